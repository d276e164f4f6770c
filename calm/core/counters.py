"""Reads the counters of calmalloc and ptlbmalloc2 in a running process, without stopping it.

Each library carries an ELF note that leads to a table of its counters' addresses (src/os/counter_table.h).
Note and table are read from the process's memory, not from the library's file: that may be deleted, replaced
or stripped. Another process's memory is not trusted: names and sizes are checked, and reads are bounded.
"""

import os
import re
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from calm.core import proc
from calm.core.proc import Mapping

VERSION = 1
STATES = {0: "starting", 1: "governs", 2: "left to glibc"}
"""Values of ptlbmalloc2's counter `state`."""

_MAGIC = b"calmstat"
_HEAD = struct.Struct("<8sIHHQQ24s16sQQQQ")
_TERM = struct.Struct("<24s4Q9IHBBI")
_SUBTRACT = 1
_PAGES = 1
_IN_WORDS = 2
_WIDTHS = (1, 2, 4, 8)
_NAME = re.compile(rb"([a-z][a-z0-9_]*)\0+")

_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_ELF = struct.Struct("<6s26xQ14xHH6x")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_PT_LOAD, _PT_NOTE = 1, 4
_NOTE = re.compile(re.escape(struct.pack("<III12s", 10, 8, 1, b"calmalloc")) + rb"(.{8})", re.DOTALL)

# More than any of our tables needs: a table that asks for more is foreign or damaged.
_MAX_NOTES_BYTES = 1 << 16
_MAX_PROGRAM_HEADERS = 64
_MAX_TABLE_BYTES = 1 << 16
_MAX_TERM_BYTES = 256
_MAX_POINTERS = 256
_MAX_ROWS = 8192
_MAX_SPAN_BYTES = 1 << 20
_MAX_FILES = 8192
MAX_BYTES = 16 << 20

YOUNG_S = 10.0
"""Of a process that is older, the libraries are loaded and relocated, and its fork is over."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Read = Callable[[int, int], bytes | None]
"""Reads bytes at an address, as `proc.memory` does."""


class NotATableError(Exception):
    """A note leads to something that is not a table of this version."""


class _UnreadableError(Exception):
    """A counter's memory cannot be read, or it asks for too much."""


class _Term(NamedTuple):
    """A `struct counter_term`: the sum of some words, a part of a counter."""

    name: str
    at: int
    rows: int
    present: int
    weights: int
    pointers: int
    pointer_stride: int
    offset: int
    row_stride: int
    stride: int
    weight_stride: int
    present_offset: int
    present_stride: int
    base_offset: int
    words: int
    width: int
    unit: int
    flags: int

    @property
    def span(self) -> int:
        """Bytes from the first word of a row to the end of its last."""
        return (self.words - 1) * self.stride + self.width

    @property
    def cost(self) -> int:
        """Of a row, in bytes: words that overlap are read one by one, too."""
        return (
            max(self.span, self.words * self.width) * max(1, self.pointers) * (3 if self.base_offset else 1)
        )


def _text(field: bytes) -> str:
    match = _NAME.fullmatch(field)
    if match is None:
        raise NotATableError("a name in it is not well-formed")
    return match[1].decode()


def _term(data: bytes) -> _Term:
    name, *fields = _TERM.unpack_from(data)
    term = _Term(_text(name), *fields)
    if term.width not in _WIDTHS or term.unit > _IN_WORDS or term.flags & ~_SUBTRACT:
        raise NotATableError("a counter in it is of no known kind")
    term = term._replace(words=term.words or 1)
    spans = (
        term.span,
        term.words * term.weight_stride,
        term.present_stride,
        term.pointers * term.pointer_stride,
        term.base_offset,
    )
    if max(spans) > _MAX_SPAN_BYTES or term.pointers > _MAX_POINTERS:
        raise NotATableError("a counter in it is too large")
    return term


