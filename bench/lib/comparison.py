"""The table of docs/comparison.md: figures of a burst, of the suite, and of many CPUs, by allocator."""

from __future__ import annotations

from research.bench.analysis import PEAK, TIME, analyse

from . import idle_curve, scaling, suite, summary
from .results import Store
from .rounds import CALMALLOC
from .tables import line

NAME = "comparison"
LABELS = (CALMALLOC, *(label for label in idle_curve.LABELS if label != CALMALLOC))


def table(store: Store) -> str:
    """The table; empty until all of it has been measured."""
    curve, many = store.load(idle_curve.NAME), store.load(scaling.NAME)
    if curve is None or many is None or not suite.result(store.folder).exists():
        return ""
    analysis = analyse(suite.load(store.folder))
    threads, rows = next(iter(many["threads"].items()))
    scaled = {label: scaling.mean(rows, label, 0) for label in LABELS}
    left = {each["label"]: f"{each['kept_mib']:,.0f} MiB" for each in curve["curves"]}
    columns = {
        f"kept of 1 GiB after {idle_curve.IDLE_S} s": left,
        f"time, {len(analysis.results.rows)} programs": summary.means(analysis, TIME.key),
        "peak": summary.means(analysis, PEAK.key),
        "shootdowns": {label: f"{total:,.0f}" for label, (total, _) in analysis.shootdowns.items()},
        f"time, {threads} threads": {label: f"{time:.2f}" for label, time in scaled.items() if time},
    }
    return (
        "\n".join(
            [
                line(["", *columns]),
                line(["---", *["---:"] * len(columns)]),
                *(line([label, *(cells.get(label, "") for cells in columns.values())]) for label in LABELS),
            ]
        )
        + "\n"
    )
