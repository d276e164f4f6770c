"""Fitting the cost model to runs of the experiment, and how well it foretells runs that it was not fitted to.

To the paper's terms, a for an interrupt and C for a call, one is added that its figure has no need of at a
million calls of 16 threads, but fewer threads have: while another thread is in the middle of such a call, be
it only preempted there, the kernel cannot tell what that one still has to flush, and flushes everything. The
tracepoint tlb:tlb_flush shows it even on one CPU: a quarter of the calls of two threads, three quarters of
four. So each other thread is within a call by some chance, and a call costs more if any is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from calm.errors import CalmError
from calm.predict.model import socket_factor
from calm.statistics import CONFIDENCE, SEED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_RESAMPLES = 500
# So many of the draws must tell a cost: of three rounds one alone is drawn by a chance of 4 %.
_TELLING = 0.9
INTERVAL_ROUNDS_LEAST = 3
# Below this the interrupts' cost is lost among the calls'.
_LEAST_INTERRUPTS = 1000
_LEAST_SHARE = 0.05
# Huber's constant: 95 % as good as least squares where no run is out of line.
_HUBER = 1.345
_STEPS = 30
_CHANCES = tuple(step / 20 for step in range(1, 20))


@dataclass(frozen=True)
class Sample:
    """One run: threads that give a page back, over and over."""

    round: int
    cpus: int
    sockets: int
    threads: int
    calls: int
    interrupts: int
    cpu_s: float
    wall_s: float

    @property
    def point(self) -> tuple[int, int, int]:
        """What distinguishes it from other runs of the same round."""
        return self.sockets, self.cpus, self.threads


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of CPU time."""

    call_ns: float
    """A call that none of another thread overlaps."""
    overlap_ns: float
    """What it costs more if one does."""
    overlap_chance: float
    """That a given other thread is within a call."""
    local_ns: float
    """An interrupt within a socket."""
    remote: float | None
    """How many times as dear an interrupt to another socket is; None where there is one socket."""

    def cpu_s(self, sample: Sample, otherwise: float) -> float:
        """What a run should take."""
        call = self.call_ns + self.overlap_ns * overlapped(sample.threads, self.overlap_chance)
        remote = otherwise if self.remote is None else self.remote
        interrupt = self.local_ns * socket_factor(sample.sockets, remote)
        return (call * sample.calls + interrupt * sample.interrupts) * 1e-9


def overlapped(threads: int, chance: float) -> float:
    """The share of calls that some other thread's overlaps."""
    return 1 - float((1 - chance) ** (threads - 1))


