"""The exit statuses of `calm`, and the exception that ends a command with one of them."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

FAILED = 1
USAGE = 2
WORSE = 3
NOT_EXECUTABLE = 126
NOT_FOUND = 127
INTERRUPTED = 130
PIPE_CLOSED = 141

# The only table of them: `calm --help`, the manual page and the site print it.
STATUSES: dict[str, str] = {
    "0": "The command has done what was asked.",
    "of CMD": "`calm run`, `stat`, `profile` and `heap run` end with the status of CMD.",
    str(FAILED): "CMD failed, a process cannot be observed, or a file cannot be written.",
    str(USAGE): "An option, an argument or an input file cannot be used.",
    str(WORSE): "`calm compare --fail-over`: a figure is worse than the limit allows.",
    str(NOT_EXECUTABLE): "CMD cannot be executed.",
    str(NOT_FOUND): "CMD does not exist.",
    "128 + N": "Signal N interrupted the command.",
    str(PIPE_CLOSED): "The reader of standard output closed it.",
}


def without_controls(text: str) -> str:
    """A text with `?` for characters that a terminal would obey: names of other processes may have such."""
    return _CONTROL.sub("?", text)


class CalmError(Exception):
    """Ends the command with one line on standard error and an exit status."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
