import json
import math
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from bench_helpers import LABELS, RATE, STEADY, by_time, made_up, markdown, row, side
from calm_helpers import ROOT, Calm, without_runs
from rich.console import Console
from waiting import wait_until

from calm.core import documents, proc, processes, statistics
from calm.core.allocators import find_library
from calm.core.errors import CalmError
from calm.core.progress import RoundsBar
from calm.core.rounds import orders, williams_square
from research.bench import analysis, command, picture, runner, tables, workloads
from research.bench.analysis import AVERAGE, PEAK, TIME, analyse
from research.bench.cases import Case, Prepared
from research.bench.results import COST, Metric, Results, Run, Side, Subject, cost_s, saved
from research.statistics import geometric_mean_of_ratios, span_of_medians

LATENCY = Metric("ns", "ns", higher_is_better=False)


def test_ratios_are_to_the_best_of_the_row() -> None:
    found = analysis.rank(by_time("a", 3.0, 1.5, 1.0), TIME)
    assert {label: ratio.value for label, ratio in found.ratios.items()} == pytest.approx(
        {"glibc": 3.0, "calmalloc": 1.5, "jemalloc": 1.0}
    )
    assert found.best(LABELS) == "jemalloc"
    assert found.best(LABELS[:2]) == "calmalloc"
    assert not found.insensitive


def test_a_metric_of_which_more_is_better_is_turned_around() -> None:
    rates = [side(label, 1.0, metric=rate) for label, rate in zip(LABELS, (100.0, 400.0, 200.0), strict=True)]
    rated = row("a", *rates, metric=RATE)
    found = analysis.rank(rated, TIME)
    assert {label: ratio.value for label, ratio in found.ratios.items()} == pytest.approx(
        {"glibc": 4.0, "calmalloc": 1.0, "jemalloc": 2.0}
    )
    # What is shown is the figure as it was printed.
    assert tables._best(found) == "400 /s"
    assert [rated.median(label, "metric") for label in LABELS] == [100.0, 400.0, 200.0]
    latencies = analysis.rank(row("a", *rates, metric=LATENCY), TIME)
    assert [ratio.value for ratio in latencies.ratios.values()] == pytest.approx([1.0, 4.0, 2.0])


def test_rows_that_tell_nobody_apart_are_in_no_mean() -> None:
    noisy = (0.9, 1.0, 1.1)
    quiet = row("quiet", *(side(label, 2.0 + 0.02 * n, spread=noisy) for n, label in enumerate(LABELS)))
    # Noise that is everybody's own, not the round's.
    for each, shift in zip(quiet.sides, ((0, 1, 2), (1, 2, 0), (2, 0, 1)), strict=True):
        each.runs = [Run(number, each.runs[index].figures) for number, index in enumerate(shift, 1)]
    found = analyse(made_up(by_time("told", 4.0, 1.0, 2.0), quiet))
    assert [each.row.name for each in found.ranking(TIME, sensitive=True)] == ["told"]
    assert [each.row.name for each in found.ranking(TIME, sensitive=False)] == ["quiet"]
    mean = found.means[0]
    assert mean.rows == ("told",)
    assert {label: ratio.value for label, ratio in mean.to_best.items()} == pytest.approx(
        {"glibc": 4.0, "calmalloc": 1.0, "jemalloc": 2.0}
    )


def test_chance_is_called_so_nearly_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 500)
    generator = np.random.default_rng(7)
    for allocators, rounds in ((2, 5), (8, 5), (8, 9)):
        chance = [
            span_of_medians(
                np.exp(
                    generator.normal(0, 0.03, (allocators, rounds)) + generator.normal(0, 0.1, rounds)
                ).tolist()
            ).is_chance
            for _ in range(100)
        ]
        assert sum(chance) >= 85, (allocators, rounds)


def test_one_that_differs_is_enough_and_three_rounds_are_needed() -> None:
    generator = np.random.default_rng(7)
    samples = np.exp(generator.normal(0, 0.01, (8, 5)))
    samples[3] *= 1.2
    span = span_of_medians(samples.tolist())
    assert not span.is_chance
    assert span.medians == pytest.approx(1.2, rel=0.03)
    assert span_of_medians([[1.0, 1.0], [1.0, 1.0]]).by_chance is None
    # What never varies is told apart by anything at all.
    assert not span_of_medians([[1.0] * 5, [1.001] * 5]).is_chance
    assert span_of_medians([[1.0] * 5, [1.0] * 5]).is_chance


