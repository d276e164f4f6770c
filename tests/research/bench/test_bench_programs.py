"""The suite's programs and servers: that they prepare, run, and are what they say."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from calm_helpers import ROOT
from waiting import wait_until

from calm.core import allocators, proc
from calm.core.environment import clean_environment
from calm.core.errors import USAGE, CalmError
from research.bench import clients, programs
from research.bench.cases import Case, Prepared
from research.bench.results import COST
from research.bench.runner import obstacle

BY_NAME = {case.name: case for case in programs.CASES}
PROGRAMS = [case for case in programs.CASES if case.family != "server"]
SERVERS = list(programs.SERVERS)
# Much shorter runs of the servers' clients: the last of an option given twice counts.
SHORT = {
    "redis-set": ("--keys", "20000"),
    "redis-get": ("--keys", "10000", "--rounds", "2"),
    "redis-half": ("--keys", "5000", "--settle", "0.2s"),
    "memcached": ("--keys", "5000"),
}
# Four seconds each, and more.
LENGTHY = {"sqlite3", "xalan", "ghostscript", "gcc", "g++", "rustc", "java"}
LENGTHY |= {case.name for case in PROGRAMS if case.family == "periodic"}
SOCKETS = {"redis-set": clients.REDIS.socket, "memcached": clients.MEMCACHED.socket}
PRINTED = {
    "sqlite3": r"\A2\n0\|20619\|",
    "python3": r"\A([0-9a-f]{64}\n){13}\Z",
    "python3-malloc": r"\A([0-9a-f]{64}\n){13}\Z",
    "z3": r"\Asat\n",
    "rocksdb": r"fillrandom .*200000 operations(.|\n)*readrandom .*200000 operations",
    "pandas": r"\A(1080 \(20000, 10\) \d+ [\d.]+\n){3}100000\n\Z",
    "java": r"\A(\d+\n){4}\Z",
    "periodic-pillow": r"\A(31500000\n){6}\Z",
    "periodic-gunicorn": r"\A(\d+\n){6}\Z",
    "periodic-java": r"\A(\d+\n){6}\Z",
    "duckdb": r"\A(\[\('group 0', .*\]\n\('note \d+', \d+\)\n){3}\Z",
    "polars": r"\A(\[\('group 0', .*\]\n5000\n){3}\Z",
    "pyarrow": r"\A(\[\{'name': 'group 0', .*\]\n400000\n){3}\Z",
    "sklearn": r"\A\(10000, \d+\) [\d.]+ 1.0\n\Z",
    "php": r"\A(\d+ 5001\n){2}\Z",
    "cgo": r"\A\d+\n\Z",
    "lua": r"\A819100\t262143\t\d+\t\d+\t\d+\n\Z",
}
WRITTEN = {
    "xalan": ["report.xml"],
    "ghostscript": [f"page-{page}.ppm" for page in range(1, 9)],
    "gcc": ["big.o"],
    "g++": ["big.o"],
    "clang": ["big.o"],
    "ffmpeg": ["film.mkv"],
    "git-gc": ["repository"],
    "rustc": ["libbig.rlib"],
    "pandas": ["orders.csv"],
    "vips": ["sharp.ppm", "edges.ppm", "turned.ppm"],
    "rocksdb": ["database"],
}


def prepared(case: Case, folder: Path) -> Prepared:
    if reason := obstacle(case):
        pytest.skip(reason)
    return case.prepare(folder)


def test_program_that_calls_jemalloc_by_its_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "redis-server"
    monkeypatch.setenv("PATH", str(tmp_path))
    for names, expected in ((b"\0malloc\0", None), (b"\0free\0mallocx\0", "a preload does not replace")):
        server.write_bytes(names)
        server.chmod(0o755)
        reason = obstacle(BY_NAME["redis-set"])
        assert reason is None if expected is None else expected in str(reason)


def plain(more: Mapping[str, str]) -> dict[str, str]:
    """An environment without a developer's own settings for malloc."""
    prefixes = ("LD_", "MALLOC_", "GLIBC_TUNABLES", "CALM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)} | dict(more)


def processes_in(folder: Path) -> list[str]:
    """Commands whose working directory is there."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cwd").readlink() == folder:
                found.append((path / "cmdline").read_text())
        except OSError:
            continue
    return found


@contextmanager
def server(ready: Prepared, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        ready.command,
        cwd=ready.folder,
        env=plain(ready.environment) | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def client(ready: Prepared, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ready.client, *more],
        cwd=ready.folder,
        env=plain(ready.environment),
        capture_output=True,
        text=True,
    )


def reported(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    line: dict[str, Any] = json.loads(done.stdout)
    return line


def served(case: Case, ready: Prepared, *more: str, **variables: str) -> dict[str, Any]:
    """One run: the server ends by itself, and leaves nothing behind."""
    with server(ready, **variables) as process:
        line = reported(client(ready, *more))
        assert process.wait() == 0
    assert processes_in(ready.folder) == []
    assert case.metric
    assert line[case.metric.key] > 0
    return line


def refused(done: subprocess.CompletedProcess[str], status: int = 1) -> str:
    assert done.returncode == status, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# ---- all ----


def test_names_and_summaries() -> None:
    names = [case.name for case in programs.CASES]
    assert len(set(names)) == len(names)
    for case in programs.CASES:
        of_metric = {None: "program", COST: "periodic"}
        assert case.family == of_metric.get(case.metric, "server")
        assert case.program
        assert case.package
        assert case.summary
        assert "\n" not in case.summary
        assert "." not in case.summary[-1]
    assert any(case.quick for case in programs.CASES)


DIGESTS = """
import hashlib, json, sys
from research.bench import applications, inputs
digests = {}
for program in inputs.PROGRAMS + inputs.FURTHER_PROGRAMS + applications.PROGRAMS:
    for name, pieces in program.inputs.items():
        digest = hashlib.sha256()
        for piece in pieces():
            digest.update(piece if isinstance(piece, bytes) else piece.encode())
        digests[f"{program.name}/{name}"] = digest.hexdigest()
json.dump(digests, sys.stdout)
"""


def test_inputs_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    """By another interpreter, whose hashes differ, and as they are written."""
    found = subprocess.run(
        [sys.executable, "-c", DIGESTS],
        env=plain({"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1"}),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    expected = json.loads(found)
    assert len(set(expected.values())) == len(expected) - 1, "only python3's and python3-malloc's are one"
    for case in PROGRAMS:
        case.prepare(tmp_path / case.name)
        for path in (tmp_path / case.name / "inputs").iterdir():
            if path.name != "made-by":
                written = hashlib.sha256(path.read_bytes()).hexdigest()
                assert expected.pop(f"{case.name}/{path.name}") == written
    assert not expected


def test_inputs_are_kept_and_made_again_when_stale(tmp_path: Path) -> None:
    case = BY_NAME["lua"]
    case.prepare(tmp_path / "lua")
    script = tmp_path / "lua/inputs/churn.lua"
    text, written = script.read_text(), script.stat().st_mtime_ns
    case.prepare(tmp_path / "lua")
    assert script.stat().st_mtime_ns == written
    # Another version's.
    script.write_text("error()")
    (script.parent / "made-by").write_text("0" * 64)
    (script.parent / "other").touch()
    case.prepare(tmp_path / "lua")
    assert script.read_text() == text
    assert not (script.parent / "other").exists()
    # Left half by one who was interrupted.
    (script.parent / "made-by").unlink()
    script.write_text(text[:100])
    case.prepare(tmp_path / "lua")
    assert script.read_text() == text


def test_preparing_stays_in_its_folder_and_names_it_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    # PostgreSQL prepares its own folder.
    for case in (case for case in programs.CASES if case.name != "postgres" or not obstacle(case)):
        ready = case.prepare(Path("cases") / case.name)
        assert ready.folder.is_absolute()
        assert ready.folder.is_dir()
        assert ready.folder.is_relative_to(tmp_path / "cases" / case.name)
        # Relative: results from different machines name the same command.
        assert not any(str(tmp_path) in word for word in ready.command)
        assert bool(ready.client) == (case.family == "server")
    assert [path.name for path in tmp_path.iterdir()] == ["cases"]


# ---- programs ----


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.long] if case.name in LENGTHY else [])
        for case in PROGRAMS
    ],
)
def test_program(case: Case, tmp_path: Path) -> None:
    ready = prepared(case, tmp_path)
    done = subprocess.run(
        ready.command,
        cwd=ready.folder,
        env=plain(ready.environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stderr
    if case.name in PRINTED:
        assert re.search(PRINTED[case.name], done.stdout)
    for name in WRITTEN.get(case.name, []):
        path = ready.folder / name
        assert path.is_dir() or path.stat().st_size > 1000
    if case.name in ("ghostscript", "vips"):
        heads = {path.read_bytes()[:2] for path in ready.folder.glob("*.ppm")}
        assert heads <= {b"P6", b"PF"}, "not pictures"


# ---- servers ----


@pytest.mark.parametrize("case", SERVERS, ids=lambda case: case.name)
def test_server(case: Case, tmp_path: Path) -> None:
    ready = prepared(case, tmp_path)
    for _ in range(2):
        line = served(case, ready, *SHORT[case.name])
        assert line["operations"] >= 10_000
        assert (case.resident_key is None) or line[case.resident_key] > 0
    # Nothing is kept on disk.
    assert list(ready.folder.iterdir()) in ([], [ready.folder / clients.MEMCACHED.socket])


@pytest.mark.long
@pytest.mark.timeout(8000)
@pytest.mark.parametrize("case", SERVERS, ids=lambda case: case.name)
def test_whole_server(case: Case, tmp_path: Path) -> None:
    """At full length the server, not the client, is what takes the time."""
    line = served(case, prepared(case, tmp_path))
    assert line["client_processor_seconds"] < line["server_processor_seconds"]


def test_folder_with_a_long_path(tmp_path: Path) -> None:
    case = BY_NAME["redis-set"]
    served(case, prepared(case, tmp_path / ("x" * 120)), *SHORT["redis-set"])
    case = BY_NAME["memcached"]
    served(case, prepared(case, tmp_path / ("y" * 120)), *SHORT["memcached"])


def test_half_reports_what_is_resident(tmp_path: Path) -> None:
    case = BY_NAME["redis-half"]
    line = served(case, prepared(case, tmp_path), "--keys", "20001", "--settle", "0.2s")
    assert line["live_bytes"] == 10_000 * 4096
    assert line["operations"] == 2 * 20_001
    assert line["live_bytes"] < line["resident_bytes"] <= line["resident_bytes_full"] * 1.05
    assert 20_001 * 4096 < line["resident_bytes_full"] < 20_001 * 4096 * 2
    # The server's own word, from the same file.
    assert line["used_memory_rss"] == pytest.approx(line["resident_bytes"], rel=0.1)


def test_number_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["redis-half"]
    assert case.prepare(tmp_path).client[-2:] == ("--keys", "200000")
    monkeypatch.setenv(programs.REDIS_KEYS, "1000000")
    assert case.prepare(tmp_path).client[-2:] == ("--keys", "1000000")
    for wrong in ("", "0", "-1", "many", "1e6", "10000001", "٣"):
        monkeypatch.setenv(programs.REDIS_KEYS, wrong)
        with pytest.raises(CalmError, match=programs.REDIS_KEYS) as caught:
            case.prepare(tmp_path)
        assert caught.value.exit_code == USAGE


def bound(log: Path, name: str) -> set[str]:
    """The library that redis-server's own use of a name was bound to."""
    pattern = rf"binding file redis-server \[0\] to (\S+) \[0\]: \w+ symbol `{name}'"
    return {
        str(Path(found).resolve())
        for path in log.parent.glob(f"{log.name}.*")
        for found in re.findall(pattern, path.read_text(errors="replace"))
    }


@pytest.mark.parametrize("name", allocators.KNOWN)
def test_redis_is_served_by_the_allocator(name: str, tmp_path: Path) -> None:
    """Debian's is linked with jemalloc: neither glibc's runs nor any other's may end up there."""
    case = BY_NAME["redis-set"]
    ready = prepared(case, tmp_path / "case")
    if name == allocators.GLIBC:
        library = allocators.origin(name).library
    elif not (library := allocators.find_library(name)):
        pytest.skip(f"{name} is not on this machine")
    assert library
    preload = allocators.parse(name).variables({})
    log = tmp_path / "bindings"
    served(
        case,
        ready,
        "--keys",
        "2000",
        **preload,
        LD_DEBUG="bindings",
        LD_DEBUG_OUTPUT=str(log),
        LD_BIND_NOW="1",
    )
    for function in ("malloc", "calloc", "realloc", "free", "malloc_usable_size"):
        assert bound(log, function) == {str(Path(library).resolve())}, function


# ---- clients that cannot do their work ----


@pytest.mark.parametrize("case", SERVERS, ids=lambda case: case.name)
def test_no_server(case: Case, tmp_path: Path) -> None:
    ready = case.prepare(tmp_path)
    began = time.monotonic()
    message = refused(client(ready, *SHORT[case.name], "--timeout", "0.5s"))
    assert "no server at" in message
    assert "within 0.5 s" in message
    assert time.monotonic() - began < 30


def test_no_folder(tmp_path: Path) -> None:
    ready = BY_NAME["redis-set"].prepare(tmp_path)
    assert "No such file" in refused(client(ready, "--folder", str(tmp_path / "none")))


@pytest.mark.parametrize(
    "words", [("--keys", "0"), ("--keys", "x"), ("--settle", "-1s"), ("--value", "3"), ("--no",)]
)
def test_wrong_options(words: tuple[str, ...], tmp_path: Path) -> None:
    done = client(BY_NAME["redis-half"].prepare(tmp_path), *words)
    assert done.returncode == USAGE
    assert done.stdout == ""
    assert words[0] in done.stderr.splitlines()[-1]


@contextmanager
def impostor(folder: Path, name: str, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server of another kind: Python that finds the accepted connection in `c`, and ends at its end."""
    text = f"import socket, time\ns = socket.socket(socket.AF_UNIX)\ns.bind({name!r})\ns.listen()\n"
    text += f"c, _ = s.accept()\n{script}\n"
    process = subprocess.Popen([sys.executable, "-c", text], cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("c.recv(100); c.close()", "hung up"),
        ("c.recv(100)", "hung up"),
        ("c.recv(100)\nfor _ in range(9): c.sendall(b'-ERR no' * 20000)", "not asked for|hung up"),
    ],
    ids=["closes", "dies", "nonsense"],
)
@pytest.mark.parametrize("name", ["redis-set", "memcached"])
def test_server_that_fails(name: str, script: str, message: str, tmp_path: Path) -> None:
    ready = BY_NAME[name].prepare(tmp_path)
    with impostor(tmp_path, SOCKETS[name], script):
        assert re.search(message, refused(client(ready, *SHORT[name])))


def test_silent_server(tmp_path: Path) -> None:
    """Every wait has an end."""
    ready = BY_NAME["redis-set"].prepare(tmp_path)
    shorter = "import sys, research.bench.clients as c; c.SILENCE_S = c.ENDING_S = 0.5\n"
    shorter += "sys.exit(c.run(c.command, 'client'))"
    command = (sys.executable, "-c", shorter, *ready.client[3:])
    silent = Prepared(ready.command, ready.folder, command, ready.environment)
    with impostor(tmp_path, clients.REDIS.socket, "time.sleep(60)"):
        assert "silent after 0 of" in refused(client(silent, *SHORT["redis-set"]))


def test_server_dies_while_it_is_driven(tmp_path: Path) -> None:
    case = BY_NAME["redis-get"]
    ready = prepared(case, tmp_path)
    with server(ready) as process:
        driver = subprocess.Popen(
            [*ready.client, "--rounds", "1000"],
            env=plain(ready.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: proc.stat(process.pid).user_s > 0.1)
        process.kill()
        output, errors = driver.communicate()
    assert refused(subprocess.CompletedProcess([], driver.returncode, output, errors)).count("hung up") == 1


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


def test_client_that_is_told_to_end_ends_the_server(tmp_path: Path) -> None:
    case = BY_NAME["redis-get"]
    ready = prepared(case, tmp_path)
    with server(ready) as process:
        driver = subprocess.Popen([*ready.client, "--rounds", "1000"], env=plain(ready.environment))
        wait_until(lambda: proc.stat(process.pid).user_s > 0.1)
        driver.terminate()
        assert driver.wait() == 128 + 15
        assert process.wait() == 0


# ---- what an earlier run has left ----


@pytest.mark.parametrize("name", ["redis-set", "memcached"])
def test_stale_server_is_ended(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    ready = prepared(case, tmp_path)
    with server(ready) as stale:
        wait_until(lambda: listens(tmp_path / SOCKETS[name]))
        again = case.prepare(tmp_path)
        stale.wait()
        assert list(tmp_path.iterdir()) == []
        served(case, again, *SHORT[name])


def test_socket_that_nobody_listens_on(tmp_path: Path) -> None:
    for name in ("redis-set", "memcached"):
        case = BY_NAME[name]
        ready = prepared(case, tmp_path / name)
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(ready.folder / SOCKETS[name]))
        served(case, ready, *SHORT[name])


def test_compilers_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gcc is ccache's, all runs but the first would copy what that one compiled."""
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho $CCACHE_DISABLE\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ready = BY_NAME["gcc"].prepare(tmp_path / "gcc-case")
    environment = clean_environment() | dict(ready.environment)
    done = subprocess.run(ready.command, cwd=ready.folder, env=environment, capture_output=True, text=True)
    assert done.stdout == "1\n"


def test_a_client_finds_calm_where_this_one_is(tmp_path: Path) -> None:
    (case,) = (case for case in programs.CASES if case.name == "memcached")
    first = case.prepare(tmp_path).environment["PYTHONPATH"].split(":")[0]
    assert (Path(first) / "research/bench/clients.py").is_file()
