"""The readers of allocators, in the order in which their libraries would answer malloc."""

from __future__ import annotations

from collections.abc import Callable

from calm.commands.explain import calmalloc, glibc, jemalloc, mimalloc, pymalloc
from calm.commands.explain.model import Heap, Process, Reader


def _one(read: Callable[[Process], Heap | None]) -> Reader:
    """Of an allocator that a process has once at most."""

    def heaps(process: Process) -> tuple[Heap, ...]:
        heap = read(process)
        return () if heap is None else (heap,)

    return heaps


READERS: tuple[Reader, ...] = (
    _one(calmalloc.read),
    jemalloc.heaps,
    mimalloc.heaps,
    _one(glibc.read),
    pymalloc.heaps,
)
