"""Whether a comparison has a figure that is worse: beyond a limit, and beyond what chance explains.

The baseline is a document of `calm compare --json`, or the first allocator of the same run. Runs of another
day are not interleaved with today's, so the two are resampled independently; those of one run, by whole
rounds.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from calm.core import documents, machine, report
from calm.core.comparison import Check, ComparisonDocument, Regression, Verdict
from calm.core.errors import USAGE, CalmError
from calm.core.measure import METRIC, Metric
from calm.core.statistics import CONFIDENCE, Ratio, bootstrap_medians, interval, median, percentile

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DEFAULT_METRICS = ("wall_s", "peak_rss_kib", "shootdowns")
# Two runs a side are apart by chance every third time, three every tenth: with fewer nothing is certain.
MIN_ROUNDS = 3
# What a metric must change by, whatever its ratio: from 0 to 3 shootdowns is no regression.
MIN_CHANGE = {"s": 0.002, "KiB": 256.0, "count": 100.0}

_SHORT = {"time": "wall_s", "rss": "peak_rss_kib"}
_PERCENTAGE = re.compile(r"(\d+\.?\d*|\.\d+)\s*(%?)")


def read_limit(value: str) -> float:
    """`5%` or `0.05`, as a fraction. A bare 5 could be 5 % or five times, and is refused."""
    found = _PERCENTAGE.fullmatch(value.strip())
    if not found:
        raise click.BadParameter(f"{value!r} is no percentage: write 5% or 0.05")
    number = float(found[1])
    if found[2]:
        return number / 100
    if number >= 1:
        raise click.BadParameter(f"{value} may mean {value} % or {value} times: write {value}% or a fraction")
    return number


def read_metrics(value: str) -> tuple[Metric, ...]:
    """Metrics by their names in JSON or short names, with commas between them."""
    keys = [_SHORT.get(name.strip(), name.strip()) for name in value.split(",")]
    if unknown := [key for key in keys if key not in METRIC]:
        known = ", ".join([*_SHORT, *METRIC])
        raise click.BadParameter(f"no such metric: {unknown[0]!r} (there are {known})")
    return tuple(METRIC[key] for key in dict.fromkeys(keys))


def complete_metrics(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    before, comma, last = incomplete.rpartition(",")
    return [CompletionItem(before + comma + name) for name in (*_SHORT, *METRIC) if name.startswith(last)]


def same_command(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether they are the same but for the program's folder: each build may have its own."""
    return Path(one[0]).name == Path(other[0]).name and tuple(one[1:]) == tuple(other[1:])


def _alike(key: str, then: object, now: object) -> bool:
    # The memory that the kernel keeps for itself varies from boot to boot.
    if key == "memory_kib" and isinstance(then, int) and isinstance(now, int):
        return abs(then - now) <= 0.02 * now
    return str(then) == str(now)


