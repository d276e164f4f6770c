"""Compares the adaptive policy with the offline optimum, on recorded memory use.

A trace holds a program's memory in use and CPU time in each epoch of 100 ms, read from outside while the
program runs. `retention-replay` replays it for a policy. The optimum knows the future, and purges memory at
the start of the longest gaps, for the same cost: a page costs the same in each gap, so that the optimum
chooses gaps by length alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from papers import sessions

from calm.core import allocators, counters, proc
from calm.core.environment import clean_environment

from . import sawtooth, tables
from .results import BUILD, REPOSITORY, Store
from .rounds import CALMALLOC

NAME = "policy"
WINDOW_S = 0.1
_SAMPLE_S = 0.01
_PAGE = 4096
PURGE_TIMES = (1.0, 10.0)
FIXED = (1, 10)  # epochs
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Window:
    """Pages in use, and milliseconds of CPU time."""

    most: int
    last: int
    cpu_ms: float


Trace = list[Window]
PROGRAMS: dict[str, list[str]] = {
    "dedup-like": ["dedup-like"],
    "idle-burst": ["idle-burst", "--seconds", "3"],
    "listing1, touched": ["listing1", "--threads", "4", "--touch", "all", "--rounds", "200"],
}
WAVES = (
    sawtooth.Row(8000, 100_000, 0.05),
    sawtooth.Row(8000, 100_000, 0.5),
    sawtooth.Row(16, 512, 2),
)


def commands() -> dict[str, list[str]]:
    """The programs to record, by name."""
    found = {name: [str(BUILD / words[0]), *words[1:]] for name, words in PROGRAMS.items()}
    for row in WAVES:
        command = row.command()
        command[command.index("--rounds") + 1] = str(max(10, row.teeth))
        found[f"sawtooth, {row.name()}"] = command
    return found


def _cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / _TICKS


def record(command: Sequence[str]) -> Trace:
    """Runs a program under calmalloc, and samples its memory in use."""
    environment = clean_environment()
    environment |= allocators.parse(CALMALLOC).variables(environment)
    trace: Trace = []
    pipe = subprocess.DEVNULL
    with sessions.whole(
        command, folder=REPOSITORY, environment=environment, output=pipe, errors=subprocess.PIPE
    ) as process:
        finder, table = counters.Finder(), None
        most, cpu_ms, end = 0, 0.0, time.monotonic() + WINDOW_S
        while process.poll() is None:
            time.sleep(_SAMPLE_S)
            try:
                with proc.memory(process.pid) as read:
                    if table is None:
                        found, _ = finder.tables(read, counters.images(process.pid))
                        table = next(iter(found), None)
                        continue
                    used = table.values(read)["in_use"] // _PAGE
                most = max(most, used)
                if time.monotonic() >= end:
                    now_ms = _cpu_ms(process.pid)
                    trace.append(Window(most, used, now_ms - cpu_ms))
                    most, cpu_ms, end = used, now_ms, end + WINDOW_S
            except (OSError, proc.GoneError, KeyError, IndexError):
                continue  # it has not started, or is exiting
    return trace


def replay(trace: Trace, *arguments: str) -> dict[str, Any]:
    """The memory that a policy would keep, and its cost."""
    text = "".join(f"{each.most} {each.last} {each.cpu_ms}\n" for each in trace)
    program = [str(REPOSITORY / BUILD / "retention-replay"), *arguments]
    done = subprocess.run(program, input=text, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def gaps(levels: Iterable[int]) -> list[tuple[int, int]]:
    """The gaps, as (epochs, pages): pages that were not in use for a time, and then used again."""
    falls: list[tuple[int, int]] = []  # time and former level of each fall, the lowest level last
    found: list[tuple[int, int]] = []
    before = 0
    for at, level in enumerate(levels):
        if level < before:
            falls.append((at, before))
        while falls and level > before:
            since, top = falls[-1]
            upto = min(level, top)
            if upto > before:
                found.append((at - since, upto - before))
                before = upto
            if upto < top:
                break
            falls.pop()
        before = level
    return found


def optimum_mib(trace: Trace, vain_pages: float) -> float:
    """The memory that the optimum keeps on average if it purges this many pages in vain."""
    budget, kept = vain_pages, 0.0
    for windows, pages in sorted(gaps(each.most for each in trace), reverse=True):
        given = min(budget, pages)
        budget -= given
        kept += windows * (pages - given)
    return kept / max(1, len(trace)) * _PAGE / (1 << 20)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def judged(trace: Trace) -> dict[str, Any]:
    """Replays a trace for the policy, by purge_time, and for fixed periods."""

    def beside_optimum(*arguments: str) -> dict[str, Any]:
        found = replay(trace, *arguments)
        best = optimum_mib(trace, found["vain_pages"])
        figures = (found["kept_mib"], found["vain_percent"], best)
        return dict(zip(("kept_mib", "vain_percent", "optimum_mib"), map(_short, figures), strict=True))

    return {
        "windows": len(trace),
        "peak_mib": max((each.most for each in trace), default=0) * _PAGE / (1 << 20),
        "adaptive": {str(each): beside_optimum("--purge-time", str(each)) for each in PURGE_TIMES},
        "fixed": {str(each): beside_optimum("--policy", "fixed", "--windows", str(each)) for each in FIXED},
        "paper": beside_optimum("--policy", "paper"),
    }


def measure(store: Store) -> None:
    """Records all programs, and replays them."""
    found = []
    for name, command in commands().items():
        trace = record(command)
        found.append({"name": name, **judged(trace)})
        print(f"  {name}: {found[-1]['windows']} epochs, {found[-1]['adaptive']['1.0']}", flush=True)
    store.save(NAME, {"traces": found})


def _cell(found: dict[str, Any]) -> str:
    return f"{found['kept_mib']:.1f} ({found['vain_percent']:.2f} %; {found['optimum_mib']:.1f})"


def table(store: Store) -> str:
    """The table; empty if nothing was measured."""
    result = store.load(NAME)
    if result is None:
        return ""
    head = ["program", "epochs", "peak"]
    head += [f"`purge_time={each:g}`" for each in PURGE_TIMES]
    head += [f"{each * WINDOW_S:g} s" for each in FIXED]
    head.append("the paper's policy")
    lines = [tables.line(head), tables.line(["---", *["---:"] * (len(head) - 1)])]
    for each in result["traces"]:
        cells = [each["name"], str(each["windows"]), f"{each['peak_mib']:.0f} MiB"]
        cells += [_cell(each["adaptive"][str(share)]) for share in PURGE_TIMES]
        cells += [_cell(each["fixed"][str(windows)]) for windows in FIXED]
        cells.append(_cell(each["paper"]))
        lines.append(tables.line(cells))
    return "\n".join([*lines, *tables.where(store, NAME)]) + "\n"
