"""The command, on a program whose time and memory follow from its environment."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from calm_helpers import ROOT, Calm
from waiting import wait_until

from calm import cli
from calm.commands.tune import search, space, trial
from calm.commands.tune.command import _chosen_spaces
from calm.commands.tune.search import Budget, Tuning
from calm.commands.tune.space import Setting
from calm.core import allocators, documents, measure, proc
from calm.core.errors import CalmError
from calm.core.rounds import RunFailedError

# What it takes is asleep, so that a busy machine changes little; nothing where QUICK is set.
PROGRAM = r"""
    #include <stdlib.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <unistd.h>
    int main(int argc, char **argv) {
        const char *tunables = getenv("GLIBC_TUNABLES"), *preload = getenv("LD_PRELOAD");
        int trim = tunables && strstr(tunables, "trim_threshold=");
        if (tunables && strstr(tunables, "top_pad=") && argc > 1 && strcmp(argv[1], "fails") == 0) return 3;
        if (argc > 1 && strcmp(argv[1], "none") == 0) trim = 0;
        if (argc > 1 && strcmp(argv[1], "preload") == 0) trim = preload && strstr(preload, "calmalloc");
        size_t size = (size_t)(trim ? 10 : 9) << 20;
        char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memset(memory, 1, size);
        if (!getenv("QUICK")) usleep(trim ? 40000 : 160000);
        return 0;
    }
"""


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fake")
    (folder / "fake.c").write_text(PROGRAM)
    path = folder / "fake"
    subprocess.run(["cc", "-O1", "-o", str(path), str(folder / "fake.c")], check=True)
    return path


Timed = Callable[[Callable[[Mapping[str, str]], float]], None]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Programs are run, but how long each takes, by its environment, is what the test says."""
    monkeypatch.setenv("QUICK", "1")
    passed = 0.0

    def apply(took: Callable[[Mapping[str, str]], float]) -> None:
        def measured(
            words: Sequence[str], changed: Mapping[str, str], *, inherited: Mapping[str, str], **more: Any
        ) -> measure.Measurement:
            nonlocal passed
            run = measure.measure(words, changed, inherited=inherited, **more)
            wall_s = took({**inherited, **changed})
            passed += wall_s
            return replace(run, wall_s=wall_s, average_rss_kib=run.peak_rss_kib)

        monkeypatch.setattr(trial, "measure", measured)
        monkeypatch.setattr(search, "Budget", partial(Budget, now=lambda: passed))

    return apply


def with_trimming(environment: Mapping[str, str]) -> float:
    """A threshold helps."""
    return 0.04 if "trim_threshold=" in environment.get("GLIBC_TUNABLES", "") else 0.16


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_finds_the_setting_and_prints_the_line(calm: Calm, fake: Path, tmp_path: Path, timed: Timed) -> None:
    timed(with_trimming)
    report, picture = tmp_path / "report.json", tmp_path / "front.svg"
    result = calm(
        *(
            "tune",
            "search",
            "-a",
            "glibc",
            "--trials",
            "4",
            "--seed",
            "1",
            "--json",
            report,
            "--plot",
            picture,
        ),
        *("--", fake, "it is"),
    )
    assert result.returncode == 0, result.stderr
    found = read(report)
    chosen = found["recommendation"]
    assert "glibc.malloc.trim_threshold" in chosen["setting"]["values"]
    assert chosen["time"]["value"] == pytest.approx(0.25)
    assert chosen["time"]["high"] == pytest.approx(0.25)
    # 10 MiB to 9, and what every program has besides.
    assert 1 < chosen["memory"]["value"] < 1.2
    assert chosen["time"]["n"] == 10
    assert chosen["line"].startswith("GLIBC_TUNABLES=glibc.malloc.trim_threshold=")
    assert result.stdout.rstrip().endswith(f"{fake} 'it is'")
    assert chosen["line"] in result.stdout
    assert "of the average RSS" in result.stdout
    assert found["trials"] == 4
    assert found["command"] == [str(fake), "it is"]
    assert all(each["machines"] for each in found["tried"])
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    # It goes to a log here, in lines.
    assert "searching, 4 trials" in result.stderr
    assert "trial 1: time 0." in result.stderr
    # And the line does what it says.
    run = subprocess.run(["sh", "-c", chosen["line"]], check=False)
    assert run.returncode == 0


