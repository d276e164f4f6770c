"""`calm bench`'s full suite as one of the figures: its result, its picture, and its tables for the docs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from calm.bench import picture, results
from calm.bench.analysis import analyse
from calm.bench.runner import clean_environment
from calm.bench.tables import to_markdown

from .results import REPOSITORY, Store

NAME = "suite"
_CALM = str(REPOSITORY / "bin/calm")
SUMMARY = ("summary",)
DETAILS = ("time", "peak", "average", "shootdowns", "worst")


def result(folder: Path) -> Path:
    """Where the suite's result lies."""
    return folder / f"{NAME}.json"


def measure(store: Store, runs: int | None) -> None:
    """Runs the suite and saves its result."""
    path = store.runs(NAME)
    command = [_CALM, "bench", "--suite", "full", "-o", str(path)]
    command += ["-n", str(runs)] if runs else []
    done = subprocess.run(command, cwd=REPOSITORY, env=clean_environment())
    # 1: a program failed under some allocator, as the tables say.
    if done.returncode not in (0, 1):
        sys.exit(f"bench/figures: calm bench ended with {done.returncode}")
    store.keep(NAME, json.loads(path.read_text()))


def tables(folder: Path, kinds: Sequence[str]) -> str:
    """These tables of `calm bench` for a page, or nothing where the suite was not measured."""
    if not result(folder).exists():
        return ""
    return to_markdown(analyse(results.load(str(result(folder)))), kinds).strip() + "\n"


def draw(folder: Path, path: Path) -> None:
    """Time against memory."""
    if result(folder).exists():
        picture.draw(path, analyse(results.load(str(result(folder)))))
