"""The parts of bench/figures whose errors would go unnoticed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from lib import (  # noqa: E402
    allocator_share,
    client_time,
    idle,
    idle_curve,
    instructions,
    judged,
    offload,
    published,
    ratios,
    rounds,
    scaling,
    server_time,
    suite,
    tables,
)
from lib.judged import BEST_PEER, Goal  # noqa: E402
from lib.results import Store  # noqa: E402

from calm import __version__  # noqa: E402
from calm.core import allocators, documents  # noqa: E402
from calm.core.profile_model import CPU, FAULT, Frame, Profile, Stack, Timeline  # noqa: E402
from research.bench import command  # noqa: E402
from research.bench.analysis import analyse  # noqa: E402
from research.bench.results import METRIC, Metric, Results, Row, Run, Side, Source, Subject  # noqa: E402
from research.bench.source_tree import SourceTree  # noqa: E402

BUILD = ROOT / "build/release"


def test_a_cgroup_is_made_only_where_its_memory_is_counted(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("proc /proc proc rw 0 0\n")
    assert idle.cgroup_parent(mounts) == (None, "cgroup v2 is not mounted")
    mounts.write_text(f"cgroup2 {tmp_path}/cgroup cgroup2 rw 0 0\n")
    slice_ = tmp_path / "cgroup/user.slice"
    slice_.mkdir(parents=True)
    (tmp_path / "cgroup/cgroup.subtree_control").write_text("cpu\n")
    (slice_ / "cgroup.subtree_control").write_text("")
    parent, reason = idle.cgroup_parent(mounts, "/user.slice/session.scope")
    assert parent is None
    assert "counts its children's memory" in reason
    (slice_ / "cgroup.subtree_control").write_text("memory pids\n")
    assert idle.cgroup_parent(mounts, "/user.slice/session.scope") == (slice_, "")
    with idle.fresh_cgroup(slice_) as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_memory_over_time_is_the_highest_of_each_step() -> None:
    assert idle_curve.on_grid([(0.01, -3.0), (0.11, 5.2), (0.15, 9.6), (0.31, 2.0)], 0.1) == [0, 10, 10, 2]
    assert idle_curve.on_grid([]) == []


def test_memory_of_the_exit_is_left_out() -> None:
    samples = [(0.0, 1.0), (0.1, 90.0), (0.2, 50.0), (0.3, 49.5), (0.4, 20.0), (0.5, 3.0)]
    assert idle_curve.until_exit(samples, 50.0) == samples[:4]
    assert idle_curve.until_exit(samples, 2.0) == samples


def test_memory_is_followed_until_the_program_ends() -> None:
    command = [str(BUILD / "idle-burst"), "--threads", "1", "--bytes", "50000000", "--seconds", "1"]
    curve = idle_curve.follow(command, allocators.parse("glibc"))
    assert curve["label"] == "glibc"
    assert max(curve["mib"]) >= 30
    assert curve["mib"][-1] >= curve["kept_mib"] - 2
    with pytest.raises(subprocess.CalledProcessError):
        idle_curve.follow([*command, "--no-such-option"], allocators.parse("glibc"))


def test_only_calls_from_main_count() -> None:
    profile = """
