"""The options and counters of calmalloc, from its tables in src/api. scripts/generate writes the values."""

from collections.abc import Mapping
from typing import NamedTuple


class Counter(NamedTuple):
    """A counter of calmalloc."""

    unit: str
    """bytes, ns, or what is counted."""
    is_total: bool
    """Whether it counts from the start of the process, and never falls."""
    help: str


# From the tables: begin.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "memory_per_cpu": ("auto",),
    "background": ("off", "on"),
    "huge_pages": ("never", "earned"),
    "vectored_purge": ("off", "auto", "on"),
    "misuse": ("abort", "warn", "immediate"),
    "report": ("off", "exit"),
    "profile": (),
    "profile_file": (),
    "test_policy": ("adaptive", "paper"),
    "test_cgroup": ("off", "on"),
    "test_placement": ("off", "lines", "colors", "random"),
    "test_cache": ("auto", "locked", "off"),
    "test_heaps": ("auto",),
    "test_check": (),
}
"""The words that each option takes, in the order of their numbers."""

COUNTERS: Mapping[str, Counter] = {
    "footprint": Counter("bytes", False, "Pages that are, or may be, resident."),
    "in_use": Counter("bytes", False, "Pages that contain any part of a block, cached blocks included."),
    "dirty": Counter("bytes", False, "Free pages of the heap that may be resident."),
    "cached": Counter("bytes", False, "Free blocks in the CPU caches and the depots."),
    "reserved": Counter("bytes", False, "Address space."),
    "metadata": Counter("bytes", False, "The allocator's own data: an upper bound of what is resident."),
    "dirty_limit": Counter("bytes", False, "The limit on dirty memory for the current footprint."),
    "cached_limit": Counter("bytes", False, "The limit on pages kept by cached blocks: a constant per CPU."),
    "dirtied": Counter("bytes", True, "Memory that became free and may be resident."),
    "purged": Counter("bytes", True, "Memory returned to the kernel."),
    "purges_limit": Counter("purge", True, "Purges because dirty memory exceeded its limit."),
    "purges_epoch": Counter("purge", True, "Purges at an epoch's end: memory was unused or is scarce."),
    "purges_request": Counter(
        "purge", True, "Purges that `calm_trim`, `malloc_trim` or another process requested."
    ),
    "purge_failures": Counter("range", True, "Address ranges that the kernel refused to purge."),
    "purge_vectored_calls": Counter("call", True, "Calls of `process_madvise` to purge."),
    "purge_single_calls": Counter("call", True, "Calls of `madvise` to purge."),
    "purge_ranges": Counter("range", True, "Address ranges purged."),
    "purge_ns": Counter("ns", True, "CPU time spent in purges."),
    "purge_wasted_ns": Counter("ns", True, "Estimated cost of purging memory that was needed again."),
    "dirty_saved_ns": Counter("ns", True, "Estimated CPU time saved by keeping memory that was used again."),
    "dirty_byte_seconds": Counter(
        "byte_second", True, "Dirty memory, multiplied by the time for which it was that much."
    ),
    "limit_checks": Counter("check", True, "Checks of the limit on dirty memory."),
    "cache_flushes": Counter("flush", True, "Times that a CPU's cache was flushed."),
    "cache_misses": Counter("operation", True, "Operations on a size class that left the fast path."),
    "heap_locks": Counter("lock", True, "Acquisitions of a heap's lock."),
    "large_allocations": Counter("allocation", True, "Allocations of runs of pages: above 32 KiB."),
    "large_moves": Counter("move", True, "Calls of `realloc` that moved pages."),
    "heap_locks_contended": Counter(
        "lock", True, "Acquisitions of a heap's lock that had to wait for another thread."
    ),
    "cache_lock_reason": Counter("reason", False, "Why the CPU caches have locks: 0 if they have none."),
}
# From the tables: end.
