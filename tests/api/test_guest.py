"""The allocator's traces in a process: mappings, file descriptors, and libraries that are loaded late."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from api_helpers import GLIBC, MIB, OFFLOAD, OURS, PRELOAD, Programs, program


@pytest.mark.parametrize("way", OURS)
def test_no_metadata_next_to_the_heap(programs: Programs, way: str) -> None:
    programs.run(way, "guest", "guards")


@pytest.mark.parametrize("options", ["", OFFLOAD])
@pytest.mark.parametrize("way", OURS)
def test_core_files_are_small(programs: Programs, way: str, options: str) -> None:
    """Core files exclude reserved memory, but may include guard pages."""
    assert programs.run(way, "guest", "core-files", options=options)["reserved_in_core_files"] < 8 * MIB


@pytest.mark.parametrize("way", OURS)
def test_little_is_writable(programs: Programs, way: str) -> None:
    """The caches of CPUs that do not exist are not writable."""
    plain = programs.run(GLIBC, "guest", "writable")["writable"]
    assert programs.run(way, "guest", "writable")["writable"] < plain + 16 * MIB


@pytest.mark.parametrize(("way", "options"), [(GLIBC, ""), *itertools.product(OURS, ["", OFFLOAD])])
def test_address_space_is_limited_at_run_time(programs: Programs, way: str, options: str) -> None:
    programs.run(way, "guest", "limit-at-run-time", options=options)


def test_reports_into_no_file_of_the_programs(programs: Programs, tmp_path: Path) -> None:
    """Although the program reused every descriptor."""
    path = tmp_path / "file"
    programs.run(PRELOAD, "guest", "reuse-descriptors", path, options="report=exit")
    assert path.read_bytes() == b""


@pytest.mark.parametrize("way", [GLIBC, PRELOAD])
def test_cxx_that_comes_late(programs: Programs, way: str) -> None:
    """Exceptions and new-handlers of a C++ library that a C program loads."""
    programs.run(way, "guest", "late-cxx", program("new_plugin.so"))
