"""`calm top`: what running processes do with their memory, live."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from calm import options, ranges, report
from calm.errors import CalmError
from calm.top import sampler, system, view
from calm.top.sampler import Sampler, Snapshot


def _pids(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[int, ...]:
    """Process ids with commas between them."""
    words = [word for value in values for word in value.split(",")]
    for word in words:
        if not word.isdecimal() or not 0 < int(word) < 1 << 31:
            raise click.BadParameter(f"{word!r} is not a process id", ctx, param)
    return tuple(map(int, words))


def _complete_pids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The user's own processes."""
    found = []
    for pid in system.processes():
        with contextlib.suppress(OSError, ValueError, system.GoneError):
            if str(pid).startswith(incomplete) and Path(f"/proc/{pid}").stat().st_uid == os.getuid():
                found.append(CompletionItem(str(pid), help=system.stat(pid).name))
    return found


def _complete_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    names = set()
    for pid in system.processes():
        with contextlib.suppress(OSError, ValueError, system.GoneError):
            names.add(system.stat(pid).name)
    return sorted(name for name in names if name.startswith(incomplete))


class _Lines:
    """One line of JSON for each interval."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        if path not in (None, "-"):
            report.check_writable(str(path))
            report.write(str(path), "")

    def write(self, snapshot: Snapshot) -> None:
        line = json.dumps(snapshot.as_dict()) + "\n"
        if self._path == "-":
            sys.stdout.write(line)
            sys.stdout.flush()
        elif self._path is not None:
            with Path(self._path).open("a") as file:
                file.write(line)


class _Watch:
    """The looks, one after the other, and what is kept of them."""

    def __init__(
        self, looker: Sampler, state: view.State, lines: _Lines, interval_s: float, count: int | None
    ) -> None:
        self.looker = looker
        self.state = state
        self.lines = lines
        self.interval_s = interval_s
        self.left = count
        self.latest: Snapshot | None = None
        self.ended: list[tuple[int, str]] = []
        self.next_look = time.monotonic()
        self._first = True

    @property
    def is_over(self) -> bool:
        """Nothing is left to look at, or as many looks were had as were asked for."""
        return self.left == 0 or (self.latest is not None and not self.latest.rows)

    def look(self) -> bool:
        """True if there is something new to show: the first look has no rates, and is for the next."""
        snapshot = self.looker.look()
        self.ended += snapshot.ended
        self.next_look = max(self.next_look + self.interval_s, time.monotonic() + 0.2 * self.interval_s)
        first, self._first = self._first, False
        if first and snapshot.rows:
            return False
        self.latest = snapshot
        self.state.note(snapshot)
        if snapshot.rows or not first:
            self.lines.write(snapshot)
        if self.left is not None:
            self.left -= 1
        return True


def _press(watch: _Watch, key: str, can_leave: bool) -> bool:
    """What a key does. False: quit."""
    state = watch.state
    rows = state.shown(watch.latest) if watch.latest else []
    if state.typing:
        if key == "enter":
            state.typing = False
        elif key == "escape":
            state.typing, state.filter = False, ""
        elif key == "backspace":
            state.filter = state.filter[:-1]
        elif len(key) == 1:
            state.filter += key
        return True
    pids = [row.pid for row in rows]
    at = pids.index(state.selected) if state.selected in pids else -1
    if key == "q":
        if state.help:
            state.help = False
        elif state.detail is not None and can_leave:
            state.detail = None
        else:
            return False
    elif key == "escape":
        if state.help:
            state.help = False
        elif state.detail is not None and can_leave:
            state.detail = None
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
        state.detail = state.selected if at >= 0 else pids[0]
    elif key == " ":
        watch.next_look = time.monotonic()
    return True


def _live(watch: _Watch, alone: bool) -> None:
    from calm.top.terminal import Screen

    with Screen() as screen:
        watch.state.ascii = not screen.has_unicode

        def draw() -> None:
            screen.draw(view.screen(watch.latest, watch.state, watch.interval_s, *screen.size))

        draw()
        while not watch.is_over:
            if time.monotonic() >= watch.next_look:
                watch.look()
                draw()
                continue
            for key in screen.wait(watch.next_look):
                if not _press(watch, key, not alone):
                    return
            draw()


def _print(watch: _Watch) -> None:
    if watch.latest is None:
        return
    console = report.console(sys.stdout)
    for line in view.plain(watch.latest, watch.state, watch.interval_s, console.width):
        console.print(line, soft_wrap=True)


def _in_turn(watch: _Watch, show: Callable[[], None]) -> None:
    """Without a terminal: each interval's, one below the other."""
    while not watch.is_over:
        if watch.look():
            show()
        if not watch.is_over:
            time.sleep(max(0.0, watch.next_look - time.monotonic()))


