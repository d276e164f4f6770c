"""Runs a program with libcalmcolors.so preloaded before its allocator, and samples it until it ends.

The program is sampled at intervals; before a large block is freed, if large blocks are an eighth more than at
the last such sample; and at its end, which it delays for that. Of the samples of all its processes, the one
with the most large memory is kept.
"""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from calm.core import proc, processes, program
from calm.core.allocators import Allocator
from calm.core.errors import CalmError
from research.colors import records, sample
from research.colors.records import Records
from research.colors.sample import Sample

_PRELOAD = "LD_PRELOAD"
_EACH_S = 0.005
# Samples at intervals take at most one part in so many of the time.
_SHARE = 20
INTERVAL = "interval"


def _resident_bytes(pid: int) -> int:
    """Resident memory, with that in hugetlbfs."""
    fields = proc.status(pid)
    return sum(int(fields.get(name, "0").split()[0]) for name in ("VmRSS", "HugetlbPages")) * 1024


class Watch:
    """The samples of a program, and what is known of its end."""

    def __init__(self, root: int, place: str, min_bytes: int, interval_s: float) -> None:
        self.root = root
        self.best: Sample | None = None
        """The sample with the most large memory."""
        self.samples = 0
        self.seen = {root}
        """The program's first process, and those that recorded their blocks."""
        self.elsewhere: set[int] = set()
        """Processes in PID namespaces of their own, which cannot be sampled."""
        self.status = 0
        """The exit status of the program, or the negative number of the signal that ended it."""
        self.began = self.next = time.monotonic()
        self.wall_s = 0.0
        self.folder = records.Folder(Path(place))
        self._place = os.path.realpath(place)
        self._min_bytes, self._interval_s = min_bytes, interval_s
        self._root_ends = False

    def tick(self) -> None:
        """Answers waiting processes, and samples all of them if an interval is over."""
        found = self.folder.scan()
        for each in found:
            if moment := each.asked():
                number = each.begin()
                taken = False
                try:
                    taken = self._take_recorded(each, moment)
                finally:
                    each.done(number)
                if moment == records.EXIT:
                    self.folder.forget(each.pid)
                    self._root_ends |= taken and each.pid == self.root
        began = time.monotonic()
        if began < self.next:
            return
        sampled = {each.pid for each in found if self._take_recorded(each, INTERVAL)}
        # Once its records are gone, calm's own part of its memory is not known either.
        if self.root not in sampled and not self._root_ends:
            self._take(self.root, INTERVAL, None)
        now = time.monotonic()
        self.next = now + max(self._interval_s, (now - began) * _SHARE)

    def _take_recorded(self, found: Records, moment: str) -> bool:
        """Samples the process of these records; returns whether it was found."""
        if found.is_of(found.pid):
            self.seen.add(found.pid)
            self._take(found.pid, moment, found)
            return True
        # Between two programs a process maps no records. One that waits exists, but has another number here.
        if moment != INTERVAL:
            self.elsewhere.add(found.pid)
        return False

    def _take(self, pid: int, moment: str, found: Records | None) -> None:
        best = self.best.weight if self.best else (0, 0)
        # A process that has ended shows nothing, or less than it had.
        with contextlib.suppress(CalmError, OSError):
            if pid != self.root and _resident_bytes(pid) < best[0]:
                return
            blocks, lost = (found.blocks(), found.lost) if found else (None, 0)
            taken = sample.take(pid, moment, self._min_bytes, blocks, lost=lost, own=self._place)
            self.samples += 1
            if taken.regions and (self.best is None or taken.weight > best):
                self.best = taken


def run(
    command: Sequence[str], allocator: Allocator, min_bytes: int, interval_s: float, stdout: int | None = None
) -> Watch:
    """Runs the program to its end. Raises CalmError if it cannot be started."""
    program.find(command[0])
    room = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
    # A child that outlives the program may create a file while the others are removed.
    with tempfile.TemporaryDirectory(prefix="calm-colors-", dir=room, ignore_cleanup_errors=True) as place:
        variables = dict(os.environ) | allocator.variables(os.environ)
        preload = [str(records.library()), *filter(None, [variables.get(_PRELOAD)])]
        variables |= {_PRELOAD: ":".join(preload), records.FOLDER: place, records.MIN_BYTES: str(min_bytes)}
        began = time.monotonic()
        try:
            process = subprocess.Popen(command, env=variables, stdout=stdout)
        except OSError as error:
            raise program.exec_error(command[0], error.errno or 0) from error
        watch = Watch(process.pid, place, min_bytes, interval_s)
        # The first sample is not of the dynamic linker.
        watch.began, watch.next = began, began + min(interval_s, 0.1)
        with processes.signals_passed_on(process):
            try:
                while process.poll() is None:
                    watch.tick()
                    time.sleep(_EACH_S)
            finally:
                watch.folder.close()
                if process.returncode is None:
                    process.kill()
                    process.wait()
    watch.wall_s, watch.status = time.monotonic() - began, process.returncode
    return watch
