"""The caches of a machine, as the kernel describes them, and those of the paper's."""

import os
from dataclasses import dataclass
from pathlib import Path

from calm.topology import SYSTEM, number

LINE_BYTES = 64


@dataclass(frozen=True)
class Cache:
    """One cache that holds data. What memory has one color competes for `ways` places in each of its sets."""

    level: int
    bytes: int
    ways: int
    line_bytes: int = LINE_BYTES
    cpus: int = 1
    """How many CPUs share it."""

    @property
    def sets(self) -> int:
        """How many sets there are. It may be no power of two: then the cache is hashed, in slices."""
        return max(1, self.bytes // (self.ways * self.line_bytes))

    @property
    def way_bytes(self) -> int:
        """Memory this far apart has the same set, where the set is the address's next bits above the line."""
        return self.sets * self.line_bytes

    def colors(self, page_bytes: int) -> int:
        """How many kinds of pages there are by the sets they fall into; 1 where each covers all sets."""
        return max(1, self.way_bytes // page_bytes)


# Section 3.1: Intel E5520.
NEHALEM = (Cache(1, 32 << 10, 8), Cache(2, 256 << 10, 8), Cache(3, 8 << 20, 16, cpus=8))


def _bytes(text: str) -> int:
    units = {"K": 10, "M": 20, "G": 30}
    return int(text[:-1]) << units[text[-1]] if text[-1:] in units else int(text)


def _members(text: str) -> int:
    """How many CPUs a list such as `0-3,8` names."""
    ends = (part.partition("-") for part in text.split(",") if part)
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def caches(cpu: int | None = None, system: Path = SYSTEM) -> list[Cache]:
    """The caches that a CPU's data passes, the nearest first; none where the kernel does not say.

    Without a CPU, one that calm may run on.
    """
    if cpu is None:
        cpu = min(os.sched_getaffinity(0))
    found = []
    for index in sorted((system / f"cpu{cpu}" / "cache").glob("index*")):
        try:
            text = {name: (index / name).read_text().strip() for name in ("type", "size", "shared_cpu_list")}
            if text["type"] == "Instruction":
                continue
            size = _bytes(text["size"])
            cpus = _members(text["shared_cpu_list"])
        except (OSError, ValueError):
            continue
        line = number(index / "coherency_line_size", LINE_BYTES)
        # A fully associative cache says 0 ways.
        ways = number(index / "ways_of_associativity", 0) or max(1, size // line)
        found.append(Cache(number(index / "level", 0), size, ways, line, max(1, cpus)))
    return sorted(found, key=lambda cache: cache.level)
