"""`bench/paper run nextgen`: its tables, what counts for it, and the plugin that sees loads and stores."""

import json
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from calm_helpers import without_runs
from paper_helpers import paper
from waiting import wait_until

from calm.core import allocators, documents
from calm.core.allocators import Allocator
from calm.core.errors import CalmError
from research.bench import runner, tables
from research.bench.results import Row, Run, Side, Subject, saved
from research.papers import (
    nextgen,
    nextgen_cases,
    nextgen_counters,
    nextgen_tables,
    nextgen_trace,
    published,
    rerun,
)
from research.papers.model import COUNTED, TRACED, About, Further, PaperResults

ABOUT = About("nextgen", 1.0, threads=2, sockets=1, virtual=True, extra=("calmalloc",))
LABELS = ("glibc", "mimalloc", "tcmalloc", "calmalloc")
PLAIN = Allocator("glibc")
Figures = dict[str, float | None]


# The published numbers.


def test_published_numbers_fit_together() -> None:
    """A digit that was mistyped would break what the paper itself makes of its numbers."""
    base, new = published.NEXTGEN_3["mimalloc"], published.NEXTGEN_3["nextgen"]
    for name, percent in vars(published.NEXTGEN_3_IMPROVEMENT).items():
        less = 100 * (1 - getattr(new, name) / getattr(base, name))
        assert less == pytest.approx(percent, abs=0.1), name
    one = published.NEXTGEN_1
    # By cycles as by time, and "TLB misses vary more than 10x and LLC load misses vary 4x".
    assert one["glibc"].cycles / one["mimalloc"].cycles == pytest.approx(published.NEXTGEN_SPEEDUP, rel=0.03)
    tlb, other = one["glibc"].dtlb_load_misses, one["tcmalloc"].dtlb_load_misses
    assert tlb
    assert other
    assert tlb / other > 10
    assert one["glibc"].llc_load_misses / one["tcmalloc"].llc_load_misses == pytest.approx(4, abs=0.05)
    assert one["jemalloc"].llc_load_misses < one["tcmalloc"].llc_load_misses
    # "More than 10x when the number of threads increases from 1 to 8."
    two = published.NEXTGEN_2
    assert list(two) == [1, 2, 4, 8]
    for name in vars(two[1]):
        values = [getattr(events, name) for events in two.values()]
        assert values == sorted(values, key=lambda value: (value is not None, value))
    assert two[8].llc_store_misses / two[1].llc_store_misses > 10
    # The sum as printed, 279,759,405, has two of its digits changed about.
    assert published.NEXTGEN_MALLOCS + published.NEXTGEN_FREES == 279_795_405


# The tables, of results that are made up.


def side(label: str, figures: Figures, rounds: int = 1) -> Side:
    return Side(label, [Run(number, dict(figures)) for number in range(1, rounds + 1)])


def row(name: str, family: str, figures: Callable[[str], Figures], rounds: int = 1) -> Row:
    sides = [side(label, figures(label), rounds) for label in LABELS]
    return Row(name, family, None, [name], [], {}, sides)


def timed(label: str) -> Figures:
    wall = {"glibc": 4.0, "mimalloc": 2.0, "calmalloc": 1.0}.get(label, 3.0)
    return {"wall_s": wall, "user_s": wall / 2, "system_s": 0.5, "minor_faults": 1000.0, "peak_rss_kib": 2e5}


def missed(label: str) -> Figures:
    """For a million instructions; calmalloc has half of all misses."""
    share = 0.5 if label == "calmalloc" else 1.0
    names = (*(name for name in nextgen_counters.EVENTS if name.endswith("misses")), "l2_load_misses")
    figures: Figures = dict.fromkeys((*names, "l2_store_misses"), 2000 * share)
    figures |= {"dtlb_load_walks": 250.0, "coherence_load_misses": 100 * share, "coherence_store_misses": 0.0}
    figures |= {"own_l2_load_misses": 300.0, "own_l2_store_misses": 100.0, "own_upgrades": 100.0}
    sizes = {f"{name}_bytes": 1024.0 for name in ("l1", "l2", "llc", "tlb", "stlb")}
    return figures | {"instructions": 1e6, "upgrades": 1000 * share, **sizes}


def of_layouts(label: str) -> Figures:
    figures: Figures = {"instructions": 1e6, "mallocs": 150.0, "frees": 140.0}
    for number, layout in enumerate(nextgen_trace.LAYOUTS, 1):
        figures[f"{layout}: message_misses"] = 10.0 * number
        for who in ("users", "server"):
            for name in ("l1_misses", "l2_misses", "llc_misses", "tlb_misses", "walks", "upgrades"):
                figures[f"{layout}: {who} {name}"] = 1000.0 * number
    return figures