def test_nothing_helps(calm: Calm, fake: Path, tmp_path: Path, timed: Timed) -> None:
    timed(lambda _: 0.03)
    report = tmp_path / "report.json"
    result = calm(
        *(
            "tune",
            "search",
            "-a",
            "glibc",
            "--trials",
            "3",
            "--prefer",
            "memory",
            "--memory",
            "peak",
            "--json",
            report,
        ),
        *("--", fake, "none"),
    )
    assert result.returncode == 0, result.stderr
    assert "nothing helps: no setting gained 2% or more" in result.stdout
    assert "GLIBC_TUNABLES" not in result.stdout
    assert read(report)["recommendation"] is None
    assert read(report)["memory"] == "peak"


def test_a_limit_without_an_end_is_no_number_in_json(calm: Calm, fake: Path, timed: Timed) -> None:
    timed(lambda _: 0.06)
    options = ("--trials", "1", "--memory-limit", "inf", "--json", "-")
    result = calm("tune", "search", "-a", "glibc", *options, "--", fake, "none")
    assert result.returncode == 0, result.stderr
    assert '"memory_limit": null' in result.stdout
    assert "Infinity" not in result.stdout


def test_a_short_program_is_run_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure.measure(["true"], groups=())
    runs: list[float | None] = []

    def measured(*_: object, limit_s: float | None, **__: object) -> measure.Measurement:
        runs.append(limit_s)
        return replace(real, wall_s=0.004, user_s=0.001, system_s=0.002, peak_rss_kib=1000 * len(runs))

    monkeypatch.setattr(trial, "measure", measured)
    runner = trial.ProgramRunner(("true",))
    runner.calibrate(None)
    found = runner.run(None)
    assert len(runs) == 1 + 13
    assert found.time_s == pytest.approx(0.004)
    # Too short for an average: the peak, of runs 2 to 14.
    assert found.memory_kib == pytest.approx(8000)
    assert runs[1] == pytest.approx(4 * (5 * 0.004 + 1))
    runner.by_cpu_time = True
    assert runner.run(None).time_s == pytest.approx(0.003)


def test_patience_and_samples_go_by_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure.measure(["true"], groups=())
    asked: list[tuple[float | None, int]] = []
    took = iter([0.5, 2.0, 0.5, 1.0])

    def measured(*_: object, limit_s: float | None, interval_ms: int, **__: object) -> measure.Measurement:
        asked.append((limit_s, interval_ms))
        return replace(real, wall_s=next(took))

    monkeypatch.setattr(trial, "measure", measured)
    runner = trial.ProgramRunner(("true",))
    runner.calibrate(60.0)
    setting = Setting("glibc", {"glibc.malloc.arena_max": "1"})
    for each in (None, setting, setting):
        runner.run(each)
    # The slowest that the baseline was, be it by chance; what a setting takes says nothing.
    assert asked == [(60.0, 10), (4 * 3.5, 5), (11.0, 5), (11.0, 5)]


def test_a_run_without_an_end_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_TIMEOUT_TIMES", 0.0)
    script = 'test -z "$GLIBC_TUNABLES" || exec sleep 1000'
    runner = trial.ProgramRunner(("sh", "-c", script))
    runner.calibrate(None)
    setting = Setting("glibc", {"glibc.malloc.arena_max": "1"})
    with pytest.raises(RunFailedError, match=r"^timeout after \d+ s"):
        runner.run(setting)
    runner.run(None)


