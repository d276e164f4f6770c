"""A profile on the terminal: totals, causes, stacks, curves, and what they mean."""

import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from calm import report
from calm.profile.findings import managing_share
from calm.profile.model import CALL, CAUSES, CPU, FAULT, SHOOTDOWN, Frame, Profile, label

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


def sparkline(values: Sequence[float], bars: str = _BARS, width: int = _WIDTH) -> str:
    """A row of bars, the highest value being the full one; a blank where nothing happened."""
    most = max(values, default=0.0)
    if most <= 0:
        return ""
    step = max(1.0, len(values) / width)
    columns = []
    at = 0.0
    while round(at) < len(values):
        columns.append(max(values[round(at) : max(round(at + step), round(at) + 1)]))
        at += step
    return "".join(
        bars[min(len(bars) - 1, int(value / most * len(bars)))] if value > 0 else " " for value in columns
    )


@dataclass(frozen=True)
class Way:
    """Stacks that differ in nothing but lines of the source."""

    cause: str
    frames: tuple[Frame, ...]
    weight: float


def ways(profile: Profile, kind: str) -> list[Way]:
    """The most frequent ways to one kind of event, by the functions of user code."""
    weights: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    shown: dict[tuple[str, tuple[str, ...]], tuple[float, tuple[Frame, ...]]] = {}
    for stack in profile.stacks:
        if stack.kind != kind or (kind == CPU and stack.cause == "other"):
            continue
        frames = tuple(f for f in (profile.frames[index] for index in stack.frames) if not f.kernel)
        key = (stack.cause, tuple(frame.function for frame in frames))
        weights[key] += stack.weight
        if key not in shown or shown[key][0] < stack.weight:
            shown[key] = (stack.weight, frames)
    found = [Way(cause, shown[cause, names][1], weight) for (cause, names), weight in weights.items()]
    return sorted(found, key=lambda way: -way.weight)


def _frame(frame: Frame) -> str:
    name = frame.function if frame.function not in ("", "[unknown]") else f"({frame.module})"
    return f"{name} ({frame.source})" if frame.source else name


def _amount(value: float | None, unit: str = "count") -> str:
    if value is None:
        return "-"
    return report.figure(round(value) if unit == "count" else value, unit)


def _totals(profile: Profile) -> Table:
    table = report.table(show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", style="dim")
    table.add_row("wall time", report.duration(profile.wall_s), "")
    for key, total in profile.totals.items():
        # Calls that were counted and never made need no row.
        if total.value == 0 and key in CAUSES:
            continue
        table.add_row(label(key), _amount(total.value, total.unit), total.how)
    return table


def _share(part: float | None, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if part is not None and whole else "-"


def _causes(profile: Profile) -> Table:
    table = report.table()
    table.add_column("cause", no_wrap=True)
    for title in ("shootdowns", "", "faults", "", "calls", "CPU time", ""):
        table.add_column(title, justify="right", no_wrap=True)
    shootdowns = sum(cause.shootdowns or 0 for cause in profile.causes)
    faults = sum(cause.faults or 0 for cause in profile.causes)
    cpu = sum(cause.cpu_s or 0 for cause in profile.causes)
    for cause in profile.causes:
        name = "all else, the program's own work too" if cause.key == "other" else CAUSES[cause.key]
        table.add_row(
            name,
            _amount(cause.shootdowns),
            _share(cause.shootdowns, shootdowns),
            _amount(cause.faults),
            _share(cause.faults, faults),
            _amount(cause.calls),
            _amount(cause.cpu_s, "s"),
            _share(cause.cpu_s, cpu),
        )
    return table


def _print_ways(console: Console, profile: Profile, kind: str) -> None:
    found = ways(profile, kind)
    whole = sum(way.weight for way in found)
    if not whole:
        return
    console.print(f"\n{_TITLES[kind]}", style="bold")
    for way in found[:_STACKS]:
        unit = "s" if kind == CPU else "count"
        # A call is known by its own name, whatever it did: brk may grow the heap, or only ask.
        cause = way.cause if kind == CALL else CAUSES[way.cause]
        console.print(
            f"  {_share(way.weight, whole):>7}  about {_amount(way.weight, unit)}, {cause}", soft_wrap=True
        )
        frames = [_frame(frame) for frame in reversed(way.frames)]
        left = len(frames) - _FRAMES
        line = " < ".join(frames[:_FRAMES]) + (f" < {left} more" if left > 0 else "")
        console.print(
            f"           {line or 'no user code: the kernel by itself'}", style="dim", soft_wrap=True
        )


def _print_curves(console: Console, profile: Profile) -> None:
    bars = _BARS if str(getattr(console.file, "encoding", "")).lower().startswith("utf") else _PLAIN_BARS
    bin_s, series = profile.timeline.bin_s, profile.timeline.series
    sums: defaultdict[str, list[float]] = defaultdict(list)
    for name, values in series.items():
        title = {SHOOTDOWN: "shootdowns", CALL: "calls", FAULT: "faults"}.get(name.partition(":")[0], name)
        sums[title] = [a + b for a, b in zip(sums[title], values, strict=True)] if sums[title] else values
    lines = []
    for title in ("shootdowns", "faults", "calls", "cpu:user", "cpu:system"):
        values = sums.get(title, [])
        if line := sparkline(values, bars):
            rate = max(values) / bin_s
            text = f"{rate:.2f} CPUs" if title.startswith("cpu") else f"{rate:,.0f}/s"
            lines.append((title.replace("cpu:", "CPU, "), line, text))
    for name, title in (("rss", "RSS"), ("dirty", "dirty"), ("huge", "huge pages")):
        curve = profile.curves.get(name)
        if curve and len(curve.kib) > 1 and (line := sparkline(_by_time(curve.at_s, curve.kib), bars)):
            lines.append((title, line, report.memory(max(curve.kib))))
    if lines:
        console.print(f"\nover {report.duration(profile.wall_s)} (and the most)", style="bold")
    for title, line, most in lines:
        console.print(f"  {title:<12}{line:<{_WIDTH}}  {most}", soft_wrap=True)


def _by_time(at_s: Sequence[float], values: Sequence[float]) -> list[float]:
    """Values at even steps: the latest that was known then."""
    end = at_s[-1]
    found, index = [], 0
    for column in range(_WIDTH):
        moment = end * (column + 1) / _WIDTH
        while index + 1 < len(at_s) and at_s[index + 1] <= moment:
            index += 1
        found.append(values[index])
    return found


def _described(profile: Profile) -> str:
    """What was profiled, in a line."""
    words = shlex.join(profile.command) or "(no command line)"
    return f"{words} (process {profile.pid})" if profile.pid is not None else words


def show(console: Console, profile: Profile) -> None:
    """Prints all of it."""
    console.print(f"\n{_described(profile)}", style="bold", soft_wrap=True)
    report.print_table(console, _totals(profile))
    if profile.causes:
        console.print()
        report.print_table(console, _causes(profile))
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
        what = (
            "none of the rules found anything to say" if profile.stacks else "there are no stacks to judge by"
        )
        console.print(f"- {what}", soft_wrap=True)
    console.print()
    for note in profile.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for line in profile.own_cost:
        console.print(f"cost of profiling: {line}", soft_wrap=True)
