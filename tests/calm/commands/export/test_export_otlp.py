"""calm export: what an OpenTelemetry collector gets, whatever it answers."""

import itertools
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from types import SimpleNamespace

import pytest
from calm_helpers import ROOT, Calm
from export_helpers import PTLBMALLOC2, Collector, Exporter, Start, check_values, counters_of
from waiting import wait_until

from calm.commands.export import metrics, otlp
from calm.commands.export.metrics import Kind
from calm.commands.export.reader import Reader

pytest.importorskip("prometheus_client")


sys.path.insert(0, str(ROOT / "bench"))


def test_otlp_is_what_the_specification_says(start: Start, calm: Calm, collector: Collector) -> None:
    pytest.importorskip("opentelemetry.proto")
    from google.protobuf import json_format
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as service

    before_s = time.time()
    process, said = start()
    other, _ = start(PTLBMALLOC2)
    env = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20token, x-a=b"}
    begin_ns = time.time_ns()
    done = calm("export", process.pid, other.pid, "-n", "1", "--otlp", collector.url, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    ((path, headers, body),) = collector.received
    assert path == "/v1/metrics"
    assert headers["Content-Type"] == "application/json"
    assert (headers["Authorization"], headers["X-A"]) == ("Bearer token", "b")
    # Unknown fields and wrong types are errors.
    message = json_format.Parse(body, service.ExportMetricsServiceRequest())
    of_process, of_other, own = message.resource_metrics
    attributes = {each.key: each.value for each in of_process.resource.attributes}
    assert attributes["process.pid"].int_value == process.pid
    assert attributes["process.command"].string_value == "victim"
    assert attributes["host.name"].string_value == os.uname().nodename
    created = attributes["process.creation.time"].string_value
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", created)
    # The kernel knows it to a clock tick.
    assert before_s - 0.1 < datetime.fromisoformat(created).timestamp() < time.time()
    found: dict[str, dict[str, float]] = {}
    known = {metric.name: metric for metric in metrics.METRICS}
    for resource_metrics in (of_process, of_other):
        (scope,) = resource_metrics.scope_metrics
        (pid,) = (
            each.value.int_value for each in resource_metrics.resource.attributes if each.key == "process.pid"
        )
        for each in scope.metrics:
            metric = known[each.name]
            assert (each.unit, each.description) == (metric.unit, metric.help)
            kind = each.WhichOneof("data")
            assert kind == ("sum" if metric.kind in (Kind.COUNTER, Kind.UP_DOWN) else "gauge")
            if kind == "sum":
                assert each.sum.is_monotonic == (metric.kind is Kind.COUNTER)
                assert each.sum.aggregation_temporality == 2
            for point in getattr(each, kind).data_points:
                assert point.time_unix_nano >= begin_ns
                if kind == "sum":
                    assert 0 < point.start_time_unix_nano <= point.time_unix_nano
                own_value = {item.key: item.value.string_value for item in point.attributes}
                key = f"{pid} {own_value.get(metric.attribute, '')}".strip()
                found.setdefault(metric.prometheus_name, {})[key] = getattr(point, point.WhichOneof("value"))
    assert check_values(found, "calmalloc", process.pid, said) > 15
    assert check_values(found, "ptlbmalloc2", other.pid, counters_of(other.pid)) > 10
    names = {each.key: each.value.string_value for each in own.resource.attributes}
    assert names["service.name"] == "calm-export"
    (scope,) = own.scope_metrics
    assert {each.name for each in scope.metrics} >= {"calm.export.processes", "calm.export.scrape.duration"}


def test_otlp_is_pushed_on_an_interval(
    start: Start, export: Callable[..., Exporter], collector: Collector
) -> None:
    exporter = export(start()[0].pid, "--otlp", f"{collector.url}/custom/path", "-d", "100ms", listens=False)
    wait_until(lambda: len(collector.received) >= 3)
    assert {path for path, _, _ in collector.received} == {"/custom/path"}
    assert exporter.end() == (0, "")


def test_an_endpoint_that_is_down_and_comes_back(
    start: Start, export: Callable[..., Exporter], collector: Collector
) -> None:
    collector.answer = (503, b"", {})
    exporter = export(start()[0].pid, "--otlp", collector.url, "-d", "100ms")
    assert "cannot push to" in exporter.line()
    wait_until(lambda: exporter.metrics()["calm_export_otlp_failures_total"][""] >= 3)
    collector.answer = (200, b"", {})
    assert exporter.line() == f"calm: {collector.url}/v1/metrics accepts metrics again\n"
    assert exporter.end() == (0, "")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, b"no\n", {}), "status 400 Bad Request"),
        ((302, b"", {"Location": "/other"}), "status 302 Found"),
        ((429, b"", {"Retry-After": "7"}), "status 429 Too Many Requests"),
        ((503, b"", {"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}), "status 503"),
        ((429, b"", {"Retry-After": "9" * 5000}), "status 429"),
        ((429, b"", {"Retry-After": "-1"}), "status 429"),
    ],
)
def test_what_an_endpoint_may_answer(
    start: Start, calm: Calm, collector: Collector, answer: tuple[int, bytes, dict[str, str]], words: str
) -> None:
    collector.answer = answer
    done = calm("export", start()[0].pid, "-n", "1", "--otlp", collector.url)
    assert done.returncode == 1
    assert re.fullmatch(rf"calm: cannot push to {collector.url}/v1/metrics: {words}[^\n]*\n", done.stderr)
    assert len(collector.received) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 60_000,
        b'{"partialSuccess":{}}',
        b'{"partialSuccess":null}',
        b'{"partialSuccess":{"rejectedDataPoints":1e999}}',
        b'{"partialSuccess":{"rejectedDataPoints":%s}}' % (b"9" * 5000),
    ],
)
def test_an_answer_without_a_rejection(answer: bytes) -> None:
    assert otlp._rejection(answer) == ""


