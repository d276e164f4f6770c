"""The counts of ABIS: by workload, variant and CPUs, each with the figures of its rounds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from calm.core.errors import CalmError
from calm.core.statistics import Ratio, median

from .abis_guest import RECEIVED, SENT, PageTables
from .abis_machine import BASELINE
from .abis_shape import complaint
from .abis_workloads import WORKLOADS, Workload
from .results import compact, text_of, without_paths

# A ratio to fewer shootdowns than this is meaningless.
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
            "n": int,
        }
    ],
}
_NUMBER = int | float
# Additional fields of an entry with rounds.
_FIGURES = {
    "median": {"sent": _NUMBER, "received": _NUMBER, "shootdowns": _NUMBER, ...: _NUMBER},
    "range": {"sent": [_NUMBER], "received": [_NUMBER]},
}
_STRESS = dict.fromkeys(("seconds", "stale", "uses", "changes", "pages", "ways"), _NUMBER)


def load(path: Path) -> dict[str, Any]:
    """Loads a file of results, and checks that it can be rendered and continued."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        wrong = complaint(result, _FILE, "it")
    except ValueError:
        wrong = "it is no JSON"
    if not wrong:
        wrong = next(filter(None, map(_without_figures, result["entries"])), None)
    if wrong:
        raise CalmError(f"{path} is no file of results: {wrong}; remove it, or name another by --json")
    return result


def _without_figures(entry: Mapping[str, Any]) -> str | None:
    """The first error in the figures of a workload's rounds, or None."""
    workload = WORKLOADS.get(entry["workload"])
    stress = {"stress": _STRESS} if workload and workload.group.stress_s else {}
    return complaint(entry, _FIGURES | stress, entry["workload"]) if entry["n"] else None


def summarized(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry with the figures of its runs: medians, and how far apart they are."""
    workload, runs = WORKLOADS.get(entry["workload"]), entry["runs"]
    found = {name: [figure(run) for run in runs] for name, figure in FIGURES.items()}
    known = {name: [value for value in values if value is not None] for name, values in found.items()}
    entry |= {
        "n": len(runs),
        "median": {name: median(values) for name, values in known.items() if values},
        "range": {name: [min(known[name]), max(known[name])] for name in ("sent", "received") if runs},
    }
    return entry | (
        {"stress": _stress(runs[0]["printed"])} if workload and workload.group.stress_s and runs else {}
    )


def _stress(printed: Mapping[str, Any]) -> dict[str, Any]:
    """The coherence test's counts, summed over all operations."""
    done = printed["operations"].values()
    return {
        "seconds": printed["seconds"],
        "stale": printed["stale"],
        "uses": sum(operation["reads"] + operation["writes"] for operation in done),
        "changes": sum(operation["count"] for operation in done),
        "pages": sum(operation["pages"] for operation in done),
        "ways": len(done),
    }


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Replaces a file of results atomically, without the runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text_of(compact(without_paths(result))) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def known(
    path: Path, builds: Mapping[str, str], tlb_sets: int, digest: Callable[[Workload, int], str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A file's entries that are valid beside new measurements, and the builds of all of them.

    There are none if the emulator, its TLB or a kernel has changed: a table describes one machine, and one
    kernel for each name. Entries are dropped if the workload's files in the guest have changed or are
    missing.
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


def merge(entries: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries in which new ones replace old ones."""
    keys = ("workload", "variant", "cpus")
    by_keys = {tuple(entry[key] for key in keys): entry for entry in (*entries, *new)}
    return list(by_keys.values())


def sent(run: Run) -> float:
    """Shootdowns sent; per request, for a workload that serves requests."""
    return float(run[SENT]) / float(run.get("requests", 1))


def received(run: Run) -> float:
    """Flushes that CPUs made for others; per request, likewise."""
    return float(run[RECEIVED]) / float(run.get("requests", 1))


def receivers(run: Run) -> float | None:
    """CPUs that a shootdown interrupts, on average."""
    return run[RECEIVED] / run[SENT] if run[SENT] else None


def page_tables(run: Run) -> float | None:
    """The ratio of page tables with the metadata of their entries to page tables alone."""
    pages, records = run.get("page_table_pages"), run.get("page_table_records_bytes")
    return PageTables(pages, records).ratio if pages and records is not None else None


def _counted(name: str, run: Run) -> float | None:
    return run.get(name)


def instructions(run: Run) -> float | None:
    """Instructions per page fault, which are the clock's nanoseconds."""
    found = run.get("printed", {}).get("ns_per_fault")
    return None if found is None else float(found)


# Figures with medians in an entry. The reasons are the kernels' own counters.
REASONS = (
    "abis_avoided_private",
    "abis_avoided_version",
    "abis_sent",
    "abis_shared",
    "abis_false_sharing",
    "abis_insertions",
)
FIGURES: Mapping[str, Figure] = {
    "sent": sent,
    "received": received,
    "shootdowns": lambda run: float(run[SENT]),
    "receivers": receivers,
    "page_tables": page_tables,
    "instructions": instructions,
    **{name: partial(_counted, name) for name in ("page_table_pages", *REASONS)},
}


@dataclass(frozen=True)
class Results:
    """The entries of a file of results."""

    entries: Sequence[Mapping[str, Any]]

    def places(self, *names: str) -> Iterator[tuple[Workload, int]]:
        """The workloads and CPUs with entries, in the order of workloads."""
        for name, workload in WORKLOADS.items():
            if not names or name in names:
                of = {entry["cpus"] for entry in self.entries if entry["workload"] == name}
                yield from ((workload, cpus) for cpus in sorted(of))

    def entry(self, workload: Workload, cpus: int, variant: str) -> Mapping[str, Any] | None:
        """The entry of a variant; None if it was not run."""
        place = (workload.name, cpus, variant)
        of = (each for each in self.entries if (each["workload"], each["cpus"], each["variant"]) == place)
        return next(of, None)

    def rounds(self, workload: Workload, cpus: int, variant: str) -> int:
        """The number of rounds; 0 if a variant was not run, or failed."""
        entry = self.entry(workload, cpus, variant)
        return entry["n"] if entry else 0

    def failed(self, workload: Workload, cpus: int, variant: str) -> bool:
        """Whether a variant was run and failed."""
        return bool((self.entry(workload, cpus, variant) or {}).get("failure"))

    def median(self, workload: Workload, cpus: int, variant: str, figure: str) -> float | None:
        """The median over the rounds."""
        found: float | None = (self.entry(workload, cpus, variant) or {}).get("median", {}).get(figure)
        return found

    def ratio(self, workload: Workload, cpus: int, variant: str, figure: str) -> Ratio:
        """The ratio of a variant's median to that without ABIS, with its largest possible range.

        Rounds of two boots are unrelated.
        """
        of = self.entry(workload, cpus, variant), self.entry(workload, cpus, BASELINE)
        ours, base = (entry if entry and entry["n"] else None for entry in of)
        if not ours or not base or not base["range"][figure][0]:
            return Ratio(None, None, None, 0)
        count = min(ours["n"], base["n"])
        value = ours["median"][figure] / base["median"][figure]
        if count == 1:
            return Ratio(value, None, None, count)
        (least, most), (base_least, base_most) = ours["range"][figure], base["range"][figure]
        return Ratio(value, least / base_most, most / base_least, count)

    def enough(self, workload: Workload, cpus: int) -> bool:
        """Whether there are enough shootdowns for a ratio."""
        return (self.median(workload, cpus, BASELINE, "shootdowns") or 0) >= FEW
