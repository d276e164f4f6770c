"""Reads the heap of glibc's malloc: its arenas, chunks, bins and thread caches.

None of it is an interface. malloc_state is found by its contents, in libc's writable memory: bins that point
at themselves, a ring of arenas that closes, and sizes that agree. Nothing is locked. Each heap is walked
chunk by chunk; a walk that does not end at the heap's end met a change, and is repeated. Only resident pages
are read.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

import numpy as np

from calm.commands.explain import calmalloc
from calm.commands.explain.model import MAX_STEPS, Heap, Process, SizeClass, estimate, exact
from calm.core.proc import Mapping
from calm_heap_readers.memory import Image, images, search, search_all
from calm_heap_readers.versions import layout, unknown, unread

_NAME = "glibc"
_LIBC = re.compile(r"/libc(?:\.so\.6|-2\.\d+\.so)(?: \(deleted\))?$")
_BANNER = rb"(?:stable|development) release version (2\.[\d.]*\d)"
_TUNABLE = rb"\0(glibc\.[a-z]+\.[a-z0-9_]+)(?=\0)"


@dataclass(frozen=True)
class _Layout:
    """What differs between releases."""

    top: int
    """Of the member `top` in malloc_state, which fastbins precede."""
    heap_header: int
    """sizeof(struct heap_info)."""
    cache: tuple[int, int]
    """Of tcache_perthread_struct: its chunk's bytes and its bins. Counters of 2 bytes precede the lists."""
    mangled: bool
    """A cache's links are combined with their place."""

    @property
    def has_fastbins(self) -> bool:
        return self.top == _WITH_FASTBINS


# struct malloc_state, from its member `top` on.
_BINS, _BIN_COUNT = 16, 127
_NEXT, _SYSTEM_MEM, _MAX_SYSTEM_MEM = 2064, 2088, 2096
_BODY_BYTES = 2104
_WITH_FASTBINS, _WITHOUT_FASTBINS = 96, 8
_FASTBINS_AT, _FASTBIN_COUNT = 16, 10
_MIN_EMPTY_BINS = 16

_HEADER, _MIN_CHUNK, _ALIGN = 16, 32, 16
_FREE_HEADER = 48
"""Of a free chunk: its sizes and links."""
_PREV_INUSE, _MMAPPED, _FLAGS = 1, 2, 7
_HEAP_MAX = 64 << 20
_ARENAS_MOST = 1 << 14
_WALKS = 3
_WINDOW_PAGES = 256
_CHAIN, _RESUME_BYTES = 8, 1 << 18
_SBRK_BASE_WITHIN = 1 << 16

_TCACHE_SMALL = 64
_SMALL_CACHE, _LARGE_CACHE = (64 * 10 + _HEADER, 64), (76 * 10 + 8, 76)
_LAYOUTS = {
    "plain links": _Layout(_WITH_FASTBINS, 32, _SMALL_CACHE, mangled=False),
    "mangled links": _Layout(_WITH_FASTBINS, 48, _SMALL_CACHE, mangled=True),
    "large caches": _Layout(_WITHOUT_FASTBINS, 48, _LARGE_CACHE, mangled=True),
}
_CACHED_MOST = 1 << 16


@dataclass(frozen=True)
class _Arena:
    address: int
    top: int
    system_mem: int


