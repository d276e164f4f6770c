"""Steps between the values that the optimizer draws: it has many knobs, and each of them few values.

`halfway` brings a gain that costs too much within the limits, while the search lasts. `Refinement` moves the
knobs of a setting that is known to be good: each up, or else down, as far as that gains; then the same for a
setting that is better, but beyond the limits, with less of a knob.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from calm.commands.tune.space import Knobs, Point, Setting, between
from calm.commands.tune.trial import Pair, Tried
from calm.commands.tune.verdict import MIN_GAIN, Preference
from calm.core.rounds import RunFailedError

_NOT_SET = -1
# Pairs that tell whether a step with one knob gains.
_PAIRS = 3
# How often the distance to a value that does not gain is halved.
_HALVINGS = 3
# A step keeps this distance from the limits, as the pairs are few; what is worse by this much needs one pair.
_MARGIN = 1.03
_WORSE = 1.1

Measure = Callable[[Setting, int], Pair | None]
"""One pair of a setting; None if there is no time for that many. Raises RunFailedError."""


def halfway(
    spaces: Mapping[str, Knobs], points: Sequence[Point], tried: Collection[Setting], preference: Preference
) -> Setting | None:
    """A setting of one knob between one that is within the limits, or unset, and the next that is better but
    beyond. None if nothing is between, or that was tried.
    """
    enough = min([1.0, *(preference.cost(each) for each in points if preference.allows(each))])
    found = []
    for allocator, knobs in spaces.items():
        for name, values in knobs.items():
            # The settings of this knob alone, by the index of its value.
            alone = {Setting(allocator, {name: value}): index for index, value in enumerate(values)}
            seen = {alone[each.setting]: each for each in points if each.setting in alone}
            outer = min(
                (
                    index
                    for index, each in seen.items()
                    if not preference.allows(each) and preference.cost(each) <= enough * (1 - MIN_GAIN)
                ),
                default=_NOT_SET,
            )
            within = [index for index, each in seen.items() if index < outer and preference.allows(each)]
            inner = max([_NOT_SET, *within])
            if (middle := (inner + outer) // 2) > inner:
                setting = Setting(allocator, {name: values[middle]})
                if setting not in tried:
                    found.append((preference.cost(seen[outer]), setting))
    return min(found, key=lambda each: each[0])[1] if found else None


@dataclass
class Refinement:
    """Moves the knobs of one setting."""

    spaces: Mapping[str, Knobs]
    preference: Preference
    measure: Measure
    best: Tried | None = None

    def steps(self, start: Setting, points: Sequence[Point]) -> Iterator[tuple[Setting, Setting]]:
        """Ever better settings, each with the one that it was moved from: the start, or one of the points."""
        first = self.seen(start)
        if first is None or first.failure:
            return
        self.best = first
        for name in start.values:
            if not self._move(self.best.setting, name, upwards=True):
                self._move(self.best.setting, name)
        if self.best is not first:
            yield self.best.setting, start
        enough = self.preference.cost(self.best.point) * (1 - MIN_GAIN)
        outside = [
            each
            for each in points
            if not self.preference.allows(each) and self.preference.cost(each) <= enough
        ]
        if outside:
            beyond = min(outside, key=lambda each: (len(each.setting.values), self.preference.cost(each)))
            for name in beyond.setting.values:
                if self._move(beyond.setting, name, inwards=True):
                    yield self.best.setting, beyond.setting

    def _move(self, start: Setting, name: str, *, upwards: bool = False, inwards: bool = False) -> bool:
        """Moves a knob as far as each step gains, or inwards: only until it is within the limits.

        By the values of the search, then by halves of what is in between. Whether that found a better one.
        """
        before = self.best

        def is_good(value: str) -> bool | None:
            seen = self.seen(start.replace(name, value))
            if seen is None or seen.failure:
                return None if seen is None else False
            allowed = self.preference.allows(seen.point.scaled(_MARGIN))
            # The new one only if it gains enough to be worth it.
            gains = allowed and self.preference.cost(seen.point) <= (1 - MIN_GAIN) * self._known_cost
            if gains:
                self.best = seen
            return allowed if inwards else gains

        values, last = self.spaces[start.allocator][name], start.values[name]
        index = values.index(last)
        for value in values[index + 1 :] if upwards else reversed(values[:index]):
            found = is_good(value)
            if found is None:
                break
            if found == inwards:
                good, bad = (value, last) if inwards else (last, value)
                for _ in range(_HALVINGS):
                    if not (middle := between(good, bad)) or (found := is_good(middle)) is None:
                        break
                    good, bad = (middle, bad) if found else (good, middle)
                break
            last = value
        return self.best is not before

    @property
    def _known_cost(self) -> float:
        return self.preference.cost(self.best.point) if self.best else float("inf")

    def seen(self, setting: Setting) -> Tried | None:
        """By a few pairs, or by one if it is plainly worse; None if there is no time for them."""
        seen = Tried(setting)
        while len(seen.pairs) < _PAIRS:
            try:
                pair = self.measure(setting, _PAIRS - len(seen.pairs))
            except RunFailedError as error:
                return Tried(setting, failure=str(error))
            if pair is None:
                return None
            seen.pairs.append(pair)
            optimistic = seen.point.scaled(1 / _WORSE)
            if not self.preference.allows(optimistic) or self.preference.cost(optimistic) > self._known_cost:
                break
        return seen
