"""The search itself, on programs that are functions."""

import io
import math
import os
import re
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tune_helpers import ARENAS, TCACHE, TRIM, FakeRunner, Watched, glibc_space, knob, search

from calm.commands.tune import space
from calm.commands.tune.output import front_table, print_report
from calm.commands.tune.search import Budget, Search, Tuning, shares
from calm.commands.tune.space import Point, Setting, between
from calm.commands.tune.steps import Refinement
from calm.commands.tune.study import Study
from calm.commands.tune.trial import BaselineError, Pair, Pairs, Run, Tried
from calm.commands.tune.verdict import MIN_ROUNDS, Preference, Verdict, front, verdict
from calm.core import allocators, report
from calm.core.allocators import GLIBC
from calm.core.rounds import StoppedError
from calm.core.statistics import Ratio


def much_trimming(setting: Setting | None) -> tuple[float, float]:
    """A program that a large trim threshold makes faster, at the price of some memory."""
    trim = knob(setting, TRIM)
    return (0.4, 1100) if trim is not None and trim >= 1 << 20 else (1.0, 1000)


def nothing_helps(_: Setting | None) -> tuple[float, float]:
    return 1.0, 1000


def trade(setting: Setting | None) -> tuple[float, float]:
    """The larger the threshold, the faster, and the larger; a single arena saves memory and costs time."""
    trim, arenas = knob(setting, TRIM), knob(setting, ARENAS)
    time, memory = 1.0, 1000.0
    if trim is not None and trim >= 1 << 20:
        time, memory = (0.2, 3000) if trim >= 1 << 25 else (0.5, 1300)
    return (time * 1.03, memory * 0.5) if arenas == 1 else (time, memory)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_finds_what_helps_and_leaves_out_what_does_not(seed: int) -> None:
    runner = FakeRunner(much_trimming, noise=0.02, seed=seed)
    outcome = search(runner, seed=seed)
    chosen = outcome.recommendation
    assert chosen is not None
    # By noise one that does not matter may stay.
    assert TRIM in chosen.setting.values
    assert len(chosen.setting.values) <= 2
    assert chosen.time.value == pytest.approx(0.4, rel=0.05)
    assert chosen.memory.value == pytest.approx(1.1, rel=0.05)
    assert chosen.time.low is not None
    assert chosen.time.high is not None
    assert chosen.time.low <= chosen.time.value <= chosen.time.high < 1


def test_the_optimizer_finds_a_setting_that_is_not_enqueued() -> None:
    def odd(setting: Setting | None) -> tuple[float, float]:
        pad = knob(setting, "glibc.malloc.top_pad")
        return (0.3 if pad is not None and 1 << 14 <= pad <= 1 << 18 else 1.0), 1000

    outcome = search(FakeRunner(odd), trials=40)
    assert outcome.recommendation is not None
    assert list(outcome.recommendation.setting.values) == ["glibc.malloc.top_pad"]


def test_what_matters_together_stays_together() -> None:
    """Neither knob does anything alone."""

    def both(setting: Setting | None) -> tuple[float, float]:
        return (0.5 if knob(setting, TCACHE) is not None and knob(setting, TRIM) is not None else 1.0), 1000

    chosen = search(FakeRunner(both), trials=30).recommendation
    assert chosen is not None
    assert set(chosen.setting.values) == {TCACHE, TRIM}


def test_nothing_is_compared_with_itself() -> None:
    runner = FakeRunner(much_trimming, noise=0.02)
    search(runner)
    assert Setting(GLIBC) not in runner.log


@pytest.mark.parametrize("first", [True, False])
def test_what_failed_only_once_does_not_win(first: bool) -> None:
    study = Study(glibc_space(), seed=1)
    asked, again = study.ask(), study.ask()
    again.trial.set_user_attr("setting", asdict(asked.setting))
    good, bad = (again, asked) if first else (asked, again)
    study.tell(good, [Pair(0.1, 1.0)])
    study.tell(bad, [], "exit code 1")
    outcome = search(FakeRunner(nothing_helps), study=study, trials=3)
    tried = next(each for each in outcome.tried if each.setting == asked.setting)
    assert tried.pairs
    assert tried.failure == "exit code 1"
    assert asked.setting not in [each.setting for each in outcome.front + outcome.rejected]


