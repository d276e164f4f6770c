"""Drives tests/api/programs/commanded.c, a program that does what it is told line by line."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUILD = Path(
    os.environ.get("CALMALLOC_BUILD", Path(__file__).resolve().parents[2] / "build/release")
).absolute()


class Commanded:
    """The running program."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = self._answer()

    def _answer(self) -> int:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it has ended with status {self.process.wait()}"
        return int(line)

    def do(self, *lines: str) -> int:
        """Has it carry out some lines, one after the other; returns the process that did the last."""
        assert self.process.stdin is not None
        for line in lines:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
            self.pid = self._answer()
        return self.pid

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait()


@contextmanager
def commanded(
    way: str = "plain", preload: str | Path = "", options: str = "", **more: str
) -> Iterator[Commanded]:
    """Starts it: `way` is plain, linked or static; `preload` the name of a library of ours, or a path."""
    drop = ("LD_", "CALM_", "MALLOC_", "GLIBC_TUNABLES", "PTLBMALLOC2_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    env |= (
        {"LD_PRELOAD": str(preload if "/" in str(preload) else BUILD / f"lib{preload}.so")} if preload else {}
    )
    env |= {"CALM_OPTIONS": options} if options else {}
    program = BUILD / "tests/api" / f"commanded-{way}"
    assert program.is_file(), f"{program} is not built: cmake --build {BUILD} --target programs"
    with subprocess.Popen(
        [program], env=env | more, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Commanded(process)
        finally:
            process.kill()
