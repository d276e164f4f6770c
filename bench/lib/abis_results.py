"""What was counted of ABIS: by workload, variant and CPUs, each with its rounds; and figures of that."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calm.errors import CalmError
from calm.statistics import Ratio, median

from .abis_guest import RECEIVED, SENT, PageTables
from .abis_machine import BASELINE
from .abis_shape import complaint
from .abis_workloads import WORKLOADS, Workload
from .results import without_paths

# A ratio to fewer shootdowns than this says nothing.
FEW = 50
Run = Mapping[str, Any]
Figure = Callable[[Run], float | None]
_FILE = {
    "qemu": str,
    "builds": {...: str},
    "tlb_sets": int,
    "entries": [
        {
            "workload": str,
            "variant": str,
            "cpus": int,
            "files": str,
            "kernel": str | None,
            "failure": str | None,
            "runs": [{SENT: int, RECEIVED: int}],
        }
    ],
}


def load(path: Path) -> dict[str, Any]:
    """A file of results that can be rendered, and gone on with."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        wrong = complaint(result, _FILE, "it")
    except ValueError:
        wrong = "it is no JSON"
    if not wrong:
        wrong = next(filter(None, map(_unprinted, result["entries"])), None)
    if wrong:
        raise CalmError(f"{path} is no file of results: {wrong}; remove it, or name another by --json")
    return result


def _unprinted(entry: Mapping[str, Any]) -> str | None:
    """What is wrong with what a workload's runs printed."""
    workload = WORKLOADS.get(entry["workload"])
    shape = {"printed": workload.prints} if workload and workload.prints else {}
    return complaint(entry["runs"], [shape], entry["workload"])


def save(path: Path, result: Mapping[str, Any]) -> None:
    """What was there stays whole until all of the new is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(without_paths(result), indent=1) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def known(
    path: Path, builds: Mapping[str, str], tlb_sets: int, digest: Callable[[Workload, int], str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What a file has that holds for what is measured now, and which builds all that then is of.

    Nothing, if the emulator, its TLB or a kernel is another now: one table is of one machine, and of one
    kernel of a name. And no entry of a workload whose files in the guest are others now, or cannot be had.
    """
    if path.exists():
        result = load(path)
        before = result["builds"]
        same = all(before.get(name, of) == of for name, of in builds.items())
        if same and result["tlb_sets"] == tlb_sets:
            return [entry for entry in result["entries"] if _holds(entry, digest)], {**before, **builds}
    return [], dict(builds)


def _holds(entry: Mapping[str, Any], digest: Callable[[Workload, int], str]) -> bool:
    workload = WORKLOADS.get(entry["workload"])
    try:
        return workload is not None and digest(workload, entry["cpus"]) == entry["files"]
    except CalmError:
        return False


def merge(entries: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """New ones take the place of the old."""
    keys = ("workload", "variant", "cpus")
    by_keys = {tuple(entry[key] for key in keys): entry for entry in (*entries, *new)}
    return list(by_keys.values())


def sent(run: Run) -> float:
    """Shootdowns that some CPU asked of others; for each request, where those are served."""
    return float(run[SENT]) / float(run.get("requests", 1))


def received(run: Run) -> float:
    """Flushes that CPUs made for others, likewise."""
    return float(run[RECEIVED]) / float(run.get("requests", 1))


def receivers(run: Run) -> float | None:
    """CPUs that a shootdown interrupts."""
    return run[RECEIVED] / run[SENT] if run[SENT] else None


def page_tables(run: Run) -> float | None:
    """Their memory and that of the records of their entries, to their own alone."""
    pages, records = run.get("page_table_pages"), run.get("page_table_records_bytes")
    return PageTables(pages, records).ratio if pages and records is not None else None


def instructions(run: Run) -> float | None:
    """For each page fault: the clock's nanoseconds are that."""
    found = run.get("printed", {}).get("ns_per_fault")
    return None if found is None else float(found)


def ratio(ours: Sequence[float], base: Sequence[float]) -> Ratio:
    """Of medians, and how far apart it could be: rounds of two boots have nothing to do with each other."""
    count = min(len(ours), len(base))
    if not count or not min(base):
        return Ratio(None, None, None, count)
    value = statistics.median(ours) / statistics.median(base)
    if count == 1:
        return Ratio(value, None, None, count)
    return Ratio(value, min(ours) / max(base), max(ours) / min(base), count)


@dataclass(frozen=True)
class Results:
    """The entries of a file of results."""

    entries: Sequence[Mapping[str, Any]]

    def places(self, *names: str) -> Iterator[tuple[Workload, int]]:
        """The workloads and CPUs that there are entries of, in the order that workloads have."""
        for name, workload in WORKLOADS.items():
            if not names or name in names:
                of = {entry["cpus"] for entry in self.entries if entry["workload"] == name}
                yield from ((workload, cpus) for cpus in sorted(of))

    def runs(self, workload: Workload, cpus: int, variant: str) -> list[Run]:
        """Under a variant; none where it was not run, or failed."""
        found: list[Run] = []
        for entry in self.entries:
            if (entry["workload"], entry["cpus"], entry["variant"]) == (workload.name, cpus, variant):
                found = entry["runs"]
        return found

    def failed(self, workload: Workload, cpus: int, variant: str) -> bool:
        """Whether a variant was run, and something went wrong."""
        place = (workload.name, cpus, variant)
        return any(
            entry["failure"] and (entry["workload"], entry["cpus"], entry["variant"]) == place
            for entry in self.entries
        )

    def median(self, workload: Workload, cpus: int, variant: str, figure: Figure) -> float | None:
        """Over the rounds."""
        return median([figure(run) for run in self.runs(workload, cpus, variant)])

    def ratio(self, workload: Workload, cpus: int, variant: str, figure: Figure) -> Ratio:
        """Of a variant's median to that without ABIS."""
        ours, base = (
            [value for run in self.runs(workload, cpus, of) if (value := figure(run)) is not None]
            for of in (variant, BASELINE)
        )
        return ratio(ours, base)

    def enough(self, workload: Workload, cpus: int) -> bool:
        """Whether there is much to save."""
        return (median([float(run[SENT]) for run in self.runs(workload, cpus, BASELINE)]) or 0) >= FEW
