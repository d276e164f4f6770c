import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calm_helpers import ROOT, Calm, Compile, probe
from waiting import wait_until

from calm.core import measure

# How long a program holds its memory: until it is looked at meanwhile, which a busy machine may put off.
HELD_MS = (400, 4_000, 40_000)


def figures(
    calm: Calm, *command: str | Path, options: tuple[str, ...] = (), **how: Callable[[], object]
) -> dict[str, Any]:
    result = calm("stat", "--json", *options, "--", *command, **how)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return {key: figure["median"] for key, figure in report["figures"].items()}


def test_shows_every_figure(calm: Calm) -> None:
    result = calm("stat", "--", "true")
    assert result.returncode == 0
    assert result.stdout == ""
    for metric in measure.METRICS:
        if metric.key != "interrupts_system_wide":
            assert metric.label in result.stderr
    assert "cost of measuring: the probe used" in result.stderr


def test_what_is_not_there_is_never_a_silent_zero(calm: Calm) -> None:
    report = json.loads(calm("stat", "--json", "--", "true").stdout)
    for key, figure in report["figures"].items():
        assert (figure["median"] is None) == figure["how"].startswith("not "), key


def test_json_has_the_runs(calm: Calm) -> None:
    report = json.loads(calm("stat", "--json", "-n", "3", "--", "sh", "-c", "echo noise").stdout)
    assert (report["schema"], report["version"]) == ("calm-stat", 1)
    assert report["command"] == ["sh", "-c", "echo noise"]
    assert report["rounds"] == len(report["runs"]) == 3
    assert set(report["figures"]) == set(measure.METRIC)
    for run in report["runs"]:
        assert run["wall_s"] > 0
        assert run["peak_rss_kib"] > 100
        assert run["minor_faults"] > 0
        assert run["code"] == 0
        assert run["signal"] is None
        assert set(run["own"]) == {
            *("cpu_s", "counted_call_ns", "other_call_ns", "flush_ns", "task_ns"),
            *("system_wide_tasks_started", "tracing_s"),
        }


def test_output_of_the_program_passes_through(calm: Calm) -> None:
    assert calm("stat", "--", "cat", input="through\n", process=True).stdout == "through\n"


def test_report_and_json_go_to_files(calm: Calm, tmp_path: Path) -> None:
    text, data = tmp_path / "report", tmp_path / "stat.json"
    result = calm("stat", "-o", text, "--json", data, "--", "echo", "out", process=True)
    assert (result.stdout, result.stderr) == ("out\n", "")
    assert "wall time" in text.read_text()
    assert json.loads(data.read_text())["schema"] == "calm-stat"


def test_options_of_the_program_are_its_own(calm: Calm) -> None:
    assert calm("stat", "echo", "--json", "-n", "0").stdout == "--json -n 0\n"


def test_passes_the_exit_code_on(calm: Calm) -> None:
    assert calm("stat", "--", "sh", "-c", "exit 3").returncode == 3


