"""`calm colors --simulate`: the tables, the sentences that follow from them, and the picture."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from calm import plot
from calm.colors.simulation.policies import HASH
from calm.colors.simulation.simulate import (
    ARRAYS,
    BLOCKED,
    CONFLICTS,
    LINEAR,
    PROCESSES,
    SPREAD,
    Curve,
    Figure,
    Point,
    Result,
)
from calm.report import memory, print_table, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Columns of a table of sizes: where random colors begin to hurt, and where the cache is full.
_SHOWN = (0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5)
_BAD = 0.5
"""Where so many accesses miss to data that there is room for, a case is called pathological."""

# Told apart by every kind of eye (Okabe and Ito). Many are equal: each is drawn thinner than the last.
_LOOKS = ("#0072B2", "#56B4E9", "#E69F00", "#7B5B00", "#009E73", "#CC79A7", "#444444", "#882255", "#D55E00")


def _title(result: Result) -> str:
    cache = result.cache
    return (
        f"L{cache.level}: {memory(cache.bytes / 1024)}, {cache.ways} ways, {result.colors} colors of "
        f"{memory(result.page_bytes / 1024)} pages; {result.runs} runs"
    )


def is_by_size(figure: Figure) -> bool:
    """Whether its curves go over sizes, as shares of the cache, and not over numbers of something."""
    return figure.name in (CONFLICTS, LINEAR, BLOCKED)


def _where(figure: Figure, at: float) -> str:
    return f"{100 * at:.4g} %" if is_by_size(figure) else f"{at:.0f}"


def _cell(figure: Figure, point: Point) -> str:
    """The mean, and what it lies between if it is not always the same."""
    scale, unit = (1, "") if figure.name == CONFLICTS else (100, " %")
    low, mean, high = (_number(scale * value) for value in (point.minimum, point.mean, point.maximum))
    return f"{mean}{unit}" if point.minimum == point.maximum else f"{mean}{unit} ({low}-{high})"


def _number(value: float) -> str:
    """Two digits at most, or all before the point; nothing becomes 0 that is not."""
    if value == int(value) or value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.05 else "<0.1"


def _table(figure: Figure) -> Table:
    made = table()
    points = figure.curves[0].points
    shown = list(range(len(points)))
    if figure.name in (CONFLICTS, LINEAR):
        # The nearest: a small cache has no whole number of pages for each.
        shown = sorted({min(shown, key=lambda index: abs(points[index].at - each)) for each in _SHOWN})
    made.add_column("policy")
    for index in shown:
        made.add_column(_where(figure, points[index].at), justify="right")
    for curve in figure.curves:
        made.add_row(curve.policy, *(_cell(figure, curve.points[index]) for index in shown))
    return made


def begin(curve: Curve, of: Callable[[Point], float], least: float) -> float | None:
    """From where on there is so much of it for the first time; none: nowhere."""
    return next((point.at for point in curve.points if of(point) >= least), None)


def _grouped(figure: Figure, of: Callable[[Point], float], least: float) -> dict[float | None, list[str]]:
    """The policies by where it begins."""
    groups: dict[float | None, list[str]] = {}
    for curve in figure.curves:
        groups.setdefault(begin(curve, of, least), []).append(curve.policy)
    return groups


def findings(result: Result) -> list[str]:
    """What the figures say, in sentences."""
    said = []
    for figure in result.figures:
        if figure.name == CONFLICTS:
            for at, policies in _grouped(figure, lambda point: point.maximum, 1).items():
                begins = (
                    "none in any run"
                    if at is None
                    else f"in some run from {_where(figure, at)} of the cache on"
                )
                said.append(f"unnecessary conflicts of one array, {begins}: {', '.join(policies)}")
        elif figure.name in (ARRAYS, SPREAD, PROCESSES):
            for at, policies in _grouped(figure, lambda point: point.mean, _BAD).items():
                begins = "never" if at is None else f"from {_where(figure, at)} on"
                said.append(
                    f"{figure.name}: most accesses miss though there is room, {begins}: {', '.join(policies)}"
                )
    if any(curve.policy == HASH for figure in result.figures for curve in figure.curves):
        cache = result.cache
        whole, less = memory(cache.bytes / 1024), memory((cache.ways - 1) * cache.way_bytes / 1024)
        said.append(
            f"{HASH}: the first {whole} of a segment never conflict with each other, nor any {less} in a row "
            f"within a segment ({cache.ways - 1} ways of {cache.ways})"
        )
    return said


def report(result: Result, console: Console) -> None:
    """All tables, what follows from them, and what to bear in mind."""
    console.print(f"{_title(result)} ({result.traced} of them access by access), seed {result.seed}")
    for figure in result.figures:
        console.print(f"\n{figure.name}: {figure.what}")
        print_table(console, _table(figure))
    console.print()
    for line in findings(result):
        console.print(line)
    for note in result.notes:
        console.print(f"note: {note}")


def as_json(result: Result) -> dict[str, Any]:
    """Everything."""
    return {"colors": result.colors, "pages": result.pages} | asdict(result)


def _panel(axes: "Axes", figure: Figure, looks: dict[str, tuple[str, float]]) -> None:
    for curve in figure.curves:
        color, width = looks[curve.policy]
        scale = 1 if figure.name == CONFLICTS else 100
        where = [point.at * (100 if is_by_size(figure) else 1) for point in curve.points]
        low, mean, high = (
            [scale * getattr(point, name) for point in curve.points]
            for name in ("minimum", "mean", "maximum")
        )
        axes.fill_between(where, low, high, color=color, alpha=0.2, linewidth=0)
        axes.plot(where, mean, color=color, linewidth=width, label=curve.policy)
    axes.set_title(figure.name, fontsize=10)
    by_number = "processes" if figure.name == PROCESSES else "arrays"
    axes.set(
        xlabel="size, % of the cache" if is_by_size(figure) else by_number,
        ylabel="unnecessary conflicts, pages"
        if figure.name == CONFLICTS
        else "misses, % of repeated accesses",
    )
    if figure.name == CONFLICTS:
        axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])
    else:
        axes.set_ylim(-4, 104)
    axes.grid(alpha=0.3)


def picture(result: Result, path: Path) -> None:
    """A panel for each figure: means as lines, and what all runs lie between."""
    columns = min(3, len(result.figures))
    rows = -(-len(result.figures) // columns)
    names = [curve.policy for curve in result.figures[0].curves]
    looks = {
        name: (_LOOKS[index % len(_LOOKS)], 1.5 + 0.6 * (len(names) - 1 - index))
        for index, name in enumerate(names)
    }
    figure, panels = plot.pyplot().subplots(
        rows, columns, figsize=(4.6 * columns, 3.7 * rows + 0.6), layout="constrained", squeeze=False
    )
    figure.suptitle(_title(result), fontsize=10)
    for axes, drawn in zip(panels.flat, result.figures, strict=False):
        _panel(axes, drawn, looks)
    for axes in panels.flat[len(result.figures) :]:
        axes.set_axis_off()
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    plot.save(figure, path)
