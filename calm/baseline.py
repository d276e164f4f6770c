"""Whether a comparison found something worse than before: beyond a limit, and beyond what chance explains.

Before is what `calm compare --json` wrote once, or the first allocator of the same run. Runs of another day
are not interleaved with today's, so the two are drawn on their own; those of one run by whole rounds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from calm import report
from calm.errors import USAGE, CalmError
from calm.measure import METRIC, SYSCALLS, Metric
from calm.statistics import CONFIDENCE, RESAMPLES, SEED, Ratio, median

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table

# The exit code that says: something is worse.
WORSE_EXIT = 3
DEFAULT_METRICS = ("wall_s", "peak_rss_kib", "shootdowns_begun")
# Two runs a side are apart by chance every third time, three every tenth: with fewer nothing is certain.
LEAST_ROUNDS = 3
# What a metric must change by at the least, whatever its ratio: from 0 to 3 shootdowns is no regression.
FLOORS = {"s": 0.002, "KiB": 256.0, "count": 100.0}
TOOL, FORMAT = "calm compare", 1

_SHORT = {"time": "wall_s", "rss": "peak_rss_kib", "shootdowns": "shootdowns_begun", "faults": "minor_faults"}
_PERCENTAGE = re.compile(r"(\d+\.?\d*|\.\d+)\s*(%?)")


def read_limit(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """`5%` or `0.05`, as a fraction. A bare 5 could be 5 % or five times, and is asked about."""
    if value is None:
        return None
    found = _PERCENTAGE.fullmatch(value.strip())
    if not found:
        raise click.BadParameter(f"{value!r} is no percentage: write 5% or 0.05")
    number = float(found[1])
    if found[2]:
        return number / 100
    if number >= 1:
        raise click.BadParameter(f"{value} may mean {value} % or {value} times: write {value}% or a fraction")
    return number


def read_metrics(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> tuple[Metric, ...] | None:
    """Metrics by their keys or short names, with commas between them; each once, in the order given."""
    if value is None:
        return None
    keys = [_SHORT.get(name.strip(), name.strip()) for name in value.split(",")]
    if unknown := [key for key in keys if key not in METRIC]:
        raise click.BadParameter(
            f"no such metric: {unknown[0]!r} (there are {', '.join([*_SHORT, *METRIC])})"
        )
    return tuple(METRIC[key] for key in dict.fromkeys(keys))


def complete_metrics(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For a shell: the last one of a list."""
    before, comma, last = incomplete.rpartition(",")
    return [CompletionItem(before + comma + name) for name in (*_SHORT, *METRIC) if name.startswith(last)]


class Verdict(StrEnum):
    """What is said of one metric under one allocator."""

    WORSE = "worse"
    UNCERTAIN = "not certain"
    WITHIN = "within the limit"
    BETTER = "better"
    UNKNOWN = "not compared"


@dataclass(frozen=True)
class Check:
    """One metric under one allocator: before, now, and what is to be said of it."""

    label: str
    metric: Metric
    base: float | None
    now: float | None
    ratio: Ratio
    verdict: Verdict
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields = {name: getattr(self, name) for name in ("label", "base", "now", "note")}
        return fields | {
            "metric": self.metric.key,
            "verdict": self.verdict.value,
            "ratio": asdict(self.ratio),
        }


@dataclass(frozen=True)
class Earlier:
    """One allocator's runs, as a file has them."""

    failure: str | None
    runs: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Baseline:
    """An earlier comparison."""

    path: str
    command: tuple[str, ...]
    machine: Mapping[str, Any] | None
    uncounted: frozenset[str]
    """Metrics that no run of it has, whatever number may stand there."""
    sides: Mapping[str, Earlier]

    def values(self, label: str, metric: Metric) -> list[float | None]:
        """One figure of every run."""
        if metric.key in self.uncounted:
            return []
        return [_figure(run, metric.key) for run in self.sides[label].runs]


def _figure(run: Mapping[str, Any], key: str) -> float | None:
    counter = run["counters"].get(key)
    value = counter["value"] if counter is not None else run.get(key)
    if isinstance(value, bool) or (value is not None and not 0 <= value < math.inf):
        raise ValueError(f"{key} is {value}")
    return None if value is None else float(value)


def _whole(path: str, data: Mapping[str, Any]) -> Baseline:
    sides = {}
    for side in data["allocators"]:
        runs = tuple(side["runs"])
        for run in runs:
            for key in METRIC:
                _figure(run, key)
        sides[str(side["label"])] = Earlier(side["failure"], runs)
    machine, command = data.get("machine"), data["command"]
    if not isinstance(command, list) or not command:
        raise ValueError(f"command is {command!r}")
    return Baseline(
        path,
        tuple(map(str, command)),
        dict(machine) if machine is not None else None,
        frozenset(key for key, text in data["how"].items() if text.startswith("not counted: ")),
        sides,
    )


