"""Profiles a command that it starts, or a process that runs already."""

from __future__ import annotations

import os
import pwd
import select
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import datetime
from operator import add, neg
from typing import Any

from msgspec.structs import replace

from calm.commands.profile import findings
from calm.commands.profile import recorder as levels
from calm.commands.profile.build import build
from calm.commands.profile.memory import UNREADABLE, Sampler
from calm.commands.profile.recorder import Counting, Recorder
from calm.commands.profile.recording import Recording, Sample
from calm.core import machine, proc
from calm.core.errors import CalmError
from calm.core.measure import (
    METRIC,
    METRICS,
    SHOOTDOWNS,
    SYSCALL_GROUP,
    TLB_GROUP,
    Measurement,
    how,
    measure,
)
from calm.core.profile_model import CALL, CPU, FEW_SAMPLES, SHOOTDOWN, Profile, Total
from calm.core.progress import Bar
from calm.core.report import duration, share

_LEFT_OUT = ("wall_s", "interrupts_received", "cycles", "instructions", "dtlb_load_misses", "llc_load_misses")
# At most: what a sample with 4 KiB of stack takes from its thread, and what an event takes that both perf
# processes pass over, beyond counting (50 ns each, as measured).
_SAMPLE_S, _PASSED_S = 5e-6, 1e-7
# What counting a shootdown by the kernel's stack takes (2.7 µs as measured).
_COUNTED_S = 3e-6
_SHORT_S = 0.2
# Counts by cause begin and end within milliseconds of the totals; what differs by more, and by more than a
# few, is of other processes.
_MISFIT, _FEW = 0.1, 20


def _of_measurement(measured: Measurement) -> dict[str, Total]:
    """The probe's counts, by the names of a profile."""
    found = {
        metric.key: Total(metric.get(measured), how(metric, measured), metric.unit)
        for metric in METRICS
        if metric.key not in _LEFT_OUT
    }
    return found | {"major_faults": Total(measured.major_faults, found["minor_faults"].how)}


def _figures(stat: proc.Stat) -> tuple[float, ...]:
    """Minor and major faults, user and system seconds, with those of children that were waited for."""
    own = (stat.minor_faults, stat.major_faults, stat.user_s, stat.system_s)
    return tuple(map(add, own, stat.children))


class _Spending:
    """What a process and its descendants spend from now on."""

    def __init__(self, root: int) -> None:
        self.root = root
        self._latest: dict[int, proc.Stat] = {}
        self.update()
        if root not in self._latest:
            raise CalmError(f"process {root} has ended")
        self._before = dict(self._latest)
        self._interrupts = proc.tlb_interrupts()

    def update(self) -> None:
        """To be called now and then: a process cannot be read after its end."""
        for pid in (self.root, *proc.descendants(self.root)):
            with suppress(*UNREADABLE):
                self._latest[pid] = proc.stat(pid)

    def _sums(self) -> list[float]:
        alive = {}
        for pid, latest in self._latest.items():
            with suppress(*UNREADABLE):
                if (now := proc.stat(pid)).started_ticks == latest.started_ticks:
                    alive[pid] = now
        if self.root in self._latest:
            alive.setdefault(self.root, self._latest[self.root])
        ended = [stat for pid, stat in self._latest.items() if pid not in alive]
        after = [*alive.values(), *(stat for stat in ended if not self._in_ancestor(alive, stat))]
        before = [map(neg, _figures(stat)) for stat in self._before.values()]
        return [max(0.0, sum(each)) for each in zip(*map(_figures, after), *before, strict=True)]

    def _in_ancestor(self, alive: Mapping[int, proc.Stat], ended: proc.Stat) -> bool:
        """Whether a living ancestor waited for a process, and so has all its figures, earlier ones too."""
        above = ended.parent
        while above not in alive and above in self._latest:
            above = self._latest[above].parent
        if above not in alive:
            return False
        before = self._before[above].children[0] if above in self._before else 0
        return alive[above].children[0] - before >= _figures(ended)[0]

    def totals(self) -> dict[str, Total]:
        """The totals of all processes until now."""
        self.update()
        minor, major, user_s, system_s = self._sums()
        text = "/proc/PID/stat, the process and its children"
        now, before = proc.tlb_interrupts(), self._interrupts
        row = None if now is None or before is None else now - before
        return {
            "user_s": Total(user_s, text, "s"),
            "system_s": Total(system_s, text, "s"),
            "minor_faults": Total(minor, text),
            "major_faults": Total(major, text),
            "interrupts_system_wide": Total(row, METRIC["interrupts_system_wide"].how),
        }