def test_what_is_surely_within_the_limit_goes_first() -> None:
    def a_setting(name: str, time: float, memory: Ratio) -> Verdict:
        ratio = Ratio(time, time, time, 6)
        return Verdict(Setting(GLIBC, {name: "1"}), ratio, memory, ratio)

    fast, slow = (
        a_setting(TRIM, 0.4, Ratio(1.47, 1.4, 1.6, 6)),
        a_setting(ARENAS, 0.5, Ratio(1.0, 0.9, 1.1, 6)),
    )
    preference = Preference("time", 1.5)
    assert preference.choose([fast, slow]) == slow.setting
    assert preference.choose([fast]) == fast.setting
    assert preference.choose([a_setting(TRIM, 0.4, Ratio(1.51, 1.4, 1.6, 6))]) is None


def test_noise_is_called_none() -> None:
    found = [
        search(FakeRunner(nothing_helps, noise=0.15, seed=seed), seed=seed, trials=10).recommendation
        for seed in range(40)
    ]
    assert sum(each is not None for each in found) <= 3


def test_a_front_of_few_rounds_claims_nothing() -> None:
    # There is time for three rounds of the front: a chance of one in eight that all of them are luck.
    found = [
        search(FakeRunner(nothing_helps, noise=0.15, seed=seed), seed=seed, trials=None, seconds=40.0)
        for seed in range(20)
    ]
    rounds = [each.time.n for outcome in found for each in (*outcome.front, *outcome.rejected)]
    assert rounds
    assert max(rounds) < MIN_ROUNDS
    assert [outcome.front for outcome in found] == [[]] * 20
    cells = front_table(found[0]).columns[-1].cells
    assert [each for each in cells if "gain" in str(each)] == []


def test_without_noise_nothing_is_none() -> None:
    outcome = search(FakeRunner(nothing_helps), trials=8)
    assert outcome.recommendation is None
    assert outcome.front == []
    assert "no setting gained" in outcome.reason


def test_a_slow_drift_of_the_machine_wins_nothing() -> None:
    outcome = search(FakeRunner(nothing_helps, drift=0.01), trials=8)
    assert outcome.recommendation is None
    assert all(0.98 < each.point.time < 1.02 for each in outcome.tried if len(each.pairs) % 2 == 0)


@pytest.mark.parametrize("lucky_until", ["front", "ablation", "confirmation"])
def test_luck_in_one_phase_does_not_outlive_it(lucky_until: str) -> None:
    order = ["search", "front", "ablation", "refinement", "confirmation"]
    watched = Watched()

    def lucky(setting: Setting | None) -> tuple[float, float]:
        over = order.index(watched.now) >= order.index(lucky_until) if watched.now else True
        return (1.0 if setting is None or over else 0.5), 1000

    outcome = search(FakeRunner(lucky), watched=watched, trials=8)
    assert outcome.recommendation is None
    assert any(each.point.time < 0.6 for each in outcome.tried)
    if lucky_until == "confirmation":
        assert outcome.chosen is not None
        assert "fresh runs" in outcome.reason


def test_what_is_only_by_luck_within_the_limit_does_not_push_out_what_is() -> None:
    """Many settings seem to be below 1.5 in the search, and are above when they are run anew."""
    watched = Watched()

    def cost(setting: Setting | None) -> tuple[float, float]:
        if (trim := knob(setting, TRIM)) is not None:
            # The faster, the larger: all of them are on the front.
            size = math.log2(trim)
            return 0.4 - size / 200, (1480 if watched.now == "search" else 1600) + size / 10
        if knob(setting, TCACHE) is not None:
            return 0.97, 900
        return (0.5 if knob(setting, ARENAS) is not None else 1.0), 1000

    outcome = search(FakeRunner(cost), trials=30, watched=watched)
    assert sum(TRIM in each.setting.values for each in outcome.tried) > 4
    assert outcome.recommendation is not None
    assert outcome.recommendation.point[1:] == (pytest.approx(0.5, rel=0.02), pytest.approx(1.0, rel=0.02))


def test_while_nothing_looks_good_the_search_goes_on() -> None:
    def late(runner: FakeRunner) -> FakeRunner:
        def cost(setting: Setting | None) -> tuple[float, float]:
            return (0.5 if knob(setting, TRIM) is not None and runner.clock > 65 else 1.0), 1000

        runner.cost = cost
        return runner

    outcome = search(late(FakeRunner(nothing_helps)), trials=None, seconds=100.0)
    assert outcome.recommendation is not None
    assert outcome.recommendation.time.value == pytest.approx(0.5)


