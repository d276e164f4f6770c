"""Runners with and without the library."""

from __future__ import annotations

from pathlib import Path

import pytest
from preload import LIBRARIES, Calmalloc, Plain, Ptlbmalloc2


@pytest.fixture
def plain(tmp_path: Path) -> Plain:
    return Plain(tmp_path)


@pytest.fixture(params=LIBRARIES)
def preloaded(request: pytest.FixtureRequest, tmp_path: Path) -> Ptlbmalloc2 | Calmalloc:
    return LIBRARIES[request.param](tmp_path)
