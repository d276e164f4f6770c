"""calmalloc's own messages on a program's standard error: it runs otherwise than it was asked to.

Without a CPU for calmoffload's server, for example, the program runs without it, and one line says so. Where
calm drops a program's output it keeps these lines, or figures of one configuration would pass for another's.
"""

from collections.abc import Mapping
from typing import IO

from calm.core import report

_PREFIX = "calmalloc: "
# The messages of the start come first; of a program with a message for every call the first ones suffice.
_MAX_BYTES = 1 << 20
_MAX_LINES = 3


def lines(errors: str) -> list[str]:
    """Its lines in a program's standard error, each once."""
    return list(dict.fromkeys(line for line in errors.splitlines() if line.startswith(_PREFIX)))


def listen(heard: dict[str, list[str]], label: str, errors: IO[bytes]) -> None:
    """Adds the new lines of a run's standard error to those of its allocator."""
    errors.seek(0)
    for line in lines(errors.read(_MAX_BYTES).decode(errors="replace")):
        known = heard.setdefault(label, [])
        text = report.printable(line)
        if text not in known and len(known) < _MAX_LINES:
            known.append(text)


def notes(heard: Mapping[str, list[str]]) -> list[str]:
    return [f"{label}: {line}" for label, lines in heard.items() for line in lines]
