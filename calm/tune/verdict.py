"""What the runs say: ratios with intervals, the Pareto front, and which setting is the one to take."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from calm.statistics import Ratio, ratio_of_medians
from calm.tune.space import Setting
from calm.tune.trial import Rounds, Run

PREFERENCES = ("time", "memory", "balanced")
# Less than this is not worth a setting, however sure it is.
LEAST_GAIN = 0.02
# Whoever prefers memory does not want a program that is slower by more.
SLOWER_MOST = 1.05
# With fewer rounds a run of luck would pass for a gain: six heads of six are a chance of 3 %.
ROUNDS_LEAST = 6


Point = tuple[Setting, float, float]
"""A setting's ratios of time and memory to the baseline's."""


def is_gain(ratio: Ratio) -> bool:
    """Worth having, and more than noise; of fewer rounds an interval of 95 % is none."""
    return (
        ratio.n >= ROUNDS_LEAST
        and ratio.value is not None
        and ratio.value <= 1 - LEAST_GAIN
        and ratio.high is not None
        and ratio.high < 1
    )


@dataclass(frozen=True)
class Verdict:
    """A setting's ratios to the baseline, over rounds that were run for this alone."""

    setting: Setting
    time: Ratio
    memory: Ratio
    both: Ratio
    """Time times memory."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.setting.as_dict(),
            "time": vars(self.time),
            "memory": vars(self.memory),
            "time_by_memory": vars(self.both),
        }

    @property
    def gains(self) -> bool:
        """Whether it is better than the baseline in something, by more than noise."""
        return is_gain(self.time) or is_gain(self.memory)

    @property
    def point(self) -> tuple[float, float]:
        """Time, memory."""
        return self.time.value or math.inf, self.memory.value or math.inf


@dataclass(frozen=True)
class Preference:
    """What the recommendation goes by."""

    by: str = "time"
    memory_limit: float = 1.5

    def allows(self, time: float, memory: float) -> bool:
        """Whether a setting with such ratios may be recommended at all."""
        return memory <= self.memory_limit and (self.by != "memory" or time <= SLOWER_MOST)

    def cost(self, time: float, memory: float) -> float:
        """What is to be as small as can be."""
        return {"time": time, "memory": memory, "balanced": time * memory}[self.by]

    def _ratio(self, verdict: Verdict) -> Ratio:
        return {"time": verdict.time, "memory": verdict.memory, "balanced": verdict.both}[self.by]

    def best(self, points: Sequence[Point]) -> Setting | None:
        """The one to take among settings with their ratios, if any is better than the baseline."""
        allowed = [
            (self.cost(time, memory), setting)
            for setting, time, memory in points
            if self.allows(time, memory) and self.cost(time, memory) <= 1 - LEAST_GAIN
        ]
        return min(allowed, key=lambda pair: pair[0])[1] if allowed else None

    def choose(self, verdicts: Sequence[Verdict]) -> Setting | None:
        """The same by rounds; first among those that are within the limit by their whole interval."""
        points = [(each.setting, *each.point) for each in verdicts]
        sure = [
            (each.setting, each.point[0], math.inf if each.memory.high is None else each.memory.high)
            for each in verdicts
        ]
        return self.best(sure) or self.best(points)

    def objection(self, verdict: Verdict) -> str | None:
        """Why a setting is not to be recommended, by runs that did not choose it; None where it is."""
        ratio = self._ratio(verdict)
        time, memory = verdict.point
        if ratio.value is None or not math.isfinite(time) or not math.isfinite(memory):
            return "it could not be confirmed"
        if memory > self.memory_limit:
            return f"it takes {memory:.2f} of the memory, and the limit is {self.memory_limit:g}"
        if not self.allows(time, memory):
            return f"it takes {time:.2f} of the time"
        if ratio.n < ROUNDS_LEAST:
            return f"there was time for {ratio.n} rounds to confirm it, and {ROUNDS_LEAST} are needed"
        if not is_gain(ratio):
            return f"its gain is {'within noise' if ratio.value < 1 else 'none'} in fresh runs"
        return None

    @property
    def too_dear(self) -> str:
        """What is wrong with settings that it does not allow."""
        limit = f"take more than {self.memory_limit:g} of the memory"
        return f"{limit}, or more than {SLOWER_MOST:g} of the time" if self.by == "memory" else limit

    @property
    def words(self) -> str:
        """How it chooses."""
        limit = f"that takes at most {self.memory_limit:g} of the memory"
        if self.by == "memory":
            return f"the smallest that is not slower by more than {SLOWER_MOST - 1:.0%}"
        return f"the fastest {limit}" if self.by == "time" else f"the least of time by memory {limit}"


def verdict(setting: Setting, rounds: Rounds) -> Verdict:
    """Medians over rounds; whole rounds are drawn for the intervals."""
    base, runs = rounds.base, rounds.runs[setting]

    def ratio(figure: Callable[[Run], float]) -> Ratio:
        return ratio_of_medians([figure(run) for run in runs], [figure(run) for run in base])

    return Verdict(
        setting,
        ratio(lambda run: run.time_s),
        ratio(lambda run: run.memory_kib),
        ratio(lambda run: run.time_s * run.memory_kib),
    )


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other one beats in one way without losing in the other, from the fastest on.

    Of two that are the same, the one with fewer knobs stays.
    """
    kept: list[Point] = []
    for point in sorted(points, key=lambda each: (each[1], each[2], len(each[0].values), each[0].label)):
        if not kept or point[2] < kept[-1][2]:
            kept.append(point)
    return kept
