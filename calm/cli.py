"""The `calm` command: finds the subcommand, and turns errors into one line and an exit status."""

import errno
import os
import signal
import sys
from functools import cached_property
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from calm import __version__
from calm.core import plugins
from calm.core.errors import FAILED, INTERRUPTED, PIPE_CLOSED, STATUSES, USAGE, CalmError, without_controls
from calm.core.plugins import Listed

COMMANDS = {
    "allocators": Listed(
        "calm.commands.allocators",
        "List the allocators on this machine.",
        "Which allocators are on this machine?",
        "calm allocators",
    ),
    "compare": Listed(
        "calm.commands.compare.command",
        "Compare a program under several allocators.",
        "What would another allocator change for my program?",
        "calm compare -a glibc,calmalloc -n 20 -- ./server --self-test",
    ),
    "completion": Listed(
        "calm.commands.completion",
        "Print the script that completes calm in a shell.",
        "How do I complete calm's commands in my shell?",
        'eval "$(calm completion bash)"',
    ),
    "export": Listed(
        "calm.commands.export.command",
        "Export counters of processes to Prometheus or OpenTelemetry.",
        "How do I watch memory in production?",
        "calm export --listen 0.0.0.0:22560",
    ),
    "explain": Listed(
        "calm.commands.explain.command",
        "Explain why the memory of a process is what it is.",
        "Why is this process so large, or growing?",
        "calm explain --for 30s 4711",
    ),
    "heap": Listed(
        "calm.commands.heap.command",
        "Show which code holds memory, and which allocates most.",
        "Which code holds the memory?",
        "calm heap run -- ./server --self-test",
    ),
    "profile": Listed(
        "calm.commands.profile.command",
        "Show where shootdowns, page faults and memory calls arise.",
        "Where do shootdowns, faults and memory calls come from?",
        "calm profile -- ./server --port 8080",
    ),
    "run": Listed(
        "calm.commands.run",
        "Run a program with an allocator preloaded.",
        "How do I run a program, or a server, with calmalloc?",
        "calm run -a calmalloc -- python3 server.py",
    ),
    "stat": Listed(
        "calm.commands.stat",
        "Report the time, memory and TLB shootdowns of a program.",
        "What does memory management cost this program?",
        "calm stat -- sort -o /dev/null words",
    ),
    "top": Listed(
        "calm.commands.top.command",
        "Show what running processes do with memory.",
        "Which process makes this machine slow now?",
        "calm top",
    ),
    "trim": Listed(
        "calm.commands.trim",
        "Make running processes give back free memory.",
        "How do I get free memory back from a running process?",
        "calm trim 1234",
    ),
    "tune": Listed(
        "calm.commands.tune.command",
        "Search settings of malloc that make a program faster or smaller.",
        "Which settings would mend it, without another allocator?",
        "calm tune advise -- ./program its arguments",
    ),
}


# Commands of the package research, which only a checkout has.
RESEARCH = ("bench", "calibrate", "colors", "lab", "predict")


class PipeClosedError(Exception):
    """A write to a pipe whose reader is gone; click would turn a BrokenPipeError into status 1."""


class Commands(click.Group):
    """calm's own commands by name, and those of other packages. Listing them imports none."""

    @cached_property
    def _found(self) -> dict[str, Listed | CalmError]:
        """All commands, or in the place of another package's what is wrong with it."""
        return dict(sorted({**dict(plugins.find()), **COMMANDS}.items()))

    @property
    def listed(self) -> dict[str, Listed]:
        """All commands that can be listed, by name."""
        return {name: each for name, each in self._found.items() if isinstance(each, Listed)}

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:  # noqa: ANN401
        try:
            return super().make_context(*arguments, **options)
        except BrokenPipeError as error:
            raise PipeClosedError from error

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise PipeClosedError from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.listed)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        listed = COMMANDS.get(cmd_name) or next((each for _, each in plugins.find(cmd_name)), None)
        if listed is None and cmd_name in RESEARCH:
            listed = CalmError(
                f"{cmd_name} is in calmalloc's research package, which is not installed: `make demo` in a "
                f"checkout of calmalloc installs it, for `bin/calm {cmd_name}`",
                USAGE,
            )
        if isinstance(listed, CalmError):
            if ctx.resilient_parsing:  # completion has no place for errors
                return None
            raise listed
        if listed is None:
            return None
        try:
            command = import_module(listed.module).command
        except ImportError as error:
            raise CalmError(f"{cmd_name}: cannot import {listed.module}: {error}") from error
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for each in self._found.values():
            if isinstance(each, CalmError):
                _fail(str(each), each.exit_code)
        with formatter.section("Commands"):
            formatter.write_dl([(name, listed.summary) for name, listed in self.listed.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Questions, with the command that answers each, however long its line is; and the exit statuses."""
        with formatter.section("Which command answers my question? Each has its own --help"):
            indent = " " * formatter.current_indent
            for listed in self.listed.values():
                formatter.write(f"{indent}{listed.question}\n{indent}  {listed.example}\n")
        with formatter.section("Exit status"):
            formatter.write_dl([(status, text.replace("`", "")) for status, text in STATUSES.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names of commands, and the options of calm itself."""
        items = [
            CompletionItem(name, help=listed.summary)
            for name, listed in self.listed.items()
            if name.startswith(incomplete)
        ]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="calm")
def cli() -> None:
    """Measure what a memory allocator costs a program: time, memory and TLB shootdowns.

    A TLB shootdown interrupts every CPU that runs the program when the program gives memory back to the
    system. On many CPUs, and more so in virtual machines, shootdowns can cost more than everything else an
    allocator does. calm counts them for an unmodified program. Without root the count is coarser, and calm
    says so.
    """


def _fail(message: str, status: int) -> int:
    print(f"calm: {without_controls(message)}", file=sys.stderr)
    return status


def _discard_output() -> None:
    """Python would complain again when it closes a stream whose writes fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(command: click.Command, name: str) -> int:
    """Runs a command; returns its exit status. Whatever goes wrong becomes one line on standard error."""
    try:
        command.main(prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return 0
    except getattr(click.exceptions, "NoArgsIsHelpError", ()) as error:  # click 8.2 and later
        click.echo(error.format_message(), err=True)
        return USAGE
    except click.ClickException as error:
        hint = (
            f" (see `{error.ctx.command_path} --help`)"
            if isinstance(error, click.UsageError) and error.ctx
            else ""
        )
        message = " ".join(error.format_message().split())
        return _fail(message[:1].lower() + message[1:].rstrip(".") + hint, error.exit_code)
    except CalmError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except (BrokenPipeError, PipeClosedError):
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EBADF):
            _discard_output()
            return _fail(f"standard output: {error.strerror}", FAILED)
        return _fail(f"{error.filename or 'system'}: {error.strerror}", FAILED)
    except Exception as error:
        if os.environ.get("CALM_DEBUG"):
            raise
        return _fail(f"internal error: {type(error).__name__}: {error} (CALM_DEBUG=1 shows where)", FAILED)


def _open_standard_streams() -> None:
    """In the place of those that the caller closed: reading finds nothing, and writing to output fails."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def main() -> None:
    _open_standard_streams()
    # bin/calm lets SIGINT end Python until here: an import cannot say more of it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run(cli, "calm"))
