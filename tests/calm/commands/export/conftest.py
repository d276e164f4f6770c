"""Fixtures of the tests of calm export."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from export_helpers import CALMALLOC, SOURCE, Collector, Exporter, Start, compiled

from calm.commands.export.reader import Reader
from calm.core import proc, processes


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    folder.chmod(0o755)
    return compiled(folder, "victim", SOURCE)


@pytest.fixture
def start(program: Path) -> Iterator[Start]:
    running = []

    def run(
        preload: Path | None = CALMALLOC, *arguments: str, command: Path | None = None, **options: Any
    ) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        env = os.environ | ({"LD_PRELOAD": str(preload)} if preload else {})
        words = [str(command or program), *arguments]
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, text=True, **options)
        running.append(process)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline().partition(" ")[2])

    yield run
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def opened() -> Iterator[Callable[..., Reader]]:
    """A reader of these processes, or of all."""
    with contextlib.ExitStack() as stack:

        def make(*pids: int, **options: Any) -> Reader:
            choose = processes.chosen_by_pid(pids) if pids else proc.pids
            made = Reader(choose, every=not pids, **{"shootdowns": False} | options)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def export() -> Iterator[Callable[..., Exporter]]:
    running: list[Exporter] = []

    def run(*arguments: str | Path | int, **options: Any) -> Exporter:
        running.append(Exporter(*arguments, **options))
        return running[-1]

    yield run
    for each in running:
        each.process.kill()
        each.process.communicate()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.shutdown()
    made.server_close()
