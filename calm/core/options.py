"""The options and arguments that several commands share, and the types of values that click does not have."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from calm.core import allocators, proc, report
from calm.core.plot import ENDINGS

if TYPE_CHECKING:
    from rich.console import Console

    from calm.core.documents import Document

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(rf"(\d+(?:\.\d+)?|\.\d+) ?({'|'.join(_UNITS)})")

_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"(\d{1,20}) ?(|[kmgt])(?:i?b)?", re.IGNORECASE | re.ASCII)


class FloatRange(click.FloatRange):
    """A number within bounds. click's own accepts NaN, which is neither below nor above a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A time with its unit, as 200ms, 30s or 5min; the command gets seconds."""

    name = "duration"

    def __init__(self, at_least: str = "1us", at_most: str = "10000h") -> None:
        self._least, self._most = at_least, at_most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        seconds = parse_duration(value)
        if seconds is None:
            self.fail(f"{value!r} is not a duration with a unit, as 200ms, 30s or 5min.", param, ctx)
        least, most = parse_duration(self._least) or 0, parse_duration(self._most) or 0
        if not least <= seconds <= most:
            self.fail(f"{value} is not in the range {self._least} to {self._most}.", param, ctx)
        return seconds


def parse_duration(text: str) -> float | None:
    """Seconds of a text such as 200ms, 30s, 5min or 1h; None if it is not one."""
    found = _DURATION.fullmatch(text)
    return float(found[1]) * _UNITS[found[2]] if found else None


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, as 65536, 512k, 64M or 1GiB; the command gets bytes."""

    name = "size"

    def __init__(self, at_least: str = "0", at_most: str = "8388607T") -> None:
        self._least, self._most = at_least, at_most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401
        size = parse_size(value)
        if size is None:
            self.fail(f"{value!r} is not a number of bytes, as 65536, 512k or 64M.", param, ctx)
        if not (parse_size(self._least) or 0) <= size <= (parse_size(self._most) or 0):
            self.fail(f"{value} is not in the range {self._least} to {self._most}.", param, ctx)
        return size


def parse_size(text: str) -> int | None:
    """Bytes of a text such as 65536, 512k, 64M or 1GiB; None if it is not one."""
    found = _SIZE.fullmatch(text)
    return int(found[1]) << _SHIFTS[found[2].lower()] if found else None


def duration(
    *names: str, default: str | None = None, at_least: str = "1us", at_most: str = "10000h", text: str
) -> Decorator:
    return click.option(
        *names, type=Duration(at_least, at_most), default=default, show_default=True, help=text
    )


def timeout(default: str, text: str) -> Decorator:
    """--timeout DURATION, of each run; the command's `timeout`, in seconds."""
    return duration("--timeout", default=default, at_least="1ms", at_most="240h", text=text)


def rounds(default: int | None, text: str) -> Decorator:
    """-n N; the command's `rounds`."""
    return click.option(
        "-n", "rounds", type=click.IntRange(min=1), default=default, show_default=True, metavar="N", help=text
    )


def allocator_list(text: str, *, required: bool = False, default: str | None = None) -> Decorator:
    """-a A,B,…, for `allocators.parse_list`; the command's `specs`."""
    return click.option(
        "-a",
        "--allocators",
        "specs",
        multiple=True,
        required=required,
        default=() if default is None else (default,),
        show_default=True,
        shell_complete=allocators.complete_list,
        metavar="A,B,…",
        help=text,
    )


def program(*, required: bool = True) -> Decorator:
    """CMD and its arguments; the command's `cmd`."""
    return click.argument(
        "cmd",
        nargs=-1,
        required=required,
        type=click.UNPROCESSED,
        shell_complete=lambda _context, _parameter, incomplete: [CompletionItem(incomplete, type="file")],
    )


@dataclass(frozen=True)
class Output:
    """Where a command's report and its JSON document go."""

    report_path: str | None = None
    json_path: str | None = None
    stdout_is_taken: bool = False
    """By something else that the command writes there, as CSV."""

    @property
    def json_on_stdout(self) -> bool:
        return self.json_path == "-"

    @contextmanager
    def console(self) -> Iterator[Console]:
        """For the report: on standard output, on standard error beside JSON, or in the file of -o.

        The file is written at the end, and not at all if an exception ends the report.
        """
        if self.report_path in (None, "-"):
            taken = self.json_on_stdout or self.stdout_is_taken
            yield report.console(sys.stderr if taken else sys.stdout)
            return
        text = StringIO()
        yield report.console(text)
        report.write(str(self.report_path), text.getvalue())

    def write(self, document: Document) -> None:
        from calm.core import documents

        if self.json_path:
            report.write(self.json_path, documents.text(document))


