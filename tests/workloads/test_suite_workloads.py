"""The workloads after published benchmarks: they work, count their work, and detect errors."""

from __future__ import annotations

import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from ran_workloads import BUILD, LIBRARY, preloadable, run, start

SOURCES = BUILD.parents[1] / "workloads"

SMALL: dict[str, tuple[str, ...]] = {
    "alloc-test": ("--operations", "20000", "--slots", "500"),
    "bodytrack-like": ("--frames", "3", "--particles", "50", "--layers", "3"),
    "cache-scratch": ("--rounds", "20", "--writes", "300"),
    "cache-thrash": ("--rounds", "20", "--writes", "300"),
    "canneal-like": ("--elements", "3000", "--steps", "6", "--moves", "4000", "--batch", "200"),
    "cfrac": ("--number", "250133746951713895666541", "--primes", "150"),
    "dedup-like": ("--mib", "6", "--block", "3", "--piece", "256", "--chunk-bits", "12"),
    "espresso": ("--functions", "4", "--inputs", "8", "--outputs", "6", "--cubes", "40"),
    "exchange": ("--blocks", "100", "--rounds", "20", "--warm-up", "3", "--max", "500", "--freed-by", "next"),
    "fluidanimate-like": ("--particles", "3000", "--frames", "3"),
    "glibc-thread": (
        "--seconds",
        "0.2",
    ),
    "malloc-large": ("--rounds", "20", "--blocks", "4"),
    "malloc-latency": (
        *("--steps", "3000", "--blocks", "200", "--min", "24", "--max", "9000"),
        *("--burst", "70", "--every", "400", "--think", "50", "--clock", "monotonic"),
    ),
    "mleak": (
        "--rounds",
        "50",
    ),
    "mstress": ("--iterations", "3", "--steps", "2000", "--transfers", "50"),
    "rptest": (
        "--loops",
        "100",
    ),
    "streamcluster-like": ("--points", "1500", "--block", "500", "--dimensions", "16", "--most", "12"),
    "swaptions-like": ("--swaptions", "9", "--trials", "200", "--steps", "8", "--factors", "2"),
}
STAND_INS = (
    *("bodytrack-like", "canneal-like", "dedup-like"),
    *("fluidanimate-like", "streamcluster-like", "swaptions-like"),
)
THREADED = (
    *("alloc-test", "cache-scratch", "cache-thrash", "exchange", "glibc-thread", "malloc-latency", "mleak"),
    *("mstress", "rptest"),
    *STAND_INS,
)
FIXED_DURATION = ("glibc-thread",)
# Fields that depend on the machine, not on the workload.
MEASURED = {"seconds", "build_seconds", "rss_early_kib", "rss_late_kib"}


def work_of(printed: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in printed.items()
        if not (key in MEASURED or key.startswith("client_") or key.endswith("_ns"))
    }


@pytest.mark.parametrize("name", sorted(SMALL))
def test_parameters_are_as_given_and_defaults_as_the_help_says(name: str) -> None:
    printed = run(name, *SMALL[name])
    for option, value in zip(SMALL[name][::2], SMALL[name][1::2], strict=True):
        key = option.removeprefix("--")
        if key == "seconds":
            assert float(value) <= printed[key]
        else:
            assert str(printed[key]) == value
    helped = start(name, "--help")
    assert helped.returncode == 0
    assert helped.stdout.startswith(f"usage: {name} [options]\n")
    for option in SMALL[name][::2]:
        assert option in helped.stdout
    assert ("--threads N" in helped.stdout) == (name in THREADED)


@pytest.mark.parametrize("name", sorted(set(SMALL) - set(FIXED_DURATION)))
def test_the_work_repeats_exactly_under_any_allocator(name: str) -> None:
    first = work_of(run(name, *SMALL[name]))
    assert work_of(run(name, *SMALL[name])) == first
    assert work_of(run(name, *SMALL[name], preload=LIBRARY)) == first


