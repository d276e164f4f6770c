"""`calm top`: what running processes do with their memory, live."""

import contextlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import click
from rich.console import Console

from calm.commands.top import sampler, view
from calm.commands.top.sampler import Sampler, Snapshot
from calm.core import documents, options, processes
from calm.core.errors import CalmError
from calm.core.options import Output


@dataclass
class _Watch:
    """The samples, one after the other, and what is shown of them."""

    source: Sampler
    state: view.State
    json_path: str | None
    file: IO[bytes] | None
    """Of json_path, unless that is standard output."""
    interval_s: float
    left: int | None
    """Intervals; None: no end."""
    latest: Snapshot | None = None
    ended: list[sampler.Ended] = field(default_factory=list)
    next_sample: float = field(default_factory=time.monotonic)
    is_first: bool = True

    @property
    def is_over(self) -> bool:
        """No process is left, or no interval."""
        return self.left == 0 or (self.latest is not None and not self.latest.processes)

    def sample(self) -> bool:
        """Whether there is something new to show: the first sample has no rates, and begins an interval."""
        snapshot = self.source.sample()
        self.ended += snapshot.ended
        earliest = time.monotonic() + 0.2 * self.interval_s
        self.next_sample = max(self.next_sample + self.interval_s, earliest)
        first, self.is_first = self.is_first, False
        if first and snapshot.processes:
            return False
        self.latest = snapshot
        self.state.record(snapshot)
        if not first and self.json_path:
            self._write(documents.line(snapshot).encode())
        self.left = None if self.left is None else self.left - 1
        return True

    def _write(self, line: bytes) -> None:
        try:
            click.echo(line, self.file, nl=False)
        except OSError as error:
            if self.file is None:
                raise
            raise CalmError(f"cannot write {self.json_path}: {error.strerror}") from error

    def press(self, key: str, can_leave: bool) -> bool:
        """Does what a key stands for. False: quit."""
        state = self.state
        if state.typing:
            _type(state, key)
            return True
        pids = [row.pid for row in state.visible(self.latest)] if self.latest else []
        at = pids.index(state.selected) if state.selected in pids else -1
        if key in ("q", "escape"):
            if state.help:
                state.help = False
            elif state.detail is not None and can_leave:
                state.detail = None
            elif key == "q":
                return False
            else:
                state.filter = ""
        elif key in ("h", "?"):
            state.help = not state.help
        elif key in ("s", "S"):
            number = view.SORT_KEYS.index(state.sort) + (1 if key == "s" else -1)
            state.sort = view.SORT_KEYS[number % len(view.SORT_KEYS)]
        elif key == "r":
            state.reverse = not state.reverse
        elif key == "/":
            state.typing = True
        elif key in ("up", "k") and pids:
            state.selected = pids[max(0, at - 1)]
        elif key in ("down", "j") and pids:
            state.selected = pids[min(len(pids) - 1, at + 1)]
        elif key == "enter" and pids:
            state.detail = pids[max(0, at)]
        elif key == " ":
            self.next_sample = time.monotonic()
        return True

    def print(self, console: Console) -> None:
        """The latest interval, below those before it."""
        if self.latest is not None:
            for line in view.plain(self.latest, self.state, self.interval_s, console.width):
                console.print(line, soft_wrap=True)


def _type(state: view.State, key: str) -> None:
    """Edits the filter."""
    if key in ("enter", "escape"):
        state.typing = False
        state.filter = "" if key == "escape" else state.filter
    elif key == "backspace":
        state.filter = state.filter[:-1]
    elif len(key) == 1:
        state.filter += key


def _live(watch: _Watch, alone: bool) -> None:
    from calm.commands.top import terminal

    with terminal.opened() as screen:

        def draw() -> None:
            screen.draw(view.screen(watch.latest, watch.state, watch.interval_s, *screen.size))

        draw()
        while not watch.is_over:
            if time.monotonic() >= watch.next_sample:
                watch.sample()
            elif not all(watch.press(key, not alone) for key in screen.wait(watch.next_sample)):
                return
            draw()


def _show(watch: _Watch, output: Output, alone: bool) -> None:
    live = sys.stdout.isatty() and not output.json_on_stdout and not output.report_path
    # Beside JSON on standard output a table for each interval would be noise on standard error.
    quiet = output.json_on_stdout and not output.report_path
    interrupted = False
    with output.console() as console:
        try:
            if live:
                _live(watch, alone)
            while not live and not watch.is_over:
                if watch.sample() and not quiet:
                    watch.print(console)
                if not watch.is_over:
                    time.sleep(max(0.0, watch.next_sample - time.monotonic()))
        except KeyboardInterrupt:
            interrupted = True
            # The figures of an interval that is cut short are worth more than none.
            if watch.latest is None and watch.sample() and not live and not quiet:
                watch.print(console)
        if live and (interrupted or (watch.is_over and watch.latest and watch.latest.processes)):
            watch.print(console)
    if interrupted:
        raise KeyboardInterrupt


@click.command(
    "top",
    epilog="""\b
Examples:
  calm top
  calm top --sort shootdowns
  calm top 1234 5678 -d 5s
  calm top -n 1 --pid 1234 --json
""",
)
@click.argument(
    "arguments",
    metavar="[PID]...",
    nargs=-1,
    callback=options.process_ids,
    shell_complete=options.complete_process_ids,
)
@click.option(
    "-p",
    "--pid",
    "listed",
    multiple=True,
    callback=options.process_ids,
    shell_complete=options.complete_process_ids,
    metavar="PID,…",
    help="Only these processes.",
)
@options.command_name()
@options.duration(
    "-d", "--delay", default="1s", at_least="50ms", at_most="1h", text="The interval between two samples."
)
@options.rounds(None, "End after N intervals. Default: none, until Ctrl-C.")
@click.option(
    "--sort",
    type=click.Choice(view.SORT_KEYS),
    default="rss",
    show_default=True,
    help="Sort rows by this column.",
)
@click.option(
    "--no-calls",
    is_flag=True,
    help="Do not count memory calls: counting slows each system call of the machine a little.",
)
@options.output("one line for each interval")
def command(
    arguments: tuple[int, ...],
    listed: tuple[int, ...],
    name: str | None,
    delay: float,
    rounds: int | None,
    sort: str,
    no_calls: bool,
    output: Output,
) -> None:
    """Show what running processes do with memory.

    The figures are resident memory, TLB shootdowns, page faults, memory calls, CPU time, huge pages, the
    allocator, and the counters of calmalloc or ptlbmalloc2. No process is stopped for them.
    """
    pids = list(dict.fromkeys((*arguments, *listed)))
    if pids and name is not None:
        raise click.UsageError("--command and process ids exclude each other")
    choose = processes.chosen(pids, name)
    if name is not None and not choose():
        raise CalmError(f"there is no process called {name!r}")
    state = view.State(sort=sort, detail=pids[0] if len(pids) == 1 else None)
    path = output.json_path
    with contextlib.ExitStack() as stack:
        source = Sampler(choose, every=not pids and name is None, calls=not no_calls)
        stack.callback(source.close)
        file = stack.enter_context(Path(path).open("wb", buffering=0)) if path and path != "-" else None
        watch = _Watch(source, state, path, file, delay, rounds)
        _show(watch, output, alone=len(pids) == 1)
    if (pids or name is not None) and watch.latest is not None and not watch.latest.processes:
        lines = [f"process {ended.pid} ({ended.name}) has ended" for ended in watch.ended]
        for line in lines or ["no process is left"]:
            click.echo(f"calm: {line}", err=True)
