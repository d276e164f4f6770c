"""`calm compare`: one program under several allocators, in interleaved rounds."""

import csv
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from calm import (
    __version__,
    allocators,
    baseline,
    environment,
    machine,
    options,
    plot,
    program,
    report,
    said,
    stat,
)
from calm.allocators import Allocator
from calm.baseline import Baseline, Outcome
from calm.errors import USAGE, CalmError
from calm.measure import (
    HARDWARE_GROUP,
    METRIC,
    METRICS,
    SYSCALL_GROUP,
    TLB_GROUP,
    Measurement,
    Metric,
    counts,
    how,
    measure,
)
from calm.statistics import CONFIDENCE, RESAMPLES, SEED, Ratio, median, ratio_of_medians

if TYPE_CHECKING:
    from rich.table import Table

# Kept out of the table, where it would be a detail: the JSON has them.
_DETAILS = {"interrupts_received", "instructions", "process_madvise", "mremap", "membarrier"}


@dataclass
class Side:
    """One allocator's runs, the warm-up left out."""

    allocator: Allocator
    runs: list[Measurement] = field(default_factory=list)
    failure: str | None = None

    @property
    def label(self) -> str:
        """The allocator's name."""
        return self.allocator.label


@dataclass
class Comparison:
    """Everything that is known when the runs are over, or were stopped."""

    command: tuple[str, ...]
    wanted: int
    sides: list[Side]
    broadcast: machine.Broadcast | None
    interrupted_by: int | None = None
    said: dict[str, list[str]] = field(default_factory=dict)
    """By allocator, what calmalloc itself had to say."""

    def values(self, side: Side, metric: Metric) -> list[float | None]:
        """One figure of every run."""
        return [counts(run, metric, self.broadcast) for run in side.runs]

    def ratio(self, side: Side, metric: Metric) -> Ratio | None:
        """To the first allocator, over the rounds that have a figure for both; None for the first itself."""
        if side is self.sides[0]:
            return None
        both = zip(self.values(side, metric), self.values(self.sides[0], metric), strict=False)
        pairs = [(value, base) for value, base in both if value is not None and base is not None]
        return ratio_of_medians([value for value, _ in pairs], [base for _, base in pairs])

    def explain(self, metric: Metric) -> str:
        """How the figure was counted, or why it was not."""
        runs = [run for side in self.sides for run in side.runs]
        known = [run for run in runs if counts(run, metric, self.broadcast) is not None]
        return how(metric, (known or runs)[-1], self.broadcast)


def _fail(side: Side, command: Sequence[str], failure: str) -> None:
    side.failure = failure
    click.echo(f"calm: {side.allocator.label}: {shlex.join(command)}: {failure}", err=True)


def _run_once(comparison: Comparison, side: Side, groups: Sequence[str], show_output: bool) -> Measurement:
    """Runs the program; a failure of it is noted at its side."""
    command = comparison.command
    with tempfile.TemporaryFile() as errors:
        run = measure(
            command,
            side.allocator.variables(os.environ),
            groups=groups,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if show_output else subprocess.DEVNULL,
            stderr=None if show_output else errors,
        )
        if run.interrupted_by is None and run.failure:
            _fail(side, command, run.failure + report.last_words(errors))
        # With its output let through, nothing is in there, and the line has been seen.
        said.listen(comparison.said, side.label, errors)
        return run


