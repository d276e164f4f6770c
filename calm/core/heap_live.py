"""Reads the heap profile of a running process from its memory, without a lock and without stopping it.

The table of the library's counters leads to a description of its samples (struct samples_layout in
src/profile/samples_layout.h). A stack is read twice: if it was being changed, or has changed, it is read
again, and dropped if that goes on. Another process's memory is not trusted: sizes are bounded, and numbers
are checked.
"""

from __future__ import annotations

import errno
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from calm.core import control, counters, places, proc
from calm.core.control import ControlError, EndedError, RefusedError
from calm.core.counters import Read, Table
from calm.core.errors import CalmError
from calm.core.heap_profile import TYPES, HeapProfile, merged, numbered
from calm.core.places import Place
from calm.core.proc import GoneError, Mapping

VERSION = 1

_MAGIC = b"calmheap"
_HEAD = struct.Struct("<8sIIQQQ")
_OFFSETS = struct.Struct("<21I")
_WEIGHT = struct.Struct("<QQ")
_U32, _U64, _DOUBLE = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<d")
_MAX_LAYOUT_BYTES = 1 << 12
_MAX_OFFSET = 1 << 16
_MAX_STACKS = 1 << 20
_MAX_DEPTH = 1 << 10
_MAX_ADDRESSES = 1 << 24
_MAX_TABLE_BYTES = 1 << 27
_MAX_MEAN = 1 << 40
_TRIES = 50
# Of all stacks: few of them change while they are read.
_MAX_RETRIES = 1 << 12
_INT64_MAX = (1 << 63) - 1
# The library ends a profile that is no longer asked for; asked again in a third of this time.
LEASE_S = 60


class _Layout(NamedTuple):
    """A `struct samples_layout`: addresses, and the offsets of fields."""

    samples: int
    mean_bytes: int
    last_mean_bytes: int
    count_unit: int
    max_depth: int
    max_stacks: int
    stacks: int
    addresses: int
    stacks_end: int
    addresses_end: int
    dropped: int
    peak_bytes: int
    peak_ns: int
    peak_epoch: int
    stack_bytes: int
    sequence: int
    first: int
    depth: int
    allocated: int
    in_use: int
    at_peak: int
    epoch: int
    lifetimes: int
    births: int


class NoSamplesError(CalmError):
    """The process has no heap profile that this calm can read."""


def _layout(read: Read, address: int) -> _Layout:
    """Raises NoSamplesError, with the end of a sentence about the library."""
    head = read(address, _HEAD.size)
    offsets = read(address + _HEAD.size, _OFFSETS.size)
    if head is None or offsets is None:
        raise NoSamplesError("describes no heap profile")
    magic, version, size, *words = _HEAD.unpack(head)
    if magic != _MAGIC or not _HEAD.size + _OFFSETS.size <= size <= _MAX_LAYOUT_BYTES:
        raise NoSamplesError("does not describe its heap profile as this calm expects it")
    if version != VERSION:
        raise NoSamplesError(f"has a heap profile of version {version}; this calm reads {VERSION}")
    found = _Layout(*words, *_OFFSETS.unpack(offsets))
    if (
        max(found[_Layout._fields.index("stacks") :]) > _MAX_OFFSET
        or not 0 < found.count_unit <= 1 << 20
        or not 0 < found.max_depth <= _MAX_DEPTH
        or not 0 < found.max_stacks <= _MAX_STACKS
        or max(found[_Layout._fields.index("sequence") :]) + _DOUBLE.size > found.stack_bytes
        or max(found.allocated, found.in_use, found.at_peak) + _WEIGHT.size > found.stack_bytes
    ):
        raise NoSamplesError("does not describe its heap profile as this calm expects it")
    return found


@dataclass
class Snapshot:
    """What a process's samples were at one moment."""

    stacks: dict[tuple[int, ...], list[int]]
    """By return addresses, the innermost first: values in the order of TYPES."""
    mean_bytes: int
    """Between two samples; 0: the profile is off."""
    last_mean_bytes: int
    """The same when it was last on; 0: it never was."""
    dropped: int = 0
    """Samples that the library had no room for."""
    torn: int = 0
    """Stacks that changed each time that they were read."""
    peak_age_s: float = 0.0
    mappings: list[Mapping] = field(default_factory=list)


