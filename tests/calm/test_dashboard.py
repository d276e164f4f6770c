"""The Grafana dashboard of `calm export`: its file, and its queries in a real Prometheus."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import pytest
from waiting import TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from lib.prometheus import (  # noqa: E402
    DASHBOARD,
    Prometheus,
    QueryError,
    exporter,
    panels,
    queries,
    substituted,
)

from calm.commands.export.metrics import METRICS, OWN, Kind, label  # noqa: E402

BUILT = ROOT / "build/release"
VARIABLES = {"instance": ".*", "process": "sawtooth", "__rate_interval": "15s"}
METRIC = re.compile(r"\b(?P<name>[a-z][a-z0-9_]*)\{(?P<matchers>[^}]*)\}(?P<range>\[\$__rate_interval\])?")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Where the first document has what the second one has not."""
    if isinstance(before, dict):
        for key, value in before.items():
            if key not in after:
                yield f"{path}/{key}"
            else:
                yield from lost(value, after[key], f"{path}/{key}")
    elif isinstance(before, list):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}/{number}")
    elif before != after:
        yield f"{path}: {before!r} became {after!r}"


def test_the_file_is_current() -> None:
    subprocess.run([ROOT / "scripts/dashboard", "--check"], check=True)


def test_grafanas_own_types_know_every_field(dashboard: dict[str, Any]) -> None:
    sdk = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="grafana-foundation-sdk is missing"
    )
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    after = json.loads(JSONEncoder().encode(sdk.Dashboard.from_json(dashboard)))
    # What an import needs is not part of the dashboard itself.
    assert list(lost(dashboard, after)) == ["/__requires"]


def test_each_panel_explains_itself(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        title = panel["title"]
        assert panel["description"].endswith("."), title
        assert panel["fieldConfig"]["defaults"]["unit"], title
        assert panel["targets"], title
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert all(legends), title
        assert len(set(legends)) == len(legends), title
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["options"] in legends, title


def test_panels_fill_the_width_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    shown = dashboard["panels"]
    assert len({panel["id"] for panel in shown}) == len(shown)
    y = 0
    for line, found in groupby((panel["gridPos"] for panel in shown), key=lambda place: place["y"]):
        places = list(found)
        assert line == y
        assert len({place["h"] for place in places}) == 1
        assert [place["x"] for place in places] == [0, *accumulate(place["w"] for place in places[:-1])]
        assert sum(place["w"] for place in places) == 24
        y += places[0]["h"]


def test_the_data_source_is_the_readers_choice(dashboard: dict[str, Any]) -> None:
    def sources(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            yield from (each for key, each in value.items() if key == "datasource")
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                yield from sources(each)

    found = list(sources(dashboard))
    assert found
    assert all(each == {"type": "prometheus", "uid": "${datasource}"} for each in found)
    [variable, *_] = dashboard["templating"]["list"]
    assert (variable["name"], variable["type"]) == ("datasource", "datasource")


def test_queries_use_metrics_of_the_table(dashboard: dict[str, Any]) -> None:
    table = {metric.prometheus_name: metric for metric in (*METRICS, *OWN)}
    variables = [each["query"]["query"] for each in dashboard["templating"]["list"][1:]]
    assert all(re.match(r"label_values\(calmalloc_info\b", each) for each in variables)
    for query in queries(dashboard):
        found = list(METRIC.finditer(query.expression))
        assert found, query
        for match in found:
            metric = table[match["name"]]
            # A counter is only good for its rate, and a gauge has none.
            assert (match["range"] is not None) == (metric.kind is Kind.COUNTER), query
            assert 'instance=~"$instance"' in match["matchers"], query
            assert metric in OWN or 'process_command=~"$process"' in match["matchers"], query
        known = {"instance", "process_command", "process_pid"}
        known |= {"calmalloc_library", "calmalloc_release", "calmalloc_policy"}
        known |= {label(table[match["name"]].attribute) for match in found}
        for names in re.findall(r"by \(([^)]*)\)", query.expression):
            assert set(re.split(", *", names)) <= known, query
        for name in re.findall(r"\{\{(\w+)\}\}", query.legend):
            assert re.search(rf"by \([^)]*\b{name}\b", query.expression), query


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: scripts/setup check installs it")
    # It frees memory, so that purges are needed, at once and whenever it is idle.
    words = ["--bytes", "20000000", "--rest", "0.2", "--rounds", "1000000"]
    environment = os.environ | {
        "LD_PRELOAD": str(BUILT / "libcalmalloc.so"),
        "CALM_OPTIONS": "test_policy=paper",
    }
    with subprocess.Popen(
        [BUILT / "sawtooth", *words], env=environment, stdout=subprocess.DEVNULL
    ) as program:
        try:
            with exporter() as address, Prometheus([address]) as server:
                yield server
        finally:
            program.kill()


def test_each_query_finds_something(dashboard: dict[str, Any], prometheus: Prometheus) -> None:
    purges = "sum(increase(calmalloc_purges_total[10s])) > 0"
    prometheus.wait(lambda: prometheus.query(purges), TIMEOUT_S)
    for query in queries(dashboard):
        expression = substituted(query.expression, VARIABLES)
        if "shootdowns" in expression and not prometheus.query("calmalloc_tlb_shootdowns_total"):
            continue  # For want of permission.
        found = prometheus.wait(lambda expression=expression: prometheus.query(expression), TIMEOUT_S)
        labels = re.findall(r"\{\{(\w+)\}\}", query.legend)
        assert all(label in series["metric"] for series in found for label in labels), query
        assert len(found) == 1 or labels, query


def test_each_variable_has_values(dashboard: dict[str, Any], prometheus: Prometheus) -> None:
    prometheus.wait(lambda: prometheus.query("calmalloc_info"), TIMEOUT_S)
    for variable in dashboard["templating"]["list"][1:]:
        expression = substituted(variable["query"]["query"], VARIABLES)
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", expression)
        assert match
        values = prometheus.query(f"count by ({match[2]}) ({match[1]})")
        assert all(each["metric"][match[2]] for each in values)
        assert values


def test_a_wrong_query_is_noticed(prometheus: Prometheus) -> None:
    with pytest.raises(QueryError, match="parse error"):
        prometheus.query("sum(rate(calmalloc_purges_total))) by")
