"""The suite's real programs and servers, with inputs of our own making.

A program is a fixed work, compared by wall time. A server is driven by a client (calm.bench.clients) over a
socket in the case's own folder, keeps nothing on disk, and is compared by the operations that it answers in
a second.

Debian's redis-server is linked with libjemalloc.so.2, by malloc's own names. What is preloaded still comes
first, but where nothing is, it would be jemalloc that is measured as glibc, and a library that asks for the
next malloc would find jemalloc too. So the C library is put behind whatever is preloaded, before the
server's own libraries; the tests look at which library each name was bound to. `INFO memory` names jemalloc
always: it was written down when the server was built.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from calm.bench import inputs
from calm.bench.cases import Case, Metric, Prepared
from calm.bench.clients import exchange, memcached, redis
from calm.errors import USAGE, CalmError

# The number of keys of redis-half, of 4 KiB each.
REDIS_KEYS = "CALM_BENCH_REDIS_KEYS"
REDIS_KEYS_DEFAULT = 200_000
REDIS_KEYS_MOST = 10_000_000

_ROOT = Path(__file__).resolve().parents[2]
_STAMP = "made-by"
_THROUGHPUT = Metric("operations_per_second", "/s", higher_is_better=True)
_BEHIND_THE_PRELOAD = 'LD_PRELOAD="${LD_PRELOAD:+$LD_PRELOAD:}libc.so.6" exec "$@"'

_SUMMARIES = {
    "xalan": "an XSLT transformation of 150,000 orders, sorted",
    "ghostscript": "8 pages of text and curves rendered in bands, by two threads",
    "sqlite3": "2 million rows inserted, indexed and grouped in memory",
    "gcc": "a generated C file of 150 functions compiled with -O1",
    "python3": "dictionaries, JSON and blobs made and dropped, in threads and forks",
    "python3-malloc": "the same with Python's own allocator out of the way",
    "z3": "a product of two primes factored as a circuit of bits",
    "vips": "a picture of 12 million pixels sharpened, searched for edges and turned, by threads",
    "rocksdb": "db_bench: 200,000 keys written and read at random by two threads, tables merged behind",
    "lua": "trees, strings and tables made and dropped",
}
_QUICK = {"sqlite3", "lua"}


def _fresh(folder: Path) -> bool:
    """False where the folder holds the inputs that this version makes; what another has made goes."""
    made_by = hashlib.sha256(Path(inputs.__file__).read_bytes()).hexdigest()
    stamp = folder / _STAMP
    if stamp.is_file() and stamp.read_text() == made_by:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return True


def _stamp(folder: Path) -> None:
    """The inputs are whole."""
    (folder / _STAMP).write_text(hashlib.sha256(Path(inputs.__file__).read_bytes()).hexdigest())


def _program(program: inputs.Program) -> Case:
    def prepare(folder: Path) -> Prepared:
        folder = folder.absolute()
        if _fresh(folder / "inputs"):
            program.write_inputs(folder / "inputs")
            _stamp(folder / "inputs")
        outputs = folder / "outputs"
        outputs.mkdir(exist_ok=True)
        # Relative, so that results from different machines name the same command.
        arguments = program.arguments(Path("../inputs"))
        return Prepared((program.binary, *arguments), outputs)

    binary, package = _BINARIES.get(program.name, (program.binary, program.package))
    return Case(
        program.name,
        "program",
        _SUMMARIES[program.name],
        prepare,
        package=package,
        program=binary,
        quick=program.name in _QUICK,
    )


# What to look for, where the command begins with something that is always there.
_BINARIES: Mapping[str, tuple[str, str]] = {
    "python3-malloc": ("/usr/bin/python3", "python3"),
    "vips": ("vips", "libvips-tools"),
}


def _client(name: str, *arguments: str, folder: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", f"calm.bench.clients.{name}", "--folder", str(folder), *arguments)


def _environment() -> dict[str, str]:
    """The client finds calm where this calm is."""
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{_ROOT}:{others}" if others else str(_ROOT)}


def _served(folder: Path, command: tuple[str, ...], client: tuple[str, ...]) -> Prepared:
    return Prepared(command, folder, client, _environment())


def _redis(mode: str, arguments: Callable[[], tuple[str, ...]]) -> Callable[[Path], Prepared]:
    def prepare(folder: Path) -> Prepared:
        folder = folder.absolute()
        more = arguments()
        folder.mkdir(parents=True, exist_ok=True)
        exchange.end_stale(folder, redis.SOCKET, redis.FAREWELL)
        # Nothing is kept on disk.
        nothing = ("--save", "", "--appendonly", "no", "--databases", "1", "--loglevel", "warning")
        place = ("--port", "0", "--unixsocket", redis.SOCKET, "--unixsocketperm", "700")
        command = ("sh", "-c", _BEHIND_THE_PRELOAD, "sh", "redis-server", *place, *nothing)
        return _served(folder, command, _client("redis", mode, *more, folder=folder))

    return prepare


def _memcached(folder: Path) -> Prepared:
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    exchange.end_stale(folder, memcached.SOCKET, memcached.FAREWELL)
    # -A: may be told to shut down. -U: no datagrams. Nothing is pushed out of 1 GiB.
    server = ("memcached", "-s", memcached.SOCKET, "-a", "700", "-A", "-U", "0", "-m", "1024", "-t", "2")
    user = ("-u", "root") if os.geteuid() == 0 else ()
    return _served(folder, (*server, *user), _client("memcached", folder=folder))


def _half_keys() -> tuple[str, ...]:
    text = os.environ.get(REDIS_KEYS, str(REDIS_KEYS_DEFAULT))
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= REDIS_KEYS_MOST:
        raise CalmError(f"{REDIS_KEYS}={text!r}: not a number from 1 to {REDIS_KEYS_MOST:,}", USAGE)
    return ("--keys", text)


SERVERS = (
    Case(
        "redis-set",
        "server",
        "1,000,000 new keys with values of 16 to 3,000 bytes, by a pipeline",
        _redis("set", lambda: ("--keys", "1000000")),
        metric=_THROUGHPUT,
        package="redis-server",
        program="redis-server",
        quick=True,
    ),
    Case(
        "redis-get",
        "server",
        "300,000 keys of the same sizes, read three times in an order of no pattern",
        _redis("get", lambda: ("--keys", "300000", "--rounds", "3")),
        metric=_THROUGHPUT,
        package="redis-server",
        program="redis-server",
    ),
    Case(
        "redis-half",
        "server",
        "keys with 4 KiB values, set and read; then half go by chance, and 5 s later memory is read",
        _redis("half", _half_keys),
        metric=_THROUGHPUT,
        package="redis-server",
        program="redis-server",
        resident_key="resident_bytes",
    ),
    Case(
        "memcached",
        "server",
        "300,000 keys set, read, set anew in other sizes and read, over two connections",
        _memcached,
        metric=_THROUGHPUT,
        package="memcached",
        program="memcached",
    ),
)

CASES: tuple[Case, ...] = (
    *(_program(program) for program in (*inputs.PROGRAMS, *inputs.FURTHER_PROGRAMS)),
    *SERVERS,
)
