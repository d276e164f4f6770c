"""What a paper is to `calm bench`, and the arithmetic that its tables share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from calm import allocators
from calm.allocators import Allocator
from calm.bench import tables
from calm.bench.cases import Case
from calm.bench.paper.published import Citation
from calm.bench.results import Results, Row
from calm.bench.tables import Grid
from calm.statistics import Ratio

# Families of rows that are of one run each, and in no round: counted by the processor, by a model of caches,
# and from the frames of pages.
COUNTED, TRACED, FRAMES = "counted", "traced", "frames"
ONCE = (COUNTED, TRACED, FRAMES)
# The family of a case that is run with the system's huge pages set to always, where that may be set.
ALWAYS_HUGE = "huge pages always"


@dataclass(frozen=True)
class About:
    """What a rerun depends on beyond the suite's own results; kept in the same file."""

    name: str
    scale: float
    threads: int
    """CPUs that the runs may use."""
    sockets: int
    virtual: bool | None
    """Whether this machine is a guest; None where it does not say."""
    extra: tuple[str, ...]
    """Allocators beside the paper's own."""
    set_huge_pages: bool = False


@dataclass(frozen=True)
class Paper:
    """A paper whose tables can be measured again."""

    name: str
    citation: Citation
    allocators: tuple[str, ...]
    """Its own; those that are not here are left out."""
    extra: tuple[str, ...]
    """What stands beside them by default."""
    cases: Callable[[About], list[Case]]
    grids: Callable[[Results, About], list[Grid]]
    differences: Callable[[Results, About], list[str]]
    """What is not as it was in the paper: one line each."""
    scales: bool = False
    scale: float = 0.1
    """Of a paper that scales: the share that a run does by default."""
    counts_cycles: bool = False
    counts_shootdowns: bool = True
    samples_huge_pages: bool = False
    switches_huge_pages: bool = False
    """--set-thp adds cases, of the family ALWAYS_HUGE; without it huge pages are sampled, not switched."""
    shuffled: bool = False
    """Its cases are compared with each other: each round has them in another order."""
    draw: Callable[[Results, About, Path], None] | None = None
    """Draws its figures; the name's ending tells the format."""
    further: Callable[[Further], None] | None = None
    """What it measures besides, after all rounds: adds rows of its own."""


@dataclass(frozen=True)
class Further:
    """What such a measurement works with."""

    results: Results
    about: About
    sides: Sequence[Allocator]
    folder: Path
    """For inputs, which are kept between runs."""
    limit_s: float
    save: Callable[[Results], None]


def row_of(results: Results, name: str) -> Row | None:
    """One case's, if it was run."""
    return next((row for row in results.rows if row.name == name), None)


def _by_round(row: Row | None, label: str, figure: str) -> dict[int, float]:
    side = row.side(label) if row else None
    if side is None or side.failure:
        return {}
    return {run.round: value for run in side.runs if (value := run.figure(figure)) is not None}


def pairs(
    one: tuple[Row | None, str], other: tuple[Row | None, str], figure: str
) -> tuple[list[float], list[float]]:
    """A figure of two sides, each a case and an allocator, in the rounds that both have."""
    above, below = _by_round(*one, figure), _by_round(*other, figure)
    rounds = sorted(above.keys() & below.keys())
    return [above[number] for number in rounds], [below[number] for number in rounds]


def middle(row: Row | None, label: str, figure: str) -> float | None:
    """The median of a side's runs."""
    side = row.side(label) if row else None
    return None if side is None or side.failure else side.median(figure)


def ratio(one: tuple[Row | None, str], other: tuple[Row | None, str], figure: str) -> Ratio:
    """Of two sides' medians, with its interval."""
    (row, label), (to, base) = one, other
    for side in one, other:
        middle(*side, figure)
    if row is None or to is None:
        return Ratio(None, None, None, 0)
    return row.ratio(figure, (label, base), pairs(one, other, figure), to)


def ratio_text(found: Ratio) -> str:
    """Two digits where it is near one, and more where it is small: 0.00039 is not 0."""
    if found.value is None:
        return "-"

    def text(value: float) -> str:
        if 0 < value < 0.1:
            return f"{value:.{1 - math.floor(math.log10(value))}f}"
        return tables.times(value)

    if found.low is None and found.high is None:
        return text(found.value)
    low = text(found.low) if found.low is not None else "∞"
    high = text(found.high) if found.high is not None else "∞"
    return f"{text(found.value)} ({low} to {high})"


def less_text(found: Ratio) -> str:
    """How many percent less, with its interval."""
    if found.value is None:
        return "-"
    text = f"{100 * (1 - found.value):+.1f} %"
    if found.low is None or found.high is None:
        return text
    return f"{text} ({100 * (1 - found.high):+.1f} to {100 * (1 - found.low):+.1f})"


def published_ratio(above: float, below: float) -> str:
    """The same of two published figures."""
    return ratio_text(Ratio(above / below, None, None, 1))


def seconds(value: float | None) -> str:
    """A time, as the papers print it."""
    return "-" if value is None else f"{value:.2f}"


def count(value: float | None) -> str:
    """A number of events, or KiB."""
    return "-" if value is None else f"{value:,.0f}"


def present(labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Which of these allocators are on this machine, and which are not."""
    there: list[str] = []
    missing: list[str] = []
    for label in labels:
        name = label.partition(":")[0]
        is_there = name not in allocators.KNOWN or allocators.is_here(name)
        (there if is_there else missing).append(label)
    return there, missing