def test_what_is_reported_is_from_the_confirmation_alone() -> None:
    watched = Watched()

    def fading(setting: Setting | None) -> tuple[float, float]:
        gain = {"search": 0.3, "front": 0.5}.get(watched.now, 0.8)
        return (1.0 if setting is None or knob(setting, TRIM) is None else gain), 1000

    runner = FakeRunner(fading)
    outcome = search(runner, watched=watched, trials=8)
    assert outcome.recommendation is not None
    assert outcome.recommendation.time.value == pytest.approx(0.8)
    assert outcome.recommendation.time.n == 10
    assert [each.time.value for each in outcome.front] == [pytest.approx(0.5)]


PAD = "glibc.malloc.top_pad"
MIB = 1 << 20


def the_more_the_faster(setting: Setting | None) -> tuple[float, float]:
    """Without noise: the limit of 1.5 on memory is between 4 and 8 MiB of padding."""
    pad = (knob(setting, PAD) or 0) / MIB
    return 1 / (1 + pad), 1000 + 80 * pad


@pytest.mark.parametrize(("limit", "reached"), [(1.5, 5.5), (1.42, 4.5), (1.7, 8), (1.35, 4)])
def test_a_size_between_those_of_the_search_is_found(limit: float, reached: float) -> None:
    outcome = search(FakeRunner(the_more_the_faster), trials=60, preference=Preference("time", limit))
    assert outcome.recommendation is not None
    assert outcome.recommendation.setting == Setting("glibc", {PAD: str(int(reached * MIB))})
    assert outcome.recommendation.memory.value == pytest.approx(1 + 0.08 * reached)
    moved = outcome.reduced != outcome.recommendation.setting
    assert (outcome.refined == outcome.recommendation.setting) == moved
    assert (outcome.refined_from is not None) == moved


def test_less_of_what_is_beyond_the_limit_may_be_within_it() -> None:
    """Fast from 9 MiB on, and within the limit up to 11: no power of two is both."""

    def cliff(setting: Setting | None) -> tuple[float, float]:
        trim, pad = ((knob(setting, name) or 0) / MIB for name in (TRIM, PAD))
        if trim >= 9:
            return 0.2, 1000 + 45 * min(trim, 16)
        return (0.7 if pad >= 4 else 1.0), 1000 + 20 * pad

    outcome = search(FakeRunner(cliff, noise=0.002), trials=40)
    assert outcome.recommendation is not None
    assert 9 * MIB <= (knob(outcome.recommendation.setting, TRIM) or 0) <= 11 * MIB
    assert outcome.recommendation.time.value == pytest.approx(0.2, rel=0.02)
    assert outcome.refined_from is not None
    assert (knob(outcome.refined_from, TRIM) or 0) > 11 * MIB


def test_a_step_too_far_is_taken_back() -> None:
    """Within the limit when it was looked at, and beyond it in the confirmation."""
    watched = Watched()

    def cost(setting: Setting | None) -> tuple[float, float]:
        time, memory = the_more_the_faster(setting)
        beyond = (knob(setting, PAD) or 0) > 4 * MIB and watched.now == "confirmation"
        return time, memory + 200 * beyond

    outcome = search(FakeRunner(cost), trials=60, watched=watched)
    assert outcome.recommendation is not None
    assert outcome.recommendation.setting == Setting("glibc", {PAD: str(4 * MIB)})
    assert outcome.refined is None
    assert any("going back" in line for line in watched.said)
    assert not outcome.reason


def test_steps_that_gain_nothing_are_not_taken() -> None:
    def flat(setting: Setting | None) -> tuple[float, float]:
        return (0.5 if knob(setting, PAD) is not None else 1.0), 1000

    outcome = search(FakeRunner(flat, noise=0.003), trials=20)
    assert outcome.recommendation is not None
    assert outcome.refined is None


@pytest.mark.parametrize(
    ("time", "memory", "count"),
    [(0.5, 1400, 3), (0.5, 1600, 3), (0.5, 1700, 1), (0.65, 1400, 3), (0.7, 1400, 1)],
)
def test_what_is_plainly_worse_gets_one_pair(time: float, memory: float, count: int) -> None:
    runner = FakeRunner(lambda setting: (time, memory) if setting else (1.0, 1000))
    pairs = Pairs(runner.run)
    best = Tried(Setting(GLIBC, {PAD: str(4 * MIB)}), [Pair(0.6, 1.2)])
    steps = Refinement(glibc_space(), Preference("time", 1.5), lambda each, _: pairs.measure(each), best)
    seen = steps.seen(best.setting.replace(PAD, str(8 * MIB)))
    assert seen is not None
    assert len(seen.pairs) == count


