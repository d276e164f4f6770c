"""A case of the suite: the contract between the runner and a program that is added to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from research.bench.results import Metric


@dataclass(frozen=True)
class Prepared:
    """How a case is run."""

    command: tuple[str, ...]
    """The process that is measured, with the allocator preloaded."""
    folder: Path
    """Its working directory, which takes its outputs."""
    client: tuple[str, ...] = ()
    """For servers: started beside it without a preload. The client waits until the server answers,
    drives it, prints one line of JSON with the metric, and ends the server by the server's own protocol.
    An exit status other than 0 is a failure of the run.
    """
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables, for both."""


@dataclass(frozen=True)
class Case:
    """One row of the suite."""

    name: str
    family: str
    """One of workload, stand-in, listing1, periodic, program, server, published."""
    summary: str
    """One line: what it does, and its authors."""
    prepare: Callable[[Path], Prepared]
    """Its argument is a folder of the case's own, for inputs: written once, and kept between runs."""
    metric: Metric | None = None
    """None: a fixed amount of work, compared by wall time. With one, by that figure."""
    pattern: str = ""
    """Of a program that prints no JSON: a regular expression whose group is the figure."""
    package: str | None = None
    """The Debian package that brings the program, for the message when it is missing."""
    program: str | None = None
    """The binary that is looked for on PATH; None for one of the project's own."""
    further_programs: Mapping[str, str] = field(default_factory=dict)
    """Further binaries, such as a load generator, each with its Debian package."""
    python_module: str | None = None
    """A module of /usr/bin/python3 that the case needs; `package` brings it."""
    quick: bool = False
    """Belongs to the quick suite too."""
    resident_key: str | None = None
    """One more key of the client's JSON: bytes resident at the end."""
    more_keys: tuple[str, ...] = ()
    """Further numbers of the line with the metric, kept by their own names."""
    obstacle: str | None = None
    """Why it cannot be run, if that is known from the start."""
    runs_under: Callable[[str], bool] | None = None
    """Which allocators it is run under, by their labels; None: all."""
