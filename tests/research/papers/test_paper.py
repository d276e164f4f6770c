"""`bench/paper`: what was published, what is measured beside it, and huge pages that are put back."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from calm_helpers import ROOT, wait_for, without_runs
from paper_helpers import code, paper
from waiting import TIMEOUT_S, wait_until

from calm.core import documents, proc
from calm.core.errors import CalmError
from research.bench import tables, workloads
from research.bench.cases import Case, Prepared
from research.bench.results import Row, Run, Side, Subject, saved
from research.papers import huge_pages, model, oracle, ptlbmalloc2, published, rerun
from research.papers.model import About, PaperResults

ABOUT = About("oracle", 0.1, threads=2, sockets=1, virtual=True, extra=("calmalloc",))
PTLB = replace(ABOUT, name="ptlbmalloc2", scale=1.0)
# Steady to a tenth of a percent, in three rounds.
STEADY = (0.999, 1.0, 1.001)


def side(label: str, **figures: float) -> Side:
    return Side(
        label,
        [
            Run(number, {key: value * factor for key, value in figures.items()})
            for number, factor in enumerate(STEADY, 1)
        ],
    )


def made_up(rows: list[Row], thp: str = "madvise", about: About = ABOUT) -> PaperResults:
    labels = list(dict.fromkeys(each.label for row in rows for each in row.sides))
    return PaperResults(
        paper=about,
        date="2026-01-02T03:04:05+00:00",
        calm="0",
        machine={"cpus": 2, "cpu": "a CPU", "memory_kib": 1 << 20, "transparent_huge_pages": thp},
        suite="paper",
        rounds=3,
        seed=1,
        timeout_s=120,
        how={"shootdowns": "counted so", "cycles": "not counted: no such counter"},
        allocators=[Subject(label, version="1.0") for label in labels],
        rows=rows,
    )


def row(name: str, *sides: Side) -> Row:
    return Row(name, "workload", command=[name], sides=list(sides))


def ttest1(label: str, wall: float, faults: float, **more: float) -> Side:
    figures = {"user_s": wall / 3, "system_s": wall / 2, "peak_rss_kib": 10_000.0, huge_pages.PEAK: 2048.0}
    return side(label, wall_s=wall, minor_faults=faults, **(figures | more))


def study(thp: str = "madvise") -> PaperResults:
    def one(name: str, factor: float) -> Row:
        return row(
            name,
            ttest1("glibc", 2.0 * factor, 1_000_000 * factor),
            ttest1(oracle.NEVER_TRIM, 0.5 * factor, 4_000),
            *(ttest1(oracle.padded(size), 1.5, 9_000) for size in published.TABLE_4),
            ttest1("jemalloc", 1.0 * factor, 5_000),
            ttest1("calmalloc", 0.25 * factor, 6_000),
        )

    return made_up([one(oracle.NAMES[1], 1.0), one(oracle.NAMES[2], 0.5)], thp)


def grid_named(grids: list[tables.Grid], start: str) -> tables.Grid:
    found = [grid for grid in grids if grid.title.startswith(start)]
    assert len(found) == 1
    return found[0]


def cells(grid: tables.Grid, first: str) -> dict[str, str]:
    """A row by its headings; of two alike, the later one."""
    found = [line for line in [*grid.rows, *grid.closing] if line[0] == first]
    assert len(found) == 1, (first, grid.rows)
    assert len(found[0]) == len(grid.headings)
    return dict(zip(grid.headings, found[0], strict=True))


def test_published_numbers_fit_together() -> None:
    """A digit that was mistyped would break what the papers themselves say of their numbers."""
    one, two = published.TABLE_1[1], published.TABLE_1[2]
    for each in (one, two):
        assert each.user_s + each.system_s == pytest.approx(each.elapsed_s, rel=0.02)
    for threads, then in published.TABLE_3.items():
        assert then.default_s == published.TABLE_1[threads].elapsed_s
        assert then.default_faults == published.TABLE_1[threads].minor_faults
    # "AnonHugePages" are whole pages of 2 MiB.
    huge = [each.huge_kib for each in (*published.TABLE_4.values(), *published.TABLE_5.values())]
    assert all(kib % 2048 == 0 for kib in huge)
    assert published.TTEST1_PARAMETERS["bins"] == (64 << 20) // published.TTEST1_PARAMETERS["size"]
    # "The average of all results in table 2 is 3 %": 2.3, as it can be had from them.
    assert sum(published.TABLE_2.values()) / len(published.TABLE_2) == pytest.approx(2.3)


def test_the_studys_runs_are_one_suite() -> None:
    labels = oracle.PAPER.allocators
    assert labels[0] == "glibc"
    # With the underscore at its end, which glibc needs.
    assert "glibc:MALLOC_TRIM_THRESHOLD_=-1" in labels
    assert "glibc:MALLOC_TOP_PAD_=29360128" in labels
    assert {"gperftools", "jemalloc"} <= set(labels)
    cases = oracle.PAPER.cases(replace(ABOUT, scale=0.01))
    commands = [case.prepare(Path()).command for case in cases]
    assert [command[1:] for command in commands] == [("40", "1"), ("40", "2")]
    assert oracle.total(1e-9) == 1


def test_the_studys_tables() -> None:
    grids = oracle.PAPER.grids(study(), ABOUT)
    first = cells(grid_named(grids, "table 1"), "1 thread: elapsed, s")
    assert first == {
        "": "1 thread: elapsed, s",
        "published": "21.08",
        "measured": "2.00",
        "for 4,000 threads": "20.00",
    }
    faults = cells(grid_named(grids, "table 1"), "2 threads: minor page faults")
    assert (faults["published"], faults["for 4,000 threads"]) == ("6,846,809", "5,000,000")
    # Memory is not proportional to the work.
    memory = cells(grid_named(grids, "table 1"), "1 thread: maxresident, KiB")
    assert memory["measured"] == memory["for 4,000 threads"] == "10,000"
    assert cells(grid_named(grids, "table 1"), "elapsed, 2 threads to 1")["published"] == "0.67"
    # By the threads that a run had, which is no less than one.
    least = oracle.PAPER.grids(study(), replace(ABOUT, scale=1e-9))
    assert cells(grid_named(least, "table 1"), "1 thread: elapsed, s")["for 4,000 threads"] == "8000.00"
    third = cells(grid_named(grids, "table 3"), "1 thread: elapsed, s")
    assert (third["ratio"], third["ratio (95 %)"]) == ("0.39", "0.25 (0.25 to 0.25)")
    fourth = cells(grid_named(grids, "table 4"), "12 MB")
    assert (fourth["published: s"], fourth["measured: s"]) == ("13.48", "1.50")
    assert (fourth["to none"], fourth["to none (95 %)"].split()[0]) == ("0.64", "0.75")
    assert fourth["AnonHuge"] == "2,048"
    time_of = grid_named(grids, "table 5: other allocators, elapsed time")
    assert cells(time_of, "calmalloc")["measured: 1 thread, s"] == "0.25"
    assert cells(time_of, "calmalloc")["published: 1 thread, s"] == "-"
    # It was published, and is not on this machine.
    lacking = cells(time_of, "gperftools (the study's tcmalloc)")
    assert (lacking["published: 1 thread, s"], lacking["measured: 1 thread, s"]) == ("5.78", "-")
    assert any(
        line.startswith("not on this machine: gperftools")
        for line in oracle.PAPER.differences(study(), ABOUT)
    )
    assert not any("MALLOC" in line[0] for line in time_of.rows)


def test_the_mode_of_huge_pages_is_told() -> None:
    for name in ("table 4", "table 5: other allocators, memory"):
        other = grid_named(oracle.PAPER.grids(study("madvise"), ABOUT), name)
        assert other.title.endswith("huge pages madvise")
        assert any("not measured as published" in note for note in other.notes)
        as_published = grid_named(oracle.PAPER.grids(study("always"), ABOUT), name)
        assert not any("not measured as published" in note for note in as_published.notes)


def test_a_whole_run_is_shown_as_it_is() -> None:
    whole = replace(ABOUT, scale=1.0)
    assert grid_named(oracle.PAPER.grids(study(), whole), "table 1").headings == ["", "published", "measured"]
    assert not any("scale" in line for line in oracle.PAPER.differences(study(), whole))
    assert any("scale 0.1" in line for line in oracle.PAPER.differences(study(), ABOUT))


def evaluation(cycles: bool = False, counted: bool = True) -> PaperResults:
    def one(name: str, *shootdowns: float) -> Row:
        sides = []
        for label, many, user in zip(("glibc", "ptlbmalloc2"), shootdowns, (3.0, 2.0), strict=True):
            figures = {"wall_s": 2.0, "average_rss_kib": 5e4, "user_s": user, "system_s": 1.0}
            figures["interrupts_system_wide"] = 77.0
            if counted:
                figures["shootdowns"] = many
            if cycles:
                figures["cycles"] = 1e9 * user
            sides.append(side(label, **figures))
        return row(name, *sides)

    rows = [one("dedup-like", 10_000, 100), one("canneal-like", 5, 5), one("vips", 2_000, 40)]
    return made_up(rows, about=PTLB)


def test_the_papers_figures() -> None:
    grids = ptlbmalloc2.PAPER.grids(evaluation(), PTLB)
    third = grid_named(grids, "figure 3")
    dedup = cells(third, "dedup-like")
    assert dedup["published"] == "many with glibc, almost all eliminated"
    assert (dedup["glibc"], dedup["ptlbmalloc2"]) == ("10,000", "100")
    assert dedup["to glibc (95 %)"].startswith("0.010 ")
    assert cells(third, "canneal-like")["published"] == "few with glibc, not significantly affected"
    assert cells(third, "sum")["glibc"] == "12,005"
    fourth = cells(grid_named(grids, "figure 4"), "dedup-like")
    assert fourth["ptlbmalloc2: memory"].startswith("1.00 ")
    # Three seconds for four: of user and system time together.
    assert fourth["ptlbmalloc2: CPU time"].startswith("0.75 ")
    text = "\n".join(tables.grid_markdown(grid) for grid in grids)
    assert "CPU time, user and system, stands for cycles: no such counter" in text
    assert "not measured: calm starts no virtual machine" in text


def test_a_sum_is_of_all_programs_or_not_told() -> None:
    found = evaluation()
    failed = found.rows[0].side("ptlbmalloc2")
    assert failed
    failed.failure = "it broke"
    sums = cells(grid_named(ptlbmalloc2.PAPER.grids(found, PTLB), "figure 3"), "sum")
    assert (sums["glibc"], sums["ptlbmalloc2"]) == ("12,005", "-")


def test_a_program_too_short_for_cpu_time_is_in_no_mean() -> None:
    """Its ratio would be 0, or of nothing."""
    found = evaluation()
    for run in found.rows[0].sides[1].runs:
        run.figures |= {"user_s": 0.0, "system_s": 0.0}
    mean = cells(grid_named(ptlbmalloc2.PAPER.grids(found, PTLB), "figure 4"), "geometric mean")
    assert mean["ptlbmalloc2: CPU time"].startswith("0.75 ")


def test_vips_has_as_many_threads_as_the_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Case("vips", "program", "", lambda folder: Prepared(("vips",), folder, environment={"A": "b"}))
    monkeypatch.setattr(ptlbmalloc2.programs, "CASES", (own,))
    *stand_ins, vips = ptlbmalloc2.PAPER.cases(replace(PTLB, threads=3))
    assert vips.prepare(Path()).environment == {"A": "b", "VIPS_CONCURRENCY": "3"}
    assert {case.prepare(Path()).command[1:] for case in stand_ins} == {("--threads", "3")}


@pytest.mark.parametrize("paper", rerun.PAPERS.values())
def test_cycles_are_counted_where_the_paper_has_them(
    paper: model.Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        rerun.runner,
        "run_suite",
        lambda *_, groups, **__: (asked.append("hardware" in groups), made_up([]))[1],
    )
    rerun.measure(
        *(paper, ["glibc"]),
        scale=None,
        set_huge_pages=False,
        rounds=1,
        limit_s=1,
        touch=False,
        folder=Path(),
        write=lambda _: None,
    )
    assert asked == [paper.name == "ptlbmalloc2"]


def test_table_2_has_this_machine_as_a_row() -> None:
    def measured(about: About, **more: bool) -> dict[tuple[str, ...], str]:
        grid = grid_named(ptlbmalloc2.PAPER.grids(evaluation(**more), about), "table 2")
        assert len({len(line) for line in [grid.headings, *grid.rows, *grid.closing]}) == 1
        return {tuple(line[:3]): line[4] for line in grid.rows if line[4] != "-"}

    assert measured(PTLB) == {("virtual", "2", "1"): "+25.0 % (+25.0 to +25.0)"}
    # Where it is one of the paper's, it is no further row.
    like = replace(PTLB, threads=16, sockets=4, virtual=False)
    assert list(measured(like)) == [("native", "16", "4")]
    assert list(measured(replace(PTLB, virtual=None))) == [("not known", "2", "1")]
    # Cycles, where they are counted: two for three.
    assert measured(PTLB, cycles=True) == {("virtual", "2", "1"): "+33.3 % (+33.3 to +33.3)"}


def test_without_tracepoints_the_systems_interrupts_are_shown() -> None:
    third = grid_named(ptlbmalloc2.PAPER.grids(evaluation(counted=False), PTLB), "figure 3")
    assert third.title == "figure 3: TLB interrupts, system-wide"
    assert cells(third, "dedup-like")["glibc"] == "77"


def test_parsec_is_never_said_to_have_been_run() -> None:
    lines = ptlbmalloc2.PAPER.differences(evaluation(), PTLB)
    assert any(
        line.startswith("none of the programs measured is PARSEC's: dedup-like, canneal-like")
        for line in lines
    )
    names = [case.name for case in ptlbmalloc2.PAPER.cases(PTLB)]
    assert names == [
        *("bodytrack-like", "canneal-like", "dedup-like"),
        *("fluidanimate-like", "streamcluster-like", "swaptions-like", "vips"),
    ]


def test_rounds_are_paired_and_failures_left_out() -> None:
    one, other = side("a", x=2.0), side("b", x=1.0)
    del other.runs[1]
    found = row("r", one, other)
    assert model.pairs((found, "a"), (found, "b"), "x") == ([1.998, 2.002], [0.999, 1.001])
    assert model.ratio((found, "a"), (found, "b"), "x").value == 2.0
    one.failure = "it broke"
    assert model.middle(found, "a", "x") is None
    assert tables.ratio_text(model.ratio((found, "a"), (found, "b"), "x")) == "-"
    assert model.middle(None, "a", "x") is None


@pytest.mark.parametrize("name", ["oracle", "ptlbmalloc2"])
def test_a_file_without_runs_is_shown_alike(name: str, tmp_path: Path) -> None:
    found, about = (study(), ABOUT) if name == "oracle" else (evaluation(), PTLB)
    path = tmp_path / "out.json"
    path.write_text(without_runs(documents.text(saved(rerun.complete(found), {}))))
    read = documents.read(str(path), PaperResults)
    assert read.paper == about
    assert rerun.PAPERS[name].grids(read, about) == rerun.PAPERS[name].grids(found, about)
    assert rerun.PAPERS[name].differences(read, about) == rerun.PAPERS[name].differences(found, about)
    assert tables.conditions(read) == tables.conditions(found)


def test_small_ratios_are_not_rounded_to_nothing() -> None:
    assert model.published_ratio(4_766, 12_304_107) == "0.00039"
    assert model.published_ratio(3, 2) == "1.50"


ORACLE = ("run", "oracle", "--no-touch")
# Everything of a run but its size: a suite of two short programs in the place of t-test1.
DRIVER = """
from pathlib import Path
from research.bench import workloads
from research.papers import command, huge_pages
command.inputs_folder = lambda: Path({folder!r})
workloads.find = lambda name: Path({program!r})
huge_pages.MODE = Path({mode!r})
huge_pages.always.__wrapped__.__defaults__ = (huge_pages.MODE,)
"""


@pytest.fixture
def set_up(tmp_path: Path) -> str:
    """Python code, before the command begins."""
    program, mode = tmp_path / "program", tmp_path / "enabled"
    program.write_text(f'#!/bin/sh\necho "$1 $2 $MALLOC_TOP_PAD_" >>{tmp_path}/log\nsleep ${{NAP:-0}}\n')
    program.chmod(0o755)
    mode.write_text("always [madvise] never\n")
    return DRIVER.format(folder=str(tmp_path / "in"), program=str(program), mode=str(mode))


def run(
    set_up: str, *arguments: str | float | Path, allocators: str = "glibc"
) -> subprocess.CompletedProcess[str]:
    return paper(*ORACLE, "-a", allocators, *arguments, set_up=set_up)


def test_runs_writes_and_shows_again(set_up: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run(set_up, "-n", 1, "--scale", 0.001, "--json", out)
    assert done.returncode == 0, done.stderr
    assert "table 3: no trimming" in done.stdout
    assert (tmp_path / "enabled").read_text() == "always [madvise] never\n"
    ran = (tmp_path / "log").read_text().splitlines()
    sides = 2 + len(published.TABLE_4) + sum(map(bool, map(_is_here, ("gperftools", "jemalloc"))))
    assert len(ran) == 2 * 2 * sides  # two cases; a warm-up, and one round
    assert "4 1 29360128" in ran
    data = json.loads(out.read_text())
    assert data["paper"]["name"] == "oracle"
    assert data["paper"]["scale"] == 0.001
    assert "Oracle Linux" in data["citation"]["text"]
    assert [grid["title"].split(":")[0] for grid in data["tables"]] == [
        *("table 1", "table 3", "table 4", "table 5", "table 5")
    ]
    assert (data["schema"], data["version"]) == ("calm-paper", 1)
    again = paper("report", out)
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
    markdown = paper("report", out, "--markdown").stdout
    assert "| 1 thread: elapsed, s | 21.08 |" in markdown


def _is_here(name: str) -> bool:
    return bool(model.present([name])[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_huge_pages_are_put_back_whatever_ends_it(set_up: str, tmp_path: Path, number: int) -> None:
    """The guard's words go into a file in the place of the kernel's."""
    mode = tmp_path / "enabled"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code(set_up), *ORACLE, "-a", "glibc", "--set-thp", "-n", "3"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"NAP": "0.2"},
    )
    try:
        wait_for(tmp_path / "log", "400 ")
        wait_for(mode, "always")
        assert mode.read_text() == "always"
        process.send_signal(number)
        _, errors = process.communicate()
    finally:
        process.kill()
    assert "Traceback" not in errors
    # Between two runs a SIGTERM ends it as it ends any program.
    assert process.returncode in ((-number,) if number == signal.SIGKILL else (128 + number, -number))
    wait_for(mode, "madvise")
    assert mode.read_text().strip() == "madvise"


def test_the_misprint_of_the_study_is_told_of(set_up: str) -> None:
    misprint = "glibc:MALLOC_TRIM_THRESHOLD=-1"
    done = run(set_up, "-n", 1, "--scale", 0.001, allocators=misprint)
    assert done.returncode == 0, done.stderr
    assert "calm: MALLOC_TRIM_THRESHOLD is set, but glibc reads MALLOC_TRIM_THRESHOLD_" in done.stderr


def test_one_run_at_a_time_sets_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would take the first one's `always` for the mode to put back."""
    mode = tmp_path / "enabled"
    mode.write_text("always [madvise] never\n")
    with huge_pages.always(mode):
        mode.write_text("[always] madvise never\n")  # as the kernel tells it
        monkeypatch.setattr(huge_pages, "_TIMEOUT_S", 0.1)
        with pytest.raises(CalmError, match="another run"), huge_pages.always(mode):
            pass
        assert mode.read_text() == "[always] madvise never\n"
    wait_for(mode, "madvise\n")
    # The next one waits for the guard of the last to be gone.
    monkeypatch.setattr(huge_pages, "_TIMEOUT_S", TIMEOUT_S)
    mode.write_text("always [madvise] never\n")
    with huge_pages.always(mode):
        assert mode.read_text() == "always"
    wait_for(mode, "madvise\n")


