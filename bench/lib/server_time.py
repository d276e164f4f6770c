"""CPU time of the allocator's threads, which are named "calmalloc", while the program sleeps.

The kernel counts it in nanoseconds (schedstat); a tick would already be a thousandth of the ten seconds.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calm.core.allocators import Allocator
from calm.core.environment import clean_environment

from .results import REPOSITORY
from .rounds import CALMALLOC, note

_LOOK_S = 0.05
# The program is idle after this number of samples without CPU time of its threads.
_QUIET_LOOKS = 4
_LONGEST_WORK_S = 120


class NeverIdleError(subprocess.SubprocessError):
    """The program did not become idle, or ended before it was sampled."""


def times(task: Path) -> tuple[dict[int, int], dict[int, int]]:
    """CPU time in ns by thread, of the program's threads and of the allocator's."""
    program: dict[int, int] = {}
    allocator: dict[int, int] = {}
    for thread in task.iterdir():
        try:
            name = (thread / "comm").read_text().rstrip("\n")
            spent = int((thread / "schedstat").read_text().split()[0])
        except (OSError, IndexError, ValueError):
            continue  # it has ended
        (allocator if name == CALMALLOC else program)[int(thread.name)] = spent
    return program, allocator


def _await_rest(process: subprocess.Popen[str], task: Path) -> None:
    deadline = time.monotonic() + _LONGEST_WORK_S
    quiet, last = 0, times(task)[0]
    while quiet < _QUIET_LOOKS:
        time.sleep(_LOOK_S)
        if process.poll() is not None or time.monotonic() > deadline:
            raise NeverIdleError("it ended or went on: there was nothing to look at")
        now = times(task)[0]
        quiet = quiet + 1 if now == last else 0
        last = now


def watch(command: Sequence[str], allocator: Allocator, seconds: float) -> dict[str, Any]:
    """Runs a program that works and then sleeps for longer than these seconds, and prints JSON."""
    environment = clean_environment()
    environment |= allocator.variables(environment)
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    task = Path(f"/proc/{process.pid}/task")
    try:
        _await_rest(process, task)
        began, (_, before) = time.monotonic(), times(task)
        time.sleep(seconds)
        (_, after), lasted = times(task), time.monotonic() - began
        if process.poll() is not None:
            raise NeverIdleError("it ended while it was looked at")
        output, errors = process.communicate(timeout=_LONGEST_WORK_S)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command), output, errors)
    # A thread that started meanwhile had used no time before.
    spent = sum(ns - before.get(thread, 0) for thread, ns in after.items())
    printed: dict[str, Any] = json.loads(output)
    found = {"server_threads": len(after), "server_percent": spent * 1e-7 / lasted if after else None}
    return printed | found | note(errors)
