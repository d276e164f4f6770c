"""Runs a program under the probe, and holds what it took."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from calm import machine, places, processes, program
from calm.errors import CalmError

SI_KERNEL = 128  # sent by the terminal, so to the whole process group
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

TLB_GROUP = "tlb"
RECEIVED_GROUP = "received"
SYSCALL_GROUP = "syscalls"
HARDWARE_GROUP = "hardware"
SYSCALLS = ("madvise", "process_madvise", "munmap", "mprotect", "brk", "mremap", "membarrier")
# What ends on request gets this long to do so, before it is killed.
GRACE_S = 5.0
# The longest limit of a run that one may give: ten days. JSON cannot write that there is none.
MOST_LIMIT_S = 864_000
SHOOTDOWNS = ("shootdowns_begun", "interrupts_sent", "interrupts_received")


@dataclass(frozen=True)
class Counter:
    """One of the kernel's counters: a value, or the reason for there being none."""

    value: int | None
    reason: str | None = None
    scaled: bool = False
    user_only: bool = False


@dataclass(frozen=True)
class Own:
    """What measuring itself cost. Nanoseconds: what counting adds to one event, if measured."""

    cpu_s: float
    counted_call_ns: float | None
    other_call_ns: float | None
    flush_ns: float | None
    task_ns: float | None
    system_wide_tasks_started: int


