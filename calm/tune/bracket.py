"""What to try next of a knob whose gain costs too much: the value half way to one that does not.

An optimizer of many knobs draws each from all its values, and may never come upon the one value that gains
the most within the limits. For a knob that was tried alone, halving takes a handful.
"""

from collections.abc import Collection, Sequence

from calm.tune.space import Knob, Setting, Space
from calm.tune.verdict import LEAST_GAIN, Point, Preference

_NOT_SET = -1


def halfway(
    spaces: Sequence[Space], points: Sequence[Point], tried: Collection[Setting], preference: Preference
) -> Setting | None:
    """A setting of one knob between one that is within the limits and the next that is better but beyond.

    Where no smaller value is known to be within, the knob that is not set stands below the first. None where
    nothing is between, or what is there was tried.
    """
    known = [preference.cost(*point[1:]) for point in points if preference.allows(*point[1:])]
    least = min([1.0, *known]) * (1 - LEAST_GAIN)
    found = []
    for space in spaces:
        for knob in space.knobs:
            seen = _seen(space, knob, points)
            beyond = [
                place
                for place, ratios in seen.items()
                if not preference.allows(*ratios) and preference.cost(*ratios) <= least
            ]
            if beyond:
                outer = min(beyond)
                within = [
                    place for place, ratios in seen.items() if place < outer and preference.allows(*ratios)
                ]
                middle = (max([_NOT_SET, *within]) + outer) // 2
                if middle > max([_NOT_SET, *within]):
                    setting = Setting(space.allocator, ((knob.name, knob.values[middle]),))
                    found.append((preference.cost(*seen[outer]), setting))
    untried = [each for each in found if each[1] not in tried]
    return min(untried, key=lambda each: each[0])[1] if untried else None


def _seen(space: Space, knob: Knob, points: Sequence[Point]) -> dict[int, tuple[float, float]]:
    """The ratios of those that set this knob alone, by the place of its value."""
    return {
        knob.values.index(setting.values[0][1]): (time, memory)
        for setting, time, memory in points
        if setting.allocator == space.allocator
        and [name for name, _ in setting.values] == [knob.name]
        and setting.values[0][1] in knob.values
    }
