"""The memory of a process and its descendants over time: RSS often, what is dirty or in huge pages rarely.

A thread of calm's own reads it, and takes at most a set share of one CPU's time: whatever a look costs, the
next one waits long enough. /proc/PID/smaps_rollup walks the page tables with the address space locked, so it
gets shares of its own: of CPU time, and by the clock, in which it mostly waits for a lock that others hold.
"""

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from calm import processes
from calm.profile.model import Curve

INTERVAL_S = 0.01
# Of the time, for each of three things: resident sizes, children, and what is dirty.
_SHARE = 0.005
_SHARE_WITH_WAITING = 0.05
_SLOWER_AFTER_S = 5.0
_PAGE_KIB = os.sysconf("SC_PAGESIZE") // 1024
# No more points than this: then every second one goes, and looks become half as frequent.
_POINTS = 4000


class _Points:
    """A curve that grows."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.kib: list[float] = []
        self.least_s = 0.0

    def add(self, at_s: float, kib: float) -> None:
        self.at_s.append(at_s)
        self.kib.append(kib)
        if len(self.at_s) > _POINTS:
            self.least_s = 2 * (self.at_s[-1] - self.at_s[0]) / len(self.at_s)
            del self.at_s[1::2], self.kib[1::2]

    def curve(self) -> Curve:
        return Curve([round(at, 4) for at in self.at_s], self.kib)


def _rollup(pid: int) -> tuple[int, int] | None:
    """KiB that are dirty, and in huge pages."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:] if ":" in line)

    def kib(name: str) -> int:
        return int(fields.get(name, "0").split()[0])

    return kib("Private_Dirty") + kib("Shared_Dirty"), kib("AnonHugePages")


class Sampler:
    """Looks at the memory until it is stopped."""

    def __init__(self, root: int, tick: Callable[[], None] = lambda: None) -> None:
        self.root = root
        self._tick = tick
        self.cpu_s = 0.0
        self.looks = 0
        self._points = {name: _Points() for name in ("rss", "dirty", "huge")}
        self._stop = threading.Event()
        self._begin = 0.0
        self._family = [root]
        self._parents: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, begin: float) -> None:
        """begin: the moment that is 0 on the curves, by the monotonic clock."""
        self._begin = begin
        # The program's end, and what stops it, are signals for the thread that waits for them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def stop(self) -> None:
        """Ends it."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def curves(self) -> dict[str, Curve]:
        """Those that have points."""
        return {name: points.curve() for name, points in self._points.items() if points.at_s}

    def _parent(self, pid: int) -> int:
        """As first read: it changes when the parent ends, and then nothing is shared with it."""
        if pid not in self._parents:
            self._parents[pid] = 0
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
                self._parents[pid] = int(text.rpartition(")")[2].split()[1])
        return self._parents[pid]

    def _rss_kib(self) -> int | None:
        pages = {}
        for pid in self._family:
            with contextlib.suppress(OSError):
                pages[pid] = Path(f"/proc/{pid}/statm").read_text().split()[:3]
        # A child that still shares its parent's memory has the same figures; two workers may have, too.
        numbers = Counter(map(tuple, pages.values()))
        total = sum(
            int(each[1])
            for pid, each in pages.items()
            if numbers[tuple(each)] == 1 or pages.get(self._parent(pid)) != each
        )
        return total * _PAGE_KIB if total else None

    def _look_closely(self, now: float) -> None:
        found = [rollup for pid in self._family if (rollup := _rollup(pid)) is not None]
        if found and any(any(rollup) for rollup in found):
            self._points["dirty"].add(now - self._begin, sum(dirty for dirty, _ in found))
            self._points["huge"].add(now - self._begin, sum(huge for _, huge in found))

    def _run(self) -> None:
        next_look = 0.0
        # Looking for children reads all of /proc; a short program has gone by then.
        next_close = time.monotonic() + 0.02
        next_family = next_close + 0.03
        while not self._stop.is_set():
            self._tick()
            now = time.monotonic()
            if now >= next_family:
                before_s = time.thread_time()
                self._family = [self.root, *processes.descendants(self.root)]
                next_family = time.monotonic() + max(0.1, (time.thread_time() - before_s) / _SHARE)
            begun = time.monotonic()
            if begun >= next_look:
                before_s = time.thread_time()
                kib = self._rss_kib()
                if kib is not None:
                    self.looks += 1
                    self._points["rss"].add(begun - self._begin, kib)
                next_look = begun + max(self._points["rss"].least_s, (time.thread_time() - before_s) / _SHARE)
            if (now := time.monotonic()) >= next_close:
                before_s = time.thread_time()
                self._look_closely(now)
                end = time.monotonic()
                spent_s = time.thread_time() - before_s
                pause_s = max(spent_s / _SHARE, (end - now) / _SHARE_WITH_WAITING)
                next_close = end + max(0.05, self._points["dirty"].least_s, pause_s)
            self.cpu_s = time.thread_time()
            self._stop.wait(INTERVAL_S if now < self._begin + _SLOWER_AFTER_S else 2 * INTERVAL_S)
        self.cpu_s = time.thread_time()
