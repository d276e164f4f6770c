"""Runs perf beside a program: as much of it as the user's rights allow.

Levels, the best first: tracepoints on all CPUs; the program's page faults and CPU time with the kernel's part
of the stacks; the same without it; nothing. Each is tried, because no list of conditions would be whole:
what perf then says is the reason that is given.

Every Nth event is looked at. perf's own adaption of N to a frequency will not do: the kernel (6.18 at least)
raises N within a burst, and lowers it only while events come faster than two ticks, so after one burst there
are no samples. Two perfs run instead. One is fine, and is switched off for a second whenever it writes
more than its budget; the other is coarse, and counts for the time that the fine one is off.
"""

import contextlib
import functools
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from calm import processes
from calm.profile import script
from calm.profile.recording import Recording, prepare
from calm.profile.script import Sample

STACK_BYTES = 4096
# One event in so many is looked at. Primes, so that no loop keeps step with them.
FINE, COARSE = 11, 997
# What the fine one may write: some 200 samples a second for long, as many at once.
_BYTES_PER_S = 1 << 20
_BYTES_AT_ONCE = 1 << 20
_PAUSE_S = 1.0
CALLS = ("madvise", "process_madvise", "munmap", "mprotect", "brk", "mremap", "mmap")
_READY_S = 30.0
_STOP_S = 60.0
_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38
# The user's configuration of perf would change what it prints.
_ENVIRONMENT = os.environ | {"LC_ALL": "C", "PERF_CONFIG": "/dev/null"}

FULL, KERNEL, USER, NOTHING = "tracepoints", "kernel stacks", "user stacks", "nothing"

SHOOTDOWN_EVENT = "tlb:tlb_flush"
FAULT_EVENT = "exceptions:page_fault_user"


@functools.cache
def _has_offsets(perf: str) -> bool:
    """Whether it knows the offset in a file as a field."""
    done = subprocess.run(
        [perf, "script", "-h"],
        capture_output=True,
        text=True,
        errors="replace",
        env=_ENVIRONMENT,
        check=False,
    )
    return f",{script.OFFSET_FIELD}," in done.stdout + done.stderr


def _events(level: str, clock: list[str]) -> list[str]:
    """Arguments of perf record."""
    if level == FULL:
        arguments = ["-a", "-e", SHOOTDOWN_EVENT, "--filter", "reason==4"]
        root = next((r for r in ("/sys/kernel/tracing", "/sys/kernel/debug/tracing") if Path(r).is_dir()), "")
        known = [call for call in CALLS if Path(root, "events/syscalls", f"sys_enter_{call}").is_dir()]
        # The tracepoint tells a copy-on-write from other faults, but only x86 has it.
        traced = Path(root, "events/exceptions/page_fault_user").is_dir()
        others = [FAULT_EVENT if traced else "page-faults"]
        others += [f"syscalls:sys_enter_{call}" for call in known]
        return arguments + [word for event in [*others, *clock] for word in ("-e", event)]
    mode = "u" if level == USER else ""
    events = ["page-faults" + (":u" if mode else ""), *(event + mode for event in clock)]
    return [word for event in events for word in ("-e", event)]


def _refused(level: str) -> str | None:
    """What perf would not say: it leaves the kernel's part out where that is not permitted."""
    if level != KERNEL:
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        paranoid = int(Path("/proc/sys/kernel/perf_event_paranoid").read_text())
        status = Path("/proc/self/status").read_text()
        rights = int(status.partition("CapEff:")[2].split()[0], 16)
        if paranoid >= 2 and not rights & (1 << _CAP_SYS_ADMIN | 1 << _CAP_PERFMON):
            return f"kernel.perf_event_paranoid is {paranoid}"
    return None


