import csv
import io
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from calm_helpers import ROOT, Calm
from waiting import wait_until

from calm import __version__
from calm.core import allocators, paths
from calm.core import paths as places
from calm.core.errors import USAGE, CalmError
from calm.core.measure import METRIC


@pytest.fixture
def other() -> str:
    """Some allocator to compare glibc with; glibc itself under another name where there is none."""
    for name in ("jemalloc", "mimalloc", "gperftools"):
        if allocators.find_library(name):
            return name
    return "glibc:MALLOC_ARENA_MAX=1"


def test_prints_medians_and_ratios(calm: Calm, other: str) -> None:
    result = calm("compare", "-a", f"glibc,{other}", "-n", "3", "--", "true")
    assert result.returncode == 0, result.stderr
    assert "wall time" in result.stdout
    assert "95% interval" in result.stdout
    assert "3 interleaved rounds after one of warm-up" in result.stdout
    assert other in result.stdout


def test_json(calm: Calm, other: str) -> None:
    result = calm("compare", "-a", f"glibc,{other}", "-n", "3", "--json", "--", "true")
    report = json.loads(result.stdout)
    assert (report["schema"], report["version"], report["rounds"]) == ("calm-comparison", 1, 3)
    assert not report["interrupted_by"]
    base, side = report["allocators"]
    assert (base["label"], base["ratio"]) == ("glibc", {})
    assert side["label"] == other
    assert len(side["runs"]) == len(base["runs"]) == 3
    wall = side["ratio"]["wall_s"]
    assert wall["n"] == 3
    assert wall["low"] <= wall["value"] <= wall["high"]
    assert set(side["median"]) == set(METRIC)
    # System calls are not traced unless asked for, and never a zero that nobody counted.
    assert side["median"]["madvise"] is None
    assert report["how"]["madvise"] == "not counted: not asked for"


@pytest.mark.usefixtures("traced")
def test_syscalls_on_request(calm: Calm) -> None:
    result = calm("compare", "-a", "glibc", "-n", "1", "--syscalls", "--json", "--", "true")
    assert json.loads(result.stdout)["allocators"][0]["median"]["mprotect"] > 0


def test_csv_has_a_row_for_each_run(calm: Calm, other: str) -> None:
    result = calm("compare", "-a", f"glibc,{other}", "-n", "2", "--csv", "--", "true")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [(row["round"], row["allocator"]) for row in rows] == [
        *(("1", "glibc"), ("1", other), ("2", "glibc"), ("2", other)),
    ]
    assert all(float(row["wall_s"]) > 0 for row in rows)


def test_runs_are_interleaved_and_the_first_round_does_not_count(calm: Calm, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f'echo "$WHO" >>{log}'
    result = calm(
        "compare", "-a", "glibc:WHO=a,glibc:WHO=b", "-n", "2", "--csv", "-", "--", "sh", "-c", script
    )
    assert result.returncode == 0, result.stderr
    names = log.read_text().split()
    assert [set(names[at : at + 2]) for at in (0, 2, 4)] == [{"a", "b"}] * 3
    assert len(result.stdout.splitlines()) == 1 + 2 * 2


def test_plots(calm: Calm, other: str, tmp_path: Path) -> None:
    svg, png = tmp_path / "plot.svg", tmp_path / "plot.png"
    for path in (svg, png):
        result = calm("compare", "-a", f"glibc,{other}", "-n", "2", "--plot", path, "--", "true")
        assert result.returncode == 0, result.stderr
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert png.stat().st_size > 10_000


def test_report_goes_to_a_file(calm: Calm, tmp_path: Path) -> None:
    out = tmp_path / "report"
    result = calm("compare", "-a", "glibc", "-n", "1", "-o", out, "--csv", "--", "true")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("round,allocator,wall_s")
    assert "wall time" in out.read_text()
    assert "wall time" not in result.stderr


@pytest.mark.parametrize("option", ["--json", "--csv", "-o"])
def test_a_full_disk_gets_one_line(calm: Calm, option: str) -> None:
    result = calm("compare", "-a", "glibc", "-n", "1", option, "/dev/full", "--", "true")
    assert result.returncode == 1
    assert result.stderr.endswith("cannot write /dev/full: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-a", "nosuch", "--", "true"), 2, "unknown allocator 'nosuch'"),
        (("-a", "./no/such.so", "--", "true"), 2, "no such file"),
        (("-a", "/etc/passwd", "--", "true"), 2, "not a shared library"),
        (("-a", "glibc,glibc", "--", "true"), 2, "given twice"),
        (("-a", "glibc:A=1;B", "--", "true"), 2, "not VARIABLE=VALUE"),
        (("-a", "glibc", "-n", "0", "--", "true"), 2, "-n"),
        (("--", "true"), 2, "--allocators"),
        (("-a", "glibc", "--plot", "x.pdf", "--", "true"), 2, ".svg or .png"),
        (("-a", "glibc", "--json", "--csv", "--", "true"), 2, "only one"),
        (("-a", "glibc", "--json", "/no/such/file", "--", "true"), 1, "cannot write /no/such/file"),
        (("-a", "glibc", "--csv", "/", "--", "true"), 1, "cannot write /"),
        (("-a", "glibc", "--", "no-such-program"), 127, "no such program"),
        (("-a", "glibc", "--", "/etc/passwd"), 126, "not executable"),
    ],
)
def test_bad_input_gets_one_line(calm: Calm, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = calm("compare", *arguments)
    assert result.returncode == code
    assert message.lower() in result.stderr.lower()
    assert result.stderr.startswith("calm: ")
    assert result.stderr.count("\n") == 1


def test_a_failure_under_one_allocator_is_told_and_the_others_go_on(calm: Calm) -> None:
    script = 'test "$WHO" = good || { echo "it broke" >&2; kill -ABRT $$; }'
    specs = "glibc:WHO=good,glibc:WHO=bad"
    result = calm("compare", "-a", specs, "-n", "2", "--json", "--", "sh", "-c", script)
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("calm: ")]
    assert len(lines) == 1
    assert lines[0].startswith("calm: glibc:WHO=bad: ")
    assert "killed by SIGABRT (6)" in lines[0]
    assert "it broke" in lines[0]
    good, bad = json.loads(result.stdout)["allocators"]
    assert (len(good["runs"]), len(bad["runs"])) == (2, 0)
    assert good["failure"] is None
    assert "SIGABRT" in bad["failure"]


