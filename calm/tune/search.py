"""The whole of a search: looks for settings, confirms the front, drops what does not matter, moves what is
left to where it does most, and confirms that once more.

Whatever is chosen because it looked good is, in part, chosen for its luck. So the figures that chose are
never those that are told: the front is run anew, beside the baseline, and the one setting that is then
chosen is run anew once more, alone.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from calm.allocators import GLIBC
from calm.tune.bracket import halfway
from calm.tune.refine import Refinement
from calm.tune.space import Setting
from calm.tune.study import Study, StudyLostError, Tried
from calm.tune.trial import BaselineError, Look, Pairs, Rounds, Run, Runner, Stopped
from calm.tune.verdict import LEAST_GAIN, ROUNDS_LEAST, Point, Preference, Verdict, front, verdict

# Shares of the time: of all of it for the last confirmation, or as much more as its rounds need; and of what
# is before it until the search ends, and the front has been run anew.
_FINAL, _FINAL_AT_MOST = 0.14, 0.6
_SEARCH, _FRONT = 0.58, 0.8
_FRONT_SETTINGS = 5
_MARGINS = (1.05, 1.2)
_FRONT_ROUNDS_LEAST = 3
_FRONT_ROUNDS = 6
_FINAL_ROUNDS = 10
_FINAL_ROUNDS_MOST = 24
# So many looks decide whether a knob matters, if it does by more than _LOST or less than half of what would
# be a gain; and more, in between. One look is enough to see that it matters by _PLAIN.
_ABLATION_LOOKS = 3
_ABLATION_LOOKS_MOST = 7
_LOST = 1.1
_PLAIN = 1.5
# So many of the last looks or rounds tell what the next one takes.
_REMEMBERED = 10
# A setting that is beaten by no more than this may be as good: it is worth a second look.
_NEAR = 1.03

_T = TypeVar("_T")


@dataclass(frozen=True)
class Shares:
    """The part of the time that has passed when each phase ends."""

    search: float
    front: float
    ablation: float


def shares(runs: float) -> Shares:
    """By how many runs of the program there is time for."""
    needed = (2 * ROUNDS_LEAST + 1) / runs if runs > 0 else 1.0
    before = 1 - min(_FINAL_AT_MOST, max(_FINAL, needed))
    return Shares(_SEARCH * before, _FRONT * before, before)


def plan(runs: int) -> tuple[int, int]:
    """About how many settings can be tried with so many runs, and how many rounds confirm one."""
    parts = shares(runs)
    front = (parts.front - parts.search) * runs >= 2 * _FRONT_ROUNDS_LEAST
    final = 1 - (parts.ablation if front else parts.search)
    return max(1, int(runs * parts.search / 2)), min(_FINAL_ROUNDS_MOST, int(runs * final / 2))


class Watcher(Protocol):
    """Is told what happens."""

    def phase(self, what: str, total: int | None) -> None:
        """Something new begins: of so many steps, if that is known."""

    def step(self, front: Sequence[Point]) -> None:
        """A step is done; the front as it is known now."""

    def say(self, line: str) -> None:
        """Something worth a line."""


@dataclass
class Budget:
    """How long it may last: seconds, or trials of the search, or both, whichever ends first."""

    seconds: float | None = None
    trials: int | None = None
    now: Callable[[], float] = time.monotonic
    begin: float = 0.0

    def __post_init__(self) -> None:
        self.begin = self.now()

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self.now() - self.begin

    def left_until(self, share: float) -> float:
        """Seconds until a share of the time has passed; infinite where only trials are counted."""
        return math.inf if self.seconds is None else self.seconds * share - self.elapsed


@dataclass
class Outcome:
    """All that is known, at the end or when it was stopped."""

    tried: dict[Setting, Tried] = field(default_factory=dict)
    trials: int = 0
    front: list[Verdict] = field(default_factory=list)
    """Confirmed by rounds of its own; the search's choice may be among those that fell off it."""
    dropped: list[Verdict] = field(default_factory=list)
    """Run anew too, and no longer on the front, or no better than the baseline in anything, or too rarely."""
    chosen: Setting | None = None
    reduced: Setting | None = None
    """The chosen one without the knobs that do not matter."""
    unneeded: list[str] = field(default_factory=list)
    refined: Setting | None = None
    """A better one, found by moving the knobs of one that was known."""
    refined_from: Setting | None = None
    final: Verdict | None = None
    recommended: Verdict | None = None
    reason: str = ""
    """Why nothing is recommended."""
    failures: dict[Setting, str] = field(default_factory=dict)
    stopped_by: int | None = None
    error: str | None = None

    @property
    def unconfirmed(self) -> bool:
        """Something looks good, and time was too short to be sure."""
        rounds = self.final.time.n if self.final else 0
        return self.chosen is not None and self.recommended is None and rounds < ROUNDS_LEAST


