"""Programs with a library, `calm export` as a process of its own, and what is compared with what it says."""

import http.client
import http.server
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from calm_helpers import ROOT
from waiting import TIMEOUT_S

from calm.commands.export import metrics
from calm.core import counters, proc

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


def tell(process: subprocess.Popen[str], letter: str) -> None:
    assert process.stdin
    process.stdin.write(letter)
    process.stdin.flush()


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


OUR_LABELS = {"process_pid", "process_command", "process_executable_name", "calmalloc_library"}


def key(labels: dict[str, str]) -> str:
    """A process, and what other labels say: '12 limit'."""
    others = [value for label, value in sorted(labels.items()) if label not in OUR_LABELS]
    return " ".join([labels.get("process_pid", ""), *others]).strip()


def by_name(text: str) -> dict[str, dict[str, float]]:
    """Values by metric and by `key`."""
    from prometheus_client import parser

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
