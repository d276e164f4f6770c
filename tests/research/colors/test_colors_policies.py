"""Policies of page coloring against what defines each, and the buddy allocator against one step by step."""

from collections.abc import Sequence

import numpy as np
import pytest

from research.colors import policies
from research.colors.caches import Ints
from research.colors.policies import POLICIES, UNSEEDED, Touches, segment

# Powers of two, and not: a 480 MiB cache of 16 ways has 7,680 colors.
COLORS = (2, 8, 12, 128, 7680)


def ranks(pages: int, processes: int, start: int = 4096) -> Touches:
    """Processes with the same addresses, that touch their pages in turns."""
    page = np.repeat(start + np.arange(pages), processes)
    pids = np.tile(100 + np.arange(processes), pages)
    return Touches(page, np.full(len(page), start), pids)


@pytest.mark.parametrize("colors", COLORS)
@pytest.mark.parametrize("name", POLICIES)
def test_every_page_has_a_frame_of_its_own_which_the_seed_decides(name: str, colors: int) -> None:
    policy = POLICIES[name]
    for touches in (segment(1000, start=777), ranks(120, 5)):
        frames = policy(touches, colors, 3)
        assert len(np.unique(frames)) == len(touches)
        assert frames.min() >= 0
        assert policy(touches, colors, 3).tolist() == frames.tolist()
    pages = segment(2000, start=12345)
    seeded = {tuple(policy(pages, colors, seed) % colors) for seed in range(12)}
    # Of huge pages, only which one is drawn; their pages' colors are the address's if they cover all.
    varies = name not in UNSEEDED and not (name == "huge" and 512 % colors == 0)
    if name != "best-bin-free":  # its free pages may break no tie that matters
        assert (len(seeded) > 1) == varies


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_touched_is_no_frames(name: str) -> None:
    nothing = np.empty(0, dtype=np.int64)
    assert not len(POLICIES[name](Touches(nothing, nothing, nothing), 128, 1))


def test_modulo_takes_the_virtual_color_and_the_process_shifts_it() -> None:
    touches = ranks(300, 3)
    assert (policies.modulo(touches, 128, 0) % 128).tolist() == (touches.pages % 128).tolist()
    shifted = policies.modulo_pid(touches, 128, 0) % 128
    assert shifted.tolist() == ((touches.pages + touches.pids) % 128).tolist()
    # Neighboring ranks' pages of one address are one color apart: all but large arrays' ends still meet.
    assert ((shifted[1::3] - shifted[0::3]) % 128 == 1).all()


def test_bin_hopping_goes_on_by_one_in_each_process_whatever_the_others_do() -> None:
    touches = ranks(300, 3)
    taken = policies.bin_hopping(touches, 128, 5) % 128
    for pid in (100, 101, 102):
        own = taken[touches.pids == pid]
        assert (np.diff(own) % 128 == 1).all()
    # A page's address does not matter, only when it is touched.
    scattered = segment(256)
    scattered = Touches(
        np.random.default_rng(1).permutation(scattered.pages), scattered.segments, scattered.pids
    )
    assert np.bincount(policies.bin_hopping(scattered, 128, 5) % 128).tolist() == [2] * 128


def greedy(count: int, free: Sequence[int]) -> list[int]:
    """The best bin for one page after the other."""
    free = list(free)
    used = [0] * len(free)
    taken = []
    for _ in range(count):
        color = min((c for c in range(len(used)) if free[c]), key=lambda c: (used[c], -free[c], c))
        used[color] += 1
        free[color] -= 1
        taken.append(color)
    return taken


@pytest.mark.parametrize("seed", range(12))
def test_the_best_bin_is_the_best_each_time(seed: int) -> None:
    generator = np.random.default_rng(seed)
    free = generator.integers(20, size=10)
    count = int(generator.integers(1, free.sum() + 1))
    assert policies.least_used(free, count).tolist() == greedy(count, free.tolist())


def test_the_best_bin_uses_all_colors_alike() -> None:
    taken = policies.best_bin(segment(13), 4, 0) % 4
    assert np.bincount(taken, minlength=4).tolist() == [4, 3, 3, 3]


class Naive:
    """A buddy allocator that makes every call: lists of blocks, the head last."""

    def __init__(self, pages: int) -> None:
        self.lists: list[list[int]] = [[] for _ in range(policies.ORDERS)]
        self.lists[-1] = list(range(0, pages, policies.LARGEST))

    def take(self) -> int:
        order = next(order for order, blocks in enumerate(self.lists) if blocks)
        block = self.lists[order].pop()
        while order:
            order -= 1
            self.lists[order].append(block + (1 << order))
        return block

    def release(self, page: int) -> None:
        order = 0
        while order < policies.ORDERS - 1 and (other := page ^ (1 << order)) in self.lists[order]:
            self.lists[order].remove(other)
            page &= ~(1 << order)
            order += 1
        self.lists[order].append(page)


@pytest.mark.parametrize("seed", range(6))
def test_the_buddy_allocator_hands_out_what_one_does_that_makes_every_call(seed: int) -> None:
    generator = np.random.default_rng(seed)
    pages = 4 * policies.LARGEST
    memory, other = policies.Memory(pages), Naive(pages)
    held = np.empty(0, dtype=np.int64)
    for _ in range(24):
        free = pages - len(held)
        if len(held) == 0 or (free and generator.random() < 0.5):
            count = int(generator.integers(1, free + 1))
            taken = memory.take(count)
            assert taken.tolist() == [other.take() for _ in range(count)]
            held = np.concatenate([held, taken])
        else:
            # In runs and in any order, so that blocks merge to all orders.
            held = held if generator.random() < 0.5 else generator.permutation(held)
            back, held = np.split(held, [int(generator.integers(1, len(held) + 1))])
            memory.release(back)
            for page in back.tolist():
                other.release(page)
    assert sorted(np.concatenate([held, memory.free_pages()])) == list(range(pages))


