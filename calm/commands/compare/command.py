"""`calm compare`: one program under several allocators, in interleaved rounds."""

import csv
import io
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from calm.commands.compare import baseline
from calm.core import allocators, comparison, options, report
from calm.core.comparison import ComparisonDocument
from calm.core.errors import FAILED, USAGE, WORSE, CalmError
from calm.core.measure import (
    HARDWARE_GROUP,
    METRIC,
    METRICS,
    SYSCALL_GROUP,
    SYSCALLS,
    TLB_GROUP,
    Metric,
    own_cost,
)
from calm.core.options import Output
from calm.core.plot import pyplot, save
from calm.core.statistics import RESAMPLES, SEED, median

if TYPE_CHECKING:
    from rich.console import Console

# The JSON has them, and the table does not.
_DETAILS = {"interrupts_received", "instructions", "process_madvise", "mremap", "membarrier"}


def _print(found: ComparisonDocument, console: "Console") -> None:
    exact = all(run.counters["interrupts"].value is not None for run in found.runs)
    hidden = _DETAILS | ({"interrupts_system_wide"} if exact else set())
    shown = [metric for metric in METRICS if metric.key not in hidden]
    known = [m for m in shown if any(side.median[m.key] is not None for side in found.allocators)]
    absent = [metric for metric in shown if metric not in known]
    console.print(shlex.join(found.command), style="bold")
    report.print_table(console, comparison.table(found.allocators, known))
    for metric in [*(metric for metric in known if "tlb" in metric.how.lower()), *absent]:
        if found.how[metric.key] != "not counted: not asked for":
            console.print(f"{metric.label}: {found.how[metric.key]}", style="dim")
    for note in found.notes:
        console.print(f"note: {note}")
    few = "; with so few rounds the intervals are too narrow" if 1 < found.complete_rounds < 5 else ""
    console.print(
        f"{found.complete_rounds} interleaved rounds after one of warm-up; intervals: bootstrap of the "
        f"rounds, {RESAMPLES:,} draws, seed {SEED}{few}"
    )
    for line in own_cost(found.runs):
        console.print(f"cost of measuring, all runs: {line}")


def _as_csv(found: ComparisonDocument) -> str:
    """One row for each run; empty where nothing was counted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["round", "allocator", *METRIC])
    for index in range(found.complete_rounds):
        for side in found.allocators:
            for run in side.runs[index : index + 1]:
                writer.writerow([index + 1, side.label, *(metric.get(run) for metric in METRICS)])
    return out.getvalue()


def _first_known(found: ComparisonDocument, *keys: str) -> Metric | None:
    """The first of these metrics that every run has."""
    for metric in (METRIC[key] for key in keys):
        sides = [side for side in found.allocators if side.runs]
        if all(value is not None for side in sides for value in side.values(metric)):
            return metric
    return None


def _draw(path: Path, found: ComparisonDocument) -> None:
    sides = [side for side in found.allocators if side.runs]
    # A machine has to provide the average; programs too short to sample have a peak only.
    memory = _first_known(found, "average_rss_kib") or METRIC["peak_rss_kib"]
    shootdowns = _first_known(found, "shootdowns", "interrupts_system_wide")
    figure, (plane, bars) = pyplot().subplots(
        1, 2, figsize=(11, 4.8), width_ratios=(3, 2), layout="constrained"
    )
    title = shlex.join(found.command)
    figure.suptitle(title if len(title) <= 100 else title[:99] + "…", fontsize=10)
    colors = [f"C{index % 10}" for index in range(len(sides))]
    for color, side in zip(colors, sides, strict=True):
        times = side.values(METRIC["wall_s"])
        sizes = [(kib or 0) / 1024 for kib in side.values(memory)]
        plane.scatter(times, sizes, s=14, color=color, alpha=0.35, linewidths=0)
        plane.scatter(
            [side.median["wall_s"]], [median(sizes)], s=90, color=color, edgecolors="black", label=side.label
        )
    plane.set(xlabel="wall time, s", ylabel=f"{memory.label}, MiB")
    plane.set_xlim(left=0)
    plane.set_ylim(bottom=0)
    plane.grid(alpha=0.3)
    plane.legend(fontsize=9, title="median (large), runs (small)", title_fontsize=8)
    if shootdowns:
        heights = [side.median[shootdowns.key] or 0 for side in sides]
        drawn = bars.barh([side.label for side in sides], heights, color=colors)
        bars.bar_label(drawn, labels=[f"{height:,.0f}" for height in heights], padding=3, fontsize=9)
        # From none to a hundred thousand on one axis.
        bars.set_xscale("symlog", linthresh=10)
        bars.set_xlim(0, 20 * max(10, *heights))
        bars.set(xlabel=shootdowns.label + " (median)")
        bars.invert_yaxis()
    else:
        bars.text(0.5, 0.5, "shootdowns were not counted", ha="center", va="center", transform=bars.transAxes)
        bars.set_axis_off()
    save(figure, path)


_EPILOG = """\b
Examples:
  calm compare -a glibc,calmalloc -n 20 -- ./server --self-test
  calm compare -a glibc,calmalloc --json base.json -- ./server --self-test
  calm compare -a glibc,calmalloc --baseline base.json --fail-over 5% -- ./server --self-test
