"""The phases of a search: it tries settings, measures the front again, removes knobs without effect, moves
the others to where they gain most, and confirms one setting.

A setting that is chosen for its figures is, in part, chosen for its luck. So the figures of the report are
never those that chose: the front is measured again beside the baseline, and the setting that is then chosen
once more, by itself.
"""

# ruff: noqa: RUF012 - msgspec copies mutable defaults

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Protocol

from calm.commands.tune.space import Point, Setting
from calm.commands.tune.steps import Refinement, halfway
from calm.commands.tune.study import Study, StudyLostError
from calm.commands.tune.trial import AS_IT_IS, BaselineError, Pair, Pairs, Run, Runner, Tried
from calm.commands.tune.verdict import MIN_GAIN, MIN_ROUNDS, Preference, Verdict, front, verdict
from calm.core import rounds
from calm.core.allocators import GLIBC
from calm.core.documents import Document
from calm.core.rounds import Row, RunFailedError, Side, StoppedError
from calm.core.statistics import CONFIDENCE, RESAMPLES, SEED

# Shares of the time: of all of it for the confirmation, or more if its rounds need that; and of the time
# before it until the search ends, and until the front has been measured again.
_CONFIRMATION, _MAX_CONFIRMATION = 0.14, 0.6
_SEARCH, _FRONT = 0.58, 0.8
_FRONT_SETTINGS = 5
# Margins to the limits: a setting that seems to be just within one is so by luck, as often as not.
_MARGINS = (1.05, 1.2, 1.0)
_MIN_FRONT_ROUNDS = 3
_FRONT_ROUNDS = 6
_ROUNDS = 10
_MAX_ROUNDS = 24
# Pairs that decide whether a knob matters: the fewer ones if it does by more than _LOST, or by less than half
# of what would be a gain. One pair is enough for a loss of _PLAIN.
_ABLATION_PAIRS = 3
_MAX_ABLATION_PAIRS = 7
_LOST = 1.1
_PLAIN = 1.5
# How many of the last runs predict the time of the next.
_REMEMBERED = 40
# A setting that is beaten by no more than this may be as good: it is worth a second pair.
_NEAR = 1.03
_BASELINE = Point(Setting(GLIBC), 1.0, 1.0)


def shares(runs: float) -> dict[str, float]:
    """The part of the time that has passed when each phase ends, by how many runs there is time for."""
    before = 1 - min(_MAX_CONFIRMATION, max(_CONFIRMATION, (2 * MIN_ROUNDS + 1) / runs))
    return {"search": _SEARCH * before, "front": _FRONT * before, "ablation": before, "confirmation": 1.0}


class Watcher(Protocol):
    """Shows the progress: phases, with their number of steps if it is known; steps, with the front so far."""

    def phase(self, what: str, total: int | None) -> None: ...
    def step(self, front: Sequence[Point]) -> None: ...
    def say(self, line: str) -> None: ...


@dataclass
class Budget:
    """The limit of a search, in seconds, trials, or both; and what a run takes of it."""

    seconds: float | None = None
    trials: int | None = None
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._begin = self.now()
        # A machine is not always as busy: the last runs tell.
        self.runs_s: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def elapsed(self) -> float:
        return self.now() - self._begin

    @property
    def run_s(self) -> float:
        return fmean(self.runs_s)

    def left(self, phase: str) -> float:
        """Seconds until a phase should end; infinite if only trials are limited."""
        if self.seconds is None:
            return math.inf
        return self.seconds * shares(self.seconds / self.run_s)[phase] - self.elapsed

    def fits(self, runs: int, phase: str) -> bool:
        return self.seconds is None or self.left(phase) >= runs * self.run_s

    def rounds(self, settings: int, phase: str) -> float:
        """How many of these settings and the baseline there is time for; infinite if trials are limited."""
        return math.inf if self.seconds is None else self.left(phase) / (self.run_s * (settings + 1))


