"""One command under several allocators, in interleaved rounds; and the JSON document of such a comparison."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec

from calm.core import environment, machine, messages, program, report, rounds
from calm.core.allocators import Allocator
from calm.core.documents import Document
from calm.core.errors import FAILED, CalmError
from calm.core.measure import METRIC, METRICS, Figure, Measurement, Metric, how, measure
from calm.core.progress import RoundsBar
from calm.core.rounds import Row, RunFailedError, Side, StoppedError
from calm.core.statistics import CONFIDENCE, RESAMPLES, SEED, Ratio, median, ratio_of_medians

if TYPE_CHECKING:
    from rich.table import Table


class Verdict(StrEnum):
    """The result of a check."""

    WORSE = "worse"
    UNCERTAIN = "not certain"
    WITHIN = "within the limit"
    BETTER = "better"
    UNKNOWN = "not compared"


class Check(msgspec.Struct, kw_only=True):
    """One metric of one allocator, before and now."""

    label: str
    metric: str
    before: float | None
    now: float | None
    ratio: Ratio = Ratio(None, None, None, 0)
    verdict: Verdict = Verdict.UNKNOWN
    note: str = ""


class Regression(msgspec.Struct, kw_only=True):
    """All checks against a baseline, or against the first allocator."""

    against: str
    limit: float | None
    """The fraction of --fail-over; None: nothing is to fail."""
    checks: list[Check]
    failed: bool = False
    """Something is worse than the limit allows."""

    def __post_init__(self) -> None:
        self.failed = self.limit is not None and bool(self.worse)

    @property
    def worse(self) -> list[Check]:
        return [each for each in self.checks if each.verdict is Verdict.WORSE]

    @property
    def never_compared(self) -> list[Metric]:
        """Metrics that could be compared under no allocator."""
        known = {each.metric for each in self.checks if each.verdict is not Verdict.UNKNOWN}
        return [METRIC[key] for key in dict.fromkeys(each.metric for each in self.checks) if key not in known]


class AllocatorRuns(msgspec.Struct, kw_only=True):
    """The runs under one allocator, the warm-up left out."""

    label: str
    library: str | None
    environment: dict[str, str]
    failure: str | None
    median: dict[str, Figure | None]
    """By metric."""
    ratio: dict[str, Ratio]
    """By metric, to the first allocator."""
    runs: list[Measurement]

    def values(self, metric: Metric) -> list[float | None]:
        return [metric.get(run) for run in self.runs]


class ComparisonDocument(Document, kw_only=True, tag="calm-comparison"):
    """What `calm compare --json` writes."""

    machine: dict[str, str | int]
    command: Annotated[list[str], msgspec.Meta(min_length=1)]
    rounds: int
    """The number asked for."""
    interrupted_by: int | None
    """The signal that ended the runs early."""
    confidence: float = CONFIDENCE
    resamples: int = RESAMPLES
    seed: int = SEED
    notes: list[str]
    how: dict[str, str]
    """By metric, how it was counted, or why it was not."""
    allocators: list[AllocatorRuns]
    regression: Regression | None = None

    @property
    def runs(self) -> list[Measurement]:
        return [run for side in self.allocators for run in side.runs]

    @property
    def complete_rounds(self) -> int:
        return max((len(side.runs) for side in self.allocators), default=0)

    def side(self, label: str) -> AllocatorRuns | None:
        return next((side for side in self.allocators if side.label == label), None)


def warn(command: Sequence[str], allocators: Sequence[Allocator]) -> None:
    """Before the first run: raises CalmError for what cannot be run, and warns of what has no effect."""
    program.find(command[0])
    environment.tell(*(allocator.environment for allocator in allocators))
    for allocator in allocators:
        allocator.variables(os.environ)  # raises CalmError where the environment contradicts a variant
    if any(allocator.library for allocator in allocators) and (obstacle := program.preload_obstacle(command)):
        report.warn(obstacle)
    if existing := os.environ.get("LD_PRELOAD"):
        report.warn(f"LD_PRELOAD={existing} is set, and stays so under every allocator")


def run(
    command: Sequence[str],
    allocators: Sequence[Allocator],
    number_of_rounds: int,
    groups: Sequence[str],
    *,
    show_output: bool = False,
) -> tuple[ComparisonDocument, int]:
    """Runs the warm-up and the rounds; an interrupt or a failure keeps the rounds before it.

    Also returns the exit status of a command that does nothing else.
    """
    sides = [Side[Measurement](allocator.label) for allocator in allocators]
    by_label = {allocator.label: allocator for allocator in allocators}
    reported: dict[str, list[str]] = {}

    def once(_row: Row[Measurement], side: Side[Measurement], number: int) -> Measurement:
        with tempfile.TemporaryFile() as errors:
            try:
                run = measure(
                    command,
                    by_label[side.label].variables(os.environ),
                    groups=groups,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno() if show_output else subprocess.DEVNULL,
                    stderr=None if show_output else errors,
                )
            except CalmError as error:
                # In the warm-up nothing is lost yet, and the error ends the command like any other.
                if number == 0:
                    raise
                raise RunFailedError(str(error)) from error
            messages.listen(reported, side.label, errors)
            if run.interrupted_by is not None:
                raise StoppedError(run.interrupted_by)
            if run.failure:
                raise RunFailedError(run.failure + report.last_words(errors))
            return run

    with RoundsBar(lines=False) as bar:
        stopped_by = rounds.run([Row("", sides)], number_of_rounds, once, bar)
    if stopped_by is not None:
        # The report takes a moment; another Ctrl-C must not lose what was measured.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    broadcast = machine.broadcast_here()
    found = ComparisonDocument(
        machine=machine.describe(),
        command=list(command),
        rounds=number_of_rounds,
        interrupted_by=stopped_by,
        notes=([broadcast.note] if broadcast else []) + messages.notes(reported),
        how={},
        allocators=summarize(allocators, sides),
    )
    if found.runs:
        found.how = {metric.key: how(metric, *found.runs) for metric in METRICS}
    if stopped_by is not None:
        report.warn(f"stopped after {found.complete_rounds} of {number_of_rounds} rounds")
        return found, 128 + stopped_by
    return found, FAILED if any(side.failure for side in sides) else 0


def summarize(
    allocators: Sequence[Allocator], sides: Sequence[Side[Measurement]], metrics: Sequence[Metric] = METRICS
) -> list[AllocatorRuns]:
    """Medians and ratios to the first allocator of these metrics."""
    found = [
        AllocatorRuns(
            label=side.label,
            library=str(allocator.library) if allocator.library else None,
            environment=dict(allocator.environment),
            failure=side.failure,
            median={},
            ratio={},
            runs=[run for _, run in side.runs],
        )
        for allocator, side in zip(allocators, sides, strict=True)
    ]
    for side in found:
        for metric in metrics:
            values = side.values(metric)
            side.median[metric.key] = median(values)
            if side is not found[0]:
                # Over the rounds that have a figure for both.
                both = zip(values, found[0].values(metric), strict=False)
                pairs = [(value, base) for value, base in both if value is not None and base is not None]
                side.ratio[metric.key] = ratio_of_medians([v for v, _ in pairs], [base for _, base in pairs])
    return found


def table(sides: Sequence[AllocatorRuns], metrics: Sequence[Metric], *, values: bool = False) -> Table:
    """Medians and ratios by metric and allocator, with the number of runs, or five runs' figures."""
    headings = ("", "allocator", "median", "ratio", f"{CONFIDENCE:.0%} interval", "rounds" if values else "n")
    made = report.table(*headings, right=("median", "ratio", "n"))
    for metric in metrics:
        for index, side in enumerate(sides):
            figures = [report.figure(value, metric.unit) for value in side.values(metric)[:5]]
            made.add_row(
                "" if index else metric.label,
                side.label,
                report.figure(side.median[metric.key], metric.unit),
                *(report.ratio(side.ratio[metric.key]) if index else ("1" if figures else "-", "")),
                ", ".join(figures) if values else str(len(side.runs)),
            )
        made.add_row()
    return made
