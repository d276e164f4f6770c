"""calm calibrate: the plan of the experiment, its runs, and its documents."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from calm_helpers import ROOT, Calm, probe
from waiting import wait_until

from calm.core import documents, measure, paths, proc
from calm.core.errors import USAGE, CalmError
from research.predict import calibrate, calibration
from research.predict.calibrate import Point
from research.predict.calibration import Calibration, Costs, Experiment, Messages, Sample

needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")

# In place of madvise-storm: its threads each keep to one CPU, go before all others where they may, and write
# before each call, so that they interrupt each other on a busy machine too.
STORM = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
static long calls;
static void *run(void *argument) {
    long number = (long)argument, seen = 0;
    cpu_set_t all, own;
    sched_getaffinity(0, sizeof all, &all);
    CPU_ZERO(&own);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &all) && seen++ == number % CPU_COUNT(&all)) CPU_SET(cpu, &own);
    sched_setaffinity(0, sizeof own, &own);
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (long i = 0; i < calls; i++) {
        *(volatile char *)page = 1;
        madvise(page, 4096, MADV_DONTNEED);
    }
    return NULL;
}
int main(int argc, char **argv) {
    long threads = atol(argv[2]);
    pthread_t made[64];
    calls = atol(argv[4]);
    for (long i = 0; i < threads; i++) pthread_create(&made[i], NULL, run, (void *)i);
    for (long i = 0; i < threads; i++) pthread_join(made[i], NULL);
    printf("{\"reference_mhz\": 2500.0}\n");
    return 0;
}
"""


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the probe and that program, to be found before all others."""
    folder = tmp_path_factory.mktemp("storm")
    (folder / "storm.c").write_text(STORM)
    subprocess.run(["cc", "-O1", "-pthread", "-o", folder / "madvise-storm", folder / "storm.c"], check=True)
    (folder / "calm-probe").symlink_to(measure.find_probe())
    return folder


def made(**changes: object) -> Calibration:
    """A calibration of this machine."""
    found = Calibration(
        machine=calibration.this_machine(),
        experiment=Experiment(rounds=3, reference_mhz=[2500.0]),
        costs=Costs(400.0, 300.0, 0.25, 8000.0, None),
        interval_ns=(7500.0, 8500.0),
        residuals=[],
        notes=[],
    )
    return msgspec.structs.replace(found, **changes)


def test_plan_of_one_socket() -> None:
    points = calibrate.plan([list(range(20))], [1, 2, 16])
    assert [len(point.cpus) for point in points if point.threads == 16] == [1, 2, 4, 8, 16]
    assert {point.sockets for point in points} == {1}
    assert len(points) == len(set(points)) == 15


def test_plan_of_several_sockets() -> None:
    sockets = [list(range(number, 80, 4)) for number in range(4)]
    points = calibrate.plan(sockets, [1, 16])
    spread = {point.sockets: point.cpus for point in points if point.sockets > 1}
    assert sorted(spread) == [2, 3, 4]
    assert spread[2] == tuple(sockets[0][:8] + sockets[1][:8])
    assert [len(cpus) for _, cpus in sorted(spread.items())] == [16, 15, 16]
    # One thread cannot be on two sockets.
    assert all(point.threads > 1 for point in points if point.sockets > 1)


@pytest.mark.parametrize(("cpus", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (6, [1, 2, 4, 6])])
def test_plan_of_few_cpus(cpus: int, sizes: list[int]) -> None:
    points = calibrate.plan([list(range(cpus))], [1, 16])
    assert [len(point.cpus) for point in points if point.threads == 16] == sizes


def test_runs_keep_to_their_cpus_and_leave_ours_alone(storm: Path) -> None:
    before = os.sched_getaffinity(0)
    cpu = min(before)
    points = [Point((cpu,), 1, 1), Point((cpu,), 1, 3)]
    experiment = calibrate.run(points, 2, 0.02, str(storm / "madvise-storm"))
    assert os.sched_getaffinity(0) == before
    assert experiment.rounds == 2
    assert [(sample.threads, sample.round) for sample in experiment.samples] == [
        (1, 1),
        (1, 2),
        (3, 1),
        (3, 2),
    ]
    assert all(sample.cpu_s > 0 and sample.madvise % sample.threads == 0 for sample in experiment.samples)
    if experiment.exact:
        # On one CPU there is no other to interrupt.
        assert [sample.interrupts for sample in experiment.samples] == [0, 0, 0, 0]


@pytest.mark.parametrize(("run_s", "calls"), [(30.0, [2000, 4000]), (1e-6, [500, 250])])
def test_runs_get_longer_or_shorter(
    storm: Path, run_s: float, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A few calls in the warm-up, so that the test is short.
    monkeypatch.setattr(Point, "first_calls", lambda *_: 1000)
    points = [Point((min(os.sched_getaffinity(0)),), 1, 1)]
    experiment = calibrate.run(points, 2, run_s, str(storm / "madvise-storm"))
    assert [sample.madvise for sample in experiment.samples] == calls


@needs_two
def test_calibrates(calm: Calm, storm: Path, tmp_path: Path) -> None:
    """A busy machine may rightly be refused, and is asked again; other tests say what is refused, and how."""
    out = tmp_path / "out.json"

    results = []

    def calibrated() -> bool:
        result = calm(
            "calibrate", "shootdowns", "--threads", "1,2,3", "-n", "3", "--for", "50ms", "--json", out,
            env={"CALM_LIBRARY_PATH": str(storm), "XDG_CACHE_HOME": str(tmp_path)},
        )  # fmt: skip
        results.append(result)
        return result.returncode == 0 or "machine" not in result.stderr

    wait_until(calibrated, "runs that the machine's other work does not disturb")
    result = results[-1]
    assert result.returncode == 0, result.stderr
    assert "a, an interrupt within a socket:" in result.stdout
    assert "held out: CPU time" in result.stdout
    found = calibration.load(out, Calibration)
    assert found.reference_mhz == 2500
    assert found.experiment.rounds == 3
    assert {(row.cpus, row.threads) for row in found.residuals if row.held_out} >= {(1, 2), (2, 2)}
    # Each call of several threads on several CPUs interrupts others, and that is the most of what it costs.
    assert found.costs.local_ns > 0
    several = [each for each in found.experiment.samples if each.cpus > 1 and each.threads > 1]
    assert sum(each.interrupts for each in several) > 1000


# In place of the probe: runs nothing, and tells what a machine would whose costs are known. A call takes
# 400 ns, and an interrupt what COSTS says for each round; tracing takes a microsecond for each interrupt.
# Two threads, which are held out where there are three, take half as long again. Where TRACED is empty, there
# are no tracepoints, and other programs have interrupts, too.
PROBE = """\
import json, os, sys
from pathlib import Path
options = dict(zip(sys.argv, sys.argv[1:]))
assert options["-c"] == "tlb"
threads = int(options["--threads"])
cpus = len(os.sched_getaffinity(0))
calls = threads * int(options["--calls"])
seen = Path({folder!r}, f"seen-{{cpus}}-{{threads}}")
number = len(seen.read_text()) if seen.exists() else 0
seen.write_text("x" * (number + 1))
costs = os.environ["COSTS"].split(",")
interrupts = calls * (min(threads, cpus) - 1)
tracing = interrupts * 1000
ns = (calls * 400 + interrupts * float(costs[number % len(costs)])) * (1.5 if threads == 2 else 1) + tracing
report = {report!r}
report["user_us"], report["system_us"] = 0, ns / 1000
report["wall_ns"] = ns / min(threads, cpus)
for name in report["counters"]:
    report["counters"][name] = {{"value": None, "reason": "not asked for"}}
