"""Prometheus's text format and OpenMetrics, and the server of /metrics.

The only module that imports prometheus_client.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple

import click
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.metrics_core import Metric as Family

from calm import __version__
from calm.commands.export import metrics
from calm.commands.export.metrics import Kind, Metric, Point
from calm.commands.export.reader import BusyError, Reader, Snapshot
from calm.core import proc
from calm.core.errors import CalmError

_KINDS: dict[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.UP_DOWN: GaugeMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
}
_TEXT = "text/plain; charset=utf-8"
MAX_CONNECTIONS = 16
"""That send a request or take an answer, and again so many that wait for a scrape."""
# A client that sends or takes nothing for so long is disconnected.
_IDLE_S = 10.0


class _Families(NamedTuple):
    """What prometheus_client calls a registry: something with `collect`."""

    snapshot: Snapshot
    own: Mapping[str, str] = MappingProxyType({})
    """Attributes of the metrics of the exporter itself."""

    def collect(self) -> Iterator[Family]:
        for metric in metrics.METRICS:
            labelled = (
                (process.attributes | point.attributes, point)
                for process in self.snapshot.processes
                for point in metrics.points(metric, process)
            )
            yield from _family(metric, list(labelled))
        for metric in metrics.OWN:
            yield from _family(
                metric,
                [
                    ({**self.own, **point.attributes}, point)
                    for point in metrics.own_points(metric, self.snapshot.own)
                ],
            )


def _registry(snapshot: Snapshot, own: Mapping[str, str] = MappingProxyType({})) -> Any:  # noqa: ANN401
    """Of whichever type this version of prometheus_client declares."""
    return _Families(snapshot, own)


def _family(metric: Metric, labelled: list[tuple[dict[str, str], Point]]) -> Iterator[Family]:
    if not labelled:
        return
    if metric.kind is Kind.INFO:
        family = InfoMetricFamily(metric.family, metric.help)
        for attributes, _ in labelled:
            family.add_metric([], {metrics.label(name): value for name, value in attributes.items()})
    else:
        names = list(labelled[0][0])
        unit = metric.prometheus_unit
        family = _KINDS[metric.kind](
            metric.family, metric.help, labels=list(map(metrics.label, names)), unit=unit
        )
        for attributes, point in labelled:
            family.add_metric([attributes[name] for name in names], point.value)
    yield family


def text(snapshot: Snapshot, file: str = "") -> bytes:
    """The text format, version 0.0.4; for a file of this name, if there is one.

    node_exporter joins all files, and drops one whose series are also in another one: the exporter's own have
    the file's name as a label.
    """
    return bytes(generate_latest(_registry(snapshot, {metrics.TEXTFILE: file} if file else {})))


class Server(ThreadingHTTPServer):
    """Serves /metrics. Each connection has a thread; beyond a number of them, the oldest one is closed.

    One that waits for a scrape is kept: it would be the oldest one whenever many clients come at once.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: str, port: int, reader: Reader) -> None:
        self.reader = reader
        self._open: dict[int, socket.socket] = {}
        self._scraping = 0
        self._open_lock = threading.Lock()
        self.address_family = _family_of(address, port)
        try:
            super().__init__((address, port), _Handler)
        except OSError as error:
            raise CalmError(f"cannot listen at {_shown(address, port)}: {_explained(error, port)}") from error

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{_shown(str(host), port)}/metrics"

    def server_bind(self) -> None:
        """Without the look-up of the host's name that HTTPServer does, which may wait for a name server."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        request.settimeout(_IDLE_S)
        with self._open_lock:
            self._open[id(request)] = request
            while len(self._open) > MAX_CONNECTIONS:
                with contextlib.suppress(OSError):
                    self._open.pop(next(iter(self._open))).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    @contextlib.contextmanager
    def scraping(self, request: socket.socket) -> Iterator[None]:
        """While a connection waits for a scrape. Raises BusyError where too many do.

        Not for a connection that the server has closed: the end of what it received looks like the end of
        the request, and many such connections at once would leave no room for one that takes its answer.
        """
        with self._open_lock:
            if id(request) not in self._open:
                raise ConnectionAbortedError
            if self._scraping >= MAX_CONNECTIONS:
                raise BusyError
            self._scraping += 1
            del self._open[id(request)]
        try:
            yield
        finally:
            with self._open_lock:
                self._scraping -= 1
                self._open[id(request)] = request

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        with self._open_lock:
            self._open.pop(id(request), None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """A client that goes away, or takes too long, is no event."""
        error = sys.exception()
        if not isinstance(error, OSError):
            click.echo(f"calm: internal error: {type(error).__name__}: {error}", err=True)


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD of two pages."""

    server: Server
    server_version = f"calm/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer(HTTPStatus.OK, _TEXT, b"calm export: see /metrics\n")
        elif path != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, _TEXT, b"not found: see /metrics\n")
        else:
            self._serve_metrics()

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For what is no request, and for other methods."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._answer(status, _TEXT, f"{status.phrase}\n".encode())

    def _serve_metrics(self) -> None:
        try:
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        except (TypeError, ValueError):  # a version that is not one
            encode, content_type = choose_encoder("")
        try:
            with self.server.scraping(self.connection):
                body = encode(_registry(self.server.reader.read()))
        except BusyError:
            message = b"other scrapes are still under way\n"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, message)
            return
        self._answer(HTTPStatus.OK, content_type, body)

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""


def _family_of(address: str, port: int) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is not an address"
        raise CalmError(f"cannot listen at {_shown(address, port)}: {why}") from error


def _shown(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _explained(error: OSError, port: int) -> str:
    if isinstance(error, PermissionError) and port < 1024:
        first = proc.text("sys/net/ipv4/ip_unprivileged_port_start").strip() or "1024"
        return f"ports below {first} need root or CAP_NET_BIND_SERVICE"
    return os.strerror(error.errno or 0)
