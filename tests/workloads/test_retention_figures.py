"""bench/figures on retention: `sawtooth`'s rows, and policies compared with the offline optimum."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from lib import policy, sawtooth  # noqa: E402
from lib.policy import Trace, Window  # noqa: E402
from lib.results import Store  # noqa: E402

BUILD = ROOT / "build/release"


def run(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([BUILD / "sawtooth", *arguments], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("order", ["fifo", "lifo", "random", "alternate"])
@pytest.mark.parametrize("threads", ["1", "3"])
def test_sawtooth(order: str, threads: str) -> None:
    arguments = ("--order", order, "--threads", threads, "--bytes", "3000000", "--rounds", "4")
    found = run(*arguments, "--rest", "0.01", "--hold", "0.005", "--pause", "work", "--after", "0")
    assert found["order"] == order
    assert found["seconds"] >= 3 * 0.01 + 4 * 0.005
    assert found["minor_faults"] > 0
    assert found["rss_freed_kib"] > 0


def test_sawtooth_refuses() -> None:
    done = subprocess.run(
        [BUILD / "sawtooth", "--min", "10", "--max", "9"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "sawtooth: --min is more than --max\n")


def test_rows_differ() -> None:
    commands = [" ".join(row.command()) for row in sawtooth.rows()]
    assert len(set(commands)) == len(commands) > 20
    assert len({row.name() for row in sawtooth.rows()}) == len(commands)


def side(label: str, busy: float, held: float) -> dict[str, Any]:
    median = {"busy_s": busy, "average_rss_kib": held, "left_kib": 512.0, "vain_percent": 0.25}
    return {"label": label, "median": median, "ratio": {"busy_s": [busy / 2, None, None, 3]}}


def test_the_leanest_is_of_those_as_fast(tmp_path: Path) -> None:
    sides = [side("glibc", 2, 1024), side("mimalloc", 1.05, 4096), side("calmalloc", 1, 2048)]
    sides.append(side("jemalloc", 0.5, 8192))
    sides.append({"label": "rpmalloc", "median": {}, "ratio": {}})  # under which the program failed
    store = Store(tmp_path)
    machine = {"cpus": 2, "cpu": "C", "distribution": "D", "glibc": "G", "kernel": "K"}
    rows = [sawtooth.kept({"name": "a row", "allocators": sides})]
    store.keep(sawtooth.NAME, {"machine": machine, "rows": rows})
    (line,) = [line for line in sawtooth.table(store).splitlines() if line.startswith("| a row")]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[1:4] == ["1.000 s", "2.000 s", "0.5"]
    assert cells[4:] == ["jemalloc: 2.00", "2 MiB", "mimalloc: 0.50", "0.5 MiB", "0.25 %"]
    assert sawtooth.table(Store(tmp_path / "nothing")) == ""


def test_gaps() -> None:
    """Compared with a simple calculation: for each page, when it was last in use."""
    assert policy.gaps([5, 0, 0, 5]) == [(2, 5)]
    assert policy.gaps([100, 60, 20, 80, 100]) == [(1, 40), (2, 20), (3, 20)]
    assert policy.gaps([1, 2, 3, 9]) == []
    assert policy.gaps([9, 3, 2, 1]) == []


def by_page(levels: list[int]) -> list[tuple[int, int]]:
    """The same calculation, page by page."""
    found = []
    for page in range(max(levels)):
        used = [at for at, level in enumerate(levels) if level > page]
        found += [(after - before - 1, 1) for before, after in pairwise(used) if after - before > 1]
    return sorted(found)


def test_gaps_of_any_levels() -> None:
    state = 1
    for _ in range(200):
        levels = []
        for _ in range(30):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            levels.append(state >> 60)
        pages = [(windows, 1) for windows, count in policy.gaps(levels) for _ in range(count)]
        assert sorted(pages) == by_page(levels)


def waves(gap: int, pages: int = 100_000, count: int = 20) -> Trace:
    return [Window(*level, 100.0) for _ in range(count) for level in [(pages, 0), *[(0, 0)] * gap]]


def test_the_optimum_keeps_what_it_needs_soon() -> None:
    trace = [Window(level, level, 100.0) for level in (256, *[0] * 50, 256, 0, 256)]
    purge = 256 * (policy.FAULT_NS + policy.PURGE_NS) * 1e-9
    keep = 0.1 / 1024 / 8  # 1 MiB for an epoch, at 8 GiB
    assert policy.optimum_s(trace, 8) == pytest.approx(purge + keep)
    assert policy.optimum_s(trace, 1000) == pytest.approx(51 * keep * 8 / 1000)
    assert policy.optimum_s([], 8) == 0


@pytest.mark.parametrize("gib", [2, 8, 32])
@pytest.mark.parametrize("gap", [1, 3, 10, 30, 100, 300])
def test_the_policy_is_near_the_optimum(gap: int, gib: int) -> None:
    """Of twenty waves, of which it learns from the first."""
    trace = waves(gap)
    found = policy.replay(trace, "--memory-per-cpu", str(gib))
    assert found["vain_s"] + found["rent_s"] <= 1.3 * policy.optimum_s(trace, gib)


@pytest.mark.parametrize("gap", [10, 100])
def test_costly_memory_is_not_kept(gap: int) -> None:
    kept = [policy.replay(waves(gap), "--memory-per-cpu", gib)["kept_mib"] for gib in ("1000", "8", "1", "0")]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0] / 2


def test_a_fixed_period() -> None:
    assert policy.replay(waves(10), "--policy", "fixed", "--windows", "11")["vain_pages"] == 0
    assert policy.replay(waves(10), "--policy", "fixed", "--windows", "3")["vain_pages"] == 19 * 100_000
    assert policy.replay(waves(10), "--policy", "fixed", "--windows", "0")["kept_mib"] == 0


@pytest.mark.parametrize("text", ["1 2 3\n", "1\n", "2 1\n", "a b c\n"])
def test_the_replay_refuses(text: str) -> None:
    done = subprocess.run(
        [BUILD / "retention-replay"], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("retention-replay: a line is not three numbers")


def test_a_trace_is_recorded() -> None:
    arguments = ["--rounds", "3", "--bytes", "33554432", "--rest", "2", "--hold", "0.5"]
    trace = policy.record([str(BUILD / "sawtooth"), *arguments])
    assert len(trace) >= 10
    assert max(each.most for each in trace) >= 33554432 // 4096
    assert min(each.most for each in trace) < 1000
