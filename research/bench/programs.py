"""The suite's real programs and servers, with generated inputs.

A program does a fixed amount of work and is compared by wall time. A server is driven by a client of
research.bench.clients, keeps nothing on disk, and is compared by its operations per second.

Debian's redis-server is linked with libjemalloc.so.2, by malloc's own names. A preloaded library still comes
first, but without one jemalloc would be measured as glibc, and a library that asks for the next malloc would
find jemalloc. So the C library is preloaded last, before the server's own libraries; the tests check which
library each name is bound to. `INFO memory` names jemalloc in any case: it is a constant of the build.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from calm.core.errors import USAGE, CalmError
from research.bench import applications, clients, inputs, services
from research.bench.cases import Case, Prepared
from research.bench.results import COST, Metric
from research.bench.workloads import PERIODIC

# The number of keys of redis-half, of 4 KiB each.
REDIS_KEYS = "CALM_BENCH_REDIS_KEYS"
REDIS_KEYS_DEFAULT = 200_000
REDIS_KEYS_MOST = 10_000_000

_STAMP = "made-by"
_THROUGHPUT = Metric("operations_per_second", "/s", higher_is_better=True)
_BEHIND_THE_PRELOAD = 'LD_PRELOAD="${LD_PRELOAD:+$LD_PRELOAD:}libc.so.6" exec "$@"'


def _write_inputs(program: inputs.Program, folder: Path) -> None:
    """Writes a program's inputs, unless the folder has those that this version writes."""
    written_by = (Path(__file__).with_name(name).read_bytes() for name in ("inputs.py", "applications.py"))
    stamp, made_by = folder / _STAMP, hashlib.sha256(b"".join(written_by)).hexdigest()
    if not stamp.is_file() or stamp.read_text() != made_by:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        program.write_inputs(folder)
        stamp.write_text(made_by)


def _program(program: inputs.Program) -> Case:
    def prepare(folder: Path) -> Prepared:
        folder = folder.absolute()
        _write_inputs(program, folder / "inputs")
        outputs = folder / "outputs"
        outputs.mkdir(exist_ok=True)
        # Relative, so that results from different machines name the same command.
        return Prepared((program.binary, *program.arguments(Path("../inputs"))), outputs)

    return Case(
        program.name,
        PERIODIC if program.bursts else "program",
        program.summary,
        prepare,
        metric=COST if program.bursts else None,
        package=program.package,
        program=program.needs or program.binary,
        python_module=program.python_module,
        quick=program.quick,
    )


def _server(
    name: str,
    summary: str,
    protocol: clients.Protocol,
    command: Sequence[str],
    keys: Callable[[], str],
    *,
    quick: bool = False,
    resident_key: str | None = None,
) -> Case:
    def prepare(folder: Path) -> Prepared:
        folder = folder.absolute()
        module = ("-m", "research.bench.clients")
        client = (sys.executable, *module, name, "--folder", str(folder), "--keys", keys())
        folder.mkdir(parents=True, exist_ok=True)
        clients.end_stale(folder, protocol)
        return Prepared(tuple(command), folder, client, clients.environment())

    program = "memcached" if protocol is clients.MEMCACHED else "redis-server"
    return Case(
        name,
        "server",
        summary,
        prepare,
        metric=_THROUGHPUT,
        package=program,
        program=program,
        quick=quick,
        resident_key=resident_key,
    )


def _half_keys() -> str:
    text = os.environ.get(REDIS_KEYS, str(REDIS_KEYS_DEFAULT))
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= REDIS_KEYS_MOST:
        raise CalmError(f"{REDIS_KEYS}={text!r}: not a number from 1 to {REDIS_KEYS_MOST:,}", USAGE)
    return text


# Nothing is kept on disk.
_REDIS = (
    *("sh", "-c", _BEHIND_THE_PRELOAD, "sh", "redis-server", "--port", "0"),
    *("--unixsocket", clients.REDIS.socket, "--unixsocketperm", "700"),
    *("--save", "", "--appendonly", "no", "--databases", "1", "--loglevel", "warning"),
)
# -A: accepts `shutdown`. -U: no datagrams. 1 GiB holds all values.
_MEMCACHED = (
    *("memcached", "-s", clients.MEMCACHED.socket, "-a", "700", "-A", "-U", "0", "-m", "1024", "-t", "2"),
    *(("-u", "root") if os.geteuid() == 0 else ()),
)

SERVERS = (
    _server(
        "redis-set",
        "1,000,000 new keys with values of 16 to 3,000 bytes, by a pipeline",
        clients.REDIS,
        _REDIS,
        lambda: "1000000",
        quick=True,
    ),
    _server(
        "redis-get",
        "300,000 keys of the same sizes, read three times in an order of no pattern",
        clients.REDIS,
        _REDIS,
        lambda: "300000",
    ),
    _server(
        "redis-half",
        "keys with 4 KiB values, set and read; then half go by chance, and 5 s later memory is read",
        clients.REDIS,
        _REDIS,
        _half_keys,
        resident_key="resident_bytes",
    ),
    _server(
        "memcached",
        "300,000 keys set, read, set anew in other sizes and read, over two connections",
        clients.MEMCACHED,
        _MEMCACHED,
        lambda: "150000",
    ),
)

CASES: tuple[Case, ...] = (
    *(_program(program) for program in (*inputs.PROGRAMS, *inputs.FURTHER_PROGRAMS, *applications.PROGRAMS)),
    *SERVERS,
    *services.CASES,
)
