"""Ratios with intervals, the Pareto front, and which setting to recommend."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from calm.commands.tune.space import Point, Setting, line
from calm.commands.tune.trial import Run
from calm.core.statistics import Ratio, ratio_of_medians

PREFERENCES = ("time", "memory", "balanced")
# Less is not worth a setting, however sure it is.
MIN_GAIN = 0.02
# What --prefer memory accepts of the time.
MAX_SLOWDOWN = 1.05
# With fewer rounds luck would pass for a gain: six heads of six have a probability of 3 %.
MIN_ROUNDS = 6


def is_gain(ratio: Ratio) -> bool:
    """Worth having, and more than noise; with fewer rounds the interval is not one of 95 %."""
    return ratio.n >= MIN_ROUNDS and (ratio.value or 1) <= 1 - MIN_GAIN and (ratio.high or 1) < 1


@dataclass(frozen=True)
class Verdict:
    """A setting's ratios to the baseline, over rounds that did not choose it."""

    setting: Setting
    time: Ratio
    memory: Ratio
    time_memory: Ratio
    """Of the product of time and memory."""
    line: str = ""
    """The shell command that runs the program with it."""

    @property
    def gains(self) -> bool:
        """Whether it is better than the baseline in time or memory, by more than noise."""
        return is_gain(self.time) or is_gain(self.memory)

    @property
    def point(self) -> Point:
        return Point(self.setting, self.time.value or math.inf, self.memory.value or math.inf)


@dataclass(frozen=True)
class Preference:
    """What the recommendation goes by."""

    by: str = "time"
    memory_limit: float = 1.5

    def allows(self, point: Point) -> bool:
        return point.memory <= self.memory_limit and (self.by != "memory" or point.time <= MAX_SLOWDOWN)

    def cost(self, point: Point) -> float:
        return {"time": point.time, "memory": point.memory, "balanced": point.time * point.memory}[self.by]

    def best(self, points: Sequence[Point]) -> Setting | None:
        """The setting of the least cost that it allows, if it is better than the baseline."""
        allowed = [each for each in points if self.allows(each) and self.cost(each) <= 1 - MIN_GAIN]
        return min(allowed, key=self.cost).setting if allowed else None

    def choose(self, verdicts: Sequence[Verdict]) -> Setting | None:
        """The same by rounds; first among those that are within the limit by their whole interval."""
        sure = [each.point._replace(memory=each.memory.high or math.inf) for each in verdicts]
        return self.best(sure) or self.best([each.point for each in verdicts])

    def objection(self, verdict: Verdict) -> str | None:
        """Why rounds that did not choose a setting do not recommend it; None if they do."""
        ratio = {"time": verdict.time, "memory": verdict.memory, "balanced": verdict.time_memory}[self.by]
        _, time, memory = verdict.point
        if ratio.value is None or math.inf in (time, memory):
            return "it could not be confirmed"
        if memory > self.memory_limit:
            return f"it takes {memory:.2f} of the memory, and the limit is {self.memory_limit:g}"
        if not self.allows(verdict.point):
            return f"it takes {time:.2f} of the time"
        if ratio.n < MIN_ROUNDS:
            return f"there was time for {ratio.n} rounds to confirm it, and {MIN_ROUNDS} are needed"
        if not is_gain(ratio):
            return f"its gain is {'within noise' if ratio.value < 1 else 'none'} in fresh runs"
        return None

    @property
    def over_limit(self) -> str:
        """What is wrong with settings that it does not allow."""
        limit = f"take more than {self.memory_limit:g} of the memory"
        return f"{limit}, or more than {MAX_SLOWDOWN:g} of the time" if self.by == "memory" else limit

    @property
    def words(self) -> str:
        limit = f"that takes at most {self.memory_limit:g} of the memory"
        if self.by == "memory":
            return f"the smallest that is not slower by more than {MAX_SLOWDOWN - 1:.0%}"
        return f"the fastest {limit}" if self.by == "time" else f"the least time by memory {limit}"


def verdict(
    setting: Setting, runs: Sequence[Run], base: Sequence[Run], command: Sequence[str] = ()
) -> Verdict:
    """Medians over the same rounds of both."""

    def ratio(figure: Callable[[Run], float]) -> Ratio:
        return ratio_of_medians([figure(run) for run in runs], [figure(run) for run in base])

    return Verdict(
        setting,
        ratio(lambda run: run.time_s),
        ratio(lambda run: run.memory_kib),
        ratio(lambda run: run.time_s * run.memory_kib),
        line(setting, os.environ, command),
    )


def front(points: Sequence[Point]) -> list[Point]:
    """The Pareto front of time and memory, from the fastest on; of equals the one with fewest knobs."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda each: (*each[1:], len(each.setting.values), each.setting.label)):
        if not kept or point.memory < kept[-1].memory:
            kept.append(point)
    return kept
