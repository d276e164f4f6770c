"""The document that `calm profile` writes: what was counted of a program, by cause, by stack and over time.

Weights of stacks are estimates from samples; totals are counts, unless they say that they are not. A share by
samples has an interval that holds the truth in all but one case of a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from calm.core.documents import Document
from calm.core.measure import METRIC

Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Positive = Annotated[float, Meta(ge=0, le=1e300)]

Unit = Annotated[str, Meta(pattern="^(count|s|KiB)$")]
Kind = Annotated[str, Meta(pattern="^(shootdown|fault|call|cpu)$")]

# What a stack is of. The unit of its weight: events, or seconds of CPU time.
SHOOTDOWN, FAULT, CALL, CPU = "shootdown", "fault", "call", "cpu"
# With fewer samples of a kind, shares of it are rough.
FEW_SAMPLES = 20
# Standard deviations that hold 99.9 % of a normal distribution.
_DEVIATES = 3.29

# Causes, by the name that the kernel's code has for them, and what reports call them.
CAUSES: Mapping[str, str] = {
    "madvise": "madvise",
    "process_madvise": "process_madvise",
    "munmap": "munmap",
    "mprotect": "mprotect",
    "brk": "brk shrinking",
    "mremap": "mremap",
    "mmap": "mmap over a mapping",
    "msync": "msync",
    "cow": "copy-on-write",
    "fork": "fork",
    "exit": "exit or exec",
    "reclaim": "reclaim",
    "compaction": "compaction",
    "ksm": "KSM",
    "numa": "NUMA balancing",
    "migration": "page migration",
    "collapse": "huge pages formed or split",
    "membarrier": "membarrier",
    "fault": "page fault",
    "interrupt": "TLB interrupts handled",
    "other": "all else, the program's own work too",
}

_LABELS = {
    "shootdowns": "TLB shootdowns",
    "major_faults": "major faults",
    "mmap": "mmap calls",
    **{key: metric.label for key, metric in METRIC.items()},
}

# The curves.
MEMORY: Mapping[str, str] = {"rss": "RSS", "dirty": "dirty", "huge": "huge pages"}


def label(name: str) -> str:
    """What reports call a total."""
    return _LABELS.get(name, name.replace("_", " "))


class Total(Struct, frozen=True):
    """A figure of the whole run: a value, or the reason for there being none."""

    value: Finite | None
    how: str
    unit: Unit = "count"


class Cause(Struct, frozen=True):
    """What one cause led to. None where it could not be known; seconds are of CPU time, by sampling."""

    key: str
    """One of CAUSES."""
    shootdowns: Finite | None = None
    faults: Finite | None = None
    calls: Finite | None = None
    cpu_s: Finite | None = None


class Frame(Struct, frozen=True):
    """One function of a stack. Inlined ones are frames of their own."""

    function: str
    module: str
    """The file's name without its folders, or "kernel"."""
    kernel: bool = False
    inlined: bool = False
    source: str | None = None
    """file.c:123, where debugging information says so."""


class Stack(Struct, frozen=True):
    """How often, or for how long, something happened in one place."""

    kind: Kind
    cause: str
    frames: tuple[Annotated[int, Meta(ge=0)], ...]
    """Indices into the profile's frames, the outermost function first."""
    weight: Positive
    samples: int


class Timeline(Struct, frozen=True):
    """Events for each bin of time: series[name][bin], in the unit of the name's kind, per bin."""

    bin_s: Positive
    series: Mapping[str, list[Finite]] = {}
    """By "shootdown:CAUSE", "fault", "call:CAUSE", "cpu:user", "cpu:system"."""

    def __post_init__(self) -> None:
        if self.series and not self.bin_s:
            raise ValueError("the width of its bins is 0")


class Curve(Struct, frozen=True):
    """Memory of the process tree at moments: seconds since the start, and KiB."""

    at_s: list[Finite]
    kib: list[Finite]

    def __post_init__(self) -> None:
        if len(self.at_s) != len(self.kib):
            raise ValueError(f"a curve has {len(self.at_s)} moments and {len(self.kib)} values")


class Finding(Struct, frozen=True):
    """One sentence about what was found, what it rests on, and what would mend it."""

    text: str
    evidence: str
    remedy: str | None = None
    share: Finite | None = None
    """Of what it speaks of, from 0 to 1: the larger, the more it matters."""


class Profile(Document, kw_only=True, tag="calm-profile"):
    """A profile of a command, or of a running process."""

    command: list[str]
    pid: int | None
    """Set where a running process was watched."""
    began: str
    """Date and time, ISO 8601 with the zone."""
    wall_s: Positive
    exit_code: int | None
    allocator: str
    """By the name that `calm allocators` has, or a library's file name."""
    privileged: bool
    """Tracepoints were counted. Without them shootdowns are not known."""
    machine: Mapping[str, Any]
    totals: Mapping[str, Total]
    """Among them shootdowns, interrupts, minor_faults, major_faults, user_s, system_s, peak_rss_kib,
    threads_started and one for each memory system call."""
    causes: list[Cause]
    frames: list[Frame]
    stacks: list[Stack]
    timeline: Timeline
    curves: Mapping[str, Curve]
    """By the keys of MEMORY."""
    sampled: Mapping[str, Finite] = {}
    """By kind: so many samples of equal weight would be as sure as those of the stacks."""
    causes_counted: bool = False
    """The shootdowns of each cause were counted; otherwise they are estimates from samples."""
    findings: list[Finding]
    own_cost: list[str]
    """What profiling itself cost, in sentences."""
    own_share: Finite | None
    """The same as a share of the program's time, at most; from 0."""
    notes: list[str] = field(default_factory=list)
    kernel_stacks: bool = True
    """Stacks have the kernel's part. Without it no cause of CPU time is known."""
    interrupted_by: int | None = None
    """The signal that ended the profile early."""

    def interval(self, kind: str, share: float, of: float = 1.0) -> tuple[float, float] | None:
        """Of a share of what is of a kind, or of that part of it; None where there are too few samples."""
        n = self.sampled.get(kind, 0.0) * of
        if n < FEW_SAMPLES:
            return None
        # Wilson's.
        middle, square = share + _DEVIATES**2 / (2 * n), _DEVIATES**2 / n
        half = _DEVIATES * math.sqrt(share * (1 - share) / n + square / (4 * n))
        return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))

    def value(self, name: str) -> float | None:
        """A total; None where it was not counted."""
        total = self.totals.get(name)
        return total.value if total else None

    def __post_init__(self) -> None:
        known = len(self.frames)
        if any(index >= known for stack in self.stacks for index in stack.frames):
            raise ValueError("a stack has a frame that is not among the frames")
