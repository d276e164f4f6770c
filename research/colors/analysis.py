"""Analyses a sample: pages in conflict, the same for other colorings, and blocks that collide.

The analysis is the JSON document of `calm colors run`, from which the report is printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from calm.core.documents import Document
from research import topology
from research.colors import caches as geometry
from research.colors import sites
from research.colors.caches import PAGE_BYTES, Cache, Random
from research.colors.pagemap import OTHER, Pages
from research.colors.pairs import Cluster, Pair, clusters, pairs
from research.colors.sample import Sample
from research.colors.sites import Call

VIRTUAL_MACHINE = (
    "this is a virtual machine: frames are those of its own kernel, and have these colors only within the "
    "large pages that the host has under them"
)


@dataclass(frozen=True)
class Count:
    """The pages of one block, or of all, in one cache."""

    pages: int
    in_conflict: int | None
    """None where frames are hidden."""
    unavoidable: int
    """The conflicts of the best coloring."""
    unnecessary: int | None
    """All other conflicts; None where frames are hidden."""
    random: Random
    """The unnecessary conflicts of random frames."""
    huge: int
    """The unnecessary conflicts of huge pages at the same addresses."""


@dataclass
class Level:
    """A cache, and the conflicts of all blocks together."""

    cache: Cache
    colors: int
    skipped: str | None
    """Why there are no counts, if the reason is the cache."""
    conflicts: Count | None = None
    pages_by_color: list[int] | None = None
    """None where frames are hidden."""


@dataclass
class Block:
    """A block, or a mapping without blocks."""

    id: int
    kind: str
    """block; mapping, one that the program made; or other."""
    address: int
    bytes: int
    resident_bytes: int
    huge_bytes: int | None
    """Memory in huge pages; None where frames are hidden."""
    path: str | None
    thread: int | None
    """The thread that allocated it."""
    site: tuple[Call, ...]
    """The program's calls that allocated it, the innermost first."""
    conflicts: dict[str, Count]
    """For each cache that is not skipped, as L2."""


@dataclass
class Run:
    """The program that was run, and when the sample was taken."""

    exit_code: int
    allocator: str
    wall_s: float
    at_s: float
    samples: int
    processes: int
    processes_elsewhere: int
    """Processes in PID namespaces of their own, which are not sampled."""


class Colors(Document, tag="calm-colors"):
    """What `calm colors run` found in a process."""

    pid: int
    command: list[str]
    moment: str
    """When the sample was taken: at an interval, before a peak ends, at the exit, or now."""
    threads: int
    min_bytes: int
    near_lines: int
    page_bytes: int
    frames_known: bool
    blocks_known: bool
    """The process recorded its blocks; else blocks are mappings."""
    blocks_lost: int
    """Blocks that were not recorded, as the table was full."""
    resident_bytes: int
    """Of all blocks; memory of several blocks counts once."""
    huge_bytes: int | None
    huge_kib: int
    """The process's memory in huge pages."""
    caches: list[Level]
    blocks: list[Block]
    pairs: int
    """The number of pairs that collide."""
    collisions: list[Pair]
    """One pair of those that were allocated in the same two places and collide alike, the worst first."""
    clusters: list[Cluster]
    notes: list[str]
    run: Run | None = None
    """None for a process that was running already."""


def _count(pages: Pages, cache: Cache) -> tuple[Count, list[int] | None]:
    """The count, and the number of pages by color."""
    numbers, frames = pages.numbers, pages.frames
    if frames is not None:
        # A frame that several pages share, as that of zeros, is in the cache once.
        frames, first = np.unique(frames, return_index=True)
        numbers = numbers[np.sort(first)]
    # The innermost cache is indexed by virtual addresses.
    indexed = numbers if cache.level == 1 else frames
    counts = None if indexed is None else cache.counts(indexed)
    size = len(numbers)
    found = Count(
        pages=size,
        in_conflict=None if counts is None else int(cache.conflicts(counts)),
        unavoidable=max(0, size - cache.pages),
        unnecessary=None if counts is None else int(cache.unnecessary(counts)),
        random=geometry.random(size, cache),
        huge=int(cache.unnecessary(cache.counts(numbers))),
    )
    return found, None if counts is None else counts.tolist()


