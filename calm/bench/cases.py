"""What the suite runs: the contract between the driver and those who add a program to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Metric:
    """What a program of fixed duration prints: a key of its line of JSON on standard output."""

    key: str
    unit: str
    higher_is_better: bool


@dataclass(frozen=True)
class Prepared:
    """How a case is run."""

    command: tuple[str, ...]
    """The process that is measured, with the allocator preloaded."""
    folder: Path
    """Its working directory, which takes its outputs."""
    client: tuple[str, ...] = ()
    """For servers: started beside it without a preload. It waits by itself until the server answers,
    drives it, prints one line of JSON with the metric, and ends the server by the server's own protocol.
    If it ends with anything but 0, the run has failed.
    """
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables, for both."""


@dataclass(frozen=True)
class Case:
    """One row of the suite."""

    name: str
    family: str
    """One of workload, stand-in, listing1, program, server."""
    summary: str
    """One line: what it does, and after whom."""
    prepare: Callable[[Path], Prepared]
    """Its argument is a folder of the case's own, for inputs: written once, and kept between runs."""
    metric: Metric | None = None
    """None: a fixed amount of work, compared by wall time. With one, by that figure."""
    package: str | None = None
    """The Debian package that brings the program, for the message when it is missing."""
    program: str | None = None
    """The binary that is looked for on PATH; None for one of the project's own."""
    quick: bool = False
    """Belongs to the quick suite too."""
    resident_key: str | None = None
    """One more key of the client's JSON: bytes resident at the end."""
    more_keys: tuple[str, ...] = ()
    """Further numbers of the line with the metric, kept by their own names."""
    runs_under: Callable[[str], bool] | None = None
    """Which allocators it is run under, by their labels; None: all."""