@dataclass(frozen=True)
class Table:
    """The counters of one library in one process."""

    library: str
    terms: tuple[_Term, ...]
    release: str = ""
    """Of the library; "" where the table does not say."""
    control: int = 0
    """Addresses of further tables; 0: there is none."""
    samples: int = 0
    blocks: int = 0
    process: int = 0

    @classmethod
    def read(cls, read: Read, address: int) -> "Table":
        """The table at an address. Raises NotATableError."""
        if (head := read(address, _HEAD.size)) is None:
            raise NotATableError("it cannot be read")
        magic, version, size, term_bytes, terms_at, count, library, release, *addresses = _HEAD.unpack(head)
        if magic != _MAGIC:
            raise NotATableError("it does not begin as one")
        if version != VERSION:
            raise NotATableError(f"it is of version {version}; this calm reads {VERSION}")
        if not (
            _HEAD.size <= size
            and _TERM.size <= term_bytes <= _MAX_TERM_BYTES
            and count * term_bytes <= _MAX_TABLE_BYTES
        ):
            raise NotATableError("its size is not that of its parts")
        # None in a library that the dynamic linker has not yet relocated.
        body = read(terms_at, count * term_bytes)
        terms = tuple(_term(body[i * term_bytes :]) for i in range(count)) if body else ()
        return cls(_text(library), terms, release.split(b"\0")[0].decode("ascii", "replace"), *addresses)

    def is_of(self, read: Read, pid: int) -> bool:
        """Whether the counts are this process's own: in one that has just been forked they are its parent's.

        One that was made without fork handlers keeps those. Raises GoneError.
        """
        number = read(self.process, 4) if self.process else None
        # In its own namespace, which is the last one.
        own = proc.status(pid).get("NSpid", "").split()[-1:]
        return not number or not own or int.from_bytes(number, "little") in (0, int(own[0]))

    def values(self, read: Read) -> dict[str, int]:
        """The counters' values now, without those whose memory cannot be read or that ask for too much."""
        sums = dict.fromkeys((term.name for term in self.terms), 0)
        bad: set[str] = set()
        left = MAX_BYTES
        for term in self.terms:
            try:
                rows = _rows(read, term)
                left -= len(rows) * term.cost
                if left < 0:
                    raise _UnreadableError
                value = _value(read, term, rows)
                sums[term.name] += -value if term.flags & _SUBTRACT else value
            except _UnreadableError:
                bad.add(term.name)
        # Words that were read at different moments may contradict each other.
        return {name: max(0, value) for name, value in sums.items() if name not in bad}

    def by_weight(self, read: Read, name: str) -> dict[int, int] | None:
        """A counter of weighted words, as of blocks by their sizes: the sum of the words of each weight.

        None where its memory cannot be read.
        """
        sums: dict[int, int] = {}
        try:
            for term in (each for each in self.terms if each.name == name):
                for word, weight in zip(*_weighted(read, term, _rows(read, term)), strict=True):
                    sums[weight] = sums.get(weight, 0) + word
        except _UnreadableError:
            return None
        return sums


def _words(read: Read, address: int, width: int, count: int = 1, stride: int = 0) -> list[int]:
    data = read(address, (count - 1) * stride + width)
    if data is None:
        raise _UnreadableError
    return [int.from_bytes(data[i * stride : i * stride + width], "little") for i in range(count)]


def _rows(read: Read, term: _Term) -> Sequence[int]:
    """The rows that count."""
    (count,) = _words(read, term.rows, 4) if term.rows else (1,)
    if count > _MAX_ROWS:
        raise _UnreadableError
    if not term.present or count == 0:
        return range(count)
    (flags,) = _words(read, term.present, 8)
    if count * term.present_stride > _MAX_SPAN_BYTES:
        raise _UnreadableError
    present = _words(read, flags + term.present_offset, 1, count, term.present_stride) if flags else ()
    return [row for row, flag in enumerate(present) if flag]


def _weighted(read: Read, term: _Term, rows: Sequence[int]) -> tuple[list[int], list[int]]:
    """The sum over the rows, at each pointer, of each word; and its weight."""
    starts = _words(read, term.at, 8, term.pointers, term.pointer_stride) if term.pointers else [term.at]
    weights = (
        _words(read, term.weights, 4, term.words, term.weight_stride) if term.weights else [1] * term.words
    )
    sums = [0] * term.words
    starts = [start for start in starts if start]
    for start in starts:
        for row in rows:
            words = _row(read, term, start + term.offset + row * term.row_stride)
            sums = [sum_ + word for sum_, word in zip(sums, words, strict=True)]
    return sums, weights


