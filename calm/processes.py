"""Ending processes that a program has left behind, or that ran past their time."""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _parents() -> dict[int, int]:
    """Every process's parent, for those that can be seen."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # Behind the name, which may hold anything: parentheses, and half a character.
                found[int(entry.name)] = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
    return found


def descendants(root: int) -> list[int]:
    """All processes below one, the nearest first."""
    parents = _parents()
    found, known = [root], {root}
    for above in found:
        below = [pid for pid, parent in parents.items() if parent == above and pid not in known]
        found += below
        known.update(below)
    return found[1:]


def kill_descendants(root: int) -> list[int]:
    """Kills all processes below one."""
    found = descendants(root)
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return found


@contextlib.contextmanager
def whole(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str] | None,
    output: int,
    errors: int | IO[bytes],
    text: bool = False,
) -> Iterator[subprocess.Popen[Any]]:
    """A command in a session of its own, without input; waited for at the end.

    If that is left by an exception, as when its time is over or an interrupt comes, all of the session is
    killed: what runs other programs would end without them.
    """
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        text=text,
        errors="replace" if text else None,
        start_new_session=True,
    ) as process:
        try:
            yield process
        except BaseException:
            # It may have ended by itself just now.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def run_whole(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    errors: IO[bytes],
    limit_s: float,
) -> int:
    """Runs a command so, its output dropped; returns its exit code. TimeoutExpired when its time is over."""
    output = subprocess.DEVNULL
    with whole(command, folder=folder, environment=environment, output=output, errors=errors) as process:
        return process.wait(timeout=limit_s)


def end_with_parent(number: signal.Signals) -> None:
    """In a child, before it becomes a program: it gets this signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def adopt_orphans() -> None:
    """From now on what this process's descendants leave behind becomes its own child."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans() -> int:
    """Kills and reaps every descendant of this process, for when none is wanted; returns their number."""
    ended = 0
    while found := kill_descendants(os.getpid()):
        ended += len(found)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0] > 0:
                pass
    return ended