def test_a_rejection_is_reported_once(start: Start, calm: Calm, collector: Collector) -> None:
    collector.answer = (
        200,
        b'{"partialSuccess":{"rejectedDataPoints":"3","errorMessage":"old\\u001b[31m\\n"}}',
        {},
    )
    done = calm("export", start()[0].pid, "-n", "3", "-d", "100ms", "--otlp", collector.url)
    assert done.returncode == 0
    assert done.stderr == f"calm: {collector.url}/v1/metrics rejected 3 data points: old [31m \n"


def test_no_endpoint(start: Start, calm: Calm) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    done = calm("export", start()[0].pid, "-n", "1", "--otlp", url)
    assert done.returncode == 1
    assert done.stderr == f"calm: cannot push to {url}/v1/metrics: Connection refused\n"


@pytest.mark.parametrize(
    ("retry_after", "expected"),
    [
        ("", [15, 30, 60, 120, 240, 300, 300]),
        ("100", [105, 105, 105, 120, 240, 300, 300]),
        ("999999999", [300] * 7),
        ("9" * 5000, [15, 30, 60, 120, 240, 300, 300]),
    ],
)
def test_pushes_back_off(
    collector: Collector,
    opened: Callable[..., Reader],
    monkeypatch: pytest.MonkeyPatch,
    retry_after: str,
    expected: list[int],
) -> None:
    """The clock is the test's: while the endpoint is down, pauses double up to five minutes."""
    collector.answer = (503, b"", {"Retry-After": retry_after} if retry_after else {})
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(otlp, "time", clock)
    snapshot = opened(os.getpid()).read()
    pusher = otlp.Pusher(collector.url, 15.0, Counter())
    tried: list[float] = []
    while len(tried) < 8:
        pusher.push(snapshot)
        pusher.wait()
        if len(collector.received) > len(tried):
            tried.append(now[0])
        now[0] += 15
    assert [after - before for before, after in itertools.pairwise(tried)] == expected


def test_an_endpoint_that_does_not_answer_is_pushed_to_once(opened: Callable[..., Reader]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        pusher = otlp.Pusher(f"http://127.0.0.1:{silent.getsockname()[1]}", 15.0, Counter())
        snapshot = opened(os.getpid()).read()
        pusher.push(snapshot)
        first = pusher._thread
        for _ in range(50):
            pusher.push(snapshot)
        assert pusher._thread is first
    pusher.wait()
