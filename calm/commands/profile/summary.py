"""The report of a profile on the terminal: totals, causes, stacks, curves and findings; and its picture."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from calm.commands.profile.findings import managing_share
from calm.core import plot, report
from calm.core.errors import CalmError
from calm.core.profile_model import CALL, CAUSES, CPU, FAULT, MEMORY, SHOOTDOWN, Frame, Profile, label

_STACKS = 3
_FRAMES = 9
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*%#"
_WIDTH = 60
_TITLES = {
    SHOOTDOWN: "TLB shootdowns come from",
    CALL: "memory calls come from",
    FAULT: "page faults come from",
    CPU: "CPU time in memory management goes to",
}
_SERIES = {SHOOTDOWN: "shootdowns", FAULT: "faults", CALL: "calls"}


def sparkline(values: Sequence[float], bars: str = _BARS, width: int = _WIDTH) -> str:
    """A row of bars, the highest value as the full one; a blank for 0."""
    highest = max(values, default=0.0)
    if highest <= 0:
        return ""
    step = max(1.0, len(values) / width)
    starts = [round(column * step) for column in range(width) if round(column * step) < len(values)]
    columns = [max(values[at:end]) for at, end in pairwise([*starts, len(values)])]
    levels = [min(len(bars) - 1, int(value / highest * len(bars))) for value in columns]
    return "".join(bars[level] if value > 0 else " " for level, value in zip(levels, columns, strict=True))


class Way(NamedTuple):
    """Stacks that differ only in lines of the source."""

    cause: str
    frames: tuple[Frame, ...]
    weight: float
    samples: int


def ways(profile: Profile, kind: str) -> list[Way]:
    """The stacks of one kind by the functions of user code, the heaviest first."""
    found: dict[tuple[str, ...], Way] = {}
    for stack in profile.stacks:
        if stack.kind == kind and (kind != CPU or stack.cause != "other"):
            frames = tuple(f for f in (profile.frames[index] for index in stack.frames) if not f.kernel)
            key = (stack.cause, *(frame.function for frame in frames))
            # Stacks are sorted by weight, so the lines are those of the heaviest.
            before = found.get(key, Way(stack.cause, frames, 0.0, 0))
            found[key] = before._replace(
                weight=before.weight + stack.weight, samples=before.samples + stack.samples
            )
    return sorted(found.values(), key=lambda way: -way.weight)


def _frame(frame: Frame) -> str:
    name = frame.function if frame.function not in ("", "[unknown]") else f"({frame.module})"
    return f"{name} ({frame.source})" if frame.source else name


def amount(value: float | None, unit: str = "count") -> str:
    """A figure, or a dash."""
    if unit == "s" and value == 0:
        return "0 s"
    small = value is None or unit != "count" or (value < 10 and value != int(value))
    return report.figure(value, unit) if small else f"{value:,.0f}"


def percent(part: float | None, whole: float) -> str:
    """A share as the page's scripts print it: two digits after the point of small ones."""
    if part is None or whole <= 0:
        return "-"
    share = 100 * part / whole
    return "under 0.01 %" if 0 < share < 0.01 else f"{share:.{2 if share < 10 else 1}f} %"


def sureness(profile: Profile, kind: str, share: float, of: float = 1.0) -> str:
    """How sure a share by samples is, of what is of a kind, or of a part of it."""
    found = profile.interval(kind, share, of)
    if found is None:
        return "too few"
    low, high = (100 * each for each in found)
    return f"{low:.1f} to {high:.1f} %"


def wholes(profile: Profile) -> dict[str, float]:
    """What each column of causes adds up to."""
    sums = {
        key: sum(getattr(cause, key) or 0 for cause in profile.causes)
        for key in ("shootdowns", "faults", "calls", "cpu_s")
    }
    # The program's CPU time has more than the causes took; samples may overshoot it.
    whole_s = (profile.value("user_s") or 0) + (profile.value("system_s") or 0)
    return sums | {"cpu_s": max(whole_s, sums["cpu_s"])}


def _print_totals(console: Console, profile: Profile) -> None:
    table = report.table("figure", "value", "how", right=["value"], wrap=["how"], show_header=False)
    table.columns[2].style = "dim"
    table.add_row("wall time", report.duration(profile.wall_s), "")
    for key, total in profile.totals.items():
        # Calls that were counted and never made need no row.
        if total.value != 0 or key not in CAUSES:
            table.add_row(label(key), amount(total.value, total.unit), total.how)
    report.print_table(console, table)


def _print_causes(console: Console, profile: Profile) -> None:
    whole = wholes(profile)
    # Shootdowns that were counted by cause need no interval.
    unsure = bool(whole["shootdowns"]) and not profile.causes_counted
    headings = ("shootdowns", "", *([""] * unsure), "faults", "", "calls", "CPU time", "")
    table = report.table("cause", *headings, right=headings)
    for cause in profile.causes:
        share = (cause.shootdowns or 0) / max(1, whole["shootdowns"])
        table.add_row(
            CAUSES[cause.key],
            *(amount(cause.shootdowns), percent(cause.shootdowns, whole["shootdowns"])),
            *([sureness(profile, SHOOTDOWN, share) if cause.shootdowns else ""] * unsure),
            *(amount(cause.faults), percent(cause.faults, whole["faults"])),
            *(amount(cause.calls), amount(cause.cpu_s, "s"), percent(cause.cpu_s, whole["cpu_s"])),
        )
    console.print()
    report.print_table(console, table)


