"""What a program sees of the allocator in its process: mappings, descriptors, and what comes into it late."""

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
    """What is reserved stays out of them; guards may be in."""
    assert programs.run(way, "guest", "core-files", options=options)["reserved_in_core_files"] < 8 * MIB


@pytest.mark.parametrize("way", OURS)
def test_little_is_writable(programs: Programs, way: str) -> None:
    """Not the caches of CPUs that the machine could have."""
    plain = programs.run(GLIBC, "guest", "writable")["writable"]
    assert programs.run(way, "guest", "writable")["writable"] < plain + 16 * MIB


@pytest.mark.parametrize(("way", "options"), [(GLIBC, ""), *itertools.product(OURS, ["", OFFLOAD])])
def test_address_space_is_limited_at_run_time(programs: Programs, way: str, options: str) -> None:
    programs.run(way, "guest", "limit-at-run-time", options=options)


def test_reports_into_no_file_of_the_programs(programs: Programs, tmp_path: Path) -> None:
    """Though it reused every descriptor."""
    path = tmp_path / "file"
    programs.run(PRELOAD, "guest", "reuse-descriptors", path, options="report=exit")
    assert path.read_bytes() == b""


@pytest.mark.parametrize("way", [GLIBC, PRELOAD])
def test_cxx_that_comes_late(programs: Programs, way: str) -> None:
    """Its exceptions and its new-handlers, in a host of C."""
    programs.run(way, "guest", "late-cxx", program("new_plugin.so"))
