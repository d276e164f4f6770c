"""Short loops that isolate one chain of calls each, under all allocators: docs/hot.md.

Times are the minimum and the median of many short runs of a loop, for one of its steps, the loop's own
instructions included. Instructions are counted by callgrind: exactly, but without restartable sequences,
which valgrind does not support. llvm-mca bounds what a pair of malloc and free takes on other processors.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from calm.core import allocators
from calm.core.allocators import Allocator

from .hit_path import hit_path, machine_code
from .instructions import callgrind
from .results import BUILD, REPOSITORY, Store, first_match
from .rounds import CALMALLOC, GLIBC, PEERS, interleaved, origin, present, run_once, version_of
from .tables import line

NAME = "hot"
LABELS = (CALMALLOC, GLIBC, *PEERS[1:], "snmalloc", "rpmalloc", "tcmalloc")
ROUNDS, RUNS = 25, 60
_FEW, _MANY = 1, 3
LOOPS = {
    "pair-16": "malloc(16), a write, free",
    "pair-48": "the same, 48 bytes",
    "pair-256": "256 bytes",
    "pair-1024": "1,024 bytes",
    "set-10": "10 of 48 bytes, then freed in order",
    "set-100": "100",
    "set-100-reversed": "freed in reverse",
    "set-100-random": "freed at random",
    "set-1000": "1,000 of 16 to 256 bytes, freed in order",
    "set-1000-reversed": "in reverse",
    "set-1000-random": "at random",
    "replace-1000": "one of 1,000, at random, replaced by one of 16 to 1,024 bytes",
    "calloc-64": "calloc(64), a write, free",
    "calloc-200": "200 bytes",
    "calloc-1024": "1,024 bytes",
    "realloc-twice": "malloc(100), realloc to 220 and to 500, free",
    "grow-by-1": "realloc from 16 to 1,024 bytes by one byte: each realloc",
    "grow-by-64": "by 64 bytes: mostly into another class",
    "grow-doubling": "to double the size",
    "shrink-by-64": "from 1,040 bytes down by 64",
    "shrink-halving": "to half the size",
    "sized-48": "operator new(48), a write, delete with the size",
    "aligned-64": "new and delete of 64 bytes aligned to 64",
    "remote-1000": "1,000 of 48 bytes that another thread frees",
}
_SPINS = "remote-1000"  # instructions of threads that wait mean nothing
_X86, _ARM = ("x86_64-linux-gnu", BUILD), ("aarch64-linux-gnu", Path("build/aarch64"))
# As LLVM names them, and where a build for them is.
CORES = {
    "Intel Sapphire Rapids": ("sapphirerapids", *_X86),
    "AMD Zen 4": ("znver4", *_X86),
    "Arm Neoverse V2": ("neoverse-v2", *_ARM),
}


def instructions(allocator: Allocator, loop: str) -> float | None:
    """Of one step of a loop: the difference between many runs and few, divided. None if it fails there."""
    counted: list[tuple[int, int]] = []
    for runs in (_FEW, _MANY):
        run = callgrind(allocator, [str(BUILD / "hot"), "--loop", loop, "--runs", str(runs)])
        if run.status or not run.collected:
            return None
        counted.append((run.collected, json.loads(run.output)["steps"]))
    (few, before), (many, after) = counted
    return (many - few) / (after - before)


def pair_cycles(core: str, triple: str, build: Path) -> float | None:
    """What a pair takes if no load waits for a store; None without a build, or a model of the core."""
    library = REPOSITORY / build / "libcalmalloc.so"
    model = next((tool for tool in ("llvm-mca-19", "llvm-mca") if shutil.which(tool)), None)
    if model is None or not library.exists():
        return None
    iterations = 1000
    done = subprocess.run(
        [model, f"-mtriple={triple}", f"-mcpu={core}", f"-iterations={iterations}"],
        input="\n".join(machine_code(hit_path(library, name)) for name in ("malloc", "free")),
        capture_output=True,
        text=True,
    )
    found = re.search(r"Total Cycles: +(\d+)", done.stdout)
    return round(int(found[1]) / iterations, 1) if found else None


def _processor(key: str) -> str:
    return first_match("/proc/cpuinfo", rf"^{key}\s*:\s*(.*)$")


def _name() -> str:
    """Results of each vendor have a file of their own."""
    vendors = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}
    return f"{NAME}-{vendors.get(_processor('vendor_id'), 'other')}"


def measure(store: Store, loops: Sequence[str], rounds: int, *, counts: bool) -> None:
    """Measures loops under all installed allocators; others, of the same processor and versions, are kept."""
    name = _name()
    labels = present(LABELS)
    here: dict[str, Any] = {
        "processor": " ".join(f"{key} {_processor(key)}" for key in ("cpu family", "model")),
        "labels": labels,
        "versions": [version_of({"origin": origin(allocators.parse(label))}) for label in labels],
        "pair_cycles": {title: pair_cycles(*core) for title, core in CORES.items()},
    }
    known = store.load(name) or {}
    same = all(known.get(key) == here[key] for key in ("processor", "labels", "versions"))
    rows: dict[str, list[list[float] | None]] = known["loops"] if same else {}
    for loop in loops:
        run = partial(run_once, [str(BUILD / NAME), "--loop", loop, "--runs", str(RUNS)])
        before = rows.get(loop) or [None] * len(labels)
        sides = interleaved(labels, run, rounds, case=loop)
        rows[loop] = [_cell(side, old, loop, counts=counts) for side, old in zip(sides, before, strict=True)]
        told = (f"{label} {cell[0]:.2f}" for label, cell in zip(labels, rows[loop], strict=True) if cell)
        print(f"{loop}: {', '.join(told)} ns", flush=True)
        store.save(name, here | {"loops": {each: rows[each] for each in LOOPS if each in rows}})


def _cell(side: dict[str, Any], before: list[float] | None, loop: str, *, counts: bool) -> list[float] | None:
    """The minimum and the median, and the instructions if known; None if no run ended well."""
    runs = side["runs"]
    if not runs:
        return None
    times = (min(run["min_ns"] for run in runs), statistics.median(run["median_ns"] for run in runs))
    cell = [float(f"{each:.3g}") for each in times]
    if not counts:
        return cell + (before or [])[2:]
    counted = None if loop == _SPINS else instructions(allocators.parse(side["label"]), loop)
    return cell if counted is None else [*cell, round(counted)]


def to_best(row: Sequence[list[float] | None]) -> float | None:
    """The minimum under calmalloc, which is first, to that of the best peer."""
    ours, *others = row
    known = [cell[0] for cell in others if cell]
    return ours[0] / min(known) if ours and known else None


def _table(found: dict[str, Any]) -> list[str]:
    labels = found["labels"]
    lines = [line(["a step", *labels, "to the best peer"]), line(["---", *["---:"] * (len(labels) + 1)])]
    for loop, row in found["loops"].items():
        cells = ["; ".join(f"{each:.3g}" for each in cell) if cell else "" for cell in row]
        ratio = to_best(row)
        lines.append(line([f"`{loop}`: {LOOPS[loop]}", *cells, f"{ratio:.2f}" if ratio else ""]))
    here = found["machine"]
    versions = ", ".join(map(" ".join, zip(labels, found["versions"], strict=True)))
    return [
        *lines,
        "",
        f"{here['cpu']}, {found['processor']}, {here['cpus']} CPUs, {here['distribution']}, {here['glibc']}, "
        f"Linux {here['kernel']}, commit {here['commit']}. {versions}.",
    ]


def table(store: Store) -> str:
    """Every vendor's table, for the docs; empty if nothing was measured."""
    parts: list[str] = []
    for name in (f"{NAME}-amd", f"{NAME}-intel", f"{NAME}-other"):
        if (found := store.load(name)) is not None:
            parts += ["", *_table(found)]
            known = {title: cycles for title, cycles in found.get("pair_cycles", {}).items() if cycles}
            if known:
                told = ", ".join(f"{title} {cycles:.3g}" for title, cycles in known.items())
                parts += ["", f"A pair, in cycles, if no load waited for a store (llvm-mca): {told}."]
    return "\n".join(parts).strip("\n") + "\n" if parts else ""
