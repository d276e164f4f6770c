"""The allocator's share of a program's CPU time, as sampled by `calm profile`.

A sample counts as the allocator's if any function on its stack is in the allocator's library. This includes
the kernel's work for the allocator, but not the program's use of the memory, nor its first touch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calm.core import documents
from calm.core.allocators import Allocator
from calm.core.environment import clean_environment
from calm.core.errors import CalmError
from calm.core.profile_model import CPU, Profile

from .results import REPOSITORY
from .rounds import LONGEST_RUN_S, run_to_end, under

# About one sample per millisecond on each CPU; a prime.
_FREQUENCY = 997


def of_profile(profile: Profile, library: str) -> dict[str, Any]:
    """The share, and the number of samples. The version follows the library's name in a file's name."""
    own = {number for number, frame in enumerate(profile.frames) if frame.module.startswith(library)}
    stacks = [stack for stack in profile.stacks if stack.kind == CPU]
    total = sum(stack.weight for stack in stacks)
    within = sum(stack.weight for stack in stacks if not own.isdisjoint(stack.frames))
    samples = sum(stack.samples for stack in stacks)
    return {"share": within / total if total else None, "samples": samples}


def measure(
    command: Sequence[str], allocator: Allocator, folder: Path, limit_s: float = LONGEST_RUN_S
) -> dict[str, Any]:
    """Profiles the program once under the allocator. If that is impossible, returns the reason."""
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
            found = documents.read(file.name, Profile)
        except CalmError as error:
            return {"share": None, "reason": str(error)}
        return of_profile(found, allocator.library.name.partition(".so")[0] + ".so")
