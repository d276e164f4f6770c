"""Debian's programs for the guest, unpacked into `calm lab`'s cache and not installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from calm.core.errors import CalmError
from research.lab import packages
from research.lab.packages import Tell

from .results import REPOSITORY

CACHE = REPOSITORY / "build/emulated"
# With the libraries that they need. The C library is this machine's.
APACHE = ("apache2-bin", "libapr1", "libaprutil1", "libpcre2-8-0", "libexpat1", "libcrypt1", "libuuid1")
WRK = ("wrk", "libluajit-5.1-2", "libssl3")
PBZIP2 = ("pbzip2", "libbz2-1.0", "libstdc++6")
E2FSPROGS = ("e2fsprogs", "libext2fs2", "libcom-err2", "libblkid1", "libuuid1")
_PROGRAMS = ("usr/sbin", "usr/bin", "sbin", "bin")
_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")


def fetch(names: Iterable[str], tell: Tell) -> None:
    """Fetches and unpacks missing packages."""
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalmError(f"cannot write {CACHE}: {error.strerror}") from error
    for name in names:
        packages.unpack(name, CACHE, tell)


def _places(names: Sequence[str], folders: Sequence[str]) -> str:
    return ":".join(str(CACHE / name / folder) for name in names for folder in folders)


def paths(names: Sequence[str]) -> str:
    """PATH for their programs."""
    return _places(names[:1], _PROGRAMS)


def libraries(names: Sequence[str]) -> str:
    """LD_LIBRARY_PATH for their libraries."""
    return _places(names, _LIBRARIES)


def program(package: str, name: str) -> Path:
    """A file of an unpacked package."""
    for folder in _PROGRAMS:
        path = CACHE / package / folder / name
        if path.exists():
            return path
    raise CalmError(f"{CACHE / package} has no {name}: remove the folder to fetch it again")
