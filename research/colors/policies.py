"""Page coloring policies: those of operating systems (section 2.4), and the hash of section 5.1.

Each policy is a pure function of the touched pages, the number of colors and a seed. It returns a different
frame for each page; a frame's color is its number modulo the colors. The history of the machine, and the
secret of the hash, depend on the seed.
"""

import functools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from research.colors.caches import Ints

_Words = NDArray[np.uint64]

HUGE_PAGES = 512
"""Pages of 4 KiB in a huge page of 2 MiB."""
ORDERS = 11
"""A buddy allocator's blocks have 1 to 1,024 pages."""
LARGEST = 1 << (ORDERS - 1)
_USED = -1
# What an owner gets before another one gets some, and what it has in all, on average.
_BURST_PAGES, _OWNER_PAGES = 8, 128


@dataclass(frozen=True)
class Touches:
    """Pages in the order of their first touch."""

    pages: Ints
    """Virtual page numbers."""
    segments: Ints
    """The first page of each page's mmap segment."""
    pids: Ints
    """The process of each page."""

    def __len__(self) -> int:
        return len(self.pages)


def segment(pages: int, start: int = 0, pid: int = 1) -> Touches:
    """One segment, touched from its start to its end."""
    return Touches(start + np.arange(pages), np.full(pages, start), np.full(pages, pid))


Policy = Callable[[Touches, int, int], Ints]
"""Takes touches, the number of colors and the seed; returns frames."""


def _earlier(keys: Ints) -> Ints:
    """For each key, how many equal ones precede it."""
    order = np.argsort(keys, kind="stable")
    _, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
    found = np.empty(len(keys), dtype=np.int64)
    found[order] = np.arange(len(keys)) - np.repeat(first, counts)
    return found


def _frames(of_pages: Ints, colors: int) -> Ints:
    """The lowest free frame of each color, of which there are always enough."""
    return of_pages + colors * _earlier(of_pages)


def modulo(touches: Touches, colors: int, _seed: int) -> Ints:
    """The color of the virtual address: OpenSolaris on x86 without the PID, and much like FreeBSD."""
    return _frames(touches.pages % colors, colors)


def modulo_pid(touches: Touches, colors: int, _seed: int) -> Ints:
    """The color of the virtual address plus the PID: OpenSolaris on x86."""
    return _frames((touches.pages + touches.pids) % colors, colors)


def bin_hopping(touches: Touches, colors: int, seed: int) -> Ints:
    """The color after the last one of the process; the first is random."""
    _, process = np.unique(touches.pids, return_inverse=True)
    starts = np.random.default_rng(seed).integers(colors, size=process.max(initial=0) + 1)
    return _frames((starts[process] + _earlier(process)) % colors, colors)


def least_used(free: Ints, count: int) -> Ints:
    """Colors for so many pages: for each the one that was given least often, among those with free pages.

    Ties go to the color with the most free pages, then to the first.
    """
    # No color is given more often than this, which bounds the array that is sorted.
    level = bisect_left(range(count), count, key=lambda top: int(np.minimum(free, top).sum()))
    # A color's next page is never better than its last, so sorting gives the order of greedy choices.
    color = np.repeat(np.arange(len(free)), np.minimum(free, level))
    best: Ints = np.lexsort((color, -free[color], _earlier(color)))[:count]
    return color[best]


def best_bin(touches: Touches, colors: int, _seed: int) -> Ints:
    """The color that all processes use least."""
    return _frames(least_used(np.full(colors, len(touches)), len(touches)), colors)


class Memory:
    """Physical memory by the free lists of a buddy allocator; all pages are free at first.

    As in Linux (mm/page_alloc.c), free pages form blocks of powers of two, each merged with its buddy as soon
    as both are free. A freed block becomes the head of its list, and a page is taken from the head of the
    shortest blocks. The lists follow from which pages are free and when each became free, and are computed
    from that. The lists of single pages per CPU and the migrate types are left out.
    """

    def __init__(self, pages: int) -> None:
        """The number of pages is a multiple of LARGEST."""
        # When each page became free; all times differ.
        self._since: Ints = np.arange(pages, dtype=np.int64)
        self._clock = pages

    def free_pages(self) -> Ints:
        """All free pages, in the order in which requests for single pages get them."""
        handed: list[Ints] = []
        since = self._since
        for order in range(ORDERS):
            whole = since != _USED
            above = since
            if order < ORDERS - 1:
                merged = whole[0::2] & whole[1::2]
                above = np.where(merged, np.maximum(since[0::2], since[1::2]), _USED)
                whole &= np.repeat(~merged, 2)
            blocks = np.flatnonzero(whole)
            # A block enters its list when its last page is freed. It is split only when all shorter lists are
            # empty, and its lower half is handed out first: so its pages come in ascending order.
            blocks = blocks[np.argsort(-since[blocks], kind="stable")]
            handed.append(((blocks << order)[:, None] + np.arange(1 << order)).ravel())
            since = above
        return np.concatenate(handed)

    def take(self, count: int | None = None) -> Ints:
        """Takes so many pages, one after the other, or all."""
        pages = self.free_pages()[:count]
        self._since[pages] = _USED
        return pages

    def release(self, pages: Ints) -> None:
        """Frees the pages one after the other."""
        self._since[pages] = self._clock + np.arange(len(pages))
        self._clock += len(pages)


