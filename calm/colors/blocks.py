"""What a program tells of its large blocks while it runs: the files that libcalmcolors.so writes.

The layout is in record/layout.h. Each process has a file of its own, which begins anew when it becomes
another program. Processes write while this reads: a record counts if nobody wrote it meanwhile, by its
sequence before and after.
"""

import contextlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calm import places
from calm.colors.pagemap import PROC
from calm.errors import CalmError

LIBRARY = "libcalmcolors.so"
FOLDER, LEAST = "CALM_COLORS_RECORDS", "CALM_COLORS_LEAST"
_MAGIC = b"calmcol1"
_RECORDS_AT = 4096
_FRAMES = 16
MOST = 1 << 16
PEAK, EXIT = "peak", "exit"
_MOMENTS = {1: PEAK, 2: EXIT}
BLOCK, MAPPING = "block", "mapping"
_KINDS = {1: BLOCK, 2: MAPPING}

_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("record_bytes", "u4"),
        ("pid", "i4"),
        ("own_start", "u8"),
        ("own_end", "u8"),
        ("used", "u4"),
        ("moment", "u4"),
        ("bytes", "u8"),
        ("lost", "u8"),
        ("asked", "u4"),
        ("begun", "u4"),
        ("done", "u4"),
        ("closed", "u4"),
    ]
)
_RECORD = np.dtype(
    [
        ("sequence", "u4"),
        ("kind", "u2"),
        ("depth", "u2"),
        ("address", "u8"),
        ("bytes", "u8"),
        ("serial", "u8"),
        ("thread", "u8"),
        ("frames", "u8", (_FRAMES,)),
    ]
)
_TRIES = 20


@dataclass(frozen=True)
class Block:
    """A large block that lives; the return addresses of the calls that allocated it, the innermost first."""

    address: int
    bytes: int
    thread: int
    kind: str = BLOCK
    frames: tuple[int, ...] = ()


def library() -> Path:
    """What is preloaded."""
    for probe in places.probe_candidates():
        path = probe.with_name(LIBRARY)
        if path.is_file():
            return path.absolute()
    raise CalmError(f"{LIBRARY} is missing: `make` builds it")


class Records:
    """One process's file."""

    def __init__(self, path: Path) -> None:
        """OSError or ValueError where it is none."""
        self._path = path.resolve()
        with path.open("r+b") as file:
            self.identity = os.fstat(file.fileno()).st_ino
            self._memory = mmap.mmap(file.fileno(), _RECORDS_AT + MOST * _RECORD.itemsize)
        # One element, in the file's own memory.
        self._header = np.frombuffer(self._memory, _HEADER, count=1)
        self._records = np.frombuffer(self._memory, _RECORD, count=MOST, offset=_RECORDS_AT)
        header = self._header[0]
        if header["magic"] != _MAGIC or int(header["record_bytes"]) != _RECORD.itemsize:
            raise ValueError(f"{path} has another layout")
        self.pid = int(header["pid"])
        self.own = (int(header["own_start"]), int(header["own_end"]))
        """Where the library lies, from and to: its tables are not the program's memory."""

    def is_of(self, pid: int, proc: Path = PROC) -> bool:
        """Whether that process has it mapped: another one may know itself by the same number."""
        try:
            text = (proc / str(pid) / "maps").read_text(errors="replace")
        except OSError:
            return False
        return any(line.endswith(f" {self._path}") for line in text.splitlines())

    @property
    def bytes(self) -> int:
        """Of all large blocks that live."""
        return int(self._header["bytes"][0])

    @property
    def lost(self) -> int:
        """Blocks that found no room in the file."""
        return int(self._header["lost"][0])

    def asked(self) -> str | None:
        """Why the process waits for a look, if it does."""
        header = self._header[0]
        if header["asked"] == header["done"]:
            return None
        return _MOMENTS.get(int(header["moment"]), PEAK)

    def begin(self) -> int:
        """A look begins: what waits for it goes on to wait. For `done`."""
        number = int(self._header["asked"][0])
        self._header["begun"] = number
        return number

    def done(self, number: int) -> None:
        """Whoever waited may go on."""
        self._header["done"] = number

    def close(self) -> None:
        """No look will come any more."""
        self._header["closed"] = 1

    def _whole(self) -> tuple[bool, np.ndarray]:
        used = min(int(self._header["used"][0]), MOST)
        # Whoever writes a record counts before and after. The three are calls of their own, so they are made
        # in this order; x86 reads in it too.
        before = self._records["sequence"][:used].copy()
        found = self._records[:used].copy()
        after = self._records["sequence"][:used].copy()
        same = (before == after) & (before % 2 == 0)
        return bool(same.all()), found[same & (found["address"] != 0)]

    def blocks(self) -> list[Block]:
        """Those that live, by their addresses."""
        for _ in range(_TRIES):
            whole, found = self._whole()
            if whole:
                break
        found = np.sort(found, order="address")
        return [
            Block(
                int(record["address"]),
                int(record["bytes"]),
                int(record["thread"]),
                _KINDS.get(int(record["kind"]), BLOCK),
                tuple(int(frame) for frame in record["frames"][: int(record["depth"])]),
            )
            for record in found
        ]


class Folder:
    """The files of all processes of a program: found as they come, and again when one begins anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[int, Records] = {}

    def look(self) -> list[Records]:
        """Those that are there."""
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
        """The process has ended."""
        self._found.pop(pid, None)
        with contextlib.suppress(OSError):
            (self._path / str(pid)).unlink()

    def close(self) -> None:
        """No look will come any more, for none of them."""
        for records in self.look():
            records.close()
