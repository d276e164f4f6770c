"""`calm lab`: a program under several allocators, on an emulated machine of many CPUs."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click

from calm import allocators, measure, options, program, report
from calm.allocators import Allocator
from calm.environment import warnings
from calm.errors import USAGE, CalmError
from calm.lab import machine, packages, payload, session
from calm.lab.guest import APPLETS, Run, Turn
from calm.lab.machine import KVM, TCG, Topology
from calm.lab.session import Outcome, Plan
from calm.progress import Bar
from calm.statistics import Ratio, median, ratio_of_medians

ROUNDS = 3
ENOUGH_S = 120.0  # without -n: two allocators' counts in three minutes, whatever the program


@dataclass(frozen=True)
class Figure:
    """One that runs are compared by."""

    key: str
    label: str
    how: str
    get: Callable[[Run], float | None]
    unit: str = "count"


def _counter(name: str) -> Callable[[Run], float | None]:
    def get(run: Run) -> float | None:
        value = run.report.get("counters", {}).get(name, {}).get("value")
        return None if value is None else float(value)

    return get


def _number(value: object, factor: float = 1) -> float | None:
    return value * factor if isinstance(value, int | float) else None


FIGURES = (
    Figure(
        "interrupts",
        "TLB interrupts",
        "TLB row of the guest's /proc/interrupts, all its CPUs: received, by the program and nothing else",
        lambda run: _number(run.report.get("system_wide_tlb_interrupts")),
    ),
    Figure(
        "shootdowns_begun",
        "TLB shootdowns begun",
        "tracepoint tlb:tlb_flush, reason 4, of the guest's kernel",
        _counter("shootdowns_begun"),
    ),
    *(
        Figure(f"{name}_calls", f"{name} calls", f"tracepoint syscalls:sys_enter_{name}", _counter(name))
        for name in measure.SYSCALLS
    ),
    Figure(
        "minor_faults",
        "minor faults",
        "rusage, all waited-for processes",
        lambda run: _number(run.report.get("minor_faults")),
    ),
    Figure(
        "peak_rss_kib",
        "peak RSS",
        "the kernel's own mark of the largest process",
        lambda run: _number(run.report.get("memory", {}).get("peak_kib")),
        "KiB",
    ),
    Figure(
        "wall_s",
        "wall time",
        "monotonic clock of the guest, under KVM alone",
        lambda run: _number(run.report.get("wall_ns"), 1e-9),
        "s",
    ),
)


@dataclass
class Result:
    """An experiment, for the table and for JSON."""

    command: tuple[str, ...]
    sides: Sequence[Allocator]
    outcome: Outcome

    @property
    def figures(self) -> list[Figure]:
        """Those that somebody has; times only where they are real."""
        real = self.outcome.accelerator == KVM
        return [
            figure
            for figure in FIGURES
            if (real or figure.unit != "s")
            and any(figure.get(run) is not None for side in self.sides for run in self.outcome.of(side.label))
        ]

    def values(self, side: Allocator, figure: Figure) -> list[float | None]:
        """One for each good run."""
        return [figure.get(run) for run in self.outcome.of(side.label)]

    def ratio(self, side: Allocator, figure: Figure) -> Ratio | None:
        """To the first allocator, over the rounds that both have; None for the first itself."""
        first = self.sides[0].label
        if side.label == first:
            return None
        rounds: dict[int, dict[str, float]] = {}
        for number, run in self.outcome.runs:
            if run.failure is None and (value := figure.get(run)) is not None:
                rounds.setdefault(number, {})[run.label] = value
        both = [
            (known[side.label], known[first]) for known in rounds.values() if {side.label, first} <= {*known}
        ]
        return ratio_of_medians([value for value, _ in both], [base for _, base in both])

    @property
    def notes(self) -> list[str]:
        """What such a machine cannot show."""
        outcome = self.outcome
        if outcome.accelerator == KVM:
            notes = ["the guest runs under KVM: its times are real, for as many CPUs as this machine has"]
        else:
            notes = [
                "the CPUs are emulated: counts are a real kernel's; times would be the emulator's, and are "
                f"not shown (no KVM: {outcome.why_not_kvm})"
            ]
        if outcome.round_s is not None:
            rounds = 1 + max(number for number, _ in outcome.runs)
            notes.append(
                f"{rounds} of {outcome.plan.rounds} rounds, as one takes {outcome.round_s:.0f} s: "
                "-n runs as many as it says"
            )
        if outcome.view and _release(outcome.view.kernel) < (6, 13):
            notes.append(
                f"Linux {outcome.view.kernel} refuses process_madvise(MADV_DONTNEED), which 6.13 and later "
                "take: calmalloc and ptlbmalloc2 purge by single madvise calls here"
            )
        return notes


def _release(text: str) -> tuple[int, int]:
    numbers = text.split("-")[0].split(".")
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 and numbers[1].isdigit() else 0


def described(outcome: Outcome) -> dict[str, Any]:
    """What machine it was: for JSON."""
    topology = outcome.plan.topology
    return {
        "machine": {
            "cpus": topology.cpus,
            "sockets": topology.sockets,
            "nodes": outcome.view.nodes if outcome.view else None,
            "memory_mib": outcome.memory >> 20,
            "emulated": outcome.accelerator == TCG,
            "accelerator": outcome.accelerator,
            "why_not_kvm": outcome.why_not_kvm,
        },
        "kernel": outcome.view.kernel if outcome.view else None,
        "kernel_package": outcome.parts.kernel_package,
        "qemu": outcome.qemu.version,
        "glibc": (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ") or None,
        # Without folders, which are this machine's affair.
        "qemu_command": [re.sub(r"[^:]*/", "", word) for word in outcome.command],
    }


def as_json(result: Result) -> dict[str, Any]:
    """Everything, each run included."""
    outcome = result.outcome
    sides = []
    for side in result.sides:
        ratios = {figure.key: result.ratio(side, figure) for figure in result.figures}
        sides.append(
            {
                "label": side.label,
                "library": str(side.library) if side.library else None,
                "environment": dict(side.environment),
                "failure": outcome.failures.get(side.label),
                "n": len(outcome.of(side.label)),
                "median": {figure.key: median(result.values(side, figure)) for figure in result.figures},
                "ratio": {key: vars(ratio) for key, ratio in ratios.items() if ratio is not None},
                "runs": [
                    {
                        "round": number + 1,
                        "failure": run.failure,
                        "exit_code": run.exit_code,
                        **{figure.key: figure.get(run) for figure in result.figures},
                        "printed": run.printed,
                        "errors": run.errors,
                    }
                    for number, run in outcome.runs
                    if run.label == side.label
                ],
            }
        )
    return {
        "command": list(result.command),
        **described(outcome),
        "rounds_wanted": outcome.plan.rounds,
        "interrupted": outcome.interrupted_by is not None,
        "baseline": result.sides[0].label,
        "notes": result.notes,
        "how": {figure.key: figure.how for figure in result.figures},
        "allocators": sides,
    }


def _print(result: Result, file: IO[str]) -> None:
    console = report.console(file)  # type: ignore[arg-type]
    outcome = result.outcome
    console.print(shlex.join(result.command), style="bold", soft_wrap=True)
    kernel = f", Linux {outcome.view.kernel}" if outcome.view else ""
    kind = "under KVM" if outcome.accelerator == KVM else "emulated"
    console.print(f"{outcome.plan.topology}, {kind}{kernel}", soft_wrap=True)
    table = report.table()
    for heading in ("", "allocator"):
        table.add_column(heading, no_wrap=True)
    for heading in ("median", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("95% interval", no_wrap=True)
    table.add_column("rounds", no_wrap=True)
    for figure in result.figures:
        label = figure.label
        for side in result.sides:
            values = result.values(side, figure)
            each = ", ".join(report.figure(value, figure.unit) for value in values[:5])
            base = side is result.sides[0] and values
            cells = ("1", "") if base else report.ratio(result.ratio(side, figure))
            table.add_row(label, side.label, report.figure(median(values), figure.unit), *cells, each)
            label = ""
        table.add_row()
    report.print_table(console, table)
    for figure in result.figures:
        if "TLB" in figure.label:
            console.print(f"{figure.label}: {figure.how}", style="dim", soft_wrap=True)
    known = {figure.key for figure in result.figures}
    if "shootdowns_begun" not in known:
        reasons = [
            run.report.get("counters", {}).get("shootdowns_begun", {}).get("reason")
            for _, run in outcome.runs
        ]
        why = next((reason for reason in reasons if reason), "nothing ran to its end")
        console.print(f"TLB shootdowns begun: not counted: {why}", style="dim", soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", soft_wrap=True)


def environment_of(assignments: Sequence[str], inherited: Mapping[str, str]) -> dict[str, str]:
    """What programs in the guest find: little of this machine's, and what the user gives."""
    path = inherited.get("PATH", os.defpath)
    environment = {"PATH": f"{path}:{APPLETS}", "HOME": "/root", "USER": "root", "LANG": "C.UTF-8"}
    if libraries := inherited.get("LD_LIBRARY_PATH"):
        environment["LD_LIBRARY_PATH"] = libraries
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or (not equals and name not in inherited):
            raise CalmError(f"--env {assignment!r}: NAME=VALUE is meant, or a NAME that is set here", USAGE)
        environment[name] = value if equals else inherited[name]
    return environment


