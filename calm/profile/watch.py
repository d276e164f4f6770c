"""Profiles a program that is started for it, or a process that runs already."""

import os
import pwd
import re
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from calm import machine, mapped, processes
from calm.errors import CalmError
from calm.measure import METRICS, SYSCALL_GROUP, TLB_GROUP, Measurement, counts, how, measure
from calm.profile import findings
from calm.profile.build import FEW, Parts, build
from calm.profile.memory import Sampler
from calm.profile.model import CALL, CPU, SHOOTDOWN, Profile, Total
from calm.profile.recorder import (
    CALLS,
    COARSE,
    FINE,
    FULL,
    NOTHING,
    STACK_BYTES,
    USER,
    Counting,
    Recorder,
)
from calm.profile.recording import Recording
from calm.profile.script import Sample
from calm.report import duration, share

_NAMES = {"shootdowns_begun": "shootdowns"}
_LEFT_OUT = ("wall_s", "interrupts_received", "cycles", "instructions", "dtlb_load_misses", "llc_load_misses")
# What a sample with 4 KiB of stack takes from the thread that it is taken of, at most.
_SAMPLE_S = 5e-6
# What an event takes that both perfs pass over at most, beyond what counting takes: 50 ns each, as measured.
_PASSED_S = 1e-7
_SHORT_S = 0.2
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Progress:
    """Tells how far the watching and the reading are: seconds, and a share."""

    watching: Callable[[float], None] = lambda _: None
    reading: Callable[[float], None] = lambda _: None


def _program(pid: int) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/exe").readlink())
    return ""


class _Mapped:
    """Which allocator a process has: told by what it maps, and anew when it runs another program."""

    def __init__(self, pid: int, before: str = "") -> None:
        """before: what runs until the program does, and does not matter."""
        self.allocator = "unknown"
        self._pid = pid
        self._before = before
        self._program = ""
        self._next = self._pause_s = 0.0

    def look(self) -> None:
        """To be called often: it reads more and more seldom, because libraries come one after the other."""
        program, now = _program(self._pid), time.monotonic()
        if program in ("", self._before):
            return
        if program != self._program:
            self.allocator, self._program = "unknown", program
            self._next, self._pause_s = now, 0.005
        if now < self._next:
            return
        self._pause_s *= 2
        self._next = now + self._pause_s
        with suppress(OSError):
            found = mapped.allocator(Path(f"/proc/{self._pid}/maps").read_text(errors="replace").splitlines())
            # One that ends has nothing mapped any more.
            self.allocator = found or self.allocator


def program_totals(measured: Measurement) -> dict[str, Total]:
    """What the probe counted, by the names that a profile has."""
    broadcast = machine.broadcast_here()
    found = {
        _NAMES.get(metric.key, metric.key): Total(
            counts(measured, metric, broadcast), how(metric, measured, broadcast), metric.unit
        )
        for metric in METRICS
        if metric.key not in _LEFT_OUT
    }
    found["major_faults"] = Total(measured.major_faults, found["minor_faults"].how)
    # Beside an exact count the one of the whole machine says nothing.
    if found["interrupts_sent"].value is not None:
        del found["system_wide_tlb_interrupts"]
    return found


@dataclass(frozen=True)
class _Spent:
    """What a process has spent, with what its children had that were waited for."""

    figures: tuple[float, ...]
    """Minor and major faults, user and system seconds."""
    children_faults: int
    parent: int
    start: int
    """When it began: another process of the same number has another."""


def _spent(pid: int) -> _Spent | None:
    try:
        # The name, which may hold anything, is cut after 15 bytes: within a character too.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    number = [int(field) for field in fields[7:15]]
    return _Spent(
        figures=(
            number[0] + number[1],
            number[2] + number[3],
            (number[4] + number[6]) / _TICKS,
            (number[5] + number[7]) / _TICKS,
        ),
        children_faults=number[1],
        parent=int(fields[1]),
        start=int(fields[19]),
    )


