"""Results as files: one JSON file for each figure, with the machine that it was measured on."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "bench/results"
# Relative to the repository's root, so that results from different machines name the same commands.
BUILD = Path("build/release")


def first_match(path: str, pattern: str) -> str:
    """A fact from a file of /proc or /sys; "unknown" where it does not say."""
    try:
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return "unknown"
    return found.group(1).strip() if found else "unknown"


def output(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    """What the figures depend on."""
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
    """The same without this checkout's place on this machine."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return value.replace(f"{REPOSITORY}/", "") if isinstance(value, str) else value


class Store:
    """A folder of results."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder

    def save(self, name: str, result: dict[str, Any]) -> None:
        """Writes a result, and the machine with it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(without_paths({**result, "machine": machine()}), indent=1)
        (self.folder / f"{name}.json").write_text(text + "\n")

    def load(self, name: str) -> dict[str, Any] | None:
        """A result, if there is one."""
        path = self.folder / f"{name}.json"
        result: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return result


def side_of(result: dict[str, Any], label: str) -> dict[str, Any] | None:
    """One allocator's part of a result, if it was measured and did not fail."""
    for side in result["allocators"]:
        if side["label"] == label and side["runs"]:
            found: dict[str, Any] = side
            return found
    return None


def value(run: dict[str, Any], metric: str) -> float | None:
    """A figure of one run: one of the probe's own, one of its counters, or one that the program printed."""
    counter = run.get("counters", {}).get(metric)
    found = counter["value"] if counter else run.get(metric)
    return None if found is None else float(found)
