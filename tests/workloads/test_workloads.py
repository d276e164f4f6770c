"""The workloads do what they describe, and report it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

# As /proc/PID/syscall has it.
CLOCK_NANOSLEEP = {"x86_64": "230", "aarch64": "115"}[os.uname().machine]
BUILD = Path(__file__).resolve().parents[2] / "build/release"
MIB = 1024
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def start(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = BUILD / name
    assert path.is_file(), f"{path} is not built: run make"
    environment = os.environ | variables
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=False, env=environment)


def run(name: str, *arguments: str, **variables: str) -> dict[str, Any]:
    done = start(name, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    assert printed["workload"] == name
    return printed


def test_larson_hands_on_to_new_threads() -> None:
    few = run("larson", "--seconds", "0.2", "--blocks", "100", "--operations", "1000000000")
    assert few["threads_started"] == few["threads"] == 2
    began = time.monotonic()
    many = run("larson", "--seconds", "1", "--blocks", "100", "--operations", "1000", "--threads", "3")
    assert many["threads_started"] > 10
    # All threads are counted, not the last ones: each but the last of a chain did all its operations.
    done = many["operations_per_second"] * many["seconds"]
    # Both figures are rounded when they are printed.
    assert (many["threads_started"] - 3) * 1000 - 100 <= done <= many["threads_started"] * 1000 + 100
    assert 1 <= many["seconds"] <= time.monotonic() - began


def test_xmalloc_test_frees_what_others_allocated() -> None:
    began = time.monotonic()
    got = run(
        "xmalloc-test", "--seconds", "1", "--threads", "1", "--batch", "10", "--min", "1", "--max", "99"
    )
    assert got["frees_per_second"] * got["seconds"] > 1000
    assert 1 <= got["seconds"] <= time.monotonic() - began


def test_a_given_number_of_operations_ends_larson() -> None:
    got = run(
        "larson",
        "--threads",
        "3",
        "--blocks",
        "10",
        "--operations",
        "1000",
        "--generations",
        "4",
        "--seconds",
        "99",
    )
    assert (got["threads_started"], got["frees"], got["allocations"]) == (12, 12_000, 12_030)


@pytest.mark.parametrize("batches", ["1", "2", "100"])
def test_a_given_number_of_batches_ends_xmalloc_test(batches: str) -> None:
    """Also where few batches make producers and consumers wait for each other."""
    words = ("--threads", "3", "--batch", "10", "--batches", batches, "--rounds", "50", "--seconds", "99")
    got = run("xmalloc-test", *words)
    assert got["allocations"] == got["frees"] == 3 * 50 * 10


def test_every_thread_counts_its_blocks() -> None:
    assert run("listing1", "--threads", "3", "--rounds", "2", "--blocks", "50")["allocations"] == 300
    # Blocks of one size: each thread stops at the first that completes its share of the bytes.
    words = ("--threads", "3", "--min", "100", "--max", "100", "--bytes", "30000", "--rounds", "2")
    assert run("sawtooth", *words, "--after", "0")["allocations"] == 3 * 2 * 100


def test_glibc_simple_counts_each_number_of_blocks() -> None:
    for order in ("fifo", "lifo"):
        got = run("glibc-simple", "--pairs", "16000", "--order", order)
        each = [got[f"ns_per_pair_of_{count}"] for count in (1, 25, 100, 400, 1600)]
        assert min(each) <= got["ns_per_pair"] <= max(each)


@pytest.mark.parametrize("threads", ["1", "7"])
@pytest.mark.parametrize("order", ["lifo", "fifo", "random"])
@pytest.mark.parametrize("main", ["busy", "idle"])
def test_idle_burst_reads_memory_before_at_the_peak_and_after(threads: str, order: str, main: str) -> None:
    size = 32 * MIB * 1024
    arguments = ("--bytes", str(size), "--seconds", "0", "--threads", threads, "--order", order)
    got = run("idle-burst", *arguments, "--main", main)
    # Every byte is written, so all of it is resident at once; what the program remembers is there before.
    grown = got["rss_peak_kib"] - got["rss_before_kib"]
    assert size / 1024 <= grown < 1.25 * size / 1024
    assert got["retained_kib"] == got["rss_after_kib"] - got["rss_before_kib"]
    # Each of the 14 doublings has the same share of the bytes: on average a block has 168 of them.
    assert 120 < size / got["blocks"] < 240


def test_idle_burst_waits_and_its_threads_live_on() -> None:
    arguments = ("--bytes", "1000000", "--seconds", "1000", "--threads", "5")
    with subprocess.Popen([BUILD / "idle-burst", *arguments], stdout=subprocess.DEVNULL) as process:
        tasks = Path(f"/proc/{process.pid}/task")

        def sleeps_for_long() -> bool:
            return (tasks / str(process.pid) / "syscall").read_text().split()[0] == CLOCK_NANOSLEEP

        def states() -> list[str]:
            return [(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in tasks.iterdir()]

        try:
            wait_until(sleeps_for_long)
            wait_until(lambda: states() == ["S"] * 6)
            assert sleeps_for_long()
        finally:
            process.kill()
    began = time.monotonic()
    assert run("idle-burst", "--bytes", "1000000", "--seconds", "1")["seconds"] == 1
    assert time.monotonic() - began >= 1


def test_idle_burst_reads_a_cgroup(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text(f"{123 * 1024}\n")
    got = run("idle-burst", "--bytes", "1000000", "--seconds", "0", "--cgroup", str(tmp_path))
    assert [got[f"cgroup_{moment}_kib"] for moment in ("before", "peak", "freed", "after")] == [123] * 4
    got = run("idle-burst", "--bytes", "1000000", "--seconds", "0", "--cgroup", "/no/such")
    assert got["cgroup_before_kib"] is None


def cost_of(name: str, *arguments: str) -> tuple[dict[str, Any], resource.struct_rusage]:
    """The costs of threads that a workload prints, and the kernel's for the whole process."""
    process = subprocess.Popen([BUILD / name, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed: dict[str, Any] = json.loads(process.stdout.read())
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return printed, usage


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("listing1", ("--threads", "3", "--rounds", "1", "--blocks", "200", "--touch", "all")),
        ("ttest1", ("6", "3", "1000", "10000", "2000")),
        ("malloc-latency", ("--threads", "2", "--steps", "20000", "--blocks", "1000")),
    ],
)
def test_what_threads_cost_is_theirs_alone(name: str, arguments: tuple[str, ...]) -> None:
    printed, whole = cost_of(name, *arguments)
    assert 0 < printed["client_minor_faults"] < whole.ru_minflt
    spent = printed["client_user_s"] + printed["client_system_s"]
    # The kernel divides a thread's time in two by ticks; the sum is exact.
    assert 0 < spent <= whole.ru_utime + whole.ru_stime + 1e-3


