"""A profile: what was counted of a program, by cause, by stack and over time. Written and read as JSON.

`calm profile` makes it; the terminal summary, the HTML page and `calm predict` read it.
Weights of stacks are estimates from samples; totals are counts, or say that they are not.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from calm.errors import CalmError
from calm.measure import METRIC
from calm.profile import checked

VERSION = 1

# What a stack is of. The unit of its weight: events, or seconds of CPU time.
SHOOTDOWN, FAULT, CALL, CPU = KINDS = "shootdown", "fault", "call", "cpu"
UNITS = "count", "s", "KiB"

# Causes, by the name that the kernel's code has for them, and how they are told to people.
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
    "other": "other",
}

_LABELS = {
    "shootdowns": "TLB shootdowns",
    "major_faults": "major faults",
    "mmap": "mmap calls",
    **{key: metric.label for key, metric in METRIC.items()},
}


def label(name: str) -> str:
    """How a total is told to people."""
    return _LABELS.get(name, name.replace("_", " "))


@dataclass(frozen=True)
class Total:
    """A figure of the whole run: a value, or the reason for there being none."""

    value: float | None
    how: str
    unit: str = "count"
    """One of count, s, KiB."""


@dataclass(frozen=True)
class Cause:
    """What one cause led to. None where it could not be known; seconds are of CPU time, by sampling."""

    key: str
    """One of CAUSES."""
    shootdowns: float | None = None
    faults: float | None = None
    calls: float | None = None
    cpu_s: float | None = None


@dataclass(frozen=True)
class Frame:
    """One function of a stack. Inlined ones are frames of their own."""

    function: str
    module: str
    """The file's name without its folders, or "kernel"."""
    kernel: bool = False
    inlined: bool = False
    source: str | None = None
    """file.c:123, where debugging information says so."""


@dataclass(frozen=True)
class Stack:
    """How often, or for how long, something happened in one place."""

    kind: str
    """One of SHOOTDOWN, FAULT, CALL, CPU."""
    cause: str
    frames: tuple[int, ...]
    """Indices into the profile's frames, the outermost function first."""
    weight: float
    samples: int


@dataclass(frozen=True)
class Timeline:
    """Events for each bin of time: series[name][bin], in the unit of the name's kind, per bin."""

    bin_s: float
    series: Mapping[str, list[float]] = field(default_factory=dict)
    """By "shootdown:CAUSE", "fault", "call:CAUSE", "cpu:user", "cpu:system"."""


@dataclass(frozen=True)
class Curve:
    """Memory of the process tree at moments: seconds since the start, and KiB."""

    at_s: list[float]
    kib: list[float]


@dataclass(frozen=True)
class Finding:
    """One sentence about what was found, what it rests on, and what would mend it."""

    text: str
    evidence: str
    remedy: str | None = None
    share: float | None = None
    """Of what it speaks of, from 0 to 1: the larger, the more it matters."""


@dataclass(frozen=True)
class Profile:
    """The whole."""

    command: list[str]
    pid: int | None
    """Set where a running process was watched."""
    began: str
    """Date and time, ISO 8601 with the zone."""
    wall_s: float
    exit_code: int | None
    allocator: str
    """By the name that `calm allocators` has, or a library's file name."""
    privileged: bool
    """Tracepoints were counted. Without them shootdowns are not known."""
    machine: Mapping[str, Any]
    totals: Mapping[str, Total]
    """Among them shootdowns, interrupts_sent, minor_faults, major_faults, user_s, system_s, peak_rss_kib,
    threads_started and one for each memory system call."""
    causes: list[Cause]
    frames: list[Frame]
    stacks: list[Stack]
    timeline: Timeline
    curves: Mapping[str, Curve]
    """By rss, dirty, huge."""
    findings: list[Finding]
    own_cost: list[str]
    """What profiling itself cost, in sentences."""
    own_share: float | None
    """The same as a share of the program's time, at most; from 0."""
    notes: list[str] = field(default_factory=list)
    kernel_stacks: bool = True
    """Stacks have the kernel's part. Without it no cause of CPU time is known."""
    interrupted: bool = False

    def value(self, name: str) -> float | None:
        """A total; None where it was not counted."""
        total = self.totals.get(name)
        return total.value if total else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"calm_profile": VERSION} | asdict(self)


def load(path: str) -> Profile:
    """Reads a profile that `calm profile --json FILE` has written. What is not whole is told in one line."""
    try:
        text = json.loads(Path(path).read_text(), parse_constant=_no_number)
    except OSError as error:
        raise CalmError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CalmError(f"{path} is not JSON: {error}") from error
    if not isinstance(text, dict) or "calm_profile" not in text:
        raise CalmError(f"{path} is not a profile: write one by `calm profile --json FILE -- CMD`")
    if text.pop("calm_profile") != VERSION:
        raise CalmError(f"{path} was written by another version of calm")
    try:
        profile = checked.build(Profile, text)
        _check(profile)
    except checked.WrongError as error:
        raise CalmError(f"{path} is not a whole profile: {error}") from error
    return profile


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number there")


def _check(profile: Profile) -> None:
    """What annotations cannot say, and readers rely on."""

    def must(holds: bool, what: str) -> None:
        if not holds:
            raise checked.WrongError(what)

    must(profile.wall_s >= 0, "wall_s is negative")
    for name, total in profile.totals.items():
        must(total.unit in UNITS, f"totals[{name!r}].unit is none of {', '.join(UNITS)}")
    for place, stack in enumerate(profile.stacks):
        must(stack.kind in KINDS, f"stacks[{place}].kind is none of {', '.join(KINDS)}")
        must(stack.weight >= 0, f"stacks[{place}].weight is negative")
        must(
            all(0 <= index < len(profile.frames) for index in stack.frames),
            f"stacks[{place}].frames has one that is not among the frames",
        )
    must(
        profile.timeline.bin_s > 0 or not profile.timeline.series,
        "timeline.bin_s is not above zero",
    )
    for name, curve in profile.curves.items():
        must(len(curve.at_s) == len(curve.kib), f"curves[{name!r}] has more moments than values, or fewer")
