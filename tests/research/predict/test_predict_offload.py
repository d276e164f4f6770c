"""calm predict offload: the paper's figures, both models, and what they start from."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from calm_helpers import ROOT, Calm
from msgspec import structs

from calm import cli
from calm.core import allocators, documents
from calm.core.errors import USAGE, CalmError
from calm.core.profile_model import CPU, FAULT, Frame, Profile, Stack, Timeline, Total
from research.predict import calibration, offload, offload_inputs
from research.predict.calibration import COMPLEX, REMOTE, SIBLING, SOCKET, Messages, Pair, Spread
from research.predict.model import Span, exactly
from research.predict.offload import Cpus, Latency, Work

# Section 4.1 of Li et al.: what it counted, and what it prints as the sum.
MALLOCS, FREES, PRINTED = 138_401_260, 141_394_145, 279_759_405


LATENCY = Latency(round_trip_ns=Span(200, 100, 400), wake_ns=Span(10_000, 8_000, 20_000), ghz=2.0)
FOUR = Cpus(4)
WORK = Work(
    mallocs=1e6,
    frees=1e6,
    cache_misses=20_000,
    large=100,
    cpu_s=1.0,
    wall_s=1.0,
    refill_s=Span(0.06, 0.05, 0.07),
    free_s=Span(0.04, 0.03, 0.05),
    large_s=exactly(0.02),
    fault_s=Span(0.10, 0.08, 0.12),
)


def test_the_paper() -> None:
    found = offload.sync(Work(mallocs=MALLOCS, frees=FREES), None)
    assert found.calls == 279_795_405
    # Two digits of the sum changed places in print.
    assert found.calls - PRINTED == 36_000
    assert found.published_cycles == 74_985_168_540
    for calls in (found.calls, PRINTED):
        assert round(calls * 4 * 67 / 1e9) == 75
    assert found.published_break_even == 268 / 214
    assert f"{found.published_break_even:.2f}" == "1.25"


def test_four_atomics_a_call_follow_from_the_cycles() -> None:
    assert round(75e9 / (PRINTED * offload.ATOMIC_CYCLES), 2) == offload.ATOMICS


def test_sync_costs_a_round_trip_a_call() -> None:
    found = offload.sync(WORK, LATENCY)
    assert found.cost_s == Span(0.4, 0.2, 0.8)
    assert found.share == found.cost_s
    # 200 ns are 400 cycles at 2 GHz.
    assert found.break_even is not None
    assert found.break_even.value == pytest.approx(400 / 214)


def test_on_costs_messages_and_saves_what_is_not_waited_for() -> None:
    found = offload.on(WORK, LATENCY, FOUR)
    assert found.messages == 20_200
    assert found.per_call == pytest.approx(0.0101)
    assert found.asleep == pytest.approx(math.exp(-10_000 * 20_200 / 1e9))
    asleep = found.asleep
    assert asleep is not None
    # A line is half a round trip. 10,000 magazines come, as many go, with 100 large blocks.
    assert found.cost_s == pytest.approx(
        Span(
            ((2 * 20_100 + 4 * 100) * 100 + 100 * 10_000 * asleep) * 1e-9,
            (20_100 + 200) * 50 * 1e-9,
            ((6 * 5_000 + 2 * 10_100 + 400) * 200 + 5_100 * 20_000 * asleep) * 1e-9,
        )
    )
    assert found.moved_s == pytest.approx(Span(0.10, 0.055, 0.24))
    assert found.server_s == pytest.approx(0.12)
    assert found.saved_s is not None
    assert found.cost_s is not None
    assert found.saved_s.value == pytest.approx(0.10 - found.cost_s.value)
    assert found.saved_s.low == pytest.approx(0.055 - found.cost_s.high)
    assert found.saved_s.high == pytest.approx(0.24 - found.cost_s.low)
    verdict = offload.judge_on(WORK, found, FOUR, "")
    assert verdict.pays
    assert re.fullmatch(
        r"calmoffload should save about 9\.\d % \(between -?\d+\.\d % and 23\.\d %\)", verdict.text
    )


def test_break_even_of_on_is_by_messages() -> None:
    few = offload.on(WORK, LATENCY, FOUR).break_even
    many = offload.on(replace(WORK, mallocs=1e7, frees=1e7), LATENCY, FOUR).break_even
    assert few is not None
    assert many is not None
    assert few.value == pytest.approx(10 * many.value)


def test_one_server_does_no_more_than_it_has_time_for() -> None:
    # Two and a half CPUs at work: of one and a half that idle a server takes one.
    work = replace(WORK, cpu_s=2.5, refill_s=exactly(0.9), free_s=exactly(0.9))
    found = offload.on(work, LATENCY, FOUR)
    assert found.crowded
    assert found.moved_s is not None
    # It fetches large blocks besides, for 0.02 s.
    assert found.moved_s.value == pytest.approx(1.0 - 0.02)
    narrow = offload.on(work, LATENCY, Cpus(3))
    assert narrow.moved_s is not None
    assert narrow.moved_s.value == pytest.approx(0.5 - 0.02)
    assert not offload.on(WORK, LATENCY, FOUR).crowded
    # All of its time is theirs, or may be.
    full = offload.on(replace(work, large_s=Span(0.6, 0.2, 1.5)), LATENCY, FOUR)
    assert full.moved_s == pytest.approx(Span(0.4, 0.0, 0.8))


@pytest.mark.parametrize(
    ("work", "cpus", "reason"),
    [
        (WORK, Cpus(1), "there is one CPU to run on"),
        (WORK, Cpus(8, 1.5), "its control group may use 1.5 CPUs"),
        (replace(WORK, cpu_s=4.0), FOUR, "it keeps 4.00 of 4 CPUs busy by itself"),
        (replace(WORK, cpu_s=2.95), Cpus(8, 3.0), "it keeps 2.95 of 3 CPUs busy by itself"),
        (Work(), Cpus(1), "there is one CPU"),
    ],
)
def test_no_cpu_to_spare(work: Work, cpus: Cpus, reason: str) -> None:
    for verdict in (
        offload.judge_on(work, offload.on(work, LATENCY, cpus), cpus, "unknown"),
        offload.judge_sync(work, offload.sync(work, LATENCY), cpus),
    ):
        assert verdict.pays is False
        setting = {"on": "calmoffload", "sync": "the paper's scheme"}[verdict.way]
        assert verdict.text.startswith(f"{setting} will not pay because {reason}")


@pytest.mark.parametrize("cpus", [Cpus(2), Cpus(8, 2.0), Cpus(2, 64.0)])
def test_two_cpus_are_enough(cpus: Cpus) -> None:
    assert offload.obstacle(WORK, cpus) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"refill_s": exactly(0.004), "free_s": exactly(0.002), "fault_s": exactly(0)},
            "at most 0.6 % of its time could move",
        ),
        (
            {"cache_misses": 600_000, "refill_s": exactly(0.05), "free_s": exactly(0.05)},
            "messages would take 12.0 % of its time, and 10.0 % would move",
        ),
        (
            {"refill_s": exactly(0.006), "free_s": exactly(0.003), "fault_s": exactly(0.05)},
            "it should save about 0.4 %",
        ),
    ],
)
def test_what_does_not_pay(changes: dict[str, Any], reason: str) -> None:
    work = replace(WORK, **changes)
    verdict = offload.judge_on(work, offload.on(work, LATENCY, FOUR), FOUR, "")
    assert verdict.pays is False
    assert verdict.text.startswith(f"calmoffload will not pay because {reason}")


def test_what_is_unknown_is_not_invented() -> None:
    unknown = replace(WORK, refill_s=None)
    found = offload.on(unknown, LATENCY, FOUR)
    assert found.saved_s is None
    assert found.cost_share is not None
    verdict = offload.judge_on(unknown, found, FOUR, "there is no perf")
    assert verdict.pays is None
    assert verdict.text.startswith("calmoffload: unknown, because there is no perf; its slow paths must ")
    nothing = Work(mallocs=1, frees=1)
    verdict = offload.judge_on(nothing, offload.on(nothing, LATENCY, FOUR), FOUR, "who knows")
    assert (verdict.pays, verdict.text) == (None, "calmoffload: unknown, because who knows")


@pytest.mark.parametrize(
    ("misses", "pays", "text"),
    [
        (None, None, "pays only if it saves 1.87 misses a call, which are not counted"),
        (2e6, False, "must save 1.87 misses a call here, and there are 1.00"),
        (2e7, None, "pays only if it saves 1.87 misses a call of 10.00"),
    ],
)
def test_misses_are_counted_or_not(misses: float | None, pays: bool | None, text: str) -> None:
    work = replace(WORK, hardware_misses=misses)
    verdict = offload.judge_sync(work, offload.sync(work, LATENCY), FOUR)
    assert verdict.pays is pays
    assert text in verdict.text


# Figures by hand.


def test_figures() -> None:
    given = offload_inputs.parse_figures(["mallocs=10,frees=2e1", "miss_cycles=100", "free_s=0.5"])
    work = offload.with_figures(Work(), given)
    assert (work.calls, work.miss_cycles, work.atomics) == (30, 100, 4)
    # The other slow paths then take nothing.
    assert (work.free_s, work.refill_s, work.large_s) == (exactly(0.5), exactly(0), exactly(0))
    kept = offload.with_figures(WORK, {"free_s": 0.5})
    assert kept.refill_s == WORK.refill_s


@pytest.mark.parametrize(
    "text", ["mallocs", "mallocs=", "mallocs=x", "mallocs=-1", "mallocs=nan", "x=1", "mallocs=1,mallocs=2",
             "atomics=0", "", "cpu_s=1e-320", "mallocs=1e-13"],
)  # fmt: skip
def test_figures_that_are_none(text: str) -> None:
    with pytest.raises(CalmError) as caught:
        offload_inputs.parse_figures([text])
    assert caught.value.exit_code == 2


def test_the_least_figures_give_numbers(inside: Calm) -> None:
    least = ",".join(f"{name}={offload_inputs.MIN_FIGURE:g}" for name in offload.FIGURES)
    for figures in (
        least,
        re.sub(r"(mallocs|frees|cache_misses|large|hardware_misses)=[^,]*", r"\1=9e17", least),
    ):
        result = inside("--figures", figures, "--json", "-")
        assert result.returncode == 0, result.stderr
        # A number that JSON does not have would be one that nobody can read.
        json.loads(result.stdout, parse_constant=pytest.fail)
        assert not re.search(r"\b(inf|nan)\b", result.stderr)


# Where CPU time goes, by a profile.


def profiled(stacks: list[tuple[list[str], str, int]], **changes: Any) -> Profile:
    """Of stacks: functions, the outermost first (with a dash: calmalloc's), the cause, and samples."""
    frames: list[Frame] = []
    made = []
    for functions, cause, samples in stacks:
        places = []
        for name in functions:
            module = "libcalmalloc.so.0.1.0" if name.startswith("-") else "program"
            frames.append(Frame(name.removeprefix("-"), module))
            places.append(len(frames) - 1)
        made.append(Stack(CPU, cause, tuple(places), samples / 100, samples))
    found = Profile(
        command=["program"],
        pid=None,
        began="2026-11-21T00:00:00+00:00",
        wall_s=1.0,
        exit_code=0,
        allocator="calmalloc",
        privileged=True,
        machine={},
        totals={"user_s": Total(1.5, "counted", "s"), "system_s": Total(0.5, "counted", "s")},
        causes=[],
        frames=frames,
        stacks=made,
        timeline=Timeline(1.0),
        curves={},
        findings=[],
        own_cost=[],
        own_share=None,
    )
    return structs.replace(found, **changes)


STACKS = [
    (["main", "work"], "other", 50),
    (["main", "-malloc"], "other", 10),
    (["main", "-malloc", "-allocate_slow", "-refill.constprop.0", "-arena_take_blocks"], "madvise", 10),
    (["main", "-calloc", "-allocate_zeroed", "-allocate_large", "-arena_take_large"], "other", 4),
    (["main", "-free", "-release_slow.part.0", "-arena_put_blocks"], "madvise", 16),
    (["main", "-calloc", "-allocate_zeroed", "memset"], "fault", 2),
    (["main", "work"], "fault", 8),
]


def test_slow_paths_are_told_from_fast_ones() -> None:
    shares, why = offload_inputs.slow_shares(profiled(STACKS))
    assert why is None
    assert {pot: share.value for pot, share in shares.items()} == pytest.approx(
        {"refill_s": 0.10, "large_s": 0.04, "free_s": 0.16, "fault_s": 0.08}
    )
    for share in shares.values():
        assert 0 <= share.low < share.value < share.high <= 1


def test_more_samples_are_surer() -> None:
    few, _ = offload_inputs.slow_shares(profiled(STACKS))
    many, _ = offload_inputs.slow_shares(profiled([(at, cause, 100 * n) for at, cause, n in STACKS]))
    assert many["free_s"].value == pytest.approx(few["free_s"].value)
    assert few["free_s"].low < many["free_s"].low < many["free_s"].high < few["free_s"].high


def test_other_events_are_no_time() -> None:
    made = profiled(STACKS)
    faults = [structs.replace(stack, kind=FAULT) for stack in made.stacks]
    assert offload_inputs.slow_shares(made) == offload_inputs.slow_shares(
        structs.replace(made, stacks=[*made.stacks, *faults])
    )


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (profiled(STACKS, allocator="glibc"), "the slow paths of glibc cannot be told"),
        (profiled([], notes=["no stacks, and no causes: no perf"]), "no stacks, and no causes: no perf"),
        (profiled(STACKS[3:4]), "4 samples of CPU time are too few"),
    ],
)
def test_slow_paths_that_are_not_known(found: Profile, why: str) -> None:
    shares, reason = offload_inputs.slow_shares(found)
    assert shares == {}
    assert reason is not None
    assert why in reason


