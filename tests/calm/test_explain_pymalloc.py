"""calm explain: the pools of CPython's own allocator."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from calm_helpers import ROOT

from calm.commands.explain import picture, process
from calm.commands.explain.readers import readers
from calm_heap_readers import pymalloc

MIB = 1 << 20
HOLD = """
import sys
held = [{"number": i, "text": str(i)} for i in range(200000)][::3]
print(sys.getallocatedblocks(), flush=True)
sys.stdin.read()
"""
# Zeros, ones, and pages that begin as a pool would but for one field.
NOISE = """
import mmap, struct, sys
place = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
header = struct.pack("<QQQQIIII", 3, 0, 0, 0, 0, 5, 48 + 2 * 96, (16 << 10) - 80)
for at in range(4 << 20, 12 << 20, 4096):
    place[at : at + 48] = header if at % 8192 else b"\\xff" * 48
print(0, flush=True)
sys.stdin.read()
"""


@contextmanager
def running(program: str, **variables: str) -> Iterator[tuple[int, int]]:
    """The process, and the number that it printed."""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONMALLOC": "pymalloc"} | variables,
    ) as child:
        assert child.stdout is not None
        yield child.pid, int(child.stdout.readline())
        child.communicate()


@pytest.mark.parametrize("preload", ["", "libcalmalloc.so"])
def test_blocks_are_those_that_python_counts(preload: str) -> None:
    library = {"LD_PRELOAD": str(ROOT / "build/release" / preload)} if preload else {}
    with running(HOLD, **library) as (pid, told), process.sample(pid) as found:
        (heap,) = pymalloc.heaps(found)
        whole = picture.picture(found, readers())
    assert heap.title.startswith("pymalloc in ")
    assert 0.98 * told < sum(each.used for each in heap.classes) <= told
    parts = (heap.in_use, heap.cached, heap.retained, heap.fragmentation, heap.metadata)
    assert sum(each.bytes for each in parts) == heap.footprint.bytes
    assert heap.footprint.bytes > 40 * MIB > 30 * MIB > heap.in_use.bytes
    # What is left over are mappings of the interpreter and of the loader.
    assert whole.bytes("other") < 4 * MIB
    assert heap.title in {each.title for each in whole.heaps}
    assert whole.parts["fragmentation"].certainty == "estimate"


def test_a_large_heap_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pool in so many stands for its neighbours, so that tens of GiB take no longer."""
    monkeypatch.setattr(pymalloc, "_MAX_LOOKS", 600)
    with running(HOLD) as (pid, told), process.sample(pid) as found:
        (heap,) = pymalloc.heaps(found)
        whole = picture.picture(found, readers())
    assert re.search(r"one in \d+ was read", heap.notes[0])
    assert 0.9 * told < sum(each.used for each in heap.classes) < 1.1 * told
    assert whole.bytes("other") < 8 * MIB


def test_without_pools() -> None:
    with running(HOLD, PYTHONMALLOC="malloc") as (pid, _), process.sample(pid) as found:
        assert pymalloc.heaps(found) == ()


def test_what_resembles_a_pool() -> None:
    """Memory of a Python process that is none of its pools'."""
    with running(NOISE) as (pid, _), process.sample(pid) as found:
        (heap,) = pymalloc.heaps(found)
    assert heap.footprint.bytes < 8 * MIB


def test_a_process_without_python() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            with process.sample(child.pid) as found:
                assert pymalloc.heaps(found) == ()
        finally:
            child.kill()
