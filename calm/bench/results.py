"""What was measured, and its file: every run's raw figures, with all that they depend on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from calm.bench.cases import Metric
from calm.errors import USAGE, CalmError

FORMAT = 1
# Figures of a run that are not the case's own.
METRIC, RESIDENT = "metric", "resident_kib"

_T = TypeVar("_T")


@dataclass
class Run:
    """One run: figures by name, and which round it was in. None is a figure that could not be had."""

    round: int
    figures: dict[str, float | None]


@dataclass
class Side:
    """One allocator's runs of one case, the warm-up left out."""

    label: str
    runs: list[Run] = field(default_factory=list)
    failure: str | None = None
    """What went wrong, first of all; the allocator was not run in this case any more."""
    failed_round: int | None = None

    def values(self, figure: str) -> list[float | None]:
        """One figure of every run."""
        return [run.figures.get(figure) for run in self.runs]


@dataclass
class Row:
    """One case under every allocator."""

    name: str
    family: str
    summary: str
    metric: Metric | None
    command: list[str]
    client: list[str]
    environment: dict[str, str]
    sides: list[Side]

    def side(self, label: str) -> Side | None:
        """One allocator's part."""
        return next((side for side in self.sides if side.label == label), None)


@dataclass
class Subject:
    """An allocator that took part: what it was, and where from."""

    label: str
    library: str | None
    version: str | None
    package: str | None
    package_version: str | None
    environment: dict[str, str]


@dataclass
class Results:
    """Everything that is known when the runs are over, or were stopped."""

    date: str
    calm: str
    machine: dict[str, str | int]
    suite: str
    rounds: int
    seed: int
    timeout_s: float
    touched_kib: int
    how: dict[str, str]
    notes: list[str]
    allocators: list[Subject]
    rows: list[Row]
    left_out: dict[str, str]
    """Cases that could not be run at all, and why."""
    interrupted_by: int | None = None
    said: dict[str, list[str]] = field(default_factory=dict)
    """By allocator, what calmalloc itself had to say, in whatever case."""

    @property
    def labels(self) -> list[str]:
        """The allocators' names, in the order asked for."""
        return [each.label for each in self.allocators]

    @property
    def failures(self) -> list[tuple[Row, Side]]:
        """Every pair that failed."""
        return [(row, side) for row in self.rows for side in row.sides if side.failure]


def dump(results: Results, hidden: Mapping[str, str], analysis: Mapping[str, object] | None = None) -> str:
    """The file's text; folders of this machine are named by what they stand for ("." is left out)."""
    data = {"format": FORMAT, "tool": "calm bench", **asdict(results)}
    if analysis is not None:
        data["analysis"] = analysis
    return json.dumps(_replaced(data, hidden), indent=1) + "\n"


def _replaced(value: object, hidden: Mapping[str, str]) -> object:
    if isinstance(value, dict):
        return {key: _replaced(item, hidden) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, hidden) for item in value]
    if isinstance(value, str):
        for folder, name in hidden.items():
            below = "" if name == "." else f"{name}/"
            value = value.replace(f"{folder}/", below)
            value = re.sub(rf"{re.escape(folder)}(?=:|$)", name, value)
    return value


def _take(kind: type[_T], data: Mapping[str, Any], **read: object) -> _T:
    """Fields of a dataclass from a mapping; those already read win."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: data[name] for name in names if name in data and name not in read}, **read)


def _row(data: Mapping[str, Any]) -> Row:
    metric = _take(Metric, data["metric"]) if data["metric"] else None
    return _take(Row, data, metric=metric, sides=[_side(side) for side in data["sides"]])


def _side(data: Mapping[str, Any]) -> Side:
    return _take(Side, data, runs=[_take(Run, run) for run in data["runs"]])


def _checked(results: Results) -> Results:
    labels = set(results.labels)
    if not all(isinstance(line, str) for lines in results.said.values() for line in lines):
        raise ValueError("what an allocator said is no text")
    for row in results.rows:
        if {side.label for side in row.sides} - labels:
            raise ValueError(f"{row.name} has an allocator that is not listed")
        for side in row.sides:
            for run in side.runs:
                if not all(
                    value is None or isinstance(value, (int, float)) for value in run.figures.values()
                ):
                    raise ValueError(f"{row.name} has a figure that is no number")
    return results


def load(path: str) -> Results:
    """Reads such a file."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise CalmError(f"cannot read {path}: {error.strerror}", USAGE) from error
    except ValueError as error:
        raise CalmError(f"{path} is not a file of results: it is no JSON", USAGE) from error
    if not isinstance(data, dict) or data.get("tool") != "calm bench":
        raise CalmError(f"{path} is not a file of results of `calm bench`", USAGE)
    if data.get("format") != FORMAT:
        raise CalmError(f"{path} has format {data.get('format')}, and this calm reads {FORMAT}", USAGE)
    try:
        return _checked(
            _take(
                Results,
                data,
                allocators=[_take(Subject, each) for each in data["allocators"]],
                rows=[_row(row) for row in data["rows"]],
            )
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CalmError(f"{path} is not a whole file of results: {error}", USAGE) from error


def known(values: Sequence[float | None]) -> list[float]:
    """Those that could be had."""
    return [value for value in values if value is not None]