def aged(pages: int, seed: int, rounds: int = 2) -> Memory:
    """Memory after a long history: in each round it filled up, by the page cache, and half of it was freed.

    Owners, which are processes and files, took pages in turns; each freed all of its pages at once.
    """
    generator = np.random.default_rng(seed)
    memory = Memory(pages)
    owners = np.full(pages, -1, dtype=np.int64)
    each_round = max(1, pages // _OWNER_PAGES)
    for number in range(rounds):
        taken = memory.take()
        lengths = generator.geometric(1 / _BURST_PAGES, len(taken))
        bursts = generator.integers(each_round, size=len(taken)) + number * each_round
        owners[taken] = np.repeat(bursts, lengths)[: len(taken)]
        # Owners end in any order, not by age. Each frees its pages by address.
        leaving = generator.permutation((number + 1) * each_round)[owners]
        order = np.argsort(leaving, kind="stable")
        last = leaving[order[pages // 2]]
        memory.release(order[: np.searchsorted(leaving[order], last, side="right")])
    return memory


@functools.lru_cache(maxsize=64)
def _free_after(pages: int, seed: int) -> Ints:
    """The free pages of a machine after a long history; the same machine for each pattern."""
    free = aged(pages, seed).free_pages()
    free.setflags(write=False)
    return free


def _free(touches: Touches, seed: int) -> Ints:
    """At least twice as many free pages as are touched."""
    pages = max(1 << 14, 4 * len(touches))
    return _free_after(-(-pages // LARGEST) * LARGEST, seed)


def best_bin_free(touches: Touches, colors: int, seed: int) -> Ints:
    """As `best_bin`, with the free pages of a machine after a long history."""
    free = np.bincount(_free(touches, seed) % colors, minlength=colors)
    return _frames(least_used(free, len(touches)), colors)


def buddy(touches: Touches, _colors: int, seed: int) -> Ints:
    """The first free page of a buddy allocator after a long history: Linux."""
    return _free(touches, seed)[: len(touches)]


def random(touches: Touches, colors: int, seed: int) -> Ints:
    return _frames(np.random.default_rng(seed).integers(colors, size=len(touches)), colors)


def huge(touches: Touches, colors: int, seed: int) -> Ints:
    """Huge pages in random places. If a way is no larger than they, colors are those of virtual addresses."""
    keys = np.stack([touches.pids, touches.pages // HUGE_PAGES])
    _, which = np.unique(keys, axis=1, return_inverse=True)
    which = which.reshape(-1)
    count = int(which.max(initial=0)) + 1
    # Enough memory for all colors, if a way is larger than a huge page.
    frames = np.random.default_rng(seed).choice(16 * count + colors, size=count, replace=False)
    return frames[which] * HUGE_PAGES + touches.pages % HUGE_PAGES


_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mixed(words: _Words) -> _Words:
    """Makes each bit depend on all bits of the word (SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def hashed(touches: Touches, colors: int, seed: int) -> Ints:
    """Section 5.1: each way-sized piece of a segment has every color once, in an order of its own.

    Pieces begin at the segment's start. A stretch of `ways - 1` ways anywhere in a segment touches at most
    `ways` pieces, so it has no color more than `ways` times. From the segment's start on, all colors are used
    equally often, or once more. Several segments with at most `ways` pieces together do not conflict; more
    may, by chance. The order depends on the segment's address, the process and the piece, so that aligned
    segments, and processes with equal addresses, have unrelated colors.
    """
    offsets = touches.pages - touches.segments
    parts = np.stack([touches.pids, touches.segments, offsets // colors])
    pieces, which = np.unique(parts, axis=1, return_inverse=True)
    keys = _mixed(np.full(pieces.shape[1], seed % 2**64, dtype=np.uint64) + _STEP)
    for part in pieces:
        keys = _mixed(keys ^ part.astype(np.uint64)) + _STEP
    orders = np.argsort(_mixed(keys[:, None] + _STEP * np.arange(colors, dtype=np.uint64)), axis=1)
    return _frames(orders[which.reshape(-1), offsets % colors], colors)


HASH = "hash"
POLICIES: dict[str, Policy] = {
    "modulo": modulo,
    "modulo-pid": modulo_pid,
    "bin-hopping": bin_hopping,
    "best-bin": best_bin,
    "best-bin-free": best_bin_free,
    "buddy": buddy,
    "random": random,
    "huge": huge,
    HASH: hashed,
}

UNSEEDED = frozenset({"modulo", "modulo-pid", "best-bin"})
"""Policies that do not depend on the seed."""