"""


@click.command("compare", context_settings={"allow_interspersed_args": False}, epilog=_EPILOG)
@options.allocator_list(
    "Allocators; ratios are to the first. Each is a name (see `calm allocators`), a path/to/library.so or "
    "LABEL=path/to/library.so, optionally followed by :VARIABLE=VALUE[;VARIABLE=VALUE…]. May be given "
    "several times.",
    required=True,
)
@options.rounds(10, "Rounds that count.")
@click.option("--syscalls", is_flag=True, help="Count memory calls too, which costs the program more.")
@options.document("csv", "Write one row for each run as CSV to FILE, or to standard output without one.")
@options.plot("Draw time, memory and shootdowns.")
@options.output()
@click.option(
    "--baseline",
    "baseline_path",
    type=click.Path(),
    metavar="FILE",
    help="Compare with the figures that --json wrote to FILE before.",
)
@click.option(
    "--fail-over",
    "limit",
    type=baseline.read_limit,
    metavar="LIMIT",
    help="End with 3 if a figure is worse for certain by more than LIMIT (5% or 0.05): than in the baseline, "
    "or without one than the first allocator's.",
)
@click.option(
    "--fail-on",
    "fail_on",
    type=baseline.read_metrics,
    shell_complete=baseline.complete_metrics,
    metavar="METRIC,…",
    help="The figures to check, by their names in the JSON; `time` and `rss` are short for wall_s and "
    "peak_rss_kib. Default: time,rss,shootdowns.",
)
@click.option("--any-command", is_flag=True, help="Compare even if the baseline is of another command.")
@click.option("--show-output", is_flag=True, help="Pass CMD's output to standard error; else it is dropped.")
@options.program()
def command(
    specs: tuple[str, ...],
    rounds: int,
    syscalls: bool,
    csv_path: str | None,
    plot_path: Path | None,
    output: Output,
    baseline_path: str | None,
    limit: float | None,
    fail_on: tuple[Metric, ...] | None,
    any_command: bool,
    show_output: bool,
    cmd: tuple[str, ...],
) -> None:
    """Compare CMD under several allocators, by interleaved rounds.

    The first round is discarded as warm-up, and Ctrl-C keeps the rounds that are complete.

    The exit status is 1 if CMD failed under an allocator, or a figure named by --fail-on could not be
    compared; 3 if a figure is worse by more than --fail-over allows.
    """
    if output.json_on_stdout and csv_path == "-":
        raise CalmError("only one of --json and --csv can go to standard output", USAGE)
    output = replace(output, stdout_is_taken=csv_path == "-")
    chosen = allocators.parse_list(specs)
    if fail_on is not None and limit is None and baseline_path is None:
        raise CalmError("--fail-on has no effect without --fail-over or --baseline", USAGE)
    if any_command and baseline_path is None:
        raise CalmError("--any-command has no effect without --baseline", USAGE)
    if limit is not None and baseline_path is None and len(chosen) < 2:
        raise CalmError(
            "--fail-over needs --baseline, or a second allocator to compare with the first", USAGE
        )
    traced = [metric.key for metric in fail_on or () if metric.key in SYSCALLS]
    if traced and not syscalls:
        raise CalmError(f"--fail-on {','.join(traced)}: counted only with --syscalls", USAGE)
    comparison.warn(cmd, chosen)
    labels = [allocator.label for allocator in chosen]
    before = baseline.read(baseline_path, labels, cmd, any_command) if baseline_path is not None else None
    groups = [TLB_GROUP, HARDWARE_GROUP] + ([SYSCALL_GROUP] if syscalls else [])
    found, code = comparison.run(cmd, chosen, rounds, groups, show_output=show_output)
    if found.runs and (before or limit is not None):
        metrics = fail_on or tuple(METRIC[key] for key in baseline.DEFAULT_METRICS)
        found.regression = baseline.compare(found, baseline_path, before, metrics, limit)
        if not code and found.regression.failed:
            code = WORSE
        # A metric named by the user must be compared; a default one may be missing.
        if not code and limit is not None and fail_on and (missing := found.regression.never_compared):
            names = ", ".join(metric.key for metric in missing)
            report.warn(f"--fail-on {names}: could not be compared")
            code = FAILED
    if found.runs:
        with output.console() as console:
            _print(found, console)
            if found.regression:
                baseline.print_checks(found, found.regression, console)
    target = Path(output.json_path or "")
    replaced = before and baseline_path and target.is_file() and target.samefile(baseline_path)
    if before and replaced and (reason := baseline.why_kept(before, found, code)):
        report.warn(f"{output.json_path} stays as it was: {reason}")
    else:
        output.write(found)
    if csv_path:
        report.write(csv_path, _as_csv(found))
    if plot_path and found.runs:
        _draw(plot_path, found)
    raise SystemExit(code)
