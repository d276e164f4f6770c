"""`calm calibrate`: the costs of TLB shootdowns and of messages between CPUs on this machine.

That of shootdowns is fitted to runs of the experiment of figure 1 of the Ptlbmalloc2 paper.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click

from calm.core import machine, measure, options, paths, proc, report, rounds
from calm.core.environment import clean_environment
from calm.core.errors import USAGE, CalmError
from calm.core.measure import Measurement
from calm.core.options import Output
from calm.core.progress import RoundsBar
from calm.core.rounds import Row, Side, StoppedError
from research import topology
from research.predict import calibration, fit
from research.predict.calibration import Calibration, Experiment, Sample, reference_cycles
from research.predict.model import LOCAL_CYCLES, OVERCOMMITTED, REMOTE, VIRTUAL

# The first guess of the costs; each run's length then sets the next one's.
_FIRST_CALL_S, _FIRST_INTERRUPT_S = 600e-9, 5e-6
# Other programs on this share of a CPU rarely let two threads run at once.
_BUSY_CPUS = 0.25
_STORM = "madvise-storm"
_GOAL = 0.15
_MAX_THREADS = 4096
# An interval from a to more than so many times a adds nothing to the published constants.
_VAGUE = 2.0


@dataclass(frozen=True)
class Point:
    """A number of threads on certain CPUs."""

    cpus: tuple[int, ...]
    sockets: int
    threads: int

    def first_calls(self, seconds: float) -> int:
        """Calls of all threads for a first run of about that length."""
        spread = min(len(self.cpus), self.threads)
        each_s = _FIRST_CALL_S + (spread - 1) * _FIRST_INTERRUPT_S
        return max(self.threads, int(seconds * spread / each_s))


def plan(sockets: Sequence[Sequence[int]], threads: Sequence[int]) -> list[Point]:
    """Figure 1a: 1, 2, 4 ... CPUs of one socket, up to the threads. Figure 1b: over several sockets."""
    first, highest = sockets[0], max(threads)
    sizes = [1 << bit for bit in range(len(first).bit_length()) if 1 << bit < min(highest, len(first))]
    sizes.append(max(1, min(highest, len(first))))
    points = [Point(tuple(first[:size]), 1, count) for size in dict.fromkeys(sizes) for count in threads]
    for number in range(2, len(sockets) + 1):
        each = max(1, min(highest // number, *(len(cpus) for cpus in sockets[:number])))
        spread = tuple(cpu for cpus in sockets[:number] for cpu in cpus[:each])
        points += [Point(spread, number, count) for count in threads if count >= number]
    return points


def _others_s() -> float:
    """The CPU time that the machine spent on other processes, or lost to other virtual machines."""
    fields = proc.text("stat").split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, interrupts, soft, steal = map(int, fields)
    return (user + nice + system + interrupts + soft + steal) / proc.TICKS - sum(os.times()[:4])


def run(points: Sequence[Point], count: int, run_s: float, storm: str) -> Experiment:
    """Runs every point in each round. The round that an interrupt ends is dropped."""
    found = Experiment()
    calls = {point: point.first_calls(run_s) for point in points}
    by_label = {f"{p.threads} threads, {len(p.cpus)} CPUs, {p.sockets} sockets": p for p in points}
    row = Row[Sample]("", [Side(label) for label in by_label])
    began, others_s = time.monotonic(), _others_s()

    def once(_: Row[Sample], side: Side[Sample], number: int) -> Sample:
        point = by_label[side.label]
        each = calls[point] // point.threads
        measured = _measure(storm, point, each, found.reference_mhz)
        # Where threads rarely meet, calls are cheap and a run is over before they do.
        if measured.wall_s < run_s / 2:
            calls[point] *= 2
        elif measured.wall_s > run_s * 2:
            calls[point] = max(point.threads, calls[point] // 2)
        found.exact &= measured.counters["interrupts"].value is not None
        return _sample(measured, number, point, each * point.threads)

    def after(number: int) -> None:
        found.rounds = number
        found.busy_cpus = max(0.0, (_others_s() - others_s) / (time.monotonic() - began))

    with RoundsBar(lines=False) as watcher:
        found.interrupted_by = rounds.run([row], count, once, watcher, after=after)
    found.samples = [sample for side in row.sides for _, sample in side.runs]
    return found


def _measure(storm: str, point: Point, calls: int, reference_mhz: list[float]) -> Measurement:
    allowed = os.sched_getaffinity(0)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        # The program inherits it.
        os.sched_setaffinity(0, point.cpus)
        try:
            measured = measure.measure(
                [storm, "--threads", str(point.threads), "--calls", str(calls)],
                groups=[measure.TLB_GROUP],
                # Its memory is not reported.
                interval_ms=1000,
                stdout=output,
                stderr=errors,
                inherited=clean_environment(),
            )
        finally:
            os.sched_setaffinity(0, allowed)
        if measured.interrupted_by is not None:
            raise StoppedError(measured.interrupted_by)
        if measured.failure:
            raise CalmError(f"{_STORM}: {measured.failure}{report.last_words(errors)}")
        output.seek(0)
        if mhz := json.loads(output.read()).get("reference_mhz"):
            reference_mhz.append(float(mhz))
    return measured


def _sample(measured: Measurement, number: int, point: Point, calls: int) -> Sample:
    """The run without the time that counting took from it."""
    interrupts = measured.counters["interrupts"].value
    if interrupts is None:
        interrupts = measured.interrupts_system_wide
    if interrupts is None:
        raise CalmError("TLB interrupts cannot be counted here, not even by /proc/interrupts")
    tracing = measured.own.tracing_s or 0.0
    cpu_s = max(measured.user_s + measured.system_s - tracing, 1e-6)
    wall_s = max(measured.wall_s - tracing / min(len(point.cpus), point.threads), 1e-6)
    return Sample(number, len(point.cpus), point.sockets, point.threads, calls, interrupts, cpu_s, wall_s)


def analyse(found: Experiment, left_out: Sequence[int]) -> Calibration:
    """Fits the costs to all runs but those held out, and predicts these."""
    training = [each for each in found.samples if each.threads not in left_out]
    costs = fit.fit(training)
    notes = []
    if not found.exact:
        notes.append(
            "interrupts were counted system-wide, from /proc/interrupts, of all programs (root, or "
            "kernel.perf_event_paranoid at -1 and a readable tracefs, counts the program's own)"
        )
    if found.busy_cpus > _BUSY_CPUS:
        notes.append(
            f"other programs, or other virtual machines, used {found.busy_cpus:.1f} CPUs meanwhile: "
            "threads waited, so wall times are longer and interrupts fewer than on a quiet machine"
        )
    if broadcast := machine.broadcast_here():
        notes.append(broadcast.note)
    if costs.remote is None:
        notes.append(f"one socket: n = {REMOTE:g} is the published value, and could not be measured")
    return Calibration(
        machine=calibration.this_machine(),
        experiment=found,
        costs=costs,
        interval_ns=fit.interval(training),
        residuals=fit.residuals(found.samples, costs, left_out),
        notes=notes,
    )


def parse_numbers(text: str) -> list[int]:
    """Numbers of threads, as 1,2,4: one thread, and some number of several."""
    found = sorted({int(piece) if piece.strip().isdecimal() else 0 for piece in text.split(",")})
    if found[0] < 1 or found[-1] > _MAX_THREADS:
        raise CalmError(
            f"{text!r} is not a list of numbers from 1 to {_MAX_THREADS}, with commas between them", USAGE
        )
    if found[0] != 1 or len(found) < 2:
        raise CalmError(
            f"--threads {text}: one thread, and some number of several, are needed to separate costs", USAGE
        )
    return found


def _summary(found: Calibration) -> list[str]:
    """The costs, in sentences."""
    costs, mhz = found.costs, found.reference_mhz
    low, high = found.interval_ns or (0.0, 0.0)
    between = f", 95 % interval {low:,.0f} to {high:,.0f} ns" if found.interval_ns else ""
    lines = [
        f"a, an interrupt within a socket: {costs.local_ns:,.0f} ns of CPU time"
        f"{reference_cycles(costs.local_ns, mhz)}{between}; published: {LOCAL_CYCLES:,.0f} cycles",
        f"C, a call: {costs.call_ns:,.0f} ns{reference_cycles(costs.call_ns, mhz)}; {costs.overlap_ns:,.0f} "
        "ns more if another thread is within one, which each other thread is with a probability of "
        f"{costs.overlap_chance:.0%}",
    ]
    if costs.remote is not None:
        lines.append(f"n, an interrupt to another socket: {costs.remote:.2f} times a; published: {REMOTE:g}")
    if mhz:
        lines.append(
            f"cycles are the CPU's reference cycles (TSC), measured at {mhz:,.0f} MHz, not the core's own"
        )
        if found.machine["virtual"]:
            lines.append(
                f"this is a virtual machine: a is {costs.local_ns * mhz * 1e-3 / LOCAL_CYCLES:.1f} times the "
                f"published native one; published for those: {VIRTUAL:g} to {OVERCOMMITTED:g} times"
            )
    left_out = [row for row in found.residuals if row.held_out]
    if worst := max(left_out, key=lambda row: abs(row.cpu_error), default=None):
        within = "all within" if abs(worst.cpu_error) <= _GOAL else "not all within"
        lines.append(
            f"held out: CPU time {within} {_GOAL:.0%}; the worst is {worst.cpu_error:+.1%}, "
            f"{worst.threads} threads on {worst.cpus} CPU{'s' if worst.cpus > 1 else ''}"
        )
    else:
        lines.append("held out: nothing; with three numbers of threads or more, one is predicted")
    return lines


def vagueness(found: Calibration) -> str | None:
    """Why its interval is of no use; None where it is, and where there are too few rounds for one."""
    if found.interval_ns:
        low, high = found.interval_ns
        return f"an interrupt takes {low:,.0f} to {high:,.0f} ns" if high > _VAGUE * low else None
    few = found.experiment.rounds < fit.MIN_INTERVAL_ROUNDS
    return None if few else "the time of an interrupt varies by round"


def _print(found: Calibration, output: Output) -> None:
    figures = ("interrupts a call", "CPU time a call", "predicted", "wall time predicted")
    several = any(row.sockets > 1 for row in found.residuals)
    places = ("sockets", "CPUs", "threads")[0 if several else 1 :]
    table = report.table(*places, *figures, "", right=(*places, *figures))
    for row in found.residuals:
        table.add_row(
            *map(str, (row.sockets, row.cpus, row.threads)[0 if several else 1 :]),
            f"{row.interrupts_per_call:.2f}",
            f"{row.cpu_ns_per_call:,.0f} ns",
            f"{row.cpu_error:+.1%}",
            f"{row.wall_error:+.1%}",
            "held out" if row.held_out else "",
        )
    title = (
        f"madvise(MADV_DONTNEED) by all threads, medians of {found.experiment.rounds} interleaved rounds "
        "after one of warm-up"
    )
    calibration.finish(output, found, title, table, _summary(found), found.notes)


def _keep(found: calibration.Kind, command: str) -> None:
    calibration.keep(found)
    click.echo(f"kept for `calm predict {command}`")


@click.group("calibrate")
def command() -> None:
    """Measure the costs that `calm predict` starts from, on this machine."""


@command.command(
    "shootdowns",
    epilog="""\b