class Tuning(Document, tag="calm-tuning", kw_only=True):
    """A search: what it compared, and all that is known at its end or when it was stopped."""

    command: list[str] = []
    time: str = "wall"
    """wall or cpu."""
    memory: str = "average"
    """average or peak."""
    allocators: list[str] = []
    machine: dict[str, str | int] = {}
    baseline_wall_s: float = 0.0
    """Of one run of the program as it is now."""
    repeats: int = 1
    """Runs of the program for each figure."""
    limit_s: float | None = None
    max_trials: int | None = None
    preference: Preference = Preference()
    study: dict[str, str] | None = None
    """Storage, without a password, and name."""
    notes: list[str] = []
    wall_s: float = 0.0
    """Of the search."""
    trials: int = 0
    tried: list[Tried] = []
    front: list[Verdict] = []
    """The Pareto front, measured again."""
    rejected: list[Verdict] = []
    """Measured again too: not on the front any more, no better than the baseline, or of too few rounds."""
    failures: dict[str, str] = {}
    """Settings under which the program failed when they were measured again."""
    chosen: Setting | None = None
    reduced: Setting | None = None
    """The chosen setting without the knobs that have no effect."""
    removed: list[str] = []
    """Those knobs."""
    ablated: bool = False
    """There was time to try the chosen setting without each of its knobs."""
    refined: Setting | None = None
    """A better setting, found by moving the knobs of one that was known."""
    refined_from: Setting | None = None
    confirmation: Verdict | None = None
    recommendation: Verdict | None = None
    reason: str = ""
    """Why no setting is recommended."""
    interrupted_by: int | None = None
    failure: str | None = None
    """Why the search ended, if the program or the database failed."""
    confidence: float = CONFIDENCE
    resamples: int = RESAMPLES
    bootstrap_seed: int = SEED

    @property
    def working(self) -> list[Point]:
        """What the search has seen of settings that never failed."""
        return [each.point for each in self.tried if each.pairs and not each.failure]


