"""Runs a program under the probe, and the figures of such a run.

`Measurement` is also what JSON documents hold of a run.
"""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from calm.core import machine, paths, processes, program, report
from calm.core.errors import CalmError

SI_KERNEL = 128  # of a signal that the terminal sends to the whole process group
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

TLB_GROUP = "tlb"
RECEIVED_GROUP = "received"
SYSCALL_GROUP = "syscalls"
HARDWARE_GROUP = "hardware"
SYSCALLS = ("madvise", "process_madvise", "munmap", "mprotect", "brk", "mremap", "membarrier")
# A process that is asked to end is killed after this time.
GRACE_S = 5.0
SHOOTDOWNS = ("shootdowns", "interrupts", "interrupts_received")

# What a document of another program, or a damaged one, may not hold: below zero, infinite or not a number.
Figure = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
Number = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Counter:
    """One of the kernel's counters: a value, or the reason for there being none."""

    value: Number | None
    reason: str | None = None
    scaled: bool = False
    user_only: bool = False


@dataclass(frozen=True)
class Own:
    """What measuring itself cost. Nanoseconds: what counting adds to one event, if measured."""

    cpu_s: Figure
    counted_call_ns: Figure | None
    other_call_ns: Figure | None
    flush_ns: Figure | None
    task_ns: Figure | None
    system_wide_tasks_started: Number
    tracing_s: Figure | None = None
    """Time that counting took from the program's threads at most, by the cost of each event.

    Starts of threads cost most. They are known system-wide only: counting the program's own would cost more.
    """


@dataclass(frozen=True)
class Measurement:
    """One run of a program."""

    code: int | None
    signal: int | None
    wall_s: Figure
    user_s: Figure
    system_s: Figure
    minor_faults: Number
    major_faults: Number
    peak_rss_kib: Number
    average_rss_kib: Figure | None
    largest_process_kib: Number
    floor_kib: Number
    samples: Number
    interval_s: Figure
    processes: Number
    counters: Mapping[str, Counter]
    interrupts_system_wide: Number | None
    own: Own
    interrupted_by: int | None = None
    """The signal that the user stopped the run with."""
    timed_out: bool = False
    """It ran past its limit, and was killed."""
    client_code: int | None = None
    """The exit status of a server's client, as subprocess gives it."""

    @property
    def exit_code(self) -> int:
        """As a shell gives it."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    @property
    def failure(self) -> str | None:
        if self.timed_out:
            return f"timeout after {self.wall_s:.0f} s"
        if self.client_code is not None and self.client_code < 0:
            return f"client killed by {signal_name(-self.client_code)}"
        # A server that calm killed because of its client did not fail first; one that crashed did.
        if self.client_code and self.signal in (None, signal.SIGKILL):
            return f"client's exit code {self.client_code}"
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}"
        return f"exit code {self.code}" if self.code else None


def signal_name(number: int) -> str:
    """SIGSEGV (11)."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Metric:
    """A figure that runs are compared by."""

    key: str
    """Of a counter, or else of a field of Measurement."""
    label: str
    how: str
    unit: str = "count"
    """One of count, s, KiB."""

    def get(self, measurement: Measurement) -> float | None:
        counter = measurement.counters.get(self.key)
        return getattr(measurement, self.key, None) if counter is None else counter.value


METRICS: tuple[Metric, ...] = (
    Metric("wall_s", "wall time", "monotonic clock, exec to exit", "s"),
    Metric("user_s", "user time", "rusage, all waited-for processes", "s"),
    Metric("system_s", "system time", "rusage, all waited-for processes", "s"),
    Metric("peak_rss_kib", "peak RSS", "process tree", "KiB"),
    Metric("average_rss_kib", "average RSS over time", "process tree", "KiB"),
    Metric("minor_faults", "minor faults", "rusage, all waited-for processes"),
    Metric(
        "shootdowns",
        "TLB shootdowns begun",
        "tracepoint tlb:tlb_flush, reason 4: one each, even if every other CPU is found idle",
    ),
    Metric(
        "interrupts",
        "TLB interrupts sent",
        "tracepoint csd:csd_queue_cpu to flush_tlb_func: one for each CPU",
    ),
    Metric(
        "interrupts_received",
        "TLB interrupts received",
        "tracepoint tlb:tlb_flush, reason 1: handled by the program's threads",
    ),
    Metric(
        "interrupts_system_wide",
        "TLB interrupts, system-wide",
        "/proc/interrupts, TLB row: system-wide, counts every process",
    ),
    Metric("threads_started", "threads started", "tracepoint task:task_newtask with CLONE_THREAD"),
    *(Metric(name, f"{name} calls", f"tracepoint syscalls:sys_enter_{name}") for name in SYSCALLS),
    Metric("cycles", "CPU cycles", "hardware counter"),
    Metric("instructions", "instructions", "hardware counter"),
    Metric("dtlb_load_misses", "dTLB load misses", "hardware counter"),
    Metric("llc_load_misses", "LLC load misses", "hardware counter"),
)

