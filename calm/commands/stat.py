"""`calm stat`: what one program costs."""

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click
import msgspec

from calm.core import environment, machine, options, report
from calm.core.documents import Document
from calm.core.errors import CalmError
from calm.core.measure import METRICS, Measurement, Metric, how, measure, own_cost, signal_name
from calm.core.options import Output
from calm.core.statistics import median

if TYPE_CHECKING:
    from rich.console import Console


class StatFigure(msgspec.Struct):
    """One figure over all runs."""

    label: str
    unit: str
    median: float | None
    min: float | None
    max: float | None
    how: str


class StatDocument(Document, kw_only=True, tag="calm-stat"):
    """What `calm stat --json` writes."""

    command: list[str]
    rounds: int
    exit_code: int
    figures: dict[str, StatFigure]
    notes: list[str]
    own_cost: list[str]
    """What measuring cost, in sentences."""
    runs: list[Measurement]


def _figure(metric: Metric, runs: list[Measurement]) -> StatFigure:
    known = [value for run in runs if (value := metric.get(run)) is not None]
    edges = min(known, default=None), max(known, default=None)
    return StatFigure(metric.label, metric.unit, median(known), *edges, how(metric, *runs))


def _exit_code(runs: list[Measurement], wanted: int) -> int:
    """The first failure's, as it would be without calm; a stopped repetition is a failure too."""
    if failed := next((run.exit_code for run in runs if run.exit_code), None):
        return failed
    stopped = runs[-1].interrupted_by
    return 128 + stopped if stopped is not None and wanted > 1 else 0


def _print(found: StatDocument, console: "Console") -> None:
    console.print(f"\n{shlex.join(found.command)}", style="bold")
    many = found.rounds > 1
    headings = (f"median of {found.rounds}", *(("min", "max") if many else ()))
    table = report.table("", *headings, "how", right=headings, wrap=("how",), show_header=many)
    table.columns[-1].style = "dim"
    for key, figure in found.figures.items():
        # Beside an exact count the system-wide one would only confuse.
        if key != "interrupts_system_wide" or found.figures["interrupts"].median is None:
            values = (figure.median, figure.min, figure.max)[: len(headings)]
            table.add_row(figure.label, *(report.figure(v, figure.unit) for v in values), figure.how)
    report.print_table(console, table)
    for note in found.notes:
        console.print(f"note: {note}")
    for line in found.own_cost:
        console.print(f"cost of measuring: {line}")
    for run in found.runs:
        if run.signal is not None:
            console.print(f"the program was killed by {signal_name(run.signal)}")
        elif run.code:
            console.print(f"the program ended with status {run.code}")


@click.command(
    "stat",
    context_settings={"allow_interspersed_args": False},
    epilog="\b\nExamples:\n  calm stat -- sort -o /dev/null words\n"
    "  calm stat -n 5 --json stat.json -- ./program",
)
@options.rounds(1, "Runs; medians are printed.")
@options.duration(
    "-i",
    "--interval",
    default="10ms",
    at_least="1ms",
    at_most="1min",
    text="Time between samples of the memory.",
)
@options.output()
@options.program()
def command(rounds: int, interval: float, output: Output, cmd: tuple[str, ...]) -> None:
    """Run CMD and report its time, memory, TLB shootdowns, memory calls and hardware counters.

    The report goes to standard error. With JSON on standard output, CMD's own output goes to standard error.
    """
    environment.tell()
    runs: list[Measurement] = []
    stdout = sys.stderr.fileno() if output.json_on_stdout else None
    for _ in range(rounds):
        try:
            runs.append(measure(cmd, interval_ms=round(interval * 1e3), stdout=stdout))
        except CalmError:
            if not runs:
                raise
            break
        if runs[-1].interrupted_by is not None:
            break
    notes = [broadcast.note] if (broadcast := machine.broadcast_here()) else []
    if len(runs) < rounds:
        notes.append(f"stopped after {len(runs)} of {rounds} runs")
    found = StatDocument(
        command=list(cmd),
        rounds=len(runs),
        exit_code=_exit_code(runs, rounds),
        figures={metric.key: _figure(metric, runs) for metric in METRICS},
        notes=notes,
        own_cost=own_cost(runs),
        runs=runs,
    )
    # The program's own output has standard output to itself, so that it can be piped.
    with replace(output, stdout_is_taken=True).console() as console:
        _print(found, console)
    output.write(found)
    sys.stdout.flush()
    raise SystemExit(found.exit_code)
