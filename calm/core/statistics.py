"""Medians, and confidence intervals of their ratios.

numpy is imported where it draws: a command that only needs a median starts without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    return drawn_medians(values, draws), drawn_medians(base, others)


def percentile(values: NDArray[np.float64], fraction: float) -> float:
    """Of the values that occur, not between them: an infinite neighbor would make a NaN."""
    import numpy as np

    return float(np.quantile(values, fraction, method="inverted_cdf"))


def interval(ratios: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """The ends of the percentile interval; None where an end is unbounded."""
    tail = (1 - CONFIDENCE) / 2
    low, high = (percentile(ratios, fraction) for fraction in (tail, 1 - tail))
    return low if math.isfinite(low) else None, high if math.isfinite(high) else None


def drawn_medians(values: ArrayLike, draws: NDArray[np.int64]) -> NDArray[np.float64]:
    """The median of each draw of rounds."""
    import numpy as np

    return np.asarray(np.median(np.asarray(values, float)[draws], axis=-1))
