"""`calm bench` with the published programs of a tree: one of ours, whose programs are a few lines each."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from bench_helpers import LABELS, RATE, by_time, made_up, markdown, row, side
from calm_helpers import Calm

from calm.core.errors import USAGE, CalmError
from research.bench import command, pairs, published, runner, source_tree, tables
from research.bench.analysis import PEAK, TIME, analyse
from research.bench.cases import Case, Prepared
from research.bench.results import Results, Side, Source

CPUS = len(os.sched_getaffinity(0))
TREE = {
    "CMakeLists.txt": """
        cmake_minimum_required(VERSION 3.5)
        project(tree C)
        foreach(name cfrac larson barnes malloc-large)
          add_executable(${name} ${name}/${name}.c)
        endforeach()
        add_executable(sh6bench shbench/sh6bench-new.c)
    """,
    # Ends with 0 if it gets the published argument.
    "cfrac/cfrac.c": r"""
        #include <string.h>
        int main(int argc, char **argv) {
            return argc != 2 || strcmp(argv[1], "17545186520507317056371138836327483792789528") != 0;
        }
    """,
    "larson/larson.c": r"""
        #include <stdio.h>
        #include <stdlib.h>
        int main(int argc, char **argv) {
            int rate = atoi(getenv("RATE")) * 1000;
            fprintf(stderr, "as many threads as %s\n", argv[7]);
            printf("runtime: %s\n", argv[1]);
            printf("Throughput = %8d operations per second, relative time: 1.000s.\n", rate);
            return argc != 8;
        }
    """,
    # Ends with 0 if its standard input is the tree's.
    "barnes/barnes.c": r"""
        #include <stdio.h>
        #include <string.h>
        int main(void) {
            char line[10] = "";
            return fgets(line, sizeof line, stdin) == NULL || strcmp(line, "bodies\n") != 0;
        }
    """,
    "barnes/input": "bodies\n",
    "malloc-large/malloc-large.c": "int main(void) { return nothing; }\n",
}

Bench = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "the tree"
    for name, text in TREE.items():
        path = folder / "bench" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return tmp_path / "inputs"


@pytest.fixture
def bench(calm: Calm, tree: Path, inputs: Path) -> Bench:
    """`calm bench run` with the tree."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        def set_up() -> None:
            command.inputs_folder = lambda: inputs

        source = ("--source", f"mimalloc-bench={tree}")
        return calm("bench", "run", "--no-touch", *source, *arguments, set_up=set_up)

    return run


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "all")


def test_programs_are_built_and_run_beside_an_unchanged_tree(
    bench: Bench, tree: Path, tmp_path: Path
) -> None:
    before, out = contents(tree), tmp_path / "out.json"
    names = [published.original_of(name) for name in ("cfrac", "larson", "barnes", "sh6bench")]
    done = bench("-a", "glibc:RATE=1,glibc:RATE=4", "-n", 1, "--json", out, *names)
    assert done.returncode == 0, done.stderr
    assert contents(tree) == before
    assert "calm: building programs of mimalloc-bench in " in done.stderr
    found = json.loads(out.read_text())
    rows = {each["name"]: each for each in found["rows"]}
    larson = rows["published/larson"]
    assert larson["command"][0] == "INPUTS/mimalloc-bench/build/larson"
    assert larson["command"][1:] == ["5", "8", "1000", "5000", "100", "4141", str(CPUS)]
    assert [each["runs"][0]["figures"]["metric"] for each in larson["sides"]] == [1000, 4000]
    assert {each["family"] for each in found["rows"]} == {"published"}
    assert "which may not be redistributed" in found["left_out"]["published/sh6bench"]
    assert found["sources"] == [{"name": "mimalloc-bench", "version": None, "date": None}]
    assert "Published programs of mimalloc-bench (version not known).\n" in done.stdout


def test_programs_are_built_anew_only_if_the_tree_has_changed(tree: Path, inputs: Path) -> None:
    opened = source_tree.open_tree(f"mimalloc-bench={tree}")
    program = source_tree.binaries(opened.name, inputs) / "cfrac"

    def built() -> int:
        source_tree.build(opened, ["cfrac"], inputs)
        return program.stat().st_ino

    first = built()
    assert built() == first
    # Older than what was built from the one before, as in another tree.
    changed = tree / "bench/cfrac/cfrac.c"
    changed.write_text("int main(void) { return 7; }\n")
    os.utime(changed, (0, 0))
    built()
    assert subprocess.run([program], check=False).returncode == 7


def test_a_withheld_source_is_used_where_it_is_there(tree: Path, inputs: Path) -> None:
    opened = source_tree.open_tree(f"mimalloc-bench={tree}")
    source = tree / "bench/shbench/sh6bench-new.c"

    def obstacle() -> str | None:
        cases = {case.name: case for case in published.cases(opened, inputs)}
        return runner.obstacle(cases["published/sh6bench"])

    source.parent.mkdir()
    source.write_text("int main(void) { return 0; }\n")
    assert "may not be redistributed" in (obstacle() or "")
    source.write_text("#include <stdlib.h>\nint main(void) { return malloc(1) == NULL; }\n")
    assert obstacle() is None