def test_the_functions_are_there() -> None:
    """What tells slow paths are names of the library's own functions."""
    source = "".join(path.read_text() for path in (ROOT / "src").glob("*/*.c"))
    for name in set().union(*offload_inputs.SLOW_FUNCTIONS.values()):
        assert re.search(rf"^[\w *]*\b{name}\(", source, re.MULTILINE), name


def test_the_functions_are_in_the_library() -> None:
    """The compiler inlines some of each set into the others."""
    library = allocators.find_library("calmalloc")
    if library is None or shutil.which("nm") is None or offload_inputs._no_symbols():
        pytest.skip("there is no library with symbols, or no nm")
    listed = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    there = {offload_inputs.function(line.split()[-1]) for line in listed.splitlines()}
    for names in offload_inputs.SLOW_FUNCTIONS.values():
        assert names & there, names


# Counters and calls.


def test_reports_among_other_words() -> None:
    line = json.dumps({"allocator": "calmalloc", "version": 1, "cache_misses": 7, "large_allocations": 2})
    text = f'a line\nno end {line}\n{line[:40]} torn\n{{"allocator": "other"}}\n{line}'
    assert offload_inputs.reports(text) == [{"cache_misses": 7, "large_allocations": 2}] * 2


def encoded(field: int, value: int | bytes) -> bytes:
    def number(of: int) -> bytes:
        return bytes([of & 127 | 128]) + number(of >> 7) if of > 127 else bytes([of])

    if isinstance(value, int):
        return number(field << 3) + number(value)
    return number(field << 3 | 2) + number(len(value)) + value


