"""Runs of the workloads on an emulated machine: what is compared there, and what the libraries report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calm.errors import CalmError
from calm.lab import session
from calm.lab.command import described
from calm.lab.guest import APPLETS, Run, Turn
from calm.lab.machine import Topology
from calm.lab.payload import Payload
from calm.lab.session import Plan
from calm.progress import Bar

from .results import REPOSITORY

RELEASE = REPOSITORY / "build/release"
GLIBC, CALMALLOC, PTLBMALLOC2 = "glibc", "calmalloc", "ptlbmalloc2"
# Nothing of this machine's, so that all machines measure the same.
_ENVIRONMENT = {"PATH": f"/usr/bin:/bin:{APPLETS}", "HOME": "/root", "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Settings:
    """How to boot, and how patient to be."""

    cache: Path
    timeout_s: float
    accelerator: str = "auto"


@dataclass
class Work:
    """Programs and libraries that the guest has, and the turns that run them."""

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
    ) -> None:
        """A workload of build/release by its name, or a program by its path; a library to preload into it."""
        program = RELEASE / command[0]
        if not program.is_file():
            raise CalmError(f"{program} is not built: run make")
        self.files.program(program)
        variables = dict(variables or {})
        if library is not None:
            if not library.is_file():
                raise CalmError(f"{library} is not built: run make")
            self.files.library(library)
            variables |= {"LD_PRELOAD": str(library)} | _reporting(library)
        self.turns.append(Turn(label, (str(program), *command[1:]), variables, pin))


def name_of(library: Path) -> str:
    """The allocator in a library: calmalloc, for libcalmalloc.so."""
    return library.name.removeprefix("lib").partition(".")[0]


def _reporting(library: Path) -> dict[str, str]:
    """Has it say at exit what it did."""
    if name_of(library) == PTLBMALLOC2:
        return {"PTLBMALLOC2_STATS": "json"}
    return {"CALM_OPTIONS": "report=exit"} if name_of(library) == CALMALLOC else {}


def report_of(library: Path, run: Run) -> dict[str, Any]:
    """What the library says that it did. One that was not there would be measured as glibc."""
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
    """TLB shootdown interrupts that all CPUs received while it ran."""
    return int(run.report["system_wide_tlb_interrupts"])


def shootdowns(run: Run) -> int | None:
    """Shootdowns that it began: one each, however many CPUs it interrupted."""
    value = run.report["counters"]["shootdowns_begun"]["value"]
    return None if value is None else int(value)


def measure(
    work: Work, rounds: int, topology: Topology, settings: Settings
) -> tuple[dict[str, Any], list[Run]]:
    """Boots the machine and runs all the turns, rounds times. Returns what machine it was, and the runs.

    Any failure is an error: figures with holes are no figures.
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
        outcome = session.run(plan, lambda what, done, total: bar.update(done, what, total))
    if outcome.interrupted_by is not None:
        sys.exit(128 + outcome.interrupted_by)
    for label, failure in outcome.failures.items():
        raise CalmError(f"{label}: {failure}")
    if outcome.stopped:
        raise CalmError(outcome.stopped)
    return described(outcome), [run for _, run in outcome.runs]


def labelled(runs: Iterable[Run], label: str) -> list[Run]:
    """Those of one turn."""
    return [run for run in runs if run.label == label]
