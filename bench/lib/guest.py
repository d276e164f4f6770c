"""Runs of the workloads on an emulated machine, and the libraries' reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from calm.core.errors import CalmError
from calm.core.progress import Bar
from research.lab import session
from research.lab.command import described
from research.lab.guest import APPLETS, Run, Turn
from research.lab.machine import Topology
from research.lab.payload import Payload
from research.lab.session import Plan

from .results import REPOSITORY

RELEASE = REPOSITORY / "build/release"
GLIBC, CALMALLOC, PTLBMALLOC2 = "glibc", "calmalloc", "ptlbmalloc2"
# Independent of this machine, so that all machines measure the same.
_ENVIRONMENT = {"PATH": f"/usr/bin:/bin:{APPLETS}", "HOME": "/root", "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Settings:
    """The options for booting, and the timeout."""

    cache: Path
    timeout_s: float
    accelerator: str = "auto"


@dataclass
class Work:
    """The guest's programs and libraries, and the turns that run them."""

    turns: list[Turn] = field(default_factory=list)
    files: Payload = field(default_factory=lambda: Payload(_ENVIRONMENT))

    def add(
        self,
        label: str,
        command: Sequence[str],
        library: Path | None = None,
        *,
        pin: str | None = None,
        variables: Mapping[str, str] | None = None,
        options: str = "",
    ) -> None:
        """A workload of build/release by its name, or a program by its path; a library to preload into it.

        `options` are calmalloc's.
        """
        program = RELEASE / command[0]
        if not program.is_file():
            raise CalmError(f"{program} is not built: run make")
        self.files.program(program)
        variables = dict(variables or {})
        if library is not None:
            if not library.is_file():
                raise CalmError(f"{library} is not built: run make")
            self.files.library(library)
            variables |= preloading(library, options)
        self.turns.append(Turn(label, (str(program), *command[1:]), variables, pin))


def name_of(library: Path) -> str:
    """The allocator in a library: calmalloc, for libcalmalloc.so."""
    return library.name.removeprefix("lib").partition(".")[0]


def preloading(library: Path, options: str = "") -> dict[str, str]:
    """The variables that preload the library, and make it report at exit."""
    variables = {"LD_PRELOAD": str(library)}
    if name_of(library) == PTLBMALLOC2:
        variables["PTLBMALLOC2_STATS"] = "json"
    elif name_of(library) == CALMALLOC:
        variables["CALM_OPTIONS"] = ",".join(each for each in (options, "report=exit") if each)
    return variables


def report_of(library: Path, run: Run) -> dict[str, Any]:
    """The library's report. Without this check, a library that was not loaded would be measured as glibc."""
    first = {PTLBMALLOC2: '{"pid": ', CALMALLOC: '{"allocator": "calmalloc"'}.get(name_of(library))
    if first is None:
        return {}
    start = run.errors.find(first)
    report: dict[str, Any] = {}
    if start >= 0:
        report, _ = json.JSONDecoder().raw_decode(run.errors, start)
    if not report or report.get("active") is False:
        raise CalmError(f"{library.name} was not active: {run.errors.strip() or 'no report'}")
    return report


def interrupts(run: Run) -> int:
    """TLB shootdown interrupts that all CPUs received during the run."""
    if run.measurement is None or run.measurement.interrupts_system_wide is None:
        raise CalmError(f"{run.label}: TLB interrupts were not counted")
    return run.measurement.interrupts_system_wide


def shootdowns(run: Run) -> int | None:
    """Shootdowns begun during the run: one each, however many CPUs it interrupts."""
    return run.measurement.counters["shootdowns"].value if run.measurement else None


def measure(
    work: Work, rounds: int, topology: Topology, settings: Settings
) -> tuple[dict[str, Any], list[Run]]:
    """Boots the machine and runs all turns in each round. Returns a description of the machine, and the runs.

    Any failure is an error: incomplete figures are useless.
    """
    plan = Plan(
        turns=work.turns,
        rounds=rounds,
        topology=topology,
        payload=work.files,
        cache=settings.cache,
        environment=_ENVIRONMENT,
        accelerator=settings.accelerator,
        timeout_s=settings.timeout_s,
    )
    with Bar() as bar:
        outcome = session.run(plan, bar)
    if outcome.interrupted_by is not None:
        sys.exit(128 + outcome.interrupted_by)
    for label, failure in outcome.failures.items():
        raise CalmError(f"{label}: {failure}")
    if outcome.stopped:
        raise CalmError(outcome.stopped)
    return msgspec.to_builtins(described(outcome)), [run for _, run in outcome.runs]


def labelled(runs: Iterable[Run], label: str) -> list[Run]:
    """The runs of one turn."""
    return [run for run in runs if run.label == label]
