"""calm export: what Prometheus, node_exporter and an OpenTelemetry collector get, whatever happens."""

import contextlib
import http.client
import http.server
import itertools
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from calm_helpers import ROOT, Calm, Compile
from impostor import FLAGS, impostor
from unprivileged import NOBODY, readable_by_all, unprivileged
from waiting import TIMEOUT_S, wait_until

from calm.commands.export import metrics, otlp, reader, textfile
from calm.commands.export.command import PORT
from calm.commands.export.metrics import Kind
from calm.commands.export.reader import Reader
from calm.core import counters, machine, proc, processes
from calm.core.library_tables import COUNTERS

pytest.importorskip("prometheus_client")
from prometheus_client import openmetrics, parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from calm.commands.export import exposition

sys.path.insert(0, str(ROOT / "bench"))
from lib.prometheus import Prometheus, QueryError, Series

BUILD = ROOT / "build/release"
EXAMPLES = ROOT / "examples/export"
PAGE = ROOT / "docs/calm-export.md"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->\n"

# Uses its heap, prints its number and what the library reports, and then waits, or does as it is told.
SOURCE = r"""
    #define _GNU_SOURCE
    #include <pthread.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <sys/prctl.h>
    #include <unistd.h>
    __attribute__((weak)) int calm_stats_json(char *buffer, size_t size);
    static void *churn(void *unused) {
        for (;;) free(malloc(100000 + rand() % 100000));
        return unused;
    }
    int main(int argc, char **argv) {
        static void *blocks[3000];
        for (int i = 0; i < 3000; i++) memset(blocks[i] = malloc(100 + i * 10), 1, 100);
        for (int i = 0; i < 3000; i += 2) free(blocks[i]);
        pthread_t thread;
        for (int i = 0; argc > 1 && strcmp(argv[1], "churn") == 0 && i < 4; i++)
            pthread_create(&thread, NULL, churn, NULL);
        static char text[16384] = "{}";
        if (calm_stats_json) calm_stats_json(text, sizeof text);
        setvbuf(stdout, NULL, _IONBF, 0);
        printf("%d %s\n", getpid(), text);
        char byte;
        while (read(0, &byte, 1) > 0) {
            if (byte == 'n') prctl(PR_SET_NAME, "renamed");
            if (byte == 'e') { unsetenv("LD_PRELOAD"); execlp("cat", "cat", (char *)NULL); }
            puts("done");
        }
        return 0;
    }
"""
CALMALLOC, PTLBMALLOC2 = BUILD / "libcalmalloc.so", BUILD / "libptlbmalloc2.so"

Start = Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]


def compiled(folder: Path, name: str, source: str, *flags: str) -> Path:
    code = folder / f"{name}.c"
    code.write_text(source)
    subprocess.run(["cc", "-O1", "-fno-builtin", "-pthread", *flags, code, "-o", folder / name], check=True)
    return folder / name


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    folder.chmod(0o755)
    return compiled(folder, "victim", SOURCE)


@pytest.fixture
def start(program: Path) -> Iterator[Start]:
    running = []

    def run(
        preload: Path | None = CALMALLOC, *arguments: str, command: Path | None = None, **options: Any
    ) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        env = os.environ | ({"LD_PRELOAD": str(preload)} if preload else {})
        words = [str(command or program), *arguments]
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, text=True, **options)
        running.append(process)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline().partition(" ")[2])

    yield run
    for process in running:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str], letter: str) -> None:
    assert process.stdin
    process.stdin.write(letter)
    process.stdin.flush()


@pytest.fixture
def opened() -> Iterator[Callable[..., Reader]]:
    """A reader of these processes, or of all."""
    with contextlib.ExitStack() as stack:

        def make(*pids: int, **options: Any) -> Reader:
            choose = processes.chosen_by_pid(pids) if pids else proc.pids
            made = Reader(choose, every=not pids, **{"shootdowns": False} | options)
            stack.callback(made.close)
            return made

        yield make


