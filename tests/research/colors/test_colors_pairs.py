"""Blocks that start where others do: found, and ranked."""

from collections.abc import Sequence

import numpy as np
import pytest

from research.colors import pairs as tested
from research.colors.caches import NEHALEM, Cache
from research.colors.pagemap import NO_PAGES, Pages, Region
from research.colors.pairs import Cluster, Pair, largest, side_by_side

PAGE = 4096
LINE = 64
BYTES = 1 << 20
HASHED = Cache(3, 480 << 20, 16, cpus=8)


def pairs(starts: list[Region], caches: Sequence[Cache], near: int = 1, **options: bool) -> list[Pair]:
    return tested.pairs(dict(enumerate(starts)), caches, near, **options)


def clusters(starts: list[Region], caches: Sequence[Cache], threads: int, **options: bool) -> list[Cluster]:
    return tested.clusters(dict(enumerate(starts)), caches, threads, **options)


def start(address: int, frames: list[int] | None = None, size: int = BYTES) -> Region:
    """A block whose first pages have these frames, or are not resident: -1."""
    if frames is None:
        return Region(address, size, pages=NO_PAGES)
    found = np.array(frames[: -(-(address % PAGE + size) // PAGE)])
    numbers = address // PAGE + np.arange(len(found))
    return Region(address, size, pages=Pages(numbers[found >= 0], found[found >= 0]))


def test_page_aligned_blocks_collide_in_the_innermost_cache() -> None:
    blocks = [start(0x10010), start(0x200010), start(0x300410)]
    (found,) = pairs(blocks, NEHALEM)
    assert (found.first, found.second, found.apart_bytes, found.alias_bytes, found.lines) == (
        0,
        1,
        0,
        0,
        True,
    )
    assert found.colors == {}


@pytest.mark.parametrize(("apart", "near", "collide"), [(63, 1, True), (64, 1, False), (64, 2, True)])
@pytest.mark.parametrize("sign", [1, -1])
def test_near_is_less_than_so_many_lines(apart: int, near: int, collide: bool, sign: int) -> None:
    found = pairs([start(1 << 20), start((1 << 21) + sign * apart)], NEHALEM, near)
    assert bool(found) == collide
    if collide:
        assert found[0].apart_bytes == found[0].alias_bytes == apart


def test_a_way_of_several_pages_is_not_an_alias() -> None:
    """16 KiB a way: starts 4 KiB apart are in different sets, but a store may still hold up a load."""
    wide = [Cache(1, 64 << 10, 4)]
    (found,) = pairs([start(0), start((1 << 20) + 4096)], wide)
    assert (found.lines, found.alias_bytes, found.apart_bytes) == (False, 0, 4096)
    (found,) = pairs([start(0), start(1 << 20)], wide)
    assert (found.lines, found.alias_bytes) == (True, 0)


def test_first_pages_of_one_color() -> None:
    colors = NEHALEM[1].colors
    run = [start(0, list(range(100, 120))), start(0x100800, list(range(100 + 3 * colors, 120 + 3 * colors)))]
    (found,) = pairs(run, NEHALEM[:2])
    assert (found.lines, found.alias_bytes, found.colors) == (False, None, {"L2": 1.0})
    scattered = [run[0], start(0x100800, [100 + colors, *range(0, 19)])]
    (found,) = pairs(scattered, NEHALEM[:2])
    same = sum((100 + at - (at - 1 if at else 100 + colors)) % colors == 0 for at in range(20))
    assert found.colors == {"L2": same / 20}
    assert found.weight == same / 20
    # Whose first page is not resident, or whose frames are hidden, collides with nobody there.
    for frames in ([-1, *range(101, 120)], None):
        assert pairs([run[0], start(0x100800, frames)], NEHALEM) == []


def test_a_hashed_cache_says_nothing() -> None:
    frames = list(range(64))
    assert pairs([start(0, frames), start(0x100800, frames)], [NEHALEM[0], HASHED]) == []
    assert clusters([start(at * 4096 + at * 64, frames) for at in range(64)], [HASHED], 1) == []


def test_the_worst_comes_first() -> None:
    huge = list(range(512))
    blocks = [
        start(0x0000000, huge, 64 << 10),
        start(0x1000000, huge, 64 << 10),
        start(0x2000800, [at * 7 for at in huge], 1 << 20),
        start(0x3000800, None, 1 << 20),
        start(0x4000800, None, 2 << 20),
    ]
    found = [(pair.first, pair.second) for pair in pairs(blocks, NEHALEM)]
    # In all caches; then the larger before those that are found by addresses, too.
    assert found[0] == (0, 1)
    assert set(found[1:4]) == {(2, 3), (2, 4), (3, 4)}
    weights = [(pair.weight, pair.bytes) for pair in pairs(blocks, NEHALEM)]
    assert weights == sorted(weights, reverse=True)


@pytest.mark.parametrize("seed", range(10))
def test_all_pairs_are_found(seed: int) -> None:
    random = np.random.default_rng(seed)
    blocks = [
        start(int(address) * 16, [int(frame) for frame in random.integers(0, 1 << 20, 8)])
        for address in random.integers(0, 1 << 30, 60)
    ]
    wanted = {}
    for one in range(60):
        for other in range(one + 1, 60):
            first, second = blocks[one], blocks[other]
            apart = (first.address - second.address) % PAGE
            near = min(apart, PAGE - apart) < 2 * LINE
            outer = {
                cache.name
                for cache in NEHALEM[1:]
                if (first.frames[0] - second.frames[0]) % cache.colors == 0
            }
            if near or outer:
                wanted[one, other] = (near, outer)
    found = {(pair.first, pair.second): (pair.lines, set(pair.colors)) for pair in pairs(blocks, NEHALEM, 2)}
    assert found == wanted
    assert len(wanted) > 10


def test_side_by_side_counts_pages_that_both_have() -> None:
    cache = NEHALEM[1]
    one, other = start(0, [0, 1, -1, 3]), start(1 << 30, [8, 9, 10, 12, 13])
    assert side_by_side(one, other, cache) == 2 / 3
    assert side_by_side(one, start(0, [-1, -1, -1, -1]), cache) == 0.0
    assert side_by_side(one, start(0), cache) == 0.0


def test_clusters_are_more_than_the_ways_that_a_thread_has() -> None:
    blocks = [start(at << 21, list(range(512 * at, 512 * at + 8))) for at in range(9)]
    found = {each.level: each for each in clusters(blocks, NEHALEM, threads=1)}
    everyone = tuple(range(9))
    assert found == {1: Cluster(1, 0, everyone, 8, 1), 2: Cluster(2, 0, everyone, 8, 1)}
    # Eight threads share the outermost cache: two of sixteen ways are each one's.
    found = {each.level: each for each in clusters(blocks, NEHALEM, threads=12)}
    assert found[3] == Cluster(3, 0, everyone, 16, 8)
    assert found[3].room == 2
    assert clusters(blocks[:8], NEHALEM, threads=1) == []
    # The fullest first.
    fuller = [start((at << 21) + 5 * LINE) for at in range(10)]
    both = clusters([*blocks, *fuller], NEHALEM[:1], threads=1)
    assert [(each.place, len(each.blocks)) for each in both] == [(5, 10), (0, 9)]


def test_starts_that_are_spread_are_no_cluster() -> None:
    blocks = [start((at << 21) + at * (PAGE + LINE), list(range(513 * at, 513 * at + 8))) for at in range(9)]
    assert clusters(blocks, NEHALEM, threads=1) == []
    # Nine blocks, eight colors: only the first and the last begin in one, and go on so side by side.
    (found,) = pairs(blocks, NEHALEM[:2])
    assert (found.first, found.second, found.lines, found.alias_bytes) == (0, 8, False, None)
    assert found.colors == {"L2": 1.0}


def test_where_addresses_are_those_of_pages_only_colors_are_compared() -> None:
    blocks = [start(at << 21, list(range(512 * at, 512 * at + 8))) for at in range(9)]
    found = pairs(blocks, NEHALEM, by_address=False)
    assert len(found) == 36
    assert {(pair.lines, pair.alias_bytes, tuple(pair.colors)) for pair in found} == {
        (False, None, ("L2", "L3"))
    }
    assert pairs([start(0), start(1 << 20)], NEHALEM, by_address=False) == []
    assert {each.level for each in clusters(blocks, NEHALEM, 1, by_address=False)} == {2}


def test_the_largest() -> None:
    blocks = [start(at, size=size) for at, size in enumerate([5, 9, 1, 7])]
    assert largest(dict(enumerate(blocks)), 2) == [1, 3]
