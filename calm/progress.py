"""A bar for whatever takes longer than two seconds: on a terminal, and on standard error alone.

Elsewhere a line for each step that is worth one. It has no thread of its own, which would take CPU time from
what is measured.
"""

import sys
import time
from typing import TYPE_CHECKING

import click

from calm import report

if TYPE_CHECKING:
    from rich.progress import Progress

_AFTER_S = 2.0
_EACH_S = 0.1


class Bar:
    """Shows how far something is. Used as a context; appears once two seconds have passed."""

    def __init__(self, total: float | None = None, what: str = "") -> None:
        self._terminal = sys.stderr.isatty()
        self._what = what
        self._total = total
        self._done = 0.0
        self._begin = time.monotonic()
        self._shown = 0.0
        self._progress: Progress | None = None

    def __enter__(self) -> "Bar":
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
        if not self._terminal or now - self._begin < _AFTER_S or now - self._shown < _EACH_S:
            return
        self._shown = now
        if self._progress is None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=report.console(sys.stderr),
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
