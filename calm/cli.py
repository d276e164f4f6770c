"""The `calm` command: finds the subcommand, and turns errors into one line and an exit status."""

import errno
import os
import signal
import sys
from importlib import import_module
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from calm import __version__
from calm.core.errors import FAILED, INTERRUPTED, PIPE_CLOSED, STATUSES, USAGE, CalmError, without_controls


class Listed(NamedTuple):
    """A command as `calm --help` shows it."""

    module: str
    """Below `calm.commands`; has `command`. Imported when the command is used."""
    summary: str
    question: str
    example: str


COMMANDS = {
    "allocators": Listed(
        "allocators",
        "List the allocators on this machine.",
        "Which allocators are on this machine?",
        "calm allocators",
    ),
    "bench": Listed(
        "bench.command",
        "Compare allocators on a suite of programs.",
        "How do allocators compare on many programs?",
        "calm bench run",
    ),
    "calibrate": Listed(
        "predict.calibrate",
        "Measure what a TLB shootdown costs on this machine.",
        "What does a TLB shootdown cost here?",
        "calm calibrate shootdowns",
    ),
    "colors": Listed(
        "colors.command",
        "Show page colors, and large blocks that collide in caches.",
        "Do large arrays evict each other from the cache?",
        "calm colors run -- ./solver input",
    ),
    "compare": Listed(
        "compare.command",
        "Compare a program under several allocators.",
        "What would another allocator change for my program?",
        "calm compare -a glibc,calmalloc -n 20 -- ./server --self-test",
    ),
    "completion": Listed(
        "completion",
        "Print the script that completes calm in a shell.",
        "How do I complete calm's commands in my shell?",
        'eval "$(calm completion bash)"',
    ),
    "export": Listed(
        "export.command",
        "Export counters of processes to Prometheus or OpenTelemetry.",
        "How do I watch memory in production?",
        "calm export --listen 0.0.0.0:22560",
    ),
    "explain": Listed(
        "explain.command",
        "Explain why the memory of a process is what it is.",
        "Why is this process so large, or growing?",
        "calm explain --for 30s 4711",
    ),
    "heap": Listed(
        "heap.command",
        "Show which code holds memory, and which allocates most.",
        "Which code holds the memory?",
        "calm heap run -- ./server --self-test",
    ),
    "lab": Listed(
        "lab.command",
        "Count a program's TLB interrupts on an emulated machine.",
        "How many interrupts would 16 CPUs see?",
        "calm lab --cpus 16 --sockets 4 -a glibc,calmalloc -- ./server-test --threads 16",
    ),
    "predict": Listed(
        "predict.command",
        "Predict what TLB shootdowns cost on another machine.",
        "What would it cost on a machine that I do not have?",
        "calm predict run --cpus 64 --sockets 4 --virt -a glibc,calmalloc -- build/release/listing1",
    ),
    "profile": Listed(
        "profile.command",
        "Show where shootdowns, page faults and memory calls arise.",
        "Where do shootdowns, faults and memory calls come from?",
        "calm profile -- ./server --port 8080",
    ),
    "run": Listed(
        "run",
        "Run a program with an allocator preloaded.",
        "How do I run a program, or a server, with calmalloc?",
        "calm run -a calmalloc -- python3 server.py",
    ),
    "stat": Listed(
        "stat",
        "Report the time, memory and TLB shootdowns of a program.",
        "What does memory management cost this program?",
        "calm stat -- sort -o /dev/null words",
    ),
    "top": Listed(
        "top.command",
        "Show what running processes do with memory.",
        "Which process makes this machine slow now?",
        "calm top",
    ),
    "trim": Listed(
        "trim",
        "Make running processes give back free memory.",
        "How do I get free memory back from a running process?",
        "calm trim 1234",
    ),
    "tune": Listed(
        "tune.command",
        "Search settings of malloc that make a program faster or smaller.",
        "Which settings would mend it, without another allocator?",
        "calm tune advise -- ./program its arguments",
    ),
}


class PipeClosedError(Exception):
    """A write to a pipe whose reader is gone; click would turn a BrokenPipeError into status 1."""


class Commands(click.Group):
    """The commands by name. Listing them imports none."""

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
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"calm.commands.{COMMANDS[cmd_name].module}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in self.list_commands(ctx)])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Questions, with the command that answers each, however long its line is; and the exit statuses."""
        with formatter.section("Which command answers my question? Each has its own --help"):
            indent = " " * formatter.current_indent
            for name in self.list_commands(ctx):
                formatter.write(f"{indent}{COMMANDS[name].question}\n{indent}  {COMMANDS[name].example}\n")
        with formatter.section("Exit status"):
            formatter.write_dl([(status, text.replace("`", "")) for status, text in STATUSES.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names of commands, and the options of calm itself."""
        items = [
            CompletionItem(name, help=COMMANDS[name].summary)
            for name in self.list_commands(ctx)
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
