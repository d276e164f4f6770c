"""Which part of a program's CPU time is the allocator's, as `calm profile` samples it.

A sample is the allocator's where any function on its stack is of the allocator's library: what the kernel
does for it counts, what the program does with the memory (its first touch, too) does not.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calm.allocators import Allocator
from calm.bench.runner import clean_environment
from calm.errors import CalmError
from calm.profile.model import CPU, Profile, load

from .results import REPOSITORY
from .rounds import LONGEST_RUN_S, run_to_end, under

# A sample a millisecond or so, on each CPU; a prime.
_FREQUENCY = 997


def of_profile(profile: Profile, library: str) -> dict[str, Any]:
    """The share, and of how many samples. A file's name goes on behind the library's, by its version."""
    own = {number for number, frame in enumerate(profile.frames) if frame.module.startswith(library)}
    stacks = [stack for stack in profile.stacks if stack.kind == CPU]
    total = sum(stack.weight for stack in stacks)
    within = sum(stack.weight for stack in stacks if not own.isdisjoint(stack.frames))
    samples = sum(stack.samples for stack in stacks)
    return {"share": within / total if total else None, "samples": samples}


def measure(
    command: Sequence[str], allocator: Allocator, folder: Path, limit_s: float = LONGEST_RUN_S
) -> dict[str, Any]:
    """Profiles the program once, under the allocator; where that cannot be, there is a reason instead."""
    assert allocator.library is not None
    environment = clean_environment()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        calm = [sys.executable, "-m", "calm", "profile", "--freq", str(_FREQUENCY), "--json", file.name]
        try:
            done = run_to_end(
                [*calm, "--", *under(allocator, command, environment)],
                folder=folder,
                environment=environment | {"PYTHONPATH": str(REPOSITORY)},
                stdout=subprocess.DEVNULL,
                check=False,
                limit_s=limit_s,
            )
        except subprocess.TimeoutExpired:
            return {"share": None, "reason": f"calm profile did not end within {limit_s:g} s"}
        if done.returncode:
            return {"share": None, "reason": f"calm profile ended with {done.returncode}"}
        try:
            return of_profile(load(file.name), allocator.library.name.partition(".so")[0] + ".so")
        except CalmError as error:
            return {"share": None, "reason": str(error)}
