"""Real servers give the same answers with and without the library, which is verified to be active."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from inputs import WORDS
from preload import Calmalloc, Plain, Ptlbmalloc2, Runner, program
from waiting import wait_until


class Redis:
    def __init__(self, port: int, folder: Path) -> None:
        self.port = port
        self.folder = folder
        self.plain = Plain(folder)

    def run(self, command: list[str], stdin: str = "") -> str:
        return self.plain.run(command, self.folder, stdin)

    def ask(self, *words: str, stdin: str = "") -> str:
        return self.run([program("redis-cli", "redis-tools"), "-p", str(self.port), *words], stdin).strip()


@contextmanager
def redis_server(folder: Path, runner: Runner) -> Iterator[Redis]:
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = program("redis-server", "redis-server")
    if b"\0mallocx\0" in Path(server).read_bytes():
        pytest.skip("this redis-server calls functions of jemalloc's own, which a preload does not replace")
    command = [server, "--port", str(port), "--bind", "127.0.0.1"]
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
    with runner.log.open("a") as log:
        server = subprocess.Popen(command, cwd=folder, env=runner.env, stdout=log, stderr=log)
        try:

            def answers() -> bool:
                assert server.poll() is None, runner.log.read_text()
                with socket.socket() as client:
                    return client.connect_ex(("127.0.0.1", port)) == 0

            wait_until(answers)
            yield Redis(port, folder)
            server.terminate()
            assert server.wait() == 0, runner.log.read_text()
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()


def redis_commands() -> str:
    lines = []
    for i in range(5000):
        word = WORDS[i % len(WORDS)]
        lines.append(f"SET string:{i} {word * (i % 40 + 1)}")
        lines.append(f"RPUSH list:{i % 300} {word}-{i}")
        lines.append(f"HSET hash:{i % 500} field-{i} {i * i}")
        lines.append(f"ZADD ranks:{i % 50} {i * 7919 % 10007} member-{i}")
        if i % 5 == 0:
            lines.append(f"DEL string:{i // 2}")
            lines.append(f"APPEND string:{i // 3} {word}")
    return "\n".join(lines) + "\n"


def redis_session(folder: Path, runner: Runner) -> str:
    """Load from 50 clients, then known contents, their digest, and a save by a forked child."""
    with redis_server(folder, runner) as redis:
        load = [program("redis-benchmark", "redis-tools"), "-p", str(redis.port), "-c", "50", "-n", "5000"]
        load += [
            "-r",
            "5000",
            "-d",
            "700",
            "-P",
            "16",
            "-q",
            "-t",
            "set,get,lpush,rpop,sadd,hset,zadd,lrange_100",
        ]
        report = redis.run(load)
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
        wait_until(lambda: "rdb_bgsave_in_progress:0" in redis.ask("INFO", "persistence"))
        assert "rdb_last_bgsave_status:ok" in redis.ask("INFO", "persistence")
        assert (folder / "dump.rdb").stat().st_size > 0
        redis.ask("DEBUG", "RELOAD")
        described.append(redis.ask("DEBUG", "DIGEST"))
        assert described[-1] == described[2], "the data changed when saved and loaded"
    return "\n".join(described)


@pytest.fixture(scope="module")
def plain_redis(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The result without a library, computed once."""
    folder = tmp_path_factory.mktemp("plain-redis")
    return redis_session(folder / "work", Plain(folder))


def test_redis(plain_redis: str, preloaded: Runner, tmp_path: Path) -> None:
    assert plain_redis == redis_session(tmp_path / "preloaded", preloaded)
    preloaded.assert_active()


class Postgres:
    """A separate cluster on a socket in a folder, run by a user other than root."""

    def __init__(self, runner: Runner, folder: Path) -> None:
        self.runner = runner
        self.folder = folder
        self.user = None
        if os.getuid() == 0:
            names = [entry.pw_name for entry in pwd.getpwall()]
            self.user = "postgres" if "postgres" in names else "nobody"
            shutil.chown(folder, self.user)
        self.env = dict(runner.env)
        if "LD_PRELOAD" in self.env:
            # Where that user can read it.
            copied = shutil.copy(self.env["LD_PRELOAD"], folder)
            Path(copied).chmod(0o755)
            self.env["LD_PRELOAD"] = str(copied)
        if "PTLBMALLOC2_STATS" in self.env:
            self.env["PTLBMALLOC2_STATS"] = f"json:{folder / 'stats.json'}"
        self.env |= {"HOME": str(folder), "PGHOST": str(folder), "PGUSER": "calm", "PGDATABASE": "postgres"}
        installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        if not installed:
            pytest.skip("PostgreSQL is not installed: it is in the Debian package postgresql")
        self.bin = installed[-1]

    def run(self, name: str, *words: str) -> str:
        done = subprocess.run(
            [str(self.bin / name), *words],
            cwd=self.folder,
            env=self.env,
            user=self.user,
            extra_groups=[] if self.user else None,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        with self.runner.log.open("a") as log:
            log.write(done.stderr)
        assert done.returncode == 0, f"{name}: status {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
        return done.stdout

    @contextmanager
    def started(self) -> Iterator[None]:
        data, log = str(self.folder / "data"), self.folder / "server.log"
        self.run("initdb", "-D", data, "-U", "calm", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        settings = f"-c listen_addresses= -c unix_socket_directories={self.folder} -c fsync=off"
        settings += " -c shared_buffers=16MB -c max_connections=20 -c max_wal_size=64MB"
        self.run("pg_ctl", "-D", data, "-l", str(log), "-w", "-t", "600", "-o", settings, "start")
        try:
            yield
        finally:
            self.run("pg_ctl", "-D", data, "-m", "fast", "-w", "-t", "600", "stop")
            with self.runner.log.open("a") as kept:
                kept.write(log.read_text())

    def query(self, text: str) -> str:
        return self.run("psql", "-X", "-q", "-A", "-t", "-c", text)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that all users can read, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="calm-postgres-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def test_postgres(preloaded: Ptlbmalloc2 | Calmalloc) -> None:
    with open_folder() as folder:
        postgres = Postgres(preloaded, folder)
        with postgres.started():
            postgres.run("pgbench", "-i", "-q", "-s", "2")
            report = postgres.run("pgbench", "-c", "4", "-j", "2", "-t", "250", "-P", "2")
            found = re.search(r"number of transactions actually processed: (\d+)", report)
            assert found is not None, report
            count = int(found[1])
            assert count == 4 * 250
            # The sums that pgbench's transactions keep equal.
            sums = [
                postgres.query(f"SELECT coalesce(sum({column}), 0) FROM {table}")
                for table, column in (
                    ("pgbench_accounts", "abalance"),
                    ("pgbench_branches", "bbalance"),
                    ("pgbench_tellers", "tbalance"),
                    ("pgbench_history", "delta"),
                )
            ]
            assert len(set(sums)) == 1, sums
            assert int(postgres.query("SELECT count(*) FROM pgbench_history")) == count
            # Much memory, in one statement.
            text = "SELECT count(DISTINCT md5(i::text)), sum(length(repeat('x', i % 5000))) "
            text += "FROM generate_series(1, 60000) AS i"
            assert postgres.query(text) == "60000|149970000\n"
            postgres.query("VACUUM ANALYZE")
        if isinstance(preloaded, Calmalloc):
            preloaded.assert_active()
        else:
            lines = [json.loads(line) for line in (folder / "stats.json").read_text().splitlines()]
            assert len(lines) > 4
            assert all(line["active"] is True for line in lines)
