"""What the runs tell: ratios, means over rows, and where a peer wins. Pure: results in, figures out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from calm import allocators
from calm.bench.results import METRIC, RESIDENT, Results, Row, Side, known
from calm.statistics import Ratio, Span, ratio_of_medians, span_of_medians

LISTING1 = "listing1"
_VARIANTS = tuple(name for name, known in allocators.KNOWN.items() if known.variant_of)
OWN = (*allocators.OWN, *_VARIANTS)
# A peer that is by this much both faster and smaller has won a row outright.
PARETO_MARGIN = 1.02


@dataclass(frozen=True)
class Measure:
    """A figure that allocators are ranked by; less is better, once metrics are turned around."""

    key: str
    title: str
    memory: bool


TIME = Measure("time", "time", memory=False)
PEAK = Measure("peak_rss_kib", "peak RSS", memory=True)
AVERAGE = Measure("average_rss_kib", "average RSS over time", memory=True)
MEASURES = (TIME, PEAK, AVERAGE)


def time_key(row: Row) -> str:
    """The figure that a row's time is: its metric, or the wall time."""
    return METRIC if row.metric else "wall_s"


def inverted(row: Row, what: Measure) -> bool:
    """Whether more of the figure is better."""
    return bool(what is TIME and row.metric and row.metric.higher_is_better)


def _key(row: Row, what: Measure) -> str:
    return time_key(row) if what is TIME else what.key


def costs(row: Row, side: Side, what: Measure) -> list[float]:
    """The figures as costs: less is better. None at all unless every run has one above zero."""
    values = [] if side.failure else known(side.values(_key(row, what)))
    if len(values) != len(side.runs) or any(value <= 0 for value in values):
        return []
    return [1 / value for value in values] if inverted(row, what) else values


@dataclass(frozen=True)
class Entry:
    """One allocator in one row by one measure."""

    label: str
    median: float
    """As measured."""
    ratio: Ratio
    """To the row's best, more being worse, with its interval; the best's is 1."""

    @property
    def cost(self) -> float:
        """The best of the row has 1."""
        return self.ratio.value or 0.0


@dataclass(frozen=True)
class Ranking:
    """A row by one measure: everyone who finished."""

    row: Row
    what: Measure
    entries: tuple[Entry, ...]
    span: Span | None

    @property
    def insensitive(self) -> bool:
        """The allocators differ by no more than the runs themselves."""
        return self.span is not None and self.span.is_chance

    def entry(self, label: str) -> Entry | None:
        """One allocator's."""
        return next((entry for entry in self.entries if entry.label == label), None)

    def best(self, labels: Sequence[str] | None = None) -> Entry | None:
        """The least cost, among these labels."""
        among = [entry for entry in self.entries if labels is None or entry.label in labels]
        return min(among, key=lambda entry: entry.cost, default=None)


def rank(row: Row, what: Measure) -> Ranking:
    """Ranks one row."""
    if row.has_runs:
        _compare(row, what)
    entries = []
    for label, ratio in row.to_best.get(what.key, {}).items():
        side = row.side(label)
        entries.append(Entry(label, (side.median(_key(row, what)) if side else None) or 0.0, ratio))
    return Ranking(row, what, tuple(entries), row.spans.get(what.key))


def _compare(row: Row, what: Measure) -> None:
    """Takes from the runs what a ranking is made of."""
    found = {side.label: values for side in row.sides if (values := costs(row, side, what))}
    best = min(found.values(), key=np.median, default=[])
    row.to_best[what.key] = {label: ratio_of_medians(values, best) for label, values in found.items()}
    alike = len(found) > 1 and len(set(map(len, found.values()))) == 1
    row.spans[what.key] = span_of_medians(list(found.values())) if alike else None


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


@dataclass(frozen=True)
class Worst:
    """The row that an allocator does worst in, against the best of all others."""

    label: str
    row: str
    ratio: float
    against: str


@dataclass(frozen=True)
class Beaten:
    """A row where a peer is both clearly faster and clearly smaller than the subject."""

    row: str
    peer: str
    time: float
    """The subject's time divided by the peer's, and so on."""
    peak: float
    average: float | None


