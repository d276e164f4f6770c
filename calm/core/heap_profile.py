"""The document that `calm heap` writes: what was allocated and in use, by stack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct, field

from calm.core.documents import Document
from calm.core.profile_model import Frame

INUSE_SPACE, INUSE_OBJECTS = "inuse_space", "inuse_objects"
ALLOC_SPACE, ALLOC_OBJECTS = "alloc_space", "alloc_objects"
PEAK_SPACE, PEAK_OBJECTS = "peak_space", "peak_objects"
FREED_LIFETIME, INUSE_AGE = "freed_lifetime", "inuse_age"


class SampleType(Struct, frozen=True):
    """What the values of a profile's stacks are, one of several."""

    name: str
    unit: str
    """"bytes", "count" or "nanoseconds"; of other programs' profiles any word."""


# Those of libcalmalloc's profiles, in their order.
TYPES = (
    SampleType(ALLOC_OBJECTS, "count"),
    SampleType(ALLOC_SPACE, "bytes"),
    SampleType(INUSE_OBJECTS, "count"),
    SampleType(INUSE_SPACE, "bytes"),
    SampleType(PEAK_OBJECTS, "count"),
    SampleType(PEAK_SPACE, "bytes"),
    SampleType(FREED_LIFETIME, "nanoseconds"),
    SampleType(INUSE_AGE, "nanoseconds"),
)


class HeapStack(Struct, frozen=True):
    """The values of one stack of calls."""

    frames: tuple[Annotated[int, Meta(ge=0)], ...]
    """Indices into the profile's frames, the outermost function first."""
    values: list[int]
    """One for each of the profile's types."""


class HeapProfile(Document, kw_only=True, tag="calm-heap"):
    """A heap profile. Values are estimates of totals from samples."""

    command: list[str]
    """Empty where it is not known."""
    pid: int | None = None
    source: str = ""
    """The file that it was read from; empty if from the process."""
    base: str = ""
    """The file whose values were subtracted."""
    window_s: float | None = None
    """Allocations and lifetimes are those of this time; None: of all the time that the profile was on."""
    mean_bytes: int = 0
    """Between two samples; 0: not known."""
    default_type: str = INUSE_SPACE
    types: list[SampleType]
    frames: list[Frame]
    stacks: list[HeapStack]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        known, count = len(self.frames), len(self.types)
        if any(len(stack.values) != count for stack in self.stacks):
            raise ValueError("a stack has not one value for each type")
        if any(index >= known for stack in self.stacks for index in stack.frames):
            raise ValueError("a stack has a frame that is not among the frames")

    def column(self, name: str) -> int | None:
        """The index of a type among the values; None if the profile has no such values."""
        return next((at for at, each in enumerate(self.types) if each.name == name), None)

    def values(self, name: str) -> list[int] | None:
        """The values of one type, in the order of the stacks."""
        at = self.column(name)
        return None if at is None else [stack.values[at] for stack in self.stacks]

    def total(self, name: str) -> int | None:
        values = self.values(name)
        return None if values is None else sum(values)


def merged(
    stacks: Iterable[tuple[tuple[Frame, ...], Sequence[int]]],
) -> dict[tuple[Frame, ...], list[int]]:
    """Adds up the values of equal stacks; those without any value are left out."""
    sums: dict[tuple[Frame, ...], list[int]] = {}
    for frames, values in stacks:
        before = sums.get(frames)
        sums[frames] = (
            list(values) if before is None else [a + b for a, b in zip(before, values, strict=True)]
        )
    return {frames: values for frames, values in sums.items() if any(values)}


def numbered(
    stacks: Mapping[tuple[Frame, ...], Sequence[int]],
) -> tuple[list[Frame], list[HeapStack]]:
    """The frames, each once, and the stacks by their indices."""
    numbers: dict[Frame, int] = {}
    found = [
        HeapStack(tuple(numbers.setdefault(frame, len(numbers)) for frame in frames), list(values))
        for frames, values in stacks.items()
    ]
    return list(numbers), found


def stacks_by_frames(profile: HeapProfile) -> dict[tuple[Frame, ...], list[int]]:
    return merged((tuple(profile.frames[at] for at in each.frames), each.values) for each in profile.stacks)
