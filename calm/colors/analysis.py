"""What a look shows: pages in conflict, beside what other colorings would give, and blocks that collide."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from calm import topology
from calm.colors import conflicts, look, pairs, sites
from calm.colors.conflicts import Random
from calm.colors.geometry import Cache
from calm.colors.look import Look
from calm.colors.pagemap import PAGE_BYTES, Pages
from calm.colors.sites import Site

VIRTUAL_MACHINE = (
    "this is a virtual machine: frames are its own kernel's, and have these colors in the caches only as far "
    "as the host has large pages under them"
)


@dataclass(frozen=True)
class Count:
    """Pages of one region, or of all, in one cache."""

    pages: int
    in_conflict: int | None
    """None: frames are hidden."""
    unavoidable: int
    unnecessary: int | None
    """Those that the best coloring would not have; None: frames are hidden."""
    random: Random
    """All conflicts that random frames would have, the unavoidable included; the same for huge pages."""
    huge: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        spread = asdict(self.random) | {"unnecessary": self.random.mean - self.unavoidable}
        huge = {"in_conflict": self.huge, "unnecessary": self.huge - self.unavoidable}
        return {
            "pages": self.pages,
            "in_conflict": self.in_conflict,
            "unavoidable": self.unavoidable,
            "unnecessary": self.unnecessary,
            "random": spread,
            "huge": huge,
        }


@dataclass(frozen=True)
class Level:
    """One cache: the count of all regions together, and of each."""

    cache: Cache
    all: Count
    each: Sequence[Count]


@dataclass(frozen=True)
class Collision:
    """Pairs of blocks from the same two places of the program that collide alike; the worst as an example."""

    example: pairs.Pair
    count: int


@dataclass(frozen=True)
class Analysis:
    """All of it."""

    look: Look
    levels: Sequence[Level]
    skipped: Sequence[tuple[Cache, str]]
    """Caches without a count, and why."""
    collisions: Sequence[Collision]
    pair_count: int
    """Of which the collisions are made."""
    crowds: Sequence[pairs.Crowd]
    sites: Sequence[Site]
    """Of each region."""
    near_lines: int
    notes: Sequence[str] = field(default_factory=tuple)


@lru_cache(maxsize=4096)
def _random(pages: int, cache: Cache) -> Random:
    return conflicts.random(pages, cache, PAGE_BYTES)


def _count(pages: Pages, cache: Cache) -> Count:
    numbers, frames = pages.numbers, pages.frames
    if frames is not None:
        # A frame that several pages share, as that of zeros, has one place in the cache.
        frames, first = np.unique(frames, return_index=True)
        numbers = numbers[np.sort(first)]
    # The innermost cache goes by virtual addresses.
    by = numbers if cache.level == 1 else frames
    colors = None if by is None else conflicts.colors_of(by, cache, PAGE_BYTES)
    count = len(numbers)
    return Count(
        count,
        None if colors is None else conflicts.conflicts(colors, cache),
        conflicts.unavoidable(count, cache, PAGE_BYTES),
        None if colors is None else conflicts.unnecessary(colors, cache, PAGE_BYTES),
        _random(count, cache),
        conflicts.huge(numbers, cache, PAGE_BYTES),
    )


def _why_skipped(cache: Cache) -> str | None:
    if conflicts.is_hashed(cache):
        return (
            f"its {cache.sets:,} sets are no power of two: it is made of slices that a hash of the address "
            "chooses, and the count of colors does not apply"
        )
    if cache.colors(PAGE_BYTES) == 1:
        return "one color: a page covers all its sets"
    return None


def _notes(seen: Look, levels: Sequence[Level], known: bool) -> list[str]:
    notes = []
    if seen.hidden:
        rest = "" if seen.resident_known else ", nor which pages are resident"
        notes.append(f"{seen.hidden}; where blocks lie by their addresses is shown{rest}")
    elif topology.is_virtual():
        notes.append(VIRTUAL_MACHINE)
    shared = [level.cache for level in levels if level.cache.level > 2]
    if shared and not seen.hidden:
        names = ", ".join(f"L{cache.level}" for cache in shared)
        notes.append(
            f"{names} is counted as if its sets followed the address: Intel's since Sandy Bridge and AMD's "
            "hash it, and have fewer conflicts"
        )
    if not known:
        notes.append("the kernel describes no caches here: neither colors nor conflicts are known")
    if seen.lost:
        notes.append(f"{seen.lost:,} large blocks found no room in the table and are not looked at")
    return notes


def _collisions(found: Sequence[pairs.Pair], origin: Sequence[object]) -> list[Collision]:
    groups: dict[object, list[pairs.Pair]] = {}
    for pair in found:
        alike = (pair.inner, pair.aliased is not None, tuple(sorted(pair.outer)))
        ends = frozenset((origin[pair.first], origin[pair.second]))
        groups.setdefault((alike, ends), []).append(pair)
    # By the worst of each group, as the pairs come.
    return [Collision(group[0], len(group)) for group in groups.values()]


def analyse(seen: Look, caches: Sequence[Cache], near_lines: int, allocator: str = "") -> Analysis:
    """Counts and compares. The allocator is the name of its library."""
    levels, skipped = [], []
    together = seen.pages
    for cache in caches:
        if why := _why_skipped(cache):
            skipped.append((cache, why))
        elif seen.resident_known:
            each = [_count(region.pages, cache) for region in seen.regions]
            levels.append(Level(cache, _count(together, cache), each))
    starts = [
        pairs.Start(region.address, region.bytes, look.frames_by_page(region)) for region in seen.regions
    ]
    # Where nobody told of blocks, a mapping may begin with one. That it begins with a page tells nothing.
    (walked,) = np.nonzero([region.kind != look.OTHER for region in seen.regions])
    chosen = [starts[at] for at in walked]
    found = [
        replace(pair, first=int(walked[pair.first]), second=int(walked[pair.second]))
        for pair in pairs.pairs(chosen, caches, PAGE_BYTES, near_lines, by_address=seen.told)
    ]
    crowds = [
        replace(crowd, members=tuple(int(walked[at]) for at in crowd.members))
        for crowd in pairs.crowds(chosen, caches, PAGE_BYTES, seen.threads, seen.told)
    ]
    known = sites.resolve({region.frames for region in seen.regions}, seen.mappings, allocator)
    where = [known[region.frames] for region in seen.regions]
    # Regions that nobody told of are each of their own origin.
    origin: list[object] = [site or at for at, site in enumerate(where)]
    return Analysis(
        seen,
        levels,
        skipped,
        _collisions(found, origin),
        len(found),
        crowds,
        where,
        near_lines,
        _notes(seen, levels, bool(caches)),
    )
