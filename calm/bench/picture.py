"""The picture of the suite: time against memory, each row a point, and who is on the front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm import plot
from calm.bench.analysis import PEAK, TIME, Analysis
from calm.statistics import Ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by every kind of eye (Okabe and Ito), and each with a mark of its own for print.
_LOOKS = {
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


@dataclass(frozen=True)
class Place:
    """Where an allocator's means lie, with their intervals."""

    label: str
    time: Ratio
    memory: Ratio

    @property
    def point(self) -> tuple[float, float]:
        """Time, memory."""
        return self.time.value or 0.0, self.memory.value or 0.0


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other one beats in one way without losing in the other, from the fastest on."""
    kept: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def places(analysis: Analysis) -> list[Place]:
    """Everyone's geometric means, of those who have both and over all rows."""
    found = {mean.what.key: mean for mean in analysis.means if mean.scope == "all"}
    time, memory = found[TIME.key], found[PEAK.key]
    return [
        Place(label, time.to_best[label], memory.to_best[label])
        for label in analysis.results.labels
        if time.to_best[label].value is not None and memory.to_best[label].value is not None
    ]


def points(analysis: Analysis, label: str) -> list[tuple[float, float]]:
    """One allocator's rows: time and peak, each to the best of the row."""
    found = []
    for time, memory in zip(analysis.rankings[TIME.key], analysis.rankings[PEAK.key], strict=True):
        entries = time.entry(label), memory.entry(label)
        best = time.best(), memory.best()
        if entries[0] and entries[1] and best[0] and best[1]:
            found.append((entries[0].cost / best[0].cost, entries[1].cost / best[1].cost))
    return found


def looks_of(labels: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Color and marker of each allocator, the same in every picture."""
    spare = iter(_SPARE * (1 + len(labels) // len(_SPARE)))
    return {label: _LOOKS[label] if label in _LOOKS else next(spare) for label in labels}


def _log_axes(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        # As many figures as there is room for.
        figures = (1, 1.5, 2, 3, 5) if high / low < 15 else (1, 2, 5) if high / low < 500 else (1,)
        axis.set_major_locator(LogLocator(base=10, subs=figures))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_rows(axes: Axes, analysis: Analysis, looks: dict[str, tuple[str, str]]) -> None:
    for label, (color, marker) in looks.items():
        rows = points(analysis, label)
        if rows:
            xs, ys = [x for x, _ in rows], [y for _, y in rows]
            axes.scatter(xs, ys, s=22, color=color, marker=marker, alpha=0.55, linewidths=0, zorder=2)
    for place in places(analysis):
        color, marker = looks[place.label]
        axes.scatter(
            *place.point, s=150, color=color, marker=marker, edgecolors="white", linewidths=1.2, zorder=4
        )
    _log_axes(axes)
    low_x, high_x = axes.get_xlim()
    low_y, high_y = axes.get_ylim()
    axes.set_xlim(min(low_x, 0.93), max(high_x, 2.2))
    axes.set_ylim(min(low_y, 0.93), max(high_y, 2.2))
    axes.set_title("every row (small), geometric means (large)", fontsize=10)


def _draw_means(axes: Axes, analysis: Analysis, looks: dict[str, tuple[str, str]]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    found = places(analysis)
    for place in found:
        color, marker = looks[place.label]
        x, y = place.point
        spread = [
            [[value - (ratio.low or value)], [(ratio.high or value) - value]]
            for value, ratio in ((x, place.time), (y, place.memory))
        ]
        axes.errorbar(x, y, xerr=spread[0], yerr=spread[1], color=color, linewidth=1, capsize=0, zorder=3)
        axes.scatter(x, y, s=150, color=color, marker=marker, edgecolors="white", linewidths=1.2, zorder=4)
        axes.annotate(
            place.label, (x, y), xytext=(9, 6), textcoords="offset points", fontsize=9, color="#222222"
        )
    reached = front([place.point for place in found])
    low_x, high_x = axes.get_xlim()
    low_y, high_y = axes.get_ylim()
    # Room for the names at the right.
    high_x += 0.18 * (high_x - low_x)
    if reached:
        xs = [reached[0][0], *(x for x, _ in reached), high_x]
        ys = [high_y, *(y for _, y in reached), reached[-1][1]]
        axes.step(xs, ys, where="post", color="#888888", linewidth=1.2, linestyle=(0, (4, 2)), zorder=1)
        axes.fill_between(xs, ys, low_y, step="post", color="#888888", alpha=0.07, linewidth=0, zorder=0)
        axes.fill_betweenx([low_y, high_y], low_x, reached[0][0], color="#888888", alpha=0.07, linewidth=0)
    axes.set_xlim(low_x, high_x)
    axes.set_ylim(low_y, high_y)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title("geometric means, 95 % intervals, Pareto front (dashed)", fontsize=10)


def _legend(figure: Any, labels: Sequence[str], looks: dict[str, tuple[str, str]]) -> None:  # noqa: ANN401
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="", color=looks[label][0], marker=looks[label][1], markersize=7, label=label)
        for label in labels
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(9, len(labels)), frameon=False, fontsize=9
    )


def draw(path: Path, analysis: Analysis) -> None:
    """Writes the picture; its ending tells the format."""
    pyplot = plot.pyplot()
    labels = analysis.results.labels
    looks = looks_of(labels)
    figure, (rows, means) = pyplot.subplots(1, 2, figsize=(12, 5.6), layout="constrained")
    _draw_rows(rows, analysis, looks)
    _draw_means(means, analysis, looks)
    for axes in (rows, means):
        axes.set_xlabel("time, to the best of each row (less is better)")
        axes.set_ylabel("peak RSS, to the best of each row (less is better)")
    machine = analysis.results.machine
    figure.suptitle(
        f"{len(analysis.results.rows)} programs on {machine.get('cpus')} CPUs ({machine.get('cpu')}), "
        f"{analysis.results.date[:10]}",
        fontsize=11,
    )
    _legend(figure, labels, looks)
    plot.save(figure, path)
