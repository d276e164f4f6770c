"""malloc's guarantees while arenas are trimmed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from preload import REPOSITORY, environment, library
from ran import Ran, Run
from waiting import TIMEOUT_S

KIB, MIB = 1 << 10, 1 << 20


def assert_trimmed(ran: Ran) -> None:
    assert ran.stats["active"] is True
    assert ran.stats["trims"] > 0
    assert ran.stats["failed_purges"] == 0


@pytest.mark.parametrize(
    "case", ["calloc", "realloc", "memalign", "errno", "tall-contended", "older-arena", "too-much"]
)
def test_right_while_trimming(run: Run, case: str) -> None:
    assert_trimmed(run(case))


@pytest.mark.parametrize("way", ["thread", "library"])
def test_freed_address_space_serves_others(run: Run, run_plain: Run, way: str) -> None:
    run_plain("room", way)
    run("room", way)


@pytest.mark.parametrize("case", ["calloc", "realloc", "memalign", "errno", "too-much", "oom"])
def test_the_cases_hold_without_the_library(run_plain: Run, case: str) -> None:
    run_plain(case)


@pytest.mark.parametrize("how", ["prctl", "seccomp"])
def test_filter_that_kills(run: Run, run_plain: Run, how: str) -> None:
    """In a child, which leaves everything to glibc from then on; the parent continues."""
    run_plain("filtered", how)
    assert_trimmed(run("filtered", how))


@pytest.mark.parametrize("kernel", ["as-it-is", "without-wipe"])
def test_fork_under_load(run: Run, kernel: str) -> None:
    """By a kernel that wipes the library's state in a child, and by one that does not."""
    ran = run("forks", kernel)
    assert_trimmed(ran)
    children = ran.lines[:-1]
    assert len(children) == 52
    assert len({line["pid"] for line in ran.lines}) == len(ran.lines)
    for child in children:
        assert child["active"] is True
        assert child["failed_purges"] == 0
        # Its own, from zero: the parent's grow by tens of trims and hundreds of MiB.
        assert child["trims"] <= 10
        assert child["bytes_trimmed"] < 100 * MIB
    assert ran.stats["bytes_trimmed"] > 100 * MIB


@pytest.mark.parametrize("child", ["syscall-clone", "syscall-clone3", "syscall-vfork", "syscall-to-stack"])
def test_calls_that_return_twice(child: str) -> None:
    """By the library's `syscall`, on the stack of the caller, or on another one."""
    program = REPOSITORY / "build/release/tests/api/children-plain"
    assert program.is_file(), f"{program} is not built: cmake --build --preset release -t programs"
    env = environment(None) | {"LD_PRELOAD": str(library())}
    subprocess.run([program, "children", child], env=env, check=True, timeout=TIMEOUT_S)


def test_threads_that_come_and_go(run: Run) -> None:
    ran = run("churn")
    assert_trimmed(ran)
    assert ran.figures["kept"] < 8 * MIB


def test_before_and_after_main(run_early_late: Callable[[], Ran]) -> None:
    ran = run_early_late()
    assert ran.stats["active"] is True
    assert ran.stats["failed_purges"] == 0


@pytest.mark.parametrize("order", ["in-order", "reversed", "random"])
def test_several_heaps(run: Run, order: str) -> None:
    ran = run("tall", order)
    assert_trimmed(ran)
    assert ran.figures["peak"] > 290 * MIB
    assert ran.figures["kept"] < 4 * MIB + ran.stats["cpus"] * 8 * MIB  # what merged tops may leave


def test_out_of_memory(run: Run) -> None:
    stats = run("oom").stats
    assert stats["active"] is True
    assert stats["trims"] > 0


def test_locked_memory(run: Run) -> None:
    """1,200 blocks are freed three times. Each purge fails, and few are tried; fewer on fast CPUs."""
    stats = run("mlockall").stats
    assert stats["active"] is True
    assert stats["purge_calls"] == 0
    assert stats["bytes_trimmed"] == 0  # nothing counts as given back that was not
    assert 1 <= stats["failed_purges"] <= 1200


def test_vectored_call_denied(run: Run) -> None:
    ran = run("deny")
    assert_trimmed(ran)
    assert ran.stats["purge_method"] == "madvise"
    assert ran.stats["process_madvise_calls"] == 0
    assert ran.stats["purge_calls"] == ran.stats["ranges"] > 0


def test_mmap_threshold_rises(run: Run, run_plain: Run) -> None:
    ran = run("mmap-threshold", "1")
    assert ran.figures == run_plain("mmap-threshold", "1").figures
    assert ran.figures == {"first_mapped": 1, "second_mapped": 0}
    assert ran.stats["mmap_threshold_raises"] == 1
    assert ran.stats["user_mmap_threshold"] is False


def test_mmap_threshold_has_an_end(run: Run, run_plain: Run) -> None:
    ran = run("mmap-threshold", "40")
    assert ran.figures == run_plain("mmap-threshold", "40").figures
    assert ran.figures == {"first_mapped": 1, "second_mapped": 1}
    assert ran.stats["mmap_threshold_raises"] == 0


@pytest.mark.parametrize("name", ["mmap_threshold", "top_pad", "trim_threshold", "mmap_max"])
def test_mmap_threshold_is_the_users(run: Run, run_plain: Run, name: str) -> None:
    """Each of these settings disables glibc's dynamic threshold."""
    tunable = f"glibc.malloc.{name}={200 * KIB}"
    ran = run("mmap-threshold", "1", GLIBC_TUNABLES=tunable)
    assert ran.figures == run_plain("mmap-threshold", "1", GLIBC_TUNABLES=tunable).figures
    assert ran.figures == {"first_mapped": 1, "second_mapped": 1}
    assert ran.stats["mmap_threshold_raises"] == 0
    assert ran.stats["user_mmap_threshold"] is True