def _print_ways(console: Console, profile: Profile, kind: str) -> None:
    found = ways(profile, kind)
    if not (whole := sum(way.weight for way in found)):
        return
    # Of CPU time the ways are those of memory management.
    of = whole / sum(stack.weight for stack in profile.stacks if stack.kind == kind)
    console.print(f"\n{_TITLES[kind]}", style="bold")
    for way in found[:_STACKS]:
        # A call is named by itself, whatever it did: brk may grow the heap, or only read its end.
        cause = way.cause if kind == CALL else CAUSES[way.cause]
        about = f"about {amount(way.weight, 's' if kind == CPU else 'count')}, {cause}"
        about += f" ({way.samples:,} samples, {sureness(profile, kind, way.weight / whole, of)})"
        console.print(f"  {percent(way.weight, whole):>7}  {about}", soft_wrap=True)
        frames = [_frame(frame) for frame in reversed(way.frames)]
        if len(frames) > _FRAMES:
            frames[_FRAMES:] = [f"{len(frames) - _FRAMES} more"]
        line = " < ".join(frames) or "no user code: the kernel by itself"
        console.print(f"           {line}", style="dim", soft_wrap=True)


def _curves(profile: Profile) -> Iterator[tuple[str, Sequence[float], str]]:
    """Name, values and the highest value."""
    bin_s = profile.timeline.bin_s
    sums: dict[str, list[float]] = {}
    for name, values in profile.timeline.series.items():
        title = _SERIES.get(name.partition(":")[0], name)
        sums[title] = [a + b for a, b in zip(sums.get(title, [0] * len(values)), values, strict=True)]
    for title in (*_SERIES.values(), "cpu:user", "cpu:system"):
        if values := sums.get(title, []):
            rate = max(values) / bin_s
            is_cpu = title.startswith("cpu")
            yield title.replace("cpu:", "CPU, "), values, f"{rate:.2f} CPUs" if is_cpu else f"{rate:,.0f}/s"
    for name, title in MEMORY.items():
        if (curve := profile.curves.get(name)) and len(curve.kib) > 1:
            yield title, _by_time(curve.at_s, curve.kib), report.memory(max(curve.kib))


def _by_time(at_s: Sequence[float], values: Sequence[float]) -> list[float]:
    """Values at even steps: the latest of each moment."""
    found, index = [], 0
    for column in range(_WIDTH):
        while index + 1 < len(at_s) and at_s[index + 1] <= at_s[-1] * (column + 1) / _WIDTH:
            index += 1
        found.append(values[index])
    return found


def _print_curves(console: Console, profile: Profile) -> None:
    bars = _PLAIN_BARS if console.options.ascii_only else _BARS
    lines = [
        f"  {title:<12}{line:<{_WIDTH}}  {highest}"
        for title, values, highest in _curves(profile)
        if (line := sparkline(values, bars))
    ]
    if lines:
        console.print(f"\nover {report.duration(profile.wall_s)} (and the highest value)", style="bold")
    for line in lines:
        console.print(line, soft_wrap=True)


def show(console: Console, profile: Profile) -> None:
    words = shlex.join(profile.command) or "(no command line)"
    process = f" (process {profile.pid})" if profile.pid is not None else ""
    console.print(f"\n{words}{process}", style="bold", soft_wrap=True)
    _print_totals(console, profile)
    if profile.causes:
        _print_causes(console, profile)
    if (managing := managing_share(profile)) is not None:
        console.print(f"memory management took {100 * managing:.1f} % of the CPU time", soft_wrap=True)
    for kind in _TITLES:
        _print_ways(console, profile, kind)
    _print_curves(console, profile)
    console.print("\nfindings", style="bold")
    for finding in profile.findings:
        console.print(f"- {finding.text}", soft_wrap=True)
        console.print(f"  ({finding.evidence})", style="dim", soft_wrap=True)
        if finding.remedy:
            console.print(f"  What helps: {finding.remedy}.", soft_wrap=True)
    if not profile.findings:
        none = "no rule found anything to report" if profile.stacks else "there are no stacks to judge by"
        console.print(f"- {none}", soft_wrap=True)
    console.print()
    for note in profile.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for line in profile.own_cost:
        console.print(f"cost of profiling: {line}", soft_wrap=True)


def draw(path: Path, profile: Profile) -> None:
    """Draws RSS, dirty memory and huge pages over time."""
    if not profile.curves:
        raise CalmError(f"cannot draw {path}: the program ended before its memory was sampled")
    figure, axes = plot.pyplot().subplots(figsize=(8, 4), layout="constrained")
    for name, title in MEMORY.items():
        if curve := profile.curves.get(name):
            axes.plot(curve.at_s, [kib / 1024 for kib in curve.kib], label=title)
    axes.set(xlabel="time (s)", ylabel="memory (MiB)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    plot.save(figure, path)
