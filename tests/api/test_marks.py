"""What a program does to pages of its own blocks ends with the blocks."""

from __future__ import annotations

import os

import pytest
from api_helpers import GLIBC, MIB, OFFLOAD, PRELOAD, STATIC, Programs, built

SEED = os.environ.get("CALM_TEST_SEED", "1")
KINDS = [
    "dont-fork",
    "wipe-on-fork",
    "dont-dump",
    "mergeable",
    "no-huge-pages",
    "guard",
    "read-only",
    "no-access",
    "executable",
    "random",
    "raw-dont-fork",
    "lock",
    "lock-on-fault",
    "key",
    "bind",
    "name",
    "user-faults",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("way", "options", "sizes"),
    [
        (GLIBC, "", [33 * MIB]),  # which keeps smaller blocks mapped
        (PRELOAD, "", [5 * MIB, 300000, 70000]),
        (PRELOAD, OFFLOAD, [300000]),
        (STATIC, "", [300000]),
    ],
)
def test_next_owner_finds_no_mark(
    programs: Programs, way: str, options: str, sizes: list[int], kind: str
) -> None:
    if way == STATIC and kind == "user-faults":
        pytest.skip("ioctl is not seen in static programs")
    for size in sizes:
        assert programs.run(way, "marks", "mark", f"{kind} {size}", options=options)["marked"] == 1


@pytest.mark.parametrize("options", ["", OFFLOAD])
def test_huge_pages_end_with_their_block(programs: Programs, options: str) -> None:
    ran = programs.run(PRELOAD, "marks", "huge-pages", options=options)
    assert ran["grown"] < 4 * MIB
    assert ran["left"] < 12 * MIB
    assert ran["end"] < 12 * MIB


@pytest.mark.parametrize("when", ["at once", "on-fault"])
@pytest.mark.parametrize(("way", "options"), [(GLIBC, ""), (PRELOAD, ""), (PRELOAD, OFFLOAD)])
def test_renewed_memory_is_not_locked(programs: Programs, way: str, options: str, when: str) -> None:
    ran = programs.run(way, "marks", "lock-future", when, options=options)
    assert ran["locked"] < 8 * MIB
    assert ran["left"] < 24 * MIB


@pytest.mark.parametrize("options", ["", OFFLOAD])
def test_nothing_comes_where_pages_are_absent(programs: Programs, options: str) -> None:
    assert programs.run(PRELOAD, "marks", "absent", options=options)["apart"] == 1


@pytest.mark.parametrize("options", ["", "test_cache=locked", OFFLOAD])
def test_marks_at_random(programs: Programs, options: str) -> None:
    """Contents are checked in the process and its children, whatever is marked, freed, resized and purged."""
    ran = programs.run(PRELOAD, "marks", "at-random", f"3000 {SEED} all", options=options)
    assert ran["steps"] == 3000


@pytest.mark.parametrize("library", ["", "libptlbmalloc2.so"])
def test_marks_at_random_with_glibc(programs: Programs, library: str) -> None:
    """Of blocks that glibc maps alone."""
    preload = str(built(library)) if library else ""
    ran = programs.run(GLIBC, "marks", "at-random", f"1000 {SEED} mapped", LD_PRELOAD=preload)
    assert ran["steps"] == 1000
