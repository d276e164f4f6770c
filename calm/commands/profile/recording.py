"""Reads what perf recorded: one program's records, with exec made visible, as `perf script` prints them.

perf records the whole machine, because one counter for each CPU costs a program with a thousand threads
nothing, and each thread's inherited counter would. The records of other programs are dropped here.

perf (6.1 at least) keeps the mappings from before an exec, and takes the place of a library from the lowest
of its mappings, new or stale: stacks then end at their first function. So an empty mapping of the whole
address space follows each exec.
"""

from __future__ import annotations

import functools
import io
import os
import re
import struct
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import IO

from calm.core.symbols import Address

CLOCK = "cpu-clock"
# The user's configuration of perf would change its output.
ENVIRONMENT = os.environ | {"LC_ALL": "C", "PERF_CONFIG": "/dev/null"}

_MMAP, _LOST, _COMM, _EXIT, _FORK, _SAMPLE, _MMAP2, _LOST_SAMPLES = 1, 2, 3, 4, 7, 9, 10, 13
_HEADER_ATTR, _TRACING_DATA = 64, 66
_MISC_USER = 2
_MISC_EXEC = 1 << 13
_SAMPLE_IDENTIFIER = 1 << 16
_KERNEL = 0xFFFFFFFF
_MAGIC = b"PERFILE2"
_EVERYTHING = (0x1000, 1 << 56)

# Without the program's name, which may contain anything: a newline, or another sample's text.
_FIELDS = "pid,tid,time,event,ip,sym,dso"
# perf from 6.4 on has this field. It stands behind the file's name, and the address is the process's;
# perf 6.1 prints the file's own address.
_OFFSET_FIELD = "dsoff"
_HEAD = re.compile(r"^\s*-?\d+/-?\d+\s+(\d+\.\d+):\s+(\S+):(?: (.*))?$")
_FRAME = re.compile(r"^\s+([0-9a-f]+) (.*?) \((.*)\)$")
_OFFSET = re.compile(r"(.*)\+0x([0-9a-f]+)")


@dataclass
class Recording:
    """Figures of the streams of records."""

    samples: int = 0
    """Of the program."""
    lost: int = 0
    """Records that the kernel had no room for."""
    processes: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Sample:
    """One event, which stands for as many as its period says; a sample of the clock stands for one tick."""

    at_s: float
    period: int
    event: str
    trace: str
    """The tracepoint's fields, as text."""
    stack: tuple[Address, ...]
    """The innermost function first."""


def _records(file: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and bytes of each; a stream that was cut off ends at its last whole record."""
    while len(header := file.read(8)) == 8:
        kind, misc, size = struct.unpack("<IHH", header)
        body = file.read(size - 8)
        if len(body) < size - 8:
            return
        if kind == _TRACING_DATA:
            (extra,) = struct.unpack_from("<I", body)
            body += file.read(extra)
        yield kind, misc, header + body


def _cover(comm: bytes) -> bytes:
    """An empty mapping of a process's whole address space, at the moment of its exec."""
    name_end = comm.index(b"\0", 16) + 1
    trailer = comm[16 + (name_end - 16 + 7) // 8 * 8 :]
    pid, tid = struct.unpack_from("<II", comm, 8)
    body = struct.pack("<IIQQQIIQQII", pid, tid, *_EVERYTHING, 0, 0, 0, 0, 0, 0, 2)
    body += b"//anon\0\0" + trailer
    return struct.pack("<IHH", _MMAP2, _MISC_USER, 8 + len(body)) + body


def prepare(source: IO[bytes], target: IO[bytes], roots: Iterable[int], recording: Recording) -> None:
    """Copies the records of the processes and their descendants, and adds up figures."""
    source.seek(0)
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
            forks.append((time, pid, parent))
    recording.processes |= set(roots)
    for _, pid, parent in sorted(forks):
        if parent in recording.processes:
            recording.processes.add(pid)
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
        elif kind in (_LOST, _LOST_SAMPLES):
            recording.lost += struct.unpack_from("<Q", record, 16 if kind == _LOST else 8)[0]
        target.write(record)
        if kind == _COMM and misc & _MISC_EXEC:
            target.write(_cover(record))


@functools.cache
def _has_offsets(perf: str) -> bool:
    """Whether perf script knows the offset in a file as a field."""
    done = subprocess.run([perf, "script", "-h"], capture_output=True, env=ENVIRONMENT, check=False)
    return f",{_OFFSET_FIELD},".encode() in done.stdout + done.stderr


def script(perf: str, prepared: IO[bytes], period: int, *, traced: bool) -> Iterator[Sample]:
    """The samples of a prepared stream. Without tracepoints perf refuses to print their fields."""
    has_offsets = _has_offsets(perf)
    fields = _FIELDS + ",trace" * traced + f",{_OFFSET_FIELD}" * has_offsets
    arguments = [perf, "script", "-i", "-", "--no-inline", "--no-demangle", "-F", fields]
    with subprocess.Popen(
        arguments,
        stdin=prepared,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield from read(
                io.TextIOWrapper(process.stdout, errors="replace"), period, has_offsets=has_offsets
            )
        finally:
            process.kill()


def read(lines: Iterable[str], period: int, *, has_offsets: bool = False) -> Iterator[Sample]:
    """The samples in perf script's text, of one event in `period`; other lines are passed over."""
    head: re.Match[str] | None = None
    stack: list[Address] = []

    @functools.cache
    def address(line: str) -> Address | None:
        if (frame := _FRAME.match(line)) is None:
            return None
        place = _OFFSET.fullmatch(frame[3]) if has_offsets else None
        return Address(place[1] if place else frame[3], int(place[2] if place else frame[1], 16), frame[2])

    for line in chain(lines, [""]):
        line = line.rstrip("\n")
        if head is not None:
            if found := address(line):
                stack.append(found)
                continue
            # perf writes the options of an event into its name; ":u" is a modifier.
            event = head[2].partition("/")[0]
            trace = (head[3] or "").strip()
            yield Sample(float(head[1]), 1 if event == CLOCK else period, event, trace, tuple(stack))
        head, stack = _HEAD.match(line), []