def heap_profile(period: int, *samples: tuple[int, int, int, int], comment: str = "") -> bytes:
    found = b"".join(
        encoded(2, encoded(1, 4_000_000_000) + b"".join(encoded(2, value) for value in sample))
        for sample in samples
    )
    return encoded(6, comment.encode()) + found + encoded(12, period)


def test_calls_of_a_heap_profile() -> None:
    content = heap_profile(1024, (1000, 64_000, 100, 6_400), (5, 50_000, 5, 50_000))
    found = offload_inputs.read_heap_profiles(content)
    assert (found.mallocs, found.frees) == (1005, 900)
    # Each block of 64 bytes stands for some sixteen, and is hit by chance; large ones always are.
    assert found.deviation == pytest.approx(math.sqrt(1000 * 15.5), rel=0.02)
    other = heap_profile(1, (7, 70, 0, 0), comment="calmalloc: 3 samples dropped for want of room")
    both = offload_inputs.read_heap_profiles(content, other)
    # Each byte of the other one is a sample.
    assert both.deviation == pytest.approx(found.deviation)
    assert (both.mallocs, both.frees, both.dropped) == (1012, 907, 3)


@pytest.mark.parametrize("content", [b"\x12", b"\x12\x05\x10", b"\x1f\x00"])
def test_heap_profiles_that_are_torn(content: bytes) -> None:
    with pytest.raises(CalmError, match="cannot be read"):
        offload_inputs.read_heap_profiles(content + b"\xff" * 3)


