"""Memory that stays resident after it was freed, and the cost of purging."""

from __future__ import annotations

import os

import pytest
from api_helpers import GLIBC, MIB, OFFLOAD, OURS, PRELOAD, Programs, Ran

PEAK = 175 * MIB  # at least: eight threads hold 200 MiB, or a little less, in whole blocks
OTHER = 3 * MIB  # stacks and what the C library holds for each thread
PAGE = 4096
CACHED = 6 * MIB * len(os.sched_getaffinity(0))  # at most, with the pages that it keeps alive


def assert_bounded(ran: Ran, block: int) -> None:
    """The memory kept is as counted, and within its limits."""
    assert ran["peak"] > PEAK
    assert ran["dirty"] <= ran["dirty_limit"] <= 24 * MIB
    assert ran["cached"] <= ran["cached_limit"]
    # A block in a cache may hold pages that nothing else holds; and the program has some blocks of its own.
    assert ran["in_use"] <= ran["cached_limit"] + 16384
    assert ran["in_use"] <= ran["cached"] // block * (block // PAGE + 2) * PAGE + MIB, ran.stdout
    assert ran["kept"] <= ran["dirty"] + ran["in_use"] + OTHER, ran.stdout


@pytest.mark.parametrize("policy", ["adaptive", "paper"])
@pytest.mark.parametrize("order", ["in-order", "reversed", "random", "others"])
@pytest.mark.parametrize("block", [64, 1000, 9000, 100_000, 3_000_000])
def test_idle_threads_keep_little(programs: Programs, block: int, order: str, policy: str) -> None:
    ran = programs.run(
        PRELOAD, "retention", "plain", f"{block},{order}", options=f"background=off,test_policy={policy}"
    )
    assert_bounded(ran, block)
    assert ran["purge_failures"] == 0
    assert ran["purged"] > 150 * MIB


@pytest.mark.parametrize("cache", ["locked", "off"])
@pytest.mark.parametrize("block", [64, 9000, 100_000])
def test_idle_threads_keep_little_with_other_caches(programs: Programs, block: int, cache: str) -> None:
    options = f"background=off,test_cache={cache}"
    assert_bounded(programs.run(PRELOAD, "retention", "plain", f"{block},others", options=options), block)


@pytest.mark.parametrize("block", [64, 9000, 100_000])
def test_idle_threads_keep_little_with_a_server(programs: Programs, block: int) -> None:
    """After the server has processed all frees."""
    options = f"{OFFLOAD},test_policy=paper"
    ran = programs.run(PRELOAD, "retention", "plain", f"{block},others", options=options)
    assert ran["peak"] > PEAK
    assert ran["dirty"] <= ran["dirty_limit"] <= 24 * MIB
    assert ran["cached"] <= ran["cached_limit"]
    assert ran["kept"] <= ran["dirty"] + ran["in_use"] + OTHER + 24 * MIB, ran.stdout
    ran = programs.run(PRELOAD, "retention", "idle-with-server", f"{block},others", options=OFFLOAD)
    assert ran["settled"] == 1


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("block", [64, 9000, 100_000])
def test_idle_next_to_nothing_in_the_end(programs: Programs, block: int, way: str) -> None:
    """tests/c/arena/test_helper.c checks the time, with a simulated clock."""
    ran = programs.run(way, "retention", "idle", f"{block},others", options="background=on")
    assert ran["peak"] > PEAK
    assert ran["settled"] == 1


def test_the_figures_can_be_bad(programs: Programs) -> None:
    """Where memory costs next to nothing everything is kept, so the policy causes the results above."""
    ran = programs.run(
        PRELOAD, "retention", "plain", "100000,reversed", options="background=off,memory_per_cpu=1600"
    )
    assert ran["kept"] > 150 * MIB
    assert programs.run(GLIBC, "retention", "plain", "1000,others")["kept"] > 60 * MIB


@pytest.mark.parametrize("case", ["deny-vectored", "deny-missing"])
@pytest.mark.parametrize("block", [1000, 100_000])
def test_vectored_call_denied(programs: Programs, block: int, case: str) -> None:
    """By a container's filter and by an old kernel: one madvise for each range, and the same limits."""
    ran = programs.run(PRELOAD, "retention", case, f"{block},others", options="background=off")
    assert_bounded(ran, block)
    assert ran["purge_single_calls"] > 0
    assert ran["purged"] > 150 * MIB
    assert ran["purge_failures"] <= 4


def test_nothing_can_be_given_back(programs: Programs) -> None:
    """Few calls are wasted, and free memory is reused."""
    ran = programs.run(PRELOAD, "retention", "deny-all", "100000,others", options="background=off")
    assert ran["kept"] > PEAK
    assert ran["purged"] == 0
    assert 1 <= ran["purge_failures"] <= ran["frees"] // 3
    assert ran["grown_again"] <= 8 * MIB


@pytest.mark.parametrize("block", [9000, 100_000])
def test_locked_memory_is_left_alone(programs: Programs, block: int) -> None:
    ran = programs.run(PRELOAD, "retention", "locked", f"{block},others", options="background=off")
    assert ran["purged"] == 0
    assert 1 <= ran["purge_failures"] <= ran["frees"] // 4


@pytest.mark.parametrize(("policy", "most"), [("paper", 32), ("adaptive", 24)])
@pytest.mark.parametrize("block", [1000, 9000, 100_000])
def test_purges_are_worth_their_cost(programs: Programs, block: int, policy: str, most: int) -> None:
    """25 MiB are allocated and freed forty times.

    While they are freed, the limit shrinks with the footprint, and a purge returns three quarters of a tenth
    of that. This makes 26 purges.
    """
    options = f"background=off,test_policy={policy}"
    ran = programs.run(PRELOAD, "retention", "steady", f"{block},reversed", options=options)
    assert (0 if policy == "adaptive" else 1) <= ran["purges"] <= 40 * most
    assert ran["purged"] <= ran["dirtied"]
    if ran["purge_vectored_calls"] > 0:
        assert ran["purge_vectored_calls"] <= 1.2 * ran["purges"] + 40


@pytest.mark.parametrize(("block", "most_percent"), [(200, 30), (3000, 30), (20_000, 60)])
def test_what_stays_holds_back_little(programs: Programs, block: int, most_percent: int) -> None:
    """One block in each 64 KiB stays."""
    ran = programs.run(PRELOAD, "retention", "sparse", f"{block},reversed", options="background=off")
    assert ran["full"] > 24 * MIB
    bound = ran["dirty_limit"] + CACHED + ran["live"] + 2 * ran["live_pages"] + OTHER
    assert ran["kept"] <= bound, ran.stdout
    assert ran["kept"] <= ran["full"] * most_percent // 100