@dataclass
class Search:
    """One search, from the first trial to the recommendation."""

    study: Study
    runner: Runner
    budget: Budget
    result: Tuning
    watcher: Watcher

    def __post_init__(self) -> None:
        self.preference = self.result.preference
        self._pairs = Pairs(self._run)

    def _run(self, setting: Setting | None) -> Run:
        begin = self.budget.now()
        try:
            return self.runner(setting)
        finally:
            self.budget.runs_s.append(self.budget.now() - begin)

    def run(self) -> Tuning:
        """All phases; what was known when it was stopped is kept."""
        try:
            with self.study.storage_errors():
                self._search()
                if shortlist := self._shortlist():
                    self._confirm_front(shortlist)
                    self._choose()
                    if self.result.chosen:
                        self._ablate(self.result.chosen)
                        self._refine()
                        self._confirm_chosen()
                else:
                    self.result.reason = "no setting worked" if self.result.tried else "no setting was tried"
        except StoppedError as stopped:
            self.result.interrupted_by = stopped.signal
            self.result.reason = "stopped before the recommendation was confirmed"
        except BaselineError as error:
            self.result.failure = f"the program failed as it is, without any setting: {error}"
            self.result.reason = "the program itself failed"
        except StudyLostError as error:
            self.result.failure = str(error)
            self.result.reason = "the study was lost"
        self.result.wall_s = self.budget.elapsed
        return self.result

    def _update(self) -> None:
        self.result.tried = list(self.study.tried().values())

    def _points(self, runnable: bool = True) -> list[Point]:
        """What the search has seen, without what failed even once, and what only other machines have."""
        return [
            each
            for each in self.result.working
            if each.setting.label not in self.result.failures
            if not runnable or self.study.parameters(each.setting)
        ]

    def _step(self) -> None:
        self.watcher.step(front([*self._points(runnable=False), _BASELINE]))

    def _search(self) -> None:
        self.watcher.phase("search", self.budget.trials)
        self._update()
        enqueued: set[Setting] = set()
        while self._may_try():
            self._try_one()
            seen = enqueued | {each.setting for each in self.result.tried}
            if middle := halfway(self.study.spaces, self._points(), seen, self.preference):
                self.study.enqueue(middle)
                enqueued.add(middle)
            self._step()

    def _may_try(self) -> bool:
        if self.budget.trials is not None and self.result.trials >= self.budget.trials:
            return False
        # As long as no setting is better than the baseline there is nothing to measure again.
        phase = "search" if self.preference.best(self._points()) else "ablation"
        # One at least, however short the time is.
        return self.budget.fits(2, phase) or (self.result.trials == 0 and self.budget.left(phase) > 0)

    def _try_one(self) -> None:
        asked = self.study.ask()
        new = Tried(asked.setting)
        known = next((each for each in self.result.tried if each.setting == asked.setting), new)
        pairs: list[Pair] = []
        failure = known.failure
        try:
            while not failure and len(pairs) < 2:
                pairs.append(self._pairs.measure(asked.setting))
                if self._is_beaten(Tried(asked.setting, known.pairs + pairs).point):
                    break
        except RunFailedError as error:
            pairs, failure = [], str(error)
            self.watcher.say(f"{asked.setting.label}: failed: {failure}")
        finally:
            # A trial that is stopped keeps the pair that was complete.
            self.study.tell(asked, pairs, failure)
            self._update()
        self.result.trials += 1

    def _is_beaten(self, new: Point) -> bool:
        """Clearly, by a setting that is known, or by the baseline."""
        return any(
            (time * _NEAR < new.time and memory <= new.memory)
            or (memory * _NEAR < new.memory and time <= new.time)
            for setting, time, memory in (_BASELINE, *self._points(runnable=False))
            if setting != new.setting
        )

    def _shortlist(self) -> list[Setting]:
        """The best for the recommendation, then the rest of the front."""
        points = self._points()
        if not (found := front(points)):
            return []
        cost, allows, wanted = self.preference.cost, self.preference.allows, []
        for margin in _MARGINS:
            allowed = [point for point in points if allows(point.scaled(margin))]
            wanted += sorted(allowed, key=lambda point: (cost(point), len(point.setting.values)))[:1]
        knee = min(found, key=lambda point: point.time * point.memory)
        wanted += [knee, found[0], found[-1], *found[1:-1]]
        return list(dict.fromkeys(point.setting for point in wanted))[:_FRONT_SETTINGS]

    def _measure(
        self, settings: list[Setting], max_rounds: int, phase: str
    ) -> tuple[list[Verdict], Exception | None]:
        """As many rounds as time allows, whatever their figures are; and what stopped them.

        To stop when the figures please would be luck again.
        """
        self.watcher.phase(phase, int(min(max_rounds, self.budget.rounds(len(settings), phase))))
        base: Side[Run] = Side(AS_IT_IS)
        sides: dict[Setting, Side[Run]] = {setting: Side(setting.label) for setting in settings}
        by_label = {setting.label: setting for setting in settings}
        row = Row(phase, [base, *sides.values()])

        def once(_row: Row[Run], side: Side[Run], _number: int) -> Run:
            return self._run(by_label.get(side.label))

        def rows_of(_number: int) -> list[Row[Run]]:
            alive = any(side.failure is None for side in sides.values())
            return [row] if alive and self.budget.rounds(len(settings), phase) >= 1 else []

        stopped: Exception | None = None
        try:
            # All has just run: there is nothing to warm up.
            number = rounds.run(
                [row], max_rounds, once, after=lambda _: self._step(), rows_of=rows_of, warm_up=False
            )
            stopped = StoppedError(number) if number is not None else None
        except BaselineError as error:
            stopped = error
        self.result.failures |= {side.label: side.failure for side in sides.values() if side.failure}
        base_runs = [run for _, run in base.runs]
        found = [
            verdict(setting, [run for _, run in side.runs], base_runs, self.result.command)
            for setting, side in sides.items()
            if side.runs and not side.failure
        ]
        return found, stopped

    def _confirm_front(self, shortlist: list[Setting]) -> None:
        while shortlist and self.budget.rounds(len(shortlist), "front") < _MIN_FRONT_ROUNDS:
            shortlist = shortlist[:-1]
        if not shortlist:
            return
        verdicts, stopped = self._measure(shortlist, _FRONT_ROUNDS, "front")
        kept = front([*(each.point for each in verdicts), _BASELINE])
        self.result.front = [
            each for point in kept for each in verdicts if each.point == point and each.gains
        ]
        self.result.rejected = [each for each in verdicts if each not in self.result.front]
        if stopped:
            raise stopped

    def _choose(self) -> None:
        confirmed = [*self.result.front, *self.result.rejected]
        if confirmed:
            points = [each.point for each in confirmed]
            self.result.chosen = self.preference.choose(confirmed)
        else:
            points = self._points()
            self.result.chosen = self.preference.best(points)
        if self.result.chosen is None:
            runs = "in fresh runs" if confirmed else "in the search"
            gained = any(self.preference.cost(point) <= 1 - MIN_GAIN for point in points)
            self.result.reason = (
                f"{runs} those that gain anything {self.preference.over_limit}"
                if gained
                else f"no setting gained {MIN_GAIN:.0%} or more {runs}"
            )

    def _ablate(self, chosen: Setting) -> None:
        """Unsets the knobs without effect, by pairs with the whole setting: all at once, or by halves."""
        self.result.reduced = reduced = chosen
        self.result.ablated = True
        if len(chosen.values) <= (1 if chosen.allocator == GLIBC else 0):
            return
        self.watcher.phase("ablation", None)
        against = Pairs(self._run, chosen)
        candidates = [list(chosen.values)]
        while candidates:
            names = candidates.pop()
            without = reduced.without(names)
            # Without any knob glibc is the baseline, which the setting was chosen over.
            needed = without == Setting(GLIBC) or self._is_worse(against, without)
            self.result.ablated &= needed is not None
            if needed is False:
                self.result.reduced = reduced = without
                self.result.removed += names
            elif needed and len(names) > 1:
                # The latter half first: the knobs that affect the fewest programs.
                half = len(names) // 2
                candidates += [names[:half], names[half:]]

    def _is_worse(self, against: Pairs, without: Setting) -> bool | None:
        """Whether a setting loses something against the whole; None if there is no time left."""
        mean = Tried(without)
        lost = 0.0
        while len(mean.pairs) < _MAX_ABLATION_PAIRS:
            try:
                pair = self._measure_pair(against, without, 1)
            except RunFailedError:
                return True
            if pair is None:
                return None
            if max(pair.time, pair.memory) > _PLAIN:
                return True
            mean.pairs.append(pair)
            lost = max(mean.point[1:])
            if len(mean.pairs) >= _ABLATION_PAIRS and not 1 + MIN_GAIN / 2 < lost <= _LOST:
                break
        return lost > 1 + MIN_GAIN

    def _measure_pair(self, pairs: Pairs, setting: Setting, count: int) -> Pair | None:
        """One pair before the confirmation; None if there is no time for so many."""
        if not self.budget.fits(2 * count, "ablation"):
            return None
        pair = pairs.measure(setting)
        self._step()
        return pair

    def _refine(self) -> None:
        setting = self.result.reduced
        if setting is None or not setting.values:
            return
        self.watcher.phase("refinement", None)
        measure = partial(self._measure_pair, self._pairs)
        refinement = Refinement(self.study.spaces, self.preference, measure)
        for found in refinement.steps(setting, self._points()):
            self.result.refined, self.result.refined_from = found

    def _confirm_chosen(self) -> None:
        """Confirms the last step; if that fails and time is left, the setting that it began at."""
        reduced = self.result.reduced
        assert reduced is not None
        self._confirm(self.result.refined or reduced)
        time_is_left = self.budget.fits(2 * MIN_ROUNDS, "confirmation")
        if self.result.refined and not self.result.recommendation and time_is_left:
            self.watcher.say(f"{self.result.reason}; going back to {reduced.label}")
            self.result.refined = self.result.refined_from = None
            self._confirm(reduced)

    def _confirm(self, setting: Setting) -> None:
        max_rounds = _ROUNDS if self.budget.seconds is None else _MAX_ROUNDS
        found, stopped = self._measure([setting], max_rounds, "confirmation")
        if found:
            self.result.confirmation = found[0]
        if stopped:
            raise stopped
        name, confirmed = setting.label, self.result.confirmation
        if failure := self.result.failures.get(name):
            self.result.reason = f"{name} failed when it was to be confirmed: {failure}"
        elif confirmed is None:
            self.result.reason = f"no time was left to confirm {name}; {MIN_ROUNDS} rounds are needed"
        elif objection := self.preference.objection(confirmed):
            self.result.reason = f"{name}: {objection}"
        else:
            self.result.recommendation, self.result.reason = confirmed, ""
