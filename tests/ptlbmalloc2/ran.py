"""A case's output, and the library's report."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
_MERGED_PER_CPU = 8 * MIB


@dataclass(frozen=True)
class Ran:
    figures: dict[str, int]
    stderr: str
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stats(self) -> dict[str, Any]:
        """The report of the program itself, which ends after all its children."""
        assert self.lines, "the library wrote no statistics"
        return self.lines[-1]

    def bound_bytes(self, threads: int) -> int:
        """The memory that may stay.

        That is the threshold, or the padding left by the last trim, which the footprint of that time
        determines; the bytes that each thread may free between two checks; those that merged tops may leave
        for each CPU that could be in use; and memory that is not heap (stacks).
        """
        cpus = max(self.stats["cpus"], len(os.sched_getaffinity(0)))
        padding: int = self.stats["pad_each_bytes"] * self.stats["arenas"]
        most: int = max(self.stats["threshold_bytes"], padding)
        return most + threads * 256 * KIB + MIB + int(cpus * _MERGED_PER_CPU)

    def promised_bytes(self, threads: int) -> int:
        """The worst case: the same, the bytes that may become free before the next check of all arenas, and
        an unnoticed merge in each arena.
        """
        again: int = max(self.stats["threshold_bytes"] // 16, MIB)
        unnoticed: int = self.stats["arenas"] * MIB
        return self.bound_bytes(threads) + again + unnoticed


Run = Callable[..., Ran]
