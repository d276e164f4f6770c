"""Ratios, means over rows, and rows in which a peer wins: pure functions of the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import msgspec
import numpy as np

from calm.core import allocators
from calm.core.statistics import Ratio, ratio_of_medians
from research.bench.published import FAMILY
from research.bench.results import METRIC, Beaten, Conclusions, Results, Rounds, Row, Side, Worst, known
from research.statistics import Span, span_of_medians

LISTING1 = "listing1"
PUBLISHED = "of published programs"
OWN = allocators.OWN
# A peer that is by this much both faster and smaller has won a row outright.
PARETO_MARGIN = 1.02


@dataclass(frozen=True)
class Measure:
    """A figure that allocators are ranked by; less is better, once metrics are turned around."""

    key: str
    title: str

    def figure(self, row: Row) -> str:
        """What is measured: a row's time is its metric, or the wall time."""
        return self.key if self is not TIME else METRIC if row.metric else "wall_s"


TIME = Measure("time", "time")
PEAK = Measure("peak_rss_kib", "peak RSS")
AVERAGE = Measure("average_rss_kib", "average RSS over time")
MEASURES = (TIME, PEAK, AVERAGE)


def costs(row: Row, side: Side, what: Measure) -> list[float]:
    """The figures as costs: less is better. Empty unless every run has one above zero."""
    values = [] if side.failure else known(side.values(what.figure(row)))
    if len(values) != len(side.runs) or any(value <= 0 for value in values):
        return []
    return [_cost(row, what, value) for value in values]


def _cost(row: Row, what: Measure, value: float) -> float:
    return 1 / value if what is TIME and row.metric and row.metric.higher_is_better else value


@dataclass(frozen=True)
class Ranking:
    """A row by one measure: every allocator that finished."""

    row: Row
    what: Measure
    ratios: dict[str, Ratio]
    """Of each allocator's cost to the least of the row, which has 1."""
    costs: dict[str, list[float]]
    """Of each round; empty without the runs."""
    span: Span | None

    @property
    def insensitive(self) -> bool:
        """The allocators differ by no more than the runs themselves."""
        return self.span is not None and self.span.is_chance

    def cost(self, label: str) -> float:
        return self.ratios[label].value or 0.0

    def best(self, labels: Sequence[str]) -> str | None:
        return min((each for each in self.ratios if each in labels), key=self.cost, default=None)

    def ratio(self, one: str, other: str) -> float | None:
        both = one in self.ratios and other in self.ratios
        return self.cost(one) / self.cost(other) if both else None

    def rounds(self, one: str, other: str) -> Rounds:
        """The costs of both, in the rounds that both have."""
        above, below = self.costs.get(one, []), self.costs.get(other, [])
        shared = min(len(above), len(below))
        return above[:shared], below[:shared]


def rank(row: Row, what: Measure) -> Ranking:
    """Ranks one row, from its runs or from what its file has of them."""
    found = {side.label: values for side in row.sides if (values := costs(row, side, what))}
    if row.has_runs:
        best = min(found.values(), key=np.median, default=[])
        row.to_best[what.key] = {
            label: astuple(ratio_of_medians(values, best)) for label, values in found.items()
        }
        alike = len(found) > 1 and len(set(map(len, found.values()))) == 1
        row.spans[what.key] = span_of_medians(list(found.values())) if alike else None
    if row.has_runs or what.key in row.to_best:
        ratios = {label: Ratio(*ratio) for label, ratio in row.to_best[what.key].items()}
    else:
        ratios = _of_medians(row, what)
    return Ranking(row, what, ratios, found, row.spans.get(what.key))


def _of_medians(row: Row, what: Measure) -> dict[str, Ratio]:
    """The ratios to the best of a file that has only medians, without intervals."""
    medians = {side.label: row.median(side.label, what.figure(row)) for side in row.sides}
    found = {label: _cost(row, what, value) for label, value in medians.items() if value}
    return {label: Ratio(cost / min(found.values()), None, None, 0) for label, cost in found.items()}


@dataclass(frozen=True)
class Mean:
    """Geometric means over rows by one measure."""

    what: Measure
    scope: str
    """Which rows."""
    to_best: dict[str, Ratio]
    """Each allocator to the best of each row, over the rows that it finished; n is their number."""
    subject_to: dict[str, Ratio]
    """The subject to each other one, over the rows that both finished."""
    subject_to_best_peer: Ratio
    """The subject to a peer that does not exist: in every row the best of all."""
    rows: tuple[str, ...]


class Analysis(Conclusions, kw_only=True):
    """Everything that the tables are made of."""

    results: Results
    rankings: dict[str, list[Ranking]]
    """By the measure's key, all rows."""
    to_best_peer: dict[str, list[tuple[str, Ratio] | None]]
    """By time and by peak, in each row the best of the peers, and the subject's ratio to it."""
    means: list[Mean]

    def conclusions(self) -> Conclusions:
        return msgspec.convert(self, Conclusions, from_attributes=True)

    def ranking(self, what: Measure, sensitive: bool) -> list[Ranking]:
        """Rows that tell allocators apart by a measure, or those that do not."""
        return [each for each in self.rankings[what.key] if each.ratios and each.insensitive != sensitive]