def test_tells_the_signal_that_killed_the_program(calm: Calm) -> None:
    result = calm("stat", "--", "sh", "-c", "kill -SEGV $$")
    assert result.returncode == 128 + signal.SIGSEGV
    assert "killed by SIGSEGV (11)" in result.stderr
    assert "wall time" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--", "no-such-program"), 127, "no such program: 'no-such-program'"),
        (("--", "./no/such"), 127, "no such program: './no/such'"),
        (("--", "/etc/passwd"), 126, "/etc/passwd is not executable"),
        (("--", "/usr"), 126, "/usr is a directory"),
        (("--", ""), 127, "no such program: ''"),
        (("-n", "0", "--", "true"), 2, "-n"),
        (("-n", "many", "--", "true"), 2, "-n"),
        (("--nonsense", "--", "true"), 2, "--nonsense"),
        (("-i", "10", "--", "true"), 2, "not a duration"),
        (("-i", "10us", "--", "true"), 2, "not in the range 1ms to 1min"),
        (("--json", "/no/such/file", "--", "true"), 1, "cannot write /no/such/file"),
        ((), 2, "cmd"),
    ],
)
def test_bad_input_gets_one_line(calm: Calm, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = calm("stat", *arguments)
    assert result.returncode == code
    assert message.lower() in result.stderr.lower()
    assert result.stderr.startswith("calm: ")
    assert result.stderr.count("\n") == 1


def test_interpreter_that_is_missing(calm: Calm, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    result = calm("stat", "--", script)
    assert result.returncode == 127
    assert result.stderr.count("\n") == 1


def test_missing_probe(calm: Calm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.paths, "probe_candidates", lambda: [tmp_path / "calm-probe"])
    with pytest.raises(measure.CalmError, match="`make` builds it"):
        measure.find_probe()


@pytest.mark.usefixtures("traced")
def test_calls_are_counted_exactly(calm: Calm, compiled: Compile) -> None:
    names = ["madvise", "munmap", "mprotect", "brk"]
    none = figures(calm, compiled("calls"), "0", "0", "0", "0")
    some = figures(calm, compiled("calls"), "101", "23", "57", "1009")
    assert [some[name] - none[name] for name in names] == [101, 23, 57, 1009]


@pytest.mark.usefixtures("traced")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU has no other to shoot at")
def test_two_threads_shoot_down(calm: Calm, compiled: Compile) -> None:
    def interrupted() -> bool:
        got = figures(calm, compiled("shootdowns"), "2000", "two")
        assert got["shootdowns"] < 2200
        assert got["interrupts"] < 2200
        assert got["interrupts_received"] <= got["interrupts"]
        # Where the other thread is away from its CPU, there is none to send an interrupt to.
        return got["shootdowns"] > 1000 and got["interrupts"] > 200 and got["interrupts_received"]

    wait_until(interrupted)


@pytest.mark.usefixtures("traced")
def test_one_thread_on_one_cpu_shoots_nothing_down(calm: Calm, compiled: Compile) -> None:
    # Also before it starts the program, which else had reason to interrupt the CPU it was on before.
    got = figures(calm, compiled("shootdowns"), "2000", set_up=lambda: os.sched_setaffinity(0, {0}))
    assert got["madvise"] >= 2000
    assert got["shootdowns"] == 0
    assert got["interrupts"] == 0


def test_memory_that_is_held(calm: Calm, compiled: Compile) -> None:
    for held in HELD_MS:
        got = figures(calm, compiled("hold"), "200", str(held))
        assert got["peak_rss_kib"] / 1024 == pytest.approx(201, rel=0.05)
        assert got["average_rss_kib"] / 1024 < 205
        # It takes time to touch it, too.
        if got["average_rss_kib"] / 1024 > 120:
            return
    pytest.fail(f"{got['average_rss_kib']} KiB on average of what was held for {held} ms")


def test_the_peak_of_one_process_is_the_kernels_mark(compiled: Compile) -> None:
    memory = probe("-c", "none", "--", compiled("hold"), "30", "100")["memory"]
    assert memory["processes"] == 1
    assert memory["peak_kib"] == memory["largest_process_kib"]
    assert 30 < memory["peak_kib"] / 1024 < 34


def test_a_mark_below_the_probes_own_is_read_from_the_program(tmp_path: Path) -> None:
    source, path = tmp_path / "tiny.c", tmp_path / "tiny"
    # Without a C library, and far smaller than the probe.
    source.write_text(
        "void _start(void) { long t[2] = {0, 200000000}, r;"
        ' __asm__ volatile("syscall" : "=a"(r) : "a"(35), "D"(t), "S"(0) : "rcx", "r11", "memory");'
        ' __asm__ volatile("syscall" : : "a"(60), "D"(0)); __builtin_unreachable(); }'
    )
    if platform.machine() != "x86_64":
        pytest.skip("the program is x86-64's")
    subprocess.run(["cc", "-O1", "-static", "-nostdlib", "-o", path, source], check=True)
    memory = probe("-c", "tlb", "--", path)["memory"]
    assert memory["mark_read"]
    assert memory["peak_kib"] < memory["floor_kib"]


def test_the_peak_of_a_short_program_is_not_that_of_its_start() -> None:
    for _ in range(12):
        # Looked at once, as it begins.
        memory = probe("-i", "60000", "--", "sh", "-c", "sleep 0.02")["memory"]
        assert memory["samples"] < 2
        assert memory["peak_kib"] >= memory["floor_kib"] > 1000


@pytest.mark.usefixtures("traced")
def test_threads_are_counted_exactly(calm: Calm, compiled: Compile) -> None:
    assert figures(calm, compiled("shootdowns"), "10")["threads_started"] == 0
    assert figures(calm, compiled("shootdowns"), "10", "two")["threads_started"] == 1
    # Processes are no threads.
    assert figures(calm, compiled("hold"), "1", "10", "3")["threads_started"] == 0


def test_memory_of_the_whole_tree(calm: Calm, compiled: Compile) -> None:
    for held in HELD_MS:
        got = figures(calm, compiled("hold"), "50", str(held), "2")
        assert got["peak_rss_kib"] / 1024 < 110
        assert got["average_rss_kib"] / 1024 < 105
        # The two at once.
        if got["peak_rss_kib"] / 1024 > 100 and got["average_rss_kib"] / 1024 > 50:
            return
    pytest.fail(f"{got['peak_rss_kib']} KiB of two that held 50 MiB each for {held} ms")


def test_orphans_belong_to_the_tree(calm: Calm, compiled: Compile) -> None:
    # The middle process ends at once, and what it leaves behind is still found.
    for held in HELD_MS:
        script = f"({compiled('hold')} 60 {held} &) ; sleep {held / 1000}"
        if figures(calm, "sh", "-c", script)["peak_rss_kib"] / 1024 > 60:
            return
    pytest.fail(f"60 MiB were not seen, held for {held} ms")


def test_memory_shared_by_vfork_counts_once(calm: Calm, compiled: Compile) -> None:
    got = figures(calm, compiled("vforks"), options=("-i", "1ms"))
    assert 100 < got["peak_rss_kib"] / 1024 < 115


def test_memory_shared_by_vfork_counts_once_while_it_grows(calm: Calm, compiled: Compile) -> None:
    got = figures(calm, compiled("vgrows"), options=("-i", "1ms"))
    assert 100 < got["peak_rss_kib"] / 1024 < 115


def test_small_programs_show_no_floor(calm: Calm) -> None:
    report = json.loads(calm("stat", "--json", "--", "true").stdout)
    assert report["runs"][0]["floor_kib"] < 2048


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
def test_without_permission_the_reasons_are_given(calm: Calm, tmp_path: Path) -> None:
    # A checkout may lie where only its owner can look.
    probe = shutil.copy(measure.find_probe(), "/tmp/calm-probe-unprivileged")
    try:
        result = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", probe, "--", "true"],
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
        )
    finally:
        Path(probe).unlink()
    report = json.loads(result.stderr)
    measurement = measure.parse(report)
    for name in ("shootdowns", "interrupts", "madvise", "brk"):
        assert measurement.counters[name].value is None
        assert "EACCES" in (measurement.counters[name].reason or "")
    assert measure.how(measure.METRIC["shootdowns"], measurement).startswith("not counted: ")
    if report["interrupts_system_wide"] is not None:
        text = measure.how(measure.METRIC["interrupts_system_wide"], measurement)
        assert "system-wide, counts every process" in text


def test_an_interrupt_reaches_the_program_and_the_figures_are_kept() -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "calm",
            "stat",
            "--",
            "sh",
            "-c",
            "trap 'kill $!; exit 7' INT; sleep 1000 & echo up; wait",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    assert process.wait() == 7
    assert process.stderr
    assert "wall time" in process.stderr.read()


def test_stopped_while_the_probe_starts(tmp_path: Path) -> None:
    wrapper = tmp_path / "calm-probe"
    # As a terminal does it: calm gets it, and what has not yet become the probe.
    wrapper.write_text(f'#!/bin/sh\nkill -INT 0\nexec {measure.find_probe()} "$@"\n')
    wrapper.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "calm", "stat", "--", "sleep", "1000"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CALM_LIBRARY_PATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "wall time" in errors


def test_the_probe_takes_no_signal_that_is_none() -> None:
    for text in ("0", "2,65", "INT"):
        result = subprocess.run(
            [measure.find_probe(), "-s", text, "--", "true"], capture_output=True, text=True, check=False
        )
        assert result.returncode == 2
        assert "-s takes a whole number from 1 to 64" in result.stderr
