"""The axes of counts in figures 1a, 1b and 3 of Schildermans et al., Ptlbmalloc2, on emulated machines.

The number of interrupts per call depends on the kernel and on how many CPUs run the program at that moment,
which an emulator shows correctly. Fewer calls than the paper's 1,000,000 in each thread are enough.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from calm.core import allocators
from calm.core.errors import CalmError
from research.lab.guest import Run
from research.lab.machine import Topology

from . import guest
from .guest import CALMALLOC, GLIBC, PTLBMALLOC2, RELEASE, Settings, Work

THREADS = 16
CALLS = 300
_STORM = ("madvise-storm", "--threads", str(THREADS), "--calls", str(CALLS))
# touched: each thread writes to its own page before each call, so there is always something to flush.
# untouched: the page is never used; whether there is something to flush depends on other threads' calls.
VARIANTS: Mapping[str, tuple[str, ...]] = {"touched": ("--pages", "own", "--touch"), "untouched": ()}
# vips is not a stand-in, but Debian's program itself.
VIPS = "vips"
_PICTURE = 1024
_VIPS_VARIABLES = {"VIPS_CONCURRENCY": str(THREADS)}
SOCKETS = (1, 2, 3, 4)
PINNED = 12
MOST_CPUS = 20

# The stand-ins by the paper's names, with so little work that emulation takes seconds.
STAND_INS: Mapping[str, str] = {
    "dedup": "--mib 128",
    "canneal": "--elements 50000 --steps 3 --moves 20000",
    "streamcluster": "--points 4096 --block 2048 --dimensions 32",
    "bodytrack": "--frames 6 --particles 400",
    "swaptions": "--trials 2000",
    "fluidanimate": "--particles 20000 --frames 3",
}


def _storms(work: Work, points: Mapping[int, str]) -> None:
    for point, pin in points.items():
        for variant, options in VARIANTS.items():
            work.add(f"{variant}:{point}", (*_STORM, *options), pin=pin)


def _rows(
    runs: list[Run], points: Mapping[int, str], axis: str, cpus: Callable[[int], int]
) -> list[dict[str, Any]]:
    calls = THREADS * CALLS
    rows = []
    for point, pin in points.items():
        row: dict[str, Any] = {axis: point, "pinned_to": pin}
        for variant in VARIANTS:
            of = guest.labelled(runs, f"{variant}:{point}")
            counted = [guest.interrupts(run) for run in of]
            row[variant] = {
                "interrupts": counted,
                "shootdowns": [guest.shootdowns(run) for run in of],
                "interrupts_per_call": statistics.median(counted) / calls,
            }
        # CPUs that run a thread of the program: each call can interrupt all of them.
        row["other_cpus"] = min(cpus(point), THREADS) - 1
        rows.append(row)
    return rows


def figure_1a(rounds: int, settings: Settings) -> dict[str, Any]:
    """Interrupts of 16 threads that call madvise, on 1 to 20 CPUs of one socket."""
    points = {cpus: f"0-{cpus - 1}" for cpus in range(1, MOST_CPUS + 1)}
    work = Work()
    _storms(work, points)
    machine, runs = guest.measure(work, rounds, Topology(MOST_CPUS, 1), settings)
    return {
        "what": "TLB shootdown interrupts received by all CPUs, and shootdowns begun, while 16 threads each "
        f"call madvise(MADV_DONTNEED) {CALLS} times, by the CPUs that they may use",
        **machine,
        "threads": THREADS,
        "calls_of_each_thread": CALLS,
        "rows": _rows(runs, points, "cpus", lambda cpus: cpus),
    }


def figure_1b(rounds: int, settings: Settings) -> dict[str, Any]:
    """The same on 12 CPUs, shared out to 1 to 4 of the sockets of one machine."""
    points = {}
    for sockets in SOCKETS:
        share = PINNED // sockets
        points[sockets] = ",".join(
            f"{socket * PINNED}-{socket * PINNED + share - 1}" for socket in range(sockets)
        )
    work = Work()
    _storms(work, points)
    machine, runs = guest.measure(work, rounds, Topology(PINNED * max(SOCKETS), max(SOCKETS)), settings)
    return {
        "what": "TLB shootdown interrupts received by all CPUs, and shootdowns begun, while 16 threads each "
        f"call madvise(MADV_DONTNEED) {CALLS} times on 12 CPUs, by the sockets that these lie in",
        **machine,
        "threads": THREADS,
        "calls_of_each_thread": CALLS,
        "rows": _rows(runs, points, "sockets", lambda _: PINNED),
    }


def _picture(vips: str, folder: Path, work: Work) -> Path:
    """A picture of noise for vips to blur, generated once."""
    path = folder / "noise.v"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"noise.{os.getpid()}.v"
        size, look = str(_PICTURE), ("--sigma", "40", "--mean", "128")
        subprocess.run([vips, "gaussnoise", partial, size, size, *look], check=True)
        partial.rename(path)
    work.files.add(path)
    return path


def figure_3(rounds: int, settings: Settings) -> dict[str, Any]:
    """Interrupts of the stand-ins for PARSEC's programs under three allocators, 16 CPUs in one socket."""
    libraries: dict[str, Path | None] = {GLIBC: None}
    for name in (PTLBMALLOC2, CALMALLOC):
        libraries[name] = allocators.find_library(name)
        if libraries[name] is None:
            raise CalmError(f"{name} is not built: run make")
    there = {
        name: (f"{name}-like", "--threads", str(THREADS), *options.split())
        for name, options in STAND_INS.items()
        if (RELEASE / f"{name}-like").is_file()
    }
    if not there:
        raise CalmError("none of the stand-ins is built: run make")
    work = Work()
    if vips := shutil.which(VIPS):
        there[VIPS] = (vips, "gaussblur", str(_picture(vips, settings.cache, work)), "/tmp/out.v", "3")
    for name, command in there.items():
        variables = _VIPS_VARIABLES if name == VIPS else {}
        for label, library in libraries.items():
            work.add(f"{name}:{label}", command, library, variables=variables)
    machine, runs = guest.measure(work, rounds, Topology(THREADS, 1), settings)
    rows = []
    for name, command in there.items():
        row: dict[str, Any] = {
            "program": Path(command[0]).name,
            "command": [Path(command[0]).name, *command[1:]],
        }
        for label, library in libraries.items():
            of = guest.labelled(runs, f"{name}:{label}")
            if library is not None:
                for run in of:
                    guest.report_of(library, run)
            counted = [guest.interrupts(run) for run in of]
            row[label] = {
                "interrupts": counted,
                "shootdowns": [guest.shootdowns(run) for run in of],
                "median_interrupts": statistics.median(counted),
            }
        rows.append(row)
    return {
        "what": "TLB shootdown interrupts received by all CPUs, and shootdowns begun, of the stand-ins for "
        "PARSEC's programs, and of vips, with 16 threads",
        **machine,
        "left_out": sorted({*STAND_INS, VIPS} - set(there)),
        "rows": rows,
    }


