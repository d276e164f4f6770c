"""What the readers of foreign allocators share: images, bounded scans of memory, records read in bulk.

Nothing that is read is trusted: a reader takes an address for a record only if fields that the allocator
keeps in two places agree.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from calm.commands.explain.model import MAX_BYTES, Process
from calm.core import elf
from calm.core.proc import Mapping

Words = npt.NDArray[np.uint64]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAX_FILE_BYTES = 256 << 20
_CHUNK = 1 << 20
_WRITABLE = "rw"


@dataclass(frozen=True)
class Image:
    """A program or library that a process has mapped: its parts in memory."""

    path: str
    inode: int
    constant: tuple[tuple[int, int], ...]
    """Mappings that cannot be written: code and strings."""
    data: tuple[tuple[int, int], ...]
    """Those that can be, .bss included."""


def images(process: Process) -> list[Image]:
    """Every file of which a mapping is executable."""
    parts: dict[tuple[str, int, str], tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    executed = set()
    last: tuple[tuple[str, int, str], int] | None = None
    for each in process.mappings:
        key = (each.device, each.inode, each.path)
        if each.path.startswith("/"):
            constant, data = parts.setdefault(key, ([], []))
            if each.rights.startswith(_WRITABLE):
                _extend(data, each)
            elif each.rights[0] == "r":
                _extend(constant, each)
            if each.rights[2] == "x":
                executed.add(key)
            last = key, each.end
        elif last and each.start == last[1] and not each.path and each.rights.startswith(_WRITABLE):
            # The part of .bss that no page of the file covers.
            _extend(parts[last[0]][1], each)
            last = last[0], each.end
        else:
            last = None
    return [
        Image(key[2], key[1], tuple(constant), tuple(data))
        for key, (constant, data) in parts.items()
        if key in executed
    ]


def _extend(parts: list[tuple[int, int]], each: Mapping) -> None:
    if parts and parts[-1][1] == each.start:
        parts[-1] = parts[-1][0], each.end
    else:
        parts.append((each.start, each.end))


def search(process: Process, image: Image, pattern: bytes) -> re.Match[bytes] | None:
    """The first match of a regular expression in an image, of at most 256 bytes."""
    found = _matches(process, image, pattern, first=True)
    return found[0] if found else None


def search_all(process: Process, image: Image, pattern: bytes) -> set[bytes]:
    """What the first group of a regular expression matches in an image."""
    return {each[1] for each in _matches(process, image, pattern, first=False)}


def _matches(process: Process, image: Image, pattern: bytes, first: bool) -> tuple[re.Match[bytes], ...]:
    """In the file, if it is still the one that is mapped, as its pages would count as the process's."""
    try:
        path = Path(f"/proc/{process.pid}/root{image.path}")
        if path.stat().st_ino == image.inode:
            return _in_file(str(path), image.inode, pattern, first)
    except (OSError, ValueError):
        pass
    found: list[re.Match[bytes]] = []
    left = _MAX_FILE_BYTES
    for start, end in image.constant:
        for at in range(start, min(end, start + left), _CHUNK):
            text = process.read(at, min(end - at, _CHUNK + 256)) or b""
            found += islice(re.finditer(pattern, text, re.DOTALL), 1 if first else None)
            if found and first:
                return tuple(found)
        left -= end - start
        if left <= 0:
            break
    return tuple(found)


@lru_cache(maxsize=256)
def _in_file(path: str, inode: int, pattern: bytes, first: bool) -> tuple[re.Match[bytes], ...]:
    """Raises OSError or ValueError where there is nothing to search."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:  # noqa: PTH123
        found = re.finditer(pattern, text[:_MAX_FILE_BYTES], re.DOTALL)
        same = os.fstat(file.fileno()).st_ino == inode
        return tuple(islice(found, 1 if first else None)) if same else ()


_AROUND = 48
_LEA = re.compile(rb"([\x48\x4c])\x8d([\x05\x0d\x15\x1d\x25\x2d\x35\x3d])(.{4})", re.DOTALL)


def references(process: Process, image: Image, pattern: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Where code for x86-64 loads the address at which a match in the image's file ends.

    The number of the register that it is loaded into, and the code before and after. Nothing where the file
    is not the one that is mapped.
    """
    path = f"/proc/{process.pid}/root{image.path}"
    with contextlib.suppress(OSError, elf.ElfError):
        if Path(path).stat().st_ino == image.inode:
            yield from _references(path, image.inode, pattern)


