"""`calm run`: becomes the program, with an allocator preloaded."""

import errno
import os
import signal

import click

from calm.core import allocators, environment, options, program, report
from calm.core.errors import USAGE, CalmError


def become(command: tuple[str, ...], variables: dict[str, str]) -> CalmError:
    """Execs the program, so nothing lies between it and the caller. Returns only with an error."""
    path = program.find(command[0])
    environment = os.environ | variables
    # Python ignores these; a program expects them as it would find them in a shell.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execve(path, command, environment)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            return program.exec_error(command[0], error.errno or 0)
    # As the shell and execvp do with a script that names no interpreter.
    shell = ["/bin/sh", str(path), *command[1:]]
    try:
        os.execve(shell[0], shell, environment)
    except OSError as error:
        return program.exec_error(command[0], error.errno or 0)


@click.command(
    "run",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    epilog="\b\nExamples:\n  calm run -a calmalloc -- python3 server.py\n"
    "  calm run -a calmalloc:CALM_OPTIONS=report=exit -- ls\n  calm run --offload -- python3 server.py",
)
@click.option(
    "-a",
    "--allocator",
    shell_complete=allocators.complete,
    metavar="NAME",
    help="Allocator to run with; see `calm allocators`.",
)
@click.option("--offload", is_flag=True, help="As -a calmoffload: a thread of its own prepares blocks.")
@options.program()
def command(allocator: str | None, offload: bool, cmd: tuple[str, ...]) -> None:
    """Run CMD with an allocator preloaded."""
    if offload and allocator:
        raise CalmError("--offload means -a calmoffload: leave one of them out", USAGE)
    if not (offload or allocator):
        raise CalmError("name an allocator by --allocator, or give --offload", USAGE)
    chosen = allocators.parse(allocator or "calmoffload")
    environment.tell(chosen.environment)
    if chosen.library and (obstacle := program.preload_obstacle(cmd)):
        report.warn(obstacle)
    raise become(cmd, chosen.variables(os.environ))