def _why_skipped(cache: Cache) -> str | None:
    if cache.is_hashed:
        return (
            f"its {cache.sets:,} sets are no power of two: it consists of slices that a hash of the address "
            "chooses, and pages have no colors in it"
        )
    return "one color: a page covers all its sets" if cache.colors == 1 else None


def _notes(seen: Sample, levels: Sequence[Level]) -> list[str]:
    notes = []
    if seen.hidden:
        notes.append(f"{seen.hidden}; blocks are compared by their addresses")
    elif topology.is_virtual():
        notes.append(VIRTUAL_MACHINE)
    outer = [level.cache.name for level in levels if level.cache.level > 2 and level.conflicts]
    if outer and not seen.hidden:
        notes.append(
            f"conflicts in {', '.join(outer)} are counted as if sets followed the address: Intel's since "
            "Sandy Bridge and AMD's hash it, and have fewer conflicts"
        )
    if not levels:
        notes.append("the kernel describes no caches here: neither colors nor conflicts are known")
    if seen.lost:
        notes.append(f"{seen.lost:,} large blocks found no room in the table and are missing")
    return notes


def _grouped(found: Sequence[Pair], blocks: Sequence[Block]) -> list[Pair]:
    """One pair, the first, of those that collide alike and have their blocks from the same two places."""
    groups: dict[object, list[Pair]] = {}
    for pair in found:
        # A block whose place is not known is different from all others.
        places = frozenset(blocks[at].site or at for at in (pair.first, pair.second))
        alike = (pair.lines, pair.alias_bytes is not None, *sorted(pair.colors))
        groups.setdefault((places, alike), []).append(pair)
    return [replace(group[0], count=len(group)) for group in groups.values()]


def analyse(
    seen: Sample, caches: Sequence[Cache], min_bytes: int, near_lines: int, allocator: str = ""
) -> Colors:
    """Analyses a sample. The allocator is the file name of its library."""
    known = sites.resolve({region.stack for region in seen.regions}, seen.mappings, allocator)
    levels = [Level(cache, cache.colors, _why_skipped(cache)) for cache in caches]
    counted = [level for level in levels if level.skipped is None]
    for level in counted:
        level.conflicts, level.pages_by_color = _count(seen.pages, level.cache)
    blocks = [
        Block(
            id=at,
            kind=region.kind,
            address=region.address,
            bytes=region.bytes,
            resident_bytes=region.pages.bytes,
            huge_bytes=region.pages.huge_bytes(),
            path=region.path or None,
            thread=region.thread or None,
            site=known[region.stack],
            conflicts={level.cache.name: _count(region.pages, level.cache)[0] for level in counted},
        )
        for at, region in enumerate(seen.regions)
    ]
    # A mapping may begin with a block if blocks are not known; but all mappings begin with a page.
    own = {at: region for at, region in enumerate(seen.regions) if region.kind != OTHER}
    found = pairs(own, caches, near_lines, by_address=seen.blocks_known)
    return Colors(
        pid=seen.pid,
        command=list(seen.command),
        moment=seen.moment,
        threads=seen.threads,
        min_bytes=min_bytes,
        near_lines=near_lines,
        page_bytes=PAGE_BYTES,
        frames_known=seen.hidden is None,
        blocks_known=seen.blocks_known,
        blocks_lost=seen.lost,
        resident_bytes=seen.pages.bytes,
        huge_bytes=seen.pages.huge_bytes(),
        huge_kib=sum(mapping.huge_kib for mapping in seen.mappings),
        caches=levels,
        blocks=blocks,
        pairs=len(found),
        collisions=_grouped(found, blocks),
        clusters=clusters(own, caches, seen.threads, by_address=seen.blocks_known),
        notes=_notes(seen, levels),
    )
