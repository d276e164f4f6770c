"""Conflicts are as many as a checker finds that puts pages into a cache one by one."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest

from calm.colors import conflicts
from calm.colors.geometry import NEHALEM, Cache

SEEDS = range(60)


def place(frames: list[int], cache: Cache, page_bytes: int) -> int:
    """Puts pages into the cache, a line each at a time; counts the pages of which a line finds no room."""
    taken: dict[int, int] = {}
    without_room = 0
    for frame in frames:
        sets = {
            (frame * page_bytes + line) // cache.line_bytes % cache.sets
            for line in range(0, page_bytes, cache.line_bytes)
        }
        if any(taken.get(each, 0) >= cache.ways for each in sets):
            without_room += 1
            continue
        for each in sets:
            taken[each] = taken.get(each, 0) + 1
    return without_room


def geometry(random: np.random.Generator) -> tuple[Cache, int]:
    page_bytes = int(random.choice([1024, 4096]))
    ways = int(random.integers(1, 17))
    colors = 1 << int(random.integers(1, 6))
    return Cache(2, ways * colors * page_bytes, ways), page_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_as_many_as_find_no_room(seed: int) -> None:
    random = np.random.default_rng(seed)
    cache, page_bytes = geometry(random)
    room = cache.bytes // page_bytes
    frames = random.choice(1 << 20, size=int(random.integers(1, 2 * room + 2)), replace=False)
    wanted = place([int(frame) for frame in frames], cache, page_bytes)
    colors = conflicts.colors_of(frames, cache, page_bytes)
    assert conflicts.conflicts(colors, cache) == wanted
    # Ideal frames follow each other.
    least = place(list(range(len(frames))), cache, page_bytes)
    assert conflicts.unavoidable(len(frames), cache, page_bytes) == least
    assert conflicts.unnecessary(colors, cache, page_bytes) == wanted - least >= 0


@pytest.mark.parametrize("seed", range(12))
def test_what_chance_gives(seed: int) -> None:
    random = np.random.default_rng(seed)
    cache, page_bytes = geometry(random)
    pages = int(random.integers(1, 2 * cache.bytes // page_bytes + 2))
    colors = cache.colors(page_bytes)
    # Without rounding: over all numbers of pages that one color may get.
    exact = sum(
        comb(pages, n) * Fraction(colors - 1) ** (pages - n) / Fraction(colors) ** pages * (n - cache.ways)
        for n in range(cache.ways + 1, pages + 1)
    )
    mean = conflicts.expected(pages, cache, page_bytes)
    assert mean == pytest.approx(float(exact * colors), rel=1e-6, abs=1e-9)
    drawn = [conflicts.conflicts(random.integers(0, colors, pages), cache) for _ in range(2000)]
    spread = conflicts.random(pages, cache, page_bytes)
    assert spread.mean == mean
    assert spread.low <= mean <= spread.high or spread.low == spread.high
    # As large as the draws' own, to what the ends of two samples may differ by.
    low, high = np.percentile(drawn, (1, 99))
    assert low <= spread.low <= spread.high <= high


def test_95_of_100_draws_lie_between_the_ends() -> None:
    cache = NEHALEM[2]
    drawn = np.random.default_rng(1).multinomial(2048, np.full(128, 1 / 128), size=4000)
    wanted = np.percentile(np.maximum(drawn - cache.ways, 0).sum(axis=1), (2.5, 97.5))
    found = conflicts.random(2048, cache, draws=4000)
    # The ends of two such samples differ by a page or so; those of 90 of 100 are five pages further in.
    assert (found.low, found.high) == pytest.approx(wanted, abs=2.5)


def test_the_papers_cache_half_full() -> None:
    """Figure 2: random pages conflict from half of the cache on; a run of memory does not."""
    cache = NEHALEM[2]
    assert cache.colors(4096) == 128
    assert 0.5 < conflicts.expected(1024, cache) < conflicts.expected(1536, cache) / 10
    assert conflicts.huge(np.arange(2048), cache) == 0
    assert conflicts.huge(np.arange(2049), cache) == 1
    assert conflicts.random(2048, cache).low > 0


def test_blocks_that_all_start_on_a_huge_page() -> None:
    """As many pages as the cache has room for, and all of few colors."""
    cache = NEHALEM[1]
    starts = np.arange(40) * 512
    pages = (starts[:, None] + np.arange(2)).reshape(-1)
    assert conflicts.huge(pages, cache) == 2 * (40 - cache.ways)
    assert conflicts.unavoidable(len(pages), cache) == 80 - 64


def test_one_color_has_no_choice() -> None:
    cache = NEHALEM[0]
    assert cache.colors(4096) == 1
    assert conflicts.random(20, cache) == conflicts.Random(12.0, 12, 12)
    assert conflicts.expected(20, cache) == 12
    assert conflicts.conflicts([0] * 20, cache) == 12
    assert conflicts.unnecessary([0] * 20, cache) == 0


def test_no_pages() -> None:
    assert conflicts.conflicts([], NEHALEM[2]) == 0
    assert conflicts.unnecessary(np.array([], dtype=np.int64), NEHALEM[2]) == 0
    assert conflicts.random(0, NEHALEM[2]) == conflicts.Random(0.0, 0, 0)


def test_draws_are_the_same_again_and_by_seed() -> None:
    found = [conflicts.random(1500, NEHALEM[2], seed=seed) for seed in (1, 1, 2)]
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_hashed() -> None:
    assert not any(conflicts.is_hashed(cache) for cache in NEHALEM)
    assert conflicts.is_hashed(Cache(3, 480 << 20, 16))
    assert not conflicts.is_hashed(Cache(3, 44 << 20, 11))
