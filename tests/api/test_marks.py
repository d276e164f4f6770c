"""What a program does to pages of its own blocks ends with the blocks."""

from __future__ import annotations

import pytest
from api_helpers import GLIBC, MIB, OFFLOAD, PRELOAD, STATIC, Programs

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
def test_next_owner_finds_no_mark(programs: Programs, way: str, options: str, sizes: list[int], kind: str) -> None:
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
