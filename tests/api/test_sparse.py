"""Blocks of which a program writes little make little resident, whatever its other blocks were."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import KIB, MIB, PRELOAD, Programs, run_command

PAGE = 4096
# One wrong guess, the pages in which blocks begin, and descriptors.
ALLOWED = 10 * MIB

ROWS = [
    # burst, count, bytes, kind, renewals
    (0, 1000, MIB, "calloc", 0),
    (0, 100, 4 * MIB, "calloc", 0),
    (0, 4, 256 * MIB, "calloc", 10),
    (0, 10000, 64 * KIB, "calloc", 1),
    (8 * MIB, 300, 4 * MIB, "malloc", 0),
    (8 * MIB, 300, 4 * MIB, "malloc", 10),
    (8 * MIB, 300, 4 * MIB, "calloc", 0),
    (4 * MIB, 300, 4 * MIB, "malloc", 10),
    (4 * MIB, 300, 4 * MIB, "calloc", 10),
    (64 * KIB, 1000, MIB, "calloc", 1),
    (128 * KIB, 300, 4 * MIB, "malloc", 0),
]


def huge_pages_always() -> bool:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return enabled.exists() and "[always]" in enabled.read_text()


without_huge_pages = pytest.mark.skipif(
    huge_pages_always(), reason="the kernel backs untouched memory: transparent_hugepage is always"
)


@without_huge_pages
@pytest.mark.parametrize(("burst", "count", "size", "kind", "renewals"), ROWS)
def test_resident(programs: Programs, burst: int, count: int, size: int, kind: str, renewals: int) -> None:
    arguments = [str(burst), str(count), str(size), kind, str(renewals), "trim"]
    ran = programs.run(PRELOAD, "sparse", *arguments)
    assert int(ran.stdout) <= 1.25 * count * PAGE + ALLOWED


@without_huge_pages
@pytest.mark.parametrize(
    ("burst", "count", "size"), [(8 * MIB, 300, 4 * MIB), (4 * MIB, 300, 4 * MIB), (0, 10000, 64 * KIB)]
)
def test_resident_of_ptlbmalloc2(programs: Programs, burst: int, count: int, size: int) -> None:
    """No more than glibc, whose calloc clears what was usable at its top: 128 KiB with each growth."""
    command = [programs.path("sparse", PRELOAD), str(burst), str(count), str(size), "calloc", "0", "keep"]
    library = programs.path("sparse", PRELOAD).parents[2] / "libptlbmalloc2.so"
    glibc = int(run_command(command, {}).stdout)
    # The least of three: a purge that is due by the clock may make glibc grow, and clear, once more.
    ours = min(int(run_command(command, {"LD_PRELOAD": str(library)}).stdout) for _ in range(3))
    assert ours <= 1.25 * glibc + ALLOWED
