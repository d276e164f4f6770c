"""Counts TLB shootdowns and memory system calls of running processes, by the kernel's tracepoints.

A counter is opened on each thread of a process, and inherited by the threads that it starts later. The kernel
counts by itself; an interval costs a read for each counter.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterable, Mapping, Sequence
from fcntl import ioctl

from calm.core import proc
from calm.core.events import EVENTS, TRACEFS, tracefs

SHOOTDOWNS = "shootdowns"
RECEIVED = "interrupts_received"

# The numbers of perf_event_open and of its ioctl, and the constants of linux/perf_event.h.
_SYSCALL = {"x86_64": 298, "aarch64": 241}
_SET_FILTER = 0x40082406
_TYPE_TRACEPOINT = 2
_INHERIT, _INHERIT_THREAD = 1 << 1, 1 << 35
_CLOEXEC = 8
_ATTRIBUTES = struct.Struct("=IIQQQQQ72x")
# Left for everything else that this process opens.
_SPARE_DESCRIPTORS = 64
_MAX_DESCRIPTORS = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)

Counting = Mapping[str, Sequence[int]]
"""The counters of a process: by event, a descriptor for each thread that it had when they were opened."""


def read(counting: Counting) -> dict[str, int]:
    """The events since the counters were opened."""
    return {
        name: sum(int.from_bytes(os.read(each, 8), "little") for each in descriptors)
        for name, descriptors in counting.items()
    }


class Events:
    """Opens counters on processes, as far as the kernel permits."""

    def __init__(self, names: Iterable[str]) -> None:
        self.reasons: dict[str, str] = {}
        """Why an event is not counted, by its name."""
        self.threads_only = True
        self._identifiers: dict[str, int] = {}
        self._held: dict[str, list[int]] = {}
        self._open = 0
        self._room = _raise_descriptor_limit() - _SPARE_DESCRIPTORS
        for name in names:
            try:
                self._identifiers[name] = self._identify(name)
            except OSError as error:
                self.reasons[name] = _explain(error, EVENTS[name].perf)

    def _identify(self, name: str) -> int:
        """The kernel's number of the tracepoint, if this process may count it.

        The counter that proves it stays open: closing the last one of an event waits some 30 ms for all CPUs.
        """
        if (root := tracefs()) is None:
            mounted = any(root.is_dir() for root in TRACEFS)
            raise OSError(errno.EACCES if mounted else errno.ENXIO, "tracefs")
        identifier = int((root / EVENTS[name].path / "id").read_text())
        try:
            descriptor = self._open_counter(name, identifier, os.getpid())
        except OSError as error:
            # Before Linux 5.13 counters are inherited by processes too.
            if error.errno not in (errno.EINVAL, errno.E2BIG) or not self.threads_only:
                raise
            self.threads_only = False
            descriptor = self._open_counter(name, identifier, os.getpid())
        self._held[name] = [descriptor]
        self._open += 1
        return identifier

    def _open_counter(self, name: str, identifier: int, thread: int) -> int:
        flags = _INHERIT | (_INHERIT_THREAD if self.threads_only else 0)
        attributes = _ATTRIBUTES.pack(_TYPE_TRACEPOINT, _ATTRIBUTES.size, identifier, 0, 0, 0, flags)
        number = _SYSCALL.get(platform.machine(), -1)
        descriptor = int(_libc.syscall(number, attributes, thread, -1, -1, ctypes.c_ulong(_CLOEXEC)))
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if condition := EVENTS[name].condition:
            try:
                ioctl(descriptor, _SET_FILTER, condition.encode() + b"\0")
            except OSError:
                os.close(descriptor)
                raise
        return descriptor

    def attach(self, pid: int) -> tuple[Counting | None, str]:
        """Counters on a process from now on, or why there are none.

        A thread is missed if one that has no counter yet starts it meanwhile.
        """
        if not self._identifiers:
            return None, next(iter(self.reasons.values()), "")
        counting: dict[str, list[int]] = {name: [] for name in self._identifiers}
        try:
            threads = proc.threads(pid)
            if self._open + len(threads) * len(counting) > self._room:
                return None, f"its {len(threads):,} threads need more descriptors than `ulimit -n` grants"
            for name, identifier in self._identifiers.items():
                for thread in threads:
                    try:
                        counting[name].append(self._open_counter(name, identifier, thread))
                    except ProcessLookupError:
                        continue  # the thread has ended
        except proc.GoneError:
            return None, "it has ended"
        except OSError as error:
            _close(counting)
            return None, _explain(error, "the process's threads")
        self._open += sum(map(len, counting.values()))
        return counting, ""

    def detach(self, counting: Counting) -> None:
        """Closes a process's counters."""
        self._open -= sum(map(len, counting.values()))
        _close(counting)

    def close(self) -> None:
        """Closes what this object holds; a process's counters are closed by detach."""
        _close(self._held)
        self._held.clear()


def _close(counting: Counting) -> None:
    for descriptors in counting.values():
        for descriptor in descriptors:
            os.close(descriptor)


def _raise_descriptor_limit() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def _explain(error: OSError, what: str) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return "the kernel's tracepoints need root, or CAP_PERFMON and a readable tracefs"
    reasons = {
        errno.ENXIO: f"there is no tracefs at {TRACEFS[0]}",
        errno.ENOENT: f"this kernel has no tracepoint {what}",
        errno.EMFILE: "too many open files",
    }
    return reasons.get(error.errno or 0, f"{what}: {error.strerror}")