def made_up(counted: bool = False, traced: bool = True) -> PaperResults:
    names = [case.name for case in nextgen_cases.rounds(ABOUT)]
    rows = [row(name, "program", timed, 3) for name in names]
    if counted:
        rows += [
            row(f"{name}: counted", COUNTED, lambda label: missed(label) | {"cycles": 5e6}) for name in names
        ]
    if traced:
        rows += [row(f"{case.name}: traced", TRACED, missed) for case, *_ in nextgen_cases.traced_runs(ABOUT)]
        rows += [
            row(f"{case.name}: layouts", TRACED, of_layouts) for case in nextgen_cases.layout_runs(ABOUT)
        ]
    return PaperResults(
        paper=ABOUT,
        date="2026-01-02T03:04:05+00:00",
        calm="0",
        machine={"cpus": 2},
        suite="paper nextgen",
        rounds=3,
        seed=1,
        timeout_s=120,
        touched_kib=1,
        how={COUNTED: "not counted: no such counter", TRACED: "a model" if traced else "not traced: no QEMU"},
        allocators=[Subject(label, version="1.0") for label in LABELS],
        rows=rows,
    )


def grid_named(results: PaperResults, start: str) -> tables.Grid:
    found = [grid for grid in nextgen.PAPER.grids(results, ABOUT) if grid.title.startswith(start)]
    assert len(found) == 1
    return found[0]


def cells(grid: tables.Grid, first: str) -> list[tuple[str, str]]:
    """A row with its headings, of which some are alike."""
    found = [line for line in [*grid.rows, *grid.closing] if line[0] == first]
    assert len(found) == 1, (first, grid.rows)
    return list(zip(grid.headings, found[0], strict=True))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_each_row_is_as_wide_as_its_table(counted: bool, traced: bool) -> None:
    for grid in nextgen.PAPER.grids(made_up(counted, traced), ABOUT):
        assert {len(line) for line in [*grid.rows, *grid.closing]} <= {len(grid.headings)}, grid.title
        assert grid.notes


@pytest.mark.parametrize("counted", [False, True])
def test_a_file_without_runs_is_shown_alike(counted: bool, tmp_path: Path) -> None:
    found = made_up(counted)
    path = tmp_path / "out.json"
    path.write_text(without_runs(documents.text(saved(rerun.complete(found), {}))))
    read = documents.read(str(path), PaperResults)
    assert nextgen.PAPER.grids(read, ABOUT) == nextgen.PAPER.grids(found, ABOUT)
    assert nextgen.PAPER.differences(read, ABOUT) == nextgen.PAPER.differences(found, ABOUT)


def test_times_and_figure_1() -> None:
    grid = grid_named(made_up(), "table 1 and figure 1")
    mimalloc = cells(grid, "mimalloc")
    assert mimalloc[1:5] == [
        ("published: cycles", "6.959e+11"),
        ("to glibc", "0.59"),
        ("measured: elapsed, s", "2.00"),
        ("to glibc (95 %)", "0.50 (0.50 to 0.50)"),
    ]
    # Of the paper's allocators alone: calmalloc is faster than all of them.
    assert dict(cells(grid, "slowest to fastest of the paper's"))["to glibc (95 %)"] == ""
    assert ("to glibc (95 %)", "2.00") in cells(grid, "slowest to fastest of the paper's")
    # Published, and not on this machine.
    assert dict(cells(grid, "jemalloc"))["measured: elapsed, s"] == "-"
    assert any("CPU time, user and system, stands for cycles" in note for note in grid.notes)


def test_misses_beside_those_published() -> None:
    grid = grid_named(made_up(), "table 1: xalan, misses")
    # 4.059e8 of 1.282e12 instructions, in a thousand; and 2,000 of a million.
    assert cells(grid, "glibc")[1:3] == [("published: LLC loads", "0.317"), ("measured", "2.000")]
    assert cells(grid, "calmalloc")[1:3] == [("published: LLC loads", "-"), ("measured", "1.000")]
    assert cells(grid, "glibc")[9] == ("dTLB loads, 2nd level", "0.250")
    assert cells(grid, "tcmalloc")[-2:] == [
        ("instructions to glibc: published", "0.986"),
        ("measured", "1.000"),
    ]
    assert any("a model" in note for note in grid.notes)


def test_threads_of_xmalloc() -> None:
    grid = grid_named(made_up(), "table 2")
    assert [line[0] for line in grid.rows][:5] == [
        *("tcmalloc, 1", "tcmalloc, 2", "tcmalloc, 4", "tcmalloc, 8", "glibc, 1")
    ]
    eight = dict(cells(grid, "tcmalloc, 8"))
    assert eight["published: LLC loads"] == "0.241"
    assert eight["measured: LLC loads"] == "2.000"
    assert (eight["own caches"], eight["of which lost to others"]) == ("4.000", "0.100")
    assert (eight["taken from others"], eight["to 1 thread"]) == ("1.000", "1.00")
    assert dict(cells(grid, "glibc, 1"))["published: LLC loads"] == "-"
    assert dict(cells(grid, "glibc, 1"))["to 1 thread"] == ""


