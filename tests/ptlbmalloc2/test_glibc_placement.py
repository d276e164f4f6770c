"""PTLBMALLOC2_PLACEMENT: where glibc's mapped blocks start, and that free and realloc recognize them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from preload import environment, library
from ran import Ran, Run

LINES, LINE = 64, 64  # of a page; bytes
ON = {"PTLBMALLOC2_PLACEMENT": "1"}
ALIKE = 2 * LINES  # blocks of 1 MiB that are alike


def assert_on(ran: Ran) -> None:
    assert ran.stats["placement"] is True
    assert ran.stats["why_no_placement"] == ""


def assert_off(ran: Ran, why: str) -> None:
    assert ran.stats["placement"] is False
    assert ran.stats["why_no_placement"] == why
    assert ran.stats["placed_blocks"] == 0


@pytest.mark.parametrize("case", ["malloc", "calloc", "grown"])
def test_blocks_alike_begin_apart(run_placed: Run, run_unplaced: Run, case: str) -> None:
    plain, ran = run_unplaced(case).figures, run_placed(case)
    assert_on(ran)
    assert plain["mapped"] == ran.figures["mapped"] == ALIKE
    assert plain["distinct"] == 1, "glibc places blocks by itself now"
    # Each line of the page about as often as any other, as whole pages leave room for all of them.
    assert ran.figures["distinct"] == LINES
    assert ran.figures["most_of_one"] <= ALIKE // LINES + 1
    assert ran.figures["nearest_neighbours"] >= 24 * LINE
    assert ran.figures["pages"] == plain["pages"]
    assert ALIKE - 3 <= ran.stats["placed_blocks"] <= ALIKE  # but those on the first line


@pytest.mark.parametrize("case", ["among-others", "among-others-lowered", "among-others-refused"])
def test_the_least_that_glibc_maps(run_placed: Run, run_unplaced: Run, case: str) -> None:
    assert run_unplaced(case).figures["distinct"] == 1
    ran = run_placed(case)
    assert ran.figures["distinct"] == LINES
    assert ran.figures["most_of_one"] <= ALIKE // LINES + 1
    assert ran.figures["nearest_neighbours"] >= 24 * LINE
    assert ran.stats["placed_blocks"] >= ALIKE - 3


def test_an_arenas_blocks_stay(run_placed: Run, run_unplaced: Run) -> None:
    run_unplaced("in-arena")
    ran = run_placed("in-arena")
    assert_on(ran)
    assert ran.figures == {"first": 16, "last": 16}  # or the case is not what it should be
    assert ran.stats["placed_blocks"] == 0


def test_threads_share_the_lines(run_placed: Run) -> None:
    ran = run_placed("in-threads")
    assert ran.figures["distinct"] == LINES
    assert ran.figures["most_of_one"] <= 4 + 1


def test_processes_differ(run_placed: Run) -> None:
    """With 64 offsets for the first block, 20 processes agree by chance once in 10^34."""
    assert len({run_placed("first").figures["start"] for _ in range(20)}) > 1


def test_aligned_blocks_stay(run_placed: Run, run_unplaced: Run) -> None:
    ran = run_placed("aligned")
    assert_on(ran)
    assert ran.figures == run_unplaced("aligned").figures
    assert ran.stats["placed_blocks"] == 0


def test_as_much_as_there_is_room(run_placed: Run, run_unplaced: Run) -> None:
    ran, plain = run_placed("little-room"), run_unplaced("little-room")
    assert (ran.figures["distinct"], ran.figures["farthest"]) == (8, 7)
    # An eighth of the circle holds 7 to 10 of 64 multiples of the golden ratio, depending on the seed.
    assert ran.figures["most_of_one"] <= LINES // 8 + 2
    assert ran.figures["pages"] == plain.figures["pages"]


def test_no_room(run_placed: Run, run_unplaced: Run) -> None:
    ran = run_placed("no-room")
    assert_on(ran)
    assert ran.figures == run_unplaced("no-room").figures


def test_a_page_more_for_large_blocks(run_placed: Run, run_unplaced: Run) -> None:
    ran, plain = run_placed("large-without-room").figures, run_unplaced("large-without-room").figures
    assert ran["distinct"] >= LINES * 3 // 4
    assert ran["pages"] == plain["pages"] + LINES  # one for each block, of 65


@pytest.mark.parametrize("case", ["pages-of-smaller", "pages-of-whole"])
def test_no_page_more(run_placed: Run, run_unplaced: Run, case: str) -> None:
    ran = run_placed(case)
    assert ran.stats["placed_blocks"] > 0
    assert ran.figures["pages"] == run_unplaced(case).figures["pages"]


def test_at_most_a_64th_more(run_placed: Run, run_unplaced: Run) -> None:
    plain = run_unplaced("pages-of-larger").figures["pages"]
    assert plain < run_placed("pages-of-larger").figures["pages"] <= plain * 65 / 64


@pytest.mark.parametrize("case", ["resize", "copy-to-mapping", "copy-to-arena", "at-random", "across-fork"])
def test_free_and_realloc(run_placed: Run, case: str) -> None:
    ran = run_placed(case)
    assert_on(ran)
    assert ran.stats["placed_blocks"] > 0


@pytest.mark.parametrize("case", ["resize", "copy-to-mapping", "copy-to-arena", "at-random", "across-fork"])
def test_the_cases_hold_on_glibc(run_unplaced: Run, case: str) -> None:
    run_unplaced(case)


@pytest.mark.parametrize("threshold", ["4096", "20000", "900000"])
def test_under_other_thresholds(run_placed: Run, threshold: str) -> None:
    ran = run_placed("at-random", MALLOC_MMAP_THRESHOLD_=threshold, MALLOC_PERTURB_="165")
    assert_on(ran)
    assert ran.stats["placed_blocks"] > 0


def test_a_child_counts_its_own(run_placed: Run) -> None:
    child, parent = run_placed("across-fork").lines
    assert child["placed_blocks"] <= 1
    assert 1 <= parent["placed_blocks"] <= 2


@pytest.mark.parametrize(
    "case",
    [
        "threads",
        "forks",
        "churn",
        "tall-contended",
        "calloc",
        "realloc",
        "memalign",
        "errno",
        "oom",
        "too-much",
    ],
)
def test_programs_at_work(run: Run, case: str) -> None:
    ran = run(case, **ON)
    assert_on(ran)
    assert ran.stats["trims"] > 0
    assert ran.stats["failed_purges"] == 0


def test_before_and_after_main(run_early_late: Callable[..., Ran]) -> None:
    assert_on(run_early_late(**ON))


def test_threshold_rises_all_the_same(run: Run, run_plain: Run) -> None:
    for mebibytes in ("1", "40"):
        ran = run("mmap-threshold", mebibytes, **ON)
        assert_on(ran)
        assert ran.figures == run_plain("mmap-threshold", mebibytes).figures
        assert ran.stats["mmap_threshold_raises"] == (1 if mebibytes == "1" else 0)


def run_case(placed: Path, case: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a case under glibc's own settings, and accepts any result."""
    env = environment(None) | variables
    return subprocess.run([str(placed), case], env=env, capture_output=True, text=True)


