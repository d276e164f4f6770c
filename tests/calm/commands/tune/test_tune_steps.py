"""Halving between what is within the limits and what is beyond."""

import pytest
from tune_helpers import ARENAS, TRIM, FakeRunner, glibc_space, knob, search

from calm.commands.tune.space import Point, Setting
from calm.commands.tune.steps import halfway
from calm.commands.tune.verdict import Preference
from calm.core.allocators import GLIBC

TIME = Preference("time", 1.5)


def alone(name: str, value: int) -> Setting:
    return Setting(GLIBC, {name: str(value)})


def at(name: str, value: int, time: float, memory: float) -> Point:
    return Point(alone(name, value), time, memory)


def trims() -> list[str]:
    return list(glibc_space()[GLIBC][TRIM])


def test_half_way_by_its_place_among_the_values() -> None:
    points = [at(TRIM, 2 << 20, 0.9, 1.1), at(TRIM, 32 << 20, 0.2, 1.8)]
    assert halfway(glibc_space(), points, (), TIME) == alone(TRIM, 8 << 20)
    points.append(at(TRIM, 8 << 20, 0.4, 1.4))
    assert halfway(glibc_space(), points, (), TIME) == alone(TRIM, 16 << 20)
    points.append(at(TRIM, 16 << 20, 0.3, 1.6))
    assert halfway(glibc_space(), points, (), TIME) is None


def test_without_a_smaller_one_the_values_begin_at_not_set() -> None:
    first = int(trims()[0])
    assert halfway(glibc_space(), [at(TRIM, 4 * first, 0.2, 1.8)], (), TIME) == alone(TRIM, first)
    assert halfway(glibc_space(), [at(TRIM, 2 * first, 0.2, 1.8)], (), TIME) == alone(TRIM, first)
    assert halfway(glibc_space(), [at(TRIM, first, 0.2, 1.8)], (), TIME) is None


@pytest.mark.parametrize(
    ("preference", "points"),
    [
        # Within the limits already.
        (TIME, [at(TRIM, 1 << 30, 0.2, 1.4)]),
        # No better than what is within them.
        (TIME, [at(TRIM, 1 << 30, 0.5, 1.8), at(ARENAS, 1, 0.5, 1.0)]),
        # No better than nothing.
        (TIME, [at(TRIM, 1 << 30, 1.1, 1.8)]),
        # Not alone.
        (TIME, [Point(Setting(GLIBC, {TRIM: str(1 << 30), ARENAS: "8"}), 0.2, 1.8)]),
        # Of another allocator.
        (TIME, [Point(Setting("calmalloc", {"memory_per_cpu": "512"}), 0.2, 1.8)]),
        # A value that only another machine knows.
        (TIME, [at(TRIM, 12345, 0.2, 1.8)]),
        # Fast, and with --prefer memory of no use.
        (Preference("memory", 1.5), [at(TRIM, 1 << 30, 0.2, 1.8)]),
    ],
)
def test_nothing_to_halve(preference: Preference, points: list[Point]) -> None:
    assert halfway(glibc_space(), points, (), preference) is None


def test_the_best_knob_comes_first_and_none_twice() -> None:
    points = [at(TRIM, 1 << 30, 0.4, 1.8), at(ARENAS, 64, 0.2, 1.8)]
    first = halfway(glibc_space(), points, (), TIME)
    assert first is not None
    assert list(first.values) == [ARENAS]
    second = halfway(glibc_space(), points, {first}, TIME)
    assert second is not None
    assert list(second.values) == [TRIM]
    assert halfway(glibc_space(), points, {first, second}, TIME) is None


def test_a_narrow_window_is_found_within_few_trials() -> None:
    """Only one of seventeen values gains within the limit, and no other knob does anything."""

    def window(setting: Setting | None) -> tuple[float, float]:
        trim = knob(setting, TRIM) or 0
        return (0.2, 1700) if trim > 8 << 20 else (0.3, 1400) if trim == 8 << 20 else (1.0, 1000)

    for seed in range(5):
        recommended = search(FakeRunner(window, seed=seed), seed=seed, trials=10).recommendation
        assert recommended is not None
        assert recommended.setting == alone(TRIM, 8 << 20)
        assert recommended.time.value == pytest.approx(0.3)
