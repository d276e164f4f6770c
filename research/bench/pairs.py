"""How far each stand-in is from the published program that it was written after; computed from rankings."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from research.bench.analysis import Ranking
from research.bench.published import FAMILY, original_of


@dataclass(frozen=True)
class Pair:
    """The costs of both, by allocator, each to the best of its row."""

    name: str
    stand_in: Mapping[str, float]
    original: Mapping[str, float]

    @property
    def both(self) -> list[str]:
        """The allocators that finished both."""
        return [label for label in self.stand_in if label in self.original]

    @property
    def discrepancy(self) -> float | None:
        """The largest factor by which the ratio of two allocators differs between the two programs."""
        factors = [self.stand_in[label] / self.original[label] for label in self.both]
        return max(factors) / min(factors) if len(factors) > 1 else None


def find(rankings: Sequence[Ranking]) -> list[Pair]:
    """The stand-ins whose originals were measured too, by one measure."""
    costs = {
        each.row.name: {label: each.cost(label) for label in each.ratios} for each in rankings if each.ratios
    }
    originals = {each.row.name for each in rankings if each.row.family == FAMILY}
    return [
        Pair(name, stand_in, costs[original])
        for name, stand_in in costs.items()
        if (original := original_of(name)) in originals and original in costs
    ]


def mean(found: Iterable[Pair]) -> Pair:
    """Geometric means; an allocator's are over the pairs that it finished both of."""
    pairs = list(found)
    over = {label: [pair for pair in pairs if label in pair.both] for pair in pairs for label in pair.both}
    return Pair(
        "geometric mean",
        {
            label: statistics.geometric_mean(pair.stand_in[label] for pair in each)
            for label, each in over.items()
        },
        {
            label: statistics.geometric_mean(pair.original[label] for pair in each)
            for label, each in over.items()
        },
    )
