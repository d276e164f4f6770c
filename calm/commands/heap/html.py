"""A heap profile as one page of HTML, with a flame graph for each of its types."""

from __future__ import annotations

import shlex

from calm.commands.heap import formats
from calm.commands.heap.summary import TITLES, amount, percent
from calm.core import pages, report
from calm.core.heap_profile import HeapProfile
from calm.core.profile_model import Stack

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


def page(profile: HeapProfile, name: str | None) -> str:
    """The page's text, all ASCII. The named type is shown first."""
    profile = pages.printable(profile)
    first = formats.column(profile, name)
    kinds = {}
    units = {}
    stacks = []
    for at in sorted(range(len(profile.types)), key=lambda at: at != first):
        kind = profile.types[at]
        kinds[kind.name] = (_BUTTONS.get(kind.name, kind.name), _NOUNS.get(kind.name, kind.name))
        units[kind.name] = _UNITS.get(kind.unit, "count")
        scale = 1e-9 if kind.unit == "nanoseconds" else 1
        stacks += [
            Stack(kind.name, "", stack.frames, stack.values[at] * scale, 0)
            for stack in profile.stacks
            if stack.values[at] > 0
        ]
    return pages.render(
        "calm.commands.heap",
        frames=profile.frames,
        stacks=stacks,
        profile=profile,
        data=pages.flame(profile.frames, stacks, kinds, units),
        title=shlex.join(profile.command) or profile.source or "unknown program",
        titles=TITLES,
        kinds=kinds,
        units=units,
        amount=lambda value, unit: amount(value * 1e9, "nanoseconds") if unit == "s" else amount(value, unit),
        percent=percent,
        cause_of=None,
        report=report,
    )
