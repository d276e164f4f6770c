"""What predictions start from: profiles, comparisons, results of the suite, or runs made now."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calm import machine
from calm.bench import results
from calm.compare import Comparison
from calm.errors import CalmError
from calm.measure import METRIC, SHOOTDOWNS
from calm.predict.model import Observed
from calm.profile import model as profile_model
from calm.statistics import median

# Calls after which a page table has less in it. brk may grow or shrink, and tells too little.
_FLUSHING = ("madvise", "process_madvise", "munmap", "mprotect", "mremap")
_WHY = "they need root, or kernel.perf_event_paranoid at -1 and a readable tracefs"


@dataclass
class Inputs:
    """By allocator, what each program did; and what is to be said of it."""

    programs: dict[str, list[Observed]]
    cpus: int
    """Of the machine that they were counted on."""
    here: bool
    """That is this machine, as far as can be known."""
    notes: list[str] = field(default_factory=list)


def _here(described: Mapping[str, Any]) -> bool:
    own = machine.describe()
    return all(described.get(key) == own[key] for key in ("cpu", "architecture", "kernel"))


def _cpus(described: Mapping[str, Any], path: str) -> int:
    cpus = described.get("cpus")
    if not isinstance(cpus, int) or cpus < 1:
        raise CalmError(f"{path} does not say on how many CPUs it was measured")
    return cpus


def _checked(cpus: int, path: str) -> int:
    if cpus == 1:
        raise CalmError(
            f"{path} was measured on one CPU, where no TLB interrupt is sent: there is nothing to scale"
        )
    return cpus


def observed(
    label: str, figures: Mapping[str, float | None], cpus: int, reason: str = "not counted"
) -> Observed:
    """From medians of a run's figures; the system's interrupts stand in where the program's are missing."""
    own = figures.get("interrupts_sent")
    interrupts = figures.get("system_wide_tlb_interrupts") if own is None else own
    user, system = figures.get("user_s"), figures.get("system_s")
    if interrupts is None:
        raise CalmError(f"{label}: no TLB interrupts to start from: {reason}")
    if user is None or system is None:
        raise CalmError(f"{label}: the CPU time is missing")
    started = figures.get("threads_started")
    threads = None if started is None else started + 1
    calls = [value for name in _FLUSHING if (value := figures.get(name)) is not None]
    return Observed(
        label=label,
        interrupts=interrupts,
        shootdowns=figures.get("shootdowns_begun"),
        cpu_s=user + system,
        cpus=cpus,
        threads=threads,
        calls=sum(calls) if calls else None,
        system_wide=own is None,
    )


def _system_wide(programs: Mapping[str, Sequence[Observed]]) -> list[str]:
    if any(each.system_wide for group in programs.values() for each in group):
        return [
            f"interrupts were counted system-wide, so other programs' are among them; {_WHY} to count its own"
        ]
    return []


def from_profiles(paths: Sequence[str]) -> Inputs:
    """One allocator each."""
    programs: dict[str, list[Observed]] = {}
    found: Inputs | None = None
    for path in paths:
        profile = profile_model.load(path)
        cpus = _checked(_cpus(profile.machine, path), path)
        if found and cpus != found.cpus:
            raise CalmError(f"{path} was measured on {cpus} CPUs, and {paths[0]} on {found.cpus}")
        values: dict[str, float | None] = {name: total.value for name, total in profile.totals.items()}
        if values.get("interrupts_sent") is None:
            total = profile.totals.get("interrupts_sent") or profile.totals.get("shootdowns")
            reason = total.how.removeprefix("not counted: ") if total and total.value is None else _WHY
            raise CalmError(f"{path}: TLB shootdowns were not counted: {reason}")
        label = profile.allocator
        if label in programs:
            label = f"{label} ({Path(path).stem})"
        if label in programs:
            raise CalmError(f"{path} is given twice")
        values["shootdowns_begun"] = values.get("shootdowns")
        programs[label] = [observed(label, values, cpus)]
        if found is None:
            found = Inputs(programs, cpus, _here(profile.machine))
        if profile.interrupted:
            found.notes.append(f"{path} is of a run that was stopped, so of a part of the work")
        found.here &= _here(profile.machine)
    assert found is not None
    return found