@pytest.mark.parametrize("what", ["time", "memory"])
@pytest.mark.parametrize(
    ("lost", "needed", "count"),
    [(1.005, False, 3), (1.015, False, 7), (1.03, True, 7), (1.2, True, 3), (1.6, True, 1)],
)
def test_what_is_lost_without_a_knob_decides_whether_it_stays(
    what: str, lost: float, needed: bool, count: int
) -> None:
    """Be it time or memory; where it is close, more pairs are measured."""
    without = (lost, 1000.0) if what == "time" else (1.0, 1000 * lost)
    runner = FakeRunner(lambda setting: without if setting else (1.0, 1000))
    looking = Search(Study(glibc_space()), runner.run, Budget(trials=1), Tuning(), Watched())
    assert looking._is_worse(Pairs(runner.run), Setting(GLIBC, {PAD: str(MIB)})) == needed
    assert len(runner.log) == 2 * count


def test_a_knob_moves_down_where_that_is_better() -> None:
    def small(setting: Setting | None) -> tuple[float, float]:
        pad = knob(setting, PAD)
        return 1.0, 1000 if pad is None else 700 + 10 * pad / MIB

    runner = FakeRunner(small)
    pairs = Pairs(runner.run)
    start = Setting("glibc", {PAD: str(32 * MIB)})
    steps = Refinement(glibc_space(), Preference("memory"), lambda each, _: pairs.measure(each))
    # Below 2 MiB a step gains less than a setting is worth.
    assert list(steps.steps(start, [])) == [(start.replace(PAD, str(2 * MIB)), start)]


def test_half_way() -> None:
    assert between(str(4 * MIB), str(8 * MIB)) == str(6 * MIB)
    assert between(str(8 * MIB), str(4 * MIB)) == str(6 * MIB)
    assert between("65536", "131072") is None
    assert between("1", "2") is None
    assert between("never", "on") is None
    assert between("0.5", "2") is None


@pytest.mark.parametrize(
    "preference",
    [Preference("time", 1.5), Preference("time", 4), Preference("memory"), Preference("balanced", 4)],
    ids=lambda each: f"{each.by}, {each.memory_limit:g}",
)
def test_the_recommendation_goes_by_the_preference(preference: Preference) -> None:
    outcome = search(FakeRunner(trade), preference=preference)
    assert outcome.recommendation is not None
    point = outcome.recommendation.point
    assert preference.allows(point)
    allowed = [each.point for each in outcome.tried if preference.allows(each.point)]
    # What is left out may cost as much as would not be a gain.
    assert preference.cost(point) <= 1.021 * min(map(preference.cost, allowed))


def test_preferences_differ() -> None:
    names = [Setting(GLIBC, {TRIM: str(1 << n)}) for n in range(20, 25)]
    shape = [(0.2, 3.0), (0.4, 1.4), (0.5, 1.0), (1.04, 0.6), (1.1, 0.2)]
    points = [Point(name, *point) for name, point in zip(names, shape, strict=True)]
    assert Preference("time", 1.5).best(points) == names[1]
    assert Preference("time", 3.0).best(points) == names[0]
    assert Preference("memory").best(points) == names[3]
    assert Preference("balanced").best(points) == names[4]
    assert Preference("time").best([Point(names[0], 0.99, 1.0)]) is None
    assert Preference("time").best(points[:1]) is None


def test_nothing_within_the_limit_is_said_so() -> None:
    def dear(setting: Setting | None) -> tuple[float, float]:
        return (1.0, 1000) if knob(setting, TRIM) is None else (0.5, 2000)

    outcome = search(FakeRunner(dear), trials=8)
    assert outcome.recommendation is None
    assert "take more than 1.5 of the memory" in outcome.reason
    assert outcome.front[0].point[1:] == (pytest.approx(0.5), pytest.approx(2.0))


def test_what_fails_is_recorded_and_never_wins() -> None:
    def fails(setting: Setting | None) -> str | None:
        return "killed by SIGSEGV (11)" if knob(setting, TRIM) is not None else None

    watched = Watched()
    outcome = search(FakeRunner(much_trimming, fails=fails), trials=12, watched=watched)
    assert outcome.recommendation is None
    failed = [each for each in outcome.tried if each.failure]
    assert failed
    assert all(TRIM in each.setting.values for each in failed)
    assert not any(TRIM in each.setting.values for each in outcome.front + outcome.rejected)
    assert any("SIGSEGV" in line for line in watched.said)


