"""The `calm` command."""

import os
import sys

import click

from calm import __version__, allocators, compare, run, stat
from calm.bench import command as bench
from calm.errors import USAGE, CalmError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="calm")
def cli() -> None:
    """Measure what a memory allocator costs a program: time, memory and TLB shootdowns."""


for each in (stat, compare, bench, run, allocators):
    cli.add_command(each.command)


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