if os.environ.get("TRACED", "yes"):
    report["counters"]["interrupts"] = {{"value": interrupts}}
report["interrupts_system_wide"] = interrupts + 10
report["own"] |= {{"flush_ns": 1000, "task_ns": None, "counted_call_ns": None}}
os.write(int(options["-f"]), json.dumps(report).encode())
assert not any("LD_PRELOAD" in word for word in sys.argv)
print('{{"reference_mhz": 2500.0}}')
"""


@pytest.fixture
def known(storm: Path, tmp_path: Path) -> Path:
    """A folder with that probe."""
    (tmp_path / "probe.py").write_text(
        PROBE.format(folder=str(tmp_path), report=probe("-c", "none", "--", "true"))
    )
    (tmp_path / "calm-probe").write_text(f'#!/bin/sh\nexec {sys.executable} -S {tmp_path}/probe.py "$@"\n')
    (tmp_path / "calm-probe").chmod(0o755)
    (tmp_path / "madvise-storm").symlink_to(storm / "madvise-storm")
    return tmp_path


@needs_two
def test_known_costs_are_found_and_kept(calm: Calm, known: Path, storm: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(known)}
    # The experiment does not inherit the user's preload.
    own = cache | {"CALM_LIBRARY_PATH": str(known), "COSTS": "8000", "LD_PRELOAD": "libc.so.6"}
    result = calm("calibrate", "shootdowns", "--threads", "1,2,3", "-n", "3", "--for", "10ms", env=own)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("kept for `calm predict run`\n")
    found = calibration.load(known / "calm/calibration.json", Calibration)
    # Without what tracing took, and what two threads did.
    assert (found.costs.call_ns, found.costs.local_ns) == pytest.approx((400, 8000), rel=1e-3)
    assert found.interval_ns == pytest.approx((8000, 8000), rel=1e-3)
    assert found.experiment.exact
    for row in found.residuals:
        error = 1 / 1.5 - 1 if row.threads == 2 else 0
        assert row.held_out == (row.threads == 2)
        assert (row.cpu_error, row.wall_error) == pytest.approx((error, error), abs=1e-3)
    assert "held out: CPU time not all within 15%; the worst is -33.3%" in result.stdout
    used = calm(
        "predict", "run", "--cpus", "8", "-a", "glibc", "-n", "1", "--",
        storm / "madvise-storm", "--threads", "2", "--calls", "20", env=cache,
    )  # fmt: skip
    assert "calibrated here" in used.stdout, used.stderr


@needs_two
def test_what_is_too_vague_is_shown_and_not_kept(calm: Calm, known: Path) -> None:
    environment = {"CALM_LIBRARY_PATH": str(known), "XDG_CACHE_HOME": str(known), "COSTS": "4000,8000,16000"}
    result = calm("calibrate", "shootdowns", "--threads", "1,3", "-n", "3", "--for", "10ms", env=environment)
    assert result.returncode == 1
    assert "a, an interrupt within a socket:" in result.stdout
    assert "kept for" not in result.stdout
    assert result.stderr.startswith("calm: too vague, so not kept: an interrupt takes ")
    assert result.stderr.count("\n") == 1
    assert not (known / "calm").exists()


@needs_two
def test_without_tracepoints_the_systems_interrupts_are_counted_and_it_says_so(
    calm: Calm, known: Path
) -> None:
    out = known / "out.json"
    result = calm(
        "calibrate", "shootdowns", "--threads", "1,2", "-n", "2", "--for", "20ms", "--json", out,
        env={"CALM_LIBRARY_PATH": str(known), "XDG_CACHE_HOME": str(known), "COSTS": "8000", "TRACED": ""},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "counted system-wide" in result.stdout
    assert "held out: nothing" in result.stdout
    assert not json.loads(out.read_text())["experiment"]["exact"]
    # What is written elsewhere is not kept for predict.
    assert not (known / "calm").exists()


@needs_two
@pytest.mark.parametrize("runs", [1, 13])
def test_interrupt_ends_all_and_keeps_nothing(known: Path, runs: int) -> None:
    """In the first round, with nothing to show; and later, with rounds that are complete."""
    log = known / "log"
    # The last one goes on until it is interrupted.
    (known / "calm-probe").write_text(
        f"#!/bin/sh\necho >>{log}\n[ $(wc -l <{log}) -lt {runs} ] || exec {measure.find_probe()} "
        f'"$@"\nexec {sys.executable} -S {known}/probe.py "$@"\n'
    )
    (known / "madvise-storm").unlink()
    (known / "madvise-storm").write_text("#!/bin/sh\nexec sleep 1000\n")
    (known / "madvise-storm").chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(known), "COSTS": "8000"}
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "calm",
            "calibrate",
            "shootdowns",
            "--threads",
            "1,2",
            "-n",
            "1000",
            "--for",
            "20ms",
        ],
        env=environment | {"CALM_LIBRARY_PATH": str(known)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    below: list[int] = []

    def is_at_the_last() -> bool:
        below[:] = proc.descendants(process.pid)
        with contextlib.suppress(OSError):
            return any(b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below)
        return False

    wait_until(is_at_the_last)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert "of 1000 rounds; nothing is kept" in stderr
    assert ("stopped after 0 of" in stderr) == (runs == 1)
    assert ("a, an interrupt within a socket" in stdout) == (runs > 1)
    assert "Traceback" not in stderr
    assert "kept for" not in stdout
    assert not (known / "calm").exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in below)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--threads", "1,x"], 2, "'1,x' is not a list of numbers"),
        (["--threads", "0,1"], 2, "'0,1' is not a list of numbers"),
        (["--threads", "2,4"], 2, "--threads 2,4: one thread, and some number of several, are needed"),
        (["--threads", "1"], 2, "--threads 1: one thread, and some number of several, are needed"),
        (["-n", "0"], 2, "0 is not in the range"),
        (["--for", "1ms"], 2, "1ms is not in the range 10ms to 1min"),
        (["--for", "0.2"], 2, "'0.2' is not a duration with a unit"),
        (["--json", "/nowhere/x.json"], 1, "cannot write /nowhere/x.json: no such directory"),
    ],
)
def test_bad_arguments(calm: Calm, arguments: list[str], code: int, message: str) -> None:
    result = calm("calibrate", "shootdowns", *arguments)
    assert result.returncode == code
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_one_cpu_has_nothing_to_calibrate(calm: Calm) -> None:
    cpu = min(os.sched_getaffinity(0))
    result = calm("calibrate", "shootdowns", set_up=lambda: os.sched_setaffinity(0, [cpu]))
    assert result.returncode == 1
    assert result.stderr == "calm: one CPU sends no TLB interrupts, so there is nothing to calibrate\n"


def test_a_failing_storm_is_named(calm: Calm, tmp_path: Path) -> None:
    (tmp_path / "calm-probe").symlink_to(measure.find_probe())
    (tmp_path / "madvise-storm").write_text("#!/bin/sh\necho no luck >&2\nexit 3\n")
    (tmp_path / "madvise-storm").chmod(0o755)
    result = calm("calibrate", "shootdowns", env={"CALM_LIBRARY_PATH": str(tmp_path)})
    assert result.returncode == 1
    assert result.stderr == "calm: madvise-storm: exit code 3 (it said: no luck)\n"


@pytest.mark.parametrize(("busy_cpus", "noted"), [(0.2, False), (0.5, True)])
def test_other_programs_are_noted(busy_cpus: float, noted: bool) -> None:
    samples = [Sample(0, cpus, 1, cpus, 1000, 2000 * (cpus - 1), cpus * 1e-3, 1e-3) for cpus in (1, 2)]
    experiment = Experiment(samples, rounds=1, busy_cpus=busy_cpus)
    notes = calibrate.analyse(experiment, []).notes
    assert any("other virtual machines, used 0.5 CPUs meanwhile" in note for note in notes) == noted
    assert not any("system-wide" in note for note in notes)


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    written = made()
    calibration.keep(written)
    path = tmp_path / "new/calm/calibration.json"
    assert calibration.load(path, Calibration) == written
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_calibration_without_a_useful_interval_is_vague() -> None:
    assert calibrate.vagueness(made()) is None
    assert calibrate.vagueness(made(interval_ns=(7500.0, 14_900.0))) is None
    assert (
        calibrate.vagueness(made(interval_ns=(7500.0, 15_100.0))) == "an interrupt takes 7,500 to 15,100 ns"
    )
    without = made(interval_ns=None)
    assert calibrate.vagueness(without) == "the time of an interrupt varies by round"
    # With so few rounds there is none.
    without.experiment.rounds = 2
    assert calibrate.vagueness(without) is None


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("cpu", "another"),
        ("architecture", "another"),
        ("cpus", 1000),
        ("sockets", 1000),
        ("virtual", not calibration.this_machine()["virtual"]),
        ("kernel", "another"),
    ],
)
def test_another_machines_is_refused(tmp_path: Path, key: str, other: object) -> None:
    path = tmp_path / "calibration.json"
    machine = calibration.this_machine() | {key: other}
    path.write_text(documents.text(made(machine=machine)))
    with pytest.raises(CalmError, match=rf"is of another machine \({key} {other}, and here ") as caught:
        calibration.load(path, Calibration)
    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is no document of calm"),
        ('{"schema": "calm-messages", "version": 1}', "is of the schema calm-messages"),
        (
            '{"schema": "calm-calibration", "version": 99}',
            "has version 99 .*: run `calm calibrate shootdowns` again",
        ),
        ('{"schema": "calm-calibration", "version": 1, "costs": {}}', "not a whole calm-calibration"),
        (None, "cannot read"),
    ],
)
def test_files_that_are_no_calibration(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "calibration.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CalmError, match=message) as caught:
        calibration.load(path, Calibration)
    assert caught.value.exit_code == USAGE


def test_a_cost_of_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(documents.text(made(costs=Costs(400.0, 300.0, 0.25, 0.0, None))))
    with pytest.raises(CalmError, match="local_ns"):
        calibration.load(path, Calibration)


# Messages between CPUs.


def messages(pairs: str) -> dict[str, Any]:
    """What calm-messages writes."""
    command = [paths.find_part("calm-messages"), pairs]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    report: dict[str, Any] = json.loads(found)
    return report


def message_costs(pairs: str) -> dict[str, Any]:
    """What calm-messages measures; once more, if other programs kept one of the CPUs all the time."""
    for _ in range(5):
        report = messages(pairs)
        if all(each is None or None not in each.values() for each in report["pairs"].values()):
            return report
    pytest.skip("other programs keep the CPUs busy")


@needs_two
def test_messages_are_sent() -> None:
    a, b = sorted(os.sched_getaffinity(0))[:2]
    report = message_costs(f"{a}:{b},{b}:{a}")
    assert list(report["pairs"]) == [f"{a}:{b}", f"{b}:{a}"]
    for costs in report["pairs"].values():
        for spread in (*costs.values(), report["atomic_ns"]):
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
            assert spread["samples"] >= 5
        # One is a part of the other in each sample, so that it holds however they are slowed.
        for name in ("low", "median", "high"):
            assert costs["wake_ns"][name] <= costs["wake_round_trip_ns"][name]
    if os.uname().machine == "x86_64":
        assert 200 < report["reference_mhz"] < 20_000


@needs_two
def test_a_cpu_that_may_not_be_used_is_told_of() -> None:
    own, other = min(os.sched_getaffinity(0)), 1023
    if other in os.sched_getaffinity(0):
        pytest.skip("has 1024 CPUs")
    report = messages(f"{own}:{other},{other}:{own}")
    assert report["pairs"] == {f"{own}:{other}": None, f"{other}:{own}": None}
    assert report["atomic_ns"]["median"] > 0


@pytest.mark.parametrize(
    "pairs", ["", "0", "0:", ":1", "0:0", "0:1,", "0:1x", "-1:0", "0:1024", "0:99999999999"]
)
def test_pairs_that_are_none(pairs: str) -> None:
    command = [paths.find_part("calm-messages"), pairs]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("calm-messages: takes at most 64 pairs")


def calm_with_messages(
    calm: Calm, *arguments: str | Path, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Once more, if other programs kept the CPUs all the time."""
    for _ in range(5):
        result = calm("calibrate", "messages", *arguments, env=env)
        if result.returncode == 0:
            return result
        assert "the machine is too busy to measure any" in result.stderr
    pytest.skip("other programs keep the CPUs busy")


