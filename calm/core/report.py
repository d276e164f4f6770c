"""Figures as text, consoles and tables, and writing of files."""

import contextlib
import errno
import os
import shutil
import stat
import sys
from collections.abc import Collection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

import click

from calm.core.errors import CalmError, without_controls
from calm.core.statistics import Ratio

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_WIDTH_OF_A_FILE = 160
_WIDTH_OF_A_TABLE = 80
_WIDTH_WITHOUT_END = 10_000


def console(file: TextIO | None = None, *, soft_wrap: bool = True) -> "Console":
    """A console that neither interprets markup in a program's output nor breaks lines of a file.

    rich is imported where it is used: half of calm's commands end without it.
    """
    from rich.console import Console

    class StrictConsole(Console):
        def on_broken_pipe(self) -> None:
            # rich would end calm with 1; calm.cli ends it with PIPE_CLOSED.
            raise BrokenPipeError

        def render_str(self, text: str, **options: Any) -> "Text":  # noqa: ANN401
            # A program's words and a file's labels must not control the terminal.
            return super().render_str(without_controls(text), **options)

    stream = file or sys.stdout
    width = shutil.get_terminal_size((100, 24)).columns if stream.isatty() else _WIDTH_OF_A_FILE
    return StrictConsole(
        file=stream, width=width, soft_wrap=soft_wrap, markup=False, highlight=False, emoji=False
    )


def table(
    *headings: str,
    right: Collection[str] = (),
    wrap: Collection[str] = (),
    spare: Collection[str] = (),
    show_header: bool = True,
    padding: tuple[int, int, int, int] = (0, 1, 0, 1),
) -> "Table":
    """A table without rows, in the form that all of calm's have; `right`, `wrap` and `spare` name columns.

    A narrow terminal does not get the spare ones.
    """
    from rich.table import Table

    class SparingTable(Table):
        without = frozenset(spare)

    made = SparingTable(
        box=None, pad_edge=False, show_header=show_header, header_style="bold", padding=padding
    )
    for heading in headings:
        made.add_column(
            heading,
            justify="right" if heading in right else "left",
            no_wrap=heading not in wrap,
            overflow="fold" if heading in wrap else "ellipsis",
        )
    return made


def print_table(target: "Console", table: "Table") -> None:
    """Prints a table without the blanks that pad its lines.

    On a narrow terminal its spare columns are left out; what then is longer is not cut, as rich would. A file
    gets one line for each row.
    """
    from rich.measure import Measurement

    width = max(target.width, _WIDTH_OF_A_TABLE)
    options = target.options.update(width=_WIDTH_WITHOUT_END)
    for column in table.columns:
        # rich takes the longest word for what a column needs.
        cells = (column.header, *column.cells)
        if column.no_wrap:
            column.min_width = max(Measurement.get(target, options, each).maximum for each in cells)
    needed = Measurement.get(target, options, table)
    if target.is_terminal and needed.maximum > width:
        spare = getattr(table, "without", ())
        table.columns = [column for column in table.columns if column.header not in spare]
        needed = Measurement.get(target, options, table)
    target.width = max(width, needed.minimum if target.is_terminal else needed.maximum)
    with target.capture() as capture:
        target.print(table, soft_wrap=False)
    target.width = width
    for line in capture.get().splitlines():
        target.file.write(line.rstrip() + "\n")


def warn(text: str) -> None:
    """Prints a line on standard error, beside the report."""
    click.echo(f"calm: {without_controls(text)}", err=True)


def duration(seconds: float) -> str:
    """1.234 s, 12.3 ms, 45 µs."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.0f} µs"


def rough_duration(seconds: float) -> str:
    """1 h 5 min, 12 min, 40 s."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{max(1, round(seconds))} s"


def memory(kib: float) -> str:
    """12.3 MiB, 456 KiB."""
    if kib >= 1024 * 1024:
        return f"{kib / 1024 / 1024:.2f} GiB"
    return f"{kib / 1024:.1f} MiB" if kib >= 1024 else f"{kib:.0f} KiB"


def figure(value: float | None, unit: str) -> str:
    """A figure in its unit: s, KiB or count."""
    if value is None:
        return "-"
    if unit == "s":
        return duration(value)
    if unit == "KiB":
        return memory(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def share(part: float, whole: float) -> str:
    """A percentage that never rounds a cost to nothing."""
    if whole <= 0:
        return "unknown share"
    percent = 100 * part / whole
    return "under 0.01 %" if 0 < percent < 0.01 else f"{percent:.2f} %"


def ratio(found: Ratio | None) -> tuple[str, str]:
    """A ratio and its interval, for two cells of a table."""
    if found is None or found.value is None:
        return "-", ""
    if found.low is None and found.high is None:
        return f"{found.value:.3g}", "-"
    low, high = ("∞" if end is None else f"{end:.3g}" for end in (found.low, found.high))
    return f"{found.value:.3g}", f"{low} to {high}"


def printable(line: str) -> str:
    """A line of a program's output without control characters, and not too long."""
    return shown(line)[:200]


def shown(text: str) -> str:
    """A program's output without control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in text)


def last_words(errors: IO[bytes]) -> str:
    """The last line that a program wrote to standard error, for the message about its failure."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 2000))
    lines = errors.read().decode(errors="replace").split("\n")
    last = printable(next((line.strip() for line in reversed(lines) if line.strip()), ""))
    return f" (it said: {last})" if last else ""


def check_writable(path: str) -> None:
    """Raises CalmError where a file could not be written; called before hours of runs."""
    target = Path(path)
    if target.is_dir():
        raise CalmError(f"cannot write {path}: is a directory")
    if not target.absolute().parent.is_dir():
        raise CalmError(f"cannot write {path}: no such directory")
    if not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
        raise CalmError(f"cannot write {path}: permission denied")


def write(path: str, content: str | bytes) -> None:
    """Writes a file, whole or not at all as far as its folder lets it; '-' is standard output."""
    if path == "-":
        click.echo(content, nl=False)
        return
    try:
        _replace(Path(path), content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise CalmError(f"cannot write {path}: {error.strerror}") from error


def _replace(target: Path, content: bytes) -> None:
    # A pipe is not replaced, nor a file that is open under another name, as /dev/stdout.
    is_plain = not target.exists() or (target.is_file() and os.access(target, os.W_OK))
    if not is_plain or target.is_relative_to("/dev"):
        target.write_bytes(content)
        return
    target = target.resolve()
    part = target.with_name(f".calm-{os.getpid()}")
    try:
        part.write_bytes(content)
        if target.exists():
            had = target.stat()
            os.chown(part, had.st_uid, had.st_gid)
            part.chmod(stat.S_IMODE(had.st_mode))
        part.replace(target)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY):
            raise
        # The file may be written where its folder, its owner or a mount keeps it from being replaced.
        target.write_bytes(content)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
