"""Finds large blocks that start alike in a cache, and so evict each other when they are walked side by side.

In the innermost cache, which is indexed by virtual addresses, two blocks collide over all of their length if
their starts fall into the same lines of a way, or nearly. If starts are a multiple of 4 KiB apart, or nearly,
a load may wait for an unrelated store. In outer caches, which are indexed by physical addresses, blocks
collide if their first pages have one color; their frames decide how many of the following pages do so too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from research.colors.caches import LINE_BYTES, Cache, Ints
from research.colors.pagemap import Region

ALIAS_BYTES = 4096
# Only the largest blocks are compared in pairs, page by page from their starts.
MAX_BLOCKS = 256
_MAX_PAGES = 1024


@dataclass(frozen=True)
class Pair:
    """Two blocks that collide, and the number of pairs like this one."""

    first: int
    second: int
    bytes: int
    """The length over which they collide."""
    apart_bytes: int
    """The distance of their starts, modulo a way of the innermost cache."""
    lines: bool
    """Whether they collide in the innermost cache."""
    alias_bytes: int | None
    """The distance of their starts modulo 4 KiB, if that is near."""
    colors: dict[str, float] = field(default_factory=dict)
    """For each outer cache in which they collide, as L2: the share of pages side by side with one color."""
    count: int = 1

    @property
    def weight(self) -> float:
        """Ranks pairs: by the caches in which they collide, times the length of the overlap."""
        return self.lines + (self.alias_bytes is not None) + sum(self.colors.values())


@dataclass(frozen=True)
class Cluster:
    """Blocks that start in one line of a way, or one color, and are more than the ways a thread can use."""

    level: int
    place: int
    """The line or the color."""
    blocks: tuple[int, ...]
    ways: int
    threads: int
    """The threads that share the cache, each of which may walk these blocks."""

    @property
    def room(self) -> int:
        """How many blocks each thread can walk side by side."""
        return max(1, self.ways // self.threads)


def _circular(difference: Ints, modulus: int) -> Ints:
    return np.minimum(difference % modulus, -difference % modulus)


def side_by_side(one: Region, other: Region, cache: Cache) -> float:
    """The share of pages at the same distance from both starts that have one color."""
    if one.frames is None or other.frames is None:
        return 0.0
    length = min(len(one.frames), len(other.frames), _MAX_PAGES)
    first, second = one.frames[:length], other.frames[:length]
    both = (first >= 0) & (second >= 0)
    return float(((first - second)[both] % cache.colors == 0).mean()) if both.any() else 0.0


def _physical(caches: Sequence[Cache]) -> list[Cache]:
    return [cache for cache in caches if cache.level > 1 and cache.colors > 1 and not cache.is_hashed]


def largest(regions: Mapping[int, Region], count: int = MAX_BLOCKS) -> list[int]:
    """The keys of the largest blocks."""
    return sorted(sorted(regions, key=lambda at: (-regions[at].bytes, regions[at].address))[:count])


def pairs(
    regions: Mapping[int, Region], caches: Sequence[Cache], near_lines: int = 1, *, by_address: bool = True
) -> list[Pair]:
    """All pairs of the largest blocks that collide, the worst first.

    Starts are near each other if they are less than near_lines lines apart. Addresses are not compared where
    they are only those of pages.
    """
    chosen = largest(regions)
    inner = next((cache for cache in caches if cache.level == 1), None)
    way = inner.way_bytes if inner is not None and not inner.is_hashed else ALIAS_BYTES
    near = near_lines * (inner.line_bytes if inner is not None else LINE_BYTES)
    addresses = np.array([regions[at].address for at in chosen], dtype=np.int64)
    difference = addresses[:, None] - addresses
    apart, alias = _circular(difference, way), _circular(difference, ALIAS_BYTES)
    aliased, lines = (by_address & (distance < near) for distance in (alias, apart))
    found = aliased | lines
    same: list[tuple[Cache, NDArray[np.bool_]]] = []
    for cache in _physical(caches):
        colors = np.array([regions[at].color(cache) for at in chosen], dtype=np.int64)
        same.append((cache, (colors[:, None] == colors) & (colors >= 0)))
        found |= same[-1][1]
    result = []
    for one, other in zip(*np.nonzero(np.triu(found, 1)), strict=True):
        first, second = regions[chosen[one]], regions[chosen[other]]
        result.append(
            Pair(
                chosen[one],
                chosen[other],
                min(first.bytes, second.bytes),
                int(apart[one, other]),
                inner is not None and bool(lines[one, other]),
                int(alias[one, other]) if aliased[one, other] else None,
                {
                    cache.name: side_by_side(first, second, cache)
                    for cache, alike in same
                    if alike[one, other]
                },
            )
        )
    return sorted(
        result, key=lambda each: (-each.weight, -each.bytes, each.apart_bytes, each.first, each.second)
    )


def clusters(
    regions: Mapping[int, Region], caches: Sequence[Cache], threads: int, *, by_address: bool = True
) -> list[Cluster]:
    """All clusters, the fullest first."""
    found = []
    physical = _physical(caches)
    for cache in caches:
        places: dict[int, list[int]] = {}
        for at, region in regions.items():
            if cache in physical:
                places.setdefault(region.color(cache), []).append(at)
            elif cache.level == 1 and by_address and not cache.is_hashed:
                places.setdefault(region.address % cache.way_bytes // cache.line_bytes, []).append(at)
        sharers = max(1, min(cache.cpus, threads))
        for place, blocks in places.items():
            found.append(Cluster(cache.level, place, tuple(blocks), cache.ways, sharers))
    found = [each for each in found if each.place >= 0 and len(each.blocks) > each.room]
    return sorted(found, key=lambda each: (-len(each.blocks) / each.room, each.level, each.place))
