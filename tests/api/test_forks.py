"""Forks of programs that do not know the allocator: handlers, files, signals, and the cost of a fork."""

from __future__ import annotations

import itertools

import pytest
from api_helpers import GLIBC, LINKED, MODES, OURS, PRELOAD, STATIC, Programs


@pytest.mark.parametrize(("case", "handled"), [("handlers", 104), ("handlers-fork", 208)])
@pytest.mark.parametrize(("way", "mode"), [(GLIBC, ""), *itertools.product(OURS, MODES)])
def test_handlers_that_allocate(programs: Programs, way: str, mode: str, case: str, handled: int) -> None:
    """Registered before any constructor ran. For those inside the locks, see test_fork_order.c."""
    assert programs.run(way, "forks", case, options=mode)["handled"] >= handled


@pytest.mark.parametrize(("way", "mode"), [(GLIBC, ""), *itertools.product([PRELOAD, LINKED], MODES)])
def test_handlers_that_lock(programs: Programs, way: str, mode: str) -> None:
    """A lock whose holder allocates: these handlers must run before the allocator's, which locks the heap."""
    programs.run(way, "forks", "handlers-lock", options=mode)


@pytest.mark.parametrize(("way", "mode"), [(GLIBC, ""), (STATIC, ""), *itertools.product([PRELOAD], MODES)])
def test_files(programs: Programs, way: str, mode: str) -> None:
    """A thread that flushes all files waits for a file whose holder allocates."""
    programs.run(way, "forks", "stdio", options=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["signals", "signals-and-threads"])
def test_signal_handlers_fork(programs: Programs, case: str, mode: str) -> None:
    programs.run(PRELOAD, "forks", case, options=mode)


@pytest.mark.parametrize("way", [PRELOAD, LINKED])
def test_copies_without_handlers(programs: Programs, way: str) -> None:
    """By `clone`, `_Fork` and the raw system call, while the allocator has a thread."""
    assert programs.run(way, "forks", "copies")["beside"] > 0


@pytest.mark.parametrize(("background", "more"), [("off", 0), ("on", 16)])
def test_a_fork_costs_little(programs: Programs, background: str, more: int) -> None:
    """The pages that parent and child copy, compared with a program under glibc's malloc.

    With a helper, the heap is locked over the fork, and the helper itself writes as well.
    """
    plain = programs.run(GLIBC, "forks", "cost")
    ours = programs.run(PRELOAD, "forks", "cost", options=f"background={background}")
    assert ours["parent_faults"] <= plain["parent_faults"] + 8 + more, ours.stdout
    assert ours["child_faults"] <= plain["child_faults"] + 12 + more, ours.stdout