fn=start
1 10
cfn=main
calls=1 1
1 500
fn=main
3 7
cob=libc.so.6
cfn=malloc
calls=100 1
3 200
cfn=free
calls=100 1
3 150
fn=malloc
1 100
cfn=inner
calls=100 1
1 100
"""
    assert instructions.called_by_main(profile) == 350


def taken_by(labels: list[str], count: int, fails: int = 0) -> tuple[list[str], list[dict[str, Any]]]:
    """The order of turns, by the last letter, and the results; the turn with that number fails."""
    order: list[str] = []

    def run(allocator: Any) -> dict[str, Any]:
        order.append(allocator.label[-1])
        if len(order) == fails:
            raise subprocess.CalledProcessError(1, "it")
        return {"figure": len(order)}

    return order, rounds.interleaved(labels, run, rounds=count)


def test_rounds_are_interleaved_and_no_allocator_has_a_place() -> None:
    labels = [f"glibc:A={number}" for number in range(4)]
    order, sides = taken_by(labels, 7)
    drawn = [order[at : at + 4] for at in range(0, 32, 4)]
    assert all(sorted(each) == ["0", "1", "2", "3"] for each in drawn)
    for place in range(4):
        assert sorted(each[place] for each in drawn) == sorted("00112233")
    followed = Counter(pair for each in drawn for pair in itertools.pairwise(each))
    assert set(followed.values()) == {2}
    assert len(followed) == 12
    # The same at each start; the first round counts nowhere.
    assert taken_by(labels, 7)[0] == order
    assert all(len(each["runs"]) == 7 for each in sides)
    assert min(run["figure"] for each in sides for run in each["runs"]) == 5


def test_a_failing_allocator_is_dropped() -> None:
    order, sides = taken_by(["glibc:A=1", "glibc:A=2"], 3, fails=4)
    failed, other = (sides[0], sides[1]) if order[3] == "1" else (sides[1], sides[0])
    assert order[4:] == [other["label"][-1]] * 2
    assert [run["figure"] for run in other["runs"]] == [3, 5, 6]
    assert failed["runs"] == []
    assert "exit status 1" in failed["failure"]


def test_results_say_which_version_took_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(BUILD / "libcalmalloc.so", tmp_path / "libmimalloc.so")
    shutil.copy(BUILD / "libcalmalloc.so", tmp_path / "libcalmoffload.so")
    crate = {"version": "3.3.2", "crate": "libmimalloc-sys", "crate_version": "0.1.49"}
    tree = {"version": "2.0.1-1-g5dacae8", "date": "2026-07-15", "tree": "/src/rpmalloc"}
    shutil.copy(BUILD / "libcalmalloc.so", tmp_path / "librpmalloc.so")
    (tmp_path / "versions.json").write_text(json.dumps({"mimalloc": crate, "rpmalloc": tree}))
    monkeypatch.setenv("CALM_LIBRARY_PATH", str(tmp_path))
    labels = ["mimalloc:A=1", "calmoffload", "glibc", "rpmalloc"]
    sides = rounds.interleaved(labels, lambda _: {}, rounds=1)
    assert sides[0]["origin"] == crate | {"date": None, "package": None, "package_version": None}
    told = [rounds.version_of(side) for side in sides]
    assert told[0] == "3.3.2, crate libmimalloc-sys 0.1.49"
    assert told[1] == __version__
    assert told[2].startswith(os.confstr("CS_GNU_LIBC_VERSION").split()[1])  # type: ignore[union-attr]
    assert told[3] == "2.0.1-1-g5dacae8 (2026-07-15)"
    assert rounds.version_of({"label": "older results"}) == "version not known"


# Tells the number of the process that it starts, which goes on for as long as it is let.
STARTS_ANOTHER = 'sleep 1000 & echo $! >"$0"; wait'


def await_end(told: Path) -> None:
    wait_until(told.exists)
    wait_until(told.read_text)
    stat = Path(f"/proc/{int(told.read_text())}/stat")

    def has_ended() -> bool:
        try:
            return stat.read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    wait_until(has_ended, "it goes on")


def test_what_is_cut_short_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    command = ["sh", "-c", STARTS_ANOTHER, str(told)]
    for limit_s in (1, 10, 100):  # a busy machine may come to start it late
        with pytest.raises(subprocess.TimeoutExpired):
            rounds.run_to_end(command, limit_s=limit_s)
        if told.exists():
            break
    await_end(told)


def test_a_profile_that_does_not_end_is_cut_short(tmp_path: Path) -> None:
    if reason := client_time.obstacle():
        pytest.skip(reason)
    told = tmp_path / "pid"
    command = ["sh", "-c", STARTS_ANOTHER, str(told)]
    for limit_s in (5, 50, 500):  # a busy machine may come to start it late
        found = allocator_share.measure(command, allocators.parse("calmalloc"), ROOT, limit_s=limit_s)
        assert found == {"share": None, "reason": f"calm profile did not end within {limit_s} s"}
        if told.exists():
            break
    await_end(told)


def side(label: str, *runs: dict[str, Any]) -> dict[str, Any]:
    return {"label": label, "runs": list(runs)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def save(store: Store, name: str, metric: str, *sides: dict[str, Any]) -> None:
    ratios.compare(sides, [metric])
    store.save(name, {"allocators": list(sides)})


def test_the_best_peer_is_the_fastest(store: Store) -> None:
    key = "operations_per_second"
    save(
        store,
        "larson",
        key,
        side("glibc", {key: 1e6}, {key: 1e6}),
        side("mimalloc", {key: 4e6}, {key: 4e6}),
        side("calmalloc", {key: 2e6}, {key: 2e6}),
        side("jemalloc"),
    )
    (row,) = tables.calmalloc_rows(store)
    assert row == (
        "| larson, 2 threads: operations per second | 2.0 million | 1.0 million |  |  | 4.0 million "
        "| 2 (2 to 2) | mimalloc: 0.5 (0.5 to 0.5) |"
    )


def test_the_best_peer_has_the_lowest_cost(store: Store) -> None:
    key = "ns_per_pair"
    costs = {"calmalloc": 4.0, "glibc": 8.0, "gperftools": 5.0}
    sides = (side(name, {key: cost}) for name, cost in costs.items())
    save(store, "glibc-simple", key, *sides)
    (row,) = tables.calmalloc_rows(store)
    assert row.endswith("| 0.5 | gperftools: 0.8 |")


def test_without_figures_of_calmalloc_there_is_no_table_of_it(store: Store) -> None:
    save(store, "larson", "operations_per_second", side("glibc", {"operations_per_second": 1.0}))
    assert tables.calmalloc_table(store) == []
    assert tables.idle_table(store) == []
    assert tables.figures(store).startswith("| figure (medians) | glibc | ptlbmalloc2 |")
    assert "Measured by `bench/figures` on" in tables.figures(store)


# ---- what calmoffload is judged by ----


def judge_one(goal: Goal, *sides: dict[str, Any]) -> dict[str, Any]:
    (verdict,) = judged.judge({"allocators": list(sides)}, [goal])
    return verdict


@pytest.mark.parametrize(("at_most", "outcome"), [(0.5, "met"), (0.49, "missed"), (None, None)])
def test_a_goal_is_a_ratio_of_costs(at_most: float | None, outcome: str | None) -> None:
    goal = Goal("wall_s", "calmoffload", "mimalloc", at_most)
    sides = (
        side("mimalloc", {"wall_s": 4.0}, {"wall_s": 8.0}, {"wall_s": 6.0}),
        side("calmoffload", {"wall_s": 2.0}, {"wall_s": 4.0}, {"wall_s": 3.0}),
    )
    verdict = judge_one(goal, *sides)
    assert (verdict["value"], verdict["low"], verdict["high"]) == (0.5, 0.5, 0.5)
    assert (verdict["n"], verdict["outcome"]) == (3, outcome)
    # The cost of a rate is its inverse.
    goal = dataclasses.replace(goal, metric="frees_per_second")
    rates = (
        side("mimalloc", *[{"frees_per_second": 100.0}] * 2),
        side("calmoffload", *[{"frees_per_second": 200.0}] * 2),
    )
    assert judge_one(goal, *rates)["value"] == 0.5
    assert judge_one(goal, *rates)["outcome"] == outcome


@pytest.mark.parametrize(
    ("at_most", "outcome"), [(0.5, "missed"), (0.799, "missed"), (0.9, "open"), (1.15, "open"), (1.2, "met")]
)
def test_the_interval_decides_and_not_the_median(at_most: float, outcome: str) -> None:
    ratios = (0.8, 0.9, 1.0, 1.1, 1.2)
    sides = (
        side("mimalloc", *[{"wall_s": 1.0}] * 5),
        side("calmoffload", *[{"wall_s": ratio} for ratio in ratios]),
    )
    verdict = judge_one(Goal("wall_s", "calmoffload", "mimalloc", at_most), *sides)
    assert (verdict["value"], verdict["low"], verdict["high"]) == (1.0, 0.8, 1.2)
    assert verdict["outcome"] == outcome
    line = f"wall_s, calmoffload to mimalloc: 1 (95 %: 0.8 to 1.2), at most {at_most:g}: {outcome}"
    assert judged.told(verdict) == line


def test_one_run_decides_nothing() -> None:
    sides = (side("mimalloc", {"wall_s": 1.0}), side("calmoffload", {"wall_s": 0.1}))
    verdict = judge_one(Goal("wall_s", "calmoffload", "mimalloc", 0.9), *sides)
    assert (verdict["value"], verdict["low"], verdict["outcome"]) == (0.1, None, "open")
    assert judge_one(Goal("wall_s", "mimalloc", at_most=9.0), *sides)["outcome"] == "open"


def test_the_best_peer_is_none_of_our_own() -> None:
    costs = {
        "calmalloc": 1.0,
        "calmoffload:CALM_OPTIONS=test_sync=on": 2.0,
        "ptlbmalloc2": 3.0,
        "jemalloc": 6.0,
        "glibc": 5.0,
    }
    goal = Goal("ns", "calmoffload:CALM_OPTIONS=memory_per_cpu=1", BEST_PEER, 0.5)
    sides = [side(label, *[{"ns": cost}] * 2) for label, cost in (costs | {goal.of: 2.0}).items()]
    verdict = judge_one(goal, *sides)
    assert (verdict["to"], verdict["value"], verdict["outcome"]) == ("glibc", 0.4, "met")


def test_what_was_not_measured_meets_nothing() -> None:
    goal = Goal("ns", "calmoffload", "calmalloc", 9.0)
    measured = {"ns": 1.0}
    for sides in (
        (),
        (side("calmalloc", measured), side("calmoffload")),
        (side("calmoffload", measured),),
        (side("calmalloc", measured), side("calmoffload", {"ns": None})),
        # The library said that it did otherwise.
        (side("calmalloc", measured), side("calmoffload", measured | {"said": ["calmalloc: no"]})),
    ):
        verdict = judge_one(goal, *sides)
        assert verdict["outcome"] == "not known"
        assert judged.told(verdict).endswith("at most 9: not known")


def test_a_goal_may_be_a_figure_itself() -> None:
    runs = [{"server_percent": percent} for percent in (0.02, 0.3, 0.05)]
    for at_most, outcome in ((0.3, "met"), (0.1, "open"), (0.01, "missed")):
        goal = Goal("server_percent", "calmoffload", at_most=at_most)
        verdict = judge_one(goal, side("calmoffload", *runs))
        assert (verdict["value"], verdict["low"], verdict["high"]) == (0.05, 0.02, 0.3)
        assert verdict["outcome"] == outcome
        # Least and largest of three runs are no interval of 95 %.
        assert "0.05 (3 runs: 0.02 to 0.3)" in judged.told(verdict)
    assert "95 %" not in judged.HEAD


def test_all_goals_or_one_program() -> None:
    def verdict(outcome: str | None) -> dict[str, Any]:
        return {"outcome": outcome}

    met, missed, undecided, unknown, told_only = map(verdict, ("met", "missed", "open", "not known", None))
    assert judged.of_all([met, told_only]) == "met"
    assert judged.of_all([met, undecided]) == "open"
    assert judged.of_all([met, unknown, undecided]) == "not known"
    assert judged.of_all([met, undecided, unknown, missed]) == "missed"
    assert judged.of_all([told_only]) == "not known"

    def row(share: float | None, found: dict[str, Any]) -> dict[str, Any]:
        return {"allocator_share": {"share": share}, "ratios": [found, told_only]}

    assert judged.of_any([row(0.2, missed), row(0.1, met)]) == "met"
    assert judged.of_any([row(0.2, missed), row(0.1, undecided)]) == "open"
    # A program that hardly allocates proves nothing.
    assert judged.of_any([row(0.2, missed), row(0.09, met)]) == "missed"
    assert judged.of_any([row(0.01, met)]) == "not known"
    # One of which that is not known may be the one: unless another is, or it would not be anyway.
    assert judged.of_any([row(0.2, missed), row(None, met)]) == "not known"
    assert judged.of_any([row(0.2, undecided), row(None, undecided)]) == "not known"
    assert judged.of_any([row(0.2, met), row(None, met)]) == "met"
    assert judged.of_any([row(0.2, missed), row(None, missed)]) == "missed"
    assert judged.of_any([row(0.2, missed), row(0.3, unknown)]) == "not known"
    # Left out.
    assert judged.of_any([row(0.2, missed), {"allocator_share": {}, "ratios": [unknown]}]) == "not known"


def test_what_calmalloc_says_is_kept() -> None:
    said = "calmalloc: unknown option 'x' in CALM_OPTIONS ignored"
    assert rounds.note(f"other\n{said}\n{said}\ncalmallocator\n") == {"said": [said]}
    assert rounds.note("nothing of the kind\n") == {}
    found = rounds.run_once(
        [str(BUILD / "listing1"), "--rounds", "1", "--blocks", "1"],
        allocators.parse("calmalloc:CALM_OPTIONS=no_such=1"),
    )
    assert found["workload"] == "listing1"
    assert found["said"] == ["calmalloc: unknown option 'no_such=1' in CALM_OPTIONS ignored"]


# Process 100 has its main thread, two that it started (one also in user code), and the allocator's.
LOOKS = """
listing1 100/100   10.000001:
\tffffffff821f5127 exc_page_fault
\tffffffff81000c82 asm_exc_page_fault

