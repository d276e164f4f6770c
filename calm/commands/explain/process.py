"""A process as the readers see it: its mappings, memory, symbols and resident pages, without stopping it."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from calm.commands.explain.model import MAX_BYTES, Image
from calm.core import elf, proc
from calm.core.counters import Read
from calm.core.proc import Mapping

PAGE = os.sysconf("SC_PAGE_SIZE")
_PRESENT = np.uint64(1 << 63)
_PAGEMAP_CHUNK = 1 << 20
# A program may reserve terabytes of which it uses little, and the kernel takes seconds to look at each.
_PAGES_AT_ONCE, _MAX_PAGES = 1 << 27, 1 << 29
_FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}


class LiveProcess:
    """One sample of a running process: the mappings are read when it is made, memory when it is asked for."""

    def __init__(self, pid: int, read: Read, pagemap: int | None) -> None:
        self.pid = pid
        self.page = PAGE
        self.mappings: Sequence[Mapping] = proc.smaps(pid)
        self._read = read
        self._pagemap = pagemap
        self._left = MAX_BYTES
        self._pages_left = _MAX_PAGES

    def read(self, address: int, size: int) -> bytes | None:
        if not 0 <= size <= self._left or address < 0:
            return None
        self._left -= size
        return self._read(address, size)

    def words(self, address: int, count: int, width: int = 8) -> tuple[int, ...] | None:
        data = self.read(address, count * width)
        return None if data is None else struct.unpack(f"<{count}{_FORMATS[width]}", data)

    @cached_property
    def _starts(self) -> list[int]:
        return [each.start for each in self.mappings]

    def images(self) -> Iterator[Mapping]:
        """The first mapping of each file of which some part is executable."""
        executed = {each.path for each in self.mappings if "x" in each.rights and each.path.startswith("/")}
        seen: set[str] = set()
        for each in self.mappings:
            if each.path in executed and each.path not in seen:
                seen.add(each.path)
                yield each

    def _found(self, pattern: str) -> Iterator[Mapping]:
        return (each for each in self.images() if re.search(pattern, each.path))

    def file(self, path: str) -> str:
        """A path that opens the file as the process sees it, in its own root."""
        return f"/proc/{self.pid}/root{path}"

    def image(self, pattern: str) -> Image | None:
        first = next(self._found(pattern), None)
        if first is None:
            return None
        facts = _facts(self.file(first.path), first.inode)
        if facts is None:
            return Image(first.path, 0, (), "")
        address, writable, build_id, _ = facts
        bias = first.start - address
        return Image(first.path, bias, tuple((bias + a, bias + b) for a, b in writable), build_id)

    def symbols(self, pattern: str, names: Iterable[str]) -> dict[str, int]:
        wanted = set(names)
        for first in self._found(pattern):
            facts = _facts(self.file(first.path), first.inode)
            if facts is None:
                continue
            found = {name: first.start - facts[0] + facts[3][name] for name in wanted if name in facts[3]}
            if found:
                return found
        return {}

    def present(self, start: int, end: int) -> Any:  # noqa: ANN401
        if self._pagemap is None:
            return None
        first, last = start // self.page, -(-end // self.page)
        if last - first > min(_PAGES_AT_ONCE, self._pages_left):
            return None
        self._pages_left -= max(0, last - first)
        parts = []
        for at in range(first, last, _PAGEMAP_CHUNK):
            count = min(last - at, _PAGEMAP_CHUNK)
            try:
                data = os.pread(self._pagemap, count * 8, at * 8)
            except OSError:
                return None
            entries = np.zeros(count, np.uint64)
            # Where there are no page tables at all the file is short.
            entries[: len(data) // 8] = np.frombuffer(data, np.uint64)
            parts.append(entries & _PRESENT != 0)
        return np.concatenate(parts) if parts else np.zeros(0, bool)

    def resident(self, start: int, end: int) -> int | None:
        found = self.present(start, end)
        return None if found is None else int(np.count_nonzero(found)) * self.page


_Facts = tuple[int, tuple[tuple[int, int], ...], str, dict[str, int]]


@lru_cache(maxsize=64)
def _facts(path: str, inode: int) -> _Facts | None:
    """Of a file: the address of its first segment, its writable segments, its build id and its symbols.

    None where the file cannot be read or is not the one that is mapped: it was deleted or replaced.
    """
    try:
        if Path(path).stat().st_ino != inode:
            return None
        with elf.opened(path) as file:
            loads = [each.header for each in file.iter_segments("PT_LOAD")]
            writable = tuple(
                (each.p_vaddr, each.p_vaddr + each.p_memsz) for each in loads if each.p_flags & 2
            )
            notes = (note for part in file.iter_segments("PT_NOTE") for note in part.iter_notes())
            build_id = next((str(note.n_desc) for note in notes if note.n_type == "NT_GNU_BUILD_ID"), "")
            symbols = {
                symbol.name: int(symbol.entry.st_value)
                for name in (".dynsym", ".symtab")
                if (section := file.get_section_by_name(name)) is not None
                for symbol in section.iter_symbols()
                if symbol.entry.st_value and symbol.entry.st_info.type in ("STT_OBJECT", "STT_FUNC")
            }
            return loads[0].p_vaddr & -PAGE, writable, build_id, symbols
    except (elf.ElfError, OSError, IndexError):
        return None


@contextmanager
def sample(pid: int) -> Iterator[LiveProcess]:
    """A process at this moment. Raises GoneError or PermissionError."""
    with proc.memory(pid) as read:
        pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield LiveProcess(pid, read, pagemap)
        finally:
            os.close(pagemap)
