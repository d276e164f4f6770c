"""What `calm compare` measures: time, memory, faults and shootdowns of a program that does a fixed work."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .results import BUILD, REPOSITORY, Store
from .rounds import CALMALLOC, GLIBC, PEERS, PTLBMALLOC2, clean_environment, present

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
PROGRAMS = ("xalan", "ghostscript", "sqlite3", "gcc", "python3")


def touch_memory() -> None:
    """Memory that a virtual machine's host has not backed yet is slow at first touch: touch it before."""
    script = "b = bytearray(2 << 30)\nb[::4096] = bytes([1]) * len(range(0, len(b), 4096))"
    subprocess.run([sys.executable, "-c", script], check=True)


def compare(case: Case, store: Store, runs: int | None) -> None:
    """Runs one comparison and saves it. What fails under one allocator is kept for the others."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        calm = ["bin/calm", "compare", "-a", ",".join(present(case.allocators)), "-n", str(runs or case.runs)]
        print(f"\n$ {shlex.join([*calm, '--', *case.command])}", flush=True)
        done = subprocess.run(
            [*calm, "--json", file.name, "--", *case.command], cwd=REPOSITORY, env=clean_environment()
        )
        if done.returncode not in (0, 1) or not Path(file.name).stat().st_size:
            sys.exit(f"bench/figures: {case.name}: calm compare ended with {done.returncode}")
        store.save(case.name, json.loads(Path(file.name).read_text()))


def programs(store: Store, runs: int | None) -> None:
    """Compares on real programs."""
    command = [str(REPOSITORY / "bench/programs"), "-a", ",".join(present(OURS))]
    command += ["--results", str(store.folder)] + (["-n", str(runs)] if runs else [])
    subprocess.run(command, env=clean_environment(), check=True)
    for path in store.folder.glob("program-*.json"):
        store.save(path.stem, json.loads(path.read_text()))