def test_what_fails_in_the_front_is_not_chosen_by_the_search() -> None:
    """Where nothing of the front is left, the search's figures choose."""
    watched = Watched()
    runner = FakeRunner(
        much_trimming, fails=lambda setting: "exit code 3" if setting and watched.now == "front" else None
    )
    outcome = search(runner, trials=6, watched=watched)
    assert outcome.failures
    assert not outcome.front + outcome.rejected
    assert outcome.chosen is None or outcome.chosen.label not in outcome.failures


def test_what_is_plainly_beaten_gets_one_pair_of_the_search() -> None:
    def cost(setting: Setting | None) -> tuple[float, float]:
        return (2.0 if knob(setting, TCACHE) is not None else 1.0), 1000

    tried = search(FakeRunner(cost), trials=6).tried
    assert {TCACHE in each.setting.values: len(each.pairs) for each in tried} == {False: 2, True: 1}


def test_a_pair_that_was_complete_when_it_was_stopped_is_kept() -> None:
    (tried,) = search(FakeRunner(much_trimming, stop_at=3)).tried
    assert len(tried.pairs) == 1


def test_what_failed_is_not_run_again() -> None:
    bad = Setting(GLIBC, {ARENAS: "64"})
    study = Study(glibc_space(), seed=1)
    for _ in range(3):
        study.enqueue(bad)
    runner = FakeRunner(nothing_helps, fails=lambda setting: "exit code 1" if setting == bad else None)
    assert search(runner, study=study, trials=10).trials == 10
    assert runner.log.count(bad) == 1


@pytest.mark.parametrize(("runs", "last"), [(math.inf, 0.14), (100, 0.14), (26, 0.5), (15, 0.6)])
def test_of_few_runs_more_are_for_the_confirmation(runs: float, last: float) -> None:
    parts = shares(runs)
    assert 1 - parts["ablation"] == pytest.approx(last)
    assert 0 < parts["search"] < parts["front"] < parts["ablation"]


@pytest.mark.parametrize("phase", ["front", "confirmation"])
def test_what_fails_when_confirmed_is_not_recommended(phase: str) -> None:
    watched = Watched()

    def fails(setting: Setting | None) -> str | None:
        return "exit code 3" if knob(setting, TRIM) is not None and watched.now == phase else None

    outcome = search(FakeRunner(much_trimming, fails=fails), trials=8, watched=watched)
    assert outcome.recommendation is None
    assert "exit code 3" in outcome.failures.values()


def test_a_program_that_begins_to_fail_ends_the_search_and_keeps_what_is_known() -> None:
    runner = FakeRunner(much_trimming)

    def fails(setting: Setting | None) -> str | None:
        if setting is None and len(runner.log) > 12:
            raise BaselineError("exit code 1")
        return None

    runner.fails = fails
    outcome = search(runner)
    assert outcome.failure is not None
    assert "exit code 1" in outcome.failure
    assert outcome.recommendation is None
    assert outcome.tried


@pytest.mark.parametrize("phase", ["search", "front", "ablation", "refinement", "confirmation"])
@pytest.mark.parametrize("runs", [0, 1, 8])
def test_what_is_known_when_it_is_stopped_is_kept(phase: str, runs: int) -> None:
    watched = Watched()
    seen = 0

    def stop(_: Setting | None) -> None:
        nonlocal seen
        seen += watched.now == phase
        if seen > runs:
            raise StoppedError(2)

    def cost(setting: Setting | None) -> tuple[float, float]:
        # Two knobs that both matter, so that there is something to leave out.
        time = 0.8 if knob(setting, TRIM) is not None else 1.0
        return (time * 0.8 if knob(setting, "glibc.malloc.mmap_threshold") is not None else time), 1000

    outcome = search(FakeRunner(cost, fails=stop), trials=12, watched=watched)
    assert watched.now == phase
    assert outcome.interrupted_by == 2
    assert outcome.recommendation is None
    assert "stopped" in outcome.reason
    assert bool(outcome.tried) == (phase != "search" or runs > 1)
    later = ("ablation", "refinement", "confirmation")
    assert bool(outcome.front) == (phase in later)
    # Of a round or two nothing is claimed.
    assert not (phase == "front" and runs == 8) or outcome.rejected
    assert bool(outcome.confirmation) == (phase == "confirmation" and runs == 8)


