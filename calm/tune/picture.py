"""The picture of a search: time against memory, everything tried, and the front with its intervals."""

from pathlib import Path
from typing import TYPE_CHECKING

from calm import plot
from calm.statistics import Ratio
from calm.tune.search import Outcome
from calm.tune.verdict import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LONG = 110


def _error(ratio: Ratio) -> tuple[float, float]:
    value = ratio.value or 0.0
    low = ratio.low if ratio.low is not None else value
    high = ratio.high if ratio.high is not None else value
    return max(0.0, value - low), max(0.0, high - value)


def _short(text: str) -> str:
    return text if len(text) <= _LONG else text[: _LONG - 1] + "…"


def _point(plane: "Axes", found: Verdict, marker: str, color: str, label: str) -> None:
    time, memory = found.point
    before, behind = _error(found.time)
    below, above = _error(found.memory)
    plane.errorbar(
        [time],
        [memory],
        xerr=[[before], [behind]],
        yerr=[[below], [above]],
        fmt=marker,
        color=color,
        capsize=2,
        markersize=12 if marker == "*" else 5,
        zorder=5 if marker == "*" else 4,
        label=label,
    )


def draw(path: Path, title: str, outcome: Outcome, memory_label: str) -> None:
    """Writes the picture; its ending tells the format."""
    figure, plane = plot.pyplot().subplots(figsize=(8, 6.6), layout="constrained")
    figure.suptitle(_short(title), fontsize=10)
    tried = [each for each in outcome.tried.values() if each.looks and each.failure is None]
    names = sorted({each.setting.allocator for each in tried})
    for number, allocator in enumerate(names):
        own = [each for each in tried if each.setting.allocator == allocator]
        plane.scatter(
            [each.time for each in own],
            [each.memory for each in own],
            s=16,
            alpha=0.4,
            color=f"C{number}",
            linewidths=0,
            label=f"{allocator}, tried",
        )
    plane.scatter([1], [1], s=90, marker="s", color="#444444", label="as it is now", zorder=3)
    # Settings are long, and points of a front lie close: the names stand below, by number.
    for number, each in enumerate(outcome.front, 1):
        _point(plane, each, "o", "black", f"{number}: {_short(each.setting.label)}")
        plane.annotate(
            str(number), each.point, xytext=(5, 5), textcoords="offset points", fontsize=9, fontweight="bold"
        )
    if (best := outcome.recommended) is not None:
        _point(plane, best, "*", "#D55E00", f"recommended: {_short(best.setting.label)}")
    plane.axvline(1, color="#bbbbbb", linewidth=0.8, zorder=0)
    plane.axhline(1, color="#bbbbbb", linewidth=0.8, zorder=0)
    plane.set_xscale("log")
    plane.set_yscale("log")
    plane.set(xlabel="time, ratio", ylabel=f"{memory_label}, ratio")
    for axis in (plane.xaxis, plane.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
        axis.set_tick_params(which="both", labelsize=8)
    plane.grid(alpha=0.25)
    figure.legend(loc="outside lower left", fontsize=7, frameon=False)
    plot.save(figure, path)
