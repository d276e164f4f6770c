"""Programs that allocate and free in waves: `sawtooth`, under calmalloc and its peers.

A row's time is its threads' busy time: the whole run minus the pauses. The benchmark samples resident memory.
The cost of purging in vain is calmalloc's own counter, as a share of the process's CPU time.
"""

from __future__ import annotations

import json
import resource
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from calm.core.allocators import Allocator
from calm.core.environment import clean_environment
from calm.core.statistics import Ratio
from research.papers import sessions

from . import ratios, tables
from .results import BUILD, REPOSITORY, Store, machine, side_of
from .rounds import CALMALLOC, GLIBC, LONGEST_RUN_S, PEERS, interleaved, note, present

NAME = "sawtooth"
LABELS = (*PEERS, "snmalloc", "rpmalloc", "tcmalloc", CALMALLOC)
METRICS = ("busy_s", "minor_faults", "average_rss_kib", "peak_rss_kib", "left_kib")
_OF_PEERS = ("busy_s", "average_rss_kib")
_OF_OURS = (*_OF_PEERS, "left_kib", "vain_percent")
ROUNDS = 3
# Peers within a tenth of calmalloc's time count as equally fast.
AS_FAST = 1.1
SHORT_S = 0.05
_SAMPLE_S = 0.005
_PAGE_KIB = resource.getpagesize() // 1024
_MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One kind of program."""

    least: int
    most: int
    pause_s: float
    threads: int = 1
    order: str = "fifo"
    mib: int = 100

    @property
    def teeth(self) -> int:
        """The number of waves: about a second of pauses, or three."""
        return max(3, min(20, int(1 / max(self.pause_s, 0.001))))

    def command(self) -> list[str]:
        """The command."""
        options = {
            "threads": self.threads,
            "bytes": self.mib * _MIB,
            "min": self.least,
            "max": self.most,
            "rounds": self.teeth,
            "hold": f"{self.pause_s / 2:.3f}",
            "rest": f"{self.pause_s / 2:.3f}",
            "order": self.order,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [str(BUILD / NAME), *words]

    def name(self) -> str:
        """The row's name in tables."""
        what = [f"{self.least:,} to {self.most:,} bytes", f"{self.pause_s * 1000:g} ms"]
        what += [f"{self.threads} threads"] if self.threads > 1 else []
        what += [self.order] if self.order != "fifo" else []
        what += [f"{self.mib} MiB"] if self.mib != Row.mib else []
        return ", ".join(what)


SIZES = ((16, 512), (1000, 8000), (8000, 100_000), (100_000, 1_000_000))


def rows() -> Iterator[Row]:
    """All combinations of sizes, pauses and threads; then longer pauses, other orders, and more memory."""
    for (least, most), pause, threads in product(SIZES, (0.005, SHORT_S), (1, 2, 4)):
        yield Row(least, most, pause, threads)
    for (least, most), pause in product((SIZES[0], SIZES[2]), (0.5, 5)):
        yield Row(least, most, pause)
    for (least, most), order in product((SIZES[0], SIZES[2]), ("lifo", "random", "alternate")):
        yield Row(least, most, 0.005, order=order)
    yield Row(16, 100_000, 0.005, mib=400)


