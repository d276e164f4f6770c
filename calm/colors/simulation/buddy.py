"""Physical memory by a buddy allocator's free lists, and what a long history leaves of them.

As Linux has it (mm/page_alloc.c): free pages are in blocks of a power of two, each merged with its buddy as
soon as both are free; a freed block goes to the head of its list, and a page is taken from the head of the
shortest blocks that there are. So the lists follow from which pages are free and when each became so, and are
computed from that, the same as if every call had been made. Left out are the lists of single pages for each
CPU and the types of mobility.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

ORDERS = 11
"""Blocks of 1 to 1,024 pages."""
LARGEST = 1 << (ORDERS - 1)
_USED = -1


class Memory:
    """Pages that are free, or used. All are free at first, as after booting."""

    def __init__(self, pages: int) -> None:
        if pages <= 0 or pages % LARGEST:
            raise ValueError(f"memory is a multiple of {LARGEST} pages, not {pages}")
        # When each became free, in calls of free; no two in the same one.
        self._since: Ints = np.arange(pages, dtype=np.int64)
        self._clock = pages

    @property
    def pages(self) -> int:
        """How much there is, free or not."""
        return len(self._since)

    def free_pages(self) -> Ints:
        """All free ones, in the order in which a program that asks for one page after the other gets them."""
        handed: list[Ints] = []
        since = self._since
        for order in range(ORDERS):
            whole = since != _USED
            if order < ORDERS - 1:
                merged = whole[0::2] & whole[1::2]
                above = np.where(merged, np.maximum(since[0::2], since[1::2]), _USED)
                whole &= np.repeat(~merged, 2)
            else:
                above = since
            blocks = np.flatnonzero(whole)
            # A block came to its list when the last of its pages was freed. It is split only when all shorter
            # lists are empty, and its lower half is handed out first: so its pages come in ascending order.
            blocks = blocks[np.argsort(-since[blocks], kind="stable")]
            handed.append(((blocks << order)[:, None] + np.arange(1 << order)).ravel())
            since = above
        return np.concatenate(handed)

    def take(self, count: int | None = None) -> Ints:
        """So many pages, asked for one after the other, or all."""
        pages = self.free_pages()[:count]
        if count is not None and len(pages) < count:
            raise ValueError(f"{count} pages were asked for, {len(pages)} are free")
        self._since[pages] = _USED
        return pages

    def release(self, pages: Ints) -> None:
        """Frees them one after the other."""
        if (self._since[pages] != _USED).any():
            raise ValueError("a free page is freed again")
        self._since[pages] = self._clock + np.arange(len(pages))
        self._clock += len(pages)


@dataclass(frozen=True)
class History:
    """What has happened since the machine was booted; no rounds are a machine that was booted just now."""

    rounds: int = 2
    """How often memory filled up (the page cache sees to that) and was given back in part."""
    burst_pages: int = 8
    """How many pages a process or file gets, on average, before another one gets some."""
    owner_pages: int = 128
    """What each process or file has, on average: it gives back all of it at once."""
    free: float = 0.5
    """The share of memory that is free after each round."""


def aged(pages: int, seed: int, history: History | None = None) -> Memory:
    """Memory after that history: owners took it in turns, and some of them, of any age, are gone."""
    history = history or History()
    generator = np.random.default_rng(seed)
    memory = Memory(pages)
    owners = np.full(memory.pages, -1, dtype=np.int64)
    each_round = max(1, memory.pages // history.owner_pages)
    for number in range(history.rounds):
        taken = memory.take()
        lengths = generator.geometric(1 / history.burst_pages, len(taken))
        bursts = generator.integers(each_round, size=len(taken)) + number * each_round
        owners[taken] = np.repeat(bursts, lengths)[: len(taken)]
        # Who is older does not go earlier. Each gives back its pages by address.
        leaving = generator.permutation((number + 1) * each_round)[owners]
        order = np.argsort(leaving, kind="stable")
        wanted = int(history.free * memory.pages)
        last = leaving[order[min(wanted, memory.pages - 1)]]
        memory.release(order[: np.searchsorted(leaving[order], last, side="right")])
    return memory
