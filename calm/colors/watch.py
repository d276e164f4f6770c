"""Runs a program with libcalmcolors.so before its allocator, and looks at it until it ends.

It is looked at every so often; before a block is freed, if large blocks are an eighth more than at the last
such look; and when it ends: then it waits until it has been seen. Of all looks, and of all its processes,
that with the most large memory counts.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from calm import program
from calm.allocators import Allocator
from calm.colors import blocks, look
from calm.colors.look import Look
from calm.errors import CalmError

_PRELOAD = "LD_PRELOAD"
_EACH_S = 0.005
# Looking takes at most one part in so many of the time, but for what is waited for.
_SHARE = 20
INTERVAL = "interval"


@dataclass
class Watched:
    """What came of a program."""

    exit_code: int
    signal: int | None
    """That ended it."""
    wall_s: float
    look: Look | None
    """The one with the most large memory."""
    at_s: float = 0.0
    """When that was, from the start."""
    looks: int = 0
    processes: int = 1
    """That were seen."""
    obstacle: str | None = None
    """Why it could not tell of its blocks."""
    elsewhere: int = 0
    """Processes that could not be found by the numbers that they know themselves by."""


@contextlib.contextmanager
def _signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """What would end calm goes to the program; the terminal sends an interrupt to both, and one is enough."""

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    kept = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGHUP)}
    kept[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _resident_bytes(pid: int) -> int:
    """All of a process's, that in hugetlbfs as well."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    sizes = [line.split()[1] for line in lines if line.startswith(("VmRSS:", "HugetlbPages:"))]
    return sum(int(size) for size in sizes) * 1024


@dataclass
class _Watch:
    """The state of watching."""

    root: int
    folder: blocks.Folder
    place: str
    least: int
    interval_s: float
    best: Look | None = None
    looks: int = 0
    seen: set[int] = field(default_factory=set)
    """Processes that have told."""
    elsewhere: set[int] = field(default_factory=set)
    """The numbers by which others know themselves, in a PID namespace of their own."""
    root_ends: bool = False
    """It has told so, and has been looked at for the last time."""
    _next: float = 0.0

    def tick(self) -> None:
        """Answers those that wait, and looks if it is time."""
        records = self.folder.look()
        for each in records:
            if moment := each.asked():
                number = each.begin()
                found = False
                try:
                    found = self._look_by(each, moment)
                finally:
                    each.done(number)
                if moment == blocks.EXIT:
                    self.folder.forget(each.pid)
                    self.root_ends |= found and each.pid == self.root
        began = time.monotonic()
        if began < self._next:
            return
        looked = {each.pid for each in records if self._look_by(each, INTERVAL)}
        # Once it tells no more, what is calm's own of its memory is not known either.
        if self.root not in looked and not self.root_ends:
            self._look(self.root, INTERVAL, None)
        now = time.monotonic()
        self._next = now + max(self.interval_s, (now - began) * _SHARE)

    def _look_by(self, records: blocks.Records, moment: str) -> bool:
        """Looks at the process whose records they are, if it can be found."""
        pid = records.pid
        if records.is_of(pid):
            self.seen.add(pid)
            self._look(pid, moment, records)
            return True
        # Between two programs a process has none. One that waits is there, though not by this number.
        if moment != INTERVAL:
            self.elsewhere.add(pid)
        return False

    def _look(self, pid: int, moment: str, records: blocks.Records | None) -> None:
        best = self.best.weight if self.best is not None else (0, 0)
        # What is resident at all is no less than what is large.
        comparable = self.best is not None and self.best.resident_known
        if pid != self.root and comparable and _resident_bytes(pid) < best[0]:
            return
        try:
            told = records.blocks() if records is not None else None
            lost = records.lost if records is not None else 0
            calms = look.Calms(os.path.realpath(self.place), *(records.own if records is not None else ()))
            found = look.take(pid, moment, self.least, told, lost=lost, calms=calms)
        except (CalmError, OSError):
            # It has just ended.
            return
        self.looks += 1
        # What has ended by now shows nothing, or what is left of it.
        if found.regions and (self.best is None or found.weight > best):
            self.best = found


def run(
    command: Sequence[str], allocator: Allocator, least: int, interval_s: float, stdout: int | None = None
) -> Watched:
    """Runs the program to its end. Raises CalmError if it cannot be started."""
    program.find(command[0])
    obstacle = program.preload_obstacle(command)
    room = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
    # A child that goes on may make a file while the others are removed.
    with tempfile.TemporaryDirectory(prefix="calm-colors-", dir=room, ignore_cleanup_errors=True) as place:
        variables = dict(os.environ) | allocator.variables(os.environ)
        preload = [str(blocks.library()), *filter(None, [variables.get(_PRELOAD)])]
        variables |= {_PRELOAD: ":".join(preload), blocks.FOLDER: place, blocks.LEAST: str(least)}
        began = time.monotonic()
        try:
            process = subprocess.Popen(command, env=variables, stdout=stdout)
        except OSError as error:
            raise program.exec_error(command[0], error.errno or 0) from error
        folder = blocks.Folder(Path(place))
        watch = _Watch(process.pid, folder, place, least, interval_s)
        with _signals(process):
            try:
                # The first look is not for the dynamic linker.
                watch._next = began + min(interval_s, 0.1)
                while process.poll() is None:
                    watch.tick()
                    time.sleep(_EACH_S)
            finally:
                folder.close()
                if process.returncode is None:
                    process.kill()
                    process.wait()
    ended = process.returncode
    return Watched(
        ended if ended >= 0 else 128 - ended,
        -ended if ended < 0 else None,
        time.monotonic() - began,
        watch.best,
        watch.best.at_s - began if watch.best is not None else 0.0,
        watch.looks,
        max(1, len(watch.seen | {process.pid})),
        obstacle,
        len(watch.elsewhere),
    )