class _Before:
    """What processes had spent when watching began."""

    def __init__(self, root: int) -> None:
        self.root = root
        self._then = {pid: spent for pid in self._family() if (spent := _spent(pid))}
        self._latest = dict(self._then)
        self._interrupts = machine.tlb_interrupts()

    def _family(self) -> list[int]:
        return [self.root, *processes.descendants(self.root)]

    def look(self) -> None:
        """To be called now and then: what has ended cannot be asked at the end."""
        for pid in self._family():
            if spent := _spent(pid):
                self._latest[pid] = spent

    def _sums(self) -> list[float]:
        alive = {
            pid: now for pid, was in self._latest.items() if (now := _spent(pid)) and now.start == was.start
        }
        if self.root in self._latest:
            alive.setdefault(self.root, self._latest[self.root])
        sums = [0.0] * 4

        def add(figures: tuple[float, ...], sign: int) -> None:
            for field, value in enumerate(figures):
                sums[field] += sign * value

        for pid, latest in self._latest.items():
            then = self._then.get(pid)
            if pid in alive:
                add(alive[pid].figures, 1)
            elif self._has_its_faults(alive, pid):
                # All that it ever spent is in the figures of whoever waited for it: from before, too.
                pass
            else:
                add(latest.figures, 1)
            if then is not None:
                add(then.figures, -1)
        return sums

    def _has_its_faults(self, alive: Mapping[int, _Spent], ended: int) -> bool:
        """A process above one that has ended waited for it: nobody need do so."""
        above = self._latest[ended].parent
        while above not in alive and above in self._latest:
            above = self._latest[above].parent
        if above not in alive:
            return False
        before = self._then[above].children_faults if above in self._then else 0
        return alive[above].children_faults - before >= self._latest[ended].figures[0]

    def totals(self) -> dict[str, Total]:
        """What was spent since."""
        self.look()
        sums = [max(0, value) for value in self._sums()]
        text = "/proc/PID/stat, the process and its children"
        now = machine.tlb_interrupts()
        row = now - self._interrupts if now is not None and self._interrupts is not None else None
        return {
            "user_s": Total(sums[2], text, "s"),
            "system_s": Total(sums[3], text, "s"),
            "minor_faults": Total(sums[0], text),
            "major_faults": Total(sums[1], text),
            "system_wide_tlb_interrupts": Total(
                row, "/proc/interrupts, TLB row: system-wide, counts every process"
            ),
        }


def check_pid(pid: int) -> None:
    """Whether the process can be watched, before anything is started."""
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except FileNotFoundError as error:
        raise CalmError(f"there is no process {pid}") from error
    fields = dict(re.findall(r"^(\w+):\s*(.*)$", status, re.MULTILINE))
    if fields.get("Tgid", str(pid)) != str(pid):
        raise CalmError(f"{pid} is a thread of process {fields['Tgid']}: give that one")
    if fields.get("State", "").startswith("Z"):
        raise CalmError(f"process {pid} has ended, and waits for its parent")
    if "VmSize" not in fields:
        raise CalmError(f"process {pid} is a thread of the kernel: it has no memory of its own")
    if os.geteuid() not in (0, owner):
        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = str(owner)
        raise CalmError(f"process {pid} belongs to {name}: only root may profile it")


def _own_cost(
    recorder: Recorder,
    looked: int,
    program_s: float,
    processes_s: dict[str, float],
    counting_s: float | None,
) -> tuple[list[str], float]:
    """In sentences, and as a share of the program's time: wall or CPU time, whichever is more."""
    tracing = looked * _SAMPLE_S + (counting_s or 0.0)
    cpu = sum(processes_s.values())
    parts = ", ".join(f"{name} {duration(spent)}" for name, spent in processes_s.items() if spent)
    lines = [f"CPU time of what watched: {parts}: {share(cpu, program_s)} of the program's time"]
    if recorder.level != NOTHING:
        lines.append(
            f"{looked:,} samples with {STACK_BYTES} bytes of stack, at most {_SAMPLE_S * 1e6:.0f} µs each"
            + (f", and {duration(counting_s)} at most for events counted" if counting_s else "")
            + f", from the program's own threads: {share(tracing, program_s)} of its time"
        )
        lines.append(
            f"one event in {FINE} was looked at for {100 * recorder.fine_share:.0f} % of the time, "
            f"one in {COARSE} otherwise; weights are scaled to the exact totals"
        )
    return lines, (cpu + tracing) / max(program_s, 1e-9)


