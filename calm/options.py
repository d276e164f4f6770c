"""The options that several commands have, each in one piece."""

from collections.abc import Callable
from typing import Any

import click

from calm import allocators, completion, measure, ranges

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def allocator_list(text: str, *, required: bool = False, default: str | None = None) -> Decorator:
    """-a A,B,…: what `allocators.parse_list` reads; the command's `specs`."""
    return click.option(
        "-a",
        "--allocators",
        "specs",
        multiple=True,
        required=required,
        default=() if default is None else (default,),
        show_default=default is not None,
        shell_complete=allocators.complete_list,
        metavar="A,B,…",
        help=text,
    )


def json_file(text: str = "Write everything as JSON; '-' is stdout.") -> Decorator:
    """--json FILE, for `report.write`; the command's `json_path`."""
    return click.option("--json", "json_path", type=click.Path(allow_dash=True), metavar="FILE", help=text)


def timeout(default_s: float, text: str) -> Decorator:
    """--timeout SECONDS, of each run."""
    return click.option(
        "--timeout",
        type=ranges.FloatRange(min=0, min_open=True, max=measure.MOST_LIMIT_S),
        default=default_s,
        show_default=True,
        metavar="SECONDS",
        help=text,
    )


def program(*, required: bool = True) -> Decorator:
    """CMD and its arguments, all that is left; the command's `cmd`."""
    return click.argument(
        "cmd",
        nargs=-1,
        required=required,
        type=click.UNPROCESSED,
        shell_complete=completion.command_line,
    )