def test_geometric_means_with_and_without_listing1() -> None:
    found = analyse(
        made_up(
            by_time("listing1", 64.0, 1.0, 1.0, family="listing1"),
            by_time("a", 2.0, 4.0, 1.0),
            by_time("b", 4.0, 1.0, 8.0),
        )
    )
    every, without = found.means[:2]
    assert (every.scope, without.scope) == ("all", "without listing1")
    assert every.to_best["glibc"].value == pytest.approx((64 * 2 * 4) ** (1 / 3))
    assert without.to_best["glibc"].value == pytest.approx(math.sqrt(8))
    assert without.subject_to["glibc"].value == pytest.approx(math.sqrt(2 * 0.25))
    assert without.subject_to["jemalloc"].value == pytest.approx(math.sqrt(4 * 0.125))
    # In each row another peer is the best: 1 in the first, 4 in the second.
    assert without.subject_to_best_peer.value == pytest.approx(math.sqrt(4 * 0.25))
    low, high = without.subject_to["glibc"].low, without.subject_to["glibc"].high
    assert low is not None
    assert high is not None
    assert low <= math.sqrt(0.5) <= high


def test_a_geometric_mean_of_nothing() -> None:
    assert geometric_mean_of_ratios([]).value is None
    assert geometric_mean_of_ratios([([2.0], [1.0])]).low is None


def test_worst_rows() -> None:
    found = analyse(made_up(by_time("a", 2.0, 1.5, 1.0), by_time("b", 9.0, 1.0, 2.0)))
    worst = {each.label: each for each in found.worst["time"]}
    assert (worst["glibc"].row, worst["glibc"].against) == ("b", "calmalloc")
    assert worst["glibc"].ratio == pytest.approx(9.0)
    assert (worst["calmalloc"].row, worst["calmalloc"].against) == ("a", "jemalloc")
    assert worst["calmalloc"].ratio == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("time_s", "peak", "expected"),
    [
        (0.90, 900, ["jemalloc"]),
        (0.97, 970, ["jemalloc"]),
        (0.99, 900, []),  # faster, but not by more than the margin
        (0.90, 990, []),
        (0.50, 1001, []),  # faster and larger
        (1.10, 500, []),
    ],
)
def test_rows_that_are_lost_outright(time_s: float, peak: float, expected: list[str]) -> None:
    sides = (side("glibc", 2.0, 900), side("calmalloc", 1.0, 1000), side("jemalloc", time_s, peak))
    found = analyse(made_up(row("a", *sides)))
    assert [each.peer for each in found.beaten] == expected
    text = "\n".join(tables.findings(found))
    assert ("jemalloc is both faster and smaller" in text) == bool(expected)


def test_rows_that_are_lost_come_first_and_name_the_winners() -> None:
    won = row("won", side("calmalloc", 1.0, 1000), side("glibc", 2.0, 1500), side("jemalloc", 1.5, 1100))
    lost = row("lost", side("calmalloc", 1.0, 1000), side("glibc", 2.0, 700), side("jemalloc", 0.5, 900))
    [grid] = tables.grids(analyse(made_up(won, lost)), ["peers"])
    assert [[cells[0], *cells[1].split()[:2], *cells[2].split()[:2], cells[3]] for cells in grid.rows] == [
        ["lost", "jemalloc", "2.00", "glibc", "1.43", "jemalloc"],
        ["won", "jemalloc", "0.67", "jemalloc", "0.91", ""],
    ]


def test_no_row_is_beaten_by_chance() -> None:
    def beaten(*spreads: tuple[float, float, float]) -> int:
        sides = [
            side(label, time_s, peak, spread)
            for label, time_s, peak, spread in zip(
                LABELS, (1.0, 1.0, 0.9), (1000, 1000, 900), spreads, strict=True
            )
        ]
        return len(analyse(made_up(row("a", *sides))).beaten)

    assert beaten(STEADY, STEADY, STEADY) == 1
    assert beaten((0.7, 1.0, 1.4), (1.4, 1.0, 0.7), (1.0, 0.7, 1.4)) == 0


