"""calm export: the metrics, compared with what the libraries report, and as Prometheus scrapes them."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from calm_helpers import ROOT, Compile
from export_helpers import (
    BEGIN,
    CALMALLOC,
    END,
    PAGE,
    PTLBMALLOC2,
    Exporter,
    Start,
    by_name,
    check_values,
    compiled,
    counters_of,
    key,
)
from waiting import wait_until

from calm.commands.export import metrics, otlp
from calm.commands.export.metrics import Kind
from calm.commands.export.reader import Reader
from calm.core import counters, machine, proc
from calm.core.library_tables import COUNTERS

pytest.importorskip("prometheus_client")
from prometheus_client import openmetrics, parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from calm.commands.export import exposition

sys.path.insert(0, str(ROOT / "bench"))
from lib.prometheus import Prometheus, QueryError, Series

# The table of metrics.


def test_names_are_well_formed_and_unique() -> None:
    every = (*metrics.METRICS, *metrics.OWN)
    for names in ([each.name for each in every], [each.prometheus_name for each in every]):
        assert len(names) == len(set(names))
    names = {each.name for each in every}
    for metric in every:
        assert re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+", metric.name)
        assert re.fullmatch(r"|By|By\.s|s|1|\{[a-z]+\}", metric.unit)
        # OpenTelemetry: a name is not at once a namespace of others.
        assert not any(other.startswith(f"{metric.name}.") for other in names)
        assert metric.help.endswith(".")
        assert (metric.kind is Kind.COUNTER) == metric.prometheus_name.endswith("_total")
        assert len({source.value for source in metric.sources}) <= 1 or metric.attribute


def test_every_counter_of_a_library_is_exported_or_left_out_on_purpose(start: Start) -> None:
    left_out = {"state", "policy", "pad_each_bytes", "cpus_hundredths", "bytes_trimmed", "claims"}
    left_out |= {"bytes_claimed", "mmap_threshold_raises", "cache_lock_reason"}
    # Of interest together: `calm explain`.
    left_out |= {"waiting_bytes", "waiting_unused_ns", "waiting_reuse_ns", "waiting_until_ns"}
    used = {source.counter for each in metrics.METRICS for source in each.sources}
    for library in (CALMALLOC, PTLBMALLOC2):
        assert set(counters_of(start(library)[0].pid)) - used - left_out == set()


def test_the_page_has_the_table() -> None:
    """`python -c 'from calm.commands.export import metrics; print(metrics.markdown())'` prints a new one."""
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0] == metrics.markdown()


# Values, in all formats.


def test_values_are_those_that_the_library_reports(start: Start, opened: Callable[..., Reader]) -> None:
    process, said = start()
    other, _ = start(PTLBMALLOC2)
    text = exposition.text(opened(process.pid, other.pid).read()).decode()
    found = by_name(text)
    assert check_values(found, "calmalloc", process.pid, said) > 15
    values = counters_of(process.pid)
    assert check_values(found, "calmalloc", process.pid, values) > 20
    assert found["calmalloc_footprint_bytes"][str(process.pid)] > 1 << 20
    values = counters_of(other.pid)
    assert check_values(found, "ptlbmalloc2", other.pid, values) > 10
    assert found["ptlbmalloc2_active"][str(other.pid)] == (values["state"] == 1)
    release = re.findall(r'CALM_RELEASE +"([^"]+)"', (ROOT / "include/calmalloc.h").read_text())[0]
    assert found["calmalloc_info"][f"{process.pid} adaptive {release}"] == 1
    stat = proc.stat(process.pid)
    assert found["process_paging_faults_total"][f"{process.pid} minor"] == stat.minor_faults
    assert found["process_memory_usage_bytes"][str(process.pid)] == proc.rss_kib(process.pid) * 1024
    assert found["calm_export_processes"][""] == 2
    assert set(found["calm_export_unreadable_processes"].values()) == {0}


# Counts something, and forks: with fork handlers and without, or child after child.
FORKS = r"""
    #define _GNU_SOURCE
    #include <malloc.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/wait.h>
    #include <unistd.h>
    static void churn(size_t bytes) {
        char *volatile block = malloc(bytes);
        memset(block, 1, bytes);
        free(block);
        malloc_trim(0);
    }
    int main(int argc, char **argv) {
        static char *volatile kept;
        kept = malloc(100000);
        for (int i = 0; i < 20; i++) churn(8 << 20);
        if (argc > 1 && strcmp(argv[1], "storm") == 0) {
            puts("0 {}");
            fflush(stdout);
            for (;;) {
                pid_t child = fork();
                if (child == 0) {
                    for (int i = 0; i < 5; i++) { churn(1 << 20); usleep(500); }
                    _exit(0);
                }
                waitpid(child, NULL, 0);
            }
        }
        int ready[2];
        char byte = 0;
        if (pipe(ready) != 0) return 1;
        pid_t forked = fork();
        if (forked == 0) { write(ready[1], &byte, 1); pause(); }
        if (read(ready[0], &byte, 1) != 1) return 1;
        pid_t copied = _Fork();
        if (copied == 0) pause();
        printf("0 {\"forked\": %d, \"copied\": %d}\n", forked, copied);
        fflush(stdout);
        while (read(0, &byte, 1) > 0) {}
        return 0;
    }