@contextlib.contextmanager
def _closing(watch: _Watch) -> Iterator[None]:
    try:
        yield
    finally:
        watch.looker.close()


def _processes(pids: Sequence[int], name: str | None) -> Callable[[], Sequence[int]]:
    if pids:
        for pid in pids:
            system.check(pid)
        return sampler.chosen_by_pid(pids)
    if name is not None:
        choose = sampler.chosen_by_name(name)
        if not choose():
            raise CalmError(f"there is no process called {name!r}")
        return choose
    return system.processes


@click.command(
    "top",
    epilog="\b\nExamples:\n"
    "  calm top                               all processes, the largest first\n"
    "  calm top --sort shootdowns             who interrupts other CPUs\n"
    "  calm top 1234 5678                     these\n"
    "  calm top --once --json - -p 1234       one line of JSON",
)
@click.argument("arguments", metavar="[PID]...", nargs=-1, callback=_pids, shell_complete=_complete_pids)
@click.option(
    "-p",
    "--pid",
    "listed",
    multiple=True,
    callback=_pids,
    shell_complete=_complete_pids,
    metavar="PID,…",
    help="Only these.",
)
@click.option(
    "--command",
    "name",
    metavar="NAME",
    shell_complete=_complete_names,
    help="Only processes of this name; * and ? stand for others.",
)
@click.option(
    "-d",
    "--delay",
    type=ranges.FloatRange(min=0.05, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="From one look to the next.",
)
@click.option("-n", "--count", type=click.IntRange(min=1), help="Intervals; without it, until told to end.")
@click.option("--once", is_flag=True, help="The same as -n 1.")
@click.option(
    "--sort", type=click.Choice(view.SORT_KEYS), default="rss", show_default=True, help="What comes first."
)
@click.option(
    "--no-calls",
    is_flag=True,
    help="Leave memory calls uncounted: to count them slows each system call of the machine a little.",
)
@options.json_file("Write one line of JSON for each interval; '-' is stdout.")
def command(
    arguments: tuple[int, ...],
    listed: tuple[int, ...],
    name: str | None,
    delay: float,
    count: int | None,
    once: bool,
    sort: str,
    no_calls: bool,
    json_path: str | None,
) -> None:
    """Show what running processes do with memory: size, TLB shootdowns, faults, memory calls, CPU time, huge
    pages, their allocator, and what calmalloc or ptlbmalloc2 in them count. No process is stopped for it.
    """
    pids = list(dict.fromkeys((*arguments, *listed)))
    if pids and name is not None:
        raise click.UsageError("--command and process ids exclude each other")
    if once and count is not None:
        raise click.UsageError("--once and -n exclude each other")
    choose = _processes(pids, name)
    state = view.State(sort=sort, detail=pids[0] if len(pids) == 1 else None)
    lines = _Lines(json_path)
    looker = Sampler(choose, every=not pids and name is None, calls=not no_calls)
    watch = _Watch(looker, state, lines, delay, 1 if once else count)
    quiet = json_path == "-"
    with _closing(watch):
        try:
            if sys.stdout.isatty() and not quiet:
                _live(watch, alone=len(pids) == 1)
                if watch.is_over and watch.latest and watch.latest.rows:
                    _print(watch)
            else:
                _in_turn(watch, (lambda: None) if quiet else (lambda: _print(watch)))
        except KeyboardInterrupt:
            # What is known of an interval that was not over yet is worth more than nothing.
            early = watch.latest is None and watch.look()
            if not quiet and (early or sys.stdout.isatty()):
                _print(watch)
            raise
        _say_ended(watch, bool(pids) or name is not None)


def _say_ended(watch: _Watch, chosen: bool) -> None:
    if chosen and watch.latest is not None and not watch.latest.rows:
        for pid, name in watch.ended:
            click.echo(f"calm: process {pid} ({name}) has ended", err=True)
