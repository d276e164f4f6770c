"""Which large blocks start where others start in a cache, and so fight when they are walked side by side.

In a cache of virtual addresses, the innermost, two blocks collide if their starts are the same lines of a
way, or nearly: then they stay so from end to end. And where starts are a multiple of 4 KiB apart, or nearly,
a load may wait for a store that it has nothing to do with. In a cache of physical addresses two blocks
collide whose first pages have one color; how much of what follows does so too depends on the frames.
Pure functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calm.colors.conflicts import is_hashed
from calm.colors.geometry import LINE_BYTES, Cache

ALIAS_BYTES = 4096
# Pairs are looked for among the largest blocks.
MOST_BLOCKS = 256
# How far two blocks are compared page by page.
_MOST_PAGES = 1024


@dataclass(frozen=True)
class Start:
    """A block: where it starts, how much of it there is, and the frame of each page from its first on."""

    address: int
    bytes: int
    frames: NDArray[np.int64] | None = None
    """-1 where a page is not resident; None where nothing is known."""


@dataclass(frozen=True)
class Pair:
    """Two blocks, by their places in the list, and in which caches they collide."""

    first: int
    second: int
    bytes: int
    """For so much of their length."""
    apart: int
    """Bytes from one start to the other, modulo the innermost cache's way."""
    inner: bool
    """In the innermost cache."""
    aliased: int | None
    """Bytes from one start to the other modulo 4 KiB, where they are near; None where they are not."""
    outer: Mapping[int, float] = field(default_factory=dict)
    """By the level of each cache where the first pages have one color: the share of all that do so."""

    @property
    def weight(self) -> float:
        """By which pairs are ranked: in how many ways they collide, and for how much of their length."""
        return self.inner + (self.aliased is not None) + sum(self.outer.values())


@dataclass(frozen=True)
class Crowd:
    """Blocks that start in one place of a cache, more than it has room for there."""

    level: int
    place: int
    """The line of a way, or the color."""
    members: tuple[int, ...]
    ways: int
    sharers: int
    """Threads that share the cache, each of which may walk these blocks."""

    @property
    def room(self) -> int:
        """How many blocks each thread can walk side by side."""
        return max(1, self.ways // self.sharers)


def circular(difference: NDArray[np.int64], modulus: int) -> NDArray[np.int64]:
    """The distance on a circle."""
    turned = difference % modulus
    return np.minimum(turned, modulus - turned)


def first_color(start: Start, cache: Cache, page_bytes: int) -> int | None:
    """Of its first page; None where that is not known."""
    if start.frames is None or not len(start.frames) or start.frames[0] < 0:
        return None
    return int(start.frames[0]) % cache.colors(page_bytes)


def alongside(one: Start, other: Start, cache: Cache, page_bytes: int) -> float:
    """Of the pages that both have at the same distance from their starts: the share that has one color."""
    if one.frames is None or other.frames is None:
        return 0.0
    length = min(len(one.frames), len(other.frames), _MOST_PAGES)
    first, second = one.frames[:length], other.frames[:length]
    both = (first >= 0) & (second >= 0)
    if not both.any():
        return 0.0
    return float(((first - second)[both] % cache.colors(page_bytes) == 0).mean())


def _physical(caches: Sequence[Cache], page_bytes: int) -> list[Cache]:
    return [
        cache for cache in caches if cache.level > 1 and cache.colors(page_bytes) > 1 and not is_hashed(cache)
    ]


def largest(starts: Sequence[Start], most: int = MOST_BLOCKS) -> list[int]:
    """The places in the list of the largest blocks."""
    order = sorted(range(len(starts)), key=lambda at: (-starts[at].bytes, starts[at].address))
    return sorted(order[:most])


def pairs(
    starts: Sequence[Start],
    caches: Sequence[Cache],
    page_bytes: int,
    near_lines: int = 1,
    *,
    by_address: bool = True,
) -> list[Pair]:
    """All that collide among the largest blocks, the worst first.

    Starts are near each other if they are less than so many lines apart. Where addresses are only those of
    pages, they are not to be compared.
    """
    chosen = largest(starts)
    if len(chosen) < 2:
        return []
    inner = next((cache for cache in caches if cache.level == 1), None)
    way = inner.way_bytes if inner is not None and not is_hashed(inner) else ALIAS_BYTES
    near = near_lines * (inner.line_bytes if inner is not None else LINE_BYTES)
    addresses = np.array([starts[at].address for at in chosen], dtype=np.int64)
    difference = addresses[:, None] - addresses[None, :]
    apart, alias = circular(difference, way), circular(difference, ALIAS_BYTES)
    aliased, lines = (by_address & (distance < near) for distance in (alias, apart))
    found = aliased | lines
    physical = _physical(caches, page_bytes)
    same: dict[int, NDArray[np.bool_]] = {}
    for cache in physical:
        colors = [first_color(starts[at], cache, page_bytes) for at in chosen]
        row = np.array([-1 if color is None else color for color in colors])
        same[cache.level] = (row[:, None] == row[None, :]) & (row[:, None] >= 0)
        found |= same[cache.level]
    result = []
    for one, other in zip(*np.nonzero(np.triu(found, 1)), strict=True):
        first, second = starts[chosen[one]], starts[chosen[other]]
        result.append(
            Pair(
                chosen[one],
                chosen[other],
                min(first.bytes, second.bytes),
                int(apart[one, other]),
                inner is not None and bool(lines[one, other]),
                int(alias[one, other]) if aliased[one, other] else None,
                {
                    cache.level: alongside(first, second, cache, page_bytes)
                    for cache in physical
                    if same[cache.level][one, other]
                },
            )
        )
    return sorted(result, key=lambda pair: (-pair.weight, -pair.bytes, pair.apart, pair.first, pair.second))


def crowds(
    starts: Sequence[Start],
    caches: Sequence[Cache],
    page_bytes: int,
    threads: int,
    by_address: bool = True,
) -> list[Crowd]:
    """Places of caches where more blocks start than a thread can walk side by side, the fullest first."""
    found = []
    physical = _physical(caches, page_bytes)
    for cache in caches:
        if is_hashed(cache) or (cache.level == 1 and not by_address):
            continue
        places: dict[int, list[int]] = {}
        for at, start in enumerate(starts):
            if cache.level == 1:
                place: int | None = start.address % cache.way_bytes // cache.line_bytes
            else:
                place = first_color(start, cache, page_bytes) if cache in physical else None
            if place is not None:
                places.setdefault(place, []).append(at)
        sharers = max(1, min(cache.cpus, threads))
        each = [Crowd(cache.level, place, tuple(at), cache.ways, sharers) for place, at in places.items()]
        found += [crowd for crowd in each if len(crowd.members) > crowd.room]
    return sorted(found, key=lambda crowd: (-len(crowd.members) / crowd.room, crowd.level, crowd.place))
