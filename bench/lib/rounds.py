"""Runs a program under several allocators in turn, and reads the program's output."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from calm.core import allocators, program
from calm.core import messages as said
from calm.core.allocators import Allocator
from calm.core.environment import clean_environment
from calm.core.rounds import orders
from calm.core.statistics import SEED
from research.papers import sessions

from .results import REPOSITORY

GLIBC = "glibc"
CALMALLOC = "calmalloc"
PTLBMALLOC2 = "ptlbmalloc2"
PEERS = (GLIBC, "jemalloc", "gperftools", "mimalloc")

LONGEST_RUN_S = 600
# A shell that enters the cgroup, and then executes the program.
_ENTER = 'echo $$ >"$0/cgroup.procs" && exec "$@"'


def present(labels: Iterable[str]) -> list[str]:
    """The installed allocators; prints those that are missing."""
    there: list[str] = []
    missing: list[str] = []
    for label in labels:
        (there if allocators.is_here(label.partition(":")[0]) else missing).append(label)
    if missing:
        print(f"skipped, because not installed: {', '.join(missing)}", flush=True)
    return there


def under(allocator: Allocator, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command with the allocator preloaded, which does not affect the process that starts it."""
    return program.with_variables(command, allocator.variables(environment))


def run_to_end(
    command: Sequence[str],
    *,
    folder: Path = REPOSITORY,
    environment: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
    check: bool = True,
    limit_s: float = LONGEST_RUN_S,
) -> subprocess.CompletedProcess[str]:
    """Runs a command with a timeout, at which all its processes are killed."""
    pipe = subprocess.PIPE
    with sessions.whole(
        command, folder=folder, environment=environment, output=stdout, errors=pipe, text=True
    ) as process:
        output, errors = process.communicate(timeout=limit_s)
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command), output, errors)
    return subprocess.CompletedProcess(list(command), process.returncode, output, errors)


def run_once(command: Sequence[str], allocator: Allocator, cgroup: Path | None = None) -> dict[str, Any]:
    """Runs a workload, and returns the JSON that it prints."""
    environment = clean_environment()
    environment |= allocator.variables(environment)
    if cgroup is not None:
        command = ["sh", "-c", _ENTER, str(cgroup), *command]
    done = run_to_end(command, environment=environment)
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed | note(done.stderr)


def note(errors: str) -> dict[str, Any]:
    """The messages of calmalloc, if any: about an unknown option, or one that it declines."""
    lines = said.lines(errors)
    return {"said": lines} if lines else {}


def origin(allocator: Allocator) -> dict[str, str | None]:
    """An allocator's version with its date, and its package or crate."""
    name = allocator.label.partition(":")[0]
    if name not in allocators.KNOWN:
        return {}
    found = allocators.origin(name)
    kept = ("version", "date", "package", "package_version", "crate", "crate_version")
    return {key: getattr(found, key) for key in kept}


def version_of(side: Mapping[str, Any]) -> str:
    """The same as text."""
    known = side.get("origin") or {}
    for kind in ("crate", "package"):
        if known.get(kind):
            return f"{known['version']}, {kind} {known[kind]} {known[f'{kind}_version']}"
    return allocators.dated(known.get("version"), known.get("date")) or "version not known"


def interleaved(
    labels: Sequence[str],
    run: Callable[[Allocator], dict[str, Any]],
    rounds: int,
    warm_up: int = 1,
    case: str = "",
) -> list[dict[str, Any]]:
    """Runs each allocator once per round, in varying order (calm.core.rounds); the first round is discarded.

    An allocator under which the program fails is dropped. The case seeds the orders.
    """
    sides: list[dict[str, Any]] = []
    parsed = [allocators.parse(label) for label in labels]
    for allocator in parsed:
        sides.append(
            {
                "label": allocator.label,
                "origin": origin(allocator),
                "environment": dict(allocator.environment),
                "failure": None,
                "runs": [],
            }
        )
    turns = list(zip(sides, parsed, strict=True))
    for number, order in enumerate(orders(turns, warm_up + rounds, SEED, case)):
        for side, allocator in order:
            if side["failure"] is not None:
                continue
            try:
                printed = run(allocator)
            except (subprocess.SubprocessError, json.JSONDecodeError) as error:
                side["failure"] = str(error)
                side["runs"] = []
                print(f"{side['label']}: {error}", flush=True)
                continue
            if number >= warm_up:
                side["runs"].append(printed)
    return sides


def median(side: dict[str, Any], metric: str) -> float:
    """The median of a figure that each run printed."""
    return statistics.median(float(run[metric]) for run in side["runs"])
