"""What a program that allocates little pays for the allocator."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest
from api_helpers import BUILD, KIB, shared_library

pytestmark = pytest.mark.skipif(
    BUILD.name != "release" or platform.machine() != "x86_64", reason="of other sizes"
)


def memory_of_a_shell(preload: Path | None) -> tuple[int, int]:
    """Bytes that only a shell has that waits for input, and the page faults that it had taken by then."""
    environment = {**os.environ, "LD_PRELOAD": str(preload or "")}
    shell = subprocess.Popen(
        ["sh", "-c", "echo ready; read line"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"ready\n"
        process = Path(f"/proc/{shell.pid}")
        lines = [line.split() for line in (process / "smaps_rollup").read_text().splitlines()]
        memory = next(int(value) * KIB for name, value, *_ in lines if name == "Anonymous:")
        faults = int((process / "stat").read_text().rpartition(")")[2].split()[7])
    return memory, faults


def test_a_small_program_has_few_pages() -> None:
    memory, faults = memory_of_a_shell(shared_library())
    memory_before, faults_before = memory_of_a_shell(None)
    assert memory - memory_before <= 96 * KIB
    assert faults - faults_before <= 50