def run_rounds(comparison: Comparison, groups: Sequence[str], show_output: bool) -> None:
    """A B C A B C …; the first round warms up. A round that was stopped in its middle is dropped whole."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    # Without a thread of its own, which would take CPU time from what is measured.
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=report.console(sys.stderr),
        auto_refresh=False,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    rounds = comparison.wanted + 1
    with progress:
        task = progress.add_task("warm-up", total=rounds * len(comparison.sides))
        try:
            for number in range(rounds):
                finished: list[tuple[Side, Measurement]] = []
                for side in comparison.sides:
                    if side.failure is None:
                        what = f"round {number} of {comparison.wanted}" if number else "warm-up"
                        progress.update(task, description=f"{what}: {side.allocator.label}")
                        progress.refresh()
                        try:
                            run = _run_once(comparison, side, groups, show_output)
                        except CalmError as error:
                            # At first it is an error like any other; later there are results to keep.
                            if number == 0:
                                raise
                            _fail(side, comparison.command, str(error))
                            continue
                        if run.interrupted_by is not None:
                            comparison.interrupted_by = run.interrupted_by
                            return
                        if side.failure is None:
                            finished.append((side, run))
                    progress.advance(task)
                progress.refresh()
                if not finished:
                    return
                if number > 0:
                    for side, run in finished:
                        side.runs.append(run)
        except KeyboardInterrupt:
            comparison.interrupted_by = signal.SIGINT


def _table(comparison: Comparison, metrics: list[Metric]) -> "Table":
    table = report.table()
    table.add_column("", no_wrap=True)
    table.add_column("allocator", no_wrap=True)
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column(f"{CONFIDENCE:.0%} interval", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    for metric in metrics:
        label = metric.label
        for side in comparison.sides:
            middle = median(comparison.values(side, metric))
            base = side is comparison.sides[0]
            ratio, interval = ("1", "") if base else report.ratio(comparison.ratio(side, metric))
            cells = [
                side.allocator.label,
                report.figure(middle, metric.unit),
                ratio,
                interval,
                str(len(side.runs)),
            ]
            table.add_row(label, *cells, end_section=side is comparison.sides[-1])
            label = ""
        table.add_row()
    return table


def _print(comparison: Comparison, file: IO[str]) -> None:
    console = report.console(file)  # type: ignore[arg-type]
    runs = [run for side in comparison.sides for run in side.runs]
    exact = all(run.counters["interrupts_sent"].value is not None for run in runs)
    hidden = _DETAILS | ({"system_wide_tlb_interrupts"} if exact else set())
    metrics: list[Metric] = []
    absent: list[Metric] = []
    for metric in METRICS:
        if metric.key not in hidden:
            known = any(
                value is not None for side in comparison.sides for value in comparison.values(side, metric)
            )
            (metrics if known else absent).append(metric)
    console.print(shlex.join(comparison.command), style="bold", soft_wrap=True)
    report.print_table(console, _table(comparison, metrics))
    counted = [metric for metric in metrics if "tlb" in metric.how.lower()]
    for metric in [*counted, *absent]:
        explanation = comparison.explain(metric)
        if explanation != "not counted: not asked for":
            console.print(f"{metric.label}: {explanation}", style="dim", soft_wrap=True)
    if comparison.broadcast:
        console.print(f"note: {comparison.broadcast.note}", soft_wrap=True)
    for line in said.notes(comparison.said):
        console.print(f"note: {line}", soft_wrap=True)
    done = max(len(side.runs) for side in comparison.sides)
    few = "; with so few rounds the intervals are too narrow" if 1 < done < 5 else ""
    console.print(
        f"{done} interleaved rounds after one of warm-up; intervals: bootstrap of the rounds, "
        f"{RESAMPLES:,} draws, seed {SEED}{few}",
        soft_wrap=True,
    )
    for line in stat.own_cost(runs):
        console.print(f"cost of measuring, all runs: {line}", soft_wrap=True)


def hold_against(
    comparison: Comparison, before: Baseline | None, metrics: Sequence[Metric], limit: float | None
) -> Outcome:
    """Each allocator's figures against the same one's in the file, or without one against the first's."""
    first, *others = comparison.sides
    checks = []
    for metric in metrics:
        for side in comparison.sides if before else others:
            if side.failure or not side.runs or (before and side.label not in before.sides):
                continue
            base = before.values(side.label, metric) if before else comparison.values(first, metric)
            checks.append(
                baseline.check(
                    side.label,
                    metric,
                    comparison.values(side, metric),
                    base,
                    limit or 0.0,
                    paired=before is None,
                )
            )
    return Outcome(tuple(checks), limit, before.path if before else first.label)


