"""What calmalloc itself says on a program's standard error: that it runs otherwise than it was asked to.

Where offload finds no CPU for its server, the program runs without, and one line tells. What drops a
program's words must keep these, or figures of one way to run are taken for another's.
"""

from collections.abc import Mapping
from typing import IO

from calm import report

_BEGINS = "calmalloc: "
# It is said when the program starts, and of a program whose every call it complains of the first will do.
_LOOKED_AT = 1 << 20
_MOST = 3


def lines(errors: str) -> list[str]:
    """What it said, each once, of a program's standard error."""
    return list(dict.fromkeys(line for line in errors.splitlines() if line.startswith(_BEGINS)))


def listen(heard: dict[str, list[str]], label: str, errors: IO[bytes]) -> None:
    """Adds what is new in a run's standard error to what was heard of this allocator before."""
    errors.seek(0)
    for line in lines(errors.read(_LOOKED_AT).decode(errors="replace")):
        known = heard.setdefault(label, [])
        words = report.printable(line)
        if words not in known and len(known) < _MOST:
            known.append(words)


def notes(heard: Mapping[str, list[str]]) -> list[str]:
    """One line each, with whom it is about."""
    return [f"{label}: {line}" for label, lines in heard.items() for line in lines]
