"""The small programs, compiled once, and run with the library preloaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "programs"))

from preload import environment, library, program, read_stats
from ran import Ran, Run

SOURCES = Path(__file__).parent
CANNOT = 77  # what the programs exit with where the machine does not allow what the case is about


@dataclass(frozen=True)
class Programs:
    cases: Path
    early_late: Path
    plugin: Path
    placed: Path


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    folder = tmp_path_factory.mktemp("programs")
    built = Programs(folder / "cases", folder / "early-late", folder / "plugin.so", folder / "placed")
    compiler = [program("cc", "gcc"), "-std=gnu17", "-D_GNU_SOURCE", "-O1", "-fno-builtin", "-pthread"]
    compiler += ["-Wall", "-Wextra", "-Werror", "-Wshadow"]
    for output, sources, flags in (
        (built.cases, ["cases.c", "support.c"], []),
        (built.early_late, ["early_late.c", "support.c"], []),
        (built.plugin, ["plugin.c"], ["-shared", "-fPIC"]),
        (built.placed, ["placed.c"], []),
    ):
        paths = [str(SOURCES / source) for source in sources]
        done = subprocess.run(
            [*compiler, *flags, "-o", str(output), *paths, "-ldl"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    return built


def run_program(command: list[str], env: dict[str, str], stats: Path, timeout: float = 60) -> Ran:
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
def run(programs: Programs, tmp_path: Path) -> Run:
    """Runs a case under the library: run("name", "argument", VARIABLE="value")."""

    def run_case(*case: str, **variables: str) -> Ran:
        stats = tmp_path / "stats.json"
        env = environment(None) | {"LD_PRELOAD": str(library()), "PTLBMALLOC2_STATS": f"json:{stats}"}
        return run_program([str(programs.cases), *case], env | variables, stats)

    return run_case


@pytest.fixture
def run_early_late(programs: Programs, tmp_path: Path) -> Callable[..., Ran]:
    def run_it(**variables: str) -> Ran:
        stats = tmp_path / "stats.json"
        env = environment(None) | {"LD_PRELOAD": str(library()), "PTLBMALLOC2_STATS": f"json:{stats}"}
        return run_program([str(programs.early_late), str(programs.plugin)], env | variables, stats)

    return run_it


@pytest.fixture
def placed_program(programs: Programs) -> Path:
    return programs.placed


@pytest.fixture
def run_placed(programs: Programs, tmp_path: Path) -> Run:
    """Runs a case about mapped blocks with PTLBMALLOC2_PLACEMENT=1, unless told otherwise."""

    def run_case(*case: str, **variables: str) -> Ran:
        stats = tmp_path / "stats.json"
        env = environment(None) | {"LD_PRELOAD": str(library()), "PTLBMALLOC2_STATS": f"json:{stats}"}
        # Else, after the first that is freed, glibc would map only larger blocks.
        env |= {"PTLBMALLOC2_PLACEMENT": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
        return run_program([str(programs.placed), *case], env | variables, stats)

    return run_case


@pytest.fixture
def run_unplaced(programs: Programs, tmp_path: Path) -> Run:
    """The same on glibc alone."""

    def run_case(*case: str, **variables: str) -> Ran:
        env = environment(None) | {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)} | variables
        return run_program([str(programs.placed), *case], env, tmp_path / "none.json")

    return run_case


@pytest.fixture
def run_plain(programs: Programs, tmp_path: Path) -> Run:
    """The same without the library."""

    def run_case(*case: str, **variables: str) -> Ran:
        command = [str(programs.cases), *case]
        return run_program(command, environment(None) | variables, tmp_path / "none.json")

    return run_case