def check_pid(pid: int) -> None:
    """Raises CalmError if the process cannot be profiled."""
    proc.check(pid)
    found = proc.stat(pid)
    if found.has_ended:
        raise CalmError(f"process {pid} has ended, and waits for its parent")
    if found.is_kernel:
        raise CalmError(f"process {pid} is a thread of the kernel: it has no memory of its own")
    if os.geteuid() not in (0, owner := proc.owner(pid)):
        name = str(owner)
        with suppress(KeyError):
            name = pwd.getpwuid(owner).pw_name
        raise CalmError(f"process {pid} belongs to {name}: only root may profile it")


def _fitting(counted: Mapping[str, int], totals: Mapping[str, Total]) -> Mapping[str, int] | None:
    """The shootdowns by cause, where they are those of the total."""
    total = totals["shootdowns"].value if "shootdowns" in totals else None
    if not total or not counted or abs(sum(counted.values()) - total) > max(_FEW, _MISFIT * total):
        return None
    return counted


def _own_cost(
    recorder: Recorder, samples: int, program_s: float, cpu_s: Mapping[str, float], counting_s: float
) -> tuple[list[str], float]:
    """In sentences, and as a share of the program's time: wall or CPU time, whichever is more."""
    tracing = samples * _SAMPLE_S + counting_s
    cpu = sum(cpu_s.values())
    parts = ", ".join(f"{name} {duration(spent)}" for name, spent in cpu_s.items() if spent)
    lines = [f"CPU time of profiling: {parts}: {share(cpu, program_s)} of the program's time"]
    if recorder.level != levels.NOTHING:
        counting = f", and {duration(counting_s)} at most for events counted" if counting_s else ""
        lines += [
            f"{samples:,} samples with {levels.STACK_BYTES} bytes of stack, at most "
            f"{_SAMPLE_S * 1e6:.0f} µs each{counting}, from the program's own threads: "
            f"{share(tracing, program_s)} of its time",
            f"one event in {levels.FINE} was sampled for {100 * recorder.fine_share:.0f} % of the time, "
            f"one in {levels.COARSE} otherwise; weights are scaled to the exact totals",
        ]
    return lines, (cpu + tracing) / max(program_s, 1e-9)


def _missing(recorder: Recorder) -> list[str]:
    """What a profile lacks for want of rights, and what would give it."""
    if recorder.level == levels.FULL:
        return []
    paranoid = proc.text("sys/kernel/perf_event_paranoid").strip()
    if not paranoid:
        return ["no stacks: this kernel has no performance events"]
    rest = "for faults and CPU time alone; shootdowns and calls have none"
    lost = {levels.NOTHING: "no stacks, and no causes", levels.USER: f"stacks are of user code, {rest}"}
    reason = recorder.reasons[-1 if recorder.level == levels.NOTHING else 0]
    lines = [f"{lost.get(recorder.level, f'stacks are {rest}')}: {reason}"]
    if levels.NO_PERF not in reason:
        lines.append(
            "root, CAP_PERFMON (and read access to /sys/kernel/tracing), or sysctl "
            f"kernel.perf_event_paranoid=-1 (it is {paranoid}) gives all; a container's seccomp profile "
            "must allow perf_event_open as well"
        )
    return lines


