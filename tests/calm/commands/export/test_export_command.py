"""calm export: bad input, how it ends, the textfile, and the examples."""

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from calm_helpers import ROOT, Calm
from export_helpers import CALMALLOC, EXAMPLES, Exporter, Start, by_name, check_values
from waiting import wait_until

from calm.commands.export import textfile
from calm.commands.export.command import PORT
from calm.core import proc

pytest.importorskip("prometheus_client")
from prometheus_client import parser

sys.path.insert(0, str(ROOT / "bench"))


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
