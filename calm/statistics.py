"""Medians, and how far a ratio of medians can be trusted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
SEED = 20_200_315


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians over n rounds, with its confidence interval; None where the runs do not tell."""

    value: float | None
    low: float | None
    high: float | None
    n: int


def median(values: Sequence[float | None]) -> float | None:
    """The median of what was counted; None when nothing was."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def ratio_of_medians(
    values: Sequence[float],
    base: Sequence[float],
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Ratio:
    """The ratio to the base, with a percentile bootstrap over rounds.

    Whole rounds are drawn, so what slowed both sides of a round at once cancels out.
    """
    n = len(values)
    if n != len(base):
        raise ValueError("both sides need the same rounds")
    if n == 0 or (bottom := float(np.median(base))) == 0:
        return Ratio(None, None, None, n)
    value = float(np.median(values)) / bottom
    if n == 1:
        return Ratio(value, None, None, n)
    draws = np.random.default_rng(seed).integers(0, n, size=(resamples, n))
    above = np.median(np.asarray(values, dtype=float)[draws], axis=1)
    below = np.median(np.asarray(base, dtype=float)[draws], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = above / below
    ratios = np.where(np.isnan(ratios), np.inf, ratios)
    tail = (1 - confidence) / 2
    # Of the values that occur, not between them: an infinite neighbour would make a NaN.
    low, high = np.quantile(ratios, [tail, 1 - tail], method="inverted_cdf")
    return Ratio(value, _finite(low), _finite(high), n)
