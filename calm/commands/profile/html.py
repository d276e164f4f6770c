"""A profile as one page of HTML that needs no other file and no network.

Its templates are page/*.html, and those of core/page that `calm heap` has too: text and tables can be read
without scripts. The scripts draw the flame graph and the plots from JSON.
"""

from __future__ import annotations

import base64
import gzip
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from calm.commands.profile.summary import amount, percent, wholes
from calm.core import pages, profile_model, report
from calm.core.profile_model import CALL, CAUSES, CPU, FAULT, MEMORY, SHOOTDOWN, Profile

Data = dict[str, Any]

# Colors of causes in page.css; the last one is for all causes without a color of their own.
OTHER = 6
# Title and noun of each kind of stack.
KINDS = {
    SHOOTDOWN: ("Shootdowns", "shootdowns"),
    FAULT: ("Faults", "faults"),
    CALL: ("Calls", "calls"),
    CPU: ("CPU", "CPU time"),
}
_UNITS = {kind: "s" if kind == CPU else "count" for kind in KINDS}
_MACHINE = {
    "cpus": "{cpus} CPUs ({cpu})",
    "memory_kib": "{memory}",
    "distribution": "{distribution}",
    "glibc": "glibc {glibc}",
    "kernel": "Linux {kernel}",
    "transparent_huge_pages": "transparent huge pages {transparent_huge_pages}",
}


def page(profile: Profile) -> str:
    """The page's text, all ASCII."""
    # Names of functions may contain anything.
    profile = pages.printable(profile)
    command = shlex.join(profile.command) or (f"process {profile.pid}" if profile.pid else "no command")
    data = collect(profile)
    return pages.render(
        "calm.commands.profile",
        frames=profile.frames,
        stacks=profile.stacks,
        profile=profile,
        data=data,
        title=command,
        machine=_machine(profile),
        cards=list(_cards(profile)),
        wholes=wholes(profile),
        cause_of=lambda stack: stack.cause if stack.kind == CALL else CAUSES.get(stack.cause, stack.cause),
        units=_UNITS,
        colors=colors(profile),
        plotly=_plotly() if data["panels"] else None,
        model=profile_model,
        report=report,
        kinds=KINDS,
        other=OTHER,
        amount=amount,
        percent=percent,
    )


