"""What a reader of an allocator says of a process's heap, and what it is given to read it.

A reader looks from outside, while the process runs: it never waits for the process, for a lock or a disk,
takes what it reads for damaged or half changed, and bounds its own work (`MAX_STEPS`, `MAX_BYTES`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from calm.core.proc import Mapping

MAX_STEPS = 1 << 22
"""Elements of a list that a reader follows at most: a longer one is damaged or changes too fast."""
MAX_BYTES = 1 << 30
"""Of the process's memory that a reader reads at most."""

Certainty = Literal["exact", "estimate", "unknown"]
"""exact: read from the allocator's own records, or measured. estimate: derived by an assumption that the
reader's notes name. unknown: cannot be read; the figure's bytes are then 0 and mean nothing."""


@dataclass(frozen=True)
class Figure:
    """Bytes, and how sure they are."""

    bytes: int = 0
    certainty: Certainty = "unknown"

    @property
    def is_known(self) -> bool:
        return self.certainty != "unknown"


UNKNOWN = Figure()


def exact(count: int) -> Figure:
    return Figure(max(0, count), "exact")


def estimate(count: int) -> Figure:
    return Figure(max(0, count), "estimate")


@dataclass(frozen=True)
class SizeClass:
    """The blocks of one size: a size class, a bin, or a range of sizes (then `size` is the smallest)."""

    size: int
    used: int
    """Blocks that the program holds."""
    free: int
    """Free blocks that lie in pages or slabs which also hold blocks in use."""
    bytes: int
    """Memory of the slabs (pages, bins) that hold at least one block in use or cached."""
    movable: int
    """Bytes that would return to the system if the blocks in use were packed densely."""
    cached: int = 0
    """Free blocks in caches, which the heap counts as used."""


@dataclass(frozen=True)
class Heap:
    """An allocator's heap at one moment.

    in_use + cached + retained + fragmentation + metadata = footprint, as far as all are known. Each byte
    counts once: a free block in a cache is cached, one in a partly used page or slab is fragmentation, and a
    page without any block that may be resident is retained.
    """

    allocator: str
    """As `calm allocators` names it."""
    version: str
    """Of the library; "" where it does not say."""
    footprint: Figure
    """Memory that the allocator holds from the system and that may be resident: not what it only reserved,
    nor what it gave back."""
    in_use: Figure
    """Blocks that the program holds, in the sizes that the allocator rounded them up to."""
    cached: Figure = UNKNOWN
    """Free blocks in the caches of threads or CPUs."""
    retained: Figure = UNKNOWN
    """Free pages that may be resident and that the allocator could return (purge, trim) at once."""
    fragmentation: Figure = UNKNOWN
    """Free bytes that cannot be returned, because a block in use lies in the same page or slab."""
    metadata: Figure = UNKNOWN
    """The allocator's own records."""
    movable: Figure = UNKNOWN
    """Bytes that would return if blocks in use could be moved: the sum over the classes, rounded to pages."""
    classes: tuple[SizeClass, ...] = ()
    """Those with memory; empty where they cannot be read."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Start and end of the address ranges that the allocator owns, reserved or used, in any order. Anonymous
    memory outside of all readers' ranges belongs to the program's or a runtime's own mappings."""
    notes: tuple[str, ...] = ()
    """One sentence each: what an estimate assumes, what could not be read and why."""
    library: str = ""
    """The file's name of a library that brought this allocator for itself; "" if it may be the process's."""
    settings: str = ""
    """The environment variable of the allocator's settings, as this build of it has it; "" where unknown."""
    control: str = ""
    """The function that makes it return memory, as this build of it has it; "" where the image has none."""
    facts: dict[str, int] = field(default_factory=dict)
    """Further numbers by which rules decide what to advise, such as arenas or threads' caches."""

    @property
    def title(self) -> str:
        """The allocator, and the library that brought it."""
        return f"{self.allocator} in {self.library}" if self.library else self.allocator


def merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same addresses in as few ranges."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return tuple(found)


class Process(Protocol):
    """A process as readers see it. Its memory, mappings and files are those of one sample."""

    pid: int
    page: int
    """The page size."""
    mappings: Sequence[Mapping]
    """/proc/PID/smaps, by address. `sizes_kib` is empty where only maps could be read."""

    def read(self, address: int, size: int) -> bytes | None:
        """Bytes of its memory; None where they cannot all be read."""

    def words(self, address: int, count: int, width: int = 8) -> tuple[int, ...] | None:
        """Unsigned little-endian integers of 1, 2, 4 or 8 bytes; None where they cannot all be read."""

    def symbols(self, pattern: str, names: Iterable[str]) -> dict[str, int]:
        """Addresses in memory of functions and variables, by name.

        Of the first mapped ELF file that has any of them and whose path matches the regular expression: from
        .symtab where it is not stripped, and from .dynsym.
        """

    def image(self, pattern: str) -> Image | None:
        """The first mapped ELF file whose path matches the regular expression, executable ones only."""

    def resident(self, start: int, end: int) -> int | None:
        """Resident bytes of a range, by pagemap; None where that cannot be read."""

    def present(self, start: int, end: int) -> Any:  # noqa: ANN401
        """Whether each page of a range is resident, a numpy array; None where that cannot be read, or where
        the range is too large for that.

        To read a page that is not resident makes the process wait for its swap, or gives it page tables.
        """


@dataclass(frozen=True)
class Image:
    """An ELF file that is mapped into a process."""

    path: str
    bias: int
    """Added to the addresses in the file."""
    writable: tuple[tuple[int, int], ...]
    """Start and end in memory of its data: .data, .bss."""
    build_id: str


class Reader(Protocol):
    """Reads the heaps of one allocator. One function object per allocator, in a module of its own."""

    def __call__(self, process: Process) -> Sequence[Heap]:
        """One for each program or library of the process that has this allocator in it.

        One that cannot be read is a Heap whose figures are UNKNOWN and whose notes say why.
        Never raises for what the process's memory holds.
        """
