"""The large blocks of a running program, by the files that libcalmcolors.so writes (record/table.h).

Each process writes a file of its own, and a new one when it executes another program. A record is valid if
its sequence number is even, and the same before and after it is copied.
"""

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calm.core import paths
from calm.core import proc as proc_files
from calm.core.errors import CalmError
from calm.core.proc import PROC
from research.colors.pagemap import BLOCK, MAPPING, Region

LIBRARY = "libcalmcolors.so"
FOLDER, MIN_BYTES = "CALM_COLORS_RECORDS", "CALM_COLORS_MIN_BYTES"
PEAK, EXIT = "peak", "exit"
MAX_RECORDS = 1 << 16
FRAMES = 16
_MOMENTS = {1: PEAK, 2: EXIT}
_KINDS = {1: BLOCK, 2: MAPPING}
_MAGIC = b"calmcol2"
_RECORDS_AT = 4096
_TRIES = 20


def _layout(fields: str) -> np.dtype[np.void]:
    return np.dtype([tuple(field.split(":")) for field in fields.split()])


_HEADER = _layout(
    "magic:S8 record_bytes:u4 pid:i4 used:u4 moment:u4 bytes:u8 lost:u8 asked:u4 begun:u4 done:u4 closed:u4"
)
_RECORD = _layout(f"sequence:u4 kind:u2 depth:u2 address:u8 bytes:u8 serial:u8 thread:u8 frames:{FRAMES}u8")


def library() -> Path:
    return paths.find_part(LIBRARY)


class Records:
    """The file of one process."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or ValueError for any other file."""
        self._path = str(path.resolve())
        with path.open("r+b") as file:
            self.identity = os.fstat(file.fileno()).st_ino
            memory = mmap.mmap(file.fileno(), _RECORDS_AT + MAX_RECORDS * _RECORD.itemsize)
        # An array of one header, in the memory of the file.
        self._header = np.frombuffer(memory, _HEADER, count=1)
        self._records = np.frombuffer(memory, _RECORD, count=MAX_RECORDS, offset=_RECORDS_AT)
        if self._header["magic"][0] != _MAGIC or self._field("record_bytes") != _RECORD.itemsize:
            raise ValueError(f"{path} has another layout")
        self.pid = self._field("pid")

    def _field(self, name: str) -> int:
        return int(self._header[name][0])

    def is_of(self, pid: int, proc: Path = PROC) -> bool:
        """Whether that process maps the file; one in another PID namespace may have the same number."""
        try:
            return self._path in proc_files.files(pid, proc)
        except (OSError, CalmError):
            return False

    @property
    def lost(self) -> int:
        """The number of blocks for which the file had no room."""
        return self._field("lost")

    def asked(self) -> str | None:
        """Why the process waits to be sampled; None if it does not wait."""
        if self._field("asked") == self._field("done"):
            return None
        return _MOMENTS.get(self._field("moment"), PEAK)

    def begin(self) -> int:
        """Tells the waiting process that a sample begins; returns the number for `done`."""
        number = self._field("asked")
        self._header["begun"] = number
        return number

    def done(self, number: int) -> None:
        self._header["done"] = number

    def close(self) -> None:
        """Tells the process that nothing will sample it any more."""
        self._header["closed"] = 1

    def _copy(self) -> tuple[bool, NDArray[np.void]]:
        used = min(self._field("used"), MAX_RECORDS)
        # The copies are separate calls, which run in this order; x86 loads in order too.
        before = self._records["sequence"][:used].copy()
        found = self._records[:used].copy()
        after = self._records["sequence"][:used].copy()
        valid = (before == after) & (before % 2 == 0)
        return bool(valid.all()), found[valid & (found["address"] != 0)]

    def blocks(self) -> list[Region]:
        """The live blocks, by address, without their pages."""
        for _ in range(_TRIES):
            whole, found = self._copy()
            if whole:
                break
        return [
            Region(
                int(record["address"]),
                int(record["bytes"]),
                _KINDS.get(int(record["kind"]), BLOCK),
                tuple(record["frames"][: record["depth"]].tolist()),
                int(record["thread"]),
            )
            for record in np.sort(found, order="address")
        ]


class Folder:
    """The files of all processes of a program, opened as they appear."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[int, Records] = {}

    def scan(self) -> list[Records]:
        present: set[int] = set()
        with contextlib.suppress(OSError), os.scandir(self._path) as entries:
            for entry in entries:
                if not entry.name.isdigit():
                    continue
                pid = int(entry.name)
                present.add(pid)
                known = self._found.get(pid)
                if known is None or known.identity != entry.inode():
                    with contextlib.suppress(OSError, ValueError):
                        self._found[pid] = Records(self._path / entry.name)
        return [records for pid, records in self._found.items() if pid in present]

    def forget(self, pid: int) -> None:
        self._found.pop(pid, None)
        (self._path / str(pid)).unlink(missing_ok=True)

    def close(self) -> None:
        """Tells all processes that nothing will sample them any more."""
        for records in self.scan():
            records.close()
