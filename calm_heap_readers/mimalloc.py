"""Reads mimalloc's heap: the pages of its segments (2.x) or of its page map (3.x), with their free blocks.

A segment of 2.x begins at a multiple of its size and holds a cookie: its address combined with a secret of
the process, which is also in the library's data. The page map of 3.x leads from each slice of 64 KiB to the
record of a page, and that back to the slice. So both are found without symbols, and a record that does not
agree is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as default

import numpy as np
import numpy.typing as npt

from calm.commands.explain.model import MAX_STEPS, Heap, Process, SizeClass, estimate, exact, merged
from calm_heap_readers.memory import (
    Image,
    Memory,
    Words,
    bringer,
    field,
    function,
    images,
    references,
    resident,
    resident_each,
    search,
)
from calm_heap_readers.pymalloc import PYTHON
from calm_heap_readers.versions import layout, unknown, unread

_NAME = "mimalloc"
_MESSAGE = b"mimalloc: "
"""How each of its messages begins."""
_LIBRARY = re.compile(r"/libmimalloc[^/]*\.so")
_RETURNS_CONSTANT = re.compile(rb"(?:\xf3\x0f\x1e\xfa)?\xb8(.{4})\xc3", re.DOTALL)
_MOVES_CONSTANT = 0x52800000
_START_MESSAGE = rb"\0(?=v%i\.%i\.%i)"
# Arguments of a function on x86-64, by the numbers of the registers: rdi, rsi, rdx, rcx, r8, r9.
_ARGUMENTS = (7, 6, 2, 1, 8, 9)
_SLICE = 64 << 10
_MAX_CANDIDATES = 1 << 12
_MAX_ROOTS = 1 << 9
_MAX_SAMPLES = 256
_MAX_SEGMENTS = 1 << 16
_RACES = 0.05
_MAX_BLOCK = 1 << 46


@dataclass(frozen=True)
class _Pages:
    """Pages, each a run of slices with blocks of one size."""

    start: Words
    """Where their blocks begin."""
    span_start: Words
    span_end: Words
    block: Words
    used: Words
    """Blocks that are not on the page's own free lists."""
    capacity: Words
    reserved: Words
    thread_free: Words
    """Heads of the lists of blocks that other threads freed."""

    @property
    def count(self) -> int:
        return len(self.start)

    @property
    def bytes(self) -> Words:
        return self.capacity * self.block


@dataclass
class _Found:
    """What a version's records lead to."""

    pages: _Pages
    areas: list[tuple[int, int]]
    """Segments and arenas: what is in them and not in a page is free or metadata."""
    metadata: list[tuple[int, int]]
    delayed: list[int] = default(default_factory=list)
    """Heads of lists of blocks that other threads freed, in any page."""
    idle: list[tuple[int, int]] = default(default_factory=list)
    """Memory that is mimalloc's by its place alone."""
    races: int = 0


@dataclass(frozen=True)
class _Segments:
    """Offsets of a `mi_segment_t` and of a `mi_page_t` of 2.x."""

    shift: int
    used: int
    cookie: int
    slices: int
    info_slices: int
    entries: int
    pages: int
    page_bytes: int
    page_used: int
    block: int
    block_width: int
    thread_free: int
    heap: int
    delayed: int


@dataclass(frozen=True)
class _Record:
    """Offsets of a `mi_page_t` and of a `mi_arena_t` of 3.x."""

    memory_id: int
    arena: int
    """Of `slice_count`; `info_slices` follows."""
    has_offset: bool = False
    """A page's record has its blocks' distance from it, in words, instead of their address."""


_LAYOUTS: dict[str, _Segments | _Record] = {
    "segments of 64 MiB": _Segments(26, 312, 320, 328, 336, 360, 368, 80, 24, 28, 4, 40, 48, 2840),
    "pages of 80 bytes": _Segments(25, 208, 216, 224, 232, 248, 264, 80, 24, 28, 4, 40, 48, 2840),
    "pages of 96 bytes": _Segments(25, 208, 216, 224, 232, 248, 264, 96, 32, 40, 8, 56, 64, 8),
    "segments with subprocesses": _Segments(25, 216, 224, 248, 256, 272, 288, 96, 32, 40, 8, 56, 64, 8),
    "page map": _Record(96, 32),
    "page map, arenas with a parent": _Record(96, 40),
    "page map, blocks by offset": _Record(88, 40, has_offset=True),
}
_KEYS_BYTES = 16
"""Builds that check their free lists have two more words in each record of a page."""
_HUGE_BLOCK = 2 << 30