@dataclass
class _Walk:
    """What the chunks of one heap say."""

    used: Counter[int] = field(default_factory=Counter)
    """Chunks in use, or in a cache, by their size."""
    pinned: Counter[int] = field(default_factory=Counter)
    """Free bytes in pages with a chunk in use, by the size of the chunk before them."""
    used_bytes: int = 0
    free_bytes: int = 0
    whole_bytes: int = 0
    """Resident pages that no chunk in use touches: malloc_trim would return them."""
    absent_bytes: int = 0
    """Free, and not resident."""
    top_bytes: int = 0
    skipped_bytes: int = 0
    """That changed while they were read."""
    tcaches: list[int] = field(default_factory=list)
    """Addresses of blocks that may be a thread's cache."""

    def add(self, other: _Walk) -> None:
        self.used += other.used
        self.pinned += other.pinned
        self.tcaches += other.tcaches
        for name in ("used_bytes", "free_bytes", "whole_bytes", "absent_bytes", "top_bytes", "skipped_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class _TornError(Exception):
    """What was read contradicts itself: the heap changed meanwhile, or it is not what it seemed."""


def _word(process: Process, address: int) -> int:
    words = process.words(address, 1)
    if words is None:
        raise _TornError
    return words[0]


def _libc(process: Process) -> Image | None:
    """libc, or the program that it is linked into."""
    found = images(process)
    named = (each for each in found if _LIBC.search(each.path))
    return next(named, found[0] if found else None)


def _release(process: Process, image: Image) -> str:
    """By the banner of libc.so.6. A static program has none: the names of its tunables tell it."""
    if banner := search(process, image, _BANNER):
        return banner[1].decode()
    if _LIBC.search(image.path):
        return ""
    names = search_all(process, image, _TUNABLE)
    return f"tunables {hashlib.sha256(b' '.join(sorted(names))).hexdigest()[:8]}" if names else ""


def _main_bodies(process: Process, image: Image) -> Iterator[int]:
    """Where the member `top` of main_arena may be: places that many empty bins follow."""
    for start, end in image.data:
        content = process.read(start, end - start)
        if content is None or len(content) < _BODY_BYTES:
            continue
        words = np.frombuffer(content, np.uint64)
        # An empty bin's links point 16 bytes before themselves, as if they were the end of a chunk.
        own = np.arange(len(words), dtype=np.uint64) * np.uint64(8) + np.uint64(start - _BINS)
        empty = np.zeros(len(words) + 2 * _BIN_COUNT, np.int64)
        empty[: len(words) - 1] = (words[:-1] == own[:-1]) & (words[1:] == own[:-1])
        total = np.zeros(len(empty), np.int64)
        for parity in (0, 1):
            total[parity::2] = np.cumsum(empty[parity::2])
        counts = np.zeros(len(words), np.int64)
        span = 2 * _BIN_COUNT
        counts[2:] = total[span : span + len(words) - 2] - total[: len(words) - 2]
        for index in np.flatnonzero(counts >= _MIN_EMPTY_BINS):
            body = start + int(index) * 8 - _BINS
            if body + _BODY_BYTES <= end:
                yield body


def _arena(process: Process, address: int, offset: int) -> _Arena:
    body = address + offset
    system_mem, most = _word(process, body + _SYSTEM_MEM), _word(process, body + _MAX_SYSTEM_MEM)
    if system_mem > most:
        raise _TornError
    return _Arena(address, _word(process, body), system_mem)


def _ring(process: Process, main: int, form: _Layout) -> list[_Arena]:
    """All arenas, main_arena first."""
    arenas: list[_Arena] = []
    at = main
    while len(arenas) < _ARENAS_MOST:
        heap = _heap_start(at)
        if arenas and not (at == heap + form.heap_header and _word(process, heap) == at):
            break
        arenas.append(_arena(process, at, form.top))
        at = _word(process, at + form.top + _NEXT)
        if at == main:
            return arenas
    raise _TornError


def _heap_start(address: int) -> int:
    return address & -_HEAP_MAX


def _find(process: Process, image: Image, form: _Layout) -> list[_Arena]:
    """The arenas; none where nothing was allocated. Raises _TornError where none of what seems to be is."""
    bodies = list(_main_bodies(process, image))
    for body in bodies:
        try:
            return _ring(process, body - form.top, form)
        except _TornError:
            continue
    if bodies:
        raise _TornError
    return []


class _Window:
    """Reads chunk headers of a range, resident pages only, many at once."""

    def __init__(self, process: Process, start: int, end: int) -> None:
        present = process.present(start, end)
        if present is None:
            raise _TornError
        self.page = process.page
        self.first = start // self.page
        self.present = present
        self._process = process
        self._at, self._data = 0, b""

    def header(self, chunk: int) -> int:
        """The size and flags of a chunk."""
        offset = chunk + 8 - self._at
        if not 0 <= offset <= len(self._data) - 8:
            self._fill(chunk + 8)
            offset = 0
        return int(struct.unpack_from("<Q", self._data, offset)[0])

    def _fill(self, address: int) -> None:
        page = address // self.page - self.first
        around = self.present[page : page + _WINDOW_PAGES]
        count = len(around) if around.all() else int(np.argmin(around))
        size = (self.first + page + count) * self.page - address
        data = self._process.read(address, size) if count else None
        if data is None:
            raise _TornError
        self._at, self._data = address, data

    def resident(self, start: int, end: int) -> int:
        """Bytes of whole pages in a range that are resident."""
        first, last = -(-start // self.page) - self.first, end // self.page - self.first
        return int(np.count_nonzero(self.present[first:last])) * self.page if last > first else 0

    def whole(self, start: int, end: int) -> int:
        return max(0, end // self.page - -(-start // self.page)) * self.page


def _is_chain(window: _Window, chunk: int, limit: int) -> bool:
    """Whether chunks follow each other from here on."""
    try:
        for _ in range(_CHAIN):
            size = window.header(chunk) & ~_FLAGS
            if size < _MIN_CHUNK or size % _ALIGN or chunk + size > limit:
                return False
            chunk += size
            if chunk == limit:
                break
    except _TornError:
        return False
    return True


def _resume(window: _Window, chunk: int, limit: int) -> int:
    """The next chunk after a place whose header makes no sense: one in a chain of such."""
    for each in range(chunk + _ALIGN, min(limit, chunk + _RESUME_BYTES), _ALIGN):
        if _is_chain(window, each, limit):
            return each
    raise _TornError


def _walk(
    process: Process, start: int, top: int, end: int, loose: Set[int], steps: int, cache_bytes: int
) -> _Walk:
    """The chunks from start on; to `top`, or to `end` where the top is in another heap.

    `loose` are free chunks that count as in use in the headers: those in fastbins.
    """
    window = _Window(process, start, end)
    walk = _Walk()
    used, pinned = walk.used, walk.pinned
    limit = top if start <= top < end else end
    chunk, before = start, 0
    size = window.header(chunk) & ~_FLAGS
    free = 0  # where the free chunks begin that end here; 0: the one before is in use

    def close(end: int) -> None:
        """Counts free chunks up to an end. Links and sizes at their start are needed."""
        first = free + _FREE_HEADER
        resident, whole = window.resident(first, end), window.whole(first, end)
        walk.free_bytes += end - free
        walk.whole_bytes += resident
        walk.absent_bytes += whole - resident
        pinned[before] += end - free - whole

    while chunk < limit:
        # Fenceposts end a heap that is full.
        if limit == end and end - chunk <= 4 * _HEADER and size in (0, _HEADER):
            break
        following = chunk + size
        if size < _MIN_CHUNK or size % _ALIGN or following > limit:
            following = _resume(window, chunk, limit)
            walk.skipped_bytes += following - chunk
            chunk, size = following, window.header(following) & ~_FLAGS
            continue
        steps -= 1
        if steps <= 0:
            raise _TornError
        flags = window.header(following) if following < end else _PREV_INUSE
        if flags & _PREV_INUSE == 0 or chunk in loose:
            free = free or chunk
        else:
            if free:
                close(chunk)
                free = 0
            used[size] += 1
            walk.used_bytes += size
            before = size
            if size == cache_bytes:
                walk.tcaches.append(chunk + _HEADER)
        chunk, size = following, flags & ~_FLAGS
    if chunk == top:
        walk.top_bytes = size
        free = free or chunk
        chunk += size
    if free:
        close(chunk)
    return walk


def _walked(
    process: Process, body: int, start: int, end: int, loose: Set[int], steps: int, cache_bytes: int
) -> _Walk | None:
    for _ in range(_WALKS):
        try:
            return _walk(process, start, _word(process, body), end, loose, steps, cache_bytes)
        except _TornError:
            continue
    return None


def _aligned(address: int) -> int:
    return -(-address // _ALIGN) * _ALIGN


def _heaps(process: Process, arena: _Arena, offset: int) -> Iterator[tuple[int, int, int]]:
    """Of an arena that is not the main one: each heap's start, first chunk and end."""
    heap = _heap_start(arena.top)
    for _ in range(_ARENAS_MOST):
        words = process.words(heap, 3)
        if words is None or words[0] != arena.address or not 0 < words[2] <= _HEAP_MAX:
            raise _TornError
        header = arena.address - _heap_start(arena.address)
        first = heap + header
        if heap == _heap_start(arena.address):
            first = _aligned(arena.address + offset + _BODY_BYTES)
        yield heap, first, heap + words[2]
        heap = words[1]
        if not heap:
            return
    raise _TornError


def _mapping_at(process: Process, address: int) -> Mapping | None:
    return next((each for each in process.mappings if each.start <= address < each.end), None)


def _demangle(place: int, pointer: int, mangled: bool) -> int:
    """A link of a cache's list: since 2.32 with the place of the link in it."""
    return pointer ^ (place >> 12) if mangled else pointer


def _list(process: Process, block: int, mangled: bool) -> Iterator[int]:
    """The blocks of a cache's list."""
    for _ in range(_CACHED_MOST):
        if not block:
            return
        if block % _ALIGN:
            raise _TornError
        yield block
        block = _demangle(block, _word(process, block), mangled)
    raise _TornError


def _tcache(process: Process, block: int, bins: int, mangled: bool) -> Counter[int] | None:
    """Chunks in a thread's cache, by size; None where the block is none: another use of that size."""
    for _ in range(_WALKS):
        data = process.read(block, bins * 10)
        if data is None:
            return None
        counts, firsts = (
            struct.unpack_from(f"<{bins}H", data),
            struct.unpack_from(f"<{bins}Q", data, 2 * bins),
        )
        if not any(firsts):
            return None
        try:
            if bins > _TCACHE_SMALL:
                return _lists(process, firsts, mangled)
            if all(
                (count == 0) == (first == 0)
                and (first == 0 or _size_of(process, first) == (number + 2) * _ALIGN)
                for number, (count, first) in enumerate(zip(counts, firsts, strict=True))
            ):
                return Counter({(number + 2) * _ALIGN: count for number, count in enumerate(counts) if count})
        except _TornError:
            continue
    return None


def _size_of(process: Process, block: int) -> int:
    if block % _ALIGN:
        raise _TornError
    return _word(process, block - 8) & ~_FLAGS


def _lists(process: Process, firsts: Iterable[int], mangled: bool) -> Counter[int]:
    """Chunks of a cache whose counters say how many more it may hold, by size."""
    cached: Counter[int] = Counter()
    for number, first in enumerate(firsts):
        for each in _list(process, first, mangled):
            size = _size_of(process, each)
            if number < _TCACHE_SMALL and size != (number + 2) * _ALIGN:
                raise _TornError
            cached[size] += 1
    return cached


def _fastbins(process: Process, arena: _Arena, mangled: bool) -> set[int]:
    """Chunks that wait to be joined with free neighbours. Their links are those of chunks."""
    found: set[int] = set()
    pages: dict[int, bytes] = {}
    for chunk in process.words(arena.address + _FASTBINS_AT, _FASTBIN_COUNT) or ():
        while chunk and chunk % _ALIGN == 0 and chunk not in found and len(found) < MAX_STEPS:
            # Neighbours are often freed one after the other: one read serves many.
            place = chunk + _HEADER
            page = place & -process.page
            if page not in pages:
                data = process.read(page, process.page)
                if data is None:
                    break
                pages = {page: data}
            found.add(chunk)
            chunk = _demangle(place, struct.unpack_from("<Q", pages[page], place - page)[0], mangled)
    return found


def _sbrk_base(process: Process, image: Image) -> tuple[int, int] | None:
    """Members of mp_: sbrk_base, where the main arena begins, and mmapped_mem. None: there is no [heap].

    mp_ is found by the former. The memory of a static program's first thread precedes it in the [heap].
    """
    start = next((each.start for each in process.mappings if each.path == "[heap]"), None)
    for low, high in image.data if start else ():
        content = process.read(low, high - low) or b""
        words = np.frombuffer(content, np.uint64)
        near = words - np.uint64(start or 0) < np.uint64(_SBRK_BASE_WITHIN)
        for index in np.flatnonzero(near):
            if index >= 5 and _are_mmaps(content, int(index)):
                return int(words[index]), int(words[index - 2])
    return None


def _are_mmaps(content: bytes, sbrk_base: int) -> bool:
    """Whether the members of mp_ before sbrk_base, at that word, are counts of mapped blocks that agree.

    These are the ints n_mmaps, n_mmaps_max, max_n_mmaps, no_dyn_threshold; then mmapped_mem and
    max_mmapped_mem. Since 2.35 one more int precedes them, and padding follows.
    """
    ints = struct.unpack_from("<6i", content, (sbrk_base - 5) * 8)
    now, most = struct.unpack_from("<QQ", content, (sbrk_base - 2) * 8)
    return any(
        0 <= count <= highest
        and limit >= 0
        and fixed in (0, 1)
        and (count == 0) == (now == 0)
        and now <= most
        for count, limit, highest, fixed in (ints[1:5], ints[2:6])
    )


def _mmapped(process: Process, wanted: int, taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges of blocks that glibc mapped one by one: their chunks' headers begin pages."""
    found: list[tuple[int, int]] = []
    owned = {start for start, _ in taken}
    for each in process.mappings:
        if wanted <= 0:
            break
        if each.path or not each.rights.startswith("rw-p") or _heap_start(each.start) in owned:
            continue
        present = process.present(each.start, each.end)
        if present is None:
            continue
        page = each.start
        while page < each.end and wanted > 0:
            rest = present[(page - each.start) // process.page :]
            page += int(np.argmax(rest)) * process.page
            words = process.words(page, 2) if rest.any() else None
            if words is None:
                break
            size = words[1] & ~_FLAGS
            if (
                words[1] & _FLAGS == _MMAPPED
                and words[0] == 0
                and 0 < size <= min(wanted, each.end - page)
                and size % process.page == 0
            ):
                found.append((page, page + size))
                wanted -= size
                page += size
            else:
                page += process.page
    return found


@dataclass
class _Found:
    """All arenas together."""

    walk: _Walk = field(default_factory=_Walk)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    unread: int = 0
    """Bytes of arenas whose chunks could not be walked."""
    records: int = 0


def _arenas(process: Process, arenas: list[_Arena], form: _Layout, base: int | None) -> _Found:
    found = _Found()
    cache_bytes = form.cache[0]
    steps = MAX_STEPS
    for number, arena in enumerate(arenas):
        loose = _fastbins(process, arena, form.mangled) if form.has_fastbins else set()
        walks: list[_Walk | None] = []
        if number == 0:
            breaks = [each for each in process.mappings if each.path == "[heap]"]
            top = _mapping_at(process, arena.top)
            if arena.system_mem == 0 or top is None:
                continue
            # Where brk failed, the main arena has mappings, whose beginnings nothing tells.
            start = _aligned(base) if base is not None and top in breaks else top.start
            found.ranges += [(each.start, each.end) for each in breaks or [top]]
            top_end = arena.top + (_word(process, arena.top + 8) & ~_FLAGS)
            body = arena.address + form.top
            walks = [_walked(process, body, start, min(top_end, top.end), loose, steps, cache_bytes)]
            held = arena.system_mem
        else:
            held = arena.system_mem
            try:
                for start, first, end in _heaps(process, arena, form.top):
                    mapping = _mapping_at(process, start)
                    found.ranges.append((start, mapping.end if mapping else end))
                    found.records += first - start
                    body = arena.address + form.top
                    walks.append(_walked(process, body, first, end, loose, steps, cache_bytes))
            except _TornError:
                walks = [None]
        if None in walks:
            found.unread += held
            continue
        for walk in walks:
            assert walk is not None
            steps -= walk.used.total()
            found.walk.add(walk)
    return found


def _classes(found: _Found, cached: Counter[int]) -> tuple[SizeClass, ...]:
    sizes = sorted(found.walk.used.keys() | found.walk.pinned.keys())
    return tuple(
        SizeClass(
            size=max(0, size - 8),
            used=max(0, found.walk.used[size] - cached[size]),
            cached=min(cached[size], found.walk.used[size]),
            free=0,
            bytes=found.walk.used[size] * size + found.walk.pinned[size],
            movable=found.walk.pinned[size],
        )
        for size in sizes
    )


def heaps(process: Process) -> tuple[Heap, ...]:
    """A `Reader`. One heap at most; none where glibc's malloc was never called."""
    image = _libc(process)
    release = _release(process, image) if image else ""
    # A program that is linked to no glibc at all.
    if image is None or (not release and not _LIBC.search(image.path)):
        return ()
    form = _LAYOUTS.get(layout(_NAME, release))
    if form is None:
        return (unknown(_NAME, release),)
    try:
        heap = _heap(process, image, release, form)
    except _TornError:
        note = "glibc's arenas are not as those of this version, or changed while they were read."
        heap = unread(_NAME, release, note)
    return () if heap is None else (heap,)


def _heap(process: Process, image: Image, release: str, form: _Layout) -> Heap | None:
    arenas = _find(process, image, form)
    base, mmapped = _sbrk_base(process, image) or (None, None)
    if not any(arena.system_mem for arena in arenas) and not mmapped:
        return None
    ours = next((each for each in calmalloc.tables(process) if each.library == "ptlbmalloc2"), None)
    found = _arenas(process, arenas, form, base)
    cached: Counter[int] = Counter()
    threads = 0
    for block in found.walk.tcaches:
        if of_thread := _tcache(process, block, form.cache[1], form.mangled):
            threads += 1
            cached += of_thread
    in_caches = sum(size * count for size, count in cached.items())
    large = _mmapped(process, mmapped or 0, found.ranges)
    large_bytes = mmapped if mmapped is not None else sum(end - start for start, end in large)

    notes = []
    sure = exact
    walk = found.walk
    unread = found.unread + walk.skipped_bytes
    if unread:
        sure = estimate
        notes.append(
            f"{unread >> 10} KiB of arenas could not be read, or changed meanwhile: they count as in use."
        )
    if mmapped is None:
        sure = estimate
        notes.append("Blocks that glibc maps one by one cannot be told from the program's own mappings.")
    elif sum(end - start for start, end in large) != mmapped:
        notes.append("Some blocks that glibc maps one by one were not found: they count as other mappings.")
    fragmentation = walk.free_bytes - walk.whole_bytes - walk.absent_bytes
    in_use = walk.used_bytes - in_caches + large_bytes + unread
    return Heap(
        allocator="ptlbmalloc2" if ours else "glibc",
        version=ours.release if ours else release,
        footprint=sure(in_use + in_caches + walk.whole_bytes + fragmentation + found.records),
        in_use=sure(in_use),
        cached=sure(in_caches),
        retained=sure(walk.whole_bytes),
        fragmentation=sure(fragmentation),
        metadata=sure(found.records),
        movable=sure(sum(walk.pinned.values())),
        classes=_classes(found, cached),
        ranges=tuple(found.ranges + large),
        notes=tuple(notes),
        facts={
            "arenas": sum(1 for arena in arenas if arena.system_mem),
            "top": walk.top_bytes,
            "large_bytes": large_bytes,
            "tcaches": threads,
        },
    )
