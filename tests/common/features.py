"""The optional features of the library under test (CALM_PROFILE and so on, in CMakeLists.txt)."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from elftools.elf.elffile import ELFFile

REPOSITORY = Path(__file__).resolve().parents[2]


@functools.cache
def lacks(feature: str) -> bool:
    """Whether the library was built without the feature. False if there is no library: tests report that."""
    library = Path(os.environ.get("CALMALLOC_BUILD", REPOSITORY / "build/release")) / "libcalmalloc.so"
    if not library.is_file():
        return False
    with library.open("rb") as file:
        names = ELFFile(file).get_section_by_name("calm_features")  # src/api/features.c
        return feature not in names.data().rstrip(b"\0").decode().split()
