"""Figures that something is judged by: ratios of costs, each with what it may be at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from calm.bench.analysis import OWN
from calm.statistics import median, ratio_of_medians

from .results import side_of, value

BEST_PEER = "the best peer"
# So that a program is one that the allocator's speed matters for: its share of the time.
ENOUGH = 0.10


@dataclass(frozen=True)
class Goal:
    """What a figure of one allocator may be at most: a ratio to another's, or a figure as it is."""

    metric: str
    of: str
    to: str | None = None
    """An allocator, or BEST_PEER; None: the figure itself."""
    at_most: float | None = None
    """None: it is only told."""


def cost(figure: float, metric: str) -> float:
    """Less is better, also of what is done in a second."""
    return 1 / figure if metric.endswith("_per_second") else figure


def _costs(result: dict[str, Any], label: str, metric: str) -> list[float | None]:
    side = side_of(result, label)
    figures = [value(run, metric) for run in side["runs"]] if side else []
    return [cost(figure, metric) if figure is not None else None for figure in figures]


def best_peer(result: dict[str, Any], metric: str) -> str | None:
    """Of the allocators that are not this project's own, the one with the least cost."""
    found = {}
    for side in result["allocators"]:
        label = side["label"]
        middle = median(_costs(result, label, metric))
        if label.partition(":")[0] not in OWN and middle is not None:
            found[label] = middle
    return min(found, key=lambda label: found[label]) if found else None


def _complained(result: dict[str, Any], label: str) -> bool:
    """The library did not do as it was asked to: what ran is not what was to be measured."""
    side = side_of(result, label)
    return side is not None and any(run.get("said") for run in side["runs"])


def judge(result: dict[str, Any], goals: Sequence[Goal]) -> list[dict[str, Any]]:
    """Each goal with what was measured for it.

    met is None where nothing was measured, nothing is asked for, or the library said that it did otherwise.
    """
    verdicts = []
    for goal in goals:
        to = best_peer(result, goal.metric) if goal.to == BEST_PEER else goal.to
        found: float | None
        low = high = None
        if goal.to is None:
            figures = [figure for figure in _costs(result, goal.of, goal.metric) if figure is not None]
            found = median(figures)
            low, high = (min(figures), max(figures)) if figures else (None, None)
        else:
            both = zip(
                _costs(result, goal.of, goal.metric),
                _costs(result, to, goal.metric) if to else (),
                strict=False,
            )
            pairs = [(above, below) for above, below in both if above is not None and below is not None]
            ratio = ratio_of_medians([above for above, _ in pairs], [below for _, below in pairs])
            found, low, high = ratio.value, ratio.low, ratio.high
        met = None
        if goal.at_most is not None and found is not None and not _complained(result, goal.of):
            met = found <= goal.at_most
        verdicts.append(asdict(goal) | {"to": to, "value": found, "low": low, "high": high, "met": met})
    return verdicts


def all_met(verdicts: Sequence[dict[str, Any]]) -> bool | None:
    """Of what is asked for; None where something could not be told."""
    asked = [each["met"] for each in verdicts if each["at_most"] is not None]
    if False in asked:
        return False
    return None if None in asked or not asked else True


def any_row_met(rows: Sequence[dict[str, Any]]) -> bool | None:
    """Of the rows in which the allocator has share enough; None where there is none."""
    counted = [row for row in rows if (row["allocator_share"].get("share") or 0) >= ENOUGH]
    found = [all_met(row["ratios"]) for row in counted]
    if True in found:
        return True
    return None if None in found or not found else False


def told(verdict: dict[str, Any]) -> str:
    """A verdict in a line."""
    number = "not known" if verdict["value"] is None else f"{verdict['value']:.3g}"
    if verdict["low"] is not None and verdict["high"] is not None:
        number += f" ({verdict['low']:.3g} to {verdict['high']:.3g})"
    of = f"{verdict['of']} to {verdict['to']}" if verdict["to"] else verdict["of"]
    if verdict["at_most"] is None:
        return f"{verdict['metric']}, {of}: {number}"
    word = {None: "not known", True: "met", False: "missed"}[verdict["met"]]
    return f"{verdict['metric']}, {of}: {number}, at most {verdict['at_most']:g}: {word}"
