"""Large regions of a process's memory: their resident pages, and the frames of these by /proc/PID/pagemap.

The kernel shows frames to processes with CAP_SYS_ADMIN; others read zeros.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from calm.core.errors import CalmError
from calm.core.proc import PROC, GoneError
from research.colors.caches import PAGE_BYTES, Cache, Ints

HIDDEN = "frames are hidden: it takes root, or CAP_SYS_ADMIN, to see in which a page is"
# Kinds of regions. A mapping that the program did not record is `other`: its static arrays, or a heap.
BLOCK, MAPPING, OTHER = "block", "mapping", "other"
_PRESENT = np.uint64(1 << 63)
_FRAME = np.uint64((1 << 55) - 1)
_ENTRY_BYTES = 8
# Entries of 512 MiB of addresses are read at a time.
_AT_ONCE = 1 << 17
_HUGE_BYTES = 2 << 20


@dataclass(frozen=True)
class Pages:
    """The resident pages of a range of addresses."""

    numbers: Ints
    """Addresses divided by the page size, ascending."""
    frames: Ints | None
    """The frame of each page; None where they are hidden."""

    @property
    def bytes(self) -> int:
        return len(self.numbers) * PAGE_BYTES

    def huge_bytes(self) -> int | None:
        """Memory in aligned, contiguous pieces of 2 MiB; None where frames are hidden."""
        each = _HUGE_BYTES // PAGE_BYTES
        if self.frames is None:
            return None
        # In a huge page, all addresses have the same distance to their frames.
        distance = self.numbers - self.frames
        aligned = distance % each == 0
        keys = np.stack([self.numbers[aligned] // each, distance[aligned]])
        _, counts = np.unique(keys, axis=1, return_counts=True)
        return int((counts == each).sum()) * _HUGE_BYTES


NO_PAGES = Pages(np.empty(0, np.int64), None)


@dataclass(frozen=True)
class Region:
    """A large piece of memory, analysed as a whole."""

    address: int
    bytes: int
    kind: str = BLOCK
    stack: tuple[int, ...] = ()
    """Return addresses of the calls that allocated it, the innermost first."""
    thread: int = 0
    path: str = ""
    pages: Pages = NO_PAGES

    @cached_property
    def frames(self) -> Ints | None:
        """The frame of each page from the first on; -1 for pages that are not resident."""
        if self.pages.frames is None:
            return None
        first = self.address // PAGE_BYTES
        found = np.full(-(-(self.address + self.bytes) // PAGE_BYTES) - first, -1, dtype=np.int64)
        found[self.pages.numbers - first] = self.pages.frames
        return found

    def color(self, cache: Cache) -> int:
        """The color of the first page; -1 where that is not known."""
        return -1 if self.frames is None or self.frames[0] < 0 else int(self.frames[0]) % cache.colors


@contextlib.contextmanager
def pagemap(pid: int, proc: Path = PROC) -> Iterator[Callable[[int, int], Pages]]:
    """Reads the resident pages of an address and a size. Raises CalmError if the process ends."""
    try:
        file = (proc / str(pid) / "pagemap").open("rb", buffering=0)
    except PermissionError as error:
        raise CalmError(f"the pages of process {pid} cannot be read: permission denied") from error
    except OSError as error:
        raise GoneError(pid) from error

    def read(address: int, size: int) -> Pages:
        numbers, frames = [], []
        first, end = address // PAGE_BYTES, -(-(address + size) // PAGE_BYTES)
        while first < end:
            data = b""
            with contextlib.suppress(OSError):
                wanted = min(end - first, _AT_ONCE) * _ENTRY_BYTES
                data = os.pread(file.fileno(), wanted, first * _ENTRY_BYTES)
            # There are no entries once the process has ended or executes another program.
            if not data:
                raise CalmError(f"process {pid} ended while it was sampled")
            entries = np.frombuffer(data, np.uint64)
            (at,) = np.nonzero(entries & _PRESENT)
            numbers.append(first + at)
            frames.append((entries[at] & _FRAME).astype(np.int64))
            first += len(entries)
        found = np.concatenate(frames)
        # Frame 0 belongs to the firmware.
        return Pages(np.concatenate(numbers), None if len(found) and not found.any() else found)

    with file:
        yield read
