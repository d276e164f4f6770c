"""The report of `calm colors simulate`: tables, the conclusions from them, and the picture."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from calm.core import plot
from calm.core.report import memory, print_table, table
from research.colors.policies import HASH
from research.colors.simulation import BLOCKED, CONFLICTS, LINEAR, PROCESSES, Figure, Point, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Columns of a table of sizes: where random colors begin to conflict, and where the cache is full.
_SHARES = (0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5)
_BAD = 0.5
"""A case is pathological from this share of misses on."""

# Distinguishable with color blindness (Okabe and Ito).
_COLORS = ("#0072B2", "#56B4E9", "#E69F00", "#7B5B00", "#009E73", "#CC79A7", "#444444", "#882255", "#D55E00")


def _title(found: Simulation) -> str:
    cache = found.cache
    return (
        f"{cache.name}: {memory(cache.bytes / 1024)}, {cache.ways} ways, {found.colors} colors of "
        f"{memory(found.page_bytes / 1024)} pages; {found.rounds} runs"
    )


def _is_by_size(figure: Figure) -> bool:
    """Whether the curves are over sizes, as shares of the cache, and not over numbers."""
    return figure.name in (CONFLICTS, LINEAR, BLOCKED)


def _where(figure: Figure, at: float) -> str:
    return f"{100 * at:.4g} %" if _is_by_size(figure) else f"{at:.0f}"


def _number(value: float) -> str:
    """At most two digits, or all before the point; only 0 is printed as 0."""
    if value == int(value) or value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.05 else "<0.1"


def _cell(figure: Figure, point: Point) -> str:
    """The mean, and the range if runs differ."""
    scale, unit = (1, "") if figure.name == CONFLICTS else (100, " %")
    low, mean, high = (_number(scale * value) for value in (point.minimum, point.mean, point.maximum))
    return f"{mean}{unit}" if point.minimum == point.maximum else f"{mean}{unit} ({low}-{high})"


def _table(figure: Figure) -> Table:
    points = figure.curves[0].points
    columns = list(range(len(points)))
    if figure.name in (CONFLICTS, LINEAR):
        # The nearest points: a small cache has no whole number of pages for each share.
        columns = sorted({min(columns, key=lambda index: abs(points[index].at - each)) for each in _SHARES})
    headings = [_where(figure, points[index].at) for index in columns]
    made = table("policy", *headings, right=headings)
    for curve in figure.curves:
        made.add_row(curve.policy, *(_cell(figure, curve.points[index]) for index in columns))
    return made


def findings(found: Simulation) -> list[str]:
    """The conclusions from the figures, in sentences."""
    lines = []
    for figure in found.figures:
        counted = figure.name == CONFLICTS
        if _is_by_size(figure) and not counted:
            continue
        groups: dict[float | None, list[str]] = {}
        for curve in figure.curves:
            bad = [each.at for each in curve.points if (each.maximum >= 1 if counted else each.mean >= _BAD)]
            groups.setdefault(bad[0] if bad else None, []).append(curve.policy)
        for at, policies in groups.items():
            if counted:
                begins = f"in some run from {_where(figure, at)} of the cache on" if at else "none in any run"
                what = f"unnecessary conflicts of one array, {begins}"
            else:
                begins = f"from {_where(figure, at)} on" if at else "never"
                what = f"{figure.name}: most accesses miss though there is room, {begins}"
            lines.append(f"{what}: {', '.join(policies)}")
    if any(curve.policy == HASH for figure in found.figures for curve in figure.curves):
        cache = found.cache
        whole, less = memory(cache.bytes / 1024), memory((cache.ways - 1) * cache.way_bytes / 1024)
        lines.append(
            f"{HASH}: the first {whole} of a segment never conflict with each other, nor any {less} in a row "
            f"within a segment ({cache.ways - 1} ways of {cache.ways})"
        )
    return lines


def show(console: Console, found: Simulation) -> None:
    """Prints all tables, the conclusions and the notes."""
    console.print(f"{_title(found)} ({found.traced} of them access by access), seed {found.seed}")
    for figure in found.figures:
        console.print(f"\n{figure.name}: {figure.what}")
        print_table(console, _table(figure))
    console.print()
    for line in (*findings(found), *(f"note: {note}" for note in found.notes)):
        console.print(line)


def _panel(axes: "Axes", figure: Figure) -> None:
    counted, by_size = figure.name == CONFLICTS, _is_by_size(figure)
    scale = 1 if counted else 100
    for index, curve in enumerate(figure.curves):
        color = _COLORS[index % len(_COLORS)]
        # Equal curves stay visible: each is thinner than the last.
        width = 1.5 + 0.6 * (len(figure.curves) - 1 - index)
        where = [point.at * (100 if by_size else 1) for point in curve.points]
        low, mean, high = (
            [scale * getattr(point, name) for point in curve.points]
            for name in ("minimum", "mean", "maximum")
        )
        axes.fill_between(where, low, high, color=color, alpha=0.2, linewidth=0)
        axes.plot(where, mean, color=color, linewidth=width, label=curve.policy)
    axes.set_title(figure.name, fontsize=10)
    by_number = "processes" if figure.name == PROCESSES else "arrays"
    axes.set(
        xlabel="size, % of the cache" if by_size else by_number,
        ylabel="unnecessary conflicts, pages" if counted else "misses, % of repeated accesses",
    )
    axes.set_ylim(*((-0.03 * axes.get_ylim()[1], None) if counted else (-4, 104)))
    axes.grid(alpha=0.3)


def draw(found: Simulation, path: Path) -> None:
    """Draws a panel for each figure: means as lines, in the range of all runs."""
    columns = min(3, len(found.figures))
    rows = -(-len(found.figures) // columns)
    size = (4.6 * columns, 3.7 * rows + 0.6)
    picture, panels = plot.pyplot().subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    picture.suptitle(_title(found), fontsize=10)
    for axes, figure in zip(panels.flat, found.figures, strict=False):
        _panel(axes, figure)
    for axes in panels.flat[len(found.figures) :]:
        axes.set_axis_off()
    handles, labels = panels[0][0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    plot.save(picture, path)
