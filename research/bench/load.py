"""The client of servers that a load generator drives: starts the generator, and prints one line of JSON.

wrk sends requests over HTTP for a fixed time, pgbench a fixed number of transactions. Both keep a fixed
number of connections busy, so a slow answer delays the requests behind it: the latencies compare allocators
under the same load, and do not predict those of a server with a given rate of requests.
"""

import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click

from calm.cli import run
from calm.core import options, proc
from calm.core.errors import CalmError
from research.bench.clients import ENDING_S, ClientError

T = TypeVar("T")

P99, P99_9 = "p99_s", "p99_9_s"
RESIDENT = "resident_bytes"
# Between the end of the load and the reading of memory.
SETTLE_S = 1.0
# In the server's folder: the port that it listens on, wrk's script, and the requests.
PORT, SCRIPT, REQUESTS = "port", "wrk.lua", "requests"

WRK = """local requests, position = {}, 0

function init()
    for line in io.lines("requests") do
        if line:sub(1, 1) == "/" then
            requests[#requests + 1] = wrk.format("GET", line, {["Accept-Encoding"] = "gzip"})
        else
            requests[#requests + 1] = wrk.format("POST", "/", {["Content-Type"] = "application/json"}, line)
        end
    end
end

function request()
    position = position % #requests + 1
    return requests[position]
end

function done(summary, latency)
    local errors = summary.errors
    io.write(string.format(
        '{"operations": %d, "seconds": %f, "failed": %d, "p99_s": %f, "p99_9_s": %f}\\n',
        summary.requests, summary.duration / 1e6,
        errors.connect + errors.read + errors.write + errors.status + errors.timeout,
        latency:percentile(99) / 1e6, latency:percentile(99.9) / 1e6))
end
"""
# A thousand rows grouped, sorted and joined to strings in the server's memory.
REPORT = """\\set first random(1, 100000 * :scale - 1000)
SELECT bid, count(*), string_agg(aid || ':' || abalance, ',' ORDER BY abalance, aid), array_agg(filler)
FROM pgbench_accounts WHERE aid BETWEEN :first AND :first + 999 GROUP BY bid;
"""
POSTGRES_DATA = "data"
POSTGRES_USER = "bench"


@dataclass(frozen=True)
class Server:
    """How a server is found and ended."""

    pid_file: str
    """In the server's working directory; its first line is the process."""
    farewell: signal.Signals
    """The signal that it ends on in good order."""
    connections: int


SERVERS: Mapping[str, Server] = {
    "nginx": Server("server.pid", signal.SIGQUIT, 400),
    "node": Server("server.pid", signal.SIGTERM, 32),
    "aiohttp": Server("server.pid", signal.SIGTERM, 32),
    "puma": Server("server.pid", signal.SIGTERM, 32),
    "postgres": Server(f"{POSTGRES_DATA}/postmaster.pid", signal.SIGINT, 8),
}


def postgres_program(name: str) -> str:
    """The newest on this machine: Debian keeps each version's programs in a folder of its own."""
    folders = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    newest = sorted(folders, key=lambda folder: float(folder.parent.name), reverse=True)
    return shutil.which(name, path=os.pathsep.join(map(str, newest))) or name


# ---- the server's process ----


def find_server(pid_file: Path) -> int | None:
    """The process that a pid file names, unless it has ended and the number is another one's."""
    try:
        pid = int(pid_file.read_text().split()[0])
        return pid if Path(f"/proc/{pid}/cwd").readlink() == pid_file.parent.resolve() else None
    except (OSError, ValueError, IndexError):
        return None


def end_server(pid: int, number: signal.Signals, seconds: float) -> bool:
    """Sends the signal; returns whether the process has ended in time."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(process, number)
        return bool(select.select([process], [], [], seconds)[0])
    except ProcessLookupError:
        return True
    finally:
        os.close(process)


def end_stale(folder: Path, server: Server) -> None:
    """Ends a server that a killed run has left in a folder."""
    if pid := find_server(folder / server.pid_file):
        end_server(pid, signal.SIGKILL, ENDING_S)


def wait_for(look: Callable[[], T | None], deadline: float) -> T:
    while not (found := look()):
        if time.monotonic() > deadline:
            raise ClientError("the server is not there in time")
        time.sleep(0.02)
    return found


@contextmanager
def served(server: Server, answers: Callable[[], bool], seconds: float) -> Iterator[int]:
    """The server's process, once it answers; it is ended whatever happens."""
    deadline = time.monotonic() + seconds
    pid = wait_for(lambda: find_server(Path(server.pid_file)), deadline)
    try:
        wait_for(answers, deadline)
        yield pid
    finally:
        ended = end_server(pid, server.farewell, ENDING_S)
    if not ended:
        raise ClientError(f"the server does not end, {ENDING_S:g} s after it was asked to")


