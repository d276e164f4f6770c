"""What the library adds to malloc and free between two checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from callgrind import instructions_of_pair
from preload import REPOSITORY, environment, library

from calm.core import elf

PAIRS = REPOSITORY / "build/release/pairs"
CACHE_LINE = 64


# Of these, free compares the tops of 2,000 bytes.
@pytest.mark.parametrize(("size", "limit"), [(64, 17), (1000, 19), (2000, 23)])
def test_instructions_added(tmp_path: Path, size: int, limit: int) -> None:
    plain = instructions_of_pair(PAIRS, size, environment(None), tmp_path)
    governed = environment(None) | {"LD_PRELOAD": str(library())}
    assert 0 < instructions_of_pair(PAIRS, size, governed, tmp_path) - plain <= limit


@pytest.mark.parametrize("name", ["malloc", "calloc", "realloc", "free"])
def test_functions_start_a_cache_line(name: str) -> None:
    with elf.opened(library()) as file:
        (symbol,) = file.get_section_by_name(".dynsym").get_symbol_by_name(name)
    assert symbol["st_value"] % CACHE_LINE == 0