def differences(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return [
        f"{key} was {then[key]} and is {now[key]}"
        for key in now
        if key in then and not _alike(key, then[key], now[key])
    ]


def read(path: str, labels: Sequence[str], command: Sequence[str], any_command: bool) -> ComparisonDocument:
    """The baseline; prints before the first run what cannot be compared with it."""
    before = documents.read(path, ComparisonDocument)
    if not any(side.runs for side in before.allocators):
        raise CalmError(f"{path} has no complete round to compare with", USAGE)
    if not any_command and not same_command(before.command, command):
        raise CalmError(
            f"{path} is of another command ({shlex.join(before.command)}): write a new one with --json, or "
            "compare all the same with --any-command",
            USAGE,
        )
    names = ", ".join(side.label for side in before.allocators)
    found = {label: before.side(label) for label in labels}
    if not any(found.values()):
        raise CalmError(f"{path} has none of these allocators: it has {names}", USAGE)
    for label, side in found.items():
        if side is None:
            report.warn(f"{label} is not in {path}, which has {names}: not compared")
        elif side.failure:
            report.warn(f"{label} failed in {path}: {side.failure}")
    if differing := differences(before.machine, machine.describe()):
        report.warn(
            f"{path} is from another machine, or from before it changed: {'; '.join(differing)}. This "
            "may explain what differs"
        )
    # Intervals are about the runs' spread, which does not include what slows all runs of a day.
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cpus / 2:
        report.warn(
            f"the load average is {load:.1f} on {cpus} CPUs: what else runs here would count as a change"
        )
    return before


def judge(
    values: Sequence[float], base: Sequence[float], limit: float, floor: float, *, paired: bool = False
) -> tuple[Ratio, Verdict]:
    """The ratio to the base with its interval, and whether it is worse by more than limit and floor.

    Less is better. It is worse if even the interval's lower end is. Paired: both are of the same rounds.
    """
    import numpy as np

    n = min(len(values), len(base))
    middle, bottom = float(np.median(values)), float(np.median(base))
    value = middle / bottom if bottom else (1.0 if middle == 0 else None)
    bound = max(bottom * (1 + limit), bottom + floor)
    above, below = bootstrap_medians(values, base, paired=paired)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(above == below, 1.0, above / below)
    ratio = Ratio(value, *(interval(ratios) if n > 1 else (None, None)), n)
    tail = (1 - CONFIDENCE) / 2
    beyond = percentile(above - np.maximum(below * (1 + limit), below + floor), tail) > 0
    if beyond and n >= MIN_ROUNDS:
        return ratio, Verdict.WORSE
    if middle > bound:
        return ratio, Verdict.UNCERTAIN
    better = n >= MIN_ROUNDS and percentile(above - below, 1 - tail) < -floor
    return ratio, Verdict.BETTER if better else Verdict.WITHIN


def check(
    label: str,
    metric: Metric,
    values: Sequence[float | None],
    base: Sequence[float | None],
    limit: float,
    *,
    paired: bool = False,
) -> Check:
    """Judges one metric of one allocator, by the runs that have it."""
    if paired:
        both = [(a, b) for a, b in zip(values, base, strict=False) if a is not None and b is not None]
        values, base = [a for a, _ in both], [b for _, b in both]
    now = [value for value in values if value is not None]
    then = [value for value in base if value is not None]
    found = Check(label=label, metric=metric.key, before=median(then), now=median(now))
    if found.now is None or found.before is None:
        found.note = "no figure now" if found.now is None else "no figure in the baseline"
        return found
    floor = MIN_CHANGE[metric.unit]
    found.ratio, found.verdict = judge(now, then, limit, floor, paired=paired)
    if found.verdict is Verdict.UNCERTAIN and found.ratio.n < MIN_ROUNDS:
        rounds = "round" if found.ratio.n == 1 else "rounds"
        found.note = f"{found.ratio.n} {rounds}, and no less than {MIN_ROUNDS} can be certain"
    elif found.verdict is Verdict.WITHIN and found.before * (1 + limit) < found.now <= found.before + floor:
        found.note = f"a change below {report.figure(floor, metric.unit)} does not count"
    return found


def compare(
    found: ComparisonDocument,
    path: str | None,
    before: ComparisonDocument | None,
    metrics: Sequence[Metric],
    limit: float | None,
) -> Regression:
    """Checks each allocator against the same one in the file, or without a file against the first one."""
    first, *others = found.allocators
    checks = [
        check(side.label, metric, side.values(metric), base.values(metric), limit or 0.0, paired=not before)
        for metric in metrics
        for side in (found.allocators if before else others)
        if not side.failure and side.runs and (base := before.side(side.label) if before else first)
    ]
    return Regression(against=path or first.label, limit=limit, checks=checks)


def percent(ratio: float | None) -> str:
    """A ratio as the change that it is: +7 %, -2.1 %, x12."""
    if ratio is None:
        return "∞"
    if ratio >= 10:
        return f"x{ratio:,.0f}"
    change = 100 * (ratio - 1)
    text = f"{change:+.0f}" if abs(change) >= 10 else f"{change:+.1f}"
    return f"{text} %" if text not in ("+0.0", "-0.0") else "0 %"


def _change(ratio: Ratio) -> tuple[str, str]:
    """The change and its interval."""
    change = "from none" if ratio.value is None else percent(ratio.value)
    is_known = ratio.low is not None or ratio.high is not None
    return change, f"[{percent(ratio.low)}, {percent(ratio.high)}]" if is_known else ""


def _verdict(each: Check, limit: float | None) -> str:
    if each.verdict is Verdict.UNKNOWN:
        return f"not compared: {each.note}"
    text = each.verdict.value
    if each.verdict is Verdict.WORSE and limit is not None:
        text = f"worse by more than {100 * limit:g} %"
    elif each.verdict is Verdict.WITHIN and limit is None:
        text = "no worse"
    elif each.verdict is Verdict.UNCERTAIN:
        text = f"worse by {' '.join(_change(each.ratio)).removeprefix('+').rstrip()}: not certain"
    return f"{text} ({each.note})" if each.note else text


def _table(found: Regression) -> Table:
    headings = ("", "allocator", "before", "now", "change", f"{CONFIDENCE:.0%} interval", "verdict")
    table = report.table(*headings, right=("before", "now", "change"))
    for each in found.checks:
        metric = METRIC[each.metric]
        known = each.verdict is not Verdict.UNKNOWN
        table.add_row(
            metric.label,
            each.label,
            report.figure(each.before, metric.unit),
            report.figure(each.now, metric.unit),
            *(_change(each.ratio) if known else ("-", "")),
            _verdict(each, found.limit),
            style="bold" if each.verdict is Verdict.WORSE else None,
        )
    return table


def summary(found: Regression) -> str:
    """One line, for a log."""
    verdicts = [each.verdict for each in found.checks]
    rest = [
        f"{verdicts.count(verdict)} {verdict.value}"
        for verdict in (Verdict.BETTER, Verdict.UNCERTAIN, Verdict.UNKNOWN)
        if verdict in verdicts
    ]
    beyond = f" by more than {100 * found.limit:g} %" if found.limit is not None else ""
    worse = [
        f"{each.label}: {METRIC[each.metric].label} {' '.join(_change(each.ratio))}".rstrip()
        for each in found.worse
    ]
    checks = f"{len(verdicts)} checks" if len(verdicts) != 1 else "1 check"
    are = "are" if len(worse) > 1 else "is"
    line = f"{len(worse) or 'none'} of {checks} against {found.against} {are} worse{beyond} for certain"
    word = "" if found.limit is None else "FAIL: " if found.failed else "PASS: "
    line = word + line + (f": {'; '.join(worse)}" if worse else "")
    return f"{line} ({', '.join(rest)})" if rest else line


def print_checks(found: ComparisonDocument, regression: Regression, console: Console) -> None:
    """The table, and the line that a log is searched for."""
    console.print(f"\nagainst {regression.against}:", style="bold")
    report.print_table(console, _table(regression))
    for metric in regression.never_compared:
        console.print(f"{metric.label}: {found.how[metric.key]}", style="dim")
    console.print(summary(regression), style="bold")


def why_kept(before: ComparisonDocument, found: ComparisonDocument, code: int) -> str | None:
    """A run that is worse or incomplete does not replace its baseline: the next run would then pass."""
    if code:
        return "only a run that passes replaces its baseline"
    worse = found.regression.worse if found.regression else []
    if worse:
        return f"{', '.join(_names(worse))} {'is' if len(worse) == 1 else 'are'} worse"
    lost = [side.label for side in before.allocators if not found.side(side.label)]
    checks = found.regression.checks if found.regression else []
    lost += _names(each for each in checks if each.verdict is Verdict.UNKNOWN and each.before is not None)
    return f"this run has no {', no '.join(lost)}" if lost else None


def _names(checks: Iterable[Check]) -> list[str]:
    return [f"{METRIC[each.metric].label} of {each.label}" for each in checks]
