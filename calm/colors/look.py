"""One look at a process: its large regions at a moment, their pages, and the frames that these are in."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calm.colors import pagemap
from calm.colors.blocks import MAPPING, Block
from calm.colors.pagemap import PAGE_BYTES, Mapping, Pagemap, Pages

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

    @property
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
        """By which the look to be shown is chosen: resident memory that was told of, and all."""
        told = sum(region.pages.bytes for region in self.regions if region.kind != OTHER)
        return told, sum(region.pages.bytes for region in self.regions)

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


def _others(mappings: Sequence[Mapping], blocks: Sequence[Block], least: int, not_of: str) -> list[Mapping]:
    """Mappings with that much resident memory that no block lies in."""
    starts = np.array([block.address for block in blocks], dtype=np.uint64)
    ends = np.array([block.address + block.bytes for block in blocks], dtype=np.uint64)
    # What a library or program has beside its code, and only reads, is no data to be walked.
    code = {mapping.path for mapping in mappings if "x" in mapping.rights and mapping.path}
    found = []
    for mapping in mappings:
        if not mapping.is_data or (not_of and mapping.path.startswith(not_of)):
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
    not_of: str = "",
    proc: Path = pagemap.PROC,
) -> Look:
    """Looks at a process, by the blocks that it tells of, or else by its mappings."""
    mappings = pagemap.mappings(pid, proc)
    regions = []
    with Pagemap(pid, proc) as pages:
        for block in blocks or ():
            seen = pages.pages(block.address, block.bytes)
            regions.append(
                Region(block.address, block.bytes, block.kind, seen, block.frames, thread=block.thread)
            )
        for mapping in _others(mappings, blocks or (), least, not_of):
            size = mapping.end - mapping.start
            kind = OTHER if blocks is not None else MAPPING
            seen = pages.pages(mapping.start, size)
            regions.append(Region(mapping.start, size, kind, seen, path=mapping.path))
        hidden, known = pages.reason, pages.readable
    if hidden is not None:
        regions = [
            Region(
                region.address,
                region.bytes,
                region.kind,
                Pages(region.pages.numbers, None),
                region.frames,
                region.path,
                region.thread,
            )
            for region in regions
        ]
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
    )


def frames_by_page(region: Region) -> NDArray[np.int64] | None:
    """The frame of each page from the region's first on; -1 of one that is not resident."""
    if region.pages.frames is None:
        return None
    first = region.address // PAGE_BYTES
    found = np.full((region.address + region.bytes - 1) // PAGE_BYTES + 1 - first, -1, dtype=np.int64)
    found[region.pages.numbers - first] = region.pages.frames
    return found