"""


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("forking"), "forking", FORKS)


def test_a_child_counts_from_its_fork_on(
    forking: Path, start: Start, opened: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that ran no fork handlers looks like a child in the midst of its fork, with another's counts."""
    parent, said = start(command=forking)
    source = opened(parent.pid, said["forked"], said["copied"])
    try:
        found = {each.pid: each.libraries for each in source.read().processes}
        of_parent, of_child = (found[pid]["calmalloc"].counters for pid in (parent.pid, said["forked"]))
        assert of_parent["purged"] >= 160 << 20
        assert of_child["in_use"] > 0
        totals = {name: of_child.get(name, 0) for name, counter in COUNTERS.items() if counter.is_total}
        assert len(totals) > 15
        assert set(totals.values()) == {0}, totals
        assert found[said["copied"]] == {}
        # If it stays so, they are what there is.
        monkeypatch.setattr(counters, "YOUNG_S", 0.0)
        found = {each.pid: each.libraries for each in source.read().processes}
        assert found[said["copied"]]["calmalloc"].counters["purged"] >= 160 << 20
    finally:
        for pid in (said["forked"], said["copied"]):
            os.kill(pid, signal.SIGKILL)


GROWING = ("dirtied", "purged", "purges_request", "large_allocations", "limit_checks", "cache_misses")


def test_totals_of_a_process_only_grow(forking: Path, start: Start) -> None:
    """Of children, too, that are read in the midst of their fork."""
    parent, _ = start(CALMALLOC, "storm", command=forking)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    source = Reader(
        lambda: [parent.pid, *map(int, children.read_text().split())], every=True, shootdowns=False
    )
    before: dict[tuple[int, float], dict[str, int]] = {}

    def is_enough() -> bool:
        for each in source.read().processes:
            now = each.libraries["calmalloc"].counters
            # Of one that ends meanwhile not all can be read.
            totals = {name: now[name] for name in GROWING if name in now}
            earlier = before.setdefault((each.pid, each.started_s), dict.fromkeys(GROWING, 0))
            assert all(totals[name] >= earlier[name] for name in totals), (totals, earlier)
            assert each.pid == parent.pid or totals.get("purged", 0) <= 40 << 20
            earlier.update(totals)
        return len(before) > 60

    wait_until(is_enough)


def test_the_options_are_exported(opened: Callable[..., Reader]) -> None:
    env = os.environ | {"LD_PRELOAD": str(CALMALLOC)}
    env["CALM_OPTIONS"] = "test_policy=paper,memory_per_cpu=4,test_cgroup=off,background=off"
    with subprocess.Popen(["cat"], env=env, stdin=subprocess.PIPE) as process:
        wait_until(lambda: opened(process.pid).read().processes[0].libraries)
        found = by_name(exposition.text(opened(process.pid).read()).decode())
    assert [key.split()[1] for key in found["calmalloc_info"]] == ["paper"]
    for name, value in (("memory_per_cpu_bytes", 4 << 30), ("helper_enabled", 0)):
        assert found[f"calmalloc_{name}"][str(process.pid)] == value


