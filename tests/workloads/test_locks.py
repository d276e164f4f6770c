"""bench/emulated --locks: its rows, and what becomes of its figures; without an emulated machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lab_qemu
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from lib import guest, locks, results  # noqa: E402
from lib.guest import Settings, Work  # noqa: E402
from lib.locks import MANY, ONE, WAITS, Row  # noqa: E402
from lib.results import Store  # noqa: E402

from calm.core import measure  # noqa: E402
from calm.core.errors import CalmError  # noqa: E402
from research.lab.guest import Run  # noqa: E402

LIBRARY = guest.RELEASE / "libcalmalloc.so"
BOTH = {ONE: "test_heaps=1", MANY: ""}
built = pytest.mark.skipif(not LIBRARY.exists(), reason="calmalloc is not built")


def measurement(own: int | None = None) -> measure.Measurement:
    """Of a machine that received 40 interrupts."""
    report = json.loads(lab_qemu.report(40))
    report["counters"]["interrupts"]["value"] = own
    return measure.parse(report)


def run_of(label: str, allocations: int = 1000, **report: Any) -> Run:
    counters = {"heap_locks": 30, "cache_misses": 50} | report
    errors = json.dumps({"allocator": "calmalloc"} | counters)
    return Run(label, measurement(), json.dumps({"allocations": allocations}), errors)


def test_rows_divide_the_same_work_among_the_threads() -> None:
    few, many = ({row.name: row for row in locks.rows(threads, 160)} for threads in (2, 16))
    assert list(few) == list(many)
    assert len({row.label for row in (*few.values(), *many.values())}) == 2 * len(few)
    operations = "larson --threads {} --generations {} --operations 50000"
    assert few["larson"].command == tuple(operations.format(2, 160).split())
    assert many["larson"].command == tuple(operations.format(16, 20).split())
    # A pair is two threads.
    assert many["xmalloc-test"].command[:3] == ("xmalloc-test", "--threads", "8")
    # A thread holds as many blocks, whatever the number of threads.
    wave = "sawtooth, 16 to 512 bytes"
    sizes = [int(rows[wave].command[rows[wave].command.index("--bytes") + 1]) for rows in (few, many)]
    assert sizes == [2 * (4 << 20), 16 * (4 << 20)]
    assert sum(name.startswith("sawtooth") for name in few) == len(locks.SIZES)


@built
@pytest.mark.parametrize("row", list(locks.rows(3, 1)), ids=lambda row: row.name)
def test_rows_run_and_count_their_calls(row: Row) -> None:
    """The same number of calls in each run; at least a hundred, since a rate is for each 1,000."""
    runs = [locks.describe(LIBRARY, locks.run_natively(row, LIBRARY, ""), locks.sent) for _ in range(2)]
    assert runs[0]["calls"] == runs[1]["calls"] > 100
    for run in runs:
        assert run["heap_locks"] > 0
        assert run["interrupts"] >= 0
        assert run["peak_rss_kib"] > 1000
        assert run["printed"]["workload"] == row.command[0]


@built
def test_a_program_that_fails_is_no_figure() -> None:
    row = Row("bad", 1, ("larson", "--threads", "none"))
    with pytest.raises(CalmError, match=r"bad, 1 threads: exit code 2\n.*'none' is not a number"):
        locks.run_natively(row, LIBRARY, "")


@built
def test_a_library_without_the_option_has_one_heap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {ONE: "test_cache=locked", MANY: ""}
    monkeypatch.setattr(locks, "OPTIONS", known)
    assert locks.sides_of(LIBRARY) == known
    monkeypatch.setattr(locks, "OPTIONS", {ONE: "test_nothing=1", MANY: ""})
    assert locks.sides_of(LIBRARY) == {ONE: ""}
    assert "does not know test_nothing=1" in capsys.readouterr().out


def test_options_are_added_to_those_that_make_it_report() -> None:
    assert guest.preloading(LIBRARY, "test_heaps=1")["CALM_OPTIONS"] == "test_heaps=1,report=exit"
    assert guest.preloading(LIBRARY)["CALM_OPTIONS"] == "report=exit"
    other = guest.preloading(Path("/lib/libptlbmalloc2.so"))
    assert other == {"LD_PRELOAD": "/lib/libptlbmalloc2.so", "PTLBMALLOC2_STATS": "json"}


def test_calls_are_allocations_and_frees() -> None:
    assert locks.calls_of({"allocations": 30}) == 60
    assert locks.calls_of({"allocations": 30, "frees": 20}) == 50


def test_a_run_in_rates() -> None:
    """A counter that the library does not have has no rate."""
    found = locks.describe(LIBRARY, run_of("x"), guest.interrupts)
    assert [found[name] for name in locks.RATES] == [15, None, 25, 20]
    assert (found["calls"], found["peak_rss_kib"], found["wall_s"]) == (2000, 2048, 5)
    assert locks.describe(LIBRARY, run_of("x", heap_locks_contended=8), guest.interrupts)[WAITS] == 4
    with pytest.raises(CalmError, match="was not active"):
        locks.describe(LIBRARY, replace(run_of("x"), errors=""), guest.interrupts)


def test_natively_the_program_s_own_interrupts_count() -> None:
    assert locks.sent(Run("x", measurement(7))) == 7
    assert locks.sent(Run("x", measurement(0))) == 0
    assert locks.sent(Run("x", measurement())) == 40


def described(*waits: int | None) -> list[dict[str, Any]]:
    counted: list[dict[str, Any]] = [{} if each is None else {WAITS: each} for each in waits]
    return [locks.describe(LIBRARY, run_of("x", **each), guest.interrupts) for each in counted]


def test_a_side_in_medians_and_the_range_of_its_waits() -> None:
    assert locks.summary(described(6, 2, 200)) == [15, 3, 25, 20, 2048, 5, 1, 100]
    assert locks.summary(described(None)) == [15, None, 25, 20, 2048, 5, None, None]
    (third,) = described(2)
    assert locks.summary([third | {"heap_locks": 2 / 3}])[0] == 0.667


def test_all_runs_of_a_row_make_the_same_calls() -> None:
    row = Row("row", 4, ("larson",))
    runs = [locks.describe(LIBRARY, run_of("x", count), guest.interrupts) for count in (1000, 1001)]
    with pytest.raises(CalmError, match=r"row, 4 threads: .*differs between runs: \[2000, 2002\]"):
        locks.result(LIBRARY, 1, {row: {ONE: runs[:1], MANY: runs[1:]}})


def test_both_sides_run_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[Work] = []

    def ran(work: Work, count: int, *_: object) -> tuple[dict[str, Any], list[Run]]:
        works.append(work)
        runs = [run_of(turn.label, heap_locks_contended=4) for _ in range(count) for turn in work.turns]
        return {"machine": {"cpus": 16, "sockets": 1}, "kernel": "6.12", "qemu_command": ["q"]}, runs

    monkeypatch.setattr(locks, "sides_of", lambda _: BOTH)
    monkeypatch.setattr(locks, "measure", ran)
    found = locks.measure_emulated(LIBRARY, 2, Settings(Path("/cache"), 60))
    turns = works[0].turns
    assert [turn.label for turn in turns[:3]] == [f"larson: {ONE}", f"larson: {MANY}", f"xmalloc-test: {ONE}"]
    options = [turn.variables["CALM_OPTIONS"] for turn in turns[:2]]
    assert options == ["test_heaps=1,report=exit", "report=exit"]
    assert found["commands"]["larson"] == "larson --threads 16 --generations 2 --operations 50000"
    calls, one, many = found["rows"]["larson"]["16"]
    assert (calls, one, many) == (2000, [15, 2, 25, 20, 2048, 5, 2, 2], one)
    assert len(found["runs"]["larson, 16 threads"][MANY]) == 2


def test_natively_the_sides_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[tuple[str, str]] = []

    def run_once(row: Row, _: Path, options: str) -> Run:
        ran.append((row.label, options))
        return run_of(row.label)

    monkeypatch.setattr(locks, "sides_of", lambda _: BOTH)
    monkeypatch.setattr(locks, "run_natively", run_once)
    found = locks.measure_natively(LIBRARY, 2)
    # A round to warm up, and two.
    assert len(ran) == 3 * 2 * len(locks.THREADS) * len(found["rows"])
    for first, second in zip(ran[::2], ran[1::2], strict=True):
        assert first[0] == second[0]
        assert {first[1], second[1]} == set(BOTH.values())
    assert list(found["rows"]["mstress"]) == ["2", "4", "8", "16"]
    store = Store(tmp_path)
    monkeypatch.setattr(results, "output", lambda *_: "abc1234")
    store.save(locks.NATIVE, found)
    assert "| mstress | 8 | 2,000 | 15, 15 | -, - | 25, 25 | 20, 20 | 2, 2 | 5.00, 5.00 |" in locks.table(
        store
    )


def test_a_table_of_one_side_or_both(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert locks.table(store) == ""
    machine = {"machine": {"cpus": 16}, "kernel": "6.12"}
    row = Row("larson", 16, ("larson",))
    store.keep(locks.NAME, machine | locks.result(LIBRARY, 3, {row: {ONE: described(6, 2, 200)}}))
    one = locks.table(store)
    assert "16 emulated CPUs, Linux 6.12, 3 rounds; in each cell: one heap:\n" in one
    assert one.splitlines()[-1] == "| larson | 16 | 2,000 | 15 | 3 (1 to 100) | 25 | 20 | 2 |"
    both = {ONE: described(6), MANY: [described(0)[0] | {"heap_locks": 1234.5, "interrupts": 1e-5}]}
    store.keep(locks.NAME, machine | locks.result(LIBRARY, 1, {row: both}))
    line = locks.table(store).splitlines()[-1]
    assert line == "| larson | 16 | 2,000 | 15, 1,234 | 3 (3 to 3), 0 (0 to 0) | 25, 25 | 20, <0.001 | 2, 2 |"


def test_only_locks_are_counted_natively() -> None:
    done = subprocess.run([ROOT / "bench/emulated", "--native"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "emulated: error: --native needs --locks",
    )
