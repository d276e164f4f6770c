"""Running a program under several allocators in turns, for what the program itself prints."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from calm import allocators
from calm.allocators import Allocator

from .results import REPOSITORY

GLIBC = "glibc"
CALMALLOC = "calmalloc"
PTLBMALLOC2 = "ptlbmalloc2"
PEERS = (GLIBC, "jemalloc", "gperftools", "mimalloc")

# Settings of whoever runs this must not reach what is measured.
_SETTINGS = ("LD_", "MALLOC_", "GLIBC_TUNABLES", "CALM_OPTIONS", "PTLBMALLOC2_", "MIMALLOC_", "TCMALLOC_")
_LONGEST_RUN_S = 600
# A shell that goes into the cgroup and then becomes the program.
_ENTER = 'echo $$ >"$0/cgroup.procs" && exec "$@"'


def clean_environment() -> dict[str, str]:
    """The environment, without any allocator's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}


def present(labels: Iterable[str]) -> list[str]:
    """Those that are on this machine; says which are not."""
    there: list[str] = []
    missing: list[str] = []
    for label in labels:
        (there if allocators.is_here(label.partition(":")[0]) else missing).append(label)
    if missing:
        print(f"left out, as not on this machine: {', '.join(missing)}", flush=True)
    return there


def run_once(command: Sequence[str], allocator: Allocator, cgroup: Path | None = None) -> dict[str, Any]:
    """Runs a workload, and returns the JSON that it prints."""
    environment = clean_environment()
    environment |= allocator.variables(environment)
    if cgroup is not None:
        command = ["sh", "-c", _ENTER, str(cgroup), *command]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=_LONGEST_RUN_S,
    )
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed | note(done.stderr)


def note(errors: str) -> dict[str, Any]:
    """What calmalloc had to say, if anything: that it knows no such option, or that it declines."""
    said = [line for line in errors.splitlines() if line.startswith(f"{CALMALLOC}: ")]
    return {"said": list(dict.fromkeys(said))} if said else {}


def interleaved(
    labels: Sequence[str], run: Callable[[Allocator], dict[str, Any]], rounds: int, warm_up: int = 1
) -> list[dict[str, Any]]:
    """A B C, A B C, …, the first rounds for nothing. An allocator that the program fails under is dropped."""
    sides: list[dict[str, Any]] = []
    parsed = [allocators.parse(label) for label in labels]
    for allocator in parsed:
        sides.append(
            {
                "label": allocator.label,
                "library": str(allocator.library) if allocator.library else None,
                "environment": dict(allocator.environment),
                "failure": None,
                "runs": [],
            }
        )
    for number in range(warm_up + rounds):
        for side, allocator in zip(sides, parsed, strict=True):
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