def _release(process: Process, image: Image) -> str:
    """The version that the function mi_version returns; "" where its code is not found."""
    name = f"^{re.escape(image.path)}$"
    address = process.symbols(name, ["mi_version"]).get("mi_version")
    code = process.read(address, 16) if address else None
    if code is None:
        return _printed_release(process, image)
    if match := _RETURNS_CONSTANT.match(code):
        number = int.from_bytes(match[1], "little")
    else:
        word = int.from_bytes(code[:4], "little")
        if word & ~(0xFFFF << 5) != _MOVES_CONSTANT:
            return ""
        number = word >> 5 & 0xFFFF
    if number < 1000:
        return f"{number // 100}.{number // 10 % 10}.{number % 10}"
    minor = number // 100 % (10 if number < 10000 else 100)
    return f"{number // (1000 if number < 10000 else 10000)}.{minor}.{number % 100}"


def _printed_release(process: Process, image: Image) -> str:
    """What the message at the start is printed with: programs that it is linked into lack mi_version."""
    for register, before, after in references(process, image, _START_MESSAGE):
        if register not in _ARGUMENTS[:3]:
            continue
        first = _ARGUMENTS.index(register) + 1
        numbers = [_constant(each, before, after) for each in _ARGUMENTS[first : first + 3]]
        if None not in numbers:
            return ".".join(map(str, numbers))
    return ""


def _constant(register: int, before: bytes, after: bytes) -> int | None:
    """What a register is set to: the last time before a place, or the first time after it."""
    number = register % 8
    move = (b"\x41" if register > 7 else b"(?<!\x41)") + re.escape(bytes([0xB8 + number])) + rb"(.)\0\0\0"
    clear = (b"\x45" if register > 7 else b"") + re.escape(bytes([0x31, 0xC0 + 9 * number]))
    pattern = b"(?:%b)|(?:%b)" % (move, clear)
    matches = [*re.finditer(pattern, before, re.DOTALL)][-1:] or [*re.finditer(pattern, after, re.DOTALL)][:1]
    return next((match[1][0] if match[1] else 0 for match in matches), None)


