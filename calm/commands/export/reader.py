"""Reads the counters of processes at the time of a scrape, without stopping them or waiting for them.

Finding a library in a process costs most, and is done once for each process, which is identified by its
number, its start and the program that it executes. Afterwards, a scrape reads two files of /proc and some
words of memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from calm.commands.export.metrics import GOVERNS, LIBRARIES, PTLBMALLOC2, REASONS, Library, Number, Process
from calm.core import counters, event_counters, machine, proc
from calm.core.counters import Table
from calm.core.event_counters import SHOOTDOWNS, Counting, Events

MAX_PROCESSES = 1000
"""Bounds the number of series, and the time of a scrape."""
_MAX_NAME = 64
_CAP_SYS_PTRACE = 1 << 19
# A scrape that finds another one still under way after this time is refused.
_TIMEOUT_S = 5.0


class BusyError(Exception):
    """Another scrape does not end."""


@dataclass
class Snapshot:
    """All that one scrape has read."""

    at_s: float
    """In seconds since 1970."""
    processes: list[Process]
    own: dict[str, Number]
    """The counters of the exporter itself."""


@dataclass
class _Known:
    """What is remembered of a process between scrapes."""

    image: tuple[int, int, str]
    executable: str
    command: str
    tables: list[Table] = field(default_factory=list)
    reason: str = ""
    """Why a table that may be there cannot be used, as a value of calm.export.reason."""
    why: str = ""
    """The same for the user."""
    is_settled: bool = False
    """Whether another search would find the same."""
    counting: Counting | None = None
    was_counting_tried: bool = False


class Reader:
    """Reads the processes that `choose` returns.

    `every`: they are all processes of the machine. Then only those that have a table are exported, and only
    those of this user unless the exporter may read others.
    """

    def __init__(self, choose: Callable[[], Iterable[int]], every: bool, shootdowns: bool = True) -> None:
        self._choose = choose
        self._every = every
        self._known: dict[int, _Known] = {}
        self._finder = counters.Finder()
        broadcast = machine.broadcast_here()
        self._events = Events((SHOOTDOWNS,) if shootdowns and not (broadcast and broadcast.always) else ())
        self._lock = threading.Lock()
        self._latest: Snapshot | None = None
        self._latest_begin = 0.0
        self.failures: Counter[str] = Counter()
        """Of the exporter's outputs: for its own metrics."""
        self._scrapes = 0
        capabilities = int(proc.status(os.getpid()).get("CapEff", "0"), 16)
        self.reads_others: bool = os.geteuid() == 0 or bool(capabilities & _CAP_SYS_PTRACE)
        self._boot_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)

    def close(self) -> None:
        for known in self._known.values():
            self._stop_counting(known)
        self._events.close()

    def read(self) -> Snapshot:
        """One scrape. Several threads may call it; those that wait share the next one. Raises BusyError."""
        called = time.monotonic()
        if not self._lock.acquire(timeout=_TIMEOUT_S):
            raise BusyError
        try:
            if self._latest is None or self._latest_begin < called:
                self._latest_begin = time.monotonic()
                self._latest = self._read_all()
            return self._latest
        finally:
            self._lock.release()

    def why_unreadable(self, pid: int) -> str:
        """Why the counters of a process cannot be read; "" where they can, or where there are none."""
        return known.why if (known := self._known.get(pid)) else ""

    def lacks_library(self, pid: int) -> bool:
        """Whether neither library is in a process that was read. False while it may not be loaded yet."""
        known = self._known.get(pid)
        return known is not None and known.is_settled and not known.tables and not known.why

    def _read_all(self) -> Snapshot:
        begin = time.monotonic()
        found: list[Process] = []
        unreadable: Counter[str] = Counter()
        seen: set[int] = set()
        for pid in self._choose():
            seen.add(pid)
            try:
                process, reason = self._read(pid, len(found) >= MAX_PROCESSES)
            except PermissionError:
                process, reason = None, "permission"
            except (proc.GoneError, OSError, ValueError, IndexError):
                known = self._known.get(pid)
                had_table = known is not None and bool(known.tables)
                process, reason = None, "ended" if had_table or not self._every else ""
                self._forget(pid)
            if process:
                found.append(process)
            if reason:
                unreadable[reason] += 1
        for pid in self._known.keys() - seen:
            self._forget(pid)
        self._scrapes += 1
        own: dict[str, Number] = {
            **dict.fromkeys(REASONS, 0),
            **unreadable,
            **self.failures,
            "processes": len(found),
            "scrapes": self._scrapes,
            "duration_s": time.monotonic() - begin,
        }
        return Snapshot(time.time(), found, own)

    def _forget(self, pid: int) -> None:
        if known := self._known.pop(pid, None):
            self._stop_counting(known)

    def _is_ours(self, pid: int) -> bool:
        return self.reads_others or os.geteuid() == (proc.PROC / str(pid)).stat().st_uid

    def _read(self, pid: int, is_full: bool) -> tuple[Process | None, str]:
        """The process if it is to be exported, and why its counters could not be read, if they could not."""
        if self._every and pid not in self._known and not self._is_ours(pid):
            return None, ""
        stat = proc.stat(pid)
        if stat.has_ended or (self._every and stat.is_kernel):
            self._forget(pid)
            return None, "" if self._every else "ended"
        known = self._known.get(pid)
        if known is None or known.image != stat.image:
            known = self._identify(known, stat)
        if not known.tables and not known.is_settled:
            self._search(known, stat)
        if self._every and not known.tables:
            return None, known.reason
        if is_full:
            return None, "limit"
        libraries = self._libraries(known, pid)
        if self._every and not libraries:
            return None, known.reason
        return Process(
            pid,
            known.executable,
            known.command,
            self._boot_s + stat.started_ticks / proc.TICKS,
            self._kernel_counters(known, stat),
            libraries,
        ), known.reason

    def _identify(self, before: _Known | None, stat: proc.Stat) -> _Known:
        """A process that is new, executes another program, or has renamed itself.

        One that renames itself keeps its first name here: each name would begin new series.
        """
        executable = _name(proc.executable(stat.pid))
        same = before is not None and (before.image[0], before.executable) == (stat.image[0], executable)
        if before is not None and same:
            before.image, before.tables, before.is_settled = stat.image, [], False
            return before
        self._forget(stat.pid)
        known = self._known[stat.pid] = _Known(stat.image, executable, _name(stat.name))
        return known

    def _search(self, known: _Known, stat: proc.Stat) -> None:
        known.reason = known.why = ""
        try:
            # Opened first: where that is refused, it is cheaper than reading maps.
            with proc.memory(stat.pid) as read:
                tables, known.why = self._finder.tables(read, counters.images(stat.pid))
                known.tables = counters.without_parents(read, tables, stat)
        except PermissionError as error:
            known.reason = "permission"
            known.why = "" if self._every else proc.refusal(stat.pid, error)
            return
        if known.why and not known.tables:
            is_other = known.why.endswith(f"this calm reads {counters.VERSION}")
            known.reason = "version" if is_other else "damaged"
        known.is_settled = _age_s(stat) > counters.YOUNG_S

    def _libraries(self, known: _Known, pid: int) -> dict[str, Library]:
        if not known.tables:
            return {}
        found: dict[str, Library] = {}
        with proc.memory(pid) as read:
            for table in known.tables:
                if table.library not in LIBRARIES or table.library in found:
                    continue
                values = table.values(read)
                if table.library == PTLBMALLOC2 and "state" in values:
                    values[GOVERNS] = int(counters.STATES.get(values["state"]) == "governs")
                if values:
                    found[table.library] = Library(_printable(table.release), values)
        if not found:
            # It was not relocated yet, or it is gone.
            known.tables = []
        return found

    def _kernel_counters(self, known: _Known, stat: proc.Stat) -> dict[str, Number]:
        size, resident, _ = proc.statm(stat.pid)
        found: dict[str, Number] = {
            "virtual": size * proc.PAGE_KIB * 1024,
            "resident": resident * proc.PAGE_KIB * 1024,
            "minor_faults": stat.minor_faults,
            "major_faults": stat.major_faults,
            "user_s": stat.user_s,
            "system_s": stat.system_s,
            "uptime_s": _age_s(stat),
        }
        if not known.was_counting_tried:
            known.was_counting_tried = True
            known.counting, _ = self._events.attach(stat.pid)
        if known.counting is not None:
            found[SHOOTDOWNS] = event_counters.read(known.counting).get(SHOOTDOWNS, 0)
        return found

    def _stop_counting(self, known: _Known) -> None:
        if known.counting is not None:
            self._events.detach(known.counting)
            known.counting = None


def _age_s(stat: proc.Stat) -> float:
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started_ticks / proc.TICKS)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _name(path: str) -> str:
    """The last part of a path, within bounds: a label's value comes from another process."""
    return _printable(path.removesuffix(" (deleted)").rsplit("/", 1)[-1])[:_MAX_NAME]