@dataclass(frozen=True)
class Analysis:
    """Everything that is said about results."""

    results: Results
    subject: str
    peers: tuple[str, ...]
    rankings: dict[str, tuple[Ranking, ...]]
    """By the measure's key, all rows."""
    to_best_peer: dict[str, tuple[tuple[str, Ratio] | None, ...]]
    """By time and by peak, in each row the best of the peers, and the subject's ratio to it."""
    means: tuple[Mean, ...]
    worst: dict[str, tuple[Worst, ...]]
    beaten: tuple[Beaten, ...]
    shootdown_key: str
    shootdowns: dict[str, tuple[float, int]]
    """The sum over rows of medians, and in how many rows."""

    def as_dict(self) -> dict[str, object]:
        """For the file of results: a convenience of those who read it."""
        return {
            "subject": self.subject,
            "peers": list(self.peers),
            "rows": {
                what.key: {
                    ranking.row.name: {
                        "insensitive": ranking.insensitive,
                        "span": asdict(ranking.span) if ranking.span else None,
                        "allocators": {
                            entry.label: {"median": entry.median, "to_best": asdict(entry.ratio)}
                            for entry in ranking.entries
                        },
                    }
                    for ranking in self.rankings[what.key]
                }
                for what in MEASURES
            },
            "geometric_means": [asdict(mean) | {"what": mean.what.key} for mean in self.means],
            "worst": {key: [asdict(each) for each in found] for key, found in self.worst.items()},
            "beaten": [asdict(each) for each in self.beaten],
            self.shootdown_key: {
                label: {"sum_of_medians": total, "rows": rows}
                for label, (total, rows) in self.shootdowns.items()
            },
        }

    def ranking(self, what: Measure, sensitive: bool) -> list[Ranking]:
        """Rows that tell allocators apart by a measure, or those that do not."""
        return [each for each in self.rankings[what.key] if each.entries and each.insensitive != sensitive]


def subject_of(labels: Sequence[str]) -> str:
    """The allocator that the others are peers of: calmalloc, a variant of it, or the first but glibc."""
    plain = [label for label in labels if label == "calmalloc" or label.startswith("calmalloc:")]
    variants = [label for label in labels if label.partition(":")[0] in _VARIANTS]
    others = [label for label in labels if label != "glibc"]
    return (sorted(plain, key=len) or variants or others or list(labels))[0]


def _costs_of(ranking: Ranking, label: str) -> list[float]:
    side = ranking.row.side(label)
    return costs(ranking.row, side, ranking.what) if side else []


def _pairs(
    rankings: Sequence[Ranking], subject: str, other: Callable[[Ranking], str | None]
) -> list[tuple[list[float], list[float]]]:
    """The subject's costs and another's, in each row that both finished."""
    found = []
    for ranking in rankings:
        against = other(ranking)
        if against and ranking.entry(subject) and ranking.entry(against):
            above, below = _costs_of(ranking, subject), _costs_of(ranking, against)
            if shared := min(len(above), len(below)):
                found.append((above[:shared], below[:shared]))
    return found


def to_best_peer(ranking: Ranking, subject: str, peers: Sequence[str]) -> tuple[str, Ratio] | None:
    """The best of the peers, and the subject's ratio to it; None unless both finished."""
    best = ranking.best(peers)
    if best is None or ranking.entry(subject) is None:
        return None
    above, below = _costs_of(ranking, subject), _costs_of(ranking, best.label)
    shared = min(len(above), len(below))
    labels = subject, best.label
    return best.label, ranking.row.ratio(ranking.what.key, labels, (above[:shared], below[:shared]))


def _always(label: str) -> Callable[[Ranking], str | None]:
    return lambda _: label


def _best_of(labels: Sequence[str]) -> Callable[[Ranking], str | None]:
    def best(ranking: Ranking) -> str | None:
        entry = ranking.best(labels)
        return entry.label if entry else None

    return best