class Exporter:
    """`calm export` as a process of its own, and where it listens."""

    def __init__(
        self, *arguments: str | Path | int, listens: bool = True, before: Sequence[str] = ()
    ) -> None:
        words = [*before, sys.executable, "-m", "calm", "export", *map(str, arguments)]
        words += ["--listen", "0"] if listens else []
        self.process = subprocess.Popen(
            words,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        if listens:
            while not self.lines or "http://" not in self.lines[-1]:
                self.lines.append(self.line())
            self.url = self.lines[-1].split()[-1]
            self.port = int(re.findall(r":(\d+)/", self.url)[0])

    def line(self) -> str:
        assert self.process.stderr
        line = self.process.stderr.readline()
        assert line, self.process.wait()
        return line

    def request(self, method: str, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    def metrics(self) -> dict[str, dict[str, float]]:
        return by_name(self.request("GET", "/metrics")[1].decode())

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, errors = self.process.communicate()
        assert "Traceback" not in errors
        return self.process.returncode, errors


@pytest.fixture
def export() -> Iterator[Callable[..., Exporter]]:
    running: list[Exporter] = []

    def run(*arguments: str | Path | int, **options: Any) -> Exporter:
        running.append(Exporter(*arguments, **options))
        return running[-1]

    yield run
    for each in running:
        each.process.kill()
        each.process.communicate()


OUR_LABELS = {"process_pid", "process_command", "process_executable_name", "calmalloc_library"}


def key(labels: dict[str, str]) -> str:
    """A process, and what other labels say: '12 limit'."""
    others = [value for label, value in sorted(labels.items()) if label not in OUR_LABELS]
    return " ".join([labels.get("process_pid", ""), *others]).strip()


def by_name(text: str) -> dict[str, dict[str, float]]:
    """Values by metric and by `key`."""
    found: dict[str, dict[str, float]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            series = key(sample.labels)
            assert series not in found.setdefault(sample.name, {}), (sample, "twice")
            found[sample.name][series] = sample.value
    return found


def counters_of(pid: int) -> dict[str, int]:
    with proc.memory(pid) as read:
        tables, _ = counters.Finder().tables(read, counters.images(pid))
        return {name: value for table in tables for name, value in table.values(read).items()}


def check_values(found: dict[str, dict[str, float]], library: str, pid: int, said: dict[str, int]) -> int:
    """Every exported value is that of its counter. Returns how many were compared."""
    compared = 0
    for metric in metrics.METRICS:
        for source in metric.sources:
            if source.library == library and source.counter in said:
                expected = said[source.counter] * metric.scale
                series = f"{pid} {source.value}".strip()
                if metric.may_be_unused and expected == 0:
                    assert series not in found.get(metric.prometheus_name, {})
                else:
                    assert found[metric.prometheus_name][series] == pytest.approx(expected), metric.name
                compared += 1
    return compared


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
    left_out |= {"bytes_claimed", "mmap_threshold_raises"}
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
        assert len(totals) > 20
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
    assert families["calmalloc_retained_bytes"].unit == "bytes"
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
        ratio = "calmalloc_retained_bytes / on(process_pid, calmalloc_library) calmalloc_retained_limit_bytes"
        pids = {str(process.pid), str(other.pid)}
        wait_until(lambda: {each["metric"]["process_pid"] for each in query(server, ratio)} == pids)
        process.kill()
        wait_until(lambda: query(server, "calm_export_processes == 1"))


# The server.


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


# Processes that come, go and change.


def test_all_processes_with_a_library(start: Start, export: Callable[..., Exporter]) -> None:
    exporter = export()
    pids = {str(start(library)[0].pid) for library in (CALMALLOC, PTLBMALLOC2)}
    without, _ = start(None)
    found = exporter.metrics()
    assert pids <= set(found["calmalloc_footprint_bytes"])
    assert str(without.pid) not in found["process_memory_usage_bytes"]
    assert "2" not in found["process_memory_usage_bytes"]
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)
        os.waitpid(int(pid), 0)
    assert not pids & set(exporter.metrics().get("calmalloc_footprint_bytes", {}))


def test_by_name(start: Start, export: Callable[..., Exporter], tmp_path: Path, program: Path) -> None:
    named = tmp_path / "by-this-name"
    shutil.copy(program, named)
    exporter = export("--command", "by-this-*")
    assert "there is no process called 'by-this-*' yet" in exporter.lines[0]
    first, _ = start(command=named)
    second, _ = start(None, command=named)
    found = exporter.metrics()
    assert set(found["process_memory_usage_bytes"]) == {str(first.pid), str(second.pid)}
    assert set(found["calmalloc_footprint_bytes"]) == {str(first.pid)}


def test_a_hundred_processes(opened: Callable[..., Reader]) -> None:
    env = os.environ | {"LD_PRELOAD": str(CALMALLOC)}
    processes = [subprocess.Popen(["sleep", "1000"], env=env) for _ in range(100)]
    try:
        source = opened(*(process.pid for process in processes))
        wait_until(lambda: sum(bool(each.libraries) for each in source.read().processes) == 100)
        found = by_name(exposition.text(source.read()).decode())
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    assert len(found["calmalloc_footprint_bytes"]) == 100
    assert source.read().own["ended"] == 0  # chosen by their numbers, which are free again
    assert source._known == {}


def test_programs_that_are_run_once_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_MAX_FILES", 10)
    finder = counters.Finder()
    for number in range(1000):
        image = proc.Mapping(0, 4096, "r-xp", 0, "0:1", number, f"/{number}")
        assert finder.tables(lambda _, size: bytes(size), [image]) == ([], "")
        assert len(finder._without) <= 10


def test_there_is_a_limit(
    start: Start, opened: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = [start()[0].pid for _ in range(3)]
    monkeypatch.setattr(reader, "MAX_PROCESSES", 2)
    snapshot = opened(*pids).read()
    assert [process.pid for process in snapshot.processes] == pids[:2]
    assert (snapshot.own["processes"], snapshot.own["limit"]) == (2, 1)


def test_a_process_that_ends_during_the_scrape(
    start: Start, opened: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = start()
    source = opened(process.pid)
    source.read()

    def ends(_: int) -> tuple[int, int, int]:
        process.kill()
        process.wait()
        raise proc.GoneError(process.pid)

    monkeypatch.setattr(proc, "statm", ends)
    snapshot = source.read()
    assert (snapshot.processes, snapshot.own["ended"]) == ([], 1)


def test_a_program_that_becomes_another_and_one_that_renames_itself(
    start: Start, opened: Callable[..., Reader]
) -> None:
    process, _ = start()
    source = opened(process.pid)
    (first,) = source.read().processes
    tell(process, "n")
    assert process.stdout
    process.stdout.readline()
    assert proc.stat(process.pid).name == "renamed"
    (second,) = source.read().processes
    assert second.attributes == first.attributes
    assert second.libraries
    tell(process, "e")
    wait_until(lambda: proc.stat(process.pid).name == "cat")
    (third,) = source.read().processes
    assert (third.command, third.libraries) == ("cat", {})


def test_a_number_that_is_used_again(
    start: Start, opened: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = start()
    chosen = opened(process.pid)
    unchecked = Reader(lambda: [process.pid], every=False, shootdowns=False)
    (before,) = unchecked.read().processes
    assert chosen.read().processes[0].pid == process.pid
    again = replace(proc.stat(process.pid), name="another", started_ticks=0)
    monkeypatch.setattr(proc, "stat", lambda *_: again)
    assert chosen.read().processes == []
    (after,) = unchecked.read().processes
    assert (before.command, after.command) == ("victim", "another")


@pytest.mark.parametrize("library", [CALMALLOC, PTLBMALLOC2])
def test_a_stopped_process_is_read(start: Start, opened: Callable[..., Reader], library: Path) -> None:
    """Wherever its threads are: perhaps one of them has the heap's lock."""
    process, _ = start(library, "churn")
    source = opened(process.pid)
    for _ in range(20):
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: proc.stat(process.pid).state == "T")
        (read,) = source.read().processes
        assert read.libraries
        process.send_signal(signal.SIGCONT)


def test_a_process_that_was_named_ends(start: Start, export: Callable[..., Exporter], tmp_path: Path) -> None:
    process, _ = start()
    file = tmp_path / "x.prom"
    exporter = export(process.pid, "--textfile", file, "-d", "100ms")
    wait_until(file.exists)
    process.kill()
    _, errors = exporter.process.communicate()
    assert exporter.process.returncode == 0
    assert errors == f"calm: process {process.pid} (victim) has ended\n"
    assert list(tmp_path.iterdir()) == []


def test_a_process_without_a_library_is_reported(
    start: Start, export: Callable[..., Exporter], monkeypatch: pytest.MonkeyPatch, calm: Calm
) -> None:
    process, _ = start(None)
    monkeypatch.setattr(counters, "YOUNG_S", -1.0)
    done = calm("export", process.pid, "-n", "1", "--textfile", "-")
    assert done.returncode == 0
    assert done.stderr == f"calm: neither calmalloc nor ptlbmalloc2 is in process {process.pid}\n"
    found = by_name(done.stdout)
    assert str(process.pid) in found["process_memory_usage_bytes"]
    assert "calmalloc_footprint_bytes" not in found


FOREIGN = {
    "version": "table.version = 2;",
    "damaged": 'memcpy(one[0].name, "a\\033[31m", 7);',
    "other library": "",
    "same library": """
        strcpy(table.library, "calmalloc");
        strcpy(table.release, "1\\"\\n{");
        strcpy(one[0].name, "footprint");
    """,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_tables(
    start: Start, opened: Callable[..., Reader], calm: Calm, tmp_path: Path, kind: str
) -> None:
    process, _ = start(None, command=compiled(tmp_path, "foreign", impostor(FOREIGN[kind]), FLAGS))
    snapshot = opened(process.pid).read()
    if kind in ("version", "damaged"):
        assert snapshot.own[kind] == 1
        assert snapshot.processes[0].libraries == {}
        done = calm("export", process.pid)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.fullmatch(rf"calm: process {process.pid}: the table of counters in [^\n]+\n", done.stderr)
    elif kind == "other library":
        assert snapshot.processes[0].libraries == {}
    else:
        assert snapshot.processes[0].libraries["calmalloc"].release == '1"?{'
        assert by_name(exposition.text(snapshot).decode())["calmalloc_footprint_bytes"] == {
            str(process.pid): 42
        }
    every = opened().read()
    assert (process.pid in [each.pid for each in every.processes]) == (kind == "same library")


# Permissions.


def test_without_root(start: Start, program: Path) -> None:
    """The user's own processes alone, and a port that needs no right."""
    imports = "calm.commands.export.command, calm.commands.export.exposition, encodings.idna, difflib"
    roots, _ = start()
    with contextlib.ExitStack() as stack:
        if os.geteuid() == 0:
            library, copy = stack.enter_context(readable_by_all(CALMALLOC, program))
            mine, _ = start(library, command=copy, user=NOBODY, group=NOBODY, extra_groups=[])
        done = unprivileged(imports, "export", "-n", "1", "--textfile", "-")
    yama = proc.text("sys/kernel/yama/ptrace_scope").strip() or "0"
    if yama == "0":
        assert (done.returncode, done.stderr) == (0, "")
        found = by_name(done.stdout)
        assert str(mine.pid) in found["calmalloc_footprint_bytes"]
        assert str(roots.pid) not in found["process_memory_usage_bytes"]
    done = unprivileged(imports, "export", roots.pid)
    assert done.returncode == 1
    assert done.stderr == f"calm: process {roots.pid}: another user's process: needs root\n"
    if int(proc.text("sys/net/ipv4/ip_unprivileged_port_start") or 1024) > 80:
        done = unprivileged(imports, "export", "--listen", "80")
        assert done.returncode == 1
        assert "cannot listen at 127.0.0.1:80: ports below 1024 need root" in done.stderr.splitlines()[-1]


# Bad input.


def test_bad_input_is_one_line(calm: Calm, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, code, words in (
            (["999999999"], 1, "there is no process 999999999"),
            (["x"], 2, "'x' is not a process id"),
            (["0"], 2, "'0' is not a process id"),
            (["9" * 5000], 2, "is not a process id"),
            (["--command", "x", "1"], 2, "exclude each other"),
            (
                ["--listen", f"127.0.0.1:{port}"],
                1,
                f"cannot listen at 127.0.0.1:{port}: Address already in use",
            ),
            (["--listen", "192.0.2.1:9999"], 1, "Cannot assign requested address"),
            (["--listen", "no.such.host.invalid:9999"], 1, "cannot listen at no.such.host.invalid:9999"),
            (["--listen", "65536"], 2, "is not [ADDRESS:]PORT"),
            (["--listen", ":9999"], 2, "is not [ADDRESS:]PORT"),
            (["--listen", "::1:9999"], 2, "is not [ADDRESS:]PORT"),
            (["--listen", "x"], 2, "is not [ADDRESS:]PORT"),
            (["--textfile", "x"], 2, "must end in .prom"),
            (["--textfile", "/no/such/folder/x.prom"], 1, "no such directory"),
            (["--textfile", f"{tmp_path}/d.prom"], 1, "is a directory"),
            (["-n", "1"], 2, "-n needs --textfile or --otlp"),
            (["-n", "1", "--listen", "0", "--textfile", "x.prom"], 2, "excludes --listen"),
            (["-n", "0", "--textfile", "-"], 2, "0"),
            (["-d", "15"], 2, "'15' is not a duration"),
            (["--otlp", "localhost:4318"], 2, "is not a URL of http or https"),
            (["--otlp", "file:///etc/passwd"], 2, "is not a URL of http or https"),
            (["--otlp", "http://"], 2, "is not a URL of http or https"),
            (["--otlp", "http://x:99999"], 2, "is not a URL"),
            (["--otlp", "http://user:secret@x"], 2, "OTEL_EXPORTER_OTLP_HEADERS"),
            (["--otlp", "http://x/a b"], 2, "is not a URL of http or https"),
        ):
            (tmp_path / "d.prom").mkdir(exist_ok=True)
            done = calm("export", *arguments)
            assert done.returncode == code, (arguments, done.stderr)
            assert done.stdout == ""
            assert re.fullmatch(r"calm: [^\n]+\n", done.stderr), (arguments, done.stderr)
            assert words in done.stderr, arguments
            assert "secret" not in done.stderr


def test_a_thread_is_not_a_process(calm: Calm, start: Start) -> None:
    process, _ = start(CALMALLOC, "churn")
    thread = max(proc.threads(process.pid))
    done = calm("export", thread)
    assert (done.returncode, done.stderr) == (1, f"calm: {thread} is a thread of process {process.pid}\n")


def test_headers_that_are_none(calm: Calm) -> None:
    for value in ("token", "a=b,c", "a b=c", "a=x%0d%0aB: y", "=x"):
        env = {"OTEL_EXPORTER_OTLP_HEADERS": value}
        done = calm("export", "--otlp", "http://127.0.0.1:1", "-n", "1", env=env)
        assert done.returncode == 2
        assert done.stderr == "calm: OTEL_EXPORTER_OTLP_HEADERS is not a list of name=value\n"


def test_without_prometheus_client(calm: Calm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    done = calm("export")
    assert done.returncode == 1
    assert re.fullmatch(
        r"calm: calm export needs prometheus_client, which is not installed: [^\n]+\n", done.stderr
    )


def test_only_this_command_imports_prometheus_client() -> None:
    code = "import sys, calm.cli as c\nfor n in c.COMMANDS: c.cli.get_command(None, n)\n"
    code += "sys.exit('prometheus_client' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode
        == 0
    )


# How it ends.


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_it(
    start: Start, export: Callable[..., Exporter], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    file = tmp_path / "calm.prom"
    exporter = export(start()[0].pid, "--textfile", file, "-d", "100ms")
    wait_until(file.exists)
    assert exporter.end(number) == (code, "")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", exporter.port))


def test_an_ignored_signal_does_not(start: Start, export: Callable[..., Exporter], tmp_path: Path) -> None:
    """As where nohup or a script's & has started it."""
    file = tmp_path / "calm.prom"
    ignore = ("sh", "-c", 'trap "" INT HUP; exec "$@"', "sh")
    exporter = export(start()[0].pid, "--textfile", file, "-d", "100ms", listens=False, before=ignore)
    wait_until(file.exists)
    exporter.process.send_signal(signal.SIGINT)
    exporter.process.send_signal(signal.SIGHUP)
    before = file.stat().st_mtime_ns
    wait_until(lambda: file.stat().st_mtime_ns != before)
    assert exporter.end() == (0, "")


# The textfile.


def test_the_file_is_whole_at_any_time(start: Start, export: Callable[..., Exporter], tmp_path: Path) -> None:
    file = tmp_path / "calm.prom"
    export(start()[0].pid, "--textfile", file, "-d", "100ms", listens=False)
    wait_until(file.exists)
    versions = set()
    with file.open() as first:
        text = first.read()
        while len(versions) < 5:
            versions.add(by_name(file.read_text())["calm_export_scrapes_total"].popitem()[1])
            assert {path.suffix for path in tmp_path.iterdir()} <= {".prom", ".tmp"}
        # Who has opened a version reads it to its end.
        first.seek(0)
        assert first.read() == text
    assert re.search(r"^calm_export_scrapes_total\S* \S+\n\Z", text, re.MULTILINE)
    assert file.stat().st_mode & 0o777 == 0o644


def test_once(start: Start, calm: Calm, tmp_path: Path) -> None:
    file = tmp_path / "calm.prom"
    process, said = start()
    done = calm("export", process.pid, "-n", "1", "--textfile", file)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == [file]
    assert check_values(by_name(file.read_text()), "calmalloc", process.pid, said) > 15


def test_files_for_one_collector_share_no_series(start: Start, calm: Calm, tmp_path: Path) -> None:
    series: list[tuple[str, frozenset[tuple[str, str]]]] = []
    for name in ("one.prom", "other.prom"):
        calm("export", start()[0].pid, "-n", "1", "--textfile", tmp_path / name)
        for family in parser.text_string_to_metric_families((tmp_path / name).read_text()):
            series += [(sample.name, frozenset(sample.labels.items())) for sample in family.samples]
    assert len(series) == len(set(series))
    assert ("calm_export_scrapes_total", frozenset({("calm_export_textfile", "one.prom")})) in series


def test_a_disk_that_is_full(start: Start, calm: Calm, tmp_path: Path) -> None:
    """A limit on the size of files fails in the middle of a write, as a full disk does."""
    file = tmp_path / "calm.prom"
    file.write_text("the one before\n")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    words = ("export", start()[0].pid, "-n", "3", "-d", "100ms", "--textfile", file)
    done = calm(*words, set_up=limit)
    assert done.returncode == 1
    assert done.stderr == f"calm: cannot write {file}: File too large\n"
    assert {path: path.read_text() for path in tmp_path.iterdir()} == {file: "the one before\n"}


def test_a_disk_that_was_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures: Counter[str] = Counter()
    folder = tmp_path / "folder"
    file = textfile.Textfile(str(folder / "calm.prom"), failures)
    for _ in range(3):
        file.write(b"x 1\n")
    assert file.has_failed
    folder.mkdir()
    file.write(b"x 2\n")
    file.write(b"x 3\n")
    assert not file.has_failed
    assert failures == {"textfile_failures": 3}
    assert (folder / "calm.prom").read_bytes() == b"x 3\n"
    path = folder / "calm.prom"
    assert capsys.readouterr().err.splitlines() == [
        f"calm: cannot write {path}: No such file or directory",
        f"calm: {path} is written again",
    ]


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".calm.prom.{os.getpid()}.tmp").symlink_to(victim)
    file = textfile.Textfile(str(tmp_path / "calm.prom"), Counter())
    file.write(b"x 1\n")
    assert victim.read_text() == "precious"
    file.write(b"x 2\n")
    assert (tmp_path / "calm.prom").read_bytes() == b"x 2\n"


# OTLP.


class Collector(http.server.ThreadingHTTPServer):
    """Takes what is pushed to it, and answers as it is told."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receive)
        self.received: list[tuple[str, dict[str, str], bytes]] = []
        self.answer: tuple[int, bytes, dict[str, str]] = (200, b"{}", {})
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Receive(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, dict(self.headers), body))
        status, text, headers = self.server.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.shutdown()
    made.server_close()


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


# The examples.


def test_the_unit_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is missing")
    unit = tmp_path / "calm-export.service"
    text = (EXAMPLES / unit.name).read_text()
    # The page that Documentation= names, and the program, are installed by the package.
    text = re.sub(r"^Documentation=.*\n", "", text, flags=re.MULTILINE)
    unit.write_text(text.replace("/usr/bin/calm", shutil.which("true") or ""))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def exporter_arguments(command: list[str]) -> None:
    """That calm accepts them."""
    from calm.commands.export.command import command as export

    assert command[:2] == ["calm", "export"]
    export.make_context("export", command[2:])


def test_the_examples_for_containers() -> None:
    compose = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    exporter = compose["services"]["exporter"]
    assert exporter["pid"] == "service:app"
    exporter_arguments(exporter["command"])
    pod = yaml.safe_load((EXAMPLES / "sidecar.yaml").read_text())
    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    assert pod["spec"]["shareProcessNamespace"] is True
    app, sidecar = pod["spec"]["containers"]
    exporter_arguments(sidecar["command"])
    assert sidecar["ports"][0]["containerPort"] == PORT
    assert app["env"][0]["name"] == "LD_PRELOAD"
