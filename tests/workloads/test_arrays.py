"""The workloads on large arrays: they do what they say wherever the arrays start, and notice errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ran_workloads import BUILD, LIBRARY, preloadable, run, start

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
WORD = 2**64 - 1

SMALL: dict[str, tuple[str, ...]] = {
    "alias4k": (
        *("--streams", "2", "--variant", "rewritten", "--work", "mesh", "--memory", "malloc"),
        *("--bytes", "200000", "--head", "1024", "--repeats", "30"),
    ),
    "array-sweep": (
        *("--bytes", "262144", "--memory", "small", "--walk", "pages", "--stride", "128"),
        *("--repeats", "3"),
    ),
    "mhd-like": (
        *("--grid", "24", "--steps", "7", "--arrays", "8", "--memory", "aligned"),
        *("--problem", "wave-y"),
    ),
    "streams": (
        *("--arrays", "5", "--threads", "2", "--bytes", "200000", "--gap", "204800", "--work", "update"),
        *("--memory", "mmap", "--huge", "off", "--head", "512", "--repeats", "30"),
    ),
}
# What the machine decides, not the workload.
MEASURED = {
    "seconds",
    "ns_per_element",
    "ns_per_iteration",
    "cycles_per_iteration",
    "ns_per_load",
    "ns_per_cell",
}
# What the allocator and the system decide.
PLACED = {"distinct_starts", "distance", "huge_kib"}


def work_of(printed: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in printed.items() if key not in MEASURED | PLACED}


def checksum_add(checksum: int, number: int) -> int:
    """What support.c does: one step of splitmix64."""
    z = ((checksum ^ number) + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def checksum_of(numbers: list[int]) -> int:
    checksum = 0
    for number in numbers:
        checksum = checksum_add(checksum, number)
    return checksum


@pytest.mark.parametrize("name", sorted(SMALL))
def test_arguments_are_printed_and_helped_with(name: str) -> None:
    printed = run(name, *SMALL[name])
    helped = start(name, "--help")
    assert helped.returncode == 0
    for option, value in zip(SMALL[name][::2], SMALL[name][1::2], strict=True):
        assert str(printed[option.removeprefix("--")]) == value
        assert f"{option} " in helped.stdout


@pytest.mark.parametrize("name", sorted(SMALL))
def test_the_work_repeats_exactly_under_any_allocator(name: str) -> None:
    first = work_of(run(name, *SMALL[name]))
    assert work_of(run(name, *SMALL[name])) == first
    assert work_of(run(name, *SMALL[name], preload=LIBRARY)) == first


@pytest.mark.parametrize(
    ("name", "arguments", "memories"),
    [
        ("alias4k", ("--repeats", "3"), ("malloc", "mmap", "padded")),
        ("alias4k", ("--repeats", "3", "--streams", "8", "--work", "mesh"), ("malloc", "mmap", "padded")),
        ("array-sweep", ("--repeats", "3", "--walk", "chase"), ("malloc", "small", "huge")),
        ("mhd-like", ("--grid", "24", "--steps", "3"), ("malloc", "aligned", "padded")),
        ("streams", ("--repeats", "30", "--work", "sum"), ("malloc", "mmap")),
        ("streams", ("--repeats", "30", "--work", "update"), ("malloc", "mmap")),
    ],
)
def test_no_placement_changes_the_result(
    name: str, arguments: tuple[str, ...], memories: tuple[str, ...]
) -> None:
    results = {run(name, *arguments, "--memory", memory)["checksum"] for memory in memories}
    assert len(results) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("alias4k", ("--offset", "4096"), "a number from 0 to 4095"),
        ("alias4k", ("--offset", "4"), "--offset is no multiple of 8"),
        ("alias4k", ("--offset", "64", "--memory", "malloc"), "--offset is for --memory mmap"),
        ("alias4k", ("--head", "20"), "--head is no multiple of 8"),
        ("alias4k", ("--bytes", "1024"), "--head is more than --bytes"),
        ("alias4k", ("--streams", "9"), "a number from 1 to 8"),
        ("array-sweep", ("--stride", "60"), "--stride is no multiple of 8"),
        ("array-sweep", ("--bytes", "1000"), "--bytes is no multiple of --stride"),
        ("array-sweep", ("--bytes", str(2**36), "--stride", "8"), "--bytes has more than"),
        ("array-sweep", ("--walk", "back"), "one of stride|chase|pages"),
        ("array-sweep", ("--cache", "2"), "--cache and --colors are for --memory colored"),
        ("array-sweep", ("--colors", "timed"), "--cache and --colors are for --memory colored"),
        ("mhd-like", ("--grid", "3"), "a number from 4"),
        ("mhd-like", ("--arrays", "11"), "one of 8|12"),
        ("streams", ("--arrays", "1"), "a number from 2"),
        ("streams", ("--head", "100"), "--head is no multiple of 64"),
        ("streams", ("--bytes", "512"), "--head is more than --bytes"),
        ("streams", ("--gap", "4096"), "--gap and --huge are for --memory mmap"),
        ("streams", ("--huge", "on"), "--gap and --huge are for --memory mmap"),
        ("streams", ("--memory", "mmap", "--gap", "1001"), "--gap is no multiple of 8"),
        ("streams", ("--memory", "mmap", "--gap", "512"), "--gap is less than --head"),
    ],
)
def test_arguments_that_make_no_sense_get_one_line(
    name: str, arguments: tuple[str, ...], message: str
) -> None:
    done = start(name, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


# Gives the same memory for each large block, so that arrays lie on one another.
BROKEN_MALLOC = """
#include <stdlib.h>
#include <sys/mman.h>

