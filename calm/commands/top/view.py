"""The lines of a snapshot: a table in as many columns as there is room for, or one process alone."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from rich.text import Text

from calm.commands.top.sampler import LIBRARIES, Row, Snapshot
from calm.core import counters, report
from calm.core.library_tables import COUNTERS, OPTIONS

HISTORY = 600
_BARS = "▁▂▃▄▅▆▇█"
_LABEL_WIDTH = 18
_FIGURE_WIDTH = 12
_MAXIMUM_WIDTH = 14


def count(value: float | None) -> str:
    """A rate in few characters: 0, 0.4, 87, 1,234, 56.7k, 1.2M."""
    if value is None:
        return "-"
    if value and value < 9.95:
        return f"{value:.1f}"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size * (10 if unit == "k" else 1):
            return f"{value / size:.1f}{unit}"
    return f"{value:,.0f}"


def size(kib: float | None, sign: bool = False) -> str:
    """Memory in few characters: 12K, 3.4M, +1.2G."""
    if kib is None:
        return "-"
    prefix = "-" if kib < 0 else "+" if sign and kib > 0 else ""
    kib = abs(kib)
    if kib >= 1024 * 1024:
        return f"{prefix}{kib / 1024 / 1024:.2f}G"
    return f"{prefix}{kib / 1024:.1f}M" if kib >= 1024 else f"{prefix}{kib:.0f}K"


def _bytes(*values: float) -> str:
    return "/".join(size(value / 1024) for value in values)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 99.5 else f"{value:.1f}"


def _plural(number: int, noun: str, ending: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def _dirty(row: Row) -> tuple[int, int] | None:
    known = row.dirty_bytes is not None and row.limit_bytes is not None
    return (row.dirty_bytes, row.limit_bytes) if known else None  # type: ignore[return-value]


def _short_command(row: Row) -> str:
    """On one line, without the program's folder, which would fill the column."""
    program, *arguments = row.command
    return report.shown(" ".join([program.rsplit("/", 1)[-1] or program, *arguments])).rstrip()


def _calls(row: Row) -> float | None:
    return None if row.calls is None else sum(row.calls.values())


def _cpu(row: Row) -> float | None:
    return None if row.user_percent is None else row.user_percent + (row.system_percent or 0)


@dataclass(frozen=True)
class Figure:
    """A figure of a process, and its column, if it has one.

    Columns of a high rank are left out first where there is no room.
    """

    key: str
    get: Callable[[Row], Any]
    text: Callable[[Any], str] = count
    title: str = ""
    width: int = 0
    rank: int = 0


FIGURES = {
    figure.key: figure
    for figure in (
        Figure("pid", attrgetter("pid"), str, "PID", 7, 0),
        Figure("name", _short_command, str, "COMMAND", 0, 0),
        Figure("rss", attrgetter("rss_kib"), size, "RSS", 8, 1),
        Figure("change", attrgetter("rss_change_kib"), partial(size, sign=True), "CHANGE", 8, 4),
        Figure("shootdowns", attrgetter("shootdowns"), count, "SHOOT/s", 8, 2),
        Figure("interrupts", attrgetter("interrupts_received"), count, "IRQ/s", 8, 5),
        Figure("faults", attrgetter("minor_faults"), count, "MINFLT/s", 9, 3),
        Figure("major", attrgetter("major_faults"), count, "MAJ/s", 7, 10),
        Figure("calls", _calls, count, "CALLS/s", 8, 6),
        Figure("user", attrgetter("user_percent"), _percent, "USER%", 6, 8),
        Figure("system", attrgetter("system_percent"), _percent, "SYS%", 6, 7),
        Figure("huge", attrgetter("huge_kib"), size, "HUGE", 8, 12),
        Figure("purges", attrgetter("purges"), count, "PURGE/s", 8, 11),
        Figure("dirty", _dirty, lambda both: _bytes(*both) if both else "-", "KEPT/LIMIT", 14, 13),
        Figure("allocator", attrgetter("allocator"), lambda name: name or "-", "ALLOCATOR", 12, 9),
        Figure("cpu", _cpu, _percent),
        Figure("swap", attrgetter("swap_kib"), size),
        Figure("purged", attrgetter("purged_bytes"), _bytes),
    )
}
COLUMNS = tuple(figure for figure in FIGURES.values() if figure.title)
SORT_KEYS = tuple(column.key for column in COLUMNS)
_HISTORIES = ("rss", "cpu", "shootdowns", "interrupts", "faults", "calls", "purges")
_MIN_NAME, _MAX_NAME = 15, 40
_LEFT_ALIGNED = ("name", "allocator")
_ASCENDING = ("pid", *_LEFT_ALIGNED)


def columns_for(width: int, sort: str) -> list[tuple[Figure, int]]:
    """Those that fit, with their widths, in their order; among them that by which rows are sorted."""
    chosen: list[Figure] = []
    room = width - _MIN_NAME
    for column in sorted(COLUMNS, key=lambda column: 0 if column.key == sort else column.rank):
        if column.width and column.width + 1 > room:
            break
        chosen.append(column)
        room -= column.width + 1 if column.width else 0
    name = _MIN_NAME + min(max(room, 0), _MAX_NAME - _MIN_NAME)
    return [(column, column.width or name) for column in COLUMNS if column in chosen]


