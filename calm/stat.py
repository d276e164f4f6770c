"""`calm stat`: what one program costs."""

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from calm import environment, machine, options, report
from calm.errors import CalmError
from calm.measure import METRICS, Measurement, Metric, counts, how, measure, signal_name
from calm.statistics import median

if TYPE_CHECKING:
    from rich.table import Table


def shown(sample: Measurement) -> list[Metric]:
    """The metrics worth a row. The system-wide count would only confuse beside an exact one."""
    exact = sample.counters["interrupts_sent"].value is not None
    return [metric for metric in METRICS if not (exact and metric.key == "system_wide_tlb_interrupts")]


def own_cost(runs: list[Measurement]) -> list[str]:
    """What measuring cost, in sentences."""
    wall = sum(run.wall_s for run in runs)
    cpu = sum(run.own.cpu_s for run in runs)
    samples = sum(run.samples for run in runs)
    lines = [
        f"the probe used {report.duration(cpu)} of CPU time ({report.share(cpu, wall)} of the wall time) "
        f"for {samples:,} samples of memory"
    ]
    tracing = [run.tracing_s for run in runs if run.tracing_s is not None]
    if tracing:
        own = runs[-1].own
        each = [
            f"{ns:.0f} ns {what}"
            for ns, what in (
                (own.counted_call_ns, "a counted call"),
                (own.other_call_ns, "any other system call (of unknown number, so not in the sum)"),
                (own.flush_ns, "a TLB flush"),
                (own.task_ns, "a thread or process started"),
            )
            if ns is not None
        ]
        lines.append(
            f"counting took at most {report.duration(sum(tracing))} from the program's threads "
            f"({report.share(sum(tracing), wall)} of the wall time): {', '.join(each)}; "
            f"{sum(run.own.system_wide_tasks_started for run in runs):,} of the last, system-wide"
        )
    return lines


def _table(runs: list[Measurement], broadcast: machine.Broadcast | None) -> "Table":
    many = len(runs) > 1
    table = report.table(show_header=many)
    table.add_column("", no_wrap=True)
    table.add_column(f"median of {len(runs)}", justify="right", no_wrap=True)
    if many:
        table.add_column("least", justify="right", no_wrap=True)
        table.add_column("most", justify="right", no_wrap=True)
    table.add_column("how", style="dim")
    for metric in shown(runs[-1]):
        values = [counts(run, metric, broadcast) for run in runs]
        known = [value for value in values if value is not None]
        # The latest run that has the figure explains it, or else the latest says why there is none.
        explained = next(
            (run for run in reversed(runs) if counts(run, metric, broadcast) is not None), runs[-1]
        )
        row = [metric.label, report.figure(median(values), metric.unit)]
        if many:
            row += [report.figure(edge(known) if known else None, metric.unit) for edge in (min, max)]
        table.add_row(*row, how(metric, explained, broadcast))
    return table


def _as_json(
    command: tuple[str, ...], runs: list[Measurement], broadcast: machine.Broadcast | None
) -> dict[str, Any]:
    figures = {
        metric.key: {
            "label": metric.label,
            "unit": metric.unit,
            "median": median([counts(run, metric, broadcast) for run in runs]),
            "how": how(metric, runs[-1], broadcast),
        }
        for metric in METRICS
    }
    return {
        "command": list(command),
        "n": len(runs),
        "exit_code": _exit_code(runs),
        "figures": figures,
        "notes": [broadcast.note] if broadcast else [],
        "own_cost": own_cost(runs),
        "runs": [run.as_dict() for run in runs],
    }


def _exit_code(runs: list[Measurement]) -> int:
    """The first failure's, as it would be had nothing watched; a stopped repetition is a failure too."""
    if failed := next((run.exit_code for run in runs if run.exit_code), None):
        return failed
    stopped = runs[-1].interrupted_by
    return 128 + stopped if stopped is not None and len(runs) > 1 else 0


def _print(command: tuple[str, ...], runs: list[Measurement], broadcast: machine.Broadcast | None) -> None:
    # On standard error, so that the program's own output can still be piped.
    console = report.console(sys.stderr)
    console.print(f"\n{shlex.join(command)}", style="bold", soft_wrap=True)
    report.print_table(console, _table(runs, broadcast))
    if broadcast:
        console.print(f"note: {broadcast.note}", soft_wrap=True)
    for line in own_cost(runs):
        console.print(f"cost of measuring: {line}", soft_wrap=True)
    for run in runs:
        if run.signal is not None:
            console.print(f"the program was killed by {signal_name(run.signal)}")


@click.command(
    "stat",
    context_settings={"allow_interspersed_args": False},
    epilog="\b\nExamples:\n  calm stat -- sort -o /dev/null words\n"
    "  calm stat -n 5 --json -- ./program >stat.json",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on stdout; CMD's own output goes to stderr."
)
@click.option(
    "-n", "repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Runs; medians are shown."
)
@click.option(
    "-i",
    "--interval",
    type=click.IntRange(min=1, max=60_000),
    default=10,
    show_default=True,
    metavar="MS",
    help="Milliseconds between samples of the memory.",
)
@options.program()
def command(as_json: bool, repeat: int, interval: int, cmd: tuple[str, ...]) -> None:
    """Run CMD and report its time, memory, TLB shootdowns, memory calls and hardware counters."""
    environment.tell()
    broadcast = machine.broadcast_here()
    runs: list[Measurement] = []
    stdout = sys.stderr.fileno() if as_json else None
    for _ in range(repeat):
        try:
            runs.append(measure(cmd, interval_ms=interval, stdout=stdout))
        except CalmError:
            if not runs:
                raise
            break
        if runs[-1].interrupted_by is not None:
            break
    if as_json:
        click.echo(json.dumps(_as_json(cmd, runs, broadcast), indent=2))
    else:
        _print(cmd, runs, broadcast)
    sys.stdout.flush()
    raise SystemExit(_exit_code(runs))
