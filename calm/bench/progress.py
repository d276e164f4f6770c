"""How far the runs are, and how long they will take: from what the same runs took before."""

import sys
import time
from collections.abc import Sequence

import click

from calm import report
from calm.statistics import median


def words(seconds: float) -> str:
    """1 h 5 min, 12 min, 40 s."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{max(1, round(seconds))} s"


class TimeLeft:
    """What is left to run, by the medians of what it took before."""

    def __init__(self, turns: Sequence[tuple[str, str]], rounds: int) -> None:
        self._left = dict.fromkeys(turns, rounds)
        self._took: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}

    def done(self, turn: tuple[str, str], seconds: float) -> None:
        """One more has been run."""
        self._left[turn] = max(0, self._left[turn] - 1)
        self._took[turn].append(seconds)

    def dropped(self, turn: tuple[str, str]) -> None:
        """It will not be run again."""
        self._left[turn] = 0

    @property
    def runs(self) -> int:
        """How many are left."""
        return sum(self._left.values())

    @property
    def text(self) -> str:
        """What of it is known; as long as something was never run, it is only a bound."""
        known = [(median(self._took[turn]), left) for turn, left in self._left.items() if left]
        seconds = sum(each * left for each, left in known if each is not None)
        if not known:
            return ""
        at_least = "at least " if any(each is None for each, _ in known) else ""
        return f"{at_least}{words(seconds)} left" if seconds > 0 else "time left not known yet"


class Shown:
    """A bar on a terminal; elsewhere a line for each case of each round."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        # Without a thread of its own, which would take CPU time from what is measured.
        self._bar = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"),
            console=report.console(sys.stderr),
            auto_refresh=False,
            transient=True,
            disable=not self._terminal,
        )
        self._task = self._bar.add_task("", total=1, left="")
        self._left = TimeLeft([], 0)
        self._rounds = 0
        self._line: list[str] = []
        self._where = ""
        self._begin = time.monotonic()

    def __enter__(self) -> "Shown":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, turns: Sequence[tuple[str, str]], rounds: int) -> None:
        """See runner.Watcher."""
        self._left = TimeLeft(turns, rounds)
        self._rounds = rounds - 1
        self._refresh()

    def _refresh(self) -> None:
        finished = self._bar.tasks[0].completed
        self._bar.update(
            self._task, total=finished + self._left.runs, left=self._left.text, description=self._where
        )
        self._bar.refresh()

    def touching(self) -> None:
        """See runner.Watcher."""
        self._where = "touching memory, so that it is there"
        if self._terminal:
            self._refresh()
        else:
            click.echo(self._where, err=True)

    def turn(self, number: int, case: str, label: str) -> None:
        """See runner.Watcher."""
        place = f"round {number} of {self._rounds}" if number else "warm-up"
        self._where = f"{place}, {case}: {label}"
        if not self._line:
            self._line = [f"{place}, {case}:"]
        self._refresh()

    def done(self, case: str, label: str, seconds: float) -> None:
        """See runner.Watcher."""
        self._left.done((case, label), seconds)
        self._line.append(f"{label} {seconds:.1f} s")
        self._bar.advance(self._task)
        self._refresh()

    def failed(self, case: str, label: str, failure: str) -> None:
        """See runner.Watcher."""
        self._left.dropped((case, label))
        message = f"calm: {case}: {label}: {failure}"
        if self._terminal:
            self._bar.console.print(message, soft_wrap=True)
        else:
            click.echo(message, err=True)

    def row_done(self) -> None:
        """See runner.Watcher."""
        if self._line and not self._terminal:
            head, *rest = self._line
            left = f"; {self._left.text}" if self._left.text else ""
            click.echo(f"{head} {', '.join(rest)}{left}", err=True)
        self._line = []
