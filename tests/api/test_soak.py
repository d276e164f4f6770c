"""A service in small: what it holds resident follows what its sessions hold, and does not creep."""

from __future__ import annotations

import os
import re
import statistics

import pytest
from api_helpers import GLIBC, MIB, OFFLOAD, PRELOAD, Programs, Ran


def cycles_of(ran: Ran) -> list[tuple[int, ...]]:
    """Each cycle says: most live, most resident, and, after a pause, live, and resident above it."""
    lines = re.finditer(r"^cycle \d+ (\d+) (\d+) (\d+) (\d+)$", ran.stdout, re.MULTILINE)
    cycles = [tuple(int(figure) for figure in line.groups()) for line in lines]
    assert len(cycles) == ran["cycles"]
    assert ran["live_most"] > 100 * MIB
    return cycles


def is_tight(live: int, excess: int) -> bool:
    """What may stay above what sessions hold, once they rest."""
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
    # Of what is live, which itself grows for as long as the longest sessions last. What creeps does so in
    # every cycle; one alone may have been busy with something else.
    early = max(excess / live for *_, live, excess in cycles[1 : 1 + third])
    late = statistics.median_low(excess / live for *_, live, excess in cycles[-third:])
    assert late <= early * 1.5, ran.stdout


# Where giving back may cost all CPU time, memory that waves leave is gone soon after each.
@pytest.mark.parametrize("mode", ["cache=auto", OFFLOAD])
def test_soak(programs: Programs, mode: str) -> None:
    ran = programs.run(PRELOAD, "soak", "0", "9", options=f"{mode},purge_time=100")
    assert_steady(ran)
    assert ran["left"] < 8 * MIB


def test_the_soak_finds_what_is_kept(programs: Programs) -> None:
    """glibc's malloc keeps what a burst left behind."""
    *_, (_, _, live, excess) = cycles_of(programs.run(GLIBC, "soak", "4"))
    assert not is_tight(live, excess)


def test_a_creep_would_be_found() -> None:
    """By hand: as much is live at all times, and each pause finds 3 MiB more above it."""
    live, cycles = 45 * MIB, 10
    lines = [f"cycle {at} {3 * live} {3 * live} {live} {(14 + 3 * at) * MIB}" for at in range(cycles)]
    steady = [re.sub(r"\d+$", str(14 * MIB), line) for line in lines]
    figures = {"cycles": cycles, "live_most": 3 * live}
    assert_steady(Ran("", 0, "\n".join(steady), "", figures))
    with pytest.raises(AssertionError):
        assert_steady(Ran("", 0, "\n".join(lines), "", figures))


@pytest.mark.long
@pytest.mark.timeout(20000)
@pytest.mark.parametrize("options", ["purge_time=100", "policy=paper", f"{OFFLOAD},purge_time=100"])
def test_soak_long(programs: Programs, options: str) -> None:
    """CALM_SOAK_SECONDS each, by default half an hour: what takes ten times that hangs."""
    seconds = os.environ.get("CALM_SOAK_SECONDS", "1800")
    ran = programs.run(PRELOAD, "soak", seconds, options=options, timeout=10 * float(seconds))
    assert_steady(ran)
