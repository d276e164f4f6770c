"""The `calm` command."""

import os
import sys
from importlib import import_module
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from calm import __version__
from calm.errors import USAGE, CalmError


class Listed(NamedTuple):
    """A command as `calm --help` shows it."""

    module: str
    """Holds `command`. Imported when the command is asked for: none pays for what another needs."""
    summary: str
    example: str
    """One of the examples of the command's own help."""


COMMANDS = {
    "allocators": Listed(
        "calm.allocators",
        "List the allocators on this machine.",
        "calm allocators",
    ),
    "bench": Listed(
        "calm.bench.command",
        "Compare allocators on a suite of programs.",
        "calm bench",
    ),
    "calibrate": Listed(
        "calm.predict.calibrate",
        "Measure what a TLB shootdown costs on this machine.",
        "calm calibrate",
    ),
    "colors": Listed(
        "calm.colors.command",
        "Show page colors, and large blocks that collide in caches.",
        "calm colors -- ./solver input",
    ),
    "compare": Listed(
        "calm.compare",
        "Compare CMD under several allocators, by interleaved rounds.",
        "calm compare -a glibc,calmalloc -n 20 -- ./server --self-test",
    ),
    "completion": Listed(
        "calm.completion",
        "Print the script that completes calm in a shell.",
        'eval "$(calm completion bash)"',
    ),
    "lab": Listed(
        "calm.lab.command",
        "Count the TLB interrupts of CMD on an emulated machine.",
        "calm lab --cpus 16 --sockets 4 -a glibc,calmalloc -- ./server-test --threads 16",
    ),
    "predict": Listed(
        "calm.predict.command",
        "Predict what TLB shootdowns cost on another machine.",
        "calm predict --cpus 64 --sockets 4 --virt -a glibc,calmalloc -- build/release/listing1",
    ),
    "profile": Listed(
        "calm.profile.command",
        "Show where shootdowns, page faults and memory calls arise.",
        "calm profile -- ./server --port 8080",
    ),
    "run": Listed(
        "calm.run",
        "Run CMD with an allocator preloaded.",
        "calm run -a calmalloc -- python3 server.py",
    ),
    "stat": Listed(
        "calm.stat",
        "Report the time, memory and TLB shootdowns of CMD.",
        "calm stat -- sort -o /dev/null words",
    ),
    "top": Listed(
        "calm.top.command",
        "Show what running processes do with memory.",
        "calm top",
    ),
    "tune": Listed(
        "calm.tune.command",
        "Search settings of malloc that make CMD faster or smaller.",
        "calm tune --minutes 5 --plot front.svg -- ./program its arguments",
    ),
}


class Commands(click.Group):
    """The commands by name. To list them imports none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All, by the alphabet."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The one of a name."""
        if cmd_name not in COMMANDS:
            return None
        command = import_module(COMMANDS[cmd_name].module).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What each is for."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in self.list_commands(ctx)])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """An example of each, on a line of its own however long it is."""
        with formatter.section("Examples, of which each command's --help has more"):
            for name in self.list_commands(ctx):
                formatter.write(f"{'':{formatter.current_indent}}{COMMANDS[name].example}\n")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands' names, and options of calm itself."""
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

    A TLB shootdown interrupts every CPU that runs the program, when it gives memory back to the system; on
    many CPUs, and more so in virtual machines, that may cost more than all else an allocator does. calm
    counts them, beside time and memory, for a program as it is: nothing is compiled anew. Without root the
    count of shootdowns is coarser, and calm says so.
    """


def _fail(message: str, code: int) -> int:
    print(f"calm: {message}", file=sys.stderr)
    return code


def _run() -> int:
    """Runs the command; whatever goes wrong becomes one line and an exit code."""
    try:
        cli.main(prog_name="calm", standalone_mode=False)
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
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough. Python would complain again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _fail(f"{error.filename or 'system'}: {error.strerror}", 1)
    except Exception as error:
        if os.environ.get("CALM_DEBUG"):
            raise
        return _fail(f"internal error: {type(error).__name__}: {error} (CALM_DEBUG=1 shows where)", 1)


def main() -> None:
    """Entry point of the console script."""
    sys.exit(_run())
