"""Boots the machine, and has it run programs: as often as it takes, where one of them brings it down."""

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from calm import measure, processes
from calm.errors import CalmError
from calm.lab import guest, machine, packages
from calm.lab.guest import Run, Turn, View
from calm.lab.machine import KVM, TCG, USUAL, Emulator, Qemu, Topology
from calm.lab.packages import Parts
from calm.lab.payload import Payload

BOOT_S = 240.0  # 64 emulated CPUs on a busy machine take a minute
_KVM_S = 15.0
_EACH_S = 0.2
_OUT_OF_MEMORY = re.compile(
    r"Out of memory: Killed process \d+ \(([^)]*)\)|Out of memory and no killable|"
    r"System is deadlocked on memory"
)
_PANIC = re.compile(r"Kernel panic - not syncing: (.*)")
_UNPACKING = re.compile(r"Initramfs unpacking failed: (.*)")
_CONSOLE_IN = "; its console is in "


class StoppedError(CalmError):
    """The machine came to its end before its task did."""


class _EnoughError(Exception):
    """What is known has taken the time that there is."""


@dataclass
class Plan:
    """What is to be run, and on what."""

    turns: Sequence[Turn]
    rounds: int
    """At most, where there is a time that is enough."""
    topology: Topology
    payload: Payload
    """Complete but for what the guest itself needs."""
    cache: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path("/tmp")
    memory: int | None = None
    accelerator: str = "auto"
    groups: Sequence[str] = (measure.TLB_GROUP,)
    timeout_s: float = 600.0
    kernel: Path | None = None
    busybox: Path | None = None
    emulator: Emulator = USUAL
    update: bool = False
    enough_s: float | None = None
    """No round but the first is begun that would likely end later than this."""


@dataclass
class Outcome:
    """All that is known when the machine is gone."""

    plan: Plan
    qemu: Qemu
    parts: Parts
    accelerator: str
    """With which it ran."""
    why_not_kvm: str | None
    memory: int
    view: View | None = None
    command: list[str] = field(default_factory=list)
    runs: list[tuple[int, Run]] = field(default_factory=list)
    """With their round's number."""
    failures: dict[str, str] = field(default_factory=dict)
    """By label: what stopped its runs."""
    stopped: str | None = None
    """Why a second boot was none."""
    round_s: float | None = None
    """What a round took, where another one would have been too much."""
    interrupted_by: int | None = None

    def of(self, label: str) -> list[Run]:
        """Good runs, in order. A round that one label has and another has not is the caller's business."""
        return [run for _, run in self.runs if run.label == label and run.failure is None]


Step = Callable[[str, int, int], None]
"""Told what is going on, how many steps are done, and of how many."""


def last_of_console(reason: str, lines: int = 20) -> list[str]:
    """The end of the console that the reason of a failure names, if it names one."""
    _, _, path = reason.rpartition(_CONSOLE_IN)
    return _text(Path(path)).splitlines()[-lines:] if path != reason else []


