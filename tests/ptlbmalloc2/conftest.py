"""The small programs, compiled once, and run with the library preloaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "programs"))

from preload import REPOSITORY, environment, library, read_stats
from ran import Ran, Run
from waiting import TIMEOUT_S

SOURCES = Path(__file__).parent
CANNOT = 77  # what the programs exit with where the machine does not allow what the case is about


PROGRAMS = REPOSITORY / "build/release/tests/ptlbmalloc2"


def built(name: str) -> str:
    path = PROGRAMS / name
    assert path.is_file(), f"{path} is not built: cmake --build --preset release -t programs"
    return str(path)


def run_program(command: list[str], env: dict[str, str], stats: Path, timeout: float = TIMEOUT_S) -> Ran:
    stats.unlink(missing_ok=True)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        raise AssertionError(f"{' '.join(command)} hangs") from expired
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, f"{' '.join(command)}: status {done.returncode}\n{done.stderr}"
    figures = dict(line.split() for line in done.stdout.splitlines())
    lines = read_stats(stats) if stats.exists() else []
    return Ran({name: int(value) for name, value in figures.items()}, done.stderr, lines)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a case under the library: run("name", "argument", VARIABLE="value")."""

    def run_case(*case: str, **variables: str) -> Ran:
        stats = tmp_path / "stats.json"
        env = environment(None) | {"LD_PRELOAD": str(library()), "PTLBMALLOC2_STATS": f"json:{stats}"}
        return run_program([built("cases"), *case], env | variables, stats)

    return run_case


@pytest.fixture
def run_early_late(tmp_path: Path) -> Callable[..., Ran]:
    def run_it(**variables: str) -> Ran:
        stats = tmp_path / "stats.json"
        env = environment(None) | {"LD_PRELOAD": str(library()), "PTLBMALLOC2_STATS": f"json:{stats}"}
        return run_program([built("early-late"), built("plugin.so")], env | variables, stats)

    return run_it


@pytest.fixture
def cases_program() -> Path:
    return Path(built("cases"))


@pytest.fixture
def placed_program() -> Path:
    return Path(built("placed"))


@pytest.fixture
def run_placed(tmp_path: Path) -> Run:
    """Runs a case about mapped blocks with PTLBMALLOC2_PLACEMENT=1 by default."""

    def run_case(*case: str, **variables: str) -> Ran:
        stats = tmp_path / "stats.json"
        env = environment(None) | {"LD_PRELOAD": str(library()), "PTLBMALLOC2_STATS": f"json:{stats}"}
        # Else, after the first that is freed, glibc would map only larger blocks.
        env |= {"PTLBMALLOC2_PLACEMENT": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
        return run_program([built("placed"), *case], env | variables, stats)

    return run_case


@pytest.fixture
def run_unplaced(tmp_path: Path) -> Run:
    """The same on glibc alone."""

    def run_case(*case: str, **variables: str) -> Ran:
        env = environment(None) | {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)} | variables
        return run_program([built("placed"), *case], env, tmp_path / "none.json")

    return run_case


@pytest.fixture
def run_plain(tmp_path: Path) -> Run:
    """The same without the library."""

    def run_case(*case: str, **variables: str) -> Ran:
        command = [built("cases"), *case]
        return run_program(command, environment(None) | variables, tmp_path / "none.json")

    return run_case
