"""Set-associative caches that replace what was used least recently, simulated access by access, and exactly.

What happens in one set does not depend on the others. So all sets go forward together: the first access to
each, then the second to each, and so on, each step a few operations on arrays.
"""

import numpy as np
from numpy.typing import NDArray

from calm.colors.geometry import Cache

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def hits(sets: Ints, tags: Ints, ways: int) -> Bools:
    """Which accesses find what they want, in a cache that is empty at first.

    An access is to a set and to something that has a tag, at least 0, within that set. Sets are numbered
    from 0, without large gaps: there is a table of them.
    """
    found = np.zeros(len(sets), dtype=np.bool_)
    if not len(sets):
        return found
    counts = np.bincount(sets)
    # By rows, the busiest set first: those with an access left are always the first rows.
    busiest = np.argsort(-counts, kind="stable")
    # Numbers of 16 bits are sorted by their digits, many times faster.
    row = np.empty(len(counts), dtype=np.min_scalar_type(len(counts)))
    row[busiest] = np.arange(len(counts))
    counts = counts[busiest][: np.count_nonzero(counts)]
    order = np.argsort(row[sets], kind="stable")
    first = np.cumsum(counts) - counts
    rows = np.arange(len(counts))
    held = np.full((len(counts), ways), -1, dtype=np.int64)
    used = np.full((len(counts), ways), -1, dtype=np.int64)
    for step in range(int(counts[0])):
        active = int(np.searchsorted(-counts, -step, side="left"))
        at = order[first[:active] + step]
        wanted = tags[at]
        # The place that holds it, else the one used least recently.
        place = np.where(held[:active] == wanted[:, None], -2, used[:active]).argmin(axis=1)
        here = rows[:active]
        found[at] = held[here, place] == wanted
        held[here, place] = wanted
        used[here, place] = step
    return found


def line_hits(cache: Cache, lines: Ints, domains: Ints | None = None) -> Bools:
    """Which accesses to lines hit; a line is its physical address over its size. Each domain has a cache."""
    sets = lines % cache.sets
    return hits(sets if domains is None else sets + domains * cache.sets, lines, cache.ways)


def page_hits(cache: Cache, page_bytes: int, frames: Ints, domains: Ints | None = None) -> Bools:
    """Which accesses to whole pages hit. Each is to all lines of the page in turn, which share one fate.

    That is so as a page's lines are in sets of their own, in the same company as the others of its color.
    """
    if cache.way_bytes % page_bytes:
        raise ValueError(f"a way of {cache.way_bytes} bytes has no whole number of pages of {page_bytes}")
    colors = cache.colors(page_bytes)
    sets = frames % colors
    return hits(sets if domains is None else sets + domains * colors, frames, cache.ways)


def cyclic_misses(counts: Ints, ways: int) -> Ints:
    """How many misses each pass of a cyclic access has, after the first: those of all sets, the last axis.

    Pages that are used again in the same order all stay in a set that has room for them; in a set with one
    too many, each is replaced just before it is used again.
    """
    missed: Ints = np.where(counts > ways, counts, 0).sum(axis=-1)
    return missed
