"""The suite's servers that a load generator drives: PostgreSQL, nginx, and two web servers of generated code.

Those that speak HTTP listen on a free port of the loopback interface, which is written into their folder:
wrk knows no other sockets.
"""

import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from calm.core.errors import CalmError
from research.bench import clients, load
from research.bench.cases import Case, Prepared
from research.bench.inputs import WORDS
from research.bench.results import Metric

_THROUGHPUT = Metric("operations_per_second", "/s", higher_is_better=True)
_WRK = {"wrk": "wrk"}

# Without paths outside of the folder: Debian's own may not be written by every user.
_NGINX = """{user}daemon off;
pid server.pid;
error_log stderr error;
worker_processes 1;
events {{ worker_connections 2048; multi_accept on; }}
http {{
    access_log off;
    default_type text/html;
    client_body_temp_path temporary/body;
    proxy_temp_path temporary/proxy;
    fastcgi_temp_path temporary/fastcgi;
    uwsgi_temp_path temporary/uwsgi;
    scgi_temp_path temporary/scgi;
    keepalive_requests 50;
    gzip on;
    gzip_comp_level 1;
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        root pages;
    }}
}}
"""

_NODE = """
const fs = require('fs'), http = require('http'), zlib = require('zlib');

function report(orders) {
  const regions = {};
  for (const order of orders) {
    const region = regions[order.region] ??= {orders: 0, total: 0, notes: []};
    region.orders += 1;
    region.total += order.items.reduce((sum, item) => sum + item.count * item.price, 0);
    region.notes.push(order.note.toUpperCase());
  }
  return Object.entries(regions).sort();
}

const server = http.createServer((request, response) => {
  const pieces = [];
  request.on('data', (piece) => pieces.push(piece));
  request.on('end', () => {
    const orders = JSON.parse(Buffer.concat(pieces).toString());
    zlib.gzip(JSON.stringify(report(orders)), {level: 1}, (error, packed) => {
      response.writeHead(error ? 500 : 200, {'Content-Encoding': 'gzip', 'Content-Length': packed.length});
      response.end(packed);
    });
  });
});

process.on('SIGTERM', () => {
  fs.unlinkSync('server.pid');
  process.exit(0);
});
server.listen(Number(fs.readFileSync('port')), '127.0.0.1', 1024, () => {
  fs.writeFileSync('server.pid', `${process.pid}\\n`);
});
"""

_AIOHTTP = """
import gzip, json, os, pathlib
from aiohttp import web

def report(orders):
    regions = {}
    for order in orders:
        region = regions.setdefault(order["region"], {"orders": 0, "total": 0, "notes": []})
        region["orders"] += 1
        region["total"] += sum(item["count"] * item["price"] for item in order["items"])
        region["notes"].append(order["note"].upper())
    return sorted(regions.items())

async def answer(request):
    body = json.dumps(report(await request.json())).encode()
    return web.Response(body=gzip.compress(body, 1), headers={"Content-Encoding": "gzip"})

async def started(application):
    pid_file.write_text(f"{os.getpid()}\\n")

async def ended(application):
    pid_file.unlink()

pid_file = pathlib.Path("server.pid")
application = web.Application()
application.router.add_post("/", answer)
application.on_startup.append(started)
application.on_cleanup.append(ended)
# On SIGTERM, this ends in good order.
web.run_app(
    application, host="127.0.0.1", port=int(pathlib.Path("port").read_text()), print=None, access_log=None
)
"""


_PUMA = """
require "json"

run ->(environment) {
  orders = JSON.parse(environment["rack.input"].read)
  regions = orders.group_by { |order| order["region"] }.map do |region, all|
    total = all.sum { |order| order["items"].sum { |item| item["count"] * item["price"] } }
    [region, all.size, total, all.map { |order| order["note"].upcase }]
  end
  [200, {"Content-Type" => "application/json"}, [JSON.generate(regions.sort)]]
}
"""
_PUMA_OPTIONS = """
bind "tcp://127.0.0.1:{port}"
pidfile "server.pid"
rackup "web.ru"
threads 4, 4
quiet
raise_exception_on_sigterm false
"""


def orders(count: int) -> Iterator[str]:
    """Requests: each a list of 5 to 60 orders in JSON, on a line of its own."""
    rng = random.Random(7)
    for _ in range(count):
        texts = []
        for _ in range(rng.randrange(5, 60)):
            items = ",".join(
                f'{{"count":{rng.randrange(1, 9)},"price":{rng.randrange(100, 9999) / 100}}}'
                for _ in range(rng.randrange(1, 6))
            )
            note = " ".join(rng.choices(WORDS, k=12))
            texts.append(f'{{"region":"{rng.choice(WORDS)}","note":"{note}","items":[{items}]}}')
        yield f"[{','.join(texts)}]\n"


