"""What the scripts of a profile's page draw from: stacks as one tree of callers, and curves over time.

Numbers that JSON cannot hold (infinities, NaN) become gaps.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from calm import report
from calm.profile.model import CALL, CAUSES, CPU, FAULT, SHOOTDOWN, Frame, Profile

Data = dict[str, Any]

# Sizes that the page reserves before the scripts run, and that they then use.
PANEL_PX = 170
AXIS_PX = 44
ROW_PX = 19
FLAME_MOST_PX = 680

# Colours of causes in page.css; the last one is for all that have none of their own.
OTHER = 6


@dataclass(frozen=True)
class Kind:
    """What a kind of stack counts, in words."""

    title: str
    noun: str


KINDS = {
    SHOOTDOWN: Kind("Shootdowns", "shootdowns"),
    FAULT: Kind("Faults", "faults"),
    CALL: Kind("Calls", "calls"),
    CPU: Kind("CPU", "CPU time"),
}


def amount(kind: str, weight: float) -> str:
    """A stack's weight in the unit of its kind."""
    if not math.isfinite(weight):
        return "-"
    if kind == CPU:
        return report.duration(weight) if weight else "0 s"
    return f"{weight:,.0f}" if weight >= 10 or weight == int(weight) else f"{weight:.1f}"


def percent(part: float, whole: float) -> str:
    """As the page's scripts have it: two digits after the point for what is small."""
    if not (whole > 0 and math.isfinite(part)):
        return "-"
    share = 100 * part / whole
    if 0 < share < 0.01:
        return "under 0.01 %"
    return f"{share:.{2 if share < 10 else 1}f} %"


def collect(profile: Profile) -> Data:
    """All of it, for JSON."""
    colors = _colors(profile)
    keys = sorted({stack.cause for stack in profile.stacks})
    tree = _tree(profile, keys)
    return {
        "colors": colors,
        # A call is known by its own name, whatever it did.
        "calls": [printable(key) for key in keys],
        "causes": [printable(CAUSES.get(key, key)) for key in keys],
        "kinds": {kind: {"title": words.title, "noun": words.noun} for kind, words in KINDS.items()},
        "row": ROW_PX,
        "panel": PANEL_PX,
        "axis": AXIS_PX,
        "wall": _number(profile.wall_s),
        "panels": _panels(profile, colors),
        **tree,
    }


def printable(text: str) -> str:
    """Without what a screen cannot show, or what would reorder the rest of the line."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _number(value: float) -> float | None:
    """Six digits are more than a screen shows."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _colors(profile: Profile) -> dict[str, int]:
    """A colour for each of the causes that matter most, the same in all plots."""
    weight: dict[str, float] = {}
    for name, values in profile.timeline.series.items():
        kind, _, key = name.partition(":")
        if key and kind != CPU:
            # Calls are many and cheap: they count only where there are no shootdowns.
            factor = 1e6 if kind == SHOOTDOWN else 1
            weight[key] = weight.get(key, 0) + factor * sum(v for v in values if math.isfinite(v))
    for cause in profile.causes:
        weight.setdefault(cause.key, 0)
        weight[cause.key] += 1e6 * (cause.shootdowns or 0) + (cause.calls or 0)
    order = sorted(weight, key=lambda key: (-weight[key], key))
    return {key: min(place, OTHER) for place, key in enumerate(order)}


def short(function: str) -> str:
    """A C++ function without what stands in its angle brackets and parentheses."""
    # The brackets of operators are names, not brackets.
    text = re.sub(r"\boperator\s*(\(\)|<=>|<<=?|>>=?|<=|>=|->\*?|<|>)", _veil, function)
    text = text.replace("(anonymous namespace)", "{anonymous}")
    for opening, closing in ("<>", "()"):
        text = _emptied(text, opening, closing)
    return text.translate(_UNVEIL)


_VEILED = {ord(character): 0xE000 + index for index, character in enumerate("<>()-")}
_UNVEIL = {veiled: chr(plain) for plain, veiled in _VEILED.items()}


def _veil(match: re.Match[str]) -> str:
    return match[0].translate(_VEILED)