METRIC = {metric.key: metric for metric in METRICS}


def how(metric: Metric, *runs: Measurement) -> str:
    """How a figure was counted in the latest run that has it, or why none has: 'not counted: …'."""
    key = metric.key
    run = next((run for run in reversed(runs) if metric.get(run) is not None), runs[-1])
    counter = run.counters.get(key)
    if counter is not None and counter.value is None:
        return f"not counted: {counter.reason}"
    if key == "interrupts_system_wide" and run.interrupts_system_wide is None:
        return "not counted: /proc/interrupts has no TLB row that can be read"
    if key == "average_rss_kib" and run.average_rss_kib is None:
        return "not available: the program ended before three samples were taken"
    text = metric.how
    if key == "peak_rss_kib":
        if run.samples == 0:
            text = "largest process, by the kernel's own mark; too short to sample"
        elif run.processes == 1:
            text = "the kernel's own mark of its one process (VmHWM)"
        else:
            text = f"{run.samples} samples of the process tree; the kernel's mark of its largest process"
        if run.peak_rss_kib == run.floor_kib:
            text += f"; no less than the probe's {run.floor_kib} KiB can show"
    elif key == "average_rss_kib":
        text = f"{run.samples} samples of the process tree, every {run.interval_s * 1e3:.0f} ms"
    elif counter is not None:
        text += ", user mode only" if counter.user_only else ""
        text += ", scaled: shared the hardware with other counters" if counter.scaled else ""
        text += "; broadcasts are not counted" if key in SHOOTDOWNS and machine.broadcast_here() else ""
    return text


def without_broadcasts(run: Measurement) -> Measurement:
    """The run without its counts of shootdowns, where this machine's CPUs make them meaningless."""
    if not (broadcast := machine.broadcast_here()) or not broadcast.always:
        return run
    return replace(run, counters={**run.counters, **dict.fromkeys(SHOOTDOWNS, Counter(None, broadcast.note))})


def find_probe() -> str:
    return str(paths.find_part("calm-probe"))


def own_cost(runs: Sequence[Measurement]) -> list[str]:
    wall = sum(run.wall_s for run in runs)
    cpu = sum(run.own.cpu_s for run in runs)
    lines = [
        f"the probe used {report.duration(cpu)} of CPU time ({report.share(cpu, wall)} of the wall time) "
        f"for {sum(run.samples for run in runs):,} samples of memory"
    ]
    tracing = [run.own.tracing_s for run in runs if run.own.tracing_s is not None]
    if tracing:
        own = runs[-1].own
        costs = (
            (own.counted_call_ns, "a counted call"),
            (own.other_call_ns, "any other system call (of unknown number, so not in the sum)"),
            (own.flush_ns, "a TLB flush"),
            (own.task_ns, "a thread or process started"),
        )
        each = ", ".join(f"{ns:.0f} ns {what}" for ns, what in costs if ns is not None)
        lines.append(
            f"counting took at most {report.duration(sum(tracing))} from the program's threads "
            f"({report.share(sum(tracing), wall)} of the wall time): {each}; "
            f"{sum(run.own.system_wide_tasks_started for run in runs):,} of the last, system-wide"
        )
    return lines


def _tracing_s(counters: Mapping[str, Counter], own: Mapping[str, Any]) -> float | None:
    costs = [
        (own["counted_call_ns"], [counters[name].value for name in SYSCALLS]),
        (own["flush_ns"], [counters[name].value for name in SHOOTDOWNS]),
        (own["task_ns"], [own["system_wide_tasks_started"]]),
    ]
    known = [
        each * value * 1e-9
        for each, values in costs
        for value in values
        if each is not None and value is not None
    ]
    return sum(known) if known else None


def parse(data: Mapping[str, Any], **ended: Any) -> Measurement:  # noqa: ANN401
    """The probe's report, and how the run ended."""
    memory, own = data["memory"], data["own"]
    counters = msgspec.convert(data["counters"], dict[str, Counter])
    renamed = {
        "wall_s": data["wall_ns"] * 1e-9,
        "user_s": data["user_us"] * 1e-6,
        "system_s": data["system_us"] * 1e-6,
        "peak_rss_kib": memory["peak_kib"],
        "average_rss_kib": memory["average_kib"],
        "interval_s": memory["interval_ns"] * 1e-9,
        "own": own | {"cpu_s": own["cpu_ns"] * 1e-9, "tracing_s": _tracing_s(counters, own)},
    }
    return msgspec.convert({**data, **data["end"], **memory, **renamed, **ended}, Measurement)


