"""The papers' tables, measured anew by `calm bench --paper`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console

from calm.bench import results
from calm.bench.paper import huge_pages, rerun
from calm.bench.runner import clean_environment

from .results import REPOSITORY, Store

NAME, PREFIX = "papers", "paper-"
PAPERS = ("oracle", "ptlbmalloc2", "nextgen", "valat")
# Those that run with huge pages set to always.
WITH_HUGE_PAGES = ("oracle", "valat")
_CALM = str(REPOSITORY / "bin/calm")


def result(folder: Path, paper: str) -> Path:
    """Where a paper's result lies."""
    return folder / f"{PREFIX}{paper}.json"


def measure(store: Store, runs: int | None) -> None:
    """Runs them all; with huge pages as they had them, where this may set them."""
    for paper in PAPERS:
        path = store.runs(f"{PREFIX}{paper}")
        command = [_CALM, "bench", "--paper", paper, "-o", str(path)]
        command += ["-n", str(runs)] if runs else []
        if paper in WITH_HUGE_PAGES and os.access(huge_pages.MODE, os.W_OK):
            command.append("--set-thp")
        done = subprocess.run(command, cwd=REPOSITORY, env=clean_environment())
        # 1: a program failed under some allocator, as the tables say.
        if done.returncode not in (0, 1):
            sys.exit(f"bench/figures: calm bench --paper {paper} ended with {done.returncode}")
        store.keep(path.stem, json.loads(path.read_text()))


def text(folder: Path, paper: str, pictures: Path) -> str:
    """A paper's tables, and its picture if it has one; nothing where it was not measured."""
    path = result(folder, paper)
    if not path.exists():
        return ""
    found, about = results.load(str(path)), rerun.load_about(str(path))
    assert about is not None
    out = StringIO()
    rerun.show(found, about, markdown=True, console=Console(file=out))
    picture = ""
    if draw := rerun.PAPERS[paper].draw:
        draw(found, about, pictures / f"{paper}.svg")
        picture = f"![Its figures, as measured]({paper}.svg)\n\n"
    return f"\n{out.getvalue().strip()}\n\n{picture}"
