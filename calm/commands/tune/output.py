"""The output of a search: progress while it runs, its report, and its picture."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.commands.tune.search import Budget, Tuning
from calm.commands.tune.space import Point, Setting
from calm.commands.tune.trial import AS_IT_IS
from calm.commands.tune.verdict import MIN_GAIN, MIN_ROUNDS, Verdict, is_gain
from calm.core import plot, report
from calm.core.allocators import GLIBC
from calm.core.progress import Bar
from calm.core.statistics import CONFIDENCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

_PHASES = {
    "first": "running it once, to know how long it takes",
    "search": "searching",
    "front": "measuring the front again",
    "ablation": "removing knobs without effect",
    "refinement": "moving the other knobs",
    "confirmation": "confirming",
}
_LONG = 110


class Progress(Bar):
    """The search's watcher."""

    def __init__(self, budget: Budget) -> None:
        super().__init__(total=1.0)
        self._budget = budget
        self._phase = ""
        self._steps = 0
        self._of: int | None = None
        self._known = {Setting(GLIBC)}

    def phase(self, what: str, total: int | None) -> None:
        self._phase, self._of, self._steps = what, total, 0
        if what != "first" and total != 0:
            of = "" if total is None else f", {total} {'trials' if what == 'search' else 'rounds'}"
            self.say(f"{report.rough_duration(self._budget.elapsed)}: {_PHASES[what]}{of}")
        self._show()

    def step(self, front: Sequence[Point]) -> None:
        self._steps += 1
        if self._phase == "search":
            for setting, seconds, memory in front:
                if setting not in self._known:
                    self.say(
                        f"{report.rough_duration(self._budget.elapsed)}: trial {self._steps}: "
                        f"time {seconds:.2f}, memory {memory:.2f}: {setting.label}"
                    )
            self._known = {Setting(GLIBC), *(point.setting for point in front)}
        self._show()

    def _show(self) -> None:
        elapsed, limit_s = self._budget.elapsed, self._budget.seconds
        done = elapsed / limit_s if limit_s else self._steps / self._of if self._of else 0.0
        left = f"{report.rough_duration(max(0.0, limit_s - elapsed))} left, " if limit_s else ""
        of = "" if self._of is None else f" of {self._of}"
        self.update(min(1.0, done), f"{left}{_PHASES[self._phase]}: {self._steps}{of}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def front_table(result: Tuning) -> "Table":
    """The front and the baseline; then, dim, the settings that were rejected."""
    interval = f"{CONFIDENCE:.0%} interval"
    headings = ("time", interval, "memory", interval, "rounds", "setting")
    table = report.table(*headings, right={"time", "memory", "rounds"}, wrap={"rounds", "setting"})

    def cells(each: Verdict, note: str = "") -> list[str]:
        figures = (*report.ratio(each.time), *report.ratio(each.memory))
        return [*figures, str(each.time.n), each.setting.label + note]

    rows = [((1.0, 1.0), ["1", "", "1", "", "", AS_IT_IS])]
    rows += [(each.point[1:], cells(each)) for each in result.front]
    for _, row in sorted(rows):
        table.add_row(*row)
    for each in sorted(result.rejected, key=lambda each: each.point[1:]):
        few = " (too few rounds)" if each.time.n < MIN_ROUNDS else " (no gain)"
        table.add_row(*cells(each, " (beaten)" if each.gains else few), style="dim")
    return table


def _print_unconfirmed(result: Tuning, console: "Console") -> None:
    """The best settings of the search, if none was measured again."""
    known = result.working
    if known:
        console.print("not confirmed, by single runs of the search:", style="dim")
    allows, cost = result.preference.allows, result.preference.cost
    for point in sorted(known, key=lambda each: (not allows(each), cost(each)))[:3]:
        text = f"  time {point.time:.2f}, memory {point.memory:.2f}: {point.setting.label}"
        console.print(text, soft_wrap=True)


def _print_over_limit(result: Tuning, console: "Console") -> None:
    """The best setting that gains, but takes more than is allowed: the limit is the user's to move."""
    preference, chosen = result.preference, result.recommendation
    least = preference.cost(chosen.point) if chosen else 1.0
    points = [each.point for each in (*result.front, *result.rejected)] or result.working
    beyond = [
        each
        for each in points
        if not preference.allows(each)
        and preference.cost(each) <= least - MIN_GAIN
        and each.memory < math.inf
    ]
    if not beyond:
        return
    best = min(beyond, key=preference.cost)
    limit = math.ceil(best.memory * 20 + 1) / 20
    way = f"; --memory-limit {limit:g} allows it" if best.memory > preference.memory_limit else ""
    console.print(
        f"beyond the limit: time {best.time:.2f}, memory {best.memory:.2f}: {best.setting.label}{way}",
        soft_wrap=True,
    )


def print_report(result: Tuning, notes: Sequence[str], console: "Console") -> None:
    console.print(shlex.join(result.command), style="bold", soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)
    failed = sum(1 for each in result.tried if each.failure)
    console.print(
        f"{_count(result.trials, 'trial')} of {_count(len(result.tried), 'setting')} in "
        f"{report.rough_duration(result.wall_s)}"
        + (f"; {_count(failed, 'setting')} made the program fail" if failed else "")
        + f"; ratios to {AS_IT_IS}, memory: {result.memory} RSS\n",
        soft_wrap=True,
    )
    if result.front or result.rejected:
        report.print_table(console, front_table(result))
    else:
        _print_unconfirmed(result, console)
    console.print()
    chosen = result.recommendation
    if chosen is None:
        count = result.confirmation.time.n if result.confirmation else 0
        unsure = result.interrupted_by or result.failure or (result.chosen and count < MIN_ROUNDS)
        beyond = any(result.preference.cost(each) <= 1 - MIN_GAIN for each in result.working)
        nothing = "nothing is recommended" if unsure or beyond else "nothing helps"
        console.print(f"{nothing}: {result.reason}", style="bold", soft_wrap=True)
        _print_over_limit(result, console)
        if result.preference.by == "time" and any(is_gain(each.memory) for each in result.front):
            console.print("some of the front take less memory: see --prefer memory", soft_wrap=True)
        return
    console.print(f"recommended: {chosen.setting.label}", style="bold", soft_wrap=True)
    (time, time_interval), (memory, memory_interval) = map(report.ratio, (chosen.time, chosen.memory))
    console.print(
        f"  {time} of the time ({CONFIDENCE:.0%} interval {time_interval}) and "
        f"{memory} of the {result.memory} RSS ({memory_interval}), "
        f"by {chosen.time.n} fresh rounds of this setting and of none in turn",
        soft_wrap=True,
    )
    console.print(f"  chosen as {result.preference.words}", soft_wrap=True)
    if result.removed:
        removed = ", ".join(each.removeprefix("glibc.malloc.") for each in result.removed)
        console.print(f"  left out, as nothing is lost without: {removed}", soft_wrap=True)
    elif len(chosen.setting.values) > 1 and not result.ablated:
        count = len(chosen.setting.values)
        text = f"there was no time to try it without each of its {count} knobs: some may do nothing"
        console.print(f"  {text}", soft_wrap=True)
    if result.refined_from:
        console.print(f"  found by small steps from {result.refined_from.label}", soft_wrap=True)
    _print_over_limit(result, console)
    console.print(f"\n{chosen.line}", soft_wrap=True)


def _short(text: str) -> str:
    return text if len(text) <= _LONG else text[: _LONG - 1] + "…"


def _point(plane: "Axes", found: Verdict, marker: str, label: str, **style: Any) -> None:  # noqa: ANN401
    _, time, memory = found.point
    errors = [
        [[max(0.0, value - (ratio.low or value))], [max(0.0, (ratio.high or value) - value)]]
        for value, ratio in ((time, found.time), (memory, found.memory))
    ]
    plane.errorbar([time], [memory], errors[1], errors[0], marker, capsize=2, label=label, **style)


def draw(path: Path, result: Tuning) -> None:
    figure, plane = plot.pyplot().subplots(figsize=(8, 6.6), layout="constrained")
    figure.suptitle(_short(shlex.join(result.command)), fontsize=10)
    tried = result.working
    for number, allocator in enumerate(sorted({each.setting.allocator for each in tried})):
        own = [each for each in tried if each.setting.allocator == allocator]
        times, memories = [each.time for each in own], [each.memory for each in own]
        label = f"{allocator}, tried"
        plane.scatter(times, memories, s=16, alpha=0.4, linewidths=0, color=f"C{number}", label=label)
    plane.scatter([1], [1], s=90, marker="s", color="#444444", label=AS_IT_IS, zorder=3)
    # The labels are long, and points of a front are close: the legend has them, by number.
    for number, each in enumerate(result.front, 1):
        label = f"{number}: {_short(each.setting.label)}"
        _point(plane, each, "o", label, color="black", markersize=5, zorder=4)
        plane.annotate(
            str(number), each.point[1:], (5, 5), textcoords="offset points", fontsize=9, fontweight="bold"
        )
    if (best := result.recommendation) is not None:
        label = f"recommended: {_short(best.setting.label)}"
        _point(plane, best, "*", label, color="#D55E00", markersize=12, zorder=5)
    plane.axvline(1, color="#bbbbbb", linewidth=0.8, zorder=0)
    plane.axhline(1, color="#bbbbbb", linewidth=0.8, zorder=0)
    plane.set_xscale("log")
    plane.set_yscale("log")
    plane.set(xlabel="time, ratio", ylabel=f"{result.memory} RSS, ratio")
    for axis in (plane.xaxis, plane.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
        axis.set_tick_params(which="both", labelsize=8)
    plane.grid(alpha=0.25)
    figure.legend(loc="outside lower left", fontsize=7, frameon=False)
    plot.save(figure, path)