def from_file(path: str, case: str | None) -> Inputs:
    """What `calm compare --json` or `calm bench -o` wrote."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise CalmError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CalmError(f"{path} is not JSON: {error}") from error
    if isinstance(data, dict) and data.get("tool") == "calm bench":
        return _from_suite(path, case)
    if case is not None:
        raise CalmError(f"--case {case}: {path} is no file of results of `calm bench`")
    if not isinstance(data, dict) or "allocators" not in data or "rounds_wanted" not in data:
        raise CalmError(
            f"{path} is neither a comparison (`calm compare --json`) nor results of `calm bench -o`"
        )
    try:
        return _from_comparison(path, data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CalmError(f"{path} is not a whole comparison: {error}") from error


def _from_comparison(path: str, data: Mapping[str, Any]) -> Inputs:
    notes, described = [], data.get("machine") or {}
    if described:
        cpus = _cpus(described, path)
    else:
        cpus = int(machine.describe()["cpus"])
        notes.append(
            f"{path} does not say where it was measured: taken to be this machine, with its {cpus} CPUs"
        )
    programs = {}
    how = data.get("how", {})
    for side in data["allocators"]:
        if side["n"] == 0:
            notes.append(f"{side['label']} is left out: {side['failure'] or 'it has no complete round'}")
            continue
        reason = str(how.get("interrupts_sent", "not counted")).removeprefix("not counted: ")
        programs[str(side["label"])] = [observed(side["label"], side["median"], _checked(cpus, path), reason)]
    if not programs:
        raise CalmError(f"{path} has no complete run")
    return Inputs(programs, cpus, not described or _here(described), notes + _system_wide(programs))


def _from_suite(path: str, case: str | None) -> Inputs:
    """Every case that has all figures under every allocator, as one program after the other."""
    found = results.load(path)
    cpus = _checked(_cpus(found.machine, path), path)
    rows = [row for row in found.rows if case is None or row.name == case]
    if not rows:
        raise CalmError(f"{path} has no case {case}" if case else f"{path} has no case")
    programs: dict[str, list[Observed]] = {label: [] for label in found.labels}
    left_out = []
    for row in rows:
        whole = {}
        for side in row.sides:
            if side.rounds and not side.failure:
                keys = [
                    *SHOOTDOWNS[:2],
                    "system_wide_tlb_interrupts",
                    "user_s",
                    "system_s",
                    "threads_started",
                ]
                whole[side.label] = {key: side.median(key) for key in keys}
        if len(whole) < len(found.labels):
            left_out.append(row.name)
            continue
        for label, figures in whole.items():
            programs[label].append(observed(label, figures, cpus, found.how.get("interrupts_sent", "")))
    if not programs[found.labels[0]]:
        raise CalmError(f"{path}: no case was measured under every allocator")
    notes = [] if case else [f"all {len(rows) - len(left_out)} cases of {path} together"]
    if left_out:
        notes.append(f"left out, as not every allocator has figures: {', '.join(left_out)}")
    return Inputs(programs, cpus, _here(found.machine), notes + _system_wide(programs))


def from_runs(comparison: Comparison) -> Inputs:
    """Runs made now; allocators without any are left out."""
    cpus = int(machine.describe()["cpus"])
    programs = {}
    for side in comparison.sides:
        if side.runs and not side.failure:
            figures = {name: median(comparison.values(side, metric)) for name, metric in METRIC.items()}
            reason = comparison.explain(METRIC["interrupts_sent"]).removeprefix("not counted: ")
            programs[side.allocator.label] = [observed(side.allocator.label, figures, cpus, reason)]
    return Inputs(programs, cpus, True, _system_wide(programs))