def test_mimalloc_and_nextgen_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = grid_named(made_up(), "table 3")
    assert cells(grid, "execution time, s")[1:] == [
        *(("published: mimalloc", "532"), ("NextGen-Malloc", "508"), ("less", "+4.5 %")),
        *(("measured: mimalloc", "2.00"), ("calmalloc", "1.00"), ("less (95 %)", "+50.0 % (+50.0 to +50.0)")),
        *(("calmoffload", "-"), ("less (95 %)", "-")),
    ]
    assert cells(grid, "dTLB-load-MPKI")[1:7] == [
        *(("published: mimalloc", "6.092"), ("NextGen-Malloc", "3.452"), ("less", "+43.3 %")),
        *(("measured: mimalloc", "2.000"), ("calmalloc", "1.000"), ("less (95 %)", "+50.0 %")),
    ]
    assert dict(cells(grid, "own caches' MPKI"))["calmalloc"] == "2.500"
    assert dict(cells(grid, "own caches of the allocator's thread"))["calmalloc"] == "0.500"
    # Where this calm knows it, it is told why it took no part.
    others = {name: known for name, known in allocators.KNOWN.items() if name != nextgen_trace.OFFLOADED}
    monkeypatch.setattr(allocators, "KNOWN", others)
    notes = grid_named(made_up(), "table 3").notes
    assert "calmoffload took no part: this calm does not know it" in notes
    others[nextgen_trace.OFFLOADED] = allocators.Known(hint="`make` builds it")
    notes = grid_named(made_up(), "table 3").notes
    assert "calmoffload took no part: `make` builds it" in notes


def joined_by(found: PaperResults, label: str, environment: dict[str, str]) -> PaperResults:
    """One more allocator, with the figures of calmalloc."""
    found.allocators.append(Subject(label, version="1.0", environment=environment))
    for each in found.rows:
        calmalloc = each.side("calmalloc")
        assert calmalloc
        each.sides.append(msgspec.structs.replace(calmalloc, label=label))
    return found


@pytest.mark.parametrize("label", ["calmoffload", "calmalloc-offload"])
def test_the_offloaded_rows_are_found(label: str) -> None:
    """By the name in earlier results, too."""
    found = joined_by(made_up(), label, {})
    grid = grid_named(found, "table 3")
    assert [name for name in grid.headings if name.startswith("calm")] == ["calmalloc", label]
    assert dict(cells(grid, "LLC-load-MPKI"))[label] == "1.000"
    assert not any("took no part" in note for note in grid.notes)
    assert dict(cells(grid_named(found, "table 2"), f"{label}, 8"))["own caches"] == "2.000"


def test_layouts() -> None:
    grid = grid_named(made_up(), "figure 2")
    assert len(grid.rows) == 8
    first = dict(cells(grid, "alloc-test: aggregated inline"))
    assert (first["L1"], first["own caches"], first["of which messages"]) == ("1.000", "2.000", "0.010")
    assert first["own caches of the allocator's CPU"] == ""
    last = dict(cells(grid, "alloc-test: segregated offloaded"))
    assert (last["LLC"], last["own caches of the allocator's CPU"]) == ("4.000", "8.000")


def test_the_processors_counters_come_first() -> None:
    found = made_up(counted=True)
    found.how[COUNTED] = "perf stat"
    for each in found.rows:
        if each.family == COUNTED:
            for one in each.sides:
                one.runs[0].figures["llc_load_misses"] = 7000.0
    assert dict(cells(grid_named(found, "table 3"), "LLC-load-MPKI"))["measured: mimalloc"] == "7.000"
    assert "misses: perf stat" in grid_named(found, "table 1: xalan, misses").notes
    assert dict(cells(grid_named(found, "table 1 and figure 1"), "glibc"))["cycles"] == "5e+06"
    # Nobody's thread is told apart by them.
    assert not any(line[0].startswith("own caches of") for line in grid_named(found, "table 3").rows)