@needs_two
def test_messages_are_kept(calm: Calm, tmp_path: Path) -> None:
    result = calm_with_messages(calm, env={"XDG_CACHE_HOME": str(tmp_path)})
    kept = calibration.load(tmp_path / "calm/messages.json", Messages)
    assert kept.pairs
    assert f"{kept.pairs[0].a}, {kept.pairs[0].b}" in result.stdout
    assert "kept for `calm predict offload`" in result.stdout
    path = tmp_path / "here.json"
    calm_with_messages(calm, "--json", path, env={"XDG_CACHE_HOME": "/nonexistent"})
    assert calibration.load(path, Messages).kinds()


def test_messages_need_two_cpus(calm: Calm) -> None:
    cpu = min(os.sched_getaffinity(0))
    result = calm("calibrate", "messages", set_up=lambda: os.sched_setaffinity(0, [cpu]))
    assert result.returncode == 1
    assert result.stderr == "calm: there is one CPU, so no other to send a message to\n"


@pytest.mark.parametrize("option", ["--threads", "-n", "--for"])
def test_options_of_shootdowns_are_not_of_messages(calm: Calm, option: str) -> None:
    result = calm("calibrate", "messages", option, "1")
    assert result.returncode == USAGE
    assert "no such option" in result.stderr.lower()
