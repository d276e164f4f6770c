"""Reads the counters of calmalloc and ptlbmalloc2 out of a running process, without stopping it.

Each library carries an ELF note that leads to a table of where its counters lie (src/os/figures.h). Both are
read from the process's memory, so that it does not matter whether the library's file is still there, is
stripped, or is part of a static program. Nothing in another process's memory is trusted: what is not a table
as it should be is told as such, and reads are bounded.
"""

import ctypes
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

VERSION = 1

_MAGIC = b"calmfigs"
_OWNER = b"calmalloc\0"
_NOTE_TYPE = 1
_HEAD = struct.Struct("=8sIIHHI24s")
_TERM = struct.Struct("=24sQQQQQIIIIIIHBBI")
_ELF = struct.Struct("=16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("=IIQQQQQQ")
_PT_LOAD, _PT_NOTE = 1, 4
_SUBTRACT, _THROUGH = 1, 2
_PAGES = 1
_WORDS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_NAME = re.compile(rb"([a-z][a-z0-9_]*)\0+")

# More than any table of ours has: what asks for more is not ours, or broken.
_NOTES_BYTES = 1 << 16
_PROGRAM_HEADERS = 64
_TABLE_BYTES = 1 << 16
_HEAD_BYTES = 256
_ROWS = 8192
_SPAN_BYTES = 1 << 20
_BYTES_MOST = 16 << 20
_IOVECS = 512

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


class UnreadableError(Exception):
    """The process's memory, or a part of it, cannot be read."""


class RefusedError(UnreadableError):
    """The kernel does not let this user read the process."""


class NotATableError(Exception):
    """A note leads to something that is no table of this version."""


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [
    ctypes.c_int,
    ctypes.POINTER(_Iovec),
    ctypes.c_ulong,
    ctypes.POINTER(_Iovec),
    ctypes.c_ulong,
    ctypes.c_ulong,
]

# Reads so many bytes at each address; None where they cannot be read.
Reader = Callable[[Sequence[tuple[int, int]]], list[bytes | None]]


def _refusal(pid: int) -> str:
    """Why the kernel refuses, as far as can be told."""
    try:
        other = Path(f"/proc/{pid}").stat().st_uid != os.geteuid()
    except OSError:
        return "it has ended"
    if other:
        return "another user's process: needs root"
    try:
        scope = int(_YAMA.read_text())
    except (OSError, ValueError):
        scope = 0
    if scope:
        return f"kernel.yama.ptrace_scope is {scope}: needs root"
    return "the kernel refuses to read this process: needs root"


def reader_of(pid: int) -> Reader:
    """Reads a process's memory. Raises RefusedError, or UnreadableError where the process has ended."""

    def some(places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        sizes = [size for _, size in places]
        buffer = ctypes.create_string_buffer(max(1, sum(sizes)))
        local = _Iovec(ctypes.addressof(buffer), sum(sizes))
        remote = (_Iovec * len(places))(*[_Iovec(address, size) for address, size in places])
        got = _readv(pid, ctypes.byref(local), 1, remote, len(places), 0)
        if got < 0:
            error = ctypes.get_errno()
            if error == 1:
                raise RefusedError(_refusal(pid))
            if error == 3:
                raise UnreadableError("it has ended")
            got = 0
        data = buffer.raw
        found: list[bytes | None] = []
        at = 0
        for size in sizes:
            found.append(data[at : at + size] if at + size <= got else None)
            at += size
        return found

    def read(places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        found: list[bytes | None] = []
        while len(found) < len(places):
            part = some(places[len(found) : len(found) + _IOVECS])
            # It ends at the first place that cannot be read; those behind it may be readable.
            whole = next((i for i, piece in enumerate(part) if piece is None), len(part))
            found += part[: max(whole, 1)]
        return found

    return read


@dataclass(frozen=True)
class _Term:
    name: str
    at: int
    rows: int
    present: int
    less: int
    weights: int
    offset: int
    row_stride: int
    stride: int
    weight_stride: int
    present_offset: int
    present_stride: int
    count: int
    word: struct.Struct
    unit: int
    flags: int

    @property
    def span(self) -> int:
        return (self.count - 1) * self.stride + self.word.size


def _text(field: bytes) -> str:
    match = _NAME.fullmatch(field)
    if match is None:
        raise NotATableError("a name in it is none")
    return match[1].decode()


def _term(data: bytes) -> _Term:
    fields = _TERM.unpack_from(data)
    count, width, unit, flags = fields[-4:]
    if width not in _WORDS or unit > _PAGES or flags & ~(_SUBTRACT | _THROUGH):
        raise NotATableError("a figure in it is of no known kind")
    (at, rows, present, less, weights) = fields[1:6]
    (offset, row_stride, stride, weight_stride, present_offset, present_stride) = fields[6:12]
    term = _Term(
        name=_text(fields[0]),
        at=at,
        rows=rows,
        present=present,
        less=less,
        weights=weights,
        offset=offset,
        row_stride=row_stride,
        stride=stride,
        weight_stride=weight_stride,
        present_offset=present_offset,
        present_stride=present_stride,
        count=count or 1,
        word=struct.Struct("=" + _WORDS[width]),
        unit=unit,
        flags=flags,
    )
    spans = (term.span, term.count * weight_stride, present_stride)
    if max(spans) > _SPAN_BYTES:
        raise NotATableError("a figure in it is too large")
    return term


@dataclass(frozen=True)
class Table:
    """The counters of one library in one process."""

    library: str
    terms: tuple[_Term, ...]

    @classmethod
    def read(cls, read: Reader, address: int) -> "Table":
        """The table at an address. Raises NotATableError."""
        (head,) = read([(address, _HEAD.size)])
        if head is None:
            raise NotATableError("it cannot be read")
        magic, version, size, head_bytes, term_bytes, count, library = _HEAD.unpack(head)
        if magic != _MAGIC:
            raise NotATableError("it does not begin as one")
        if version != VERSION:
            raise NotATableError(f"it is of version {version}, and known is {VERSION}")
        if not (
            _HEAD.size <= head_bytes <= _HEAD_BYTES
            and _TERM.size <= term_bytes <= _HEAD_BYTES
            and size <= _TABLE_BYTES
            and size == head_bytes + count * term_bytes
        ):
            raise NotATableError("its size is not that of its parts")
        (body,) = read([(address + head_bytes, count * term_bytes)])
        if body is None:
            raise NotATableError("it cannot be read")
        terms = tuple(_term(body[i * term_bytes :]) for i in range(count))
        return cls(_text(library), terms)

    def values(self, read: Reader) -> dict[str, int]:
        """What the counters say now. One whose memory cannot be read, or says nonsense, is left out."""
        sums = dict.fromkeys((term.name for term in self.terms), 0)
        bad: set[str] = set()
        starts = _words(read, [t.at if t.flags & _THROUGH else 0 for t in self.terms], 8)
        present = _words(read, [t.present for t in self.terms], 8)
        rows = _words(read, [t.rows for t in self.terms], 4)
        plan: list[tuple[_Term, int]] = []
        places: list[tuple[int, int]] = []
        size = 0
        for term, start, flags, count in zip(self.terms, starts, present, rows, strict=True):
            at = start if term.flags & _THROUGH else term.at
            lines = _rows(read, term, flags, count)
            size += len(lines or ()) * term.span
            if at is None or lines is None or size > _BYTES_MOST:
                bad.add(term.name)
                continue
            if at == 0:
                continue
            plan.append((term, len(lines)))
            places += [(at + term.offset + row * term.row_stride, term.span) for row in lines]
            if term.less:
                places.append((term.less, 2 * term.count))
            if term.weights:
                places.append((term.weights, (term.count - 1) * term.weight_stride + 4))
        pieces = iter(read(places) if places else [])
        for term, lines_read in plan:
            spans = [next(pieces) for _ in range(lines_read)]
            less = next(pieces) if term.less else b""
            weights = next(pieces) if term.weights else b""
            if less is None or weights is None or any(span is None for span in spans):
                bad.add(term.name)
                continue
            value = _sum(term, [span for span in spans if span is not None], less, weights)
            sums[term.name] += -value if term.flags & _SUBTRACT else value
        # Words that were read at two moments may contradict each other.
        return {name: max(0, value) for name, value in sums.items() if name not in bad}


def _rows(read: Reader, term: _Term, flags: int | None, count: int | None) -> Sequence[int] | None:
    """The rows that count; None if that cannot be told, or they are too many."""
    if not term.rows:
        count = 1
    if count is None or count > _ROWS or (term.present and flags is None):
        return None
    if not term.present:
        return range(count)
    if not flags or count == 0:
        return ()
    if count * term.present_stride > _SPAN_BYTES:
        return None
    (data,) = read([(flags + term.present_offset, (count - 1) * term.present_stride + 1)])
    return None if data is None else [row for row in range(count) if data[row * term.present_stride]]


def _words(read: Reader, addresses: Sequence[int], size: int) -> list[int | None]:
    """The words at the addresses; 0 for none."""
    wanted = [(address, size) for address in addresses if address]
    pieces = iter(read(wanted) if wanted else [])
    found: list[int | None] = []
    for address in addresses:
        piece = next(pieces) if address else b"\0"
        found.append(None if piece is None else int.from_bytes(piece, sys.byteorder))
    return found


def _sum(term: _Term, spans: Sequence[bytes], less: bytes, weights: bytes) -> int:
    total = 0
    take = term.word.unpack_from
    if not less and not weights:
        total = sum(take(span, i * term.stride)[0] for span in spans for i in range(term.count))
    else:
        taken = [int.from_bytes(less[2 * i : 2 * i + 2], sys.byteorder) for i in range(term.count)]
        each = [
            int.from_bytes(weights[i * term.weight_stride :][:4], sys.byteorder) if weights else 1
            for i in range(term.count)
        ]
        for span in spans:
            words = [take(span, i * term.stride)[0] for i in range(term.count)]
            total += sum((w - off) * by for w, off, by in zip(words, taken, each, strict=True) if w > off)
    return total * _PAGE_BYTES if term.unit == _PAGES else total


@dataclass(frozen=True)
class Image:
    """A file that is mapped, and where it begins in memory."""

    start: int
    device: str
    inode: str
    path: str


def images(pid: int) -> list[Image]:
    """The programs and libraries that a process has mapped from their beginning. Raises UnreadableError.

    Not data: to read a page of a file that nobody answers for would take its time.
    """
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except PermissionError as error:
        raise RefusedError(_refusal(pid)) from error
    except OSError as error:
        raise UnreadableError("it has ended") from error
    begins: dict[tuple[str, str, str], int] = {}
    executed = set()
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith("/") or fields[1][3] != "p":
            continue
        key = (fields[3], fields[4], fields[5])
        if fields[1][2] == "x":
            executed.add(key)
        if fields[1][0] == "r" and int(fields[2], 16) == 0:
            begins.setdefault(key, int(fields[0].split("-")[0], 16))
    return [Image(begin, *key) for key, begin in begins.items() if key in executed]


def _notes(data: bytes, align: int) -> Iterator[tuple[bytes, int, int, int]]:
    """Owner, type, and where the content lies."""
    at = 0
    while at + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("=III", data, at)
        name_at = at + 12
        content = name_at + -(-name_size // align) * align
        if content + size > len(data):
            return
        yield data[name_at : name_at + name_size], kind, content, size
        at = content + -(-size // align) * align


def tables_of_image(read: Reader, start: int) -> list[int] | None:
    """The addresses of the tables that notes of an image lead to. None: it cannot be read to its end."""
    (head,) = read([(start, _ELF.size)])
    if head is None:
        return None
    fields = _ELF.unpack(head)
    ident, program_at, entry_size, entries = fields[0], fields[5], fields[9], fields[10]
    native = b"\x01" if struct.pack("=H", 1) == b"\x01\x00" else b"\x02"
    if ident[:5] != b"\x7fELF\x02" or ident[5:6] != native:
        return []
    if entry_size != _PROGRAM.size or not 0 < entries <= _PROGRAM_HEADERS or program_at > 1 << 20:
        return []
    (table,) = read([(start + program_at, entries * entry_size)])
    if table is None:
        return None
    headers = list(_PROGRAM.iter_unpack(table))
    first = next((header for header in headers if header[0] == _PT_LOAD and header[2] == 0), None)
    if first is None:
        return []
    bias = start - first[3]
    found = []
    for kind, _, _, address, _, size, _, align in headers:
        if kind != _PT_NOTE or size > _NOTES_BYTES:
            continue
        (data,) = read([(bias + address, size)])
        if data is None:
            return None
        for owner, note_type, content, length in _notes(data, 8 if align == 8 else 4):
            if owner == _OWNER and note_type == _NOTE_TYPE and length == 8:
                distance = int.from_bytes(data[content : content + 8], sys.byteorder, signed=True)
                found.append((bias + address + content + distance) % (1 << 64))
    return found


class Finder:
    """Finds the tables of processes, and remembers which files have none."""

    def __init__(self) -> None:
        self._without: set[tuple[str, str, str]] = set()

    def tables(self, pid: int, mapped: Sequence[Image]) -> tuple[list[Table], str]:
        """The tables of a process, and why one that is there is not read. Raises UnreadableError."""
        read = reader_of(pid)
        found: list[Table] = []
        why = ""
        for image in mapped:
            key = (image.device, image.inode, image.path)
            if key in self._without:
                continue
            addresses = tables_of_image(read, image.start)
            # One that cannot be read may be gone from this process since, and is in others still.
            if addresses == []:
                self._without.add(key)
            for address in addresses or ():
                try:
                    found.append(Table.read(read, address))
                except NotATableError as error:
                    why = f"the table of counters in {image.path} is not read: {error}"
        return found, why
