"""The picture of the suite: time against memory, each row a point, and the Pareto front of the means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter

from calm.core import plot
from calm.core.statistics import Ratio
from research.bench.analysis import PEAK, TIME, Analysis

# Distinct with every kind of color vision (Okabe and Ito), each with a marker of its own for print.
_STYLES = {
    "calmalloc": ("#D55E00", "o"),
    "glibc": ("#444444", "s"),
    "jemalloc": ("#0072B2", "^"),
    "mimalloc": ("#009E73", "D"),
    "snmalloc": ("#CC79A7", "v"),
    "tcmalloc": ("#E69F00", "P"),
    "rpmalloc": ("#56B4E9", "X"),
    "gperftools": ("#7B5B00", "h"),
    "ptlbmalloc2": ("#882255", "<"),
}
_SPARE = [("#332288", ">"), ("#999933", "p"), ("#AA4499", "d"), ("#117733", "*"), ("#661100", "8")]


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front of points of which less is better, from the fastest on."""
    kept: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def places(analysis: Analysis) -> dict[str, tuple[Ratio, Ratio]]:
    """Geometric means of time and memory over all rows, of the allocators that have both."""
    time, memory = (
        next(mean.to_best for mean in analysis.means if mean.what is what and mean.scope == "all")
        for what in (TIME, PEAK)
    )
    both = {label: (time[label], memory[label]) for label in analysis.results.labels}
    return {label: pair for label, pair in both.items() if all(ratio.value is not None for ratio in pair)}


def points(analysis: Analysis, label: str) -> list[tuple[float, float]]:
    """One allocator's rows: time and peak, each to the best of the row."""
    both = zip(analysis.rankings[TIME.key], analysis.rankings[PEAK.key], strict=True)
    rows = (pair for pair in both if all(label in ranking.ratios for ranking in pair))
    return [(time.cost(label), memory.cost(label)) for time, memory in rows]


def styles(labels: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Color and marker of each allocator, the same in every picture."""
    spare = iter(_SPARE * (1 + len(labels) // len(_SPARE)))
    return {label: _STYLES[label] if label in _STYLES else next(spare) for label in labels}


def _plain_axis(axis: Axis, locator: Locator) -> None:
    """Numbers as 0.5 and 20, with no minor ones."""
    axis.set_major_locator(locator)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _mark(axes: Axes, x: float, y: float, style: tuple[str, str]) -> None:
    color, marker = style
    axes.scatter(x, y, s=150, color=color, marker=marker, edgecolors="white", linewidths=1.2, zorder=4)


def _draw_rows(axes: Axes, analysis: Analysis, style: dict[str, tuple[str, str]]) -> None:
    for label, (color, marker) in style.items():
        if rows := points(analysis, label):
            xs, ys = zip(*rows, strict=True)
            axes.scatter(xs, ys, s=22, color=color, marker=marker, alpha=0.55, linewidths=0, zorder=2)
    for label, (time, memory) in places(analysis).items():
        _mark(axes, time.value or 0, memory.value or 0, style[label])
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        # As many numbers as there is room for.
        numbers = (1, 1.5, 2, 3, 5) if high / low < 15 else (1, 2, 5) if high / low < 500 else (1,)
        _plain_axis(axis, LogLocator(base=10, subs=numbers))
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    axes.set_xlim(min(left, 0.93), max(right, 2.2))
    axes.set_ylim(min(bottom, 0.93), max(top, 2.2))
    axes.set_title("every row (small), geometric means (large)", fontsize=10)


def _draw_means(axes: Axes, analysis: Analysis, style: dict[str, tuple[str, str]]) -> None:
    found = []
    for label, pair in places(analysis).items():
        x, y = (ratio.value or 0 for ratio in pair)
        found.append((x, y))
        spread = [
            [[value - (ratio.low or value)], [(ratio.high or value) - value]]
            for value, ratio in zip((x, y), pair, strict=True)
        ]
        color = style[label][0]
        axes.errorbar(x, y, xerr=spread[0], yerr=spread[1], color=color, linewidth=1, capsize=0, zorder=3)
        _mark(axes, x, y, style[label])
        axes.annotate(label, (x, y), xytext=(9, 6), textcoords="offset points", fontsize=9, color="#222222")
    low_x, high_x = axes.get_xlim()
    low_y, high_y = axes.get_ylim()
    # Room for the names at the right.
    high_x += 0.18 * (high_x - low_x)
    if reached := front(found):
        xs = [reached[0][0], *(x for x, _ in reached), high_x]
        ys = [high_y, *(y for _, y in reached), reached[-1][1]]
        axes.step(xs, ys, where="post", color="#888888", linewidth=1.2, linestyle=(0, (4, 2)), zorder=1)
        axes.fill_between(xs, ys, low_y, step="post", color="#888888", alpha=0.07, linewidth=0, zorder=0)
        axes.fill_betweenx([low_y, high_y], low_x, reached[0][0], color="#888888", alpha=0.07, linewidth=0)
    axes.set(xlim=(low_x, high_x), ylim=(low_y, high_y))
    for axis in (axes.xaxis, axes.yaxis):
        _plain_axis(axis, MaxNLocator(6))
    axes.set_title("geometric means, 95 % intervals, Pareto front (dashed)", fontsize=10)


def draw(path: Path, analysis: Analysis) -> None:
    pyplot = plot.pyplot()
    labels = analysis.results.labels
    style = styles(labels)
    figure, (rows, means) = pyplot.subplots(1, 2, figsize=(12, 5.6), layout="constrained")
    _draw_rows(rows, analysis, style)
    _draw_means(means, analysis, style)
    for axes in (rows, means):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("time, to the best of each row (less is better)")
        axes.set_ylabel("peak RSS, to the best of each row (less is better)")
    machine = analysis.results.machine
    figure.suptitle(
        f"{len(analysis.results.rows)} programs on {machine.get('cpus')} CPUs ({machine.get('cpu')}), "
        f"{analysis.results.date[:10]}",
        fontsize=11,
    )
    handles = [
        Line2D([], [], linestyle="", color=color, marker=marker, markersize=7, label=label)
        for label, (color, marker) in style.items()
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(9, len(labels)), frameon=False, fontsize=9
    )
    plot.save(figure, path)