def as_json(comparison: Comparison, outcome: Outcome | None = None) -> dict[str, Any]:
    """Everything, each run included."""
    has_runs = any(side.runs for side in comparison.sides)
    sides = []
    for side in comparison.sides:
        ratios = {metric.key: comparison.ratio(side, metric) for metric in METRICS}
        sides.append(
            {
                "label": side.allocator.label,
                "library": str(side.allocator.library) if side.allocator.library else None,
                "environment": dict(side.allocator.environment),
                "failure": side.failure,
                "said": comparison.said.get(side.label, []),
                "n": len(side.runs),
                "median": {metric.key: median(comparison.values(side, metric)) for metric in METRICS},
                "ratio": {key: vars(ratio) for key, ratio in ratios.items() if ratio is not None},
                "runs": [run.as_dict() for run in side.runs],
            }
        )
    return {
        "tool": baseline.TOOL,
        "format": baseline.FORMAT,
        "calm": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "command": list(comparison.command),
        "rounds_wanted": comparison.wanted,
        "interrupted": comparison.interrupted_by is not None,
        "baseline": comparison.sides[0].allocator.label,
        "confidence": CONFIDENCE,
        "resamples": RESAMPLES,
        "seed": SEED,
        "notes": [comparison.broadcast.note] if comparison.broadcast else [],
        "how": {metric.key: comparison.explain(metric) for metric in METRICS} if has_runs else {},
        "allocators": sides,
    } | ({"regression": outcome.as_dict()} if outcome else {})


def as_csv(comparison: Comparison) -> str:
    """One row for each run, so that any tool can take it from there; empty where nothing was counted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["round", "allocator", *METRIC])
    for number in range(max(len(side.runs) for side in comparison.sides)):
        for side in comparison.sides:
            if number < len(side.runs):
                figures = [counts(side.runs[number], metric, comparison.broadcast) for metric in METRICS]
                writer.writerow([number + 1, side.allocator.label, *figures])
    return out.getvalue()


def _warn(sides: Sequence[Side], command: Sequence[str]) -> None:
    if any(side.allocator.library for side in sides) and (obstacle := program.preload_obstacle(command)):
        click.echo(f"calm: {obstacle}", err=True)
    if existing := os.environ.get("LD_PRELOAD"):
        click.echo(f"calm: LD_PRELOAD={existing} is set, and stays so under every allocator", err=True)


def _open_baseline(path: str, sides: Sequence[Side], cmd: Sequence[str], any_command: bool) -> Baseline:
    """Reads it, and says before the first run what cannot be compared with it."""
    before = baseline.load(path)
    if not any_command and not baseline.same_command(before.command, cmd):
        raise CalmError(
            f"{path} is of another command ({shlex.join(before.command)}): write a new one with --json, or "
            "compare all the same with --any-command",
            USAGE,
        )
    there = [side for side in sides if side.label in before.sides]
    names = ", ".join(before.sides)
    if not there:
        raise CalmError(f"{path} has none of these allocators: it has {names}", USAGE)
    for side in sides:
        if side not in there:
            click.echo(f"calm: {side.label} is not in {path}, which has {names}: not compared", err=True)
        elif failure := before.sides[side.label].failure:
            click.echo(f"calm: {side.label} failed in {path}: {failure}", err=True)
    if before.machine is None:
        click.echo(f"calm: {path} does not say which machine it is from", err=True)
    elif differing := baseline.differences(before.machine, machine.describe()):
        click.echo(
            f"calm: {path} is from another machine, or from before it changed: {'; '.join(differing)}. What "
            "differs may be the machine's doing",
            err=True,
        )
    return before


def _warn_of_load() -> None:
    """Intervals are about the runs' spread: what slows all runs of a day is not in them."""
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cpus / 2:
        click.echo(
            f"calm: the load average is {load:.1f} on {cpus} CPUs: what else runs here would count as a "
            "change",
            err=True,
        )


def _tell(outcome: Outcome, comparison: Comparison, file: IO[str]) -> None:
    """The table, and the line that a log is searched for."""
    console = report.console(file)  # type: ignore[arg-type]
    console.print(f"\nagainst {outcome.against}:", style="bold", soft_wrap=True)
    report.print_table(console, outcome.table())
    for metric in outcome.never_compared:
        console.print(f"{metric.label}: {comparison.explain(metric)}", style="dim", soft_wrap=True)
    console.print(outcome.summary(), style="bold", soft_wrap=True)


