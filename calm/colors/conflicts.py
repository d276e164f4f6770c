"""Pages that fight for a place in a cache: counted, and what other ways to choose frames would give.

A cache has room for `ways` pages of each color. Of a color with more, all beyond that are in conflict. What
even the best coloring could not avoid, as the cache has no room for so many pages, is unavoidable; the rest
is unnecessary. Pure functions: numbers in, numbers out.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calm.colors.geometry import Cache

PAGE_BYTES = 4096
_DRAWS = 200
_SEED = 20120616
# Draws are made in pieces of at most so many numbers.
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Random:
    """What pages in random frames would have: the expected number, and where 95 of 100 draws lie."""

    mean: float
    low: int
    high: int


def is_hashed(cache: Cache) -> bool:
    """Whether an address's set is not simply its next bits above the line: the sets are no power of two."""
    return cache.sets & (cache.sets - 1) != 0


def colors_of(pages: ArrayLike, cache: Cache, page_bytes: int = PAGE_BYTES) -> NDArray[np.int64]:
    """The color of each page by its number: its frame's, or its own for a cache of virtual addresses."""
    colors = cache.colors(page_bytes)
    return (np.asarray(pages, dtype=np.uint64) % np.uint64(colors)).astype(np.int64)


def _counted(colors: ArrayLike) -> NDArray[np.int64]:
    return np.bincount(np.asarray(colors, dtype=np.int64).reshape(-1))


def _beyond(counts: NDArray[np.int64], cache: Cache) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.maximum(counts - cache.ways, 0).sum(axis=-1)
    return found


def conflicts(colors: ArrayLike, cache: Cache) -> int:
    """How many pages of these colors find no room beside the others: of each color, those beyond the ways."""
    return int(_beyond(_counted(colors), cache))


def unavoidable(pages: int, cache: Cache, page_bytes: int = PAGE_BYTES) -> int:
    """The conflicts of the best coloring, an even one: what the cache has no room for at all."""
    return max(0, pages - cache.ways * cache.colors(page_bytes))


def unnecessary_by_counts(
    counts: NDArray[np.int64], cache: Cache, page_bytes: int = PAGE_BYTES
) -> NDArray[np.int64]:
    """As `unnecessary`, of numbers of pages by color, which are the last axis."""
    room = cache.ways * cache.colors(page_bytes)
    found: NDArray[np.int64] = _beyond(counts, cache) - np.maximum(0, counts.sum(axis=-1) - room)
    return found


def unnecessary(colors: ArrayLike, cache: Cache, page_bytes: int = PAGE_BYTES) -> int:
    """The conflicts that an even coloring of as many pages would not have."""
    return int(unnecessary_by_counts(_counted(colors), cache, page_bytes))


def huge(pages: ArrayLike, cache: Cache, page_bytes: int = PAGE_BYTES) -> int:
    """The conflicts that the pages of these virtual addresses had in huge pages.

    Within one, frames follow each other as addresses do. Where a way is larger than a huge page, one follows
    the other likewise: as in one run of memory.
    """
    return conflicts(colors_of(pages, cache, page_bytes), cache)


def expected(pages: int, cache: Cache, page_bytes: int = PAGE_BYTES) -> float:
    """The mean of conflicts when colors come by chance, exactly: of each color, a binomial's overflow."""
    colors, ways = cache.colors(page_bytes), cache.ways
    if colors == 1 or pages <= ways:
        return float(max(0, pages - ways))
    # E(X - w)+ = E(X) - w + E(w - X)+, and the last has few terms.
    count = np.arange(ways)
    log_probability = np.empty(ways)
    log_probability[0] = pages * np.log1p(-1 / colors)
    steps = np.log(pages - count[:-1]) - np.log(count[1:]) - np.log(colors - 1)
    log_probability[1:] = log_probability[0] + np.cumsum(steps)
    short = float(((ways - count) * np.exp(log_probability)).sum())
    return max(0.0, colors * (pages / colors - ways + short))


def random(
    pages: int, cache: Cache, page_bytes: int = PAGE_BYTES, *, draws: int = _DRAWS, seed: int = _SEED
) -> Random:
    """What a fully random page table gives: the mean exactly, its spread by draws."""
    colors = cache.colors(page_bytes)
    if colors == 1 or pages <= cache.ways:
        each = max(0, pages - cache.ways)
        return Random(float(each), each, each)
    generator = np.random.default_rng(seed)
    found: list[NDArray[np.int64]] = []
    left = draws
    while left > 0:
        some = min(left, max(1, _AT_ONCE // colors))
        drawn = generator.multinomial(pages, np.full(colors, 1 / colors), size=some)
        found.append(_beyond(drawn, cache))
        left -= some
    low, high = np.percentile(np.concatenate(found), (2.5, 97.5), method="nearest")
    return Random(expected(pages, cache, page_bytes), int(low), int(high))
