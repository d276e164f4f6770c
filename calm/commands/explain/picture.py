"""All resident memory of a process, divided into parts that sum to its RSS."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from calm.commands.explain.model import Certainty, Figure, Heap, Process, Reader, exact, merged
from calm.core import proc, proc_maps
from calm.core.allocators import GLIBC
from calm.core.proc import Mapping

PARTS = {
    "in_use": "blocks that the program holds",
    "cached": "free blocks in caches of threads or CPUs",
    "retained": "free pages that the allocator keeps",
    "fragmentation": "free bytes beside blocks in use",
    "metadata": "the allocator's records",
    "unaccounted": "the heap's, not explained by its records",
    "other": "anonymous mappings of no known allocator",
    "stacks": "stacks of threads",
    "shmem": "shared memory",
    "data": "written pages of programs and libraries",
    "files": "pages of files",
    "remainder": "RSS as the kernel counts it, less the parts",
}
HEAP_PARTS = ("in_use", "cached", "retained", "fragmentation", "metadata")
SMALL_BYTES = 8 << 20
"""What is smaller needs no explanation."""
_MISMATCH_SHARE = 0.05
_SHMEM = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")
_THREADS_MOST = 1 << 12
_LARGEST = 5
# Pages whose contents are looked at, to find huge pages that are mostly empty.
_SAMPLED_PAGES = 512
_HUGE_LEAST_KIB = 2048


@dataclass(frozen=True)
class Region:
    """A mapping that no allocator owns."""

    start: int
    size: int
    resident: int
    name: str


@dataclass(frozen=True)
class Picture:
    """A process's memory at one moment."""

    pid: int
    command: str
    rss: int
    parts: dict[str, Figure]
    """By the names of PARTS; they sum to rss."""
    heaps: tuple[Heap, ...]
    """The largest first."""
    of_heaps: tuple[dict[str, Figure], ...]
    """What each heap has in the parts: resident memory only."""
    unread: str
    """The process's own allocator, if its heap cannot be read; "" if it can."""
    untouched: int
    """Bytes in use of heaps that the program never touched, or that are in swap: not resident."""
    shared: int
    """Resident anonymous memory that other processes have too, and all shared memory."""
    swap: int
    huge: int
    """Anonymous memory in huge pages."""
    empty_huge: Figure
    """Pages of zeros within those."""
    largest: tuple[Region, ...]
    """Of `other`."""
    notes: tuple[str, ...]

    def bytes(self, *parts: str) -> int:
        return sum(self.parts[part].bytes for part in parts)

    @property
    def heap(self) -> Heap | None:
        return self.heaps[0] if self.heaps else None

    def heap_of(self, part: str) -> Heap | None:
        """That which has most of a part of HEAP_PARTS; of another part, the largest."""
        if part not in HEAP_PARTS or not self.heaps:
            return self.heap
        sizes = [parts[part].bytes if part in parts else 0 for parts in self.of_heaps]
        return self.heaps[sizes.index(max(sizes))]

    @property
    def mismatch(self) -> int:
        """By how much the parts miss RSS, where that is too much for a process that does not allocate."""
        missing = abs(self.bytes("remainder"))
        return missing if missing >= max(SMALL_BYTES, _MISMATCH_SHARE * self.rss) else 0

    def bytes_of(self, heap: Heap, part: str) -> int:
        """Of the heap with the same title; 0 where there is none."""
        titles = [each.title for each in self.heaps]
        parts = self.of_heaps[titles.index(heap.title)] if heap.title in titles else {}
        return parts[part].bytes if part in parts else 0


def _resident_within(process: Process, mapping: Mapping, ranges: Sequence[tuple[int, int]]) -> int:
    """Resident bytes of a mapping that lie in the ranges, which are sorted and do not overlap."""
    resident = (mapping.resident_kib or 0) * 1024
    pieces = [
        (max(start, mapping.start), min(end, mapping.end))
        for start, end in ranges
        if start < mapping.end and end > mapping.start
    ]
    if not pieces or not resident:
        return 0
    if pieces == [(mapping.start, mapping.end)]:
        return resident
    return min(resident, sum(process.resident(*piece) or 0 for piece in pieces))


def _stack_pointers(pid: int) -> list[int]:
    """Of threads that wait in the kernel."""
    found = []
    with contextlib.suppress(OSError, proc.GoneError):
        for thread in proc.threads(pid)[:_THREADS_MOST]:
            with contextlib.suppress(OSError, ValueError, IndexError):
                words = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
                found.append(int(words[-2], 16))
    return found


def _kind(mapping: Mapping, stacks: Sequence[int]) -> str:
    """Which part a mapping outside of heaps belongs to."""
    path = mapping.path
    if mapping.rights[3:] == "s" and (not path.startswith("/") or path.startswith(_SHMEM)):
        return "shmem"
    if path.startswith("/"):
        return "shmem" if path.startswith(_SHMEM) else "files"
    if path.startswith("[stack") or any(mapping.start <= each < mapping.end for each in stacks):
        return "stacks"
    return "files" if path in ("[vdso]", "[vvar]", "[vsyscall]", "[uprobes]") else "other"


def _name(mapping: Mapping) -> str:
    name = mapping.path or "anonymous"
    return f"{name}, executable" if "x" in mapping.rights and not mapping.path else name


def _divided(heap: Heap, resident: int) -> tuple[dict[str, Figure], int]:
    """The resident bytes of a heap's ranges by part; and bytes that its figures have beyond them."""
    left = resident
    parts = {}
    # Free pages that may be resident may also not be: the blocks in use come first.
    for name in ("metadata", "in_use", "cached", "fragmentation", "retained"):
        figure: Figure = getattr(heap, name)
        parts[name] = replace(figure, bytes=min(left, figure.bytes))
        left -= parts[name].bytes
    known = all(getattr(heap, name).is_known for name in HEAP_PARTS)
    certainty: Certainty = "exact" if known else "unknown"
    parts["unaccounted"] = Figure(left, certainty)
    return parts, max(0, heap.footprint.bytes - resident)


