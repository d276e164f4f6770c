"""The workloads on large arrays: they work wherever the arrays start, and detect errors."""

from __future__ import annotations

import json
import math
import mmap
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
# Fields that depend on the machine, not on the workload.
MEASURED = {
    "seconds",
    "ns_per_element",
    "ns_per_iteration",
    "cycles_per_iteration",
    "ns_per_load",
    "ns_per_cell",
}
# Fields that depend on the allocator and the system.
PLACED = {"distinct_starts", "distance", "huge_kib"}


def work_of(printed: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in printed.items() if key not in MEASURED | PLACED}


def checksum_add(checksum: int, number: int) -> int:
    """The same as in support.c: one step of splitmix64."""
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


# The last page of a large block is its first once more.
FOLDED_MALLOC = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

extern void *__libc_malloc(size_t size);
extern void __libc_free(void *block);

enum { PAGE = 4096 };

static const size_t ROOM = 1UL << 30;
static char *room;
static size_t used;

void *malloc(size_t size) {
    if (size < 100000) {
        return __libc_malloc(size);
    }
    if (room == NULL) {
        room = mmap(NULL, ROOM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    char *block = room + used;
    size_t whole = (size + PAGE - 1) / PAGE * PAGE;
    int file = memfd_create("folded", 0);
    if (ftruncate(file, whole) != 0) {
        abort();
    }
    mmap(block, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    mmap(block + whole - PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    close(file);
    used += whole;
    return block;
}
void free(void *block) {
    if (room == NULL || (char *)block < room || (char *)block >= room + ROOM) {
        __libc_free(block);
    }
}
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preloadable(tmp_path_factory.mktemp("broken"), BROKEN_MALLOC)


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preloadable(tmp_path_factory.mktemp("folded"), FOLDED_MALLOC)


def said_of(name: str, *arguments: str, preload: Path) -> str:
    done = start(name, *arguments, preload=preload)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    return done.stderr


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
    assert message in said_of(name, *arguments, *repeats, preload=broken)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("array-sweep", ("--walk", "stride"), "does not hold what was written to it"),
        ("array-sweep", ("--walk", "chase"), "leaves places out"),
        ("array-sweep", ("--walk", "pages"), "leaves places out"),
        (
            "mhd-like",
            ("--grid", "128", "--steps", "2", "--problem", "wave-y"),
            "what must be conserved is not",
        ),
    ],
)
def test_an_array_that_lies_on_itself_is_found(
    name: str, arguments: tuple[str, ...], message: str, folded: Path
) -> None:
    assert message in said_of(name, *arguments, preload=folded)


# How much is done in a pass, by what a run prints.
WORK: dict[str, Any] = {
    "alias4k": lambda ran: (ran["head"] // 8 - 1) * ran["streams"],
    "array-sweep": lambda ran: ran["bytes"] // ran["stride"],
    "mhd-like": lambda ran: ran["grid"] ** 2,
    "streams": lambda ran: (ran["head"] // 8 - (ran["work"] == "update")) * ran["arrays"],
}


@pytest.mark.parametrize(
    ("name", "key", "arguments"),
    [
        ("alias4k", "ns_per_element", ("--streams", "2", "--head", "64", "--repeats", "200000")),
        ("alias4k", "ns_per_element", ("--variant", "rewritten", "--head", "64", "--repeats", "200000")),
        ("array-sweep", "ns_per_load", ("--bytes", "16384", "--repeats", "20000")),
        ("array-sweep", "ns_per_load", ("--bytes", "16384", "--repeats", "20000", "--walk", "chase")),
        ("array-sweep", "ns_per_load", ("--bytes", "16384", "--repeats", "20000", "--walk", "pages")),
        ("mhd-like", "ns_per_cell", ("--grid", "32", "--steps", "50")),
        ("streams", "ns_per_element", ("--head", "64", "--repeats", "50000")),
        ("streams", "ns_per_element", ("--head", "64", "--repeats", "50000", "--work", "update")),
    ],
)
def test_all_that_is_counted_is_done(name: str, key: str, arguments: tuple[str, ...]) -> None:
    ran = run(name, *arguments)
    passes = ran["steps" if name == "mhd-like" else "repeats"]
    assert ran[key] * passes * WORK[name](ran) == pytest.approx(ran["seconds"] * 1e9, rel=0.01)
    # A time below that of any CPU means that work was optimized away. (A busy CPU only takes longer.)
    assert ran[key] > 0.02


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


def most_kib(name: str, *arguments: str) -> int:
    """The peak memory of a run."""
    # The parent's memory counts, too, until the program is executed, so the parent is small.
    parent = "import resource, subprocess as s, sys\ns.run(sys.argv[1:], check=True, stdout=s.DEVNULL)\n"
    parent += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    command = [sys.executable, "-I", "-c", parent, BUILD / name, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_streams_touches_the_heads_alone() -> None:
    arguments = ("--arrays", "16", "--bytes", str(64 << 20), "--repeats", "10", "--work", "update")
    # The arrays have 1 GiB in total; a huge page for each array is 32 MiB.
    assert most_kib("streams", *arguments) < 100 << 10


def test_mhd_like_uses_all_its_arrays() -> None:
    each = 512 * 512 * 8 >> 10
    few, many = (most_kib("mhd-like", "--grid", "512", "--steps", "1", "--arrays", n) for n in ("8", "12"))
    assert many - few > 3 * each


@pytest.mark.parametrize(
    ("gap", "distinct"), [(4096, 1), (1 << 20, 1), (1056768, 1), (4096 + 64, 16), (4096 + 1024, 4)]
)
def test_streams_start_a_gap_apart(gap: int, distinct: int) -> None:
    got = run(
        *("streams", "--memory", "mmap", "--gap", str(gap), "--bytes", "4096", "--arrays", "16"),
        *("--repeats", "1"),
    )
    assert got["distinct_starts"] == distinct


# calmalloc's large blocks start anywhere in their first page.
@pytest.mark.parametrize("preload", [None, LIBRARY])
@pytest.mark.parametrize(("streams", "distinct"), [(1, 2), (2, 4), (3, 6), (8, 16)])
def test_alias4k_pads_evenly(streams: int, distinct: int, preload: Path | None) -> None:
    arguments = ("--memory", "padded", "--streams", str(streams), "--repeats", "1")
    got = run("alias4k", *arguments, preload=preload)
    assert got["distinct_starts"] == distinct
    # Whole lines.
    assert got["distance"] == 4096 // (2 * streams) // 64 * 64


@pytest.mark.parametrize("preload", [None, LIBRARY])
@pytest.mark.parametrize("grid", ["16", "99"])
def test_mhd_like_pads_evenly(grid: str, preload: Path | None) -> None:
    def starts(memory: str, arrays: int) -> int:
        arguments = ("--memory", memory, "--grid", grid, "--steps", "1", "--arrays", str(arrays))
        return int(run("mhd-like", *arguments, preload=preload)["distinct_starts"])

    assert [starts("aligned", 8), starts("aligned", 12)] == [1, 1]
    assert [starts("padded", 8), starts("padded", 12)] == [8, 12]


@pytest.mark.parametrize("offset", [0, 8, 64, 2048, 4088])
@pytest.mark.parametrize("streams", [1, 2])
def test_alias4k_puts_y_where_it_says(offset: int, streams: int) -> None:
    arguments = ("--offset", str(offset), "--streams", str(streams), "--repeats", "1")
    got = run("alias4k", *arguments)
    assert got["distance"] == offset
    # Each as much further than the one before it.
    assert got["distinct_starts"] == len({k * offset % 4096 // 64 for k in range(2 * streams)})


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


# Mappings start a page off what the kernel would choose, what it is advised of them is told, and another file
# says what is in huge pages.
MISPLACED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

void *mmap(void *wanted, size_t size, int protection, int flags, int file, off_t offset) {
    void *(*real)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap");
    return (char *)real(wanted, size + 4096, protection, flags, file, offset) + 4096;
}

int madvise(void *start, size_t size, int advice) {
    fprintf(stderr, "%d %zu %zu\\n", advice, (size_t)start % (2 << 20), size);
    return 0;
}

FILE *fopen(const char *path, const char *mode) {
    FILE *(*real)(const char *, const char *) = dlsym(RTLD_NEXT, "fopen");
    return real(strcmp(path, "/proc/self/smaps_rollup") == 0 ? getenv("ROLLUP") : path, mode);
}
"""


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("array-sweep", "--bytes", "3000000", "--memory", "huge", "--walk", "chase"), mmap.MADV_HUGEPAGE),
        (("array-sweep", "--bytes", "3000000", "--memory", "small"), mmap.MADV_NOHUGEPAGE),
        (("array-sweep", "--bytes", "3000000", "--memory", "malloc", "--walk", "pages"), None),
        (("streams", "--arrays", "3", "--memory", "mmap", "--huge", "on"), mmap.MADV_HUGEPAGE),
        (("streams", "--arrays", "3", "--memory", "mmap", "--huge", "off"), mmap.MADV_NOHUGEPAGE),
        (("streams", "--arrays", "3", "--memory", "mmap"), None),
    ],
)
def test_the_kernel_is_asked_for_pages_of_the_size(
    arguments: tuple[str, ...], advice: int | None, tmp_path: Path
) -> None:
    misplaced = preloadable(tmp_path, MISPLACED, "-ldl")
    rollup = tmp_path / "rollup"
    rollup.write_text("560000000000-7fff00000000 ---p 00000000 00:00 0 [rollup]\nAnonHugePages:    6144 kB\n")
    done = start(*arguments, "--repeats", "1", preload=misplaced, ROLLUP=str(rollup))
    assert done.returncode == 0
    assert json.loads(done.stdout)["huge_kib"] == 6144
    # Whole huge pages, from a boundary of one on.
    assert done.stderr == ("" if advice is None else f"{advice} 0 {4 << 20}\n")


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


@pytest.mark.parametrize("axis", ["x", "y"])
def test_mhd_like_goes_as_far_as_the_fastest_signal_lets_it(axis: str) -> None:
    grid = 6
    speeds = []
    for cell in range(grid):
        angle = 2 * math.pi * (cell + 0.5) / grid
        # Density 1, a field of 1 along the axis, and one that rotates about it together with the fluid.
        sound, sideways = 5 / 3 * 0.1, 0.1 * math.sin(angle)
        both = sound + 1 + 0.1**2
        for velocity, field in ((0, 1), (sideways, sideways)):
            root = math.sqrt(both**2 - 4 * sound * field**2)
            speeds.append(abs(velocity) + math.sqrt((both + root) / 2))
    got = run("mhd-like", "--problem", f"wave-{axis}", "--grid", str(grid), "--steps", "1")
    assert got["time"] == pytest.approx(0.4 / max(speeds) / grid, abs=1e-6)


def test_mhd_like_conserves_mass_and_energy() -> None:
    got = run("mhd-like", "--grid", "48", "--steps", "200")
    assert got["mass"] == pytest.approx((5 / 3) ** 2, abs=1e-8)
    # The energies of the gas, the flow and the field; each of their squares averages a half.
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