def _row(read: Read, term: _Term, at: int) -> list[int]:
    """The words of a row, each less its base. Words whose bases just changed count 0."""
    if not term.base_offset:
        words = _words(read, at, term.width, term.words, term.stride)
    else:
        bases_at, ones = at + term.base_offset, (1 << 8 * term.width) - 1
        before = _words(read, bases_at, term.width, term.words, term.stride)
        words = _words(read, at, term.width, term.words, term.stride)
        after = _words(read, bases_at, term.width, term.words, term.stride)
        words = [
            max(0, word - (base ^ ones)) if base == then else 0
            for word, base, then in zip(words, before, after, strict=True)
        ]
    return [word // 8 for word in words] if term.unit == _IN_WORDS else words


def _value(read: Read, term: _Term, rows: Sequence[int]) -> int:
    total = sum(word * weight for word, weight in zip(*_weighted(read, term, rows), strict=True))
    return total * _PAGE_BYTES if term.unit == _PAGES else total


def images(pid: int) -> list[Mapping]:
    """The first mapping of each program and library of a process. Raises GoneError or PermissionError.

    Files of data are left out: reading a page of one may wait for a disk or a network.
    """
    mappings = [each for each in proc.maps(pid) if each.path.startswith("/") and each.rights[3] == "p"]
    executed = {(each.device, each.inode, each.path) for each in mappings if each.rights[2] == "x"}
    found: dict[tuple[str, int, str], Mapping] = {}
    for each in mappings:
        if each.offset == 0 and each.rights[0] == "r":
            found.setdefault((each.device, each.inode, each.path), each)
    return [image for key, image in found.items() if key in executed]


def table_addresses(read: Read, start: int) -> list[int] | None:
    """The addresses of the tables that an ELF image's notes lead to; None where it cannot be read."""
    if (head := read(start, _ELF.size)) is None:
        return None
    magic, offset, entry_bytes, entries = _ELF.unpack(head)
    if (
        magic != _ELF64_LITTLE_ENDIAN
        or entry_bytes != _PROGRAM.size
        or not 0 < entries <= _MAX_PROGRAM_HEADERS
        or offset > 1 << 20
    ):
        return []
    if (data := read(start + offset, entries * entry_bytes)) is None:
        return None
    headers = list(_PROGRAM.iter_unpack(data))
    bias = next((start - header[3] for header in headers if header[0] == _PT_LOAD and header[2] == 0), None)
    found = []
    for kind, _, _, address, _, size, _, _ in headers if bias is not None else ():
        if kind != _PT_NOTE or size > _MAX_NOTES_BYTES:
            continue
        if (notes := read(bias + address, size)) is None:
            return None
        for note in _NOTE.finditer(notes):
            distance = int.from_bytes(note[1], "little", signed=True)
            found.append((bias + address + note.start(1) + distance) % (1 << 64))
    return found


def without_parents(read: Read, tables: Sequence[Table], stat: proc.Stat) -> list[Table]:
    """Those whose counts are the process's own. To an old process all belong: see `Table.is_of`."""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started_ticks / proc.TICKS
    return [table for table in tables if age_s > YOUNG_S or table.is_of(read, stat.pid)]


class Finder:
    """Finds the tables of processes, and remembers the files that have none."""

    def __init__(self) -> None:
        self._without: set[tuple[str, int, str]] = set()

    def tables(self, read: Read, mapped: Sequence[Mapping]) -> tuple[list[Table], str]:
        """The tables of a process's images, and why one that is there cannot be used."""
        found: list[Table] = []
        why = ""
        for image in mapped:
            key = (image.device, image.inode, image.path)
            if key in self._without:
                continue
            addresses = table_addresses(read, image.start)
            # An image that cannot be read may be unmapped by now, and still be there in other processes.
            if addresses == []:
                if len(self._without) >= _MAX_FILES:
                    self._without.clear()
                self._without.add(key)
            for address in addresses or ():
                try:
                    found.append(Table.read(read, address))
                except NotATableError as error:
                    why = f"the table of counters in {image.path} cannot be used: {error}"
        return found, why
