"""The picture of a comparison: time against memory, and shootdowns beside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from calm.errors import CalmError
from calm.measure import METRIC, Measurement
from calm.statistics import median

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".svg", ".png")


def _values(runs: Sequence[Measurement], key: str) -> list[float]:
    return [value for run in runs if (value := METRIC[key].get(run)) is not None]


def _memory_key(results: Mapping[str, Sequence[Measurement]]) -> str:
    """Average memory is what a machine has to have; programs too short to sample have a peak only."""
    every = all(METRIC["average_rss_kib"].get(run) is not None for runs in results.values() for run in runs)
    return "average_rss_kib" if every else "peak_rss_kib"


def _shootdown_key(results: Mapping[str, Sequence[Measurement]]) -> str | None:
    for key in ("shootdowns_begun", "system_wide_tlb_interrupts"):
        if all(METRIC[key].get(run) is not None for runs in results.values() for run in runs):
            return key
    return None


def pyplot() -> ModuleType:
    """Matplotlib, for files. Imported here, because it takes longer than most of what calm does."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "calm"  # the same figures give the same file
    from matplotlib import pyplot

    return pyplot


def save(figure: "Figure", path: Path) -> None:
    """Writes a picture and lets go of it; the ending tells the format."""
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise CalmError(f"cannot write {path}: {error.strerror}") from error
    finally:
        pyplot().close(figure)


def draw(path: Path, title: str, results: Mapping[str, Sequence[Measurement]]) -> None:
    """Writes the picture; its ending tells the format."""
    results = {label: runs for label, runs in results.items() if runs}
    memory, shootdowns = _memory_key(results), _shootdown_key(results)
    figure, (plane, bars) = pyplot().subplots(
        1, 2, figsize=(11, 4.8), width_ratios=(3, 2), layout="constrained"
    )
    figure.suptitle(title if len(title) <= 100 else title[:99] + "…", fontsize=10)
    colors = [f"C{index % 10}" for index in range(len(results))]
    for color, (label, runs) in zip(colors, results.items(), strict=True):
        times = _values(runs, "wall_s")
        sizes = [kib / 1024 for kib in _values(runs, memory)]
        plane.scatter(times, sizes, s=14, color=color, alpha=0.35, linewidths=0)
        plane.scatter(
            [median(times) or 0], [median(sizes) or 0], s=90, color=color, edgecolors="black", label=label
        )
    plane.set(xlabel="wall time, s", ylabel=f"{METRIC[memory].label}, MiB")
    plane.set_xlim(left=0)
    plane.set_ylim(bottom=0)
    plane.grid(alpha=0.3)
    plane.legend(fontsize=9, title="median (large), runs (small)", title_fontsize=8)
    if shootdowns:
        heights = [median(_values(runs, shootdowns)) or 0 for runs in results.values()]
        drawn = bars.barh(list(results), heights, color=colors)
        bars.bar_label(drawn, labels=[f"{height:,.0f}" for height in heights], padding=3, fontsize=9)
        # From none to a hundred thousand on one axis.
        bars.set_xscale("symlog", linthresh=10)
        bars.set_xlim(0, 20 * max(10, *heights) if heights else 10)
        bars.set(xlabel=METRIC[shootdowns].label + " (median)")
        bars.invert_yaxis()
    else:
        bars.text(0.5, 0.5, "shootdowns were not counted", ha="center", va="center", transform=bars.transAxes)
        bars.set_axis_off()
    save(figure, path)