def test_threshold_rises_as_far(placed_program: Path) -> None:
    for variables in ({}, {"LD_PRELOAD": str(library()), **ON}):
        ran = run_case(placed_program, "after-a-free", **variables)
        assert ran.returncode == 0, ran.stderr


def test_glibc_still_finds_wrong_pointers(placed_program: Path) -> None:
    plain = run_case(placed_program, "free-the-inside")
    placed = run_case(placed_program, "free-the-inside", LD_PRELOAD=str(library()), **ON)
    assert plain.returncode == placed.returncode == -signal.SIGABRT
    assert placed.stderr == plain.stderr != ""


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off(run_placed: Run, run_unplaced: Run, run: Run, value: str | None) -> None:
    if value is None:
        ran = run("little")
    else:
        ran = run_placed("malloc", PTLBMALLOC2_PLACEMENT=value)
        assert ran.figures == run_unplaced("malloc").figures
    assert_off(ran, "not asked for")
    assert ran.stderr == ""


@pytest.mark.parametrize("value", ["2", "yes", "on", "1 ", "-1"])
def test_bad_values(run_placed: Run, value: str) -> None:
    ran = run_placed("malloc", PTLBMALLOC2_PLACEMENT=value)
    assert_off(ran, "not asked for")
    assert ran.figures["distinct"] == 1
    assert ran.stderr == f"ptlbmalloc2: PTLBMALLOC2_PLACEMENT='{value}' ignored: 0 or 1 is wanted\n"


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, "glibc is not governed"),
        ({"MALLOC_TRIM_THRESHOLD_": "1000000", "MALLOC_TOP_PAD_": "100000"}, "glibc is not governed"),
        ({"MALLOC_CHECK_": "3"}, "glibc.malloc.check marks where each block ends"),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=3"}, "glibc.malloc.check marks where each block ends"),
        ({"MALLOC_MMAP_MAX_": "0"}, "glibc maps no large blocks"),
    ],
    ids=["hugetlb", "not-governed", "check", "check-tunable", "no-mappings"],
)
def test_stays_out_and_says_why(run: Run, variables: dict[str, str], why: str) -> None:
    silent = run("threads", **ON, **variables)
    assert_off(silent, why)
    assert silent.stderr == ""
    lines = run("little", PTLBMALLOC2_VERBOSE="1", **ON, **variables).stderr.splitlines()
    assert len(lines) == 2
    assert lines[1] == f"ptlbmalloc2: mapped blocks are not placed: {why}"


def test_verbose_says_that_it_places(run: Run) -> None:
    lines = run("little", PTLBMALLOC2_VERBOSE="1", **ON).stderr.splitlines()
    assert len(lines) == 2
    assert lines[1] == "ptlbmalloc2: mapped blocks are placed"


def test_large_padding_hides_no_mapping(run: Run) -> None:
    """The block that verification allocates must be mapped, however large the first arena's top is."""
    assert_on(run("little", MALLOC_TOP_PAD_=str(64 << 20), **ON))
