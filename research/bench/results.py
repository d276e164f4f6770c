"""The document of `calm bench`: every run's figures, with all that they depend on.

The medians and ratios of the tables are kept beside the runs: without the runs, the tables are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TypeVar

import msgspec

from calm.core.documents import Document
from calm.core.statistics import Ratio, median, ratio_of_medians
from research.statistics import Span, geometric_mean_of_ratios

# Figures of a run that are not the case's own.
METRIC, RESIDENT = "metric", "resident_kib"
# The sum of user and system time.
CPU_TIME = "cpu_s"

Rounds = tuple[Sequence[float], Sequence[float]]
RatioFields = tuple[float | None, float | None, float | None, int]
"""A `Ratio` in the file: value, low, high and the number of rounds."""
Kind = TypeVar("Kind", bound="Results")


class Metric(msgspec.Struct, frozen=True, array_like=True):
    """The figure that a program prints: a key of its line of JSON, or a name for what its pattern finds."""

    key: str
    unit: str
    higher_is_better: bool


COST = Metric("cost_s", "s", higher_is_better=False)
"""CPU time, and the memory held, multiplied by the time for which it was, at this price."""
COST_GIB_PER_CPU = 8


def cost_s(figures: Mapping[str, float | None]) -> float | None:
    """What a run cost, in seconds of CPU time: of its whole RSS, in use or not."""
    found = [figures.get(name) for name in ("user_s", "system_s", "average_rss_kib", "wall_s")]
    user, system, held_kib, wall = found
    if user is None or system is None or held_kib is None or wall is None:
        return None
    return user + system + held_kib / (1 << 20) * wall / COST_GIB_PER_CPU


class Run(msgspec.Struct):
    """One run: its round, and figures by name; None is a figure that could not be measured."""

    round: int
    figures: dict[str, float | None]

    def figure(self, name: str) -> float | None:
        if name != CPU_TIME:
            return self.figures.get(name)
        user, system = self.figures.get("user_s"), self.figures.get("system_s")
        return None if user is None or system is None else user + system


class Side(msgspec.Struct):
    """One allocator's runs of one case, without the warm-up."""

    label: str
    runs: list[Run] = []
    failure: str | None = None
    """The first failure; the allocator was not run in this case any more."""
    failed_round: int | None = None
    n: int | None = None
    """The number of rounds, where it is not the suite's."""

    def values(self, figure: str) -> list[float | None]:
        return [run.figure(figure) for run in self.runs]


class Row(msgspec.Struct):
    """One case under every allocator."""

    name: str
    family: str
    metric: Metric | None = None
    command: list[str] = []
    client: list[str] = []
    environment: dict[str, str] = {}
    sides: list[Side] = []
    """In a file: left out if there are only medians, and every allocator has them."""
    medians: dict[str, list[float | None]] = {}
    """By figure, one for each side."""
    ratios: dict[str, RatioFields] = {}
    """Of its sides' figures to others'."""
    to_best: dict[str, dict[str, RatioFields]] = {}
    """By measure, each allocator that finished to the best of them; if left out, the medians have them."""
    spans: dict[str, Span | None] = {}
    """By measure, the span of the allocators' medians, and of what would be chance."""
    curves: dict[str, list[float]] = {}
    """Of a row without a program."""

    @property
    def has_runs(self) -> bool:
        """Whether the runs themselves are here, and not only what the tables took from them."""
        return any(side.runs for side in self.sides)

    def side(self, label: str) -> Side | None:
        return next((side for side in self.sides if side.label == label), None)

    def median(self, label: str, figure: str) -> float | None:
        """The median of an allocator's runs that have the figure; None if it failed."""
        side = self.side(label)
        if side is None or side.failure:
            return None
        index = self.sides.index(side)
        if self.has_runs:
            column = self.medians.setdefault(figure, [])
            column += [None] * (len(self.sides) - len(column))
            column[index] = median(side.values(figure))
        column = self.medians.get(figure, [])
        return column[index] if index < len(column) else None

    def ratio(self, figure: str, labels: tuple[str, str], rounds: Rounds, to: Row | None = None) -> Ratio:
        """Of one allocator's median to another's, which may be of another row; both in the same rounds."""
        name = f"{figure}: {' to '.join(labels)}" + (f" of {to.name}" if to and to is not self else "")
        if self.has_runs:
            self.ratios[name] = astuple(ratio_of_medians(*rounds))
        return Ratio(*self.ratios.get(name, (None, None, None, 0)))