def _first_sentence(text: str) -> str:
    """What perf said is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip().strip("- ")]
    lines = [line for line in lines if line.lower() not in ("error:", "warning:")]
    printable = "".join(c if c.isprintable() else " " for c in (lines[0] if lines else "it said nothing"))
    return printable.removeprefix("Error:").strip()[:200]


class _Perf:
    """One perf process that counts or records from when it is told to, until it is told to end."""

    def __init__(self, arguments: Sequence[str], folder: Path, name: str) -> None:
        self.cpu_s = self._before_s = 0.0
        self._asked = False
        self.output = folder / f"{name}.out"
        self.errors = folder / f"{name}.err"
        control, self._control = os.pipe()
        self._answer, answer = os.pipe()
        try:
            with self.output.open("wb") as output, self.errors.open("wb") as errors:
                # In a session of its own: what the terminal sends is not for it.
                self._process = subprocess.Popen(
                    [*arguments, "-D", "-1", "--control", f"fd:{control},{answer}"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    pass_fds=(control, answer),
                    start_new_session=True,
                    preexec_fn=lambda: processes.end_with_parent(signal.SIGTERM),
                    env=_ENVIRONMENT,
                )
        finally:
            os.close(control)
            os.close(answer)

    def begin(self, order: str = "enable") -> str | None:
        """Waits until it has opened its counters and carried out an order; the reason if that cannot be."""
        self.tell(order)
        ready, _, _ = select.select([self._answer], [], [], _READY_S)
        if ready and os.read(self._answer, 5):
            self._before_s = self._spent_s()
            return None
        said = f"it was not ready after {_READY_S:.0f} s" if not ready else ""
        self.end()
        return said or _first_sentence(self.errors.read_text(errors="replace"))

    def _spent_s(self) -> float:
        """CPU time until now."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0]) * 1e-9
        return 0.0

    def tell(self, what: str) -> None:
        """Gives an order, which is answered some time."""
        with contextlib.suppress(OSError):
            os.write(self._control, f"{what}\n".encode())

    def answered(self) -> bool:
        """An order was carried out."""
        return bool(select.select([self._answer], [], [], 0)[0] and os.read(self._answer, 5))

    @property
    def running(self) -> bool:
        """It was not ended yet."""
        return self._process.returncode is None

    def ask_to_end(self) -> None:
        """Tells it to end, so that several do so at once: closing a tracepoint waits for all CPUs."""
        if not self.running or self._asked:
            return
        self._asked = True
        # What it spends before and after has no part in what was watched.
        self.cpu_s = self._spent_s() - self._before_s
        os.close(self._control)
        os.close(self._answer)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGINT)

    def end(self) -> None:
        """Ends it, and waits until all is written."""
        self.ask_to_end()
        deadline = time.monotonic() + _STOP_S
        while self.running:
            try:
                self._process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._process.kill()


class _Fine:
    """Switches the fine perf off and on, and remembers when it was on."""

    def __init__(self, perf: _Perf, now: float) -> None:
        self.perf = perf
        self.on = [[now, float("inf")]]
        self._level = 0.0
        # What perf writes at first is a list of all processes.
        self._size = perf.output.stat().st_size
        self._last = now
        self._next = 0.0
        self._pending: list[str] = []

    def tick(self, now: float) -> None:
        """To be called some hundred times a second."""
        if self._pending and self.perf.answered() and self._pending.pop(0) == "enable":
            self.on.append([now, float("inf")])
        size = self.perf.output.stat().st_size
        self._level = max(0.0, self._level - (now - self._last) * _BYTES_PER_S) + size - self._size
        self._size, self._last = size, now
        if self._pending:
            return
        if self.on[-1][1] == float("inf"):
            if self._level > _BYTES_AT_ONCE:
                self.on[-1][1] = now
                self._next = now + _PAUSE_S
                self.perf.tell("disable")
                self._pending.append("disable")
        elif now >= self._next:
            self._level = 0.0
            self.perf.tell("enable")
            self._pending.append("enable")

    def covers(self, at_s: float) -> bool:
        """The fine samples of that moment are there, and count."""
        return any(begin <= at_s < end for begin, end in self.on)


