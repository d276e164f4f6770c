"""Many large arrays under calmalloc and jemalloc, by their size, their number, threads and huge pages.

Each cell of the grid is a short measurement in which both alternate. The result is the mean of all cells, and
the cells in which calmalloc is certainly slower.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from calm.core.statistics import ratio_of_medians
from research.papers import huge_pages
from research.statistics import geometric_mean_of_ratios

from . import judged
from .judged import Goal
from .results import BUILD, Store, summarize
from .rounds import CALMALLOC, interleaved, present, run_once, version_of

NAME = "placement-peer"
PEER = "jemalloc"
UNPLACED = f"{CALMALLOC}:CALM_OPTIONS=test_placement=off"
METRIC = "seconds"
SIZES = tuple(kib << 10 for kib in (64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10))
ARRAYS = (2, 4, 8, 16, 32, 64, 128)
THREADS = (1, 2)
ROUNDS = 7
# A run takes about 40 ms if the arrays do not conflict.
REPEATS = 20_000
# calmalloc is worse if the mean is above the first, or a cell's whole interval is above the second.
MEAN_AT_MOST, CELL_AT_MOST = 1.0, 1.05
ALWAYS = "always"

# A cell's ratio is only reported; the mean of all cells is judged.
_TOLD = asdict(Goal(METRIC, CALMALLOC, PEER))

Measured = Callable[[Sequence[str], int, str], list[dict[str, Any]]]


def command(size: int, arrays: int, threads: int) -> list[str]:
    """A cell's command, run in the repository's root."""
    words = {"bytes": size, "arrays": arrays, "threads": threads, "repeats": REPEATS}
    options = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return [str(BUILD / "streams"), "--work", "update", "--memory", "malloc", *options]


@contextmanager
def _modes(set_huge_pages: bool, path: Path) -> Iterator[dict[str, Callable[[], None]]]:
    """The huge-page modes to measure, and functions that set them; restores the mode at the end."""
    found = huge_pages.mode(path)
    if not set_huge_pages or found == ALWAYS:
        print(f"{NAME}: huge pages {found}" + ("" if set_huge_pages else "; --set-thp: always, too"))
        yield {found: lambda: None}
        return
    with huge_pages.always(path):
        yield {mode: lambda mode=mode: path.write_text(mode) for mode in (found, ALWAYS)}  # type: ignore[misc]


def _measured(words: Sequence[str], rounds: int, case: str) -> list[dict[str, Any]]:
    return interleaved(
        present([CALMALLOC, PEER]), lambda allocator: run_once(words, allocator), rounds, case=case
    )


def _times(cell: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The runs of calmalloc and the peer; empty if one of them failed or is not installed."""
    by_label = {side["label"]: [float(run[METRIC]) for run in side["runs"]] for side in cell["runs"]}
    ours, theirs = by_label.get(CALMALLOC, []), by_label.get(PEER, [])
    return (ours, theirs) if len(ours) == len(theirs) else ([], [])


def name_of(cell: Mapping[str, Any]) -> str:
    """A description of the cell."""
    threads = f"{cell['threads']} thread{'s' if cell['threads'] > 1 else ''}"
    return f"{cell['arrays']} arrays of {cell['bytes'] >> 10} KiB, {threads}, huge pages {cell['huge_pages']}"


def judge(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean over all cells with both allocators, and the cells in which calmalloc is slower."""
    pairs = [_times(cell) for cell in cells]
    mean = geometric_mean_of_ratios([pair for pair in pairs if pair[0]])
    slower = [cell for cell in cells if (cell["ratio"][1] or 0) > CELL_AT_MOST]
    known = bool(pairs) and all(pair[0] for pair in pairs) and mean.low is not None
    of_mean = judged.outcome(MEAN_AT_MOST, mean.low, mean.high) if mean.value is not None else "not known"
    of_cells: judged.Outcome = "missed" if slower else "met" if known else "not known"
    return {
        "mean": asdict(Goal(METRIC, CALMALLOC, PEER, MEAN_AT_MOST))
        | {"value": mean.value, "low": mean.low, "high": mean.high, "n": mean.n, "outcome": of_mean},
        "slower": [name_of(cell) for cell in slower],
        "cells_outcome": of_cells,
        "outcome": judged.of_all([{"outcome": of_mean}, {"outcome": of_cells}]),
    }


def _cell(mode: str, size: int, arrays: int, threads: int, rounds: int, measured: Measured) -> dict[str, Any]:
    cell: dict[str, Any] = {"huge_pages": mode, "bytes": size, "arrays": arrays, "threads": threads}
    name = name_of(cell)
    cell["runs"] = measured(command(size, arrays, threads), rounds, name)
    summarize(cell["runs"], [METRIC])
    cell["median"] = {side["label"]: side["median"].get(METRIC) for side in cell["runs"]}
    ratio = ratio_of_medians(*_times(cell))
    cell["ratio"] = list(astuple(ratio))
    print(f"  {name}: {judged.told(_verdict(cell))}", flush=True)
    return cell


def _verdict(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A verdict that is reported, but not judged."""
    return _TOLD | dict(zip(("value", "low", "high", "n"), cell["ratio"], strict=True))


def measure(
    store: Store,
    runs: int | None,
    set_huge_pages: bool,
    *,
    path: Path = huge_pages.MODE,
    measured: Measured = _measured,
    sizes: Sequence[int] = SIZES,
    numbers: Sequence[int] = ARRAYS,
) -> None:
    """Measures all cells in each huge-page mode, and saves them."""
    rounds = runs or ROUNDS
    cells = []
    with _modes(set_huge_pages, path) as modes:
        for size, arrays, threads in itertools.product(sizes, numbers, THREADS):
            for mode, set_mode in modes.items():
                set_mode()
                cells.append(_cell(mode, size, arrays, threads, rounds, measured))
    found = judge(cells)
    print(f"\n{NAME}: {judged.told(found['mean'])}")
    for name in found["slower"]:
        print(f"  slower by more than {CELL_AT_MOST - 1:.0%}: {name}")
    print(f"{NAME}: {found['outcome']}", flush=True)
    sides = {side["label"]: side["origin"] for cell in cells for side in cell["runs"]}
    known = [{"label": label, "origin": origin} for label, origin in sides.items()]
    store.save(NAME, {"rounds": rounds, "allocators": known, "cells": cells} | found)


def lines(result: dict[str, Any]) -> list[str]:
    """Table rows under judged.HEAD."""
    cells = result["cells"]
    rows = [judged.cells(f"peer: mean of {len(cells)} cells", result["mean"])]
    slower = f"{len(result.get('slower', []))} of {len(cells)}"
    what = f"peer: cells with all of the interval above {CELL_AT_MOST:g}"
    rows.append(f"| {what} | {METRIC} | {CALMALLOC} | {PEER} | {slower} | 0 | {result['cells_outcome']} |")
    by_name = {name_of(cell): cell for cell in cells}
    for name in result.get("slower", ()):
        rows.append(judged.cells(f"peer: {name}", _verdict(by_name[name])))
    return rows


def versions(result: dict[str, Any]) -> set[str]:
    """The allocators' versions."""
    return {f"- {side['label']}: {version_of(side)}" for side in result["allocators"]}
