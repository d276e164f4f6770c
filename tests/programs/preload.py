"""The libraries under test, preloaded as by a user, and their reports at exit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def library() -> Path:
    built = REPOSITORY / "build/release/libptlbmalloc2.so"
    path = Path(os.environ.get("PTLBMALLOC2_LIBRARY", built)).absolute()
    assert path.is_file(), f"{path} is not built: run make, or set PTLBMALLOC2_LIBRARY"
    return path


def calmalloc() -> Path:
    folder = Path(os.environ.get("CALMALLOC_BUILD", REPOSITORY / "build/release"))
    path = (folder / "libcalmalloc.so").absolute()
    assert path.is_file(), f"{path} is not built: run make, or set CALMALLOC_BUILD"
    return path


def program(name: str, package: str) -> str:
    """The path of a tool. A missing tool fails the test, with the name of the package to install."""
    found = shutil.which(name)
    assert found is not None, f"{name} is not installed: it is in the Debian package {package}"
    return found


def environment(stats: Path | None) -> dict[str, str]:
    """The environment of a plain run, or of a preloaded one, which writes its statistics to a file."""
    env = {
        name: value
        for name, value in os.environ.items()
        # A developer's own settings for malloc must not reach either run.
        if not name.startswith(("LD_", "PTLBMALLOC2_", "CALM_", "MALLOC_", "GLIBC_TUNABLES"))
    }
    env["LC_ALL"] = "C.UTF-8"
    if stats is not None:
        env["LD_PRELOAD"] = str(library())
        env["PTLBMALLOC2_STATS"] = f"json:{stats}"
        env["PTLBMALLOC2_VERBOSE"] = "1"
    return env


def read_stats(stats: Path) -> list[dict[str, Any]]:
    """One dictionary for each process that ended by exit()."""
    assert stats.is_file(), "the library wrote no statistics: it was not loaded, or the program did not exit"
    return [json.loads(line) for line in stats.read_text().splitlines()]


def assert_active(stats: Path) -> None:
    lines = read_stats(stats)
    assert lines, "the library wrote no statistics"
    passive = [line for line in lines if line["active"] is not True]
    assert not passive, f"not active in {len(passive)} of {len(lines)} processes: {passive[0]}"


@dataclass(frozen=True)
class Runner:
    """Runs programs, plain or under one of the libraries, and keeps their stderr."""

    env: dict[str, str]
    log: Path

    def run(self, command: list[str], folder: Path, stdin: str = "", **variables: str) -> str:
        done = subprocess.run(
            command,
            cwd=folder,
            env=self.env | variables,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
        )
        with self.log.open("a") as log:
            log.write(done.stderr)
        assert done.returncode == 0, f"{command[0]}: status {done.returncode}\n{done.stderr[-2000:]}"
        return done.stdout

    def assert_active(self) -> None:
        """The library served the programs, and reported no problem."""
        raise NotImplementedError


class Plain(Runner):
    def __init__(self, folder: Path) -> None:
        super().__init__(environment(None), folder / "plain.log")


class Ptlbmalloc2(Runner):
    def __init__(self, folder: Path) -> None:
        super().__init__(environment(folder / "stats.json"), folder / "preloaded.log")

    def assert_active(self) -> None:
        assert_active(Path(self.env["PTLBMALLOC2_STATS"].removeprefix("json:")))


class Calmalloc(Runner):
    def __init__(self, folder: Path) -> None:
        preloaded = {"LD_PRELOAD": str(calmalloc()), "CALM_OPTIONS": "report=exit"}
        super().__init__(environment(None) | preloaded, folder / "preloaded.log")

    def assert_active(self) -> None:
        lines = self.log.read_text().splitlines()
        complaints = [line for line in lines if "calmalloc:" in line]
        assert not complaints, complaints[0]
        reports = [json.loads(line) for line in lines if line.startswith("{") and '"footprint"' in line]
        assert reports, "the library reported nothing: it was not loaded, or no program called exit()"
        for report in reports:
            assert report["heap_locks"] > 0, "it served nobody"
            assert report["in_use"] + report["dirty"] == report["footprint"]
            assert report["purge_failures"] == 0


LIBRARIES: dict[str, type[Ptlbmalloc2] | type[Calmalloc]] = {
    "ptlbmalloc2": Ptlbmalloc2,
    "calmalloc": Calmalloc,
}