@dataclass
class Recorder:
    """Records stacks of a process and its descendants."""

    frequency: int
    level: str = NOTHING
    reasons: list[str] = field(default_factory=list)
    """Why each better level is not there."""
    began: float = 0.0
    """By the monotonic clock."""
    cpu_s: float = 0.0
    fine_share: float = 1.0
    """Of the time, in which every FINEth event was looked at instead of every COARSEth."""
    _roots: list[int] = field(default_factory=list)
    _coarse: _Perf | None = None
    _fine: _Fine | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "Recorder":
        self._folder = tempfile.TemporaryDirectory(prefix="calm-profile-")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        assert self._folder is not None
        self._folder.cleanup()

    @property
    def folder(self) -> Path:
        """Private, and removed at the end."""
        assert self._folder is not None
        return Path(self._folder.name)

    def start(self, roots: Sequence[int]) -> None:
        """Begins to record, at the best level that is to be had."""
        self._roots = list(roots)
        perf = shutil.which("perf")
        if perf is None:
            self.reasons.append("there is no perf in PATH (Debian's package linux-perf)")
        else:
            for level in (FULL, KERNEL, USER):
                if (why := _refused(level) or self._try(perf, level)) is None:
                    self.level = level
                    break
                self.reasons.append(f"{level}: {why}")
        self.began = time.monotonic()
        if self._fine is not None:
            self._fine.on[0][0] = self.began

    def _try(self, perf: str, level: str) -> str | None:
        clock = [f"{script.CLOCK}/period={round(1e9 / self.frequency)}/"]
        started: list[_Perf] = []
        why: str | None = None
        try:
            for name, period, events in (("coarse", COARSE, clock), ("fine", FINE, [])):
                arguments = [perf, "record", "-q", "-B", "-N", "-k", "mono", "-m", "256"]
                # With periods recorded, the kernel would give a sample for each event.
                arguments += [
                    "--no-period",
                    "-c",
                    str(period),
                    "-o",
                    "-",
                    "--call-graph",
                    f"dwarf,{STACK_BYTES}",
                    *_events(level, events),
                ]
                if level != FULL:
                    arguments += ["-p", ",".join(map(str, self._roots))]
                started.append(_Perf(arguments, self.folder, name))
            for one in started:
                why = why or one.begin()
        except OSError as error:
            why = f"{error.strerror}"
        if why is not None:
            for one in started:
                one.ask_to_end()
            for one in started:
                one.end()
            return why
        self._coarse, self._fine = started[0], _Fine(started[1], time.monotonic())
        return None

    def tick(self) -> None:
        """To be called some hundred times a second, by one thread."""
        if self._fine is not None:
            self._fine.tick(time.monotonic())

    def stop(self, wall_s: float = 0.0) -> None:
        """Ends recording, once nothing ticks any more; what is of interest lasted so long."""
        if self._coarse is None or self._fine is None:
            return
        if self._coarse.running and wall_s:
            last = self.began + wall_s
            on = sum(max(0.0, min(end, last) - begin) for begin, end in self._fine.on)
            self.fine_share = min(1.0, on / wall_s)
        both = (self._coarse, self._fine.perf)
        for perf in both:
            perf.ask_to_end()
        for perf in both:
            perf.end()
        self.cpu_s = self._coarse.cpu_s + self._fine.perf.cpu_s

    def samples(
        self, found: Recording, progress: Callable[[float], None] = lambda _: None
    ) -> Iterator[Sample]:
        """What was recorded, once stopped, each sample with its period; tells about it in `found`."""
        if self._coarse is None or self._fine is None:
            return
        for number, perf in enumerate((self._coarse, self._fine.perf)):
            fine = number == 1
            fit = perf.output.with_suffix(".fit")
            with perf.output.open("rb") as source, fit.open("wb") as target:
                before = found.samples
                prepare(source, target, self._roots, found)
                total = found.samples - before
            perf.output.unlink()
            for index, sample in enumerate(self._script(fit, FINE if fine else COARSE)):
                progress((number + index / max(total, 1)) / 2)
                # The clock runs in the coarse one alone.
                if sample.event == script.CLOCK or self._fine.covers(sample.at_s) == fine:
                    yield sample

    def _script(self, recorded: Path, period: int) -> Iterator[Sample]:
        perf = shutil.which("perf") or "perf"
        arguments = [
            perf,
            "script",
            "-i",
            "-",
            "--no-inline",
            "--no-demangle",
            "-F",
        ]
        # Without the tracepoints' fields there are none to be printed, and perf refuses to.
        fields = script.FIELDS if self.level == FULL else script.FIELDS.removesuffix(",trace")
        has_offsets = _has_offsets(perf)
        if has_offsets:
            fields += f",{script.OFFSET_FIELD}"
        with recorded.open("rb") as source:
            process = subprocess.Popen(
                [*arguments, fields],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                text=True,
                errors="replace",
                preexec_fn=lambda: processes.end_with_parent(signal.SIGTERM),
                env=_ENVIRONMENT,
            )
        assert process.stdout is not None
        try:
            yield from script.read(process.stdout, period, has_offsets=has_offsets)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