class Subject(msgspec.Struct):
    """An allocator that took part: its version, and where it is from."""

    label: str
    library: str | None = None
    version: str | None = None
    package: str | None = None
    package_version: str | None = None
    environment: dict[str, str] = {}
    date: str | None = None
    """The day of its last commit, if it was built from a checkout."""


class Source(msgspec.Struct, frozen=True):
    """A tree of published programs that were built for the suite."""

    name: str
    version: str | None = None
    """Its git revision; None if it is no git checkout."""
    date: str | None = None
    """Of its last commit."""


class Worst(msgspec.Struct, frozen=True):
    """The row that an allocator does worst in, against the best of all others."""

    label: str
    row: str
    ratio: float
    against: str


class Beaten(msgspec.Struct, frozen=True):
    """A row where a peer is both clearly faster and clearly smaller than the subject."""

    row: str
    peer: str
    time: float
    """The subject's time divided by the peer's, and so on."""
    peak: float
    average: float | None


class Conclusions(msgspec.Struct):
    """The findings over all rows, for other programs; the rows' own ratios are with the rows."""

    subject: str
    peers: list[str]
    worst: dict[str, list[Worst]]
    """By measure."""
    beaten: list[Beaten]
    shootdown_key: str
    """The figure that was counted: shootdowns, or interrupts_system_wide."""
    shootdowns: dict[str, tuple[float, int]]
    """By allocator, the sum over rows of its medians, and the number of rows."""


class Results(Document, kw_only=True, tag="calm-suite"):
    """What `calm bench run` measured, whether it was stopped or not."""

    version: int = 3
    machine: dict[str, str | int]
    suite: str
    rounds: int
    seed: int
    timeout_s: float
    touched_kib: int = 0
    how: dict[str, str] = msgspec.field(default_factory=dict)
    """By figure, how it was measured, or why not."""
    notes: list[str] = msgspec.field(default_factory=list)
    allocators: list[Subject]
    sources: list[Source] = msgspec.field(default_factory=list)
    rows: list[Row]
    left_out: dict[str, str] = msgspec.field(default_factory=dict)
    """Cases that cannot be run on this machine, and why."""
    interrupted_by: int | None = None
    """The signal that stopped the suite."""
    messages: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """By allocator, what calmalloc itself printed in any case."""
    means: dict[str, RatioFields] = msgspec.field(default_factory=dict)
    """Geometric means of ratios, over rows."""
    analysis: Conclusions | None = None

    def __post_init__(self) -> None:
        for row in self.rows:
            if row.medians and not row.sides:
                row.sides = [Side(label) for label in self.labels]
            if any(len(column) > len(row.sides) for column in row.medians.values()):
                raise ValueError(f"{row.name} has more medians than allocators")
            if unknown := {side.label for side in row.sides} - set(self.labels):
                raise ValueError(f"{row.name} has {', '.join(unknown)}, which is not listed")

    @property
    def labels(self) -> list[str]:
        return [each.label for each in self.allocators]

    @property
    def failures(self) -> list[tuple[Row, Side]]:
        return [(row, side) for row in self.rows for side in row.sides if side.failure]

    def rounds_of(self, side: Side) -> int:
        return len(side.runs) or (self.rounds if side.n is None else side.n)

    def mean(self, name: str, rows: Sequence[Rounds]) -> Ratio:
        """The geometric mean, over rows, of ratios of medians; each row has both sides' same rounds."""
        if any(row.has_runs for row in self.rows):
            self.means[name] = astuple(geometric_mean_of_ratios(rows))
        return Ratio(*self.means.get(name, (None, None, None, 0)))


def saved(results: Kind, folders: Mapping[str, str]) -> Kind:
    """The results as a file has them: folders of this machine have a name ("." is left out)."""
    for side in (side for row in results.rows for side in row.sides if side.runs):
        side.n = None if len(side.runs) == results.rounds else len(side.runs)
    text = msgspec.json.encode(results).decode()
    for folder, name in folders.items():
        quoted = json.dumps(folder, ensure_ascii=False)[1:-1]
        text = text.replace(f"{quoted}/", "" if name == "." else f"{name}/")
        text = re.sub(rf'{re.escape(quoted)}(?=[:"])', name, text)
    return msgspec.json.decode(text, type=type(results))


def known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