@dataclass(frozen=True)
class Measurement:
    """One run of a program."""

    code: int | None
    signal: int | None
    wall_s: float
    user_s: float
    system_s: float
    minor_faults: int
    major_faults: int
    peak_rss_kib: int
    average_rss_kib: float | None
    largest_process_kib: int
    floor_kib: int
    samples: int
    interval_s: float
    processes: int
    counters: Mapping[str, Counter]
    system_wide_tlb_interrupts: int | None
    own: Own
    interrupted_by: int | None = None
    """A signal that the user stopped the run with."""
    timed_out: bool = False
    """It ran past its limit, and was killed."""
    client_code: int | None = None
    """How the client of a server ended: as subprocess gives it."""

    @property
    def exit_code(self) -> int:
        """As a shell gives it."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    @property
    def failure(self) -> str | None:
        """What went wrong with the program, or with its client, if anything did."""
        if self.timed_out:
            return f"timeout after {self.wall_s:.0f} s"
        if self.client_code is not None and self.client_code < 0:
            return f"client killed by {signal_name(-self.client_code)}"
        # A server that was killed because of its client is not what went wrong first; one that crashed is.
        if self.client_code and self.signal in (None, signal.SIGKILL):
            return f"client's exit code {self.client_code}"
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}"
        return f"exit code {self.code}" if self.code else None

    @property
    def tracing_s(self) -> float | None:
        """Time that counting took from the program's threads at most, by the cost of each event.

        Starts of threads are the dearest, and known system-wide only: counting them would cost more still.
        """
        total, known = 0.0, False
        for names, each in ((SYSCALLS, self.own.counted_call_ns), (SHOOTDOWNS, self.own.flush_ns)):
            values = [self.counters[name].value for name in names]
            counted = [value for value in values if value is not None]
            if counted and each is not None:
                total, known = total + sum(counted) * each * 1e-9, True
        if self.own.task_ns is not None:
            total, known = total + self.own.system_wide_tasks_started * self.own.task_ns * 1e-9, True
        return total if known else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {
            "counters": {name: vars(counter) for name, counter in self.counters.items()},
            "own": vars(self.own) | {"tracing_s": self.tracing_s},
        }


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
    label: str
    how: str
    get: Callable[[Measurement], float | None]
    unit: str = "count"
    """One of count, s, KiB."""


def _counted(name: str) -> Callable[[Measurement], float | None]:
    return lambda measurement: measurement.counters[name].value


def _call_metric(name: str) -> Metric:
    return Metric(name, f"{name} calls", f"tracepoint syscalls:sys_enter_{name}", _counted(name))


METRICS: tuple[Metric, ...] = (
    Metric("wall_s", "wall time", "monotonic clock, exec to exit", lambda m: m.wall_s, "s"),
    Metric("user_s", "user time", "rusage, all waited-for processes", lambda m: m.user_s, "s"),
    Metric("system_s", "system time", "rusage, all waited-for processes", lambda m: m.system_s, "s"),
    Metric("peak_rss_kib", "peak RSS", "process tree", lambda m: m.peak_rss_kib, "KiB"),
    Metric("average_rss_kib", "average RSS over time", "process tree", lambda m: m.average_rss_kib, "KiB"),
    Metric("minor_faults", "minor faults", "rusage, all waited-for processes", lambda m: m.minor_faults),
    Metric(
        "shootdowns_begun",
        "TLB shootdowns begun",
        "tracepoint tlb:tlb_flush, reason 4: one each, even if every other CPU is found idle",
        _counted("shootdowns_begun"),
    ),
    Metric(
        "interrupts_sent",
        "TLB interrupts sent",
        "tracepoint csd:csd_queue_cpu to flush_tlb_func: one for each CPU",
        _counted("interrupts_sent"),
    ),
    Metric(
        "interrupts_received",
        "TLB interrupts received",
        "tracepoint tlb:tlb_flush, reason 1: handled by the program's threads",
        _counted("interrupts_received"),
    ),
    Metric(
        "system_wide_tlb_interrupts",
        "TLB interrupts, system-wide",
        "/proc/interrupts, TLB row: system-wide, counts every process",
        lambda m: m.system_wide_tlb_interrupts,
    ),
    Metric(
        "threads_started",
        "threads started",
        "tracepoint task:task_newtask with CLONE_THREAD",
        _counted("threads_started"),
    ),
    *(_call_metric(name) for name in SYSCALLS),
    Metric("cycles", "CPU cycles", "hardware counter", _counted("cycles")),
    Metric("instructions", "instructions", "hardware counter", _counted("instructions")),
    Metric("dtlb_load_misses", "dTLB load misses", "hardware counter", _counted("dtlb_load_misses")),
    Metric("llc_load_misses", "LLC load misses", "hardware counter", _counted("llc_load_misses")),
)

METRIC = {metric.key: metric for metric in METRICS}


def how(metric: Metric, measurement: Measurement, broadcast: machine.Broadcast | None) -> str:
    """How a figure came about, or why there is none: 'not counted: …'."""
    key = metric.key
    counter = measurement.counters.get(key)
    if key in SHOOTDOWNS and broadcast and broadcast.always:
        return f"not counted: {broadcast.note}"
    if counter is not None and counter.value is None:
        return f"not counted: {counter.reason}"
    if key == "system_wide_tlb_interrupts" and measurement.system_wide_tlb_interrupts is None:
        return "not counted: /proc/interrupts has no TLB row that can be read"
    if key == "average_rss_kib" and measurement.average_rss_kib is None:
        return "not available: the program ended before three samples were taken"
    text = metric.how
    if key == "peak_rss_kib":
        if measurement.samples == 0:
            text = "largest process, by the kernel's own mark; too short to sample"
        elif measurement.processes == 1:
            text = "the kernel's own mark of its one process (VmHWM)"
        else:
            text = (
                f"{measurement.samples} samples of the process tree; the kernel's mark of its largest process"
            )
        if measurement.peak_rss_kib == measurement.floor_kib:
            text += f"; no less than the probe's {measurement.floor_kib} KiB can show"
    elif key == "average_rss_kib":
        text = (
            f"{measurement.samples} samples of the process tree, every {measurement.interval_s * 1e3:.0f} ms"
        )
    elif counter is not None:
        text += ", user mode only" if counter.user_only else ""
        text += ", scaled: shared the hardware with other counters" if counter.scaled else ""
        text += "; broadcasts are not counted" if key in SHOOTDOWNS and broadcast else ""
    return text


def counts(measurement: Measurement, metric: Metric, broadcast: machine.Broadcast | None) -> float | None:
    """The figure, unless this machine's CPUs make it meaningless."""
    if metric.key in SHOOTDOWNS and broadcast and broadcast.always:
        return None
    return metric.get(measurement)


def find_probe() -> str:
    """The probe's path."""
    for candidate in places.probe_candidates():
        if os.access(candidate, os.X_OK) and candidate.is_file():
            return str(candidate)
    raise CalmError(f"calm-probe is missing: `make` builds it, or set {places.LIBRARY_PATH} to its directory")


def _parse(report: dict[str, Any], interrupted_by: int | None, watch: "_Watch | None" = None) -> Measurement:
    memory, own, end = report["memory"], report["own"], report["end"]
    return Measurement(
        code=end["code"],
        signal=end["signal"],
        wall_s=report["wall_ns"] * 1e-9,
        user_s=report["user_us"] * 1e-6,
        system_s=report["system_us"] * 1e-6,
        minor_faults=report["minor_faults"],
        major_faults=report["major_faults"],
        peak_rss_kib=memory["peak_kib"],
        average_rss_kib=memory["average_kib"],
        largest_process_kib=memory["largest_process_kib"],
        floor_kib=memory["floor_kib"],
        samples=memory["samples"],
        interval_s=memory["interval_ns"] * 1e-9,
        processes=memory["processes"],
        counters={name: Counter(**fields) for name, fields in report["counters"].items()},
        system_wide_tlb_interrupts=report["system_wide_tlb_interrupts"],
        own=Own(cpu_s=own.pop("cpu_ns") * 1e-9, **own),
        interrupted_by=interrupted_by,
        timed_out=watch is not None and watch.timed_out,
        client_code=watch.client.returncode if watch is not None and watch.client else None,
    )