listing1 100/101   10.000002:
\tffffffff81c3bee4 clear_page_erms
\tffffffff815eea80 handle_mm_fault
\tffffffff81000c82 asm_exc_page_fault

my prog 1 100/102   10.000003:
\tffffffff81c3bee4 zap_page_range_single
\tffffffff815eea80 do_madvise.part.0
\tffffffff81000c82 __x64_sys_madvise

listing1 100/101   10.000004:

listing1 100/101   10.000005:
\tffffffff81c3bee4 futex_wait
\tffffffff81000c82 __x64_sys_futex

calmalloc 100/103   10.000006:
\tffffffff81000c82 asm_exc_page_fault

listing1 200/201   10.000007:
\tffffffff81000c82 asm_exc_page_fault

swapper     0/0     10.000008:
\tffffffff81000c82 pv_native_safe_halt
"""


def test_only_the_threads_that_the_program_started_are_clients() -> None:
    looks = client_time.read(LOOKS.splitlines(), 100)
    assert looks.all == 4
    assert looks.in_kernel == {"fault": 1, "madvise": 1, "other": 1}
    each = client_time.PERIOD_NS * 1e-9
    figures = looks.figures()
    assert figures["client_memory_s"] == pytest.approx(2 * each)
    assert figures["client_kernel_s"] == pytest.approx(3 * each)
    assert figures["client_cpu_s"] == pytest.approx(4 * each)
    assert client_time.read(LOOKS.splitlines(), 300).figures()["client_memory_s"] == 0


@pytest.mark.parametrize("label", ["glibc", "calmalloc"])
def test_time_of_clients_in_faults(label: str) -> None:
    if why := client_time.obstacle():
        pytest.skip(why)
    command = [
        str(BUILD / "listing1"),
        "--threads",
        "1",
        "--rounds",
        "1",
        "--blocks",
        "2000",
        "--touch",
        "all",
    ]
    found = client_time.run_once(command, allocators.parse(label))
    assert found["workload"] == "listing1"
    assert "said" not in found
    # 250 MiB are touched: hundreds of looks.
    assert 0 < found["client_memory_s"] <= found["client_kernel_s"] <= found["client_cpu_s"]
    assert found["client_kernel_s_by_cause"]["fault"] > 0
    # Two ways to count it: the whole is exact in one, and a sample in the other.
    spent = found["client_user_s"] + found["client_system_s"]
    assert 0.5 * spent <= found["client_cpu_s"] <= 2 * spent + 0.05


def make_thread(task: Path, thread: int, name: str, spent: int) -> None:
    (task / str(thread)).mkdir(parents=True)
    (task / str(thread) / "comm").write_text(f"{name}\n")
    (task / str(thread) / "schedstat").write_text(f"{spent} 77 3\n")


def test_the_allocators_threads_are_known_by_their_name(tmp_path: Path) -> None:
    make_thread(tmp_path, 10, "program", 1000)
    make_thread(tmp_path, 11, "calmalloc", 20)
    make_thread(tmp_path, 12, "calmalloc", 30)
    make_thread(tmp_path, 13, "calmalloc-x", 4)
    (tmp_path / "14").mkdir()  # one that has just ended
    assert server_time.times(tmp_path) == ({10: 1000, 13: 4}, {11: 20, 12: 30})


# Sleeps for some seconds beside a thread that is called as the allocator's, which does so or goes on.
SLEEPER = """
import ctypes, sys, threading, time
seconds = int(sys.argv[1])
end = time.monotonic() + seconds
def serve():
    ctypes.CDLL(None).prctl(15, b"calmalloc", 0, 0, 0)
    while time.monotonic() < end:
        {act}
