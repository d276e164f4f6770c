"""The cost of shootdowns on another machine: the figures to start from, the document and its report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from calm.core import documents, machine, proc, report
from calm.core.comparison import ComparisonDocument
from calm.core.documents import Document
from calm.core.errors import USAGE, CalmError
from calm.core.options import Output
from calm.core.profile_model import Profile
from research import topology
from research.bench.results import Results
from research.predict import calibration, model
from research.predict.calibration import Calibration
from research.predict.model import LOCAL_CYCLES, REMOTE, VIRTUAL, Estimate, Observed, Prediction, Target

# Calls after which a page table maps less. brk may grow or shrink, so its number says too little.
_FLUSHING = ("madvise", "process_madvise", "munmap", "mprotect", "mremap")
_FIGURES = (
    *("shootdowns", "interrupts", "interrupts_system_wide", "user_s", "system_s", "threads_started"),
    *_FLUSHING,
)
_WHY = "they need root, or kernel.perf_event_paranoid at -1 and a readable tracefs"


@dataclass
class Inputs:
    """By allocator, the programs that ran; and notes on them."""

    path: str | None
    """The file that they are from; None: runs made now."""
    machine: Mapping[str, Any]
    programs: dict[str, list[Observed]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def error(self, message: str) -> CalmError:
        """The error about the file, or about the runs."""
        return CalmError(f"{self.path}{message}", USAGE) if self.path else CalmError(message.lstrip(": "))

    @property
    def here(self) -> bool:
        """They are of this machine, as far as can be known."""
        own = machine.describe()
        return all(self.machine.get(key) == own[key] for key in ("cpu", "architecture", "kernel"))

    @property
    def cpus(self) -> int:
        """The number of CPUs where they were counted."""
        cpus = self.machine.get("cpus")
        if not isinstance(cpus, int) or cpus < 1:
            raise self.error(" does not say on how many CPUs it was measured")
        if cpus == 1:
            raise self.error(
                " was measured on one CPU, where no TLB interrupt is sent: nothing can be scaled"
            )
        return cpus

    def add(self, label: str, figures: Mapping[str, float | None], reason: str) -> None:
        """Adds a program; the system's interrupts stand in where its own were not counted."""
        own = figures.get("interrupts")
        interrupts = figures.get("interrupts_system_wide") if own is None else own
        user, system, started = map(figures.get, ("user_s", "system_s", "threads_started"))
        if interrupts is None:
            raise self.error(f": {label}: no TLB interrupts to start from: {reason}")
        if user is None or system is None:
            raise self.error(f": {label}: the CPU time is missing")
        calls = [value for name in _FLUSHING if (value := figures.get(name)) is not None]
        program = Observed(
            label=label,
            interrupts=interrupts,
            shootdowns=figures.get("shootdowns"),
            cpu_s=user + system,
            cpus=self.cpus,
            threads=None if started is None else started + 1,
            calls=sum(calls) if calls else None,
            system_wide=own is None,
        )
        self.programs.setdefault(label, []).append(program)


def from_profiles(paths: Sequence[str]) -> Inputs:
    """Profiles, one for each allocator or change; all of machines with as many CPUs."""
    first: Inputs | None = None
    for path in paths:
        profile = documents.read(path, Profile)
        found = Inputs(path, profile.machine)
        first = first or found
        if found.cpus != first.cpus:
            raise CalmError(
                f"{path} was measured on {found.cpus} CPUs, and {paths[0]} on {first.cpus}", USAGE
            )
        values = {name: total.value for name, total in profile.totals.items()}
        if values.get("interrupts") is None:
            total = profile.totals.get("interrupts") or profile.totals.get("shootdowns")
            reason = total.how.removeprefix("not counted: ") if total and total.value is None else _WHY
            raise CalmError(f"{path}: TLB shootdowns were not counted: {reason}", USAGE)
        label = profile.allocator
        if label in first.programs:
            label = f"{label} ({Path(path).stem})"
        if label in first.programs:
            raise CalmError(f"{path} is given twice", USAGE)
        if profile.exit_code:
            found.notes.append(f"{label}: the profiled program ended with status {profile.exit_code}")
        found.add(label, values, "")
        first.programs |= found.programs
        if profile.interrupted_by:
            first.notes.append(f"{path} is of a run that was stopped, so of a part of the work")
        if not found.here:
            first.machine = found.machine
    assert first is not None
    return first


def from_file(path: str, case: str | None) -> Inputs:
    """The file of `calm compare --json` or `calm bench run --json`."""
    found = documents.read(path, ComparisonDocument, Results)
    if isinstance(found, Results):
        return _from_suite(path, found, case)
    if case is not None:
        raise CalmError(f"--case {case}: {path} is not a calm-suite", USAGE)
    assert isinstance(found, ComparisonDocument)
    return from_comparison(found, path)


