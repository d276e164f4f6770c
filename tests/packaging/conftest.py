"""Shared fixtures of the package tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging_helpers import BUILD, run


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, installed under one prefix and then moved to another."""
    assert (BUILD / "libcalmalloc.so").is_file(), f"{BUILD} is not built: run make, or set CALMALLOC_BUILD"
    folder = tmp_path_factory.mktemp("installed")
    run("cmake", "--install", BUILD, "--prefix", folder / "first")
    return (folder / "first").rename(folder / "second")