# What is counted of a process that runs already: name, event, filter.
COUNTED = (
    ("shootdowns", SHOOTDOWN_EVENT, "reason==4"),
    ("interrupts_sent", "csd:csd_queue_cpu", "func.function == flush_tlb_func"),
    ("threads_started", "task:task_newtask", "clone_flags & 0x10000"),
    *((call, f"syscalls:sys_enter_{call}", None) for call in (*CALLS, "membarrier")),
)


def parse_counts(text: str) -> dict[str, int]:
    """What `perf stat -x,` wrote, by the names in COUNTED. What never ran on a CPU met no event."""
    names = {event: name for name, event, _ in COUNTED}
    found = {}
    for line in text.splitlines():
        fields = line.split(",")
        if len(fields) > 2 and fields[2] in names:
            if fields[0].isdigit():
                found[names[fields[2]]] = int(fields[0])
            elif fields[0] == "<not counted>":
                found[names[fields[2]]] = 0
    return found


class Counting:
    """Counts exactly, for processes that run already: between begin and stop."""

    def __init__(self, roots: Sequence[int], folder: Path) -> None:
        self.reasons: dict[str, str] = {}
        self.cpu_s = 0.0
        self._file = folder / "counts"
        self._perf: _Perf | None = None
        perf = shutil.which("perf")
        if perf is None:
            self.reasons = {name: "there is no perf in PATH" for name, _, _ in COUNTED}
            return
        wanted = list(COUNTED)
        # An event that this kernel lacks would refuse them all.
        while wanted:
            arguments = [perf, "stat", "-x", ",", "-o", str(self._file), "-p", ",".join(map(str, roots))]
            for _, event, condition in wanted:
                arguments += ["-e", event, *(["--filter", condition] if condition else [])]
            started = _Perf(arguments, folder, "stat")
            # They are off still: to open all that is recorded takes its time, which is not watched.
            if (why := started.begin("disable")) is None:
                self._perf = started
                return
            name, event, _ = wanted.pop(next((i for i, c in enumerate(wanted) if c[1] in why), 0))
            self.reasons[name] = f"perf stat: {why}"
            # Rights are the same for all.
            if name == COUNTED[0][0]:
                self.reasons |= {name: f"perf stat: {why}" for name, _, _ in wanted}
                return

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Counts from now on."""
        if self._perf is not None and (why := self._perf.begin()) is not None:
            self._perf = None
            self.reasons |= {name: f"perf stat: {why}" for name, _, _ in COUNTED}

    def stop(self) -> None:
        """Counts no longer."""
        if self._perf is not None:
            self._perf.tell("disable")

    def end(self) -> dict[str, int]:
        """Ends perf; the counts by name."""
        if self._perf is None:
            return {}
        self._perf.end()
        self.cpu_s = self._perf.cpu_s
        try:
            return parse_counts(self._file.read_text())
        except OSError:
            return {}
