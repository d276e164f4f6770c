"""Runs perf beside a program, at the highest level of detail that the user's rights allow.

Levels, the best first: tracepoints on all CPUs; page faults and CPU time with the kernel's part of the
stacks; the same without it; nothing. Each is tried, and perf's error message is the reason that reports give.

One event in N is sampled. perf's adaption of N to a frequency does not serve: the kernel (6.18 at least)
raises N within a burst, and lowers it only while events come faster than two ticks, so the first burst ends
all sampling. Two perf processes record instead. The fine one pauses for a second whenever it exceeds its
budget of bytes; the samples of the coarse one count for that time.

perf writes to files without a name, which the kernel removes with the last process that has them open.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from calm.commands.profile.counting import ShootdownCounts
from calm.commands.profile.recording import CLOCK, ENVIRONMENT, Recording, Sample, prepare, script
from calm.core import proc, processes
from calm.core.events import EVENTS, tracefs

STACK_BYTES = 4096
# One event in so many is sampled. Primes, so that no loop keeps step with them.
FINE, COARSE = 11, 997
# The budget of the fine perf: some 200 samples a second, and as many at once.
_BYTES_PER_S = _BURST_BYTES = 1 << 20
_PAUSE_S = 1.0
_START_S, _STOP_S = 30.0, 60.0
_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38

FULL, KERNEL, USER, NOTHING = "tracepoints", "kernel stacks", "user stacks", "nothing"
CALLS = ("madvise", "process_madvise", "munmap", "mprotect", "brk", "mremap", "mmap")
# What is counted exactly of a process that runs already.
COUNTED = ("shootdowns", "interrupts", "threads_started", *CALLS, "membarrier")
NO_PERF = "there is no perf in PATH"


def _events(level: str, clock: Sequence[str]) -> list[str]:
    """Arguments of perf record."""
    arguments, events = [], ["page-faults", *clock]
    if level == USER:
        events = ["page-faults:u", *(f"{event}u" for event in clock)]
    elif level == FULL:
        root, shootdowns = tracefs() or Path(), EVENTS["shootdowns"]
        arguments = ["-a", "-e", shootdowns.perf, "--filter", shootdowns.condition]
        traced = [EVENTS[name] for name in ("faults", *CALLS) if (root / EVENTS[name].path).is_dir()]
        events = [event.perf for event in traced] + events[EVENTS["faults"] in traced :]
    return arguments + [word for event in events for word in ("-e", event)]


def _refusal(level: str) -> str | None:
    """What perf does not report: without the right to it, the kernel leaves its part of the stacks out."""
    paranoid = proc.text("sys/kernel/perf_event_paranoid").strip()
    rights = int(proc.status(os.getpid()).get("CapEff", "0"), 16)
    may = rights & (1 << _CAP_SYS_ADMIN | 1 << _CAP_PERFMON) or not paranoid or int(paranoid) < 2
    return None if level != KERNEL or may else f"kernel.perf_event_paranoid is {paranoid}"


class _Perf:
    """One perf process, which counts or records between orders to begin and to end."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.cpu_s = self._cpu_before_s = 0.0
        self.running = True
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - kept until it is read
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        control, self._control = os.pipe()
        self._answers, answers = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*arguments, "-D", "-1", "--control", f"fd:{control},{answers}"],
                # The terminal's signals do not reach a session of its own.
                start_new_session=True,
                preexec_fn=lambda: processes.end_with_parent(signal.SIGTERM),
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self._errors,
                pass_fds=(control, answers),
            )
        finally:
            os.close(control)
            os.close(answers)

    @property
    def size(self) -> int:
        return os.fstat(self.output.fileno()).st_size

    def begin(self, order: str = "enable") -> str | None:
        """Waits until it has opened its counters and carried out an order; the reason if it cannot."""
        self.order(order)
        if self.answered(_START_S):
            self._cpu_before_s = self._cpu_s()
            return None
        self.end()
        self._errors.seek(0)
        lines = (line.strip() for line in self._errors.read().decode(errors="replace").splitlines())
        found = (line for line in lines if line.strip("- ") and line.lower() not in ("error:", "warning:"))
        first = next(found, f"perf wrote no message, and was not ready after {_START_S:.0f} s or had ended")
        return "".join(c if c.isprintable() else " " for c in first).removeprefix("Error:").strip()[:200]

    def _cpu_s(self) -> float:
        words = proc.text(f"{self._process.pid}/schedstat").split()
        return int(words[0]) * 1e-9 if words else 0.0

    def order(self, what: str) -> None:
        """Gives an order, and does not wait for the answer."""
        with contextlib.suppress(OSError):
            os.write(self._control, f"{what}\n".encode())

    def answered(self, within_s: float = 0.0) -> bool:
        return bool(select.select([self._answers], [], [], within_s)[0] and os.read(self._answers, 5))

    def ask_to_end(self) -> None:
        """Interrupts it. Several end at once so: closing a tracepoint waits for all CPUs."""
        if self.running:
            self.running = False
            # Its CPU time before and after is not spent beside the program.
            self.cpu_s = self._cpu_s() - self._cpu_before_s
            os.close(self._control)
            os.close(self._answers)
            self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Ends it, and waits until it has written everything."""
        self.ask_to_end()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Fine:
    """Switches the fine perf off and on, and records when it was on."""

    def __init__(self, perf: _Perf, now: float) -> None:
        self.perf = perf
        self.on = [[0.0, math.inf]]
        self._over = 0.0
        # perf begins with a list of all processes.
        self._size = perf.size
        self._last, self._next = now, 0.0
        self._pending = ""

    def tick(self, now: float) -> None:
        """Checks the budget; to be called some hundred times a second."""
        if self._pending and self.perf.answered():
            if self._pending == "enable":
                self.on.append([now, math.inf])
            self._pending = ""
        size = self.perf.size
        self._over = max(0.0, self._over - (now - self._last) * _BYTES_PER_S) + size - self._size
        self._size, self._last = size, now
        if self._pending:
            return
        if self.on[-1][1] < math.inf:
            if now >= self._next:
                self._over = 0.0
                self._order("enable")
        elif self._over > _BURST_BYTES:
            self.on[-1][1], self._next = now, now + _PAUSE_S
            self._order("disable")

    def _order(self, what: str) -> None:
        self.perf.order(what)
        self._pending = what

    def covers(self, at_s: float) -> bool:
        """Whether the fine samples of that moment count."""
        return any(begin <= at_s < end for begin, end in self.on)


class Recorder:
    """Records stacks of a process and its descendants."""

    def __init__(self, frequency: int) -> None:
        self.frequency = frequency
        self.level = NOTHING
        self.reasons: list[str] = []
        """Why each better level is not available."""
        self.began = 0.0
        """By the monotonic clock."""
        self.cpu_s = 0.0
        self.fine_share = 1.0
        """The part of the time in which one event in FINE was sampled, not one in COARSE."""
        self.shootdowns: dict[str, int] = {}
        """By cause, as far as they were counted."""
        self.counts = ShootdownCounts()
        self._perf = shutil.which("perf") or ""
        self._roots: Sequence[int] = ()
        self._perfs: list[_Perf] = []
        self._fine: _Fine | None = None

    def start(self, roots: Sequence[int]) -> None:
        """Begins to record, at the best level that is available."""
        self._roots = roots
        # Before perf, which would record how it begins.
        if self._perf and _refusal(FULL) is None:
            self.counts.start(roots)
        if not self._perf:
            self.reasons.append(f"{NO_PERF} (Debian's package linux-perf)")
        for level in (FULL, KERNEL, USER) if self._perf else ():
            if (why := _refusal(level) or self._try(level)) is None:
                self.level = level
                self._fine = _Fine(self._perfs[1], time.monotonic())
                break
            self.reasons.append(f"{level}: {why}")
        self.began = time.monotonic()

    def _try(self, level: str) -> str | None:
        clock = [f"{CLOCK}/period={round(1e9 / self.frequency)}/"]
        target = [] if level == FULL else ["-p", ",".join(map(str, self._roots))]
        self._perfs = []
        why: str | None = None
        try:
            for period, events in ((COARSE, clock), (FINE, [])):
                # With periods recorded, the kernel would give a sample for each event.
                arguments = [self._perf, "record", "-q", "-B", "-N", "-k", "mono", "-m", "256", "-o", "-"]
                arguments += ["--no-period", "-c", str(period), "--call-graph", f"dwarf,{STACK_BYTES}"]
                self._perfs.append(_Perf([*arguments, *_events(level, events), *target]))
            for perf in self._perfs:
                why = why or perf.begin()
        except OSError as error:
            why = f"{error.strerror}"
        if why is not None:
            self._end()
        return why

    def _end(self) -> None:
        for perf in self._perfs:
            perf.ask_to_end()
        for perf in self._perfs:
            perf.end()

    def tick(self) -> None:
        """To be called some hundred times a second, by one thread."""
        if self._fine is not None:
            self._fine.tick(time.monotonic())

    def stop(self, wall_s: float = 0.0) -> None:
        """Ends the recording after the last tick; wall_s is the time of it that counts."""
        if self._fine is not None and self._fine.perf.running and wall_s:
            last = self.began + wall_s
            on = sum(max(0.0, min(end, last) - max(begin, self.began)) for begin, end in self._fine.on)
            self.fine_share = min(1.0, on / wall_s)
        # The counts take a while to end, and would be sampled.
        for perf in self._perfs:
            perf.ask_to_end()
        self.shootdowns = self.shootdowns or self.counts.stop()
        self._end()
        self.cpu_s = sum(perf.cpu_s for perf in self._perfs)

    def close(self) -> None:
        """Ends what still runs."""
        self.counts.close()
        self.stop()

    def samples(self, found: Recording) -> Iterator[tuple[Sample, float]]:
        """The samples of a recording that has ended, and the part of it read; `found` gets its figures."""
        if self._fine is None:
            return
        for number, (perf, period) in enumerate(zip(self._perfs, (COARSE, FINE), strict=True)):
            with tempfile.TemporaryFile() as prepared:
                before = found.samples
                with perf.output:
                    prepare(perf.output, prepared, self._roots, found)
                prepared.seek(0)
                total = max(1, found.samples - before)
                read = script(self._perf, prepared, period, traced=self.level == FULL)
                for index, sample in enumerate(read):
                    # Only the coarse perf has the clock.
                    if sample.event == CLOCK or self._fine.covers(sample.at_s) == (period == FINE):
                        yield sample, (number + index / total) / 2


def parse_counts(text: str) -> dict[str, int]:
    """The output of `perf stat -x,`, by the names in COUNTED. A task that never ran had no events."""
    names = {EVENTS[name].perf: name for name in COUNTED}
    found = {}
    for fields in (line.split(",") for line in text.splitlines()):
        if len(fields) > 2 and fields[2] in names and (fields[0].isdigit() or fields[0] == "<not counted>"):
            found[names[fields[2]]] = int(fields[0]) if fields[0].isdigit() else 0
    return found


class Counting:
    """Counts exactly, for processes that run already: between begin and stop."""

    def __init__(self, roots: Sequence[int]) -> None:
        self.reasons: dict[str, str] = {}
        self.cpu_s = 0.0
        self._perf: _Perf | None = None
        perf, root = shutil.which("perf"), tracefs()
        if perf is None or root is None:
            why = NO_PERF if perf is None else "tracefs is not readable"
            self.reasons = dict.fromkeys(COUNTED, why)
            return
        # One event that this kernel lacks would make perf refuse all of them.
        self.reasons = {
            name: f"this kernel has no tracepoint {EVENTS[name].perf}"
            for name in COUNTED
            if not (root / EVENTS[name].path).is_dir()
        }
        arguments = [perf, "stat", "-x", ",", "--log-fd", "1", "-p", ",".join(map(str, roots))]
        for event in (EVENTS[name] for name in COUNTED if name not in self.reasons):
            arguments += ["-e", event.perf, *(["--filter", event.condition] if event.condition else [])]
        self._perf = _Perf(arguments)
        # Opening all counters takes a while that is not observed: they stay off until `begin`.
        self.begin("disable")

    def begin(self, order: str = "enable") -> None:
        if self._perf is not None and (why := self._perf.begin(order)) is not None:
            self._perf = None
            self.reasons |= dict.fromkeys(COUNTED, f"perf stat: {why}")

    def stop(self) -> None:
        if self._perf is not None:
            self._perf.order("disable")

    def end(self) -> dict[str, int]:
        """Ends perf; the counts by name."""
        if self._perf is None:
            return {}
        self._perf.end()
        self.cpu_s = self._perf.cpu_s
        self._perf.output.seek(0)
        return parse_counts(self._perf.output.read().decode(errors="replace"))

    close = end
