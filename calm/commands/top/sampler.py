"""Samples processes each interval, and computes rates from two samples."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from calm.core import counters, event_counters, machine, proc
from calm.core import proc_maps as mapped
from calm.core.documents import Document
from calm.core.event_counters import RECEIVED, SHOOTDOWNS, Counting, Events
from calm.core.measure import SYSCALLS

# The share of the time for what is costly: smaps_rollup, and the search for the libraries' counters.
_SHARE = 0.02
# Of all processes, the busiest ones have their shootdowns and calls counted: so many at a time.
MAX_COUNTED = 20
_SEARCH_AGAIN_S = 5.0


class Library(NamedTuple):
    """The names of the counters that both libraries have, and of two figures in the view."""

    purges: tuple[str, ...]
    purged: str
    dirty: str
    limit: str
    dirty_label: str
    limit_label: str


LIBRARIES = {
    "calmalloc": Library(
        ("purges_limit", "purges_epoch", "purges_request"),
        *("purged", "dirty", "dirty_limit", "kept free", "limit"),
    ),
    "ptlbmalloc2": Library(
        ("trims",),
        *("bytes_trimmed", "free_top_bytes", "threshold_bytes", "free at tops", "trimmed from"),
    ),
}


class Row(msgspec.Struct):
    """One process in one interval: rates are per second. For what is null, `reasons` has the cause."""

    pid: int
    name: str
    command: list[str]
    threads: int
    rss_kib: int
    rss_change_kib: int | None = None
    user_percent: float | None = None
    system_percent: float | None = None
    minor_faults: float | None = None
    major_faults: float | None = None
    shootdowns: float | None = None
    interrupts_received: float | None = None
    calls: dict[str, float] | None = None
    huge_kib: int | None = None
    swap_kib: int | None = None
    allocator: str | None = None
    purges: float | None = None
    purged_bytes: float | None = None
    dirty_bytes: int | None = None
    limit_bytes: int | None = None
    counters: dict[str, dict[str, int]] = {}
    """The counters of calmalloc and ptlbmalloc2, by library and their own names."""
    reasons: dict[str, str] = {}


class Ended(msgspec.Struct):
    """A process that has ended since the sample before."""

    pid: int
    name: str


class Snapshot(Document, tag="calm-top", kw_only=True):
    """One interval: a line of `calm top --json`."""

    time: float
    """Of the sample, in seconds since 1970."""
    interval_s: float
    own_cpu_percent: float
    interrupts_system_wide: float | None
    processes: list[Row]
    ended: list[Ended]
    notes: list[str]


@dataclass
class _Process:
    """What is known of a process between two samples."""

    stat: proc.Stat
    at: float
    busy: float
    rss_kib: int = 0
    command: list[str] = field(default_factory=list)
    tables: list[counters.Table] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    why_no_counters: str = ""
    search_at: float = 0.0
    values: dict[str, dict[str, int]] = field(default_factory=dict)
    counting: Counting | None = None
    why_not_counted: str = ""
    counted: dict[str, int] = field(default_factory=dict)
    counted_at: float = 0.0
    rollup: dict[str, int] | None = None
    swap_kib: int | None = None
    why_no_rollup: str = ""
    rollup_at: float = 0.0


class Sampler:
    """Samples the processes that `choose` returns; `every`: these are all processes of the machine."""

    def __init__(self, choose: Callable[[], Sequence[int]], every: bool, calls: bool = True) -> None:
        self._choose = choose
        self._every = every
        self._known: dict[int, _Process] = {}
        self._finder = counters.Finder()
        self._events = Events((SHOOTDOWNS, RECEIVED, *(SYSCALLS if calls else ())))
        self._why_no_calls = "" if calls else "not asked for"
        self._broadcast = machine.broadcast_here()
        self._at = time.monotonic()
        self._cpu_s = time.process_time()
        self._tlb = proc.tlb_interrupts()
        self._ended: list[Ended] = []

    def close(self) -> None:
        """Closes the counters."""
        for process in self._known.values():
            self._stop_counting(process)
        self._events.close()

    def sample(self) -> Snapshot:
        """The processes as they are now. The first sample has no rates."""
        self._ended = []
        now = time.monotonic()
        rows = [row for pid in self._choose() if (row := self._sample(pid))]
        for pid in self._known.keys() - {row.pid for row in rows}:
            self._forget(pid)
        self._choose_counted()
        elapsed = max(now - self._at, 1e-9)
        cpu_s, tlb = time.process_time(), proc.tlb_interrupts()
        snapshot = Snapshot(
            time=round(time.time(), 3),
            interval_s=round(elapsed, 6),
            own_cpu_percent=_rate(100 * (cpu_s - self._cpu_s), elapsed),
            interrupts_system_wide=None if None in (tlb, self._tlb) else _rate(tlb - self._tlb, elapsed),  # type: ignore[operator]
            processes=rows,
            ended=self._ended,
            notes=self._notes(),
        )
        self._at, self._cpu_s, self._tlb = now, cpu_s, tlb
        return snapshot

    def _forget(self, pid: int) -> None:
        process = self._known.pop(pid)
        self._stop_counting(process)
        self._ended.append(Ended(pid, process.stat.name))

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
            notes.append(f"shootdowns and calls are counted in the {MAX_COUNTED} busiest processes")
        return notes

    def _sample(self, pid: int) -> Row | None:
        try:
            stat, rss_kib = proc.stat(pid), proc.rss_kib(pid)
        except (proc.GoneError, OSError, ValueError):
            return None
        if stat.has_ended or (self._every and stat.is_kernel):
            return None
        now = time.monotonic()
        known = self._known.get(pid)
        if known and known.stat.started_ticks != stat.started_ticks:
            # Another process of the same number.
            self._forget(pid)
            known = None
        before = known.stat if known else None
        if known is None:
            known = self._known[pid] = _Process(stat, now, _percent_so_far(stat))
        if before is None or before.image != stat.image:
            known.search_at, known.values, known.command = 0.0, {}, _command(stat)
        row = Row(pid, stat.name, known.command, stat.threads, rss_kib)
        elapsed = max(now - known.at, 1e-9)
        if before is not None:
            row.rss_change_kib = rss_kib - known.rss_kib
            row.user_percent = _rate(100 * (stat.user_s - before.user_s), elapsed)
            row.system_percent = _rate(100 * (stat.system_s - before.system_s), elapsed)
            row.minor_faults = _rate(stat.minor_faults - before.minor_faults, elapsed)
            row.major_faults = _rate(stat.major_faults - before.major_faults, elapsed)
            known.busy = 0.5 * known.busy + row.user_percent + row.system_percent + row.minor_faults / 100
        self._read_events(known, row, now)
        self._read_rollup(known, row, now)
        self._read_tables(known, row, now, elapsed)
        known.stat, known.rss_kib, known.at = stat, rss_kib, now
        return row

    def _read_events(self, known: _Process, row: Row, now: float) -> None:
        if known.counting is None:
            uncounted = "not among the busiest processes" if self._every else "counted from now on"
            row.reasons |= dict.fromkeys((SHOOTDOWNS, RECEIVED, "calls"), known.why_not_counted or uncounted)
            return
        counted = event_counters.read(known.counting)
        elapsed = max(now - known.counted_at, 1e-9)
        rates = {name: _rate(value - known.counted[name], elapsed) for name, value in counted.items()}
        known.counted, known.counted_at = counted, now
        row.calls = {name: rates[name] for name in SYSCALLS if name in rates} or None
        if row.calls is None:
            row.reasons["calls"] = self._why_no_calls or next(iter(self._events.reasons.values()), "")
        if self._broadcast and self._broadcast.always:
            row.reasons |= dict.fromkeys((SHOOTDOWNS, RECEIVED), self._broadcast.note)
        else:
            row.shootdowns, row.interrupts_received = rates.get(SHOOTDOWNS), rates.get(RECEIVED)
        row.reasons |= {name: why for name, why in self._events.reasons.items() if name not in rates}

    def _pause_s(self, begin: float) -> float:
        """The pause that keeps such work on all processes within its share of the time."""
        return (time.thread_time() - begin) * max(1, len(self._known)) / _SHARE

    def _read_rollup(self, known: _Process, row: Row, now: float) -> None:
        if now >= known.rollup_at:
            begin = time.thread_time()
            known.rollup, known.why_no_rollup = None, "the kernel does not report it"
            try:
                known.swap_kib = proc.swap_kib(row.pid)
                if row.rss_kib + (known.swap_kib or 0) > proc.MAX_ROLLUP_KIB:
                    known.why_no_rollup = "reading it would delay a process of this size"
                else:
                    known.rollup = proc.rollup(row.pid)
            except PermissionError:
                known.why_no_rollup = proc.OTHER_USER
            except (proc.GoneError, OSError):
                pass
            known.rollup_at = now + self._pause_s(begin)
        row.swap_kib = known.swap_kib
        if known.rollup is None:
            row.reasons["huge_kib"] = known.why_no_rollup
        else:
            row.huge_kib = proc.huge_kib(known.rollup)

    def _search(self, known: _Process, pid: int, now: float) -> None:
        begin = time.thread_time()
        tables: list[counters.Table] = []
        known.tables, known.paths = [], []
        try:
            images = counters.images(pid)
            known.paths = [image.path for image in images]
            with proc.memory(pid) as read:
                tables, known.why_no_counters = self._finder.tables(read, images)
                known.tables = counters.without_parents(read, tables, known.stat)
        except (proc.GoneError, OSError) as error:
            known.why_no_counters = proc.refusal(pid, error)
        pause = self._pause_s(begin)
        known.search_at = now + (pause if tables else max(_SEARCH_AGAIN_S, pause))

    def _read_tables(self, known: _Process, row: Row, now: float, elapsed: float) -> None:
        # The libraries of a process that has just begun may not be loaded yet, or not be relocated.
        if not any(known.values.values()) and now >= known.search_at:
            self._search(known, row.pid, now)
        values: dict[str, dict[str, int]] = {}
        if known.tables:
            try:
                with proc.memory(row.pid) as read:
                    values = {table.library: table.values(read) for table in known.tables}
            except (proc.GoneError, OSError) as error:
                known.why_no_counters = proc.refusal(row.pid, error)
        if known.paths:
            row.allocator = next(iter(values), None) or mapped.allocator(known.paths) or "unknown"
        elif known.why_no_counters:
            row.reasons["allocator"] = known.why_no_counters
        if not values:
            row.reasons["counters"] = known.why_no_counters or "neither calmalloc nor ptlbmalloc2 is in it"
        for library, current in values.items():
            summarize(row, library, current, known.values.get(library), elapsed)
        row.counters = known.values = values

    def _stop_counting(self, process: _Process) -> None:
        if process.counting is not None:
            self._events.detach(process.counting)
            process.counting = None

    def _choose_counted(self) -> None:
        """Starts counters where there are none yet: in every process that was chosen, or in the busiest."""
        chosen = list(self._known.items())
        if self._every:
            # A process that is counted already is replaced only by one that is clearly busier.
            chosen.sort(
                key=lambda item: (item[1].busy + (item[1].counting is not None), item[1].rss_kib),
                reverse=True,
            )
            for _, process in chosen[MAX_COUNTED:]:
                self._stop_counting(process)
            chosen = chosen[:MAX_COUNTED]
        for pid, process in chosen:
            if process.counting is None:
                process.counting, process.why_not_counted = self._events.attach(pid)
                if process.counting is not None:
                    process.counted = event_counters.read(process.counting)
                    process.counted_at = time.monotonic()


def summarize(
    row: Row, library: str, now: dict[str, int], before: dict[str, int] | None, elapsed: float
) -> None:
    """Fills in the figures that both libraries have: purges, dirty memory, and its limit."""
    if (names := LIBRARIES.get(library)) is None:
        return
    if library == "ptlbmalloc2" and (state := now.get("state", 0)) != 1:
        row.allocator = f"glibc ({library} {counters.STATES.get(state)})"
    row.dirty_bytes, row.limit_bytes = now.get(names.dirty), now.get(names.limit)
    if before is not None and before.keys() & now.keys() >= {*names.purges, names.purged}:
        row.purges = _rate(max(0, sum(now[name] - before[name] for name in names.purges)), elapsed)
        row.purged_bytes = _rate(max(0, now[names.purged] - before[names.purged]), elapsed)


def _rate(amount: float, elapsed: float) -> float:
    return round(amount / elapsed, 3)


def _command(stat: proc.Stat) -> list[str]:
    try:
        return proc.arguments(stat.pid) or [stat.name]
    except (proc.GoneError, OSError):
        return [stat.name]


def _percent_so_far(stat: proc.Stat) -> float:
    """CPU time per time since the process began."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started_ticks / proc.TICKS
    return 100 * (stat.user_s + stat.system_s) / max(age, 1.0)