def test_what_makes_the_program_fail_is_reported(calm: Calm, fake: Path, timed: Timed) -> None:
    timed(lambda _: 0.05)
    # The plain settings that are tried first have a top_pad among them.
    result = calm(
        "tune", "search", "-a", "glibc", "--trials", "4", "--seed", "1", "--json", "-", "--", fake, "fails"
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    failed = [each for each in found["tried"] if each["failure"]]
    assert failed
    assert all(each["failure"] == "exit code 3" for each in failed)
    assert all("glibc.malloc.top_pad" in each["setting"]["values"] for each in failed)
    assert "failed: exit code 3" in result.stderr
    assert "made the program fail" in result.stderr
    for each in found["front"] + found["rejected"]:
        assert "glibc.malloc.top_pad" not in each["setting"]["values"]


def test_an_allocator_of_our_own(calm: Calm, fake: Path, timed: Timed) -> None:
    if not allocators.find_library("calmalloc"):
        pytest.skip("calmalloc is not built")
    timed(lambda environment: 0.04 if "calmalloc" in environment.get("LD_PRELOAD", "") else 0.16)
    result = calm("tune", "search", "-a", "calmalloc", "--trials", "2", "--json", "-", "--", fake, "preload")
    found = json.loads(result.stdout)
    assert found["recommendation"]["setting"]["allocator"] == "calmalloc"
    assert found["recommendation"]["line"].startswith(f"LD_PRELOAD={allocators.find_library('calmalloc')} ")


def test_what_is_set_stays_and_runs_alternate(calm: Calm, fake: Path, tmp_path: Path, timed: Timed) -> None:
    timed(lambda _: 0.06)
    log = tmp_path / "log"
    script = f'echo "$GLIBC_TUNABLES" >>{log}; exec {fake} none'
    tunables = "glibc.malloc.perturb=1:glibc.malloc.trim_threshold=65536"
    result = calm(
        *("tune", "search", "-a", "glibc", "--trials", "2", "--", "sh", "-c", script),
        env={"GLIBC_TUNABLES": tunables},
    )
    assert result.returncode == 0, result.stderr
    assert f"GLIBC_TUNABLES={tunables} is set, and stays so in every run" in result.stderr
    warm, *lines = log.read_text().splitlines()
    assert warm == tunables
    # In pairs that turn.
    assert [line == tunables for line in lines[:4]] == [True, False, False, True]
    assert lines[1].startswith(f"{tunables}:glibc.malloc.")
    assert all(line.startswith(tunables) and line.count("trim_threshold") == 1 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-a", "nosuch", "--", "true"), 2, "'nosuch' has no settings to search"),
        (("-a", "glibc,glibc", "--", "true"), 2, "given twice"),
        (("--for", "0s", "--", "true"), 2, "not in the range"),
        (("--for", "5", "--", "true"), 2, "'5' is not a duration with a unit"),
        (("--for", "infs", "--", "true"), 2, "'infs' is not a duration with a unit"),
        (("--memory-limit", "nan", "--", "true"), 2, "'nan' is not a number"),
        (("--trials", "0", "--", "true"), 2, "--trials"),
        (("--seed", "-1", "--", "true"), 2, "--seed"),
        (("--memory-limit", "0", "--", "true"), 2, "--memory-limit"),
        (("--prefer", "luck", "--", "true"), 2, "--prefer"),
        (("--time", "later", "--", "true"), 2, "--time"),
        (("--memory", "some", "--", "true"), 2, "--memory"),
        (("--plot", "x.pdf", "--", "true"), 2, ".svg or .png"),
        (("--json", "/no/such/file", "--", "true"), 1, "cannot write /no/such/file"),
        (("--plot", "/no/such/file.svg", "--", "true"), 1, "cannot write /no/such/file.svg"),
        (("--storage", "sqlite:///x.db", "--", "true"), 2, "--storage URL and --study NAME go together"),
        (("--study", "x", "--", "true"), 2, "go together"),
        (("--advise", "--", "true"), 2, "no such option"),
        ((), 2, "missing argument"),
        (("--trials", "1", "--", "no-such-program"), 127, "no such program"),
        (("--trials", "1", "--", "/etc/passwd"), 126, "not executable"),
        (("--trials", "1", "--", "false"), 1, "false: exit code 1"),
        (
            ("--trials", "1", "--", "sh", "-c", "echo broken >&2; kill -SEGV $$"),
            1,
            "SIGSEGV (11) (it said: broken)",
        ),
        (("--for", "300ms", "--", "sleep", "5"), 1, "one run takes longer than --for 0.3s allows"),
    ],
)
def test_bad_input_gets_one_line(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["calm", "tune", "search", *arguments])
    assert cli.run(cli.cli, "calm") == code
    stdout, stderr = capfd.readouterr()
    assert message.lower() in stderr.lower()
    assert stderr.startswith("calm: ")
    assert stderr.count("\n") == 1
    assert stdout == ""


def test_the_document_is_one_that_calm_reads(calm: Calm, fake: Path, tmp_path: Path, timed: Timed) -> None:
    timed(with_trimming)
    report = tmp_path / "report.json"
    result = calm("tune", "search", "-a", "glibc", "--trials", "2", "--json", report, "--", fake)
    assert result.returncode == 0, result.stderr
    found = documents.read(str(report), Tuning)
    assert found.command == [str(fake)]
    assert found.tried[0].pairs
    (tmp_path / "cut").write_text(report.read_text()[:-100])
    (tmp_path / "later").write_text(report.read_text().replace('"version": 1', '"version": 9'))
    for name, message in (("cut", "cut short"), ("later", "has version 9")):
        with pytest.raises(CalmError, match=message):
            documents.read(str(tmp_path / name), Tuning)


