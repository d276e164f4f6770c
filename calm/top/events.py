"""Counts TLB shootdowns and memory system calls of running processes, by the kernel's tracepoints.

A counter is opened on each thread of a process, and inherited by the threads that it starts later. The kernel
counts by itself; an interval costs a read for each counter.
"""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path

from calm.measure import SYSCALLS

SHOOTDOWNS = "shootdowns"
INTERRUPTS = "interrupts"

# As calm's probe counts them: the numbers are those of enum tlb_flush_reason.
_EVENTS: dict[str, tuple[str, str]] = {
    SHOOTDOWNS: ("tlb/tlb_flush", "reason == 4"),
    INTERRUPTS: ("tlb/tlb_flush", "reason == 1"),
} | {name: (f"syscalls/sys_enter_{name}", "") for name in SYSCALLS}

_NUMBERS = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
_TYPE_TRACEPOINT = 2
_INHERIT, _INHERIT_THREAD = 1 << 1, 1 << 35
_CLOEXEC = 8
_SET_FILTER = 0x40082406
_ATTRIBUTES = struct.Struct("=IIQQQQQ")
_ATTRIBUTE_BYTES = 112
_ROOTS = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
# Left for everything else that this process opens.
_DESCRIPTORS_LEFT = 64

_libc = ctypes.CDLL(None, use_errno=True)


class _GoneError(Exception):
    """The thread has ended."""


def _open(identifier: int, pid: int, flags: int) -> int:
    attributes = _ATTRIBUTES.pack(_TYPE_TRACEPOINT, _ATTRIBUTE_BYTES, identifier, 0, 0, 0, flags)
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTE_BYTES)
    number = _NUMBERS[platform.machine()]
    descriptor = int(_libc.syscall(number, buffer, pid, -1, -1, ctypes.c_ulong(_CLOEXEC)))
    if descriptor < 0:
        error = ctypes.get_errno()
        if error == errno.ESRCH:
            raise _GoneError
        raise OSError(error, os.strerror(error))
    return descriptor


@dataclass
class Counting:
    """The counters of one process: by event, a descriptor for each thread that was there."""

    descriptors: dict[str, list[int]] = field(default_factory=dict)

    def read(self) -> dict[str, int]:
        """What was counted since they were opened."""
        found = {}
        for name, descriptors in self.descriptors.items():
            found[name] = sum(int.from_bytes(os.read(one, 8), "little") for one in descriptors)
        return found

    def close(self) -> None:
        """Ends it."""
        for descriptors in self.descriptors.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self.descriptors.clear()

    @property
    def size(self) -> int:
        """How many descriptors it takes."""
        return sum(map(len, self.descriptors.values()))


class Events:
    """Opens counters on processes, as far as the kernel permits."""

    def __init__(self, names: Iterable[str] = _EVENTS) -> None:
        # Why an event is not counted, by its name; and what of all there is no telling.
        self.reasons: dict[str, str] = {}
        self.threads_only = True
        self._identifiers: dict[str, int] = {}
        self._held: list[int] = []
        self._open = 0
        self._room = _raise_descriptor_limit() - _DESCRIPTORS_LEFT
        for name in names:
            try:
                self._identifiers[name] = self._identify(name)
            except OSError as error:
                self.reasons[name] = _explain(error, _EVENTS[name][0])

    def _identify(self, name: str) -> int:
        """The kernel's number for the tracepoint, once a counter of this process has proved that it may be
        opened. That one stays: closing the last one of an event waits some 30 ms for every CPU.
        """
        root = next((root for root in _ROOTS if os.access(root / "events/header_event", os.R_OK)), None)
        if root is None:
            readable = any(root.is_dir() for root in _ROOTS)
            raise PermissionError(errno.EACCES, "tracefs") if readable else OSError(errno.ENXIO, "tracefs")
        identifier = int((root / "events" / _EVENTS[name][0] / "id").read_text())
        if platform.machine() not in _NUMBERS:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        try:
            descriptor = self._open_one(name, identifier, os.getpid())
        except OSError as error:
            # Before Linux 5.13 there is no telling threads from processes.
            if error.errno not in (errno.EINVAL, errno.E2BIG) or not self.threads_only:
                raise
            self.threads_only = False
            descriptor = self._open_one(name, identifier, os.getpid())
        self._held.append(descriptor)
        self._open += 1
        return identifier

    def _open_one(self, name: str, identifier: int, pid: int) -> int:
        flags = _INHERIT | (_INHERIT_THREAD if self.threads_only else 0)
        descriptor = _open(identifier, pid, flags)
        if condition := _EVENTS[name][1]:
            try:
                ioctl(descriptor, _SET_FILTER, condition.encode() + b"\0")
            except OSError:
                os.close(descriptor)
                raise
        return descriptor

    def attach(self, pid: int) -> tuple[Counting | None, str]:
        """Counters on a process from now on; or why there are none.

        A thread that is started meanwhile by one that has no counter yet is missed.
        """
        if not self._identifiers:
            return None, next(iter(self.reasons.values()), "")
        counting = Counting()
        try:
            threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
            if self._open + len(threads) * len(self._identifiers) > self._room:
                return None, f"its {len(threads):,} threads need more descriptors than `ulimit -n` grants"
            for name, identifier in self._identifiers.items():
                counting.descriptors[name] = []
                for thread in threads:
                    with contextlib.suppress(_GoneError):
                        counting.descriptors[name].append(self._open_one(name, identifier, thread))
        except OSError as error:
            counting.close()
            if error.errno in (errno.ENOENT, errno.ESRCH):
                return None, "it has ended"
            return None, _explain(error, "the process's threads")
        self._open += counting.size
        return counting, ""

    def detach(self, counting: Counting) -> None:
        """Closes a process's counters."""
        self._open -= counting.size
        counting.close()

    def close(self) -> None:
        """Closes what this object holds; a process's counters are closed by detach."""
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()


def _raise_descriptor_limit() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return min(soft, 1 << 16) if soft != resource.RLIM_INFINITY else 1 << 16


def _explain(error: OSError, what: str) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return "the kernel's tracepoints need root, or CAP_PERFMON and a readable tracefs"
    if error.errno == errno.ENXIO:
        return f"there is no tracefs at {_ROOTS[0]}"
    if error.errno == errno.ENOENT:
        return f"this kernel has no tracepoint {what}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many open files"
    return f"{what}: {error.strerror}"