FIGURES: Mapping[str, Callable[[int, Settings], dict[str, Any]]] = {
    "1a": figure_1a,
    "1b": figure_1b,
    "3": figure_3,
}


def table_of(figure: str, result: Mapping[str, Any]) -> str:
    """A figure as a Markdown table."""
    if figure == "3":
        lines = [
            "| program | glibc | ptlbmalloc2 | calmalloc |",
            "| --- | ---: | ---: | ---: |",
        ]
        for row in result["rows"]:
            cells = (f"{row[label]['median_interrupts']:,.0f}" for label in (GLIBC, PTLBMALLOC2, CALMALLOC))
            lines.append(f"| {row['program']} | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"
    axis = "cpus" if figure == "1a" else "sockets"
    lines = [
        f"| {axis.replace('cpu', 'CPU')} | interrupts per call, touched | untouched | other CPUs |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        cells = (f"{row[variant]['interrupts_per_call']:.2f}" for variant in VARIANTS)
        lines.append(f"| {row[axis]} | {' | '.join(cells)} | {row['other_cpus']} |")
    return "\n".join(lines) + "\n"


def draw(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """All measured figures in one picture."""
    from calm.core import plot

    names = {"1a": "CPUs of one socket", "1b": "sockets that 12 CPUs lie in"}
    figure, axes = plot.pyplot().subplots(
        1, len(results), figsize=(4.6 * len(results), 3.8), layout="constrained", squeeze=False
    )
    for axis, (name, result) in zip(axes[0], results.items(), strict=True):
        rows = result["rows"]
        if name == "3":
            width = 0.27
            for place, label in enumerate((GLIBC, PTLBMALLOC2, CALMALLOC)):
                heights = [row[label]["median_interrupts"] for row in rows]
                axis.bar([number + place * width for number in range(len(rows))], heights, width, label=label)
            axis.set_xticks([number + width for number in range(len(rows))], [row["program"] for row in rows])
            axis.tick_params(axis="x", rotation=35)
            axis.set_yscale("symlog", linthresh=10)
            axis.set(title="figure 3", ylabel="TLB interrupts")
        else:
            at = [row["cpus" if name == "1a" else "sockets"] for row in rows]
            for variant in VARIANTS:
                axis.plot(
                    at, [row[variant]["interrupts_per_call"] for row in rows], "o-", ms=4, label=variant
                )
            axis.plot(at, [row["other_cpus"] for row in rows], "k:", label="other CPUs")
            axis.set(title=f"figure {name}", xlabel=names[name], ylabel="TLB interrupts for each call")
            axis.set_xticks(at if name == "1b" else range(0, MOST_CPUS + 1, 4))
            axis.set_ylim(bottom=0, top=MOST_CPUS)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    plot.save(figure, path)