def test_a_version_that_was_built_from_a_checkout_has_its_date() -> None:
    results = made_up(by_time("a", 2.0, 1.0, 3.0))
    results.allocators = [
        Subject("glibc", version="2.36"),
        Subject("jemalloc", version="5.3.1-47-g1", date="2026-05-18"),
    ]
    assert tables.conditions(results)[0] == "glibc 2.36, jemalloc 5.3.1-47-g1 (2026-05-18)."


def test_own_variants_are_no_peers() -> None:
    labels = ("glibc", "calmalloc", "calmalloc:CALM_OPTIONS=memory_per_cpu=1", "ptlbmalloc2")
    found = analyse(made_up(row("a", *(side(label, 1.0) for label in labels)), labels=labels))
    assert (found.subject, found.peers) == ("calmalloc", ["glibc"])


def test_a_failure_is_shown_and_leaves_the_row_to_the_others() -> None:
    one = by_time("a", 2.0, 1.0, 3.0)
    one.sides[2] = Side("jemalloc", one.sides[2].runs, "killed by SIGSEGV (11)", 2)
    found = analyse(made_up(one, by_time("b", 3.0, 1.0, 2.0)))
    text = markdown(found, tables.KINDS)
    assert "| a | 1.000 s | 2.00 | 1.00 | failed |" in text
    assert "failed: a under jemalloc, in round 2: killed by SIGSEGV (11)" in text
    assert "not run: absent: it is not on this machine" in text
    mean = found.means[0]
    assert (mean.to_best["jemalloc"].n, mean.to_best["glibc"].n) == (1, 2)
    assert "2.00*" in text
    assert found.shootdowns == {"glibc": (20.0, 2), "calmalloc": (20.0, 2), "jemalloc": (10.0, 1)}


def test_the_summary_says_what_the_tables_close_with() -> None:
    one = by_time("a", 2.0, 1.0, 3.0)
    one.sides[2] = Side("jemalloc", one.sides[2].runs, "killed by SIGSEGV (11)", 2)
    text = markdown(analyse(made_up(one, by_time("b", 9.0, 2.0, 3.0))), ["summary"])
    assert "| time | 3.00 | 1.00 | 1.50* |" in text
    assert "| **worst time of a row** | 4.50 | 0.67 | 1.50 |" in text
    assert "| **shootdowns, sum** | 20 | 20 | 10 |" in text
    assert "over fewer rows" in text


def test_latencies_of_servers_have_their_tables() -> None:
    sides = [
        side(label, 1.0, p99_s=0.002 * factor, p99_9_s=0.03 * factor)
        for factor, label in enumerate(LABELS, 1)
    ]
    text = markdown(analyse(made_up(row("nginx", *sides), by_time("b", 9.0, 2.0, 3.0))), ["latency"])
    assert "P99 latency of requests (medians):" in text
    assert "P99.9 latency of requests (medians):" in text
    assert "| nginx | 2.00 ms | 4.00 ms |" in text
    assert "| nginx | 30.00 ms | 60.00 ms |" in text
    assert "| b |" not in text
    assert markdown(analyse(made_up(by_time("b", 9.0, 2.0, 3.0))), ["latency"]).count("|") == 0


def test_without_tracepoints_the_systems_interrupts_are_shown() -> None:
    sides = [side(label, 1.0, shootdowns=1.0, interrupts_system_wide=7.0) for label in ("glibc", "calmalloc")]
    for each in sides:
        for run in each.runs:
            run.figures["shootdowns"] = None
    data = made_up(row("a", *sides), labels=("glibc", "calmalloc"))
    data.how["shootdowns"] = "not counted: it needs root"
    found = analyse(data)
    assert found.shootdown_key == "interrupts_system_wide"
    text = markdown(found, ["shootdowns"])
    assert "system-wide" in text
    assert "not counted: it needs root" in text


