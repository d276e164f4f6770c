"""Medians, and confidence intervals of their ratios.

numpy is imported where it draws: a command that only needs a median starts without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
RESAMPLES = 10_000
SEED = 20_200_315


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians over n rounds, with its confidence interval; None: undefined, or unbounded."""

    value: float | None
    low: float | None
    high: float | None
    n: int


def median(values: Sequence[float | None]) -> float | None:
    """The median of what was counted; None when nothing was."""
    import statistics

    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


def ratio_of_medians(values: Sequence[float], base: Sequence[float]) -> Ratio:
    """The ratio to the base, with a percentile bootstrap over rounds.

    Whole rounds are drawn, so what slowed both sides of a round at once cancels out.
    """
    import numpy as np

    n = len(values)
    if n != len(base):
        raise ValueError("both sides need the same rounds")
    if n == 0 or (bottom := float(np.median(base))) == 0:
        return Ratio(None, None, None, n)
    value = float(np.median(values)) / bottom
    if n == 1:
        return Ratio(value, None, None, n)
    above, below = bootstrap_medians(values, base, paired=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = above / below
    ratios = np.where(np.isnan(ratios), np.inf, ratios)
    return Ratio(value, *interval(ratios), n)


def bootstrap_medians(
    values: Sequence[float], base: Sequence[float], *, paired: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Medians of both sides over drawn rounds; paired: the same rounds are drawn of both."""
    import numpy as np

    generator = np.random.default_rng(SEED)
    draws = generator.integers(0, len(values), size=(RESAMPLES, len(values)))
    others = draws if paired else generator.integers(0, len(base), size=(RESAMPLES, len(base)))
    return _drawn_medians(values, draws), _drawn_medians(base, others)


def percentile(values: NDArray[np.float64], fraction: float) -> float:
    """Of the values that occur, not between them: an infinite neighbor would make a NaN."""
    import numpy as np

    return float(np.quantile(values, fraction, method="inverted_cdf"))


def interval(ratios: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """The ends of the percentile interval; None where an end is unbounded."""
    tail = (1 - CONFIDENCE) / 2
    low, high = (percentile(ratios, fraction) for fraction in (tail, 1 - tail))
    return low if math.isfinite(low) else None, high if math.isfinite(high) else None


def _drawn_medians(values: ArrayLike, draws: NDArray[np.int64]) -> NDArray[np.float64]:
    """The median of each draw of rounds."""
    import numpy as np

    return np.asarray(np.median(np.asarray(values, float)[draws], axis=-1))


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
        total += _drawn_medians(above, draws) - _drawn_medians(below, draws)
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
