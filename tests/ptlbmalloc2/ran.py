"""What a case printed, and what the library said of it."""

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
        """Of the program itself, which ends after all its children."""
        assert self.lines, "the library wrote no statistics"
        return self.lines[-1]

    def bound_bytes(self, threads: int) -> int:
        """
        What may stay: the threshold, or the padding that was left when memory was last given back, of a
        larger footprint then; what each thread may free between two looks; what merged tops may leave for
        each CPU that could be in use; and what is no heap (stacks).
        """
        cpus = max(self.stats["cpus"], len(os.sched_getaffinity(0)))
        padding: int = self.stats["pad_each_bytes"] * self.stats["arenas"]
        most: int = max(self.stats["threshold_bytes"], padding)
        return most + threads * 256 * KIB + MIB + int(cpus * _MERGED_PER_CPU)

    def promised_bytes(self, threads: int) -> int:
        """What may stay at worst: the same, what may come free before all arenas are looked at again, and in
        each arena a merge that is too small to be noticed."""
        again: int = max(self.stats["threshold_bytes"] // 16, MIB)
        unnoticed: int = self.stats["arenas"] * MIB
        return self.bound_bytes(threads) + again + unnoticed


Run = Callable[..., Ran]
