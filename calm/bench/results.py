"""What was measured, and its file: every run's raw figures, with all that they depend on.

What the tables take from the runs, medians and ratios, is kept beside them. A file without the runs is
shown from that alone.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from calm.bench.cases import Metric
from calm.errors import USAGE, CalmError
from calm.statistics import Ratio, Span, geometric_mean_of_ratios, median, ratio_of_medians

FORMAT = 2
# A file may lack what would be empty.
_EMPTY: Mapping[str, Any] = {"how": {}, "notes": [], "left_out": {}}
_EMPTY_ROW: Mapping[str, Any] = {
    "metric": None,
    "command": [],
    "client": [],
    "environment": {},
    "medians": {},
}
# Figures of a run that are not the case's own.
METRIC, RESIDENT = "metric", "resident_kib"
# The sum of user and system time.
CPU_TIME = "cpu_s"
_UNKNOWN = Ratio(None, None, None, 0)

_T = TypeVar("_T")


@dataclass
class Run:
    """One run: figures by name, and which round it was in. None is a figure that could not be had."""

    round: int
    figures: dict[str, float | None]

    def figure(self, name: str) -> float | None:
        """One of them, or the CPU time."""
        if name != CPU_TIME:
            return self.figures.get(name)
        user, system = self.figures.get("user_s"), self.figures.get("system_s")
        return None if user is None or system is None else user + system


@dataclass
class Side:
    """One allocator's runs of one case, the warm-up left out."""

    label: str
    runs: list[Run] = field(default_factory=list)
    failure: str | None = None
    """What went wrong, first of all; the allocator was not run in this case any more."""
    failed_round: int | None = None
    n: int = 0
    """The number of runs, in a file."""
    medians: dict[str, float | None] = field(default_factory=dict)
    """By figure, those that were asked for."""

    def values(self, figure: str) -> list[float | None]:
        """One figure of every run."""
        return [run.figure(figure) for run in self.runs]

    @property
    def rounds(self) -> int:
        """The number of runs."""
        return len(self.runs) or self.n

    def median(self, figure: str) -> float | None:
        """The median of the runs that have the figure."""
        if self.runs:
            self.medians[figure] = median(self.values(figure))
        return self.medians.get(figure)

    def all_medians(self) -> dict[str, float | None]:
        """Of all figures."""
        for name in dict.fromkeys(name for run in self.runs for name in run.figures):
            self.median(name)
        return self.medians


@dataclass
class Row:
    """One case under every allocator."""

    name: str
    family: str
    metric: Metric | None
    command: list[str]
    client: list[str]
    environment: dict[str, str]
    sides: list[Side]
    ratios: dict[str, Ratio] = field(default_factory=dict)
    """Of its sides' figures to others', those that were asked for."""
    to_best: dict[str, dict[str, Ratio]] = field(default_factory=dict)
    """By measure, each allocator that finished to the best of them."""
    spans: dict[str, Span | None] = field(default_factory=dict)
    """By measure, how far they are apart."""
    curves: dict[str, list[float]] = field(default_factory=dict)
    """Of a row that no program is run for."""

    def ratio(
        self,
        figure: str,
        labels: tuple[str, str],
        rounds: tuple[Sequence[float], Sequence[float]],
        to: Row | None = None,
    ) -> Ratio:
        """Of one allocator's median to another's, which may be of another row; both in the same rounds."""
        name = f"{figure}: {' to '.join(labels)}" + (f" of {to.name}" if to and to is not self else "")
        if self.has_runs:
            self.ratios[name] = ratio_of_medians(*rounds)
        return self.ratios.get(name, _UNKNOWN)

    @property
    def has_runs(self) -> bool:
        """Whether there is more than what was taken from them before."""
        return any(side.runs for side in self.sides)

    def side(self, label: str) -> Side | None:
        """One allocator's part."""
        return next((side for side in self.sides if side.label == label), None)


