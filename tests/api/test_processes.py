"""Forks, short-lived threads, code before and after main, libraries loaded late, signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from api_helpers import (
    GLIBC,
    LINKED,
    MIB,
    MODES,
    OFFLOAD,
    OURS,
    PRELOAD,
    STATIC,
    Programs,
    program,
    shared_library,
)

# Each case with its program.
CASES = {
    "forks-at-once": "processes",
    "fork-deep": "processes",
    "fork-in-flight": "processes",
    "child-frees": "processes",
    "fork-handlers": "processes",
    "spawn": "processes",
    "unregistered": "children",
    "own-area": "children",
    "detached": "children",
    "become-nobody": "processes",
    "many-at-once": "threads",
    "thread-ends": "threads",
    "thread-cancel": "threads",
    "main-ends-first": "threads",
}
# Each way to end, with the status that the program leaves by it.
ENDS = {"exit": 20, "_exit": 21, "execve": 22, "pthread_exit": 23, "abort": -signal.SIGABRT}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_processes(programs: Programs, case: str, mode: str) -> None:
    programs.run(PRELOAD, CASES[case], case, options=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("end", "status"), ENDS.items())
def test_ends_while_busy(programs: Programs, end: str, status: int, mode: str) -> None:
    """While three threads allocate. As in any process that ends so, there is no output."""
    for _ in range(3):
        assert (
            programs.run(PRELOAD, "threads", "end-while-busy", end, options=mode, status=status).stderr == ""
        )


@pytest.mark.parametrize("background", ["on", "off"])
@pytest.mark.parametrize("mode", MODES)
def test_fork_storm(programs: Programs, mode: str, background: str) -> None:
    """While three other threads allocate."""
    forks = "100" if mode == "test_cache=auto" else "40"
    programs.run(PRELOAD, "processes", "fork-storm", forks, options=f"{mode},background={background}")


@pytest.mark.parametrize(
    "case", ["child-frees", "thread-ends", "thread-cancel", "fork-deep", "spawn", "unregistered"]
)
@pytest.mark.parametrize("way", [GLIBC, LINKED, STATIC])
def test_processes_linked(programs: Programs, way: str, case: str) -> None:
    programs.run(way, CASES[case], case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", [GLIBC, PRELOAD, LINKED])
def test_threads_of_an_unregistered_creator(programs: Programs, way: str, mode: str) -> None:
    programs.run(way, "children", "unregistered-creator", options=mode)


# How a child comes to run on the memory and the thread-local storage of its parent. In static programs the
# C library's own clone is not seen.
CLONES = ["clone", "clone-without-vfork", "clone-killed"]
BY_SYSCALL = ["syscall-clone", "syscall-clone3", "syscall-vfork", "syscall-to-stack"]
CHILDREN = ["vfork", "vfork-twice", *CLONES, *BY_SYSCALL]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("child", CHILDREN)
def test_child_on_its_parents_memory(programs: Programs, child: str, mode: str) -> None:
    """While three other threads allocate."""
    programs.run(PRELOAD, "children", "children", child, options=mode)


@pytest.mark.parametrize("way", OURS)
def test_child_has_no_number(programs: Programs, way: str) -> None:
    programs.run(way, "children", "child-has-no-number")


@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("way", [GLIBC, LINKED, STATIC])
def test_child_on_its_parents_memory_linked(programs: Programs, way: str, child: str) -> None:
    if way == STATIC and child in CLONES:
        pytest.skip("not promised")
    programs.run(way, "children", "children", child)


@pytest.mark.parametrize(("policy", "most"), [("paper", 16 * MIB), ("adaptive", 40 * MIB)])
def test_workers_of_a_server_cost_little(programs: Programs, policy: str, most: int) -> None:
    """Twelve children of a parent that holds 64 MiB. Each child allocated and freed 20 MiB five times."""
    ran = programs.run(PRELOAD, "processes", "prefork", "12", options=f"background=off,test_policy={policy}")
    assert 0 < ran["max_dirty"] < most
    assert ran["max_above"] < 6 * MIB


@pytest.mark.parametrize("mode", MODES)
def test_ten_thousand_threads(programs: Programs, mode: str) -> None:
    """In waves of 50. The memory kept does not grow with their number; costly memory makes growth visible."""
    options = f"{mode},background=off,test_policy=paper,memory_per_cpu=1"
    ran = programs.run(PRELOAD, "threads", "churn", "200", options=options)
    # The memory prepared for threads differs from wave to wave.
    assert ran["grown_late"] <= ran["grown_early"] + (8 if mode == OFFLOAD else 2) * MIB
    assert ran["kept"] < 24 * MIB


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", [GLIBC, *OURS])
def test_before_and_after_main(programs: Programs, way: str, mode: str) -> None:
    assert programs.run(way, "early_late", program("plugin-0.so"), options=mode)["after_main"] == 1


@pytest.fixture(scope="session")
def hogs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Libraries that each use a little of the thread-local memory that late libraries share."""
    folder = tmp_path_factory.mktemp("hogs")
    made = []
    for size in (256, 32, 8):
        plugin = program(f"plugin-{size}.so").read_bytes()
        for i in range(60):
            made.append(folder / f"hog-{size}-{i}.so")
            made[-1].write_bytes(plugin)
    return made


@pytest.mark.parametrize("options", ["", "test_cache=locked", "background=off", OFFLOAD])
def test_opened_late(programs: Programs, hogs: list[Path], options: str) -> None:
    """Beside glibc's malloc, with few bytes left of the thread-local memory that late libraries share."""
    ran = programs.run(GLIBC, "late_open", shared_library(), *hogs, options=options)
    assert ran["taken"] > 0
    assert ran["used"] == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["timers", "moves", "both"])
def test_interrupted_at_every_instruction(programs: Programs, case: str, mode: str) -> None:
    if case != "timers" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is only one CPU to move to")
    ran = programs.run(PRELOAD, "signals", case, "0.7", options=mode)
    assert ran["operations"] > 20_000
    if case != "moves":
        assert ran["interrupts"] > 2000
    if case != "timers":
        assert ran["moves"] > 1000


@pytest.mark.long
@pytest.mark.timeout(8000)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "case", ["fork-storm", "forks-at-once", "fork-in-flight", "fork-handlers", "thread-ends"]
)
def test_processes_at_length(programs: Programs, case: str, mode: str) -> None:
    programs.run(PRELOAD, CASES.get(case, "processes"), case, "1000", options=mode, timeout=7000)


@pytest.mark.long
@pytest.mark.timeout(8000)
def test_interrupted_for_minutes(programs: Programs) -> None:
    for way in OURS:
        programs.run(way, "signals", "both", "90", timeout=2000)
