"""One look at a process: its large regions at a moment, their pages, and the frames that these are in."""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calm.colors import pagemap
from calm.colors.blocks import MAPPING, Block
from calm.colors.pagemap import PAGE_BYTES, Mapping, Pagemap, Pages
from calm.errors import CalmError

# Neither a block nor a mapping that the program told of: its static arrays, a heap of small blocks.
OTHER = "other"


@dataclass(frozen=True)
class Region:
    """A large piece of memory that is looked at as a whole."""

    address: int
    bytes: int
    kind: str
    """One of blocks.BLOCK, blocks.MAPPING, OTHER."""
    pages: Pages
    frames: tuple[int, ...] = ()
    """Return addresses of the calls that allocated it, the innermost first."""
    path: str = ""
    thread: int = 0


@dataclass(frozen=True)
class Look:
    """What was seen."""

    pid: int
    command: str
    moment: str
    at_s: float
    """By the monotonic clock."""
    threads: int
    regions: Sequence[Region]
    mappings: Sequence[Mapping]
    hidden: str | None
    """Why frames are not known."""
    resident_known: bool
    told: bool
    """The process told of its blocks."""
    lost: int = 0
    cpu: int = 0
    """One that it may run on."""

    @cached_property
    def pages(self) -> Pages:
        """Of all regions; what lies in two counts once."""
        known = [region.pages for region in self.regions if len(region.pages.numbers)]
        if not known:
            return pagemap.NO_PAGES
        numbers, first = np.unique(np.concatenate([each.numbers for each in known]), return_index=True)
        frames: NDArray[np.int64] | None = None
        if self.hidden is None:
            parts = [each.frames for each in known if each.frames is not None]
            frames = np.concatenate(parts)[first]
        return Pages(numbers, frames)

    @property
    def weight(self) -> tuple[int, int]:
        """By which the look to be shown is chosen: all memory that is resident; of that, what was told of.

        Where it cannot be known what is resident, all counts.
        """
        sizes = [
            (region.pages.bytes if self.resident_known else region.bytes, region.kind != OTHER)
            for region in self.regions
        ]
        total = self.resident_bytes if self.resident_known else sum(size for size, _ in sizes)
        return total, sum(size for size, told in sizes if told)

    @property
    def resident_bytes(self) -> int:
        """Of all regions."""
        return self.pages.bytes


def _threads(pid: int, proc: Path) -> int:
    try:
        text = (proc / str(pid) / "status").read_text()
        return int(text.partition("\nThreads:")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return 1


def _command(pid: int, proc: Path) -> str:
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")[:-1]
        return " ".join(word.decode(errors="replace") for word in words)
    except OSError:
        return ""


def _cpu(pid: int) -> int:
    for whose in (pid, 0):
        with contextlib.suppress(OSError):
            return min(os.sched_getaffinity(whose))
    return 0


@dataclass(frozen=True)
class Calms:
    """What of a process's memory is calm's own."""

    folder: str = ""
    """Of the files that are mapped."""
    start: int = 0
    end: int = 0
    """Where its library lies."""

    def without(self, mapping: Mapping) -> list[Mapping]:
        """What is left of a mapping: the kernel makes one of the library's tables and of what lies beside."""
        if self.folder and mapping.path.startswith(self.folder):
            return []
        start = self.start // PAGE_BYTES * PAGE_BYTES
        end = -(-self.end // PAGE_BYTES) * PAGE_BYTES
        if mapping.end <= start or mapping.start >= end:
            return [mapping]
        # What is resident of a piece is not in smaps.
        pieces = ((mapping.start, start), (end, mapping.end))
        return [replace(mapping, start=a, end=b, resident_kib=None) for a, b in pieces if a < b]


_NOTHING = Calms()


def _others(mappings: Sequence[Mapping], blocks: Sequence[Block], least: int, calms: Calms) -> list[Mapping]:
    """Mappings with that much resident memory, as far as smaps knows, that no block lies in."""
    starts = np.array([block.address for block in blocks], dtype=np.uint64)
    ends = np.array([block.address + block.bytes for block in blocks], dtype=np.uint64)
    # What a library or program has beside its code, and only reads, is no data to be walked.
    code = {mapping.path for mapping in mappings if "x" in mapping.rights and mapping.path}
    found = []
    for mapping in (piece for whole in mappings for piece in calms.without(whole)):
        if not mapping.is_data:
            continue
        if mapping.path in code and "w" not in mapping.rights:
            continue
        size = mapping.end - mapping.start
        if min(size, size if mapping.resident_kib is None else mapping.resident_kib * 1024) < least:
            continue
        if not bool(((starts < mapping.end) & (ends > mapping.start)).any()):
            found.append(mapping)
    return found


def take(
    pid: int,
    moment: str,
    least: int,
    blocks: Sequence[Block] | None = None,
    *,
    lost: int = 0,
    calms: Calms = _NOTHING,
    proc: Path = pagemap.PROC,
) -> Look:
    """Looks at a process, by the blocks that it tells of, or else by its mappings. CalmError if it ends."""
    mappings = pagemap.mappings(pid, proc)
    regions = []
    with Pagemap(pid, proc) as pages:
        for block in blocks or ():
            seen = pages.pages(block.address, block.bytes)
            regions.append(
                Region(block.address, block.bytes, block.kind, seen, block.frames, thread=block.thread)
            )
        for mapping in _others(mappings, blocks or (), least, calms):
            size = mapping.end - mapping.start
            kind = OTHER if blocks is not None else MAPPING
            seen = pages.pages(mapping.start, size)
            if mapping.resident_kib is None and pages.readable and seen.bytes < least:
                continue
            regions.append(Region(mapping.start, size, kind, seen, path=mapping.path))
        # As many mappings as were listed when it ended, or none.
        for first in mappings[:1]:
            pages.pages(first.start, 1)
        if pages.ended:
            raise CalmError(f"process {pid} ended while it was looked at")
        hidden, known = pages.reason, pages.readable
    if hidden is not None:
        regions = [replace(region, pages=replace(region.pages, frames=None)) for region in regions]
    return Look(
        pid,
        _command(pid, proc),
        moment,
        time.monotonic(),
        _threads(pid, proc),
        sorted(regions, key=lambda region: region.address),
        mappings,
        hidden,
        known,
        blocks is not None,
        lost,
        _cpu(pid),
    )


def frames_by_page(region: Region) -> NDArray[np.int64] | None:
    """The frame of each page from the region's first on; -1 of one that is not resident."""
    if region.pages.frames is None:
        return None
    first = region.address // PAGE_BYTES
    found = np.full((region.address + region.bytes - 1) // PAGE_BYTES + 1 - first, -1, dtype=np.int64)
    found[region.pages.numbers - first] = region.pages.frames
    return found