def _plotly() -> str | None:
    """The packed script of plotly: its package has only the whole one, of nearly 5 MB. None without it."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        return None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 6, mtime=0)).decode()


def _machine(profile: Profile) -> str:
    words = {"cpu": "unknown"} | dict(profile.machine)
    words["memory"] = report.memory(words.get("memory_kib", 0))
    return ", ".join(form.format(**words) for key, form in _MACHINE.items() if key in words)


def _cards(profile: Profile) -> Iterator[tuple[str, str, str]]:
    """The key figures: name, value, and more about it or the reason for there being none."""
    value, wall_s = profile.value, profile.wall_s

    def figure(name: str, title: str, *more: str) -> tuple[str, str, str]:
        total = profile.totals.get(name)
        if total is None or total.value is None:
            return title, "-", total.how if total else "not recorded"
        return title, report.figure(total.value, total.unit), ", ".join(filter(None, more))

    def rate(name: str) -> str:
        return f"{count / wall_s:,.0f} a second" if (count := value(name)) and wall_s > 0 else ""

    shootdowns, interrupts, major = value("shootdowns"), value("interrupts"), value("major_faults")
    yield figure("shootdowns", "TLB shootdowns", rate("shootdowns"))
    ratio = f"{interrupts / shootdowns:.1f} for each shootdown" if shootdowns and interrupts else ""
    yield figure("interrupts", "TLB interrupts sent", ratio)
    majors = "" if major is None else f"{major:,.0f} major"
    yield figure("minor_faults", "page faults (minor)", rate("minor_faults"), majors)
    user, system = value("user_s"), value("system_s")
    if user is None or system is None:
        yield figure("user_s" if user is None else "system_s", "CPU time")
    else:
        whole_s = user + system
        cpus = f"{whole_s / wall_s:.2f} CPUs" if wall_s > 0 else ""
        kernel = f"{percent(system, whole_s)} in the kernel" if whole_s > 0 else ""
        yield "CPU time", report.duration(whole_s), ", ".join(filter(None, (cpus, kernel)))
        # CPU time without one of the causes is the program's own work.
        known = [cause.cpu_s for cause in profile.causes if cause.cpu_s is not None and cause.key != "other"]
        if known and whole_s > 0:
            share = percent(min(sum(known), whole_s), whole_s)
            yield "CPU share", share, f"{amount(sum(known), 's')} in the causes below, by sampling"
    average = value("average_rss_kib")
    if average is None and (rss := profile.curves.get("rss")) and rss.at_s[-1] > rss.at_s[0]:
        steps = zip(pairwise(rss.at_s), rss.kib, strict=False)
        average = sum((end - at) * kib for (at, end), kib in steps) / (rss.at_s[-1] - rss.at_s[0])
    more = "" if average is None else f"{report.memory(average)} on average"
    yield figure("peak_rss_kib", "peak RSS", more)
    yield figure("threads_started", "threads started")


def collect(profile: Profile) -> Data:
    """The data that the scripts draw from."""
    return pages.flame(profile.frames, profile.stacks, KINDS, _UNITS, CAUSES) | {
        # Heights in pixels that the page reserves before the scripts run, and that they then use.
        **{"panel": 170, "axis": 44},
        "wall": pages.six_digits(profile.wall_s),
        "panels": list(_panels(profile)),
    }


def colors(profile: Profile) -> dict[str, int]:
    """A color for each of the first causes, the same in all plots."""
    keys = [cause.key for cause in profile.causes]
    keys += [name.partition(":")[2] for name in profile.timeline.series]
    return {key: min(place, OTHER) for place, key in enumerate(dict.fromkeys(filter(None, keys)))}


def _panels(profile: Profile) -> Iterator[Data]:
    """One above the other: rates by cause, CPUs in use, memory."""
    series, bin_s = profile.timeline.series, profile.timeline.bin_s

    def rates(
        title: str, unit: str, group: str, curves: Sequence[tuple[str, int, list[float]]]
    ) -> Iterator[Data]:
        traces = [
            {
                "name": name,
                "group": group,
                "color": color,
                "y": [pages.six_digits(value / bin_s) for value in values],
            }
            for name, color, values in curves
        ]
        if traces:
            yield {"title": title, "unit": unit, "stacked": True, "traces": traces, "bin": bin_s}

    for kind, group in ((SHOOTDOWN, "Causes"), (FAULT, "Faults"), (CALL, "Calls")):
        title = f"{KINDS[kind][1]} / s"
        yield from rates(title, title, group, _by_color(profile, kind, f"other {group.lower()}"))
    modes = [
        (f"{mode} CPU", color, series.get(f"cpu:{mode}", [])) for mode, color in (("user", 5), ("system", 4))
    ]
    yield from rates("CPUs in use", "CPUs", "CPU", [mode for mode in modes if any(mode[2])])
    memory = [
        {
            "name": title,
            "group": "Memory",
            "color": color,
            "x": [pages.six_digits(at) for at in curve.at_s],
            "y": [pages.six_digits(kib / 1024) for kib in curve.kib],
        }
        for color, (name, title) in enumerate(MEMORY.items())
        if (curve := profile.curves.get(name)) and curve.at_s
    ]
    if memory:
        yield {"title": "memory, MiB", "unit": "MiB", "stacked": False, "traces": memory}


def _by_color(profile: Profile, kind: str, others: str) -> list[tuple[str, int, list[float]]]:
    """Name, color and events per bin of each cause that has a color, and of all others together."""
    sums: dict[int, list[float]] = {}
    names: dict[int, str] = {}
    known = colors(profile)
    for name, values in profile.timeline.series.items():
        of, _, key = name.partition(":")
        if of == kind and any(values):
            color = known.get(key, OTHER) if key else 3
            sums[color] = [a + b for a, b in zip(sums.get(color, [0.0] * len(values)), values, strict=True)]
            title = (key if kind == CALL else CAUSES.get(key, key)) if key else "page faults"
            names[color] = title if color < OTHER else others
    return [(names[color], color, sums[color]) for color in sorted(sums)]