def test_a_failing_build_is_one_line(bench: Bench, tree: Path) -> None:
    done = bench("-a", "glibc", "-n", 1, "published/malloc-large")
    assert done.returncode == USAGE
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"calm: --source mimalloc-bench={tree}: the build failed: ")
    assert "error: " in last
    assert "build.log" in last
    (tree / "bench/CMakeLists.txt").write_text('message(FATAL_ERROR "no")\n')
    done = bench("-a", "glibc", "-n", 1, "published/cfrac")
    assert done.returncode == USAGE
    assert "the build failed: CMake Error at " in done.stderr.splitlines()[-1]


def test_without_cmake_there_is_one_line(tree: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/such")
    with pytest.raises(CalmError, match="cmake is not on this machine") as caught:
        source_tree.build(source_tree.open_tree(f"mimalloc-bench={tree}"), ["cfrac"], inputs)
    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--source", "other=/"), "--source other=/: no such source: other (known: mimalloc-bench)"),
        (("run", "--source", "mimalloc-bench"), "--source mimalloc-bench: is not mimalloc-bench=DIR"),
        (("run", "--source", ""), "is not mimalloc-bench=DIR"),
        (("run", "--source", "mimalloc-bench=/no/such"), "/no/such is not a directory"),
        (("run", "--source", "mimalloc-bench=/etc"), "/etc has no bench/CMakeLists.txt"),
        (("list", "--source", "mimalloc-bench=/etc"), "/etc has no bench/CMakeLists.txt"),
        (("run", "--suite", "published"), "published/cfrac needs --source mimalloc-bench=DIR"),
        (("run", "published/larson"), "published/larson needs --source mimalloc-bench=DIR"),
    ],
)
def test_bad_input_gets_one_line(calm: Calm, arguments: tuple[str, ...], message: str) -> None:
    done = calm("bench", *arguments)
    assert done.returncode == USAGE
    assert message in done.stderr
    assert done.stderr.startswith("calm: ")
    assert done.stderr.count("\n") == 1


def test_the_list_tells_what_is_needed(calm: Calm, tree: Path) -> None:
    def obstacles(*arguments: str) -> dict[str, str | None]:
        found = json.loads(calm("bench", "list", *arguments, "--json").stdout)
        return {each["name"]: each["obstacle"] for each in found["cases"] if each["family"] == "published"}

    assert set(obstacles().values()) == {"it needs --source mimalloc-bench=DIR"}
    with_tree = obstacles("--source", f"mimalloc-bench={tree}")
    assert {name for name, reason in with_tree.items() if reason} == {
        "published/sh6bench",
        "published/sh8bench",
    }


def test_the_suite_has_each_program_before_its_stand_in() -> None:
    every = command.all_cases()
    chosen = [case.name for case in command.choose(every, "published", [])]
    originals = [case.name for case in every if case.family == "published"]
    assert len(originals) == 21
    stand_ins = [name for name in chosen if name not in originals]
    assert len(stand_ins) == 13
    assert all(chosen[chosen.index(name) - 1] == published.original_of(name) for name in stand_ins)
    for suite in ("quick", "full", "stand-ins"):
        assert all(case.family != "published" for case in command.choose(every, suite, []))


@pytest.mark.parametrize(
    ("name", "output", "figure"),
    [
        ("larson", "sleep\nThroughput =   123456 operations per second, relative time: 8.100s.\n", 123456),
        ("larson-sized", "Throughput = 1234567890 operations per second, relative time: 0.0s.\n", 1234567890),
        ("rptest", "crt  2 threads: ....1234567 memory ops/CPU second (47MiB peak, 1MiB)\n", 1234567),
        ("xmalloc-test", "rtime: 0.834, free/sec: 119.869 M\n", 119.869),
        ("glibc-thread", "5 iterations\n215904859 iterations\n", 215904859),
        ("glibc-thread", "no figure\n", None),
    ],
)
def test_a_figure_is_found_by_its_pattern(name: str, output: str, figure: float | None) -> None:
    cases = {case.name: case for case in command.all_cases()}
    case = cases[published.original_of(name)]
    assert case.metric
    assert case.metric.higher_is_better
    found = runner._printed(case, BytesIO(output.encode()))
    assert found.get(case.metric.key) == figure


def test_a_program_without_the_figure_has_failed(tmp_path: Path) -> None:
    prepared = Prepared(("echo", "no figure"), tmp_path)
    case = Case("echo", "published", "", lambda _: prepared, RATE, pattern=r"rate (\d+)")
    _, _, failure = runner.run_once(case, prepared, runner.Allocator("glibc"), 600.0)
    assert failure == "it printed no rate"


