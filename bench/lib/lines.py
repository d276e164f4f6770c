"""Cache lines that move between CPUs for a pair of malloc and free, by the model of research/papers/trace.

The model's machine has 64 CPUs, one for each thread, of which the program is told. In one case, the CPUs
belong to four nodes. Each figure is of one run: the work does not depend on time, and the threads take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calm.core import allocators
from research.papers import nextgen_trace
from research.papers.nextgen_trace import Told

from .results import BUILD, REPOSITORY, Store
from .rounds import CALMALLOC, GLIBC, origin, version_of
from .tables import line

NAME = "lines"
LABELS = (CALMALLOC, GLIBC, "mimalloc", "snmalloc", "tcmalloc", "jemalloc", "rpmalloc")
THREADS = (2, 4, 8, 16, 32, 64)
CPUS = 64
NODES = 4
PROGRAM = "exchange"
_LIMIT_S = 600.0
_DECIMALS = 2


@dataclass(frozen=True)
class Case:
    """Work of several threads: each allocates a number of blocks in a round, of `least` to `most` bytes."""

    name: str
    title: str
    least: int
    most: int
    blocks: int
    freed_by: str
    rounds: int
    """The rounds that count, of all threads together."""
    nodes: int = 0

    def _rounds(self, threads: int) -> int:
        return max(1, self.rounds // threads)

    def command(self, threads: int) -> list[str]:
        rounds = self._rounds(threads)
        options = {
            "threads": threads,
            "min": self.least,
            "max": self.most,
            "blocks": self.blocks,
            "warm-up": min(rounds, max(1, _WARM_UP // self.blocks)),
            "rounds": rounds,
            "freed-by": self.freed_by,
        }
        return [PROGRAM, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]

    def pairs(self, threads: int) -> int:
        """Of malloc and free, in the rounds that count."""
        allocating = threads // 2 if self.freed_by == "partner" else threads
        return allocating * self.blocks * self._rounds(threads)


_WARM_UP = 4096
"""Blocks that each thread allocates before the rounds that count, in at most as many rounds."""
_KIB = 1024
CASES = (
    Case("large", "64 to 128 KiB, 4 at a time", 64 * _KIB, 128 * _KIB, 4, "self", 6400),
    Case("small", "64 bytes, 4,096 at a time", 64, 64, 4096, "self", 32),
    Case("passed", "64 bytes, 256 at a time, freed by another thread", 64, 64, 256, "partner", 512),
    Case("nodes", "64 bytes, 2,048 at a time, freed on another node", 64, 64, 2048, "next", 32, NODES),
)
# What a table's rows show of a case.
MOVED, REMOTE_LINES, REMOTE_PAGES = "moved", "remote lines", "remote pages"
ROWS = (
    *((case.name, MOVED, f"moved lines: {case.title}") for case in CASES),
    ("nodes", REMOTE_LINES, "the same: accesses to lines last used on another node"),
    ("nodes", REMOTE_PAGES, "the same: other accesses to pages of another node"),
)


def figures(found: Mapping[str, Any], pairs: int) -> dict[str, float]:
    """For each pair, what all threads caused, those of the allocator included.

    A line moves when a CPU loads it and another CPU has changed it, and when a CPU stores to it and any other
    CPU has it.
    """
    sums = dict.fromkeys((MOVED, REMOTE_LINES, REMOTE_PAGES), 0)
    for thread in found["threads"].values():
        sums[MOVED] += thread["transfers"]["loads"] + thread["invalidations"]
        sums[REMOTE_LINES] += sum(thread["remote_lines"].values())
        sums[REMOTE_PAGES] += sum(thread["remote_pages"].values())
    return {name: round(value / pairs, _DECIMALS) for name, value in sums.items()}


def run(label: str, case: Case, threads: int) -> dict[str, float]:
    """One run under the model."""
    program, *arguments = case.command(threads)
    command = [str(REPOSITORY / BUILD / program), *arguments]
    told = Told(CPUS, case.nodes)
    found = nextgen_trace.trace_marked(command, REPOSITORY, allocators.parse(label), _LIMIT_S, told)
    return figures(found, case.pairs(threads))


def merged(
    known: Mapping[str, Any] | None, label: str, version: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """A result with one allocator's values replaced; others are kept if they are of the same work."""
    commands = {case.name: " ".join(case.command(THREADS[-1])) for case in CASES}
    same = known is not None and known["commands"] == commands and known["threads"] == list(THREADS)
    versions = dict(known["versions"]) if known is not None and same else {}
    cases = {
        case.name: dict(known["cases"][case.name]) if known is not None and same else {} for case in CASES
    }
    versions[label] = version
    for name, rows in values.items():
        cases[name][label] = rows
    return {"commands": commands, "threads": list(THREADS), "versions": versions, "cases": cases}


def measure(store: Store, labels: Sequence[str]) -> None:
    """Measures some allocators; the values of others are kept."""
    for label in labels:
        values: dict[str, dict[str, list[float]]] = {}
        for case in CASES:
            names = [name for of, name, _ in ROWS if of == case.name]
            rows: dict[str, list[float]] = {name: [] for name in names}
            for threads in THREADS:
                found = run(label, case, threads)
                for name in names:
                    rows[name].append(found[name])
                told = ", ".join(f"{name} {found[name]:.3g}" for name in names)
                print(f"{label}, {case.name}, {threads} threads: {told}", flush=True)
            values[case.name] = rows
        version = version_of({"origin": origin(allocators.parse(label))})
        store.save(NAME, merged(store.load(NAME), label, version, values))


def remove(store: Store, label: str) -> None:
    """Removes an allocator's values."""
    found = store.load(NAME) or {"versions": {}, "cases": {}}
    for values in (found["versions"], *found["cases"].values()):
        values.pop(label, None)
    store.keep(NAME, found)


def table(store: Store) -> str:
    """The figures, for the docs; empty if nothing was measured."""
    found = store.load(NAME)
    if found is None:
        return ""
    known = found["versions"]
    labels = [
        *(label for label in LABELS if label in known),
        *(label for label in known if label not in LABELS),
    ]
    lines = [line(["for a pair", "threads", *labels]), line(["---", *["---:"] * (len(labels) + 1)])]
    for case, name, title in ROWS:
        for number, threads in enumerate(found["threads"]):
            cells = [found["cases"][case].get(label, {}).get(name) for label in labels]
            shown = ["" if cell is None else f"{cell[number]:.2f}" for cell in cells]
            lines.append(line([title if number == 0 else "", str(threads), *shown]))
    here = found["machine"]
    versions = ", ".join(f"{label} {known[label]}" for label in labels)
    lines += ["", f"{versions}. {here['distribution']}, {here['glibc']}, commit {here['commit']}."]
    return "\n".join(lines) + "\n"
