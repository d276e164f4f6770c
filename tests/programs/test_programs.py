"""Real programs give the same results with the library as without it, and the library truly works in them."""

from __future__ import annotations

import hashlib
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from inputs import PROGRAMS, WORDS, Program
from preload import assert_active, environment, program


def run(command: list[str], folder: Path, env: dict[str, str], stdin: str = "") -> str:
    done = subprocess.run(
        command, cwd=folder, env=env, input=stdin, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{command[0]}: status {done.returncode}\n{done.stderr[-2000:]}"
    return done.stdout


def digest_of(folder: Path) -> dict[str, str]:
    """By name, so that a failure says which output differs without printing it."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_same_output(case: Program, tmp_path: Path) -> None:
    command = [program(case.binary, case.package), *case.write_inputs(tmp_path)]
    stats = tmp_path / "stats.json"
    outputs = []
    for name, env in (("plain", environment(None)), ("preloaded", environment(stats))):
        folder = tmp_path / name
        folder.mkdir()
        stdout = run(command, folder, env)
        outputs.append((hashlib.sha256(stdout.encode()).hexdigest(), digest_of(folder)))
        assert stdout or outputs[-1][1], "the program wrote nothing"
    assert outputs[0] == outputs[1]
    assert_active(stats)


def test_threaded_cpp(tmp_path: Path) -> None:
    binary = tmp_path / "threads"
    source = Path(__file__).parent / "threads.cpp"
    compiler = program("g++", "g++")
    run(
        [compiler, "-std=c++17", "-O2", "-pthread", "-o", str(binary), str(source)],
        tmp_path,
        environment(None),
    )
    stats = tmp_path / "stats.json"
    plain = run([str(binary)], tmp_path, environment(None))
    for _ in range(5):
        assert run([str(binary)], tmp_path, environment(stats)) == plain
    assert_active(stats)


def git_history(folder: Path, env: dict[str, str]) -> str:
    """Makes a repository of two commits, packs it with threads, and describes all that it holds."""
    git = program("git", "git")
    folder.mkdir()
    identity = {
        f"GIT_{role}_{field}": value
        for role in ("AUTHOR", "COMMITTER")
        for field, value in (("NAME", "A"), ("EMAIL", "a@example.org"), ("DATE", "2020-01-01T00:00:00Z"))
    }
    # Nothing from the user's own configuration, and no repository found above.
    env = {**env, **identity, "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1", "XDG_CONFIG_HOME": str(folder)}
    env["GIT_CEILING_DIRECTORIES"] = str(folder.parent)
    run([git, "init", "-q", "-b", "main", "."], folder, env)
    for generation in range(2):
        for i in range(1500):
            path = folder / f"{WORDS[i % len(WORDS)]}/{i}.txt"
            path.parent.mkdir(exist_ok=True)
            words = (WORDS[(i * j + generation) % len(WORDS)] for j in range(i % 400))
            path.write_text(f"{i}\n" + "\n".join(words))
        run([git, "add", "."], folder, env)
        run([git, "commit", "-q", "-m", f"generation {generation}"], folder, env)
    run(
        [git, "-c", "pack.threads=4", "-c", "gc.auto=0", "gc", "-q", "--aggressive", "--prune=now"],
        folder,
        env,
    )
    run([git, "fsck", "--full", "--strict"], folder, env)
    listed = run([git, "cat-file", "--batch-all-objects", "--batch-check"], folder, env)
    return run([git, "log", "--format=%H %T", "--stat"], folder, env) + listed


def test_git(tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    plain = git_history(tmp_path / "plain", environment(None))
    assert plain == git_history(tmp_path / "preloaded", environment(stats))
    assert_active(stats)


class Redis:
    def __init__(self, port: int, folder: Path) -> None:
        self.port = port
        self.folder = folder

    def ask(self, *words: str, stdin: str = "") -> str:
        cli = [program("redis-cli", "redis-tools"), "-p", str(self.port), *words]
        return run(cli, self.folder, environment(None), stdin).strip()


@contextmanager
def redis_server(folder: Path, env: dict[str, str]) -> Iterator[Redis]:
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program("redis-server", "redis-server"), "--port", str(port), "--bind", "127.0.0.1"]
    command += [
        "--save",
        "",
        "--enable-debug-command",
        "yes",
        "--io-threads",
        "2",
        "--lazyfree-lazy-user-flush",
        "yes",
    ]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            for _ in range(200):
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.05)
            yield Redis(port, folder)
            server.terminate()
            assert server.wait(timeout=30) == 0, (folder / "log").read_text()
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()


def redis_commands() -> str:
    lines = []
    for i in range(20000):
        word = WORDS[i % len(WORDS)]
        lines.append(f"SET string:{i} {word * (i % 40 + 1)}")
        lines.append(f"RPUSH list:{i % 300} {word}-{i}")
        lines.append(f"HSET hash:{i % 500} field-{i} {i * i}")
        lines.append(f"ZADD ranks:{i % 50} {i * 7919 % 10007} member-{i}")
        if i % 5 == 0:
            lines.append(f"DEL string:{i // 2}")
            lines.append(f"APPEND string:{i // 3} {word}")
    return "\n".join(lines) + "\n"


def redis_session(folder: Path, env: dict[str, str]) -> str:
    """Load from 50 clients, then known contents, their digest, and a save by a forked child."""
    with redis_server(folder, env) as redis:
        load = [program("redis-benchmark", "redis-tools"), "-p", str(redis.port), "-c", "50", "-n", "20000"]
        load += [
            "-r",
            "20000",
            "-d",
            "700",
            "-P",
            "16",
            "-q",
            "-t",
            "set,get,lpush,rpop,sadd,hset,zadd,lrange_100",
        ]
        report = run(load, folder, environment(None))
        assert "ERR" not in report
        assert len(re.findall(r"requests per second", report)) >= 7, report
        redis.ask("FLUSHALL")
        replies = redis.ask(stdin=redis_commands())
        assert "ERR" not in replies
        described = [hashlib.sha256(replies.encode()).hexdigest()]
        described += [
            redis.ask(*words) for words in (("DBSIZE",), ("DEBUG", "DIGEST"), ("LRANGE", "list:7", "0", "5"))
        ]
        redis.ask("BGSAVE")
        for _ in range(200):
            persistence = redis.ask("INFO", "persistence")
            if "rdb_bgsave_in_progress:0" in persistence:
                break
            time.sleep(0.05)
        assert "rdb_last_bgsave_status:ok" in persistence
        assert (folder / "dump.rdb").stat().st_size > 0
        redis.ask("DEBUG", "RELOAD")
        described.append(redis.ask("DEBUG", "DIGEST"))
        assert described[-1] == described[2], "the data changed when saved and loaded"
    return "\n".join(described)


def test_redis(tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    plain = redis_session(tmp_path / "plain", environment(None))
    assert plain == redis_session(tmp_path / "preloaded", environment(stats))
    assert_active(stats)