@pytest.mark.parametrize(
    ("label", "options", "polls"),
    [
        ("calmoffload", None, True),
        ("calmoffload:CALM_OPTIONS=test_sync=on", "test_sync=on", True),
        ("calmalloc-offload", None, True),
        ("mine=x.so", None, False),
    ],
)
@pytest.mark.parametrize("counted", [False, True])
def test_counters_have_the_servers_polling_in_them(
    counted: bool, label: str, options: str | None, polls: bool
) -> None:
    found = joined_by(made_up(counted=counted), label, {"CALM_OPTIONS": options} if options else {})
    for start in ("table 1 and figure 1", "table 1: xalan, misses", "table 2", "table 3"):
        notes = [note for note in grid_named(found, start).notes if "allocator's thread of" in note]
        assert len(notes) == (1 if counted and polls else 0), start
        assert all(label in note for note in notes)
    # One that failed, or was not counted, has no figures that it could dilute.
    for each in found.rows:
        side = each.side(label)
        assert side
        each.sides[each.sides.index(side)] = Side(label)
    assert not any("allocator's thread of" in note for note in grid_named(found, "table 2").notes)


def test_turns_that_were_lost_are_told() -> None:
    found = made_up()
    assert not any("turns that a thread lost" in line for line in nextgen.PAPER.differences(found, ABOUT))
    traced = next(each for each in found.rows if each.name == "xmalloc-test, 8 threads: traced")
    for each in traced.sides:
        each.runs[0].figures["turns_lost"] = 1234.0 if each.label == "mimalloc" else 0.0
    (line,) = [line for line in nextgen.PAPER.differences(found, ABOUT) if "turns that a thread lost" in line]
    assert line.endswith(": 1,234 in xmalloc-test, 8 threads under mimalloc")


@pytest.mark.parametrize(("scale", "seconds"), [(0.01, "0.2"), (0.5, "0.5"), (3.0, "3")])
def test_a_scale_is_of_durations_too(scale: float, seconds: str) -> None:
    about = replace(ABOUT, scale=scale)
    assert f"scale {scale:g}: documents, traces and durations" in "".join(
        nextgen.PAPER.differences(made_up(), about)
    )
    for case in nextgen_cases.rounds(about)[1:]:
        assert case.prepare(Path()).command[-2:] == ("--seconds", seconds)


def test_without_traces_the_reason_is_told() -> None:
    found = made_up(traced=False)
    for start in ("table 1: xalan, misses", "table 2", "table 3", "figure 2"):
        assert any("not traced: no QEMU" in note for note in grid_named(found, start).notes), start
    assert not any("restartable" in line for line in nextgen.PAPER.differences(found, ABOUT))
    with_traces = nextgen.PAPER.differences(made_up(), ABOUT)
    assert any("no restartable sequences" in line for line in with_traces)
    assert any("published 0.22, xalan here 0.290" in line for line in with_traces)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.0001, "< 0.0005"),
        (0.0123, "0.012"),
        (9.9994, "9.999"),
        (1234.5, "1,234.5"),
    ],
)
def test_rates(value: float | None, text: str) -> None:
    assert nextgen_tables.rate(value) == text


def test_names_say_how_much_was_done() -> None:
    small = replace(ABOUT, scale=0.001)
    assert next(case.name for case in nextgen_cases.rounds(small)) == "xalan of 150 orders"
    assert nextgen_cases.traced_xalan(small) == "xalan of 6 orders"
    warm = [(case.name, warm, limit) for case, warm, limit in nextgen_cases.traced_runs(small)]
    assert warm[0] == ("xalan of 6 orders", 0, 0)
    assert warm[-1] == ("xmalloc-test, 8 threads", 40_000, 120_000)
    # Never nothing.
    least = replace(ABOUT, scale=1e-9)
    assert nextgen_cases.recorded_xalan(least) == "xalan of 1 orders"


def test_inputs_are_made_once(tmp_path: Path) -> None:
    case = nextgen_cases.rounds(replace(ABOUT, scale=0.0001))[0]
    prepared = case.prepare(tmp_path)
    assert prepared.command[0] == "xalan"
    document = tmp_path / "orders.xml"
    assert document.read_text().count("<order ") == 15
    before = document.stat()
    case.prepare(tmp_path)
    assert document.stat().st_mtime_ns == before.st_mtime_ns
    assert sorted(path.name for path in tmp_path.iterdir()) == ["orders.xml", "report.xsl"]


# The processor's counters, by a perf of our own.

PERF_SAID = """# started on Mon Jan  2 03:04:05 2026

5000000,,cycles:u,1000000,100.00,,
1000000,,instructions:u,1000000,100.00,0.20,insn per cycle
<not supported>,,LLC-store-misses,0,100.00,,
4000,,LLC-load-misses:u,1000000,100.00,,
<not counted>,,dTLB-load-misses,0,100.00,,
"""


def test_perf_is_read() -> None:
    assert nextgen_counters.read(PERF_SAID) == {
        "cycles": 5e6,
        "instructions": 1e6,
        "llc_load_misses": 4000,
        "llc_store_misses": None,
        "dtlb_load_misses": None,
        "dtlb_store_misses": None,
    }


