"""`calm trim`: makes running processes give free memory back, without stopping them."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import click
import msgspec

from calm.commands.explain import advice
from calm.commands.explain import command as explained
from calm.core import control, counters, options, proc, report
from calm.core.counters import Finder, Table
from calm.core.documents import Document
from calm.core.errors import CalmError
from calm.core.options import Output

_MAX_AT_ONCE = 32
_FREE = {"calmalloc": ("dirty", "cached"), "ptlbmalloc2": ("free_top_bytes",)}


_WORTH_NAMING = 8 << 20
_WITHOUT_US = "neither calmalloc nor ptlbmalloc2 is in it"
_NO_WAY = "calm knows no way to make it return that"


class Elsewhere(msgspec.Struct):
    """Free memory of a heap of the process that calm trim does not reach."""

    heap: str
    """The allocator, and the library that brought it."""
    bytes: int | None
    """None if calm cannot read that heap."""
    step: str
    """What makes it return that memory; "" where calm knows nothing."""


class Trimmed(msgspec.Struct):
    """One process. Where `reason` is given, it did not trim."""

    pid: int
    name: str
    library: str | None = None
    given_back_bytes: int | None = None
    """Free memory that the library gave back; other threads may have taken new memory meanwhile."""
    rss_before_kib: int | None = None
    rss_after_kib: int | None = None
    seconds: float | None = None
    """From the request to the answer."""
    reason: str | None = None
    elsewhere: list[Elsewhere] = []
    """Read last; the most first."""


class Report(Document, tag="calm-trim", kw_only=True):
    """What `calm trim` did."""

    keep_bytes: int
    processes: list[Trimmed]


@dataclass(frozen=True)
class _Wish:
    keep_bytes: int
    seconds: float


def _elsewhere(pid: int) -> list[Elsewhere]:
    """Free memory of the heaps of other allocators. Raises CalmError where they cannot be read."""
    found = explained.take(pid)
    kept = [
        Elsewhere(heap.title, free, advice.release(heap.allocator, heap, pid))
        for heap, parts in zip(found.heaps, found.of_heaps, strict=True)
        if heap.allocator not in _FREE
        and heap.footprint.is_known
        and (free := parts["retained"].bytes + parts["cached"].bytes) >= _WORTH_NAMING
    ]
    kept.sort(key=lambda each: -(each.bytes or 0))
    if found.unread:
        kept.append(Elsewhere(found.unread, None, advice.release(found.unread, None, pid)))
    return kept


def _why_idle(pid: int, table: Table, there: control.Memory, wish: _Wish) -> str:
    stat = proc.stat_or_none(pid)
    if stat is None or stat.has_ended:
        return "it has ended"
    if stat.state in "Tt":
        return "it is stopped by a signal or a debugger, and does not answer until it goes on"
    values = table.values(there.read)
    free = sum(values.get(name, 0) for name in _FREE.get(table.library, ()))
    left = f"{report.memory(free / 1024)} of free memory" if free else "no free memory"
    return (
        f"no thread of it has come to the allocator within {wish.seconds:g} s: the program is idle, "
        f"or its threads find what they need in their caches; it keeps {left}"
    )


def _ask(row: Trimmed, there: control.Memory, wish: _Wish) -> None:
    """Fills in the row."""
    images = counters.images(row.pid)
    tables, why = Finder().tables(there.read, images)
    table = next((table for table in tables if table.control), next(iter(tables), None))
    if table is None:
        row.reason = why or _WITHOUT_US
        return
    row.library = table.library
    if (
        table.library == "ptlbmalloc2"
        and counters.STATES.get(table.values(there.read).get("state", 0)) == "left to glibc"
    ):
        row.reason = "ptlbmalloc2 leaves malloc to glibc in it (PTLBMALLOC2_REPORT=1 shows the cause)"
        return
    row.rss_before_kib = proc.rss_kib(row.pid)
    begin = time.monotonic()
    try:
        given = control.ask(there, table, control.TRIM, wish.keep_bytes, wish.seconds)
    except control.IdleError:
        row.reason = _why_idle(row.pid, table, there, wish)
        return
    row.seconds = round(time.monotonic() - begin, 6)
    row.given_back_bytes = given
    row.rss_after_kib = proc.rss_kib(row.pid)


def _look_elsewhere(row: Trimmed) -> None:
    """What other heaps keep; it changes nothing of whether the process trimmed."""
    more = f", nor a heap that is known to keep {report.memory(_WORTH_NAMING / 1024)} of free memory"
    try:
        row.elsewhere = _elsewhere(row.pid)
    except CalmError as error:
        more = f"; {error}"
    if row.reason == _WITHOUT_US and not row.elsewhere:
        row.reason += more


def _trim(pid: int, wish: _Wish) -> Trimmed:
    row = Trimmed(pid, "")
    try:
        proc.check(pid)
        row.name = proc.stat(pid).name
        with control.memory(pid) as there:
            _ask(row, there, wish)
        _look_elsewhere(row)
    except (FileNotFoundError, ProcessLookupError, proc.GoneError):
        row.reason = "it has ended" if row.name else "there is no such process"
    except OSError as error:
        how = "" if os.geteuid() == 0 else f": sudo calm trim {pid}"
        row.reason = f"{proc.refusal(pid, error)}{how}"
    except (CalmError, control.ControlError) as error:
        row.reason = str(error)
    return row


def _line(row: Trimmed) -> str:
    given, seconds = row.given_back_bytes or 0, row.seconds or 0.0
    before, after = row.rss_before_kib or 0, row.rss_after_kib or 0
    return (
        f"{row.pid} {row.name}: {row.library} gave back {report.memory(given / 1024)} "
        f"in {report.duration(seconds)}; RSS {report.memory(before)} before, {report.memory(after)} after"
    )


def _kept(each: Elsewhere) -> str:
    amount = "an unknown amount" if each.bytes is None else report.memory(each.bytes / 1024)
    return f"{each.heap} keeps {amount} of free memory: {(each.step or _NO_WAY).removesuffix('.')}"


def _failure(row: Trimmed) -> str:
    return "; ".join([f"process {row.pid}: {row.reason}", *map(_kept, row.elsewhere)])


@click.command(
    "trim",
    epilog="\b\nExamples:\n  calm trim 1234\n  calm trim 1234 5678 --keep 64M\n"
    "  calm trim 1234 --timeout 1min --json",
)
@click.argument(
    "pids",
    nargs=-1,
    required=True,
    metavar="PID...",
    callback=options.process_ids,
    shell_complete=options.complete_process_ids,
)
@click.option(
    "--keep",
    "keep_bytes",
    type=options.Size(),
    default="0",
    show_default=True,
    metavar="SIZE",
    help="Free memory that each process may keep, in bytes; k, M or G may follow.",
)
@options.timeout("5s", "Wait so long for the answer of each process.")
@options.output()
def command(pids: tuple[int, ...], keep_bytes: int, timeout: float, output: Output) -> None:
    """Make the processes PID give free memory back to the system, without stopping them.

    calmalloc and libptlbmalloc2 do so when a thread of the program next comes to the allocator, or the helper
    thread next wakes up. A program that stays idle does not answer. What other allocators of a process
    keep is named, with what makes them return it.
    """
    wish = _Wish(keep_bytes, timeout)
    with ThreadPoolExecutor(min(_MAX_AT_ONCE, len(pids))) as pool:
        rows = list(pool.map(lambda pid: _trim(pid, wish), pids))
    failed = [row for row in rows if row.reason is not None]
    with output.console() as console:
        for row in rows:
            if row.reason is None:
                console.print(_line(row), soft_wrap=True)
                for each in row.elsewhere:
                    console.print(f"  {_kept(each)}", soft_wrap=True)
    output.write(Report(keep_bytes=keep_bytes, processes=rows))
    if len(rows) == len(failed) == 1:
        raise CalmError(_failure(failed[0]))
    for row in failed:
        report.warn(_failure(row))
    if failed:
        raise CalmError(f"{len(failed)} of {len(rows)} processes did not trim")
