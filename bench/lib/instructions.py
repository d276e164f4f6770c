"""The cost of malloc and free in instructions, counted by callgrind: exact, independent of other load."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from calm.core import allocators
from calm.core.allocators import Allocator
from calm.core.environment import clean_environment

from .results import BUILD, REPOSITORY, Store
from .rounds import CALMALLOC, GLIBC, PTLBMALLOC2, present

SIZES = (64, 1000, 2000, 20_000, 100_000)
FEW, MANY = 100_000, 1_100_000
LABELS = (GLIBC, PTLBMALLOC2, CALMALLOC, "mimalloc")


@dataclass(frozen=True)
class Count:
    """Instructions of the whole run, and of all functions that main called."""

    total: float
    called: float


def called_by_main(profile: str) -> int:
    """The inclusive cost of main's calls, from callgrind's file (names and positions written out)."""
    within, after_calls, cost = False, False, 0
    for line in profile.splitlines():
        if line.startswith("fn="):
            within = line.removeprefix("fn=") == "main"
        elif line.startswith("calls="):
            after_calls = True
        elif after_calls:
            after_calls = False
            if within:
                cost += int(line.split()[1])
    return cost


@dataclass(frozen=True)
class Callgrind:
    """One run of a program under callgrind."""

    status: int
    collected: int
    """Instructions; 0 if it did not say."""
    output: str
    errors: str
    profile: str


def callgrind(allocator: Allocator, command: Sequence[str]) -> Callgrind:
    """Counts the instructions of a program that runs with an allocator."""
    environment = clean_environment()
    environment |= allocator.variables(environment)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "callgrind.out"
        words = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={file}"]
        words += ["--compress-strings=no", "--compress-pos=no", *command]
        done = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
        profile = file.read_text() if file.exists() else ""
    found = re.search(r"Collected : (\d+)", done.stderr)
    return Callgrind(done.returncode, int(found[1]) if found else 0, done.stdout, done.stderr, profile)


def count(label: str, pairs: int, size: int) -> Count:
    """The instructions of a number of pairs of malloc and free."""
    run = callgrind(allocators.parse(label), [str(BUILD / "pairs"), str(pairs), str(size)])
    called = called_by_main(run.profile)
    if run.status or not run.collected or not called:
        sys.exit(f"bench/figures: callgrind did not count: {run.errors[-300:]}")
    return Count(run.collected, called)


def each(label: str, size: int) -> Count:
    """The instructions of one pair: the difference between runs with many and few, divided."""
    few, many = count(label, FEW, size), count(label, MANY, size)
    pairs = MANY - FEW
    return Count((many.total - few.total) / pairs, (many.called - few.called) / pairs)


def measure(store: Store) -> None:
    """The cost of a pair under each allocator, and ptlbmalloc2's addition to glibc's.

    A pair includes the loop around it; the bodies are malloc and free with the functions that they call.
    """
    labels = present(LABELS)
    pairs: dict[str, dict[str, float]] = {}
    bodies: dict[str, dict[str, float]] = {}
    for size in SIZES:
        counts = {label: each(label, size) for label in labels}
        pairs[str(size)] = {label: counted.total for label, counted in counts.items()}
        if PTLBMALLOC2 in counts:
            added = counts[PTLBMALLOC2].total - counts[GLIBC].total
            pairs[str(size)]["added"] = round(added, 2)
        bodies[str(size)] = {label: round(counted.called, 2) for label, counted in counts.items()}
        told = ", ".join(f"{label} {counted:.1f}" for label, counted in bodies[str(size)].items())
        print(f"malloc({size}) and free: {told} instructions", flush=True)
    store.save("instructions", {"pair_of_malloc_and_free": pairs, "bodies_of_malloc_and_free": bodies})
