"""How often calls of malloc and free take a heap's lock, and wait for it: with one heap, and with many.

Each row is a program whose threads do a given number of operations, so only its wall time depends on the
speed of the machine. The rows run on an emulated machine of 16 CPUs, or on this machine with several numbers
of threads: if these are more than the CPUs, the kernel may preempt a thread that holds a lock.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calm.core import measure as probe
from calm.core import messages, rounds
from calm.core.environment import clean_environment
from calm.core.errors import CalmError
from calm.core.progress import RoundsBar
from research.lab.guest import Run
from research.lab.machine import Topology

from . import results
from .guest import RELEASE, Settings, Work, interrupts, labelled, measure, preloading, report_of
from .results import Store
from .sawtooth import SIZES
from .tables import line

NAME, NATIVE = "emulated-16cpu-locks", "native-locks"
# With more nodes, the kernel's NUMA balancing causes most of the interrupts.
MACHINE = Topology(16, 1)
THREADS = (2, 4, 8, 16)
# Operations of all threads together, as multiples of what a row gives one thread; fewer for an emulator.
WORK, NATIVE_WORK = 16, 160
ONE, MANY = "one heap", "many heaps"
OPTIONS = {ONE: "test_heaps=1", MANY: ""}
WAITS = "heap_locks_contended"
# For each 1,000 calls of malloc and free.
RATES = ("heap_locks", WAITS, "cache_misses", "interrupts")
# The medians of a side's runs, and the range of its waits.
FIGURES = (*RATES, "peak_rss_kib", "wall_s", "least_waits", "most_waits")
_MEDIANS = FIGURES[:-2]
_SHARE = 4 << 20
_LIMIT_S = 600.0

Sides = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Row:
    """A program with a number of threads."""

    name: str
    threads: int
    command: tuple[str, ...]

    @property
    def label(self) -> str:
        """Unique among all numbers of threads."""
        return f"{self.name}, {self.threads} threads"


def rows(threads: int, work: int) -> Iterator[Row]:
    """All rows. Each thread's share of the work is smaller with more threads, but not the blocks it holds."""
    times = max(1, work // threads)

    def row(name: str, repeated: str, count: int, *more: object, program: str = "") -> Row:
        # xmalloc-test has pairs of threads.
        members = max(1, threads // 2) if name == "xmalloc-test" else threads
        words = (program or name, "--threads", members, f"--{repeated}", count * times, *more)
        return Row(name, threads, tuple(map(str, words)))

    yield row("larson", "generations", 2, "--operations", 50_000)
    yield row("xmalloc-test", "rounds", 30)
    yield row("mstress", "iterations", 3, "--steps", 10_000)
    for least, most in SIZES:
        size = ("--bytes", threads * _SHARE, "--min", least, "--max", most, "--after", 0)
        yield row(f"sawtooth, {least:,} to {most:,} bytes", "rounds", 3, *size, program="sawtooth")
    touched = ("--blocks", 100, "--touch", "all")
    yield row("listing1-touched", "rounds", 2, *touched, program="listing1")
    yield row("alloc-test", "operations", 200_000, "--slots", 20_000)


def sides_of(library: Path) -> dict[str, str]:
    """The sides and their options; a library that does not know the option has only one heap."""
    done = subprocess.run(
        [RELEASE / "listing1", "--threads", "1", "--rounds", "1"],
        env=clean_environment() | preloading(library, OPTIONS[ONE]),
        capture_output=True,
        text=True,
        check=True,
    )
    if any("unknown option" in each for each in messages.lines(done.stderr)):
        print(f"{library.name} does not know {OPTIONS[ONE]}, and is measured with its one heap", flush=True)
        return {ONE: ""}
    return dict(OPTIONS)


def calls_of(printed: Mapping[str, Any]) -> int:
    """Calls of malloc and free, from a program's output. A program that frees all blocks prints no frees."""
    allocations: int = printed["allocations"]
    frees: int = printed.get("frees", allocations)
    return allocations + frees


def describe(library: Path, run: Run, count: Callable[[Run], int]) -> dict[str, Any]:
    """One run. The rate of a counter that the library does not have is None."""
    assert run.measurement
    printed, report = json.loads(run.printed), report_of(library, run)
    calls, counted = calls_of(printed), {**report, "interrupts": count(run)}
    rates = {name: 1000 * counted[name] / calls if name in counted else None for name in RATES}
    memory, wall_s = run.measurement.peak_rss_kib, run.measurement.wall_s
    return {"calls": calls, **rates, "peak_rss_kib": memory, "wall_s": wall_s} | {
        "printed": printed,
        "report": report,
    }


def _short(value: float | None) -> float | None:
    """As many digits as the table shows."""
    if value is None:
        return None
    return round(value) if value >= 100 else float(f"{value:.3g}")


def summary(runs: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """A side's FIGURES."""
    known = {name: [run[name] for run in runs if run[name] is not None] for name in _MEDIANS}
    medians = [statistics.median(known[name]) if known[name] else None for name in _MEDIANS]
    waits = known[WAITS]
    return [_short(value) for value in (*medians, min(waits, default=None), max(waits, default=None))]


def result(library: Path, count: int, measured: Mapping[Row, Sides]) -> dict[str, Any]:
    """What is kept: for each row and number of threads the calls, and the figures of each side."""
    found: dict[str, dict[str, Any]] = {}
    for row, sides in measured.items():
        calls = {run["calls"] for runs in sides.values() for run in runs}
        if len(calls) > 1:
            raise CalmError(f"{row.label}: the number of calls differs between runs: {sorted(calls)}")
        figures = [summary(runs) for runs in sides.values()]
        found.setdefault(row.name, {})[str(row.threads)] = [*calls, *figures]
    return {
        "library": library.name,
        "rounds": count,
        "sides": list(next(iter(measured.values()))),
        "figures": list(FIGURES),
        "rows": found,
        "runs": {row.label: sides for row, sides in measured.items()},
    }


def measure_emulated(library: Path, count: int, settings: Settings) -> dict[str, Any]:
    """All rows on the emulated machine, with as many threads as CPUs."""
    sides = sides_of(library)
    all_rows = list(rows(MACHINE.cpus, WORK))
    work = Work()
    for row in all_rows:
        for side, options in sides.items():
            work.add(f"{row.name}: {side}", row.command, library, options=options)
    machine, runs = measure(work, count, MACHINE, settings)
    measured = {
        row: {
            side: [describe(library, run, interrupts) for run in labelled(runs, f"{row.name}: {side}")]
            for side in sides
        }
        for row in all_rows
    }
    commands = {row.name: " ".join(row.command) for row in all_rows}
    return {**machine, "commands": commands, **result(library, count, measured)}


def run_natively(row: Row, library: Path, options: str) -> Run:
    """One run of a row on this machine."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        measured = probe.measure(
            (str(RELEASE / row.command[0]), *row.command[1:]),
            preloading(library, options),
            groups=(probe.TLB_GROUP,),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            inherited=clean_environment(),
            limit_s=_LIMIT_S,
        )
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if measured.interrupted_by is not None:
        raise rounds.StoppedError(measured.interrupted_by)
    run = Run(row.label, measured, *texts)
    if run.failure:
        raise CalmError("\n".join([f"{row.label}: {run.failure}", *run.last_words]))
    return run


def sent(run: Run) -> int:
    """Interrupts that the program sent; where the kernel does not count these, all that the CPUs received."""
    counter = run.measurement.counters.get("interrupts") if run.measurement else None
    return interrupts(run) if counter is None or counter.value is None else counter.value


def measure_natively(library: Path, count: int) -> dict[str, Any]:
    """All rows on this machine, with each number of threads."""
    sides = sides_of(library)
    all_rows = {row.label: row for threads in THREADS for row in rows(threads, NATIVE_WORK)}
    turns = [rounds.Row(label, [rounds.Side[Run](side) for side in sides]) for label in all_rows]
    with RoundsBar() as bar:
        stopped = rounds.run(
            turns,
            count,
            lambda turn, side, _: run_natively(all_rows[turn.name], library, sides[side.label]),
            bar,
        )
    if stopped is not None:
        sys.exit(128 + stopped)
    measured = {
        all_rows[turn.name]: {
            side.label: [describe(library, run, sent) for _, run in side.runs] for side in turn.sides
        }
        for turn in turns
    }
    return {"machine": results.machine(), **result(library, count, measured)}


def _number(value: float) -> str:
    """Three digits, without an exponent."""
    if 0 < value < 0.001:
        return "<0.001"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(name: str, side: Mapping[str, float | None]) -> str:
    value, least, most = side[name], side["least_waits"], side["most_waits"]
    if value is None:
        return "-"
    if name == "peak_rss_kib":
        return f"{value / 1024:,.0f}"
    if name == "wall_s":
        return f"{value:.2f}"
    if name != WAITS or least is None or most is None:
        return _number(value)
    return f"{_number(value)} ({_number(least)} to {_number(most)})"


def _cells(sides: Sequence[Sequence[float | None]], natively: bool) -> Iterator[str]:
    """Each cell has the figures of both sides, or of the one that was measured."""
    known = [dict(zip(FIGURES, side, strict=True)) for side in sides]
    for name in _MEDIANS if natively else _MEDIANS[:-1]:
        yield ", ".join(_text(name, side) for side in known)


def table_of(found: Mapping[str, Any], natively: bool) -> str:
    """A line for each row, and for each number of threads."""
    head = ["program", "threads", "calls", "locks", "waits", "cache misses", "interrupts", "peak RSS, MiB"]
    head += ["wall time, s"] if natively else []
    lines = [line(head), line(["---", *["---:"] * (len(head) - 1)])]
    for name, by_threads in found["rows"].items():
        for threads, (calls, *sides) in by_threads.items():
            lines.append(line([name, threads, f"{calls:,.0f}", *_cells(sides, natively)]))
    at = found["machine"]
    where = f"{at['cpus']} CPUs ({at['cpu']})" if natively else f"{at['cpus']} emulated CPUs"
    kernel = at["kernel"] if natively else found["kernel"]
    sides_text = ", ".join(found["sides"])
    begin = f"{where}, Linux {kernel}, {found['rounds']} rounds; in each cell: {sides_text}:"
    return "\n".join([begin, "", *lines]) + "\n"


def table(store: Store) -> str:
    """The tables; empty if nothing was measured."""
    known = [(store.load(name), natively) for name, natively in ((NAME, False), (NATIVE, True))]
    return "\n".join(table_of(found, natively) for found, natively in known if found)
