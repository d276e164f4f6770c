"""Runs the test programs with the library loaded in each possible way."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from waiting import TIMEOUT_S

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).parent / "programs"
BUILD = Path(os.environ.get("CALMALLOC_BUILD", REPOSITORY / "build/release")).absolute()
BUILD_AARCH64 = BUILD.with_name("aarch64")
BUILD_MUSL = BUILD.with_name("musl")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

CANNOT = 77  # what the programs exit with where the machine does not allow what the case is about

# The library: not at all, preloaded, linked as a shared one, and linked into a static program.
GLIBC, PRELOAD, LINKED, STATIC = "glibc", "preload", "linked", "static"
OURS = [PRELOAD, LINKED, STATIC]

# How blocks get from the heap to threads and back: options of which one is in force at a time. The last is no
# option, but libcalmoffload, which is only ever preloaded.
OFFLOAD = "libcalmoffload"
MODES = ["test_cache=auto", "test_cache=locked", "test_cache=off", "test_heaps=16", OFFLOAD]

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wshadow"]
C_FLAGS = ["-std=gnu17", "-D_GNU_SOURCE", "-O1", "-g", "-fno-builtin", "-pthread", *WARNINGS]
CXX_FLAGS = ["-std=c++17", "-O1", "-g", "-fno-builtin", "-pthread", *WARNINGS]
INCLUDE = f"-I{REPOSITORY / 'include'}"


def tool(name: str, package: str) -> str:
    """The path of a tool. A missing tool fails the test, with the name of the package to install."""
    found = shutil.which(name)
    assert found is not None, f"{name} is not installed: it is in the Debian package {package}"
    return found


def built(name: str, folder: Path = BUILD) -> Path:
    path = folder / name
    assert path.is_file(), f"{path} is not built: run make, or set CALMALLOC_BUILD"
    return path


def shared_library() -> Path:
    return built("libcalmalloc.so")


def offload_library() -> Path:
    return built("libcalmoffload.so")


def program(name: str, folder: Path = BUILD) -> Path:
    """The path of a test program."""
    path = folder / "tests/api" / name
    build = f"cmake --build {folder} --target programs"
    assert path.is_file(), f"{path} is not built: {build}"
    return path


def archive() -> Path:
    return built("libcalmalloc.a")


def clean_environment() -> dict[str, str]:
    """The environment without the developer's own malloc settings."""
    drop = ("LD_", "CALM_", "MALLOC_", "GLIBC_TUNABLES", "ASAN_", "TSAN_", "UBSAN_")
    return {name: value for name, value in os.environ.items() if not name.startswith(drop)}


def compile_program(command: Sequence[str | Path]) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stderr[-6000:]}"


@dataclass
class Ran:
    command: str
    status: int
    stdout: str
    stderr: str
    figures: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self.stdout.splitlines():
            words = line.split()
            if len(words) == 2 and words[1].isdigit():
                self.figures[words[0]] = int(words[1])

    def __getitem__(self, name: str) -> int:
        assert name in self.figures, f"{self.command} says nothing of {name}:\n{self.stdout}\n{self.stderr}"
        return self.figures[name]

    @property
    def report(self) -> dict[str, Any]:
        """The line of report=exit, which is the last one."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("{")]
        assert lines, f"{self.command} reports nothing: {self.stderr}"
        found: dict[str, Any] = json.loads(lines[-1])
        return found


def describe(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def limit(which: int, value: int) -> Callable[[], None]:
    def apply() -> None:
        resource.setrlimit(which, (value, value))

    return apply


def run_command(
    command: Sequence[str | Path],
    env: dict[str, str],
    *,
    timeout: float = TIMEOUT_S,
    status: int | None = 0,
    prepare: Callable[[], None] | None = None,
    cwd: Path | None = None,
) -> Ran:
    """Runs a command to its end. With status None any status is accepted."""
    words = [str(word) for word in command]
    line = " ".join([f"{name}={env[name]}" for name in ("CALM_OPTIONS", "LD_PRELOAD") if name in env] + words)
    try:
        done = subprocess.run(
            words,
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            preexec_fn=prepare,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as expired:
        raise AssertionError(f"{line} hangs") from expired
    if done.returncode == CANNOT and status != CANNOT:
        pytest.skip(done.stderr.strip())
    if status is not None:
        assert done.returncode == status, (
            f"{line}: {describe(done.returncode)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return Ran(line, done.returncode, done.stdout, done.stderr)


class Programs:
    """The built programs, one for each way of loading the library."""

    def path(self, name: str, way: str) -> Path:
        return program(f"{name}-{'plain' if way in (GLIBC, PRELOAD) else way}")

    def environment(self, way: str, options: str = "", **variables: str) -> dict[str, str]:
        env = clean_environment() | variables
        words = options.split(",")
        offloaded = OFFLOAD in words
        if offloaded and way != PRELOAD:
            pytest.skip("libcalmoffload is preloaded")
        if way == PRELOAD:
            env["LD_PRELOAD"] = str(offload_library() if offloaded else shared_library())
        if options not in ("", OFFLOAD):
            env["CALM_OPTIONS"] = ",".join(word for word in words if word != OFFLOAD)
        return env

    def run(
        self,
        way: str,
        name: str,
        *arguments: str | Path,
        options: str = "",
        wrapper: Sequence[str] = (),
        timeout: float = TIMEOUT_S,
        status: int | None = 0,
        prepare: Callable[[], None] | None = None,
        **variables: str,
    ) -> Ran:
        command = [*wrapper, self.path(name, way), *arguments]
        env = self.environment(way, options, **variables)
        return run_command(command, env, timeout=timeout, status=status, prepare=prepare)


def complaints(stderr: str) -> list[str]:
    """The allocator's messages."""
    return [line for line in stderr.splitlines() if line.startswith("calmalloc:")]
