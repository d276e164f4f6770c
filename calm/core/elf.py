"""Reads ELF files: programs and shared libraries.

pyelftools is imported where a file is read: most of calm's commands end without it.
"""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MAGIC = b"\x7fELF"


class ElfError(Exception):
    """A file cannot be read, or is not an intact ELF file; the message names it."""


class Segment(NamedTuple):
    """A part of a file that is loaded into memory."""

    offset: int
    address: int
    size: int
    """In the file; more of the memory may follow, as zeros."""


def _opened(path: str | Path) -> BinaryIO:
    """Without waiting: a pipe may lie where a file that a process has mapped was."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # no path has such a character, but what foreign files call one may
        raise OSError(errno.EINVAL, str(error)) from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "not a regular file")


@contextmanager
def opened(path: str | Path) -> Iterator[Any]:
    """A file as an ELFFile of pyelftools. Raises ElfError for any error in the block."""
    try:
        file = _opened(path)
    except OSError as error:
        raise ElfError(f"{path}: {error.strerror}") from error
    with file:
        if not _is_elf(file):
            raise ElfError(f"{path} is not an ELF file")
        from elftools.elf.elffile import ELFFile

        try:
            yield ELFFile(file)
        except Exception as error:
            # Of a damaged file pyelftools raises errors of many classes, which share no base.
            raise ElfError(f"{path} is not an intact ELF file: {error}") from error


def _is_elf(file: BinaryIO) -> bool:
    magic = file.read(len(MAGIC))
    file.seek(0)
    return magic == MAGIC


def is_elf(path: str | Path) -> bool:
    try:
        with _opened(path) as file:
            return _is_elf(file)
    except OSError:
        return False


def is_loadable(path: str | Path) -> bool:
    """Whether it is a program or a shared library, and not an object file or a core dump."""
    with opened(path) as file:
        return file.header.e_type in ("ET_EXEC", "ET_DYN")


def is_shared_library_here(path: str | Path) -> bool:
    """Whether it is a shared object, or a position-independent program, for this machine's processes."""
    with opened(path) as file, opened("/proc/self/exe") as own:
        return (
            file.header.e_type == "ET_DYN"
            and all(getattr(file, name) == getattr(own, name) for name in ("elfclass", "little_endian"))
            and bool(file.header.e_machine == own.header.e_machine)
        )


def segments(path: str | Path) -> tuple[Segment, ...]:
    with opened(path) as file:
        return tuple(
            Segment(each.header.p_offset, each.header.p_vaddr, each.header.p_filesz)
            for each in file.iter_segments("PT_LOAD")
        )


class Functions:
    """The functions of a file by their addresses."""

    def __init__(self, found: dict[int, tuple[int, str]]) -> None:
        self._starts = sorted(found)
        self._found = found

    def at(self, address: int) -> str | None:
        """The name of the function that an address belongs to."""
        if not (index := bisect_right(self._starts, address)):
            return None
        start = self._starts[index - 1]
        size, name = self._found[start]
        return name if address < start + size else None


def functions(path: str | Path) -> Functions:
    """Of its table of symbols; of that of its exports, if it is stripped."""
    with opened(path) as file:
        found: dict[int, tuple[int, str]] = {}
        for name in (".symtab", ".dynsym"):
            if found or (section := file.get_section_by_name(name)) is None:
                continue
            for symbol in section.iter_symbols():
                entry = symbol.entry
                if entry.st_info.type == "STT_FUNC" and entry.st_value and entry.st_size:
                    found[entry.st_value] = entry.st_size, symbol.name
        return Functions(found)


def build_id(path: str | Path) -> str:
    """In hexadecimal digits; "" of a file without one."""
    with opened(path) as file:
        for segment in file.iter_segments("PT_NOTE"):
            for note in segment.iter_notes():
                if note["n_type"] == "NT_GNU_BUILD_ID":
                    return str(note["n_desc"])
    return ""


def interpreter(path: str | Path) -> str | None:
    """The dynamic linker of a program; None of a static one, and of most libraries."""
    with opened(path) as file:
        found = next(file.iter_segments("PT_INTERP"), None)
        return str(found.get_interp_name()) if found else None