@pytest.mark.parametrize("seconds", [7.0, 100.0, 250.0])
def test_it_lasts_no_longer_than_it_may(seconds: float) -> None:
    runner = FakeRunner(much_trimming, noise=0.02)
    outcome = search(runner, trials=None, seconds=seconds)
    assert runner.clock <= seconds + 1
    assert runner.clock >= 0.7 * min(seconds, 100)
    assert (outcome.recommendation is not None) == (seconds >= 100)
    if seconds < 100:
        assert outcome.reason.endswith("6 are needed")
        assert "nothing is recommended: " in printed(outcome)


def test_trials_are_counted() -> None:
    outcome = search(FakeRunner(nothing_helps), trials=9)
    assert outcome.trials == 9
    assert len(outcome.tried) <= 9


def test_the_same_seed_searches_alike() -> None:
    runs = [FakeRunner(much_trimming, noise=0.05) for _ in range(2)]
    first, second = (search(runner, trials=16, seed=7) for runner in runs)
    assert runs[0].log == runs[1].log
    second.date = first.date
    assert first == second
    other = FakeRunner(much_trimming, noise=0.05)
    search(other, trials=16, seed=8)
    assert other.log != runs[0].log


def test_pairs_turn() -> None:
    runner = FakeRunner(nothing_helps)
    setting = Setting(GLIBC, {TRIM: "65536"})
    pairs = Pairs(runner.run)
    for _ in range(4):
        pairs.measure(setting)
    assert runner.log == [None, setting, setting, None] * 2


def confirming(runner: FakeRunner) -> Search:
    return Search(Study(glibc_space()), runner.run, Budget(trials=1), Tuning(), Watched())


def test_rounds_take_turns_and_a_stopped_one_leaves_nothing() -> None:
    settings = [Setting(GLIBC, {TRIM: str(1 << n)}) for n in (20, 21)]
    runner = FakeRunner(nothing_helps, stop_at=20)
    found, stopped = confirming(runner)._measure(settings, 10, "front")
    assert isinstance(stopped, StoppedError)
    assert [(each.setting, each.time.n) for each in found] == [(setting, 6) for setting in settings]
    assert {runner.log[at] for at in range(0, 18, 3)} == {None, *settings}
    for at in range(0, 18, 3):
        assert set(runner.log[at : at + 3]) == {None, *settings}


def test_what_fails_in_a_later_round_has_no_rounds() -> None:
    good, bad = (Setting(GLIBC, {TRIM: str(1 << n)}) for n in (20, 21))
    runner = FakeRunner(nothing_helps)
    runner.fails = lambda setting: "exit code 3" if setting == bad and runner.log.count(bad) == 3 else None
    rounds = confirming(runner)
    found, stopped = rounds._measure([good, bad], 4, "front")
    assert stopped is None
    assert rounds.result.failures == {bad.label: "exit code 3"}
    assert [(each.setting, each.time.n) for each in found] == [(good, 4)]
    assert runner.log.count(bad) == 3


def test_without_a_setting_that_works_rounds_end() -> None:
    bad = Setting(GLIBC, {TRIM: "1048576"})
    runner = FakeRunner(nothing_helps, fails=lambda setting: "exit code 3" if setting else None)
    assert confirming(runner)._measure([bad], 4, "confirmation") == ([], None)
    assert sorted(map(str, runner.log)) == sorted(map(str, [None, bad]))


def test_ratios_are_to_the_same_rounds_baseline() -> None:
    setting = Setting(GLIBC, {TRIM: "65536"})
    runs, base = ([Run(t * part, 100 * part) for t in (1.0, 2.0, 4.0)] for part in (0.5, 1))
    found = verdict(setting, runs, base)
    assert (found.time.value, found.time.low, found.time.high) == (0.5, 0.5, 0.5)
    assert found.memory.value == 0.5
    assert found.time_memory.value == 0.25


def a_verdict(value: float, high: float, n: int = 10, memory: float = 1.0) -> Verdict:
    time = Ratio(value, value - 0.01, high, n)
    return Verdict(Setting(GLIBC, {TRIM: "1"}), time, Ratio(memory, memory, memory, n), time)


def test_why_a_setting_was_rejected_is_printed() -> None:
    dropped = [a_verdict(0.9, 0.95), a_verdict(1.0, 1.1), a_verdict(0.8, 0.9, n=MIN_ROUNDS - 1)]
    notes = [str(each).partition("(")[2] for each in front_table(Tuning(rejected=dropped)).columns[-1].cells]
    assert notes == ["", "too few rounds)", "beaten)", "no gain)"]


