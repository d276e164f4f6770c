"""The figures by `calm compare`: time, memory, faults and shootdowns of programs with a a fixed task."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from calm.core.environment import clean_environment

from . import ratios
from .results import BUILD, REPOSITORY, Store, machine
from .rounds import CALMALLOC, GLIBC, PEERS, PTLBMALLOC2, present

CURVE = (1, 2, 5, 10, 20, 50, 100)
LISTING1 = str(BUILD / "listing1")
EVERY = (GLIBC, PTLBMALLOC2, *PEERS[1:], CALMALLOC)
OURS = (GLIBC, PTLBMALLOC2, CALMALLOC)


@dataclass(frozen=True)
class Case:
    """One comparison, run from the repository's root."""

    name: str
    command: tuple[str, ...]
    allocators: tuple[str, ...]
    runs: int = 7


CASES = (
    Case("listing1", (LISTING1,), EVERY),
    Case("listing1-without-process-madvise", (str(BUILD / "without-process-madvise"), LISTING1), OURS),
    Case("listing1-touched", (LISTING1, "--threads", "4", "--touch", "all"), EVERY),
    Case("listing1-reversed", (LISTING1, "--order", "reversed"), OURS),
    Case(
        "ttest1",
        (str(BUILD / "ttest1"),),
        (GLIBC, *(f"{PTLBMALLOC2}:PTLBMALLOC2_SENSITIVITY={factor}" for factor in CURVE)),
        5,
    ),
)
METRICS = ("wall_s", "minor_faults", "peak_rss_kib", "average_rss_kib", "shootdowns")
# Fields of `calm compare`'s output: the measurement, and each allocator's part.
_KEPT = ("date", "calm", "command", "interrupted_by", "notes")
_KEPT_OF_SIDES = ("label", "environment", "failure", "runs")
PROGRAMS = ("xalan", "ghostscript", "sqlite3", "gcc", "python3")


def touch_memory() -> None:
    """Touches memory in advance, because a virtual machine's memory is slow until the host has backed it."""
    script = "b = bytearray(2 << 30)\nb[::4096] = bytes([1]) * len(range(0, len(b), 4096))"
    subprocess.run([sys.executable, "-c", script], check=True)


def compare(case: Case, store: Store, runs: int | None) -> None:
    """Runs one comparison and saves it. A failure under one allocator does not affect the others."""
    path = store.runs(case.name)
    path.unlink(missing_ok=True)
    calm = ["bin/calm", "compare", "-a", ",".join(present(case.allocators)), "-n", str(runs or case.runs)]
    print(f"\n$ {shlex.join([*calm, '--', *case.command])}", flush=True)
    done = subprocess.run(
        [*calm, "--json", str(path), "--", *case.command], cwd=REPOSITORY, env=clean_environment()
    )
    if done.returncode not in (0, 1) or not path.exists():
        sys.exit(f"bench/figures: {case.name}: calm compare ended with {done.returncode}")
    store.keep(case.name, compared(json.loads(path.read_text())) | {"machine": machine()})


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """The part of a comparison's file that is kept."""
    sides = [{key: side.get(key) for key in _KEPT_OF_SIDES} for side in found["allocators"]]
    ratios.compare(sides, METRICS)
    return {key: found.get(key) for key in _KEPT} | {"allocators": sides}


def programs(store: Store, runs: int | None) -> None:
    """Compares the allocators on real programs."""
    command = [str(REPOSITORY / "bench/programs"), "-a", ",".join(present(OURS))]
    names = [f"program-{name}" for name in PROGRAMS]
    command += ["--results", str(store.runs(names[0]).parent)] + (["-n", str(runs)] if runs else [])
    subprocess.run(command, env=clean_environment(), check=True)
    for name in names:
        store.keep(name, compared(json.loads(store.runs(name).read_text())) | {"machine": machine()})
