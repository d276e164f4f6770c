"""Simulated caches against one that is simulated access by access, as a textbook does it."""

from collections import OrderedDict, defaultdict

import numpy as np
import pytest

from research.colors.caches import NEHALEM, Cache
from research.colors.simulation import hits


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
    found = hits((tags * sets + where)[None], sets, ways)
    assert found.ravel().tolist() == naive(where.tolist(), tags.tolist(), ways)
    assert 0.1 < found.mean() < 0.9


def test_the_least_recently_used_goes_and_not_the_oldest() -> None:
    # 1 is used again before 3 comes: 2 goes. The oldest, 1, would go first in first out.
    sequence = np.array([1, 2, 1, 3, 1, 2])
    found = hits(sequence[None], 1, 2)
    assert found[0].tolist() == [False, False, True, False, True, False]


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
    pool = generator.choice(4096, size=cache.ways * cache.colors * 5 // 4, replace=False)
    frames = generator.choice(pool, size=800)
    pages = hits(frames[None], cache.colors, cache.ways)[0]
    lines = (frames[:, None] * 64 + np.arange(64)).reshape(1, -1)
    by_line = hits(lines, cache.sets, cache.ways).reshape(-1, 64)
    assert by_line.tolist() == [[hit] * 64 for hit in pages]
    assert pages.tolist() == naive((frames % cache.colors).tolist(), frames.tolist(), cache.ways)
    assert pages.any()
    assert not pages.all()


def test_each_row_has_a_cache_of_its_own() -> None:
    frames = np.tile([0, 2, 4], 10)
    assert not hits(frames[None], 2, 2).any()
    runs = np.stack([np.tile([0, 2, 0], 10), frames, np.full(30, 4)])
    assert hits(runs, 2, 2).sum(axis=1).tolist() == [28, 0, 29]
