"""Resident memory over time after one burst, and over ten, under each allocator: the README's picture."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calm.core import plot
from calm.core.allocators import Allocator, parse
from calm.core.environment import clean_environment
from research.bench.picture import styles
from research.papers import sessions

from .results import BUILD, REPOSITORY, Store
from .rounds import CALMALLOC, GLIBC, present

NAME = "idle-curve"
LABELS = (GLIBC, "jemalloc", "mimalloc", "snmalloc", "rpmalloc", "tcmalloc", "gperftools", CALMALLOC)
# Longer than memory of which nothing is known is worth keeping, also where a page fault is dear.
IDLE_S = 30
COMMAND = ("idle-burst", "--threads", "2", "--main", "idle", "--seconds", str(IDLE_S))
BURSTS, REST_S, BURST_MIB = 10, 5, 200
BURST_COMMAND = (
    *("sawtooth", "--bytes", str(BURST_MIB << 20), "--min", "1000", "--max", "60000"),
    *("--rounds", str(BURSTS), "--rest", str(REST_S), "--after", str(REST_S)),
)
STEP_S = 1
_SAMPLE_S = 0.01
_NOISE_MIB = 1


def _resident_kib(process: int, program: str) -> float | None:
    """None before the process executes the workload, and after it has ended."""
    try:
        if Path(f"/proc/{process}/comm").read_text().strip() != program:
            return None
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


@dataclass(frozen=True)
class Followed:
    """One run of a workload."""

    samples: list[tuple[float, float]]
    """Seconds since the start, and resident KiB."""
    cpu_s: float
    """Of all threads."""
    printed: dict[str, Any]


def run(command: list[str], allocator: Allocator) -> Followed:
    """Runs a workload, and samples its memory."""
    environment = clean_environment()
    environment |= allocator.variables(environment)
    samples: list[tuple[float, float]] = []
    pipe = subprocess.PIPE
    before_s = _children_s()
    with sessions.whole(
        command, folder=REPOSITORY, environment=environment, output=pipe, errors=pipe, text=True
    ) as process:
        start = time.monotonic()
        while process.poll() is None:
            if (resident := _resident_kib(process.pid, Path(command[0]).name)) is not None:
                samples.append((time.monotonic() - start, resident))
            time.sleep(_SAMPLE_S)
        output, errors = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return Followed(samples, _children_s() - before_s, json.loads(output))


def follow(command: list[str], allocator: Allocator) -> dict[str, Any]:
    """One run: its memory at each multiple of STEP_S, in MiB, minus that before; and its CPU time."""
    done = run(command, allocator)
    printed, samples, cpu_s = done.printed, done.samples, done.cpu_s
    before = printed["rss_before_kib"]
    kept = printed.get("retained_kib", printed.get("rss_after_kib", 0) - before) / 1024
    above = until_exit([(at, (kib - before) / 1024) for at, kib in samples], kept)
    mib = on_grid(above)
    average = sum(value for _, value in above) / max(1, len(above))
    figures = {"kept_mib": round(kept, 1), "average_mib": round(average, 1), "cpu_s": round(cpu_s, 3)}
    return {"label": allocator.label, **figures, "mib": mib}


def _children_s() -> float:
    """CPU time of processes that have ended, all threads included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def until_exit(samples: list[tuple[float, float]], kept: float) -> list[tuple[float, float]]:
    """The samples without those at exit, which are below the value that the program itself read last."""
    count = len(samples)
    while count > 0 and samples[count - 1][1] < kept - _NOISE_MIB:
        count -= 1
    return samples[:count]


def on_grid(samples: list[tuple[float, float]], step_s: float = STEP_S) -> list[int]:
    """The highest value within each step; a step without a sample repeats the previous one. Not below 0."""
    highest: dict[int, float] = {}
    for at, value in samples:
        step = int(at / step_s)
        highest[step] = max(value, highest.get(step, value))
    values = [0]
    for step in range(max(highest, default=-1) + 1):
        values.append(max(0, round(highest.get(step, values[-1]))))
    return values[1:]


def measure(store: Store, arguments: tuple[str, ...] = ()) -> None:
    """One run of each installed allocator."""
    command = [str(BUILD / COMMAND[0]), *COMMAND[1:], *arguments]
    burst = [str(BUILD / BURST_COMMAND[0]), *BURST_COMMAND[1:]]
    curves, bursts = [], []
    for label in present(LABELS):
        curves.append(follow(command, parse(label)))
        bursts.append(follow(burst, parse(label)))
        of_bursts = f"{bursts[-1]['average_mib']:,} MiB and {bursts[-1]['cpu_s']} s for {BURSTS} bursts"
        print(f"  {label:<12} {curves[-1]['kept_mib']:,} MiB at the end; {of_bursts}", flush=True)
    found = {"step_s": STEP_S, "command": command, "curves": curves, "burst_command": burst, "bursts": bursts}
    store.save(NAME, found)


def draw(store: Store, path: Path) -> None:
    """One line for each allocator; the legend lists them by what they keep after a burst."""
    result = store.load(NAME)
    if result is None:
        return
    pyplot = plot.pyplot()
    figure, both = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    colors = styles([curve["label"] for curve in result["curves"]])
    panels = (
        ("curves", "Two threads allocate and free 1 GiB, and then idle"),
        ("bursts", f"{BURSTS} bursts of {BURST_MIB} MiB, {REST_S} s apart"),
    )
    for axes, (key, title) in zip(both, panels, strict=True):
        for curve in sorted(result[key], key=lambda curve: -curve["kept_mib"]):
            label, mib = curve["label"], curve["mib"]
            ours = label == CALMALLOC
            axes.plot(
                [number * result["step_s"] for number in range(len(mib))],
                mib,
                color=colors[label][0],
                linewidth=2.6 if ours else 1.3,
                zorder=3 if ours else 2,
                label=label if key == "curves" else None,
            )
        axes.set_xlabel("seconds")
        axes.set_ylabel("resident memory (MiB)")
        axes.set_title(title, fontsize=10)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    plot.save(figure, path)
