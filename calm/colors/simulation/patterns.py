"""How programs go through memory, as traces: which pages they touch first, and then every access in order."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calm.colors.simulation.buddy import Ints
from calm.colors.simulation.policies import Touches

Bools = NDArray[np.bool_]

FIRST_PID = 1000
START = 0x7F1234567
"""An mmap segment's first page: aligned with nothing."""


@dataclass(frozen=True)
class Trace:
    """Accesses, to whole pages or to lines of them."""

    touches: Touches
    page: Ints
    """Of each access, as an index of the touches."""
    line: Ints | None
    """Of each access, within its page; none: each is to all of a page, line after line."""
    repeated: Bools
    """Accesses to what the pattern has used before, and would find in a cache that had room for all of it."""

    def lines(self, frames: Ints, lines_a_page: int) -> Ints:
        """The physical lines accessed, in order, where the touched pages are in these frames."""
        if self.line is None:
            raise ValueError("the accesses are to whole pages")
        return frames[self.page] * lines_a_page + self.line


def _trace(pids: Ints, segments: Ints, pages: Ints, line: Ints | None, repeated: Bools) -> Trace:
    """Of accesses to virtual pages."""
    # Pages of x86-64's longer addresses need 45 bits.
    _, first, which = np.unique((pids << 45) + pages, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    first = first[order]
    return Trace(Touches(pages[first], segments[first], pids[first]), rank[which.reshape(-1)], line, repeated)


def blocked(pages: int, tiles: int, passes: int = 3, start: int = START) -> Trace:
    """One array in tiles of so many pages, each passed over as often before the next one: cache blocking.

    One tile is an array that is passed over again and again (figure 3).
    """
    tile = np.tile(np.arange(pages), passes)
    offsets = (np.arange(tiles)[:, None] * pages + tile).ravel()
    again = np.tile(np.arange(len(tile)) >= pages, tiles)
    count = len(offsets)
    return _trace(np.full(count, FIRST_PID), np.full(count, start), start + offsets, None, again)


@dataclass(frozen=True)
class Arrays:
    """Arrays that are worked on together, each in a segment of its own (section 4.2, figure 10)."""

    count: int
    gap_pages: int
    """From one array's segment to the next one's, all of which are multiples of it."""
    used_bytes: int
    """What of each is used, from its start on."""
    spread_bytes: int = 0
    """The arrays' starts are evenly spread over so much, in whole lines; 0: each starts with its segment."""


def streams(
    arrays: Arrays, processes: int = 1, passes: int = 3, page_bytes: int = 4096, line_bytes: int = 64
) -> Trace:
    """Every array's first piece, in each process, then the second of each, and so on; repeatedly.

    All processes have the same addresses, as MPI's have (section 4.3), and go forward together. A piece is a
    line, or a page where all arrays begin and end with pages.
    """
    starts = np.arange(arrays.count) * arrays.spread_bytes // arrays.count // line_bytes * line_bytes
    by_page = not (starts % page_bytes).any() and arrays.used_bytes % page_bytes == 0
    piece = page_bytes if by_page else line_bytes
    pieces = np.arange(-(-arrays.used_bytes // piece))
    # Axes: pass, piece, process, array.
    shape = (passes, len(pieces), processes, arrays.count)
    offsets = np.broadcast_to(starts + pieces[:, None, None] * piece, shape).ravel()
    segments = np.broadcast_to((1 + np.arange(arrays.count)) * arrays.gap_pages, shape).ravel()
    pids = np.broadcast_to(FIRST_PID + np.arange(processes)[:, None], shape).ravel()
    return _trace(
        pids,
        segments,
        segments + offsets // page_bytes,
        None if by_page else offsets % page_bytes // line_bytes,
        np.arange(len(offsets)) >= len(offsets) // passes,
    )
