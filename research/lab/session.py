"""Boots the machine and runs programs on it; boots again after a program that hangs or crashes the guest."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from calm.core import measure, proc, processes, report
from calm.core.errors import CalmError
from calm.core.progress import Bar
from research.lab import guest, machine, packages
from research.lab.guest import Listener, Run, Turn, View
from research.lab.machine import KVM, TCG, Qemu, Topology
from research.lab.packages import Parts
from research.lab.payload import Payload

BOOT_S = 240.0  # 64 emulated CPUs on a busy machine take a minute
_KVM_BOOT_S = 15.0
_SELECT_S = 0.2
_OUT_OF_MEMORY = re.compile(
    r"Out of memory: Killed process \d+ \(([^)]*)\)|Out of memory and no killable|"
    r"System is deadlocked on memory"
)
_PANIC = re.compile(r"Kernel panic - not syncing: (.*)")
_UNPACKING = re.compile(r"Initramfs unpacking failed: (.*)")
_CONSOLE = "console.log"
CONSOLE_IN = "; its console is in "


class StoppedError(CalmError):
    """The machine has stopped before its last run."""


@dataclass
class Plan:
    """The runs, and the machine for them."""

    turns: Sequence[Turn]
    rounds: int
    """At most, where there is enough_s."""
    topology: Topology
    payload: Payload
    """Complete except for the files of the guest itself."""
    cache: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path("/tmp")
    memory: int | None = None
    accelerator: str = "auto"
    groups: Sequence[str] = (measure.TLB_GROUP,)
    timeout_s: float = 600.0
    kernel: Path | None = None
    busybox: Path | None = None
    update: bool = False
    enough_s: float | None = None
    """No round but the first begins that would probably end later than this."""
    qemu: Path | None = None
    """None: the one on PATH."""
    qemu_options: Mapping[str, str] = field(default_factory=dict)
    """Those that differ from `machine.command`."""


@dataclass
class Outcome:
    """Everything that is known at the end."""

    plan: Plan
    qemu: Qemu
    parts: Parts
    accelerator: str
    why_not_kvm: str | None
    memory: int
    view: View | None = None
    command: list[str] = field(default_factory=list)
    runs: list[tuple[int, Run]] = field(default_factory=list)
    """With the numbers of their rounds."""
    failures: dict[str, str] = field(default_factory=dict)
    """By label, why its runs ended early."""
    stopped: str | None = None
    """Why another boot failed."""
    round_s: float | None = None
    """The time of a round, where another one would have taken too long."""
    interrupted_by: int | None = None

    def of(self, label: str) -> list[tuple[int, Run]]:
        """The runs that did not fail, in order, with the numbers of their rounds."""
        return [(number, run) for number, run in self.runs if run.label == label and run.failure is None]


def what_stopped(console: str, complaints: str, code: int | None) -> str:
    """Why the machine stopped, by the messages of its kernel and of QEMU."""
    if found := _UNPACKING.search(console):
        return f"the guest's kernel could not unpack its files ({found[1].strip()}): more --memory may help"
    if found := _OUT_OF_MEMORY.search(console):
        killed = f", and its kernel killed {found[1]}" if found[1] else ""
        return f"the guest ran out of memory{killed}: give it more with --memory"
    if found := _PANIC.search(console):
        return f"the guest's kernel panicked: {found[1].strip()}"
    lines = [line.strip() for line in complaints.splitlines() if line.strip() and "warning:" not in line]
    if lines:
        # The first message is the cause of the others.
        return f"QEMU: {re.sub(r'^(qemu-system-[^ :]+: )?(error: )?', '', lines[0])}"
    return "the guest stopped before its end" + (f" (QEMU ended with {code})" if code else "")


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _work_folder(cache: Path) -> tempfile.TemporaryDirectory[str]:
    """Of one boot; `packages.sweep` knows its name."""
    return tempfile.TemporaryDirectory(prefix=f"boot-{os.getpid()}-", dir=cache)


def _boot(
    outcome: Outcome,
    left: Sequence[tuple[int, Turn]],
    probe: Path,
    work: Path,
    listener: Listener,
    boot_s: float,
) -> Generator[list[tuple[int, Run]], None, None]:
    """Boots the machine; yields the runs that have ended, several times a second, until the guest is done.

    Raises StoppedError for any other end. A Ctrl-C on the terminal does not reach the emulator.
    """
    plan, console, complaints = outcome.plan, work / _CONSOLE, work / "qemu.log"
    plan.payload.make(guest.BUSYBOX, outcome.parts.busybox.read_bytes())
    port = outcome.qemu.architecture.port
    plan.payload.make("/init", guest.script(left, probe, plan.groups, plan.environment, plan.folder, port))
    archive = work / "initramfs.cpio"
    with archive.open("wb") as file:
        plan.payload.write(file)
    outcome.command = machine.command(
        outcome.qemu,
        plan.topology,
        outcome.memory,
        outcome.accelerator,
        outcome.parts.kernel,
        archive,
        console,
        plan.qemu_options,
    )
    with (
        complaints.open("wb") as errors,
        subprocess.Popen(
            outcome.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            preexec_fn=lambda: processes.end_with_parent(signal.SIGKILL),
        ) as process,
    ):
        assert process.stdout is not None
        state: tuple[bool, int | None] = (False, None)
        since = time.monotonic()
        try:
            while not listener.done:
                ready, _, _ = select.select([process.stdout], [], [], _SELECT_S)
                data = os.read(process.stdout.fileno(), 1 << 16) if ready else None
                if data == b"":
                    process.wait()
                    raise StoppedError(what_stopped(_text(console), _text(complaints), process.returncode))
                yield listener.feed(data or b"")
                if state != (state := (listener.view is not None, listener.running)):
                    since = time.monotonic()
                lasts = time.monotonic() - since
                if listener.view and lasts > plan.timeout_s:
                    raise StoppedError(f"did not finish in {plan.timeout_s:g} s (--timeout)")
                if not listener.view and lasts > boot_s:
                    raise StoppedError(f"the guest did not boot in {boot_s:.0f} s")
        finally:
            process.kill()


def _kvm_boots(qemu: Qemu, parts: Parts, cache: Path, tick: Callable[[], None]) -> str | None:
    """Why no machine boots under KVM here, or None if one does: by booting one.

    It proves nothing that /dev/kvm can be opened. The cache keeps the answer until this machine boots again.
    """
    if qemu.architecture.foreign:
        return "the guest's architecture is not this machine's"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm is missing" if not Path("/dev/kvm").exists() else "/dev/kvm: permission denied"
    boot = proc.text("sys/kernel/random/boot_id").strip()
    key = [boot, qemu.path, qemu.version, parts.kernel_package]
    known = cache / "kvm.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(known.read_text())
        if kept["key"] == key:
            why_not: str | None = kept["why_not"]
            return why_not
    why_not = None
    plan = Plan([], 0, Topology(2, 1), Payload({}, qemu.architecture), cache)
    outcome = Outcome(plan, qemu, parts, KVM, None, 512 << 20)
    with _work_folder(cache) as work:
        try:
            for _ in _boot(outcome, [], Path("/"), Path(work), Listener({}), _KVM_BOOT_S):
                tick()
        except StoppedError as stopped:
            why_not = str(stopped)
    report.write(str(known), json.dumps({"key": key, "why_not": why_not}) + "\n")
    return why_not


class _Session:
    """The boots of one plan."""

    def __init__(self, plan: Plan, bar: Bar) -> None:
        self._plan, self._bar = plan, bar
        bar.update(0, "fetching the kernel", 2 + plan.rounds * len(plan.turns))
        architecture = plan.payload.architecture
        qemu = machine.find_qemu(plan.qemu, architecture)
        parts = packages.fetch(
            plan.cache,
            lambda what: bar.update(what=what),
            kernel=plan.kernel,
            busybox=plan.busybox,
            update=plan.update,
            architecture=architecture,
        )
        packages.sweep(plan.cache)
        bar.update(what="gathering the program's files")
        self._start = self._first_began = time.monotonic()
        self._round = -1
        probe = architecture.built("calm-probe") if architecture.foreign else Path(measure.find_probe())
        self._probe = probe.absolute()
        plan.payload.program(self._probe)
        plan.payload.finish(parts.libraries)
        memory = machine.choose_memory(plan.memory, plan.payload.size)
        why_not: str | None = "not asked for"
        if plan.accelerator != TCG:
            bar.update(what="does a guest boot under KVM?")
            why_not = _kvm_boots(qemu, parts, plan.cache, bar.update)
        if why_not is not None and plan.accelerator == KVM:
            raise CalmError(f"--accel kvm: no machine boots under KVM here: {why_not}")
        self.outcome = Outcome(plan, qemu, parts, TCG if why_not else KVM, why_not, memory)

    def boot(self, left: Sequence[tuple[int, Turn]]) -> list[tuple[int, Turn]]:
        """Boots once; returns the turns that another boot is needed for."""
        plan, outcome = self._plan, self.outcome
        labels = {number: turn.label for number, turn in left}
        listener = Listener(labels)
        finished: set[int] = set()
        console_read = 0
        with _work_folder(plan.cache) as name:
            work = Path(name)
            try:
                with contextlib.closing(_boot(outcome, left, self._probe, work, listener, BOOT_S)) as steps:
                    for number, run in self._followed(steps, listener, labels):
                        finished.add(number)
                        outcome.runs.append((number // len(plan.turns), run))
                        console = _text(work / _CONSOLE)
                        # The kernel's messages since the run before are about this one.
                        killed = _OUT_OF_MEMORY.search(console, console_read)
                        console_read = len(console)
                        if run.failure:
                            why = f"{what_stopped(killed[0], '', None)}{self._keep(work)}" if killed else ""
                            outcome.failures.setdefault(run.label, why or run.failure)
                return []
            except StoppedError as stopped:
                reason = f"{stopped}{self._keep(work)}"
                if listener.running is not None:
                    outcome.failures[labels[listener.running]] = reason
                elif outcome.runs or outcome.failures:
                    outcome.stopped = reason
                    return []
                else:
                    raise CalmError(reason) from stopped
        return [
            (number, turn)
            for number, turn in left
            if number not in finished and turn.label not in outcome.failures
        ]

    def _keep(self, work: Path) -> str:
        """Keeps the console of a boot, and returns words about it for the message; none without a console."""
        # By the boot's own name: other boots, of this run and of others, may fail too.
        log = self._plan.cache / f"console-{work.name.removeprefix('boot-')}.log"
        if not (work / _CONSOLE).exists():
            return ""
        shutil.copyfile(work / _CONSOLE, log)
        return f"{CONSOLE_IN}{log}"

    def _followed(
        self, steps: Iterator[list[tuple[int, Run]]], listener: Listener, labels: Mapping[int, str]
    ) -> Iterator[tuple[int, Run]]:
        """The runs that have ended; shows what goes on, and ends before a round that would take too long."""
        plan, outcome = self._plan, self.outcome
        for runs in steps:
            yield from runs
            if listener.view is None:
                self._bar.update(1, f"booting {plan.topology}")
                continue
            if outcome.view is None:
                _check_view(listener.view, outcome)
                outcome.view = listener.view
            if listener.running is None:
                self._bar.update()
                continue
            number = listener.running // len(plan.turns)
            if number > self._round and not self._begin(number):
                return
            what = f"round {number + 1} of {plan.rounds}: {labels[listener.running]}"
            self._bar.update(2 + listener.running, what)

    def _begin(self, number: int) -> bool:
        """A round begins. False: it would take too long."""
        now = time.monotonic()
        self._first_began = now if self._round < 0 else self._first_began
        self._round = number
        if number > 0 and self._plan.enough_s is not None:
            each = (now - self._first_began) / number
            if now + each > self._start + self._plan.enough_s:
                self.outcome.round_s = each
                return False
        return True


def _check_view(view: View, outcome: Outcome) -> None:
    topology = outcome.plan.topology
    nodes = topology.nodes(outcome.memory)
    if (view.cpus, view.sockets, view.nodes) != (topology.cpus, topology.sockets, nodes):
        raise CalmError(
            f"the guest sees {view.cpus} CPUs in {view.sockets} sockets and {view.nodes} nodes, "
            f"where {topology} and {nodes} nodes were asked for"
        )


def _terminate(number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends the machine like Ctrl-C."""
    raise SystemExit(128 + number)


def run(plan: Plan, bar: Bar) -> Outcome:
    """Runs all turns round by round, or as many rounds as there is time for.

    A program that fails is not run again. One that hangs or crashes the guest costs the others a second boot
    only. An interrupt keeps the runs that are complete.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        session = _Session(plan, bar)
        left = list(enumerate(turn for _ in range(plan.rounds) for turn in plan.turns))
        try:
            while left:
                left = session.boot(left)
        except KeyboardInterrupt:
            session.outcome.interrupted_by = signal.SIGINT
        except SystemExit:
            session.outcome.interrupted_by = signal.SIGTERM
        return session.outcome
    finally:
        signal.signal(signal.SIGTERM, before)
