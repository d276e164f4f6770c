"""The caches of a machine, as the kernel describes them, and the pages that conflict in them.

A cache has room for `ways` pages of each color; further pages of that color are in conflict. Conflicts that
even the best coloring has, because the cache is too small, are unavoidable; the others are unnecessary.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calm.core.machine import SYSTEM, number

Ints = NDArray[np.int64]

LINE_BYTES = 64
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_UNITS = {"K": 10, "M": 20, "G": 30}
_DRAWS = 200
_SEED = 20120616


@dataclass(frozen=True)
class Cache:
    """A cache of data. Counts are numbers of pages by color, which are the last axis of an array."""

    level: int
    bytes: int
    ways: int
    line_bytes: int = LINE_BYTES
    cpus: int = 1
    """How many CPUs share it."""

    @property
    def name(self) -> str:
        """As L2."""
        return f"L{self.level}"

    @property
    def sets(self) -> int:
        return max(1, self.bytes // (self.ways * self.line_bytes))

    @property
    def is_hashed(self) -> bool:
        """Whether the number of sets is no power of two, so that a hash of the address chooses the set."""
        return self.sets & (self.sets - 1) != 0

    @property
    def way_bytes(self) -> int:
        """Addresses this far apart fall into the same set, unless the cache hashes them."""
        return self.sets * self.line_bytes

    @property
    def colors(self) -> int:
        """The number of groups of sets that pages fall into; 1 where each page covers all sets."""
        return max(1, self.way_bytes // PAGE_BYTES)

    @property
    def pages(self) -> int:
        """How many pages it has room for."""
        return self.colors * self.ways

    def counts(self, pages: ArrayLike) -> Ints:
        """Counts pages by their numbers: of frames, or of addresses in a virtually indexed cache."""
        return np.bincount(np.asarray(pages, dtype=np.int64) % self.colors, minlength=self.colors)

    def conflicts(self, counts: Ints) -> Ints:
        """The number of pages beyond the ways, over all colors."""
        found: Ints = np.maximum(counts - self.ways, 0).sum(axis=-1)
        return found

    def unnecessary(self, counts: Ints) -> Ints:
        """The conflicts that an even coloring of as many pages would not have."""
        found: Ints = self.conflicts(counts) - np.maximum(0, counts.sum(axis=-1) - self.pages)
        return found


# Section 3.1: Intel E5520.
NEHALEM = (Cache(1, 32 << 10, 8), Cache(2, 256 << 10, 8), Cache(3, 8 << 20, 16, cpus=8))


@dataclass(frozen=True)
class Random:
    """Conflicts of random frames: the expected number, and the interval of 95 % of all draws."""

    mean: float
    low: int
    high: int


def expected(pages: int, cache: Cache) -> float:
    """The exact mean of the conflicts of random frames: for each color, the overflow of a binomial."""
    colors, ways = cache.colors, cache.ways
    if colors == 1 or pages <= ways:
        return float(max(0, pages - ways))
    # E(X - w)+ = E(X) - w + E(w - X)+, and the last has few terms.
    count = np.arange(ways)
    steps = np.log(pages - count[:-1]) - np.log(count[1:]) - np.log(colors - 1)
    log_probability = pages * np.log1p(-1 / colors) + np.cumsum(np.concatenate([[0], steps]))
    short = float(((ways - count) * np.exp(log_probability)).sum())
    return max(0.0, colors * (pages / colors - ways + short))


@lru_cache(maxsize=4096)
def random(pages: int, cache: Cache, *, draws: int = _DRAWS, seed: int = _SEED) -> Random:
    """The unnecessary conflicts of a random page table: the mean exactly, its spread by draws."""
    equal = np.full(cache.colors, 1 / cache.colors)
    drawn = np.random.default_rng(seed).multinomial(pages, equal, size=draws)
    low, high = np.percentile(cache.unnecessary(drawn), (2.5, 97.5), method="nearest")
    return Random(expected(pages, cache) - max(0, pages - cache.pages), int(low), int(high))


def caches(cpu: int | None = None, system: Path = SYSTEM) -> list[Cache]:
    """The caches for the data of a CPU (any that calm may run on, by default), the innermost first."""
    if cpu is None:
        cpu = min(os.sched_getaffinity(0))
    found = []
    for index in (system / f"cpu{cpu}" / "cache").glob("index*"):
        try:
            kind, text, shared = (
                (index / name).read_text().strip() for name in ("type", "size", "shared_cpu_list")
            )
            size = int(text[:-1]) << _UNITS[text[-1]]
            ranges = [part.partition("-") for part in shared.split(",")]
            cpus = sum(int(last or first) - int(first) + 1 for first, _, last in ranges)
        except (OSError, ValueError, LookupError):
            continue
        line = number(index / "coherency_line_size", LINE_BYTES)
        # The kernel writes 0 ways of a fully associative cache.
        ways = number(index / "ways_of_associativity", 0) or max(1, size // line)
        if kind != "Instruction":
            found.append(Cache(number(index / "level", 0), size, ways, line, cpus))
    return sorted(found, key=lambda cache: cache.level)
