"""Runs a package user's commands outside the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).parent
BUILD = Path(os.environ.get("CALMALLOC_BUILD", REPOSITORY / "build/release")).absolute()
VERSION = subprocess.run(
    [REPOSITORY / "scripts/version"], check=True, capture_output=True, text=True
).stdout.strip()
# What only the commands in research/ need: no package has it.
FOR_RESEARCH = re.compile(r"research|trace|libcalmcolors|calm-messages|madvise-storm|larson")


def environment(**variables: str) -> dict[str, str]:
    """The caller's environment, without variables that refer to the checkout."""
    leads = ("CALM_", "PTLBMALLOC2_", "LD_", "PYTHON", "PKG_CONFIG", "CMAKE_", "CFLAGS", "LDFLAGS")
    return {key: value for key, value in os.environ.items() if not key.startswith(leads)} | variables


def run(
    *command: str | Path, cwd: Path | None = None, fails: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, check=False
    )
    assert (result.returncode != 0) == fails, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


def tool(name: str, package: str) -> str:
    """The path of a tool. A missing tool fails the test, with the name of the package to install."""
    found = shutil.which(name)
    assert found is not None, f"{name} is not installed: it is in the Debian package {package}"
    return found


def project(folder: Path, language: str, lines: Sequence[str]) -> Path:
    """A CMake project of one program in one language, with `uses_calmalloc` and further lines."""
    folder.mkdir(parents=True)
    suffix = {"C": "c", "CXX": "cpp"}[language]
    shutil.copy(SOURCES / "program.c", folder / f"program.{suffix}")
    text = [
        "cmake_minimum_required(VERSION 3.25)",
        f"project(outer {language})",
        f"add_executable(uses_calmalloc program.{suffix})",
        *lines,
    ]
    (folder / "CMakeLists.txt").write_text("\n".join(text) + "\n")
    return folder


def configure(folder: Path, *options: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    return run("cmake", "-G", "Ninja", "-S", folder, "-B", folder / "build", *options, fails=fails)


def build(folder: Path, *options: str) -> Path:
    """Builds the program of a project."""
    configure(folder, *options)
    run("cmake", "--build", folder / "build")
    return folder / "build/uses_calmalloc"