def resident_bytes(root: int) -> int:
    """Of a process and all below it; what they share is counted once."""
    total = 0
    for pid in (root, *proc.descendants(root)):
        try:
            total += proc.rollup(pid)["Pss"] * 1024
        except proc.GoneError:
            continue
    return total


# ---- load generators ----


def generate(command: Sequence[str], folder: Path | None = None) -> str:
    """Runs a load generator; returns what it printed."""
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ClientError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ClientError(f"{Path(command[0]).name}: {words[-1]}")
    return done.stdout


def port() -> int:
    return int(Path(PORT).read_text())


def listens() -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port())) == 0


def http(connections: int, seconds: float) -> dict[str, float]:
    command = ["wrk", "--threads", "1", "--connections", str(connections), "--duration"]
    command += [f"{math.ceil(seconds)}s", "--timeout", "30s", "--script", SCRIPT]
    printed = generate([*command, f"http://127.0.0.1:{port()}/"])
    line: dict[str, float] = json.loads(printed.splitlines()[-1])
    if line["failed"] or not line["operations"]:
        raise ClientError(f"{line['failed']} of {line['operations']} requests failed")
    return line


def _postgres(name: str, *arguments: str) -> str:
    # The socket's name would be too long for some folders: the program finds it in its own.
    command = [postgres_program(name), "--host=/proc/self/cwd", f"--username={POSTGRES_USER}"]
    return generate([*command, *arguments], Path(POSTGRES_DATA))


def postgres_answers() -> bool:
    try:
        _postgres("pg_isready", "--dbname=postgres")
    except ClientError:
        return False
    return True


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by this share of all."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def postgres(connections: int, transactions: int, scale: int) -> dict[str, float]:
    """Transactions of pgbench, and a report for each nine of them, on fresh tables."""
    database = "--", "postgres"
    _postgres("pgbench", "--initialize", "--init-steps=dtgvp", f"--scale={scale}", "--quiet", *database)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "report.sql").write_text(REPORT)
        load = [f"--client={connections}", f"--transactions={transactions}", "--random-seed=1", "--no-vacuum"]
        load += ["--builtin=tpcb-like@9", f"--file={folder / 'report.sql'}@1"]
        load += ["--log", f"--log-prefix={folder / 'log'}"]
        _postgres("pgbench", *load, *database)
        # Each line: client, transaction, microseconds, script, seconds and microseconds at its end.
        lines = [line.split() for file in folder.glob("log.*") for line in file.read_text().splitlines()]
    latencies = sorted(int(line[2]) / 1e6 for line in lines)
    if len(latencies) != connections * transactions:
        raise ClientError(f"{len(latencies)} of {connections * transactions} transactions were committed")
    ends = [int(line[4]) + int(line[5]) / 1e6 for line in lines]
    began = min(end - int(line[2]) / 1e6 for end, line in zip(ends, lines, strict=True))
    return {
        "operations": len(latencies),
        "seconds": max(ends) - began,
        P99: quantile(latencies, 0.99),
        P99_9: quantile(latencies, 0.999),
    }


@click.command()
@click.argument("name", type=click.Choice(tuple(SERVERS)))
@click.option("--folder", default=".", help="The server's working directory.")
@options.timeout("20s", "Wait no longer for the server.")
@options.duration("--seconds", default="5s", at_least="1s", text="Time of the load over HTTP.")
@click.option("--transactions", type=click.IntRange(1), default=2000, help="For each connection of pgbench.")
@click.option("--scale", type=click.IntRange(1), default=3, help="Of pgbench: 100,000 rows each.")
def command(name: str, folder: str, timeout: float, seconds: float, transactions: int, scale: int) -> None:
    """Drive a server by a load generator, and end it."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise CalmError(f"{folder}: {error.strerror}") from error
    server, is_postgres = SERVERS[name], name == "postgres"
    with served(server, postgres_answers if is_postgres else listens, timeout) as pid:
        if is_postgres:
            line = postgres(server.connections, transactions, scale)
        else:
            line = http(server.connections, seconds)
            time.sleep(SETTLE_S)
            line[RESIDENT] = resident_bytes(pid)
    print(json.dumps({"operations_per_second": line["operations"] / line["seconds"], **line}), flush=True)


if __name__ == "__main__":
    # On SIGTERM the server is ended first.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(run(command, "client"))