def from_comparison(comparison: ComparisonDocument, path: str | None = None) -> Inputs:
    """A comparison; allocators that failed are left out."""
    found = Inputs(path, comparison.machine, notes=list(comparison.notes))
    for side in comparison.allocators:
        if side.failure or not side.runs:
            found.notes.append(f"{side.label} is left out: {side.failure or 'it has no complete round'}")
        else:
            reason = comparison.how.get("interrupts", "not counted").removeprefix("not counted: ")
            found.add(side.label, side.median, reason)
    if not found.programs and path:
        raise found.error(" has no complete run")
    return found


def _from_suite(path: str, suite: Results, case: str | None) -> Inputs:
    """Every case that has all figures under every allocator, as one program after the other."""
    found = Inputs(path, suite.machine)
    rows = [row for row in suite.rows if case in (None, row.name)]
    if not rows:
        raise found.error(f" has no case {case}" if case else " has no case")
    whole = [
        row
        for row in rows
        if len(suite.labels) == sum(not side.failure and suite.rounds_of(side) > 0 for side in row.sides)
    ]
    if not whole:
        raise found.error(": no case was measured under every allocator")
    for row in whole:
        for label in suite.labels:
            figures = {name: row.median(label, name) for name in _FIGURES}
            found.add(label, figures, suite.how.get("interrupts", "not counted"))
    if not case:
        found.notes.append(f"all {len(whole)} cases of {path} together")
    if left_out := [row.name for row in rows if row not in whole]:
        found.notes.append(f"left out, as not every allocator has figures: {', '.join(left_out)}")
    return found


class PredictedAllocator(msgspec.Struct, frozen=True):
    """One allocator: the programs that ran under it, and the prediction by environment."""

    label: str
    observed: list[Observed]
    predicted: dict[str, Prediction]


class ShootdownPrediction(Document, tag="calm-prediction", kw_only=True):
    """What `calm predict run` writes: the cost of TLB shootdowns on another machine."""

    target: Target
    estimates: list[Estimate]
    """The time of an interrupt by every source; the first one has precedence."""
    observed_interrupt_ns: float
    """The time of an interrupt where they were counted."""
    ghz: float
    assumptions: list[str]
    notes: list[str]
    allocators: list[PredictedAllocator]


def clock_ghz(cpuinfo: str) -> float | None:
    """The clock of the fastest CPU: an idle one may run at a fifth of it. None where it is not known."""
    found = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", cpuinfo, re.MULTILINE)
    return max(map(float, found), default=0.0) / 1000 or None


def _estimates(
    known: Calibration | None, given_ghz: float | None, here: bool
) -> tuple[list[Estimate], float, float]:
    """By the calibration of this machine, if there is one, and by the published constants.

    With the time of an interrupt where they were counted, and the target's clock.
    """
    mhz = known.reference_mhz if known else None
    own_ghz = mhz / 1000 if mhz else clock_ghz(proc.text("cpuinfo"))
    # Without a clock of this machine, that of the target is the best guess.
    ghz = given_ghz or own_ghz
    own_ghz = own_ghz or given_ghz
    if ghz is None or own_ghz is None:
        raise CalmError(
            "the clock of this machine's CPUs is not known: give that of the target by --ghz", USAGE
        )
    published_ns = LOCAL_CYCLES / ghz
    published = Estimate("published", published_ns, published_ns, published_ns)
    sockets = len(topology.sockets())
    observed_ns = LOCAL_CYCLES / own_ghz
    if here:
        kind = model.VIRT if topology.is_virtual() else model.NATIVE
        observed_ns *= model.environment_factor(kind, sockets)
    if not known:
        return [published], observed_ns, ghz
    measured, remote = known.costs.local_ns, known.costs.remote
    if here:
        observed_ns = measured * model.socket_factor(sockets, remote)
    # The interrupts of a guest include the cost of virtualization.
    divisor = VIRTUAL if known.machine["virtual"] else 1.0
    # The number of cycles is the same by the target's clock.
    faster = ghz / own_ghz if mhz else 1.0
    source = "calibrated here"
    if divisor != 1.0 or faster != 1.0:
        source += f"{', in a virtual machine' if divisor != 1.0 else ''}: {measured:,.0f} ns"
        source += f" at {own_ghz:.2f} GHz" if faster != 1.0 else ""
        source += f", divided by the published {divisor:g}" if divisor != 1.0 else ""
    low, high = known.interval_ns or (measured, measured)
    native, low, high = (each / divisor / faster for each in (measured, low, high))
    own = Estimate(source, native, low, high, REMOTE if remote is None else remote)
    return [own, published], observed_ns, ghz


