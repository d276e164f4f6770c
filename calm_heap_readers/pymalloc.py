"""Reads the pools of CPython's own allocator, for objects of up to 512 bytes.

pymalloc maps arenas, and divides them into pools with blocks of one size. A pool begins with a header of 48
bytes, which repeats the size in two ways and counts the pool's blocks in use: by that a pool is recognized,
as no symbol leads to the arenas of a stripped Python.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calm.commands.explain.model import Heap, Process, SizeClass, estimate, exact, merged
from calm.core.proc import Mapping
from calm_heap_readers.memory import Memory, Words, field, function, images
from calm_heap_readers.versions import layout, unknown

_FUNCTION = "PyObject_Malloc"
_NAME = "pymalloc"
PYTHON = re.compile(r"/(?:lib)?python(\d(?:\.\d+t?)?)[^/]*$")
_HEADER_BYTES = 48
_ALIGNMENT = 16
_CLASSES = 32
_PAGE = np.int64(4096)
# Sizes of a pool and of an arena.
_LAYOUTS = {"pools of 16 KiB": (16 << 10, 1 << 20), "pools of 4 KiB": (4 << 10, 256 << 10)}
_LOOKS_PER_ARENA = 8
_LEAST_POOLS = 4
_MAX_LOOKS = 1 << 17
"""Headers that are read at most, of each form: of more, one in so many is, and stands for its neighbours."""
_NOTE = "pymalloc's pools are recognized by their headers, and what is free in them is not in its records"


@dataclass(frozen=True)
class _Pools:
    """The pools that were found, by address, and their headers. Each stands for so many."""

    addresses: Words
    headers: npt.NDArray[np.uint8]
    each: int


def heaps(process: Process) -> tuple[Heap, ...]:
    """A `Reader`. One heap at most: several Pythons in a process have pools of the same form."""
    found = ((each, PYTHON.search(each.path)) for each in images(process))
    pythons = ((each, match[1]) for each, match in found if match and function(process, each, _FUNCTION))
    image, version = next(pythons, (None, ""))
    if image is None:
        return ()
    library = Path(image.path).name
    form = _LAYOUTS.get(layout(_NAME, version))
    if form is None:
        return (replace(unknown(_NAME, version), library=library),)
    pools = _pools(Memory(process), *form)
    return (_heap(library, version, pools, form[0]),) if len(pools.addresses) >= _LEAST_POOLS else ()


def _pools(memory: Memory, pool_bytes: int, arena_bytes: int) -> _Pools:
    """Looks at a few places in what may be an arena, and then at all pools near those that are one."""
    mappings = [each for each in memory.writable if not each.path and each.end - each.start >= arena_bytes]
    step = arena_bytes // _LOOKS_PER_ARENA
    while sum((each.end - each.start) // step for each in mappings) > _MAX_LOOKS and step < arena_bytes:
        step *= 2
    candidates = []
    for mapping in mappings:
        looks = _present(memory, mapping, _multiples(mapping.start, mapping.end, step))[:_MAX_LOOKS]
        marks = _valid(memory, looks, pool_bytes)[0].tolist()
        near = merged((max(mark - arena_bytes, mapping.start), mark + arena_bytes) for mark in marks)
        for start, end in near:
            places = _multiples(start, min(end, mapping.end - pool_bytes + 1), pool_bytes)
            candidates.append(_present(memory, mapping, places))
    addresses = np.concatenate(candidates) if candidates else np.empty(0, np.uint64)
    each = max(1, -(-len(addresses) // _MAX_LOOKS))
    return _Pools(*_valid(memory, addresses[::each], pool_bytes), each)


def _multiples(start: int, end: int, step: int) -> Words:
    """The addresses in a range that a step divides."""
    return np.arange(start + -start % step, end, step, dtype=np.uint64)


def _present(memory: Memory, mapping: Mapping, addresses: Words) -> Words:
    """Those that are resident: no other one is read."""
    present = memory.process.present(mapping.start, mapping.end)
    if present is None:
        return addresses
    pages = (addresses - np.uint64(mapping.start)) // np.uint64(memory.process.page)
    is_present: npt.NDArray[np.bool_] = present[pages.astype(np.int64)]
    return addresses[is_present]


def _headers(memory: Memory, addresses: Words) -> npt.NDArray[np.uint8]:
    """A row for each address, of zeros where it cannot be read: they are too far apart for one read."""
    nothing = bytes(_HEADER_BYTES)
    rows = b"".join(memory.read(address, _HEADER_BYTES) or nothing for address in addresses.tolist())
    return np.frombuffer(rows, np.uint8).reshape(-1, _HEADER_BYTES)


def _valid(memory: Memory, addresses: Words, pool_bytes: int) -> tuple[Words, npt.NDArray[np.uint8]]:
    """Those at which a pool begins, and their headers."""
    rows = _headers(memory, addresses)
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


def _heap(library: str, version: str, pools: _Pools, pool_bytes: int) -> Heap:
    rows, each = pools.headers, pools.each
    sizes, used = _sizes(rows), field(rows, 0, 4).astype(np.int64)
    blocks = (pool_bytes - _HEADER_BYTES) // sizes
    # Blocks behind this were never handed out, and their pages not touched.
    carved = np.minimum(-(-field(rows, 40, 4).astype(np.int64) // _PAGE) * _PAGE, pool_bytes)
    in_use = used * sizes
    classes = []
    for size in np.unique(sizes).tolist():
        of_size = sizes == size
        holding = int(np.count_nonzero(of_size & (used > 0))) * each
        total, in_pool = int(used[of_size].sum()) * each, int(blocks[of_size][0])
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
    metadata = len(rows) * _HEADER_BYTES * each
    return Heap(
        allocator=_NAME,
        version=version,
        footprint=estimate(int(carved.sum()) * each),
        in_use=estimate(int(in_use.sum()) * each),
        cached=exact(0),
        retained=exact(0),
        fragmentation=estimate(int((carved - in_use).sum()) * each - metadata),
        metadata=estimate(metadata),
        movable=estimate(sum(one.movable for one in classes)),
        classes=tuple(classes),
        ranges=merged((start, start + each * pool_bytes) for start in pools.addresses.tolist()),
        notes=(f"{_NOTE}{f'; one in {each} was read' if each > 1 else ''}.",),
        library=library,
    )
