"""A heap profile as one page of HTML, with a flame graph for each of its types."""

from __future__ import annotations

import shlex
from typing import NamedTuple

import msgspec

from calm.commands.heap import formats
from calm.commands.heap.summary import TITLES, amount
from calm.core import pages, report
from calm.core.heap_profile import HeapProfile

# What a flame graph counts, by type.
_NOUNS = {
    "peak_space": "memory in use at the peak",
    "peak_objects": "blocks in use at the peak",
    "inuse_space": "memory in use",
    "inuse_objects": "blocks in use",
    "alloc_space": "memory allocated",
    "alloc_objects": "blocks allocated",
    "freed_lifetime": "lifetimes of freed blocks",
    "inuse_age": "ages of blocks in use",
}
_BUTTONS = {
    "peak_space": "At the peak",
    "peak_objects": "Blocks at the peak",
    "inuse_space": "In use",
    "inuse_objects": "Blocks in use",
    "alloc_space": "Allocated",
    "alloc_objects": "Blocks allocated",
    "freed_lifetime": "Lifetimes",
    "inuse_age": "Ages",
}
# The flame graph's units.
_UNITS = {"bytes": "bytes", "nanoseconds": "s"}


class _Weighted(NamedTuple):
    """A stack with one of its values."""

    kind: str
    frames: tuple[int, ...]
    weight: float
    samples: int = 0
    cause: str = ""


def _percent(part: float, whole: float, _digits: int = 0) -> str:
    return f"{100 * part / whole:.1f} %" if whole > 0 else "-"


def page(profile: HeapProfile, name: str | None) -> str:
    """The page's text, all ASCII. The named type is shown first."""
    profile = msgspec.convert(pages.printable(msgspec.to_builtins(profile)), HeapProfile)
    first = formats.column(profile, name)
    order = sorted(range(len(profile.types)), key=lambda at: at != first)
    kinds = {}
    units = {}
    stacks: dict[str, list[_Weighted]] = {}
    for at in order:
        kind = profile.types[at]
        kinds[kind.name] = (_BUTTONS.get(kind.name, kind.name), _NOUNS.get(kind.name, kind.name))
        units[kind.name] = _UNITS.get(kind.unit, "count")
        scale = 1e-9 if kind.unit == "nanoseconds" else 1
        found = [
            _Weighted(kind.name, stack.frames, stack.values[at] * scale)
            for stack in profile.stacks
            if stack.values[at] > 0
        ]
        stacks[kind.name] = sorted(found, key=lambda stack: -stack.weight)
    command = shlex.join(profile.command) or profile.source or "unknown program"
    data = {
        "causes": {},
        "nouns": {kind: noun for kind, (_, noun) in kinds.items()},
        "units": units,
        "row": pages.ROW_PX,
        "frames": pages.frames(profile.frames),
        "stacks": [
            {"kind": each.kind, "cause": "", "frames": each.frames, "weight": each.weight}
            for found in stacks.values()
            for each in found
        ],
    }
    return pages.render(
        "calm.commands.heap",
        profile=profile,
        data=data,
        title=command if len(command) <= 100 else command[:99] + "…",
        titles=TITLES,
        stacks=stacks,
        kinds=kinds,
        units=units,
        summary=lambda stack: pages.summary(profile.frames, stack.frames),
        amount=lambda value, unit: amount(value * 1e9, "nanoseconds") if unit == "s" else amount(value, unit),
        percent=_percent,
        cause_of=None,
        report=report,
    )
