"""Which frame a page gets: the policies of operating systems (section 2.4), and the one of section 5.1.

Each policy is a pure function of what is touched, the number of colors and a seed. It returns the frame of
each touched page, all different; a frame's color is its number modulo the colors. What the machine did
before, and a hash's secret, come of the seed.
"""

import functools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calm.colors.simulation import buddy
from calm.colors.simulation.buddy import Ints

_Words = NDArray[np.uint64]

HUGE_PAGES = 512
"""Pages of 4 KiB in a huge page of 2 MiB."""


@dataclass(frozen=True)
class Touches:
    """Pages in the order in which they are touched first, each of them once."""

    pages: Ints
    """Virtual page numbers."""
    segments: Ints
    """For each the page where its mmap segment starts."""
    pids: Ints
    """For each the process it belongs to."""

    def __len__(self) -> int:
        return len(self.pages)


def segment(pages: int, start: int = 0, pid: int = 1) -> Touches:
    """One segment, touched from its start to its end."""
    return Touches(start + np.arange(pages), np.full(pages, start), np.full(pages, pid))


Policy = Callable[[Touches, int, int], Ints]
"""What is touched, how many colors there are, and the seed; gives the frames."""


def _earlier(keys: Ints) -> Ints:
    """For each key, how many of the same come before it."""
    order = np.argsort(keys, kind="stable")
    _, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
    found = np.empty(len(keys), dtype=np.int64)
    found[order] = np.arange(len(keys)) - np.repeat(first, counts)
    return found


def _frames(of_pages: Ints, colors: int) -> Ints:
    """The lowest free frame of each color, where there are always enough of all."""
    return of_pages + colors * _earlier(of_pages)


def modulo(touches: Touches, colors: int, seed: int) -> Ints:
    """The virtual address's: OpenSolaris on x86 without the process's number, and much like FreeBSD."""
    return _frames(touches.pages % colors, colors)


def modulo_pid(touches: Touches, colors: int, seed: int) -> Ints:
    """The virtual address's, plus the process's number: OpenSolaris on x86."""
    return _frames((touches.pages + touches.pids) % colors, colors)


def bin_hopping(touches: Touches, colors: int, seed: int) -> Ints:
    """The one after the process's last. Each process starts with any."""
    _, process = np.unique(touches.pids, return_inverse=True)
    starts = np.random.default_rng(seed).integers(colors, size=process.max(initial=0) + 1)
    return _frames((starts[process] + _earlier(process)) % colors, colors)


def _room(left: Ints, used: Ints, level: int) -> Ints:
    """How many pages each color can give until it is used so often."""
    return np.minimum(left, np.maximum(0, level - used))


def best_bin(
    touches: Touches, colors: int, seed: int, used: Ints | None = None, free: Ints | None = None
) -> Ints:
    """The color least used, by all processes.

    Of several such the one with the most free pages, and of these the first; one without free pages is not
    taken. `used` and `free` are the numbers of pages by color at the start: none, and enough of all.
    """
    count = len(touches)
    used = np.zeros(colors, dtype=np.int64) if used is None else used
    left = np.full(colors, count) if free is None else np.minimum(free, count)
    if left.sum() < count:
        raise ValueError(f"{count} pages were asked for, {left.sum()} are free")
    # No color is used more often than this at the end, which keeps what is sorted short.
    level = bisect_left(
        range(int(used.max()) + count), count, key=lambda top: int(_room(left, used, top).sum())
    )
    left = _room(left, used, level)
    # A color's next page is never better than its last, so taking the best each time merges the colors' rows.
    color = np.repeat(np.arange(colors), left)
    nth = _earlier(color)
    spare = -nth if free is None else free[color] - nth
    best = np.lexsort((color, -spare, used[color] + nth))[:count]
    return _frames(color[best], colors)


@functools.lru_cache(maxsize=64)
def _free_after(pages: int, seed: int) -> Ints:
    """The free pages of a machine that has run for long: each pattern has the same machines."""
    free = buddy.aged(pages, seed).free_pages()
    free.setflags(write=False)
    return free


