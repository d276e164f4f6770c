"""`calm export`: the counters of running processes for Prometheus and OpenTelemetry."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import click

from calm.commands.export.otlp import Pusher
from calm.commands.export.reader import BusyError, Reader, Snapshot
from calm.commands.export.textfile import Textfile
from calm.core import options, proc, processes
from calm.core.errors import FAILED, CalmError

if TYPE_CHECKING:
    from calm.commands.export.exposition import Server

ADDRESS, PORT = "127.0.0.1", 22560
_LISTEN = re.compile(r"(?:(?:\[(?P<ipv6>[^\]]+)\]|(?P<name>[^\[\]:]+)):)?(?P<port>\d{1,5})")
# How often the processes that were named are checked for having ended.
_CHECK_S = 1.0


class _Listen(click.ParamType):  # type: ignore[type-arg]
    """[ADDRESS:]PORT; the command gets both."""

    name = "address"

    def convert(
        self,
        value: str | tuple[str, int],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        found = _LISTEN.fullmatch(value)
        if found is None or int(found["port"]) > 65535:
            example = f"as {PORT}, 127.0.0.1:{PORT}, 0.0.0.0:{PORT} or [::1]:{PORT}"
            self.fail(f"{value!r} is not [ADDRESS:]PORT, {example}.", param, ctx)
        return found["ipv6"] or found["name"] or ADDRESS, int(found["port"])


def _textfile_name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value not in (None, "-") and not str(value).endswith(".prom"):
        raise click.UsageError(
            f"--textfile {value}: the name must end in .prom, as node_exporter's textfile collector wants it"
        )
    return options.writable(context, parameter, value)


@dataclass
class _Outputs:
    """Where metrics go on an interval."""

    textfile: Textfile | None
    pusher: Pusher | None

    @property
    def is_periodic(self) -> bool:
        return self.textfile is not None or self.pusher is not None

    @property
    def has_failed(self) -> bool:
        return any(each is not None and each.has_failed for each in (self.textfile, self.pusher))

    def send(self, snapshot: Snapshot, wait: bool) -> None:
        if self.textfile:
            from calm.commands.export import exposition

            self.textfile.write(exposition.text(snapshot, self.textfile.name))
        if self.pusher:
            self.pusher.push(snapshot)
            if wait:
                self.pusher.wait()


def _need_prometheus_client() -> None:
    try:
        import_module("prometheus_client")
    except ImportError as error:
        raise CalmError(
            "calm export needs prometheus_client, which is not installed: pip install prometheus-client, "
            "or Debian's package python3-prometheus-client"
        ) from error


def _block_signals() -> set[signal.Signals]:
    """Signals that end the command from now on wait for `sigtimedwait`: no write is interrupted halfway."""
    ending = {
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    return ending


def _run(
    reader: Reader,
    outputs: _Outputs,
    ending: set[signal.Signals],
    is_over: Callable[[], bool],
    delay: float,
    rounds: int | None,
) -> int | None:
    """Writes and pushes until the end. Returns the signal that ended it."""
    next_at = time.monotonic()
    while True:
        if outputs.is_periodic and time.monotonic() >= next_at:
            with contextlib.suppress(BusyError):
                outputs.send(reader.read(), wait=rounds is not None)
            next_at = max(next_at + delay, time.monotonic() + 0.2 * delay)
            if rounds is not None and (rounds := rounds - 1) == 0:
                return None
        if is_over():
            return None
        pause = min(_CHECK_S, next_at - time.monotonic()) if outputs.is_periodic else _CHECK_S
        if (received := signal.sigtimedwait(ending, max(0.0, pause))) is not None:
            return received.si_signo


def _report_first(reader: Reader, pids: Sequence[int], name: str | None) -> dict[int, str]:
    """Reads once, and reports what the user would otherwise miss. Returns the names of the processes."""
    first = reader.read()
    names = {process.pid: process.command for process in first.processes}
    for pid in pids:
        if why := reader.why_unreadable(pid):
            raise CalmError(f"process {pid}: {why}")
        if pid not in names:
            raise proc.GoneError(pid)
        if reader.lacks_library(pid):
            click.echo(f"calm: neither calmalloc nor ptlbmalloc2 is in process {pid}", err=True)
    if name is not None and not names:
        click.echo(f"calm: there is no process called {name!r} yet", err=True)
    unreadable = first.own["permission"]
    if not pids and name is None and not names and unreadable and not reader.reads_others:
        click.echo(f"calm: no process is exported; without permission to read: {unreadable}", err=True)
    return names


@click.command(
    "export",
    epilog="""\b
