"""The papers' tables, measured by `bench/paper run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from calm.core import documents
from calm.core.environment import clean_environment
from research.bench.tables import to_markdown
from research.papers import huge_pages, rerun
from research.papers.model import PaperResults

from .results import REPOSITORY, Store

NAME, PREFIX = "papers", "paper-"
PAPERS = ("oracle", "ptlbmalloc2", "nextgen", "valat")
# Papers that run with huge pages set to always.
WITH_HUGE_PAGES = ("oracle", "valat")
_PAPER = str(REPOSITORY / "bench/paper")


def result(folder: Path, paper: str) -> Path:
    """The path of a paper's result."""
    return folder / f"{PREFIX}{paper}.json"


def measure(store: Store, runs: int | None) -> None:
    """Runs all papers, with the papers' huge-page setting if permitted."""
    for paper in PAPERS:
        path = store.runs(f"{PREFIX}{paper}")
        command = [_PAPER, "run", paper, "--json", str(path)]
        command += ["-n", str(runs)] if runs else []
        if paper in WITH_HUGE_PAGES and os.access(huge_pages.MODE, os.W_OK):
            command.append("--set-thp")
        done = subprocess.run(command, cwd=REPOSITORY, env=clean_environment())
        # 1: a program failed under an allocator, which the tables show.
        if done.returncode not in (0, 1):
            sys.exit(f"bench/figures: bench/paper run {paper} ended with {done.returncode}")
        store.keep(path.stem, json.loads(path.read_text()))


def text(folder: Path, paper: str, pictures: Path) -> str:
    """A paper's tables, and its picture if it has one; empty if it was not measured."""
    path = result(folder, paper)
    if not path.exists():
        return ""
    found = rerun.complete(documents.read(str(path), PaperResults))
    tables = to_markdown(found.tables, rerun.lines(found), found)
    picture = ""
    if draw := rerun.PAPERS[paper].draw:
        draw(found, found.paper, pictures / f"{paper}.svg")
        picture = f"![Its figures, as measured]({paper}.svg)\n\n"
    return f"\n{tables.strip()}\n\n{picture}"