def ordered(rows: Sequence[Row], key: str, reverse: bool = False) -> list[Row]:
    """By a figure, the greatest first, but names and numbers from the least; unknown figures come last."""
    get = FIGURES[key].get
    known = sorted((row for row in rows if get(row) is not None), key=attrgetter("pid"))
    known.sort(key=get, reverse=(key not in _ASCENDING) != reverse)
    return known + [row for row in rows if get(row) is None]


@dataclass
class State:
    """What the user has chosen to see."""

    sort: str = "rss"
    reverse: bool = False
    filter: str = ""
    typing: bool = False
    selected: int | None = None
    detail: int | None = None
    help: bool = False
    histories: dict[int, dict[str, deque[float]]] = field(default_factory=dict)

    def record(self, snapshot: Snapshot) -> None:
        """Extends the processes' histories; a later process of the same number begins its own."""
        for ended in snapshot.ended:
            self.histories.pop(ended.pid, None)
            if ended.pid == self.detail:
                self.detail = None
        for row in snapshot.processes:
            history = self.histories.setdefault(row.pid, {})
            for key in _HISTORIES:
                if (value := FIGURES[key].get(row)) is not None:
                    history.setdefault(key, deque(maxlen=HISTORY)).append(value)

    def visible(self, snapshot: Snapshot) -> list[Row]:
        """The rows that the filter lets through, in order."""
        word = self.filter.lower()
        rows = [row for row in snapshot.processes if word in f"{row.name} {' '.join(row.command)}".lower()]
        return ordered(rows, self.sort, self.reverse)


def sparkline(values: Sequence[float], width: int) -> str:
    """The latest values, from 0 to their maximum."""
    latest = list(values)[-width:] if width > 0 else []
    maximum = max(latest, default=0)
    top = (len(_BARS) - 1) / maximum if maximum > 0 else 0
    return "".join(_BARS[round(value * top)] for value in latest)


def header(snapshot: Snapshot, interval_s: float) -> list[Text]:
    """The first lines: the time, the number of processes, and the cost of calm top itself."""
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    processes = _plural(len(snapshot.processes), "process", "es")
    load = f"TLB interrupts of the whole system: {count(snapshot.interrupts_system_wide)}/s; "
    return [
        Text(f"calm top {clock}, {processes}, every {interval_s:g} s", style="bold"),
        Text(f"{load}calm top itself: {snapshot.own_cpu_percent:.1f} % of a CPU"),
    ]


def _cell(text: str, width: int, left: bool) -> str:
    text = text if len(text) <= width else f"{text[: max(0, width - 1)]}+"
    return text.ljust(width) if left else text.rjust(width)


def table(rows: Sequence[Row], width: int, sort: str, selected: int | None = None) -> list[Text]:
    """A line of titles, and one for each process."""
    chosen = [(column, wide, column.key in _LEFT_ALIGNED) for column, wide in columns_for(width, sort)]
    titles = Text()
    for column, wide, left in chosen:
        titles.append(" " if titles.plain else "", style="reverse")
        titles.append(
            _cell(column.title, wide, left), style="bold reverse" if column.key == sort else "reverse"
        )
    lines = [titles]
    for row in rows:
        cells = [_cell(column.text(column.get(row)), wide, left) for column, wide, left in chosen]
        lines.append(Text(" ".join(cells).rstrip(), style="bold cyan" if row.pid == selected else ""))
    return lines


def detail(row: Row, state: State, width: int) -> list[Text]:
    """One process: each figure with its history, and the counters of our libraries."""
    history = state.histories.get(row.pid, {})
    room = max(0, width - _LABEL_WIDTH - _FIGURE_WIDTH - 2 - _MAXIMUM_WIDTH)
    title = f"{row.pid} {report.shown(' '.join(row.command))}"
    lines = [Text(_cell(title, width, left=True).rstrip(), style="bold"), Text()]

    def line(label: str, key: str, reason: str = "") -> None:
        figure = FIGURES[key]
        value = figure.get(row)
        text = Text(f"{label:<{_LABEL_WIDTH}}{figure.text(value):>{_FIGURE_WIDTH}}  ")
        if value is None:
            text.append(row.reasons.get(reason, ""), style="dim")
        elif values := history.get(key):
            text.append(sparkline(values, room), style="cyan")
            if room > 0:
                text.append(f"  max {figure.text(max(list(values)[-room:]))}", style="dim")
        lines.append(text)

    def note(text: str) -> None:
        lines.append(Text(f"  {text}", style="dim"))

    line("RSS", "rss")
    line("  change", "change")
    line("CPU, %", "cpu")
    split = f"user {_percent(row.user_percent)}, system {_percent(row.system_percent)}"
    note(f"{split}; {_plural(row.threads, 'thread')}")
    line("shootdowns/s", "shootdowns", "shootdowns")
    line("  interrupts/s", "interrupts", "interrupts_received")
    line("minor faults/s", "faults")
    line("  major", "major")
    line("memory calls/s", "calls", "calls")
    if busy := [f"{name} {count(rate)}" for name, rate in (row.calls or {}).items() if rate]:
        note(", ".join(busy))
    line("huge pages", "huge", "huge_kib")
    if row.swap_kib:
        line("swapped out", "swap")
    lines.append(Text())
    line("allocator", "allocator", "allocator")
    if row.counters:
        line("purges/s", "purges")
        if row.purged_bytes is not None:
            line("  purged/s", "purged")
    elif row.allocator is not None and "counters" in row.reasons:
        note(f"no counters: {row.reasons['counters']}")
    for library, values in row.counters.items():
        lines += _library(library, values, width)
    return lines