@contextlib.contextmanager
def _qemu(command: Sequence[str], complaints: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The emulator, for as long as the context lasts. The terminal's Ctrl-C is for us, and not for it."""
    with complaints.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            preexec_fn=lambda: processes.end_with_parent(signal.SIGKILL),
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def what_stopped(console: str, complaints: str, code: int | None) -> str:
    """Why a machine is gone before its time, by what its kernel and QEMU have said."""
    if found := _UNPACKING.search(console):
        return f"the guest's kernel could not unpack its files ({found[1].strip()}): more --memory may help"
    if found := _OUT_OF_MEMORY.search(console):
        killed = f", and its kernel killed {found[1]}" if found[1] else ""
        return f"the guest ran out of memory{killed}: give it more with --memory"
    if found := _PANIC.search(console):
        return f"the guest's kernel panicked: {found[1].strip()}"
    lines = [line.strip() for line in complaints.splitlines() if line.strip() and "warning:" not in line]
    if lines:
        # What it says first is the cause, and the rest what came of it.
        return f"QEMU: {lines[0].removeprefix(machine.QEMU + ': ').removeprefix('error: ')}"
    return "the guest stopped before its end" + (f" (QEMU ended with {code})" if code else "")


@dataclass
class _Boot:
    """One life of the machine."""

    command: Sequence[str]
    work: Path
    listener: guest.Listener
    boot_s: float
    run_s: float
    tick: Callable[[], None]
    on_run: Callable[[int, Run], None]

    def live(self) -> None:
        """Returns when the guest has said that it is done; raises StoppedError for any other end."""
        console, complaints = self.work / "console.log", self.work / "qemu.log"
        with _qemu(self.command, complaints) as process, selectors.DefaultSelector() as selector:
            output = process.stdout
            assert output is not None
            selector.register(output, selectors.EVENT_READ)
            state: tuple[bool, int | None] = (False, None)
            since = time.monotonic()
            while not self.listener.done:
                ready = selector.select(_EACH_S)
                self.tick()
                data = os.read(output.fileno(), 1 << 16) if ready else None
                if data == b"":
                    process.wait()
                    raise StoppedError(what_stopped(_text(console), _text(complaints), process.returncode))
                for number, run in self.listener.feed(data or b""):
                    self.on_run(number, run)
                now = (self.listener.view is not None, self.listener.running)
                if now != state:
                    state, since = now, time.monotonic()
                self._check(time.monotonic() - since)

    def _check(self, lasts_s: float) -> None:
        if self.listener.view is None:
            if lasts_s > self.boot_s:
                raise StoppedError(f"the guest did not boot in {self.boot_s:.0f} s")
        elif lasts_s > self.run_s:
            raise StoppedError(f"did not finish in {self.run_s:g} s (--timeout)")


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _prepare(payload: Payload, busybox: Path, init: bytes, work: Path) -> Path:
    """The archive of one boot."""
    payload.make(guest.BUSYBOX, busybox.read_bytes())
    payload.make("/init", init)
    archive = work / "initramfs.cpio"
    with archive.open("wb") as file:
        payload.write(file)
    return archive


def _kvm_boots(qemu: Qemu, parts: Parts, cache: Path, tick: Callable[[], None]) -> str | None:
    """Why no machine boots under KVM here, or None where one does: by booting it.

    That /dev/kvm can be opened proves nothing. The answer holds until this machine boots again.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm is missing" if not Path("/dev/kvm").exists() else "/dev/kvm: permission denied"
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    key = {"boot_id": boot_id, "qemu": [qemu.path, qemu.version], "kernel": parts.kernel_package}
    known = cache / "kvm.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(known.read_text())
        if kept["key"] == key:
            return None if kept["why_not"] is None else str(kept["why_not"])
    why_not = None
    with tempfile.TemporaryDirectory(prefix=f"boot-{os.getpid()}-", dir=cache) as name:
        work = Path(name)
        payload = Payload({})
        init = guest.script([], probe=Path("/"), groups=(), environment={}, folder=Path("/"))
        archive = _prepare(payload, parts.busybox, init, work)
        topology, memory = Topology(2, 1), 512 << 20
        command = machine.command(qemu, topology, memory, KVM, parts.kernel, archive, work / "console.log")
        listener = guest.Listener({})
        try:
            _Boot(command, work, listener, _KVM_S, _KVM_S, tick, lambda *_: None).live()
        except StoppedError as stopped:
            why_not = str(stopped)
    partial = known.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"key": key, "why_not": why_not}) + "\n")
    partial.replace(known)
    return why_not


def _choose(
    wanted: str, qemu: Qemu, parts: Parts, cache: Path, tick: Callable[[], None]
) -> tuple[str, str | None]:
    if wanted == TCG:
        return TCG, "not asked for"
    why_not = _kvm_boots(qemu, parts, cache, tick)
    if why_not is None:
        return KVM, None
    if wanted == KVM:
        raise CalmError(f"--accel kvm: no machine boots under KVM here: {why_not}")
    return TCG, why_not


def _check_view(view: View, outcome: Outcome) -> None:
    topology = outcome.plan.topology
    nodes = topology.sockets if machine.has_nodes(topology, outcome.memory) else 1
    if (view.cpus, view.sockets, view.nodes) != (topology.cpus, topology.sockets, nodes):
        raise CalmError(
            f"the guest sees {view.cpus} CPUs in {view.sockets} sockets and {view.nodes} nodes, "
            f"where {topology} and {nodes} nodes were asked for"
        )


def _handle_sigterm(*_: object) -> None:
    raise _TerminatedError


class _TerminatedError(BaseException):
    """SIGTERM, which is to leave as little behind as Ctrl-C does."""


def run(plan: Plan, step: Step) -> Outcome:
    """Runs all turns, round by round, or as many rounds as there is time for.

    A program that fails is not run again. One that hangs, or brings the guest down, costs the others a
    second boot and nothing else. What is known survives Ctrl-C.
    """
    before = signal.signal(signal.SIGTERM, _handle_sigterm)
    try:
        return _run(plan, step)
    except _TerminatedError:
        raise SystemExit(128 + signal.SIGTERM) from None  # before there was anything to keep
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(plan: Plan, step: Step) -> Outcome:
    total = 2 + plan.rounds * len(plan.turns)
    doing, at = "fetching the kernel", 0
    last_round, first_began = -1, 0.0

    def tick() -> None:
        step(doing, at, total)

    def tell(what: str, done: int = 0) -> None:
        nonlocal doing, at
        doing, at = what, done
        tick()

    if os.uname().machine != "x86_64":
        raise CalmError("the guest runs this machine's programs, so this is to be an x86-64 machine")
    qemu = machine.find_qemu(plan.emulator.path)
    parts = packages.fetch(plan.cache, tell, kernel=plan.kernel, busybox=plan.busybox, update=plan.update)
    packages.sweep(plan.cache)
    tell("gathering what the program needs")
    start = time.monotonic()
    probe = Path(measure.find_probe()).absolute()
    plan.payload.program(probe)
    plan.payload.finish()
    memory = machine.choose_memory(plan.memory, plan.payload.size)
    tell("does a guest boot under KVM?" if plan.accelerator != TCG else "building the guest")
    accelerator, why_not_kvm = _choose(plan.accelerator, qemu, parts, plan.cache, tick)
    outcome = Outcome(plan, qemu, parts, accelerator, why_not_kvm, memory)
    turns = [turn for _ in range(plan.rounds) for turn in plan.turns]
    left = list(enumerate(turns))

    def begin(number: int) -> None:
        """A round's run does, its first or a later one."""
        nonlocal last_round, first_began
        if number <= last_round:
            return
        now = time.monotonic()
        first_began = now if last_round < 0 else first_began
        last_round = number
        if number > 0 and plan.enough_s is not None:
            each = (now - first_began) / number
            if now + each > start + plan.enough_s:
                outcome.round_s = each
                raise _EnoughError

    try:
        while left:
            left = _one_boot(outcome, left, probe, begin, tell, tick)
    except _EnoughError:
        pass
    except KeyboardInterrupt:
        outcome.interrupted_by = signal.SIGINT
    except _TerminatedError:
        outcome.interrupted_by = signal.SIGTERM
    return outcome


def _one_boot(
    outcome: Outcome,
    left: list[tuple[int, Turn]],
    probe: Path,
    begin: Callable[[int], None],
    tell: Callable[[str, int], None],
    tick: Callable[[], None],
) -> list[tuple[int, Turn]]:
    """Boots once; returns the turns that another boot is needed for."""
    plan = outcome.plan
    labels = {number: turn.label for number, turn in left}
    listener = guest.Listener(labels)
    finished: set[int] = set()
    console_read = 0

    def describe() -> None:
        if listener.view is None:
            tell(f"booting {plan.topology}", 1)
        elif listener.running is not None:
            number = listener.running
            begin(number // len(plan.turns))
            what = f"round {number // len(plan.turns) + 1} of {plan.rounds}: {labels[number]}"
            tell(what, 2 + number)
        else:
            tick()
        look()

    def look() -> None:
        if listener.view and outcome.view is None:
            _check_view(listener.view, outcome)
            outcome.view = listener.view

    def on_run(number: int, run: Run) -> None:
        nonlocal console_read
        finished.add(number)
        outcome.runs.append((number // len(plan.turns), run))
        console = _text(work / "console.log")
        # What the kernel has said since the run before is about this one.
        killed = _OUT_OF_MEMORY.search(console, console_read)
        console_read = len(console)
        if run.failure:
            reason = what_stopped(killed[0], "", None) + keep_log() if killed else run.failure
            outcome.failures.setdefault(run.label, reason)

    def keep_log() -> str:
        # Of this boot alone: others of this run, and of others, may go wrong too.
        log = plan.cache / f"console-{work.name.removeprefix('boot-')}.log"
        if not (work / "console.log").exists():
            return ""
        shutil.copyfile(work / "console.log", log)
        return f"{_CONSOLE_IN}{log}"

    with tempfile.TemporaryDirectory(prefix=f"boot-{os.getpid()}-", dir=plan.cache) as name:
        work = Path(name)
        init = guest.script(
            left, probe=probe, groups=plan.groups, environment=plan.environment, folder=plan.folder
        )
        archive = _prepare(plan.payload, outcome.parts.busybox, init, work)
        outcome.command = machine.command(
            outcome.qemu,
            plan.topology,
            outcome.memory,
            outcome.accelerator,
            outcome.parts.kernel,
            archive,
            work / "console.log",
            plan.emulator,
        )
        boot = _Boot(outcome.command, work, listener, BOOT_S, plan.timeout_s, describe, on_run)
        try:
            boot.live()
            look()
            return []
        except StoppedError as stopped:
            reason = f"{stopped}{keep_log()}"
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