def subject_of(labels: Sequence[str]) -> str:
    """The allocator that the others are peers of: calmalloc, calmoffload, or the first but glibc."""
    plain, offload = (
        [label for label in labels if label.partition(":")[0] == name]
        for name in ("calmalloc", "calmoffload")
    )
    others = [label for label in labels if label != "glibc"]
    return (sorted(plain, key=len) or offload or others or list(labels))[0]


def _mean(
    results: Results,
    what: Measure,
    rankings: Sequence[Ranking],
    scope: str,
    subject: str,
    peers: Sequence[str],
) -> Mean:
    def to(label: str, words: str, others: Sequence[str]) -> Ratio:
        both = ((each, each.best(others)) for each in rankings if label in each.ratios)
        pairs = (ranking.rounds(label, best) for ranking, best in both if best)
        return results.mean(f"{what.key}, {scope}: {label} to {words}", [pair for pair in pairs if pair[0]])

    labels = results.labels
    return Mean(
        what=what,
        scope=scope,
        to_best={label: to(label, "the best", labels) for label in labels},
        subject_to={label: to(subject, label, [label]) for label in labels if label != subject},
        subject_to_best_peer=to(subject, "the best peer", peers),
        rows=tuple(ranking.row.name for ranking in rankings),
    )


def _to_best_peer(ranking: Ranking, subject: str, peers: Sequence[str]) -> tuple[str, Ratio] | None:
    """The best of the peers, and the subject's ratio to it; None unless both finished."""
    best = ranking.best(peers)
    if best is None or subject not in ranking.ratios:
        return None
    rounds = ranking.rounds(subject, best)
    return best, ranking.row.ratio(ranking.what.key, (subject, best), rounds)


def _worst(rankings: Sequence[Ranking], labels: Sequence[str]) -> list[Worst]:
    found = []
    for label in labels:
        others = [other for other in labels if other != label]
        both = ((each, each.best(others)) for each in rankings if label in each.ratios)
        rows = [
            Worst(label, each.row.name, each.cost(label) / each.cost(best), best)
            for each, best in both
            if best
        ]
        found += [max(rows, key=lambda each: each.ratio)] if rows else []
    return found


def _beaten(rankings: dict[str, list[Ranking]], subject: str, peers: Sequence[str]) -> list[Beaten]:
    """Every row where a peer is by more than the margin both faster and smaller at its peak.

    Not where the allocators cannot be told apart by one of the two.
    """
    found = []
    for row in zip(*(rankings[what.key] for what in MEASURES), strict=True):
        if row[0].insensitive or row[1].insensitive:
            continue
        for peer in peers:
            time, peak, average = (ranking.ratio(subject, peer) for ranking in row)
            if time and peak and min(time, peak) > PARETO_MARGIN:
                found.append(Beaten(row[0].row.name, peer, time, peak, average))
    return found


def analyse(results: Results) -> Analysis:
    for row in results.rows:
        for side in row.sides:
            for figure in dict.fromkeys(name for run in side.runs for name in run.figures):
                row.median(side.label, figure)
    labels = results.labels
    subject = subject_of(labels)
    peers = [label for label in labels if label != subject and label.partition(":")[0] not in OWN]
    rankings = {what.key: [rank(row, what) for row in results.rows] for what in MEASURES}
    means = []
    for what in MEASURES:
        sensitive = [each for each in rankings[what.key] if each.ratios and not each.insensitive]
        without = [each for each in sensitive if each.row.family != LISTING1]
        originals = [each for each in sensitive if each.row.family == FAMILY]
        for scope, rows in (("all", sensitive), ("without listing1", without), (PUBLISHED, originals)):
            if scope == "all" or (rows and len(rows) < len(sensitive)):
                means.append(_mean(results, what, rows, scope, subject, peers))
    # Each allocator's own where they were counted, or else the system's interrupts.
    counted = any(row.median(each, "shootdowns") is not None for row in results.rows for each in labels)
    key = "shootdowns" if counted else "interrupts_system_wide"
    medians = {label: known([row.median(label, key) for row in results.rows]) for label in labels}
    return Analysis(
        subject=subject,
        peers=peers,
        worst={what.key: _worst(rankings[what.key], labels) for what in MEASURES},
        beaten=_beaten(rankings, subject, peers),
        shootdown_key=key,
        shootdowns={label: (sum(each), len(each)) for label, each in medians.items() if each},
        results=results,
        rankings=rankings,
        to_best_peer={
            what.key: [_to_best_peer(each, subject, peers) for each in rankings[what.key]]
            for what in (TIME, PEAK)
        },
        means=means,
    )
