"""Figures that something is judged by: ratios of costs, each with what it may be at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from calm.bench.analysis import OWN
from calm.statistics import median, ratio_of_medians

from .results import side_of, values_of

BEST_PEER = "the best peer"
# By the interval: all of it is within the goal, none of it is, or the runs do not decide.
Outcome = Literal["met", "missed", "open", "not known"]
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
    figures = values_of(side_of(result, label), metric)
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


def outcome(at_most: float, low: float | None, high: float | None) -> Outcome:
    """Of a figure that was measured; one without an interval is of a single run, which decides nothing."""
    if high is not None and high <= at_most:
        return "met"
    return "missed" if low is not None and low > at_most else "open"


def judge(result: dict[str, Any], goals: Sequence[Goal]) -> list[dict[str, Any]]:
    """Each goal with what was measured for it.

    The interval of a ratio is 95 %, and that of a figure as it is goes from its least run to its largest.
    The outcome is None where nothing is asked for, and "not known" where nothing was measured or the library
    said that it did otherwise.
    """
    verdicts = []
    for goal in goals:
        to = best_peer(result, goal.metric) if goal.to == BEST_PEER else goal.to
        found: float | None
        low = high = None
        if goal.to is None:
            figures = [figure for figure in _costs(result, goal.of, goal.metric) if figure is not None]
            found = median(figures)
            runs = len(figures)
            low, high = (min(figures), max(figures)) if runs > 1 else (None, None)
        else:
            both = zip(
                _costs(result, goal.of, goal.metric),
                _costs(result, to, goal.metric) if to else (),
                strict=False,
            )
            pairs = [(above, below) for above, below in both if above is not None and below is not None]
            ratio = ratio_of_medians([above for above, _ in pairs], [below for _, below in pairs])
            found, low, high, runs = ratio.value, ratio.low, ratio.high, ratio.n
        judged: Outcome | None = None
        if goal.at_most is not None:
            known = found is not None and not _complained(result, goal.of)
            judged = outcome(goal.at_most, low, high) if known else "not known"
        verdict = {"to": to, "value": found, "low": low, "high": high, "n": runs, "outcome": judged}
        verdicts.append(asdict(goal) | verdict)
    return verdicts


def of_all(verdicts: Sequence[dict[str, Any]]) -> Outcome:
    """Of what is asked for: one that is missed is enough to miss it."""
    asked = [each["outcome"] for each in verdicts if each["outcome"] is not None]
    if not asked:
        return "not known"
    worst: tuple[Outcome, ...] = ("missed", "not known", "open")
    return next((each for each in worst if each in asked), "met")


def _counted(row: dict[str, Any]) -> Outcome | None:
    """What a row adds to a figure that one row is enough for; None where the share is too little."""
    share = row["allocator_share"].get("share")
    found = of_all(row["ratios"])
    if share is None:
        # Whatever its share is, what misses the goal does not meet it.
        return "missed" if found == "missed" else "not known"
    return found if share >= ENOUGH else None


def of_any(rows: Sequence[dict[str, Any]]) -> Outcome:
    """Of the rows in which the allocator has share enough: one that meets its goals is enough."""
    counted = [_counted(row) for row in rows]
    best: tuple[Outcome, ...] = ("met", "not known", "open", "missed")
    return next((each for each in best if each in counted), "not known")


def words(verdict: dict[str, Any]) -> dict[str, str]:
    """What to tell of a verdict: its number, what it may be at most, and the outcome."""
    value, low, high, at_most = (verdict.get(key) for key in ("value", "low", "high", "at_most"))
    number = "not known" if value is None else f"{value:.3g}"
    if low is not None and high is not None:
        interval = "95 %" if verdict.get("to") else f"{verdict['n']} runs"
        number += f" ({interval}: {low:.3g} to {high:.3g})"
    return {
        "number": number,
        "at_most": "" if at_most is None else f"{at_most:g}",
        "outcome": verdict.get("outcome") or "",
    }


def told(verdict: dict[str, Any]) -> str:
    """A verdict in a line."""
    tell = words(verdict)
    to = verdict.get("to")
    of = f"{verdict['of']} to {to}" if to else verdict["of"]
    line = f"{verdict['metric']}, {of}: {tell['number']}"
    return f"{line}, at most {tell['at_most']}: {tell['outcome']}" if tell["at_most"] else line


def cells(what: str, verdict: dict[str, Any]) -> str:
    """The same as a row of a table in Markdown, under HEAD."""
    tell = words(verdict)
    row = (what, verdict["metric"], verdict["of"], verdict.get("to") or "", *tell.values())
    return f"| {' | '.join(row)} |"


HEAD = """| figure | cost | of | to | measured | at most | |
| --- | --- | --- | --- | --- | ---: | --- |"""
