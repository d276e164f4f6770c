"""A small service: its resident memory follows its sessions' memory, and does not creep up."""

from __future__ import annotations

import os
import re
import statistics

import pytest
from api_helpers import GLIBC, MIB, OFFLOAD, PRELOAD, Programs, Ran


def cycles_of(ran: Ran) -> list[tuple[int, ...]]:
    """Each cycle's peaks of live and resident memory, and live memory and the excess after a pause."""
    lines = re.finditer(r"^cycle \d+ (\d+) (\d+) (\d+) (\d+)$", ran.stdout, re.MULTILINE)
    cycles = [tuple(int(figure) for figure in line.groups()) for line in lines]
    assert len(cycles) == ran["cycles"]
    assert ran["max_live"] > 100 * MIB
    return cycles


def is_tight(live: int, excess: int) -> bool:
    """Whether the excess after a pause is within its limit."""
    return excess <= live * 0.6 + 24 * MIB


def assert_tight(ran: Ran) -> None:
    cycles = cycles_of(ran)
    assert len(cycles) >= 4
    for live, grown, idle_live, idle_excess in cycles[1:]:
        assert grown <= live * 1.35 + 24 * MIB, ran.stdout
        assert is_tight(idle_live, idle_excess), ran.stdout


def assert_steady(ran: Ran) -> None:
    assert_tight(ran)
    cycles = cycles_of(ran)
    assert len(cycles) >= 9, "too few to tell a creep from chance"
    third = len(cycles) // 3
    # Relative to live memory, which grows for as long as the longest sessions last. A creep shows in every
    # cycle; a single cycle may be disturbed by other work.
    early = max(excess / live for *_, live, excess in cycles[1 : 1 + third])
    late = statistics.median_low(excess / live for *_, live, excess in cycles[-third:])
    assert late <= early * 1.5, ran.stdout


# Where memory is worth nothing, what that waves leave is gone soon after each.
@pytest.mark.parametrize("mode", ["test_cache=auto", OFFLOAD])
def test_soak(programs: Programs, mode: str) -> None:
    ran = programs.run(PRELOAD, "soak", "0", "9", options=f"{mode},memory_per_cpu=0")
    assert_steady(ran)
    assert ran["left"] < 8 * MIB


def test_the_soak_finds_what_is_kept(programs: Programs) -> None:
    """glibc's malloc keeps the memory of a burst."""
    *_, (_, _, live, excess) = cycles_of(programs.run(GLIBC, "soak", "4"))
    assert not is_tight(live, excess)


def test_a_creep_would_be_found() -> None:
    """With made-up numbers: constant live memory, and 3 MiB more excess at each pause."""
    live, cycles = 45 * MIB, 10
    lines = [f"cycle {at} {3 * live} {3 * live} {live} {(14 + 3 * at) * MIB}" for at in range(cycles)]
    steady = [re.sub(r"\d+$", str(14 * MIB), line) for line in lines]
    figures = {"cycles": cycles, "max_live": 3 * live}
    assert_steady(Ran("", 0, "\n".join(steady), "", figures))
    with pytest.raises(AssertionError):
        assert_steady(Ran("", 0, "\n".join(lines), "", figures))


@pytest.mark.long
@pytest.mark.timeout(20000)
@pytest.mark.parametrize("options", ["memory_per_cpu=0", "test_policy=paper", f"{OFFLOAD},memory_per_cpu=0"])
def test_soak_long(programs: Programs, options: str) -> None:
    """CALM_SOAK_SECONDS each, half an hour by default; ten times that counts as a hang."""
    seconds = os.environ.get("CALM_SOAK_SECONDS", "1800")
    ran = programs.run(PRELOAD, "soak", seconds, options=options, timeout=10 * float(seconds))
    assert_steady(ran)
