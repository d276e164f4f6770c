"""The published programs beside the suite's stand-ins as one of the figures: its result, and its tables.

The result has what these tables need of the suite's document: the medians of time and peak RSS.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from research.bench.analysis import AVERAGE, PEAK
from research.bench.results import METRIC
from research.bench.source_tree import SourceTree

from . import suite
from .results import Store

NAME = "published"
KINDS = ("published",)


def kept(found: dict[str, Any]) -> dict[str, Any]:
    """The suite's document without figures and ratios that are in none of the tables."""
    rows = [
        row
        | {
            "medians": {
                figure: row["medians"][figure]
                for figure in (METRIC if row["metric"] else "wall_s", PEAK.key)
                if figure in row["medians"]
            },
            "ratios": {},
            "spans": {key: span for key, span in row["spans"].items() if key != AVERAGE.key},
        }
        for row in found["rows"]
    ]
    means = {
        name: mean
        for name, mean in found["means"].items()
        if name.endswith(" to the best") and not name.startswith(AVERAGE.key)
    }
    return found | {"rows": rows, "means": means, "how": {}}


def measure(store: Store, runs: int | None, tree: SourceTree) -> None:
    """Builds and runs the programs of the tree, and their stand-ins, and saves the result."""
    path = store.runs(NAME)
    suite.run(path, runs, "--suite", NAME, "--source", f"{tree.name}={tree.folder}")
    suite.keep(store, NAME, kept(json.loads(path.read_text())))


def tables(folder: Path) -> str:
    """The tables for a page; empty if the programs were not measured."""
    return suite.tables(folder, KINDS, NAME)
