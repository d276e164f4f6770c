"""Commands that other packages add to calm: entry points of the group `calm.commands`.

An entry point's name is the command's; it refers to a `Listed`. Looking for entry points reads the metadata
of every installed package, so calm does it only for its overview, and for a name that is none of its own.
"""

from collections.abc import Iterator
from typing import NamedTuple

from calm.core.errors import CalmError

GROUP = "calm.commands"


class Listed(NamedTuple):
    """A command as `calm --help` shows it."""

    module: str
    """Has `command`. Imported when the command is used."""
    summary: str
    question: str
    example: str


def find(only: str | None = None) -> Iterator[tuple[str, Listed | CalmError]]:
    """The commands of other packages, or the one of this name. An error, where an entry point is broken."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP):
        if only not in (None, entry.name):
            continue
        try:
            listed = entry.load()
            if not isinstance(listed, Listed):
                raise TypeError(f"is a {type(listed).__name__}, not a Listed")
        except Exception as error:
            package = entry.dist.name if entry.dist else "a package"
            what = f"{entry.name}: {package}'s entry point {entry.value} is broken: {error}"
            yield entry.name, CalmError(what)
        else:
            yield entry.name, listed