@pytest.fixture
def perf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "perf"
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    nextgen_counters.obstacle.cache_clear()
    yield path
    nextgen_counters.obstacle.cache_clear()


def says(perf: Path, text: str) -> None:
    perf.write_text(f'#!/bin/sh\ncat >"$4" <<"END"\n{text}END\nshift 7\nexec "$@"\n')
    perf.chmod(0o755)


def test_counters_that_a_machine_lacks(perf: Path) -> None:
    says(perf, PERF_SAID.replace("4000", "<not supported>"))
    assert nextgen_counters.obstacle() == "this machine does not count LLC-load-misses"


def test_the_allocator_is_the_programs_and_not_perfs(perf: Path, tmp_path: Path) -> None:
    says(perf, PERF_SAID)
    assert nextgen_counters.obstacle() is None
    allocator = Allocator("some", None, {"MARK": "x"})
    found = nextgen_counters.count(["sh", "-c", f"echo $MARK >{tmp_path}/said"], tmp_path, allocator, 30)
    assert found["llc_load_misses"] == 4000
    assert (tmp_path / "said").read_text() == "x\n"
    with pytest.raises(CalmError, match="exit code 3"):
        nextgen_counters.count(["sh", "-c", "exit 3"], tmp_path, allocator, 30)
    with pytest.raises(CalmError, match=r"did not end within 0\.1 s"):
        nextgen_counters.count(["sleep", "30"], tmp_path, allocator, 0.1)


def test_what_calmalloc_says_is_heard(perf: Path, tmp_path: Path) -> None:
    says(perf, PERF_SAID)
    heard: dict[str, list[str]] = {}
    words = ["sh", "-c", "echo other; echo other >&2; echo calmalloc: no >&2"]
    for _ in range(2):
        nextgen_counters.count(words, tmp_path, Allocator("some"), 30, heard)
    assert heard == {"some": ["calmalloc: no"]}


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_past_its_time_the_program_is_killed_and_not_perf_alone(perf: Path, tmp_path: Path) -> None:
    # As perf does it: the program is a child.
    perf.write_text('#!/bin/sh\nshift 7\n"$@"\nexit\n')
    perf.chmod(0o755)
    number = tmp_path / "number"
    for limit_s in (0.2, 1, 5, 20):
        with pytest.raises(CalmError, match="did not end"):
            nextgen_counters.count(
                ["sh", "-c", f"echo $$ >{number}; exec sleep 600"], tmp_path, PLAIN, limit_s
            )
        if number.exists() and number.read_text():
            break
    pid = int(number.read_text())
    wait_until(lambda: not _lives(pid))


# What the plugin reports, and what it sees of small programs.


