"""The clients of the suite's servers: each drives a server over its socket and prints one line of JSON.

Every value begins with the number of its key, and answers are checked against it. Requests are made before
the time is taken, and sent a few batches ahead of the answers, so that the server always has work. Every wait
is bounded: a client ends, with one line on standard error, whatever the server does.
"""

import json
import os
import random
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import click

from calm.cli import run
from calm.core import options, proc
from calm.core.errors import CalmError

# Without a byte from the server, or room for one.
SILENCE_S = 30.0
ENDING_S = 30.0
# Batches that are sent ahead of the answers, and their bytes: of requests or answers, whichever are more.
IN_FLIGHT = 4
BATCH_BYTES = 1 << 20
# Buffers in one system call (UIO_MAXIOV), less a margin.
BUFFERS = 1000
DIGITS = 10
_ROOT = Path(__file__).resolve().parents[2]
FILLER = b"The quick brown fox jumps over the lazy dog. " * 2000


@dataclass(frozen=True)
class Protocol:
    """A server's requests and answers; each ends with the key's digits where a value begins."""

    socket: str
    """A name in the current folder, since a path may be too long for a socket's."""
    farewell: bytes
    batch: int
    """Requests in a batch, at most."""
    store: bytes
    stored: bytes
    fetch: bytes
    head: bytes
    tail: bytes


REDIS = Protocol(
    socket="redis.sock",
    farewell=b"*2\r\n$8\r\nSHUTDOWN\r\n$6\r\nNOSAVE\r\n",
    batch=2000,
    store=b"*3\r\n$3\r\nSET\r\n$14\r\nkey:%(key)010d\r\n$%(size)d\r\n%(key)010d",
    stored=b"+OK\r\n",
    fetch=b"*2\r\n$3\r\nGET\r\n$14\r\nkey:%(key)010d\r\n",
    head=b"$%(size)d\r\n%(key)010d",
    tail=b"\r\n",
)
MEMCACHED = Protocol(
    socket="memcached.sock",
    farewell=b"shutdown graceful\r\n",
    batch=500,
    store=b"set key:%(key)010d 0 0 %(size)d\r\n%(key)010d",
    stored=b"STORED\r\n",
    fetch=b"get key:%(key)010d\r\n",
    head=b"VALUE key:%(key)010d 0 %(size)d\r\n%(key)010d",
    tail=b"\r\nEND\r\n",
)
REDIS_DELETE = b"*2\r\n$3\r\nDEL\r\n$14\r\nkey:%010d\r\n"
# Most values are small, and some are pages.
REDIS_SIZES = (16, 24, 40, 64, 64, 96, 128, 128, 192, 256, 384, 512, 700, 1000, 1500, 3000)
MEMCACHED_SIZES = (20, 40, 64, 100, 150, 200, 300, 500, 700, 1000, 1500, 2500)


class ClientError(CalmError):
    """The server does not do what it should."""


@dataclass(frozen=True)
class Batch:
    """Requests that are sent together, and the answers that must come."""

    requests: Sequence[bytes]
    count: int
    length: int
    """Bytes of the answers."""
    parts: Sequence[tuple[int, bytes]]
    """Parts of the answers, with the offset of each."""