Examples:
  calm calibrate shootdowns
  calm calibrate shootdowns --threads 1,2,3,4,8 -n 9 --json here.json
""",
)
@click.option(
    "--threads",
    metavar="1,2,…",
    default="1,2,3,4,6,8,12,16",
    show_default=True,
    help="Numbers of threads. Every second one in between is held out, and predicted from the others.",
)
@options.rounds(5, "Rounds that count.")
@options.duration(
    "--for", "run_s", default="200ms", at_least="10ms", at_most="1min", text="Approximate length of a run."
)
@options.output()
def shootdowns(threads: str, rounds: int, run_s: float, output: Output) -> None:
    """Measure the cost of a TLB shootdown.

    Threads repeatedly give a page back by madvise(MADV_DONTNEED), on different numbers of CPUs. The cost of
    an interrupt is fitted to the interrupts and the CPU time, and tested on runs that it was not fitted to.
    Run it on a quiet machine. It needs no root, but with root the count of interrupts is exact. The result is
    kept for `calm predict run`; with --json it is not.
    """
    counts = parse_numbers(threads)
    calibration.check_interrupts("calibrate")
    measured = run(plan(topology.sockets(), counts), rounds, run_s, str(paths.find_part(_STORM)))
    code = 0 if measured.interrupted_by is None else 128 + measured.interrupted_by
    if code:
        click.echo(f"calm: stopped after {measured.rounds} of {rounds} rounds; nothing is kept", err=True)
        if not measured.rounds:
            raise SystemExit(code)
    try:
        found = analyse(measured, fit.held_out(counts))
    except CalmError as error:
        raise CalmError(str(error), code or error.exit_code) from error
    _print(found, output)
    if code:
        raise SystemExit(code)
    if output.json_path:
        return
    if vague := vagueness(found):
        raise CalmError(f"too vague, so not kept: {vague}; try more rounds (-n), or a quieter machine")
    _keep(found, "run")


@command.command(
    "messages",
    epilog="""\b
Examples:
  calm calibrate messages
  calm calibrate messages --json here.json
""",
)
@options.output()
def messages_command(output: Output) -> None:
    """Measure the cost of a message between CPUs.

    Takes a few seconds. The result is kept for `calm predict offload`; with --json it is not.
    """
    found = calibration.measure_messages()
    calibration.print_messages(found, output)
    if not output.json_path:
        _keep(found, "offload")