def overflow(frames: Ints, colors: int, ways: int) -> int:
    return int(np.maximum(np.bincount(frames % colors, minlength=colors) - ways, 0).sum())


def test_an_aged_buddy_allocator_is_much_like_chance_and_a_new_one_is_not() -> None:
    """Section 2.3: Linux is hardly better than a random page table, of which 203 pages are expected."""
    fresh = policies.aged(1 << 15, 1, rounds=0).take(2048)
    assert overflow(fresh, 128, 16) == 0
    aged = [overflow(policies.buddy(segment(2048), 128, seed), 128, 16) for seed in range(40)]
    assert 0.85 * 203 < np.mean(aged) < 1.05 * 203
    assert min(aged) > 120
    # It remains in an order: pages of a burst, freed together, are neighbors.
    pages = policies.aged(1 << 15, 1).free_pages()
    assert 0.05 < np.mean(np.diff(pages) == 1) < 0.9
    assert 0.5 <= len(pages) / (1 << 15) < 0.6


def test_huge_pages_are_contiguous_aligned_and_of_the_virtual_color() -> None:
    touches = ranks(1500, 2, start=1000)
    frames = policies.huge(touches, 128, 9)
    assert (frames % 512).tolist() == (touches.pages % 512).tolist()
    assert (frames % 128).tolist() == (touches.pages % 128).tolist()
    which = {}
    for frame, page, pid in zip(frames // 512, touches.pages // 512, touches.pids, strict=True):
        assert which.setdefault((page, pid), frame) == frame
    assert len(set(which.values())) == len(which) == 8


@pytest.mark.parametrize("colors", COLORS)
def test_the_hash_has_every_color_once_in_each_piece(colors: int) -> None:
    pieces = 6
    taken = policies.hashed(segment(pieces * colors, start=987654321), colors, 4) % colors
    for piece in taken.reshape(pieces, colors):
        assert sorted(piece) == list(range(colors))
    # From the segment's start, at every length: no color is ahead of another by more than one.
    if colors <= 128:
        counts = np.cumsum(taken[:, None] == np.arange(colors), axis=0)
        assert (counts.max(axis=1) - counts.min(axis=1)).max() == 1


def most_in_any_stretch(taken: Ints, colors: int, length: int) -> int:
    """How often any color is in any stretch of so many pages."""
    counts = np.concatenate(
        [np.zeros((1, colors), int), np.cumsum(taken[:, None] == np.arange(colors), axis=0)]
    )
    return int((counts[length:] - counts[:-length]).max())


@pytest.mark.parametrize(("colors", "ways"), [(128, 16), (32, 16), (8, 8), (12, 4)])
def test_no_stretch_of_less_than_the_cache_by_a_way_conflicts_by_the_hash(colors: int, ways: int) -> None:
    worst = []
    for seed in range(8):
        taken = policies.hashed(segment(3 * ways * colors), colors, seed) % colors
        assert most_in_any_stretch(taken, colors, (ways - 1) * colors) <= ways
        worst.append(most_in_any_stretch(taken, colors, ways * colors - colors // 4))
    # That is all there is to have: somewhere in a longer stretch one color is too many.
    assert max(worst) == ways + 1


def test_the_hash_of_another_segment_process_piece_or_boot_is_another_order() -> None:
    colors = 128
    base = policies.hashed(segment(colors, start=512 * 100, pid=7), colors, 1) % colors
    longer = policies.hashed(segment(2 * colors, start=512 * 100, pid=7), colors, 1) % colors
    others = [
        policies.hashed(segment(colors, start=512 * 101, pid=7), colors, 1) % colors,
        policies.hashed(segment(colors, start=512 * 100, pid=8), colors, 1) % colors,
        longer[colors:],
        policies.hashed(segment(colors, start=512 * 100, pid=7), colors, 2) % colors,
    ]
    assert longer[:colors].tolist() == base.tolist()
    for other in others:
        # By chance one page in 128 has the same color.
        assert (other == base).sum() <= 8
        # Nor is it the same order from another start.
        assert len(np.unique((other - base) % colors)) > colors // 3


@pytest.mark.parametrize("colors", [8, 12, 128])
def test_aligned_segments_begin_with_every_color_alike_by_the_hash(colors: int) -> None:
    """A chi-squared of the first page's colors, over segments and then over processes."""
    each = 64
    count = each * colors
    starts = (1 + np.arange(count)) * 512
    by_segment = policies.hashed(Touches(starts, starts, np.full(count, 1)), colors, 1)
    one = np.full(count, 512)
    by_process = policies.hashed(Touches(one, one, 1 + np.arange(count)), colors, 1)
    for frames in (by_segment, by_process):
        squared = ((np.bincount(frames % colors, minlength=colors) - each) ** 2 / each).sum()
        # Its mean is colors - 1, its variance twice that.
        assert abs(squared - (colors - 1)) < 5 * np.sqrt(2 * (colors - 1))