def _advice(recorder: Recorder) -> list[str]:
    """What is missing for want of rights, and what would give it."""
    if recorder.level == FULL:
        return []
    with suppress(OSError):
        paranoid = Path("/proc/sys/kernel/perf_event_paranoid").read_text().strip()
        lost = {
            NOTHING: "no stacks, and no causes",
            USER: "stacks are of user code, for faults and CPU time alone; shootdowns and calls have none",
        }.get(recorder.level, "stacks are of page faults and CPU time alone; shootdowns and calls have none")
        lines = [f"{lost}: {recorder.reasons[-1 if recorder.level == NOTHING else 0]}"]
        if not any("no perf" in reason for reason in recorder.reasons):
            lines.append(
                "root, CAP_PERFMON (and read access to /sys/kernel/tracing), or sysctl "
                f"kernel.perf_event_paranoid=-1 (it is {paranoid}) gives all; a container's seccomp profile "
                "must allow perf_event_open as well"
            )
        return lines
    return ["no stacks: this kernel has no performance events"]


class Watcher:
    """One profile's making."""

    def __init__(self, frequency: int, progress: Progress) -> None:
        self.frequency = frequency
        self.progress = progress
        self.interrupted = False
        self._mapped: _Mapped | None = None

    def run(self, command: Sequence[str], stdout: int | None = None) -> Profile:
        """Starts a program and watches it to its end."""
        began = datetime.now().astimezone().isoformat(timespec="seconds")
        with Recorder(self.frequency) as recorder:
            samplers: list[Sampler] = []

            def gate(pid: int) -> None:
                recorder.start([pid])
                self._mapped = _Mapped(pid, _program(pid))
                samplers.append(Sampler(pid, lambda: self._tick(recorder)))
                samplers[0].start(recorder.began)

            try:
                measured = measure(command, gate=gate, groups=(TLB_GROUP, SYSCALL_GROUP), stdout=stdout)
            finally:
                for sampler in samplers:
                    sampler.stop()
            recorder.stop(measured.wall_s)
            totals = program_totals(measured)
            spent = {"perf": recorder.cpu_s, "calm": samplers[0].cpu_s, "calm-probe": measured.own.cpu_s}
            self.interrupted = measured.interrupted_by is not None
            profile = self._put_together(
                recorder, samplers[0], totals, measured.wall_s, spent, measured.tracing_s, measured.processes
            )
        return replace(
            profile,
            command=list(command),
            began=began,
            exit_code=measured.exit_code,
            interrupted=self.interrupted,
        )

    def watch(self, pid: int, for_s: float | None) -> Profile:
        """Watches a process that runs already."""
        began = datetime.now().astimezone().isoformat(timespec="seconds")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        roots = [pid, *processes.descendants(pid)]
        with Recorder(self.frequency) as recorder, Counting(roots, recorder.folder) as counting:
            recorder.start(roots)
            counting.begin()
            before = _Before(pid)
            self._mapped = _Mapped(pid)
            sampler = Sampler(pid, lambda: self._tick(recorder))
            sampler.start(recorder.began)
            try:
                self._wait(pid, for_s, before)
            except KeyboardInterrupt:
                self.interrupted = True
            finally:
                wall_s = time.monotonic() - recorder.began
                counting.stop()
                sampler.stop()
            totals = before.totals()
            recorder.stop(wall_s)
            numbers = counting.end()
            for name, value in numbers.items():
                totals[name] = Total(value, "perf stat, the process and what it starts")
            for name, why in counting.reasons.items():
                totals[name] = Total(None, f"not counted: {why}")
            curves = sampler.curves()
            if "rss" in curves:
                peak = max(curves["rss"].kib)
                totals["peak_rss_kib"] = Total(peak, f"{sampler.looks} samples of the process tree", "KiB")
            if broadcast := machine.broadcast_here():
                for name in ("shootdowns", "interrupts_sent"):
                    if broadcast.always:
                        totals[name] = Total(None, f"not counted: {broadcast.note}")
            if totals.get("interrupts_sent", Total(None, "")).value is not None:
                del totals["system_wide_tlb_interrupts"]
            spent = {"perf": recorder.cpu_s + counting.cpu_s, "calm": sampler.cpu_s}
            profile = self._put_together(recorder, sampler, totals, wall_s, spent, None, len(roots))
        return replace(
            profile,
            command=[os.fsdecode(word) for word in words],
            pid=pid,
            began=began,
            interrupted=self.interrupted,
        )

    def _wait(self, pid: int, for_s: float | None, before: _Before) -> None:
        begin = time.monotonic()
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                while for_s is None or time.monotonic() - begin < for_s:
                    left = 0.5 if for_s is None else min(0.5, for_s - (time.monotonic() - begin))
                    if select.select([descriptor], [], [], max(0.0, left))[0]:
                        return
                    before.look()
                    self.progress.watching(time.monotonic() - begin)
            finally:
                os.close(descriptor)

    def _tick(self, recorder: Recorder) -> None:
        recorder.tick()
        if self._mapped is not None:
            self._mapped.look()

    def _samples(self, recorder: Recorder, recording: Recording) -> Iterator[Sample]:
        try:
            yield from recorder.samples(recording, self.progress.reading)
        except KeyboardInterrupt:
            self.interrupted = True

    def _put_together(
        self,
        recorder: Recorder,
        sampler: Sampler,
        totals: dict[str, Total],
        wall_s: float,
        spent: dict[str, float],
        counting_s: float | None,
        processes_seen: int,
    ) -> Profile:
        recording = Recording()
        kernel_stacks = recorder.level not in (USER, NOTHING)
        samples = self._samples(recorder, recording)
        parts = build(samples, totals, recorder.began, wall_s, 1 / self.frequency, kernel_stacks)
        if (mmaps := parts.sums.get(f"{CALL}:mmap")) is not None and "mmap" not in totals:
            totals["mmap"] = Total(mmaps, "about, by samples: not counted")
        events = [totals[name].value for name in ("shootdowns", "minor_faults", *CALLS) if name in totals]
        if recorder.level == FULL:
            passed = sum(value for value in events if value is not None) * _PASSED_S
            counting_s = (counting_s or 0.0) + passed
        used = [totals[name].value or 0.0 for name in ("user_s", "system_s")]
        own_cost, own_share = _own_cost(
            recorder, recording.samples, max(wall_s, sum(used)), spent, counting_s
        )
        profile = Profile(
            command=[],
            pid=None,
            began="",
            wall_s=wall_s,
            exit_code=None,
            allocator=self._mapped.allocator if self._mapped else "unknown",
            privileged=recorder.level == FULL,
            machine=machine.describe(),
            totals=totals,
            causes=parts.causes,
            frames=parts.frames,
            stacks=parts.stacks,
            timeline=parts.timeline,
            curves=sampler.curves(),
            findings=[],
            own_cost=own_cost,
            own_share=own_share,
            notes=[*_advice(recorder), *self._notes(recorder, recording, parts, totals, wall_s)],
            kernel_stacks=kernel_stacks,
        )
        # Most of those that end soon are in the recording alone.
        number = max(processes_seen, len(recording.processes), 1)
        return replace(profile, findings=findings.find(profile, number))

    def _notes(
        self, recorder: Recorder, recording: Recording, parts: Parts, totals: dict[str, Total], wall_s: float
    ) -> list[str]:
        notes = []
        if broadcast := machine.broadcast_here():
            notes.append(broadcast.note)
        ticks = parts.samples.get(CPU, 0)
        number = sum(parts.samples.values())
        if recorder.level != NOTHING and number < FEW:
            what = "was too short for stacks" if wall_s < _SHORT_S else "had little to be sampled"
            notes.append(f"{duration(wall_s)} {what}: there are {number} samples")
        elif recorder.level != NOTHING and ticks < FEW:
            notes.append(f"samples of CPU time: {ticks} alone, so shares of it are rough (--freq takes more)")
        shootdowns = totals.get("shootdowns")
        if shootdowns and shootdowns.value and not parts.samples.get(SHOOTDOWN) and recorder.level == FULL:
            notes.append(f"none of the {shootdowns.value:,.0f} shootdowns was among the samples")
        if recording.lost:
            notes.append(
                f"{recording.lost:,} samples, of all programs, were lost when perf had no room; totals are "
                "exact all the same, and shares come from the others"
            )
        return notes
