"""Reads the files of /proc, each in one place: those of a process, and those of the machine.

All of it raises GoneError where a process has ended, and PermissionError where its files may not be read.
`proc` is another root for tests.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from pathlib import Path

from calm.core.errors import CalmError

PROC = Path("/proc")
OTHER_USER = "another user's process: needs root"
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
TICKS = os.sysconf("SC_CLK_TCK")
MAX_ROLLUP_KIB = 128 << 10
"""Up to this resident size smaps_rollup is read of processes that others wait for: the kernel walks all page
tables for it, at some 10 us for each MiB, and page faults and memory calls may have to wait so long."""
_KERNEL_THREAD = 0x00200000
_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) (\S+) (\d+) *(.*)$")
_FIELD_KIB = re.compile(r"^(\S+):\s+(\d+) kB$", re.MULTILINE)
_HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")
_HUGETLB = ("Shared_Hugetlb", "Private_Hugetlb")


class GoneError(CalmError):
    """The process has ended."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"there is no process {pid}")


@dataclass(frozen=True)
class Stat:
    """A line of /proc/PID/stat."""

    pid: int
    name: str
    state: str
    parent: int
    threads: int
    user_s: float
    system_s: float
    minor_faults: int
    major_faults: int
    started_ticks: int
    """Since the machine booted: with the pid, it identifies a process."""
    start_code: int
    """Changes when the process executes another program."""
    is_kernel: bool
    children: tuple[int, int, float, float]
    """Minor and major faults, user and system seconds of children that it has waited for."""

    @property
    def has_ended(self) -> bool:
        """A zombie, or one that is about to vanish."""
        return self.state in "ZX"

    @property
    def image(self) -> tuple[int, int, str]:
        """Differs once the process executes another program, or its number belongs to another process."""
        return self.started_ticks, self.start_code, self.name


@dataclass(frozen=True)
class Mapping:
    """A mapping of /proc/PID/maps, with what smaps adds."""

    start: int
    end: int
    rights: str
    offset: int
    device: str
    inode: int
    path: str
    sizes_kib: dict[str, int] = field(default_factory=dict)
    """The fields of smaps; empty where only maps was read."""

    @property
    def resident_kib(self) -> int | None:
        """Resident memory, hugetlb pages included; None where only maps was read."""
        if "Rss" not in self.sizes_kib:
            return None
        return self.sizes_kib["Rss"] + sum(self.sizes_kib.get(name, 0) for name in _HUGETLB)

    @cached_property
    def huge_kib(self) -> int:
        return huge_kib(self.sizes_kib)


def huge_kib(sizes: dict[str, int]) -> int:
    """Memory in huge pages of any kind, by the fields of smaps or smaps_rollup."""
    return sum(sizes.get(name, 0) for name in (*_HUGE, *_HUGETLB))


@contextmanager
def _alive(pid: int) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, ProcessLookupError) as error:
        raise GoneError(pid) from error


def _read(pid: int, name: str, proc: Path = PROC) -> str:
    with _alive(pid), FileIO(f"{proc}/{pid}/{name}") as file:  # of several thousand files a second
        return file.readall().decode(errors="replace")


def pids(proc: Path = PROC) -> list[int]:
    return [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()]


def stat(pid: int, proc: Path = PROC) -> Stat:
    text = _read(pid, "stat", proc)
    # The name may hold anything, parentheses and line ends too.
    begin, end = text.index("("), text.rindex(")")
    name = text[begin + 1 : end]
    fields = text[end + 2 :].split()
    return Stat(
        pid=pid,
        name=name if name.isprintable() else "".join(c if c.isprintable() else "?" for c in name),
        state=fields[0],
        parent=int(fields[1]),
        threads=int(fields[17]),
        user_s=int(fields[11]) / TICKS,
        system_s=int(fields[12]) / TICKS,
        minor_faults=int(fields[7]),
        major_faults=int(fields[9]),
        started_ticks=int(fields[19]),
        start_code=int(fields[23]),
        is_kernel=bool(int(fields[6]) & _KERNEL_THREAD),
        children=(int(fields[8]), int(fields[10]), int(fields[13]) / TICKS, int(fields[14]) / TICKS),
    )


def stat_or_none(pid: int, proc: Path = PROC) -> Stat | None:
    """The same; None where the process has ended or its stat cannot be read."""
    try:
        return stat(pid, proc)
    except (GoneError, OSError, ValueError, IndexError):
        return None


def statm(pid: int, proc: Path = PROC) -> tuple[int, int, int]:
    """Pages: of its address space, resident, and of these shared."""
    size, resident, shared, *_ = map(int, _read(pid, "statm", proc).split())
    return size, resident, shared


def rss_kib(pid: int, proc: Path = PROC) -> int:
    """Resident memory; the kernel's cheap and slightly stale count."""
    return statm(pid, proc)[1] * PAGE_KIB


def status(pid: int, proc: Path = PROC) -> dict[str, str]:
    lines = (line.partition(":") for line in _read(pid, "status", proc).splitlines())
    return {name: value.strip() for name, _, value in lines}


def check(pid: int, proc: Path = PROC) -> None:
    """Raises CalmError unless it is a process, and not a thread of one."""
    leader = int(status(pid, proc).get("Tgid", pid))
    if leader != pid:
        raise CalmError(f"{pid} is a thread of process {leader}")


