"""`calm calibrate`: the experiment of figure 1 of the Ptlbmalloc2 paper, on this machine."""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from calm import machine, measure, options, ranges, report, topology
from calm.bench import workloads
from calm.errors import USAGE, CalmError
from calm.predict import calibration, fit, messages
from calm.predict.calibration import Calibration
from calm.predict.fit import Residual, Sample
from calm.predict.model import LOCAL_CYCLES, OVERCOMMITTED, REMOTE, VIRTUAL
from calm.progress import Bar

if TYPE_CHECKING:
    from rich.table import Table

THREADS = (1, 2, 3, 4, 6, 8, 12, 16)
# As dear as these at first; each run's length then tells the next.
_FIRST_CALL_S, _FIRST_INTERRUPT_S = 600e-9, 5e-6
_GOAL = 0.15
# Others' programs on so much of a CPU let two threads rarely run at once.
_BUSY = 0.25
# An interval from a to more than so many times a says nothing that the published constants do not.
_VAGUE = 2.0


@dataclass(frozen=True)
class Point:
    """Threads on certain CPUs."""

    cpus: tuple[int, ...]
    sockets: int
    threads: int


@dataclass
class Experiment:
    """The runs, as far as they got."""

    points: Sequence[Point]
    rounds: int
    run_s: float
    samples: list[Sample] = field(default_factory=list)
    done: int = 0
    """Whole rounds."""
    reference_mhz: list[float] = field(default_factory=list)
    exact: bool = True
    busy_cpus: float = 0.0
    interrupted_by: int | None = None


