"""Libraries that find libc's functions past those of a preloaded library: their blocks cross nevertheless."""

from __future__ import annotations

import platform

import pytest
from api_helpers import GLIBC, LINKED, PRELOAD, Programs, built

# How the library comes into the program. libptlbmalloc2 is glibc's own heap.
PTLBMALLOC2 = "ptlbmalloc2"
WAYS = [GLIBC, PRELOAD, LINKED, PTLBMALLOC2]


def run(programs: Programs, way: str, *arguments: str) -> None:
    if way == PTLBMALLOC2:
        programs.run(GLIBC, "deep_bound", *arguments, LD_PRELOAD=str(built("libptlbmalloc2.so")))
    else:
        programs.run(way, "deep_bound", *arguments)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["deep", "deep-lazy", "deep-threads", "deep-dlmopen", "shallow"])
def test_libraries_opened_with_deep_binding(programs: Programs, way: str, case: str) -> None:
    """Their malloc is the process's, and their other symbols are bound as they asked."""
    run(programs, way, case)


@pytest.mark.parametrize("way", [PRELOAD, LINKED])
def test_deep_binding_where_libc_is_sealed(programs: Programs, way: str) -> None:
    run(programs, way, "deep-sealed")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("library", ["libc.so.6", "libm.so.6"])
def test_functions_found_by_a_handle(programs: Programs, way: str, library: str) -> None:
    run(programs, way, "by-handle", library)


@pytest.mark.parametrize("way", WAYS)
def test_functions_found_by_a_handle_and_a_version(programs: Programs, way: str) -> None:
    run(programs, way, "by-version", "GLIBC_2.17" if platform.machine() == "aarch64" else "GLIBC_2.2.5")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["next", "errors", "other-namespace"])
def test_the_dynamic_linker_as_without_the_library(programs: Programs, way: str, case: str) -> None:
    run(programs, way, case)