@pytest.mark.parametrize("option", ["--json", "-o"])
def test_a_full_disk_is_reported(calm: Calm, fake: Path, timed: Timed, option: str) -> None:
    timed(lambda _: 0.06)
    result = calm("tune", "search", "-a", "glibc", "--trials", "1", option, "/dev/full", "--", fake)
    assert result.returncode == 1
    assert result.stderr.endswith("calm: cannot write /dev/full: No space left on device\n")


def test_a_time_too_short_to_compare_anything(calm: Calm, timed: Timed) -> None:
    timed(lambda _: 0.5)
    result = calm("tune", "search", "--for", "1.2s", "--", "true")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "one run takes 500.00 ms: --for 1.2s is too short; --for 30s is enough" in result.stderr


def test_where_all_is_set_already_nothing_is_searched(calm: Calm, fake: Path) -> None:
    knobs = space.spaces(["glibc"], {})[0]["glibc"]
    tunables = ":".join(f"{name}={values[0]}" for name, values in knobs.items())
    result = calm(
        "tune", "search", "-a", "glibc", "--trials", "2", "--", fake, env={"GLIBC_TUNABLES": tunables}
    )
    assert result.returncode == 2
    assert result.stderr.endswith(
        "calm: nothing is left to search: the environment sets all knobs of glibc\n"
    )


def test_without_optuna(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr(sys, "argv", ["calm", "tune", "search", "--trials", "1", "--", "true"])
    assert cli.run(cli.cli, "calm") == 1
    needs = "calm: calm tune search needs optuna, which is not installed: pip install optuna\n"
    assert capfd.readouterr().err == needs


def test_a_long_program_is_told_what_is_possible(calm: Calm, tmp_path: Path, timed: Timed) -> None:
    timed(lambda _: 0.3)
    report = tmp_path / "report.json"
    result = calm("tune", "search", "-a", "glibc", "--for", "3s", "--json", report, "--", "true")
    assert result.returncode == 0, result.stderr
    assert re.search(
        r"--for 3s allows about \d+ of the 60 runs of a search; --for 18s is enough", result.stderr
    )
    # A gain by chance is not confirmed, for lack of time.
    assert re.search(r"nothing (helps|is recommended): ", result.stdout)
    assert read(report)["recommendation"] is None
    assert read(report)["wall_s"] < 4.5


def test_a_static_program_has_glibc_alone(calm: Calm, tmp_path: Path) -> None:
    source, path = tmp_path / "static.c", tmp_path / "static"
    source.write_text("#include <unistd.h>\nint main(void) { usleep(60000); return 0; }\n")
    subprocess.run(["cc", "-static", "-o", str(path), str(source)], check=True)
    result = calm("tune", "search", "-a", "calmalloc", "--trials", "1", "--", path)
    assert result.returncode == 2
    assert "statically linked" in result.stderr
    spaces, notes = _chosen_spaces((), None, None, (str(path),))
    assert list(spaces) == ["glibc"]
    assert "statically linked" in notes[0]


def test_stopped_in_the_first_run(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "calm",
            "tune",
            "search",
            "--",
            "sh",
            "-c",
            f"touch {tmp_path}/runs; exec sleep 1000",
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until((tmp_path / "runs").exists)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130
    assert stderr == "calm: stopped before anything was known\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_known_is_kept_when_it_is_stopped(fake: Path, tmp_path: Path, number: signal.Signals) -> None:
    report = tmp_path / "report.json"
    arguments = ["tune", "search", "-a", "glibc", "--for", "5min", "--json", str(report), "--", str(fake)]
    process = subprocess.Popen(
        [sys.executable, "-m", "calm", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "trial 1" in line:
            break
    time.sleep(0.3)
    below = proc.descendants(process.pid)
    # As a terminal does it.
    os.killpg(process.pid, number)
    stdout, stderr = process.communicate()
    assert process.returncode == 128 + number
    assert "stopped after" in stderr
    assert "Traceback" not in stderr
    assert "nothing is recommended: stopped" in stdout
    assert "not confirmed" in stdout
    assert "trim_threshold" in stdout
    found = read(report)
    assert found["interrupted_by"] == number
    assert found["tried"]
    assert found["recommendation"] is None
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
