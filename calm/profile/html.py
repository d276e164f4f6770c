"""A profile as one HTML page that needs nothing else: no network, no other file.

Words and tables are written here and can be read without scripts. The flame graph and the plots are drawn by
page/*.js from the JSON that calm.profile.html_data makes. The page is ASCII, so that no locale can spoil it.
"""

import base64
import gzip
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from itertools import groupby
from string import Template

from calm import __version__, report
from calm.profile import html_data
from calm.profile.html_data import KINDS, amount, percent
from calm.profile.model import CALL, CAUSES, Finding, Frame, Profile, Stack, label

# More would only be scrolled past: the flame graph and the JSON have all.
_STACKS_SHOWN = 25
_FUNCTIONS_IN_A_SUMMARY = 5


def write(profile: Profile, path: str) -> None:
    """Writes the page; '-' is standard output."""
    report.write(path, page(profile))


def page(profile: Profile) -> str:
    """The page's text, all ASCII."""
    command = shlex.join(profile.command) or (f"process {profile.pid}" if profile.pid else "no command")
    data = html_data.collect(profile)
    library = _plotly() if data["panels"] else None
    text = Template(_asset("page.html")).substitute(
        generator=escape(f"calm {__version__}"),
        title=_text(f"{command if len(command) <= 100 else command[:99] + '…'} - calm profile"),
        css=_asset("page.css"),
        command=_text(command),
        facts=_text(_facts(profile)),
        machine=_text(_machine(profile)),
        warnings=_warnings(profile),
        findings=_findings(profile.findings),
        cards=_cards(profile),
        totals=_totals(profile),
        causes=_causes(profile, data["colors"]),
        plots=_plots(data, library is not None),
        where=_where(profile),
        cost=_cost(profile),
        footer=_text(f"Written by calm {__version__}. This page loads nothing from anywhere."),
        data=_script_safe(data),
        plotly=f'<script type="application/gzip" id="plotly">{library}</script>' if library else "",
        script=_asset("flame.js") + _asset("plots.js") + _asset("page.js"),
    )
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _asset(name: str) -> str:
    return (resources.files("calm.profile") / "page" / name).read_text(encoding="ascii")


def _plotly() -> str | None:
    """Plotly's script, packed: its package has none but the whole one, of nearly 5 MB. None without it."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        return None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 6, mtime=0)).decode()


def _script_safe(data: object) -> str:
    """JSON that cannot end the script element that it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _text(text: object) -> str:
    """Any text as HTML; what HTML cannot hold is replaced."""
    return escape(html_data.printable(str(text)))


