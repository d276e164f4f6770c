"""Comparing with an earlier comparison: what fails a build, what must not, and what cannot be read."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from calm_helpers import Calm
from click.shell_completion import ShellComplete

from calm.cli import cli
from calm.commands.compare import baseline
from calm.commands.compare.baseline import check, judge
from calm.core import comparison, documents, machine, measure
from calm.core.comparison import ComparisonDocument, Regression, Verdict
from calm.core.errors import CalmError
from calm.core.measure import METRIC

WALL, RSS, SHOOTDOWNS = (METRIC[key] for key in baseline.DEFAULT_METRICS)
BASE = (1.00, 1.01, 0.99, 1.02, 0.98)


def scaled(factor: float) -> list[float]:
    return [factor * value for value in BASE]


def verdict(factor: float, limit: float = 0.05) -> Verdict:
    return judge(scaled(factor), BASE, limit, floor=0.002)[1]


def test_worse_is_what_the_whole_interval_says() -> None:
    assert verdict(1.00) is Verdict.WITHIN
    assert verdict(1.03) is Verdict.WITHIN
    # The median is beyond the limit, the interval's lower end is not.
    assert verdict(1.06) is Verdict.UNCERTAIN
    assert verdict(1.15) is Verdict.WORSE
    assert verdict(1.15, limit=0.20) is Verdict.WITHIN
    assert verdict(0.80) is Verdict.BETTER
    ratio, _ = judge(scaled(1.15), BASE, 0.05, 0.002)
    assert ratio.low is not None
    assert ratio.high is not None
    assert 1.05 < ratio.low < 1.15 < ratio.high < 1.25


def test_noise_alone_fails_no_build() -> None:
    """Nothing has changed, and runs scatter by 10 %: over many days, hardly ever a verdict of worse."""
    generator = np.random.default_rng(3)
    for rounds in (3, 5, 10):
        days = [generator.normal(1.0, 0.1, (2, rounds)) for _ in range(100)]
        worse = [judge(list(now), list(then), 0.05, 0.0)[1] is Verdict.WORSE for then, now in days]
        assert sum(worse) <= 5, rounds


@pytest.mark.parametrize("rounds", [1, 2])
def test_too_few_rounds_are_never_certain(rounds: int) -> None:
    for now, then in (([9.0] * rounds, [1.0] * 9), ([9.0] * 9, [1.0] * rounds)):
        found = check("a", WALL, now, then, 0.05)
        assert found.verdict is Verdict.UNCERTAIN
        assert "no less than 3 can be certain" in found.note
    assert judge([9.0] * 3, [1.0] * 3, 0.05, 0.0)[1] is Verdict.WORSE
    # Neither is what is better.
    assert judge([1.0] * rounds, [9.0] * 9, 0.05, 0.0)[1] is Verdict.WITHIN
    assert judge([1.0] * 3, [9.0] * 3, 0.05, 0.0)[1] is Verdict.BETTER


@pytest.mark.parametrize(
    ("now", "then", "expected"),
    [
        ([3, 3, 3], [0, 0, 0], Verdict.WITHIN),
        ([90, 95, 99], [1, 1, 1], Verdict.WITHIN),
        ([100, 100, 100], [0, 0, 0], Verdict.WITHIN),
        ([500, 510, 520], [0, 0, 0], Verdict.WORSE),
        ([0, 0, 0], [0, 0, 0], Verdict.WITHIN),
        ([0, 0, 0], [500, 500, 500], Verdict.BETTER),
        ([20000, 20100, 20200], [10000, 10000, 10100], Verdict.WORSE),
    ],
)
def test_few_shootdowns_more_are_no_regression(
    now: list[float], then: list[float], expected: Verdict
) -> None:
    found = check("a", SHOOTDOWNS, now, then, 0.05)
    assert found.verdict is expected
    assert msgspec.to_builtins(found)["verdict"] == expected.value


def test_floors_of_time_and_memory() -> None:
    assert check("a", WALL, [0.003] * 3, [0.0015] * 3, 0.05).verdict is Verdict.WITHIN
    assert check("a", WALL, [0.03] * 3, [0.015] * 3, 0.05).verdict is Verdict.WORSE
    assert check("a", RSS, [1400] * 3, [1200] * 3, 0.05).verdict is Verdict.WITHIN
    assert "does not count" in check("a", RSS, [1400] * 3, [1200] * 3, 0.05).note
    assert check("a", RSS, [1600] * 3, [1200] * 3, 0.05).verdict is Verdict.WORSE


def test_rounds_of_one_run_are_drawn_whole() -> None:
    """What slows a round slows both: unpaired, the same figures tell nothing."""
    rounds = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    slower = [1.2 * value for value in rounds]
    assert check("a", WALL, slower, rounds, 0.05, paired=True).verdict is Verdict.WORSE
    assert check("a", WALL, slower, rounds, 0.05).verdict is Verdict.UNCERTAIN


def test_what_one_side_lacks_is_not_compared() -> None:
    assert check("a", SHOOTDOWNS, [None] * 3, [1.0] * 3, 0.05).note == "no figure now"
    assert check("a", SHOOTDOWNS, [1.0] * 3, [], 0.05).note == "no figure in the baseline"
    assert check("a", SHOOTDOWNS, [None, 900.0, 900.0, 900.0], [1.0] * 3, 0.05).verdict is Verdict.WORSE


def test_commands_are_the_same_wherever_the_program_lies() -> None:
    assert baseline.same_command(["old/app", "-x"], ["/new/app", "-x"])
    assert not baseline.same_command(["app", "-x"], ["app", "-y"])
    assert not baseline.same_command(["app"], ["app", "-y"])
    assert not baseline.same_command(["app"], ["other"])


def test_differences_of_machines() -> None:
    here = machine.describe()
    assert baseline.differences(here, here) == []
    # As the kernel may have it after a boot.
    assert baseline.differences(here | {"memory_kib": int(here["memory_kib"]) + 4}, here) == []
    assert baseline.differences({"cpus": 64, "cpu": here["cpu"]}, here | {"cpus": 2}) == [
        "cpus was 64 and is 2"
    ]
    assert baseline.differences({"memory_kib": 1030}, {"memory_kib": 1000}) == [
        "memory_kib was 1030 and is 1000"
    ]
    # No boot changes the number of CPUs, however many there are.
    assert baseline.differences({"cpus": 128}, {"cpus": 126}) == ["cpus was 128 and is 126"]


@pytest.mark.parametrize(
    ("text", "fraction"),
    [("5%", 0.05), ("5 %", 0.05), ("0.05", 0.05), (".5", 0.5), ("250%", 2.5), ("0", 0.0)],
)
def test_percentages(text: str, fraction: float) -> None:
    assert baseline.read_limit(text) == pytest.approx(fraction)


def test_changes_are_told_as_percentages() -> None:
    assert [baseline.percent(ratio) for ratio in (1.074, 0.979, 1.25, 12.4, 1.0002, None)] == [
        *("+7.4 %", "-2.1 %", "+25 %", "x12", "0 %", "∞"),
    ]


def test_metrics_are_completed() -> None:
    def complete(text: str) -> list[str]:
        shell = ShellComplete(cli, {}, "calm", "_CALM_COMPLETE")
        return [item.value for item in shell.get_completions(["compare", "--fail-on"], text)]

    assert "time" in complete("")
    assert complete("time,peak") == ["time,peak_rss_kib"]


# What it takes is NAP seconds: see `naps`.
SLEEP = ("sh", "-c", ": $NAP")


@pytest.fixture(autouse=True)
def naps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are run, but their wall time is what their environment says, however busy the machine is."""

    def measured(words: Sequence[str], variables: Mapping[str, str], **more: Any) -> measure.Measurement:
        run = measure.measure(words, variables, **more)
        return replace(run, wall_s=float({**os.environ, **variables}.get("NAP", run.wall_s)))

    monkeypatch.setattr(comparison, "measure", measured)