class Values:
    """The value of each key. Sizes follow one another without a pattern that a power of two would meet."""

    def __init__(self, protocol: Protocol, sizes: Sequence[int], generation: int = 0) -> None:
        self.protocol, self.sizes, self.shift = protocol, sizes, 5 * generation
        self.sent = {size: FILLER[: size - DIGITS] + b"\r\n" for size in sizes}
        self.received = {size: FILLER[: size - DIGITS] + protocol.tail for size in sizes}

    def _batches(self, keys: Sequence[int]) -> Iterator[list[dict[bytes, int]]]:
        per_batch = max(1, min(self.protocol.batch, BATCH_BYTES * len(self.sizes) // sum(self.sizes)))
        for piece in pieces(keys, per_batch):
            kinds = [((key * 2654435761 >> 7) + self.shift) % len(self.sizes) for key in piece]
            yield [{b"key": key, b"size": self.sizes[n]} for key, n in zip(piece, kinds, strict=True)]

    def stored(self, keys: Sequence[int]) -> list[Batch]:
        found = []
        for pairs in self._batches(keys):
            requests = [
                part for each in pairs for part in (self.protocol.store % each, self.sent[each[b"size"]])
            ]
            # Large values of one size are sent from where they are, not copied.
            if len(self.sizes) > 1:
                requests = [b"".join(requests)]
            found.append(expecting(self.protocol.stored * len(pairs), len(pairs), requests))
        return found

    def fetched(self, keys: Sequence[int]) -> list[Batch]:
        """Every sixteenth answer is checked; its offset depends on the lengths of all before it."""
        found = []
        for pairs in self._batches(keys):
            length, parts = 0, []
            for number, each in enumerate(pairs):
                head, rest = self.protocol.head % each, self.received[each[b"size"]]
                if number % 16 == 0:
                    parts += [(length, head), (length + len(head), rest)]
                length += len(head) + len(rest)
            requests = b"".join([self.protocol.fetch % each for each in pairs])
            found.append(Batch([requests], len(pairs), length, parts))
        return found


def expecting(answer: bytes, count: int, requests: Sequence[bytes]) -> Batch:
    return Batch(requests, count, len(answer), [(0, answer)])


def pieces(keys: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (keys[start : start + size] for start in range(0, len(keys), size))


def shuffled(keys: Sequence[int], seed: int) -> list[int]:
    """The same order each time."""
    return random.Random(seed).sample(keys, len(keys))


class Pipeline:
    """Batches on their way over one connection."""

    def __init__(self, connection: socket.socket, batches: Sequence[Batch]) -> None:
        self.connection = connection
        self.fileno = connection.fileno
        self.unsent, self.unanswered = deque(batches), deque[Batch]()
        self.buffers = deque[memoryview]()
        self.answer, self.received = bytearray(max(batch.length for batch in batches)), 0

    @property
    def can_send(self) -> bool:
        return bool(self.buffers or (self.unsent and len(self.unanswered) < IN_FLIGHT))

    def send(self) -> None:
        if not self.buffers:
            self.unanswered.append(self.unsent.popleft())
            self.buffers.extend(map(memoryview, self.unanswered[-1].requests))
        sent = self.connection.sendmsg(list(islice(self.buffers, BUFFERS)))
        while sent:
            first = self.buffers.popleft()
            if sent < len(first):
                self.buffers.appendleft(first[sent:])
            sent -= min(sent, len(first))

    def receive(self) -> None:
        """Takes what has come of the first answers, and checks them when they are whole."""
        batch = self.unanswered[0]
        count = self.connection.recv_into(memoryview(self.answer)[self.received : batch.length])
        if count == 0:
            raise ClientError("the server hung up in the midst of an answer")
        self.received += count
        if self.received < batch.length:
            return
        if not all(self.answer.startswith(part, start) for start, part in batch.parts):
            raise ClientError(f"the server answered what was not asked for: {bytes(self.answer[:60])!r}")
        self.unanswered.popleft()
        self.received = 0


def exchange(*work: tuple[socket.socket, Sequence[Batch]]) -> None:
    lines = [Pipeline(*each) for each in work]
    while lines := [line for line in lines if line.unsent or line.unanswered]:
        waiting = [line for line in lines if line.unanswered]
        ready, room, _ = select.select(waiting, [line for line in lines if line.can_send], [], SILENCE_S)
        if not ready and not room:
            line = lines[0]
            words = bytes(line.answer[: min(line.received, 60)]).split(b"\r")[0]
            length = line.unanswered[0].length if line.unanswered else 0
            after = f"after {line.received} of {length} bytes"
            raise ClientError(f"the server is silent {after}: {words!r}")
        try:
            for line in room:
                line.send()
            for line in ready:
                line.receive()
        except OSError as error:
            raise ClientError(f"the server hung up: {error.strerror or error}") from error


def ask(connection: socket.socket, request: bytes, end: bytes) -> bytes:
    try:
        connection.sendall(request)
        answer = b""
        while not answer.endswith(end):
            piece = connection.recv(65536)
            if not piece:
                raise ClientError("the server hung up in the midst of an answer")
            answer += piece
    except OSError as error:
        raise ClientError(f"the server does not answer: {error}") from error
    return answer


# ---- the server's process ----


def connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(SILENCE_S)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def peer(connection: socket.socket) -> int:
    """The process that listens at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder)


def wait_for_server(name: str, seconds: float) -> socket.socket:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return connect(name)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClientError(f"no server at {name} within {seconds:g} s: {error.strerror}") from error
        time.sleep(0.02)


def end_server(path: str, farewell: bytes, seconds: float) -> bool:
    """Asks the server at a socket to end; returns whether it has, or there is none."""
    try:
        with connect(path) as connection:
            process = os.pidfd_open(peer(connection))
            try:
                connection.sendall(farewell)
                return bool(select.select([process], [], [], seconds)[0])
            finally:
                os.close(process)
    except OSError:
        return True


def end_stale(folder: Path, protocol: Protocol) -> None:
    """Ends a server that a killed run has left in a folder. One that does not end loses its socket."""
    with chdir(folder):
        end_server(protocol.socket, protocol.farewell, 5.0)
        Path(protocol.socket).unlink(missing_ok=True)


@contextmanager
def served(protocol: Protocol, seconds: float) -> Iterator[socket.socket]:
    """A connection to the server, which is ended whatever happens."""
    connection = wait_for_server(protocol.socket, seconds)
    try:
        with connection:
            yield connection
    finally:
        # On a connection of its own: behind half a request, no further one would be understood.
        ended = end_server(protocol.socket, protocol.farewell, ENDING_S)
    if not ended:
        raise ClientError(f"the server does not end, {ENDING_S:g} s after it was asked to")


class Meter:
    """Wall and CPU time of the parts of a run that count."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.operations = 0
        self.seconds = self.server_seconds = self.client_seconds = 0.0

    def exchange(self, *work: tuple[socket.socket, Sequence[Batch]]) -> None:
        began, server, client = time.monotonic(), proc.stat(self.pid), time.process_time()
        exchange(*work)
        self.seconds += time.monotonic() - began
        now = proc.stat(self.pid)
        self.server_seconds += now.user_s + now.system_s - server.user_s - server.system_s
        self.client_seconds += time.process_time() - client
        self.operations += sum(batch.count for _, batches in work for batch in batches)

    def report(self, more: dict[str, float]) -> None:
        """The line of JSON. The two processor times show that the client is not what is measured."""
        line = {
            "operations_per_second": self.operations / self.seconds,
            "operations": self.operations,
            "seconds": self.seconds,
            "server_processor_seconds": self.server_seconds,
            "client_processor_seconds": self.client_seconds,
        }
        print(json.dumps(line | more), flush=True)


def environment() -> dict[str, str]:
    """With it, a client finds calm where this calm is."""
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": ":".join(path)}


# ---- what the clients do ----


def expect_keys(connection: socket.socket, count: int) -> None:
    answer = ask(connection, b"*1\r\n$6\r\nDBSIZE\r\n", b"\r\n")
    if answer != b":%d\r\n" % count:
        raise ClientError(f"the server should hold {count} keys, and says {answer!r}")


def redis_half(
    connection: socket.socket, meter: Meter, keys: range, value: int, settle: float
) -> dict[str, float]:
    """SET and GET of large values; then a random half of the keys is deleted, and memory is read."""
    values = Values(REDIS, (value,))
    meter.exchange((connection, values.stored(keys)))
    meter.exchange((connection, values.fetched(shuffled(keys, 1))))
    full = proc.rss_kib(meter.pid) * 1024
    gone = shuffled(keys, 2)[: (len(keys) + 1) // 2]
    requests = [(len(piece), b"".join([REDIS_DELETE % key for key in piece])) for piece in pieces(gone, 1000)]
    exchange((connection, [expecting(b":1\r\n" * count, count, [request]) for count, request in requests]))
    at_once = proc.rss_kib(meter.pid) * 1024
    time.sleep(settle)
    left = len(keys) - len(gone)
    expect_keys(connection, left)
    resident = proc.rss_kib(meter.pid) * 1024
    information = ask(connection, b"*2\r\n$4\r\nINFO\r\n$6\r\nmemory\r\n", b"\r\n\r\n")
    lines = dict(line.split(":", 1) for line in information.decode().splitlines() if ":" in line)
    return {
        "resident_bytes": resident,
        "resident_bytes_full": full,
        "resident_bytes_at_once": at_once,
        "used_memory_rss": int(lines["used_memory_rss"]),
        "live_bytes": left * value,
    }


def memcached(one: socket.socket, meter: Meter, keys: int) -> None:
    """Two connections store, read and store anew; values change their sizes, and so the server's slabs."""
    first, second = (Values(MEMCACHED, MEMCACHED_SIZES, generation) for generation in (0, 1))
    work = []
    for number in range(2):
        own = range(number * keys, (number + 1) * keys)
        mixed = shuffled(own, number)
        batches = [*first.stored(own), *first.fetched(mixed), *second.stored(mixed), *second.fetched(own)]
        work.append(batches)
    with connect(MEMCACHED.socket) as two:
        meter.exchange(*zip((one, two), work, strict=True))


@click.command()
@click.argument("mode", type=click.Choice(("redis-set", "redis-get", "redis-half", "memcached")))
@click.option("--folder", default=".", help="The folder of the server's socket.")
@options.timeout("20s", "Wait no longer for the server.")
@click.option(
    "--keys", type=click.IntRange(1), default=150_000, help="The number of keys of each connection."
)
@click.option("--rounds", type=click.IntRange(1), default=3, help="Rounds of redis-get.")
@click.option(
    "--value", type=click.IntRange(DIGITS, len(FILLER)), default=4096, help="Bytes of a value of redis-half."
)
@options.duration("--settle", default="5s", at_least="0s", text="Time before redis-half reads memory.")
def command(
    mode: str, folder: str, timeout: float, keys: int, rounds: int, value: int, settle: float
) -> None:
    """Drive a server from the first connection to its end."""
    os.chdir(folder)
    more: dict[str, float] = {}
    with served(MEMCACHED if mode == "memcached" else REDIS, timeout) as connection:
        meter, values = Meter(peer(connection)), Values(REDIS, REDIS_SIZES)
        if mode == "memcached":
            memcached(connection, meter, keys)
        elif mode == "redis-half":
            more = redis_half(connection, meter, range(keys), value, settle)
        elif mode == "redis-set":
            meter.exchange((connection, values.stored(range(keys))))
            expect_keys(connection, keys)
        else:
            exchange((connection, values.stored(range(keys))))
            batches = values.fetched(shuffled(range(keys), 1))
            for _ in range(rounds):
                meter.exchange((connection, batches))
    meter.report(more)


if __name__ == "__main__":
    # On SIGTERM the server is ended first.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(run(command, "client"))