def _prose(text: str) -> str:
    """A sentence: what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(text))


def _bar(share: float) -> str:
    return f'<i style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></i>'


def _facts(profile: Profile) -> str:
    facts = [profile.began.replace("T", " "), f"{report.duration(profile.wall_s)} of wall time"]
    facts.append(f"under {profile.allocator}")
    if profile.pid is not None:
        facts.append(f"watched as process {profile.pid}")
    if profile.exit_code is not None:
        facts.append(f"exit code {profile.exit_code}")
    return " · ".join(facts)


def _machine(profile: Profile) -> str:
    machine = profile.machine
    words = []
    if "cpus" in machine:
        words.append(f"{machine['cpus']} CPUs" + (f" ({machine['cpu']})" if "cpu" in machine else ""))
    if isinstance(machine.get("memory_kib"), int | float):
        words.append(report.memory(machine["memory_kib"]))
    for key, before in (
        ("distribution", ""),
        ("glibc", "glibc "),
        ("kernel", "Linux "),
        ("transparent_huge_pages", "transparent huge pages "),
    ):
        if key in machine:
            words.append(f"{before}{machine[key]}")
    return ", ".join(words)


def _warnings(profile: Profile) -> str:
    warnings = []
    if profile.interrupted:
        warnings.append("Stopped before the program ended: this is what was known by then.")
    if not profile.privileged:
        total = profile.totals.get("shootdowns")
        why = f": {total.how}" if total is not None and total.value is None else ""
        warnings.append(f"Without tracepoints, shootdowns and their causes are not known{why}.")
    return "".join(f'<p class="warning" role="note">{_prose(text)}</p>' for text in warnings)


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<p>Nothing stands out.</p>"
    items = []
    # Those that are no share of anything come last.
    order = sorted(findings, key=lambda each: -1.0 if each.share is None else each.share, reverse=True)
    for finding in order:
        share = ""
        if finding.share is not None:
            share = f"{percent(finding.share, 1)}<small>{_bar(finding.share)}</small>"
        remedy = f'<p class="remedy"><b>Remedy:</b> {_prose(finding.remedy)}</p>' if finding.remedy else ""
        items.append(
            f'<li><div class="share">{share}</div><div><p class="what">{_prose(finding.text)}</p>'
            f'<p class="quiet">{_prose(finding.evidence)}</p>{remedy}</div></li>'
        )
    return f'<ol class="findings">{"".join(items)}</ol>'


def _per_second(profile: Profile, name: str) -> str:
    value = profile.value(name)
    if not value or profile.wall_s <= 0:
        return ""
    return f"{report.figure(round(value / profile.wall_s), 'count')} a second"


def _card(label: str, value: str, more: str) -> str:
    values = f'<dd class="value">{_text(value)}</dd><dd class="more">{_text(more)}</dd>'
    return f"<div><dt>{_text(label)}</dt>{values}</div>"


def _cards(profile: Profile) -> str:
    """The figures that a reader looks for first; those without a value say why."""

    def card(name: str, label: str, more: str) -> str:
        total = profile.totals.get(name)
        if total is None or total.value is None:
            return _card(label, "-", total.how if total else "not recorded")
        return _card(label, report.figure(total.value, total.unit), more)

    shootdowns, interrupts = profile.value("shootdowns"), profile.value("interrupts_sent")
    each = (
        f"{interrupts / shootdowns:.1f} for each shootdown" if shootdowns and interrupts is not None else ""
    )
    major = profile.value("major_faults")
    faults = [_per_second(profile, "minor_faults"), f"{major:,.0f} major" if major is not None else ""]
    rss = profile.curves.get("rss")
    average = profile.value("average_rss_kib")
    if average is None and rss:
        average = _average(rss.at_s, rss.kib)
    memory = f"{report.memory(average)} on average" if average is not None else ""
    return "".join(
        [
            card("shootdowns", "TLB shootdowns", _per_second(profile, "shootdowns")),
            card("interrupts_sent", "TLB interrupts sent", each),
            card("minor_faults", "page faults (minor)", ", ".join(filter(None, faults))),
            *_cpu_cards(profile),
            card("peak_rss_kib", "peak RSS", memory),
            card("threads_started", "threads started", ""),
        ]
    )


def _cpu_cards(profile: Profile) -> list[str]:
    times = [profile.totals.get(name) for name in ("user_s", "system_s")]
    user, system = (profile.value(name) for name in ("user_s", "system_s"))
    if user is None or system is None:
        reasons = (total.how for total in times if total is not None and total.value is None)
        why = next(reasons, "not recorded")
        return [_card("CPU time", "-", why), _card("CPU share", "-", why)]
    whole = user + system
    more = [f"{percent(system, whole)} in the kernel"] if whole > 0 else []
    if profile.wall_s > 0:
        more.insert(0, f"{whole / profile.wall_s:.2f} CPUs")
    cards = [_card("CPU time", report.duration(whole), ", ".join(more))]
    # What has none of the causes is the program's own work.
    known = [cause.cpu_s for cause in profile.causes if cause.cpu_s is not None and cause.key != "other"]
    if known and whole > 0:
        share = percent(min(sum(known), whole), whole)
        cards.append(_card("CPU share", share, f"{_seconds(sum(known))} in the causes below, by sampling"))
    else:
        cards.append(_card("CPU share", "-", "no CPU time was sampled by cause"))
    return cards


def _seconds(value: float) -> str:
    return report.duration(value) if value else "0 s"


def _average(at_s: Sequence[float], kib: Sequence[float]) -> float | None:
    """Over time: moments need not be equally far apart."""
    steps = [(after - at, value) for at, after, value in zip(at_s, at_s[1:], kib, strict=False)]
    whole = sum(step for step, _ in steps)
    return sum(step * value for step, value in steps) / whole if whole > 0 else None


def _totals(profile: Profile) -> str:
    if not profile.totals:
        return ""
    rows = "".join(
        f'<tr><td>{_text(label(name))}</td><td class="number">{report.figure(total.value, total.unit)}</td>'
        f"<td>{_text(total.how)}</td></tr>"
        for name, total in profile.totals.items()
    )
    return (
        "<details><summary>All totals, and how each was counted</summary>"
        '<table class="totals"><thead><tr><th>figure</th><th class="number">value</th><th>how</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></details>"
    )


def _heading(text: str, number: bool = True) -> str:
    classes = ' class="number"' if number else ""
    return f'<th scope="col"{classes}><button type="button">{_text(text)}</button></th>'


def _measure(value: float | None, whole: float, unit: str) -> str:
    """A cell with a figure, and its share of the column."""
    if value is None:
        return '<td class="number" data-value="-1" title="not known">-</td>'
    shown = _seconds(value) if unit == "s" else report.figure(round(value), "count")
    share = f"<small>{percent(value, whole)}</small>" if whole > 0 else ""
    part = f'<span class="part">{_bar(value / whole)}</span>' if whole > 0 else ""
    return f'<td class="number" data-value="{value!r}">{shown} {share}{part}</td>'


def _causes(profile: Profile, colors: dict[str, int]) -> str:
    columns = (
        ("shootdowns", "shootdowns", "count"),
        ("faults", "faults", "count"),
        ("calls", "calls", "count"),
        ("cpu_s", "CPU time", "s"),
    )
    if not profile.causes:
        return "<p>No cause was recorded.</p>"
    wholes = {key: sum(getattr(cause, key) or 0 for cause in profile.causes) for key, *_ in columns}
    whole_cpu = (profile.value("user_s") or 0) + (profile.value("system_s") or 0)
    # Of the program's CPU time, which has more than what the causes took; samples may overshoot it.
    wholes["cpu_s"] = max(whole_cpu, wholes["cpu_s"])
    rows = []
    order = sorted(
        profile.causes,
        key=lambda cause: (
            cause.key == "other",
            *(-(getattr(cause, key) or 0) for key in ("shootdowns", "cpu_s", "calls", "faults")),
        ),
    )
    for cause in order:
        cells = "".join(_measure(getattr(cause, key), wholes[key], unit) for key, _, unit in columns)
        name = (
            "all else, the program's own work too"
            if cause.key == "other"
            else CAUSES.get(cause.key, cause.key)
        )
        dot = f'<span class="dot" style="background:var(--c{colors.get(cause.key, html_data.OTHER)})"></span>'
        rows.append(f'<tr><td data-value="{_text(name)}">{dot}{_text(name)}</td>{cells}</tr>')
    headings = _heading("cause", number=False) + "".join(_heading(name) for _, name, _ in columns)
    return (
        '<div class="wide" tabindex="0" role="region" aria-labelledby="h-causes">'
        f'<table class="sortable" id="causes"><thead><tr>{headings}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        '<p class="quiet">Shares of CPU time are of the program\'s; '
        "other shares are of their column. A dash means not known.</p>"
    )


def _plots(data: html_data.Data, library: bool) -> str:
    panels = data["panels"]
    if not panels:
        return "<p>Nothing was recorded over time: the program was too short, or nothing happened.</p>"
    if not library:
        return "<p>Plots need Python's package plotly where the page is written: pip install plotly.</p>"
    # The height that plots.js gives it: the page stays put when it is drawn.
    height = html_data.PANEL_PX * len(panels) + html_data.AXIS_PX
    return (
        f'<div class="legend" id="series">{_legend(panels)}</div>'
        f'<div id="plots" class="plot" style="height:{height}px" role="img" aria-label="Curves over time: '
        f'{_text(", ".join(panel["title"] for panel in panels))}"></div>'
        '<p class="quiet">All share one time axis. Drag across to zoom in time, double-click to come back; '
        "names switch curves off and on.</p><noscript><p>The plots need JavaScript.</p></noscript>"
    )


def _legend(panels: Sequence[html_data.Data]) -> str:
    """The page's own and not plotly's: it wraps as text does. Each name switches its curves."""
    groups: dict[str, dict[str, int]] = {}
    for panel in panels:
        for trace in panel["traces"]:
            groups.setdefault(trace["group"], {})[trace["name"]] = trace["color"]
    return "".join(
        f'<span class="group">{_text(group)}: '
        + "".join(
            f'<button type="button" aria-pressed="true" data-group="{_text(group)}" '
            f'data-name="{_text(name)}">'
            f'<span class="dot" style="background:var(--c{color})"></span>{_text(name)}</button>'
            for name, color in names.items()
        )
        + "</span>"
        for group, names in groups.items()
    )


def _where(profile: Profile) -> str:
    if not profile.stacks:
        return "<p>No stacks were recorded.</p>"
    present = {stack.kind for stack in profile.stacks}
    chosen = next(kind for kind in KINDS if kind in present)
    kinds = []
    for kind, words in KINDS.items():
        state = (" checked" if kind == chosen else "") + ("" if kind in present else " disabled")
        title = "" if kind in present else ' title="no stacks of these were recorded"'
        kinds.append(
            f'<label{title}><input type="radio" name="kind" value="{kind}"{state}>'
            f"<span>{_text(words.title)}</span></label>"
        )
    depth = 1 + max(len(stack.frames) for stack in profile.stacks)
    height = min(html_data.FLAME_MOST_PX, depth * html_data.ROW_PX + 2)
    tables = "".join(_stacks(profile, kind, kind == chosen) for kind in KINDS if kind in present)
    template = Template(_asset("flame.html"))
    return template.substitute(kinds="".join(kinds), height=height, stacks=tables)


def _stacks(profile: Profile, kind: str, shown: bool) -> str:
    words = KINDS[kind]
    stacks = sorted((s for s in profile.stacks if s.kind == kind), key=lambda s: s.weight, reverse=True)
    whole = sum(stack.weight for stack in stacks)
    first = stacks[:_STACKS_SHOWN]
    rows = "".join(_stack(profile.frames, stack, whole) for stack in first)
    held = percent(sum(stack.weight for stack in first), whole)
    extent = (
        f"All {len(stacks):,} stacks."
        if len(first) == len(stacks)
        else f"The heaviest {len(first)} of {len(stacks):,} stacks: {held} of {words.noun}."
    )
    if len(stacks) == 1:
        extent = "The only stack."
    headings = "".join((_heading(words.noun), _heading("share"), _heading("cause", number=False)))
    return (
        f'<div class="stacks" data-kind="{kind}"{"" if shown else " hidden"}>'
        f'<h3>Top stacks: {_text(words.noun)}</h3><p class="quiet">{extent} '
        "Weights are estimates from samples. Click a stack for all its functions.</p>"
        f'<table class="sortable"><thead><tr>{headings}'
        '<th scope="col">innermost function, and its callers</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _stack(frames: Sequence[Frame], stack: Stack, whole: float) -> str:
    inner_first = [frames[index] for index in reversed(stack.frames)]
    # How the kernel did it is seldom what a reader can change: the program's own functions come first.
    own = [frame for frame in inner_first if not frame.kernel] or inner_first
    # A function that calls itself is named once.
    names = [name for name, _ in groupby(html_data.short(frame.function) for frame in own)]
    if len(names) > _FUNCTIONS_IN_A_SUMMARY:
        names[_FUNCTIONS_IN_A_SUMMARY:] = ["…"]
    items = "".join(_frame(frame) for frame in inner_first)
    number = amount(stack.kind, stack.weight)
    samples = f"{stack.samples:,} sample{'' if stack.samples == 1 else 's'}"
    cause = stack.cause if stack.kind == CALL else CAUSES.get(stack.cause, stack.cause)
    return (
        f'<tr><td class="number" data-value="{stack.weight!r}">{number}</td>'
        f'<td class="number" data-value="{stack.weight!r}">{percent(stack.weight, whole)}</td>'
        f'<td class="cause" data-value="{_text(cause)}">{_text(cause)}</td>'
        f'<td><details><summary class="mono">{_text(" ← ".join(names)) or "(no functions known)"}</summary>'
        f'<p class="quiet">{samples}</p><ol>{items}</ol></details></td></tr>'
    )


def _frame(frame: Frame) -> str:
    tags = [name for name, holds in (("kernel", frame.kernel), ("inlined", frame.inlined)) if holds]
    where = ", ".join(filter(None, ["" if frame.kernel else frame.module, frame.source]))
    return (
        f'<li><span class="mono">{_text(frame.function)}</span> '
        + " ".join(f'<span class="tag {tag}">{tag}</span>' for tag in tags)
        + (f' <span class="quiet">{_text(where)}</span>' if where else "")
        + "</li>"
    )


def _cost(profile: Profile) -> str:
    def items(texts: Iterable[str]) -> str:
        return f"<ul>{''.join(f'<li>{_prose(text)}</li>' for text in texts)}</ul>"

    body = "<p>The cost of profiling is not known.</p>"
    if profile.own_share is not None:
        body = f"<p>Profiling took at most {percent(profile.own_share, 1)} of the program's time.</p>"
    if profile.own_cost:
        body = (body if profile.own_share is not None else "") + items(profile.own_cost)
    if profile.notes:
        body += f"<h3>Notes</h3>{items(profile.notes)}"
    if profile.machine:
        rows = "".join(
            f"<tr><td>{_text(str(key).replace('_', ' '))}</td><td>{_text(value)}</td></tr>"
            for key, value in profile.machine.items()
        )
        body += f"<details><summary>The machine</summary><table><tbody>{rows}</tbody></table></details>"
    return body
