"""Records the heap profile of a program that calm runs, or of a process that runs already."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from calm.core import allocators, heap_live, pprof, proc, processes, program, report
from calm.core.allocators import CALM_OPTIONS
from calm.core.errors import USAGE, CalmError
from calm.core.heap_live import LEASE_S, Snapshot
from calm.core.heap_profile import PEAK_SPACE, HeapProfile
from calm.core.measure import signal_name
from calm.core.progress import Bar

DEFAULT_MEAN = 512 << 10
DEFAULT_FOR_S = 30.0
_STEP_S = 0.05
_ASK_S = (1, 30)
_RENEW_S = 1.0
# Snapshots, for when the process ends without a profile; they take at most one part in so many of the time.
_SNAPSHOT_S = 1.0
_SHARE = 20


@dataclass
class Series:
    """Profiles that are written on an interval: server.1.pb.gz, server.2.pb.gz and so on."""

    path: str
    each_s: float
    written: int = 0

    def write(self, profile: HeapProfile) -> None:
        """A disk that is full for a while costs these files only."""
        path = Path(self.path)
        self.written += 1
        stem, dot, endings = path.name.partition(".")
        name = f"{stem}.{self.written}{dot}{endings}"
        try:
            report.write(str(path.with_name(name)), pprof.encode(profile))
        except CalmError as error:
            report.warn(str(error))


@dataclass
class _Pace:
    """When the next snapshot is due, and the next profile of a series."""

    series: Series | None
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._next_snapshot = self.began + _SNAPSHOT_S
        self.taken = self.began
        self._next_profile = self.began + self.series.each_s if self.series else float("inf")

    def step(
        self, take: Callable[[], Snapshot], document: Callable[[Snapshot], HeapProfile]
    ) -> Snapshot | None:
        """A snapshot if one is due. Raises CalmError if the process cannot be read any more."""
        began = time.monotonic()
        if began < min(self._next_snapshot, self._next_profile):
            return None
        found = take()
        self.taken = began
        if self.series and began >= self._next_profile:
            self._next_profile += self.series.each_s
            self.series.write(document(found))
        now = time.monotonic()
        self._next_snapshot = now + max(_SNAPSHOT_S, (now - began) * _SHARE)
        return found


def _variables(mean_bytes: int, folder: str) -> dict[str, str]:
    variables = allocators.parse("calmalloc").variables(os.environ)
    options = variables.get(CALM_OPTIONS, os.environ.get(CALM_OPTIONS, ""))
    taken = [each for each in options.split(",") if each.partition("=")[0] in ("profile", "profile_file")]
    if taken:
        raise CalmError(f"{CALM_OPTIONS} has {taken[0]}: `calm heap run` sets it; leave it out", USAGE)
    more = [f"profile={mean_bytes}", f"profile_file={folder}/heap"]
    return variables | {CALM_OPTIONS: ",".join([*filter(None, [options]), *more])}


def _snapshot(pid: int) -> Snapshot:
    with heap_live.attached(pid) as process:
        return process.snapshot()


def _of_files(folder: str, root: int) -> tuple[HeapProfile | None, list[str]]:
    """The profile of the process with the highest peak, and notes."""
    found = []
    for path in Path(folder).glob("heap.*.heap"):
        with contextlib.suppress(CalmError, ValueError):
            found.append((int(path.name.split(".")[1]), pprof.Unread(str(path))))
    if not found:
        return None, []
    pid, chosen = max(found, key=lambda each: (each[1].total(PEAK_SPACE), each[0] == root))
    profile = chosen.named()
    profile.source, profile.pid = "", pid
    if len(found) == 1:
        return profile, []
    return profile, [f"{len(found)} processes wrote profiles: this is the one with the highest peak"]


def run(
    command: Sequence[str], mean_bytes: int, series: Series | None, stdout: int | None = None
) -> tuple[HeapProfile, int]:
    """Runs a program to its end: its profile and exit status. Raises CalmError if it cannot be started."""
    program.find(command[0])
    if obstacle := program.preload_obstacle(command):
        raise CalmError(obstacle, USAGE)
    last: Snapshot | None = None
    # A child that outlives the program may write a file while the others are removed.
    with tempfile.TemporaryDirectory(prefix="calm-heap-", ignore_cleanup_errors=True) as folder:
        variables = dict(os.environ) | _variables(mean_bytes, folder)
        try:
            process = subprocess.Popen(command, env=variables, stdout=stdout)
        except OSError as error:
            raise program.exec_error(command[0], error.errno or 0) from error
        pid = process.pid
        pace = _Pace(series)
        with processes.signals_passed_on(process):
            try:
                while process.poll() is None:
                    with contextlib.suppress(CalmError, OSError):
                        last = (
                            pace.step(lambda: _snapshot(pid), lambda each: heap_live.profile(pid, each))
                            or last
                        )
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_STEP_S)
            finally:
                if process.returncode is None:
                    process.kill()
                    process.wait()
        ended = time.monotonic()
        profile, notes = _of_files(folder, pid)
        code = process.returncode
        if profile is None:
            how = f"was ended by {signal_name(-code)}" if code < 0 else "ended without exit(3)"
            if last is None:
                raise CalmError(f"the program {how}, and wrote no profile")
            profile = heap_live.profile(pid, last)
            age = report.duration(ended - pace.taken)
            notes = [f"the program {how}: this is what it had about {age} before"]
    profile.command, profile.notes = list(command), [*notes, *profile.notes]
    return profile, code if code >= 0 else 128 - code


def watch(
    pid: int, for_s: float | None, mean_bytes: int | None, series: Series | None, bar: Bar
) -> tuple[HeapProfile, bool]:
    """The profile of a running process, and whether Ctrl-C ended it early.

    A profile that is on already is read at once, unless there is a time to wait for.
    """
    notes: list[str] = []
    interrupted = False
    window_s = None
    with heap_live.attached(pid) as process:
        before = found = process.snapshot()
        arguments = _command(pid)
        wanted = mean_bytes or DEFAULT_MEAN
        switched = before.mean_bytes == 0
        if switched:
            for_s = DEFAULT_FOR_S if for_s is None else for_s
        elif mean_bytes not in (None, before.mean_bytes):
            report.warn(
                f"process {pid} samples each {before.mean_bytes} bytes already: --every is not applied"
            )
        if for_s is not None:
            asked = wanted if switched else 0
            try:
                if switched:
                    _switch_on(process, asked, for_s)
                found, window_s, notes, interrupted = _wait(process, for_s, asked, series, bar)
            except _NotOnError:
                switched = False
                raise
            finally:
                if switched:
                    _switch_off(process)
        profile = heap_live.profile(pid, found, before if window_s is not None else None)
        if switched:
            notes.append("blocks allocated before the profile was on are not in it")
        profile.command, profile.window_s = arguments, window_s
        profile.notes = [*notes, *profile.notes]
        return profile, interrupted


def _command(pid: int) -> list[str]:
    """Its command line, without the empty arguments that a program leaves that has changed its title."""
    found = proc.arguments(pid)
    while found and not found[-1]:
        found.pop()
    return found


class _NotOnError(CalmError):
    """The profile could not be switched on."""


def _switch_on(process: heap_live.Process, mean_bytes: int, for_s: float) -> None:
    """Waits as long as the profile is to take, within bounds: an idle process answers late."""
    try:
        process.ask(mean_bytes, min(max(for_s, _ASK_S[0]), _ASK_S[1]))
    except CalmError as error:
        raise _NotOnError(str(error)) from error


def _switch_off(process: heap_live.Process) -> None:
    """No harm if that fails: the library ends a profile that is no longer asked for."""
    if not process.is_same():
        return
    try:
        process.ask(0)
    except CalmError as error:
        report.warn(f"{error}; the library ends the profile by itself, {LEASE_S} s from now at the latest")


def _renewed(process: heap_live.Process, mean_bytes: int) -> bool:
    """Whether the library keeps the profile on: an idle process answers when it next allocates."""
    try:
        process.ask(mean_bytes, _RENEW_S)
    except CalmError:
        return False
    return True


def _wait(
    process: heap_live.Process, for_s: float, mean_bytes: int, series: Series | None, bar: Bar
) -> tuple[Snapshot, float, list[str], bool]:
    """The last snapshot, how long it took, notes, and whether Ctrl-C ended it."""
    pace = _Pace(series)
    last = process.snapshot()
    renew = pace.began + LEASE_S / 3
    notes: list[str] = []
    interrupted = False
    try:
        while (now := time.monotonic()) < pace.began + for_s:
            bar.update(now - pace.began)
            if not process.is_same():
                raise CalmError("it has ended")
            last = pace.step(process.snapshot, lambda each: heap_live.profile(process.pid, each)) or last
            if mean_bytes and now >= renew and _renewed(process, mean_bytes):
                renew = now + LEASE_S / 3
            time.sleep(min(_STEP_S, max(0.0, pace.began + for_s - now)))
        last = process.snapshot()
    except KeyboardInterrupt:
        # Another one must not lose what is known.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupted = True
        with contextlib.suppress(CalmError):
            last = process.snapshot()
    except CalmError:
        if process.is_same():
            raise
        notes.append(f"process {process.pid} has ended: this is what it had at most a few seconds before")
    if mean_bytes and not last.mean_bytes:
        notes.append("the profile was switched off before the end of this time")
    return last, time.monotonic() - pace.began, notes, interrupted
