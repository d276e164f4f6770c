"""A sample of a process: its large regions at one moment, their resident pages, and the frames of these."""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from calm.core import proc as proc_files
from calm.core.errors import CalmError
from calm.core.proc import PROC, Mapping
from research.colors.pagemap import HIDDEN, MAPPING, NO_PAGES, OTHER, Pages, Region, pagemap


@dataclass(frozen=True)
class Sample:
    """All regions of a process at one moment."""

    pid: int
    command: Sequence[str]
    moment: str
    at_s: float
    """By the monotonic clock."""
    threads: int
    regions: Sequence[Region]
    mappings: Sequence[Mapping]
    hidden: str | None
    """Why frames are not known."""
    blocks_known: bool
    """The process records its blocks."""
    lost: int = 0
    """Blocks that were not recorded, as the table was full."""
    cpu: int = 0
    """A CPU that the process may run on."""

    @cached_property
    def pages(self) -> Pages:
        """The pages of all regions; pages of several regions count once."""
        known = [region.pages for region in self.regions if len(region.pages.numbers)]
        if not known:
            return NO_PAGES
        numbers, first = np.unique(np.concatenate([each.numbers for each in known]), return_index=True)
        frames = [each.frames for each in known if each.frames is not None]
        return Pages(numbers, np.concatenate(frames)[first] if self.hidden is None else None)

    @property
    def weight(self) -> tuple[int, int]:
        """Ranks samples: by resident memory, then by that in recorded blocks."""
        return self.pages.bytes, sum(each.pages.bytes for each in self.regions if each.kind != OTHER)


def is_data(mapping: Mapping) -> bool:
    """Whether it is readable, not code, and not the kernel's own."""
    is_kernels = mapping.path.startswith(("[v", "[uprobes"))
    return mapping.rights[0] == "r" and "x" not in mapping.rights and not is_kernels


def _others(mappings: Sequence[Mapping], blocks: Sequence[Region], min_bytes: int) -> list[Mapping]:
    """Mappings without a block that have so much resident memory."""
    starts = np.array([block.address for block in blocks], dtype=np.uint64)
    ends = np.array([block.address + block.bytes for block in blocks], dtype=np.uint64)
    # Read-only mappings of a file with code are constants beside the code.
    code = {mapping.path for mapping in mappings if "x" in mapping.rights and mapping.path}
    found = []
    for mapping in mappings:
        if not is_data(mapping) or (mapping.path in code and "w" not in mapping.rights):
            continue
        size = min(mapping.end - mapping.start, (mapping.resident_kib or 0) * 1024)
        if size >= min_bytes and not ((starts < mapping.end) & (ends > mapping.start)).any():
            found.append(mapping)
    return found


def take(
    pid: int,
    moment: str,
    min_bytes: int,
    blocks: Sequence[Region] | None = None,
    *,
    lost: int = 0,
    own: str = "",
    proc: Path = PROC,
) -> Sample:
    """Samples a process by its recorded blocks, or else by its mappings. Raises CalmError if it ends.

    Files below the folder `own` are not the program's memory.
    """
    try:
        mappings = proc_files.smaps(pid, proc)
    except PermissionError as error:
        raise CalmError(f"the mappings of process {pid} cannot be read: permission denied") from error
    if not mappings:
        # A zombie, or a thread of the kernel.
        raise CalmError(f"process {pid} has ended, or has no memory of its own")
    with pagemap(pid, proc) as pages:
        regions = [replace(block, pages=pages(block.address, block.bytes)) for block in blocks or ()]
        kind = MAPPING if blocks is None else OTHER
        for mapping in _others(mappings, blocks or (), min_bytes):
            if not own or not mapping.path.startswith(own):
                size = mapping.end - mapping.start
                found = pages(mapping.start, size)
                regions.append(Region(mapping.start, size, kind, path=mapping.path, pages=found))
        # If it has ended by now, nothing is at the first mapping.
        pages(mappings[0].start, 1)
    hidden = None
    if any(region.pages.frames is None for region in regions):
        hidden = HIDDEN
        regions = [replace(region, pages=replace(region.pages, frames=None)) for region in regions]
    cpu = 0
    for whose in (0, pid):
        with contextlib.suppress(OSError):
            cpu = min(os.sched_getaffinity(whose))
    return Sample(
        pid,
        proc_files.arguments(pid, proc),
        moment,
        time.monotonic(),
        int(proc_files.status(pid, proc).get("Threads", 1)),
        sorted(regions, key=lambda region: region.address),
        mappings,
        hidden,
        blocks is not None,
        lost,
        cpu,
    )
