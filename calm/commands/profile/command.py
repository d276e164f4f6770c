"""`calm profile`: the causes and stacks of TLB shootdowns, page faults and memory calls."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path

import click

from calm.core import options, report
from calm.core.errors import INTERRUPTED
from calm.core.measure import signal_name
from calm.core.options import Output
from calm.core.progress import Bar


@click.command(
    "profile",
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  calm profile -- ./server --port 8080
  calm profile --pid 1234 --for 30s --html report.html
""",
)
@click.option(
    "--pid", type=click.IntRange(min=1), metavar="PID", help="Profile this process, and its descendants."
)
@options.duration(
    "--for", "for_s", text="With --pid: how long. Default: until the process ends, or Ctrl-C.", at_most="720h"
)
@click.option(
    "--freq",
    type=click.IntRange(min=1, max=10_000),
    default=99,
    show_default=True,
    metavar="HZ",
    help="Samples of CPU time a second, on each CPU.",
)
@options.output("the profile")
@click.option(
    "--html",
    "html_path",
    type=click.Path(),
    metavar="FILE",
    callback=options.writable,
    help="Write the profile as a page with flame graphs.",
)
@options.plot("Draw RSS, dirty memory and huge pages over time.")
@options.program(required=False)
def command(
    pid: int | None,
    for_s: float | None,
    freq: int,
    output: Output,
    html_path: str | None,
    plot_path: Path | None,
    cmd: tuple[str, ...],
) -> None:
    """Find the causes and stacks of shootdowns, page faults and memory calls.

    The report of a command goes to standard error, and CMD's own output to standard output, unless the JSON
    document is there. The exit status is CMD's.
    """
    if (pid is None) == (not cmd):
        raise click.UsageError("give either a command to run, or --pid of a process")
    if for_s is not None and pid is None:
        raise click.UsageError("--for goes with --pid: a command is profiled to its end")
    # perf ends with this process in any case, and here without a report.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    # Imported here: `calm profile --help` needs none of it.
    from calm.commands.profile import summary
    from calm.commands.profile.watch import Watcher, check_pid

    if pid is not None:
        check_pid(pid)
    with Bar(total=for_s) as bar:
        watcher = Watcher(freq, bar)
        stdout = sys.stderr.fileno() if output.json_on_stdout else None
        profile = watcher.run(cmd, stdout) if pid is None else watcher.watch(pid, for_s)
    code = profile.exit_code
    with replace(output, stdout_is_taken=pid is None).console() as console:
        summary.show(console, profile)
        if code is not None and code > 128 and not profile.interrupted_by:
            console.print(f"the program ended with {code}: {signal_name(code - 128)}", soft_wrap=True)
    output.write(profile)
    if html_path:
        from calm.commands.profile import html

        report.write(html_path, html.page(profile))
    if plot_path:
        summary.draw(plot_path, profile)
    sys.stdout.flush()
    if code is None:
        # Without --for, Ctrl-C is the regular end.
        code = INTERRUPTED if profile.interrupted_by and for_s is not None else 0
    raise SystemExit(code)
