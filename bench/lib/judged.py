"""Figures with goals: ratios of costs, each with an upper limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from calm.core.statistics import median, ratio_of_medians
from research.bench.analysis import OWN
from research.papers.labels import plain

from .results import side_of, values_of

BEST_PEER = "the best peer"
# The whole interval is within the goal, none of it is, or the runs do not decide.
Outcome = Literal["met", "missed", "open", "not known"]
# The allocator's share of the time from which on its speed matters for a program.
ENOUGH = 0.10


@dataclass(frozen=True)
class Goal:
    """The upper limit of an allocator's figure, as a ratio to another allocator's or as a value."""

    metric: str
    of: str
    to: str | None = None
    """An allocator, or BEST_PEER; None: the figure itself."""
    at_most: float | None = None
    """None: reported, but not judged."""


def cost(figure: float, metric: str) -> float:
    """A cost: less is better. Rates are inverted."""
    return 1 / figure if metric.endswith("_per_second") else figure


def _costs(result: dict[str, Any], label: str, metric: str) -> list[float | None]:
    figures = values_of(side_of(result, label), metric)
    return [cost(figure, metric) if figure is not None else None for figure in figures]


def best_peer(result: dict[str, Any], metric: str) -> str | None:
    """The allocator with the lowest cost among those of other projects."""
    found = {}
    for side in result["allocators"]:
        label = side["label"]
        middle = median(_costs(result, label, metric))
        if label.partition(":")[0] not in OWN and middle is not None:
            found[label] = middle
    return min(found, key=lambda label: found[label]) if found else None


def _complained(result: dict[str, Any], label: str) -> bool:
    """Whether the library declined its options, so that the run did not measure what it should."""
    side = side_of(result, label)
    return side is not None and any(run.get("said") for run in side["runs"])


def outcome(at_most: float, low: float | None, high: float | None) -> Outcome:
    """The outcome of a figure. One without an interval is from a single run, which decides nothing."""
    if high is not None and high <= at_most:
        return "met"
    return "missed" if low is not None and low > at_most else "open"


def judge(result: dict[str, Any], goals: Sequence[Goal]) -> list[dict[str, Any]]:
    """Each goal with its measurement.

    The interval of a ratio is 95 %; that of a value is the range of its runs. The outcome is None for a
    figure without a limit, and "not known" if nothing was measured or the library declined its options.
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
    """The outcome of several goals: one missed goal is enough to miss all."""
    asked = [each["outcome"] for each in verdicts if each["outcome"] is not None]
    if not asked:
        return "not known"
    worst: tuple[Outcome, ...] = ("missed", "not known", "open")
    return next((each for each in worst if each in asked), "met")


def _counted(row: dict[str, Any]) -> Outcome | None:
    """A row's outcome, for a figure for which one row suffices; None if the share is too small."""
    share = row["allocator_share"].get("share")
    found = of_all(row["ratios"])
    if share is None:
        # Even without a known share, a missed goal is a miss.
        return "missed" if found == "missed" else "not known"
    return found if share >= ENOUGH else None


def of_any(rows: Sequence[dict[str, Any]]) -> Outcome:
    """The outcome of the rows with enough of the allocator's share: one that meets its goals suffices."""
    counted = [_counted(row) for row in rows]
    best: tuple[Outcome, ...] = ("met", "not known", "open", "missed")
    return next((each for each in best if each in counted), "not known")


def words(verdict: dict[str, Any]) -> dict[str, str]:
    """A verdict as text: its value, its limit, and the outcome."""
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
    """A verdict in one line."""
    tell = words(verdict)
    to = verdict.get("to")
    of = f"{verdict['of']} to {to}" if to else verdict["of"]
    line = f"{verdict['metric']}, {of}: {tell['number']}"
    return f"{line}, at most {tell['at_most']}: {tell['outcome']}" if tell["at_most"] else line


def cells(what: str, verdict: dict[str, Any]) -> str:
    """The same as a row of a Markdown table, under HEAD."""
    tell = words(verdict)
    sides = (plain(verdict["of"]), plain(verdict.get("to") or ""))
    row = (plain(what), verdict["metric"], *sides, *tell.values())
    return f"| {' | '.join(row)} |"


HEAD = """| figure | cost | of | to | measured | at most | |
| --- | --- | --- | --- | --- | ---: | --- |"""
