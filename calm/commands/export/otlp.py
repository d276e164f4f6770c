"""Pushes metrics by OTLP over HTTP, in its JSON encoding."""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote, urlsplit

import click

from calm import __version__
from calm.commands.export import metrics
from calm.commands.export.metrics import Kind, Metric, Number, Point
from calm.commands.export.reader import Snapshot
from calm.core import report
from calm.core.errors import USAGE, CalmError

_PATH = "/v1/metrics"
_TIMEOUT_S = 10.0
_MAX_PAUSE_S = 300.0
_MAX_ANSWER_BYTES = 1 << 16
_MAX_INT64 = (1 << 63) - 1
_CUMULATIVE = 2
# By precedence: what is for metrics only overrides what is for all signals.
_HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_METRICS_HEADERS")


def endpoint(url: str) -> str:
    """The URL that metrics are posted to: one without a path gets that of the specification."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018
    except ValueError as error:
        raise CalmError(f"--otlp {url}: is not a URL: {error}", USAGE) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise CalmError(f"--otlp {url}: is not a URL of http or https", USAGE)
    if "@" in parts.netloc:
        raise CalmError(f"--otlp: credentials belong into {_HEADERS[0]}, not into the URL", USAGE)
    return parts._replace(path=parts.path if parts.path.strip("/") else _PATH).geturl()


def headers() -> dict[str, str]:
    """What the standard variables add to requests, as a token."""
    found = {}
    for variable in _HEADERS:
        for item in filter(None, os.environ.get(variable, "").split(",")):
            name, equals, value = item.partition("=")
            name, value = name.strip(), unquote(value.strip())
            if (
                not equals
                or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name)
                or not value.isprintable()
            ):
                raise CalmError(f"{variable} is not a list of name=value", USAGE)
            found[name] = value
    return found


def _attributes(attributes: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"intValue": value} if key == metrics.PID else {"stringValue": value}}
        for key, value in attributes.items()
    ]


def _data_point(point: Point, start_s: float, at_s: float, kind: Kind) -> dict[str, Any]:
    value: Number = point.value
    number = (
        {"asInt": str(min(value, _MAX_INT64))} if isinstance(value, int) else {"asDouble": round(value, 9)}
    )
    start = {"startTimeUnixNano": str(int(start_s * 1e9))} if kind in (Kind.COUNTER, Kind.UP_DOWN) else {}
    return {
        **start,
        "timeUnixNano": str(int(at_s * 1e9)),
        "attributes": _attributes(point.attributes),
        **number,
    }


def _metric(metric: Metric, points: Iterable[Point], start_s: float, at_s: float) -> Iterator[dict[str, Any]]:
    data: dict[str, Any] = {
        "dataPoints": [_data_point(point, start_s, at_s, metric.kind) for point in points]
    }
    if not data["dataPoints"]:
        return
    head = {"name": metric.name, "description": metric.help, "unit": metric.unit}
    if metric.kind in (Kind.COUNTER, Kind.UP_DOWN):
        is_monotonic = metric.kind is Kind.COUNTER
        yield head | {"sum": data | {"aggregationTemporality": _CUMULATIVE, "isMonotonic": is_monotonic}}
    else:
        yield head | {"gauge": data}


def _resource(attributes: dict[str, str], found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "resource": {"attributes": _attributes(attributes | {"host.name": os.uname().nodename})},
        "scopeMetrics": [{"scope": {"name": "calm.export", "version": __version__}, "metrics": found}],
    }


def request(snapshot: Snapshot, began_s: float) -> bytes:
    """An ExportMetricsServiceRequest: each process is a resource, and so is the exporter."""
    resources = []
    for process in snapshot.processes:
        found = [
            each
            for metric in metrics.METRICS
            for each in _metric(
                metric, metrics.points(metric, process), min(process.started_s, snapshot.at_s), snapshot.at_s
            )
        ]
        created = datetime.fromtimestamp(process.started_s, UTC).isoformat(timespec="milliseconds")
        attributes = process.attributes | {"process.creation.time": created.replace("+00:00", "Z")}
        resources.append(_resource(attributes, found))
    own = [
        each
        for metric in metrics.OWN
        for each in _metric(metric, metrics.own_points(metric, snapshot.own), began_s, snapshot.at_s)
    ]
    resources.append(_resource({"service.name": "calm-export", "service.version": __version__}, own))
    return json.dumps({"resourceMetrics": resources}, separators=(",", ":")).encode()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would turn the POST into a GET."""

    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401
        return None


class Pusher:
    """Pushes one snapshot at a time. Those that come while it is busy or backs off are dropped."""

    def __init__(self, url: str, interval_s: float, failures: Counter[str]) -> None:
        self._url = endpoint(url)
        self._headers = {"Content-Type": "application/json", "User-Agent": f"calm/{__version__}"} | headers()
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._interval_s = interval_s
        self._failures = failures
        self._began_s = time.time()
        self._thread: threading.Thread | None = None
        self._pause_s = 0.0
        self._not_before = 0.0
        self._has_rejected = False
        self.has_failed = False
        """At the last attempt."""

    def push(self, snapshot: Snapshot) -> None:
        """Starts to push in a thread, unless it is busy or backs off."""
        if (self._thread and self._thread.is_alive()) or time.monotonic() < self._not_before:
            return
        self._thread = threading.Thread(target=self._push, args=(snapshot,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the push that was started has ended."""
        if self._thread:
            self._thread.join()

    def _push(self, snapshot: Snapshot) -> None:
        body = request(snapshot, self._began_s)
        post = urllib.request.Request(self._url, body, self._headers, method="POST")
        after = ""
        try:
            with self._opener.open(post, timeout=_TIMEOUT_S) as answer:
                self._succeed(answer.read(_MAX_ANSWER_BYTES))
            return
        except urllib.error.HTTPError as error:
            why, after = f"status {error.code} {error.reason}", error.headers.get("Retry-After", "")
            error.close()
        except urllib.error.URLError as error:
            reason = error.reason
            why = (reason.strerror if isinstance(reason, OSError) else "") or str(reason)
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        self._fail(why, int(after) if re.fullmatch(r"[0-9]{1,9}", after) else 0)

    def _fail(self, why: str, after_s: int) -> None:
        self._failures["otlp_failures"] += 1
        self._pause_s = min(max(2 * self._pause_s, self._interval_s), _MAX_PAUSE_S)
        self._not_before = time.monotonic() + max(self._pause_s, min(after_s, _MAX_PAUSE_S))
        if not self.has_failed:
            click.echo(f"calm: cannot push to {self._url}: {report.printable(why)}", err=True)
        self.has_failed = True

    def _succeed(self, answer: bytes) -> None:
        if self.has_failed:
            click.echo(f"calm: {self._url} accepts metrics again", err=True)
        self.has_failed, self._pause_s, self._not_before = False, 0.0, 0.0
        if (rejection := _rejection(answer)) and not self._has_rejected:
            click.echo(f"calm: {self._url} rejected {rejection}", err=True)
        self._has_rejected = bool(rejection)


def _rejection(answer: bytes) -> str:
    """What an ExportMetricsServiceResponse says of points that were not taken."""
    try:
        partial = json.loads(answer)["partialSuccess"]
        count, why = int(partial.get("rejectedDataPoints", 0)), str(partial.get("errorMessage", ""))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return ""
    return f"{count} data points: {report.printable(why)}" if count else ""