def thread(name: str, number: int, waiting: int = 0) -> dict[str, Any]:
    both = {"loads": number, "stores": 10 * number}
    keys = (
        "accesses",
        "l1_misses",
        "l2_misses",
        "llc_misses",
        "coherence",
        "transfers",
        "tlb_misses",
        "walks",
    )
    more = {"waiting": waiting, "waiting_accesses": {"loads": waiting // 2, "stores": 0}}
    return {
        "name": name,
        "instructions": 100 * number,
        "upgrades": number,
        **dict.fromkeys(keys, both),
        **more,
    }


def test_threads_are_summed_by_whose_they_are() -> None:
    found = nextgen_trace.figures(
        {
            "threads": {"0": thread("main", 1), "1": thread("main", 4, 20), "2": thread("calmalloc", 2)},
            "machine": {"l1": {"bytes": 32768, "ways": 8}},
            "turns_lost": 3,
        }
    )
    assert found["instructions"] == 480
    assert found["waiting_instructions"] == 20
    assert (found["loads"], found["stores"]) == (5 - 10, 50)
    assert (found["llc_load_misses"], found["llc_store_misses"], found["upgrades"]) == (5, 50, 5)
    assert (found["own_instructions"], found["own_l2_store_misses"]) == (200, 20)
    assert (found["l1_bytes"], found["turns_lost"]) == (32768, 3)


def test_the_server_gets_a_cpu_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with_server, without = map(Allocator, ("calmoffload:A=1", "calmalloc"))
    for cpus in ({0, 1}, {4, 2}, {7}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cpus=cpus: cpus)
        assert nextgen_trace.patient(with_server).split(",")[1] == f"server_cpu={max(cpus)}"
        assert nextgen_trace.patient(without) == ""


# Each prints nothing; argument 1 is what to do.
PROGRAM = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() __asm__ volatile("yield")
#endif
enum { MIB = 1 << 20, ROUNDS = 2000 };
static volatile char *memory;
static _Atomic(int) turn __attribute__((aligned(128)));
static void sweep(size_t bytes, int passes) {
    for (int pass = 0; pass < passes; pass++)
        for (size_t at = 0; at < bytes; at += 64) (void)memory[at];
}
static void *answer(void *name) {
    if (name) prctl(PR_SET_NAME, name);
    for (int i = 0; i < ROUNDS; i++) {
        while (atomic_load(&turn) != 2 * i + 1) PAUSE();
        atomic_store(&turn, 2 * i + 2);
    }
    return NULL;
}
static void poll(void) {
    for (int i = 0; i < ROUNDS && !atomic_load(&turn); i++) PAUSE();
}
static void poll_and_sweep(void) {
    for (int i = 0; i < ROUNDS; i++) {
        (void)memory[i * 4096];
        PAUSE();
    }
}
static void ask(const char *name) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, answer, (void *)name)) exit(2);
    for (int i = 0; i < ROUNDS; i++) {
        atomic_store(&turn, 2 * i + 1);
        while (atomic_load(&turn) != 2 * i + 2) PAUSE();
    }
    pthread_join(thread, NULL);
}
int main(int argc, char **argv) {
    const char *what = argv[1];
    memory = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!strcmp(what, "large")) sweep(8 * MIB, 4);
    if (!strcmp(what, "small")) sweep(MIB / 64, 2048);
    if (!strcmp(what, "ask")) ask(NULL);
    if (!strcmp(what, "own")) ask("calmalloc");
    if (!strcmp(what, "poll")) poll();
    if (!strcmp(what, "news")) poll_and_sweep();
    if (!strcmp(what, "endless")) for (;;) sweep(MIB, 1);
    if (!strcmp(what, "fork")) {
        if (fork() == 0) { sweep(8 * MIB, 1); exit(0); }
        int status;
        return wait(&status) < 0 || status != 0;
    }
    if (!strcmp(what, "exit")) return 3;
    if (!strcmp(what, "say")) return write(2, "calmalloc: no\n", 14) != 14;
    if (!strcmp(what, "blocks")) {
        static char *blocks[1000];
        for (int round = 0; round < 5; round++) {
            for (int i = 0; i < 1000; i++) memset(blocks[i] = malloc(100), 1, 100);
            for (int i = 0; i < 1000; i++) free(blocks[i]);
        }
        char *more = realloc(calloc(10, 10), 1000);
        if (more[99] != 0) return 4;
        free(more);
    }
    return 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    if reason := nextgen_trace.obstacle():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("traced")
    (folder / "program.c").write_text(PROGRAM)
    path = folder / "program"
    command = ["cc", "-O1", "-pthread", "-fno-builtin-malloc", "-o", str(path), str(folder / "program.c")]
    subprocess.run(command, check=True)
    return str(path)


def trace(program: str, what: str, **more: int) -> dict[str, float]:
    found = nextgen_trace.trace([program, what], Path(program).parent, PLAIN, 90, **more)
    return {name: value for name, value in found.items() if value is not None}


def test_what_fits_is_missed_once(program: str) -> None:
    """The start of a program misses some thousand lines; it is the same in both."""
    nothing, small, large = (trace(program, what) for what in ("nothing", "small", "large"))
    lines = 8 * 1024 * 1024 // 64
    # 4 times 8 MiB, through caches that keep what was used last: none of it is there the next time.
    missed = large["llc_load_misses"] - nothing["llc_load_misses"]
    assert 4 * lines * 0.99 < missed < 4 * lines * 1.01
    assert 0 < 4 * 2048 - (large["dtlb_load_misses"] - nothing["dtlb_load_misses"]) + 100 < 200
    # As many loads of 16 KiB, which L1 has room for.
    assert small["loads"] - nothing["loads"] == pytest.approx(2048 * 256, rel=0.01)
    assert small["l1_load_misses"] - nothing["l1_load_misses"] < 1000
    assert small["instructions"] > nothing["instructions"] + 2048 * 256
    assert large.get("own_loads", 0) == 0


def test_two_threads_take_a_line_from_each_other(program: str) -> None:
    rounds = 2000
    alone, asked = trace(program, "nothing"), trace(program, "ask")
    lost = sum(asked[f"coherence_{kind}_misses"] for kind in ("load", "store"))
    # Each sees each answer of the other by a line that it had.
    assert lost >= 2 * rounds * 0.95
    assert asked["transfer_load_misses"] >= 2 * rounds * 0.95
    assert alone["coherence_load_misses"] == alone["upgrades"] == 0
    # It is theirs, and neither the program's nor its caches' size: hardly anything goes to memory.
    assert asked["llc_load_misses"] - alone["llc_load_misses"] < rounds / 2


