"""Memory that stays resident, and the cost of returning the rest."""

from __future__ import annotations

import pytest
from ran import KIB, MIB, Ran, Run

THREADS = 16
PEAK = 290 * MIB  # at least: 16 threads hold 300 MiB of blocks


def assert_bounded(ran: Ran) -> None:
    assert ran.figures["peak"] > PEAK
    assert ran.stats["pad_each_bytes"] * ran.stats["arenas"] < 10 * MIB
    kept, bound = ran.figures["kept"], ran.promised_bytes(THREADS)
    assert kept <= bound, f"{kept >> 10} KiB stay, the bound is {bound >> 10} KiB; {ran.stats}"


@pytest.mark.parametrize("order", ["in-order", "reversed", "random", "others"])
def test_idle_threads_keep_little(run: Run, order: str) -> None:
    """How much one thread leaves to another depends on scheduling; usually it is far less."""
    fewer = runs = 0
    while fewer < 3:
        ran = run("retain", order)
        assert_bounded(ran)
        fewer += ran.figures["kept"] <= ran.bound_bytes(THREADS)
        runs += 1
        assert runs < 30


def test_last_small_frees_of_many_arenas(run: Run) -> None:
    """One small block freed in each arena makes all of it free: too few bytes for a check."""
    assert_bounded(run("pinned"))


def test_purges_are_worth_their_cost(run: Run) -> None:
    """At most two purges for each half threshold freed, whatever the number of threads."""
    stats = run("steady").stats
    assert stats["trims"] > 10
    assert stats["failed_purges"] == 0
    assert stats["bytes_trimmed"] / stats["trims"] >= stats["threshold_bytes"] / 4
    assert stats["bytes_purged"] / stats["trims"] >= 500 * KIB
    freed = 8 * 15 * 200 * 100 * KIB
    assert stats["bytes_purged"] <= freed


def test_one_purge_for_many_arenas(run: Run) -> None:
    stats = run("together").stats
    if stats["purge_method"] != "process_madvise":
        pytest.skip("the kernel does not grant process_madvise on oneself")
    assert stats["trims"] > 10
    assert stats["ranges_per_trim"] > 1.5
    assert stats["ranges"] > 1.5 * stats["process_madvise_calls"]
    assert stats["process_madvise_calls"] <= 1.5 * stats["trims"]
    assert stats["purge_calls"] == stats["process_madvise_calls"]
