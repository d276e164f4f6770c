"""How a snapshot looks: a list of processes in as many columns as there is room for, or one process alone."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from calm import report
from calm.top.sampler import STATES, Row, Snapshot

HISTORY = 600
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*#@"
_LABEL = 18
_FIGURE = 12
_MOST = 14


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


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 99.5 else f"{value:.1f}"


def _of_limit(row: Row) -> str:
    if row.retained_bytes is None or row.limit_bytes is None:
        return "-"
    return f"{size(row.retained_bytes / 1024)}/{size(row.limit_bytes / 1024)}"


def _command(row: Row) -> str:
    """Without the folder of the program, which would fill the column."""
    first, _, rest = row.command.partition(" ")
    return f"{first.rsplit('/', 1)[-1] or first} {rest}".rstrip()


@dataclass(frozen=True)
class Column:
    """One figure of a process. Those of a high rank go first where there is no room."""

    key: str
    title: str
    width: int
    rank: int
    show: Callable[[Row], str]
    order: Callable[[Row], float | str | None]


COLUMNS = (
    Column("pid", "PID", 7, 0, lambda r: str(r.pid), lambda r: -r.pid),
    Column("name", "COMMAND", 0, 0, _command, lambda r: r.name),
    Column("rss", "RSS", 8, 1, lambda r: size(r.rss_kib), lambda r: r.rss_kib),
    Column("change", "CHANGE", 8, 4, lambda r: size(r.change_kib, True), lambda r: r.change_kib),
    Column("shootdowns", "SHOOT/s", 8, 2, lambda r: count(r.shootdowns), lambda r: r.shootdowns),
    Column("interrupts", "IRQ/s", 8, 5, lambda r: count(r.interrupts), lambda r: r.interrupts),
    Column("faults", "MINFLT/s", 9, 3, lambda r: count(r.minor_faults), lambda r: r.minor_faults),
    Column("major", "MAJ/s", 7, 10, lambda r: count(r.major_faults), lambda r: r.major_faults),
    Column("calls", "CALLS/s", 8, 6, lambda r: count(r.calls), lambda r: r.calls),
    Column("user", "USER%", 6, 8, lambda r: _percent(r.user_percent), lambda r: r.user_percent),
    Column("system", "SYS%", 6, 7, lambda r: _percent(r.system_percent), lambda r: r.system_percent),
    Column("huge", "HUGE", 8, 12, lambda r: size(r.huge_kib), lambda r: r.huge_kib),
    Column("purges", "PURGE/s", 8, 11, lambda r: count(r.purges), lambda r: r.purges),
    Column("retained", "KEPT/LIMIT", 14, 13, _of_limit, lambda r: r.retained_bytes),
    Column("allocator", "ALLOCATOR", 12, 9, lambda r: r.allocator or "-", lambda r: r.allocator),
)  # fmt: skip
SORT_KEYS = tuple(column.key for column in COLUMNS)
_ORDER = {column.key: column.order for column in COLUMNS}
_NAME_LEAST, _NAME_MOST = 15, 40
_LEFT = ("pid", "name", "allocator")


def columns_for(width: int, sort: str) -> list[tuple[Column, int]]:
    """Those that fit, with their widths, in their order; among them that by which rows are sorted."""
    chosen: list[Column] = []
    room = width - _NAME_LEAST
    for column in sorted(COLUMNS, key=lambda column: 0 if column.key == sort else column.rank):
        if column.width == 0:
            chosen.append(column)
        elif column.width + 1 <= room:
            chosen.append(column)
            room -= column.width + 1
        else:
            break
    name = _NAME_LEAST + min(max(room, 0), _NAME_MOST - _NAME_LEAST)
    return [(column, column.width or name) for column in COLUMNS if column in chosen]


def ordered(rows: Sequence[Row], key: str, reverse: bool = False) -> list[Row]:
    """By a figure, the greatest first, but names by the alphabet; what is not known comes last."""
    of = _ORDER[key]
    known = [row for row in rows if of(row) is not None]
    known.sort(key=lambda row: row.pid)
    known.sort(key=of, reverse=(key not in ("name", "allocator")) != reverse)  # type: ignore[arg-type]
    return known + [row for row in rows if of(row) is None]


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
    ascii: bool = False
    histories: dict[int, dict[str, deque[float]]] = field(default_factory=dict)

    def note(self, snapshot: Snapshot) -> None:
        """Keeps the history of processes, for a detail view; a later one of the same number is another."""
        for pid, _ in snapshot.ended:
            self.histories.pop(pid, None)
            if pid == self.detail:
                self.detail = None
        for row in snapshot.rows:
            history = self.histories.setdefault(row.pid, {})
            for key, value in (
                ("rss", row.rss_kib),
                ("shootdowns", row.shootdowns),
                ("interrupts", row.interrupts),
                ("faults", row.minor_faults),
                ("calls", row.calls),
                ("purges", row.purges),
                ("cpu", None if row.user_percent is None else row.user_percent + (row.system_percent or 0)),
            ):
                if value is not None:
                    history.setdefault(key, deque(maxlen=HISTORY)).append(value)

    def shown(self, snapshot: Snapshot) -> list[Row]:
        """The rows that the filter lets through, in order."""
        word = self.filter.lower()
        rows = [r for r in snapshot.rows if word in r.name.lower() or word in r.command.lower()]
        return ordered(rows, self.sort, self.reverse)


def sparkline(values: Sequence[float], width: int, bars: str = _BARS) -> str:
    """The latest values, from 0 to their maximum."""
    latest = list(values)[-width:] if width > 0 else []
    most = max(latest, default=0)
    top = len(bars) - 1
    return "".join(bars[min(top, round(value / most * top)) if most > 0 else 0] for value in latest)


def header(snapshot: Snapshot, interval_s: float, processes: int) -> list[Text]:
    """The first lines: when, how much, and what looking costs."""
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.when))
    what = f"{processes} process{'' if processes == 1 else 'es'}"
    line = Text(f"calm top {clock}, {what}, every {interval_s:g} s", style="bold")
    load = Text(f"TLB interrupts of the whole system: {count(snapshot.tlb_interrupts)}/s; ")
    load.append(f"calm top itself: {snapshot.own_percent:.1f} % of a CPU")
    return [line, load]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "+"


def table(rows: Sequence[Row], width: int, sort: str, selected: int | None = None) -> list[Text]:
    """A line of titles, and one for each process."""
    chosen = columns_for(width, sort)
    titles = Text()
    for i, (column, wide) in enumerate(chosen):
        title = _cut(column.title, wide)
        cell = title.ljust(wide) if column.key in _LEFT[1:] else title.rjust(wide)
        titles.append(" " if i else "", style="reverse")
        titles.append(cell, style="bold reverse" if column.key == sort else "reverse")
    lines = [titles]
    for row in rows:
        cells = []
        for column, wide in chosen:
            cell = _cut(column.show(row), wide)
            cells.append(cell.ljust(wide) if column.key in _LEFT[1:] else cell.rjust(wide))
        lines.append(Text(" ".join(cells).rstrip(), style="bold cyan" if row.pid == selected else ""))
    return lines


def detail(row: Row, state: State, width: int) -> list[Text]:
    """One process: each figure with its history, and what our libraries say of themselves."""
    history = state.histories.get(row.pid, {})
    bars = _ASCII_BARS if state.ascii else _BARS
    room = max(0, width - _LABEL - _FIGURE - 2 - _MOST)
    lines = [Text(_cut(f"{row.pid} {row.command}", width), style="bold"), Text()]

    def line(label: str, figure: str, key: str = "", reason: str = "") -> None:
        text = Text(f"{label:<{_LABEL}}{figure:>{_FIGURE}}  ")
        if figure == "-" and reason:
            text.append(reason, style="dim")
        elif values := history.get(key):
            text.append(sparkline(values, room, bars), style="cyan")
            if room > 0:
                most = max(list(values)[-room:])
                shown = size(most) if key == "rss" else _percent(most) if key == "cpu" else count(most)
                text.append(f"  max {shown}", style="dim")
        lines.append(text)

    why = row.reasons
    line("RSS", size(row.rss_kib), "rss")
    line("  change", size(row.change_kib, True))
    cpu = None if row.user_percent is None else row.user_percent + (row.system_percent or 0)
    line("CPU, %", _percent(cpu), "cpu")
    split = f"user {_percent(row.user_percent)}, system {_percent(row.system_percent)}"
    lines.append(Text(f"  {split}; {row.threads:,} thread{'' if row.threads == 1 else 's'}", style="dim"))
    line("shootdowns/s", count(row.shootdowns), "shootdowns", why.get("shootdowns", ""))
    line("  interrupts/s", count(row.interrupts), "interrupts", why.get("interrupts", ""))
    line("minor faults/s", count(row.minor_faults), "faults")
    line("  major", count(row.major_faults))
    line("memory calls/s", count(row.calls), "calls", why.get("calls", ""))
    busy = [f"{name} {count(rate)}" for name, rate in row.calls_each.items() if rate]
    if busy:
        lines.append(Text(f"  {', '.join(busy)}", style="dim"))
    line("huge pages", size(row.huge_kib), reason=why.get("huge_kib", ""))
    if row.swap_kib:
        line("swapped out", size(row.swap_kib))
    lines.append(Text())
    line("allocator", row.allocator or "-", reason=why.get("allocator", ""))
    if row.counters:
        line("purges/s", count(row.purges), "purges")
        if row.purged_bytes is not None:
            line("  given back/s", size(row.purged_bytes / 1024))
    elif row.allocator is not None and "counters" in why:
        lines.append(Text(f"  no counters: {why['counters']}", style="dim"))
    for library, counters in row.counters.items():
        lines += _library(library, counters, width, state.ascii)
    return lines


def _limit_bar(kept: int, limit: int, width: int, ascii_only: bool) -> str:
    filled = min(width, round(width * kept / limit)) if limit > 0 else 0
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    return full * filled + empty * (width - filled)


_BYTES = {"footprint", "in_use", "retained", "retained_limit", "cached", "dirtied", "purged"}


def figure_of(name: str, value: int) -> str:
    """A library's counter in its unit."""
    if name in _BYTES or name.endswith("_bytes") or name.startswith("bytes_"):
        return size(value / 1024)
    if name.endswith("_ns"):
        return report.duration(value * 1e-9)
    if name.endswith("_hundredths"):
        return f"{value / 100:.2f}"
    if name in ("slack", "purge_time"):
        return f"{value} %"
    return f"{value:,}"


