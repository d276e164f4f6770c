"""array-sweep in colored memory, which is calmalloc's: with it, without it, and where it is not to be had."""

from __future__ import annotations

import json
import subprocess

import pytest
from ran_workloads import LIBRARY, start

SWEEP = ("array-sweep", "--memory", "colored", "--repeats", "2")


def sweep(*arguments: str) -> subprocess.CompletedProcess[str]:
    return start(*SWEEP, *arguments, preload=LIBRARY)


@pytest.mark.parametrize("walk", ["stride", "chase", "pages"])
@pytest.mark.parametrize("colors", ["auto", "frames", "timed"])
def test_it_reads_every_place(colors: str, walk: str) -> None:
    done = sweep("--bytes", "262144", "--colors", colors, "--walk", walk)
    if done.returncode == 1:
        # A container's machine may hide frames, have no such cache, or be too busy to be timed.
        reasons = ("Operation not permitted", "Operation not supported", "Resource temporarily unavailable")
        assert done.stderr.strip().removeprefix("array-sweep: calm_colored_alloc: ") in reasons
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["memory"] == "colored"
    assert printed["loads"] == 2 * 262144 // 64
    assert printed["huge_kib"] == 0


def test_without_calmalloc() -> None:
    done = start(*SWEEP)
    assert done.returncode == 1
    assert done.stderr == "array-sweep: --memory colored is calmalloc's, which is not loaded\n"


def test_a_cache_that_is_not_there() -> None:
    done = sweep("--cache", "9")
    assert done.returncode == 1
    assert done.stderr == "array-sweep: calm_colored_alloc: Operation not supported\n"