@dataclass
class Subject:
    """An allocator that took part: what it was, and where from."""

    label: str
    library: str | None = None
    version: str | None = None
    package: str | None = None
    package_version: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


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
    means: dict[str, Ratio] = field(default_factory=dict)
    """Geometric means of ratios, over rows: those that were asked for."""

    @property
    def labels(self) -> list[str]:
        """The allocators' names, in the order asked for."""
        return [each.label for each in self.allocators]

    @property
    def failures(self) -> list[tuple[Row, Side]]:
        """Every pair that failed."""
        return [(row, side) for row in self.rows for side in row.sides if side.failure]

    def mean(self, name: str, rows: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Ratio:
        """The geometric mean, over rows, of ratios of medians; each row has both sides' same rounds."""
        if any(row.has_runs for row in self.rows):
            self.means[name] = geometric_mean_of_ratios(rows)
        return self.means.get(name, _UNKNOWN)


def dump(results: Results, hidden: Mapping[str, str], analysis: Mapping[str, object] | None = None) -> str:
    """The file's text; folders of this machine are named by what they stand for ("." is left out)."""
    for row in results.rows:
        for side in row.sides:
            side.n = side.rounds
    data = {"format": FORMAT, "tool": "calm bench", **asdict(results, dict_factory=_fields)}
    for row in data["rows"]:
        # By figure, one for each side: names are longer than numbers.
        medians = [side.pop("medians") for side in row["sides"]]
        names = dict.fromkeys(name for found in medians for name in found)
        for side in row["sides"]:
            if side["n"] == results.rounds:
                del side["n"]
        row["medians"] = {name: [found.get(name) for found in medians] for name in names}
    if analysis is not None:
        data["analysis"] = analysis
    return json.dumps(_replaced(data, hidden), indent=1) + "\n"


def _fields(pairs: Sequence[tuple[str, Any]]) -> Any:  # noqa: ANN401
    """What a dataclass is in the file: an object, or a list where there are very many."""
    found = dict(pairs)
    is_list = any(found.keys() == kind.__dataclass_fields__.keys() for kind in (Ratio, Metric))
    return list(found.values()) if is_list else found


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


def _row(data: Mapping[str, Any], rounds: int) -> Row:
    data = {**_EMPTY_ROW, **data}
    metric = Metric(*data["metric"]) if data["metric"] else None
    command = data["command"]
    medians = [
        {name: column[number] for name, column in data["medians"].items()}
        for number in range(len(data["sides"]))
    ]
    return _take(
        Row,
        data,
        metric=metric,
        command=shlex.split(command) if isinstance(command, str) else command,
        sides=[
            _side({"n": rounds} | side, found) for side, found in zip(data["sides"], medians, strict=True)
        ],
        ratios=_ratios(data.get("ratios", {})),
        to_best={key: _ratios(found) for key, found in data.get("to_best", {}).items()},
        spans={key: _take(Span, span) if span else None for key, span in data.get("spans", {}).items()},
    )


def _side(data: Mapping[str, Any], medians: dict[str, float | None]) -> Side:
    return _take(Side, data, runs=[_take(Run, run) for run in data.get("runs", ())], medians=medians)


def _ratios(data: Mapping[str, Any]) -> dict[str, Ratio]:
    return {name: Ratio(*each) for name, each in data.items()}


def _checked(results: Results) -> Results:
    labels = set(results.labels)
    if not all(isinstance(line, str) for lines in results.said.values() for line in lines):
        raise ValueError("what an allocator said is no text")
    for row in results.rows:
        if {side.label for side in row.sides} - labels:
            raise ValueError(f"{row.name} has an allocator that is not listed")
        for side in row.sides:
            for figures in (side.medians, *(run.figures for run in side.runs)):
                if not all(value is None or isinstance(value, (int, float)) for value in figures.values()):
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
                {**_EMPTY, **data},
                allocators=[_take(Subject, each) for each in data["allocators"]],
                rows=[_row(row, data["rounds"]) for row in data["rows"]],
                means=_ratios(data.get("means", {})),
            )
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CalmError(f"{path} is not a whole file of results: {error}", USAGE) from error


def known(values: Sequence[float | None]) -> list[float]:
    """Those that could be had."""
    return [value for value in values if value is not None]