def _check_gate(
    limit: float | None,
    metrics: Sequence[Metric] | None,
    baseline_path: str | None,
    any_command: bool,
    syscalls: bool,
    sides: Sequence[Side],
) -> None:
    """Options that say nothing without others."""
    if metrics is not None and limit is None and baseline_path is None:
        raise CalmError("--fail-on says nothing without --fail-over or --baseline", USAGE)
    if any_command and baseline_path is None:
        raise CalmError("--any-command says nothing without --baseline", USAGE)
    if limit is not None and baseline_path is None and len(sides) < 2:
        raise CalmError(
            "--fail-over needs --baseline, or a second allocator to hold against the first", USAGE
        )
    if (traced := baseline.needs_syscalls(metrics or ())) and not syscalls:
        raise CalmError(f"--fail-on {','.join(traced)}: counted only with --syscalls", USAGE)


def _exit_code(comparison: Comparison, outcome: Outcome | None, asked: bool) -> int:
    if comparison.interrupted_by is not None:
        return 128 + comparison.interrupted_by
    if any(side.failure for side in comparison.sides):
        return 1
    if outcome and outcome.failed:
        return baseline.WORSE_EXIT
    # Whoever names a metric wants to hear that it was not looked at; a default one may be missing.
    if outcome and outcome.limit is not None and asked and outcome.never_compared:
        names = ", ".join(metric.key for metric in outcome.never_compared)
        click.echo(f"calm: --fail-on {names}: could not be compared", err=True)
        return 1
    return 0


def _lost(before: Baseline, comparison: Comparison, outcome: Outcome | None) -> list[str]:
    """What the baseline has and this run has not."""
    here = {side.label for side in comparison.sides}
    lost = [label for label in before.sides if label not in here]
    checks = outcome.checks if outcome else ()
    return lost + [
        f"{each.metric.label} of {each.label}"
        for each in checks
        if each.verdict is baseline.Verdict.UNKNOWN and each.base is not None
    ]


def _why_kept(
    path: str, before: Baseline | None, comparison: Comparison, outcome: Outcome | None, code: int
) -> str | None:
    """A baseline is not overwritten by what is worse, or not whole: the next run would then pass."""
    if before is None or path == "-" or not Path(path).exists() or not Path(path).samefile(before.path):
        return None
    if code:
        return "only a run that passes replaces its baseline"
    # Without a limit nothing fails, and this is worse all the same.
    if outcome and outcome.worse:
        worse = [f"{each.metric.label} of {each.label}" for each in outcome.worse]
        return f"{', '.join(worse)} {'is' if len(worse) == 1 else 'are'} worse"
    lost = _lost(before, comparison, outcome)
    return f"this run has no {', no '.join(lost)}" if lost else None


_EPILOG = """\b
Examples:
  calm compare -a glibc,calmalloc -n 20 -- ./server --self-test
  calm compare -a glibc,calmalloc --json base.json -- ./server --self-test
  calm compare -a glibc,calmalloc --baseline base.json --fail-over 5% -- ./server --self-test
"""