class _Sampler(threading.Thread):
    """Samples a process's resident memory."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.kib: list[int] = []
        self._statm = Path(f"/proc/{pid}/statm")
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            try:
                self.kib.append(int(self._statm.read_text().split()[1]) * _PAGE_KIB)
            except (OSError, IndexError):
                return

    def end(self) -> None:
        self._ended.set()
        self.join()


def run_once(command: Sequence[str], row: Row, allocator: Allocator) -> dict[str, Any]:
    """One run, with samples of its memory."""
    environment = clean_environment()
    environment |= allocator.variables(environment)
    if allocator.label.partition(":")[0] == CALMALLOC:
        settings = [environment.get("CALM_OPTIONS", ""), "report=exit"]
        environment["CALM_OPTIONS"] = ",".join(each for each in settings if each)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    pipe = subprocess.PIPE
    with sessions.whole(
        command, folder=REPOSITORY, environment=environment, output=pipe, errors=pipe, text=True
    ) as process:
        sampler = _Sampler(process.pid)
        sampler.start()
        output, errors = process.communicate(timeout=LONGEST_RUN_S)
        sampler.end()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command), output, errors)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    run: dict[str, Any] = json.loads(output)
    cpu_s = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    paused_s = row.teeth * run["hold_s"] + (row.teeth - 1) * run["rest_s"]
    run |= {
        "busy_s": max(run["seconds"] - paused_s, 0.0),
        "cpu_s": cpu_s,
        "average_rss_kib": sum(sampler.kib) / max(1, len(sampler.kib)),
        "peak_rss_kib": max(sampler.kib, default=0),
        "left_kib": run["rss_after_kib"] - run["rss_before_kib"],
    }
    reports = [line for line in errors.splitlines() if line.startswith("{")]
    if reports and cpu_s > 0:
        run["vain_percent"] = json.loads(reports[-1])["purge_wasted_ns"] / 1e7 / cpu_s
    return run | note("\n".join(line for line in errors.splitlines() if not line.startswith("{")))


def measure(store: Store, runs: int | None) -> None:
    """Measures all rows under all installed allocators."""
    labels = present(LABELS)
    measured = []
    for row in rows():
        command = row.command()
        run = partial(run_once, command, row)
        count = runs or (ROUNDS if row.pause_s < 1 else 1)
        sides = interleaved(labels, run, count, warm_up=0, case=" ".join(command))
        ratios.compare(sides, (*METRICS, "vain_percent"))
        found = {"name": row.name(), "command": command, "allocators": sides}
        measured.append(found)
        print(_told(kept(found)), flush=True)
    store.save(NAME, {"rows": measured})
    store.keep(NAME, {"machine": machine(), "rows": [kept(row) for row in measured]})


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """The table's values: all of calmalloc's, and the peers' times and average memory."""
    ours = side_of(row, CALMALLOC) or {"median": {}, "ratio": {}}
    peers = {
        side["label"]: [_short(side["median"][metric]) for metric in _OF_PEERS]
        for side in row["allocators"]
        if side["label"] != CALMALLOC and side["median"].keys() >= set(_OF_PEERS)
    }
    ratio = ours["ratio"].get("busy_s")
    to_glibc = ratio and [None if each is None else _short(each) for each in ratio]
    median = {key: _short(ours["median"][key]) for key in _OF_OURS if key in ours["median"]}
    return {"name": row["name"], "ours": median, "to_glibc": to_glibc, "peers": peers}


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _leanest(row: dict[str, Any]) -> tuple[str, float] | None:
    """The peer with the lowest average memory among those that are as fast, or nearly."""
    most_s = AS_FAST * row["ours"]["busy_s"]
    as_fast = {label: held for label, (busy_s, held) in row["peers"].items() if busy_s <= most_s}
    return min(as_fast.items(), key=lambda each: each[1], default=None)


def _told(row: dict[str, Any]) -> str:
    """A line for the terminal."""
    times = {label: busy_s for label, (busy_s, _) in row["peers"].items()} | {
        CALMALLOC: row["ours"]["busy_s"]
    }
    cells = ", ".join(f"{label} {seconds:.3f}" for label, seconds in times.items())
    return f"  {row['name']:<48} {cells}"


def _cells(row: dict[str, Any]) -> list[str]:
    """The cells of one row of the table."""
    ours, peers = row["ours"], row["peers"]
    fastest = min(peers, key=lambda label: peers[label][0], default=None)
    leanest = _leanest(row)
    held = ours["average_rss_kib"]
    return [
        row["name"],
        f"{ours['busy_s']:.3f} s",
        f"{peers[GLIBC][0]:.3f} s" if GLIBC in peers else "",
        tables.ratio_text(Ratio(*row["to_glibc"])) if row.get("to_glibc") else "",
        f"{fastest}: {ours['busy_s'] / peers[fastest][0]:.2f}" if fastest else "",
        f"{held / 1024:.0f} MiB",
        f"{leanest[0]}: {held / leanest[1]:.2f}" if leanest else "none",
        f"{ours['left_kib'] / 1024:.1f} MiB",
        f"{ours.get('vain_percent', 0):.2f} %",
    ]


def table(store: Store) -> str:
    """The table; empty if nothing was measured."""
    result = store.load(NAME)
    if result is None:
        return ""
    head = [
        "sizes, pause",
        CALMALLOC,
        GLIBC,
        "ratio (95 %)",
        "to the fastest peer",
        "average RSS",
        "to the leanest peer",
        "kept after 0.5 s",
        "purged in vain",
    ]
    lines = [tables.line(head), tables.line(["---", *["---:"] * (len(head) - 1)])]
    lines += [tables.line(_cells(row)) for row in result["rows"] if row["ours"]]
    return "\n".join([*lines, *tables.where(store, NAME)]) + "\n"