def test_the_lock_is_kept_until_the_mode_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard has it, which outlives the run."""
    mode = tmp_path / "enabled"
    mode.write_text("always [madvise] never\n")
    until = f"until [ -e {tmp_path}/go-on ]; do sleep 0.02; done"
    monkeypatch.setattr(huge_pages, "_GUARD", f"exec 3<&0; (cat <&3 >/dev/null; {until}) & ")
    with huge_pages.always(mode):
        pass
    mode.write_text("always [madvise] never\n")
    monkeypatch.setattr(huge_pages, "_TIMEOUT_S", 0.2)
    with pytest.raises(CalmError, match="another run"), huge_pages.always(mode):
        pass
    (tmp_path / "go-on").touch()
    monkeypatch.setattr(huge_pages, "_TIMEOUT_S", TIMEOUT_S)
    with huge_pages.always(mode):
        pass


def test_huge_pages_are_put_back_after_an_error(tmp_path: Path) -> None:
    mode = tmp_path / "enabled"
    mode.write_text("always [madvise] never\n")

    def fails() -> None:
        with huge_pages.always(mode):
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fails()
    wait_for(mode, "madvise\n")


def test_huge_pages_that_cannot_be_set() -> None:
    with pytest.raises(CalmError, match="cannot be written"), huge_pages.always(Path("/no/such")):
        pass


def test_what_a_kernel_says_of_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "enabled"
    assert huge_pages.mode(path) == "unknown"
    path.write_text("[always] madvise never\n")
    assert huge_pages.mode(path) == "always"


def test_huge_pages_of_a_program_are_seen(tmp_path: Path) -> None:
    """A program's child, below a probe, below this process: the probe and the program are shells here."""
    if huge_pages.mode() not in ("always", "madvise"):
        pytest.skip("this kernel gives no huge pages")
    source = tmp_path / "huge.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <string.h>\n#include <sys/mman.h>\n#include <unistd.h>\n"
        "int main(void) { size_t n = 16 << 20; char *p = mmap(NULL, n, PROT_READ | PROT_WRITE, "
        "MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); madvise(p, n, MADV_HUGEPAGE); memset(p, 1, n); "
        'if (write(1, "x", 1) != 1) return 1; char c; return (int)read(0, &c, 1); }\n'
    )
    subprocess.run(["cc", "-o", str(tmp_path / "huge"), str(source)], check=True)
    before = huge_pages.of_programs(os.getpid())
    shell = subprocess.Popen(
        ["sh", "-c", """sh -c '"$0"; :' "$0"; :""", str(tmp_path / "huge")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with shell:
        assert shell.stdout
        assert shell.stdin
        assert shell.stdout.read(1) == b"x"
        found = huge_pages.of_programs(os.getpid())
        below = [huge_pages._anon_huge_kib(pid) or 0 for pid in proc.descendants(shell.pid)]
        shell.stdin.close()
    assert before in (None, 0)
    assert found == sum(below)
    assert found % 2048 == 0
    if found == 0:
        pytest.skip("this kernel had no huge page to give")


def test_peaks_belong_to_their_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = study()
    monkeypatch.setattr(huge_pages, "INTERVAL_S", 0.001)
    peaks = {"glibc": 2048.0, "jemalloc": 6144.0}
    seen: list[int] = []
    looks_at_nothing = 0

    def of_programs(_: int) -> int | None:
        nonlocal looks_at_nothing
        if seen:
            return seen.pop(0)
        looks_at_nothing += 1
        return None

    monkeypatch.setattr(huge_pages, "of_programs", of_programs)
    with huge_pages.Sampler() as sampler:
        sampling = huge_pages.Sampling(sampler)
        sampling.begin([(oracle.NAMES[1], label) for label in peaks], 4)
        for label, peak in peaks.items():
            sampling.turn(2, oracle.NAMES[1], label)
            seen += [0, int(peak), 1024]
            wait_until(lambda: not seen)  # noqa: B023
            # Once there is another look, what the last one found is taken note of.
            before = looks_at_nothing
            wait_until(lambda before=before: looks_at_nothing > before + 1)
            sampling.done(oracle.NAMES[1], label, 1.0)
    sampling.note(made)
    for label, peak in peaks.items():
        found = made.rows[0].side(label)
        assert found
        assert found.values(huge_pages.PEAK) == [None, peak, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "nosuch"), "'nosuch' is not one of 'oracle', 'ptlbmalloc2'"),
        (("run",), "missing argument 'PAPER'"),
        (("run", "oracle", "larson"), "got unexpected extra argument (larson)"),
        (("run", "oracle", "--table", "time"), "no such option"),
        (("run", "oracle", "--scale", "0"), "--scale"),
        (("run", "oracle", "--timeout", "5"), "--timeout"),
        (("run", "ptlbmalloc2", "--scale", "0.5"), "--scale has no effect on ptlbmalloc2"),
        (("run", "ptlbmalloc2", "--set-thp"), "--set-thp has no effect on ptlbmalloc2"),
        (("run", "oracle", "-a", "nosuch"), "unknown allocator 'nosuch'"),
        (("run", "oracle", "--plot", "x.svg"), "--plot: there is no picture of oracle"),
        (("report", "/no/such.json"), "cannot read /no/such.json: No such file or directory"),
        (
            ("report", ROOT / "bench/results/suite.json"),
            "is of the schema calm-suite, and calm-paper is needed",
        ),
    ],
)
def test_bad_usage_gets_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = paper(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("calm: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "broken", [{"name": "nosuch"}, {"scale": 0}, {"scale": "much"}, {"threads": ...}, {"name": ["oracle"]}]
)
def test_broken_files(tmp_path: Path, broken: dict[str, object]) -> None:
    path = tmp_path / "paper.json"
    data = json.loads(documents.text(study()))
    assert documents.read(str(_written(path, data)), PaperResults) == study()
    for key, value in broken.items():
        if value is ...:
            del data["paper"][key]
        else:
            data["paper"][key] = value
    done = paper("report", _written(path, data))
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not a whole calm-paper" in done.stderr


def _written(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_what_cannot_be_run_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads.paths, "probe_candidates", list)
    case = ptlbmalloc2.PAPER.cases(PTLB)[0]
    with pytest.raises(CalmError, match="bodytrack-like is missing: `make` builds it"):
        case.prepare(Path())


def test_the_page_has_a_place_for_each_paper() -> None:
    page = (ROOT / "docs/papers.md").read_text()
    for name in rerun.PAPERS:
        assert (
            page.count(f"<!-- paper-{name}: begin -->\n") == page.count(f"<!-- paper-{name}: end -->\n") == 1
        )
