"""The suite's servers that a load generator drives: that they run, and end whatever happens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from calm.core.environment import clean_environment
from calm.core.errors import USAGE, CalmError
from research.bench import load, services
from research.bench.cases import Case, Prepared
from research.bench.clients import ClientError
from research.bench.runner import obstacle

BY_NAME = {case.name: case for case in services.CASES}
SHORT = ("--seconds", "1s", "--transactions", "20", "--scale", "1")


def prepared(case: Case, folder: Path) -> Prepared:
    if reason := obstacle(case):
        pytest.skip(reason)
    return case.prepare(folder)


def environment(ready: Prepared) -> dict[str, str]:
    return clean_environment() | dict(ready.environment)


@contextmanager
def server(ready: Prepared) -> Iterator[subprocess.Popen[bytes]]:
    with (ready.folder.parent / "errors").open("w") as errors:
        process = subprocess.Popen(ready.command, cwd=ready.folder, env=environment(ready), stderr=errors)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def client(ready: Prepared, *more: str) -> subprocess.CompletedProcess[str]:
    command = [*ready.client, *more]
    return subprocess.run(command, env=environment(ready), capture_output=True, text=True)


def served(ready: Prepared) -> dict[str, Any]:
    with server(ready) as process:
        done = client(ready, *SHORT)
        assert done.returncode == 0, done.stderr
        assert process.wait() == 0
    assert (ready.folder.parent / "errors").read_text() == ""
    line: dict[str, Any] = json.loads(done.stdout)
    return line


@pytest.mark.parametrize("case", services.CASES, ids=lambda case: case.name)
def test_server(case: Case, tmp_path: Path) -> None:
    """Twice, as in the rounds of a suite; also in a folder whose name is too long for a socket."""
    ready = prepared(case, tmp_path / ("x" * 120))
    for _ in range(2):
        line = served(ready)
        assert line["operations_per_second"] > 0
        assert 0 < line[load.P99] <= line[load.P99_9]
        assert case.resident_key is None or line[case.resident_key] > 1 << 20
        if case.name == "postgres":
            assert line["operations"] == load.SERVERS["postgres"].connections * 20
        assert load.find_server(ready.folder / load.SERVERS[case.name].pid_file) is None


@pytest.mark.parametrize("case", services.CASES, ids=lambda case: case.name)
def test_stale_server_is_ended(case: Case, tmp_path: Path) -> None:
    ready = prepared(case, tmp_path / "case")
    with server(ready) as stale:
        wait_until(lambda: load.find_server(ready.folder / load.SERVERS[case.name].pid_file))
        case.prepare(tmp_path / "case")
        assert stale.wait() != 0


@pytest.mark.parametrize("name", ["node", "postgres"])
def test_client_that_is_told_to_end_ends_the_server(name: str, tmp_path: Path) -> None:
    ready = prepared(BY_NAME[name], tmp_path / "case")
    with server(ready) as process:
        driver = subprocess.Popen([*ready.client, "--seconds", "60s"], env=environment(ready))
        generator = "wrk" if name == "node" else "pgbench"
        wait_until(lambda: generator in children(driver.pid))
        driver.terminate()
        assert driver.wait() == 128 + signal.SIGTERM
        assert process.wait() == 0


def children(pid: int) -> str:
    return subprocess.run(
        ["ps", "-o", "comm=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    ).stdout


# ---- clients that cannot do their work ----


@pytest.mark.parametrize("name", load.SERVERS)
def test_no_server(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "research.bench.load", name, "--folder", str(tmp_path)]
    done = subprocess.run([*command, "--timeout", "0.3s"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "not there in time" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("redis",), USAGE, "redis"),
        (("nginx", "--seconds", "0s"), USAGE, "--seconds"),
        (("postgres", "--transactions", "0"), USAGE, "--transactions"),
        (("nginx", "--folder", "/nowhere"), 1, "No such file"),
    ],
)
def test_wrong_options(words: tuple[str, ...], status: int, message: str) -> None:
    command = [sys.executable, "-m", "research.bench.load", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh\necho oh dear >&2\nexit 1\n", "wrk: oh dear"),
        ("#!/bin/sh\nexit 3\n", "wrk: exit code 3"),
        ('#!/bin/sh\necho \'{"operations": 7, "failed": 2}\'\n', "2 of 7 requests failed"),
        ('#!/bin/sh\necho \'{"operations": 0, "failed": 0}\'\n', "0 of 0 requests failed"),
        (None, "cannot run wrk"),
    ],
)
def test_load_generator_that_fails(
    script: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script:
        (tmp_path / "wrk").write_text(script)
        (tmp_path / "wrk").chmod(0o755)
    (tmp_path / load.PORT).write_text("1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClientError, match=message):
        load.http(1, 1)


def test_pid_of_another_process(tmp_path: Path) -> None:
    """A number that a file names may have gone to a process elsewhere."""
    file = tmp_path / "server.pid"
    assert load.find_server(file) is None
    for text in ("", "x\n", f"{os.getpid()}\n", "999999999\n"):
        file.write_text(text)
        assert load.find_server(file) is None
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as process:
        file.write_text(f"{process.pid}\nmore\n")
        try:
            wait_until(lambda: load.find_server(file) == process.pid)
            assert load.end_server(process.pid, signal.SIGTERM, 20)
        finally:
            process.kill()
    assert load.end_server(process.pid, signal.SIGTERM, 0)


def test_server_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "ENDING_S", 0.1)
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo $$ >server.pid; while :; do sleep 1; done"]
    ) as process:
        try:
            with (
                pytest.raises(ClientError, match="does not end"),
                load.served(load.SERVERS["node"], lambda: True, 20),
            ):
                pass
        finally:
            process.kill()


def test_quantiles() -> None:
    ordered = [float(value) for value in range(1, 1001)]
    assert load.quantile(ordered, 0.99) == 990
    assert load.quantile(ordered, 0.999) == 999
    assert load.quantile([5.0], 0.999) == 5


def test_inputs_are_the_same_each_time() -> None:
    assert list(services.orders(3)) == list(services.orders(3))
    assert dict(services.pages()) == dict(services.pages())
    for line in services.orders(3):
        assert 5 <= len(json.loads(line)) < 60


# ---- machines without them ----


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nginx = tmp_path / "nginx"
    nginx.write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert obstacle(BY_NAME["nginx"]) == "nginx is not on this machine: install the package nginx-light"
    nginx.chmod(0o755)
    assert obstacle(BY_NAME["nginx"]) == "wrk is not on this machine: install the package wrk"


def test_python_without_the_module(tmp_path: Path) -> None:
    python = "/usr/bin/python3"
    if not shutil.which(python):
        pytest.skip("no Python")
    case = Case("x", "program", "x", lambda folder: Prepared((python,), folder), program=python)
    there = Case(**{**case.__dict__, "python_module": "json", "package": "p"})
    missing = Case(**{**case.__dict__, "python_module": "no_such_module", "package": "p"})
    assert obstacle(there) is None
    assert obstacle(missing) == f"{python} has no module no_such_module: install the package p"


def test_initdb_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    false = tmp_path / "initdb"
    false.write_text("#!/bin/sh\necho no room >&2\nexit 1\n")
    false.chmod(0o755)
    monkeypatch.setattr(load, "postgres_program", lambda name: str(tmp_path / name))
    with pytest.raises(CalmError, match="initdb: no room"):
        BY_NAME["postgres"].prepare(tmp_path / "case")
