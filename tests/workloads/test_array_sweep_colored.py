"""array-sweep in colored memory: beside each malloc, without the library, and where it is unavailable."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from ran_workloads import BUILD, preloadable, start

SWEEP = ("array-sweep", "--memory", "colored", "--repeats", "2")
COLORED = BUILD / "libcalmcolored.so"


@pytest.mark.parametrize("walk", ["stride", "chase", "pages"])
@pytest.mark.parametrize("colors", ["auto", "frames", "timed"])
def test_it_reads_every_place(colors: str, walk: str) -> None:
    check_sweep(None, "--colors", colors, "--walk", walk)


@pytest.mark.parametrize("malloc", ["libcalmalloc.so", "libptlbmalloc2.so"])
def test_beside_another_malloc(malloc: str) -> None:
    check_sweep(BUILD / malloc, "--colors", "frames")


def check_sweep(preload: Path | None, *words: str) -> None:
    done = start(*SWEEP, "--bytes", "262144", *words, preload=preload)
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


def test_without_the_library(tmp_path: Path) -> None:
    program = shutil.copy(BUILD / "array-sweep", tmp_path)
    done = subprocess.run([program, *SWEEP[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("array-sweep: --memory colored: libcalmcolored.so: ")
    assert done.stderr.count("\n") == 1


def test_the_library_exports_its_three_functions() -> None:
    """And so it can be beside any malloc, and beside libcalmalloc, whose layers are in it, too."""
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", COLORED]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    exported = {line.split()[0] for line in printed.splitlines()}
    assert exported == {"calm_colored_alloc", "calm_colored_free", "calm_colored_stats"}


def test_a_cache_that_is_not_there() -> None:
    done = start(*SWEEP, "--cache", "9")
    assert done.returncode == 1
    assert done.stderr == "array-sweep: calm_colored_alloc: Operation not supported\n"


# In the library's place, by its name: tells what it is asked for, and whether it gets back what it gave.
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
    library = preloadable(tmp_path, STAND_IN, f"-Wl,-soname,{COLORED.name}")
    done = start(*SWEEP, "--bytes", "65536", *arguments, preload=library)
    assert done.returncode == 0
    assert done.stderr == f"65536 {cache}\nthe same\n"
