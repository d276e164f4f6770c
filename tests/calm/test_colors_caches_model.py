"""Simulated caches against one that is simulated access by access, as a textbook does it."""

from collections import OrderedDict, defaultdict

import numpy as np
import pytest

from calm.colors.geometry import NEHALEM, Cache
from calm.colors.simulation import caches_model


def naive(sets: list[int], tags: list[int], ways: int) -> list[bool]:
    """Least recently used first in each set's order."""
    held: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
    found = []
    for index, tag in zip(sets, tags, strict=True):
        places = held[index]
        found.append(tag in places)
        places[tag] = None
        places.move_to_end(tag)
        if len(places) > ways:
            places.popitem(last=False)
    return found


@pytest.mark.parametrize("ways", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("sets", [1, 7, 64])
def test_any_accesses_hit_when_they_hit_in_a_cache_simulated_one_by_one(sets: int, ways: int) -> None:
    generator = np.random.default_rng([sets, ways])
    where = generator.integers(sets, size=6000)
    # Some sets much busier than others, and as many tags as make hits and misses of both kinds.
    where[generator.random(6000) < 0.3] = 0
    tags = generator.integers(2 * ways + 1, size=6000)
    found = caches_model.hits(where * 1000, tags, ways)
    assert found.tolist() == naive(where.tolist(), tags.tolist(), ways)
    assert 0.1 < found.mean() < 0.9


def test_the_least_recently_used_goes_and_not_the_oldest() -> None:
    # 1 is used again before 3 comes: 2 goes. The oldest, 1, would go first in first out.
    sequence = np.array([1, 2, 1, 3, 1, 2])
    found = caches_model.hits(np.zeros(6, dtype=np.int64), sequence, 2)
    assert found.tolist() == [False, False, True, False, True, False]


def test_no_accesses_are_no_hits() -> None:
    nothing = np.empty(0, dtype=np.int64)
    assert not len(caches_model.hits(nothing, nothing, 8))


# The last two are no powers of two: 12 ways, and 3 colors; 5 colors.
CACHES = [
    Cache(2, 64 << 10, 4),
    NEHALEM[1],
    Cache(2, 12 * 3 * 4096, 12),
    Cache(3, 4 * 5 * 4096, 4),
]


@pytest.mark.parametrize("cache", CACHES)
def test_whole_pages_fare_as_all_their_lines_do(cache: Cache) -> None:
    generator = np.random.default_rng(cache.bytes)
    pool = generator.choice(4096, size=cache.ways * cache.colors(4096) * 5 // 4, replace=False)
    frames = generator.choice(pool, size=800)
    pages = caches_model.page_hits(cache, 4096, frames)
    lines = (frames[:, None] * 64 + np.arange(64)).ravel()
    assert caches_model.line_hits(cache, lines).reshape(-1, 64).tolist() == [[hit] * 64 for hit in pages]
    assert pages.tolist() == naive((frames % cache.colors(4096)).tolist(), frames.tolist(), cache.ways)
    assert pages.any()
    assert not pages.all()


def test_a_way_smaller_than_a_page_is_not_taken_for_whole_pages() -> None:
    with pytest.raises(ValueError, match="2048"):
        caches_model.page_hits(Cache(1, 16 << 10, 8), 4096, np.arange(4))


def test_domains_have_a_cache_each() -> None:
    cache = Cache(2, 4 * 4096, 2)
    frames = np.tile([0, 2, 4], 10)
    together = caches_model.page_hits(cache, 4096, frames)
    domains = np.tile([0, 0, 1], 10)
    apart = caches_model.page_hits(cache, 4096, frames, domains)
    assert not together.any()
    assert apart.sum() == 27
    lines = caches_model.line_hits(cache, frames * 64, domains)
    assert lines.tolist() == apart.tolist()


@pytest.mark.parametrize("ways", [1, 4, 16])
def test_a_cyclic_access_misses_as_often_as_is_computed(ways: int) -> None:
    generator = np.random.default_rng(ways)
    sets = generator.integers(24, size=24 * ways)
    tags = np.arange(len(sets))
    passes = 4
    found = caches_model.hits(np.tile(sets, passes), np.tile(tags, passes), ways).reshape(passes, -1)
    expected = caches_model.cyclic_misses(np.bincount(sets, minlength=24), ways)
    assert 0 < expected < len(sets)
    assert (~found[0]).all()
    assert (~found[1:]).sum(axis=1).tolist() == [expected] * (passes - 1)
