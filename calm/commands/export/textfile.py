"""The file of --textfile, for the textfile collector of Prometheus's node_exporter."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

import click


class Textfile:
    """A file that is replaced as a whole: no reader finds half of it."""

    def __init__(self, path: str, failures: Counter[str]) -> None:
        self._path = Path(path)
        self._failures = failures
        self.has_failed = False
        """At the last attempt."""

    @property
    def name(self) -> str:
        """Without its folder; "" of standard output."""
        return "" if str(self._path) == "-" else self._path.name

    def write(self, data: bytes) -> None:
        """Replaces the file, or reports once that this fails and leaves the file before it as it is."""
        if str(self._path) == "-":
            click.echo(data, nl=False)
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(temporary, flags, 0o644), "wb") as file:  # noqa: PTH123
                    file.write(data)
                temporary.replace(self._path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
        except OSError as error:
            if not self.has_failed:
                click.echo(f"calm: cannot write {self._path}: {error.strerror}", err=True)
            self.has_failed = True
            self._failures["textfile_failures"] += 1
            return
        if self.has_failed:
            click.echo(f"calm: {self._path} is written again", err=True)
        self.has_failed = False

    def remove(self) -> None:
        """So that no figures of an exporter that has ended are taken for current ones."""
        with contextlib.suppress(OSError):
            self._path.unlink()