def test_ctrl_c_keeps_the_complete_rounds(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "calm", "compare", "-a", "glibc,glibc:B=1", "-n", "500"),
            *("--json", str(out), "--", "sh", "-c", f"echo x >>{log}; sleep 0.1"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    # In the middle of the third round that counts.
    wait_until(lambda: log.exists() and len(log.read_text()) >= 2 * 7)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130
    assert "of 500 rounds" in stderr
    assert "Traceback" not in stderr
    assert "wall time" in stdout
    report = json.loads(out.read_text())
    assert report["interrupted_by"]
    counts = [len(side["runs"]) for side in report["allocators"]]
    assert counts[0] == counts[1] >= 2


def test_environment_values_may_hold_commas_and_colons() -> None:
    specs = allocators.parse_list(["glibc:GLIBC_TUNABLES=glibc.malloc.a=1:glibc.malloc.b=2,glibc:X=a,b;Y=c"])
    assert [dict(spec.environment) for spec in specs] == [
        {"GLIBC_TUNABLES": "glibc.malloc.a=1:glibc.malloc.b=2"},
        {"X": "a,b", "Y": "c"},
    ]


def test_options_of_calmalloc_hold_commas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libcalmalloc.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(library)], check=True)
    monkeypatch.setenv(paths.LIBRARY_PATH, str(tmp_path))
    specs = allocators.parse_list(["calmalloc,calmalloc:CALM_OPTIONS=background=off,stats=on,glibc"])
    assert [(spec.label, spec.library, dict(spec.environment)) for spec in specs] == [
        ("calmalloc", library, {}),
        (
            "calmalloc:CALM_OPTIONS=background=off,stats=on",
            library,
            {"CALM_OPTIONS": "background=off,stats=on"},
        ),
        ("glibc", None, {}),
    ]


def test_labels(tmp_path: Path) -> None:
    library = next((path for name in allocators.KNOWN if (path := allocators.find_library(name))), None)
    if library is None:
        pytest.skip("no allocator library on this machine")
    named = allocators.parse(f"mine={library}:A=1")
    assert (named.label, named.library, dict(named.environment)) == ("mine:A=1", library, {"A": "1"})
    assert allocators.parse(str(library)).library == library
    assert named.variables({"LD_PRELOAD": "/first.so"})["LD_PRELOAD"] == f"{library}:/first.so"


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("calmalloc", "libcalmalloc.so"),
        ("jemalloc", "libjemalloc.so.2"),
        ("jemalloc", "libjemalloc.so"),
        ("tcmalloc", "libtcmalloc.so"),
        ("ptlbmalloc2", "libptlbmalloc2.so"),
    ],
)
def test_library_path_comes_first(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(paths.LIBRARY_PATH, str(tmp_path))
    fake = tmp_path / file
    fake.touch()
    assert allocators.find_library(name) == fake


@pytest.mark.parametrize("name", allocators.OWN)
def test_own_libraries_are_built_not_installed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "built_directories", list)
    monkeypatch.setattr(places, "system_directories", lambda: [tmp_path])
    with pytest.raises(CalmError, match=rf"{name} is not on this machine: `make` builds it"):
        allocators.parse(name)
    (tmp_path / f"lib{name}.so").touch()
    assert allocators.origin(name).version == __version__


def test_pictures_need_matplotlib_and_nothing_else_does(calm: Calm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = ("compare", "-a", "glibc", "-n", "1")
    assert calm(*command, "--", "true").returncode == 0
    # `forked` would import it at the word --plot.
    done = calm(*command, "--plot=x.png", "--", "true")
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert "--plot needs matplotlib, which is not installed: pip install matplotlib" in done.stderr