MEASURED: list[str] = []


@pytest.fixture
def measured(calm: Calm, tmp_path: Path) -> Path:
    """Once for all tests, and each has a copy."""
    path = tmp_path / "base.json"
    if not MEASURED:
        words = ("-a", "glibc", "-n", "3", "--json", path, "--", *SLEEP)
        assert calm("compare", *words, env={"NAP": "0.02"}).returncode == 0
        MEASURED.append(path.read_text())
    path.write_text(MEASURED[0])
    return path


def read(path: Path) -> ComparisonDocument:
    return documents.read(str(path), ComparisonDocument)


def test_the_file_names_what_wrote_it(measured: Path) -> None:
    data = json.loads(measured.read_text())
    assert (data["schema"], data["version"]) == ("calm-comparison", 1)
    assert data["machine"] == machine.describe()
    assert read(measured).command == list(SLEEP)


def test_a_build_that_became_slower_fails_and_keeps_its_baseline(
    calm: Calm, measured: Path, tmp_path: Path
) -> None:
    before, other = measured.read_text(), tmp_path / "new.json"
    gate = ("compare", "-a", "glibc", "-n", "3", "--baseline", measured, "--fail-over", "50%")
    slow = {"NAP": "0.3"}
    done = calm(*gate, "--json", measured, "--", *SLEEP, env=slow)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "worse by more than 50 %" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"FAIL: 1 of 3 checks against {measured} is worse by more than 50 % for certain: ")
    assert "glibc: wall time" in last
    assert "stays as it was" in done.stderr
    assert measured.read_text() == before
    # Another file takes it; with that one as the baseline the same build passes, and replaces it.
    done = calm(*gate, "--json", other, "--", *SLEEP, env=slow)
    assert done.returncode == 3
    regression = json.loads(other.read_text())["regression"]
    assert regression["failed"]
    assert {each["metric"]: each["verdict"] for each in regression["checks"]}["wall_s"] == "worse"
    gate = ("compare", "-a", "glibc", "-n", "3", "--baseline", other, "--fail-over", "50%")
    done = calm(*gate, "--json", other, "--", *SLEEP, env=slow)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("PASS: none of 3 checks")
    assert not json.loads(other.read_text())["regression"]["failed"]


