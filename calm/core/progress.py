"""Progress on standard error: a bar on a terminal, lines elsewhere.

The bar has no thread of its own, which would take CPU time from what is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import click

from calm.core import report
from calm.core.statistics import median

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """Shows how far something is, within a `with` block: after two seconds, and at most 10 times a second."""

    after_s, each_s = 2.0, 0.1

    def __init__(self, total: float | None = None, what: str = "") -> None:
        self._terminal = sys.stderr.isatty()
        self._what = what
        self._total = total
        self._done = 0.0
        self._begin = time.monotonic()
        self._printed = 0.0
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def update(self, done: float | None = None, what: str | None = None, total: float | None = None) -> None:
        """Tells where it is; cheap enough to be called at every step."""
        self._done = self._done if done is None else done
        self._what = self._what if what is None else what
        self._total = self._total if total is None else total
        now = time.monotonic()
        if not self._terminal or now - self._begin < self.after_s or now - self._printed < self.each_s:
            return
        self._printed = now
        if self._progress is None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=report.console(sys.stderr, soft_wrap=False),
                auto_refresh=False,
                transient=True,
            )
            self._progress.add_task("", total=self._total)
            self._progress.start()
        self._progress.update(
            self._progress.task_ids[0], completed=self._done, total=self._total, description=self._what
        )
        self._progress.refresh()

    def say(self, line: str) -> None:
        """A line that stays: above the bar, or in the log."""
        if self._progress:
            self._progress.console.print(line, soft_wrap=True)
        else:
            click.echo(line, err=True)


class RoundsBar(Bar):
    """The bar of `rounds.run`; where there is no terminal, a line for each row of each round."""

    after_s = each_s = 0.0

    def __init__(self, lines: bool = True) -> None:
        super().__init__()
        self._lines = lines and not self._terminal
        self._left: dict[tuple[str, str], int] = {}
        self._took: dict[tuple[str, str], list[float]] = {}
        self._rounds = 0
        self._line: list[str] = []
        self._where = ""

    def begin(self, turns: Sequence[tuple[str, str]], rounds: int) -> None:
        """Takes all turns of a round, as row and side, and the number of rounds with the warm-up."""
        self._left, self._rounds = dict.fromkeys(turns, rounds), rounds - 1
        self._took = {turn: [] for turn in turns}
        self._refresh()

    @property
    def time_left(self) -> str:
        """By the medians of the same runs before; a lower bound as long as one of them was not run yet."""
        known = [(median(self._took[turn]), left) for turn, left in self._left.items() if left]
        seconds = sum(each * left for each, left in known if each is not None)
        if not known:
            return ""
        if seconds <= 0:
            return "time left not known yet"
        at_least = "at least " if any(each is None for each, _ in known) else ""
        return f"{at_least}{report.rough_duration(seconds)} left"

    def _refresh(self) -> None:
        total = self._done + sum(self._left.values())
        what = ", ".join(part for part in (self.time_left, self._where) if part)
        self.update(what=f"{self._done:.0f} of {total:.0f} runs, {what}", total=total)

    def touching(self) -> None:
        """Memory is touched before the first run."""
        self._where = "touching memory, so that it is backed"
        if self._lines:
            self.say(self._where)
        self._refresh()

    def turn(self, number: int, row: str, side: str) -> None:
        place = f"round {number} of {self._rounds}" if number else "warm-up"
        where = ", ".join(part for part in (place, row) if part)
        self._where = f"{where}: {side}"
        self._line = self._line or [f"{where}:"]
        self._refresh()

    def done(self, row: str, side: str, seconds: float) -> None:
        self._left[row, side] = max(0, self._left[row, side] - 1)
        self._took[row, side].append(seconds)
        self._line.append(f"{side} {seconds:.1f} s")
        self._done += 1
        self._refresh()

    def failed(self, row: str, side: str, failure: str) -> None:
        """The side takes no more turns in this row."""
        self._left[row, side] = 0
        self.say(": ".join(part for part in ("calm", row, side, failure) if part))

    def row_done(self) -> None:
        if self._line and self._lines:
            head, *rest = self._line
            self.say(f"{head} {', '.join(rest)}" + (f"; {self.time_left}" if self.time_left else ""))
        self._line = []