def calls(mallocs: float, deviation: float) -> offload_inputs.Calls:
    return offload_inputs.Calls(mallocs, mallocs, deviation, 0)


def counted(*answers: offload_inputs.Calls) -> tuple[float, list[int]]:
    """The number of calls by these answers, and the periods that were asked for."""
    periods: list[int] = []

    def sampled(period: int) -> offload_inputs.Calls:
        periods.append(period)
        return answers[len(periods) - 1]

    return offload_inputs.count_calls(sampled).mallocs, periods


FIRST = 512 << 10


def test_calls_that_are_known_closely_are_counted_once() -> None:
    assert counted(calls(1000, 50)) == (1000, [FIRST])


def test_what_is_counted_again_is_counted_more_closely() -> None:
    """Twice as far off as wanted takes four times the samples."""
    wanted = 0.1 / 1.96
    mallocs, periods = counted(calls(1000, 2 * wanted * 1000), calls(1010, 50))
    assert mallocs == 1010
    assert periods == [FIRST, pytest.approx(FIRST / 4, abs=2)]


def test_the_better_of_two_counts_is_kept() -> None:
    for second in (calls(5000, 2000), offload_inputs.Calls()):
        mallocs, periods = counted(calls(1000, 100), second)
        assert mallocs == 1000
        assert 1 <= periods[1] < FIRST
    # Without a sample each byte is one; and so it is where hardly any were.
    for first in (offload_inputs.Calls(), calls(1, 1e6)):
        assert counted(first, calls(7, 0)) == (7, [FIRST, 1])


