"""Takes a look at processes each interval, and makes rates of what was counted between two looks."""

import fnmatch
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from calm import machine, mapped
from calm.measure import SYSCALLS
from calm.top import figures, system
from calm.top.events import INTERRUPTS, SHOOTDOWNS, Counting, Events

# Of the time, for what is dear: walking a process's pages, and searching processes for libraries.
_SHARE = 0.02
# Of all processes, so many at a time have their shootdowns and calls counted: those that do most.
COUNTED_MOST = 20
_SEARCH_AGAIN_S = 5.0
STATES = {0: "starting", 1: "governs", 2: "left to glibc"}


@dataclass
class Row:
    """One process in one interval. None: not known, and `reasons` says why. Rates are by the second."""

    pid: int
    name: str
    command: str
    threads: int
    rss_kib: int
    change_kib: int | None = None
    user_percent: float | None = None
    system_percent: float | None = None
    minor_faults: float | None = None
    major_faults: float | None = None
    shootdowns: float | None = None
    interrupts: float | None = None
    calls: float | None = None
    calls_each: dict[str, float] = field(default_factory=dict)
    huge_kib: int | None = None
    swap_kib: int | None = None
    allocator: str | None = None
    purges: float | None = None
    purged_bytes: float | None = None
    retained_bytes: int | None = None
    limit_bytes: int | None = None
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As a line of JSON has it."""
        fields = {k: round(v, 3) if isinstance(v, float) else v for k, v in vars(self).items()}
        return fields | {"calls_each": {name: round(rate, 3) for name, rate in self.calls_each.items()}}


@dataclass
class Snapshot:
    """What one interval showed."""

    when: float
    interval_s: float
    rows: list[Row]
    ended: list[tuple[int, str]]
    own_percent: float
    tlb_interrupts: float | None
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """As a line of JSON has it."""
        return {
            "time": round(self.when, 3),
            "interval_s": round(self.interval_s, 6),
            "own_cpu_percent": round(self.own_percent, 3),
            "system_wide_tlb_interrupts": None
            if self.tlb_interrupts is None
            else round(self.tlb_interrupts, 3),
            "processes": [row.as_dict() for row in self.rows],
            "ended": [{"pid": pid, "name": name} for pid, name in self.ended],
            "notes": self.notes,
        }


class _Process:
    """What is kept of a process between two looks."""

    def __init__(self, first: system.Stat, now: float) -> None:
        self.stat = first
        self.at = now
        self.command = ""
        self.tables: list[figures.Table] = []
        self.paths: list[str] = []
        self.why_no_tables = ""
        self.refused = ""
        self.searched = False
        self.search_at = 0.0
        self.values: dict[str, dict[str, int]] = {}
        self.counting: Counting | None = None
        self.why_not_counted = ""
        self.counted: dict[str, int] = {}
        self.counted_at = 0.0
        self.rollup: dict[str, int] | None = None
        self.why_no_rollup = ""
        self.rollup_at = 0.0
        self.busy = system.cpu_percent_so_far(first)


class Sampler:
    """Looks at the processes that `choose` names."""

    def __init__(self, choose: Callable[[], Sequence[int]], every: bool, calls: bool = True) -> None:
        self._choose = choose
        self._every = every
        self._known: dict[int, _Process] = {}
        self._finder = figures.Finder()
        self._events = Events() if calls else Events((SHOOTDOWNS, INTERRUPTS))
        self._why_no_calls = "" if calls else "not asked for"
        self._broadcast = machine.broadcast_here()
        self._at = time.monotonic()
        self._cpu = _own_cpu()
        self._tlb = machine.tlb_interrupts()
        self._ended: list[tuple[int, str]] = []

    def close(self) -> None:
        """Closes the counters."""
        for process in self._known.values():
            self._stop_counting(process)
        self._events.close()

    def look(self) -> Snapshot:
        """Of the processes there are now. The first look has no rates."""
        self._ended = []
        now = time.monotonic()
        rows = [row for pid in self._choose() if (row := self._look_at(pid))]
        present = {row.pid for row in rows}
        for pid in [pid for pid in self._known if pid not in present]:
            process = self._known.pop(pid)
            self._stop_counting(process)
            self._ended.append((pid, process.stat.name))
        self._choose_counted()
        return self._snapshot(now, rows)

    def _snapshot(self, now: float, rows: list[Row]) -> Snapshot:
        elapsed = max(now - self._at, 1e-9)
        cpu, tlb = _own_cpu(), machine.tlb_interrupts()
        snapshot = Snapshot(
            when=time.time(),
            interval_s=elapsed,
            rows=rows,
            ended=self._ended,
            own_percent=100 * (cpu - self._cpu) / elapsed,
            tlb_interrupts=(tlb - self._tlb) / elapsed if tlb is not None and self._tlb is not None else None,
            notes=self._notes(),
        )
        self._at, self._cpu, self._tlb = now, cpu, tlb
        return snapshot

    def _notes(self) -> list[str]:
        notes = [self._broadcast.note] if self._broadcast else []
        reasons = list(dict.fromkeys(self._events.reasons.values()))
        if reasons:
            notes.append(
                f"shootdowns and calls of a process are not counted: {'; '.join(reasons)}; "
                "the TLB interrupts above are those of all processes"
            )
        if not self._events.threads_only:
            notes.append("this kernel counts the children that a process starts with it (Linux before 5.13)")
        if self._every and not reasons:
            notes.append(f"shootdowns and calls are counted in the {COUNTED_MOST} busiest processes")
        return notes

    def _look_at(self, pid: int) -> Row | None:
        try:
            stat = system.stat(pid)
        except (system.GoneError, OSError, ValueError):
            return None
        if stat.has_ended or (self._every and stat.is_kernel):
            return None
        now = time.monotonic()
        known = self._known.get(pid)
        if known is not None and known.stat.identity[0] != stat.identity[0]:
            # Another process of the same number.
            self._stop_counting(known)
            self._ended.append((pid, known.stat.name))
            known = None
        if known is None:
            known = self._known[pid] = _Process(stat, now)
            known.command = system.command_line(pid)
            before = None
        else:
            before = known.stat
            if before.identity != stat.identity:
                known.searched = False
                known.values = {}
                known.command = system.command_line(pid)
        row = Row(pid, stat.name, known.command or stat.name, stat.threads, stat.rss_kib)
        if before is not None:
            elapsed = max(now - known.at, 1e-9)
            row.change_kib = stat.rss_kib - before.rss_kib
            row.user_percent = 100 * (stat.user_s - before.user_s) / elapsed
            row.system_percent = 100 * (stat.system_s - before.system_s) / elapsed
            row.minor_faults = (stat.minor_faults - before.minor_faults) / elapsed
            row.major_faults = (stat.major_faults - before.major_faults) / elapsed
            known.busy = 0.5 * known.busy + row.user_percent + row.system_percent + row.minor_faults / 100
        self._read_events(known, row, now)
        self._read_rollup(known, row, now)
        self._read_tables(known, row, now)
        known.stat, known.at = stat, now
        return row

    def _read_events(self, known: _Process, row: Row, now: float) -> None:
        if known.counting is None:
            uncounted = "not among the busiest processes" if self._every else "counted from now on"
            why = known.why_not_counted or uncounted
            row.reasons["shootdowns"] = row.reasons["interrupts"] = row.reasons["calls"] = why
            return
        counted = known.counting.read()
        elapsed = max(now - known.counted_at, 1e-9)
        rates = {name: (value - known.counted[name]) / elapsed for name, value in counted.items()}
        known.counted, known.counted_at = counted, now
        row.calls_each = {name: rates[name] for name in SYSCALLS if name in rates}
        row.calls = sum(row.calls_each.values()) if row.calls_each else None
        if row.calls is None:
            row.reasons["calls"] = self._why_no_calls or next(iter(self._events.reasons.values()), "")
        if self._broadcast and self._broadcast.always:
            row.reasons["shootdowns"] = row.reasons["interrupts"] = self._broadcast.note
        else:
            row.shootdowns, row.interrupts = rates.get(SHOOTDOWNS), rates.get(INTERRUPTS)
        row.reasons |= {name: why for name, why in self._events.reasons.items() if name not in rates}

    def _read_rollup(self, known: _Process, row: Row, now: float) -> None:
        if now >= known.rollup_at:
            begin = time.thread_time()
            try:
                known.rollup, known.why_no_rollup = system.rollup(row.pid), ""
            except (system.GoneError, OSError) as error:
                known.rollup = None
                known.why_no_rollup = (
                    "another user's process: needs root" if isinstance(error, PermissionError)
                    else "the kernel does not say"
                )  # fmt: skip
            # All processes together take no more than their share.
            cost = time.thread_time() - begin
            known.rollup_at = now + cost * max(1, len(self._known)) / _SHARE
        if known.rollup is None:
            row.reasons["huge_kib"] = known.why_no_rollup
            return
        names = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")
        row.huge_kib = sum(known.rollup.get(name, 0) for name in names)
        row.swap_kib = known.rollup.get("Swap")

    def _search(self, known: _Process, pid: int, now: float) -> None:
        known.searched = True
        begin = time.thread_time()
        known.tables, known.why_no_tables, known.refused, known.paths = [], "", "", []
        try:
            mapped = figures.images(pid)
            known.paths = [image.path for image in mapped]
            known.tables, known.why_no_tables = self._finder.tables(pid, mapped)
        except figures.UnreadableError as error:
            known.refused = str(error)
        pause = (time.thread_time() - begin) * max(1, len(self._known)) / _SHARE
        known.search_at = now + (pause if known.tables else max(_SEARCH_AGAIN_S, pause))

    def _read_tables(self, known: _Process, row: Row, now: float) -> None:
        # A process may have been caught before its libraries were loaded, or their tables relocated.
        if not known.searched or (not any(known.values.values()) and now >= known.search_at):
            self._search(known, row.pid, now)
        values: dict[str, dict[str, int]] = {}
        try:
            read = figures.reader_of(row.pid)
            values = {table.library: table.values(read) for table in known.tables}
        except figures.UnreadableError as error:
            known.refused = str(error)
        if known.paths:
            # Our own say so themselves.
            row.allocator = next(iter(values), None) or mapped.allocator(known.paths) or "unknown"
        elif known.refused:
            row.reasons["allocator"] = known.refused
        if not values:
            row.reasons["counters"] = (
                known.refused or known.why_no_tables or "neither calmalloc nor ptlbmalloc2 is in it"
            )
        elapsed = max(now - known.at, 1e-9)
        for library, now_has in values.items():
            _summarize(row, library, now_has, known.values.get(library), elapsed)
        row.counters = known.values = values

    def _stop_counting(self, process: _Process) -> None:
        if process.counting is not None:
            self._events.detach(process.counting)
            process.counting = None

    def _choose_counted(self) -> None:
        """Starts counters where there are none yet: in every process, or in those that do most."""
        chosen = list(self._known.items())
        if self._every:
            # One that is counted already stays, as long as no other does clearly more.
            chosen.sort(
                key=lambda item: (item[1].busy + (item[1].counting is not None), item[1].stat.rss_kib),
                reverse=True,
            )
            for _, process in chosen[COUNTED_MOST:]:
                self._stop_counting(process)
        for pid, process in chosen[:COUNTED_MOST] if self._every else chosen:
            if process.counting is None:
                process.counting, process.why_not_counted = self._events.attach(pid)
                if process.counting is not None:
                    process.counted = process.counting.read()
                    process.counted_at = time.monotonic()


def _summarize(
    row: Row, library: str, now: dict[str, int], before: dict[str, int] | None, elapsed: float
) -> None:
    """What both libraries have: how much they gave back, what they keep, and how much they may."""
    purges: tuple[str, ...]
    if library == "calmalloc":
        purges = ("purges", "purges_timed", "purges_asked")
        purged, kept, limit = "purged", "retained", "retained_limit"
    elif library == "ptlbmalloc2":
        purges, purged, kept, limit = ("trims",), "bytes_trimmed", "free_top_bytes", "threshold_bytes"
        row.allocator = (
            library if now.get("state") == 1 else f"glibc ({library} {STATES.get(now.get('state', 0))})"
        )
    else:
        return
    row.retained_bytes, row.limit_bytes = now.get(kept), now.get(limit)
    if before is not None and all(name in now and name in before for name in (*purges, purged)):
        row.purges = max(0, sum(now[name] - before[name] for name in purges)) / elapsed
        row.purged_bytes = max(0, now[purged] - before[purged]) / elapsed


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _began(pid: int) -> int | None:
    try:
        return system.stat(pid).identity[0]
    except (system.GoneError, OSError, ValueError):
        return None


def chosen_by_pid(pids: Sequence[int]) -> Callable[[], Sequence[int]]:
    """Those that have these numbers now, and none that gets one later."""
    began = {pid: _began(pid) for pid in pids}
    return lambda: [pid for pid in pids if began[pid] is not None and _began(pid) == began[pid]]


def chosen_by_name(pattern: str) -> Callable[[], Sequence[int]]:
    """All whose name, or whose program's, is so; `*` and `?` stand for others."""

    def choose() -> Sequence[int]:
        found = []
        for pid in system.processes():
            if pid == os.getpid():
                continue
            try:
                name = system.stat(pid).name
            except (system.GoneError, OSError, ValueError):
                continue
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(system.program(pid), pattern):
                found.append(pid)
        return found

    return choose