def printed(found: Tuning) -> str:
    file = io.StringIO()
    print_report(found, [], report.console(file))
    return file.getvalue()


@pytest.mark.parametrize(("by", "memory", "count"), [("time", 0.5, 1), ("memory", 0.5, 0), ("time", 1.0, 0)])
def test_what_saves_memory_is_mentioned_with_prefer_time(by: str, memory: float, count: int) -> None:
    found = Tuning(front=[a_verdict(1.0, 1.1, memory=memory)], preference=Preference(by), reason="of that")
    assert printed(found).count("see --prefer memory") == count


def test_where_nothing_was_confirmed_what_is_within_the_limits_comes_first() -> None:
    seen = {4: (0.9, 1.0), 5: (0.2, 2.0), 6: (0.5, 1.0), 7: (1.0, 1.0)}
    tried = [Tried(Setting(GLIBC, {ARENAS: str(n)}), [Pair(*each)]) for n, each in seen.items()]
    text, _, beyond = printed(Tuning(tried=tried)).partition("beyond the limit")
    assert re.findall(r"arena_max=(\d)", text) == ["6", "4", "7"]
    assert "arena_max=5" in beyond


def test_what_the_limit_excludes_is_printed() -> None:
    """A setting 23 % faster that takes 1.56 of the memory is no reason to say that nothing helps."""
    seen = {4: (0.77, 1.56), 5: (0.95, 3.0), 6: (1.0, 1.0)}
    tried = [Tried(Setting(GLIBC, {ARENAS: str(n)}), [Pair(*each)]) for n, each in seen.items()]
    text = printed(Tuning(tried=tried, reason="those that gain take more"))
    assert "nothing is recommended: those that gain take more" in text
    assert (
        "beyond the limit: time 0.77, memory 1.56: glibc: arena_max=4; --memory-limit 1.65 allows it" in text
    )
    within = printed(Tuning(tried=tried[2:], reason="none"))
    assert "nothing helps: none" in within
    assert "beyond" not in within


@pytest.mark.parametrize("ablated", [True, False])
def test_knobs_that_were_not_tried_by_themselves_are_said_to_be(ablated: bool) -> None:
    both = replace(a_verdict(0.5, 0.6), setting=Setting(GLIBC, {TRIM: "1", ARENAS: "1"}))
    text = printed(Tuning(recommendation=both, ablated=ablated))
    assert ("without each of its 2 knobs: some may do nothing" in text) != ablated


@pytest.mark.parametrize(
    ("found", "objection"),
    [
        (a_verdict(0.5, 0.6), None),
        (a_verdict(0.5, 1.0), "within noise"),
        (a_verdict(0.99, 0.995), "within noise"),
        (a_verdict(1.1, 1.2), "none"),
        (a_verdict(0.5, 0.6, n=MIN_ROUNDS - 1), "rounds"),
        (a_verdict(0.5, 0.6, memory=1.51), "the limit is 1.5"),
    ],
)
def test_objections(found: Verdict, objection: str | None) -> None:
    found_objection = Preference().objection(found)
    assert (found_objection is None) if objection is None else objection in (found_objection or "")


def test_prefer_memory_does_not_recommend_a_slow_program() -> None:
    slow = a_verdict(1.06, 1.1, memory=0.5)
    assert Preference("memory").objection(slow) is not None
    assert Preference("memory").objection(a_verdict(1.04, 1.1, memory=0.5)) is None


def test_front() -> None:
    plain, one, two = (Setting(GLIBC), Setting(GLIBC, {TRIM: "1"}), Setting(GLIBC, {TRIM: "1", TCACHE: "0"}))
    arenas = Setting(GLIBC, {ARENAS: "1"})
    points = [Point(two, 0.5, 1.2), Point(one, 0.5, 1.2), Point(plain, 1.0, 1.0), Point(arenas, 0.9, 1.3)]
    assert [each[0] for each in front(points)] == [one, plain]


def test_asked_settings_are_of_the_space_and_never_the_baseline() -> None:
    study = Study(glibc_space(), seed=3)
    allowed = glibc_space()[GLIBC]
    seen: set[str] = set()
    left_alone = 0
    for _ in range(60):
        asked = study.ask()
        assert asked.setting != Setting(GLIBC)
        for name, value in asked.setting.values.items():
            assert value in allowed[name]
        seen |= set(asked.setting.values)
        left_alone += TRIM not in asked.setting.values
        study.tell(asked, [Pair(1.0, 1.0)])
    assert seen == set(allowed)
    assert left_alone > 5