def executable(pid: int, proc: Path = PROC) -> str:
    """The program that it runs; empty where that cannot be read."""
    try:
        return str((proc / str(pid) / "exe").readlink())
    except OSError:
        return ""


def arguments(pid: int, proc: Path = PROC) -> list[str]:
    """Its command line; empty for the kernel's threads and zombies."""
    text = _read(pid, "cmdline", proc)
    return text.removesuffix("\0").split("\0") if text else []


def owner(pid: int, proc: Path = PROC) -> int:
    """Its effective user id."""
    return int(status(pid, proc)["Uid"].split()[1])


def refusal(pid: int, error: Exception) -> str:
    """Why a process's memory cannot be read or written, as far as it is known."""
    if not isinstance(error, PermissionError):
        return "it has ended"
    if os.geteuid() == 0:
        return "the kernel refuses it, also to root: needs CAP_SYS_PTRACE, which containers lack by default"
    with contextlib.suppress(GoneError, OSError):
        if owner(pid) != os.geteuid():
            return OTHER_USER
    scope = text("sys/kernel/yama/ptrace_scope").strip() or "0"
    return (
        f"{f'kernel.yama.ptrace_scope is {scope}' if scope != '0' else 'the kernel refuses it'}: needs root"
    )


def threads(pid: int, proc: Path = PROC) -> list[int]:
    with _alive(pid):
        return [int(entry.name) for entry in (proc / str(pid) / "task").iterdir()]


@contextmanager
def memory(pid: int) -> Iterator[Callable[[int, int], bytes | None]]:
    """Reads bytes at an address of its memory; None where they cannot all be read."""
    with _alive(pid):
        descriptor = os.open(PROC / str(pid) / "mem", os.O_RDONLY | os.O_CLOEXEC)

    def read(address: int, size: int) -> bytes | None:
        try:
            data = os.pread(descriptor, size, address)
        except (OSError, OverflowError):
            return None
        return data if len(data) == size else None

    try:
        yield read
    finally:
        os.close(descriptor)


def fields_kib(text: str) -> dict[str, int]:
    """The fields in kB of smaps_rollup, status or meminfo."""
    return {name: int(value) for name, value in _FIELD_KIB.findall(text)}


def swap_kib(pid: int, proc: Path = PROC) -> int | None:
    """Memory that is swapped out, by /proc/PID/status."""
    return fields_kib(_read(pid, "status", proc)).get("VmSwap")


def rollup(pid: int, proc: Path = PROC) -> dict[str, int]:
    """smaps_rollup in KiB: the kernel walks all page tables for it, with the address space locked."""
    return fields_kib(_read(pid, "smaps_rollup", proc))


def parse_mappings(text: str) -> list[Mapping]:
    """Reads maps or smaps. Lines of neither form are passed over."""
    mappings: list[Mapping] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            start, end, rights, offset, device, inode, path = head.groups()
            place = int(start, 16), int(end, 16), rights, int(offset, 16), device, int(inode), path
            mappings.append(Mapping(*place))
        elif mappings and (size := _FIELD_KIB.match(line)):
            mappings[-1].sizes_kib[size[1]] = int(size[2])
    return mappings


def maps(pid: int, proc: Path = PROC) -> list[Mapping]:
    return parse_mappings(_read(pid, "maps", proc))


def smaps(pid: int, proc: Path = PROC) -> list[Mapping]:
    """Its mappings with their sizes, for which the kernel walks all page tables."""
    return parse_mappings(_read(pid, "smaps", proc))


def files(pid: int, proc: Path = PROC) -> list[str]:
    """The paths that it has mapped, each once."""
    return list(dict.fromkeys(each.path for each in maps(pid, proc) if each.path.startswith("/")))


def parents(proc: Path = PROC) -> dict[int, int]:
    return {pid: found.parent for pid in pids(proc) if (found := stat_or_none(pid, proc))}


def descendants(root: int, proc: Path = PROC) -> list[int]:
    """All processes below one, the nearest first."""
    above = parents(proc)
    found, known = [root], {root}
    for each in found:
        below = [pid for pid, parent in above.items() if parent == each and pid not in known]
        found += below
        known.update(below)
    return found[1:]


def text(name: str, proc: Path = PROC) -> str:
    """A file of the machine's, as cpuinfo or interrupts; empty where it cannot be read."""
    try:
        return (proc / name).read_text(errors="replace")
    except OSError:
        return ""


def cpu_flags(cpuinfo: str | None = None) -> set[str] | None:
    """The flags of the CPUs; None where /proc/cpuinfo has none, as on arm64."""
    found = re.search(r"^flags\s*:(.*)$", text("cpuinfo") if cpuinfo is None else cpuinfo, re.MULTILINE)
    return set(found[1].split()) if found else None


def memory_kib(field: str) -> int:
    """A field of /proc/meminfo; 0 where it is missing."""
    return fields_kib(text("meminfo")).get(field, 0)


def tlb_interrupts() -> int | None:
    """The TLB row of /proc/interrupts, over all CPUs and every process; None where there is no such row."""
    found = re.search(r"^ *TLB:(.*)$", text("interrupts"), re.MULTILINE)
    return sum(int(word) for word in found[1].split() if word.isdigit()) if found else None
