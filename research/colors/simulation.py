"""Simulates page coloring policies on a cache: unnecessary conflicts, and misses of several access patterns.

Figure 2 of the paper shows unnecessary conflicts of pages that are used one after the other. Misses depend on
the pattern too: each is simulated as a trace, on a set-associative cache with LRU replacement.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from calm.core.documents import Document
from research.colors.caches import PAGE_BYTES, Cache, Ints
from research.colors.policies import HUGE_PAGES, POLICIES, UNSEEDED, Policy, Touches, segment

Bools = NDArray[np.bool_]

RUNS = 500
"""The number of runs in the paper."""
TRACED = 20
"""At most so many of the runs are simulated access by access."""
_PAPER_BYTES = 8 << 20
_MIN_RUNS, _MIN_TRACED = 20, 3
# Traces of several runs are simulated together, up to so many accesses.
_AT_ONCE = 1 << 21

STEPS = 16
"""Sizes are multiples of a sixteenth of the cache, up to twice the cache."""

CONFLICTS, LINEAR, BLOCKED = "conflicts", "linear", "blocked"
ARRAYS, SPREAD, PROCESSES = "arrays", "arrays-spread", "processes"
_CONFLICTS = "unnecessary conflicts, in pages, by an array's size as a share of the cache"
PATTERNS = {
    LINEAR: "repeated passes over one array, by its size as a share of the cache",
    BLOCKED: "an array in tiles, each passed over repeatedly, by a tile's size as a share of the cache",
    ARRAYS: "a page of each of several arrays that start at multiples of a way and of 2 MiB, by their number",
    SPREAD: "the same, the arrays' starts spread evenly over a way in whole cache lines",
    PROCESSES: "processes with the same addresses, in each a few arrays that are aligned so, by their number",
}


FIRST_PID = 1000
START = 0x7F1234567
"""The first page of an mmap segment, without any alignment."""


@dataclass(frozen=True)
class Point:
    """The values of all runs for one size or number."""

    at: float
    minimum: float
    mean: float
    maximum: float


@dataclass(frozen=True)
class Curve:
    """The points of one policy."""

    policy: str
    points: list[Point]


@dataclass(frozen=True)
class Figure:
    """The curves of all policies: unnecessary conflicts, or shares of misses for a pattern."""

    name: str
    what: str
    curves: list[Curve]


class Simulation(Document, tag="calm-color-simulation"):
    """The results of `calm colors simulate`."""

    cache: Cache
    colors: int
    pages: int
    """How many pages the cache has room for."""
    rounds: int
    traced: int
    """How many of the rounds were simulated access by access."""
    seed: int
    figures: list[Figure]
    notes: list[str]
    page_bytes: int = PAGE_BYTES
    caches_of: str = ""
    """machine or nehalem."""

    def figure(self, name: str) -> Figure:
        """The figure of a name: `conflicts`, or a pattern."""
        return next(figure for figure in self.figures if figure.name == name)


@dataclass(frozen=True)
class Trace:
    """Accesses to whole pages, or to lines."""

    touches: Touches
    page: Ints
    """The page of each access, as an index of the touches."""
    line: Ints | None
    """The line of each access within its page; None if each access is to all lines of the page in turn."""
    repeated: Bools
    """Accesses that a large enough cache would hit."""

    def accessed(self, frames: Ints, lines_a_page: int) -> Ints:
        """The frame of each access, or its physical line, if the touched pages are in these frames."""
        return frames[..., self.page] * (1 if self.line is None else lines_a_page) + (
            0 if self.line is None else self.line
        )


def _trace(pids: Ints, segments: Ints, pages: Ints, line: Ints | None, repeated: Bools) -> Trace:
    # x86-64's page numbers have at most 45 bits.
    _, first, which = np.unique((pids << 45) + pages, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    first = first[order]
    return Trace(Touches(pages[first], segments[first], pids[first]), rank[which.reshape(-1)], line, repeated)


def blocked(pages: int, tiles: int, passes: int = 3) -> Trace:
    """Cache blocking: an array in tiles, with several passes over each tile before the next one.

    A single tile is an array with repeated passes (figure 3).
    """
    tile = np.tile(np.arange(pages), passes)
    offsets = (np.arange(tiles)[:, None] * pages + tile).ravel()
    again = np.tile(np.arange(len(tile)) >= pages, tiles)
    count = len(offsets)
    return _trace(np.full(count, FIRST_PID), np.full(count, START), START + offsets, None, again)


def streams(
    arrays: int,
    gap_pages: int,
    used_bytes: int,
    *,
    spread_bytes: int = 0,
    processes: int = 1,
    passes: int = 3,
    line_bytes: int = 64,
) -> Trace:
    """Passes over arrays: the first piece of every array in every process, then the second, and so on.

    Each array has its own segment, which starts at a multiple of the gap (section 4.2, figure 10), and is
    used from its start. Starts are spread evenly over so much, in whole lines. All processes have the same
    addresses, as those of MPI (section 4.3). A piece is a page if all arrays begin and end with pages, or
    else a line.
    """
    starts = np.arange(arrays) * spread_bytes // arrays // line_bytes * line_bytes
    by_page = not (starts % PAGE_BYTES).any() and used_bytes % PAGE_BYTES == 0
    piece = PAGE_BYTES if by_page else line_bytes
    pieces = np.arange(-(-used_bytes // piece))
    # Axes: pass, piece, process, array.
    shape = (passes, len(pieces), processes, arrays)
    offsets = np.broadcast_to(starts + pieces[:, None, None] * piece, shape).ravel()
    segments = np.broadcast_to((1 + np.arange(arrays)) * gap_pages, shape).ravel()
    return _trace(
        np.broadcast_to(FIRST_PID + np.arange(processes)[:, None], shape).ravel(),
        segments,
        segments + offsets // PAGE_BYTES,
        None if by_page else offsets % PAGE_BYTES // line_bytes,
        np.arange(len(offsets)) >= len(offsets) // passes,
    )


def traces(pattern: str, cache: Cache) -> dict[float, Trace]:
    """The traces of a pattern, by size or number."""
    colors, ways = cache.colors, cache.ways
    # A multiple of both ways and huge pages.
    gap = math.lcm(colors, HUGE_PAGES)
    if pattern == BLOCKED:
        # The last but one: tiles of nearly all of the cache that are no whole number of ways.
        shares = (0.5, 0.625, 0.75, 0.875, 0.9375, 0.984375, 1.0)
        return {share: blocked(int(share * cache.pages), tiles=3) for share in shares}
    # A cache with few colors may not have room for so many pages.
    if pattern in (ARRAYS, SPREAD):
        spread = cache.way_bytes if pattern == SPREAD else 0
        numbers = sorted({max(1, ways // 2), ways, ways + 1, ways * 3 // 2, 2 * ways, 4 * ways})
        return {
            float(each): streams(each, gap, PAGE_BYTES, spread_bytes=spread, line_bytes=cache.line_bytes)
            for each in numbers
            if each <= cache.pages
        }
    # All arrays of four processes together have one page of a color for each way.
    arrays, pages = max(1, ways // 4), max(1, colors // 4)
    return {
        float(each): streams(arrays, gap, pages * PAGE_BYTES, processes=each, line_bytes=cache.line_bytes)
        for each in (1, 2, 4, 6, 8)
        if each * arrays * pages <= cache.pages
    }


def hits(accessed: Ints, sets: int, ways: int) -> Bools:
    """Which accesses hit, by frames or lines in the order of access; each row has a cache of its own.

    Sets do not influence each other. So all sets advance together, in array operations: the first access to
    each set, then the second to each, and so on.
    """
    in_set = (accessed % sets + sets * np.arange(len(accessed))[:, None]).ravel()
    tags = accessed.ravel()
    found = np.zeros(len(tags), dtype=np.bool_)
    counts = np.bincount(in_set)
    # Each set gets a row, the busiest first, so that sets with accesses left are always the first rows.
    busiest = np.argsort(-counts, kind="stable")
    # Numbers of 16 bits are sorted by radix, many times faster.
    row = np.empty(len(counts), dtype=np.min_scalar_type(len(counts)))
    row[busiest] = np.arange(len(counts))
    counts = counts[busiest][: np.count_nonzero(counts)]
    order = np.argsort(row[in_set], kind="stable")
    first = np.cumsum(counts) - counts
    rows = np.arange(len(counts))
    held = np.full((len(counts), ways), -1, dtype=np.int64)
    used = np.full((len(counts), ways), -1, dtype=np.int64)
    for step in range(int(counts[0])):
        active = int(np.searchsorted(-counts, -step, side="left"))
        at = order[first[:active] + step]
        wanted = tags[at]
        # The way that holds the tag, or else the least recently used one.
        way = np.where(held[:active] == wanted[:, None], -2, used[:active]).argmin(axis=1)
        here = rows[:active]
        found[at] = held[here, way] == wanted
        held[here, way] = wanted
        used[here, way] = step
    return found.reshape(accessed.shape)


def miss_ratios(cache: Cache, trace: Trace, policy: Policy, seeds: Sequence[int]) -> NDArray[np.float64]:
    """For each seed the share of misses among repeated accesses."""
    # All lines of a page share sets with the same pages.
    sets = cache.colors if trace.line is None else cache.sets
    together = max(1, _AT_ONCE // len(trace.page))
    ratios = []
    for first in range(0, len(seeds), together):
        runs = [policy(trace.touches, cache.colors, seed) for seed in seeds[first : first + together]]
        accessed = trace.accessed(np.stack(runs), PAGE_BYTES // cache.line_bytes)
        ratios.append(1 - hits(accessed, sets, cache.ways)[:, trace.repeated].mean(axis=1))
    return np.concatenate(ratios)


def default_runs(cache: Cache) -> int:
    """As many as in the paper, or fewer if the cache is larger, as each run takes longer."""
    return max(_MIN_RUNS, min(RUNS, RUNS * _PAPER_BYTES // cache.bytes))


def _points(where: Sequence[float], values: NDArray[np.float64]) -> list[Point]:
    """Takes values by run and place."""
    ends = (values.min(axis=0), values.mean(axis=0), values.max(axis=0))
    return [Point(*map(float, each)) for each in zip(where, *ends, strict=True)]


def sizes(pages: int) -> Ints:
    """The sizes of arrays, in pages, for a cache with room for so many."""
    return np.unique(np.maximum(1, np.arange(1, 2 * STEPS + 1) * pages // STEPS))


def counts_by_size(of_pages: Ints, colors: int, ends: Ints) -> Ints:
    """How many of the first pages have each color: a row for each of the ends, which ascend."""
    step = np.searchsorted(ends, np.arange(len(of_pages)), side="right")
    added = np.bincount(step * colors + of_pages, minlength=len(ends) * colors)
    return added.reshape(len(ends), colors).cumsum(axis=0)


def _seeds(policy: str, seeds: Sequence[int]) -> Sequence[int]:
    return seeds[:1] if policy in UNSEEDED else seeds


def _linear(
    cache: Cache, policies: dict[str, Policy], seeds: Sequence[int], step: Callable[[str], None]
) -> Iterator[Figure]:
    """Figure 2, and the misses that follow for figure 3: one array, used from its start to its end."""
    colors = cache.colors
    ends = sizes(cache.pages)
    touches = segment(int(ends[-1]), start=START)
    beyond: list[Curve] = []
    missing: list[Curve] = []
    for name, policy in policies.items():
        counts = []
        for seed in _seeds(name, seeds):
            counts.append(counts_by_size(policy(touches, colors, seed) % colors, colors, ends))
            step(name)
        by_run = np.stack(counts)
        # If all pages of a color fit into its ways, they stay; else each is evicted just before its next use.
        misses = np.where(by_run > cache.ways, by_run, 0).sum(axis=-1) / ends
        shares = (ends / cache.pages).tolist()
        beyond.append(Curve(name, _points(shares, cache.unnecessary(by_run).astype(np.float64))))
        missing.append(Curve(name, _points(shares, misses)))
    yield Figure(CONFLICTS, _CONFLICTS, beyond)
    yield Figure(LINEAR, PATTERNS[LINEAR], missing)


def run(
    cache: Cache,
    *,
    policies: Sequence[str] = tuple(POLICIES),
    patterns: Sequence[str] = tuple(PATTERNS),
    runs: int | None = None,
    seed: int = 0,
    step: Callable[[str], None] = lambda what: None,
) -> Simulation:
    """Simulates each policy on each pattern, for a cache with colors. Calls `step` with what begins."""
    runs = default_runs(cache) if runs is None else runs
    traced = min(runs, max(_MIN_TRACED, min(TRACED, TRACED * _PAPER_BYTES // cache.bytes)))
    seeds = cast("list[int]", np.random.SeedSequence(seed).generate_state(runs, np.uint64).tolist())
    chosen = {name: POLICIES[name] for name in policies}
    figures: list[Figure] = []
    for pattern in patterns:
        if pattern == LINEAR:
            figures += _linear(cache, chosen, seeds, step)
            continue
        curves = {name: Curve(name, []) for name in chosen}
        for at, trace in traces(pattern, cache).items():
            for name, policy in chosen.items():
                step(f"{pattern}, {name}")
                found = miss_ratios(cache, trace, policy, _seeds(name, seeds[:traced]))
                curves[name].points.extend(_points([at], found[:, None]))
        figures.append(Figure(pattern, PATTERNS[pattern], list(curves.values())))
    notes = []
    if cache.is_hashed:
        notes.append(
            f"the {cache.name} is hashed, as its sets are no power of two; "
            "it is simulated as if sets followed addresses"
        )
    if PROCESSES in patterns and cache.cpus == 1:
        notes.append(f"the {cache.name} serves one CPU: `{PROCESSES}` run on it in turns")
    return Simulation(
        cache=cache,
        colors=cache.colors,
        pages=cache.pages,
        rounds=runs,
        traced=traced,
        seed=seed,
        figures=figures,
        notes=notes,
    )
