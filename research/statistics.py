"""Ratios over many rows, and how far several samples lie apart.

numpy is imported where it draws: a command that only needs a median starts without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from calm.core.statistics import CONFIDENCE, RESAMPLES, SEED, Ratio, drawn_medians


def geometric_mean_of_ratios(rows: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Ratio:
    """The geometric mean, over rows, of the ratio of each row's medians, with a percentile bootstrap.

    Each row has the values and the base of the same rounds; whole rounds are drawn, row by row on their own.
    All values are above zero. The interval is about the runs' spread, not about which rows there are.
    """
    import numpy as np

    if not rows:
        return Ratio(None, None, None, 0)
    logs = [(np.log(np.asarray(values)), np.log(np.asarray(base))) for values, base in rows]
    value = float(np.exp(np.mean([np.median(above) - np.median(below) for above, below in logs])))
    if min(len(above) for above, _ in logs) < 2:
        return Ratio(value, None, None, len(rows))
    generator = np.random.default_rng(SEED)
    total = np.zeros(RESAMPLES)
    for above, below in logs:
        draws = generator.integers(0, len(above), size=(RESAMPLES, len(above)))
        total += drawn_medians(above, draws) - drawn_medians(below, draws)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.exp(np.quantile(total / len(rows), [tail, 1 - tail]))
    return Ratio(value, float(low), float(high), len(rows))


class Span(msgspec.Struct, frozen=True, array_like=True):
    """How far the medians of several samples lie apart, and how far they would by chance alone.

    Both as ratios: 1.05 is five percent.
    """

    medians: float
    by_chance: float | None
    """None where too few rounds tell the spread."""

    @property
    def is_chance(self) -> bool:
        """The samples cannot be told apart."""
        return self.by_chance is not None and self.medians <= self.by_chance


def span_of_medians(samples: Sequence[Sequence[float]]) -> Span:
    """The largest median divided by the least, beside the same for samples that differ by chance alone.

    samples[a][r] is what a took in round r; all are above zero. By the logarithms, each figure is the sum of
    its sample's mean, its round's effect (what slows a round slows all alike) and a rest. The rests, enlarged
    by sqrt(k n / ((k - 1) (n - 1))) for what the means took from them, are the runs' own spread: from them
    and the rounds' effects, samples that are all alike are drawn many times. The span that 95 % of the draws
    stay within is the one by chance.
    """
    import numpy as np

    logs = np.log(np.asarray(samples, dtype=float))
    k, n = logs.shape
    span = float(np.exp(np.ptp(np.median(logs, axis=1))))
    if k < 2 or n < 3:
        return Span(span, None)
    rest = logs - np.mean(logs, axis=1, keepdims=True)
    effects = np.mean(rest, axis=0)
    pool = (rest - effects).ravel() * np.sqrt(k * n / ((k - 1) * (n - 1)))
    generator = np.random.default_rng(SEED)
    drawn = np.median(effects + generator.choice(pool, size=(RESAMPLES, k, n)), axis=2)
    return Span(span, float(np.exp(np.quantile(np.ptp(drawn, axis=1), CONFIDENCE))))