def writable(_context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuses a file that could not be written, before hours of runs, or that is a program."""
    if value is None or value == "-":
        return value
    option = parameter.opts[-1]
    if not value or value.startswith("-"):
        raise click.UsageError(f"{option} needs the name of a file, and {value!r} is none")
    is_program = Path(value).is_file() and os.access(value, os.X_OK)
    if is_program or ("/" not in value and not Path(value).exists() and shutil.which(value)):
        raise click.UsageError(f"{option} {value}: is a program; where CMD follows, put `--` before it")
    report.check_writable(value)
    return value


def _document_file(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuses a process id: `--json 1234` lacks FILE or PID, and 1234 is hardly meant as FILE."""
    if value and value.isdecimal():
        option = parameter.opts[-1]
        raise click.UsageError(
            f"{option} {value}: is a number, not a file; process ids go before {option}, or after {option} -"
        )
    return writable(context, parameter, value)


def document(name: str, text: str) -> Decorator:
    """--name [FILE]; the command's `name_path`, which is '-' without FILE."""
    return click.option(
        f"--{name}",
        f"{name}_path",
        is_flag=False,
        flag_value="-",
        metavar="[FILE]",
        callback=_document_file,
        help=text,
    )


def output(what: str = "everything") -> Decorator:
    """-o FILE and --json [FILE]; the command's `output`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*arguments: Any, report_path: str | None, json_path: str | None, **others: Any) -> Any:  # noqa: ANN401
            return function(*arguments, output=Output(report_path, json_path), **others)

        as_json = document("json", f"Write {what} as JSON to FILE, or to standard output without one.")
        as_text = click.option(
            "-o",
            "--output",
            "report_path",
            type=click.Path(),
            metavar="FILE",
            callback=writable,
            help="Write the report to FILE instead of standard output.",
        )
        return as_text(as_json(wrapped))

    return decorate


def _picture(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    if value and Path(value).suffix not in ENDINGS:
        raise click.UsageError(f"{parameter.opts[-1]} {value}: the name must end in {' or '.join(ENDINGS)}")
    if value and find_spec("matplotlib") is None:
        what = f"{parameter.opts[-1]} needs matplotlib, which is not installed: pip install matplotlib"
        raise click.UsageError(what)
    return Path(value) if writable(context, parameter, value) and value else None


def plot(text: str) -> Decorator:
    """--plot FILE; the command's `plot_path`."""
    return click.option(
        "--plot", "plot_path", type=click.Path(), metavar="FILE.svg|png", callback=_picture, help=text
    )


def command_name() -> Decorator:
    """--command NAME, for `processes.chosen`; the command's `name`."""
    return click.option(
        "--command",
        "name",
        metavar="NAME",
        shell_complete=complete_names,
        help="Only processes of this name; * and ? match any characters.",
    )


def parse_process_id(word: str) -> int | None:
    return int(word) if re.fullmatch("[0-9]{1,10}", word) and 0 < int(word) < 1 << 31 else None


def process_ids(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[int, ...]:
    """Process ids with commas between them, each once."""
    pids: dict[int, None] = {}
    for word in (word for value in values for word in value.split(",")):
        if (pid := parse_process_id(word)) is None:
            raise click.BadParameter(f"{word!r} is not a process id", ctx, param)
        pids[pid] = None
    return tuple(pids)


def complete_process_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The user's own processes."""
    found = []
    for pid in proc.pids():
        with contextlib.suppress(OSError, proc.GoneError, KeyError):
            if str(pid).startswith(incomplete) and proc.owner(pid) == os.geteuid():
                found.append(CompletionItem(str(pid), help=proc.stat(pid).name))
    return found


def complete_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    names = {stat.name for pid in proc.pids() if (stat := proc.stat_or_none(pid))}
    return sorted(name for name in names if name.startswith(incomplete))
