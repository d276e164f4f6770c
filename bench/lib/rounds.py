"""Running a program under several allocators in turns, for what the program itself prints."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from calm import allocators, processes, program, said
from calm.allocators import Allocator
from calm.bench.order import orders
from calm.bench.runner import clean_environment
from calm.statistics import SEED

from .results import REPOSITORY

GLIBC = "glibc"
CALMALLOC = "calmalloc"
PTLBMALLOC2 = "ptlbmalloc2"
PEERS = (GLIBC, "jemalloc", "gperftools", "mimalloc")

LONGEST_RUN_S = 600
# A shell that goes into the cgroup and then becomes the program.
_ENTER = 'echo $$ >"$0/cgroup.procs" && exec "$@"'


def present(labels: Iterable[str]) -> list[str]:
    """Those that are on this machine; says which are not."""
    there: list[str] = []
    missing: list[str] = []
    for label in labels:
        (there if allocators.is_here(label.partition(":")[0]) else missing).append(label)
    if missing:
        print(f"left out, as not on this machine: {', '.join(missing)}", flush=True)
    return there


def under(allocator: Allocator, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command under the allocator, which whatever starts it is not under."""
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
    """Runs a command for so long at most: what it has started ends with it, if it is cut short."""
    pipe = subprocess.PIPE
    with processes.whole(
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
    """What calmalloc had to say, if anything: that it knows no such option, or that it declines."""
    lines = said.lines(errors)
    return {"said": lines} if lines else {}


def origin(allocator: Allocator) -> dict[str, str | None]:
    """Which version of an allocator takes part, and which package or crate it is of."""
    name = allocator.label.partition(":")[0]
    if name not in allocators.KNOWN:
        return {}
    found = allocators.origin(name)
    kept = ("version", "package", "package_version", "crate", "crate_version")
    return {key: getattr(found, key) for key in kept}


def version_of(side: Mapping[str, Any]) -> str:
    """The same in words."""
    known = side.get("origin") or {}
    for kind in ("crate", "package"):
        if known.get(kind):
            return f"{known['version']}, {kind} {known[kind]} {known[f'{kind}_version']}"
    return known.get("version") or "version not known"


def interleaved(
    labels: Sequence[str],
    run: Callable[[Allocator], dict[str, Any]],
    rounds: int,
    warm_up: int = 1,
    case: str = "",
) -> list[dict[str, Any]]:
    """Each allocator once in each round, in another order in each (calm.bench.order); the first for nothing.

    An allocator that the program fails under is dropped. The case is what the orders are drawn by.
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
    """Of a figure that each run printed."""
    return statistics.median(float(run[metric]) for run in side["runs"])