def test_plain_allocators_come_first() -> None:
    study = Study({**glibc_space(), "calmalloc": {}, "ptlbmalloc2": {}}, seed=1)
    first = []
    for _ in range(2):
        asked = study.ask()
        first.append(asked.setting)
        study.tell(asked, [Pair(1.0, 1.0)])
    assert first == [Setting("calmalloc"), Setting("ptlbmalloc2")]


def test_pairs_are_pooled_by_their_geometric_mean() -> None:
    study = Study({"calmalloc": {}}, seed=1)
    for pair in (Pair(0.5, 1.0), Pair(2.0, 4.0)):
        study.tell(study.ask(), [pair])
    (known,) = study.tried().values()
    assert known.point[1:] == pytest.approx((1.0, 2.0))


def test_what_is_set_already_stays_and_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocators, "parse", allocators.Allocator)
    inherited = {
        "GLIBC_TUNABLES": "glibc.malloc.perturb=1:glibc.malloc.trim_threshold=4096",
        "MALLOC_ARENA_MAX": "2",
        "CALM_OPTIONS": "memory_per_cpu=50,report=exit",
    }
    found, notes = space.spaces(["glibc"], inherited)
    names = set(found[GLIBC])
    assert TRIM not in names
    assert ARENAS not in names
    assert TCACHE in names
    assert len(notes) == 3
    setting = Setting(GLIBC, {TCACHE: "0"})
    variables = space.variables(setting, inherited)
    assert variables == {"GLIBC_TUNABLES": f"{inherited['GLIBC_TUNABLES']}:{TCACHE}=0"}
    options = space.variables(Setting("calmalloc", {"background": "off"}), inherited)
    assert options["CALM_OPTIONS"] == "memory_per_cpu=50,report=exit,background=off"


@pytest.mark.parametrize("name", ["calmalloc", "ptlbmalloc2"])
def test_every_value_is_one_that_the_allocator_takes(name: str) -> None:
    if not allocators.find_library(name):
        pytest.skip(f"{name} is not built")
    knobs = space.spaces([name], {})[0][name]
    assert knobs
    for knob_name, values in knobs.items():
        for value in values:
            variables = space.variables(Setting(name, {knob_name: value}), {})
            run = subprocess.run(
                ["true"], env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True, check=True
            )
            # A wrong name or value is named there, and ignored.
            assert run.stderr == "", variables


def test_the_governor_is_not_given_what_makes_it_stay_out() -> None:
    names = {each.removeprefix("glibc.malloc.") for each in space._knobs()["ptlbmalloc2"]}
    assert names.isdisjoint({"trim_threshold", "top_pad", "mmap_threshold", "mmap_max"})
    assert {"arena_max", "tcache_count", space.SENSITIVITY} <= names


def test_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(GLIBC, {TRIM: "33554432", TCACHE: "0"})
    assert space.line(setting, {}, ["./a b", "c"]) == (f"GLIBC_TUNABLES={TRIM}=33554432:{TCACHE}=0 './a b' c")
    # What is preloaded anyway needs no saying.
    assert space.line(Setting(GLIBC), {"LD_PRELOAD": "/opt/other.so"}, ["true"]) == "true"
    plain = allocators.Allocator("ptlbmalloc2", Path("/opt/libptlbmalloc2.so"))
    monkeypatch.setattr(allocators, "parse", lambda _: plain)
    governed = Setting("ptlbmalloc2", {space.SENSITIVITY: "2", ARENAS: "1"})
    line = space.line(governed, {"LD_PRELOAD": "/opt/other.so"}, ["true"])
    assert set(line.split()) == {
        "LD_PRELOAD=/opt/libptlbmalloc2.so:/opt/other.so",
        "PTLBMALLOC2_SENSITIVITY=2",
        f"GLIBC_TUNABLES={ARENAS}=1",
        "true",
    }


def test_the_order_of_allocators_says_nothing() -> None:
    assert space.parse_names(["ptlbmalloc2,glibc", "calmalloc"]) == ["glibc", "calmalloc", "ptlbmalloc2"]


def test_labels_are_short() -> None:
    setting = Setting(GLIBC, {TRIM: "33554432", TCACHE: "1023", "glibc.malloc.top_pad": "4096"})
    assert setting.label == "glibc: trim_threshold=32M tcache_count=1023 top_pad=4k"
    assert Setting("calmalloc").label == "calmalloc: defaults"
