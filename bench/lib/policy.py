"""Compares the adaptive policy with the offline optimum, on recorded memory use.

A trace holds a program's memory in use and CPU time in each epoch of 100 ms, read from outside while the
program runs. `retention-replay` replays it for a policy. A policy costs the memory that it keeps, by the
price of memory, and the purges in vain. The optimum knows the future: it purges a page at the start of a gap
where that costs less than keeping it.
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

from calm.core import allocators, counters, proc
from calm.core.environment import clean_environment
from research.bench.results import cost_s
from research.papers import sessions

from . import idle_curve, sawtooth, tables
from .results import BUILD, REPOSITORY, Store
from .rounds import CALMALLOC, present

NAME = "policy"
WINDOW_S = 0.1
_SAMPLE_S = 0.01
_PAGE = 4096
PRICES = (2, 8, 32)
"""GiB that are worth, for a second, a second of CPU time."""
FOREVER = 1 << 16
FIXED = (0, 10, FOREVER)
"""Epochs."""
FAULT_NS, PURGE_NS = 700, 900
"""Of one page; together about what machines were measured to need."""
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
    cost = ("--fault", str(FAULT_NS), "--purge", str(PURGE_NS))
    program = [str(REPOSITORY / BUILD / "retention-replay"), *cost, *arguments]
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


def optimum_s(trace: Trace, gib_per_cpu: float) -> float:
    """What the optimum costs, in seconds of CPU time."""
    page_s = (FAULT_NS + PURGE_NS) * 1e-9
    window_s = WINDOW_S * _PAGE / (gib_per_cpu * (1 << 30))
    return sum(
        pages * min(page_s, windows * window_s) for windows, pages in gaps(each.most for each in trace)
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def judged(trace: Trace) -> dict[str, Any]:
    """Replays a trace for the policy, by the price, and for fixed periods."""

    def costs(gib: int, *arguments: str) -> dict[str, Any]:
        found = replay(trace, "--memory-per-cpu", str(gib), *arguments)
        figures = (found["kept_mib"], found["vain_s"], found["vain_s"] + found["rent_s"])
        return dict(zip(("kept_mib", "vain_s", "cost_s"), map(_short, figures), strict=True))

    return {
        "windows": len(trace),
        "peak_mib": max((each.most for each in trace), default=0) * _PAGE / (1 << 20),
        "optimum_s": {str(each): _short(optimum_s(trace, each)) for each in PRICES},
        "adaptive": {str(each): costs(each) for each in PRICES},
        "fixed": {str(each): costs(8, "--policy", "fixed", "--windows", str(each)) for each in FIXED},
        "paper": costs(8, "--policy", "paper"),
    }


def measured_s(command: Sequence[str], label: str) -> float:
    """What a run costs under an allocator, at 8 GiB: CPU time, and all memory that is resident."""
    done = idle_curve.run(list(command), allocators.parse(label))
    held = [kib for _, kib in done.samples] or [0.0]
    wall_s = done.samples[-1][0] if done.samples else 0
    mean_kib = sum(held) / len(held)
    figures = {"user_s": done.cpu_s, "system_s": 0, "wall_s": wall_s, "average_rss_kib": mean_kib}
    return cost_s(figures) or 0


def measure(store: Store) -> None:
    """Records all programs, replays them, and runs them under all allocators."""
    found = []
    for name, command in commands().items():
        trace = record(command)
        under = {label: _short(measured_s(command, label)) for label in present(idle_curve.LABELS)}
        found.append({"name": name, **judged(trace), "measured_s": under})
        print(f"  {name}: {found[-1]['windows']} epochs, {found[-1]['adaptive']['8']}", flush=True)
    store.save(NAME, {"traces": found})


def _cell(found: dict[str, Any], optimum: float) -> str:
    ratio = f"; {found['cost_s'] / optimum:.2f}" if optimum else ""
    return f"{found['kept_mib']:.1f} ({found['cost_s'] * 1e3:.1f} ms{ratio})"


def table(store: Store) -> str:
    """The table; empty if nothing was measured."""
    result = store.load(NAME)
    if result is None:
        return ""
    head = ["program", "epochs", "peak"]
    head += [f"`memory_per_cpu={each}`" for each in PRICES]
    head += ["always" if each == FOREVER else f"{each * WINDOW_S:g} s" for each in FIXED]
    head.append("the paper's policy")
    lines = [tables.line(head), tables.line(["---", *["---:"] * (len(head) - 1)])]
    for each in result["traces"]:
        cells = [each["name"], str(each["windows"]), f"{each['peak_mib']:.0f} MiB"]
        cells += [_cell(each["adaptive"][str(gib)], each["optimum_s"][str(gib)]) for gib in PRICES]
        cells += [_cell(each["fixed"][str(windows)], each["optimum_s"]["8"]) for windows in FIXED]
        cells.append(_cell(each["paper"], each["optimum_s"]["8"]))
        lines.append(tables.line(cells))
    labels = [label for label in idle_curve.LABELS if label in result["traces"][0]["measured_s"]]
    text = "What the programs cost in all, at 8 GiB for a CPU: CPU time and all resident memory, measured."
    lines += ["", text, "", tables.line(["program", *labels]), tables.line(["---", *["---:"] * len(labels)])]
    for each in result["traces"]:
        lines.append(
            tables.line([each["name"], *(f"{each['measured_s'].get(label, 0):.3f} s" for label in labels)])
        )
    return "\n".join([*lines, *tables.where(store, NAME)]) + "\n"