@pytest.mark.skipif(
    "[always]" in (THP.read_text() if THP.exists() else ""), reason="a huge page is one fault"
)
def test_faults_of_all_threads_count() -> None:
    pages = 100 * 130048 // os.sysconf("SC_PAGESIZE")
    arguments = ("--rounds", "1", "--blocks", "100", "--touch")
    # Each block is a mapping of its own: a thread that begins late finds no pages that another left.
    mapped = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    for threads in (1, 4):
        got = run("listing1", "--threads", str(threads), *arguments, "all", **mapped)
        assert threads * pages <= got["client_minor_faults"] < 1.3 * threads * pages
    # Where only the head of each block is written, it is a page or two.
    got = run("listing1", "--threads", "4", *arguments, "first", **mapped)
    assert got["client_minor_faults"] < 4 * pages / 4


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("larson", ("--min", "9", "--max", "8"), "--min is more than --max"),
        ("xmalloc-test", ("--min", "65"), "--min is more than --max"),
        ("larson", ("--threads", "0"), "a number from 1"),
        ("glibc-simple", ("--order", "any"), "one of fifo|lifo"),
        ("idle-burst", ("--main", "asleep"), "one of idle|busy"),
    ],
)
def test_bad_arguments_get_one_line(name: str, arguments: tuple[str, ...], message: str) -> None:
    done = start(name, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_sawtooth_in_several_processes() -> None:
    """Each does all of it, and the one that prints waits for the others."""
    words = ("sawtooth", "--bytes", "20000000", "--rounds", "3", "--after", "0")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(*words, "--processes", "4")
    faults = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - usage.ru_minflt
    assert faults > 4 * 20_000_000 / resource.getpagesize()
    done = start(*words, "--processes", "3", LD_PRELOAD=str(BUILD / "libcalmalloc.so"))
    assert (done.returncode, done.stdout.count("sawtooth")) == (0, 1)
