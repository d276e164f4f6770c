"""Small steps from a setting that is known to be good: the search knows but every second size.

Each knob moves up, or else down, as far as that gains. Then the other way: what is better still, but beyond
the limits, may come within by less of a knob.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from calm.tune.space import Setting, between
from calm.tune.study import Study, Tried
from calm.tune.trial import Look
from calm.tune.verdict import LEAST_GAIN, Point, Preference

# So many looks tell whether a step with one knob gains; so many times the distance to one that does not is
# halved; so far a step stays from the limits, as the looks are few; and what is worse by so much needs one.
_LOOKS = 3
_HALVINGS = 3
_ROOM = 1.03
_WORSE = 1.1

LookAt = Callable[[Setting, int], Look | str | None]
"""One look at a setting, if there is time for so many, else None; or why the setting's run failed."""


class Refinement:
    """Moves the knobs of one setting."""

    def __init__(self, study: Study, preference: Preference, look_at: LookAt) -> None:
        self._study = study
        self._preference = preference
        self._look_at = look_at

    def steps(self, start: Setting, points: Sequence[Point]) -> Iterator[tuple[Setting, Setting]]:
        """Ever better settings, each with the one that it was moved from: the start, or one of the points."""
        first = best = self._seen(start)
        if best is None:
            return
        for name, _ in start.values:
            for upwards in (True, False):
                moved = self._moved(best, name, upwards)
                if moved != best:
                    best = moved
                    break
        if best != first:
            yield best.setting, start
        enough = self._cost(best) * (1 - LEAST_GAIN)
        outside = [
            (len(setting.values), self._preference.cost(time, memory), setting)
            for setting, time, memory in points
            if not self._preference.allows(time, memory) and self._preference.cost(time, memory) <= enough
        ]
        if outside:
            *_, beyond = min(outside, key=lambda each: each[:2])
            for name, _ in beyond.values:
                moved = self._inwards(best, beyond, name)
                if moved != best:
                    best = moved
                    yield best.setting, beyond

    def _inwards(self, best: Tried, beyond: Setting, name: str) -> Tried:
        """The best, or a setting beyond the limits with just so much less of a knob that it is within."""
        outer, inner = dict(beyond.values)[name], None
        for value in self._study.beyond(beyond, name, upwards=False):
            seen = self._seen(beyond.replace(name, value), best)
            if seen is None:
                return best
            if self._is_allowed(seen):
                inner, best = value, self._better_of(best, seen)
                break
            outer = value
        for _ in range(_HALVINGS):
            middle = between(outer, inner) if inner else None
            seen = self._seen(beyond.replace(name, middle), best) if middle else None
            if middle is None or seen is None:
                break
            if self._is_allowed(seen):
                inner, best = middle, self._better_of(best, seen)
            else:
                outer = middle
        return best

    def _moved(self, best: Tried, name: str, upwards: bool) -> Tried:
        """The best in one direction: by the values of the search, then by halves of what is in between."""
        value = dict(best.setting.values)[name]
        beyond: str | None = None
        for further in self._study.beyond(best.setting, name, upwards):
            if (better := self._better(best, name, further)) is None:
                beyond = further
                break
            best, value = better, further
        for _ in range(_HALVINGS):
            middle = between(value, beyond) if beyond else None
            if middle is None:
                break
            if (better := self._better(best, name, middle)) is None:
                beyond = middle
            else:
                best, value = better, middle
        return best

    def _better(self, best: Tried, name: str, value: str) -> Tried | None:
        """The setting with another value of a knob, if that gains and keeps within the limits."""
        new = self._seen(best.setting.replace(name, value), best)
        if new is None or not self._is_allowed(new):
            return None
        return None if self._better_of(best, new) is best else new

    def _cost(self, seen: Tried) -> float:
        return self._preference.cost(seen.time, seen.memory)

    def _is_allowed(self, seen: Tried) -> bool:
        return self._preference.allows(seen.time * _ROOM, seen.memory * _ROOM)

    def _better_of(self, best: Tried, new: Tried) -> Tried:
        """The new one only if it gains enough to be worth it."""
        return new if self._cost(new) <= self._cost(best) * (1 - LEAST_GAIN) else best

    def _seen(self, setting: Setting, best: Tried | None = None) -> Tried | None:
        """Its ratios to the baseline, by a few looks, or by one if it is plainly worse than the best.

        None if it fails, or there is no time for them.
        """
        seen = Tried(setting)
        while len(seen.looks) < _LOOKS:
            look = self._look_at(setting, _LOOKS - len(seen.looks))
            if look is None or isinstance(look, str):
                return None
            seen.looks.append(look)
            if not self._hopeful(seen, best):
                break
        return seen

    def _hopeful(self, seen: Tried, best: Tried | None) -> bool:
        """Whether more looks may show that it is within the limits and better."""
        time, memory = seen.time / _WORSE, seen.memory / _WORSE
        known = self._cost(best) if best else math.inf
        return self._preference.allows(time, memory) and self._preference.cost(time, memory) <= known