@click.command("compare", context_settings={"allow_interspersed_args": False}, epilog=_EPILOG)
@options.allocator_list(
    "Allocators, the first being the one that ratios are to. Each is a name (see `calm allocators`), a "
    "path/to/library.so or LABEL=path/to/library.so, with :VARIABLE=VALUE[;VARIABLE=VALUE…] behind it if so "
    "wished. May be given several times.",
    required=True,
)
@click.option(
    "-n", "repeat", type=click.IntRange(min=1), default=10, show_default=True, help="Rounds that count."
)
@click.option("--syscalls", is_flag=True, help="Count memory calls too, which costs the program more.")
@options.json_file()
@click.option(
    "--csv",
    "csv_path",
    type=click.Path(),
    metavar="FILE",
    help="Write one row for each run as CSV; '-' is stdout.",
)
@click.option(
    "--plot", "plot_path", type=click.Path(), metavar="FILE.svg|png", help="Draw time, memory and shootdowns."
)
@click.option(
    "--baseline",
    "baseline_path",
    type=click.Path(dir_okay=True),
    metavar="FILE",
    help="Hold the figures against those that --json wrote to FILE before.",
)
@click.option(
    "--fail-over",
    "limit",
    callback=baseline.read_limit,
    metavar="LIMIT",
    help="End with 3 if a figure is worse by more than LIMIT (5% or 0.05) for certain: than in the baseline, "
    "or without one than the first allocator's.",
)
@click.option(
    "--fail-on",
    "fail_on",
    callback=baseline.read_metrics,
    shell_complete=baseline.complete_metrics,
    metavar="METRIC,…",
    help="Which figures. Default: time,rss,shootdowns; others by their names in the JSON.",
)
@click.option("--any-command", is_flag=True, help="Compare even if the baseline is of another command.")
@click.option("--show-output", is_flag=True, help="Let CMD's output through, to stderr; else it is dropped.")
@options.program()
def command(
    specs: tuple[str, ...],
    repeat: int,
    syscalls: bool,
    json_path: str | None,
    csv_path: str | None,
    plot_path: str | None,
    baseline_path: str | None,
    limit: float | None,
    fail_on: tuple[Metric, ...] | None,
    any_command: bool,
    show_output: bool,
    cmd: tuple[str, ...],
) -> None:
    """Compare CMD under several allocators, by interleaved rounds.

    The first round is discarded as warm-up, and Ctrl-C keeps the rounds that are complete.

    Exit codes: 1 if CMD failed under an allocator, or a figure named by --fail-on could not be compared; 2
    for bad usage, or a baseline that cannot be used; 3 if something is worse by more than --fail-over allows.
    """
    if plot_path and Path(plot_path).suffix not in plot.ENDINGS:
        raise CalmError(f"--plot {plot_path}: the name must end in {' or '.join(plot.ENDINGS)}", USAGE)
    if json_path == csv_path == "-":
        raise CalmError("only one of --json and --csv can go to standard output", USAGE)
    for path in (json_path, csv_path, plot_path):
        if path and path != "-":
            report.check_writable(path)
    sides = [Side(allocator) for allocator in allocators.parse_list(specs)]
    _check_gate(limit, fail_on, baseline_path, any_command, syscalls, sides)
    program.find(cmd[0])
    environment.tell(*(side.allocator.environment for side in sides))
    for side in sides:
        side.allocator.variables(os.environ)  # a variant that the environment contradicts is told of at once
    before = _open_baseline(baseline_path, sides, cmd, any_command) if baseline_path is not None else None
    _warn(sides, cmd)
    if before:
        _warn_of_load()
    comparison = Comparison(cmd, repeat, sides, machine.broadcast_here())
    groups = [TLB_GROUP, HARDWARE_GROUP] + ([SYSCALL_GROUP] if syscalls else [])
    run_rounds(comparison, groups, show_output)
    has_runs = any(side.runs for side in sides)
    if comparison.interrupted_by is not None:
        done = max(len(side.runs) for side in sides)
        click.echo(f"calm: stopped after {done} of {repeat} rounds", err=True)
    outcome = None
    if has_runs and (before or limit is not None):
        metrics = fail_on or tuple(METRIC[key] for key in baseline.DEFAULT_METRICS)
        outcome = hold_against(comparison, before, metrics, limit)
    code = _exit_code(comparison, outcome, asked=fail_on is not None)
    if has_runs:
        file = sys.stderr if "-" in (json_path, csv_path) else sys.stdout
        _print(comparison, file)
        if outcome:
            _tell(outcome, comparison, file)
    if json_path:
        text = json.dumps(as_json(comparison, outcome), indent=2) + "\n"
        if reason := _why_kept(json_path, before, comparison, outcome, code):
            click.echo(f"calm: {json_path} stays as it was: {reason}", err=True)
        else:
            report.write(json_path, text)
    if csv_path:
        report.write(csv_path, as_csv(comparison))
    if plot_path and has_runs:
        plot.draw(Path(plot_path), shlex.join(cmd), {side.allocator.label: side.runs for side in sides})
    raise SystemExit(code)