def test_tables_fit_on_a_terminal_of_a_hundred_columns() -> None:
    labels = ("glibc", "calmalloc", "jemalloc", "mimalloc", "snmalloc", "rpmalloc", "tcmalloc", "gperftools")
    made = made_up(
        row("listing1-reversed", *(side(label, 1.0 + n) for n, label in enumerate(labels))), labels=labels
    )
    console = Console(width=100, force_terminal=False, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    for grid in tables.grids(analyse(made), tables.KINDS):
        with console.capture() as capture:
            console.print(tables._rich(grid))
        lines = capture.get().splitlines()
        assert "…" not in capture.get(), grid.title
        assert len([line for line in lines if line.strip()]) == 1 + len(grid.rows) + len(grid.closing), (
            grid.title
        )
        assert max(map(len, lines)) <= 100


def test_every_order_is_fair() -> None:
    for n in range(1, 10):
        square = williams_square(n)
        assert len(square) == (n if n % 2 == 0 else 2 * n)
        assert all(sorted(each) == list(range(n)) for each in square)
        for place in range(n):
            taken = [each[place] for each in square]
            assert {taken.count(item) for item in range(n)} == {len(square) // n}
        pairs = [pair for each in square for pair in pairwise(each)]
        assert len({pairs.count(pair) for pair in pairs}) <= 1
        assert len(set(pairs)) == n * (n - 1)
    assert orders("abc", 7, 1, "x") == orders("abc", 7, 1, "x")
    assert orders("abc", 7, 1, "x") != orders("abc", 7, 1, "y")


def test_time_left_is_from_what_the_same_runs_took() -> None:
    with RoundsBar(lines=False) as bar:
        bar.begin([("a", "x"), ("a", "y")], 3)
        assert bar.time_left == "time left not known yet"
        bar.done("a", "x", 10.0)
        assert bar.time_left == "at least 20 s left"
        bar.done("a", "y", 20.0)
        assert bar.time_left == "60 s left"
        bar.failed("a", "y", "exit code 1")
        assert bar.time_left == "20 s left"


def test_the_front_is_whom_nobody_beats() -> None:
    assert picture.front([(1, 3), (2, 2), (2.5, 2.5), (3, 1), (4, 1)]) == [(1, 3), (2, 2), (3, 1)]
    assert picture.front([]) == []


def test_results_survive_their_file(tmp_path: Path) -> None:
    made = made_up(by_time("a", 3.0, 1.0, 2.0, metric=LATENCY))
    made.rows[0].command = [f"{tmp_path}/a", f"{tmp_path}-other", f"{tmp_path}/inputs/b"]
    made.rows[0].environment = {"PYTHONPATH": f"{tmp_path}:{tmp_path}/c:{tmp_path}"}
    made.messages = {"calmalloc": ["calmalloc: no"]}
    made.analysis = analyse(made).conclusions()
    hidden = {f"{tmp_path}/inputs": "INPUTS", str(tmp_path): "."}
    path = tmp_path / "out.json"
    path.write_text(documents.text(saved(made, hidden)))
    read = documents.read(str(path), Results)
    assert read.rows[0].command == ["a", f"{tmp_path}-other", "INPUTS/b"]
    assert read.rows[0].environment == {"PYTHONPATH": ".:c:."}
    made.rows[0].command, made.rows[0].environment = read.rows[0].command, read.rows[0].environment
    assert read == made


@pytest.mark.parametrize("kept", ["ratios", "medians"])
def test_a_file_without_runs_is_shown_alike(tmp_path: Path, kept: str) -> None:
    failed = by_time("b", 1.0, 2.0, 3.0)
    failed.sides[2] = Side("jemalloc", failed.sides[2].runs, "killed by SIGSEGV (11)", 2)
    made = made_up(by_time("a", 3.0, 1.0, 2.0, metric=LATENCY), failed, by_time("c", 1.0, 1.3, 1.0))
    shown = markdown(analyse(made), tables.KINDS)
    path = tmp_path / "out.json"
    path.write_text(without_runs(documents.text(saved(made, {})), medians_only=kept == "medians"))
    read = documents.read(str(path), Results)
    assert not any(each.runs for row in read.rows for each in row.sides)
    assert markdown(analyse(read), tables.KINDS) == shown
    assert picture.places(analyse(read)) == picture.places(analyse(made))
    assert picture.points(analyse(read), "glibc") == picture.points(analyse(made), "glibc")
    # It is as whole the second time.
    path.write_text(without_runs(documents.text(saved(read, {}))))
    assert documents.read(str(path), Results) == read


def test_every_workload_says_how_it_is_compared(tmp_path: Path) -> None:
    names = [case.name for case in command.all_cases()]
    assert len(set(names)) == len(names)
    there = [case for case in workloads.CASES if runner.obstacle(case) is None]
    assert {"listing1", "listing1-touched", "larson", "xmalloc-test", "glibc-simple"} <= {
        case.name for case in there
    }
    for case in there:
        prepared = case.prepare(tmp_path)
        assert os.access(prepared.command[0], os.X_OK)
        assert case.family in ("workload", "listing1", "stand-in", "periodic")
        # The metric is one that the workload prints, and its source names it; or the runner's own.
        if case.metric and case.metric != COST:
            name = Path(prepared.command[0]).name
            assert f'\\"{case.metric.key}\\"' in (ROOT / "workloads" / f"{name}.c").read_text()


# Cases for real runs, in the place of the real programs.
DRIVER = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}]
from research.bench import command, programs
from research.bench.cases import Case, Prepared
from research.bench.results import Metric
from calm.cli import main
command.inputs_folder = lambda: Path({folder!r})
def shell(script, **more):
    return lambda folder: Prepared(("sh", "-c", script), folder, **more)