@lru_cache(maxsize=64)
def _references(path: str, inode: int, pattern: bytes) -> tuple[tuple[int, bytes, bytes], ...]:
    """`inode` is a part of the key."""
    text = Path(path).read_bytes()
    match = re.search(pattern, text)
    if match is None or len(text) > _MAX_FILE_BYTES:
        return ()
    found = []
    with elf.opened(path) as file:
        loads = [each.header for each in file.iter_segments("PT_LOAD")]
        at = match.end()
        target = next((at - each.p_offset + each.p_vaddr for each in loads if _holds(each, at)), 0)
        for each in loads if file["e_machine"] == "EM_X86_64" and target else ():
            code = text[each.p_offset : each.p_offset + each.p_filesz] if each.p_flags & 1 else b""
            for lea in _LEA.finditer(code):
                if each.p_vaddr + lea.end() + int.from_bytes(lea[3], "little", signed=True) == target:
                    register = lea[2][0] >> 3 | (lea[1][0] & 4) << 1
                    before = code[max(0, lea.start() - _AROUND) : lea.start()]
                    found.append((register, before, code[lea.end() : lea.end() + _AROUND]))
    return tuple(found)


def _holds(segment: Any, offset: int) -> bool:  # noqa: ANN401
    return bool(segment.p_offset <= offset < segment.p_offset + segment.p_filesz)


