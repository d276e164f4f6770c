"""A Prometheus server that scrapes what a test starts, and the queries of the Grafana dashboard."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "packaging/grafana/calmalloc.json"

T = TypeVar("T")
Series = dict[str, Any]
"""A series of Prometheus's API: `metric` has its labels, `value` or `values` its samples."""


@contextmanager
def exporter(*arguments: str, **variables: str) -> Iterator[str]:
    """Runs `calm export` at a free port, and yields its address and port."""
    command = [sys.executable, "-m", "calm", "export", "--listen", "127.0.0.1:0", *arguments]
    environment = (
        os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        | variables
    )
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while not (match := re.search(r"http://(\S+)/metrics", said)):
                line = process.stderr.readline()
                assert line, said
                said += line
            yield match[1]
        finally:
            process.terminate()


class QueryError(Exception):
    """Prometheus refused a query."""


class Query(NamedTuple):
    """A query of a panel."""

    panel: str
    expression: str
    legend: str
    instant: bool


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The panels with data. Those of a collapsed row are inside the row."""
    for panel in dashboard["panels"]:
        yield from (panel.get("panels", []) if panel["type"] == "row" else [panel])


def queries(dashboard: Mapping[str, Any]) -> Iterator[Query]:
    for panel in panels(dashboard):
        for target in panel["targets"]:
            yield Query(panel["title"], target["expr"], target["legendFormat"], target.get("instant", False))


def substituted(expression: str, variables: Mapping[str, str]) -> str:
    """An expression with Grafana's variables replaced, those of the dashboard and its own."""
    return re.sub(r"\$\{?(\w+)\}?", lambda match: variables[match[1]], expression)


class Prometheus:
    """A server with data of its own, which it scrapes once a second."""

    def __init__(self, targets: Sequence[str], interval: str = "1s") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="calm-prometheus-"))
        config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval},
            "scrape_configs": [{"job_name": "calmalloc", "static_configs": [{"targets": list(targets)}]}],
        }
        # YAML includes JSON.
        (self.folder / "prometheus.yml").write_text(json.dumps(config))
        self.log = self.folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self.folder}/prometheus.yml",
                    f"--storage.tsdb.path={self.folder}/data",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self.url = f"http://{self.wait(self._address)}"
            self.wait(self._is_ready)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.folder)

    def _address(self) -> str | None:
        match = re.search(r'msg="Listening on" address=(\S+)', self.log.read_text())
        return match[1] if match else None

    def _is_ready(self) -> bool:
        """It listens earlier, and until then answers that the service is unavailable."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=30):
                return True
        except urllib.error.HTTPError:
            return False

    def wait(self, condition: Callable[[], T], seconds: float = 60) -> T:
        """Repeats until the condition is met, as long as the server runs."""
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)
        return value

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                data: dict[str, Any] = json.load(response)["data"]
                return data
        except urllib.error.HTTPError as error:
            raise QueryError(error.read().decode()) from None

    def query(self, expression: str) -> list[Series]:
        result: list[Series] = self.get("query", query=expression)["result"]
        return result

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        parameters = {"start": f"{start}", "end": f"{end}", "step": f"{step}"}
        result: list[Series] = self.get("query_range", query=expression, **parameters)["result"]
        return result