extern void *__libc_malloc(size_t size);
extern void __libc_free(void *block);
static void *shared;

void *malloc(size_t size) {
    if (size < 100000) {
        return __libc_malloc(size);
    }
    if (shared == NULL) {
        shared = mmap(NULL, 1UL << 24, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    return shared;
}
void free(void *block) {
    if (block != shared) {
        __libc_free(block);
    }
}
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preloadable(tmp_path_factory.mktemp("broken"), BROKEN_MALLOC)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("alias4k", ("--memory", "malloc"), "does not hold what was made for it"),
        ("alias4k", ("--memory", "malloc", "--work", "mesh"), "does not hold what was made for it"),
        ("mhd-like", ("--grid", "128"), "no positive density and pressure"),
        ("streams", ("--work", "sum"), "do not hold what was written to them"),
        ("streams", ("--work", "update"), "not what the passes make of it"),
    ],
)
def test_arrays_on_one_another_are_found(
    name: str, arguments: tuple[str, ...], message: str, broken: Path
) -> None:
    repeats = () if name == "mhd-like" else ("--repeats", "3")
    done = start(name, *arguments, *repeats, preload=broken)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(("arrays", "head"), [(2, 8192), (16, 1024), (24, 640), (128, 128), (1000, 64)])
def test_streams_heads_fill_half_of_an_l1_together(arrays: int, head: int) -> None:
    assert run("streams", "--arrays", str(arrays), "--bytes", "8192", "--repeats", "1")["head"] == head


