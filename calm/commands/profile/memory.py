"""The memory of a process and its descendants over time: RSS often, dirty memory and huge pages rarely.

A thread samples it, and the allocator, and takes at most a fixed share of one CPU's time: the more a sample
costs, the longer the thread waits for the next one. /proc/PID/smaps_rollup walks the page tables with the
address space locked, so it has shares of its own: of CPU time, and of wall time, which is mostly spent
waiting for that lock.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

from calm.core import proc, proc_maps
from calm.core.profile_model import Curve

INTERVAL_S = 0.01
# Of the time, for each of four things: RSS, descendants, smaps_rollup and the allocator.
_SHARE = 0.005
_SHARE_WITH_WAITING = 0.05
_SLOWER_AFTER_S = 5.0
# A curve of more points loses every second one, and its samples become half as frequent.
_MAX_POINTS = 4000
UNREADABLE = (OSError, ValueError, IndexError, proc.GoneError)


class _Points:
    """A curve that grows."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.kib: list[float] = []
        self.min_s = 0.0

    def add(self, at_s: float, kib: float) -> None:
        self.at_s.append(at_s)
        self.kib.append(kib)
        if len(self.at_s) > _MAX_POINTS:
            self.min_s = 2 * (self.at_s[-1] - self.at_s[0]) / len(self.at_s)
            del self.at_s[1::2], self.kib[1::2]

    def curve(self) -> Curve:
        return Curve([round(at, 4) for at in self.at_s], self.kib)


class Sampler:
    """Samples memory until it is stopped, and calls `tick` each time."""

    def __init__(
        self,
        root: int,
        tick: Callable[[], None] = lambda: None,
        before: str = "",
        *,
        of_production: bool = False,
    ) -> None:
        """before: a program that runs until the observed one does, and whose allocator does not count.

        of_production: one that others wait for, which is not to be stalled by smaps_rollup.
        """
        self.root = root
        self._of_production = of_production
        self.cpu_s = 0.0
        self.samples = 0
        self.allocator = "unknown"
        self._tick = tick
        self._points = {name: _Points() for name in ("rss", "dirty", "huge")}
        self._stop = threading.Event()
        self._begin = 0.0
        self._family = [root]
        self._parents: dict[int, int] = {}
        self._before, self._program = before, ""
        self._read_maps = self._pause_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, begin: float) -> None:
        """begin: the moment that is 0 on the curves, by the monotonic clock."""
        self._begin = begin
        # Signals are for the thread that waits for the program's end.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def curves(self) -> dict[str, Curve]:
        return {name: points.curve() for name, points in self._points.items() if points.at_s}

    def _parent(self, pid: int) -> int:
        """As first read: it changes when the parent ends, and then the two share no memory."""
        if pid not in self._parents:
            found = proc.stat_or_none(pid)
            self._parents[pid] = found.parent if found else 0
        return self._parents[pid]

    def _rss_kib(self) -> int:
        sizes = {}
        for pid in self._family:
            with contextlib.suppress(*UNREADABLE):
                sizes[pid] = proc.statm(pid)
        # A child that still shares its parent's memory has the same sizes; two workers may have, too.
        numbers = Counter(sizes.values())
        return proc.PAGE_KIB * sum(
            size[1]
            for pid, size in sizes.items()
            if numbers[size] == 1 or sizes.get(self._parent(pid)) != size
        )

    # Each of the actions below returns the time until it is due again, at least.

    def _sample_rss(self, now: float) -> float:
        if kib := self._rss_kib():
            self.samples += 1
            self._points["rss"].add(now - self._begin, kib)
        return self._points["rss"].min_s

    def _sample_rollup(self, now: float) -> float:
        dirty = huge = 0
        for pid in self._family:
            with contextlib.suppress(*UNREADABLE):
                if self._of_production and proc.rss_kib(pid) > proc.MAX_ROLLUP_KIB:
                    return 1.0
                sizes = proc.rollup(pid)
                dirty += sizes.get("Private_Dirty", 0) + sizes.get("Shared_Dirty", 0)
                huge += sizes.get("AnonHugePages", 0)
        if dirty or huge:
            self._points["dirty"].add(now - self._begin, dirty)
            self._points["huge"].add(now - self._begin, huge)
        waited_s = time.monotonic() - now
        return max(0.05, self._points["dirty"].min_s, waited_s / _SHARE_WITH_WAITING)

    def _find_allocator(self, now: float) -> float:
        """By the mappings, read more and more rarely because libraries are loaded one by one."""
        program = proc.executable(self.root)
        if program in ("", self._before):
            return 0.0
        if program != self._program:
            self.allocator, self._program = "unknown", program
            self._read_maps, self._pause_s = now, INTERVAL_S
        if now >= self._read_maps:
            self._read_maps, self._pause_s = now + self._pause_s, 2 * self._pause_s
            # A process that is ending has no mappings any more.
            with contextlib.suppress(*UNREADABLE):
                self.allocator = proc_maps.allocator(proc.files(self.root)) or self.allocator
        return 0.0

    def _find_family(self, _: float) -> float:
        self._family = [self.root, *proc.descendants(self.root)]
        return 0.1

    def _run(self) -> None:
        # A short program has ended before its descendants are looked up, for which all of /proc is read.
        start = time.monotonic() + 0.02
        due = {
            self._find_family: start + 0.03,
            self._sample_rss: 0.0,
            self._find_allocator: 0.0,
            self._sample_rollup: start,
        }
        while not self._stop.is_set():
            self._tick()
            for action, moment in due.items():
                if (now := time.monotonic()) >= moment:
                    before_s = time.thread_time()
                    pause_s = action(now)
                    due[action] = time.monotonic() + max(pause_s, (time.thread_time() - before_s) / _SHARE)
            self.cpu_s = time.thread_time()
            slower = time.monotonic() >= self._begin + _SLOWER_AFTER_S
            self._stop.wait(2 * INTERVAL_S if slower else INTERVAL_S)
        self.cpu_s = time.thread_time()
