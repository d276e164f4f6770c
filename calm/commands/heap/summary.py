"""The report of a heap profile on the terminal: totals, and the stacks with most of each."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from calm.commands.heap import formats
from calm.core import pages, report
from calm.core.heap_profile import (
    ALLOC_OBJECTS,
    ALLOC_SPACE,
    FREED_LIFETIME,
    INUSE_AGE,
    INUSE_OBJECTS,
    INUSE_SPACE,
    PEAK_OBJECTS,
    PEAK_SPACE,
    HeapProfile,
    HeapStack,
    SampleType,
)
from calm.core.profile_model import Frame

if TYPE_CHECKING:
    from rich.console import Console

# Those that the report shows by default, with the blocks that each counts.
_SHOWN = {PEAK_SPACE: PEAK_OBJECTS, INUSE_SPACE: INUSE_OBJECTS, ALLOC_SPACE: ALLOC_OBJECTS}
TITLES = {
    PEAK_SPACE: "in use at the peak",
    PEAK_OBJECTS: "blocks in use at the peak",
    INUSE_SPACE: "in use",
    INUSE_OBJECTS: "blocks in use",
    ALLOC_SPACE: "allocated",
    ALLOC_OBJECTS: "blocks allocated",
    FREED_LIFETIME: "lifetimes of freed blocks, added up",
    INUSE_AGE: "ages of blocks in use, added up",
}


def amount(value: float, unit: str) -> str:
    """A value in its unit, with its sign."""
    sign, value = ("-", -value) if value < 0 else ("", value)
    if unit == "bytes":
        return sign + (report.memory(value / 1024) if value >= 1024 else f"{value:.0f} B")
    if unit == "nanoseconds":
        return sign + (report.rough_duration(value / 1e9) if value >= 1e11 else report.duration(value / 1e9))
    return f"{sign}{value:,.0f}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole > 0 else "-"


def lifetime(profile: HeapProfile, stack: HeapStack) -> str:
    """How long blocks of a stack live on average; "> 3 s" if most are in use: the age that they have."""
    names = (ALLOC_OBJECTS, INUSE_OBJECTS, FREED_LIFETIME, INUSE_AGE)
    columns = [at for name in names if (at := profile.column(name)) is not None]
    if len(columns) < len(names):
        return ""
    allocated, in_use, freed_ns, age_ns = (stack.values[at] for at in columns)
    if profile.base or min(allocated, in_use, freed_ns, age_ns) < 0:
        return ""
    if (freed := allocated - in_use) > in_use:
        return amount(freed_ns / freed, "nanoseconds")
    return f"> {amount(age_ns / in_use, 'nanoseconds')}" if in_use else ""


class Way(NamedTuple):
    """Stacks that differ in lines of the source only."""

    frames: tuple[Frame, ...]
    stack: HeapStack


def ways(profile: HeapProfile, at: int) -> list[Way]:
    """The stacks by their functions, those with most of a type first, whatever their sign."""
    found: dict[tuple[str, ...], Way] = {}
    for stack in sorted(profile.stacks, key=lambda stack: -abs(stack.values[at])):
        frames = tuple(profile.frames[index] for index in stack.frames)
        key = tuple(frame.function for frame in frames)
        if before := found.get(key):
            values = [a + b for a, b in zip(before.stack.values, stack.values, strict=True)]
            found[key] = before._replace(stack=HeapStack(before.stack.frames, values))
        else:
            found[key] = Way(frames, stack)
    return sorted(
        (way for way in found.values() if way.stack.values[at]), key=lambda way: -abs(way.stack.values[at])
    )


def place(profile: HeapProfile, way: Way) -> str:
    """The innermost functions, and the line that allocates."""
    inner = way.frames[-1] if way.frames else None
    text = pages.summary(profile.frames, way.stack.frames) or "(no functions known)"
    return f"{text} ({inner.source or inner.module})" if inner and (inner.source or inner.module) else text


def _table(console: Console, profile: HeapProfile, kind: SampleType, top: int) -> None:
    at = formats.column(profile, kind.name)
    found = ways(profile, at)
    total = sum(way.stack.values[at] for way in found)
    objects = profile.column(_SHOWN.get(kind.name, ""))
    title = TITLES.get(kind.name, kind.name)
    right = (title, "share", "blocks", "lifetime")
    headings = [
        title,
        "share",
        *(["blocks"] if objects is not None else []),
        "lifetime",
        "function ← callers",
    ]
    lifetimes = [lifetime(profile, way.stack) for way in found[:top]]
    if not any(lifetimes):
        headings.remove("lifetime")
    table = report.table(*headings, right=right, wrap=("function ← callers",))
    for way, lived in zip(found[:top], lifetimes, strict=True):
        value = way.stack.values[at]
        cells = [amount(value, kind.unit), percent(value, total)]
        if objects is not None:
            cells.append(amount(way.stack.values[objects], "count"))
        if "lifetime" in headings:
            cells.append(lived)
        table.add_row(*cells, place(profile, way))
    console.print()
    report.print_table(console, table)
    if len(found) > top:
        rest = sum(way.stack.values[at] for way in found[top:])
        stacks = "stack" if len(found) == top + 1 else "stacks"
        console.print(f"and {amount(rest, kind.unit)} of {len(found) - top} more {stacks}", style="dim")


def _head(profile: HeapProfile) -> str:
    if profile.source:
        return profile.source + (f" minus {profile.base}" if profile.base else "")
    command = shlex.join(profile.command) or "unknown program"
    return f"{command} (process {profile.pid})" if profile.pid else command


def _totals(profile: HeapProfile) -> Iterator[tuple[str, str]]:
    for name, objects in _SHOWN.items():
        if (total := profile.total(name)) is not None:
            blocks = profile.total(objects)
            more = f" in {amount(blocks, 'count')} blocks" if blocks is not None else ""
            window = (
                f", in {report.duration(profile.window_s)}"
                if profile.window_s and name == ALLOC_SPACE
                else ""
            )
            yield TITLES[name], amount(total, "bytes") + more + window


def show(console: Console, profile: HeapProfile, name: str | None, top: int) -> None:
    """Tables of the peak, of what is in use and of what was allocated; or of one type."""
    console.print(_head(profile), style="bold")
    if profile.mean_bytes and (profile.column(ALLOC_SPACE) is not None):
        console.print(f"one sample for each {amount(profile.mean_bytes, 'bytes')} on average", style="dim")
    for title, text in _totals(profile):
        console.print(f"{title}: {text}")
    chosen = [each for each in profile.types if each.name == name] if name else []
    chosen = chosen or [each for shown in _SHOWN for each in profile.types if each.name == shown]
    chosen = chosen or [profile.types[formats.column(profile, None)]]
    if not profile.stacks:
        console.print(
            "nothing differs" if profile.base else "nothing was sampled: a smaller --every samples more"
        )
    for kind in chosen:
        if any(stack.values[formats.column(profile, kind.name)] for stack in profile.stacks):
            _table(console, profile, kind, top)
    for note in profile.notes:
        console.print(f"note: {note}")
