"""The `calm` command."""

import os
import re
import sys
from importlib import import_module

import click

from calm import __version__
from calm.errors import USAGE, CalmError

# The module of each holds `command`. It is imported when asked for, so that none pays for what another needs.
COMMANDS = {
    "allocators": "calm.allocators",
    "bench": "calm.bench.command",
    "calibrate": "calm.predict.calibrate",
    "colors": "calm.colors.command",
    "compare": "calm.compare",
    "completion": "calm.completion",
    "predict": "calm.predict.command",
    "profile": "calm.profile.command",
    "lab": "calm.lab.command",
    "run": "calm.run",
    "stat": "calm.stat",
    "top": "calm.top.command",
    "tune": "calm.tune.command",
}


class Commands(click.Group):
    """The commands by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All, by the alphabet."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The one of a name."""
        if cmd_name not in COMMANDS:
            return None
        command = import_module(COMMANDS[cmd_name]).command
        assert isinstance(command, click.Command)
        return command

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The first example of each command's own help."""
        with formatter.section("Examples, of which each command's --help has more"):
            for name in self.list_commands(ctx):
                command = self.get_command(ctx, name)
                found = re.search(
                    rf"^ +(.*\bcalm {name}\b.*?)(  .*)?$", (command and command.epilog) or "", re.M
                )
                if found:
                    formatter.write(f"{'':{formatter.current_indent}}{found.group(1)}\n")


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
