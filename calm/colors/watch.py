"""Runs a program with libcalmcolors.so before its allocator, and looks at it until it ends.

It is looked at every so often; when its large blocks are about to be less than ever before, and when it ends:
then it waits until it has been seen. Of all looks, and of all its processes, that with the most large memory
counts.
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
from calm.colors import blocks, look, pagemap
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
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * pagemap.PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


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
    _next: float = 0.0

    def tick(self) -> None:
        """Answers those that wait, and looks if it is time."""
        records = self.folder.look()
        self.seen.update(each.pid for each in records)
        for each in records:
            if moment := each.asked():
                number = each.begin()
                try:
                    self._look(each.pid, moment, each)
                finally:
                    each.done(number)
                if moment == blocks.EXIT:
                    self.folder.forget(each.pid)
        began = time.monotonic()
        if began < self._next:
            return
        for each in records:
            self._look(each.pid, INTERVAL, each)
        if self.root not in self.seen:
            self._look(self.root, INTERVAL, None)
        now = time.monotonic()
        self._next = now + max(self.interval_s, (now - began) * _SHARE)

    def _look(self, pid: int, moment: str, records: blocks.Records | None) -> None:
        best = self.best.weight if self.best is not None else (0, 0)
        if pid != self.root and _resident_bytes(pid) <= best[0]:
            return
        try:
            told = records.blocks() if records is not None else None
            lost = records.lost if records is not None else 0
            found = look.take(pid, moment, self.least, told, lost=lost, not_of=self.place)
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
    with tempfile.TemporaryDirectory(prefix="calm-colors-", dir=room) as place:
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
    )