def parse_numbers(text: str, most: int) -> list[int]:
    """1,2,4: each from 1."""
    try:
        found = sorted({int(piece) for piece in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1 or found[-1] > most:
        raise CalmError(
            f"{text!r} is not a list of numbers from 1 to {most}, with commas between them", USAGE
        )
    return found


def plan(sockets: Sequence[Sequence[int]], threads: Sequence[int]) -> list[Point]:
    """Figure 1a: 1, 2, 4 ... CPUs of one socket, up to the most threads. Figure 1b: over several sockets."""
    first, most = sockets[0], max(threads)
    sizes = [1 << bit for bit in range(len(first).bit_length()) if 1 << bit < min(most, len(first))]
    sizes.append(max(1, min(most, len(first))))
    points = [Point(tuple(first[:size]), 1, count) for size in dict.fromkeys(sizes) for count in threads]
    for number in range(2, len(sockets) + 1):
        each = max(1, min(most // number, *(len(cpus) for cpus in sockets[:number])))
        spread = tuple(cpu for cpus in sockets[:number] for cpu in cpus[:each])
        points += [Point(spread, number, count) for count in threads if count >= number]
    return points


@contextmanager
def _confined(cpus: Sequence[int]) -> Iterator[None]:
    """Only these CPUs, for this process and what it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _busy_s() -> float:
    """CPU seconds that the whole machine has worked, or had taken from it."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, interrupts, soft, steal = map(int, fields)
    return (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _calls(point: Point, seconds: float) -> int:
    """Calls of all threads that take about so long, at first."""
    spread = min(len(point.cpus), point.threads)
    return max(point.threads, int(seconds * spread / (_FIRST_CALL_S + (spread - 1) * _FIRST_INTERRUPT_S)))


def _run_once(experiment: Experiment, storm: str, point: Point, calls: int) -> measure.Measurement:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, _confined(point.cpus):
        run = measure.measure(
            [storm, "--threads", str(point.threads), "--calls", str(calls // point.threads)],
            groups=[measure.TLB_GROUP],
            # Its memory is of no interest.
            interval_ms=1000,
            stdout=output,
            stderr=errors,
            inherited={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        )
        if run.interrupted_by is not None:
            return run
        if run.failure:
            raise CalmError(f"madvise-storm: {run.failure}{report.last_words(errors)}")
        output.seek(0)
        if mhz := json.loads(output.read()).get("reference_mhz"):
            experiment.reference_mhz.append(float(mhz))
    return run


def _sample(run: measure.Measurement, number: int, point: Point, calls: int) -> tuple[Sample, bool]:
    """The run without what counting took from it; and whether its interrupts are its own."""
    own = run.counters["interrupts_sent"].value
    interrupts = own if own is not None else run.system_wide_tlb_interrupts
    if interrupts is None:
        raise CalmError("TLB interrupts cannot be counted here, not even by /proc/interrupts")
    tracing = run.tracing_s or 0.0
    cpu_s = max(run.user_s + run.system_s - tracing, 1e-6)
    wall_s = max(run.wall_s - tracing / min(len(point.cpus), point.threads), 1e-6)
    sample = Sample(number, len(point.cpus), point.sockets, point.threads, calls, interrupts, cpu_s, wall_s)
    return sample, own is not None


def run_rounds(experiment: Experiment, storm: str, bar: Bar) -> None:
    """Every point once, then every point again. A round that was stopped in its middle is dropped whole."""
    calls = {point: _calls(point, experiment.run_s) for point in experiment.points}
    began, busy, own = time.monotonic(), _busy_s(), _own_s()
    try:
        for number in range(experiment.rounds):
            finished = []
            for place, point in enumerate(experiment.points):
                what = f"round {number + 1}: threads {point.threads}, CPUs {len(point.cpus)}"
                bar.update(number * len(experiment.points) + place, what)
                each = calls[point] // point.threads * point.threads
                run = _run_once(experiment, storm, point, each)
                if run.interrupted_by is not None:
                    experiment.interrupted_by = run.interrupted_by
                    return
                sample, exact = _sample(run, number, point, each)
                experiment.exact &= exact
                finished.append(sample)
                # Where threads rarely meet, calls are cheap and a run is over before they do.
                if run.wall_s < experiment.run_s / 2:
                    calls[point] *= 2
                elif run.wall_s > experiment.run_s * 2:
                    calls[point] = max(point.threads, calls[point] // 2)
            experiment.samples += finished
            experiment.done += 1
            passed = time.monotonic() - began
            experiment.busy_cpus = max(0.0, (_busy_s() - busy - (_own_s() - own)) / passed)
    except KeyboardInterrupt:
        experiment.interrupted_by = signal.SIGINT


def analyse(
    experiment: Experiment, left_out: Sequence[int], broadcast: machine.Broadcast | None
) -> Calibration:
    """Fits all but what is held out, and looks at that."""
    training = [each for each in experiment.samples if each.threads not in left_out]
    costs = fit.fit(training)
    span = fit.interval(training)
    notes = []
    if not experiment.exact:
        notes.append(
            "interrupts were counted system-wide, from /proc/interrupts, all programs' (root, or "
            "kernel.perf_event_paranoid at -1 and a readable tracefs, counts the program's own)"
        )
    if experiment.busy_cpus > _BUSY:
        notes.append(
            f"other programs, or other virtual machines, used {experiment.busy_cpus:.1f} CPUs meanwhile: "
            "threads waited, so wall times are longer and interrupts fewer than on a quiet machine"
        )
    if broadcast:
        notes.append(broadcast.note)
    if costs.remote is None:
        notes.append(f"one socket: n = {REMOTE:g} is the published one, and could not be measured")
    return Calibration(
        machine=calibration.identity(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        rounds=experiment.done,
        costs=costs,
        local_low_ns=span[0] if span else None,
        local_high_ns=span[1] if span else None,
        reference_mhz=median(experiment.reference_mhz) if experiment.reference_mhz else None,
        exact=experiment.exact,
        busy_cpus=experiment.busy_cpus,
        residuals=fit.residuals(experiment.samples, costs, left_out, REMOTE),
        samples=experiment.samples,
        notes=notes,
        interrupted=experiment.interrupted_by is not None,
    )


def _table(rows: Sequence[Residual]) -> "Table":
    several = any(row.sockets > 1 for row in rows)
    table = report.table()
    headings = [
        "CPUs",
        "threads",
        "interrupts a call",
        "CPU time a call",
        "predicted",
        "wall time predicted",
        "",
    ]
    for heading in (["sockets"] if several else []) + headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        cells = [
            str(row.cpus),
            str(row.threads),
            f"{row.interrupts_per_call:.2f}",
            f"{row.cpu_ns_per_call:,.0f} ns",
            f"{row.cpu_error:+.1%}",
            f"{row.wall_error:+.1%}",
            "held out" if row.held_out else "",
        ]
        table.add_row(*([str(row.sockets)] if several else []), *cells)
    return table


def _cycles(ns: float, mhz: float | None) -> str:
    return f" ({ns * mhz * 1e-3:,.0f} reference cycles)" if mhz else ""


def summary(found: Calibration) -> list[str]:
    """The costs, in sentences."""
    costs, mhz = found.costs, found.reference_mhz
    between = ""
    if found.local_low_ns is not None and found.local_high_ns is not None:
        between = f", 95 % interval {found.local_low_ns:,.0f} to {found.local_high_ns:,.0f} ns"
    lines = [
        f"a, an interrupt within a socket: {costs.local_ns:,.0f} ns of CPU time{_cycles(costs.local_ns, mhz)}"
        f"{between}; published: {LOCAL_CYCLES:,.0f} cycles",
        f"C, a call: {costs.call_ns:,.0f} ns{_cycles(costs.call_ns, mhz)}; {costs.overlap_ns:,.0f} ns more "
        f"if another thread is within one, which each other is by a chance of {costs.overlap_chance:.0%}",
    ]
    if costs.remote is not None:
        lines.append(f"n, an interrupt to another socket: {costs.remote:.2f} times a; published: {REMOTE:g}")
    if mhz:
        lines.append(
            f"cycles are the CPU's reference cycles (TSC), {mhz:,.0f} MHz as measured, not the core's own"
        )
        if found.machine["virtual"]:
            lines.append(
                f"this is a virtual machine: a is {costs.local_ns * mhz * 1e-3 / LOCAL_CYCLES:.1f} times the "
                f"published native one; published for such: about {VIRTUAL:g} to {OVERCOMMITTED:g} times"
            )
    left_out = [row for row in found.residuals if row.held_out]
    if left_out:
        worst = max(left_out, key=lambda row: abs(row.cpu_error))
        within = "all within" if abs(worst.cpu_error) <= _GOAL else "not all within"
        lines.append(
            f"held out: CPU time {within} {_GOAL:.0%}; the worst is {worst.cpu_error:+.1%}, "
            f"{worst.threads} threads on {worst.cpus} CPU{'s' if worst.cpus > 1 else ''}"
        )
    else:
        lines.append(
            "held out: nothing; three numbers of threads or more let one be foretold from the others"
        )
    return lines


def vagueness(found: Calibration) -> str | None:
    """Why its interval is of no use; None where it is, and where too few rounds were wanted for one."""
    low, high = found.local_low_ns, found.local_high_ns
    if low is not None and high is not None:
        return f"an interrupt takes {low:,.0f} to {high:,.0f} ns" if high > _VAGUE * low else None
    few = found.rounds < fit.INTERVAL_ROUNDS_LEAST
    return None if few else "what an interrupt takes depends on which rounds are looked at"


def _print(found: Calibration, to_stderr: bool) -> None:
    console = report.console(sys.stderr if to_stderr else sys.stdout)
    console.print("madvise(MADV_DONTNEED) by all threads without end, medians of rounds", style="bold")
    report.print_table(console, _table(found.residuals))
    for line in summary(found):
        console.print(line, soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print(f"{found.rounds} interleaved rounds", soft_wrap=True)


def _calibrate_messages(json_path: str | None) -> None:
    given = click.get_current_context().get_parameter_source
    for name, option in (("threads", "--threads"), ("rounds", "-n"), ("seconds", "--seconds")):
        if given(name) == ParameterSource.COMMANDLINE:
            raise CalmError(f"{option} is about shootdowns: it does not go with --messages", USAGE)
    if json_path and json_path != "-":
        report.check_writable(json_path)
    found = messages.measure()
    messages.print_all(found, json_path == "-")
    if json_path:
        report.write(json_path, json.dumps(found.as_dict(), indent=1) + "\n")
        return
    messages.save(messages.default_path(), found)
    click.echo("kept for `calm predict --offload`")


@click.command(
    "calibrate",
    epilog="\b\nExamples:\n  calm calibrate\n  calm calibrate --threads 1,2,3,4,8 -n 9 --json here.json\n"
    "  calm calibrate --messages",
)
@click.option(
    "--threads",
    "threads",
    metavar="1,2,…",
    default=",".join(map(str, THREADS)),
    show_default=True,
    help="Numbers of threads. Every second one in between is held out, and foretold from the others.",
)
@click.option(
    "-n", "rounds", type=click.IntRange(min=1, max=1000), default=5, show_default=True, help="Rounds."
)
@click.option(
    "--seconds",
    type=ranges.FloatRange(min=0.01, max=60),
    default=0.2,
    show_default=True,
    help="About how long each run takes.",
)
@click.option(
    "--messages",
    "of_messages",
    is_flag=True,
    help="Measure messages between CPUs instead, for `calm predict --offload`. Takes a few seconds.",
)
@options.json_file(
    "Write everything as JSON there, and not to the cache that `calm predict` reads; '-' is stdout."
)
def command(threads: str, rounds: int, seconds: float, of_messages: bool, json_path: str | None) -> None:
    """Measure what a TLB shootdown costs on this machine, for `calm predict`; or a message between CPUs.

    Threads give a page back by madvise(MADV_DONTNEED), over and over, on different numbers of CPUs. From the
    interrupts and the CPU time the cost of each is fitted, and tried on runs that it was not fitted to.
    Run it on a quiet machine. It needs no root, but with root the count of interrupts is exact.
    """
    if of_messages:
        _calibrate_messages(json_path)
        return
    counts = parse_numbers(threads, 4096)
    if counts[0] != 1 or len(counts) < 2:
        raise CalmError(
            f"--threads {threads}: one thread, and some number of several, are needed to tell costs apart",
            USAGE,
        )
    if json_path and json_path != "-":
        report.check_writable(json_path)
    broadcast = machine.broadcast_here()
    if broadcast and broadcast.always:
        raise CalmError(f"{broadcast.note}, so there is nothing to calibrate")
    sockets = topology.sockets()
    if sum(map(len, sockets)) == 1:
        raise CalmError("one CPU sends no TLB interrupts, so there is nothing to calibrate")
    storm = str(workloads.find("madvise-storm"))
    experiment = Experiment(plan(sockets, counts), rounds, seconds)
    with Bar(rounds * len(experiment.points)) as bar:
        run_rounds(experiment, storm, bar)
    if experiment.interrupted_by is not None:
        click.echo(f"calm: stopped after {experiment.done} of {rounds} rounds; nothing is kept", err=True)
        if not experiment.done:
            raise SystemExit(128 + experiment.interrupted_by)
    try:
        found = analyse(experiment, fit.held_out(counts), broadcast)
    except CalmError as error:
        if experiment.interrupted_by is None:
            raise
        click.echo(f"calm: {error}", err=True)
        raise SystemExit(128 + experiment.interrupted_by) from error
    _print(found, json_path == "-")
    if json_path:
        report.write(json_path, json.dumps(found.as_dict(), indent=1) + "\n")
    if experiment.interrupted_by is not None:
        raise SystemExit(128 + experiment.interrupted_by)
    if json_path:
        return
    if vague := vagueness(found):
        raise CalmError(
            f"too vague, so not kept for `calm predict`: {vague}; try more rounds (-n), or a quieter machine"
        )
    calibration.save(calibration.default_path(), found)
    click.echo("kept for `calm predict`")