class Watcher:
    """Makes one profile."""

    def __init__(self, frequency: int, bar: Bar | None = None) -> None:
        self.frequency = frequency
        self._bar = bar
        self._began = datetime.now().astimezone().isoformat(timespec="seconds")
        self._interrupted = False

    def run(self, command: Sequence[str], stdout: int | None = None) -> Profile:
        """Starts a program and profiles it to its end."""
        with closing(Recorder(self.frequency)) as recorder:
            samplers: list[Sampler] = []

            def gate(pid: int) -> None:
                recorder.start([pid])
                recorder.counts.begin()
                samplers.append(Sampler(pid, recorder.tick, before=proc.executable(pid)))
                samplers[0].start(recorder.began)

            try:
                measured = measure(command, gate=gate, groups=(TLB_GROUP, SYSCALL_GROUP), stdout=stdout)
            finally:
                for sampler in samplers:
                    sampler.stop()
            recorder.stop(measured.wall_s)
            self._interrupted = measured.interrupted_by is not None
            return self._profile(
                recorder,
                samplers[0],
                _of_measurement(measured),
                {"perf": recorder.cpu_s, "calm": samplers[0].cpu_s, "calm-probe": measured.own.cpu_s},
                measured.own.tracing_s or 0.0,
                measured.processes,
                command=list(command),
                pid=None,
                exit_code=measured.exit_code,
                wall_s=measured.wall_s,
            )

    def watch(self, pid: int, for_s: float | None) -> Profile:
        """Profiles a process that runs already."""
        command = proc.arguments(pid)
        roots = [pid, *proc.descendants(pid)]
        with closing(Recorder(self.frequency)) as recorder, closing(Counting(roots)) as counting:
            recorder.start(roots)
            counting.begin()
            recorder.counts.begin()
            spending = _Spending(pid)
            sampler = Sampler(pid, recorder.tick, of_production=True)
            sampler.start(recorder.began)
            try:
                self._wait(pid, for_s, spending)
            except KeyboardInterrupt:
                self._interrupted = True
            finally:
                wall_s = time.monotonic() - recorder.began
                counting.stop()
                recorder.counts.end()
                sampler.stop()
            totals = spending.totals()
            recorder.stop(wall_s)
            counted = "perf stat, the process and what it starts"
            totals |= {name: Total(value, counted) for name, value in counting.end().items()}
            totals |= {name: Total(None, f"not counted: {why}") for name, why in counting.reasons.items()}
            if (broadcast := machine.broadcast_here()) and broadcast.always:
                totals |= dict.fromkeys(SHOOTDOWNS[:2], Total(None, f"not counted: {broadcast.note}"))
            if rss := sampler.curves().get("rss"):
                text = f"{sampler.samples} samples of the process tree"
                totals["peak_rss_kib"] = Total(max(rss.kib), text, "KiB")
            return self._profile(
                recorder,
                sampler,
                totals,
                {"perf": recorder.cpu_s + counting.cpu_s, "calm": sampler.cpu_s},
                0.0,
                len(roots),
                command=command,
                pid=pid,
                exit_code=None,
                wall_s=wall_s,
            )

    def _wait(self, pid: int, for_s: float | None, spending: _Spending) -> None:
        begin = time.monotonic()
        with suppress(ProcessLookupError), open(os.pidfd_open(pid), "rb") as ended:  # noqa: PTH123
            while (passed := time.monotonic() - begin) < (for_s or float("inf")):
                if select.select([ended], [], [], min(0.5, for_s - passed) if for_s else 0.5)[0]:
                    return
                spending.update()
                if self._bar:
                    self._bar.update(time.monotonic() - begin, f"watching process {pid}")

    def _samples(self, recorder: Recorder, recording: Recording) -> Iterator[Sample]:
        try:
            for sample, part in recorder.samples(recording):
                if self._bar:
                    self._bar.update(part, "reading the stacks", 1.0)
                yield sample
        except KeyboardInterrupt:
            self._interrupted = True

    def _profile(
        self,
        recorder: Recorder,
        sampler: Sampler,
        totals: dict[str, Total],
        cpu_s: Mapping[str, float],
        counting_s: float,
        processes: int,
        *,
        wall_s: float,
        **about: Any,  # noqa: ANN401 - fields of Profile
    ) -> Profile:
        recording = Recording()
        kernel_stacks = recorder.level not in (levels.USER, levels.NOTHING)
        samples = self._samples(recorder, recording)
        counted = _fitting(recorder.shootdowns, totals)
        parts = build(samples, totals, recorder.began, wall_s, 1 / self.frequency, kernel_stacks, counted)
        mmaps = [stack.weight for stack in parts.stacks if (stack.kind, stack.cause) == (CALL, "mmap")]
        if mmaps and "mmap" not in totals:
            totals["mmap"] = Total(sum(mmaps), "about, by samples: not counted")
        # Beside an exact count that of the whole machine says nothing.
        if "interrupts" in totals and totals["interrupts"].value is not None:
            del totals["interrupts_system_wide"]

        def total(*names: str) -> float:
            return sum(totals[name].value or 0.0 for name in names if name in totals)

        if recorder.level == levels.FULL:
            counting_s += total("shootdowns", "minor_faults", *levels.CALLS) * _PASSED_S
            counting_s += sum(recorder.shootdowns.values()) * _COUNTED_S
        program_s = max(wall_s, total("user_s", "system_s"))
        own_cost, own_share = _own_cost(recorder, recording.samples, program_s, cpu_s, counting_s)
        numbers = Counter[str]()
        for stack in parts.stacks:
            numbers[stack.kind] += stack.samples
        notes = _notes(recorder, recording.lost, numbers, total("shootdowns"), wall_s, counted is not None)
        profile = Profile(
            **about,
            **parts._asdict(),
            began=self._began,
            wall_s=wall_s,
            allocator=sampler.allocator,
            privileged=recorder.level == levels.FULL,
            machine=machine.describe(),
            totals=totals,
            curves=sampler.curves(),
            findings=[],
            own_cost=own_cost,
            own_share=own_share,
            notes=[*_missing(recorder), *notes],
            kernel_stacks=kernel_stacks,
            causes_counted=counted is not None,
            interrupted_by=signal.SIGINT if self._interrupted else None,
        )
        # Most short-lived processes are in the recording alone.
        return replace(profile, findings=findings.find(profile, max(processes, len(recording.processes), 1)))