def _library(library: str, counters: dict[str, int], width: int, ascii_only: bool) -> list[Text]:
    kept, limit = (
        ("retained", "retained_limit") if library == "calmalloc" else ("free_top_bytes", "threshold_bytes")
    )
    lines = [Text(), Text(f"{library}'s own counters", style="bold")]
    if kept in counters and limit in counters:
        label, bound = ("kept free", "limit") if library == "calmalloc" else ("free at tops", "trimmed from")
        bar = _limit_bar(counters[kept], counters[limit], min(40, max(0, width - 60)), ascii_only)
        have, may = size(counters[kept] / 1024), size(counters[limit] / 1024)
        text = Text(f"{label:<{_LABEL}}{have:>{_FIGURE}}  ")
        text.append(bar, style="cyan")
        lines.append(text.append(f"  {bound} {may}", style="dim"))
    cells = []
    for name, value in counters.items():
        if name == "state":
            cells.append(f"state {STATES.get(value, str(value))}")
        elif name == "policy":
            cells.append(f"policy {('adaptive', 'paper')[value] if value < 2 else value}")
        elif name not in (kept, limit):
            cells.append(f"{name.removesuffix('_hundredths')} {figure_of(name, value)}")
    wide = max(map(len, cells), default=1) + 2
    across = max(1, width // wide)
    for i in range(0, len(cells), across):
        lines.append(Text("".join(cell.ljust(wide) for cell in cells[i : i + across]).rstrip()))
    return lines


HELP = (
    ("q", "quit, or back to the list"),
    ("s, S", "sort by the next column, or the one before"),
    ("r", "reverse the order"),
    ("/", "show only what has this in its name or arguments; Esc clears"),
    ("up, down", "choose a process"),
    ("Enter", "show it alone, with its history; q or Esc goes back"),
    ("space", "look now"),
    ("h, ?", "this help, and back"),
)


def screen(snapshot: Snapshot | None, state: State, interval_s: float, width: int, height: int) -> list[Text]:
    """As many lines as the terminal has at most."""
    if snapshot is None:
        return [Text("calm top: looking…"[: width or 1])]
    rows = state.shown(snapshot)
    lines = header(snapshot, interval_s, len(snapshot.rows))
    footer: list[Text] = []
    alone = next((row for row in snapshot.rows if row.pid == state.detail), None)
    if state.help:
        lines.append(Text())
        lines += [Text(f"  {keys:<10}{what}") for keys, what in HELP]
        keys_line = "h back  q quit"
    elif alone is not None:
        lines.append(Text())
        lines += detail(alone, state, width)
        keys_line = "q back  h help" if len(snapshot.rows) > 1 else "q quit  h help"
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
    for pid, name in snapshot.ended[-1:]:
        keys_line += f"  ended: {pid} {name}"
    body = lines[: max(1, height - len(footer) - 1)]
    body += [Text()] * (height - len(body) - len(footer) - 1)
    return [*body, *footer, Text(keys_line, style="reverse")][:height]


def plain(snapshot: Snapshot, state: State, interval_s: float, width: int) -> list[Text]:
    """For a file, or a terminal afterwards: everything, without keys."""
    lines = header(snapshot, interval_s, len(snapshot.rows))
    lines += table(state.shown(snapshot), width, state.sort)
    for line in lines:
        line.rstrip()
    lines += [Text(f"note: {note}") for note in snapshot.notes]
    lines += [Text(f"ended: {pid} {name}") for pid, name in snapshot.ended]
    return lines
