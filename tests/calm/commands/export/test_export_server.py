"""calm export: its server, whatever clients do."""

import contextlib
import os
import re
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from calm_helpers import ROOT
from export_helpers import CALMALLOC, Exporter, Start
from waiting import TIMEOUT_S, wait_until

from calm.commands.export import reader
from calm.commands.export.reader import Reader

pytest.importorskip("prometheus_client")
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from calm.commands.export import exposition

sys.path.insert(0, str(ROOT / "bench"))


def test_only_two_pages_are_served(start: Start, export: Callable[..., Exporter]) -> None:
    exporter = export(start()[0].pid)
    for path, status in (
        ("/", 200),
        ("/metrics", 200),
        ("/metrics?name[]=up", 200),
        ("/metrics/", 404),
        ("/etc/passwd", 404),
        ("/../../etc/passwd", 404),
        ("/metrics/../../../etc/passwd", 404),
        ("//etc/passwd", 404),
        ("/%2e%2e/%2e%2e/etc/passwd", 404),
        ("http://other/metrics", 404),
    ):
        answer, body = exporter.request("GET", path)
        assert (path, answer.status) == (path, status)
        assert b"root:" not in body
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "ODD"):
        answer, _ = exporter.request(method, "/metrics")
        assert (method, answer.status, answer.headers["Allow"]) == (method, 405, "GET, HEAD")
    answer, body = exporter.request("HEAD", "/metrics")
    assert (answer.status, body) == (200, b"")
    assert int(answer.headers["Content-Length"]) > 1000
    assert "Python" not in answer.headers["Server"]


def test_the_format_is_negotiated(start: Start, export: Callable[..., Exporter]) -> None:
    exporter = export(start()[0].pid)
    answer, body = exporter.request("GET", "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    assert list(parse_openmetrics(body.decode()))
    for accept in ("", "text/plain", "*/*", "application/openmetrics-text;version=1.x"):
        answer, body = exporter.request("GET", "/metrics", Accept=accept)
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        assert b"# EOF" not in body


def test_what_is_no_request_is_refused(start: Start, export: Callable[..., Exporter]) -> None:
    exporter = export(start()[0].pid)
    for sent in (
        b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\0\xff" * 9,
    ):
        with socket.create_connection(("127.0.0.1", exporter.port), timeout=TIMEOUT_S) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(1 << 16)
            assert answer[:12] not in (b"HTTP/1.0 200", b"HTTP/1.1 200")
    answer, _ = exporter.request("GET", "/" + "x" * (1 << 16))
    assert answer.status == 414
    assert exporter.metrics()["calm_export_processes"][""] == 1


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[exposition.Server]:
    """A server in this process. It does not run into a timeout."""
    monkeypatch.setattr(exposition, "_IDLE_S", TIMEOUT_S)
    monkeypatch.setattr(reader, "_TIMEOUT_S", TIMEOUT_S)
    server = exposition.Server("127.0.0.1", 0, Reader(list, every=False, shootdowns=False))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def client_of(server: exposition.Server, sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.server_port), timeout=TIMEOUT_S)
    client.sendall(sent)
    return client


def test_clients_that_are_slow_or_go_away_harm_no_other(
    served: exposition.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    most = exposition.MAX_CONNECTIONS

    def handlers() -> int:
        return sum("process_request_thread" in each.name for each in threading.enumerate())

    with contextlib.ExitStack() as stack:
        with served.reader._lock:
            for number in range(4 * most):
                sent = b"GET /metrics HTTP/1.0\r\n" if number % 2 else b"GET /me"
                stack.enter_context(client_of(served, sent))
            # Their requests end where the server has closed them, and are not answered.
            wait_until(lambda: handlers() <= most or served._scraping)
            assert served._scraping == 0
        for _ in range(10):
            gone = client_of(served, b"GET /metrics HTTP/1.0\r\n\r\n")
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            gone.close()
        with urllib.request.urlopen(served.url) as answer:
            assert answer.status == 200
    assert capsys.readouterr().err == ""


def test_a_silent_client_is_disconnected(served: exposition.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "_IDLE_S", 0.01)
    with client_of(served, b"GET /me") as client:
        assert client.recv(1) == b""


def test_scrapers_at_once(start: Start, export: Callable[..., Exporter]) -> None:
    exporter = export(start(CALMALLOC, "churn")[0].pid)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: exporter.metrics()["calm_export_processes"][""], range(60)))
    assert found == [1] * 60


def test_scrapes_that_wait_share_one(opened: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(os.getpid())
    lock, arrived = source._lock, threading.Semaphore(0)

    def acquire(timeout: float) -> bool:
        arrived.release()
        return lock.acquire(timeout=timeout)

    monkeypatch.setattr(source, "_lock", SimpleNamespace(acquire=acquire, release=lock.release))
    found: list[reader.Snapshot] = []
    threads = [threading.Thread(target=lambda: found.append(source.read())) for _ in range(9)]
    with lock:
        for thread in threads:
            thread.start()
            arrived.acquire()
    for thread in threads:
        thread.join()
    assert [each.own["scrapes"] for each in found] == [1] * 9
    assert source.read().own["scrapes"] == 2


def test_more_scrapers_than_it_serves(served: exposition.Server) -> None:
    """Those that wait for a scrape get it, and those beyond their number are told to come again."""
    most = exposition.MAX_CONNECTIONS
    statuses: Counter[int] = Counter()

    def scrape() -> None:
        try:
            with urllib.request.urlopen(served.url) as answer:
                statuses[answer.status] += 1
        except urllib.error.HTTPError as error:
            statuses[error.code] += 1

    waiting = [threading.Thread(target=scrape) for _ in range(most)]
    with served.reader._lock:
        for each in waiting:
            each.start()
        wait_until(lambda: served._scraping == most)
        for _ in range(2 * most):
            scrape()
        assert statuses == {503: 2 * most}
    for each in waiting:
        each.join()
    assert statuses == {503: 2 * most, 200: most}


def test_a_scrape_that_does_not_end_is_not_waited_for(
    served: exposition.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_TIMEOUT_S", 0.01)
    with served.reader._lock, pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(served.url)
    monkeypatch.setattr(reader, "_TIMEOUT_S", TIMEOUT_S)
    with urllib.request.urlopen(served.url) as answer:
        assert answer.status == 200


def test_all_addresses_of_ipv6() -> None:
    """Those of IPv4 too."""
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    server = exposition.Server("::", 0, Reader(list, every=False, shootdowns=False))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert re.fullmatch(r"http://\[::\]:\d+/metrics", server.url)
    for address in ("[::1]", "127.0.0.1"):
        with urllib.request.urlopen(f"http://{address}:{server.server_port}/metrics") as answer:
            assert answer.status == 200
    server.shutdown()
    server.server_close()