def counter(name: str, value: int) -> str:
    """A library's counter in its unit."""
    if name == "state":
        return counters.STATES.get(value, str(value))
    if words := OPTIONS.get("test_policy" if name == "policy" else name):
        return words[value] if value < len(words) else str(value)
    own = COUNTERS.get(name)
    if (own and own.unit == "bytes") or name.endswith("_bytes") or name.startswith("bytes_"):
        return _bytes(value)
    if name.endswith("_ns"):
        return report.duration(value * 1e-9)
    if name.endswith("_hundredths"):
        return f"{value / 100:.2f}"
    return f"{value:,}"


def _library(library: str, counters: dict[str, int], width: int) -> list[Text]:
    lines = [Text(), Text(f"{library}'s own counters", style="bold")]
    names = LIBRARIES.get(library)
    bounds = (names.dirty, names.limit) if names else ()
    if names and all(name in counters for name in bounds):
        kept, limit = (counters[name] for name in bounds)
        room = min(40, max(0, width - 60))
        filled = min(room, round(room * kept / limit)) if limit > 0 else 0
        text = Text(f"{names.dirty_label:<{_LABEL_WIDTH}}{_bytes(kept):>{_FIGURE_WIDTH}}  ")
        text.append("█" * filled + "░" * (room - filled), style="cyan")
        lines.append(text.append(f"  {names.limit_label} {_bytes(limit)}", style="dim"))
    cells = [
        f"{name.removesuffix('_hundredths')} {counter(name, value)}"
        for name, value in counters.items()
        if name not in bounds
    ]
    wide = max(map(len, cells), default=1) + 2
    across = max(1, width // wide)
    for i in range(0, len(cells), across):
        lines.append(Text("".join(cell.ljust(wide) for cell in cells[i : i + across]).rstrip()))
    return lines


HELP = (
    ("q", "quit, or back to the list"),
    ("s, S", "sort by the next column, or by the one before"),
    ("r", "reverse the order"),
    ("/", "show only processes with this in their name or arguments; Esc clears"),
    ("up, down", "choose a process"),
    ("Enter", "show it alone, with its history; q or Esc goes back"),
    ("space", "sample now"),
    ("h, ?", "this help, and back"),
)


def screen(snapshot: Snapshot | None, state: State, interval_s: float, width: int, height: int) -> list[Text]:
    """As many lines as the terminal has at most."""
    if snapshot is None:
        return [Text("calm top: sampling…"[: width or 1])]
    rows = state.visible(snapshot)
    lines = header(snapshot, interval_s)
    footer: list[Text] = []
    alone = next((row for row in snapshot.processes if row.pid == state.detail), None)
    if state.help:
        lines += [Text(), *(Text(f"  {keys:<10}{what}") for keys, what in HELP)]
        keys_line = "h back  q quit"
    elif alone is not None:
        lines += [Text(), *detail(alone, state, width)]
        keys_line = "q back  h help" if len(snapshot.processes) > 1 else "q quit  h help"
    else:
        footer = [Text(note, style="dim") for note in snapshot.notes]
        room = max(0, height - len(lines) - len(footer) - 2)
        pids = [row.pid for row in rows]
        first = max(0, pids.index(state.selected) - room + 1) if state.selected in pids else 0
        lines += table(rows[first : first + room], width, state.sort, state.selected)
        order = f"{state.sort}{' (reversed)' if state.reverse else ''}"
        keys_line = f"q quit  s sort: {order}  / filter  Enter alone  h help"
    if state.typing:
        keys_line = f"/{state.filter}_"
    elif state.filter:
        keys_line += f"  filter: {state.filter}"
    if snapshot.ended:
        keys_line += f"  ended: {snapshot.ended[-1].pid} {snapshot.ended[-1].name}"
    body = lines[: max(1, height - len(footer) - 1)]
    body += [Text()] * (height - len(body) - len(footer) - 1)
    return [*body, *footer, Text(keys_line, style="reverse")][:height]


def plain(snapshot: Snapshot, state: State, interval_s: float, width: int) -> list[Text]:
    """For a file, or for a terminal after the live view: everything, without keys."""
    lines = header(snapshot, interval_s) + table(state.visible(snapshot), width, state.sort)
    for line in lines:
        line.rstrip()
    lines += [Text(f"note: {note}") for note in snapshot.notes]
    return lines + [Text(f"ended: {ended.pid} {ended.name}") for ended in snapshot.ended]
