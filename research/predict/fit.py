"""Fits the cost model to runs of the experiment, and predicts runs that it was not fitted to.

To the paper's terms, a for an interrupt and C for a call, one is added for calls that overlap another
thread's, which flush everything: docs/calm-predict.md has the evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any

from calm.core.errors import CalmError
from calm.core.statistics import CONFIDENCE, SEED
from research.predict.calibration import Costs, Residual, Sample
from research.predict.model import socket_factor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_RESAMPLES = 500
# The share of the draws that must give a cost: of three rounds, one alone is drawn with a probability of 4 %.
_MIN_DRAWS = 0.9
MIN_INTERVAL_ROUNDS = 3
# Below this the interrupts' cost is lost among the calls'.
_MIN_INTERRUPTS = 1000
_MIN_SHARE = 0.05
# Huber's constant: 95 % as efficient as least squares without outliers.
_HUBER = 1.345
_STEPS = 30


def predicted_s(costs: Costs, sample: Sample) -> float:
    """The CPU time of a run."""
    overlapped = 1 - (1 - costs.overlap_chance) ** (sample.threads - 1)
    call = (costs.call_ns + costs.overlap_ns * overlapped) * sample.madvise
    each = costs.local_ns * socket_factor(sample.sockets, costs.remote)
    return float(call + each * sample.interrupts) * 1e-9


def _robust(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares in which outliers weigh less."""
    import numpy as np

    weights: NDArray[Any] = np.ones(len(wanted))
    found: NDArray[Any] = np.zeros(matrix.shape[1])
    for _ in range(_STEPS):
        root = np.sqrt(weights)
        found, *_ = np.linalg.lstsq(matrix * root[:, None], wanted * root, rcond=None)
        errors = np.abs(matrix @ found - wanted)
        scale = max(1.4826 * float(np.median(errors)), 1e-6)
        weights = np.minimum(1, _HUBER * scale / np.maximum(errors, 1e-12))
    return found


def _call_ns(samples: Sequence[Sample], threads: int) -> float:
    return 1e9 * median(each.cpu_s / each.madvise for each in samples if each.threads == threads)


def _overlap(samples: Sequence[Sample], call_ns: float) -> tuple[float, float]:
    """The cost of an overlap and its probability, from threads that share one CPU: without interrupts.

    The probability is tried in steps; the rest is linear.
    """
    import numpy as np

    alone = [each for each in samples if each.cpus == 1]
    threads = sorted({each.threads for each in alone} - {1})
    if not threads:
        return 0.0, 0.0
    more = np.asarray([_call_ns(alone, number) - call_ns for number in threads])
    chances = np.arange(1, 20) / 20
    shares = 1 - (1 - chances[:, None]) ** (np.asarray(threads) - 1)
    costs = np.maximum(0, shares @ more / (shares**2).sum(axis=1))
    best = np.argmin(((shares * costs[:, None] - more) ** 2).sum(axis=1))
    return float(costs[best]), float(chances[best])


def fit(samples: Sequence[Sample]) -> Costs:
    """The costs that explain the runs best, one after the other. Raises CalmError where there are none.

    As in the paper, C is taken from runs without interrupts, then a and n from those with them.
    """
    import numpy as np

    several = [each for each in samples if each.cpus > 1 and each.threads > 1]
    several = [each for each in several if each.interrupts >= _MIN_SHARE * each.madvise]
    if sum(each.interrupts for each in several) < _MIN_INTERRUPTS:
        raise CalmError(
            "too few TLB interrupts to derive their cost: the threads rarely ran on two CPUs at once "
            "(is the machine busy?)"
        )
    if all(each.threads > 1 for each in samples):
        raise CalmError("no run with one thread to derive the cost of a call from")
    call = _call_ns(samples, 1)
    without = Costs(call, *_overlap(samples, call), 0.0, None)
    # Relative to each run's time, so that long ones do not outweigh the others. The remote cost is fitted as
    # a x n, which is linear.
    seconds = np.asarray([each.cpu_s for each in several])
    wanted = 1 - np.asarray([predicted_s(without, each) for each in several]) / seconds
    columns = [[each.interrupts / each.sockets for each in several]]
    if any(each.sockets > 1 for each in several):
        columns.append([each.interrupts * (1 - 1 / each.sockets) for each in several])
    local, *far = map(float, _robust(np.asarray(columns).T * 1e-9 / seconds[:, None], wanted))
    if local <= 0:
        raise CalmError(
            "the runs contradict each other: more interrupts took less time; try a quieter machine"
        )
    return replace(without, local_ns=local, remote=far[0] / local if far else None)


def interval(samples: Sequence[Sample]) -> tuple[float, float] | None:
    """The interval of the cost of an interrupt, by resampling rounds.

    None with fewer than three rounds, and where too many draws give no cost.
    """
    import numpy as np

    rounds = sorted({each.round for each in samples})
    if len(rounds) < MIN_INTERVAL_ROUNDS:
        return None
    generator = np.random.default_rng(SEED)

    # Few rounds have few draws, up to their order: each is fitted once.
    @cache
    def of(drawn: tuple[int, ...]) -> float | None:
        try:
            return fit([each for number in drawn for each in samples if each.round == number]).local_ns
        except CalmError:
            return None

    draws = [tuple(sorted(generator.choice(rounds, size=len(rounds)).tolist())) for _ in range(_RESAMPLES)]
    found = [local_ns for drawn in draws if (local_ns := of(drawn)) is not None]
    if len(found) < _MIN_DRAWS * _RESAMPLES:
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    return float(low), float(high)


def held_out(threads: Sequence[int]) -> list[int]:
    """Every second number of threads, but neither the first nor the last."""
    return sorted(set(threads))[1:-1:2]


def residuals(samples: Sequence[Sample], costs: Costs, left_out: Sequence[int]) -> list[Residual]:
    """The medians over the runs of every point."""
    import numpy as np

    points: dict[tuple[int, int, int], list[tuple[float, ...]]] = {}
    for each in samples:
        seconds = predicted_s(costs, each)
        errors = seconds / each.cpu_s - 1, seconds / min(each.cpus, each.threads) / each.wall_s - 1
        points.setdefault((each.sockets, each.cpus, each.threads), []).append(
            (each.interrupts / each.madvise, each.cpu_s / each.madvise * 1e9, *errors)
        )
    return [
        Residual(*point, point[2] in left_out, *np.median(rows, axis=0).tolist())
        for point, rows in sorted(points.items())
    ]
