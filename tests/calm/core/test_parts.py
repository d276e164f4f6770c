"""Parts that need no program to be run: statistics, the machine's kind, how figures are written."""

import dataclasses

import numpy as np
import pytest

from calm.core import machine, measure, report, statistics
from calm.core.statistics import Ratio, median, ratio_of_medians

X86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu vme {} sse\n"


def test_median_skips_what_was_not_counted() -> None:
    assert median([3.0, None, 1.0, 2.0]) == 2.0
    assert median([None]) is None
    assert median([]) is None


def test_identical_samples_have_ratio_one() -> None:
    values = [1.0, 2.0, 5.0, 3.0]
    assert ratio_of_medians(values, values) == Ratio(1.0, 1.0, 1.0, 4)


def test_an_exact_multiple_has_no_spread() -> None:
    base = [1.0, 2.0, 5.0, 3.0]
    assert ratio_of_medians([3 * value for value in base], base) == Ratio(3.0, 3.0, 3.0, 4)


def test_the_interval_contains_the_true_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    random = np.random.default_rng(7)
    hits = 0
    for _ in range(100):
        round_speed = random.lognormal(0, 0.3, 15)
        base = 10 * round_speed * random.lognormal(0, 0.05, 15)
        values = 7 * round_speed * random.lognormal(0, 0.05, 15)
        got = ratio_of_medians(list(values), list(base))
        assert got.low is not None
        assert got.high is not None
        hits += got.low <= 0.7 <= got.high
    assert hits >= 88


def test_deterministic_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 40)
    random = np.random.default_rng(1)
    values, base = list(random.random(9)), list(random.random(9))
    got = []
    for seed in (5, 5, 6):
        monkeypatch.setattr(statistics, "SEED", seed)
        got.append(ratio_of_medians(values, base))
    assert got[0] == got[1] != got[2]


@pytest.mark.parametrize(
    ("values", "base", "expected"),
    [
        ([], [], Ratio(None, None, None, 0)),
        ([2.0], [4.0], Ratio(0.5, None, None, 1)),
        ([2.0, 2.0], [0.0, 0.0], Ratio(None, None, None, 2)),
        ([0.0, 0.0], [2.0, 2.0], Ratio(0.0, 0.0, 0.0, 2)),
    ],
)
def test_edges(values: list[float], base: list[float], expected: Ratio) -> None:
    assert ratio_of_medians(values, base) == expected


def test_a_base_that_is_sometimes_zero_has_an_open_end() -> None:
    got = ratio_of_medians([5.0] * 5, [0.0, 0.0, 1.0, 1.0, 1.0])
    assert got.value == 5.0
    assert got.high is None


def test_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="same rounds"):
        ratio_of_medians([1.0], [1.0, 2.0])


def test_broadcasting_cpus() -> None:
    assert machine.broadcast("x86_64", X86.format("pcid")) is None
    amd = machine.broadcast("x86_64", X86.format("invlpgb"))
    assert amd is not None
    assert "INVLPGB" in amd.note
    assert not amd.always
    arm = machine.broadcast("aarch64", "processor\t: 0\n")
    assert arm is not None
    assert arm.always
    assert "arm64" in arm.note
    hyperv = machine.broadcast("x86_64", X86.format("pcid"), "Microsoft Corporation")
    assert hyperv is not None
    assert "Hyper-V" in hyperv.note


@pytest.fixture
def sample() -> measure.Measurement:
    return measure.measure(["true"])


def test_broadcasting_cpus_never_show_a_zero(
    sample: measure.Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = dataclasses.replace(sample, counters=dict.fromkeys(sample.counters, measure.Counter(0)))
    metric = measure.METRIC["shootdowns"]
    monkeypatch.setattr(machine, "broadcast_here", lambda: machine.broadcast("aarch64", ""))
    assert metric.get(measure.without_broadcasts(zeros)) is None
    assert measure.how(metric, measure.without_broadcasts(zeros)).startswith("not counted: arm64")
    amd = machine.broadcast("x86_64", X86.format("invlpgb"))
    monkeypatch.setattr(machine, "broadcast_here", lambda: amd)
    assert metric.get(measure.without_broadcasts(zeros)) == 0
    assert measure.how(metric, zeros).endswith("broadcasts are not counted")


def test_scaled_and_partial_counters_say_so(sample: measure.Measurement) -> None:
    counters = {**sample.counters, "cycles": measure.Counter(5, scaled=True, user_only=True)}
    text = measure.how(measure.METRIC["cycles"], dataclasses.replace(sample, counters=counters))
    assert "scaled" in text
    assert "user mode only" in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "s", "-"),
        (1.5, "s", "1.500 s"),
        (0.0123, "s", "12.30 ms"),
        (0.0000451, "s", "45 µs"),
        (512, "KiB", "512 KiB"),
        (2048, "KiB", "2.0 MiB"),
        (3 * 1024 * 1024, "KiB", "3.00 GiB"),
        (1234567, "count", "1,234,567"),
        (2.5, "count", "2.5"),
    ],
)
def test_figures(value: float | None, unit: str, text: str) -> None:
    assert report.figure(value, unit) == text


def test_a_small_share_is_not_nothing() -> None:
    assert report.share(1e-9, 1.0) == "under 0.01 %"
    assert report.share(0.5, 10.0) == "5.00 %"