class _Clock:
    """What a run takes, by those that there were last: a machine is not always as busy."""

    def __init__(self, budget: Budget, run_s: float) -> None:
        self._budget = budget
        self._last: deque[tuple[float, int]] = deque([(run_s, 1)] if run_s else [], maxlen=_REMEMBERED)

    def each(self) -> float:
        """Seconds that one run takes; 0 if there was none."""
        runs = sum(runs for _, runs in self._last)
        return sum(seconds for seconds, _ in self._last) / runs if runs else 0.0

    def timed(self, runs: int, action: Callable[[], _T]) -> _T:
        """Does something that runs the program so many times."""
        begin = self._budget.now()
        found = action()
        self._last.append((self._budget.now() - begin, runs))
        return found


class Search:
    """One search, from the first trial to the recommendation."""

    def __init__(
        self,
        study: Study,
        runner: Runner,
        budget: Budget,
        preference: Preference,
        watcher: Watcher,
        run_s: float = 0.0,
    ) -> None:
        self.study = study
        self.runner = runner
        self.budget = budget
        self.preference = preference
        self.watcher = watcher
        self.outcome = Outcome()
        self._pairs = Pairs(runner)
        self._clock = _Clock(budget, run_s)

    def run(self) -> Outcome:
        """Everything; what was known when it was stopped is kept."""
        try:
            self._search()
            shortlist = self._shortlist()
            if shortlist:
                self._confirm_front(shortlist)
                self._choose()
                if self.outcome.chosen:
                    self._ablate(self.outcome.chosen)
                    self._refine()
                    self._confirm_chosen()
            else:
                self.outcome.reason = "no setting worked" if self.outcome.tried else "no setting was tried"
        except Stopped as stopped:
            self.outcome.stopped_by = stopped.signal
            self.outcome.reason = "stopped before the recommendation was confirmed"
        except BaselineError as error:
            self.outcome.error = f"the program failed as it is, without any setting: {error}"
            self.outcome.reason = "the program itself failed"
        except StudyLostError as error:
            self.outcome.error = str(error)
            self.outcome.reason = "the study was lost"
        return self.outcome

    def _points(self) -> list[Point]:
        """What the search has seen, without what failed even once."""
        return [
            (each.setting, each.time, each.memory)
            for each in self.outcome.tried.values()
            if each.failure is None and each.looks and each.setting not in self.outcome.failures
        ]

    def _points_here(self) -> list[Point]:
        """The same, without what only other machines have."""
        return [point for point in self._points() if self.study.runnable(point[0])]

    def _front_now(self) -> list[Point]:
        return front([*self._points(), (Setting(GLIBC), 1.0, 1.0)])

    def _search(self) -> None:
        self.watcher.phase("search", self.budget.trials)
        self.outcome.tried = self.study.tried()
        enqueued: set[Setting] = set()
        while self._may_try():
            self._try_one()
            seen = enqueued | self.outcome.tried.keys()
            middle = halfway(self.study.spaces, self._points_here(), seen, self.preference)
            if middle:
                self.study.enqueue(middle)
                enqueued.add(middle)
            self.watcher.step(self._front_now())

    def _may_try(self) -> bool:
        if self.budget.trials is not None and self.outcome.trials >= self.budget.trials:
            return False
        # As long as nothing looks good there is nothing to run anew.
        parts = self._shares()
        found = self.preference.best(self._points_here())
        left = self.budget.left_until(parts.search if found else parts.ablation)
        # One at least, however short the time is.
        return left >= 2 * self._clock.each() or (self.outcome.trials == 0 and left > 0)

    def _shares(self) -> Shares:
        each = self._clock.each()
        return shares(self.budget.seconds / each if self.budget.seconds and each else math.inf)

    def _try_one(self) -> None:
        asked = self.study.ask()
        known = self.outcome.tried.get(asked.setting)
        if known and known.failure:
            self.study.fail(asked, known.failure)
            self.outcome.trials += 1
            return
        looks: list[Look] = []
        try:
            while True:
                look = self._clock.timed(2, lambda: self._pairs.look(asked.setting))
                if isinstance(look, str):
                    self.study.fail(asked, look)
                    self.watcher.say(f"{asked.setting.label}: failed: {look}")
                    break
                looks.append(look)
                earlier = known.looks if known else []
                if len(looks) == 2 or not self._promising(Tried(asked.setting, [*earlier, *looks])):
                    self.study.tell(asked, looks)
                    break
        except (Stopped, BaselineError):
            if looks:
                self.study.tell(asked, looks)
            else:
                self.study.give_up(asked)
            self.outcome.tried = self.study.tried()
            raise
        self.outcome.trials += 1
        self.outcome.tried = self.study.tried()

    def _promising(self, new: Tried) -> bool:
        """Not clearly beaten by what is known; the baseline is, too."""
        others = [(1.0, 1.0)] + [(t, m) for setting, t, m in self._points() if setting != new.setting]
        return not any(t * _NEAR < new.time and m <= new.memory for t, m in others) and not any(
            m * _NEAR < new.memory and t <= new.time for t, m in others
        )

    def _shortlist(self) -> list[Setting]:
        """The best for the recommendation, with room to the limits and without; then the rest of the front.

        What seems to be just within a limit is so by luck, as often as not.
        """
        points = self._points_here()
        found = front(points)
        if not found:
            return []
        wanted = []
        for margin in (*_MARGINS, 1.0):
            allowed = [
                point for point in points if self.preference.allows(point[1] * margin, point[2] * margin)
            ]
            if allowed:
                best = min(
                    allowed, key=lambda point: (self.preference.cost(*point[1:]), len(point[0].values))
                )
                wanted.append(best[0])
        knee = min(found, key=lambda point: point[1] * point[2])
        wanted += [knee[0], found[0][0], found[-1][0], *(point[0] for point in found[1:-1])]
        return list(dict.fromkeys(wanted))[:_FRONT_SETTINGS]

    def _fit(self, settings: int, share: float) -> float:
        """The rounds that there is time for; infinite where trials are counted."""
        each = self._clock.each() * (settings + 1)
        left = self.budget.left_until(share)
        return left / each if each > 0 else math.inf if left > 0 else 0

    def _run_rounds(
        self, rounds: Rounds, settings: list[Setting], share: float, most: int, phase: str
    ) -> None:
        """As many as time allows, whatever the figures are: to stop when they please would be luck again."""
        self.watcher.phase(phase, int(min(most, self._fit(len(settings), share))))
        while len(rounds.base) < most and self._fit(len(settings), share) >= 1:
            self._clock.timed(len(settings) + 1, lambda: rounds.run(self.runner, settings))
            self.watcher.step(self._front_now())
            if len(rounds.failures) == len(settings):
                break

    def _confirm_front(self, shortlist: list[Setting]) -> None:
        share = self._shares().front
        while shortlist and self._fit(len(shortlist), share) < _FRONT_ROUNDS_LEAST:
            shortlist = shortlist[:-1]
        if not shortlist:
            return
        rounds = Rounds()
        try:
            self._run_rounds(rounds, shortlist, share, _FRONT_ROUNDS, "front")
        finally:
            self.outcome.failures |= rounds.failures
            verdicts = {setting: verdict(setting, rounds) for setting in rounds.runs}
            points = [(each.setting, *each.point) for each in verdicts.values()]
            kept = [point[0] for point in front([*points, (Setting(GLIBC), 1.0, 1.0)])]
            self.outcome.front = [
                verdicts[each] for each in kept if each in verdicts and verdicts[each].gains
            ]
            self.outcome.dropped = [each for each in verdicts.values() if each not in self.outcome.front]

    def _choose(self) -> None:
        confirmed = [*self.outcome.front, *self.outcome.dropped]
        if confirmed:
            points = [(each.setting, *each.point) for each in confirmed]
            self.outcome.chosen = self.preference.choose(confirmed)
        else:
            points = self._points_here()
            self.outcome.chosen = self.preference.best(points)
        if self.outcome.chosen is None:
            runs = "in fresh runs" if confirmed else "in the search"
            gained = any(self.preference.cost(point[1], point[2]) <= 1 - LEAST_GAIN for point in points)
            self.outcome.reason = (
                f"{runs} those that gain anything {self.preference.too_dear}"
                if gained
                else f"no setting gained {LEAST_GAIN:.0%} or more {runs}"
            )

    def _ablate(self, chosen: Setting) -> None:
        """Leaves alone what nothing is lost without, against the whole setting: all at once, or by halves."""
        self.outcome.reduced = chosen
        if len(chosen.values) > (1 if chosen.allocator == GLIBC else 0):
            self.watcher.phase("ablation", None)
            self._strip(Pairs(_Against(self.runner, chosen)), [name for name, _ in chosen.values])

    def _strip(self, against: Pairs, names: list[str]) -> None:
        without = self.outcome.reduced
        assert without is not None
        for name in names:
            without = without.without(name)
        # Without any knob glibc is the baseline, which the setting was chosen over.
        needed = without == Setting(GLIBC) or self._needed(against, without)
        if needed is None:
            return
        if not needed:
            self.outcome.reduced = without
            self.outcome.unneeded += names
        elif len(names) > 1:
            # The latter half first: those that programs feel the least.
            half = len(names) // 2
            self._strip(against, names[half:])
            self._strip(against, names[:half])

    def _needed(self, against: Pairs, without: Setting) -> bool | None:
        """Whether something is lost with a setting instead of the whole; None if no time is left to tell."""
        looks: list[Look] = []
        while len(looks) < _ABLATION_LOOKS_MOST:
            look = self._look(against, without, 1)
            if look is None:
                return None
            if isinstance(look, str) or max(look.time, look.memory) > _PLAIN:
                return True
            looks.append(look)
            mean = Tried(without, looks)
            if len(looks) >= _ABLATION_LOOKS:
                if max(mean.time, mean.memory) <= 1 + LEAST_GAIN / 2:
                    return False
                if max(mean.time, mean.memory) > _LOST:
                    return True
        return max(mean.time, mean.memory) > 1 + LEAST_GAIN

    def _look(self, pairs: Pairs, setting: Setting, looks: int) -> Look | str | None:
        """One look before the confirmation, if there is time for so many; else None."""
        if self.budget.left_until(self._shares().ablation) < 2 * looks * self._clock.each():
            return None
        look = self._clock.timed(2, lambda: pairs.look(setting))
        self.watcher.step(self._front_now())
        return look

    def _refine(self) -> None:
        setting = self.outcome.reduced
        if setting is None or not setting.values:
            return
        self.watcher.phase("refinement", None)
        refinement = Refinement(
            self.study, self.preference, lambda each, looks: self._look(self._pairs, each, looks)
        )
        for found in refinement.steps(setting, self._points_here()):
            self.outcome.refined, self.outcome.refined_from = found

    def _confirm_chosen(self) -> None:
        """The last of what was chosen; if that does not hold, what it was moved from, if time is left."""
        setting = self.outcome.refined or self.outcome.reduced or self.outcome.chosen
        assert setting is not None
        self._confirm(setting)
        if self.outcome.refined and not self.outcome.recommended and self._fit(1, 1.0) >= ROUNDS_LEAST:
            assert self.outcome.reduced is not None
            self.watcher.say(f"{self.outcome.reason}; going back to {self.outcome.reduced.label}")
            self.outcome.refined = self.outcome.refined_from = None
            self._confirm(self.outcome.reduced)

    def _confirm(self, setting: Setting) -> None:
        most = _FINAL_ROUNDS if self.budget.seconds is None else _FINAL_ROUNDS_MOST
        rounds = Rounds()
        try:
            self._run_rounds(rounds, [setting], 1.0, most, "confirmation")
        finally:
            if rounds.runs.get(setting):
                self.outcome.final = verdict(setting, rounds)
        if failure := rounds.failures.get(setting):
            self.outcome.failures[setting] = failure
            self.outcome.reason = f"{setting.label} failed when it was to be confirmed: {failure}"
        elif self.outcome.final is None:
            self.outcome.reason = (
                f"no time was left to confirm {setting.label}; {ROUNDS_LEAST} rounds are needed"
            )
        elif objection := self.preference.objection(self.outcome.final):
            self.outcome.reason = f"{setting.label}: {objection}"
        else:
            self.outcome.recommended, self.outcome.reason = self.outcome.final, ""


@dataclass
class _Against:
    """A runner whose baseline is a setting."""

    runner: Runner
    base: Setting

    def run(self, setting: Setting | None) -> Run:
        """See Runner."""
        return self.runner.run(setting or self.base)
