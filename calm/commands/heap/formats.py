"""A heap profile in the forms that other programs open."""

from __future__ import annotations

import json
from collections.abc import Iterator

from calm import __version__
from calm.core.errors import USAGE, CalmError
from calm.core.heap_profile import HeapProfile

_SPEEDSCOPE_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_SPEEDSCOPE_UNITS = {"bytes": "bytes", "nanoseconds": "nanoseconds"}


def column(profile: HeapProfile, name: str | None) -> int:
    """The index of a type among the values; by default, of the profile's own default. Raises CalmError."""
    if (at := profile.column(name or profile.default_type)) is None:
        known = ", ".join(each.name for each in profile.types)
        raise CalmError(f"--type {name}: the profile has {known}", USAGE)
    return at


def _positive(profile: HeapProfile, at: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Stacks and values, without those below 0, which neither folded stacks nor flame graphs have."""
    for stack in profile.stacks:
        if stack.values[at] > 0:
            yield stack.frames, stack.values[at]


def has_negative(profile: HeapProfile) -> bool:
    return any(value < 0 for stack in profile.stacks for value in stack.values)


def folded(profile: HeapProfile, name: str | None) -> str:
    """A line for each stack, as flamegraph.pl and its kin read it: functions by ';', and the value."""
    at = column(profile, name)
    sums: dict[str, int] = {}
    for frames, value in _positive(profile, at):
        names = (profile.frames[index].function for index in frames)
        line = ";".join(" ".join(each.replace(";", ":").split()) or "?" for each in names) or "?"
        sums[line] = sums.get(line, 0) + value
    return "".join(f"{line} {value}\n" for line, value in sorted(sums.items()))


def speedscope(profile: HeapProfile, name: str | None) -> str:
    """All types, each as a profile of its own; the chosen one is shown first."""
    frames = []
    for each in profile.frames:
        file, _, line = (each.source or "").rpartition(":")
        where = {"file": file, "line": int(line)} if file and line.isdecimal() else {"file": each.module}
        frames.append({"name": each.function or "?", **where})
    profiles = []
    for at, kind in enumerate(profile.types):
        found = list(_positive(profile, at))
        profiles.append(
            {
                "type": "sampled",
                "name": kind.name,
                "unit": _SPEEDSCOPE_UNITS.get(kind.unit, "none"),
                "startValue": 0,
                "endValue": sum(value for _, value in found),
                "samples": [list(stack) for stack, _ in found],
                "weights": [value for _, value in found],
            }
        )
    document = {
        "$schema": _SPEEDSCOPE_SCHEMA,
        "shared": {"frames": frames},
        "profiles": profiles,
        "activeProfileIndex": column(profile, name),
        "exporter": f"calm {__version__}",
    }
    return json.dumps(document, separators=(",", ":")) + "\n"
