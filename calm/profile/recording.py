"""A stream of perf's records, made fit for `perf script`: the program's alone, with what exec undoes undone.

Recorded is the whole machine, because a counter of each CPU costs a program with a thousand threads nothing
and adapts its period well; counters that each thread inherits do neither. What belongs to other programs is
dropped here, before anything is read out of it.

perf (6.1 at least) keeps the mappings of before an exec, and takes the place of a library from the lowest of
its mappings, new or stale: stacks then end at their first function. So behind each exec a mapping of nothing
is put over all of them.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO

_MMAP, _LOST, _COMM, _EXIT, _FORK, _SAMPLE, _MMAP2, _LOST_SAMPLES = 1, 2, 3, 4, 7, 9, 10, 13
_HEADER_ATTR, _TRACING_DATA = 64, 66
_MISC_USER = 2
_MISC_EXEC = 1 << 13
_SAMPLE_IDENTIFIER = 1 << 16
_KERNEL = 0xFFFFFFFF
_MAGIC = b"PERFILE2"
_EVERYTHING = (0x1000, 1 << 56)


@dataclass
class Recording:
    """What the stream holds besides its samples."""

    samples: int = 0
    """Of the program."""
    lost: int = 0
    """Records that the kernel had no room for."""
    processes: set[int] = field(default_factory=set)


def _records(file: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and bytes of each; a stream that was cut off ends at its last whole record."""
    while len(header := file.read(8)) == 8:
        kind, misc, size = struct.unpack("<IHH", header)
        body = file.read(size - 8)
        if size < 8 or len(body) < size - 8:
            return
        if kind == _TRACING_DATA:
            (extra,) = struct.unpack_from("<I", body)
            body += file.read(extra)
        yield kind, misc, header + body


def _family(forks: Iterable[tuple[int, int, int]], roots: Iterable[int]) -> set[int]:
    """The processes and all that descends from them, by (time, child, parent)."""
    found = set(roots)
    for _, child, parent in sorted(forks):
        if parent in found:
            found.add(child)
    return found


def _cover(comm: bytes) -> bytes:
    """A mapping of nothing over all of a process's memory, at the moment of its exec."""
    name_end = comm.index(b"\0", 16) + 1
    trailer = comm[16 + (name_end - 16 + 7) // 8 * 8 :]
    pid, tid = struct.unpack_from("<II", comm, 8)
    body = struct.pack("<IIQQQIIQQII", pid, tid, *_EVERYTHING, 0, 0, 0, 0, 0, 0, 2)
    body += b"//anon\0\0" + trailer
    return struct.pack("<IHH", _MMAP2, _MISC_USER, 8 + len(body)) + body


def prepare(source: IO[bytes], target: IO[bytes], roots: Iterable[int], recording: Recording) -> None:
    """Copies what concerns the processes and their descendants, and adds up what was met."""
    start = source.read(16)
    if start[:8] != _MAGIC:
        return
    forks: list[tuple[int, int, int]] = []
    pid_at = 16
    for kind, _, record in _records(source):
        if kind == _HEADER_ATTR:
            (sample_type,) = struct.unpack_from("<Q", record, 8 + 24)
            pid_at = 24 if sample_type & _SAMPLE_IDENTIFIER else 16
        elif kind == _FORK:
            pid, parent, _, _, time = struct.unpack_from("<IIIIQ", record, 8)
            if pid != parent:
                forks.append((time, pid, parent))
    recording.processes |= _family(forks, roots)
    ours = recording.processes | {_KERNEL}
    source.seek(16)
    target.write(start)
    for kind, misc, record in _records(source):
        if kind == _SAMPLE:
            if struct.unpack_from("<I", record, pid_at)[0] not in recording.processes:
                continue
            recording.samples += 1
        elif kind in (_MMAP, _MMAP2, _COMM, _FORK, _EXIT):
            if struct.unpack_from("<I", record, 8)[0] not in ours:
                continue
        elif kind == _LOST:
            recording.lost += struct.unpack_from("<Q", record, 16)[0]
        elif kind == _LOST_SAMPLES:
            recording.lost += struct.unpack_from("<Q", record, 8)[0]
        target.write(record)
        if kind == _COMM and misc & _MISC_EXEC:
            target.write(_cover(record))