class _Reader:
    def __init__(self, read: Read, layout: _Layout) -> None:
        self._read, self._layout = read, layout
        self._retries = 0

    def _bytes(self, address: int, size: int) -> bytes:
        if (data := self._read(address, size)) is None:
            raise EndedError("its memory cannot be read: it has ended, or runs another program")
        return data

    def _word(self, address: int, form: struct.Struct) -> int:
        return int(form.unpack(self._bytes(address, form.size))[0])

    def _field(self, offset: int, form: struct.Struct) -> int:
        return self._word(self._layout.samples + offset, form)

    def snapshot(self, now_ns: int) -> Snapshot:
        """Raises EndedError."""
        layout = self._layout
        mean = min(self._word(layout.mean_bytes, _U64), _MAX_MEAN)
        found = Snapshot({}, mean, min(self._word(layout.last_mean_bytes, _U64), _MAX_MEAN))
        # In this order: what the first number counts is within the second.
        stacks_end = self._field(layout.stacks_end, _U32)
        addresses_end = min(self._field(layout.addresses_end, _U32), _MAX_ADDRESSES)
        if not 1 < stacks_end <= layout.max_stacks:
            return found
        begin = self._field(layout.stacks, _U64) + layout.stack_bytes
        size = (stacks_end - 1) * layout.stack_bytes
        if size > _MAX_TABLE_BYTES:
            return found
        first, second = self._bytes(begin, size), self._bytes(begin, size)
        self._retries = _MAX_RETRIES
        epoch = self._field(layout.peak_epoch, _U64)
        addresses = memoryview(
            self._bytes(self._field(layout.addresses, _U64), addresses_end * _U64.size)
        ).cast("Q")
        # Each stack has addresses of its own.
        left = addresses_end
        for at in range(0, size, layout.stack_bytes):
            end = at + layout.stack_bytes
            stack = self._whole(begin + at, first[at:end], second[at:end])
            if stack is None:
                found.torn += 1
                continue
            start, depth = (_U32.unpack_from(stack, offset)[0] for offset in (layout.first, layout.depth))
            left -= depth
            if depth <= layout.max_depth and start + depth <= addresses_end and left >= 0:
                values = self._values(stack, epoch, now_ns)
                key = tuple(addresses[start : start + depth])
                before = found.stacks.get(key)
                found.stacks[key] = (
                    values if before is None else [a + b for a, b in zip(before, values, strict=True)]
                )
        found.dropped = self._field(layout.dropped, _U64)
        found.peak_age_s = max(0, now_ns - self._field(layout.peak_ns, _U64)) / 1e9
        return found

    def _whole(self, address: int, first: bytes, second: bytes) -> bytes | None:
        for _ in range(_TRIES):
            if first == second and _U32.unpack_from(first, self._layout.sequence)[0] % 2 == 0:
                return first
            self._retries -= 1
            if self._retries < 0:
                break
            size = self._layout.stack_bytes
            first, second = self._bytes(address, size), self._bytes(address, size)
        return None

    def _values(self, stack: bytes, epoch: int, now_ns: int) -> list[int]:
        layout, unit = self._layout, self._layout.count_unit
        allocated = _WEIGHT.unpack_from(stack, layout.allocated)
        in_use = _WEIGHT.unpack_from(stack, layout.in_use)
        changed = _U64.unpack_from(stack, layout.epoch)[0] == epoch
        at_peak = _WEIGHT.unpack_from(stack, layout.at_peak) if changed else in_use
        lifetimes, births = (
            _DOUBLE.unpack_from(stack, offset)[0] for offset in (layout.lifetimes, layout.births)
        )
        weights = (
            each for count, size in (allocated, in_use, at_peak) for each in (round(count / unit), size)
        )
        times = (lifetimes / unit, (in_use[0] * now_ns - births) / unit)
        return [
            *(min(each, _INT64_MAX) for each in weights),
            *(int(min(max(each, 0), _INT64_MAX)) if each == each else 0 for each in times),
        ]


def _table(pid: int, read: Read) -> Table:
    """Raises NoSamplesError, GoneError or PermissionError."""
    tables, why = counters.Finder().tables(read, counters.images(pid))
    for table in tables:
        if table.samples:
            return table
    if why:
        raise NoSamplesError(f"process {pid}: {why}")
    if tables:
        which = f"{tables[0].library} {tables[0].release}".rstrip()
        raise NoSamplesError(f"process {pid} runs {which}, which has no heap profile that can be read live")
    raise NoSamplesError(
        f"process {pid} does not run calmalloc: it has no heap profile; `calm explain {pid}` says what holds"
        " its memory, and `calm heap run -- CMD` starts the program with a profile"
    )


