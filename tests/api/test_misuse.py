"""Misuse is reported when the block is flushed to the heap, at the latest, and aborts the program."""

from __future__ import annotations

import re
import signal

import pytest
from api_helpers import MODES, OFFLOAD, OURS, PRELOAD, Programs, Ran, complaints

SIZES = ["small", "middle", "run", "large"]

DOUBLE = [
    "double-free",
    "double-free-later",
    "double-free-after-trim",
    "double-free-elsewhere",
    "double-realloc",
]
CASES = [(case, size) for case in DOUBLE for size in SIZES]
CASES += [(case, size) for case in ("interior", "odd", "interior-realloc") for size in SIZES]
CASES += [("interior-page", size) for size in ("run", "large")]
CASES += [("foreign", kind) for kind in ("stack", "data", "code", "mapped", "low", "kernel", "odd")]
CASES += [("foreign-realloc", kind) for kind in ("stack", "data")]


def assert_named(ran: Ran, case: str, pointer: int) -> None:
    lines = complaints(ran.stderr)
    assert len(lines) == 1, f"{ran.command}: {ran.stderr}"
    found = re.match(r"calmalloc: (double free|invalid free): 0x([0-9a-f]+)\b", lines[0])
    assert found is not None, lines[0]
    # A block that was freed may be no block at all by then: its slab may be gone, or its run part of another.
    if not case.startswith("double"):
        assert found[1] == "invalid free", lines[0]
    elif case in ("double-free", "double-free-now", "double-free-elsewhere"):
        assert found[1] == "double free", lines[0]
    assert int(found[2], 16) == pointer, lines[0]


def pointer_of(ran: Ran) -> int:
    found = re.search(r"pointer 0x([0-9a-f]+)", ran.stdout)
    assert found is not None, ran.stdout
    return int(found[1], 16)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("case", "what"), CASES)
def test_named_and_ended(programs: Programs, case: str, what: str, mode: str) -> None:
    ran = programs.run(PRELOAD, "misuse", case, what, options=mode, status=-signal.SIGABRT)
    assert "lived" not in ran.figures
    assert_named(ran, case, pointer_of(ran))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("case", "what"), CASES)
def test_named_and_survived(programs: Programs, case: str, what: str, mode: str) -> None:
    """With misuse=warn the heap stays intact."""
    ran = programs.run(PRELOAD, "misuse", case, what, options=f"{mode},misuse=warn")
    assert ran["lived"] == 1
    assert_named(ran, case, pointer_of(ran))


LATE = "found after the call that freed it, as blocks left a cache; with CALM_OPTIONS=misuse=immediate it is"


@pytest.mark.parametrize(
    ("case", "what", "told"),
    [
        (
            "double-free-now",
            "small",
            r": free, in CPU cache \d+: a block of (\d+) bytes; slab .*; thread \d+$",
        ),
        ("double-free-later", "small", rf": free.*; {LATE}"),
        (
            "interior",
            "middle",
            rf": in use: \d+ bytes into the block 0x\w+ of \d+ bytes; .*; {LATE}",
        ),
        (
            "interior",
            "large",
            r": in use: \d+ bytes into the large block 0x\w+ of \d+ bytes; .*; thread \d+$",
        ),
        ("foreign", "stack", r": not in a heap of calmalloc; thread \d+$"),
    ],
)
def test_tells_what_the_pointer_is(programs: Programs, case: str, what: str, told: str) -> None:
    ran = programs.run(PRELOAD, "misuse", case, what, status=-signal.SIGABRT)
    [line] = complaints(ran.stderr)
    assert re.search(told, line), line
    assert told.endswith(LATE) == (LATE in line), line


@pytest.mark.feature("profile")
def test_tells_who_freed(programs: Programs) -> None:
    """By the call stack, without the library's own frames."""
    stderr = programs.run(PRELOAD, "misuse", "double-free-now", "small", status=-signal.SIGABRT).stderr
    frames = re.findall(r"^    #(\d+) 0x[0-9a-f]+(?: \((\S+)\+0x[0-9a-f]+\))?$", stderr, re.MULTILINE)
    assert [int(number) for number, _ in frames] == list(range(len(frames)))
    assert len(frames) >= 2
    assert not any("calmalloc" in module for _, module in frames)


@pytest.mark.parametrize("mode", MODES)
def test_names_no_innocent_thread(programs: Programs, mode: str) -> None:
    """A thread that holds the heap's lock next, or that a server answers, reports nothing as its own."""
    ran = programs.run(PRELOAD, "misuse", "among-innocents", "large", options=f"{mode},misuse=warn")
    lines = complaints(ran.stderr)
    named = [line.rpartition("; thread ")[2] for line in lines if LATE not in line]
    assert lines
    assert set(named) <= {str(int(ran["offender"]))}


def test_under_a_strict_filter_it_is_reported(programs: Programs) -> None:
    """By write(2) alone: the filter kills a process that makes most other system calls."""
    ran = programs.run(PRELOAD, "misuse", "strict-filter", "large", options="misuse=warn")
    assert len(complaints(ran.stderr)) == 1
    assert "went on" in ran.stdout


def test_without_caches_it_is_found_in_the_call(programs: Programs) -> None:
    ran = programs.run(
        PRELOAD, "misuse", "double-free-later", "small", options="misuse=immediate", status=-signal.SIGABRT
    )
    [line] = complaints(ran.stderr)
    assert line.startswith("calmalloc: double free: ")
    assert LATE not in line


@pytest.mark.parametrize("mode", [*MODES, f"{OFFLOAD},test_cache=off,test_sync=on"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ["double-free-now", "unaligned"])
def test_named_before_it_is_handed_out_again(programs: Programs, case: str, size: str, mode: str) -> None:
    ran = programs.run(PRELOAD, "misuse", case, size, options=f"{mode},misuse=warn")
    assert (ran["apart"], ran["lived"]) == (1, 1)
    assert_named(ran, case, pointer_of(ran))


@pytest.mark.parametrize("mode", [*MODES, f"{OFFLOAD},test_cache=off,test_sync=on"])
@pytest.mark.parametrize("size", ["run", "large"])
def test_named_at_the_end(programs: Programs, size: str, mode: str) -> None:
    """For blocks that no cache holds: at the library's destructor, at the latest."""
    for ending, status in (("abort", -signal.SIGABRT), ("warn", 0)):
        options = f"{mode},misuse={ending}"
        ran = programs.run(PRELOAD, "misuse", "double-free-at-exit", size, options=options, status=status)
        assert_named(ran, "double-free-at-exit", pointer_of(ran))


@pytest.mark.parametrize("way", OURS)
def test_in_each_way(programs: Programs, way: str) -> None:
    for case, what in (("double-free", "small"), ("interior", "middle"), ("foreign", "stack")):
        assert_named(ran := programs.run(way, "misuse", case, what, status=-6), case, pointer_of(ran))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
def test_stray_writes_hit_no_metadata(programs: Programs, size: str, mode: str) -> None:
    ran = programs.run(PRELOAD, "misuse", "scribble", size, options=mode)
    assert (ran["lived"], ran.stderr) == (1, "")


@pytest.mark.parametrize("mode", MODES)
def test_overruns_hit_no_metadata(programs: Programs, mode: str) -> None:
    ran = programs.run(PRELOAD, "misuse", "overrun", "middle", options=mode)
    assert (ran["lived"], ran.stderr) == (1, "")