def test_the_version_is_the_trees_own(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Below a checkout of something else, and called by a hook of it.
    (tmp_path / "other").write_text("other")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "-q", "-m", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    opened = source_tree.open_tree(f"mimalloc-bench={tree}")
    assert source_tree.describe(opened) == Source("mimalloc-bench")
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-02T00:00:00Z")
    commit(tree)
    git(tree, "tag", "v3", "-m", "v3")
    assert source_tree.describe(opened) == Source("mimalloc-bench", "v3", "2026-01-02")
    (tree / "README").write_text("not built")
    assert source_tree.describe(opened).version == "v3"
    (tree / "bench/barnes/input").write_text("others\n")
    assert source_tree.describe(opened).version == "v3 with changes"


def original(name: str, *times: float, **more: Any) -> Any:
    return by_time(published.original_of(name), *times, family="published", **more)


def pair_of_rows() -> Results:
    """In the stand-in glibc is 4 times as slow as the best, in the original twice."""
    return made_up(
        original("larson", 2.0, 1.0, 1.5),
        by_time("larson", 8.0, 2.0, 3.0),
        original("barnes", 1.0, 3.0, 2.0),
        by_time("redis-set", 5.0, 1.0, 1.0),
    )


def test_a_pair_differs_by_the_largest_factor_between_two_allocators() -> None:
    (pair,) = pairs.find(analyse(pair_of_rows()).rankings[TIME.key])
    assert pair.name == "larson"
    assert pair.stand_in == pytest.approx({"glibc": 4.0, "calmalloc": 1.0, "jemalloc": 1.5})
    assert pair.original == pytest.approx({"glibc": 2.0, "calmalloc": 1.0, "jemalloc": 1.5})
    assert pair.discrepancy == pytest.approx(2.0)
    # It does not matter which of them is the best of the row.
    assert pairs.Pair("", {"a": 1, "b": 4}, {"a": 3, "b": 1}).discrepancy == pytest.approx(12)
    assert pairs.Pair("", {"a": 1}, {"a": 3, "b": 1}).discrepancy is None


def test_means_of_pairs_are_over_those_that_were_finished() -> None:
    first = pairs.Pair("", {"a": 1, "b": 4}, {"a": 1, "b": 2})
    second = pairs.Pair("", {"a": 1, "b": 9}, {"a": 4})
    mean = pairs.mean([first, second])
    assert mean.stand_in == pytest.approx({"a": 1, "b": 4})
    assert mean.original == pytest.approx({"a": 2, "b": 2})
    assert mean.discrepancy == pytest.approx(4)


def test_tables_of_the_published_programs() -> None:
    results = pair_of_rows()
    results.sources = [Source("mimalloc-bench", "v1", "2026-07-15")]
    text = markdown(analyse(results), ["published"])
    assert "| larson | 2.00, 1.00~ | 1.00, 1.00~ | 1.50, 1.00~ |" in text
    assert "| barnes | 1.00, 1.00~ | 3.00, 1.00~ | 2.00, 1.00~ |" in text
    assert "| **geometric mean** | 1.41, - | 1.73, - | 1.73, - |" in text
    assert "~ no difference in this row" in text
    assert "redis-set" not in text
    assert "| larson | 4.00/2.00 | 1.00/1.00 | 1.50/1.50 | 2.00 |" in text
    assert "- differ by: the largest factor" in text
    assert "Published programs of mimalloc-bench v1, 2026-07-15." in text


def test_both_means_are_in_one_cell() -> None:
    peaks = zip(LABELS, (2000, 1000, 4000), strict=True)
    rows = [row("published/a", *(side(label, peak / 500, peak) for label, peak in peaks), family="published")]
    text = markdown(analyse(made_up(*rows)), ["published"])
    assert "| **geometric mean** | 2.00, 2.00 | 1.00, 1.00 | 4.00, 4.00 |" in text
    assert "stand-in/published" not in text


def test_a_failure_of_either_is_shown() -> None:
    results = pair_of_rows()
    results.rows[0].sides[2] = Side("jemalloc", [], "killed by SIGSEGV (11)", 1)
    text = markdown(analyse(results), ["published"])
    assert "| larson | 2.00, 1.00~ | 1.00, 1.00~ | failed |" in text
    assert "| larson | 4.00/2.00 | 1.00/1.00 | 1.50/- | 2.00 |" in text


def test_without_published_programs_there_is_no_table_of_them() -> None:
    assert tables.grids(analyse(made_up(by_time("larson", 1.0, 2.0, 3.0))), ["published"]) == []


def test_rates_are_paired_with_times() -> None:
    rates = zip(LABELS, (100.0, 400.0, 200.0), strict=True)
    rated = row("published/larson", *(side(label, 1.0, metric=rate) for label, rate in rates), metric=RATE)
    rated.family = "published"
    (pair,) = pairs.find(analyse(made_up(rated, by_time("larson", 4.0, 1.0, 2.0))).rankings[TIME.key])
    assert pair.discrepancy == pytest.approx(1.0)
    assert pairs.find(analyse(made_up(rated)).rankings[PEAK.key]) == []