threading.Thread(target=serve).start()
time.sleep(seconds)
print("{{}}")
"""


def watch(command: Sequence[str], look_s: float) -> dict[str, Any]:
    """Watches a program that sleeps for the time in its last argument: a busy machine may sample late."""
    for seconds in ("4", "40", "400"):
        with contextlib.suppress(server_time.NeverIdleError):
            return server_time.watch([*command, seconds], allocators.parse("glibc"), look_s)
    raise AssertionError("it was never seen at rest")


@pytest.mark.parametrize(("act", "least", "most"), [("pass", 2, 110), ("time.sleep(seconds)", 0, 1)])
def test_cpu_time_of_a_server_beside_a_program_that_sleeps(act: str, least: float, most: float) -> None:
    found = watch([sys.executable, "-c", SLEEPER.format(act=act)], 1)
    assert found["server_threads"] == 1
    assert least <= found["server_percent"] <= most


def test_without_a_server_there_is_no_figure_of_it() -> None:
    found = watch([str(BUILD / "idle-burst"), "--threads", "1", "--bytes", "1000000", "--seconds"], 0.5)
    assert (found["server_threads"], found["server_percent"]) == (0, None)


def test_a_program_that_does_not_sleep_is_a_failure_that_is_told() -> None:
    command = [str(BUILD / "listing1"), "--rounds", "1", "--blocks", "1"]
    with pytest.raises(server_time.NeverIdleError):
        server_time.watch(command, allocators.parse("glibc"), 1)
    sides = rounds.interleaved(["glibc"], lambda each: server_time.watch(command, each, 1), rounds=1)
    assert "nothing to look at" in sides[0]["failure"]


def test_the_allocators_share_is_of_all_that_runs_for_it() -> None:
    frames = [
        Frame("main", "program"),
        Frame("malloc", "libcalmalloc.so.0.1.0"),
        Frame("clear_page", "kernel", kernel=True),
        Frame("libcalmalloc.so", "another"),
    ]
    stacks = [
        Stack(CPU, "other", (0,), 6.0, 60),
        Stack(CPU, "other", (0, 1), 1.0, 10),
        Stack(CPU, "fault", (0, 1, 2), 1.0, 10),  # the kernel's work for it
        Stack(CPU, "fault", (0, 2), 1.5, 15),  # a first touch of the program's own
        Stack(CPU, "other", (0, 3), 0.5, 5),
        Stack(FAULT, "fault", (0, 1, 2), 1000.0, 10),
    ]
    empty = dict.fromkeys(Profile.__struct_fields__)
    profile = Profile(**empty | {"frames": frames, "stacks": stacks, "timeline": Timeline(1.0)})  # type: ignore[arg-type]
    assert allocator_share.of_profile(profile, "libcalmalloc.so") == {"share": 0.2, "samples": 100}
    assert allocator_share.of_profile(msgspec.structs.replace(profile, stacks=[]), "lib")["share"] is None


def test_the_share_of_a_program_that_only_allocates() -> None:
    if why := client_time.obstacle():
        pytest.skip(why)
    command = [str(BUILD / "glibc-simple"), "--pairs", "4000000"]
    found = allocator_share.measure(command, allocators.parse("calmalloc"), ROOT)
    assert 0.2 < found["share"] <= 1, found
    assert found["samples"] > 10
    failed = allocator_share.measure(["false"], allocators.parse("calmalloc"), ROOT)
    assert failed["share"] is None
    assert "ended with 1" in failed["reason"]


def test_the_group_stands_for_its_figures() -> None:
    assert offload.expand(["larson", "offload"]) == ["larson", *offload.NAMES]
    assert offload.expand([]) == []
    assert all(name.startswith("offload-") for name in offload.NAMES)
    helped = subprocess.run([ROOT / "bench/figures", "--help"], capture_output=True, text=True, check=True)
    text = "".join(helped.stdout.split())
    assert all(name in text for name in offload.NAMES)
    wrong = subprocess.run(
        [ROOT / "bench/figures", "offload-no-such"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "no such figure: offload-no-such" in wrong.stderr


ROWS = [(figure, row) for figure in offload.FIGURES for row in figure.rows]


@pytest.mark.parametrize(("figure", "row"), ROWS, ids=[f"{figure.name} {row.name}" for figure, row in ROWS])
def test_each_row_has_its_program_and_knows_its_allocators(figure: offload.Figure, row: offload.Row) -> None:
    for label in row.labels:
        name = label.partition(":")[0]
        assert name in allocators.KNOWN
        if name in allocators.OWN:
            assert allocators.parse(label).library == BUILD / f"lib{name}.so"
    if row.command[0] not in offload.PROGRAMS_BY_NAME:
        # The help comes once all that stands before it is understood.
        command = [BUILD / row.command[0], *row.command[1:], "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


LITTLE = {
    "listing1": ("--rounds", "1", "--blocks", "5"),
    "malloc-latency": ("--steps", "500", "--blocks", "50"),
    "larson": ("--seconds", "0.2", "--threads", "2"),
    "xmalloc-test": ("--seconds", "0.2", "--threads", "1"),
}


@pytest.mark.parametrize("name", ["listing1", "malloc-latency", "larson", "xmalloc-test", "ttest1"])
def test_workloads_print_what_is_compared(name: str) -> None:
    rows = [(figure, row) for figure, row in ROWS if row.command[0] == name and figure.how is offload.printed]
    assert rows
    command = [str(BUILD / name), *(LITTLE.get(name) or ("2", "1", "10"))]
    found = rounds.run_once(command, allocators.parse("glibc"))
    for _, row in rows:
        assert all(found[goal.metric] is not None for goal in row.goals)


def goal_that_is_met(metric: str) -> Goal:
    return Goal(metric, "calmalloc", "glibc", 1e9)


@pytest.mark.parametrize(
    ("how", "metric"), [(offload.printed, "seconds"), (offload.timed, "wall_s")], ids=["printed", "timed"]
)
def test_a_figure_from_its_rows_to_the_table(how: Any, metric: str, tmp_path: Path, monkeypatch: Any) -> None:
    command = ("listing1", "--rounds", "1", "--blocks", "5")
    row = offload.Row("small", command, (goal_that_is_met(metric), Goal(metric, "calmalloc", BEST_PEER, 0.0)))
    figure = offload.Figure("offload-try", how, (row,), cpus=1)
    monkeypatch.setattr(offload, "FIGURES", (figure,))
    before = os.sched_getaffinity(0)
    store = Store(tmp_path)
    assert offload.table(store) == ""
    offload.measure_figure(figure, store, 2)
    assert os.sched_getaffinity(0) == before
    whole = json.loads(store.runs("offload-try").read_text())
    result = store.load("offload-try")
    assert result is not None
    assert len(result["cpus"]) == 1
    assert result["outcome"] == "missed"
    (found,) = result["rows"]
    for each, label in zip(whole["rows"][0]["allocators"], ("glibc", "calmalloc"), strict=True):
        assert (each["label"], len(each["runs"])) == (label, 2)
        assert each["origin"]["version"]
        if how is offload.timed:
            assert all(run["cpu_s"] == run["user_s"] + run["system_s"] for run in each["runs"])
    for each in found["allocators"]:
        least, most = each["range"][metric]
        assert each["n"] == 2
        assert "runs" not in each
        assert 0 < least <= each["median"][metric] <= most
    assert [verdict["outcome"] for verdict in found["ratios"]] == ["met", "missed"]
    assert str(ROOT) not in (tmp_path / "offload-try.json").read_text()
    first, second, _, *versions = offload.table(store).splitlines()[2:]
    assert first.startswith(f"| try: small | {metric} | calmalloc | glibc | ")
    assert first.endswith(" | 1e+09 | met |")
    assert second.endswith(" | 0 | missed |")
    assert versions[0] == f"- calmalloc: {__version__}"
    assert versions[1].startswith("- glibc: 2.")


def test_a_row_whose_program_is_missing_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = offload.Row("none", ("no-such-workload",), (goal_that_is_met("seconds"),))
    offload.measure_figure(offload.Figure("offload-try", offload.printed, (row,)), Store(tmp_path), 1)
    result = Store(tmp_path).load("offload-try")
    assert result is not None
    assert result["outcome"] == "not known"
    assert "is not built" in result["rows"][0]["left_out"]
    assert "skipped: build/release/no-such-workload is not built" in capsys.readouterr().out


def test_programs_tell_what_they_cost_in_cpu_time() -> None:
    goals = [row.goals for figure, row in ROWS if figure.name in ("offload-program", "offload-xalan")]
    assert goals
    assert all(Goal("cpu_s", "calmoffload", "calmalloc") in each for each in goals)


def test_a_document_for_jq(tmp_path: Path) -> None:
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    document = tmp_path / "orders.json"
    document.write_text("".join(offload.json_orders(500)))
    assert document.read_text() == "".join(offload.json_orders(500))
    jq = offload.PROGRAMS_BY_NAME["jq"]
    done = subprocess.run(["jq", *jq.arguments(tmp_path)], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    orders = json.loads(document.read_text())
    assert sum(row["orders"] for row in rows) == len(orders) == 500
    assert sum(row["items"] for row in rows) == sum(len(order["items"]) for order in orders)
    for row in rows:
        last = max((o for o in orders if o["region"] == row["region"]), key=lambda o: (o["note"], o["id"]))
        assert row["last"] == last["id"]


def test_inputs_of_programs_are_written_and_named_from_where_they_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "INPUTS", tmp_path)
    command, folder = offload.prepared(("gcc",))
    assert command[0] == "gcc"
    assert folder == tmp_path / "gcc/outputs"
    assert (folder / command[-1]).is_file()
    assert offload.prepared(("cfrac", "--primes", "9")) == ([str(BUILD / "cfrac"), "--primes", "9"], ROOT)


def test_scaling_rows_have_as_many_threads_as_asked_for() -> None:
    for case in scaling.cases(6):
        command = case.prepare(Path()).command
        threads = command[command.index("--threads") + 1]
        assert threads == ("3" if case.name == "xmalloc-test" else "6"), case.name
        # A command that the workload does not know ends with 2.
        done = subprocess.run([*command, "--no-such"], capture_output=True, text=True)
        assert done.returncode == 2
        assert "no-such" in done.stderr


def row_of(name: str, metric: Metric | None, **sides: tuple[float, float, float]) -> Row:
    figure = METRIC if metric else "wall_s"
    found = [
        Side(label, [Run(1, {figure: value, "peak_rss_kib": kib, "shootdowns": shot})])
        for label, (value, kib, shot) in sides.items()
    ]
    return Row(name, "workload", metric, ["/some/where/larson", "--threads", "4"], sides=found)


def test_scaling_table(tmp_path: Path) -> None:
    rate = Metric("operations_per_second", "/s", higher_is_better=True)
    rows = [
        scaling.kept(row_of("a rate", rate, glibc=(50, 2048, 7), calmalloc=(200, 1024, 1))),
        scaling.kept(row_of("a time", None, glibc=(1, 1024, 0), calmalloc=(1.5, 1024, 2))),
    ]
    assert rows[0]["sides"] == {"glibc": [4, 2, 7], "calmalloc": [1, 1, 1]}
    assert rows[0]["command"] == ["larson", "--threads", "4"]
    store = Store(tmp_path)
    assert scaling.table(store) == ""
    store.save("scaling", {"versions": {"glibc": "2.36"}, "threads": {"4": rows}})
    told = scaling.table(store)
    assert "| a rate | 4.00, 2 | 1.00, 1 |" in told
    assert "| **geometric mean, relative to the best** | 2.00, 1.41 | 1.22, 1.00 |" in told
    assert "| TLB shootdowns, sum | 7 | 3 |" in told


def published_document(folder: Path) -> dict[str, Any]:
    """What `calm bench run --suite published` writes, with two programs and a stand-in."""
    by_name = {case.name: case for case in command.all_cases()}
    rate, names = by_name["published/larson"].metric, ("published/larson", "larson", "published/cfrac")
    rows = [
        Row(
            name,
            by_name[name].family,
            rate if name.endswith("larson") else None,
            [name],
            sides=[
                Side(label, [Run(number, figures(value * number, peak)) for number in (1, 2, 3)])
                for label, value, peak in (("glibc", 4.0, 1000.0), ("calmalloc", 9.0, 1500.0))
            ],
        )
        for name in names
    ]
    found = Results(
        machine={"cpus": 2, "memory_kib": 1 << 20},
        suite="published",
        rounds=3,
        seed=1,
        timeout_s=120,
        allocators=[Subject("glibc", version="2.36"), Subject("calmalloc", version="0.1.0")],
        sources=[Source("mimalloc-bench", "v1", "2026-07-15")],
        rows=rows,
    )
    said = "it said: 7 /home/someone/tree/error.cc:20] of a/b"
    found.rows[2].sides[1].failure = f"killed by SIGSEGV (11) ({said})"
    analyse(found)
    path = folder / "whole.json"
    path.write_text(documents.text(found))
    written: dict[str, Any] = json.loads(path.read_text())
    return written


def figures(value: float, peak: float) -> dict[str, float | None]:
    return {METRIC: value, "wall_s": value, "peak_rss_kib": peak, "average_rss_kib": peak, "user_s": 1.0}


def test_the_result_of_the_published_programs_has_what_the_tables_need(tmp_path: Path) -> None:
    store, whole = Store(tmp_path / "kept"), published_document(tmp_path)
    assert published.tables(store.folder) == ""
    suite.keep(store, published.NAME, published.kept(whole))
    kept = store.load(published.NAME)
    assert kept
    assert {figure for row in kept["rows"] for figure in row["medians"]} == {METRIC, "wall_s", "peak_rss_kib"}
    assert [("sides" in row, "to_best" in row) for row in kept["rows"]] == [(False, False)] * 2 + [
        (True, False)
    ]
    # The same tables as from all runs.
    (store.folder / "all.json").write_text(json.dumps(whole))
    assert kept["rows"][2]["sides"][1]["failure"] == "killed by SIGSEGV (11) (it said: 7 error.cc:20] of a/b)"
    assert published.tables(store.folder) == suite.tables(store.folder, published.KINDS, "all")
    assert "| larson | 2.25/2.25 | 1.00/1.00 | 1.00 |" in published.tables(store.folder)
    assert "mimalloc-bench v1, 2026-07-15." in published.tables(store.folder)


def test_the_published_programs_are_measured_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(given: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(given)
        Path(given[given.index("--json") + 1]).write_text(json.dumps(published_document(tmp_path)))
        return subprocess.CompletedProcess(given, 1)

    monkeypatch.setattr(suite.subprocess, "run", run)
    tree = SourceTree("mimalloc-bench", Path("/some/tree"))
    published.measure(Store(tmp_path / "kept"), 2, tree)
    (given,) = commands
    assert given[1:7] == ["bench", "run", "--suite", "published", "--source", "mimalloc-bench=/some/tree"]
    assert given[-2:] == ["-n", "2"]
    assert published.tables(tmp_path / "kept")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("published",), "published needs --source mimalloc-bench=DIR"),
        (("published", "--source", "other=/"), "no such source: other"),
        (("--source", "mimalloc-bench=/etc"), "/etc has no bench/CMakeLists.txt"),
    ],
)
def test_figures_of_published_programs_need_their_tree(arguments: tuple[str, ...], message: str) -> None:
    done = subprocess.run([ROOT / "bench/figures", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
