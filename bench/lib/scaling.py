"""Workloads with as many threads as CPUs, and with a quarter of that, under calmalloc and its peers.

Most rows of the suite have two threads, so that they are comparable between machines; these show how
allocators scale. Each thread does the same work, whatever the number of threads.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from calm.core import allocators
from calm.core.progress import RoundsBar
from research.bench import runner, workloads
from research.bench.cases import Case, Prepared
from research.bench.results import METRIC, Metric, Results, Row

from .results import REPOSITORY, Store, machine
from .rounds import CALMALLOC, GLIBC, PEERS, present
from .tables import line

NAME = "scaling"
LABELS = (GLIBC, CALMALLOC, *PEERS[1:], "snmalloc", "rpmalloc", "tcmalloc")
ROUNDS = 3
_LIMIT_S = 120.0
_MIB = 1 << 20


def _prepare(words: Sequence[str], folder: Path) -> Prepared:
    return Prepared((str(workloads.find(words[0])), *words[1:]), folder)


def _commands(threads: int) -> Iterator[tuple[str, list[str], str | None]]:
    """A name, a command, and the figure that it prints if it runs for a fixed time."""
    count = str(threads)
    yield "larson", ["larson", "--threads", count, "--seconds", "1"], "operations_per_second"
    pairs = str(max(1, threads // 2))
    yield "xmalloc-test", ["xmalloc-test", "--threads", pairs, "--seconds", "1"], "frees_per_second"
    yield "glibc-thread", ["glibc-thread", "--threads", count, "--seconds", "1"], "operations_per_second"
    yield "mstress", ["mstress", "--threads", count, "--iterations", "10"], None
    yield "rptest", ["rptest", "--threads", count, "--loops", "4000"], None
    yield "alloc-test", ["alloc-test", "--threads", count, "--operations", "3000000"], None
    yield "mleak", ["mleak", "--threads", count, "--rounds", "1000"], None
    yield "cache-scratch", ["cache-scratch", "--threads", count, "--rounds", "500"], None
    yield "listing1-touched", ["listing1", "--threads", count, "--rounds", "5", "--touch", "all"], None
    wave = [
        "sawtooth",
        "--threads",
        count,
        "--bytes",
        str(threads * 25 * _MIB),
        "--rounds",
        "10",
        "--after",
        "0",
    ]
    yield "sawtooth, 16 to 512 bytes", [*wave, "--min", "16", "--max", "512"], None
    yield "sawtooth, 8,000 to 100,000 bytes", [*wave, "--min", "8000", "--max", "100000"], None


def cases(threads: int) -> list[Case]:
    """All rows with this number of threads."""
    return [
        Case(
            name,
            "workload",
            name,
            partial(_prepare, words),
            metric=Metric(metric, "/s", higher_is_better=True) if metric else None,
        )
        for name, words, metric in _commands(threads)
    ]


def _cost(row: Row, label: str) -> float | None:
    """The time for a unit of work, in an arbitrary unit."""
    value = row.median(label, METRIC if row.metric else "wall_s")
    return None if not value else 1 / value if row.metric else value


def kept(row: Row) -> dict[str, Any]:
    """For each allocator: its time relative to the best, peak RSS in MiB, and shootdowns."""
    costs = {side.label: _cost(row, side.label) for side in row.sides}
    best = min((cost for cost in costs.values() if cost), default=None)
    sides = {}
    for side in row.sides:
        cost = costs[side.label]
        peak, shot = (row.median(side.label, figure) for figure in ("peak_rss_kib", "shootdowns"))
        if best and cost and peak is not None:
            sides[side.label] = [round(cost / best, 3), round(peak / 1024, 1), shot]
    return {"name": row.name, "command": [Path(row.command[0]).name, *row.command[1:]], "sides": sides}


def measure(store: Store, runs: int | None, counts: Sequence[int] = ()) -> None:
    """Measures all rows under all installed allocators, first with as many threads as CPUs."""
    cpus = os.cpu_count() or 1
    sides = [allocators.parse(label) for label in present(LABELS)]
    folder = REPOSITORY / "build/bench"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": machine(), "threads": {}}
    for threads in counts or dict.fromkeys((cpus, max(1, cpus // 4))):
        with RoundsBar() as watcher:
            results = runner.run_suite(
                cases(threads), sides, Results, suite=NAME, count=runs or ROUNDS, folder=folder,
                limit_s=_LIMIT_S, watcher=watcher, save=lambda _: None, touch=False,
            )  # fmt: skip
        found["versions"] = {each.label: each.version for each in results.allocators}
        found["threads"][str(threads)] = [kept(row) for row in results.rows]
        store.save(NAME, found)


def mean(rows: Sequence[Mapping[str, Any]], label: str, number: int) -> float | None:
    """The geometric means of the times relative to the best, and of the peaks relative to the lowest."""
    values = []
    for row in rows:
        if label not in row["sides"]:
            return None
        least = min(side[number] for side in row["sides"].values())
        values.append(row["sides"][label][number] / least)
    return statistics.geometric_mean(values)


def table(store: Store) -> str:
    """Times and peaks of each row, for the docs; empty if nothing was measured."""
    found = store.load(NAME)
    if found is None:
        return ""
    parts = []
    for threads, rows in found["threads"].items():
        labels = [label for label in LABELS if any(label in row["sides"] for row in rows)]
        parts += [f"{threads} threads: time relative to the best of the row, and peak RSS in MiB:", ""]
        parts += [line(["row", *labels]), line(["---", *["---:"] * len(labels)])]
        for row in rows:
            cells = [row["sides"].get(label) for label in labels]
            shown = [f"{cell[0]:.2f}, {cell[1]:,.0f}" if cell else "" for cell in cells]
            parts.append(line([row["name"], *shown]))
        means = [(mean(rows, label, 0), mean(rows, label, 1)) for label in labels]
        shown = [f"{time:.2f}, {peak:.2f}" if time and peak else "" for time, peak in means]
        parts.append(line(["**geometric mean, relative to the best**", *shown]))
        totals = [
            sum(row["sides"][label][2] or 0 for row in rows if label in row["sides"]) for label in labels
        ]
        parts += [line(["TLB shootdowns, sum", *(f"{total:,.0f}" for total in totals)]), ""]
    here = found["machine"]
    versions = ", ".join(f"{label} {version}" for label, version in found["versions"].items())
    gib = int(here["memory"].split()[0]) / 1024**2
    system = f"{here['distribution']}, {here['glibc']}, Linux {here['kernel']}"
    hardware = f"{here['cpus']} CPUs ({here['cpu']}), {gib:.0f} GiB"
    parts.append(f"{versions}. {hardware}, {system}, commit {here['commit']}.")
    return "\n".join(parts) + "\n"