def _free(touches: Touches, seed: int) -> Ints:
    """At least twice as many as are touched."""
    least = max(1 << 14, 4 * len(touches))
    return _free_after(-(-least // buddy.LARGEST) * buddy.LARGEST, seed)


def best_bin_free(touches: Touches, colors: int, seed: int) -> Ints:
    """As `best_bin`, with the free pages of each color of a machine that has run for long."""
    return best_bin(touches, colors, seed, free=np.bincount(_free(touches, seed) % colors, minlength=colors))


def buddy_lists(touches: Touches, colors: int, seed: int) -> Ints:
    """The first free page of a buddy allocator, on a machine that has run for long: Linux."""
    return _free(touches, seed)[: len(touches)]


def random(touches: Touches, colors: int, seed: int) -> Ints:
    """Any color for each page."""
    return _frames(np.random.default_rng(seed).integers(colors, size=len(touches)), colors)


def huge(touches: Touches, colors: int, seed: int) -> Ints:
    """Huge pages, in any order. Where a way is no larger than they, colors are the virtual address's."""
    keys = np.stack([touches.pids, touches.pages // HUGE_PAGES])
    _, which = np.unique(keys, axis=1, return_inverse=True)
    which = which.reshape(-1)
    count = int(which.max(initial=0)) + 1
    # Any of a memory with enough for all colors, where a way is larger than a huge page.
    frames = np.random.default_rng(seed).choice(16 * count + colors, size=count, replace=False)
    return frames[which] * HUGE_PAGES + touches.pages % HUGE_PAGES


def _mixed(words: _Words) -> _Words:
    """Each word's bits depend on all of the word's (SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


_ROUNDS = [np.uint64((number * 0x9E3779B97F4A7C15) % 2**64) for number in (1, 2, 3)]


def _shuffled(index: Ints, keys: _Words, colors: int) -> Ints:
    """A permutation of all colors for each key, evaluated at an index by a few multiplications."""
    bits = np.uint64((colors - 1).bit_length())
    mask = np.uint64((1 << int(bits)) - 1)
    half = np.uint64((int(bits) + 1) // 2)

    def once(words: _Words, keys: _Words) -> _Words:
        # Each step can be undone: times an odd number, plus any, and the upper half's bits into the lower.
        for constant in _ROUNDS:
            key = _mixed(keys + constant)
            words = (words * (key | np.uint64(1)) + (key >> np.uint64(32))) & mask
            words ^= words >> half
        return words

    words = once(index.astype(np.uint64), keys)
    # That permutes a power of two. What is beyond the colors goes on until it is not.
    while (outside := np.flatnonzero(words >= np.uint64(colors))).size:
        words[outside] = once(words[outside], keys[outside])
    return words.astype(np.int64)


def hashed(touches: Touches, colors: int, seed: int) -> Ints:
    """Section 5.1: all colors in each piece of a segment as large as a way, in an order of the piece's own.

    Pieces are counted from the segment's start. So a stretch of memory of at most `ways - 1` ways anywhere in
    a segment has no color more than `ways` times, as it touches at most `ways` pieces; and one from the
    segment's start has every color as often as the others, or once more. Of several segments, those whose
    pieces are at most `ways` together do not conflict; more of them do by chance, where pieces are not whole.
    The orders are keyed by a segment's address, the process and the piece: where two segments start, or that
    two processes have equal addresses, tells nothing of their pages' colors.
    """
    offsets = touches.pages - touches.segments
    keys = _mixed(np.full(len(touches), seed % 2**64, dtype=np.uint64) + _ROUNDS[0])
    for part in (touches.pids, touches.segments, offsets // colors):
        keys = _mixed(keys ^ part.astype(np.uint64)) + _ROUNDS[0]
    return _frames(_shuffled(offsets % colors, keys, colors), colors)


HASH = "hash"
POLICIES: dict[str, Policy] = {
    "modulo": modulo,
    "modulo-pid": modulo_pid,
    "bin-hopping": bin_hopping,
    "best-bin": best_bin,
    "best-bin-free": best_bin_free,
    "buddy": buddy_lists,
    "random": random,
    "huge": huge,
    HASH: hashed,
}

UNSEEDED = frozenset({"modulo", "modulo-pid", "best-bin"})
"""Those that do not ask for the seed."""
