"""Reads jemalloc's heap: the radix tree of its extents, and the threads' caches.

jemalloc 5.3 keeps entries for the first and the last page of an extent, and for every page of a slab, in a
radix tree whose root is in .bss. An entry repeats what the extent's own record (`edata_t`) says: its state,
its size class, whether it is a slab. So the root is found in a stripped library, and every record is checked.
The tree has two levels in builds for addresses of 48 bits, and three in those for 57: its configure script
asks the processor of the machine that builds it. Debian 12 has a package of the first kind, 13 of the second.
Each arena has a ring of the caches of its threads. They lead to stacks that begin with a known word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np
import numpy.typing as npt

from calm.commands.explain.model import Figure, Heap, Process, SizeClass, estimate, exact, merged
from calm_heap_readers.memory import (
    Image,
    Memory,
    Words,
    bringer,
    field,
    function,
    images,
    resident,
    search,
)
from calm_heap_readers.versions import layout, unknown, unread

_NAME = "jemalloc"
# Of git describe: the tag, and how many commits follow it.
_VERSION = rb"\0(\d+\.\d+\.\d+-\d+)-g[0-9a-f]{0,40}\0"
# Of a build with a prefix, as libraries bring it: DUCKDB_JE_MALLOC_CONF, _RJEM_MALLOC_CONF.
_SETTINGS = rb"\0([A-Z0-9_]{0,40}MALLOC_CONF)\0"
_LIBRARY = re.compile(r"/libjemalloc[^/]*\.so")

_RECORD_BYTES = 128
_ACTIVE, _DIRTY, _MUZZY, _RETAINED = range(4)
_WORD = np.uint64(8)
_POINTER = np.uint64((1 << 48) - 1 & ~(_RECORD_BYTES - 1))

# Of `edata_t.e_bits`.
_ARENA_MASK = (1 << 12) - 1
_SLAB, _HPA, _STATE, _CLASS, _FREE = 12, 14, 17, 20, 28

_TRIES = 3
_MAX_CANDIDATES = 1 << 12
_MAX_ROOT_VOTES = 64
_MAX_PIECES = 8
_MAX_NODES = 64
"""More than a program's 47 bits of addresses need."""
_MAX_RACES = 0.05
"""The part of the records that may change while they are read."""

_ARENA_BYTES = 128 << 10
"""More than an arena's own record has before the ring of its caches."""
_STORAGE_BYTES = 128 << 10
"""More than a thread's variables and its descriptor take."""
_MAX_CACHES = 1 << 16
_MAX_BINS = 232
_BIN_BYTES = 24
_BEFORE_STACKS = 0x7A7A7A7A7A7A7A7A
_BLOCK_ALIGNMENT = 2 << 20
_MAX_BLOCK_STEPS = 512


