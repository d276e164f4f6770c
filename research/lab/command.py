"""`calm lab`: a program under several allocators, on an emulated machine of many CPUs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from calm.core import allocators, comparison, measure, options, program, report
from calm.core.allocators import Allocator
from calm.core.comparison import AllocatorRuns
from calm.core.documents import Document
from calm.core.environment import warnings
from calm.core.errors import FAILED, USAGE, CalmError
from calm.core.machine import broadcast
from calm.core.measure import METRIC, Counter, Measurement, Metric
from calm.core.options import Output
from calm.core.progress import Bar
from calm.core.rounds import Side
from research.lab import packages, payload, session
from research.lab.architecture import ARCHITECTURES, Architecture, host
from research.lab.guest import APPLETS, Turn
from research.lab.machine import KVM, TCG, Topology
from research.lab.payload import Payload
from research.lab.session import Outcome, Plan

if TYPE_CHECKING:
    from rich.console import Console

ROUNDS = 3
ENOUGH_S = 120.0  # without -n: two allocators' counts in three minutes, whatever the program

METRICS = (
    Metric(
        "interrupts_system_wide",
        "TLB interrupts",
        "TLB row of the guest's /proc/interrupts, all its CPUs: received, by the program and nothing else",
    ),
    Metric("shootdowns", "TLB shootdowns begun", "tracepoint tlb:tlb_flush, reason 4, of the guest's kernel"),
    *(METRIC[name] for name in (*measure.SYSCALLS, "minor_faults")),
    Metric("peak_rss_kib", "peak RSS", "the kernel's own mark of the largest process", "KiB"),
    Metric("wall_s", "wall time", "monotonic clock of the guest, under KVM alone", "s"),
)


class GuestMachine(msgspec.Struct, kw_only=True):
    """The machine that was emulated."""

    architecture: str
    """As `uname -m` prints it."""
    page_size_kib: int | None
    cpus: int
    sockets: int
    nodes: int | None
    memory_mib: int
    emulated: bool
    accelerator: str
    why_not_kvm: str | None


class GuestOutput(msgspec.Struct, kw_only=True):
    """What a run printed, and why it failed if it did."""

    label: str
    round: int
    failure: str | None
    printed: str
    errors: str


class Lab(Document, tag="calm-lab", kw_only=True):
    """What `calm lab --json` writes. Times are an emulator's, except under KVM."""

    command: list[str]
    machine: GuestMachine
    kernel: str | None
    kernel_package: str
    qemu: str
    glibc: str | None
    qemu_command: list[str]
    """Without the folders of files."""
    rounds: int
    """The number asked for."""
    interrupted_by: int | None
    """The signal that ended the runs early."""
    notes: list[str]
    how: dict[str, str]
    """By metric, how it was counted."""
    allocators: list[AllocatorRuns]
    """With the runs that did not fail."""
    output: list[GuestOutput]


