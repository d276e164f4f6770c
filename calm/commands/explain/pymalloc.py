"""Reads the pools of CPython's own allocator, for objects of up to 512 bytes.

pymalloc maps arenas, and divides them into pools with blocks of one size. A pool begins with a header of 48
bytes, which repeats the size in two ways and counts the pool's blocks in use: by that a pool is recognized,
as no symbol leads to the arenas of a stripped Python. Before Python 3.10 pools were of one page.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from calm.commands.explain.foreign import Memory, Words, field, images, merged
from calm.commands.explain.model import Heap, Process, SizeClass, estimate, exact
from calm.core.proc import Mapping

_FUNCTION = "PyObject_Malloc"
_PYTHON = "python"
_HEADER_BYTES = 48
_ALIGNMENT = 16
_CLASSES = 32
_PAGE = np.int64(4096)
# Sizes of a pool and of an arena, of today's Python and of those before 3.10.
_SHAPES = ((16 << 10, 1 << 20), (4 << 10, 256 << 10))
_LOOKS_PER_ARENA = 8
_LEAST_POOLS = 4
_MAX_LOOKS = 1 << 18
_NOTE = "pymalloc's pools are recognized by their headers, and what is free in them is not in its records."


def heaps(process: Process) -> tuple[Heap, ...]:
    """A `Reader`. One heap at most: several Pythons in a process have pools of the same form."""
    image = next(
        (
            each
            for each in images(process)
            if _PYTHON in Path(each.path).name and process.symbols(f"{Path(each.path).name}$", [_FUNCTION])
        ),
        None,
    )
    if image is None:
        return ()
    memory = Memory(process)
    for pool_bytes, arena_bytes in _SHAPES:
        addresses, rows = _pools(memory, pool_bytes, arena_bytes)
        if len(addresses) >= _LEAST_POOLS:
            return (_heap(Path(image.path).name, addresses, rows, pool_bytes),)
    return ()


def _pools(memory: Memory, pool_bytes: int, arena_bytes: int) -> tuple[Words, npt.NDArray[np.uint8]]:
    """The addresses of all pools, ascending, and their headers."""
    found: list[tuple[Words, npt.NDArray[np.uint8]]] = []
    left = _MAX_LOOKS
    for mapping in memory.writable:
        if mapping.path or mapping.end - mapping.start < arena_bytes:
            continue
        marks = _valid(memory, mapping, _multiples(mapping, arena_bytes // _LOOKS_PER_ARENA), pool_bytes)[0]
        if not len(marks):
            continue
        near = [(int(mark) - arena_bytes, int(mark) + arena_bytes) for mark in marks]
        parts = [
            np.arange(
                max(start, mapping.start + -mapping.start % pool_bytes), end, pool_bytes, dtype=np.uint64
            )
            for start, end in merged(near)
        ]
        candidates = np.concatenate(parts)
        candidates = candidates[candidates <= np.uint64(mapping.end - pool_bytes)][:left]
        left -= len(candidates)
        found.append(_valid(memory, mapping, candidates, pool_bytes))
    if not found:
        return np.empty(0, np.uint64), np.empty((0, _HEADER_BYTES), np.uint8)
    return np.concatenate([each for each, _ in found]), np.concatenate([rows for _, rows in found])


def _multiples(mapping: Mapping, step: int) -> Words:
    """The addresses in a mapping that a step divides."""
    return np.arange(mapping.start + -mapping.start % step, mapping.end, step, dtype=np.uint64)[:_MAX_LOOKS]


def _valid(
    memory: Memory, mapping: Mapping, addresses: Words, pool_bytes: int
) -> tuple[Words, npt.NDArray[np.uint8]]:
    """Those at which a pool begins, and their headers. What is not resident is not read."""
    present = memory.process.present(mapping.start, mapping.end)
    if present is not None:
        page = np.uint64(memory.process.page)
        addresses = addresses[present[((addresses - np.uint64(mapping.start)) // page).astype(np.int64)]]
    rows = memory.records(addresses, _HEADER_BYTES)
    count, free, number, size = field(rows, 0, 4), field(rows, 8, 8), field(rows, 36, 4), _sizes(rows)
    next_, last = field(rows, 40, 4).astype(np.int64), field(rows, 44, 4).astype(np.int64)
    inside = (free > addresses) & (free < addresses + np.uint64(pool_bytes))
    is_pool = (
        (number < _CLASSES)
        & (last == pool_bytes - size)
        & (next_ >= _HEADER_BYTES + size)
        & (next_ <= last + size)
        & (count.astype(np.int64) <= (pool_bytes - _HEADER_BYTES) // size)
        & ((free == 0) | inside)
    )
    return addresses[is_pool], rows[is_pool]


def _sizes(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The block sizes of pools."""
    return (np.minimum(field(rows, 36, 4), np.uint64(_CLASSES)).astype(np.int64) + 1) * _ALIGNMENT


def _heap(library: str, addresses: Words, rows: npt.NDArray[np.uint8], pool_bytes: int) -> Heap:
    sizes, used = _sizes(rows), field(rows, 0, 4).astype(np.int64)
    blocks = (pool_bytes - _HEADER_BYTES) // sizes
    # Blocks behind this were never handed out, and their pages not touched.
    carved = np.minimum(-(-field(rows, 40, 4).astype(np.int64) // _PAGE) * _PAGE, pool_bytes)
    in_use = used * sizes
    classes = []
    for size in np.unique(sizes).tolist():
        of_size = sizes == size
        holding = int(np.count_nonzero(of_size & (used > 0)))
        total, in_pool = int(used[of_size].sum()), int(blocks[of_size][0])
        classes.append(
            SizeClass(
                size=size,
                used=total,
                cached=0,
                free=holding * in_pool - total,
                bytes=holding * pool_bytes,
                movable=(holding - -(-total // in_pool)) * pool_bytes,
            )
        )
    metadata = len(addresses) * _HEADER_BYTES
    return Heap(
        allocator="pymalloc",
        version="",
        footprint=estimate(int(carved.sum())),
        in_use=estimate(int(in_use.sum())),
        cached=exact(0),
        retained=exact(0),
        fragmentation=estimate(int((carved - in_use).sum()) - metadata),
        metadata=estimate(metadata),
        movable=estimate(sum(each.movable for each in classes)),
        classes=tuple(classes),
        ranges=merged((int(each), int(each) + pool_bytes) for each in addresses),
        notes=(_NOTE,),
        library=library,
    )