class Memory:
    """Reads the pages of a process that hold something, up to a number of bytes in all."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.left = MAX_BYTES
        self.writable = [
            each
            for each in process.mappings
            if each.rights.startswith(_WRITABLE) and not each.path.startswith("/dev/")
        ]
        self._starts = np.array([each.start for each in self.writable], dtype=np.uint64)
        self._ends = np.array([each.end for each in self.writable], dtype=np.uint64)

    def mapping(self, address: int) -> Mapping | None:
        """The writable mapping of an address."""
        if not 0 <= address < 1 << 64:
            return None
        index = int(np.searchsorted(self._starts, np.uint64(address), side="right")) - 1
        return self.writable[index] if index >= 0 and address < self.writable[index].end else None

    def is_writable(self, addresses: Words, size: int = 1) -> npt.NDArray[np.bool_]:
        """Which of them begin that many bytes of one writable mapping."""
        if not len(self._starts):
            return np.zeros(len(addresses), dtype=np.bool_)
        index = np.searchsorted(self._starts, addresses, side="right") - 1
        room = self._ends[np.maximum(index, 0)] - addresses
        inside = (index >= 0) & (addresses < self._ends[np.maximum(index, 0)])
        return inside & (room >= np.uint64(size))

    def read(self, address: int, size: int) -> bytes | None:
        """Bytes, unless too much was read already."""
        if size > self.left:
            return None
        self.left -= size
        return self.process.read(address, size)

    def words(self, address: int, count: int) -> Words | None:
        data = self.read(address, count * 8)
        return None if data is None else np.frombuffer(data, dtype="<u8")

    def touched(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of a range that may hold something but zeros: reading others would populate them."""
        mapping = self.mapping(start)
        if mapping and (mapping.sizes_kib or {}).get("Swap"):
            yield start, end
            return
        present = self.process.present(start, end)
        if present is None:
            if end - start <= MAX_BYTES:
                yield start, end
            return
        edges = np.flatnonzero(np.diff(np.concatenate([[False], present, [False]])))
        base = start // _PAGE * _PAGE
        for first, last in edges.reshape(-1, 2).tolist():
            yield max(start, base + first * _PAGE), min(end, base + last * _PAGE)

    def nonzero(self, start: int, end: int) -> tuple[Words, Words]:
        """Addresses and values of the words of a range that are not zero."""
        addresses, values = [], []
        for begin, stop in self.touched(start, end):
            for at in range(begin, stop, _CHUNK):
                words = self.words(at, (min(stop, at + _CHUNK) - at) // 8)
                if words is None:
                    continue
                (where,) = np.nonzero(words)
                addresses.append(where.astype(np.uint64) * np.uint64(8) + np.uint64(at))
                values.append(words[where])
        if not values:
            return np.empty(0, np.uint64), np.empty(0, np.uint64)
        return np.concatenate(addresses), np.concatenate(values)

    def records(self, addresses: Words, size: int) -> npt.NDArray[np.uint8]:
        """A row of bytes for each address, in ascending order; a row that cannot be read is of zeros."""
        rows = np.zeros((len(addresses), size), dtype=np.uint8)
        first = 0
        while first < len(addresses):
            begin = int(addresses[first])
            last = int(np.searchsorted(addresses, np.uint64(begin + _CHUNK), side="right"))
            # Only neighbours are read together: what lies between two distant records stays untouched.
            gaps = np.diff(addresses[first:last]) > np.uint64(16 * size)
            if gaps.any():
                last = first + int(np.argmax(gaps)) + 1
            data = self.read(begin, int(addresses[last - 1]) - begin + size)
            if data is not None:
                offsets = (addresses[first:last] - np.uint64(begin)).astype(np.int64)
                bytes_ = np.frombuffer(data, dtype=np.uint8)
                rows[first:last] = bytes_[offsets[:, None] + np.arange(size)]
            first = last
        return rows


def field(rows: npt.NDArray[np.uint8], offset: int, width: int) -> Words:
    """A field of records, as unsigned integers."""
    columns = np.ascontiguousarray(rows[:, offset : offset + width])
    return columns.view(f"<u{width}").reshape(-1).astype(np.uint64)


def bringer(process: Process, image: Image) -> str:
    """The file's name of a library that brought an allocator for itself.

    "" of the program, and of a library with a malloc or whose file is gone: it may be the process's.
    """
    if image.path.endswith(" (deleted)") or function(process, image, "malloc"):
        return ""
    try:
        is_program = Path(f"/proc/{process.pid}/exe").stat().st_ino == image.inode
    except OSError:
        is_program = False
    return "" if is_program else Path(image.path).name


def function(process: Process, image: Image, name: str) -> str:
    """The same name, if the image has such a symbol; otherwise ""."""
    return name if process.symbols(f"^{re.escape(image.path)}$", [name]) else ""


def resident(process: Process, ranges: Iterable[tuple[int, int]]) -> int:
    """Resident bytes of ranges that do not overlap; all of them where that cannot be read."""
    total = 0
    for start, end in ranges:
        found = process.resident(start, end)
        total += end - start if found is None else found
    return total


def resident_each(
    process: Process, areas: Iterable[tuple[int, int]], starts: Words, ends: Words
) -> npt.NDArray[np.int64]:
    """Resident bytes of each of many runs of pages, most of which are in a few areas."""
    found = np.full(len(starts), -1, dtype=np.int64)
    for start, end in areas:
        (inside,) = np.nonzero((starts >= np.uint64(start)) & (ends <= np.uint64(end)))
        present = process.present(start, end) if len(inside) else None
        if present is not None:
            before = np.concatenate([[0], np.cumsum(present)])
            first, last = (
                ((edges[inside] - np.uint64(start)) // np.uint64(_PAGE)).astype(np.int64)
                for edges in (starts, ends)
            )
            found[inside] = (before[last] - before[first]) * _PAGE
    for index in np.flatnonzero(found < 0).tolist():
        found[index] = resident(process, [(int(starts[index]), int(ends[index]))])
    return found