def _units(process: Process, memory: Memory, size: int) -> Iterator[int]:
    """Multiples of a size in writable memory whose first page is resident."""
    left = _MAX_SEGMENTS
    for each in memory.writable:
        if each.inode == 0:
            for at in range(-(-each.start // size) * size, each.end - 4095, size):
                left -= 1
                if left < 0:
                    return
                if process.resident(at, at + 4096) != 0:
                    yield at


def _segments(process: Process, memory: Memory, image: Image, form: _Segments) -> list[int]:
    """Addresses of segments: those whose cookies are of one secret, which is in the library's data."""
    secrets: dict[int, list[int]] = {}
    for at in _units(process, memory, 1 << form.shift):
        head = memory.words(at, form.pages // 8)
        if head is None:
            continue
        slices, info, entries = (int(head[i // 8]) for i in (form.slices, form.info_slices, form.entries))
        if 0 < info < slices < 1 << 32 and 0 < entries <= 1 << (form.shift - 16):
            secrets.setdefault(int(head[form.cookie // 8]) ^ at, []).append(at)
    for start, end in image.data:
        _, values = memory.nonzero(start, end)
        known = set(values.tolist())
        for secret in sorted(secrets, key=lambda each: -len(secrets[each])):
            if secret in known:
                return secrets[secret]
    return []


def _read_segments(process: Process, memory: Memory, image: Image, form: _Segments) -> _Found | None:
    segments = _segments(process, memory, image, form)
    if not segments:
        return None
    columns: list[list[npt.NDArray[np.uint64]]] = [[] for _ in range(8)]
    heaps: set[int] = set()
    areas, metadata = [], []
    races = 0
    for at in segments:
        head = memory.words(at, form.pages // 8)
        data = memory.read(at + form.pages, form.page_bytes << (form.shift - 16))
        if head is None or data is None:
            races += 1
            continue
        slices, info = int(head[form.slices // 8]), int(head[form.info_slices // 8])
        areas.append((at, at + slices * _SLICE))
        metadata.append((at, at + info * _SLICE))
        if not head[form.used // 8]:
            continue
        rows = np.frombuffer(data, np.uint8).reshape(-1, form.page_bytes)
        count, back = field(rows, 0, 4), field(rows, 4, 4)
        block = field(rows, form.block, form.block_width)
        if form.block_width == 4:
            block = np.where(block == _HUGE_BLOCK, (count - np.uint64(info)) * np.uint64(_SLICE), block)
        index = np.arange(len(rows), dtype=np.uint64)
        is_page = (back == 0) & (count > 0) & (block >= 8) & (index >= info) & (index < slices)
        capacity, reserved = field(rows, 10, 2), field(rows, 12, 2)
        used = field(rows, form.page_used, 4 if form.block_width == 4 else 2)
        good = is_page & (used <= capacity) & (capacity <= reserved) & (index + count <= np.uint64(slices))
        good &= (reserved > 0) & (block * reserved <= count * np.uint64(_SLICE))
        races += int(np.count_nonzero(is_page & ~good))
        span = index * np.uint64(_SLICE) + np.uint64(at)
        end = span + count * np.uint64(_SLICE)
        # Blocks begin at the end of what alignment leaves over at the start of the page.
        start = span
        for column, values in zip(
            columns,
            (start, span, end, block, used, capacity, reserved, field(rows, form.thread_free, 8)),
            strict=True,
        ):
            column.append(values[good])
        heaps.update(field(rows, form.heap, 8)[good].tolist())
    pages = _Pages(*(np.concatenate(column) if column else np.empty(0, np.uint64) for column in columns))
    delayed = []
    for heap in heaps - {0}:
        words = memory.words(heap + form.delayed, 1) if memory.mapping(heap + form.delayed) else None
        if words is not None and words[0]:
            delayed.append(int(words[0]))
    idle = _idle(memory, areas, 1 << form.shift)
    return _Found(pages, areas, metadata, delayed, idle, races)


def _idle(memory: Memory, areas: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Room for segments in the mappings that hold some: an arena, or a cache of segments."""
    found = []
    for mapping in {each.start: each for at, _ in areas if (each := memory.mapping(at))}.values():
        inside = sorted(area for area in areas if mapping.start <= area[0] < mapping.end)
        at = -(-mapping.start // size) * size
        for start, end in [*inside, (mapping.end // size * size, 0)]:
            if at < start:
                found.append((at, start))
            at = -(-max(at, end) // size) * size
    return found


# Of `mi_page_t` of 3.x.
_RECORD_BYTES = 136
_USED, _CAPACITY, _RESERVED, _THREAD_FREE, _BLOCK, _START = 16, 18, 20, 32, 40, 48
_MAP_SHIFT, _MAP_ENTRIES, _MAX_MAP_ENTRIES = 29, 1 << 13, 1 << 19


def _starts(rows: npt.NDArray[np.uint8], records: Words, form: _Record) -> Words:
    if form.has_offset:
        return records + field(rows, _START, 4) * np.uint64(8)
    return field(rows, _START, 8)


def _slots(memory: Memory, root: int, most: int = _MAX_CANDIDATES) -> tuple[Words, Words]:
    """Slices and the records of pages that a page map leads to from them."""
    mapping = memory.mapping(root)
    if mapping is None:
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    slices, records = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    places, maps = memory.nonzero(root, min(mapping.end, root + _MAX_MAP_ENTRIES * 8))
    fits = (maps % np.uint64(8) == 0) & memory.is_writable(maps, _MAP_ENTRIES * 8)
    for place, each in zip(places[fits].tolist()[:most], maps[fits].tolist(), strict=False):
        at, values = memory.nonzero(each, each + _MAP_ENTRIES * 8)
        index = (place - root) // 8
        slices.append((at - np.uint64(each)) // np.uint64(8) + np.uint64(index * _MAP_ENTRIES))
        records.append(values)
    return np.concatenate(slices), np.concatenate(records)


def _map_pages(memory: Memory, root: int, form: _Record) -> tuple[_Pages, Words, int]:
    """The pages of a page map, their records' memory ids (an arena each), and how many do not agree."""
    slices, pointers = _slots(memory, root)
    order = np.lexsort((slices, pointers))
    slices, pointers = slices[order], pointers[order]
    records, first, counts = np.unique(pointers, return_index=True, return_counts=True)
    keep = memory.is_writable(records, _RECORD_BYTES)
    records, first, counts = records[keep], first[keep], counts[keep].astype(np.uint64)
    rows = memory.records(records, _RECORD_BYTES)
    start, block = _starts(rows, records, form), field(rows, _BLOCK, 8)
    used, capacity, reserved = (field(rows, i, 2) for i in (_USED, _CAPACITY, _RESERVED))
    slot: Words = slices[first]
    span = slot * np.uint64(_SLICE)
    end: Words = np.asarray((slot + counts) * np.uint64(_SLICE), dtype=np.uint64)
    # Of a single large block, the map has only the slices to which a pointer may be given back.
    (alone,) = np.nonzero((reserved == 1) & (block < _MAX_BLOCK) & (start >= span) & (start + block > end))
    for index in alone.tolist():
        stop = int(start[index] + block[index])
        mapping = memory.mapping(int(start[index]))
        if mapping and stop <= mapping.end:
            end[index] = -(-stop // _SLICE) * _SLICE
    good = (start >= span) & (start < end) & (block >= 8) & (block < _MAX_BLOCK) & (reserved > 0)
    good &= (used <= capacity) & (capacity <= reserved)
    good &= start + block * capacity <= end
    columns: list[Words] = [start, span, end, block, used, capacity, reserved, field(rows, _THREAD_FREE, 8)]
    pages = _Pages(*(column[good] for column in columns))
    return pages, field(rows, form.memory_id, 8)[good], int(np.count_nonzero(~good))


def _read_map(memory: Memory, image: Image, form: _Record) -> _Found | None:
    words = [memory.nonzero(start, end)[1] for start, end in image.data]
    values = np.unique(np.concatenate(words)) if words else np.empty(0, np.uint64)
    roots = values[(values % np.uint64(4096) == 0) & memory.is_writable(values, _MAP_ENTRIES * 8)]
    forms = (form, replace(form, memory_id=form.memory_id + _KEYS_BYTES))
    best, root, form = max(
        ((_score(memory, each, of), each, of) for each in roots.tolist()[:_MAX_ROOTS] for of in forms),
        key=lambda found: found[0],
        default=(0, 0, form),
    )
    if not best:
        return None
    pages, ids, races = _map_pages(memory, root, form)
    arenas, metadata = _arenas(memory, form, np.concatenate([values, np.unique(ids)]))
    mapping = memory.mapping(root)
    if mapping:
        metadata.append((root, min(mapping.end, root + _MAX_MAP_ENTRIES * 8)))
    return _Found(pages, arenas, metadata, races=races)


def _score(memory: Memory, root: int, form: _Record) -> int:
    """How many of a page map's first pages and arenas agree with it; 0 if it is none."""
    slots, pointers = _slots(memory, root, most=16)
    good = memory.is_writable(pointers, _RECORD_BYTES)
    records, first = np.unique(pointers[good][:_MAX_SAMPLES], return_index=True)
    if not len(records):
        return 0
    rows, slots = memory.records(records, _RECORD_BYTES), slots[good][first]
    block = field(rows, _BLOCK, 8)
    used, capacity, reserved = (field(rows, i, 2) for i in (_USED, _CAPACITY, _RESERVED))
    agrees = (used <= capacity) & (capacity <= reserved) & (block >= 8) & (block < _MAX_BLOCK)
    agrees &= _starts(rows, records, form) // np.uint64(_SLICE) - slots <= 1
    ids = np.unique(field(rows, form.memory_id, 8)[agrees])
    arenas = sum(_arena(memory, form, each) is not None for each in ids.tolist())
    return int(np.count_nonzero(agrees)) + arenas


def _arena(memory: Memory, form: _Record, address: int) -> tuple[int, int] | None:
    """An arena's slices, and those of them that hold its own records."""
    if address % _SLICE or memory.mapping(address) is None:
        return None
    words = memory.words(address + form.arena, 2)
    if words is None:
        return None
    count, info = words.tolist()
    # The smallest arena has 512 slices; its records never take all of it.
    return (count, info) if 0 < info < count < 1 << 28 and count >= 16 else None


def _arenas(
    memory: Memory, form: _Record, addresses: Words
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    areas, metadata = [], []
    owners: dict[int, list[tuple[int, int, int]]] = {}
    fits = (addresses % np.uint64(_SLICE) == 0) & memory.is_writable(addresses, 64)
    for address in np.unique(addresses[fits]).tolist():
        if (found := _arena(memory, form, address)) and (words := memory.words(address + 24, 1)) is not None:
            owners.setdefault(int(words[0]), []).append((address, *found))
    for owner, arenas in owners.items():
        if memory.mapping(owner):
            for address, count, info in arenas:
                areas.append((address, address + count * _SLICE))
                metadata.append((address, address + info * _SLICE))
    return areas, metadata


def _thread_freed(
    memory: Memory, pages: _Pages, delayed: Iterable[int]
) -> tuple[npt.NDArray[np.int64], bool]:
    """Blocks of each page that other threads freed, and whether every list could be followed."""
    counts = np.zeros(pages.count, dtype=np.int64)
    complete = True
    steps = MAX_STEPS
    flags = np.uint64(3)
    (lists,) = np.nonzero(pages.thread_free & ~flags)
    for index in lists.tolist():
        start, end = int(pages.span_start[index]), int(pages.span_end[index])
        at, limit = int(pages.thread_free[index] & ~flags), int(pages.used[index])
        data = memory.read(start, end - start) if end - start <= 1 << 22 else None
        count = 0
        while at and count < limit and steps > 0:
            if not start <= at <= end - 8:
                complete = False
                break
            count += 1
            steps -= 1
            word = data[at - start : at - start + 8] if data else memory.read(at, 8)
            at = int.from_bytes(word or b"", "little")
        counts[index] = count
    order = np.argsort(pages.span_start)
    for head in delayed:
        at = head
        for _ in range(1 << 16):
            if not at:
                break
            place = int(np.searchsorted(pages.span_start[order], np.uint64(at), side="right")) - 1
            index = int(order[place]) if place >= 0 else -1
            if index < 0 or at >= int(pages.span_end[index]) or (data := memory.read(at, 8)) is None:
                complete = False
                break
            counts[index] += 1
            at = int.from_bytes(data, "little")
    return np.minimum(counts, pages.used.astype(np.int64)), complete and steps > 0


def _classes(pages: _Pages, freed: npt.NDArray[np.int64]) -> list[SizeClass]:
    found = []
    used = pages.used.astype(np.int64) - freed
    free = (pages.capacity - pages.used).astype(np.int64)
    is_cached = pages.used == 0
    for size in np.unique(pages.block).tolist():
        mine = pages.block == np.uint64(size)
        total = int(pages.bytes[mine].sum())
        count = int(used[mine].sum())
        whole = int(pages.reserved[mine].max())
        held = int(pages.bytes[mine & ~is_cached].sum())
        movable = max(0, held - -(-count // whole) * whole * size) if whole > 1 else 0
        found.append(
            SizeClass(
                size,
                count,
                int(free[mine & ~is_cached].sum()),
                total,
                movable & ~4095,
                int(freed[mine].sum() + free[mine & is_cached].sum()),
            )
        )
    return found


def heaps(process: Process) -> tuple[Heap, ...]:
    """A `Reader`. A program may hold mimalloc and not use it, as Python 3.13 does: that is not its heap."""
    memory = Memory(process)
    heaps: list[Heap] = []
    for image in images(process):
        named = _LIBRARY.search(image.path) is not None
        if not named and not search(process, image, _MESSAGE):
            continue
        version = _release(process, image)
        form = _LAYOUTS.get(layout(_NAME, version))
        if python := PYTHON.search(image.path):
            # CPython has changed it; only builds without the global lock (3.13t) use it.
            if not python[1].endswith("t"):
                continue
            version, form = f"of CPython {python[1]}", None
        library = "" if named else bringer(process, image)
        found = None
        if isinstance(form, _Segments):
            found = _read_segments(process, memory, image, form)
        elif form:
            found = _read_map(memory, image, form)
        if found is not None:
            heap = _heap(process, memory, version, found)
        else:
            heap = _unread(process, version, library, is_known=form is not None)
        # A map of pages may be that of another image, too.
        if not any(_overlap(heap.ranges, each.ranges) for each in heaps):
            heaps.append(replace(heap, library=library, control=function(process, image, "mi_collect")))
    return tuple(heaps)


def _overlap(some: Iterable[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    return any(start < end_2 and start_2 < end for start, end in some for start_2, end_2 in others)


def _unread(process: Process, version: str, library: str, is_known: bool) -> Heap:
    note = ""
    if not library:
        # Only such a library has a name for it.
        note = (
            f"`gdb -p {process.pid} -batch -ex 'call (void)mi_stats_print(0)'` prints its own statistics, on"
            " the process's standard error"
        )
    if not is_known:
        return unknown(_NAME, version, note)
    why = "mimalloc's pages were not found: nothing is allocated yet, or this build keeps them elsewhere."
    return unread(_NAME, version, f"{why} {note}." if note else why)


def _heap(process: Process, memory: Memory, version: str, found: _Found) -> Heap:
    pages = found.pages
    notes = []
    sure = exact
    freed, complete = _thread_freed(memory, pages, found.delayed)
    if not complete:
        notes.append("Lists of blocks that other threads freed are encoded or changed: some count as in use.")
        sure = estimate
    if found.races > _RACES * max(100, pages.count):
        notes.append("The process changes its heap faster than it can be read.")
        sure = estimate
    if memory.left <= 0:
        notes.append("The heap is too large to be read in full.")
        sure = estimate
    areas = merged(found.areas)
    touched = resident_each(process, areas, pages.span_start, pages.span_end)
    sizes = pages.bytes.astype(np.int64)
    busy = pages.used > 0
    # Memory beyond the blocks of a page is resident where huge pages are.
    beyond = np.maximum(0, touched - sizes)
    held = int(sizes[busy].sum())
    # Pages all of whose blocks are free, but which threads keep: only the thread itself returns them.
    waiting = int((sizes + beyond)[~busy].sum())
    freed_bytes = int((freed.astype(np.uint64) * pages.block).sum())
    in_use = int((pages.used * pages.block).sum()) - freed_bytes
    spans = list(zip(pages.span_start.tolist(), pages.span_end.tolist(), strict=True))
    metadata = resident(process, found.metadata)
    free = (
        resident(process, areas)
        - sum(_within(areas, spans, touched.tolist()))
        - resident(process, [each for each in found.metadata if _is_within(areas, each[0])])
    )
    idle = resident(process, found.idle)
    retained = max(0, free) + idle
    fragmentation = held - in_use - freed_bytes + int(beyond[busy].sum())
    cached = freed_bytes + waiting
    if idle:
        notes.append("Resident memory between segments counts as retained: free segments have no records.")
    classes = _classes(pages, freed)
    return Heap(
        allocator=_NAME,
        version=version,
        footprint=(estimate if idle else sure)(in_use + cached + fragmentation + retained + metadata),
        in_use=sure(in_use),
        cached=sure(cached),
        retained=(estimate if idle else sure)(retained),
        fragmentation=sure(fragmentation),
        metadata=exact(metadata),
        movable=sure(sum(each.movable for each in classes)),
        classes=tuple(classes),
        ranges=merged([*spans, *found.areas, *found.idle, *found.metadata]),
        notes=tuple(notes),
        facts={
            "pages": int(np.count_nonzero(busy)),
            "pages_of_free_blocks": int(np.count_nonzero(~busy)),
            "segments": len(found.areas),
            "reserved_bytes": sum(end - start for start, end in merged(found.areas)),
        },
    )


def _is_within(areas: Iterable[tuple[int, int]], address: int) -> bool:
    return any(start <= address < end for start, end in areas)


def _within(
    areas: Iterable[tuple[int, int]], spans: Iterable[tuple[int, int]], sizes: Iterable[int]
) -> Iterator[int]:
    return (size for (start, _), size in zip(spans, sizes, strict=True) if _is_within(areas, start))