def make(
    found: Inputs, target: Target, known: Calibration | None, ghz: float | None, environments: Sequence[str]
) -> ShootdownPrediction:
    """Predicts for each environment and allocator."""
    estimates, observed_ns, ghz = _estimates(known, ghz, found.here)
    allocators = [PredictedAllocator(label, programs, {}) for label, programs in found.programs.items()]
    for environment in environments:
        each_ns = model.interrupt_ns(estimates, environment, target.sockets)
        for each in allocators:
            first, *others = [model.predict(one, target, observed_ns, each_ns) for one in each.observed]
            own = each.predicted[environment] = sum(others, first)
            own.ratio = model.ratio(own, allocators[0].predicted[environment], each_ns)
    notes = list(found.notes)
    if not found.here:
        notes.append(
            "the figures were counted on another machine: its shootdowns are assumed to cost as published, "
            "native and within a socket"
        )
    if any(program.system_wide for each in allocators for program in each.observed):
        notes.append("interrupts were counted system-wide, of all processes")
    for each in allocators:
        if any(program.interrupts * observed_ns * 1e-9 > program.cpu_s for program in each.observed):
            notes.append(
                f"{each.label}: at {observed_ns:,.0f} ns each, its interrupts would have taken more "
                "than all its CPU time, so nothing is left for all else"
            )
    made = ShootdownPrediction(
        target=target,
        estimates=estimates,
        observed_interrupt_ns=observed_ns,
        ghz=ghz,
        assumptions=[],
        notes=notes,
        allocators=allocators,
    )
    made.assumptions = _assumptions(made)
    return made


def _threads(programs: Sequence[Observed], target: Target) -> str:
    if target.threads is not None:
        return f"{target.threads} of its threads run at once, by --threads"
    known = [each.threads for each in programs if each.threads is not None]
    if len(known) < len(programs):
        return "its number of threads is unknown, so on every CPU (--threads sets it)"
    numbers = " to ".join(dict.fromkeys(f"{number:,.0f}" for number in (min(known), max(known))))
    return f"all its threads ({numbers} with the initial one) run at once; the minimum is without that one"


def _sockets(target: Target) -> str:
    return "one socket" if target.sockets == 1 else f"{target.sockets} sockets"


def _assumptions(made: ShootdownPrediction) -> list[str]:
    """The assumptions of the model, in sentences."""
    target, first, published = made.target, made.estimates[0], made.estimates[-1]
    programs = [program for each in made.allocators for program in each.observed]
    environments = made.allocators[0].predicted
    by_calls = any(each.calls is not None for each in programs)
    cycles = f": {LOCAL_CYCLES:,.0f} cycles"
    if first is not published:
        cycles = f"; the published {LOCAL_CYCLES:,.0f} cycles are {published.local_ns:,.0f} ns"
    lines = [
        "the work is the same: all but shootdowns takes the same CPU time, and as many shootdowns begin as "
        f"on the {programs[0].cpus} CPUs where they were counted"
        + (", or at most as many as there were calls that may begin one" if by_calls else ""),
        f"a shootdown interrupts every other CPU that runs the program: {_threads(programs, target)}",
        f"a native interrupt within a socket takes {first.local_ns:,.0f} ns ({first.source}){cycles} "
        f"at {made.ghz:.2f} GHz",
        f"over {_sockets(target)} it takes {model.socket_factor(target.sockets, first.remote):.2f} times as "
        f"long (1/s + n (1 - 1/s), n = {first.remote:g}{', published' if first.remote == REMOTE else ''})",
    ]
    if model.VIRT in environments:
        lines.append(f"virtual machines: {VIRTUAL:g} times, as published")
    if model.OVERCOMMIT in environments:
        lines.append(
            f"several on the same CPUs, sockets hidden from them: {model.OVERCOMMITTED:g} times a native one "
            "within a socket, as published; this includes the cost of sockets"
        )
    if first is not published:
        lines.append("ranges cover both the calibration and the published constants")
    lines.append(
        "CPUs that invalidate TLBs by broadcast (arm64; x86 with INVLPGB) would send no interrupts at all"
    )
    return lines


def print_prediction(made: ShootdownPrediction, output: Output) -> None:
    figures = ("interrupts", "their CPU time", "share", "all CPU time", "ratio")
    table = report.table("", *figures[:2], "range", *figures[2:], "range", right=figures)
    for environment in made.allocators[0].predicted:
        table.add_row(f"{model.ENVIRONMENTS[environment]}:", style="bold")
        for allocator in made.allocators:
            each = allocator.predicted[environment]
            share = each.share.value
            table.add_row(
                f"  {allocator.label}",
                f"{each.interrupts.value:,.0f}",
                report.duration(each.shootdown_s.value),
                each.shootdown_s.range(report.duration),
                f"{share:.1%}" if share >= 0.001 or share == 0 else "under 0.1%",
                report.duration(each.cpu_s),
                f"{each.ratio.value:.3g}" if each.ratio else "-",
                each.ratio.range("{:.3g}".format) if each.ratio else "",
            )
    title = f"{made.target.cpus} CPUs on {_sockets(made.target)}"
    assumed = (f"assumed: {line}" for line in made.assumptions)
    calibration.finish(output, made, title, table, assumed, made.notes)
