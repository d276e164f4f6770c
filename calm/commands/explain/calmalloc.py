"""Reads calmalloc's heap: spans, slabs, caches and free pages, by the layout that its table leads to.

src/heap/blocks_layout.h describes the layout. Nothing is locked: the descriptors are compared with the heap's
own count of used pages, and read again where the two differ.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from calm.commands.explain.model import (
    MAX_BYTES,
    UNKNOWN,
    Figure,
    Heap,
    Process,
    SizeClass,
    estimate,
    exact,
)
from calm.core.counters import NotATableError, Table, images, table_addresses

_MAGIC = b"calmblks"
_VERSION = 3
_LAYOUT = struct.Struct("<8sII7Q5HBB4xQHHI5Q6Q3Q3Q")
_RECORDS = slice(-6, -3)
_HEAP_RECORDS = slice(-12, -6)
_MAX_HEAPS = 256
_MAX_DEPOTS = 64
_READS = 4
_CHUNK = 4 << 20
# Reads of a heap that changes meanwhile differ by about what changes in a millisecond or two.
_TOLERANCE_PAGES, _TOLERANCE_SHARE = 64, 64


class _Layout(NamedTuple):
    """A `struct blocks_layout`. Its pointers are addresses of variables; `_of_heap` makes such of offsets."""

    magic: bytes
    version: int
    bytes: int
    heaps: int
    heap_count: int
    heap_bytes: int
    page_bytes: int
    spans: int
    spans_end: int
    span_bytes: int
    span_page: int
    span_pages: int
    span_used_blocks: int
    span_class: int
    span_state: int
    slab: int
    large: int
    pages: int
    page_users: int
    page_dirty: int
    class_bytes: int
    classes: int
    class_count: int
    segments: int
    segment_count: int
    segment_bytes: int
    heap_records: tuple[int, ...]
    records: tuple[int, ...]
    depots: int
    depot_count: int
    depot_bytes: int


_IN_HEAP = ("page_bytes", "spans", "spans_end", "span_bytes", "pages", "segments", "segment_count")


class _UnreadableError(Exception):
    """Memory of the heap's records cannot be read, or holds what it never should."""


@dataclass(frozen=True)
class _Blocks:
    """What the descriptors say, by class."""

    sizes: Any
    used: Any
    slabs: Any
    pages: Any
    """With a block, in use or cached."""
    large_pages: int
    large_blocks: int

    @property
    def used_pages(self) -> int:
        return int(self.pages.sum()) + self.large_pages


def _word(process: Process, address: int, width: int = 8) -> int:
    words = process.words(address, 1, width)
    if words is None:
        raise _UnreadableError
    return words[0]


def _layout(process: Process, address: int) -> _Layout:
    data = process.read(address, _LAYOUT.size)
    if data is None:
        raise _UnreadableError
    fields = _LAYOUT.unpack(data)
    lists = (fields[_HEAP_RECORDS], fields[_RECORDS])
    layout = _Layout._make((*fields[: _HEAP_RECORDS.start], *lists, *fields[_RECORDS.stop :]))
    if layout.magic != _MAGIC or layout.version != _VERSION or layout.bytes < _LAYOUT.size:
        raise _UnreadableError
    return layout


def _of_heap(layout: _Layout, address: int) -> _Layout:
    """The layout with the addresses of one heap's variables."""
    fields = {name: address + getattr(layout, name) for name in _IN_HEAP}
    return layout._replace(**fields, heap_records=tuple(address + each for each in layout.heap_records))


def _heaps(process: Process, layout: _Layout) -> list[_Layout]:
    """The layouts of the heaps that are in use."""
    first = _word(process, layout.heaps)
    count = min(_MAX_HEAPS, _word(process, layout.heap_count, 4)) if first else 0
    each = [_of_heap(layout, first + number * layout.heap_bytes) for number in range(count)]
    pages = [_word(process, heap.page_bytes) for heap in each]
    if not {*pages} <= {0, process.page}:
        raise _UnreadableError
    return [heap for heap, page in zip(each, pages, strict=True) if page]


