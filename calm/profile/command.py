"""`calm profile`: where shootdowns, page faults and memory calls come from."""

import json
import re
import signal
import sys

import click

from calm import options, report
from calm.measure import signal_name
from calm.profile.model import Profile
from calm.progress import Bar

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TERMINATED = 128 + signal.SIGTERM


class Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """30s, 2min, 500ms; a number alone is of seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(ms|s|min|m|h|)", str(value).strip())
        seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
        if not 0 < seconds <= 30 * 24 * 3600:
            self.fail(f"{value!r} is no duration such as 30s, 2min or 500ms", param, ctx)
        return seconds


def _terminate(*_: object) -> None:
    raise SystemExit(_TERMINATED)


def _make(
    cmd: tuple[str, ...], pid: int | None, for_s: float | None, freq: int, stdout: int | None
) -> Profile:
    # The rest is for those who profile; `calm profile --help` needs none of it.
    from calm.profile.watch import Progress, Watcher, check_pid

    if pid is not None:
        check_pid(pid)
    with Bar(total=for_s) as bar:
        progress = Progress(
            # Of a program that runs nothing is shown: the terminal is its own.
            watching=lambda seconds: bar.update(seconds, f"watching process {pid}"),
            reading=lambda part: bar.update(part, "reading the stacks", 1.0),
        )
        watcher = Watcher(freq, progress)
        return watcher.run(cmd, stdout) if pid is None else watcher.watch(pid, for_s)


def _exit_code(profile: Profile, for_s: float | None) -> int:
    if profile.exit_code is not None:
        return profile.exit_code
    # Without a duration an interrupt is how one ends it.
    return 128 + signal.SIGINT if profile.interrupted and for_s is not None else 0


@click.command(
    "profile",
    context_settings={"allow_interspersed_args": False},
    epilog="\b\nExamples:\n"
    "  calm profile -- ./server --port 8080\n"
    "  calm profile --pid 1234 --for 30s --html report.html",
)
@click.option(
    "--pid", type=click.IntRange(min=1), metavar="PID", help="Watch this process, and its children."
)
@click.option(
    "--for",
    "for_s",
    type=Duration(),
    metavar="DURATION",
    help="With --pid: for how long, as 30s or 2min. Otherwise to the process's end, or Ctrl-C.",
)
@click.option(
    "--freq",
    type=click.IntRange(min=1, max=10_000),
    default=99,
    show_default=True,
    metavar="HZ",
    help="Samples of CPU time a second, on each CPU.",
)
@options.json_file("Write the profile as JSON; '-' is stdout, and CMD's own output then goes to stderr.")
@click.option(
    "--html",
    "html_path",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write the profile as a page with its flame graphs.",
)
@options.program(required=False)
def command(
    pid: int | None,
    for_s: float | None,
    freq: int,
    json_path: str | None,
    html_path: str | None,
    cmd: tuple[str, ...],
) -> None:
    """Show where the TLB shootdowns, page faults and memory calls of CMD, or of a process, come from."""
    if (pid is None) == (not cmd):
        raise click.UsageError("give either a command to run, or --pid of a process")
    if for_s is not None and pid is None:
        raise click.UsageError("--for goes with --pid: a command is watched to its end")
    for path in (json_path, html_path):
        if path and path != "-":
            report.check_writable(path)
    # So that perf is ended, and its files are removed, however this ends.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _terminate)
    profile = _make(cmd, pid, for_s, freq, sys.stderr.fileno() if json_path == "-" else None)
    from calm.profile.summary import show

    # On standard error, so that the program's own output can still be piped.
    show(report.console(sys.stderr), profile)
    if profile.exit_code is not None and profile.exit_code > 128 and not profile.interrupted:
        click.echo(
            f"the program ended with {profile.exit_code}: {signal_name(profile.exit_code - 128)}", err=True
        )
    if json_path:
        report.write(json_path, json.dumps(profile.as_dict()) + "\n")
    if html_path:
        from calm.profile import html

        html.write(profile, html_path)
    sys.stdout.flush()
    raise SystemExit(_exit_code(profile, for_s))