class _Signals:
    """Passes signals on to the probe, and it to the program; what the terminal sends it has already."""

    def __init__(self) -> None:
        # One that is ignored, as under nohup, stays so.
        self._watched = [s for s in _FORWARDED if signal.getsignal(s) is not signal.SIG_IGN]
        self.received: list[int] = []
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "_Signals":
        # Handlers, not a mask: what is started meanwhile, as a server's client, would inherit the mask.
        for number in self._watched:
            self._old[number] = signal.signal(number, lambda received, _: self.received.append(received))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[list[int]]:
        """What is started within inherits these signals blocked: the numbers given are those to unblock."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._watched)
        try:
            yield [int(number) for number in self._watched if number not in mask]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def wait(self, watch: "_Watch") -> None:
        """Returns when the program has ended, and its client too."""
        process = watch.process
        awaited = {*self._watched, signal.SIGCHLD}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        try:
            for early in list(self.received):
                process.send_signal(early)
            while (left := watch.seconds_left(bool(self.received))) is not None:
                info = signal.sigtimedwait(awaited, min(left, 1.0))
                if info is not None and info.si_signo != signal.SIGCHLD:
                    self.received.append(info.si_signo)
                    if info.si_code != SI_KERNEL:
                        process.send_signal(info.si_signo)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Watch:
    """The probe, and the client where the program is a server: when either has to be ended."""

    def __init__(
        self, process: subprocess.Popen[bytes], client: subprocess.Popen[bytes] | None, limit_s: float | None
    ) -> None:
        self.process = process
        self.client = client
        self.timed_out = False
        self._limited = limit_s is not None
        self._deadline = time.monotonic() + limit_s if limit_s is not None else float("inf")
        self._grace: float | None = None

    def seconds_left(self, interrupted: bool) -> float | None:
        """How long to wait for news; None when all have ended."""
        server = self.process.poll()
        client = self.client.poll() if self.client else 0
        if server is not None and client is not None:
            return None
        now = time.monotonic()
        # Without its server a client has nothing to do, and without its client a server: nor the other way
        # about. Whoever interrupts a run with a limit wants it to end.
        if self._grace is None and (
            server is not None or (self.client and client is not None) or (interrupted and self._limited)
        ):
            self._grace = now + (0 if client else GRACE_S)
        if now >= self._deadline or (self._grace is not None and now >= self._grace):
            self.timed_out |= now >= self._deadline and not interrupted
            processes.kill_descendants(self.process.pid)
            if self.client and client is None:
                self.client.kill()
            return 0.05
        return max(0.0, min(self._deadline, self._grace if self._grace is not None else float("inf")) - now)


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

    What the program inherits is this process's environment, or the one given. Past the limit it is killed
    with all its descendants. For a server, start_client starts what drives it and makes it end. gate gets the
    id of the process that will become the program, which begins when gate returns.
    """
    program.find(command[0])
    arguments = [find_probe(), "-p", "-c", ",".join(groups) or "none", "-i", str(interval_ms)]
    set_variables = dict(variables or {})
    environment = dict(os.environ if inherited is None else inherited)
    # The user's preload is for the program; in the probe it would only weigh.
    if preload := environment.pop("LD_PRELOAD", None):
        set_variables.setdefault("LD_PRELOAD", preload)
    for name, value in set_variables.items():
        arguments += ["-e", f"{name}={value}"]
    read_end, write_end = os.pipe()
    here, there = socket.socketpair()
    if gate:
        arguments += ["-g", str(there.fileno())]
    with os.fdopen(read_end, "rb") as report_file, here, _Signals() as signals:
        try:
            # One that the terminal sends while the probe starts would end it before it can report.
            with signals.held() as held:
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
        # Nothing comes from a probe that fails before: its own report says why, or that there is none.
        if gate and (line := here.recv(64)):
            gate(int(line))
            here.sendall(b"g")
        watch = _Watch(process, start_client() if start_client else None, limit_s)
        signals.wait(watch)
        text = report_file.read()
        received = signals.received
    try:
        report = json.loads(text)
    except ValueError as error:
        ended = (
            f"by {signal_name(-process.returncode)}"
            if process.returncode < 0
            else f"with {process.returncode}"
        )
        raise CalmError(f"calm-probe ended {ended} and reported nothing") from error
    if report["error"]:
        raise program.exec_error(command[0], report["error"]["errno"])
    return _parse(report, received[0] if received else None, watch)