def plan_of(
    sides: Sequence[Allocator],
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    add: Sequence[Path],
    pin: str | None,
) -> tuple[payload.Payload, list[Turn]]:
    """The guest's files, and one turn for each allocator."""
    files = payload.Payload(environment)
    files.program(program.find(command[0]))
    files.folder(Path.cwd())
    for path in add:
        files.add(path)
    inherited = dict(environment)
    turns = []
    for side in sides:
        if side.library:
            files.library(side.library)
        turns.append(Turn(side.label, tuple(command), side.variables(inherited), pin))
    return files, turns


def _check_pin(pin: str, cpus: int) -> None:
    try:
        for part in pin.split(","):
            first, _, last = part.partition("-")
            if not 0 <= int(first) <= int(last or first) < cpus:
                raise ValueError
    except ValueError:
        raise CalmError(f"--pin {pin!r}: CPUs from 0 to {cpus - 1} are meant, such as 0-3,8", USAGE) from None


def _exit_code(outcome: Outcome) -> int:
    if outcome.interrupted_by is not None:
        return 128 + outcome.interrupted_by
    return 1 if outcome.failures or outcome.stopped else 0


def _tell_failures(outcome: Outcome, command: Sequence[str]) -> None:
    """A line for each, and under it what the program itself has said last."""
    for label, failure in outcome.failures.items():
        click.echo(f"calm: {label}: {shlex.join(command)}: {failure}", err=True)
        failed = next((run for _, run in outcome.runs if run.label == label and run.failure), None)
        for line in failed.last_words if failed else []:
            click.echo(f"    {line}", err=True)
    if outcome.stopped:
        click.echo(f"calm: {outcome.stopped}", err=True)


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    "lab",
    context_settings={"allow_interspersed_args": False},
    epilog="\b\nExamples:\n"
    "  calm lab --cpus 16 --sockets 4 -a glibc,calmalloc -- ./server-test --threads 16\n"
    "  calm lab --add /usr/lib/python3.11 --add work.py -- /usr/bin/python3 work.py",
)
@click.option("--cpus", type=click.IntRange(1, 255), default=16, show_default=True, help="CPUs of the guest.")
@click.option(
    "--sockets", type=click.IntRange(1, 64), default=1, show_default=True, help="Sockets that they lie in."
)
@options.allocator_list(
    "As with `calm compare`: the first is the one that ratios are to. May be given several times.",
    default="glibc,calmalloc",
)
@click.option(
    "-n",
    "rounds",
    type=click.IntRange(min=1),
    help=f"Rounds.  [default: as many as {ENOUGH_S / 60:g} minutes hold, from 1 to {ROUNDS}]",
)
@click.option(
    "--add",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A file or folder that the program needs there, put where it lies here. May be given several times.",
)
@click.option(
    "--env",
    "assignments",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set a variable there, or take this machine's. May be given several times.",
)
@click.option("--pin", metavar="CPUS", help="Let the program use these CPUs alone: 0-3,8.")
@click.option("--memory", metavar="SIZE", help="Memory of the guest: 4G, 512M.  [default: what fits]")
@options.timeout(600.0, "Give a run up that takes longer.")
@click.option(
    "--accel",
    type=click.Choice(["auto", KVM, TCG]),
    default="auto",
    show_default=True,
    help="auto: KVM where a guest boots under it, else emulation.",
)
@click.option("--syscalls", is_flag=True, help="Count memory calls too.")
@click.option("--kernel", type=_FILE, help="A bzImage, instead of Debian's newest kernel for clouds.")
@click.option("--busybox", type=_FILE, help="A static busybox, instead of Debian's.")
@click.option("--update", is_flag=True, help="Fetch the newest kernel, though there is one already.")
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where kernels are kept.  [default: build/emulated in a checkout, else the user's cache]",
)
@options.json_file()
@options.program()
def command(
    cpus: int,
    sockets: int,
    specs: tuple[str, ...],
    rounds: int | None,
    add: tuple[Path, ...],
    assignments: tuple[str, ...],
    pin: str | None,
    memory: str | None,
    timeout: float,
    accel: str,
    syscalls: bool,
    kernel: Path | None,
    busybox: Path | None,
    update: bool,
    cache: Path | None,
    json_path: str | None,
    cmd: tuple[str, ...],
) -> None:
    """Count the TLB interrupts of CMD under each allocator on an emulated machine of many CPUs.

    Boots Debian's kernel for clouds in QEMU, with nothing in it but CMD and what it needs to run. Counts
    are those of a real kernel; times are not, and shown only where a guest boots under KVM.
    """
    if json_path and json_path != "-":
        report.check_writable(json_path)
    topology = Topology(cpus, sockets)
    if pin is not None:
        _check_pin(pin, cpus)
    size = machine.bytes_of(memory) if memory else None
    sides = allocators.parse_list(specs)
    environment = environment_of(assignments, os.environ)
    files, turns = plan_of(sides, cmd, environment=environment, add=add, pin=pin)
    if any(side.library for side in sides) and (obstacle := program.preload_obstacle(cmd)):
        click.echo(f"calm: {obstacle}", err=True)
    # Of the guest's variables alone: this machine's do not come along.
    told = [each for turn in turns for each in warnings({**environment, **turn.variables})]
    for warning in dict.fromkeys(told):
        click.echo(f"calm: {warning}", err=True)
    for hint in payload.hints(cmd[1:], add):
        click.echo(f"calm: note: {hint}", err=True)
    plan = Plan(
        turns=turns,
        rounds=rounds or ROUNDS,
        enough_s=ENOUGH_S if rounds is None else None,
        topology=topology,
        payload=files,
        cache=(cache or packages.default_cache()).absolute(),
        environment=environment,
        folder=Path.cwd(),
        memory=size,
        accelerator=accel,
        groups=[measure.TLB_GROUP, *([measure.SYSCALL_GROUP] if syscalls else [])],
        timeout_s=timeout,
        kernel=kernel.absolute() if kernel else None,
        busybox=busybox.absolute() if busybox else None,
        update=update,
    )
    with Bar() as bar:
        outcome = session.run(plan, lambda what, done, total: bar.update(done, what, total))
    result = Result(cmd, sides, outcome)
    _tell_failures(outcome, cmd)
    if outcome.interrupted_by is not None:
        done = [len(outcome.of(side.label)) for side in sides if side.label not in outcome.failures]
        click.echo(f"calm: stopped after {min(done, default=0)} of {plan.rounds} rounds", err=True)
    if any(outcome.of(side.label) for side in sides):
        _print(result, sys.stderr if json_path == "-" else sys.stdout)
    if json_path:
        report.write(json_path, json.dumps(as_json(result), indent=2) + "\n")
    raise SystemExit(_exit_code(outcome))