def sizes(count: int = 232) -> list[int]:
    """The size classes of 64-bit builds, smallest first: four to each doubling above 64 bytes."""
    found = [8, 16, 32, 48, 64]
    group = 64
    while len(found) < count:
        found += [group + group // 4 * i for i in range(1, 5)]
        group *= 2
    return found[:count]


_SIZES = np.array([min(size, (1 << 63) - 1) for size in sizes()], dtype=np.int64)


@dataclass(frozen=True)
class _Shape:
    """What the page size and the address bits of the build decide: the tree's levels, from the leaves up."""

    page_shift: int
    address_bits: int

    @property
    def index_bits(self) -> int:
        """Of an address: those that the indices in the levels take."""
        return self.address_bits - self.page_shift

    @property
    def node_bits(self) -> int:
        """Of the index in a node between root and leaves; 0: there are none."""
        return 0 if self.index_bits <= 36 else self.index_bits // 3 + self.index_bits % 3 // 2

    @property
    def leaf_shift(self) -> int:
        root_bits = self.index_bits // (3 if self.node_bits else 2)
        return self.address_bits - root_bits - self.node_bits

    @property
    def words(self) -> int:
        """Of a leaf's entry: its flags are in the pointer's spare bits, or have a word of their own."""
        return 1 if self.address_bits <= 56 else 2

    @property
    def leaf_bytes(self) -> int:
        return 8 * self.words << (self.leaf_shift - self.page_shift)

    @property
    def node_bytes(self) -> int:
        return 8 << self.node_bits

    @property
    def root_entries(self) -> int:
        return 1 << (self.address_bits - self.node_bits - self.leaf_shift)

    @property
    def free_bits(self) -> int:
        return self.page_shift - 3 + 1

    def entries(self, words: Words) -> Words:
        """Entries of a leaf, as those of one word: in the other the class follows the five flags."""
        if self.words == 1:
            return words
        pointers, flags = words[::2] & _POINTER, words[1::2]
        return np.asarray(pointers | flags & np.uint64(31) | _bits(flags, 5, 8) << np.uint64(48))


_SHAPES = tuple(_Shape(shift, bits) for bits in (48, 57) for shift in (12, 16, 14))
_LEAST_ROOT_BYTES = min(shape.root_entries * 8 for shape in _SHAPES)


@dataclass(frozen=True)
class _Extents:
    """The extents' records, by address of the record."""

    start: Words
    size: Words
    state: Words
    index: Words
    is_slab: npt.NDArray[np.bool_]
    free: Words
    arena: Words
    is_huge: npt.NDArray[np.bool_]
    records: Words
    """Addresses of the records themselves."""
    races: int
    """Records that disagreed with their entry."""

    @cached_property
    def order(self) -> npt.NDArray[np.intp]:
        """The extents by their address."""
        return np.argsort(self.start)

    def find(self, addresses: Words) -> npt.NDArray[np.intp]:
        """The extent that holds each address; -1 where there is none."""
        if not len(self.start):
            return np.full(len(addresses), -1, dtype=np.intp)
        place = np.searchsorted(self.start[self.order], addresses, side="right") - 1
        found = self.order[np.maximum(place, 0)]
        inside = (place >= 0) & (addresses - self.start[found] < self.size[found])
        return np.where(inside, found, -1)

    def total(self, state: int) -> int:
        return int(self.size[self.state == state].sum())

    def ranges(self, *states: int) -> list[tuple[int, int]]:
        mine = np.isin(self.state, states)
        ends = self.start[mine] + self.size[mine]
        return list(zip(self.start[mine].tolist(), ends.tolist(), strict=True))


def _bits(values: Words, shift: int, width: int) -> Words:
    return values >> np.uint64(shift) & np.uint64((1 << width) - 1)


def _agree(entries: Words, bits: Words) -> npt.NDArray[np.bool_]:
    """Whether entries of the tree say the same as the records that they lead to."""
    state = _bits(bits, _STATE, 3)
    # A free extent keeps what it was, in its record or in its entry.
    alike = _bits(entries, 0, 1) == _bits(bits, _SLAB, 1)
    alike &= _bits(entries, 48, 8) == _bits(bits, _CLASS, 8)
    return np.asarray((_bits(entries, 2, 3) == state) & ((state != _ACTIVE) | alike))


class _Tree:
    """The radix tree of one process."""

    def __init__(self, memory: Memory, shape: _Shape, root: int) -> None:
        self._memory = memory
        self.shape = shape
        self.root = root
        self.leaves: list[tuple[int, int]] = []
        """Index, in root and node together, and address."""

    def _children(self, start: int, size: int) -> Iterator[tuple[int, int]]:
        """Index and address of what a node's words lead to."""
        places, values = self._memory.nonzero(start, start + size)
        for place, child in zip(places.tolist(), values.tolist(), strict=True):
            if child % 64 == 0 and self._memory.mapping(child):
                yield (place - start) // 8, child

    def _find_leaves(self) -> list[tuple[int, int]]:
        shape = self.shape
        found = list(self._children(self.root, shape.root_entries * 8))
        if not shape.node_bits:
            return found
        return [
            (index << shape.node_bits | within, leaf)
            for index, node in found[:_MAX_NODES]
            for within, leaf in self._children(node, shape.node_bytes)
        ]

    def _entries(self) -> tuple[Words, Words]:
        """The address that each entry stands for, and the entry."""
        memory, shape = self._memory, self.shape
        self.leaves = self._find_leaves()
        pages, entries = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        for index, leaf in self.leaves:
            at, values = memory.nonzero(leaf, leaf + shape.leaf_bytes)
            words = np.zeros(shape.leaf_bytes // 8, np.uint64)
            words[(at - np.uint64(leaf)) // _WORD] = values
            found = shape.entries(words)
            slots = np.flatnonzero(found)
            first = np.uint64(index << shape.leaf_shift)
            pages.append((slots.astype(np.uint64) << np.uint64(shape.page_shift)) + first)
            entries.append(found[slots])
        return np.concatenate(pages), np.concatenate(entries)

    def extents(self) -> _Extents:
        pages, entries = self._entries()
        pointers, first = np.unique(entries & _POINTER, return_index=True)
        keep = (pointers > 0) & self._memory.is_writable(pointers, _RECORD_BYTES)
        pointers, pages, entries = pointers[keep], pages[first[keep]], entries[first[keep]]
        rows = self._memory.records(pointers, 24)
        bits, start, size = field(rows, 0, 8), field(rows, 8, 8), field(rows, 16, 8)
        size &= ~np.uint64((1 << self.shape.page_shift) - 1)
        # Large blocks begin at a random offset in their first page.
        page_mask = ~np.uint64((1 << self.shape.page_shift) - 1)
        good = _agree(entries, bits) & (start & page_mask == pages) & (size > 0)
        good &= _bits(bits, _STATE, 3) <= np.uint64(_RETAINED)
        bits, start, size, pointers = bits[good], start[good] & page_mask, size[good], pointers[good]
        return _Extents(
            start=start,
            size=size,
            state=_bits(bits, _STATE, 3),
            index=_bits(bits, _CLASS, 8),
            is_slab=_bits(bits, _SLAB, 1) == 1,
            free=_bits(bits, _FREE, self.shape.free_bits),
            arena=bits & np.uint64(_ARENA_MASK),
            is_huge=_bits(bits, _HPA, 1) == 1,
            records=pointers,
            races=int(np.count_nonzero(~good)),
        )


def _bss(image: Image, size: int) -> Iterator[tuple[int, int]]:
    return ((start, end) for start, end in image.data if end - start >= size)


def _find_tree(memory: Memory, image: Image) -> _Tree | None:
    for shape in _SHAPES:
        for start, end in _bss(image, shape.root_entries * 8):
            if root := _find_root(memory, shape, start, end):
                return _Tree(memory, shape, root)
    return None


def _find_root(memory: Memory, shape: _Shape, start: int, end: int) -> int | None:
    """The root that most of the leaves agree on: an entry's extent says which slot of the root led to it."""
    places, values = memory.nonzero(start, end)
    index_of = _index_of_node if shape.node_bits else _index_of_leaf
    child_bytes = shape.node_bytes if shape.node_bits else shape.leaf_bytes
    fits = (values % np.uint64(64) == 0) & memory.is_writable(values, child_bytes)
    places, values = places[fits][:_MAX_CANDIDATES], values[fits][:_MAX_CANDIDATES]
    votes: dict[int, int] = {}
    for place, child in zip(places.tolist(), values.tolist(), strict=True):
        index = index_of(memory, shape, child)
        root = place - index * 8 if index is not None else 0
        if start <= root and root + shape.root_entries * 8 <= end:
            votes[root] = votes.get(root, 0) + 1
            if votes[root] >= _MAX_ROOT_VOTES:
                break
    return max(votes, key=lambda root: votes[root]) if votes else None


def _index_of_node(memory: Memory, shape: _Shape, node: int) -> int | None:
    """The slot of the root that a node belongs to, by the first of its leaves; None if it is no node."""
    for begin, stop in islice(memory.touched(node, node + shape.node_bytes), _MAX_PIECES):
        words = memory.words(begin, (stop - begin) // 8)
        if words is None:
            continue
        leaves = words[words > 0][:4]
        fits = (leaves % np.uint64(64) == 0) & memory.is_writable(leaves, shape.leaf_bytes)
        for leaf in leaves[fits].tolist():
            index = _index_of_leaf(memory, shape, leaf)
            if index is not None:
                return index >> shape.node_bits
    return None


def _index_of_leaf(memory: Memory, shape: _Shape, leaf: int) -> int | None:
    """The slot of all nodes that a leaf belongs to, by the first of its extents; None if it is no leaf."""
    pieces = memory.touched(leaf, leaf + shape.leaf_bytes)
    for begin, stop in islice(pieces, _MAX_PIECES):
        words = memory.words(begin, (min(stop, begin + (64 << 10)) - begin) // 8)
        if words is None:
            continue
        entries = shape.entries(words)
        for slot in np.flatnonzero(entries)[:4].tolist():
            entry = entries[slot : slot + 1]
            record = int(entry[0] & _POINTER)
            data = memory.read(record, 24)
            if data is None:
                continue
            bits, address, size = (int.from_bytes(data[i : i + 8], "little") for i in (0, 8, 16))
            page = (begin - leaf) // (8 * shape.words) + slot << shape.page_shift
            within = address % (1 << shape.leaf_shift)
            if (
                _agree(entry, np.array([bits], dtype=np.uint64))[0]
                and within >> shape.page_shift << shape.page_shift == page
                and size >> shape.page_shift
                and memory.mapping(address)
            ):
                return address >> shape.leaf_shift
    return None


@dataclass(frozen=True)
class _Caches:
    """The caches of threads."""

    is_complete: bool
    """Whether they are all that there are."""
    blocks: Words
    """Addresses of the free blocks in them."""
    indices: npt.NDArray[np.int64]
    """The size class of each."""
    stacks: tuple[tuple[int, int], ...]
    """The memory of the stacks of pointers."""


def _blocks(memory: Memory, tree: _Tree, extents: _Extents) -> list[tuple[int, int]]:
    """The blocks of metadata that hold leaves and records; each begins with its size and the one before."""
    known = np.concatenate(
        [np.array([leaf for _, leaf in tree.leaves], dtype=np.uint64), extents.records]
    ) // np.uint64(_BLOCK_ALIGNMENT)
    found: dict[int, int] = {}
    for unit in np.unique(known).tolist():
        at = unit * _BLOCK_ALIGNMENT
        if any(start <= at < start + size for start, size in found.items()):
            continue
        for start in range(at, max(0, at - _MAX_BLOCK_STEPS * _BLOCK_ALIGNMENT), -_BLOCK_ALIGNMENT):
            head = memory.words(start, 5) if memory.mapping(start) else None
            if head is None:
                break
            if _is_block(memory, start, head) and at < start + int(head[0]):
                _follow(memory, start, found)
                break
    return sorted((start, start + size) for start, size in found.items())


def _is_block(memory: Memory, start: int, head: Words) -> bool:
    size, after, _, rest, left = head.tolist()
    # The record of what is left of the block: its address and size end where the block does.
    return bool(
        0 < size < 1 << 40
        and size % 4096 == 0
        and after % 4096 == 0
        and start < rest <= start + size
        and rest + left == start + size
    )


def _follow(memory: Memory, start: int, found: dict[int, int]) -> None:
    for _ in range(_MAX_BLOCK_STEPS):
        head = memory.words(start, 5) if start and start not in found else None
        if head is None or not _is_block(memory, start, head):
            return
        found[start] = int(head[0])
        start = int(head[1])


def _caches(memory: Memory, image: Image, extents: _Extents, blocks: list[tuple[int, int]]) -> _Caches | None:
    """The caches on the arenas' rings, or those of builds without statistics; None if there is none."""
    found = _on_rings(memory, image, blocks) or _in_thread_storage(memory, extents, blocks)
    stacks, addresses, indices = [], [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for bins in found:
        stack, cached, kinds = _read_bins(memory, bins)
        if stack[1] > stack[0]:
            stacks.append(stack)
            addresses.append(cached)
            indices.append(kinds)
    if not stacks:
        return None
    return _Caches(
        len(stacks) == _count_stacks(memory, extents, stacks),
        np.concatenate(addresses),
        np.concatenate(indices),
        tuple(stacks),
    )


def _count_stacks(memory: Memory, extents: _Extents, known: list[tuple[int, int]]) -> int:
    """How many extents hold a cache's stacks: those of the same sizes as the ones that are known."""
    owners = extents.find(np.array([start for start, _ in known], dtype=np.uint64))
    if (owners < 0).any() or extents.is_slab[owners].any():
        return len(known)
    alike = np.isin(extents.index, extents.index[owners]) & ~extents.is_slab & (extents.state == _ACTIVE)
    count = 0
    for start in extents.start[alike].tolist()[:_MAX_CACHES]:
        words = memory.words(start, 1 << 9)
        count += words is not None and bool((words[::8] == _BEFORE_STACKS).any())
    return count


def _outside(addresses: Words, ranges: list[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    outside = np.ones(len(addresses), dtype=np.bool_)
    for low, high in ranges:
        outside &= (addresses < np.uint64(low)) | (addresses >= np.uint64(high))
    return outside


def _on_rings(memory: Memory, image: Image, blocks: list[tuple[int, int]]) -> list[int]:
    arenas: set[int] = set()
    for start, end in image.data:
        _, values = memory.nonzero(start, end)
        inside = values[~_outside(values, blocks)]
        arenas.update(inside[inside % np.uint64(64) == 0].tolist())
    rings: dict[int, int] = {}
    for arena in sorted(arenas)[:_MAX_CANDIDATES]:
        limit = next(high for low, high in blocks if low <= arena < high)
        _, heads = memory.nonzero(arena, min(limit, arena + _ARENA_BYTES))
        fits = (heads % _WORD == 0) & memory.is_writable(heads, 24) & _outside(heads, blocks)
        for head in np.unique(heads[fits]).tolist():
            if head not in rings and len(rings) < _MAX_CACHES:
                rings |= _ring(memory, head)
    return list(dict.fromkeys(rings.values()))


def _in_thread_storage(memory: Memory, extents: _Extents, blocks: list[tuple[int, int]]) -> list[int]:
    """Caches at the ends of mappings outside of the heap, where threads keep their thread-local variables."""
    found: list[int] = []
    mappings = [each for each in memory.writable if each.inode == 0]
    starts = np.array([each.start for each in mappings], dtype=np.uint64)
    alone = (extents.find(starts) < 0) & _outside(starts, blocks)
    for each in (mapping for mapping, is_alone in zip(mappings, alone, strict=True) if is_alone):
        begin = max(each.start, each.end - _STORAGE_BYTES)
        places, heads = memory.nonzero(begin, each.end)
        fits = (heads % _WORD == 0) & memory.is_writable(heads, 8)
        for place in places[fits].tolist():
            if len(found) < _MAX_CACHES and _begins_bins(memory, place):
                found.append(place)
    return found


def _ring(memory: Memory, head: int) -> dict[int, int]:
    """The elements of a ring of caches, and the bins of each; none if it is not a ring."""
    found: dict[int, int] = {}
    at, before, last = head, None, None
    for _ in range(_MAX_CACHES):
        words = memory.words(at, 3) if memory.mapping(at) else None
        if words is None:
            return {}
        after, previous, bins = words.tolist()
        if (before is not None and previous != before) or (not found and not _begins_bins(memory, bins)):
            return {}
        if last is None:
            last = previous
        found[at] = bins
        at, before = after, at
        if at == head:
            return found if last == before else {}
        if at in found:
            return {}
    return {}


def _stack(data: bytes) -> tuple[int, int, int]:
    """The lowest address, the head and the end of a bin's stack."""
    head = int.from_bytes(data[:8], "little")
    full, empty = (int.from_bytes(data[i : i + 2], "little") for i in (18, 20))
    end = head + (empty - head) % (1 << 16)
    return end - (empty - full) % (1 << 16), head, end


def _begins_bins(memory: Memory, bins: int) -> bool:
    data = memory.read(bins, _BIN_BYTES) if memory.mapping(bins) else None
    if data is None:
        return False
    low, head, end = _stack(data)
    before = (
        memory.words(low - 8, 1) if low % 8 == 0 and low <= head <= end and memory.mapping(low - 8) else None
    )
    return before is not None and int(before[0]) == _BEFORE_STACKS


def _read_bins(memory: Memory, bins: int) -> tuple[tuple[int, int], Words, npt.NDArray[np.int64]]:
    """The range of a cache's stacks, its blocks and their size classes."""
    mapping = memory.mapping(bins)
    count = min(_MAX_BINS, (mapping.end - bins) // _BIN_BYTES) if mapping else 0
    data = memory.read(bins, count * _BIN_BYTES) or b""
    parts: list[tuple[int, int, int]] = []
    first = last = 0
    for index in range(len(data) // _BIN_BYTES):
        low, head, end = _stack(data[index * _BIN_BYTES :][:_BIN_BYTES])
        if not (low <= head <= end and low % 8 == head % 8 == end % 8 == 0):
            break
        first = first or low
        # The stacks are neighbours; that of a bin which is turned off is elsewhere.
        if low == last or not last:
            last = end
            parts.append((index, head, end))
        elif index >= 36:
            break
    blocks, kinds = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for index, head, end in parts:
        if head < end and (words := memory.words(head, (end - head) // 8)) is not None:
            blocks.append(words)
            kinds.append(np.full(len(words), index))
    return (first - 8, last + 8) if parts else (0, 0), np.concatenate(blocks), np.concatenate(kinds)


def _classes(
    extents: _Extents, cached: npt.NDArray[np.int64], page_bytes: int
) -> tuple[list[SizeClass], int]:
    """The size classes of slabs, and the bytes in use of them all."""
    found, in_use = [], 0
    for index in np.unique(extents.index[extents.is_slab]).tolist():
        mine = extents.is_slab & (extents.index == np.uint64(index)) & (extents.state == _ACTIVE)
        if index >= len(_SIZES) or not mine.any():
            continue
        size, slab_bytes = int(_SIZES[index]), extents.size[mine]
        blocks = slab_bytes // np.uint64(size)
        free = np.minimum(extents.free[mine], blocks)
        held = int((blocks - free).sum())
        count = min(held, int(cached[index]))
        used = held - count
        one_slab = int(slab_bytes[0])
        needed = -(-used // int(blocks[0])) * one_slab if int(blocks[0]) else 0
        total = int(slab_bytes.sum())
        found.append(
            SizeClass(
                size=size,
                used=used,
                free=int(free.sum()),
                bytes=total,
                movable=max(0, total - needed) // page_bytes * page_bytes,
                cached=count,
            )
        )
        in_use += used * size
    return found, in_use


def _large(extents: _Extents, cached: npt.NDArray[np.int64], page_bytes: int) -> tuple[list[SizeClass], int]:
    """The classes of blocks that have an extent each, and the bytes in use of them all.

    Since 5.3.1 the largest ones are of as many pages as they need, less than their class has. One page more
    is for the random offset.
    """
    found, in_use = [], 0
    mine = ~extents.is_slab & (extents.state == _ACTIVE) & (extents.index < np.uint64(len(_SIZES)))
    for index in np.unique(extents.index[mine]).tolist():
        these = mine & (extents.index == np.uint64(index))
        size, bytes_ = int(_SIZES[index]), extents.size[these].astype(np.int64)
        held = len(bytes_)
        blocks = np.where(bytes_ >= size, size, bytes_ - page_bytes)
        count = min(held, int(cached[index]))
        found.append(SizeClass(int(blocks.min()), held - count, 0, int(bytes_.sum()), 0, count))
        in_use += int(blocks.sum()) - count * size
    return found, in_use


def heaps(process: Process) -> tuple[Heap, ...]:
    """A `Reader`."""
    memory = Memory(process)
    heaps = []
    for image in images(process):
        is_named = _LIBRARY.search(image.path) is not None
        if not is_named and not any(_bss(image, _LEAST_ROOT_BYTES)):
            continue
        match = search(process, image, _VERSION)
        if match is None and not is_named:
            continue
        heap = _of_version(process, memory, image, match[1].decode() if match else "")
        variable = search(process, image, _SETTINGS)
        settings = variable[1].decode() if variable else ""
        heaps.append(
            replace(
                heap,
                library="" if is_named else bringer(process, image),
                settings=settings,
                control=function(process, image, f"{settings.removesuffix('MALLOC_CONF').lower()}mallctl"),
            )
        )
    return tuple(heaps)


def _of_version(process: Process, memory: Memory, image: Image, version: str) -> Heap:
    if layout(_NAME, version):
        return _read(process, memory, image, version.removesuffix("-0"))
    note = ""
    if _LIBRARY.search(image.path):
        # Only such a library has a name for it.
        note = (
            f"`gdb -p {process.pid} -batch -ex 'call (void)malloc_stats_print(0, 0, 0)'` prints its own"
            " statistics, on the process's standard error"
        )
    return unknown(_NAME, version.removesuffix("-0"), note)


def _read(process: Process, memory: Memory, image: Image, version: str) -> Heap:
    tree = _find_tree(memory, image)
    if tree is None:
        return unread(
            _NAME,
            version,
            "The tree of jemalloc's extents was not found: nothing is allocated yet, or the library is of "
            "a build with other address bits.",
        )
    for _ in range(_TRIES):
        extents = tree.extents()
        if extents.races <= _MAX_RACES * max(100, len(extents.start)):
            break
    else:
        return unread(_NAME, version, "The process changes its heap faster than it can be read.")
    blocks = _blocks(memory, tree, extents)
    caches = _caches(memory, image, extents, blocks)
    return _heap(process, memory, image, version, tree, extents, blocks, caches)


def _heap(
    process: Process,
    memory: Memory,
    image: Image,
    version: str,
    tree: _Tree,
    extents: _Extents,
    blocks: list[tuple[int, int]],
    caches: _Caches | None,
) -> Heap:
    notes: list[str] = []
    sure = exact
    if extents.is_huge.any():
        notes.append(
            "The huge page allocator (hpa) is on: free memory inside its huge pages is not in the footprint."
        )
        sure = estimate
    if memory.left <= 0:
        notes.append("The heap is too large to be read in full.")
        sure = estimate
    cached = np.zeros(len(_SIZES), dtype=np.int64)
    in_caches: Figure | None = None
    if caches:
        owners = extents.find(caches.blocks)
        good = (owners >= 0) & (caches.indices < len(_SIZES))
        good &= extents.index[np.maximum(owners, 0)] == caches.indices.astype(np.uint64)
        if np.count_nonzero(good) >= (1 - _MAX_RACES) * len(good) - 8:
            np.add.at(cached, caches.indices[good], 1)
            sure = sure if caches.is_complete else estimate
            in_caches = sure(int((cached * np.where(cached > 0, _SIZES, 0)).sum()))
            if not caches.is_complete:
                notes.append("Some threads' caches were not found: their blocks count as in use.")
    if in_caches is None:
        notes.append(
            "The threads' caches were not found, or are off (tcache:false): their blocks count as in use."
        )
    page_bytes = 1 << tree.shape.page_shift
    small, in_slabs = _classes(extents, cached, page_bytes)
    large, in_extents = _large(extents, cached, page_bytes)
    active, base = extents.total(_ACTIVE), resident(process, blocks)
    dirty = extents.total(_DIRTY)
    muzzy = resident(process, extents.ranges(_MUZZY))
    in_use = in_slabs + in_extents
    internal = _internal(extents, caches)
    in_use -= internal
    metadata = base + internal
    cached_bytes = in_caches.bytes if in_caches else 0
    fragmentation = max(0, active - in_use - internal - cached_bytes)
    ranges = merged([*blocks, *extents.ranges(_ACTIVE, _DIRTY, _MUZZY, _RETAINED)])
    return Heap(
        allocator=_NAME,
        version=version,
        footprint=sure(active + dirty + muzzy + base),
        in_use=sure(in_use) if in_caches else estimate(in_use),
        cached=in_caches or Figure(),
        retained=sure(dirty + muzzy),
        fragmentation=sure(fragmentation) if in_caches else estimate(fragmentation),
        metadata=exact(metadata) if blocks else Figure(),
        movable=sure(sum(each.movable for each in small)),
        classes=tuple(sorted((*small, *large), key=lambda each: each.size)),
        ranges=ranges,
        notes=tuple(notes),
        facts={
            "arenas": len(np.unique(extents.arena)),
            "tcaches": len(caches.stacks) if caches else 0,
            "dirty_bytes": dirty,
            "muzzy_bytes": muzzy,
            "reserved_bytes": extents.total(_RETAINED),
            "slabs": int(np.count_nonzero(extents.is_slab & (extents.state == _ACTIVE))),
        },
    )


def _internal(extents: _Extents, caches: _Caches | None) -> int:
    """Blocks that hold the caches' stacks: in use by jemalloc itself."""
    if not caches:
        return 0
    owners = extents.find(np.array([start for start, _ in caches.stacks], dtype=np.uint64))
    owners = owners[owners >= 0]
    owners = owners[extents.index[owners] < np.uint64(len(_SIZES))]
    return int(_SIZES[extents.index[owners].astype(np.int64)].sum())
