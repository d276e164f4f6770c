"""array-sweep in calmalloc's colored memory: with it, without it, and where it is unavailable."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from ran_workloads import LIBRARY, preloadable, start

SWEEP = ("array-sweep", "--memory", "colored", "--repeats", "2")


def sweep(*arguments: str) -> subprocess.CompletedProcess[str]:
    return start(*SWEEP, *arguments, preload=LIBRARY)


@pytest.mark.feature("colored")
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


@pytest.mark.feature("colored")
def test_a_cache_that_is_not_there() -> None:
    done = sweep("--cache", "9")
    assert done.returncode == 1
    assert done.stderr == "array-sweep: calm_colored_alloc: Operation not supported\n"


# In calmalloc's place: tells what it is asked for, and whether it gets back what it gave.
STAND_IN = """
#include <stdio.h>
#include <stdlib.h>

static void *given;

void *calm_colored_alloc(size_t bytes, unsigned cache) {
    fprintf(stderr, "%zu %#x\\n", bytes, cache);
    return given = malloc(bytes);
}
void calm_colored_free(void *block) {
    fprintf(stderr, "%s\\n", block == given ? "the same" : "another");
    free(given);
}
"""


@pytest.mark.parametrize(
    ("arguments", "cache"),
    [
        ((), "0x2"),
        (("--cache", "3"), "0x3"),
        (("--colors", "frames"), "0x102"),
        (("--cache", "1", "--colors", "timed"), "0x201"),
    ],
)
def test_the_library_is_asked_for_what_the_options_say(
    arguments: tuple[str, ...], cache: str, tmp_path: Path
) -> None:
    done = start(*SWEEP, "--bytes", "65536", *arguments, preload=preloadable(tmp_path, STAND_IN))
    assert done.returncode == 0
    assert done.stderr == f"65536 {cache}\nthe same\n"