@pytest.mark.usefixtures("traced")
def test_shootdowns_are_counted(compiled: Compile, opened: Callable[..., Reader]) -> None:
    if os.cpu_count() == 1 or machine.broadcast_here():
        pytest.skip("this machine has no shootdowns to count")
    with subprocess.Popen([compiled("shootdowns"), str(1 << 30), "2"]) as process:
        source = opened(process.pid, shootdowns=True)
        wait_until(lambda: source.read().processes[0].counters["shootdowns"] > 0)
        assert "shootdowns" not in opened(process.pid).read().processes[0].counters
        process.kill()


def test_both_formats_can_be_parsed(start: Start, opened: Callable[..., Reader]) -> None:
    snapshot = opened(start()[0].pid, start(PTLBMALLOC2)[0].pid).read()
    plain = list(parser.text_string_to_metric_families(exposition.text(snapshot).decode()))
    text = openmetrics.exposition.generate_latest(exposition._registry(snapshot)).decode()
    families = {family.name: family for family in parse_openmetrics(text)}
    assert sum(len(each.samples) for each in families.values()) == sum(len(each.samples) for each in plain)
    assert families["calmalloc_dirty_bytes"].unit == "bytes"
    assert families["calmalloc"].type == "info"
    for metric in (*metrics.METRICS, *metrics.OWN):
        if metric.family in families:
            assert families[metric.family].documentation == metric.help


def test_promtool_finds_nothing(start: Start, opened: Callable[..., Reader]) -> None:
    if not shutil.which("promtool"):
        pytest.skip("promtool of Debian's prometheus is missing")
    snapshot = opened(start()[0].pid, start(PTLBMALLOC2)[0].pid).read()
    snapshot.own |= {"otlp_failures": 1, "textfile_failures": 1}
    check = ["promtool", "check", "metrics"]
    done = subprocess.run(check, input=exposition.text(snapshot), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_labels_that_need_escapes(
    tmp_path: Path, program: Path, start: Start, opened: Callable[..., Reader]
) -> None:
    """A program's name may hold anything but a slash: no line is torn, and no series forged."""
    odd = tmp_path / 'a"} 1\n\\x\x1b[31m\udcff'
    shutil.copy(program, odd)
    process, _ = start(command=odd)
    found = opened(process.pid).read()
    (family,) = (
        each
        for each in parser.text_string_to_metric_families(exposition.text(found).decode())
        if each.name == "process_memory_usage_bytes"
    )
    (sample,) = family.samples
    assert sample.labels["process_executable_name"] == 'a"} 1?\\x?[31m?'
    assert "\udcff" not in sample.labels["process_command"]
    json.loads(otlp.request(found, 0.0))


# Prometheus itself.


def query(server: Prometheus, expression: str) -> list[Series]:
    """Nothing, too, before the server is ready."""
    with contextlib.suppress(QueryError):
        return server.query(expression)
    return []


def test_prometheus_scrapes_it(start: Start, export: Callable[..., Exporter]) -> None:
    if not shutil.which("prometheus"):
        pytest.skip("Debian's prometheus is missing")
    process, said = start()
    other, _ = start(PTLBMALLOC2)
    exporter = export(process.pid, other.pid)
    with Prometheus([f"127.0.0.1:{exporter.port}"]) as server:
        wait_until(lambda: query(server, "max_over_time(up[1h]) == 1"))
        found: dict[str, dict[str, float]] = {}
        for each in query(server, 'last_over_time({job="calmalloc"}[1h])'):
            labels = {
                name: value for name, value in each["metric"].items() if name not in ("job", "instance")
            }
            found.setdefault(labels.pop("__name__"), {})[key(labels)] = float(each["value"][1])
        assert check_values(found, "calmalloc", process.pid, said) > 15
        assert check_values(found, "ptlbmalloc2", other.pid, counters_of(other.pid)) > 10
        ratio = "calmalloc_dirty_bytes / on(process_pid, calmalloc_library) calmalloc_dirty_limit_bytes"
        pids = {str(process.pid), str(other.pid)}
        wait_until(lambda: {each["metric"]["process_pid"] for each in query(server, ratio)} == pids)
        process.kill()
        wait_until(lambda: query(server, "calm_export_processes == 1"))
