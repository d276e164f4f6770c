"""`make test` on a Debian that has a C compiler, make and CMake, and nothing else that builds need."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from packaging_helpers import REPOSITORY, run

DEBIAN_ROOT = REPOSITORY / "scripts/debian-root"


@pytest.mark.long
@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_with_a_compiler_and_cmake_alone(suite: str, tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        pytest.skip("a Debian root needs root and mmdebstrap")
    root = tmp_path / "root"
    run(DEBIAN_ROOT, "make", suite, root, "gcc", "libc6-dev", "make", "cmake")
    run("git", "clone", "--quiet", "--no-hardlinks", REPOSITORY, root / "root/calmalloc")
    within = (DEBIAN_ROOT, "run", root, "sh", "-ec")
    run(*within, "command -v python3 || command -v ninja || command -v c++", fails=True)
    ran = run(*within, "make -C /root/calmalloc test")
    assert "100% tests passed" in ran.stdout
    shutil.rmtree(root)