def _emptied(text: str, opening: str, closing: str) -> str:
    """Each outermost pair of brackets keeps only an ellipsis, if anything was in it."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character == opening:
            depth += 1
            if depth == 1:
                parts.append(text[start : at + 1])
                start = at + 1
        elif character == closing and depth:
            depth -= 1
            if depth == 0:
                parts.append("…" if at > start else "")
                start = at
    # Brackets that do not match are left alone.
    return "".join(parts) + text[start:] if depth == 0 else text


def _tree(profile: Profile, keys: Sequence[str]) -> Data:
    """Stacks share their callers: each node knows its parent and its function, each stack its last node.

    Frames that differ by their line only are one function here.
    """
    merged: dict[tuple[str, str, bool, bool], int] = {}
    sources: list[set[str | None]] = []
    place: list[int] = []
    for frame in profile.frames:
        key = (frame.function, frame.module, frame.kernel, frame.inlined)
        index = merged.setdefault(key, len(merged))
        if index == len(sources):
            sources.append(set())
        sources[index].add(frame.source)
        place.append(index)
    parents: list[int] = []
    functions: list[int] = []
    nodes: dict[tuple[int, int], int] = {}
    stacks: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    numbers = {key: index for index, key in enumerate(keys)}
    for stack in profile.stacks:
        weight = _number(stack.weight)
        if stack.kind not in stacks or weight is None or weight <= 0:
            continue
        node = -1
        for index in stack.frames:
            step = (node, place[index])
            if step not in nodes:
                nodes[step] = len(nodes)
                parents.append(node)
                functions.append(place[index])
            node = nodes[step]
        stacks[stack.kind].append([numbers[stack.cause], node, weight, stack.samples])
    frames = [_frame(Frame(*key), lines) for key, lines in zip(merged, sources, strict=True)]
    return {"frames": frames, "parents": parents, "functions": functions, "stacks": stacks}


def _frame(frame: Frame, sources: set[str | None]) -> list[Any]:
    """Name, label (0: the name), module, 1 for the kernel's and 2 for inlined, source."""
    function = printable(frame.function)
    label = short(function)
    known = sorted(source for source in sources if source)
    source = f"{known[0]} and {len(known) - 1} more" if len(known) > 1 else "".join(known)
    return [
        function,
        label if label != function else 0,
        printable(frame.module),
        int(frame.kernel) + 2 * int(frame.inlined),
        printable(source),
    ]


def _panels(profile: Profile, colors: dict[str, int]) -> list[Data]:
    """One above the other: rates by cause, CPUs in use, memory."""
    series, bin_s = profile.timeline.series, profile.timeline.bin_s
    panels: list[Data] = []
    if bin_s > 0 and math.isfinite(bin_s):
        for kind, title in ((SHOOTDOWN, "shootdowns / s"), (FAULT, "faults / s"), (CALL, "calls / s")):
            traces = _rates(profile, kind, colors)
            if traces:
                panel = {"title": title, "unit": title, "stacked": True, "traces": traces, "bin": bin_s}
                panels.append(panel)
        cpu = [
            {"name": f"{mode} CPU", "group": "CPU", "color": color, "y": _per_second(values, bin_s)}
            for mode, color in (("user", 5), ("system", 4))
            if any(values := series.get(f"cpu:{mode}", []))
        ]
        if cpu:
            panels.append(
                {"title": "CPUs in use", "unit": "CPUs", "stacked": True, "traces": cpu, "bin": bin_s}
            )
    memory = [
        {
            "name": label,
            "group": "Memory",
            "color": color,
            "x": [_number(at) for at in profile.curves[name].at_s],
            "y": [_number(kib / 1024) for kib in profile.curves[name].kib],
        }
        for name, label, color in (("rss", "RSS", 0), ("dirty", "dirty", 1), ("huge", "huge pages", 2))
        if name in profile.curves and profile.curves[name].at_s
    ]
    if memory:
        panels.append({"title": "memory, MiB", "unit": "MiB", "stacked": False, "traces": memory})
    return panels


def _per_second(values: Sequence[float], bin_s: float) -> list[float | None]:
    return [_number(value / bin_s) for value in values]


def _rates(profile: Profile, kind: str, colors: dict[str, int]) -> list[Data]:
    """A curve for each cause that has a colour, and one for all others together."""
    groups = {SHOOTDOWN: "Causes", FAULT: "Faults", CALL: "Calls"}
    sums: dict[int, list[float]] = {}
    names: dict[int, str] = {}
    for name, values in profile.timeline.series.items():
        of, _, key = name.partition(":")
        if of != kind or not any(values):
            continue
        color = colors.get(key, OTHER) if key else 3
        have = sums.setdefault(color, [])
        have += [0.0] * (len(values) - len(have))
        for index, value in enumerate(values):
            have[index] += value
        label = (key if kind == CALL else CAUSES.get(key, key)) if key else "page faults"
        names[color] = printable(label) if color < OTHER else f"other {groups[kind].lower()}"
    return [
        {
            "name": names[color],
            "group": groups[kind],
            "color": color,
            "y": _per_second(sums[color], profile.timeline.bin_s),
        }
        for color in sorted(sums)
    ]
