"""What a case of the suite is: how it is prepared, and by which figure it is compared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Metric:
    """What a program of fixed duration prints: a key of its line of JSON on stdout."""

    key: str
    unit: str
    higher_is_better: bool


@dataclass(frozen=True)
class Prepared:
    """A case that is ready to run."""

    command: tuple[str, ...]
    """The process that is measured, with the allocator preloaded."""
    folder: Path
    """Its working directory; takes its outputs."""
    client: tuple[str, ...] = ()
    """For servers: started beside it without a preload. It waits by itself until the server answers, drives
    it, prints one line of JSON with the metric, and ends the server by the server's own protocol; non-zero
    exit: the run failed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables, for both."""


@dataclass(frozen=True)
class Case:
    """One program or workload of the suite."""

    name: str
    family: str
    """"workload", "listing1", "program" or "server"."""
    summary: str
    """One line: what it does, after whom."""
    prepare: Callable[[Path], Prepared]
    """Takes an own folder for inputs, and writes inputs once: they are kept between runs."""
    metric: Metric | None = None
    """None: a fixed work, compared by wall time. With one: by that figure."""
    package: str | None = None
    """The Debian package that brings the program, for the message when it is missing."""
    program: str | None = None
    """The binary looked for on PATH; None: one of the project's own."""
    quick: bool = False
    """In `--suite quick` too."""
    resident_key: str | None = None
    """A further key of the client's JSON: bytes resident at the end (redis after deletes)."""