def load(path: str) -> Baseline:
    """Reads what `calm compare --json` wrote; older files, which do not name the machine, too."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise CalmError(f"cannot read the baseline {path}: {error.strerror}", USAGE) from error
    except (ValueError, RecursionError) as error:
        raise CalmError(f"{path} is no baseline: it is no JSON", USAGE) from error
    if not isinstance(data, dict) or data.get("tool", TOOL) != TOOL or "rounds_wanted" not in data:
        raise CalmError(f"{path} is no baseline: `calm compare --json` did not write it", USAGE)
    if data.get("format", FORMAT) != FORMAT:
        raise CalmError(f"{path} has format {data['format']!r}, and this calm reads {FORMAT}", USAGE)
    try:
        baseline = _whole(path, data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CalmError(f"{path} is not a whole baseline: {type(error).__name__}: {error}", USAGE) from error
    if not any(side.runs for side in baseline.sides.values()):
        raise CalmError(f"{path} has no complete round to compare with", USAGE)
    return baseline


def same_command(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether they say the same, wherever the program lies: each build may have a folder of its own."""
    return Path(one[0]).name == Path(other[0]).name and tuple(one[1:]) == tuple(other[1:])


def _alike(key: str, then: object, now: object) -> bool:
    # Older files say "glibc 2.36". What the kernel keeps of the memory for itself varies from boot to boot.
    if key == "memory_kib" and isinstance(then, int) and isinstance(now, int):
        return abs(then - now) <= 0.02 * now
    return str(then).removeprefix("glibc ") == str(now)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not the same about two machines; what one of them does not tell is not known to differ."""
    return [
        f"{key} was {then[key]} and is {now[key]}"
        for key in now
        if key in then and not _alike(key, then[key], now[key])
    ]


def _draw(
    values: Sequence[float], base: Sequence[float], paired: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Medians of many draws of both sides' rounds."""
    import numpy as np

    generator = np.random.default_rng(SEED)
    draws = generator.integers(0, len(values), size=(RESAMPLES, len(values)))
    others = draws if paired else generator.integers(0, len(base), size=(RESAMPLES, len(base)))
    above = np.median(np.asarray(values, dtype=float)[draws], axis=1)
    below = np.median(np.asarray(base, dtype=float)[others], axis=1)
    return above, below


def _end(values: NDArray[np.float64], share: float) -> float:
    # Of the values that occur, not between them: one may be infinite.
    import numpy as np

    return float(np.quantile(values, share, method="inverted_cdf"))


def judge(
    values: Sequence[float], base: Sequence[float], limit: float, floor: float, *, paired: bool = False
) -> tuple[Ratio, Verdict]:
    """The ratio to the base with its interval, and whether it is worse by more than limit and floor.

    Worse is what even the interval's lower end says. Less is better. Paired: both are of the same rounds.
    """
    import numpy as np

    n = min(len(values), len(base))
    middle, bottom = float(np.median(values)), float(np.median(base))
    value = middle / bottom if bottom else (1.0 if middle == 0 else None)
    bound = max(bottom * (1 + limit), bottom + floor)
    if n < 2:
        return Ratio(value, None, None, n), Verdict.UNCERTAIN if middle > bound else Verdict.WITHIN
    above, below = _draw(values, base, paired)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(above == below, 1.0, above / below)
    tail = (1 - CONFIDENCE) / 2
    low, high = _end(ratios, tail), _end(ratios, 1 - tail)
    ratio = Ratio(value, low if np.isfinite(low) else None, high if np.isfinite(high) else None, n)
    beyond = _end(above - np.maximum(below * (1 + limit), below + floor), tail) > 0
    if beyond and n >= LEAST_ROUNDS:
        return ratio, Verdict.WORSE
    if middle > bound:
        return ratio, Verdict.UNCERTAIN
    better = n >= LEAST_ROUNDS and _end(above - below, 1 - tail) < -floor
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
    """Judges one metric under one allocator, by the runs that have it."""
    if paired:
        both = [(a, b) for a, b in zip(values, base, strict=False) if a is not None and b is not None]
        values, base = [a for a, _ in both], [b for _, b in both]
    now = [value for value in values if value is not None]
    then = [value for value in base if value is not None]
    if not now or not then:
        missing = "no figure now" if not now else "no figure in the baseline"
        return Check(
            label,
            metric,
            median(then),
            median(now),
            Ratio(None, None, None, 0),
            Verdict.UNKNOWN,
            missing,
        )
    ratio, verdict = judge(now, then, limit, FLOORS[metric.unit], paired=paired)
    note = ""
    if verdict is Verdict.UNCERTAIN and ratio.n < LEAST_ROUNDS:
        rounds = "round" if ratio.n == 1 else "rounds"
        note = f"{ratio.n} {rounds}, and no less than {LEAST_ROUNDS} can be certain"
    elif verdict is Verdict.WITHIN and ratio.value != 1 and _is_small(now, then, limit, metric):
        note = f"a change below {report.figure(FLOORS[metric.unit], metric.unit)} counts for nothing"
    return Check(label, metric, median(then), median(now), ratio, verdict, note)