class Process:
    """A process whose samples are read."""

    def __init__(self, pid: int, read: Read) -> None:
        self.pid = pid
        self._image = proc.stat(pid).image
        table = _table(pid, read)
        try:
            self._reader = _Reader(read, _layout(read, table.samples))
        except NoSamplesError as error:
            release = f"calmalloc {table.release}".rstrip()
            raise NoSamplesError(f"the library of process {pid}, {release}, {error}") from error

    def is_same(self) -> bool:
        """Whether it still runs, and the same program."""
        found = proc.stat_or_none(self.pid)
        return found is not None and not found.has_ended and found.image == self._image

    def snapshot(self) -> Snapshot:
        """Raises CalmError."""
        try:
            found = self._reader.snapshot(time.clock_gettime_ns(time.CLOCK_MONOTONIC))
            found.mappings = proc.maps(self.pid)
        except EndedError as error:
            raise CalmError(f"process {self.pid}: {error}") from error
        return found

    def ask(self, mean_bytes: int, wait_s: float = 5.0) -> int:
        """Asks for samples of each so many bytes, or for none more; returns what is in force.

        Without another request within LEASE_S the library ends the profile. Raises CalmError.
        """
        argument = mean_bytes | (LEASE_S if mean_bytes else 0) << 32
        try:
            with control.memory(self.pid) as there:
                if not self.is_same():
                    raise GoneError(self.pid)
                table = _table(self.pid, there.read)
                return control.ask(there, table, control.PROFILE, argument, wait_s)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise GoneError(self.pid) from error
        except RefusedError as error:
            if error.number == errno.ENOSYS:
                why = "its library cannot be asked for one"
            else:
                why = f"the library refuses: {error}"
            raise CalmError(f"process {self.pid} takes no profile: {why}") from error
        except ControlError as error:
            raise CalmError(f"process {self.pid} cannot be asked for a profile: {error}") from error


@contextmanager
def attached(pid: int) -> Iterator[Process]:
    """A process for reading. Raises CalmError where it has ended, is foreign or may not be read."""
    try:
        proc.check(pid)
        with proc.memory(pid) as read:
            yield Process(pid, read)
    except PermissionError as error:
        raise CalmError(
            f"process {pid} may not be read: it belongs to another user, or ptrace is restricted "
            "(root may read it)"
        ) from error


def _file(pid: int, mapping: Mapping) -> str:
    """The path that leads to a mapped file from here: the process may have another root."""
    path = mapping.path.removesuffix(" (deleted)")
    if path == mapping.path:
        try:
            if Path(path).stat().st_ino == mapping.inode:
                return path
        except OSError:
            pass
        return f"/proc/{pid}/root{path}"
    # Replaced by an update: the program itself can still be read.
    return f"/proc/{pid}/exe" if path == proc.executable(pid).removesuffix(" (deleted)") else ""


def _place(pid: int, address: int, mappings: list[Mapping], files: dict[str, str]) -> Place:
    # The call precedes its return address.
    at = address - 1
    for each in mappings:
        if each.start <= at < each.end and each.path.startswith("/"):
            if each.path not in files:
                files[each.path] = _file(pid, each)
            name = each.path.removesuffix(" (deleted)").rpartition("/")[2]
            return Place(files[each.path], at - each.start + each.offset, module=name)
    return Place("", at)


def profile(pid: int, found: Snapshot, before: Snapshot | None = None) -> HeapProfile:
    """The document of a snapshot. With one of before, allocations and lifetimes are those since then."""
    files: dict[str, str] = {}
    mappings = [each for each in found.mappings if "x" in each.rights]
    known = {
        address: _place(pid, address, mappings, files)
        for address in {a for stack in found.stacks for a in stack}
    }
    frames, notes = places.frames(set(known.values()))
    growing = [each.name in ("alloc_objects", "alloc_space", "freed_lifetime") for each in TYPES]
    stacks = []
    for addresses, values in found.stacks.items():
        old = before.stacks.get(addresses) if before else None
        if old is not None:
            values = [
                max(0, value - earlier) if grows else value
                for value, earlier, grows in zip(values, old, growing, strict=True)
            ]
        functions = tuple(frame for each in reversed(addresses) for frame in frames[known[each]])
        stacks.append((functions, values))
    if found.dropped:
        notes.append(f"{found.dropped} samples were dropped for want of room")
    if found.torn:
        notes.append(f"{found.torn} stacks changed while they were read, and are left out")
    all_frames, all_stacks = numbered(merged(stacks))
    return HeapProfile(
        command=[],
        pid=pid,
        mean_bytes=found.mean_bytes or found.last_mean_bytes,
        types=list(TYPES),
        frames=all_frames,
        stacks=all_stacks,
        notes=notes,
    )
