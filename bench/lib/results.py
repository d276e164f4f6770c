"""Files of results: one for each figure, with a description of the machine.

All runs are written to build/results. The values that tables and pictures need are written to bench/results:
medians, ratios with their intervals, commands and versions. Tables are generated from these only.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "bench/results"
RUNS = REPOSITORY / "build/results"
# Parts of a result that are redundant, or that the tables do not need.
_LEFT_OUT = (
    *("runs", "to_best", "analysis", "citation", "tables", "differences", "reports", "qemu_command"),
    # The tables show the shootdowns that the programs themselves began, and the versions of allocators.
    *("interrupts_system_wide", "library"),
)
_DIGITS = 5
_WIDTH = 300
# Relative to the repository's root, so that results from different machines name the same commands.
BUILD = Path("build/release")


def first_match(path: str, pattern: str) -> str:
    """A value from a file of /proc or /sys; "unknown" if there is none."""
    try:
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return "unknown"
    return found.group(1).strip() if found else "unknown"


def output(*command: str) -> str:
    """A command's output."""
    return subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    """The properties of the machine on which figures depend."""
    return {
        "cpu": first_match("/proc/cpuinfo", r"^model name\s*:\s*(.*)$"),
        "cpus": os.cpu_count(),
        "memory": first_match("/proc/meminfo", r"^MemTotal:\s*(.*)$"),
        "kernel": platform.release(),
        "distribution": first_match("/etc/os-release", r'^PRETTY_NAME="(.*)"$'),
        "glibc": os.confstr("CS_GNU_LIBC_VERSION"),
        "transparent_hugepages": first_match("/sys/kernel/mm/transparent_hugepage/enabled", r"\[(\w+)\]"),
        "commit": output("git", "rev-parse", "--short", "HEAD"),
    }


def without_paths(value: object) -> object:
    """The value without the path of this checkout."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return value.replace(f"{REPOSITORY}/", "") if isinstance(value, str) else value


def compact(value: Any) -> Any:  # noqa: ANN401
    """The value without runs and empty parts, with as many digits as the tables need."""
    if isinstance(value, dict):
        kept = {key: compact(item) for key, item in value.items() if key not in _LEFT_OUT}
        return {key: item for key, item in kept.items() if item is not None and item not in ([], {})}
    if isinstance(value, list):
        return [compact(item) for item in value]
    if not isinstance(value, float):
        return value
    rounded = float(f"{value:.{_DIGITS}g}") if abs(value) < 10**_DIGITS else float(round(value))
    return int(rounded) if rounded.is_integer() else rounded


def text_of(value: object, indent: str = "") -> str:
    """JSON in lines of limited length."""
    line = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if not isinstance(value, dict | list) or len(line) <= _WIDTH:
        return line
    inner = f"{indent} "
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key)}:{text_of(item, inner)}" for key, item in value.items()]
    else:
        items = [f"{inner}{text_of(item, inner)}" for item in value]
    lines = items[:1]
    for item in items[1:]:
        if "\n" in lines[-1] + item or len(lines[-1] + item) > _WIDTH:
            lines.append(item)
        else:
            lines[-1] += f",{item.lstrip()}"
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([begin, ",\n".join(lines), f"{indent}{end}"])


class Store:
    """A folder of results, and one of their runs."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder
        self._runs = RUNS if folder == RESULTS else folder / "runs"

    def runs(self, name: str) -> Path:
        """The path of a figure's runs."""
        self._runs.mkdir(parents=True, exist_ok=True)
        return self._runs / f"{name}.json"

    def save(self, name: str, result: dict[str, Any]) -> None:
        """Writes a result with the machine: once with all runs, and once without."""
        whole = without_paths({"machine": machine(), **result})
        self.runs(name).write_text(json.dumps(whole, indent=1) + "\n")
        self.keep(name, whole)

    def keep(self, name: str, result: object) -> None:
        """Writes a result without its runs, which have a separate file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{name}.json").write_text(text_of(compact(without_paths(result))) + "\n")

    def load(self, name: str) -> dict[str, Any] | None:
        """A result, if there is one."""
        path = self.folder / f"{name}.json"
        result: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return result


def value(run: dict[str, Any], metric: str) -> float | None:
    """A figure of one run: of the probe, of its counters, or of the program's output."""
    counter = run.get("counters", {}).get(metric)
    found = counter["value"] if counter else run.get(metric)
    return None if found is None else float(found)


def values_of(side: dict[str, Any] | None, metric: str) -> list[float | None]:
    """A figure of each run of an allocator; empty if it was not measured, or failed."""
    return [value(run, metric) for run in side["runs"]] if side else []


def side_of(result: dict[str, Any], label: str) -> dict[str, Any] | None:
    """One allocator's part of a result."""
    return next((side for side in result["allocators"] if side["label"] == label), None)


def summarize(sides: Iterable[dict[str, Any]], metrics: Iterable[str]) -> None:
    """Adds the number of runs, and each figure's median; the minimum and maximum of several runs."""
    metrics = tuple(metrics)
    for side in sides:
        side |= {"n": len(side["runs"]), "median": {}, "range": {}}
        for metric in metrics:
            if known := [each for each in values_of(side, metric) if each is not None]:
                side["median"][metric] = statistics.median(known)
                if len(known) > 1:
                    side["range"][metric] = [min(known), max(known)]
