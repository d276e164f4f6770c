"""bench/lines: what it counts, of which work, and what it keeps."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ran_workloads import run

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from lib import lines  # noqa: E402
from lib.lines import MOVED, REMOTE_LINES, REMOTE_PAGES, ROWS, THREADS, Case  # noqa: E402
from lib.results import Store  # noqa: E402

from calm.core import allocators  # noqa: E402
from research.papers import nextgen_trace  # noqa: E402

COMMAND = ROOT / "bench/lines"
CASES = {case.name: case for case in lines.CASES}


def kinds(loads: int, stores: int) -> dict[str, int]:
    return {"loads": loads, "stores": stores}


def thread(loads: int, invalidations: int, *remote: dict[str, int]) -> dict[str, Any]:
    return {
        "transfers": kinds(loads, 1000),
        "invalidations": invalidations,
        "remote_lines": remote[0],
        "remote_pages": remote[1],
    }


def test_a_stores_transfer_is_counted_once() -> None:
    """By the line that it takes from another CPU."""
    threads = {"0": thread(3, 4, kinds(1, 2), kinds(0, 0)), "1": thread(0, 1, kinds(0, 0), kinds(5, 6))}
    found = lines.figures({"threads": threads}, 3)
    assert found == {MOVED: 2.67, REMOTE_LINES: 1, REMOTE_PAGES: 3.67}


@pytest.mark.parametrize("case", lines.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("threads", THREADS)
def test_the_program_does_as_many_pairs_as_are_counted(case: Case, threads: int) -> None:
    program, *arguments = case.command(threads)
    printed = run(program, *arguments)
    assert printed["pairs"] == case.pairs(threads)
    assert 1 <= printed["warm-up"] <= printed["rounds"]


def test_the_cases_are_the_kinds_of_work_that_the_table_names() -> None:
    assert list(CASES) == [name for name, figure, _ in ROWS if figure == MOVED]
    assert {name for name, *_ in ROWS} == set(CASES)
    # Freed elsewhere: of two threads, and on a neighbour's node.
    assert CASES["passed"].freed_by == "partner"
    assert (CASES["nodes"].freed_by, CASES["nodes"].nodes) == ("next", 4)
    assert CASES["passed"].pairs(64) * 2 == CASES["passed"].blocks * 64 * (512 // 64)


def values(number: float) -> dict[str, dict[str, list[float]]]:
    return {case: {figure: [number] * len(THREADS) for of, figure, _ in ROWS if of == case} for case in CASES}


def test_one_allocator_is_measured_again_and_others_are_kept() -> None:
    first = lines.merged(None, "calmalloc", "0.1.0", values(1))
    both = lines.merged(first, "glibc", "2.36", values(2))
    again = lines.merged(both, "calmalloc", "0.2.0", values(3))
    assert again["versions"] == {"calmalloc": "0.2.0", "glibc": "2.36"}
    assert again["cases"]["small"] == {
        "calmalloc": {MOVED: [3] * len(THREADS)},
        "glibc": {MOVED: [2] * len(THREADS)},
    }
    assert first["versions"] == {"calmalloc": "0.1.0"}
    # Figures of other work are not comparable.
    other = both | {"commands": both["commands"] | {"small": "exchange"}}
    assert lines.merged(other, "calmalloc", "0.2.0", values(3))["versions"] == {"calmalloc": "0.2.0"}


def stored(folder: Path, **of: float) -> Store:
    store = Store(folder)
    for label, number in of.items():
        store.save(lines.NAME, lines.merged(store.load(lines.NAME), label, "1", values(number)))
    return store


def test_the_table(tmp_path: Path) -> None:
    assert lines.table(Store(tmp_path)) == ""
    store = stored(tmp_path, glibc=2.345, variant=0.001, calmalloc=1.0)
    head, rule, *rows = lines.table(store).splitlines()
    # In the order of the page; variants come last.
    assert head == "| for a pair | threads | calmalloc | glibc | variant |"
    assert rule.count("---:") == 4
    assert rows[0].startswith("| moved lines: 64 to 128 KiB")
    assert rows[1] == "|  | 4 | 1.00 | 2.35 | 0.00 |"
    assert len([row for row in rows if row.startswith("| ")]) == len(ROWS) * len(THREADS)
    assert rows[-1].startswith("calmalloc 1, glibc 1, variant 1. ")
    lines.remove(store, "variant")
    assert "variant" not in lines.table(store)


def test_the_command_renders_removes_and_rejects(tmp_path: Path) -> None:
    stored(tmp_path, calmalloc=1.0, glibc=2.0)

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [str(COMMAND), "--results", str(tmp_path), *words]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    done = command("--table")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == lines.table(Store(tmp_path)) + "\n"
    done = command("--without", "glibc")
    assert "| for a pair | threads | calmalloc |\n" in done.stdout
    done = command("nosuch")
    assert done.returncode != 0
    assert done.stderr.startswith("bench/lines: unknown allocator 'nosuch'")


def test_a_result_is_kept_after_each_allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counted(label: str, case: Case, threads: int) -> dict[str, float]:
        seen.append((label, case.name, threads))
        return {MOVED: threads, REMOTE_LINES: 1, REMOTE_PAGES: 2}

    monkeypatch.setattr(lines, "run", counted)
    lines.measure(Store(tmp_path), ["glibc"])
    assert len(seen) == len(CASES) * len(THREADS)
    found = Store(tmp_path).load(lines.NAME)
    assert found
    assert found["cases"]["nodes"]["glibc"] == {
        MOVED: list(THREADS),
        REMOTE_LINES: [1] * len(THREADS),
        REMOTE_PAGES: [2] * len(THREADS),
    }
    assert found["versions"]["glibc"]
    assert found["machine"]["commit"]


@pytest.mark.parametrize("label", ["glibc", "calmalloc"])
def test_a_small_run_under_the_model(label: str) -> None:
    if reason := nextgen_trace.obstacle():
        pytest.skip(reason)
    assert allocators.is_here(label)
    little = replace(CASES["small"], blocks=64, rounds=400)
    own = lines.run(label, little, 2)
    passed = lines.run(label, replace(little, freed_by="partner", nodes=2), 2)
    # A thread that keeps to itself moves hardly anything; one that frees another's block has read it.
    assert own[MOVED] < 0.5
    assert own[REMOTE_LINES] == own[REMOTE_PAGES] == 0
    assert 1 <= passed[MOVED] < 10
    assert 1 <= passed[REMOTE_LINES] < 10
