"""The hit paths of malloc and free, in the code and as callgrind counts them; and the loops of bench/hot."""

from __future__ import annotations

import json
import operator
import os
import platform
import re
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from callgrind import instructions_of_pair  # noqa: E402
from lib import hot  # noqa: E402
from lib.hit_path import Kinds, hit_path, is_straight, kinds, text  # noqa: E402

from calm.core import allocators  # noqa: E402
from calm.core.errors import CalmError  # noqa: E402

BUILD = ROOT / "build/release"
LIBRARY = BUILD / "libcalmalloc.so"
x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the paths of x86-64")

# The most that a compiler may make of them.
MOST = {
    "malloc": Kinds(instructions=27, loads=9, stores=2, branches=4),
    "free": Kinds(instructions=30, loads=12, stores=3, branches=5),
    "_ZnwmSt11align_val_t": Kinds(instructions=47, loads=9, stores=2, branches=8),
}
SAME = {
    "malloc": ("_Znwm", "_Znam", "calm_malloc", "__libc_malloc"),
    "free": ("_ZdlPv", "_ZdlPvm", "_ZdaPvm", "calm_free"),
}


@x86_64
@pytest.mark.parametrize("function", [*MOST, *(each for names in SAME.values() for each in names)])
def test_a_hit_is_a_straight_line_of_few_instructions(function: str) -> None:
    like = next((name for name, names in SAME.items() if function in names), function)
    path = hit_path(LIBRARY, function)
    found, most = kinds(path), MOST[like]
    assert is_straight(path), text(path)
    told = f"{function}: {found}\n{text(path)}"
    assert all(map(operator.le, astuple(found), astuple(most))), told


@x86_64
def test_what_is_no_hit_path() -> None:
    with pytest.raises(CalmError, match="exports no function calm_nothing"):
        hit_path(LIBRARY, "calm_nothing")
    with pytest.raises(CalmError, match="free of calls"):
        hit_path(LIBRARY, "malloc_stats")


# All instructions of a step in a process with one thread, without restartable sequences, which valgrind does
# not support: a few more than gcc 12 needs.
STEPS = {"pair-48": 60, "sized-48": 62, "aligned-64": 82, "calloc-64": 88, "grow-by-1": 46}


@x86_64
@pytest.mark.parametrize("loop", STEPS)
def test_instructions_of_a_lone_thread(loop: str) -> None:
    counted = hot.instructions(allocators.parse("calmalloc"), loop)
    assert counted is not None
    assert counted <= STEPS[loop]


@x86_64
def test_instructions_with_locks(tmp_path: Path) -> None:
    """The same beside a second thread: each call takes the lock of a cache once. gcc 12 needs 190."""
    environment = os.environ | {"LD_PRELOAD": str(LIBRARY)}
    assert instructions_of_pair(BUILD / "pairs", 48, environment, tmp_path, beside=True) <= 190


def test_loops_are_those_of_the_program() -> None:
    help_text = subprocess.run([BUILD / "hot", "--help"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"--loop WORD.*?: ([\w|-]+)", help_text, re.DOTALL)
    assert found is not None, help_text
    assert found[1].split("|") == list(hot.LOOPS)


@pytest.mark.parametrize("name", hot.LOOPS)
def test_every_loop_runs(name: str) -> None:
    command = [BUILD / "hot", "--loop", name, "--runs", "2"]
    environment = os.environ | {"LD_PRELOAD": str(LIBRARY)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout)
    assert 0 < figures["min_ns"] <= figures["median_ns"]
