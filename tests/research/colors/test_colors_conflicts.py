"""Conflicts are as many as a checker finds that puts pages into a cache one by one."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from numpy.typing import ArrayLike

from research.colors import caches
from research.colors.caches import NEHALEM, PAGE_BYTES, Cache

SEEDS = range(60)


def place(frames: list[int], cache: Cache) -> int:
    """Puts pages into the cache, a line each at a time; counts the pages of which a line finds no room."""
    taken: dict[int, int] = {}
    without_room = 0
    for frame in frames:
        sets = {
            (frame * PAGE_BYTES + line) // cache.line_bytes % cache.sets
            for line in range(0, PAGE_BYTES, cache.line_bytes)
        }
        if any(taken.get(each, 0) >= cache.ways for each in sets):
            without_room += 1
            continue
        for each in sets:
            taken[each] = taken.get(each, 0) + 1
    return without_room


def of_pages(pages: ArrayLike, cache: Cache) -> int:
    return int(cache.conflicts(cache.counts(pages)))


def geometry(random: np.random.Generator) -> Cache:
    ways = int(random.integers(1, 17))
    colors = 1 << int(random.integers(1, 6))
    return Cache(2, ways * colors * PAGE_BYTES, ways)


@pytest.mark.parametrize("seed", SEEDS)
def test_as_many_as_find_no_room(seed: int) -> None:
    random = np.random.default_rng(seed)
    cache = geometry(random)
    room = cache.bytes // PAGE_BYTES
    frames = random.choice(1 << 20, size=int(random.integers(1, 2 * room + 2)), replace=False)
    wanted = place([int(frame) for frame in frames], cache)
    assert of_pages(frames, cache) == wanted
    # Ideal frames follow each other.
    least = place(list(range(len(frames))), cache)
    assert cache.unnecessary(cache.counts(frames)) == wanted - least >= 0


@pytest.mark.parametrize("seed", range(12))
def test_what_chance_gives(seed: int) -> None:
    random = np.random.default_rng(seed)
    cache = geometry(random)
    pages = int(random.integers(1, 2 * cache.bytes // PAGE_BYTES + 2))
    colors = cache.colors
    # Without rounding: over all numbers of pages that one color may get.
    exact = sum(
        comb(pages, n) * Fraction(colors - 1) ** (pages - n) / Fraction(colors) ** pages * (n - cache.ways)
        for n in range(cache.ways + 1, pages + 1)
    )
    mean = caches.expected(pages, cache)
    assert mean == pytest.approx(float(exact * colors), rel=1e-6, abs=1e-9)
    least = max(0, pages - cache.pages)
    drawn = [of_pages(random.integers(0, colors, pages), cache) - least for _ in range(2000)]
    spread = caches.random(pages, cache)
    assert spread.mean == mean - least
    assert spread.low <= spread.mean <= spread.high or spread.low == spread.high
    # As large as the draws' own, to what the ends of two samples may differ by.
    low, high = np.percentile(drawn, (1, 99))
    assert low <= spread.low <= spread.high <= high


def test_95_of_100_draws_lie_between_the_ends() -> None:
    cache = NEHALEM[2]
    drawn = np.random.default_rng(1).multinomial(2048, np.full(128, 1 / 128), size=4000)
    wanted = np.percentile(np.maximum(drawn - cache.ways, 0).sum(axis=1), (2.5, 97.5))
    found = caches.random(2048, cache, draws=4000)
    # The ends of two such samples differ by a page or so; those of 90 of 100 are five pages further in.
    assert (found.low, found.high) == pytest.approx(wanted, abs=2.5)


def test_the_papers_cache_half_full() -> None:
    """Figure 2: random pages conflict from half of the cache on; a run of memory does not."""
    cache = NEHALEM[2]
    assert cache.colors == 128
    assert 0.5 < caches.expected(1024, cache) < caches.expected(1536, cache) / 10
    assert of_pages(np.arange(2048), cache) == 0
    assert of_pages(np.arange(2049), cache) == 1
    assert caches.random(2048, cache).low > 0


def test_blocks_that_all_start_on_a_huge_page() -> None:
    """As many pages as the cache has room for, and all of few colors."""
    cache = NEHALEM[1]
    starts = np.arange(40) * 512
    pages = (starts[:, None] + np.arange(2)).reshape(-1)
    assert of_pages(pages, cache) == 2 * (40 - cache.ways)
    assert cache.unnecessary(cache.counts(pages)) == 2 * (40 - cache.ways) - (80 - 64)


def test_one_color_has_no_choice() -> None:
    cache = NEHALEM[0]
    assert cache.colors == 1
    assert caches.random(20, cache) == caches.Random(0.0, 0, 0)
    assert caches.expected(20, cache) == of_pages([0] * 20, cache) == 12
    assert cache.unnecessary(cache.counts([0] * 20)) == 0


def test_no_pages() -> None:
    assert of_pages([], NEHALEM[2]) == NEHALEM[2].unnecessary(NEHALEM[2].counts([])) == 0
    assert caches.random(0, NEHALEM[2]) == caches.Random(0.0, 0, 0)


def test_draws_are_the_same_again_and_by_seed() -> None:
    found = [caches.random(1500, NEHALEM[2], seed=seed) for seed in (1, 1, 2)]
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_hashed() -> None:
    assert not any(cache.is_hashed for cache in NEHALEM)
    assert Cache(3, 480 << 20, 16).is_hashed
    assert not Cache(3, 44 << 20, 11).is_hashed