def pages() -> Iterator[tuple[str, str]]:
    """The names and texts of 24 pages of 1 to 70 KiB."""
    rng = random.Random(8)
    for number in range(24):
        lines = (f"<p>{' '.join(rng.choices(WORDS, k=16))}</p>\n" for _ in range(10 + number * number))
        yield f"{number}.html", "".join(lines)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _http(
    name: str, command: tuple[str, ...], files: Callable[[int], Mapping[str, str]], folder: Path
) -> Prepared:
    """Writes a server's files, which depend on its port."""
    load.end_stale(folder, load.SERVERS[name])
    shutil.rmtree(folder, ignore_errors=True)
    port = _free_port()
    for file, text in ({load.PORT: f"{port}\n", load.SCRIPT: load.WRK} | dict(files(port))).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return Prepared(command, folder, *_client(name, folder))


def _client(name: str, folder: Path) -> tuple[tuple[str, ...], Mapping[str, str]]:
    module = ("-m", "research.bench.load")
    return (sys.executable, *module, name, "--folder", str(folder)), clients.environment()


def _nginx_files(port: int) -> dict[str, str]:
    # The folder may be root's alone.
    user = "user root;\n" if os.geteuid() == 0 else ""
    made = {f"pages/{name}": text for name, text in pages()}
    requests = "".join(f"/{name}\n" for name, _ in pages())
    more = {"nginx.conf": _NGINX.format(port=port, user=user), load.REQUESTS: requests, "temporary/.keep": ""}
    return made | more


def _web_files(script: str, text: str, _port: int) -> dict[str, str]:
    return {script: text, load.REQUESTS: "".join(orders(200))}


def _puma_files(port: int) -> dict[str, str]:
    return _web_files("web.ru", _PUMA, port) | {"options.rb": _PUMA_OPTIONS.format(port=port)}


def _unprivileged() -> tuple[str, ...]:
    """PostgreSQL refuses root. The user keeps root's right to reach folders that are closed to others."""
    if os.geteuid() != 0:
        return ()
    capability = "+dac_override"
    user = ("--reuid=nobody", "--regid=nogroup", "--clear-groups")
    return ("setpriv", *user, f"--inh-caps={capability}", f"--ambient-caps={capability}")


def _postgres(folder: Path) -> Prepared:
    load.end_stale(folder, load.SERVERS["postgres"])
    data = folder / load.POSTGRES_DATA
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    if os.geteuid() == 0:
        shutil.chown(data, "nobody", "nogroup")
    initialize = [load.postgres_program("initdb"), "--pgdata", load.POSTGRES_DATA, "--auth=trust"]
    initialize += [f"--username={load.POSTGRES_USER}", "--no-sync", "--encoding=UTF8", "--locale=C"]
    done = subprocess.run(
        [*_unprivileged(), *initialize], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CalmError(f"initdb: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    # Nothing waits for the disk, the socket is beside the data, and few pages count in each process again.
    settings = ["listen_addresses=", "unix_socket_directories=.", "fsync=off", "synchronous_commit=off"]
    settings += ["autovacuum=off", "shared_buffers=8MB", "max_wal_size=4GB", "log_min_messages=fatal"]
    command = (load.postgres_program("postgres"), "-D", load.POSTGRES_DATA)
    options = tuple(word for setting in settings for word in ("-c", setting))
    return Prepared((*_unprivileged(), *command, *options), folder, *_client("postgres", folder))


def _case(
    name: str,
    summary: str,
    prepare: Callable[[Path], Prepared],
    program: str,
    package: str,
    further: Mapping[str, str],
    *,
    resident: bool = True,
    python_module: str | None = None,
) -> Case:
    return Case(
        name,
        "server",
        summary,
        lambda folder: prepare(folder.absolute()),
        metric=_THROUGHPUT,
        package=package,
        program=program,
        further_programs=further,
        python_module=python_module,
        resident_key=load.RESIDENT if resident else None,
        more_keys=(load.P99, load.P99_9),
    )


CASES = (
    # A connection's process ends with it, so there is no memory to read after the load.
    _case(
        "postgres",
        "16,000 transactions and reports of pgbench over 8 connections",
        _postgres,
        load.postgres_program("postgres"),
        "postgresql",
        {load.postgres_program("initdb"): "postgresql", "setpriv": "util-linux"},
        resident=False,
    ),
    _case(
        "nginx",
        "pages of 1 to 70 KiB compressed for 400 connections, each closed after 50 requests",
        partial(_http, "nginx", ("nginx", "-p", ".", "-e", "stderr", "-c", "nginx.conf"), _nginx_files),
        "nginx",
        "nginx-light",
        _WRK,
    ),
    _case(
        "node",
        "orders in JSON parsed, summed and compressed by Node.js for 32 connections",
        partial(_http, "node", ("node", "web.js"), partial(_web_files, "web.js", _NODE)),
        "node",
        "nodejs",
        _WRK,
    ),
    # Not whichever Python runs the tests.
    _case(
        "aiohttp",
        "the same by a Python web server",
        partial(
            _http, "aiohttp", ("/usr/bin/python3", "-I", "web.py"), partial(_web_files, "web.py", _AIOHTTP)
        ),
        "/usr/bin/python3",
        "python3-aiohttp",
        _WRK,
        python_module="aiohttp",
    ),
    _case(
        "puma",
        "the same by Ruby on Puma, with four threads",
        partial(_http, "puma", ("puma", "-C", "options.rb"), _puma_files),
        "puma",
        "puma",
        _WRK,
    ),
)