def described(outcome: Outcome) -> dict[str, Any]:
    """The fields of a document that describe the machine."""
    topology = outcome.plan.topology
    return {
        "machine": GuestMachine(
            architecture=outcome.qemu.architecture.machine,
            page_size_kib=(outcome.view.page_kib or None) if outcome.view else None,
            cpus=topology.cpus,
            sockets=topology.sockets,
            nodes=outcome.view.nodes if outcome.view else None,
            memory_mib=outcome.memory >> 20,
            emulated=outcome.accelerator == TCG,
            accelerator=outcome.accelerator,
            why_not_kvm=outcome.why_not_kvm,
        ),
        "kernel": outcome.view.kernel if outcome.view else None,
        "kernel_package": outcome.parts.kernel_package,
        "qemu": outcome.qemu.version,
        "glibc": outcome.parts.glibc
        or (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
        or None,
        "qemu_command": [re.sub(r"[^:]*/", "", word) for word in outcome.command],
    }


def _no_interrupts(outcome: Outcome) -> str | None:
    """Why the guest's CPUs never send an interrupt for a shootdown, if they do not."""
    found = broadcast(outcome.qemu.architecture.machine, cpuinfo="")
    return found.note if found else None


def _without_shootdowns(run: Measurement, why: str | None) -> Measurement:
    """A run whose counts of shootdowns would be zero whatever the program does."""
    if not why:
        return run
    return replace(run, counters={**run.counters, **dict.fromkeys(measure.SHOOTDOWNS, Counter(None, why))})


def _notes(outcome: Outcome) -> list[str]:
    """The limits of such a machine."""
    if outcome.accelerator == KVM:
        notes = ["the guest runs under KVM: its times are real, for as many CPUs as this machine has"]
    else:
        notes = [
            "the CPUs are emulated: counts are a real kernel's; times would be the emulator's, and are "
            f"not shown (no KVM: {outcome.why_not_kvm})"
        ]
    if why := _no_interrupts(outcome):
        notes.append(why)
    if outcome.round_s is not None:
        rounds = 1 + max(number for number, _ in outcome.runs)
        notes.append(
            f"{rounds} of {outcome.plan.rounds} rounds, as one takes {outcome.round_s:.0f} s: "
            "-n N runs N, however long they take"
        )
    release = re.match(r"(\d+)\.(\d+)", outcome.view.kernel) if outcome.view else None
    if release and (int(release[1]), int(release[2])) < (6, 13):
        notes.append(
            f"Linux {release.string} refuses process_madvise(MADV_DONTNEED), which 6.13 and later "
            "take: calmalloc and ptlbmalloc2 purge by single madvise calls here"
        )
    return notes


def _print(found: Lab, outcome: Outcome, console: Console) -> None:
    kind = "under KVM" if outcome.accelerator == KVM else "emulated"
    kernel = f", Linux {found.kernel}" if found.kernel else ""
    console.print(shlex.join(found.command), style="bold", soft_wrap=True)
    console.print(f"{outcome.plan.topology}, {kind}{kernel}", soft_wrap=True)
    metrics = [metric for metric in METRICS if metric.key in found.how]
    report.print_table(console, comparison.table(found.allocators, metrics, values=True))
    for metric in () if _no_interrupts(outcome) else METRICS[:2]:
        how = found.how.get(metric.key) or f"not counted: {_reason(found, metric)}"
        console.print(f"{metric.label}: {how}", style="dim", soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _reason(found: Lab, metric: Metric) -> str:
    runs = [run for side in found.allocators for run in side.runs]
    counters = [run.counters[metric.key] for run in runs if metric.key in run.counters]
    reasons = [counter.reason for counter in counters if counter.reason]
    return reasons[0] if reasons else "/proc/interrupts of the guest has no TLB row"


def allocators_of(specs: Iterable[str], architecture: Architecture) -> list[Allocator]:
    """Those of this machine; for a foreign guest its own glibc, and libraries that were built for it."""
    if not architecture.foreign:
        return allocators.parse_list(specs)
    begins = rf",(?=(?:{'|'.join(allocators.KNOWN)})(?:[,:]|$)|[^,:]*/)"
    sides = [_foreign(spec, architecture) for text in specs for spec in re.split(begins, text)]
    labels = [side.label for side in sides]
    if repeated := next((label for label in labels if labels.count(label) > 1), None):
        raise CalmError(f"allocator {repeated!r} is given twice", USAGE)
    return sides


def _foreign(spec: str, architecture: Architecture) -> Allocator:
    name, *variables = re.split(r"(?=:[A-Za-z_]\w*=)", spec, maxsplit=1)
    label, equals, path = name.partition("=")
    library = None
    if "/" in name:
        library = Path(path if equals else name).absolute()
    elif name in allocators.OWN:
        library = architecture.built(f"lib{name}.so")
    elif name != allocators.GLIBC:
        known = ", ".join([allocators.GLIBC, *allocators.OWN])
        raise CalmError(
            f"unknown allocator {name!r} for {architecture.name}: known are {known}, and NAME=path/to/lib.so",
            USAGE,
        )
    parsed = allocators.parse(allocators.GLIBC + "".join(variables))
    return replace(parsed, label=label + "".join(variables), library=library)


def environment_of(assignments: Sequence[str], inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of programs in the guest: few of this machine's, and those that the user gives."""
    path = inherited.get("PATH", os.defpath)
    environment = {"PATH": f"{path}:{APPLETS}", "HOME": "/root", "USER": "root", "LANG": "C.UTF-8"}
    if libraries := inherited.get("LD_LIBRARY_PATH"):
        environment["LD_LIBRARY_PATH"] = libraries
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or (not equals and name not in inherited):
            raise CalmError(
                f"--env {assignment!r} is neither NAME=VALUE nor the name of a variable here", USAGE
            )
        environment[name] = value if equals else inherited[name]
    return environment


def _check_pin(pin: str, cpus: int) -> None:
    ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in pin.split(",")]
    if not all(each and int(each[1]) <= int(each[2] or each[1]) < cpus for each in ranges):
        raise CalmError(f"--pin {pin!r} is no list of CPUs from 0 to {cpus - 1}, such as 0-3,8", USAGE)


def _report_failures(outcome: Outcome, sides: Sequence[Allocator], command: Sequence[str]) -> int:
    """A line for each on standard error, and the program's last lines. Returns the exit status."""
    for label, failure in outcome.failures.items():
        click.echo(f"calm: {label}: {shlex.join(command)}: {failure}", err=True)
        failed = next((run for _, run in outcome.runs if run.label == label and run.failure), None)
        for line in failed.last_words if failed else []:
            click.echo(f"    {line}", err=True)
    if outcome.stopped:
        click.echo(f"calm: {outcome.stopped}", err=True)
    if outcome.interrupted_by is not None:
        done = [len(outcome.of(side.label)) for side in sides if side.label not in outcome.failures]
        click.echo(f"calm: stopped after {min(done, default=0)} of {outcome.plan.rounds} rounds", err=True)
        return 128 + outcome.interrupted_by
    return FAILED if outcome.failures or outcome.stopped else 0


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    "lab",
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  calm lab --cpus 16 --sockets 4 -a glibc,calmalloc -- ./server-test --threads 16
  calm lab --add /usr/lib/python3.11 --add work.py -- /usr/bin/python3 work.py
  calm lab --arch arm64 --syscalls -- build/aarch64/dedup-like --threads 16
""",
)
@click.option(
    "--cpus",
    type=click.IntRange(1, 255),
    metavar="N",
    default=16,
    show_default=True,
    help="CPUs of the guest.",
)
@click.option(
    "--sockets",
    type=click.IntRange(1, 64),
    metavar="N",
    default=1,
    show_default=True,
    help="Sockets of these CPUs.",
)
@click.option(
    "--arch",
    "architecture",
    type=click.Choice(list(ARCHITECTURES)),
    help="Architecture of the guest and its programs; arm64-16k: with pages of 16 KiB.  "
    "[default: this machine's]",
)
@options.allocator_list(
    "Allocators, as for `calm compare`: ratios are to the first.", default="glibc,calmalloc"
)
@options.rounds(None, f"Rounds. Default: as many as {ENOUGH_S / 60:g} minutes hold, from 1 to {ROUNDS}.")
@click.option(
    "--add",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A file or folder that the program needs in the guest; may be given several times.",
)
@click.option(
    "--env",
    "assignments",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set a variable in the guest, or take it from here; may be given several times.",
)
@click.option("--pin", metavar="CPUS", help="Let the program use these CPUs alone: 0-3,8.")
@click.option(
    "--memory",
    metavar="SIZE",
    type=options.Size("1M"),
    help="Memory of the guest: 4G, 512M.  [default: what fits]",
)
@options.timeout("10min", "End a run that takes longer; it has failed.")
@click.option(
    "--accel",
    type=click.Choice(["auto", KVM, TCG]),
    default="auto",
    show_default=True,
    help="auto: KVM where a guest boots under it, else emulation.",
)
@click.option("--syscalls", is_flag=True, help="Count memory calls too.")
@click.option("--kernel", type=_FILE, help="A bzImage, or an Image of arm64, instead of Debian's newest.")
@click.option("--busybox", type=_FILE, help="A static busybox, instead of Debian's.")
@click.option("--update", is_flag=True, help="Fetch the newest kernel, even if the cache has one.")
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder of kernels.  [default: build/emulated in a checkout, else the user's cache]",
)
@options.output("every run")
@options.program()
def command(
    cpus: int,
    sockets: int,
    architecture: str | None,
    specs: tuple[str, ...],
    rounds: int | None,
    add: tuple[Path, ...],
    assignments: tuple[str, ...],
    pin: str | None,
    memory: int | None,
    timeout: float,
    accel: str,
    syscalls: bool,
    kernel: Path | None,
    busybox: Path | None,
    update: bool,
    cache: Path | None,
    output: Output,
    cmd: tuple[str, ...],
) -> None:
    """Count the TLB interrupts of CMD on an emulated machine of many CPUs.

    QEMU boots Debian's kernel for clouds, with CMD and the files that it needs, and runs CMD under each
    allocator. Counts are those of a real kernel; times are shown only where the guest boots under KVM.
    """
    topology = Topology(cpus, sockets)
    if pin is not None:
        _check_pin(pin, cpus)
    guest = ARCHITECTURES[architecture] if architecture else host()
    sides = allocators_of(specs, guest)
    environment = environment_of(assignments, os.environ)
    files = Payload(environment, guest)
    files.program(program.find(cmd[0]))
    files.mirror(Path.cwd())
    for path in add:
        files.add(path)
    for library in (side.library for side in sides if side.library):
        files.library(library)
    turns = [Turn(side.label, cmd, side.variables(environment), pin) for side in sides]
    messages = [each for turn in turns for each in warnings({**environment, **turn.variables})]
    if any(side.library for side in sides) and (obstacle := program.preload_obstacle(cmd)):
        messages.insert(0, obstacle)
    messages += [f"note: {hint}" for hint in payload.hints(cmd[1:], add)]
    for message in dict.fromkeys(messages):
        click.echo(f"calm: {message}", err=True)
    plan = Plan(
        turns=turns,
        rounds=rounds or ROUNDS,
        enough_s=ENOUGH_S if rounds is None else None,
        topology=topology,
        payload=files,
        cache=(cache or packages.default_cache()).absolute() / (guest.debian if guest.foreign else ""),
        environment=environment,
        folder=Path.cwd(),
        memory=memory,
        accelerator=accel,
        groups=[measure.TLB_GROUP, *([measure.SYSCALL_GROUP] if syscalls else [])],
        timeout_s=timeout,
        kernel=kernel.absolute() if kernel else None,
        busybox=busybox.absolute() if busybox else None,
        update=update,
    )
    with Bar() as bar:
        outcome = session.run(plan, bar)
    status = _report_failures(outcome, sides, cmd)
    why = _no_interrupts(outcome)
    # A label that failed is not run again, so its runs are those of the first rounds.
    taken = [
        Side(
            side.label,
            [
                (number, _without_shootdowns(run.measurement, why))
                for number, run in outcome.of(side.label)
                if run.measurement
            ],
            outcome.failures.get(side.label),
        )
        for side in sides
    ]
    runs = [run for side in taken for _, run in side.runs]
    # Times are shown only where they are real.
    metrics = [
        metric
        for metric in METRICS
        if (metric.unit != "s" or outcome.accelerator == KVM)
        and any(metric.get(run) is not None for run in runs)
    ]
    found = Lab(
        command=list(cmd),
        **described(outcome),
        rounds=plan.rounds,
        interrupted_by=outcome.interrupted_by,
        notes=_notes(outcome),
        how={metric.key: metric.how for metric in metrics},
        allocators=comparison.summarize(sides, taken, metrics),
        output=[
            GuestOutput(
                label=run.label, round=number + 1, failure=run.failure, printed=run.printed, errors=run.errors
            )
            for number, run in outcome.runs
        ],
    )
    if runs:
        with output.console() as console:
            _print(found, outcome, console)
    output.write(found)
    raise SystemExit(status)
