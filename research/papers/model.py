"""A paper whose tables are measured again, the document of such a run, and the arithmetic of the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from calm.core import allocators, measure
from calm.core.allocators import Allocator
from calm.core.statistics import Ratio
from research.bench.cases import Case
from research.bench.results import Results, Row
from research.bench.tables import Grid, ratio_text
from research.papers.published import Citation

Name = Literal["oracle", "ptlbmalloc2", "nextgen", "valat"]
# Families of rows that are of one run each, and in no round: counted by the processor, by a model of caches,
# and from the frames of pages.
COUNTED, TRACED, FRAMES = "counted", "traced", "frames"
ONCE = (COUNTED, TRACED, FRAMES)
# The family of a case that is run with the system's huge pages set to always, where that may be set.
ALWAYS_HUGE = "huge pages always"


@dataclass(frozen=True)
class About:
    """The conditions of a rerun beyond the suite's own results."""

    name: Name
    scale: Annotated[float, msgspec.Meta(gt=0)]
    threads: int
    """CPUs that the runs may use."""
    sockets: int
    virtual: bool | None
    """Whether this machine is a guest; None where that is not known."""
    extra: tuple[str, ...] = ()
    """Allocators beside the paper's own."""
    set_huge_pages: bool = False


class PaperResults(Results, kw_only=True, tag="calm-paper"):
    """What `bench/paper run` measured."""

    version: int = 1
    paper: About
    citation: Citation | None = None
    tables: list[Grid] = msgspec.field(default_factory=list)
    differences: list[str] = msgspec.field(default_factory=list)
    """Differences from the paper."""


@dataclass(frozen=True)
class Paper:
    """A paper whose tables can be measured again."""

    name: Name
    citation: Citation
    allocators: tuple[str, ...]
    """Its own; those that are not here are left out."""
    extra: tuple[str, ...]
    """Allocators beside them by default."""
    cases: Callable[[About], list[Case]]
    grids: Callable[[Results, About], list[Grid]]
    differences: Callable[[Results, About], list[str]]
    """Differences from the paper, one line each."""
    scales: bool = False
    scale: float = 0.1
    """Of a paper that scales: the share that a run does by default."""
    groups: tuple[str, ...] = (measure.TLB_GROUP,)
    """What the probe counts."""
    samples_huge_pages: bool = False
    switches_huge_pages: bool = False
    """--set-thp adds cases, of the family ALWAYS_HUGE; without it huge pages are sampled, not switched."""
    shuffled: bool = False
    """Its cases are compared with each other: each round has them in another order."""
    draw: Callable[[Results, About, Path], None] | None = None
    """Draws its figures; the name's ending tells the format."""
    further: Callable[[Further], None] | None = None
    """Adds rows of its own, after all rounds."""


@dataclass(frozen=True)
class Further:
    """The arguments of `Paper.further`."""

    results: PaperResults
    sides: Sequence[Allocator]
    folder: Path
    """For inputs, which are kept between runs."""
    limit_s: float
    save: Callable[[PaperResults], None]


def row_of(results: Results, name: str) -> Row | None:
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
    return row.median(label, figure) if row else None


def ratio(one: tuple[Row | None, str], other: tuple[Row | None, str], figure: str) -> Ratio:
    (row, label), (to, base) = one, other
    for side in one, other:
        middle(*side, figure)
    if row is None or to is None:
        return Ratio(None, None, None, 0)
    return row.ratio(figure, (label, base), pairs(one, other, figure), to)


def less_text(found: Ratio) -> str:
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
    return "-" if value is None else f"{value:.2f}"


def count(value: float | None) -> str:
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
