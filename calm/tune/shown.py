"""What a search looks like: while it runs, and when it is over."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from calm import report
from calm.allocators import GLIBC
from calm.statistics import CONFIDENCE, Ratio
from calm.tune.search import Budget, Outcome
from calm.tune.space import Setting
from calm.tune.verdict import ROUNDS_LEAST, Point, Preference, Verdict, is_gain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ROWS = 6
_EACH_S = 0.1
_WORDS = {
    "first": "running it once, to know how long it takes",
    "search": "searching",
    "front": "running the front anew",
    "ablation": "leaving out what does not matter",
    "refinement": "moving what is left",
    "confirmation": "confirming",
}
BASELINE = "as it is now"


def name(setting: Setting) -> str:
    """The baseline is what the user has."""
    return BASELINE if setting == Setting(GLIBC) else setting.label


def words(seconds: float) -> str:
    """2 min 5 s, or 40 s."""
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def _so_many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


class Shown:
    """A bar and the front on a terminal; elsewhere a line for each phase and each change of the front."""

    def __init__(self, budget: Budget) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn

        self._budget = budget
        self._terminal = sys.stderr.isatty()
        self._console = report.console(sys.stderr)
        # Without a thread of its own, which would take CPU time from what is measured.
        self._bar = Progress(
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=1.0)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._phase = ""
        self._total: int | None = None
        self._steps = 0
        self._front: list[Point] = []
        self._refreshed = 0.0

    def __enter__(self) -> "Shown":
        if self._terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._live.stop()

    def phase(self, what: str, total: int | None) -> None:
        """See search.Watcher."""
        self._phase, self._total, self._steps = what, total, 0
        if self._terminal:
            self._draw(self._front, now=True)
        elif what != "first" and total != 0:
            of = "" if total is None else f", {total} {'trials' if what == 'search' else 'rounds'}"
            click.echo(f"{words(self._budget.elapsed)}: {_WORDS[what]}{of}", err=True)

    def step(self, front: Sequence[Point]) -> None:
        """See search.Watcher."""
        self._steps += 1
        known = [each[0] for each in self._front]
        self._front = list(front)
        if self._terminal:
            self._draw(front)
        elif self._phase == "search":
            for setting, seconds, memory in front:
                if setting not in known and setting != Setting(GLIBC):
                    click.echo(
                        f"{words(self._budget.elapsed)}: trial {self._steps}: "
                        f"time {seconds:.2f}, memory {memory:.2f}: {setting.label}",
                        err=True,
                    )

    def _draw(self, front: Sequence[Point], now: bool = False) -> None:
        if time.monotonic() - self._refreshed < _EACH_S and not now:
            return
        self._refreshed = time.monotonic()
        budget = self._budget
        if budget.seconds is not None:
            done = budget.elapsed / budget.seconds
            left = f"{words(max(0.0, budget.seconds - budget.elapsed))} left"
        else:
            done = self._steps / self._total if self._total else 0.0
            left = words(budget.elapsed)
        of = f" of {self._total}" if self._total is not None else ""
        self._bar.update(
            self._task,
            completed=min(1.0, done),
            description=f"{left}, {_WORDS[self._phase]}: {self._steps}{of}",
        )
        from rich.console import Group

        table = report.table()
        table.add_column("time", justify="right")
        table.add_column("memory", justify="right")
        table.add_column("the front by now, not confirmed", overflow="ellipsis", no_wrap=True)
        for setting, seconds, memory in front[:_ROWS]:
            table.add_row(f"{seconds:.2f}", f"{memory:.2f}", name(setting))
        shown = Group(self._bar.get_renderable(), table) if front else self._bar.get_renderable()
        self._live.update(shown, refresh=True)

    def say(self, line: str) -> None:
        """See search.Watcher."""
        if self._terminal:
            self._live.console.print(line, soft_wrap=True)
        else:
            click.echo(line, err=True)


def _interval(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return "-"
    return f"{ratio.low:.3g} to {ratio.high:.3g}"


def _value(ratio: Ratio) -> str:
    return "-" if ratio.value is None else f"{ratio.value:.3g}"


def front_table(outcome: Outcome) -> "Table":
    """The front and the baseline; then, dim, what was run anew too and turned out to be no better."""
    table = report.table()
    interval = f"{CONFIDENCE:.0%} interval"
    for heading, justify in (("time", "right"), (interval, "left"), ("memory", "right"), (interval, "left")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("rounds", justify="right")
    table.add_column("setting")

    def cells(each: Verdict, note: str = "") -> list[str]:
        figures = [_value(each.time), _interval(each.time), _value(each.memory), _interval(each.memory)]
        return [*figures, str(each.time.n), each.setting.label + note]

    rows = [((1.0, 1.0), ["1", "", "1", "", "", BASELINE])]
    rows += [(each.point, cells(each)) for each in outcome.front]
    for _, row in sorted(rows):
        table.add_row(*row)
    for each in sorted(outcome.dropped, key=lambda each: each.point):
        few = " (too few rounds)" if each.time.n < ROUNDS_LEAST else " (no gain)"
        note = " (beaten)" if each.gains else few
        table.add_row(*cells(each, note), style="dim")
    return table


def gain(verdict: Verdict, memory_label: str) -> str:
    """What the fresh runs say of the recommended setting, in a sentence."""
    return (
        f"{_value(verdict.time)} of the time ({CONFIDENCE:.0%} interval {_interval(verdict.time)}) and "
        f"{_value(verdict.memory)} of the {memory_label} ({_interval(verdict.memory)}), "
        f"by {verdict.time.n} fresh rounds of this setting and of none in turn"
    )


def _searched(outcome: Outcome, preference: Preference, console: "Console") -> None:
    """Where nothing was run anew: what the search saw, by its own name."""
    known = [each for each in outcome.tried.values() if each.looks and each.failure is None]
    best = sorted(
        known,
        key=lambda each: (
            not preference.allows(each.time, each.memory),
            preference.cost(each.time, each.memory),
        ),
    )[:3]
    if best:
        console.print("not confirmed, as single runs of the search have it:", style="dim")
    for each in best:
        console.print(
            f"  time {each.time:.2f}, memory {each.memory:.2f}: {each.setting.label}", soft_wrap=True
        )


def show(
    outcome: Outcome,
    budget: Budget,
    preference: Preference,
    memory_label: str,
    line: str,
    console: "Console",
) -> None:
    """The front, the one setting to take, and the line to type."""
    failed = sum(1 for each in outcome.tried.values() if each.failure)
    console.print(
        f"{_so_many(outcome.trials, 'trial')} of {_so_many(len(outcome.tried), 'setting')} in "
        f"{words(budget.elapsed)}"
        + (f"; {_so_many(failed, 'setting')} made the program fail" if failed else "")
        + f"; ratios to the program {BASELINE}, memory: {memory_label}",
        soft_wrap=True,
    )
    console.print()
    if outcome.front or outcome.dropped:
        report.print_table(console, front_table(outcome))
    else:
        _searched(outcome, preference, console)
    console.print()
    chosen = outcome.recommended
    if chosen is None:
        known = outcome.stopped_by is None and outcome.error is None and not outcome.unconfirmed
        nothing = "nothing helps" if known else "nothing is recommended"
        console.print(f"{nothing}: {outcome.reason}", style="bold", soft_wrap=True)
        _mention_memory(outcome, preference, console)
        return
    console.print(f"recommended: {chosen.setting.label}", style="bold", soft_wrap=True)
    console.print(f"  {gain(chosen, memory_label)}", soft_wrap=True)
    console.print(f"  chosen as {preference.words}", soft_wrap=True)
    if outcome.unneeded:
        unneeded = ", ".join(each.removeprefix("glibc.malloc.") for each in outcome.unneeded)
        console.print(f"  left out, as nothing is lost without: {unneeded}", soft_wrap=True)
    if outcome.refined_from:
        console.print(f"  found by small steps from {outcome.refined_from.label}", soft_wrap=True)
    console.print()
    console.print(line, soft_wrap=True)


def _mention_memory(outcome: Outcome, preference: Preference, console: "Console") -> None:
    """Who asked for time may still like to know what could be saved."""
    if preference.by == "time" and any(is_gain(each.memory) for each in outcome.front):
        console.print("some of the front take less memory: --prefer memory chooses by that", soft_wrap=True)