def _add(parts: dict[str, Figure], more: dict[str, Figure]) -> None:
    order = ("exact", "estimate", "unknown")
    for name, figure in more.items():
        have = parts.get(name, exact(0))
        worst = max(have.certainty, figure.certainty, key=order.index)
        parts[name] = Figure(have.bytes + figure.bytes, worst)


def _empty_huge(process: Process, mappings: Sequence[Mapping]) -> Figure:
    """Pages of zeros in huge pages, by a sample of mappings that consist of such mostly."""
    huge = [
        each
        for each in mappings
        if each.sizes_kib.get("AnonHugePages", 0) >= max(_HUGE_LEAST_KIB, each.sizes_kib.get("Rss", 0) // 2)
    ]
    total = sum(each.sizes_kib["AnonHugePages"] for each in huge) * 1024
    sampled = empty = 0
    for each in huge:
        present = process.present(each.start, each.end)
        if present is None:
            return Figure()
        pages = np.flatnonzero(present)
        share = max(1, _SAMPLED_PAGES * each.sizes_kib["AnonHugePages"] * 1024 // total)
        for page in pages[:: max(1, len(pages) // share)]:
            data = process.read(each.start + int(page) * process.page, process.page)
            if data is not None:
                sampled += 1
                empty += not any(data)
    return Figure(total * empty // sampled, "estimate") if sampled else exact(0)


def _unread(process: Process, heaps: Sequence[Heap]) -> str:
    """The process's own allocator, where no reader knows its heap."""
    unread = (heap for heap in heaps if not heap.footprint.is_known and not heap.ranges and not heap.library)
    if unknown := next(unread, None):
        return unknown.allocator
    paths = [each.path for each in process.mappings if each.path.startswith("/")]
    name = proc_maps.allocator(paths)
    if name == "calmoffload":  # which has a heap of calmalloc
        name = "calmalloc"
    if name is None or name == GLIBC or name in {heap.allocator for heap in heaps}:
        return ""
    return name


def picture(process: Process, readers: Sequence[Reader]) -> Picture:
    """Divides the memory of a process. Raises GoneError where it ends meanwhile."""
    heaps = [heap for reader in readers for heap in reader(process)]
    heaps.sort(key=lambda heap: heap.footprint.bytes, reverse=True)
    ranges = [merged(heap.ranges) for heap in heaps]
    stacks = _stack_pointers(process.pid)
    parts: dict[str, Figure] = dict.fromkeys(PARTS, exact(0))
    in_heap = [0] * len(heaps)
    regions = []
    shared = 0
    for mapping in process.mappings:
        sizes = mapping.sizes_kib
        resident = (mapping.resident_kib or 0) * 1024
        rest = resident
        anonymous = not mapping.path.startswith("/")
        for number, of_heap in enumerate(ranges if anonymous else ()):
            inside = min(rest, _resident_within(process, mapping, of_heap))
            in_heap[number] += inside
            rest -= inside
        kind = _kind(mapping, stacks)
        if kind == "files":
            written = min(rest, sizes.get("Anonymous", 0) * 1024)
            _add(parts, {"data": exact(written), "files": exact(rest - written)})
        else:
            _add(parts, {kind: exact(rest)})
        if kind == "other" and rest:
            regions.append(Region(mapping.start, mapping.end - mapping.start, rest, _name(mapping)))
        if kind == "shmem":
            shared += resident
        elif kind != "files":
            shared += (sizes.get("Shared_Clean", 0) + sizes.get("Shared_Dirty", 0)) * 1024
    notes = [f"{heap.title}: {note}" if heap.library else note for heap in heaps for note in heap.notes]
    unread = _unread(process, heaps)
    if unread:
        notes.append(f"The heap of {unread} cannot be read: it counts as unaccounted.")
        parts["unaccounted"] = Figure(parts["other"].bytes, "unknown")
        parts["other"] = exact(0)
        regions = []
    untouched = 0
    of_heaps: list[dict[str, Figure]] = []
    for heap, resident in zip(heaps, in_heap, strict=True):
        if heap.library and not heap.footprint.is_known:
            # Its memory, if it has any, is in `other`.
            of_heaps.append({"other": Figure(0, "estimate")})
        else:
            divided, beyond = _divided(heap, resident)
            of_heaps.append(divided)
            untouched += beyond
        _add(parts, of_heaps[-1])
    status = proc.fields_kib("\n".join(f"{k}:\t{v}" for k, v in proc.status(process.pid).items()))
    rss = (status.get("VmRSS", 0) + status.get("HugetlbPages", 0)) * 1024
    remainder = rss - sum(figure.bytes for figure in parts.values())
    parts["remainder"] = Figure(remainder, "exact")
    stat = proc.stat(process.pid)
    return Picture(
        pid=process.pid,
        command=stat.name,
        rss=rss,
        parts=parts,
        heaps=tuple(heaps),
        of_heaps=tuple(of_heaps),
        unread=unread,
        untouched=untouched,
        shared=shared,
        swap=sum(each.sizes_kib.get("Swap", 0) for each in process.mappings) * 1024,
        huge=sum(each.sizes_kib.get("AnonHugePages", 0) for each in process.mappings) * 1024,
        empty_huge=_empty_huge(process, process.mappings),
        largest=tuple(sorted(regions, key=lambda each: -each.resident)[:_LARGEST]),
        notes=tuple(notes),
    )