def mean(
    results: Results,
    rankings: Sequence[Ranking],
    what: Measure,
    scope: str,
    subject: str,
    peers: Sequence[str],
) -> Mean:
    """Geometric means over these rows."""

    def to(label: str, words: str, other: Callable[[Ranking], str | None]) -> Ratio:
        return results.mean(f"{what.key}, {scope}: {label} to {words}", _pairs(rankings, label, other))

    labels = results.labels
    return Mean(
        what=what,
        scope=scope,
        to_best={label: to(label, "the best", _best_of(labels)) for label in labels},
        subject_to={label: to(subject, label, _always(label)) for label in labels if label != subject},
        subject_to_best_peer=to(subject, "the best peer", _best_of(peers)),
        rows=tuple(ranking.row.name for ranking in rankings),
    )


def worst(rankings: Sequence[Ranking], labels: Sequence[str]) -> tuple[Worst, ...]:
    """Each allocator's worst row against the best of the others in it."""
    found = []
    for label in labels:
        rows = []
        for ranking in rankings:
            entry = ranking.entry(label)
            best = ranking.best([other for other in labels if other != label])
            if entry and best:
                rows.append(Worst(label, ranking.row.name, entry.cost / best.cost, best.label))
        if rows:
            found.append(max(rows, key=lambda each: each.ratio))
    return tuple(found)


def beaten(
    rankings: dict[str, tuple[Ranking, ...]], subject: str, peers: Sequence[str]
) -> tuple[Beaten, ...]:
    """Every row where a peer is by more than the margin both faster and smaller at its peak."""
    found = []
    for time, peak, average in zip(*(rankings[what.key] for what in MEASURES), strict=True):
        for peer in peers:
            ratios = [_ratio(ranking, subject, peer) for ranking in (time, peak, average)]
            if all(ratio is not None and ratio > PARETO_MARGIN for ratio in ratios[:2]):
                found.append(Beaten(time.row.name, peer, ratios[0] or 0, ratios[1] or 0, ratios[2]))
    return tuple(found)


def _ratio(ranking: Ranking, label: str, to: str) -> float | None:
    above, below = ranking.entry(label), ranking.entry(to)
    return above.cost / below.cost if above and below else None


def _shootdowns(results: Results) -> tuple[str, dict[str, tuple[float, int]]]:
    """Each allocator's own where they were counted, or else the system's interrupts."""
    exact = any(side.median("shootdowns_begun") is not None for row in results.rows for side in row.sides)
    key = "shootdowns_begun" if exact else "system_wide_tlb_interrupts"
    found = {}
    for label in results.labels:
        sides = [side for row in results.rows if (side := row.side(label)) and not side.failure]
        medians = [middle for side in sides if (middle := side.median(key)) is not None]
        if medians:
            found[label] = (sum(medians), len(medians))
    return key, found


def analyse(results: Results) -> Analysis:
    """Draws everything from the runs, or from what their file has of them."""
    for row in results.rows:
        for side in row.sides:
            side.all_medians()
    labels = results.labels
    subject = subject_of(labels)
    peers = tuple(label for label in labels if label != subject and label.partition(":")[0] not in OWN)
    rankings = {what.key: tuple(rank(row, what) for row in results.rows) for what in MEASURES}
    means = []
    for what in MEASURES:
        told = [each for each in rankings[what.key] if each.entries and not each.insensitive]
        without = [each for each in told if each.row.family != LISTING1]
        for scope, rows in (("all", told), ("without listing1", without)):
            if scope == "all" or (rows and len(rows) < len(told)):
                means.append(mean(results, rows, what, scope, subject, peers))
    shootdown_key, shootdowns = _shootdowns(results)
    return Analysis(
        results=results,
        subject=subject,
        peers=peers,
        rankings=rankings,
        to_best_peer={
            what.key: tuple(to_best_peer(ranking, subject, peers) for ranking in rankings[what.key])
            for what in (TIME, PEAK)
        },
        means=tuple(means),
        worst={what.key: worst(rankings[what.key], labels) for what in MEASURES},
        beaten=beaten(rankings, subject, peers),
        shootdown_key=shootdown_key,
        shootdowns=shootdowns,
    )


def resident_rows(results: Results) -> list[Row]:
    """Rows that tell what stays resident at the end."""
    return [
        row
        for row in results.rows
        if any(side.median(RESIDENT) is not None for side in row.sides if not side.failure)
    ]
