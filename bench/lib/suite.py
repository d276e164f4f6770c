"""`calm bench`'s full suite as one of the figures: its result, picture, and tables for the docs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calm.core import documents
from calm.core.environment import clean_environment
from research.bench import picture
from research.bench.analysis import analyse
from research.bench.results import Results
from research.bench.tables import findings, grids, to_markdown

from .results import REPOSITORY, Store, compact

NAME = "suite"
_CALM = str(REPOSITORY / "bin/calm")
SUMMARY = ("summary",)
DETAILS = ("peers", "time", "peak", "average", "shootdowns", "latency", "worst")


def result(folder: Path, name: str = NAME) -> Path:
    """The path of a suite's result."""
    return folder / f"{name}.json"


def load(folder: Path, name: str = NAME) -> Results:
    """A suite's result."""
    return documents.read(str(result(folder, name)), Results)


def run(path: Path, runs: int | None, *options: str) -> None:
    """Runs a suite, which writes its document to the path."""
    command = [_CALM, "bench", "run", *options, "--json", str(path)]
    command += ["-n", str(runs)] if runs else []
    done = subprocess.run(command, cwd=REPOSITORY, env=clean_environment())
    # 1: a program failed under an allocator, which the tables show.
    if done.returncode not in (0, 1):
        sys.exit(f"bench/figures: calm bench ended with {done.returncode}")


# The folders of an absolute path.
_FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s/:'\"]+/)+")


def keep(store: Store, name: str, found: dict[str, Any]) -> None:
    """Writes a suite's document without its runs, and without the allocators of rows that have all.

    What a failed program said names no folders of this machine.
    """
    for side in (side for row in found["rows"] for side in row["sides"] if side.get("failure")):
        side["failure"] = _FOLDERS.sub("", side["failure"])
    every = [{"label": each["label"]} for each in found["allocators"]]
    rows = [row | {"sides": [] if compact(row["sides"]) == every else row["sides"]} for row in found["rows"]]
    store.keep(name, found | {"rows": rows})


def measure(store: Store, runs: int | None) -> None:
    """Runs the full suite and saves its result."""
    path = store.runs(NAME)
    run(path, runs, "--suite", "full")
    keep(store, NAME, json.loads(path.read_text()))


def tables(folder: Path, kinds: Sequence[str], name: str = NAME) -> str:
    """The given tables of `calm bench` for a page; empty if the suite was not measured."""
    if not result(folder, name).exists():
        return ""
    analysis = analyse(load(folder, name))
    return to_markdown(grids(analysis, kinds), findings(analysis), analysis.results).strip() + "\n"


def draw(folder: Path, path: Path) -> None:
    """The picture of time against memory."""
    if result(folder).exists():
        picture.draw(path, analyse(load(folder)))
