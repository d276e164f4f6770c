"""Runs the built workloads, and parses the one line that each prints."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

BUILD = Path(__file__).resolve().parents[2] / "build/release"
LIBRARY = BUILD / "libcalmalloc.so"


def start(
    name: str, *arguments: str, preload: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs a workload to its end, with additional environment variables."""
    path = BUILD / name
    assert path.is_file(), f"{path} is not built: run make"
    environment = {**os.environ, **more}
    if preload is not None:
        assert preload.is_file(), f"{preload} is not built: run make"
        environment["LD_PRELOAD"] = str(preload)
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=False, env=environment)


def run(name: str, *arguments: str, preload: Path | None = None, **more: str) -> dict[str, Any]:
    done = start(name, *arguments, preload=preload, **more)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    printed: dict[str, Any] = json.loads(done.stdout)
    assert printed["workload"] == name
    assert printed["seconds"] >= 0
    return printed


def preloadable(folder: Path, source: str, *libraries: str) -> Path:
    """Compiles a source to a library to preload."""
    (folder / "preloaded.c").write_text(source)
    library = folder / "preloaded.so"
    command = ["gcc", "-O1", "-fPIC", "-shared", "-fno-builtin", "-o", library, folder / "preloaded.c"]
    subprocess.run([*command, *libraries], check=True)
    return library
