"""What the clients share: the server's socket, pipelines of requests, and the server's end.

Requests are sent by one thread and their answers counted by another, so that the server always has work
before it, and neither side waits for the other to read. Every wait is bounded: a client ends, with one line
on standard error, whatever the server does.
"""

import argparse
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# A server that has been there for longer is one that an earlier run has left.
STALE_SECONDS = 30.0
# Without a byte from the server, or room for one.
SILENCE_SECONDS = 30.0
ENDING_SECONDS = 30.0
IN_FLIGHT = 4
# Buffers in one system call (UIO_MAXIOV), less a margin.
BUFFERS = 1000


class ClientError(Exception):
    """Ends the client with one line on standard error and status 1."""


@dataclass(frozen=True)
class Batch:
    """Requests that are sent together, and the answers that must come."""

    requests: Sequence[bytes]
    count: int
    answer: int
    """Bytes."""
    check: Callable[[bytearray], bool]


def age(pid: int) -> float:
    """Seconds since a process started."""
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> float:
    """What a process has run for, by the kernel's clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """A process's resident memory now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peer(connection: socket.socket) -> int:
    """The process that listens at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder)


def connect(name: str) -> socket.socket:
    """One try; the socket's name is taken in the current folder, since a path may be too long for one."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(SILENCE_SECONDS)
        connection.connect(name)
        if age(peer(connection)) < STALE_SECONDS:
            return connection
    except BaseException:
        connection.close()
        raise
    connection.close()
    raise ClientError("an earlier run's server still listens there")


def wait_for_server(name: str, seconds: float) -> socket.socket:
    """Connects as soon as a server of this run answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return connect(name)
        except (OSError, ClientError) as error:
            if time.monotonic() > deadline:
                what = error.strerror if isinstance(error, OSError) else error
                raise ClientError(f"no server at {name} within {seconds:g} s: {what}") from error
        time.sleep(0.02)


def _send(connection: socket.socket, batch: Batch) -> None:
    buffers = [memoryview(request) for request in batch.requests]
    first = 0
    while first < len(buffers):
        sent = connection.sendmsg(buffers[first : first + BUFFERS])
        while first < len(buffers) and sent >= len(buffers[first]):
            sent -= len(buffers[first])
            first += 1
        if sent:
            buffers[first] = buffers[first][sent:]


def exchange(connection: socket.socket, batches: Sequence[Batch]) -> None:
    """Sends all batches, a few ahead of the answers."""
    room = threading.Semaphore(IN_FLIGHT)
    broken: list[OSError] = []
    ended = False

    def send() -> None:
        try:
            for batch in batches:
                room.acquire()
                if ended:
                    return
                _send(connection, batch)
        except OSError as error:
            broken.append(error)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    store = bytearray(max(batch.answer for batch in batches))
    try:
        for batch in batches:
            answer, had = memoryview(store)[: batch.answer], 0
            while had < batch.answer:
                try:
                    count = connection.recv_into(answer[had:])
                except TimeoutError as error:
                    line = bytes(answer[: min(had, 60)]).split(b"\r")[0]
                    what = f"after {had} of {batch.answer} bytes: {line!r}"
                    raise ClientError(f"the server is silent {what}") from error
                except OSError as error:
                    raise ClientError(f"the server hung up: {error.strerror}") from error
                if count == 0:
                    raise ClientError("the server hung up in the midst of an answer")
                had += count
            if not batch.check(store):
                raise ClientError(f"the server answered what was not asked for: {bytes(store[:60])!r}")
            room.release()
    finally:
        ended = True
        room.release()
    sender.join(SILENCE_SECONDS)
    if broken:
        raise ClientError(f"the server hung up: {broken[0].strerror}")


def ask(connection: socket.socket, request: bytes, end: bytes) -> bytes:
    """One request; its answer ends so."""
    try:
        connection.sendall(request)
        answer = b""
        while not answer.endswith(end):
            piece = connection.recv(65536)
            if not piece:
                raise ClientError("the server hung up in the midst of an answer")
            answer += piece
    except TimeoutError as error:
        raise ClientError(f"the server does not answer {request.split()[0].decode()}") from error
    except OSError as error:
        raise ClientError(f"the server hung up: {error.strerror}") from error
    return answer


@contextmanager
def served(name: str, seconds: float, farewell: bytes) -> Iterator[tuple[socket.socket, int]]:
    """A connection to the server and its process, which is told to end whatever happens, and seen to."""
    connection = wait_for_server(name, seconds)
    with connection:
        pid = peer(connection)
        process = os.pidfd_open(pid)
        try:
            yield connection, pid
        finally:
            try:
                # Behind requests that failed halfway, no further one would be understood.
                # Not closed: the sender may be waiting on it still.
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                with connect_again(name) as last:
                    last.sendall(farewell)
                    ended = bool(select.select([process], [], [], ENDING_SECONDS)[0])
            except OSError:
                ended = bool(select.select([process], [], [], 1.0)[0])
            os.close(process)
        if not ended:
            raise ClientError(f"the server does not end, {ENDING_SECONDS:g} s after it was told to")


def connect_again(name: str) -> socket.socket:
    """To a server that is known to be this run's."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(SILENCE_SECONDS)
    try:
        connection.connect(name)
    except OSError:
        connection.close()
        raise
    return connection


def end_stale(folder: Path, name: str, farewell: bytes) -> None:
    """Ends a server that a killed run has left in a folder. One that does not end loses its socket."""
    holder = os.open(folder, os.O_PATH)
    # The folder's own path may be too long for a socket's.
    path = Path(f"/proc/self/fd/{holder}/{name}")
    try:
        with suppress(OSError), connect_again(str(path)) as connection:
            process = os.pidfd_open(peer(connection))
            try:
                connection.sendall(farewell)
                select.select([process], [], [], 5.0)
            finally:
                os.close(process)
        path.unlink(missing_ok=True)
    finally:
        os.close(holder)


class Meter:
    """Time that passes in the parts of a run that count, and who ran in it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.operations = 0
        self.seconds = self.server_seconds = self.client_seconds = 0.0

    @contextmanager
    def counting(self, operations: int) -> Iterator[None]:
        """A part that counts."""
        began, server, client = time.monotonic(), processor_seconds(self.pid), time.process_time()
        yield
        self.seconds += time.monotonic() - began
        self.server_seconds += processor_seconds(self.pid) - server
        self.client_seconds += time.process_time() - client
        self.operations += operations

    def report(self, **more: float) -> None:
        """The line of JSON. The two processor times show that the client is not what is measured."""
        line = {
            "operations_per_second": self.operations / self.seconds,
            "operations": self.operations,
            "seconds": self.seconds,
            "server_processor_seconds": self.server_seconds,
            "client_processor_seconds": self.client_seconds,
        }
        print(json.dumps(line | more), flush=True)


def positive(text: str) -> int:
    """A count from the command line."""
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def duration(text: str) -> float:
    """Seconds from the command line."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to 3600 seconds")
    return value


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """What every client takes."""
    options = argparse.ArgumentParser(prog=program, description=description)
    options.add_argument("--folder", default=".", help="where the server's socket is")
    options.add_argument("--patience", type=duration, default=20.0, help="seconds to wait for the server")
    return options


def main(program: str, run: Callable[[], None]) -> int:
    """Runs a client; the exit status. One that is told to end ends the server first."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        run()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ClientError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    return 0