@pytest.mark.parametrize("preload", [None, LIBRARY], ids=["glibc", "calmalloc"])
@pytest.mark.parametrize("threads", ["1", "4"])
@pytest.mark.parametrize("name", THREADED)
def test_any_number_of_threads(name: str, threads: str, preload: Path | None) -> None:
    printed = run(name, *SMALL[name], "--threads", threads, preload=preload)
    assert printed["threads"] == int(threads)


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize(
    "arguments", [("--no-such",), ("more",), ("--threads", "0"), ("--threads", "-1"), ("--threads", "1x")]
)
def test_bad_arguments_get_one_line(name: str, arguments: tuple[str, ...]) -> None:
    done = start(name, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert name in done.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("alloc-test", ("--min", "8", "--max", "15"), "--max is less than twice --min"),
        ("exchange", ("--min", "9", "--max", "8"), "--min is more than --max"),
        ("exchange", ("--freed-by", "partner", "--threads", "3"), "needs an even number of threads"),
        ("exchange", ("--freed-by", "all"), "one of self|next|partner"),
        ("glibc-thread", ("--min", "9", "--max", "8"), "--min is more than --max"),
        *[
            ("glibc-thread", ("--seconds", seconds), "a number from 0.001 to 1000000")
            for seconds in ("0", "0.0", "0.0001", "1.2345", "1.", ".5", "1.5x", "-1", "1000000.001", "1" * 20)
        ],
        ("malloc-large", ("--min", "9", "--max", "8"), "--min is more than --max"),
        ("malloc-large", ("--touch", "all"), "one of ends|pages"),
        ("malloc-latency", ("--min", "9", "--max", "8"), "--min is more than --max"),
        ("malloc-latency", ("--every", "0"), "a number from 1"),
        ("malloc-latency", ("--clock", "sun"), "one of counter|monotonic"),
        ("mleak", ("--fate", "kept"), "one of freed|left|lost"),
        ("rptest", ("--min", "17", "--max", "16"), "--min is more than --max"),
        ("rptest", ("--min", "15"), "a number from 16"),
        ("rptest", ("--sizes", "square"), "one of uniform|linear|exponential"),
        ("cfrac", ("--number", "12a"), "not a number of 2 to 60 digits"),
        ("cfrac", ("--number", ""), "not a number of 2 to 60 digits"),
        ("cfrac", ("--number", "1" * 61), "not a number of 2 to 60 digits"),
        ("cfrac", ("--number", "170141183460469231731687303715884105727"), "is prime"),
        ("cfrac", ("--number", "11"), "is prime"),
        ("espresso", ("--inputs", "17"), "a number from 2 to 16"),
        ("bodytrack-like", ("--particles", "0"), "a number from 1 to 100000"),
        ("canneal-like", ("--elements", "100", "--batch", "51"), "--batch is more than half of --elements"),
        ("dedup-like", ("--chunk-bits", "9"), "a number from 10 to 20"),
        ("dedup-like", ("--repeats", "101"), "a number from 0 to 100"),
        ("fluidanimate-like", ("--frames", "0"), "a number from 1"),
        ("streamcluster-like", ("--least", "9", "--most", "8"), "--least is more than --most"),
        ("swaptions-like", ("--steps", "1"), "a number from 2 to 1000"),
    ],
)
def test_arguments_that_make_no_sense_get_one_line(
    name: str, arguments: tuple[str, ...], message: str
) -> None:
    done = start(name, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


# Never frees, and lets each block of 100 bytes and more end on the first byte of the next one.
BROKEN_MALLOC = """
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

static _Atomic(char *) next;

static char *take(size_t alignment, size_t size) {
    if (next == NULL) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        next = mmap(NULL, 1UL << 38, PROT_READ | PROT_WRITE, flags, -1, 0);
    }
    char *at = atomic_fetch_add(&next, size + alignment - 1);
    return at + alignment - 1 - ((size_t)at + alignment - 1) % alignment;
}
void *malloc(size_t size) { return size < 100 ? take(16, size) : take(1, size - 1); }
void *calloc(size_t count, size_t size) { return take(16, count * size); }
void *aligned_alloc(size_t alignment, size_t size) { return take(alignment, size); }
void *realloc(void *old, size_t size) {
    void *new = take(16, size);
    return old == NULL ? new : memcpy(new, old, size / 2);
}
void free(void *block) { (void)block; }
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preloadable(tmp_path_factory.mktemp("broken"), BROKEN_MALLOC)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("alloc-test", ("--operations", "5000"), "a block does not hold"),
        ("glibc-thread", ("--seconds", "1", "--min", "100", "--max", "100"), "two blocks overlap"),
        ("malloc-large", ("--rounds", "50", "--min", "100000", "--max", "200000"), "a block does not hold"),
        ("malloc-latency", ("--steps", "2000", "--blocks", "100"), "a block does not hold"),
        ("mleak", ("--rounds", "20"), "a block does not hold"),
        ("mstress", ("--iterations", "2", "--steps", "2000"), "a block does not hold"),
        ("rptest", ("--loops", "100"), "a block does not hold"),
    ],
)
def test_blocks_that_overlap_are_found(
    name: str, arguments: tuple[str, ...], message: str, broken: Path
) -> None:
    done = start(name, *arguments, preload=broken)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_false_sharing_allocates_what_it_says() -> None:
    assert run("cache-thrash", *SMALL["cache-thrash"], "--threads", "3")["allocations"] == 60
    # One more for each thread: the block that it is given.
    assert run("cache-scratch", *SMALL["cache-scratch"], "--threads", "3")["allocations"] == 63


def test_alloc_test_has_mostly_small_blocks() -> None:
    got = run("alloc-test", "--operations", "200000", "--slots", "1000", "--threads", "1")
    # In the long run a slot is filled as often as emptied.
    assert 100000 <= got["allocations"] <= 101000
    # Each of the 13 doublings from 8 to 65,536 has 6 bytes of the average block, so much more than the least.
    assert 60 < got["bytes"] / got["allocations"] < 100
    narrow = run("alloc-test", "--operations", "20000", "--min", "64", "--max", "128", "--threads", "1")
    assert 64 <= narrow["bytes"] / narrow["allocations"] < 128


def test_mstress_allocates_one_block_a_step() -> None:
    got = run("mstress", *SMALL["mstress"], "--threads", "3")
    assert got["allocations"] == 3 * 3 * 2000


def test_rptest_hands_blocks_over_and_draws_sizes_as_asked() -> None:
    average = {}
    for sizes in ("uniform", "linear", "exponential"):
        got = run("rptest", "--loops", "200", "--sizes", sizes, "--threads", "3")
        assert got["allocations"] == 3 * 200 * 100 * 3 / 2
        average[sizes] = got["bytes"] / got["allocations"]
    # The middle of the range, a third of it, and one and a half sixteenths of it.
    assert average["uniform"] == pytest.approx(8008, rel=0.02)
    assert average["linear"] == pytest.approx(16 + 15984 / 3, rel=0.02)
    assert average["exponential"] == pytest.approx(16 + 15984 * 1.5 / 16, rel=0.05)
    none = run("rptest", "--loops", "200", "--cross", "0", "--threads", "3")
    assert none["allocations"] == 3 * 200 * 100


def test_malloc_large_replaces_within_its_range() -> None:
    got = run("malloc-large", "--rounds", "50", "--blocks", "4", "--min", "1000000", "--max", "2000000")
    assert got["allocations"] == 54
    assert 1.3e6 < got["bytes"] / 54 < 1.7e6


QUANTILES = ("p50", "p99", "p99_9", "p99_99", "max")
# Takes a millisecond more once in so many calls.
SLOW_MALLOC = """
#include <stddef.h>
#include <time.h>

extern void *__libc_malloc(size_t size);
static _Thread_local unsigned long calls;

void *malloc(size_t size) {
    if (++calls % ONE_IN == 0) {
        struct timespec begin, now;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        do {
            clock_gettime(CLOCK_MONOTONIC, &now);
        } while ((now.tv_sec - begin.tv_sec) * 1000000000L + now.tv_nsec - begin.tv_nsec < 1000000);
    }
    return __libc_malloc(size);
}
"""


def slow_malloc(folder: Path, one_in: int) -> Path:
    library = folder / f"slow-{one_in}.so"
    command = ["gcc", "-O1", "-fPIC", "-shared", f"-DONE_IN={one_in}", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=SLOW_MALLOC, text=True, check=True)
    return library


@pytest.mark.parametrize("threads", [1, 3])
def test_malloc_latency_times_every_call(threads: int) -> None:
    arguments = ("--steps", "5000", "--blocks", "300", "--burst", "100", "--every", "1000", "--min", "100")
    got = run("malloc-latency", *arguments, "--max", "199", "--threads", str(threads))
    assert got["allocations"] == threads * (5000 + 5 * 100)
    assert 100 * got["allocations"] <= got["bytes"] <= 199 * got["allocations"]
    for call in ("malloc", "free"):
        times = [got[f"{call}_{quantile}_ns"] for quantile in QUANTILES]
        assert times == sorted(times)
        assert times[-1] > 0


def test_malloc_latency_draws_each_doubling_alike() -> None:
    got = run("malloc-latency", "--steps", "50000", "--blocks", "100", "--min", "16", "--max", "1024")
    # Six doublings of which each block is 1.5 times the least on average.
    assert got["bytes"] / got["allocations"] == pytest.approx(1.5 * 16 * (2**6 - 1) / 6, rel=0.03)


@pytest.mark.parametrize("clock", ["counter", "monotonic"])
@pytest.mark.parametrize(("one_in", "quantile", "below"), [(50, "p99", "p50"), (500, "p99_9", "p99")])
def test_malloc_latency_finds_the_slow_calls(
    clock: str, one_in: int, quantile: str, below: str, tmp_path: Path
) -> None:
    arguments = ("--steps", "20000", "--blocks", "100", "--max", "256", "--burst", "0", "--clock", clock)
    got = run("malloc-latency", *arguments, preload=slow_malloc(tmp_path, one_in))
    # The cost of reading the clock is subtracted; a bucket is less than 1 % wide.
    assert got[f"malloc_{quantile}_ns"] >= 0.98e6 - got["clock_cost_ns"]
    assert got[f"malloc_{below}_ns"] < 0.5e6
    # No free is slow by itself.
    assert got["free_p50_ns"] < 0.5e6
    assert 0 < got["clock_cost_ns"] < 0.5e6


def test_malloc_latency_takes_its_thinking_time() -> None:
    steps = ("--steps", "2000", "--blocks", "10", "--max", "32")
    assert run("malloc-latency", *steps, "--think", "100000")["seconds"] >= 0.9 * 2000 * 1e-4


@pytest.mark.parametrize("fate", ["freed", "left"])
@pytest.mark.parametrize("preload", [None, LIBRARY], ids=["glibc", "calmalloc"])
def test_mleak_finds_no_leak_where_there_is_none(fate: str, preload: Path | None) -> None:
    got = run("mleak", "--rounds", "300", "--fate", fate, preload=preload)
    assert got["threads_started"] == 600
    assert got["allocations"] == 60000
    assert got["rss_late_kib"] <= got["rss_early_kib"] + 16384


def test_mleak_finds_a_leak() -> None:
    done = start("mleak", "--rounds", "300", "--fate", "lost", "--growth", "8192")
    assert done.returncode == 1
    assert "memory grew from" in done.stderr
    assert done.stdout == ""


def test_glibc_thread_measures_for_a_time() -> None:
    began = time.monotonic()
    got = run("glibc-thread", "--seconds", "0.25", "--threads", "3", "--min", "49", "--max", "49")
    assert 0.25 <= got["seconds"] <= time.monotonic() - began
    assert got["operations_per_second"] * got["ns_per_operation"] == pytest.approx(3e9, rel=0.001)


@pytest.mark.parametrize(
    ("number", "factors"),
    [
        ("15", ("3", "5")),
        ("10", ("2", "5")),
        ("1022117", ("1009", "1013")),
        ("1018081", ("1009", "1009")),
        ("1000036000099", ("1000003", "1000033")),
        ("18446744073709551617", ("274177", "67280421310721")),
        ("6850678087880260589378617837", ("73232092518569", "93547485156773")),
        ("526553932693478606158826113967", ("636389797578307", "827407879097381")),
    ],
)
def test_cfrac_factors(number: str, factors: tuple[str, str]) -> None:
    assert run("cfrac", "--number", number, "--primes", "200")["factors"] == list(factors)


def test_cfrac_factors_what_has_several_primes() -> None:
    number = 1009 * 100003 * 100019 * 1000003
    smaller, larger = run("cfrac", "--number", str(number), "--primes", "100")["factors"]
    assert int(smaller) * int(larger) == number
    assert 1 < int(smaller) <= math.isqrt(number)


@pytest.mark.parametrize("number", ["100000000000031000000000000", "1000000000100000000002379"])
def test_cfrac_numbers_of_any_form_multiply_back(number: str) -> None:
    smaller, larger = run("cfrac", "--number", number)["factors"]
    assert int(smaller) * int(larger) == int(number)


def test_espresso_minimises() -> None:
    got = run("espresso", *SMALL["espresso"])
    assert 0 < got["cubes_after"] < got["cubes_before"] <= 4 * 40
    # Functions of two inputs and one output need two cubes at most, and none where no input matters.
    least = run("espresso", "--functions", "50", "--inputs", "2", "--outputs", "1", "--cubes", "10")
    assert 25 <= least["cubes_after"] <= 100
    # More than one word of bits.
    wide = run("espresso", "--functions", "3", "--inputs", "10", "--outputs", "64", "--cubes", "30")
    assert wide["cubes_after"] > 0


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_finds_the_same_whatever_the_threads(name: str) -> None:
    found = []
    for threads in ("1", "2", "5"):
        printed = work_of(run(name, *SMALL[name], "--threads", threads))
        del printed["threads"]
        found.append(printed)
    assert found[0] == found[1] == found[2]
    assert len(found[0]["checksum"]) == 16


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("bodytrack-like", "--frames", "4"),
        ("canneal-like", "--steps", "7"),
        ("dedup-like", "--mib", "7"),
        ("fluidanimate-like", "--frames", "4"),
        ("streamcluster-like", "--points", "1600"),
        ("swaptions-like", "--trials", "210"),
    ],
)
def test_a_stand_in_with_more_to_do_finds_something_else(name: str, option: str, value: str) -> None:
    arguments = list(SMALL[name])
    before = run(name, *arguments)["checksum"]
    arguments[arguments.index(option) + 1] = value
    assert run(name, *arguments)["checksum"] != before


def test_dedup_like_stores_what_repeats_once() -> None:
    got = {
        repeats: run("dedup-like", *SMALL["dedup-like"], "--repeats", str(repeats))
        for repeats in (0, 50, 100)
    }
    # Nothing repeats; half of the segments; all but the first.
    assert got[0]["stored"] >= 0.99 * got[0]["chunks"]
    assert 0.4 * got[50]["chunks"] < got[50]["stored"] < 0.85 * got[50]["chunks"]
    assert got[100]["stored"] < 0.1 * got[100]["chunks"]
    # Words of 8 letters are two bytes and less in a match.
    assert 0.1 * (6 << 20) < got[0]["output_bytes"] < 0.8 * (6 << 20)
    coarse = run("dedup-like", *SMALL["dedup-like"][:-1], "14")
    assert 2 * coarse["chunks"] < got[50]["chunks"]


def test_canneal_like_moves_as_often_as_asked() -> None:
    few = run("canneal-like", "--elements", "3000", "--steps", "1", "--moves", "1", "--batch", "1000")
    assert few["swaps"] <= 1, "moves that are fewer than a batch are all that there are"


def test_canneal_like_shortens_its_wires() -> None:
    got = run("canneal-like", *SMALL["canneal-like"])
    assert got["wires_after"] < 0.95 * got["wires_before"]
    assert 0 < got["swaps"] < 6 * 4000


def test_streamcluster_like_finds_a_number_of_centres_in_range() -> None:
    got = run("streamcluster-like", *SMALL["streamcluster-like"])
    assert 10 <= got["centres"] <= 12


def test_swaptions_like_prices_do_not_depend_on_chance_much() -> None:
    few = run("swaptions-like", "--swaptions", "4", "--trials", "5000")["mean_price"]
    many = run("swaptions-like", "--swaptions", "4", "--trials", "20000")["mean_price"]
    assert few == pytest.approx(many, rel=0.05)
    assert 0 < many < 0.1


def test_bodytrack_like_does_not_lose_the_body() -> None:
    got = run("bodytrack-like", "--frames", "15", "--particles", "500")
    assert got["final_error"] <= 15


def test_fluidanimate_like_fills_its_cells() -> None:
    got = run("fluidanimate-like", *SMALL["fluidanimate-like"])
    # Twice the cells that the fluid takes at rest, at 12 particles a cell; some cells have more than 16.
    assert 2 * 3000 / 12 <= got["cells"] < 2 * 2 * 3000 / 12
    assert got["further_cells"] > 0


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_has_no_race_no_leak_and_no_wild_access(
    name: str, sanitizers: str, tmp_path: Path
) -> None:
    sources = [SOURCES / f"{name}.c", SOURCES / "support.c"]
    command = ["gcc", "-std=gnu17", "-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    subprocess.run([*command, "-o", tmp_path / name, *sources, "-pthread"], check=True)
    # A randomised address space can be more than the thread sanitizer knows.
    done = subprocess.run(
        ["setarch", "-R", tmp_path / name, *SMALL[name], "--threads", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["checksum"] == run(name, *SMALL[name])["checksum"]
