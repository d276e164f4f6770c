"""Drives memcached over its socket: two connections, for a thread each, store, read and store anew.

Values change their size when they are stored anew, so they move between the server's own slabs.
"""

import os
import random
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

from calm.bench.clients.exchange import (
    Batch,
    ClientError,
    Meter,
    connect_again,
    exchange,
    main,
    parser,
    positive,
    served,
)

PROGRAM = "memcached client"
SOCKET = "memcached.sock"
FAREWELL = b"shutdown graceful\r\n"
SIZES = (20, 40, 64, 100, 150, 200, 300, 500, 700, 1000, 1500, 2500)
FILLER = b"the quick brown fox jumps over the lazy dog " * 100
BATCH = 500


def value(key: int, generation: int) -> bytes:
    """Of a size that changes with the generation, with the key's number in front."""
    size = SIZES[((key * 2654435761 >> 7) + generation * 5) % len(SIZES)]
    return b"%010d%s" % (key, FILLER[: size - 10])


def stored(keys: Sequence[int], generation: int) -> Iterator[Batch]:
    """Set of these keys."""
    for start in range(0, len(keys), BATCH):
        piece = keys[start : start + BATCH]
        values = [value(key, generation) for key in piece]
        pairs = zip(piece, values, strict=True)
        request = b"".join(
            [b"set key:%010d 0 0 %d\r\n%s\r\n" % (key, len(text), text) for key, text in pairs]
        )
        yield expecting(request, b"STORED\r\n" * len(piece), len(piece))


def got(keys: Sequence[int], generation: int) -> Iterator[Batch]:
    """Get of these keys."""
    for start in range(0, len(keys), BATCH):
        piece = keys[start : start + BATCH]
        request = b"".join([b"get key:%010d\r\n" % key for key in piece])
        values = [(key, value(key, generation)) for key in piece]
        answers = [b"VALUE key:%010d 0 %d\r\n%s\r\nEND\r\n" % (key, len(text), text) for key, text in values]
        yield expecting(request, b"".join(answers), len(piece))


def expecting(request: bytes, answer: bytes, count: int) -> Batch:
    """A batch with one right answer."""
    return Batch([request], count, len(answer), lambda store: store.startswith(answer))


def run() -> None:
    """One run, from the first connection to the server's end."""
    options = parser(PROGRAM, __doc__ or "")
    options.add_argument("--keys", type=positive, default=150_000, help="of each connection")
    arguments = options.parse_args()
    os.chdir(arguments.folder)
    failures: list[ClientError] = []

    with served(SOCKET, arguments.patience, FAREWELL) as (one, pid), connect_again(SOCKET) as two:

        def drive(connection: socket.socket, batches: list[Batch]) -> None:
            try:
                exchange(connection, batches)
            except ClientError as error:
                failures.append(error)
                # The other need not wait for the end of its patience.
                for each in (one, two):
                    with suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)

        work = []
        for connection in range(2):
            first = connection * arguments.keys
            keys = list(range(first, first + arguments.keys))
            mixed = list(keys)
            random.Random(connection).shuffle(mixed)
            work.append([*stored(keys, 0), *got(mixed, 0), *stored(mixed, 1), *got(keys, 1)])
        meter = Meter(pid)
        with meter.counting(sum(batch.count for batches in work for batch in batches)):
            threads = [
                threading.Thread(target=drive, args=pair) for pair in zip((one, two), work, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]
    meter.report()


if __name__ == "__main__":
    sys.exit(main(PROGRAM, run))