def test_an_allocators_thread_is_told_apart(program: str) -> None:
    rounds = 2000
    found = trace(program, "own")
    for own in ("", nextgen_trace.OWN):
        assert found[f"{own}transfer_load_misses"] >= rounds * 0.95
    # Some ten instructions of a round are no waiting.
    assert found["own_instructions"] < rounds * 60


def test_waiting_is_not_work(program: str) -> None:
    """A word is polled that nobody writes; and then memory that each time is new to the caches."""
    nothing, polled, news = (trace(program, what) for what in ("nothing", "poll", "news"))
    assert nothing["waiting_instructions"] == news["waiting_instructions"] == 0
    # From the first pause to the last, at least the load, the pause and a jump each.
    assert polled["waiting_instructions"] >= 1999 * 3
    assert polled["instructions"] - nothing["instructions"] < 1999
    assert polled["loads"] - nothing["loads"] < 1999
    assert news["instructions"] - nothing["instructions"] >= 2000 * 3


def test_a_run_is_ended_by_its_instructions(program: str) -> None:
    found = trace(program, "endless", warm=1_000_000, limit=2_000_000)
    # The threads' turns are of 200 instructions.
    assert 2_000_000 <= found["instructions"] < 2_001_000
    # It was warm: 1 MiB has room in the LLC, and not in what is before it.
    assert found["llc_load_misses"] == 0
    assert found["l2_load_misses"] > 100_000
    with pytest.raises(CalmError, match="ended within the first 999,999,999 instructions"):
        trace(program, "nothing", warm=999_999_999)


def test_what_calmalloc_says_under_the_model_is_heard(program: str) -> None:
    heard: dict[str, list[str]] = {}
    nextgen_trace.trace([program, "say"], Path(program).parent, PLAIN, 90, heard=heard)
    assert heard == {"glibc": ["calmalloc: no"]}


def test_children_are_not_followed(program: str) -> None:
    nothing, forked = trace(program, "nothing"), trace(program, "fork")
    assert forked["llc_load_misses"] - nothing["llc_load_misses"] < 5000


def test_failures_are_told(program: str) -> None:
    with pytest.raises(CalmError, match="exit code 3"):
        trace(program, "exit")
    with pytest.raises(CalmError, match="did not end within 1 s"):
        nextgen_trace.trace([program, "endless"], Path(program).parent, PLAIN, 1)
    with pytest.raises(CalmError, match="no such program: '/no/such'"):
        nextgen_trace.trace(["/no/such"], Path(), PLAIN, 30)
    wrong = Allocator("wrong", None, {"LD_PRELOAD": "/no/such.so"})
    with pytest.raises(CalmError, match="did not preload"):
        nextgen_trace.trace([program, "nothing"], Path(program).parent, wrong, 30)


