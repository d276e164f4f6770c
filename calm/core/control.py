"""Asks the library in a running process to do something, without stopping the process (src/os/control.h).

The request is written into a block of the library's data; a thread of the program carries it out when it next
comes to the heap. One descriptor of /proc/PID/mem reads the table and writes the request, so that a process
that is started later under the same number is never written to.


Raises ControlError, or one of its kinds, where something stands against it.
"""

import fcntl
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from calm.core.counters import Table

VERSION = 1
TRIM, PROFILE = 1, 2

_MAGIC = b"calmctrl"
_BLOCK = struct.Struct("<8sIIIIIIQQiI")
_PENDING, _TICKET = 16, 24
_WORD = struct.Struct("<I")
_REQUEST_BODY = struct.Struct("<IQ")
_MAX_BLOCK_BYTES = 4096
_POLL_SECONDS = 0.01
_ENDED = "it has ended"


class ControlError(Exception):
    """The request cannot be made: the message says why."""


class NoControlError(ControlError):
    """The library has no block for requests, or one of another version."""


class RefusedError(ControlError):
    """The library has answered with an error."""

    def __init__(self, number: int) -> None:
        super().__init__(os.strerror(number))
        self.number = number


class TimedOutError(ControlError):
    """The request was not carried out in time; it is withdrawn."""


class IdleError(TimedOutError):
    """No thread of the program has come to the allocator meanwhile."""


class EndedError(ControlError):
    """The process has ended, or executes another program."""


class Memory:
    """The memory of one process, for reading and writing, also after another has taken its number."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, address: int, size: int) -> bytes | None:
        """Bytes at an address; None where they cannot be read."""
        try:
            data = os.pread(self._descriptor, size, address)
        except (OSError, OverflowError):
            return None
        return data if len(data) == size else None

    def write(self, address: int, data: bytes) -> None:
        """Raises EndedError, or NoControlError where the memory cannot be written."""
        try:
            written = os.pwrite(self._descriptor, data, address)
        except (OSError, OverflowError) as error:
            raise NoControlError(f"its memory cannot be written: {error}") from error
        if written == 0:
            raise EndedError(_ENDED)
        if written != len(data):
            raise NoControlError("its memory cannot be written")

    @contextmanager
    def locked(self, give_up: Callable[[], bool]) -> Iterator[None]:
        """Keeps other calls of calm from asking at the same time: they would write to the same block."""
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if give_up():
                    raise TimedOutError("another calm is asking it for something") from error
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


@contextmanager
def memory(pid: int) -> Iterator[Memory]:
    """Opens a process's memory. Raises FileNotFoundError, ProcessLookupError or PermissionError."""
    descriptor = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        yield Memory(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Block:
    pending: int
    completed: int
    result: int
    error: int
    claimed: int


def _read(there: Memory, address: int) -> _Block:
    if not address:
        raise NoControlError("its library takes no requests")
    if (data := there.read(address, _BLOCK.size)) is None:
        raise EndedError(_ENDED)
    magic, version, size, pending, completed, _, _, _, result, error, claimed = _BLOCK.unpack(data)
    if magic != _MAGIC or not _BLOCK.size <= size <= _MAX_BLOCK_BYTES:
        raise NoControlError("the block for requests does not begin as one")
    if version != VERSION:
        raise NoControlError(f"the block for requests is of version {version}; this calm writes {VERSION}")
    return _Block(pending, completed, result, error, claimed)


def _number(block: _Block) -> int:
    """A number that no request of late had."""
    while (number := secrets.randbits(32)) in (0, block.pending, block.completed, block.claimed):
        pass
    return number


def ask(
    there: Memory,
    table: Table,
    request: int,
    argument: int,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Asks, waits for the answer and returns its result.

    The table must have been read through `there`. A request that is not carried out in time is withdrawn.
    """
    deadline = clock() + seconds

    def give_up() -> bool:
        sleep(_POLL_SECONDS)
        return clock() >= deadline

    with there.locked(give_up):
        address = table.control
        number = _number(_read(there, address))
        there.write(address + _PENDING, _WORD.pack(0))
        there.write(address + _TICKET, _WORD.pack(number) + _REQUEST_BODY.pack(request, argument))
        there.write(address + _PENDING, _WORD.pack(number))
        while (block := _read(there, address)).completed != number:
            if give_up():
                there.write(address + _PENDING, _WORD.pack(0))
                if (block := _read(there, address)).completed != number:
                    if block.claimed == number:
                        raise TimedOutError("it has begun, and has not finished in time")
                    raise IdleError("no thread of it has come to the allocator in time")
    if block.error:
        raise RefusedError(block.error)
    return block.result
