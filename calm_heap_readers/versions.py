"""The releases of other allocators whose private structures the readers know.

None of these structures is an interface, and any release may change them. So a reader recognizes the release
in the binary first. It reads what a row of this table lists; of any other release it says what it recognized,
and reads nothing. A row names the packages that tests read. It may instead say that the structures are known
from sources only, where no package registry has these releases any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from calm.commands.explain.model import UNKNOWN, Heap


@dataclass(frozen=True)
class Known:
    """Releases that one layout describes."""

    allocator: str
    versions: tuple[str, ...]
    """As they are recognized in a binary."""
    recognized: str
    """By what."""
    layout: str
    """A key of the reader's layouts."""
    tested: str
    """The packages that the tests read it in."""


FROM_SOURCE = "none: the structures are those of the tested releases, by glibc's sources"
_BANNER = "the banner in libc.so.6"
_STATIC = "a hash of the tunables' names, in a static program"
_DESCRIBED = "the version string, up to the revision"
_MI_VERSION = "mi_version, or the numbers that its start-up message prints"
_FILE = "the name of the program or libpython"

TABLE = (
    Known("glibc", ("2.31",), _BANNER, "plain links", "Debian 11"),
    Known("glibc", ("2.36", "2.41"), _BANNER, "mangled links", "Debian 12 and 13"),
    Known("glibc", ("2.30",), _BANNER, "plain links", FROM_SOURCE),
    Known(
        "glibc",
        ("2.32", "2.33", "2.34", "2.35", "2.37", "2.38", "2.39", "2.40"),
        _BANNER,
        "mangled links",
        FROM_SOURCE,
    ),
    Known("glibc", ("tunables 09194c6b",), _STATIC, "mangled links", "2.36 of Debian 12"),
    Known("glibc", ("2.43",), _BANNER, "large caches", "Debian testing"),
    Known(
        "jemalloc",
        ("5.3.0-0", "5.3.0-1", "5.3.0-196", "5.3.1-0"),
        _DESCRIBED,
        "extents of 5.3",
        "Debian's package; PyPI's polars, duckdb and pyarrow; the crate tikv-jemalloc-sys",
    ),
    Known("mimalloc", ("2.0.6", "2.0.7"), _MI_VERSION, "segments of 64 MiB", "PyPI's pyarrow; crates"),
    Known("mimalloc", ("2.0.9", "2.1.1", "2.1.2"), _MI_VERSION, "pages of 80 bytes", "Debian 12; crates"),
    Known("mimalloc", ("2.1.4", "2.1.6", "2.1.7"), _MI_VERSION, "pages of 96 bytes", "crates"),
    Known(
        "mimalloc",
        ("2.2.3", "2.2.4", "2.2.5", "2.3.0", "2.3.1", "2.3.2"),
        _MI_VERSION,
        "segments with subprocesses",
        "PyPI's pyarrow; crates",
    ),
    Known("mimalloc", ("3.1.5",), _MI_VERSION, "page map", "PyPI's pyarrow; crates"),
    Known(
        "mimalloc",
        ("3.2.7", "3.3.0", "3.3.1", "3.3.2"),
        _MI_VERSION,
        "page map, arenas with a parent",
        "PyPI's pyarrow; crates",
    ),
    Known("mimalloc", ("3.4.1",), _MI_VERSION, "page map, blocks by offset", "PyPI's pyarrow"),
    Known("pymalloc", ("3.6", "3.7", "3.8", "3.9"), _FILE, "pools of 4 KiB", "CPython"),
    Known("pymalloc", ("3.10", "3.11", "3.12", "3.13"), _FILE, "pools of 16 KiB", "CPython"),
)


def layout(allocator: str, version: str) -> str:
    """The name of the layout of a release; "" of one that the table does not have."""
    rows = (each for each in TABLE if each.allocator == allocator and version in each.versions)
    return next((each.layout for each in rows), "")


def unread(allocator: str, version: str, *notes: str) -> Heap:
    """The heap of an allocator that is in use, and of which nothing can be said."""
    return Heap(allocator, version, UNKNOWN, UNKNOWN, notes=notes)


def unknown(allocator: str, version: str, note: str = "") -> Heap:
    """Of a release that the table does not have: nothing of it was read."""
    recognized = f"{allocator} {version}" if version else f"{allocator}, of a release that was not recognized"
    first = f"Unknown version: {recognized}. Its private structures were not read"
    return unread(allocator, version, first + (f"; {note}." if note else "."))
