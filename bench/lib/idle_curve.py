"""Resident memory over time of `idle-burst` under each allocator: the README's picture."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from papers import sessions

from calm.commands.bench.picture import styles
from calm.core import plot
from calm.core.allocators import Allocator, parse
from calm.core.environment import clean_environment

from .results import BUILD, REPOSITORY, Store
from .rounds import CALMALLOC, GLIBC, present

NAME = "idle-curve"
LABELS = (GLIBC, "jemalloc", "mimalloc", "snmalloc", "rpmalloc", "tcmalloc", "gperftools", CALMALLOC)
COMMAND = ("idle-burst", "--threads", "2", "--main", "idle")
STEP_S = 0.1
_SAMPLE_S = 0.01
_NOISE_MIB = 1


def _resident_kib(process: int) -> float | None:
    """None before the process executes the workload, and after it has ended."""
    try:
        if Path(f"/proc/{process}/comm").read_text().strip() != COMMAND[0]:
            return None
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def follow(command: list[str], allocator: Allocator) -> dict[str, Any]:
    """One run: its memory at each multiple of STEP_S, in MiB, minus that before the burst."""
    environment = clean_environment()
    environment |= allocator.variables(environment)
    samples: list[tuple[float, float]] = []
    pipe = subprocess.PIPE
    with sessions.whole(
        command, folder=REPOSITORY, environment=environment, output=pipe, errors=pipe, text=True
    ) as process:
        start = time.monotonic()
        while process.poll() is None:
            if (resident := _resident_kib(process.pid)) is not None:
                samples.append((time.monotonic() - start, resident))
            time.sleep(_SAMPLE_S)
        output, errors = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    printed = json.loads(output)
    before, kept = printed["rss_before_kib"] / 1024, printed["retained_kib"] / 1024
    above = until_exit([(at, kib / 1024 - before) for at, kib in samples], kept)
    return {"label": allocator.label, "kept_mib": round(kept, 1), "mib": on_grid(above)}


def until_exit(samples: list[tuple[float, float]], kept: float) -> list[tuple[float, float]]:
    """The samples without those at exit, which are below the value that the program itself read last."""
    count = len(samples)
    while count > 0 and samples[count - 1][1] < kept - _NOISE_MIB:
        count -= 1
    return samples[:count]


def on_grid(samples: list[tuple[float, float]]) -> list[int]:
    """The highest value within each step; a step without a sample repeats the previous one. Not below 0."""
    highest: dict[int, float] = {}
    for at, value in samples:
        step = int(at / STEP_S)
        highest[step] = max(value, highest.get(step, value))
    values = [0]
    for step in range(max(highest, default=-1) + 1):
        values.append(max(0, round(highest.get(step, values[-1]))))
    return values[1:]


def measure(store: Store, arguments: tuple[str, ...] = ()) -> None:
    """One run of each installed allocator."""
    command = [str(BUILD / COMMAND[0]), *COMMAND[1:], *arguments]
    curves = []
    for label in present(LABELS):
        curves.append(follow(command, parse(label)))
        print(f"  {label:<12} {curves[-1]['kept_mib']:,} MiB at the end", flush=True)
    store.save(NAME, {"command": command, "step_s": STEP_S, "curves": curves})


def draw(store: Store, path: Path) -> None:
    """One line for each allocator; the legend lists them by their last values."""
    result = store.load(NAME)
    if result is None:
        return
    pyplot = plot.pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    colors = styles([curve["label"] for curve in result["curves"]])
    for curve in sorted(result["curves"], key=lambda curve: -curve["kept_mib"]):
        label, mib = curve["label"], curve["mib"]
        ours = label == CALMALLOC
        axes.plot(
            [number * result["step_s"] for number in range(len(mib))],
            mib,
            color=colors[label][0],
            linewidth=2.6 if ours else 1.3,
            zorder=3 if ours else 2,
            label=f"{label}: {curve['kept_mib']:,.0f} MiB",
        )
    axes.set_xlabel("seconds")
    axes.set_ylabel("resident memory (MiB)")
    axes.set_title("Two threads allocate and free 1 GiB, and then idle", fontsize=10)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    plot.save(figure, path)