@pytest.mark.parametrize(
    ("given", "own", "options"),
    [
        (None, "", None),
        (None, "report=exit", "report=exit"),
        ("background=off", "report=exit", "background=off,report=exit"),
    ],
)
def test_its_options_follow_the_users(given: str | None, own: str, options: str | None) -> None:
    if not allocators.find_library("calmalloc"):
        pytest.skip("calmalloc is not built")
    inherited = {"CALM_OPTIONS": given} if given else {}
    assert offload_inputs.calmalloc_environment(own, inherited).get("CALM_OPTIONS") == options


# The CPUs that may be used.


def test_quota_of_a_group_and_of_those_above_it(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    (tmp_path / "a/b").mkdir(parents=True)
    assert offload_inputs.quota(own, tmp_path) is None
    (tmp_path / "a/b/cpu.max").write_text("max 100000\n")
    assert offload_inputs.quota(own, tmp_path) is None
    (tmp_path / "a/b/cpu.max").write_text("400000 100000\n")
    assert offload_inputs.quota(own, tmp_path) == 4
    (tmp_path / "a/cpu.max").write_text("150000 100000\n")
    assert offload_inputs.quota(own, tmp_path) == 1.5
    assert Cpus(8, offload_inputs.quota(own, tmp_path)).available == 1.5


def test_quota_of_version_1(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/a\n2:cpu,cpuacct:/a\n0::/\n")
    folder = tmp_path / "cpu,cpuacct/a"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert offload_inputs.quota(own, tmp_path) is None
    (folder / "cpu.cfs_quota_us").write_text("50000\n")
    assert offload_inputs.quota(own, tmp_path) == 0.5


def test_no_group() -> None:
    assert offload_inputs.quota(Path("/nonexistent")) is None


# What messages cost.


def cpu(system: Path, number: int, core: int, cache: str, socket: int) -> None:
    folder = system / f"cpu{number}"
    for level, shared in ((1, str(number)), (3, cache)):
        (folder / f"cache/index{level}").mkdir(parents=True)
        (folder / f"cache/index{level}/level").write_text(f"{level}\n")
        (folder / f"cache/index{level}/shared_cpu_list").write_text(f"{shared}\n")
    (folder / "topology").mkdir()
    (folder / "topology/core_id").write_text(f"{core}\n")
    (folder / "topology/physical_package_id").write_text(f"{socket}\n")


def test_pairs_of_each_kind(tmp_path: Path) -> None:
    # Two sockets of two caches each, two cores to a cache, and two threads to a core.
    for number in range(16):
        core = number % 8
        cpu(tmp_path, number, core % 4, cache=f"cache {core // 2}", socket=core // 4)
    pairs = calibration.pairs_of_each_kind(range(16), tmp_path)
    kinds = [kind for _, _, kind in pairs]
    assert kinds == [kind for kind in (SIBLING, COMPLEX, SOCKET, REMOTE) for _ in range(3)]
    by_kind = {kind: (a, b) for a, b, kind in reversed(pairs)}
    assert by_kind == {SIBLING: (0, 8), COMPLEX: (0, 1), SOCKET: (0, 2), REMOTE: (0, 4)}
    assert calibration.pairs_of_each_kind([0, 8], tmp_path) == [(0, 8, SIBLING)]
    assert calibration.pairs_of_each_kind([3], tmp_path) == []


def test_without_a_word_of_caches_a_socket_has_one(tmp_path: Path) -> None:
    assert calibration.pairs_of_each_kind([0, 1], tmp_path) == [(0, 1, COMPLEX)]


def pair(kind: str, round_trip: float, a: int = 0, b: int = 1) -> Pair:
    spread = Spread(round_trip, round_trip / 2, round_trip * 2, 100)
    return Pair(a, b, kind, spread, spread, spread)


def of_this_machine(*pairs: Pair, mhz: float | None = 2000.0) -> Messages:
    return Messages(
        machine=calibration.this_machine(),
        reference_mhz=mhz,
        atomic_ns=Spread(5, 4, 6, 100),
        pairs=list(pairs or [pair(COMPLEX, 200)]),
    )


def test_latency_is_of_the_nearest_core_and_ranges_are_over_all() -> None:
    measured = of_this_machine(pair(SIBLING, 40), pair(SOCKET, 200), pair(REMOTE, 500))
    found = offload.latency(measured, None)
    assert found is not None
    assert (found.round_trip_ns, found.ghz) == (Span(200, 20, 1000), 2.0)
    # Where there are siblings alone, they must do.
    alone = offload.latency(of_this_machine(pair(SIBLING, 40)), 3.0)
    assert alone is not None
    assert (alone.round_trip_ns.value, alone.ghz) == (40, 3.0)
    with pytest.raises(CalmError, match="--ghz"):
        offload.latency(of_this_machine(mhz=None), None)


def test_what_is_kept_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = of_this_machine(pair(SOCKET, 300))
    calibration.keep(kept)
    assert calibration.load(tmp_path / "calm/messages.json", Messages) == kept
    assert calibration.messages() == (kept, [])


def test_kept_costs_of_another_version_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = of_this_machine()
    kept.version = 99
    calibration.keep(kept)
    measured = of_this_machine(pair(SOCKET, 300))
    monkeypatch.setattr(calibration, "measure_messages", lambda: measured)
    found, (note,) = calibration.messages()
    assert found is measured
    assert note.startswith("messages are measured again: ")
    assert note.endswith("has version 99 of calm-messages; this calm reads 1")
    assert calibration.messages() == (measured, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data | {"version": 99}, "version 99 .*: run `calm calibrate messages` again"),
        (lambda data: data | {"machine": data["machine"] | {"kernel": "1.0"}}, "another machine .kernel 1.0"),
        (lambda data: data | {"pairs": [{}]}, "is not a whole calm-messages"),
        (lambda data: data | {"pairs": []}, "no pair of CPUs"),
        (lambda data: {"x": 1}, "is no document of calm"),
    ],
)
def test_files_that_are_of_no_use(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(change(msgspec.to_builtins(of_this_machine()))))
    with pytest.raises(CalmError, match=message) as caught:
        calibration.load(path, Messages)
    assert caught.value.exit_code == USAGE


# The command.


@pytest.fixture
def inside(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calm:
    """The command in this process, with known costs of messages, and four CPUs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration.keep(of_this_machine())
    monkeypatch.setattr(offload_inputs, "cpus_here", lambda: FOUR)

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["calm", "predict", "offload", *map(str, arguments)])
            try:
                cli.main()
            except SystemExit as ended:
                code = ended.code
        said = capsys.readouterr()
        assert isinstance(code, int)
        return subprocess.CompletedProcess([], code, said.out, said.err)

    return run


def test_the_papers_figures_as_options(inside: Calm) -> None:
    result = inside("--figures", f"mallocs={MALLOCS},frees={FREES}")
    assert result.returncode == 0, result.stderr
    assert "138,401,260 malloc + 141,394,145 free = 279,795,405 calls" in result.stdout
    for row in (
        r"a message +268 cycles +200 ns \(100 to 400\)",
        r"all of them +74,985,168,540 cycles +55\.959 s",
        r"break-even, misses a call +1\.25 +1\.87 \(0\.93 to 3\.74\)",
    ):
        assert re.search(f"^{row}", result.stdout, re.MULTILINE), row
    last = result.stdout.splitlines()[-2:]
    assert last[0] == "the paper's scheme pays only if it saves 1.87 misses a call, which are not counted"
    assert last[1].startswith("calmoffload: unknown, because no figures of its messages are given")


def test_all_of_it_as_json(inside: Calm) -> None:
    figures = "mallocs=1e6,frees=1e6,cache_misses=20000,large=100,cpu_s=1,wall_s=1,refill_s=0.06,free_s=0.04"
    result = inside("--figures", figures, "--json", "-")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["schema"], found["version"]) == ("calm-offload-prediction", 1)
    assert found["on"]["messages"] == 20_200
    assert found["latency"]["round_trip_ns"] == {"value": 200, "low": 100, "high": 400}
    assert found["on"]["moved_s"]["value"] == pytest.approx(0.1)
    verdicts = {each["way"]: each for each in found["verdicts"]}
    assert verdicts["on"]["pays"] is True
    assert verdicts["on"]["text"] in result.stderr


def test_other_cpus_than_there_are(inside: Calm) -> None:
    result = inside("--figures", "mallocs=1,frees=1", "--cpus", "1")
    for setting in ("the paper's scheme", "calmoffload"):
        assert f"{setting} will not pay because there is one CPU to run on" in result.stdout


def test_from_a_profile(inside: Calm, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(documents.text(profiled(STACKS)))
    alone = inside("--profile", path)
    assert alone.returncode == 0, alone.stderr
    assert "give them by --figures cache_misses=…" in alone.stdout.splitlines()[-1]
    both = inside("--profile", path, "--figures", "cache_misses=1000,large=10", "--json", "-")
    found = json.loads(both.stdout)
    # Of two seconds of CPU time in one.
    assert found["work"]["free_s"]["value"] == pytest.approx(0.32)
    assert found["cpus_used"] == 2
    assert found["on"]["moved_s"]["value"] == pytest.approx(0.52)
    assert {each["way"]: each["pays"] for each in found["verdicts"]} == {"sync": None, "on": True}


def test_a_profile_of_another_allocator_has_no_slow_paths(inside: Calm, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(documents.text(profiled(STACKS, allocator="glibc")))
    result = inside("--profile", path, "--figures", "cache_misses=1000,large=10")
    assert "the slow paths of glibc cannot be told" in result.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of --profile, --figures or a CMD is needed"),
        (["--profile", "x", "--", "true"], "not --profile and a CMD at once"),
        (["--sockets", "2", "--", "true"], "no such option"),
        (["-a", "glibc", "--", "true"], "no such option"),
        (["--figures", "x=1"], "'x=1' is not NAME=VALUE"),
        (["--calibration", "/nonexistent", "--", "true"], "cannot read /nonexistent"),
        (["--", "nonexistent-program"], "no such program"),
    ],
)
def test_bad_usage(inside: Calm, arguments: list[str], message: str) -> None:
    result = inside(*arguments)
    assert result.returncode in (1, 2, 127)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


# A program of known calls: all of one size, more than the caches hold, and then large blocks.
PROGRAM = r"""
#include <stdlib.h>
static void *held[30000];
int main(void) {
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < 30000; i++) held[i] = malloc(48);
        for (int i = 0; i < 30000; i++) free(held[i]);
    }
    for (int i = 0; i < 50; i++) free(malloc(1 << 20));
    return 0;
}
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_program_that_is_run(calm: Calm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a message takes is not told where others have the CPUs.
    monkeypatch.setattr(calibration, "measure_messages", of_this_machine)
    (tmp_path / "calls.c").write_text(PROGRAM)
    program = tmp_path / "program"
    # Or a pair of malloc and free is compiled to nothing.
    subprocess.run(["cc", "-O0", "-o", program, tmp_path / "calls.c"], check=True)
    result = calm(
        "predict", "offload", "-n", "1", "--json", "-", "--", program,
        env={"XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    estimated = found["estimated"]["mallocs"]
    apart = max(estimated["high"] - estimated["value"], 300_050 * 0.02)
    # Twice what 19 of 20 estimates keep within.
    assert abs(estimated["value"] - 300_050) < 2 * apart
    assert found["work"]["frees"] == pytest.approx(found["work"]["mallocs"], rel=0.01)
    assert found["work"]["large"] >= 50
    # Far more blocks than a cache has room for come and go each round, by magazines of many.
    assert 1000 < found["work"]["cache_misses"] < 600_000 / 4
    assert found["on"]["messages"] == found["work"]["cache_misses"] + 2 * found["work"]["large"]
    assert found["sync"]["cost_s"]["value"] > found["on"]["cost_s"]["low"]
    # It was measured, and kept.
    assert calibration.load(tmp_path / "calm/messages.json", Messages).pairs
    assert [each["way"] for each in found["verdicts"]] == ["sync", "on"]


def test_without_a_clock_cycles_are_unknown_and_nothing_is_run(inside: Calm, tmp_path: Path) -> None:
    calibration.keep(of_this_machine(mhz=None))
    result = inside("--", "touch", tmp_path / "log")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "give it by --ghz" in result.stderr
    assert not (tmp_path / "log").exists()
    assert inside("--ghz", "2", "--figures", "mallocs=1,frees=1").returncode == 0


def test_one_cpu_has_nobody_to_send_messages_to(calm: Calm, tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    result = calm(
        "predict", "offload", "--figures", "mallocs=1,frees=1",
        env={"XDG_CACHE_HOME": str(tmp_path)}, set_up=lambda: os.sched_setaffinity(0, [cpu]),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "note: messages are not measured: there is one CPU" in result.stdout
    assert "calmoffload will not pay because there is one CPU to run on" in result.stdout.splitlines()[-1]


def test_a_program_that_fails(inside: Calm) -> None:
    result = inside("-n", "1", "--", "false")
    assert (result.returncode, result.stderr) == (1, "calm: false: exit code 1\n")


def test_messages_without_an_answer_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a pair may have no round trip, though the program lists it."""
    program = tmp_path / "calm-messages"
    program.write_text(
        '#!/bin/sh\necho \'{"reference_mhz": null, "atomic_ns": null, "pairs": {"0:1": {}}}\'\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("CALM_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(calibration, "pairs_of_each_kind", lambda: [(0, 1, COMPLEX)])
    with pytest.raises(calibration.UnmeasuredError, match="too busy"):
        calibration.measure_messages()