def _notes(
    recorder: Recorder, lost: int, samples: Mapping[str, int], shootdowns: float, wall_s: float, counted: bool
) -> Iterator[str]:
    """`samples`: their number by kind."""
    if broadcast := machine.broadcast_here():
        yield broadcast.note
    if recorder.level != levels.NOTHING and sum(samples.values()) < FEW_SAMPLES:
        what = "was too short for stacks" if wall_s < _SHORT_S else "had little to be sampled"
        yield f"{duration(wall_s)} {what}: there are {sum(samples.values())} samples"
    elif recorder.level != levels.NOTHING and samples[CPU] < FEW_SAMPLES:
        yield f"CPU time has {samples[CPU]} samples, so shares of it are rough (--freq takes more)"
    if shootdowns and not counted and recorder.level == levels.FULL:
        number = sum(recorder.shootdowns.values())
        why = (
            recorder.counts.why
            or f"bpftrace saw {number:,} of them, as in a container with process ids of its own"
        )
        yield f"shootdowns are by cause as samples say, not counted: {why}"
    if shootdowns and not samples[SHOOTDOWN] and recorder.level == levels.FULL:
        yield f"none of the {shootdowns:,.0f} shootdowns was among the samples"
    if lost:
        yield (
            f"{lost:,} samples, of all programs, were lost when perf had no room; totals are exact all the "
            "same, and shares come from the others"
        )