def test_what_is_worse_does_not_replace_its_baseline_where_nothing_can_fail_either(
    calm: Calm, measured: Path
) -> None:
    before = measured.read_text()
    gate = ("compare", "-a", "glibc", "-n", "3", "--baseline", measured, "--fail-on", "time")
    done = calm(*gate, "--json", measured, "--", *SLEEP, env={"NAP": "0.3"})
    assert done.returncode == 0, done.stderr
    assert "base.json stays as it was: wall time of glibc is worse\n" in done.stderr
    assert measured.read_text() == before


def test_only_the_metrics_named_can_fail(calm: Calm, measured: Path) -> None:
    gate = ("compare", "-a", "glibc", "-n", "3", "--baseline", measured)
    slow = {"NAP": "0.3"}
    done = calm(*gate, "--fail-over", "50%", "--fail-on", "rss", "--", *SLEEP, env=slow)
    assert done.returncode == 0, done.stdout
    assert "PASS: none of 1 check " in done.stdout
    # Without a limit the change is shown, and fails nothing.
    done = calm(*gate, "--fail-on", "time", "--", *SLEEP, env=slow)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 of 1 check against ")


def test_against_the_first_allocator_of_the_same_run(calm: Calm) -> None:
    specs = ("-a", "glibc:NAP=0.02,glibc:NAP=0.3", "-n", "3")
    done = calm("compare", *specs, "--fail-over", "50%", "--fail-on", "time", "--", *SLEEP)
    assert done.returncode == 3, done.stdout
    assert done.stdout.splitlines()[-1].startswith("FAIL: 1 of 1 check against glibc:NAP=0.02 is worse")


def test_a_metric_that_was_asked_for_must_be_there(calm: Calm, measured: Path) -> None:
    gate = ("compare", "-a", "glibc", "-n", "3", "--baseline", measured, "--fail-over", "50%", "--syscalls")
    done = calm(*gate, "--fail-on", "madvise", "--", *SLEEP, env={"NAP": "0.02"})
    assert done.returncode == 1, done.stdout
    assert "--fail-on madvise: could not be compared" in done.stderr
    assert "not compared: no figure in the baseline" in done.stdout


def test_a_failure_comes_before_a_regression(calm: Calm, measured: Path) -> None:
    gate = ("compare", "-a", "glibc", "--baseline", measured, "--fail-over", "5%", "--any-command")
    assert calm(*gate, "--", "false").returncode == 1