def _array(process: Process, address: int, count: int, dtype: np.dtype[Any]) -> Any:  # noqa: ANN401
    """An array in the process's memory, read in pieces."""
    parts = []
    step = max(1, _CHUNK // dtype.itemsize)
    for first in range(0, count, step):
        size = min(step, count - first)
        data = process.read(address + first * dtype.itemsize, size * dtype.itemsize)
        if data is None:
            raise _UnreadableError
        parts.append(np.frombuffer(data, dtype))
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _spans(process: Process, layout: _Layout) -> Any:  # noqa: ANN401
    """The descriptors' fields that count."""
    base, end = _word(process, layout.spans), _word(process, layout.spans_end)
    size = _word(process, layout.span_bytes)
    if not base:
        end = 0
    if not 0 < size <= 1 << 16 or end * size > MAX_BYTES:
        raise _UnreadableError
    fields = {
        "page": ("<u4", layout.span_page),
        "pages": ("<u4", layout.span_pages),
        "used": ("<u2", layout.span_used_blocks),
        "class": ("u1", layout.span_class),
        "state": ("u1", layout.span_state),
    }
    formats, offsets = zip(*fields.values(), strict=True)
    if max(offsets) + 4 > size:
        raise _UnreadableError
    dtype = np.dtype(
        {"names": list(fields), "formats": list(formats), "offsets": list(offsets), "itemsize": size}
    )
    whole = _array(process, base, end, dtype)
    return whole[(whole["state"] == layout.slab) | (whole["state"] == layout.large)]


def _blocks(process: Process, layout: _Layout) -> _Blocks:
    """The blocks of all heaps."""
    count = _word(process, layout.class_count, 4)
    if not 0 < count <= 256 or not 4 <= layout.class_bytes <= 256:
        raise _UnreadableError
    classes = np.dtype(
        {"names": ["size"], "formats": ["<u4"], "offsets": [0], "itemsize": layout.class_bytes}
    )
    sizes = _array(process, layout.classes, count, classes)["size"].astype(np.int64)
    none = np.zeros(count, np.int64)
    found = _Blocks(sizes=sizes, used=none, slabs=none, pages=none, large_pages=0, large_blocks=0)
    for heap in _heaps(process, layout):
        found = _sum(found, _blocks_of_heap(process, heap, sizes))
    return found


def _sum(one: _Blocks, other: _Blocks) -> _Blocks:
    return _Blocks(
        sizes=one.sizes,
        used=one.used + other.used,
        slabs=one.slabs + other.slabs,
        pages=one.pages + other.pages,
        large_pages=one.large_pages + other.large_pages,
        large_blocks=one.large_blocks + other.large_blocks,
    )


def _blocks_of_heap(process: Process, layout: _Layout, sizes: Any) -> _Blocks:  # noqa: ANN401
    count = len(sizes)
    spans = _spans(process, layout)
    slabs = spans[(spans["state"] == layout.slab) & (spans["class"] < count) & (spans["pages"] <= 1 << 10)]
    number = slabs["class"].astype(np.int64)
    pages = slabs["pages"].astype(np.int64)
    live = np.zeros(count, np.int64)
    if len(slabs):
        begins = slabs["page"].astype(np.int64)
        ends = begins + pages
        first, last = int(begins.min()), int(ends.max())
        if (last - first) * 2 > MAX_BYTES:
            raise _UnreadableError
        users = _array(process, _word(process, layout.pages) + 2 * first, last - first, np.dtype("<u2"))
        # Not a list of all slabs' pages: descriptors that overlap would make it as long as they like.
        held = np.zeros(last - first + 1, np.uint32)
        np.cumsum((users & layout.page_users) != 0, out=held[1:])
        of_slab = held[ends - first] - held[begins - first]
        live = np.bincount(number, of_slab, minlength=count).astype(np.int64)
    large = spans[spans["state"] == layout.large]
    return _Blocks(
        sizes=sizes,
        used=np.bincount(number, slabs["used"], minlength=count).astype(np.int64),
        slabs=np.bincount(number[slabs["used"] > 0], minlength=count),
        pages=live,
        large_pages=int(large["pages"].astype(np.int64).sum()),
        large_blocks=len(large),
    )


def _extent(process: Process, start: int) -> tuple[int, int] | None:
    """From an address to where the access rights end."""
    end = start
    for each in process.mappings:
        if each.start <= end < each.end and each.rights[0] == "r" and not each.path.startswith("/"):
            end = each.end
    return (start, end) if end > start else None


def _extents(process: Process, pointers: list[int]) -> tuple[tuple[int, int], ...]:
    bases = [words[0] for pointer in pointers if pointer and (words := process.words(pointer, 1))]
    return tuple(found for base in bases if base and (found := _extent(process, base)))


def _classes(blocks: _Blocks, cached: dict[int, int], page: int) -> list[SizeClass]:
    found = []
    for size, used, pages in zip(
        *(each.tolist() for each in (blocks.sizes, blocks.used, blocks.pages)), strict=True
    ):
        if pages == 0 or size == 0:
            continue
        needed = -(-used * size // page)
        in_caches = min(used, cached.get(size, 0))
        found.append(
            SizeClass(
                size=size,
                used=used - in_caches,
                cached=in_caches,
                free=max(0, pages * page - used * size) // size,
                bytes=pages * page,
                movable=max(0, pages - needed) * page,
            )
        )
    return found


def _consistent(process: Process, layout: _Layout, table: Table) -> tuple[_Blocks, dict[str, int], bool]:
    """Blocks and counters that agree, as far as a few reads give such."""
    for _ in range(_READS):
        before = table.values(process.read)
        blocks = _blocks(process, layout)
        values = table.values(process.read)
        page = process.page
        counted = [each.get("in_use", 0) // page for each in (before, values)]
        slack = _TOLERANCE_PAGES + blocks.used_pages // _TOLERANCE_SHARE
        if min(counted) - slack <= blocks.used_pages <= max(counted) + slack:
            return blocks, values, True
    return blocks, values, False


def _heap(process: Process, table: Table) -> Heap:
    layout = _layout(process, table.blocks)
    page = process.page
    blocks, values, consistent = _consistent(process, layout, table)
    sure = exact if consistent else estimate
    cached = table.by_weight(process.read, "cached") or {}
    classes = _classes(blocks, cached, page)
    in_slabs = sum(each.used * each.size for each in classes)
    in_caches = sum(each.cached * each.size for each in classes)
    held = sum(each.bytes for each in classes)
    several = _heaps(process, layout)
    segments = [
        heap.segments + i * heap.segment_bytes
        for heap in several
        for i in range(min(256, _word(process, heap.segment_count)))
    ]
    depots = [layout.depots + i * layout.depot_bytes for i in range(min(_MAX_DEPOTS, layout.depot_count))]
    own = [each for heap in several for each in heap.heap_records]
    records = _extents(process, [*own, *layout.records, *depots])
    sizes = [process.resident(*each) for each in records]
    metadata = UNKNOWN if None in sizes else exact(sum(each or 0 for each in sizes))
    notes = []
    if not consistent:
        notes.append("The heap changed while it was read: its figures are of several moments.")
    if any("libcalmoffload" in each.path for each in process.mappings):
        notes.append("Blocks in the queues of calmoffload's server count as in use.")
        sure = estimate
    return Heap(
        allocator="calmalloc",
        version=table.release,
        footprint=sure(blocks.large_pages * page + held + values.get("dirty", 0) + metadata.bytes),
        in_use=sure(blocks.large_pages * page + in_slabs),
        cached=sure(in_caches),
        retained=sure(values["dirty"]) if "dirty" in values else UNKNOWN,
        fragmentation=sure(held - in_slabs - in_caches),
        metadata=metadata,
        movable=sure(sum(each.movable for each in classes)),
        classes=tuple(classes),
        ranges=_extents(process, segments) + records,
        notes=tuple(notes),
        facts={
            "limit": values.get("dirty_limit", 0),
            **{name: value for name, value in values.items() if name.startswith("waiting_")},
            "background": values.get("background", 0),
            "purge_failures": values.get("purge_failures", 0),
            "large_blocks": blocks.large_blocks,
            "large_bytes": blocks.large_pages * page,
        },
    )


def _without_layout(table: Table, values: dict[str, int], why: str) -> Heap:
    """What the counters alone say: of a release without a layout, or whose layout cannot be used."""

    def figure(name: str) -> Figure:
        return exact(values[name]) if name in values else UNKNOWN

    cached, in_use = figure("cached"), figure("in_use")
    return Heap(
        allocator="calmalloc",
        version=table.release,
        footprint=figure("footprint"),
        in_use=estimate(in_use.bytes - cached.bytes) if in_use.is_known else UNKNOWN,
        cached=cached,
        retained=figure("dirty"),
        notes=(f"{why}: free blocks within used pages count as in use.",),
    )


def tables(process: Process) -> list[Table]:
    """The tables of calmalloc's and ptlbmalloc2's counters."""
    found = []
    for image in images(process.pid):
        for address in table_addresses(process.read, image.start) or ():
            try:
                found.append(Table.read(process.read, address))
            except NotATableError:
                continue
    return found


def heaps(process: Process) -> tuple[Heap, ...]:
    """A `Reader`. The heaps of a process count as one."""
    table = next((each for each in tables(process) if each.library == "calmalloc"), None)
    if table is None:
        return ()
    values = table.values(process.read)
    if not table.blocks:
        return (_without_layout(table, values, "This release has no layout of its blocks"),)
    try:
        return (_heap(process, table),)
    except _UnreadableError:
        return (_without_layout(table, values, "The layout of the blocks cannot be used"),)
