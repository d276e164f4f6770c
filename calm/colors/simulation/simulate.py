"""`calm colors --simulate`: coloring policies on a simulated cache, and what each costs whom.

Figure 2 of the paper is the number of unnecessary conflicts among pages that are used one after the other.
How many accesses then miss depends on the pattern too: each is run through the cache as a trace.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calm.colors import conflicts
from calm.colors.geometry import Cache
from calm.colors.simulation import caches_model
from calm.colors.simulation.buddy import Ints
from calm.colors.simulation.patterns import START, Arrays, Trace, blocked, streams
from calm.colors.simulation.policies import HUGE_PAGES, POLICIES, UNSEEDED, Policy, segment

RUNS = 500
"""As the paper's."""
TRACED = 20
"""Of which so many, at most, are run through the cache access by access."""
_PAPER_BYTES = 8 << 20
_FEWEST, _FEWEST_TRACED = 20, 3
# Traces of several runs go through the simulation together, but not more accesses than this.
_AT_ONCE = 1 << 21

STEPS = 16
"""Sizes go in sixteenths of the cache, to twice the cache."""

CONFLICTS, LINEAR, BLOCKED = "conflicts", "linear", "blocked"
ARRAYS, SPREAD, PROCESSES = "arrays", "arrays-spread", "processes"
PATTERNS = {
    LINEAR: "repeated passes over one array, by its size as a share of the cache",
    BLOCKED: "an array in tiles, each passed over repeatedly, by a tile's size as a share of the cache",
    ARRAYS: "a page of each of several arrays that start at multiples of a way and of 2 MiB, by their number",
    SPREAD: "the same, the arrays' starts spread evenly over a way in whole cache lines",
    PROCESSES: "processes with the same addresses, in each a few arrays that are aligned so, by their number",
}


@dataclass(frozen=True)
class Point:
    """What all runs gave for one size or number."""

    at: float
    minimum: float
    mean: float
    maximum: float


@dataclass(frozen=True)
class Curve:
    """One policy's."""

    policy: str
    points: list[Point]

    def at(self, where: float) -> Point:
        """The one of a size or number that was run."""
        return next(point for point in self.points if math.isclose(point.at, where))


@dataclass(frozen=True)
class Figure:
    """All policies' curves of a kind: of unnecessary conflicts, or of misses by access for a pattern."""

    name: str
    what: str
    curves: list[Curve]

    def curve(self, policy: str) -> Curve:
        """The policy's."""
        return next(curve for curve in self.curves if curve.policy == policy)


@dataclass(frozen=True)
class Result:
    """All that was simulated, and on what."""

    cache: Cache
    page_bytes: int
    runs: int
    traced: int
    """Of the runs, those that were run through the cache access by access."""
    seed: int
    figures: list[Figure]
    notes: list[str] = field(default_factory=list)

    @property
    def colors(self) -> int:
        """The cache's."""
        return self.cache.colors(self.page_bytes)

    @property
    def pages(self) -> int:
        """What the cache has room for."""
        return self.colors * self.cache.ways

    def figure(self, name: str) -> Figure:
        """The one of a name: `conflicts`, or a pattern's."""
        return next(figure for figure in self.figures if figure.name == name)


