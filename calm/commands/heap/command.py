"""`calm heap`: which code holds memory, which allocates most, and how long blocks live."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calm.core import environment, options, report
from calm.core.errors import INTERRUPTED, USAGE, CalmError
from calm.core.measure import signal_name
from calm.core.options import Output

if TYPE_CHECKING:
    from calm.core.heap_profile import HeapProfile


@dataclass(frozen=True)
class Form:
    """What a profile is shown as, and written to."""

    type: str | None
    top: int
    pprof: str | None
    folded: str | None
    speedscope: str | None
    html: str | None
    output: Output


def _form(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of all forms; the command's `form`."""

    @functools.wraps(function)
    def wrapped(*arguments: Any, output: Output, **given: Any) -> Any:  # noqa: ANN401
        names = ("type", "top", "pprof", "folded", "speedscope", "html")
        chosen = {name: given.pop(name) for name in names}
        return function(*arguments, form=Form(**chosen, output=output), **given)

    decorated: Callable[..., Any] = options.output("the profile")(wrapped)
    for name, text in (
        ("html", "Write a page with flame graphs."),
        ("speedscope", "Write a file for speedscope.app, with all types."),
        ("folded", "Write folded stacks, a line each, for flamegraph.pl and its kin."),
        ("pprof", "Write a file for pprof, compressed, with all types and the functions' names."),
    ):
        decorated = click.option(
            f"--{name}", type=click.Path(), metavar="FILE", callback=options.writable, help=text
        )(decorated)
    decorated = click.option(
        "--top",
        type=click.IntRange(min=1),
        default=5,
        show_default=True,
        metavar="N",
        help="Stacks in a table.",
    )(decorated)
    return click.option(
        "--type",
        metavar="TYPE",
        help="What to show, and what forms with one value have: inuse_space, inuse_objects, alloc_space, "
        "alloc_objects, peak_space, peak_objects, freed_lifetime or inuse_age; of other programs' profiles "
        "their own.",
    )(decorated)


def _write(profile: HeapProfile, form: Form, stdout_is_taken: bool = False) -> None:
    """The report, and all files."""
    from calm.commands.heap import formats, html, summary
    from calm.core import pprof

    formats.column(profile, form.type)
    with replace(form.output, stdout_is_taken=stdout_is_taken).console() as console:
        summary.show(console, profile, form.type, form.top)
    form.output.write(profile)
    if form.pprof:
        report.write(form.pprof, pprof.encode(profile))
    if (form.folded or form.speedscope or form.html) and formats.has_negative(profile):
        report.warn("stacks that shrank are left out of folded stacks, speedscope's file and the page")
    if form.folded:
        report.write(form.folded, formats.folded(profile, form.type))
    if form.speedscope:
        report.write(form.speedscope, formats.speedscope(profile, form.type))
    if form.html:
        report.write(form.html, html.page(profile, form.type))


@click.group(
    "heap",
    epilog="""\b
Examples:
  calm heap run -- ./server --self-test
  calm heap run --pid 1234 --for 30s --html heap.html
  calm heap show calmalloc.1234.*.heap
""",
)
def command() -> None:
    """Show which code holds memory, which allocates most, and how long blocks live.

    calmalloc samples allocations with their stacks of calls; the amounts are estimates of totals.
    """


@command.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  calm heap run -- ./server --self-test
  calm heap run --every 64k --html heap.html -- python3 job.py
  calm heap run --pid 1234 --for 30s
  calm heap run --pid 1234 --for 24h --each 1h --pprof server.pb.gz
""",
)
@click.option("--pid", type=click.IntRange(min=1), metavar="PID", help="Profile this process, while it runs.")
@options.duration(
    "--for",
    "for_s",
    text="With --pid: how long. Default: 30s; a profile that is on already is read at once.",
    at_most="720h",
)
@click.option(
    "--every",
    type=options.Size("1", "1G"),
    metavar="BYTES",
    help="Average number of bytes between samples. Default: 512k.",
)
@options.duration(
    "--each",
    "each_s",
    text="Also write a file for pprof at this interval: FILE of --pprof with .1, .2 and so on."
    " The last profile is FILE.",
    at_least="100ms",
    at_most="720h",
)
@_form
@options.program(required=False)
def run(
    pid: int | None,
    for_s: float | None,
    every: int | None,
    each_s: float | None,
    form: Form,
    cmd: tuple[str, ...],
) -> None:
    """Profile the heap of a program, or of a running process.

    CMD runs with calmalloc preloaded. The report goes to standard error after its end. The exit status is
    CMD's.

    A process must use calmalloc. It is read from its memory: it is neither stopped nor signalled. If its
    profile is off, the library is asked to switch it on, and off at the end. If calm is killed meanwhile, the
    library does so by itself after a minute.
    """
    if (pid is None) == (not cmd):
        raise click.UsageError("give either a command to run, or --pid of a process")
    if for_s is not None and pid is None:
        raise click.UsageError("--for goes with --pid: a command is profiled to its end")
    if each_s is not None and form.pprof in (None, "-"):
        raise click.UsageError("--each needs --pprof FILE, whose name the numbered files have")
    from calm.commands.heap import watch
    from calm.core.heap_profile import TYPES
    from calm.core.progress import Bar

    if form.type is not None and form.type not in {each.name for each in TYPES}:
        raise CalmError(f"--type {form.type}: there is {', '.join(each.name for each in TYPES)}", USAGE)
    series = watch.Series(str(form.pprof), each_s) if each_s is not None else None
    if pid is None:
        environment.tell()
        stdout = sys.stderr.fileno() if form.output.json_on_stdout else None
        profile, code = watch.run(cmd, every or watch.DEFAULT_MEAN, series, stdout)
        _write(profile, form, stdout_is_taken=True)
        if code > 128:
            report.warn(f"the program was ended by {signal_name(code - 128)}")
        sys.stdout.flush()
        raise SystemExit(code)
    # So that the profile is switched off.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    with Bar(total=for_s) as bar:
        profile, interrupted = watch.watch(pid, for_s, every, series, bar)
    _write(profile, form)
    if interrupted and for_s is not None:
        raise SystemExit(INTERRUPTED)


@command.command(
    "show",
    epilog="""\b
Examples:
  calm heap show calmalloc.1234.*.heap
  calm heap show --type alloc_space --folded stacks.txt calmalloc.1234.*.heap
  calm heap show later.pb.gz earlier.pb.gz
""",
)
@_form
@click.argument("path", metavar="FILE", type=click.Path())
@click.argument("base_path", metavar="[BASE]", type=click.Path(), required=False)
def show(path: str, base_path: str | None, form: Form) -> None:
    """Show or convert a profile, or what it has more than BASE.

    FILE is one of libcalmalloc's, any other of pprof's format, or a JSON document of `calm heap`.
    """
    from calm.commands.heap.difference import difference

    profile = _read(path)
    if base_path is not None:
        profile = difference(profile, _read(base_path))
    _write(profile, form)


def _read(path: str) -> HeapProfile:
    from calm.core import documents, pprof
    from calm.core.heap_profile import HeapProfile

    try:
        with Path(path).open("rb") as file:
            is_json = file.read(1) == b"{"
    except OSError as error:
        raise CalmError(f"cannot read {path}: {error.strerror}", USAGE) from error
    if not is_json:
        return pprof.read(path)
    found = documents.read(path, HeapProfile)
    found.source = found.source or path
    return found
