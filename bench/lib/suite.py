"""`calm bench`'s full suite as one of the figures: its result, its picture, and its tables for the docs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .results import REPOSITORY
from .rounds import clean_environment

NAME = "suite"
_CALM = str(REPOSITORY / "bin/calm")
SUMMARY = ("summary",)
DETAILS = ("time", "peak", "average", "shootdowns", "worst")


def result(folder: Path) -> Path:
    """Where the suite's result lies."""
    return folder / f"{NAME}.json"


def measure(folder: Path, runs: int | None) -> None:
    """Runs the suite and saves its result."""
    command = [_CALM, "bench", "--suite", "full", "-o", str(result(folder))]
    command += ["-n", str(runs)] if runs else []
    done = subprocess.run(command, cwd=REPOSITORY, env=clean_environment())
    # 1: a program failed under some allocator, as the tables say.
    if done.returncode not in (0, 1):
        sys.exit(f"bench/figures: calm bench ended with {done.returncode}")


def tables(folder: Path, kinds: Sequence[str]) -> str:
    """These tables of `calm bench` for a page, or nothing where the suite was not measured."""
    if not result(folder).exists():
        return ""
    command = [_CALM, "bench", "--report", str(result(folder)), "--markdown"]
    for table in kinds:
        command += ["--table", table]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip() + "\n"


def draw(folder: Path, picture: Path) -> None:
    """Time against memory."""
    if result(folder).exists():
        command = [_CALM, "bench", "--report", str(result(folder)), "--picture", str(picture)]
        subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True, env=dict(os.environ))
