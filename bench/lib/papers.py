"""The papers' tables, measured anew by `calm bench --paper`: their results, and docs/papers.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from calm.bench.paper import huge_pages

from .results import REPOSITORY
from .rounds import clean_environment
from .tables import put

NAME = "papers"
PAPERS = ("oracle", "ptlbmalloc2", "nextgen", "valat")
# Those that run with huge pages set to always, and those that are drawn.
WITH_HUGE_PAGES = ("oracle", "valat")
DRAWN = ("valat",)
PAGE = REPOSITORY / "docs/papers.md"
_CALM = str(REPOSITORY / "bin/calm")


def result(folder: Path, paper: str) -> Path:
    """Where a paper's result lies."""
    return folder / f"paper-{paper}.json"


def measure(folder: Path, runs: int | None) -> None:
    """Runs them all; with huge pages as they had them, where this may set them."""
    for paper in PAPERS:
        command = [_CALM, "bench", "--paper", paper, "-o", str(result(folder, paper))]
        command += ["-n", str(runs)] if runs else []
        if paper in WITH_HUGE_PAGES and os.access(huge_pages.MODE, os.W_OK):
            command.append("--set-thp")
        done = subprocess.run(command, cwd=REPOSITORY, env=clean_environment())
        # 1: a program failed under some allocator, as the tables say.
        if done.returncode not in (0, 1):
            sys.exit(f"bench/figures: calm bench --paper {paper} ended with {done.returncode}")


def render(folder: Path, page: Path = PAGE) -> None:
    """Puts the tables on the page; those of a paper that was not measured stay as they are."""
    for paper in PAPERS:
        if result(folder, paper).exists():
            command = [_CALM, "bench", "--report", str(result(folder, paper)), "--markdown"]
            command += ["--picture", str(page.with_name(f"{paper}.svg"))] if paper in DRAWN else []
            done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
            text = f"\n{done.stdout.strip()}\n\n"
            text += f"![Its figures, as measured]({paper}.svg)\n\n" if paper in DRAWN else ""
            put(page, text, f"paper-{paper}")
