"""Programs built with a sanitizer, which has its own allocator: its reports are the same."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
from api_helpers import built, program
from waiting import TIMEOUT_S

FINDS = {"address": "heap-use-after-free", "thread": "data race", "leak": "12345 byte"}


def run(compiler: str, sanitizer: str, library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # gcc's complains of any library that is loaded before its own.
    env = os.environ | {"LD_PRELOAD": str(library), "ASAN_OPTIONS": "verify_asan_link_order=0"}
    command = [program(f"sanitized-{compiler}-{sanitizer}"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.parametrize("library", ["libcalmalloc.so", "libptlbmalloc2.so"])
@pytest.mark.parametrize(("compiler", "sanitizer"), list(itertools.product(["gcc", "clang"], FINDS)))
def test_sanitized_program(compiler: str, sanitizer: str, library: str) -> None:
    done = run(compiler, sanitizer, built(library))
    assert (done.returncode, done.stdout) == (0, "lived\n"), done.stderr
    found = run(compiler, sanitizer, built(library), "fault")
    assert FINDS[sanitizer] in found.stderr
