"""The library under test, as a user preloads it, and what it says of itself at exit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def library() -> Path:
    built = REPOSITORY / "build/release/libptlbmalloc2.so"
    path = Path(os.environ.get("PTLBMALLOC2_LIBRARY", built)).absolute()
    assert path.is_file(), f"{path} is not built: run make, or set PTLBMALLOC2_LIBRARY"
    return path


def program(name: str, package: str) -> str:
    """A test that cannot run is a test that fails: it names what to install."""
    found = shutil.which(name)
    assert found is not None, f"{name} is not installed: it is in the Debian package {package}"
    return found


def environment(stats: Path | None) -> dict[str, str]:
    """For a plain run, or with stats for a preloaded one, which writes its statistics there."""
    env = {
        name: value
        for name, value in os.environ.items()
        # A developer's own settings for malloc must not reach either run.
        if not name.startswith(("LD_", "PTLBMALLOC2_", "MALLOC_", "GLIBC_TUNABLES"))
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