def _is_small(now: Sequence[float], then: Sequence[float], limit: float, metric: Metric) -> bool:
    """Beyond the limit, but below the floor."""
    import numpy as np

    middle, bottom = float(np.median(now)), float(np.median(then))
    return middle > bottom * (1 + limit) and middle - bottom <= FLOORS[metric.unit]


def percent(ratio: float | None) -> str:
    """A ratio as the change that it is: +7 %, -2.1 %, x12."""
    if ratio is None:
        return "∞"
    if ratio >= 10:
        return f"x{ratio:,.0f}"
    change = 100 * (ratio - 1)
    text = f"{change:+.0f}" if abs(change) >= 10 else f"{change:+.1f}"
    return f"{text} %" if text not in ("+0.0", "-0.0") else "0 %"


def _change(ratio: Ratio) -> str:
    if ratio.value is None:
        return "from none"
    return percent(ratio.value)


def _interval(ratio: Ratio) -> str:
    if ratio.low is None and ratio.high is None:
        return ""
    return f"[{percent(ratio.low)}, {percent(ratio.high)}]"


@dataclass(frozen=True)
class Outcome:
    """All checks, and what to do about them."""

    checks: tuple[Check, ...]
    limit: float | None
    """None: nothing is to fail."""
    against: str

    @property
    def worse(self) -> list[Check]:
        """What ends the command with a code of its own."""
        return [each for each in self.checks if each.verdict is Verdict.WORSE]

    @property
    def failed(self) -> bool:
        """Something is worse than what is allowed."""
        return self.limit is not None and bool(self.worse)

    @property
    def never_compared(self) -> list[Metric]:
        """Metrics that could be compared under no allocator at all."""
        known = {each.metric.key for each in self.checks if each.verdict is not Verdict.UNKNOWN}
        return [
            metric
            for metric in {each.metric.key: each.metric for each in self.checks}.values()
            if metric.key not in known
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "against": self.against,
            "limit": self.limit,
            "failed": self.failed,
            "checks": [each.as_dict() for each in self.checks],
        }

    def _said(self, each: Check) -> str:
        if each.verdict is Verdict.UNKNOWN:
            return f"not compared: {each.note}"
        text = each.verdict.value
        if each.verdict is Verdict.WORSE and self.limit is not None:
            text = f"worse by more than {100 * self.limit:g} %"
        elif each.verdict is Verdict.WITHIN and self.limit is None:
            text = "no worse"
        elif each.verdict is Verdict.UNCERTAIN:
            change = _change(each.ratio).removeprefix("+")
            text = f"worse by {change} {_interval(each.ratio)}".rstrip() + ": not certain"
        return f"{text} ({each.note})" if each.note else text

    def table(self) -> Table:
        """Each check."""
        table = report.table()
        table.add_column("", no_wrap=True)
        table.add_column("allocator", no_wrap=True)
        for heading in ("before", "now", "change"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column(f"{CONFIDENCE:.0%} interval", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for each in self.checks:
            unit = each.metric.unit
            known = each.verdict is not Verdict.UNKNOWN
            table.add_row(
                each.metric.label,
                each.label,
                report.figure(each.base, unit),
                report.figure(each.now, unit),
                _change(each.ratio) if known else "-",
                _interval(each.ratio) if known else "",
                self._said(each),
                style="bold" if each.verdict is Verdict.WORSE else None,
            )
        return table

    def summary(self) -> str:
        """One line, for a log."""
        total = len(self.checks)
        counts = {verdict: sum(each.verdict is verdict for each in self.checks) for verdict in Verdict}
        rest = [
            f"{counts[verdict]} {verdict.value}"
            for verdict in (Verdict.BETTER, Verdict.UNCERTAIN, Verdict.UNKNOWN)
            if counts[verdict]
        ]
        beyond = f" by more than {100 * self.limit:g} %" if self.limit is not None else ""
        told = [
            " ".join((f"{each.label}:", each.metric.label, _change(each.ratio), _interval(each.ratio)))
            for each in self.worse
        ]
        checks = f"{total} checks" if total != 1 else "1 check"
        are = "are" if len(told) > 1 else "is"
        found = f"{len(told) or 'none'} of {checks} against {self.against} {are} worse{beyond} for certain"
        word = "" if self.limit is None else "FAIL: " if self.failed else "PASS: "
        line = word + found + (f": {'; '.join(told)}" if told else "")
        return f"{line} ({', '.join(rest)})" if rest else line


def needs_syscalls(metrics: Sequence[Metric]) -> list[str]:
    """Those that are only counted if asked for."""
    return [metric.key for metric in metrics if metric.key in SYSCALLS]
