"""Chooses running processes, and ends those that remain after the programs that calm runs."""

import contextlib
import ctypes
import fnmatch
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence

from calm.core import proc

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def chosen_by_pid(pids: Sequence[int]) -> Callable[[], Sequence[int]]:
    """Those that have these numbers now, and none that gets one later."""
    first = {pid: stat.started_ticks for pid in pids if (stat := proc.stat_or_none(pid))}

    def choose() -> Sequence[int]:
        stats = [stat for pid in first if (stat := proc.stat_or_none(pid))]
        return [stat.pid for stat in stats if stat.started_ticks == first[stat.pid]]

    return choose


def chosen_by_name(pattern: str) -> Callable[[], Sequence[int]]:
    """All with this name, or whose program's file has it; `*` and `?` match any characters."""
    matches = re.compile(fnmatch.translate(pattern)).match

    def has_it(stat: proc.Stat) -> bool:
        if matches(stat.name):
            return True
        with contextlib.suppress(proc.GoneError, OSError):
            arguments = [] if stat.is_kernel else proc.arguments(stat.pid)
            return bool(arguments and matches(arguments[0].rsplit("/", 1)[-1]))
        return False

    def choose() -> Sequence[int]:
        stats = [stat for pid in proc.pids() if pid != os.getpid() and (stat := proc.stat_or_none(pid))]
        return [stat.pid for stat in stats if has_it(stat)]

    return choose


def chosen(pids: Sequence[int], name: str | None) -> Callable[[], Sequence[int]]:
    """Those with these numbers, or with this name, or all. Raises CalmError for a number without one."""
    for pid in pids:
        proc.check(pid)
    if pids:
        return chosen_by_pid(pids)
    return proc.pids if name is None else chosen_by_name(name)


def kill_descendants(root: int) -> list[int]:
    """Kills all processes below one; returns those that it may kill, and not those of other users."""
    killed = []
    for pid in proc.descendants(root):
        with contextlib.suppress(PermissionError):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


def end_with_parent(number: signal.Signals) -> None:
    """In a child, before it becomes a program: it gets this signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


@contextlib.contextmanager
def signals_passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Passes signals that would end calm on to a program. A terminal sends SIGINT to both already."""

    def pass_on(number: int, _: object) -> None:
        if number != signal.SIGINT:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    kept = {
        number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def adopt_orphans() -> None:
    """From now on what this process's descendants leave behind becomes its own child."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans() -> int:
    """Kills and reaps every descendant of this process, for when none is wanted; returns their number."""
    ended = 0
    while found := kill_descendants(os.getpid()):
        ended += len(found)
        # Only those that were killed: a child that one of them has just started is alive, and next.
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    return ended