@pytest.mark.parametrize(("arrays", "head"), [(2, 64), (7, 192), (16, 4096)])
@pytest.mark.parametrize("threads", [1, 3])
def test_streams_sums_all_arrays_in_each_pass(arrays: int, head: int, threads: int) -> None:
    got = run(
        *("streams", "--arrays", str(arrays), "--head", str(head), "--bytes", "4096", "--repeats", "9"),
        *("--threads", str(threads)),
    )
    total = sum((7 * k + 3 * i) % 1021 for k in range(arrays) for i in range(head // 8))
    # The first of the passes warms up.
    of_thread = checksum_of([total] * 10)
    assert int(got["checksum"], 16) == checksum_of([of_thread] * threads)


@pytest.mark.parametrize(("arrays", "head"), [(2, 64), (3, 512), (16, 1024)])
def test_streams_updates_each_array_from_the_next_one(arrays: int, head: int) -> None:
    repeats = 4
    got = run(
        *("streams", "--arrays", str(arrays), "--head", str(head), "--bytes", "65536"),
        *("--work", "update", "--repeats", str(repeats)),
    )
    values = [[(7 * k + 3 * i) % 1021 for i in range(head // 8)] for k in range(arrays)]
    for repeat in range(repeats + 1):
        for i in range(1, head // 8):
            for k in range(arrays):
                values[k][i] = values[(k + 1) % arrays][i - 1] + 1 + repeat
    of_thread = checksum_of([value for array in values for value in array])
    assert int(got["checksum"], 16) == checksum_of([of_thread])


def test_streams_touches_the_heads_alone() -> None:
    arguments = ("--arrays", "16", "--bytes", str(64 << 20), "--repeats", "10", "--work", "update")
    # What the parent has had counts too until the program begins: so it is a small one.
    parent = "import resource, subprocess as s, sys\ns.run(sys.argv[1:], check=True, stdout=s.DEVNULL)\n"
    parent += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    command = [sys.executable, "-I", "-c", parent, BUILD / "streams", *arguments]
    most = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # Of 1 GiB; a huge page for each array is 32 MiB.
    assert int(most) < 100 << 10


@pytest.mark.parametrize(
    ("gap", "distinct"), [(4096, 1), (1 << 20, 1), (1056768, 1), (4096 + 64, 16), (4096 + 1024, 4)]
)
def test_streams_start_a_gap_apart(gap: int, distinct: int) -> None:
    got = run(
        *("streams", "--memory", "mmap", "--gap", str(gap), "--bytes", "4096", "--arrays", "16"),
        *("--repeats", "1"),
    )
    assert got["distinct_starts"] == distinct


@pytest.mark.parametrize(("streams", "distinct"), [(1, 2), (2, 4), (3, 6), (8, 16)])
def test_alias4k_pads_evenly(streams: int, distinct: int) -> None:
    got = run("alias4k", "--memory", "padded", "--streams", str(streams), "--repeats", "1")
    assert got["distinct_starts"] == distinct
    # Whole lines.
    assert got["distance"] == 4096 // (2 * streams) // 64 * 64


def test_mhd_like_pads_evenly() -> None:
    def starts(memory: str, arrays: int) -> int:
        got = run("mhd-like", "--memory", memory, "--grid", "16", "--steps", "1", "--arrays", str(arrays))
        return int(got["distinct_starts"])

    assert [starts("aligned", 8), starts("aligned", 12)] == [1, 1]
    assert [starts("padded", 8), starts("padded", 12)] == [8, 12]


@pytest.mark.parametrize("offset", [0, 8, 64, 2048, 4088])
@pytest.mark.parametrize("streams", [1, 2])
def test_alias4k_puts_y_where_it_says(offset: int, streams: int) -> None:
    arguments = ("--offset", str(offset), "--streams", str(streams), "--repeats", "1")
    assert run("alias4k", *arguments)["distance"] == offset


@pytest.mark.parametrize("variant", ["original", "rewritten"])
@pytest.mark.parametrize("streams", range(1, 9))
@pytest.mark.parametrize("work", ["move", "mesh"])
def test_alias4k_computes_what_it_says(variant: str, streams: int, work: str) -> None:
    count = 40
    got = run(
        *("alias4k", "--variant", variant, "--streams", str(streams), "--work", work),
        *("--head", str(8 * count), "--repeats", "2", "--memory", "malloc"),
    )
    arrays = [[checksum_add(k, i) for i in range(count)] for k in range(2 * streams)]
    xs, ys = arrays[::2], arrays[1::2]
    for i in range(1, count):
        for k in range(streams):
            if work == "move":
                xs[k][i] = ys[k][i - 1]
            else:
                xs[k][i] = (ys[(k + 1) % streams][i - 1] + 1) & WORD
                ys[k][i] = (3 * xs[k][i - 1]) & WORD
    expected = checksum_of([array[k][i] for i in range(count) for k in range(streams) for array in (xs, ys)])
    assert int(got["checksum"], 16) == expected


@pytest.mark.parametrize(("size", "stride"), [(64, 64), (4096, 64), (70016, 64), (1 << 20, 8192), (4000, 8)])
def test_array_sweep_reads_all_places(size: int, stride: int) -> None:
    places = size // stride
    checksums = {}
    for walk in ("stride", "chase", "pages"):
        got = run(
            *("array-sweep", "--bytes", str(size), "--stride", str(stride), "--walk", walk),
            *("--repeats", "3", "--memory", "small"),
        )
        assert got["loads"] == 3 * places
        checksums[walk] = int(got["checksum"], 16)
    assert checksums["stride"] == checksum_of(list(range(places)))
    if places > 100:
        assert checksums["stride"] not in (checksums["chase"], checksums["pages"])
        # Where there is one page, or each place has its own, page after page is any order.
        one_order = size <= 4096 or stride >= 4096
        assert (checksums["chase"] == checksums["pages"]) == one_order


@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="the system has no transparent huge pages"
)
def test_huge_pages_are_had_where_they_are_asked_for() -> None:
    def kib(*arguments: str) -> int:
        return int(run(*arguments, "--repeats", "1")["huge_kib"])

    sweep = ("array-sweep", "--bytes", str(4 << 20), "--memory")
    assert kib(*sweep, "small") == 0
    # The system may have none to give, but then none at all.
    assert kib(*sweep, "huge") % 2048 == 0
    streams = ("streams", "--arrays", "4", "--memory", "mmap", "--huge")
    assert kib(*streams, "off") == 0
    if kib(*sweep, "huge") == 4096:
        assert kib(*streams, "on") in (2048, 4096)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_mhd_like_approaches_the_solution(axis: str) -> None:
    def error(grid: int) -> float:
        arguments = ("--problem", f"wave-{axis}", "--grid", str(grid), "--steps", str(grid))
        got = run("mhd-like", *arguments)
        # About a third of the way, in any number of steps.
        assert 0.3 < got["time"] < 0.4
        return float(got["wave_error"])

    coarse, middle, fine = error(16), error(32), error(64)
    # A scheme of first order: half the width, half the error.
    assert coarse < 0.3
    assert 1.7 < coarse / middle < 2.1
    assert 1.85 < middle / fine < 2.1


def test_mhd_like_treats_both_axes_alike() -> None:
    arguments = ("mhd-like", "--grid", "24", "--steps", "9", "--problem")
    x = run(*arguments, "wave-x")
    y = run(*arguments, "wave-y")
    assert x["wave_error"] == y["wave_error"]
    assert x["time"] == y["time"]


def test_mhd_like_conserves_mass_and_energy() -> None:
    got = run("mhd-like", "--grid", "48", "--steps", "200")
    assert got["mass"] == pytest.approx((5 / 3) ** 2, abs=1e-8)
    # Of the gas, the flow and the field: each of their squares is a half on average.
    assert got["energy"] == pytest.approx(5 / 2 + (5 / 3) ** 2 / 2 + 1 / 2, abs=1e-8)
    assert got["mass_error"] < 1e-12
    assert got["energy_error"] < 1e-12
    assert got["time"] > 0.4
    assert got["wave_error"] is None


def test_mhd_like_needs_not_keep_what_it_can_work_out() -> None:
    results = {
        run("mhd-like", "--grid", "32", "--steps", "9", "--arrays", n)["checksum"] for n in ("8", "12")
    }
    assert len(results) == 1