Examples:
  calm export
  calm export --listen 0.0.0.0:22560
  calm export 1234 --otlp http://localhost:4318 -d 10s
  calm export --textfile calmalloc.prom
  calm export --command 'python*' -n 1 --textfile -
""",
)
@click.argument(
    "pids",
    metavar="[PID]...",
    nargs=-1,
    callback=options.process_ids,
    shell_complete=options.complete_process_ids,
)
@options.command_name()
@click.option(
    "--listen",
    type=_Listen(),
    is_flag=False,
    flag_value=f"{ADDRESS}:{PORT}",
    metavar="[[ADDRESS:]PORT]",
    help=f"Serve /metrics by HTTP. Default, also without other outputs: {ADDRESS}:{PORT}.",
)
@click.option(
    "--textfile",
    "textfile_path",
    metavar="FILE.prom",
    callback=_textfile_name,
    help="Write FILE for node_exporter's textfile collector; - is standard output.",
)
@click.option("--otlp", "url", metavar="URL", help="Push to an OpenTelemetry collector by OTLP over HTTP.")
@options.duration(
    "-d",
    "--delay",
    default="15s",
    at_least="100ms",
    at_most="24h",
    text="The interval between two writes of --textfile, and between two pushes of --otlp.",
)
@options.rounds(None, "End after N writes and pushes, and leave the file. Default: no end.")
@click.option(
    "--no-shootdowns",
    is_flag=True,
    help="Do not count TLB shootdowns, where the kernel permits it: each costs the process some 0.3 µs more.",
)
def command(
    pids: tuple[int, ...],
    name: str | None,
    listen: tuple[str, int] | None,
    textfile_path: str | None,
    url: str | None,
    delay: float,
    rounds: int | None,
    no_shootdowns: bool,
) -> None:
    """Export counters of running processes to Prometheus or OpenTelemetry.

    Without PID or NAME, all processes that run calmalloc or ptlbmalloc2 are exported: all of this user's, or,
    for root, all. No process is stopped, and none needs an option for it.
    """
    if pids and name is not None:
        raise click.UsageError("--command and process ids exclude each other")
    if rounds is not None and (listen or not (textfile_path or url)):
        raise click.UsageError("-n needs --textfile or --otlp, and excludes --listen")
    if not (textfile_path or url):
        listen = listen or (ADDRESS, PORT)
    if listen or textfile_path:
        _need_prometheus_client()
    choose = processes.chosen(pids, name)
    with contextlib.ExitStack() as stack:
        reader = Reader(choose, every=not pids and name is None, shootdowns=not no_shootdowns)
        stack.callback(reader.close)
        pusher = Pusher(url, delay, reader.failures) if url else None
        server = _listen(listen, reader, stack) if listen else None
        names = _report_first(reader, pids, name)
        ending = _block_signals()
        if server:
            _serve(server, stack)
        textfile = Textfile(textfile_path, reader.failures) if textfile_path else None
        if textfile and rounds is None:
            stack.callback(textfile.remove)
        outputs = _Outputs(textfile, pusher)

        def is_over() -> bool:
            return bool(pids) and all(
                (stat := proc.stat_or_none(pid)) is None or stat.has_ended for pid in choose()
            )

        number = _run(reader, outputs, ending, is_over, delay, rounds)
    if number is None and rounds is None:
        for pid in pids:
            click.echo(f"calm: process {pid} ({names[pid]}) has ended", err=True)
    if rounds is not None and outputs.has_failed:
        raise SystemExit(FAILED)
    if number is not None and number != signal.SIGTERM:
        raise SystemExit(128 + number)


def _listen(address: tuple[str, int], reader: Reader, stack: contextlib.ExitStack) -> Server:
    from calm.commands.export.exposition import Server

    server = Server(*address, reader)
    stack.callback(server.server_close)
    return server


def _serve(server: Server, stack: contextlib.ExitStack) -> None:
    """Serves in a thread, until the stack is closed."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.shutdown)
    click.echo(f"calm: {server.url}", err=True)