@pytest.mark.parametrize(
    "options",
    [
        *("nosuch=1", "warm=x", "out=/tmp/x,record=/tmp/y", "warm=1"),
        *("out=/tmp/x,cpus=65", "out=/tmp/x,nodes=129"),
    ],
)
def test_options_that_the_plugin_does_not_take(program: str, options: str) -> None:
    plugin = nextgen_trace._find(nextgen_trace.PLUGIN)
    done = subprocess.run(
        [nextgen_trace._qemu(), "-plugin", f"{plugin},{options}", program, "nothing"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "calm-trace: " in done.stderr


def test_a_recording_has_the_calls(program: str) -> None:
    found = nextgen_trace.layouts([program, "blocks"], Path(program).parent, 90)
    mallocs, frees = found["mallocs"], found["frees"]
    assert mallocs is not None
    assert frees is not None
    # 5 rounds, a calloc and a realloc; the C library's start has none, or a few.
    assert 5002 <= mallocs <= 5020
    assert 5002 <= frees <= mallocs
    # The bytes that are set, by eight or more at a time, and no allocator's.
    within = found["accesses_in_blocks"]
    assert within is not None
    assert 5000 * 100 / 64 <= within <= 5000 * 100
    for layout in nextgen_trace.LAYOUTS:
        offloaded = layout.endswith("offloaded")
        server, users = (found[f"{layout}: {who} accesses"] for who in ("server", "users"))
        assert server is not None
        assert users is not None
        assert (server > 5000) == offloaded
        assert ((found[f"{layout}: message_misses"] or 0) > 5000) == offloaded
        assert users > within
    # The list in the blocks takes them from the thread that writes them next.
    lost = [found[f"{layout} offloaded: users coherence"] or 0 for layout in ("aggregated", "segregated")]
    assert lost[0] > lost[1] + 3000


def test_a_failed_recording_is_told(program: str) -> None:
    with pytest.raises(CalmError, match="exit code 3"):
        nextgen_trace.layouts([program, "exit"], Path(program).parent, 60)


def test_the_replay_wants_a_trace() -> None:
    try:
        replay = nextgen_trace._find(nextgen_trace.REPLAY)
    except CalmError as error:
        pytest.skip(str(error))
    done = subprocess.run([str(replay)], input=b"\xff" * 64, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"no trace" in done.stderr
    empty = subprocess.run([str(replay)], input=b"", capture_output=True, check=True)
    assert json.loads(empty.stdout)["instructions"] == 0


@pytest.mark.parametrize("records", [0, 1, 4096, 5000])
def test_a_trace_that_is_cut_is_no_trace(records: int) -> None:
    try:
        replay = nextgen_trace._find(nextgen_trace.REPLAY)
    except CalmError as error:
        pytest.skip(str(error))
    # Loads of 8 bytes, an instruction each.
    whole = struct.pack("=QIHBB", 0x10000, 8, 1, 0, 0) * (records + 1)
    for cut in (15, 1):
        done = subprocess.run([str(replay)], input=whole[:-cut], capture_output=True, check=False)
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr == b"calm-trace-replay: the trace ends within a record\n"
    done = subprocess.run([str(replay)], input=whole, capture_output=True, check=True)
    assert json.loads(done.stdout)["instructions"] == records + 1


def test_without_qemu_nothing_is_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/no/such")
    nextgen_trace.obstacle.cache_clear()
    monkeypatch.setattr(nextgen_counters, "obstacle", lambda: "no counters")
    found = made_up(traced=False)
    before = len(found.rows)
    try:
        nextgen._further(Further(found, [PLAIN], tmp_path, 10, lambda _: None))
    finally:
        nextgen_trace.obstacle.cache_clear()
    assert len(found.rows) == before
    assert "install the package qemu-user" in found.how[TRACED] or "is missing" in found.how[TRACED]


def test_an_interrupt_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nextgen_counters, "obstacle", lambda: None)
    monkeypatch.setattr(runner, "obstacle", lambda _: None)
    small = nextgen_cases.layout_runs(replace(ABOUT, scale=1e-4))
    monkeypatch.setattr(nextgen_cases, "rounds", lambda _: small)
    asked: list[str] = []

    def count(*arguments: object) -> Figures:
        allocator = arguments[2]
        assert isinstance(allocator, Allocator)
        asked.append(allocator.label)
        if allocator.label == "bad":
            raise CalmError("it broke")
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"instructions": 1.0}

    monkeypatch.setattr(nextgen_counters, "count", count)
    found = made_up(traced=False)
    sides = [PLAIN, Allocator("bad"), Allocator("last")]
    saved: list[int] = []
    nextgen._further(Further(found, sides, tmp_path, 10, lambda each: saved.append(len(each.rows))))
    assert found.interrupted_by == 2
    assert len(saved) == 2
    assert [(each.label, len(each.runs), each.failure) for each in found.rows[-1].sides] == [
        *(("glibc", 1, None), ("bad", 0, "it broke"), ("last", 0, None))
    ]


# Everything of a run but its size.
DRIVER = """
from dataclasses import replace
from pathlib import Path
from research.papers import command, nextgen, rerun
command.inputs_folder = lambda: Path({folder!r})
rerun.PAPERS["nextgen"] = replace(nextgen.PAPER, allocators=("glibc",))
"""


def test_the_whole_command(tmp_path: Path) -> None:
    if reason := nextgen_trace.obstacle():
        pytest.skip(reason)
    set_up, out = DRIVER.format(folder=str(tmp_path / "in")), tmp_path / "out.json"
    arguments = ("run", "nextgen", "--no-touch", "-n", "1", "--scale", "0.002", "-a", "glibc")
    done = paper(*arguments, "--json", out, set_up=set_up)
    assert done.returncode == 0, done.stderr
    assert "table 2: xmalloc" in done.stdout
    data = json.loads(out.read_text())
    assert [grid["title"].split(":")[0] for grid in data["tables"]] == [
        *("table 1 and figure 1", "table 1", "table 2", "table 3", "figure 2")
    ]
    rows = {each["name"]: each for each in data["rows"]}
    counted = nextgen_counters.obstacle() is None
    family = COUNTED if counted else TRACED
    once = [each["sides"][0]["runs"] for name, each in rows.items() if name.endswith(f": {family}")]
    assert once
    assert all(runs[0]["figures"]["instructions"] > 0 for runs in once)
    layouts = rows["alloc-test: layouts"]["sides"][0]["runs"][0]["figures"]
    assert layouts["segregated offloaded: users accesses"] > 0
    again = paper("report", out)
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_it_is_one_of_the_papers() -> None:
    assert "nextgen" in rerun.PAPERS
    assert "nextgen" in paper("run", "--help").stdout
    done = paper("run", "nextgen", "--set-thp")
    assert done.returncode == 2
    assert "--set-thp has no effect on nextgen" in done.stderr
