"""The paging paper's figures as one picture, a panel for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.core import plot, report
from calm.core.allocators import GLIBC
from research.bench.results import METRIC, Results
from research.papers import valat_cases as cases
from research.papers import valat_frames
from research.papers import valat_tables as tables
from research.papers.labels import plain
from research.papers.model import About, middle
from research.papers.valat_cases import all_of, one_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by every kind of eye (Okabe and Ito).
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#444444", "#882255")
_MARKS = "os^DvPX<"


def _color(index: int) -> str:
    """Again from the first, where more take part than there are."""
    return _COLORS[index % len(_COLORS)]


def _line(axes: Axes, index: int, xs: Sequence[float], ys: Sequence[float | None], name: str) -> None:
    known = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    if known:
        marker = _MARKS[index % len(_MARKS)]
        places, values = [x for x, _ in known], [y for _, y in known]
        axes.plot(places, values, color=_color(index), marker=marker, markersize=3.5, label=name)


def _figure_2(axes: Axes, name: str, curves: valat_frames.Curves) -> None:
    where = [100 * share for share in valat_frames.shares_of(curves)]
    for index, source in enumerate(valat_frames.SOURCES):
        low, mean, high = (curves.get(valat_frames.key(source, kind)) for kind in valat_frames.KINDS)
        if low is None or mean is None or high is None:
            continue
        axes.fill_between(where, low, high, color=_color(index), alpha=0.2, linewidth=0)
        axes.plot(where, mean, color=_color(index), label=source, linewidth=3 - 0.35 * index)
    axes.set_title(f"figure 2: {name}", fontsize=10)
    axes.set(xlabel="size of the array, % of the cache", ylabel="unnecessary conflicts, pages")


def _figure_3(axes: Axes, results: Results, walk: str) -> None:
    sizes = tables.sweep_sizes(results, walk)
    for index, (memory, label) in enumerate(tables.sweep_columns(results, walk)):
        rows = [one_of(results, "array-sweep", walk=walk, bytes=size, memory=memory) for size in sizes]
        times = [middle(row, label, METRIC) for row in rows]
        _line(axes, index, [size / (1 << 20) for size in sizes], times, tables.sweep_name(memory, label))
    axes.set_title(f"figure 3: a repeated pass ({walk})", fontsize=10)
    axes.set(xlabel="size of the array, MiB", ylabel="time of a load, ns")
    axes.set_ylim(bottom=0)


def _figures_6_7(axes: Axes, results: Results) -> None:
    columns = [each for each in tables.systems(results) if each != (GLIBC, False)]
    numbers = tables.numbers_of_processes(results)
    for index, column in enumerate(columns):
        found = {number: tables.gains(results, number, *column) for number in numbers}
        there = [number for number in numbers if found[number]]
        if not there:
            continue
        least, largest = [min(found[number]) for number in there], [max(found[number]) for number in there]
        axes.fill_between(there, least, largest, color=_color(index), alpha=0.2, linewidth=0)
        means = [sum(found[number]) / len(found[number]) for number in there]
        _line(axes, index, there, means, tables.system_name(*column))
    axes.axhline(0, color="#444444", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.set_title("figures 4 to 7: gain to glibc, mean and all programs", fontsize=10)
    axes.set(xlabel="processes", ylabel="less time, %")


def _figure_10(axes: Axes, results: Results, work: str) -> None:
    between = tables.stream_gaps(results)
    numbers = sorted({each.number("arrays") for each in all_of(results, "streams", work=work)})

    def curve(index: int, name: str, label: str, **wanted: int | str) -> None:
        fixed: dict[str, Any] = {"work": work, "threads": 1} | wanted
        rows = [one_of(results, "streams", arrays=number, **fixed) for number in numbers]
        _line(axes, index, numbers, [middle(row, label, METRIC) for row in rows], name)

    for index, gap in enumerate(between):
        curve(index, tables.gap_name(gap, between[0]), GLIBC, memory="mmap", gap=gap)
    for index, label in enumerate(tables.stream_labels(results), len(between)):
        curve(index, f"malloc, {plain(label)}", label, memory="malloc")
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.set_title(f"figure 10: {work}, 1 thread", fontsize=10)
    axes.set(xlabel="arrays", ylabel="time of an element, ns")
    axes.set_ylim(bottom=0)


def draw(results: Results, about: About, path: Path) -> None:
    del about
    figure, panels = plot.pyplot().subplots(2, 3, figsize=(15, 9), layout="constrained")
    free = list(panels.flat)

    def panel() -> Axes:
        axes: Axes = free.pop(0)
        return axes

    for row in tables.frame_rows(results)[:2]:
        size = report.memory(valat_frames.cache_of(row.curves).bytes / 1024)
        _figure_2(panel(), f"{row.name}, {size}", row.curves)
    if tables.sweep_columns(results, cases.PAGES):
        _figure_3(panel(), results, cases.PAGES)
    if tables.systems(results):
        _figures_6_7(panel(), results)
    for work in cases.STREAM_WORK if tables.stream_labels(results) else ():
        _figure_10(panel(), results, work)
    for axes in free:
        axes.set_axis_off()
    for axes in panels.flat[: panels.size - len(free)]:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    plot.save(figure, path)
