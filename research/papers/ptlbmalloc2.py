"""The Ptlbmalloc2 paper's evaluation: figures 3 and 4 and table 2, with stand-ins for PARSEC's programs.

PARSEC itself is not here. Each stand-in allocates as the literature says that its model does, and vips is the
image library's own program of today.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from calm.core import measure
from calm.core.allocators import GLIBC
from calm.core.measure import METRIC
from calm.core.statistics import Ratio
from research.bench import programs, workloads
from research.bench.cases import Case, Prepared
from research.bench.results import CPU_TIME, Results
from research.bench.tables import Grid, ratio_text
from research.papers import published
from research.papers.model import (
    About,
    Paper,
    count,
    less_text,
    middle,
    pairs,
    ratio,
)
from research.papers.published import Configuration

OWN = "ptlbmalloc2"
# PARSEC's names; the workloads have `-like` behind them.
MODELS = ("bodytrack", "canneal", "dedup", "fluidanimate", "streamcluster", "swaptions")
VIPS = "vips"


def _stand_in(model: str, threads: int) -> Case:
    name = f"{model}-like"

    def prepare(folder: Path) -> Prepared:
        return Prepared((str(workloads.find(name)), "--threads", str(threads)), folder)

    return Case(name, "stand-in", f"a stand-in for PARSEC's {model}", prepare)


def _vips(threads: int) -> Case:
    case = next(case for case in programs.CASES if case.name == VIPS)

    def prepare(folder: Path) -> Prepared:
        prepared = case.prepare(folder)
        return replace(prepared, environment={**prepared.environment, "VIPS_CONCURRENCY": str(threads)})

    return replace(case, prepare=prepare)


def _cases(about: About) -> list[Case]:
    return [*(_stand_in(model, about.threads) for model in MODELS), _vips(about.threads)]


def _others(results: Results) -> list[str]:
    """The allocators that glibc is compared with: ptlbmalloc2 first."""
    return [label for label in results.labels if label != GLIBC]


def _model(case: str) -> str:
    return case.removesuffix("-like")


def _shootdown_key(results: Results) -> str:
    """Each program's own where they were counted, or else the system's interrupts."""
    return "shootdowns" if _counted(results, "shootdowns") else "interrupts_system_wide"


def _counted(results: Results, figure: str) -> bool:
    return any(row.median(side.label, figure) is not None for row in results.rows for side in row.sides)


def _figure_3(results: Results) -> Grid:
    key = _shootdown_key(results)
    others = _others(results)
    headings = ["", "published", GLIBC]
    for label in others:
        headings += [label, "to glibc (95 %)"]
    grid = Grid(f"figure 3: {METRIC[key].label}", headings, words=(1,))
    for row in results.rows:
        cells = [published.FIGURE_3.get(_model(row.name), published.FIGURE_3_OTHERS)]
        cells.append(count(middle(row, GLIBC, key)))
        for label in others:
            cells += [count(middle(row, label, key)), ratio_text(ratio((row, label), (row, GLIBC), key))]
        grid.rows.append([row.name, *cells])
    sums = [_sum(results, label, key) for label in (GLIBC, *others)]
    closing = ["sum", "", count(sums[0])]
    for total in sums[1:]:
        closing += [count(total), ""]
    grid.closing.append(closing)
    grid.notes.append(results.how.get(key, METRIC[key].how))
    if key != "shootdowns":
        grid.notes.append(results.how.get("shootdowns", ""))
    grid.notes.append(
        "the paper has these as bars on a logarithmic scale, without numbers: what stands here as published "
        "is what its section 7.1 says"
    )
    return grid


def _sum(results: Results, label: str, key: str) -> float | None:
    medians = [found for row in results.rows if (found := middle(row, label, key)) is not None]
    return sum(medians) if len(medians) == len(results.rows) else None


def _cycles_key(results: Results) -> str:
    return "cycles" if _counted(results, "cycles") else CPU_TIME


def _cycles_name(results: Results) -> str:
    return "cycles" if _cycles_key(results) == "cycles" else "CPU time"


def _figure_4(results: Results) -> Grid:
    measures = (
        ("memory", "average_rss_kib"),
        ("time", "wall_s"),
        (_cycles_name(results), _cycles_key(results)),
    )
    headings = ["", "published, of ptlbmalloc2"]
    headings += [f"{label}: {name}" for label in _others(results) for name, _ in measures]
    grid = Grid("figure 4: average memory, time and cycles, relative to glibc (95 %)", headings, words=(1,))
    for row in results.rows:
        cells = [published.FIGURE_4.get(_model(row.name), published.FIGURE_4_OTHERS)]
        for label in _others(results):
            cells += [ratio_text(ratio((row, label), (row, GLIBC), figure)) for _, figure in measures]
        grid.rows.append([row.name, *cells])
    closing = ["geometric mean", ""]
    for label in _others(results):
        closing += [ratio_text(_mean(results, label, figure)) for _, figure in measures]
    grid.closing.append(closing)
    grid.notes += _without_cycles(results)
    grid.notes.append(
        "published: the words of section 7.2 on the extremes of 4 to 64 CPUs; the numbers are only drawn"
    )
    return grid


def _without_cycles(results: Results) -> list[str]:
    if _cycles_key(results) == "cycles":
        return []
    reason = results.how.get("cycles", "not counted").removeprefix("not counted: ")
    return [f"CPU time, user and system, stands for cycles: {reason}"]


def _mean(results: Results, label: str, figure: str) -> Ratio:
    """Over all programs that have the figure under both."""
    rows = [pairs((row, label), (row, GLIBC), figure) for row in results.rows]
    whole = [each for each in rows if each[0] and min(*each[0], *each[1]) > 0]
    return results.mean(f"{figure}: {label} to {GLIBC}", whole)


def _table_2(results: Results, about: About) -> Grid:
    others = _others(results)
    grid = Grid(
        f"table 2: average improvement over all programs, in {_cycles_name(results)}",
        ["environment", "CPUs", "sockets", "published", *(f"{label} measured (95 %)" for label in others)],
    )
    here = Configuration(bool(about.virtual), about.threads, about.sockets)
    found = [less_text(_mean(results, label, _cycles_key(results))) for label in others]
    rows: Sequence[Configuration] = [*published.TABLE_2, *([here] if here not in published.TABLE_2 else [])]
    for each in rows:
        environment = "virtual" if each.virtual else "native"
        if each == here and about.virtual is None:
            environment = "not known"
        percent = published.TABLE_2.get(each)
        cells = [str(each.cpus), str(each.sockets), "-" if percent is None else f"{percent} %"]
        grid.rows.append([environment, *cells, *(found if each == here else ["-"] * len(others))])
    average = f"{published.TABLE_2_AVERAGE} %"
    grid.closing.append(["average", "", "", average, *("" for _ in others)])
    grid.notes += _without_cycles(results)
    counted = sorted({_model(row.name) for row in results.rows})
    grid.notes.append(
        f"measured: 1 less the geometric mean of the ratios to glibc, over {', '.join(counted)}"
    )
    return grid


def _figure_5(about: About) -> Grid:
    grid = Grid("figure 5: cycles in a virtualized environment", [""])
    where = {
        True: "this machine is a guest itself, so figure 4 above is of a virtualized environment",
        False: "this machine is no guest",
        None: "this machine does not say whether it is a guest",
    }[about.virtual]
    grid.notes.append(f"not measured: calm starts no virtual machine, and {where}")
    grid.notes.append(
        "published: dedup and vips gain more than natively; all others but swaptions are nearly as with "
        "glibc or better; canneal with 64 CPUs and streamcluster with 4 CPUs in 4 sockets gain much"
    )
    return grid


def _grids(results: Results, about: About) -> list[Grid]:
    return [_figure_3(results), _figure_4(results), _figure_5(about), _table_2(results, about)]


def _differences(results: Results, about: About) -> list[str]:
    stand_ins = [row.name for row in results.rows if row.name != VIPS]
    programs_are = [f"{', '.join(stand_ins)} allocate as their models are described to"] if stand_ins else []
    programs_are += ["vips is today's program of that library"] if len(stand_ins) < len(results.rows) else []
    lines = [
        f"published: {published.PTLBMALLOC2.text}; {published.PTLBMALLOC2.machine}",
        f"none of the programs measured is PARSEC's: {'; '.join(programs_are)}",
        f"{about.threads} threads each, on {about.threads} CPUs: the paper says that gains rise with the "
        "number of CPUs",
    ]
    if OWN in results.labels:
        lines.append(
            "ptlbmalloc2 is this project's own, written from the paper: it gives memory back in fewer and "
            "larger calls than the paper's"
        )
    lines += [f"not run: {name}: {reason}" for name, reason in results.left_out.items()]
    return lines


PAPER = Paper(
    name="ptlbmalloc2",
    citation=published.PTLBMALLOC2,
    allocators=(GLIBC, OWN),
    extra=("calmalloc",),
    cases=_cases,
    grids=_grids,
    differences=_differences,
    groups=(measure.TLB_GROUP, measure.HARDWARE_GROUP),
)