def test_what_the_baseline_lacks_is_said(calm: Calm, measured: Path) -> None:
    gate = ("compare", "-n", "3", "--baseline", measured, "--fail-over", "90%")
    done = calm(*gate, "-a", "glibc,glibc:X=1", "--", *SLEEP, env={"NAP": "0.02"})
    assert f"calm: glibc:X=1 is not in {measured}, which has glibc: not compared" in done.stderr
    assert "of 3 checks" in done.stdout
    done = calm(*gate, "-a", "glibc:X=1", "--", *SLEEP, env={"NAP": "0.02"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "has none of these allocators: it has glibc" in done.stderr


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_run_that_lacks_something_does_not_replace_its_baseline(calm: Calm, measured: Path) -> None:
    """The next one would find nothing to be held against, and pass."""
    rewrite(measured, lambda data: data["allocators"].append(data["allocators"][0] | {"label": "other"}))
    before = measured.read_text()
    gate = ("compare", "-a", "glibc", "-n", "1", "--baseline", measured, "--json", measured, "--", *SLEEP)
    done = calm(*gate, env={"NAP": "0.02"})
    assert done.returncode == 0, done.stderr
    assert "base.json stays as it was: this run has no other\n" in done.stderr
    assert measured.read_text() == before
    # Nor one without a figure that the file has, as shootdowns without root.
    run = read(measured)
    checks = [check("glibc", SHOOTDOWNS, [None], [9.0], 0.05), check("glibc", WALL, [1.0], [1.0], 0.05)]
    run.regression = Regression(against="base.json", limit=0.05, checks=checks)
    reason = baseline.why_kept(read(measured), run, 0)
    assert reason == "this run has no TLB shootdowns begun of glibc"
    checks = [check("glibc", SHOOTDOWNS, [None], [], 0.05)]
    run.regression = Regression(against="base.json", limit=0.05, checks=checks)
    assert baseline.why_kept(read(measured), run, 0) is None


def test_another_machine_is_warned_of(calm: Calm, measured: Path) -> None:
    rewrite(measured, lambda data: data["machine"].update(cpus=999))
    gate = ("compare", "-a", "glibc", "-n", "1", "--baseline", measured, "--", *SLEEP)
    done = calm(*gate, env={"NAP": "0.02"})
    assert done.returncode == 0
    assert "from another machine, or from before it changed: cpus was 999 and is" in done.stderr


def test_a_busy_machine_is_warned_of(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    rewrite(measured, lambda data: data.update(machine={}))
    for load, words in ((3.9, ""), (4.5, "calm: the load average is 4.5 on 8 CPUs")):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        baseline.read(str(measured), ["glibc"], SLEEP, any_command=False)
        printed = capsys.readouterr().err
        assert printed.startswith(words) if words else printed == ""


def document(**fields: object) -> str:
    """A comparison without runs, or what becomes of it by other fields."""
    empty = {"machine": {}, "command": ["a"], "rounds": 1, "interrupted_by": None, "notes": [], "how": {}}
    head = {"schema": "calm-comparison", "version": 1, "allocators": []}
    return json.dumps(head | empty | fields)


def one_run(field: str, value: str) -> str:
    """A comparison of one run with this in a field of it."""
    fields = msgspec.to_builtins(measure.measure(["true"], groups=[])) | {field: "VALUE"}
    side = {"label": "a", "library": None, "environment": {}, "failure": None, "median": {}, "ratio": {}}
    return document(allocators=[side | {"runs": [fields]}]).replace('"VALUE"', value)


WALL_IS = partial(one_run, "wall_s")
NOT_WHOLE = "is not a whole calm-comparison: "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lambda: "", "is not JSON, or was cut short"),
        (lambda: document()[:-9], "is not JSON, or was cut short"),
        (lambda: "[" * 100_000, "is not JSON, or was cut short"),
        (lambda: "[]", "is no document of calm, and calm-comparison is needed"),
        (lambda: '{"runs": []}', "is no document of calm, and calm-comparison is needed"),
        (lambda: document(schema="calm-stat"), "of the schema calm-stat, and calm-comparison is needed"),
        (lambda: document(version=2), "has version 2 of calm-comparison; this calm reads 1"),
        (lambda: document(how=None), NOT_WHOLE),
        (lambda: document(command=[]), NOT_WHOLE),
        (lambda: document(command="a"), NOT_WHOLE),
        (document, "no complete round"),
        *((partial(WALL_IS, value), NOT_WHOLE) for value in ("NaN", '"long"', "true", "-1", "1e999")),
        (partial(WALL_IS, f"1{'0' * 400}"), NOT_WHOLE),
        (partial(one_run, "counters", '{"shootdowns": {"value": -1}}'), NOT_WHOLE),
    ],
)
def test_broken_files(tmp_path: Path, text: Callable[[], str], message: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(text())
    with pytest.raises(CalmError) as raised:
        baseline.read(str(path), ["a"], ["a"], any_command=False)
    assert message in str(raised.value)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--baseline", "/no/such", "--", *SLEEP), "cannot read /no/such: No such file"),
        (("--baseline", "/", "--", *SLEEP), "cannot read /: Is a directory"),
        (("--fail-over", "5", "--", *SLEEP), "5 may mean 5 % or 5 times"),
        (("--fail-over", "-5%", "--", *SLEEP), "'-5%' is no percentage"),
        (("--fail-over", "five", "--", *SLEEP), "'five' is no percentage"),
        (("--fail-over", "5%", "--", *SLEEP), "needs --baseline, or a second allocator"),
        (("--fail-on", "time", "--", *SLEEP), "--fail-on has no effect without"),
        (("--any-command", "--", *SLEEP), "--any-command has no effect without"),
        (("--baseline", "BASE", "--fail-on", "speed", "--", *SLEEP), "no such metric: 'speed'"),
        (("--baseline", "BASE", "--fail-on", "madvise", "--", *SLEEP), "counted only with --syscalls"),
        (("--baseline", "BASE", "--", "sh", "-c", "true"), "is of another command (sh -c ': $NAP')"),
    ],
)
def test_bad_usage_gets_one_line(
    calm: Calm, measured: Path, arguments: tuple[str, ...], message: str
) -> None:
    words = [str(measured) if word == "BASE" else word for word in arguments]
    done = calm("compare", "-a", "glibc", *words, env={"NAP": "0.02"})
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("calm: ")
    assert done.stderr.count("\n") == 1