def default_runs(cache: Cache) -> int:
    """The paper's; fewer where the cache is larger than its, as each run takes as much longer."""
    return max(_FEWEST, min(RUNS, RUNS * _PAPER_BYTES // cache.bytes))


def _traced(cache: Cache, runs: int) -> int:
    return min(runs, max(_FEWEST_TRACED, min(TRACED, TRACED * _PAPER_BYTES // cache.bytes)))


def _points(where: Sequence[float], values: NDArray[np.float64]) -> list[Point]:
    """Of values by run and place."""
    return [
        Point(float(at), float(column.min()), float(column.mean()), float(column.max()))
        for at, column in zip(where, values.T, strict=True)
    ]


def sizes(pages: int) -> Ints:
    """In pages, the sizes of arrays that are looked at, for a cache with room for so many."""
    return np.unique(np.maximum(1, np.arange(1, 2 * STEPS + 1) * pages // STEPS))


def counts_by_size(of_pages: Ints, colors: int, ends: Ints) -> Ints:
    """How many of the first pages have each color: a row for each of the ends, which ascend."""
    step = np.searchsorted(ends, np.arange(len(of_pages)), side="right")
    added = np.bincount(step * colors + of_pages, minlength=len(ends) * colors)
    return added.reshape(len(ends), colors).cumsum(axis=0)


def _linear(
    cache: Cache,
    page_bytes: int,
    policies: dict[str, Policy],
    seeds: Sequence[int],
    step: Callable[[str], None],
) -> Iterator[Figure]:
    """Figure 2, and what that makes of figure 3: one array, used from its start to its end, repeatedly."""
    colors = cache.colors(page_bytes)
    room = colors * cache.ways
    ends = sizes(room)
    touches = segment(int(ends[-1]), start=START)
    shares = [float(end) / room for end in ends]
    beyond: list[Curve] = []
    missing: list[Curve] = []
    for name, policy in policies.items():
        counts = []
        for seed in _seeds(name, seeds):
            counts.append(counts_by_size(policy(touches, colors, seed) % colors, colors, ends))
            step(name)
        by_run = np.stack(counts)
        over = conflicts.unnecessary_by_counts(by_run, cache, page_bytes)
        misses = caches_model.cyclic_misses(by_run, cache.ways) / ends
        beyond.append(Curve(name, _points(shares, over.astype(np.float64))))
        missing.append(Curve(name, _points(shares, misses)))
    yield Figure(
        CONFLICTS, "unnecessary conflicts, in pages, by an array's size as a share of the cache", beyond
    )
    yield Figure(LINEAR, PATTERNS[LINEAR], missing)


def _seeds(policy: str, seeds: Sequence[int]) -> Sequence[int]:
    return seeds[:1] if policy in UNSEEDED else seeds


def miss_ratios(
    cache: Cache, trace: Trace, policy: Policy, seeds: Sequence[int], page_bytes: int = conflicts.PAGE_BYTES
) -> NDArray[np.float64]:
    """For each seed the share of misses in accesses to what has been used before."""
    lines_a_page = page_bytes // cache.line_bytes
    colors = cache.colors(page_bytes)
    together = max(1, _AT_ONCE // len(trace.page))
    ratios = []
    for first in range(0, len(seeds), together):
        frames = [policy(trace.touches, colors, seed) for seed in seeds[first : first + together]]
        domains = np.repeat(np.arange(len(frames)), len(trace.page))
        if trace.line is None:
            accessed = np.concatenate([each[trace.page] for each in frames])
            found = caches_model.page_hits(cache, page_bytes, accessed, domains)
        else:
            accessed = np.concatenate([trace.lines(each, lines_a_page) for each in frames])
            found = caches_model.line_hits(cache, accessed, domains)
        again = found.reshape(len(frames), -1)[:, trace.repeated]
        ratios.append(1 - again.mean(axis=1))
    return np.concatenate(ratios)


def traces(pattern: str, cache: Cache, page_bytes: int = conflicts.PAGE_BYTES) -> dict[float, Trace]:
    """The pattern's, by the size or number that it is shown by."""
    colors, ways = cache.colors(page_bytes), cache.ways
    # Apart by whole ways and whole huge pages both.
    gap = math.lcm(colors, HUGE_PAGES)
    if pattern == BLOCKED:
        # The last but one: tiles of nearly all of the cache that are no whole number of ways.
        shares = (0.5, 0.625, 0.75, 0.875, 0.9375, 0.984375, 1.0)
        return {share: blocked(int(share * colors * ways), tiles=3) for share in shares}
    if pattern in (ARRAYS, SPREAD):
        spread = cache.way_bytes if pattern == SPREAD else 0
        numbers = sorted({max(1, ways // 2), ways, ways + 1, ways * 3 // 2, 2 * ways, 4 * ways})
        # Where the cache has few colors, so many pages may be more than it has room for.
        numbers = [number for number in numbers if number <= colors * ways]
        found = {number: Arrays(number, gap, page_bytes, spread_bytes=spread) for number in numbers}
        return {
            float(number): streams(arrays, page_bytes=page_bytes, line_bytes=cache.line_bytes)
            for number, arrays in found.items()
        }
    # All arrays of four processes have one page of a color for each way.
    each = Arrays(max(1, ways // 4), gap, max(1, colors // 4) * page_bytes)
    pages = each.count * (each.used_bytes // page_bytes)
    return {
        float(number): streams(each, number, page_bytes=page_bytes, line_bytes=cache.line_bytes)
        for number in (1, 2, 4, 6, 8)
        if number * pages <= colors * ways
    }


def run(
    cache: Cache,
    *,
    policies: Sequence[str] = tuple(POLICIES),
    patterns: Sequence[str] = tuple(PATTERNS),
    runs: int | None = None,
    seed: int = 0,
    page_bytes: int = conflicts.PAGE_BYTES,
    step: Callable[[str], None] = lambda what: None,
) -> Result:
    """Simulates each policy on each pattern. `step` is called, with what is being done, now and then."""
    if cache.colors(page_bytes) < 2 or cache.way_bytes % page_bytes:
        raise ValueError("pages have no colors in this cache")
    runs = default_runs(cache) if runs is None else runs
    traced = _traced(cache, runs)
    seeds = [int(each) for each in np.random.SeedSequence(seed).generate_state(runs, np.uint64)]
    chosen = {name: POLICIES[name] for name in policies}
    figures: list[Figure] = []
    for pattern in patterns:
        if pattern == LINEAR:
            figures += _linear(cache, page_bytes, chosen, seeds, step)
            continue
        columns: dict[str, list[Point]] = {name: [] for name in chosen}
        for at, trace in traces(pattern, cache, page_bytes).items():
            for name, policy in chosen.items():
                step(f"{pattern}, {name}")
                found = miss_ratios(cache, trace, policy, _seeds(name, seeds[:traced]), page_bytes)
                columns[name] += _points([at], found[:, None])
        curves = [Curve(name, points) for name, points in columns.items()]
        figures.append(Figure(pattern, PATTERNS[pattern], curves))
    notes = []
    if conflicts.is_hashed(cache):
        notes.append(
            f"the L{cache.level}'s sets are no power of two, so it is hashed; "
            "it is simulated as if sets followed addresses"
        )
    if PROCESSES in patterns and cache.cpus == 1:
        notes.append(
            f"the L{cache.level} serves one CPU: `{PROCESSES}` is of processes that run there in turns"
        )
    return Result(cache, page_bytes, runs, traced, seed, figures, notes)