RATE = Metric("rate", "/s", higher_is_better=True)
programs.CASES = (
    Case("nap", "program", "sleeps", shell("sleep 0.05"), quick=True),
    Case("rate", "program", "prints", shell('echo noise; echo "{{\\\\"rate\\\\": $RATE}}"'), RATE),
    Case("silent", "program", "prints nothing", shell("true"), RATE),
    Case("crash", "program", "crashes",
         shell('test "$RATE" = 1 || {{ echo "it broke" >&2; kill -SEGV $$; }}')),
    Case("hang", "program", "never ends",
         shell("trap '' TERM INT; sleep 7700.{own} & sleep 7700.{own}; wait")),
    Case("daemon", "program", "leaves one behind", shell("setsid sleep 7800.{own} & sleep 0.02")),
    Case("endless", "program", "is stopped", shell("echo x >>log; sleep 0.1")),
    Case("absent", "program", "is not here", shell("true"), program="no-such-program", package="nowhere"),
    Case("broken", "program", "has no inputs", lambda folder: (folder / "no").read_text()),
    Case("server", "server", "answers", lambda folder: Prepared(
        (sys.executable, {server!r}, "serve"), folder,
        client=(sys.executable, {server!r}, "drive")), RATE, resident_key="bytes"),
    Case("refused", "server", "its client gives up", lambda folder: Prepared(
        (sys.executable, {server!r}, "serve"), folder, client=("sh", "-c", "echo sorry >&2; exit 3")), RATE),
)
"""

# Two requests, and the word to end.
SERVER = """
import os, socket, sys, time
path = "socket"
if sys.argv[1] == "serve":
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        peer = listener.accept()[0]
        word = peer.recv(10)
        peer.send(os.environ.get("RATE", "none").encode())
        if word == b"end":
            sys.exit(0)
assert "RATE" not in os.environ
for word in (b"hello", b"end"):
    while True:
        talk = socket.socket(socket.AF_UNIX)
        try:
            talk.connect(path)
            break
        except OSError:
            time.sleep(0.01)
    talk.send(word)
    answer = talk.recv(10).decode()