def _robust(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares, where a row that is out of line weighs less the further it is."""
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


def _call_ns(samples: Sequence[Sample]) -> float:
    """The time of a call, as the median over runs."""
    import numpy as np

    return float(np.median([each.cpu_s / each.calls for each in samples])) * 1e9


def _overlap(samples: Sequence[Sample], call_ns: float) -> tuple[float, float]:
    """What an overlap costs and its chance, from the threads that share one CPU: there are no interrupts.

    The chance is tried in steps; the rest is linear.
    """
    import numpy as np

    alone = [each for each in samples if each.cpus == 1 and each.threads > 1]
    threads = sorted({each.threads for each in alone})
    if not threads:
        return 0.0, 0.0
    more = np.asarray([_call_ns([each for each in alone if each.threads == n]) - call_ns for n in threads])
    best = (np.inf, 0.0, 0.0)
    for chance in _CHANCES:
        share = np.asarray([overlapped(n, chance) for n in threads])
        cost = max(0.0, float(share @ more / (share @ share)))
        best = min(best, (float(np.sum((share * cost - more) ** 2)), cost, chance))
    return best[1], best[2]


def fit(samples: Sequence[Sample]) -> Costs:
    """The costs that explain the runs best, one after the other. Raises CalmError where they do not tell.

    As the paper does, C is taken from runs without interrupts, and then a and n from those with them.
    """
    import numpy as np

    alone = [each for each in samples if each.threads == 1]
    several = [each for each in samples if each.cpus > 1 and each.threads > 1]
    telling = [each for each in several if each.interrupts >= _LEAST_SHARE * each.calls]
    if sum(each.interrupts for each in telling) < _LEAST_INTERRUPTS:
        raise CalmError(
            "too few TLB interrupts to tell their cost: the threads rarely ran on two CPUs at once "
            "(is the machine busy?)"
        )
    if not alone:
        raise CalmError("no run with one thread to tell a call's own cost from")
    call = _call_ns(alone)
    overlap, chance = _overlap(samples, call)
    known = Costs(call, overlap, chance, 0.0, None)
    # Relative to each run's time, so that long ones do not outweigh the others. The remote cost is fitted as
    # a x n, which is linear.
    seconds = np.asarray([each.cpu_s for each in telling])
    wanted = 1 - np.asarray([known.cpu_s(each, 0.0) for each in telling]) / seconds
    columns = [[each.interrupts / each.sockets for each in telling]]
    if any(each.sockets > 1 for each in telling):
        columns.append([each.interrupts * (1 - 1 / each.sockets) for each in telling])
    found = _robust(np.asarray(columns).T * 1e-9 / seconds[:, None], wanted)
    local, *far = map(float, found)
    if local <= 0:
        raise CalmError(
            "the runs contradict each other: more interrupts took less time; try a quieter machine"
        )
    return Costs(call, overlap, chance, local, far[0] / local if far else None)


def interval(samples: Sequence[Sample]) -> tuple[float, float] | None:
    """How far the cost of an interrupt may lie, by drawing rounds anew.

    None of fewer than three rounds, and where too many draws tell no cost: the others are not all there is.
    """
    import numpy as np

    rounds = sorted({each.round for each in samples})
    if len(rounds) < INTERVAL_ROUNDS_LEAST:
        return None
    by_round = {number: [each for each in samples if each.round == number] for number in rounds}
    generator = np.random.default_rng(SEED)

    @cache
    def of(drawn: tuple[int, ...]) -> float | None:
        try:
            return fit([each for number in drawn for each in by_round[number]]).local_ns
        except CalmError:
            return None

    # Few rounds have few draws, up to their order: each is fitted once.
    draws = [tuple(sorted(generator.choice(rounds, size=len(rounds)).tolist())) for _ in range(_RESAMPLES)]
    found = [local_ns for drawn in draws if (local_ns := of(drawn)) is not None]
    if len(found) < _TELLING * _RESAMPLES:
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    return float(low), float(high)


def held_out(threads: Sequence[int]) -> list[int]:
    """Every second number of threads, but neither the least nor the most: those in between are foretold."""
    ordered = sorted(set(threads))
    return ordered[1:-1:2]


@dataclass(frozen=True)
class Residual:
    """How far the costs are from the runs of a point. Errors are relative: 0.05 is predicted 5 % too high."""

    sockets: int
    cpus: int
    threads: int
    held_out: bool
    interrupts_per_call: float
    cpu_ns_per_call: float
    cpu_error: float
    wall_error: float
    """Of the time that passed, if the threads never wait for a CPU."""


def residuals(
    samples: Sequence[Sample], costs: Costs, left_out: Sequence[int], remote: float
) -> list[Residual]:
    """Of every point, the median of its runs."""
    import numpy as np

    found = []
    for point in sorted({each.point for each in samples}):
        runs = [each for each in samples if each.point == point]
        sockets, cpus, threads = point
        foretold = [costs.cpu_s(each, remote) for each in runs]
        spread = min(cpus, threads)
        found.append(
            Residual(
                sockets,
                cpus,
                threads,
                threads in left_out,
                float(np.median([each.interrupts / each.calls for each in runs])),
                float(np.median([each.cpu_s / each.calls for each in runs])) * 1e9,
                float(np.median([f / each.cpu_s for f, each in zip(foretold, runs, strict=True)])) - 1,
                float(np.median([f / spread / each.wall_s for f, each in zip(foretold, runs, strict=True)]))
                - 1,
            )
        )
    return found