@contextmanager
def _signals() -> Iterator[tuple[list[signal.Signals], list[int]]]:
    """Yields the signals that calm passes on to the program, and a list of those that it has received."""
    # A signal that is ignored, as under nohup, stays ignored.
    watched = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    received: list[int] = []
    # Handlers, not a mask: a server's client, started meanwhile, would inherit the mask.
    old = {number: signal.signal(number, lambda each, _: received.append(each)) for number in watched}
    try:
        yield watched, received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def _blocked(numbers: Collection[signal.Signals]) -> Iterator[list[int]]:
    """Blocks signals, also in processes started meanwhile; yields those that were not blocked before."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield [int(number) for number in numbers if number not in mask]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _wait(
    process: subprocess.Popen[bytes],
    client: subprocess.Popen[bytes] | None,
    limit_s: float | None,
    watched: Collection[signal.Signals],
    received: list[int],
) -> bool:
    """Waits for the probe, and for the client if the program is a server; returns whether time ran out.

    Signals go on to the probe, which passes them to the program; both get the terminal's directly.
    """
    deadline = time.monotonic() + limit_s if limit_s is not None else math.inf
    grace = math.inf
    timed_out = False
    awaited = {*watched, signal.SIGCHLD}
    with _blocked(awaited):
        for number in received:
            process.send_signal(number)
        while True:
            server, client_code = process.poll(), client.poll() if client else 0
            if server is not None and client_code is not None:
                return timed_out
            now = time.monotonic()
            # A client ends with its server, a server with its client, and a run with a limit by an interrupt.
            one_ended = server is not None or (client and client_code is not None)
            if grace == math.inf and (one_ended or (received and limit_s is not None)):
                grace = now + (0 if client_code else GRACE_S)
            left = min(deadline, grace) - now
            if left <= 0:
                timed_out |= now >= deadline and not received
                processes.kill_descendants(process.pid)
                if client and client_code is None:
                    client.kill()
                left = 0.05
            info = signal.sigtimedwait(awaited, min(left, 1.0))
            if info is not None and info.si_signo != signal.SIGCHLD:
                received.append(info.si_signo)
                if info.si_code != SI_KERNEL:
                    process.send_signal(info.si_signo)


def measure(
    command: Sequence[str],
    variables: Mapping[str, str] | None = None,
    *,
    groups: Sequence[str] = (TLB_GROUP, RECEIVED_GROUP, SYSCALL_GROUP, HARDWARE_GROUP),
    interval_ms: int = 10,
    stdin: int | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    inherited: Mapping[str, str] | None = None,
    folder: Path | None = None,
    limit_s: float | None = None,
    start_client: Callable[[], subprocess.Popen[bytes]] | None = None,
    gate: Callable[[int], None] | None = None,
) -> Measurement:
    """Runs a program once. Raises CalmError if it cannot be started.

    The program inherits this process's environment, or the one given. Past the limit it is killed with all
    its descendants. For a server, start_client starts the client, which makes it end. gate gets the id of the
    process that will become the program, which begins when gate returns.
    """
    program.find(command[0])
    arguments = [find_probe(), "-p", "-c", ",".join(groups) or "none", "-i", str(interval_ms)]
    set_variables = dict(variables or {})
    environment = dict(os.environ if inherited is None else inherited)
    # The user's preload is for the program, and would only slow the probe.
    if preload := environment.pop("LD_PRELOAD", None):
        set_variables.setdefault("LD_PRELOAD", preload)
    for name, value in set_variables.items():
        arguments += ["-e", f"{name}={value}"]
    read_end, write_end = os.pipe()
    here, there = socket.socketpair()
    if gate:
        arguments += ["-g", str(there.fileno())]
    with os.fdopen(read_end, "rb") as report_file, here, _signals() as (watched, received):
        try:
            # A signal from the terminal while the probe starts would end it before it can report.
            with _blocked(watched) as held:
                arguments += ["-s", ",".join(map(str, held))] if held else []
                process = subprocess.Popen(
                    [*arguments, "-f", str(write_end), "--", *command],
                    env=environment,
                    cwd=folder,
                    pass_fds=(write_end, there.fileno()),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                )
        except OSError as error:
            raise CalmError(f"calm-probe cannot be started: {error.strerror}") from error
        finally:
            os.close(write_end)
            there.close()
        # A probe that fails before sends nothing; its report gives the reason.
        if gate and (line := here.recv(64)):
            gate(int(line))
            here.sendall(b"g")
        client = start_client() if start_client else None
        timed_out = _wait(process, client, limit_s, watched, received)
        text = report_file.read()
    try:
        data = json.loads(text)
    except ValueError as error:
        code = process.returncode
        ended = f"by {signal_name(-code)}" if code < 0 else f"with {code}"
        raise CalmError(f"calm-probe ended {ended} and reported nothing") from error
    if data["error"]:
        raise program.exec_error(command[0], data["error"]["errno"])
    found = parse(
        data,
        interrupted_by=received[0] if received else None,
        timed_out=timed_out,
        client_code=client.returncode if client else None,
    )
    return without_broadcasts(found)
