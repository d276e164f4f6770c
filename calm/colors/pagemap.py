"""What the kernel tells of a process's memory: its mappings, which pages are resident, and in which frames.

Frames are shown to those with CAP_SYS_ADMIN alone: others see zeros. Of a process that one may not trace,
nothing is shown at all.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calm.errors import CalmError

PROC = Path("/proc")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PRESENT = np.uint64(1 << 63)
_FRAME = np.uint64((1 << 55) - 1)
_ENTRY_BYTES = 8
# Entries that are read at a time: of 512 MiB of addresses.
_AT_ONCE = 1 << 17
_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) \S+ \d+ *(.*)$")
# Counted in huge pages, of which hugetlbfs's are not among the resident.
_HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")
_HUGETLB = ("Shared_Hugetlb", "Private_Hugetlb")


@dataclass(frozen=True)
class Mapping:
    """A line of /proc/PID/maps, and what smaps says of it."""

    start: int
    end: int
    rights: str
    offset: int
    path: str
    resident_kib: int | None = None
    """None: only maps could be read."""
    huge_kib: int = 0

    @property
    def is_data(self) -> bool:
        """May be read, and is not code; not what the kernel has put there for itself."""
        return (
            self.rights[0] == "r" and "x" not in self.rights and not self.path.startswith(("[v", "[uprobes"))
        )


def parse(text: str) -> list[Mapping]:
    """Reads maps or smaps; what is not understood is passed over."""
    found: list[tuple[re.Match[str], dict[str, int]]] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            found.append((head, {}))
            continue
        name, _, value = line.partition(":")
        words = value.split()
        if found and len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[-1][1][name] = int(words[0])
    mappings = []
    for head, sizes in found:
        hugetlb = sum(sizes.get(name, 0) for name in _HUGETLB)
        mappings.append(
            Mapping(
                int(head[1], 16),
                int(head[2], 16),
                head[3],
                int(head[4], 16),
                head[5],
                sizes["Rss"] + hugetlb if "Rss" in sizes else None,
                sum(sizes.get(name, 0) for name in _HUGE) + hugetlb,
            )
        )
    return mappings


def mappings(pid: int, proc: Path = PROC) -> list[Mapping]:
    """All of a process's, by their addresses. CalmError where they cannot be read."""
    for name in ("smaps", "maps"):
        try:
            text = (proc / str(pid) / name).read_text(errors="replace")
        except PermissionError:
            continue
        except FileNotFoundError as error:
            raise CalmError(f"there is no process {pid}") from error
        except ProcessLookupError:
            text = ""
        if not text:
            # A zombie, or one of the kernel's own threads.
            raise CalmError(f"process {pid} has ended, or has no memory of its own")
        return parse(text)
    raise CalmError(f"the mappings of process {pid} cannot be read: permission denied")


@dataclass(frozen=True)
class Pages:
    """The resident pages of a range of addresses."""

    numbers: NDArray[np.int64]
    """Addresses by the page, ascending."""
    frames: NDArray[np.int64] | None
    """Of each the frame's number; None where they are hidden."""

    @property
    def bytes(self) -> int:
        """Resident memory."""
        return len(self.numbers) * PAGE_BYTES

    def huge_bytes(self, huge_bytes: int = 2 << 20) -> int | None:
        """Of these, what lies as in huge pages, aligned and without a gap; None where frames are hidden."""
        each = huge_bytes // PAGE_BYTES
        if self.frames is None:
            return None
        aligned = (self.numbers - self.frames) % each == 0
        # Of one huge page, addresses and frames have the same distance.
        keys = np.stack([self.numbers[aligned] // each, self.numbers[aligned] - self.frames[aligned]])
        if keys.shape[1] < each:
            return 0
        _, counts = np.unique(keys, axis=1, return_counts=True)
        return int((counts == each).sum()) * huge_bytes


NO_PAGES = Pages(np.empty(0, np.int64), None)


class Pagemap:
    """A process's /proc/PID/pagemap."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self.reason: str | None = None
        """Why frames are hidden, once that has been seen."""
        self.ended = False
        """Nothing was there any more where there had been mappings: what has been seen is not all."""
        self._file: int | None = None
        try:
            self._file = os.open(proc / str(pid) / "pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            self.reason = f"the pages of process {pid} may not be looked at: permission denied"
        except OSError as error:
            self.reason = f"the pages of process {pid} cannot be looked at: {error.strerror}"
            # A kernel without the file says that there is none; one that ended has no process, or no memory.
            self.ended = error.errno == errno.ESRCH or not (proc / str(pid)).exists()

    def __enter__(self) -> "Pagemap":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)

    @property
    def readable(self) -> bool:
        """It can be known what is resident."""
        return self._file is not None

    def _entries(self, first: int, end: int) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        assert self._file is not None
        while first < end:
            wanted = min(end - first, _AT_ONCE)
            data = b""
            # Once the process has ended, or becomes another program, there is nothing.
            with contextlib.suppress(OSError):
                data = os.pread(self._file, wanted * _ENTRY_BYTES, first * _ENTRY_BYTES)
            count = len(data) // _ENTRY_BYTES
            if count == 0:
                self.ended = True
                return
            yield first, np.frombuffer(data, np.uint64, count)
            first += count

    def pages(self, address: int, size: int) -> Pages:
        """Those that a range lies in, as far as they are resident."""
        if self._file is None or size <= 0:
            return NO_PAGES
        numbers: list[NDArray[np.int64]] = []
        frames: list[NDArray[np.int64]] = []
        for first, entries in self._entries(address // PAGE_BYTES, (address + size - 1) // PAGE_BYTES + 1):
            (at,) = np.nonzero(entries & _PRESENT)
            numbers.append(first + at.astype(np.int64))
            frames.append((entries[at] & _FRAME).astype(np.int64))
        if not numbers:
            return NO_PAGES
        found = np.concatenate(frames)
        if len(found) and not found.any():
            self.reason = "frames are hidden: it takes root, or CAP_SYS_ADMIN, to see in which a page is"
        # Frame 0 is nobody's, but for one page of a machine, which is the firmware's.
        return Pages(np.concatenate(numbers), found if self.reason is None else None)