print('{"rate": %s, "bytes": 2097152}' % answer)
"""

Bench = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cases(tmp_path: Path) -> str:
    """Python code, before calm begins."""
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    return DRIVER.format(root=str(ROOT), folder=str(tmp_path / "inputs"), server=str(server), own=os.getpid())


@pytest.fixture
def bench(calm: Calm, cases: str) -> Bench:
    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return calm("bench", "run", "--no-touch", *arguments, set_up=lambda: exec(cases, {}))

    return run


TWO = ("-a", "glibc:RATE=1,glibc:RATE=4")


def sides_of(path: Path) -> Mapping[str, list[dict[str, Any]]]:
    return {each["name"]: each["sides"] for each in json.loads(path.read_text())["rows"]}


def test_runs_and_reports(calm: Calm, bench: Bench, tmp_path: Path) -> None:
    out, drawing = tmp_path / "out.json", tmp_path / "out.svg"
    began = time.monotonic()
    done = bench(*TWO, "-n", 3, "--json", out, "--plot", drawing, "nap", "rate")
    took_s = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert "time: each to the best of its row" in done.stdout
    assert "Medians of 3 interleaved rounds after one of warm-up" in done.stdout
    assert done.stderr.splitlines()[0].startswith("warm-up, nap: ")
    assert "left" in done.stderr.splitlines()[0]
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")
    report = json.loads(out.read_text())
    assert report["machine"]["kernel"] == os.uname().release
    assert report["machine"]["transparent_huge_pages"]
    assert [each["label"] for each in report["allocators"]] == ["glibc:RATE=1", "glibc:RATE=4"]
    assert report["allocators"][0]["version"]
    sides = sides_of(out)
    assert [[run["round"] for run in each["runs"]] for each in sides["nap"]] == [[1, 2, 3]] * 2
    for run in sides["nap"][0]["runs"]:
        assert 0.05 < run["figures"]["wall_s"] < took_s
        assert run["figures"]["peak_rss_kib"] > 500
        assert run["figures"]["minor_faults"] > 0
    assert [run["figures"]["metric"] for run in sides["rate"][1]["runs"]] == [4.0] * 3
    (rate,) = (each for each in report["rows"] if each["name"] == "rate")
    assert rate["to_best"]["time"]["glibc:RATE=1"][0] == pytest.approx(4.0)
    assert report["analysis"]["subject"] == "glibc:RATE=1"
    # The same again from the file.
    again = calm("bench", "report", out)
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
    markdown = calm("bench", "report", out, "--markdown", "--table", "time")
    assert "| rate | 4 /s | 4.00 | 1.00 |" in markdown.stdout
    assert "Peak RSS" not in markdown.stdout


def test_messages_of_calmalloc_are_reported_once(calm: Calm, bench: Bench, tmp_path: Path) -> None:
    if not find_library("calmalloc"):
        pytest.skip("calmalloc is not built")
    out, wrong = tmp_path / "out.json", "calmalloc:CALM_OPTIONS=nosuch=1;RATE=1"
    done = bench("-a", f"glibc:RATE=1,{wrong}", "-n", 2, "--json", out, "nap", "rate")
    assert done.returncode == 0, done.stderr
    (line,) = json.loads(out.read_text())["messages"][wrong]
    assert line.startswith("calmalloc: ")
    assert "nosuch" in line
    assert done.stdout.count(f"note: {wrong}: {line}\n") == 1
    assert calm("bench", "report", out).stdout == done.stdout


def test_failures_are_told_and_stop_nothing(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = bench(*TWO, "-n", 2, "--json", out, "crash", "silent", "nap", "absent", "broken")
    assert done.returncode == 1
    sides = sides_of(out)
    good, bad = sides["crash"]
    assert (good["failure"], len(good["runs"])) == (None, 2)
    assert (bad["failed_round"], len(bad["runs"])) == (0, 0)
    assert bad["failure"] == "killed by SIGSEGV (11) (it said: it broke)"
    assert sides["silent"][0]["failure"] == "it printed no rate"
    assert len(sides["nap"][1]["runs"]) == 2
    assert "crash under glibc:RATE=4, in the warm-up: killed by SIGSEGV (11)" in done.stdout
    assert (
        "not run: absent: no-such-program is not on this machine: install the package nowhere" in done.stdout
    )
    assert "not run: broken: its inputs could not be made" in done.stdout
    assert set(sides) == {"crash", "silent", "nap"}


def _alive(word: str) -> bool:
    found = subprocess.run(["pgrep", "-f", f"^sleep {word}$"], capture_output=True, check=False)
    return found.returncode == 0


def test_what_takes_too_long_is_killed_with_all_it_started(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = bench("-a", "glibc", "-n", 1, "--json", out, "--timeout", "1s", "hang")
    assert done.returncode == 1
    assert "timeout after" in sides_of(out)["hang"][0]["failure"]
    assert not _alive(f"7700.{os.getpid()}")


def test_what_a_program_leaves_behind_is_killed(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = bench("-a", "glibc", "-n", 1, "--json", out, "daemon")
    assert done.returncode == 0, done.stderr
    assert sides_of(out)["daemon"][0]["failure"] is None
    assert not _alive(f"7800.{os.getpid()}")


def test_a_server_and_its_client(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = bench(*TWO, "-n", 2, "--json", out, "server", "refused")
    assert done.returncode == 1
    sides = sides_of(out)
    assert [run["figures"]["metric"] for run in sides["server"][1]["runs"]] == [4.0, 4.0]
    assert [run["figures"]["resident_kib"] for run in sides["server"][0]["runs"]] == [2048.0] * 2
    assert "resident at the end" in done.stdout
    for each in sides["refused"]:
        assert each["failure"] == "client's exit code 3 (it said: sorry)"


def test_ctrl_c_keeps_what_is_complete(cases: str, tmp_path: Path) -> None:
    out, log = tmp_path / "out.json", tmp_path / "inputs" / "endless" / "log"
    arguments = ("bench", "run", "--no-touch", *TWO, "-n", "500", "--json", str(out), "endless")
    process = subprocess.Popen(
        [sys.executable, "-c", f"{cases}main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    # In the middle of the third round that counts.
    wait_until(lambda: log.exists() and len(log.read_text()) >= 2 * 7)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert "of 500 rounds" in stderr
    assert "Traceback" not in stderr
    assert "time: each to the best of its row" in stdout
    assert json.loads(out.read_text())["interrupted_by"] == signal.SIGINT
    done = [len(each["runs"]) for each in sides_of(out)["endless"]]
    assert done[0] == done[1] >= 2


def test_the_cost_of_a_run_is_time_and_memory() -> None:
    figures = {"user_s": 1.0, "system_s": 0.5, "average_rss_kib": 2.0 * 1024 * 1024, "wall_s": 8.0}
    assert cost_s(figures) == pytest.approx(1.5 + 2 * 8 / 8)
    assert cost_s({**figures, "average_rss_kib": None}) is None


def test_the_periodic_suite_is_compared_by_cost() -> None:
    every = command.all_cases()
    chosen = command.choose(every, "periodic", [])
    assert len({case.name for case in chosen}) == len(chosen) >= 20
    assert all(case.metric == COST for case in chosen)
    assert {case.name for case in chosen}.isdisjoint(case.name for case in command.choose(every, "full", []))


def test_the_suite_of_stand_ins_is_they_and_vips() -> None:
    chosen = [case.name for case in command.choose(command.all_cases(), "stand-ins", [])]
    named = [name for name in chosen if name.endswith("-like")]
    assert len(named) == 6
    assert sorted(chosen) == sorted([*named, "vips"])
    # They are nobody's program: what they stand for is told, and that they do so.
    assert all(case.family == "stand-in" for case in command.all_cases() if case.name in named)
    quick = {case.name for case in command.choose(command.all_cases(), "quick", [])}
    assert quick.isdisjoint(named)
    assert set(chosen) < {case.name for case in command.choose(command.all_cases(), "full", [])}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("run", "no-such-case"), 2, "no such case: no-such-case"),
        (("run", "larson", "nope"), 2, "no such case: nope"),
        (("run", "-a", "nosuch", "larson"), 2, "unknown allocator 'nosuch'"),
        (("run", "-n", "0"), 2, "-n"),
        (("run", "--json", "larson"), 2, "--json larson: is a case"),
        (("run", "--suite", "huge"), 2, "--suite"),
        (("run", "--timeout", "0s"), 2, "--timeout"),
        (("run", "--timeout", "120"), 2, "--timeout"),
        (("run", "--table", "colour"), 2, "--table"),
        (("run", "--plot", "x.pdf"), 2, ".svg or .png"),
        (("run", "--plot", "/no/such/x.svg"), 1, "cannot write /no/such/x.svg"),
        (("run", "--json", "/", "larson"), 1, "cannot write /"),
        (("report", "/no/such.json"), 2, "cannot read /no/such.json"),
        (("report", "/etc/passwd"), 2, "not JSON"),
        (("list", "-o", "/no/such/list"), 1, "cannot write /no/such/list"),
        (("list", "--json", "/dev/full"), 1, "cannot write /dev/full: No space left on device"),
    ],
)
def test_bad_input_gets_one_line(calm: Calm, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = calm("bench", *arguments)
    assert result.returncode == code
    assert message.lower() in result.stderr.lower()
    assert result.stderr.startswith("calm: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "has version 99 of calm-suite; this calm reads 3"),
        ({"schema": "calm-paper"}, "is of the schema calm-paper, and calm-suite is needed"),
        ({"schema": None}, "no document of calm"),
        ({"rows": None}, "not a whole calm-suite"),
        ({"allocators": []}, "not a whole calm-suite: a has .*, which is not listed"),
        (
            {"rows": [{"name": "a", "family": "", "medians": {"wall_s": [1, 2, 3, 4]}}]},
            "not a whole calm-suite: a has more medians than allocators",
        ),
        ({"rounds": "3"}, "not a whole calm-suite"),
        ({"messages": {"calmalloc": [1]}}, "not a whole calm-suite"),
    ],
)
def test_a_file_that_is_something_else(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "out.json"
    made = made_up(by_time("a", 3, 1, 2))
    path.write_text(json.dumps(msgspec.to_builtins(made) | change))
    with pytest.raises(CalmError, match=message) as caught:
        documents.read(str(path), Results)
    assert caught.value.exit_code == 2


def test_a_file_that_was_cut_short_is_status_2(calm: Calm, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(documents.text(made_up(by_time("a", 3, 1, 2)))[:-20])
    done = calm("bench", "report", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"calm: {path} is not JSON, or was cut short\n"


def test_lists_the_cases(calm: Calm) -> None:
    listed = calm("bench", "list")
    assert listed.returncode == 0
    for case in command.all_cases():
        assert case.name in listed.stdout
    found = json.loads(calm("bench", "list", "--json").stdout)
    assert (found["schema"], found["version"]) == ("calm-cases", 1)
    assert [each["name"] for each in found["cases"]] == [case.name for case in command.all_cases()]
    assert {"larson", "cfrac"} <= {each["name"] for each in found["cases"] if each["quick"]}


def test_a_note_keeps_the_asterisk_that_it_explains() -> None:
    one = by_time("a", 2.0, 1.0, 3.0)
    one.sides[2] = Side("jemalloc", one.sides[2].runs, "killed by SIGSEGV (11)", 2)
    text = markdown(analyse(made_up(one, by_time("b", 3.0, 1.0, 2.0))), ["time"])
    assert "2.00*" in text
    assert "\n- \\* over fewer rows" in text


def test_a_library_that_is_not_preloaded_is_a_failure(tmp_path: Path) -> None:
    library = tmp_path / "libnone.so"
    library.write_bytes(b"nothing")
    case = Case("true", "program", "", lambda folder: Prepared(("true",), folder))
    allocator = runner.Allocator("none", library)
    _, _, failure = runner.run_once(case, case.prepare(tmp_path), allocator, 600.0)
    assert failure
    assert "did not preload it" in failure


def test_settings_of_the_caller_do_not_reach_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    script = 'test -z "$MALLOC_ARENA_MAX" && test "$OWN" = 1'
    prepared = Prepared(("sh", "-c", script), tmp_path, environment={"OWN": "1"})
    case = Case("sh", "program", "", lambda _: prepared)
    _, figures, failure = runner.run_once(case, prepared, runner.Allocator("glibc"), 600.0)
    assert failure is None
    assert figures["wall_s"]


def test_descendants_are_found_and_killed() -> None:
    process = subprocess.Popen(["sh", "-c", "sleep 79.5 & wait"])
    wait_until(lambda: len(proc.descendants(process.pid)) == 1)
    processes.kill_descendants(process.pid)
    assert process.wait() is not None


def test_the_default_allocators_are_those_that_are_there() -> None:
    names = command.default_allocators()
    assert names[0] == "glibc"
    assert "ptlbmalloc2" not in names


def test_average_memory_is_a_measure_of_its_own() -> None:
    found = analyse(made_up(by_time("a", 3.0, 1.0, 2.0)))
    assert [mean.what for mean in found.means] == [TIME, PEAK, AVERAGE]
