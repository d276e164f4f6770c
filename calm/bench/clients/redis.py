"""Drives a redis server over its socket: `set`, `get`, or `half`, which deletes half of what it stored.

Values are stored with the number of their key in front, and every answer is checked against it.
"""

import argparse
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from calm.bench.clients.exchange import (
    Batch,
    ClientError,
    Meter,
    ask,
    duration,
    exchange,
    main,
    parser,
    positive,
    resident_bytes,
    served,
)

PROGRAM = "redis client"
SOCKET = "redis.sock"
FAREWELL = b"*2\r\n$8\r\nSHUTDOWN\r\n$6\r\nNOSAVE\r\n"
# Value sizes of `set` and `get`: most are small, and some are pages.
MIXED = (16, 24, 40, 64, 64, 96, 128, 128, 192, 256, 384, 512, 700, 1000, 1500, 3000)
DIGITS = 10
# Bytes of a batch, requests or answers, whichever are more.
BATCH_BYTES = 1 << 20
FILLER = b"The quick brown fox jumps over the lazy dog. " * 2000


def chunks(keys: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Pieces of a sequence, all but the last of one length."""
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


def same(expected: bytes) -> Callable[[bytearray], bool]:
    """A check for known answers."""
    return lambda store: store.startswith(expected)


class Values:
    """Which value belongs to a key."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.tails = [FILLER[: size - DIGITS] + b"\r\n" for size in sizes]
        self.heads = [b"$%d\r\n" % size for size in sizes]
        ends = zip(self.heads, self.tails, strict=True)
        self.lengths = [len(head) + DIGITS + len(tail) for head, tail in ends]
        self.per_batch = max(1, min(2000, BATCH_BYTES * len(sizes) // sum(sizes)))

    def kind(self, key: int) -> int:
        """Sizes follow one another without a pattern that a power of two would meet."""
        return (key * 2654435761 >> 7) % len(self.sizes)

    def answer(self, key: int) -> bytes:
        """What GET gives."""
        kind = self.kind(key)
        return b"%s%010d%s" % (self.heads[kind], key, self.tails[kind])

    def length(self, key: int) -> int:
        """Bytes of that answer."""
        return self.lengths[self.kind(key)]

    def stored(self, keys: Sequence[int]) -> Iterator[Batch]:
        """SET of these keys. Tails are sent from where they lie, not copied."""
        for piece in chunks(keys, self.per_batch):
            requests = []
            for key in piece:
                kind = self.kind(key)
                command = b"*3\r\n$3\r\nSET\r\n$14\r\nkey:%010d\r\n%s%010d" % (key, self.heads[kind], key)
                requests += [command, self.tails[kind]]
            if len(self.sizes) > 1:
                requests = [b"".join(requests)]
            answer = b"+OK\r\n" * len(piece)
            yield Batch(requests, len(piece), len(answer), same(answer))

    def got(self, keys: Sequence[int]) -> Iterator[Batch]:
        """GET of these keys."""
        for piece in chunks(keys, self.per_batch):
            request = b"".join([b"*2\r\n$3\r\nGET\r\n$14\r\nkey:%010d\r\n" % key for key in piece])
            length = sum(map(self.length, piece))

            def check(store: bytearray, piece: Sequence[int] = piece) -> bool:
                """Every sixteenth answer, whose place depends on the lengths of all before it."""
                at = 0
                for place, key in enumerate(piece):
                    if place % 16 == 0 and not store.startswith(self.answer(key), at):
                        return False
                    at += self.length(key)
                return True

            yield Batch([request], len(piece), length, check)


def deleted(keys: Sequence[int]) -> Iterator[Batch]:
    """DEL of these keys, one by one."""
    for piece in chunks(keys, 1000):
        request = b"".join([b"*2\r\n$3\r\nDEL\r\n$14\r\nkey:%010d\r\n" % key for key in piece])
        answer = b":1\r\n" * len(piece)
        yield Batch([request], len(piece), len(answer), same(answer))


def expect_keys(connection: socket.socket, count: int) -> None:
    """What is stored is what was asked for."""
    answer = ask(connection, b"*1\r\n$6\r\nDBSIZE\r\n", b"\r\n")
    if answer != b":%d\r\n" % count:
        raise ClientError(f"the server should hold {count} keys, and says {answer!r}")


def shuffled(keys: Sequence[int], seed: int) -> list[int]:
    """The same order each time."""
    mixed = list(keys)
    random.Random(seed).shuffle(mixed)
    return mixed


def store(connection: socket.socket, meter: Meter, options: argparse.Namespace) -> dict[str, float]:
    """SET of keys that are all new."""
    batches = list(Values(MIXED).stored(range(options.keys)))
    with meter.counting(options.keys):
        exchange(connection, batches)
    expect_keys(connection, options.keys)
    return {}


def fetch(connection: socket.socket, meter: Meter, options: argparse.Namespace) -> dict[str, float]:
    """GET of all keys several times, in an order of no pattern."""
    values = Values(MIXED)
    exchange(connection, list(values.stored(range(options.keys))))
    batches = list(values.got(shuffled(range(options.keys), 1)))
    for _ in range(options.rounds):
        with meter.counting(options.keys):
            exchange(connection, batches)
    return {}


def half(connection: socket.socket, meter: Meter, options: argparse.Namespace) -> dict[str, float]:
    """SET and GET of large values; then every other key goes, by chance. What does the server keep?"""
    values = Values((options.value,))
    keys = range(options.keys)
    writing, reading = list(values.stored(keys)), list(values.got(shuffled(keys, 1)))
    with meter.counting(options.keys):
        exchange(connection, writing)
    with meter.counting(options.keys):
        exchange(connection, reading)
    del writing, reading
    full = resident_bytes(meter.pid)
    gone = shuffled(keys, 2)[: (options.keys + 1) // 2]
    exchange(connection, list(deleted(gone)))
    at_once = resident_bytes(meter.pid)
    time.sleep(options.settle)
    expect_keys(connection, options.keys - len(gone))
    resident = resident_bytes(meter.pid)
    information = ask(connection, b"*2\r\n$4\r\nINFO\r\n$6\r\nmemory\r\n", b"\r\n\r\n")
    lines = dict(line.split(":", 1) for line in information.decode().splitlines() if ":" in line)
    return {
        "resident_bytes": resident,
        "resident_bytes_full": full,
        "resident_bytes_at_once": at_once,
        "used_memory_rss": int(lines["used_memory_rss"]),
        "live_bytes": (options.keys - len(gone)) * options.value,
    }


def run() -> None:
    """One run, from the first connection to the server's end."""
    modes = {"set": store, "get": fetch, "half": half}
    options = parser(PROGRAM, __doc__ or "")
    options.add_argument("mode", choices=modes)
    options.add_argument("--keys", type=positive, default=200_000)
    options.add_argument("--rounds", type=positive, default=3, help="of get")
    options.add_argument("--value", type=positive, default=4096, help="bytes of a value, of half")
    options.add_argument(
        "--settle", type=duration, default=5.0, help="seconds before memory is read, of half"
    )
    arguments = options.parse_args()
    if not DIGITS <= arguments.value <= len(FILLER):
        options.error(f"--value is from {DIGITS} to {len(FILLER)}")
    os.chdir(arguments.folder)
    with served(SOCKET, arguments.patience, FAREWELL) as (connection, pid):
        meter = Meter(pid)
        more = modes[arguments.mode](connection, meter, arguments)
    meter.report(**more)


if __name__ == "__main__":
    sys.exit(main(PROGRAM, run))
