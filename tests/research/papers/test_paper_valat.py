"""`bench/paper run valat`: its cases, the figures' tables and picture, and huge pages by turns."""

import json
import mmap
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calm_helpers import wait_for, without_runs
from paper_helpers import paper

from calm.core import documents
from calm.core.errors import CalmError
from research.bench import tables
from research.bench.results import METRIC, Row, Run, Side, Subject, saved
from research.colors.caches import NEHALEM, Cache, Ints
from research.papers import (
    huge_pages,
    model,
    published,
    rerun,
    valat,
    valat_cases,
    valat_frames,
    valat_tables,
)
from research.papers.model import ALWAYS_HUGE, FRAMES, About, PaperResults

ABOUT = About("valat", 1.0, threads=2, sockets=1, virtual=True, extra=valat_cases.BESIDE)
L2 = Cache(2, 2 << 20, 16)
LABELS = ("glibc", *valat_cases.BESIDE)
# Steady to a tenth of a percent, in three rounds.
STEADY = (0.999, 1.0, 1.001)
# Tests see another machine's.
OUTER_CACHE = valat_cases.outer_cache
Time = Callable[[str, dict[str, str], str, bool], float]


HAS_COLORED = valat_cases.has_colored  # before the tests have it answer as they like


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has this L2, and no colored memory."""
    monkeypatch.setattr(valat_cases, "outer_cache", lambda: L2)
    monkeypatch.setattr(valat_cases, "has_colored", lambda: False)
    monkeypatch.setattr(valat_cases.workloads, "find", lambda name: Path("build") / name)


def as_it_comes(program: str, options: dict[str, str], label: str, always_huge: bool) -> float:
    """Suffers as the paper says; placement helps."""
    placed = label not in ("glibc", "jemalloc", valat_cases.UNPLACED)
    if program == "alias4k":
        return 20.0 if placed or {"padded", "rewritten"} & set(options.values()) else 50.0
    if program == "streams":
        aligned = not placed if options["memory"] == "malloc" else options["gap"] == str(L2.way_bytes)
        return 4.0 if aligned and int(options["arrays"]) > 8 else 1.0
    if program == "array-sweep":
        return 3.0 if options["memory"] == "small" else 2.0
    if program == "mhd-like":
        return 1.0 if placed or options["memory"] == "padded" else 2.0
    if always_huge:
        # The more processes, the worse.
        return {"1": 0.5, "2": 1.0, "4": 1.25, "8": 1.5}[options["processes"]]
    return 1.0


def made_up(about: About = ABOUT, time: Time = as_it_comes) -> PaperResults:
    rows = []
    for case in valat_cases.cases(about):
        program, *words = case.prepare(Path()).command
        options = dict(zip(words[::2], words[1::2], strict=True))
        options = {name.removeprefix("--"): value for name, value in options.items()}
        sides = []
        for label in LABELS:
            if case.runs_under and not case.runs_under(label):
                continue
            figure = time(Path(program).name, options, label, case.family == ALWAYS_HUGE)
            runs = [Run(number, {METRIC: figure * factor}) for number, factor in enumerate(STEADY, 1)]
            sides.append(Side(label, runs))
        command = [program, *words]
        rows.append(Row(case.name, case.family, case.metric, command, sides=sides))
    for name, cache in valat_frames.wanted(L2):
        curves = {"cache": valat_frames._geometry(cache), "shares of the cache": [0.5, 1.0, 1.5]}
        for index, source in enumerate(valat_frames.SOURCES[:-1]):
            for kind, value in zip(valat_frames.KINDS, (index, index + 1, index + 12), strict=True):
                curves[valat_frames.key(source, kind)] = [float(value)] * 3
        rows.append(Row(name, FRAMES, sides=[Side("glibc", [Run(1, {})])], curves=curves))
    return PaperResults(
        paper=about,
        date="2026-01-02T03:04:05+00:00",
        calm="0",
        machine={"cpus": 2, "cpu": "a CPU", "memory_kib": 1 << 20, "transparent_huge_pages": "madvise"},
        suite="paper valat",
        rounds=3,
        seed=1,
        timeout_s=120,
        touched_kib=1,
        how={valat_tables.HOW_FRAMES: "frames from so and so"},
        allocators=[Subject(label, version="1.0") for label in LABELS],
        rows=rows,
    )


def grid_named(grids: list[tables.Grid], start: str) -> tables.Grid:
    found = [grid for grid in grids if grid.title.startswith(start)]
    assert len(found) == 1, [grid.title for grid in grids]
    return found[0]


def cells(grid: tables.Grid, first: str) -> dict[str, str]:
    found = [line for line in [*grid.rows, *grid.closing] if line[0] == first]
    assert len(found) == 1, (first, grid.rows)
    assert len(found[0]) == len(grid.headings) == len(set(grid.headings))
    return dict(zip(grid.headings, found[0], strict=True))


def test_table_1_as_published() -> None:
    """Section 4.4: padding does what rewriting does, and both together hardly more."""
    default, padded = published.VALAT_1[False], published.VALAT_1[True]
    assert default.original / default.optimized > 2
    assert padded.original == pytest.approx(default.optimized, rel=0.01)
    assert padded.optimized == pytest.approx(padded.original, rel=0.03)


def test_cases_have_names_of_their_own_and_an_allocator_at_least() -> None:
    cases = valat_cases.cases(replace(ABOUT, set_huge_pages=True))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert not any("/" in name for name in names)
    for case in cases:
        under = [label for label in LABELS if case.runs_under is None or case.runs_under(label)]
        command = case.prepare(Path()).command
        mapped = {"small", "huge", "mmap"} & set(command)
        assert under == ["glibc"] if mapped else {"glibc", "calmalloc", valat_cases.UNPLACED} <= set(under)
        assert case.metric


def test_huge_pages_always_are_run_where_they_may_be_set() -> None:
    plain, switched = (valat_cases.cases(replace(ABOUT, set_huge_pages=each)) for each in (False, True))
    more = [case for case in switched if case.name not in {each.name for each in plain}]
    assert len(more) == len(valat_cases.KERNELS) * len(valat_cases.PROCESSES)
    assert {case.family for case in more} == {ALWAYS_HUGE}
    assert ALWAYS_HUGE not in {case.family for case in plain}


def test_scale_is_the_share_of_the_work() -> None:
    def repeats(scale: float, program: str) -> list[int]:
        commands = [case.prepare(Path()).command for case in valat_cases.cases(replace(ABOUT, scale=scale))]
        found = [command for command in commands if Path(command[0]).name == program]
        return [int(command[command.index("--repeats") + 1]) for command in found]

    for program in ("streams", "alias4k"):
        assert [each // 10 for each in repeats(1.0, program)] == repeats(0.1, program)
    assert min(repeats(1e-9, "streams")) == 1


def test_a_sweep_has_as_many_loads_whatever_its_size() -> None:
    sweeps = [case.prepare(Path()).command for case in valat_cases.sweeps(ABOUT, L2)]
    numbers = [dict(zip(command[1::2], command[2::2], strict=True)) for command in sweeps]
    sizes = {int(each["--bytes"]) for each in numbers}
    assert sizes == {round(share * L2.bytes) for share in valat_cases.SIZES}
    for each in numbers:
        loads = int(each["--repeats"]) * int(each["--bytes"]) // int(each["--stride"])
        assert loads == pytest.approx(1 << 23, rel=0.01)


def test_arrays_are_a_way_apart_and_a_page_or_a_line_more() -> None:
    assert valat_cases.gaps(L2) == (128 << 10, (128 << 10) + 4096, (128 << 10) + 64)
    found = made_up()
    gaps = valat_tables.stream_gaps(found)
    assert [valat_tables.gap_name(gap, gaps[0]) for gap in gaps] == [
        *("gap 128 KiB", "gap 128 KiB + 64 B", "gap 128 KiB + 4,096 B")
    ]


def test_where_blocks_start_and_how_much_is_huge_is_kept() -> None:
    for case in valat_cases.cases(ABOUT):
        program, *words = case.prepare(Path()).command
        wanted = {"array-sweep": ("huge_kib",), "streams": ("distinct_starts",)}
        wanted |= dict.fromkeys(("mhd-like", "alias4k"), ("distinct_starts",))
        keys = ("huge_kib",) if "mmap" in words else wanted.get(Path(program).name, ())
        assert case.more_keys == keys, case.name


def test_the_outer_cache_has_colors_and_no_hash() -> None:
    hashed = Cache(3, 480 << 20, 15, cpus=64)
    assert OUTER_CACHE([Cache(1, 48 << 10, 12), L2, hashed]) == L2
    assert OUTER_CACHE(NEHALEM) == NEHALEM[2]
    assert OUTER_CACHE([Cache(1, 32 << 10, 8)]) is None


def test_figure_2() -> None:
    grid = grid_named(
        valat.PAPER.grids(made_up(), ABOUT),
        "figure 2: unnecessary conflicts in pages, frames in this machine's L2",
    )
    assert grid.title.endswith("(2.0 MiB, 16 ways)")
    assert cells(grid, "random")["100 %"] == "2 (1-13)"
    # What was not had is no row.
    assert valat_frames.LINUX_HUGE not in [line[0] for line in grid.rows]
    assert any("published: Linux is no better" in note for note in grid.notes)
    assert "frames from so and so" in grid.notes


def test_figure_3() -> None:
    grid = grid_named(valat.PAPER.grids(made_up(), ABOUT), "figure 3: a load of a repeated pass in order")
    line = cells(grid, "2,048 KiB")
    assert (line["small pages"], line["huge pages"], line["malloc, calmalloc"]) == ("3", "2", "2")
    assert line["small to huge (95 %)"] == "1.50 (1.50 to 1.50)"
    assert any("this machine's L2" in note for note in grid.notes)
    assert any("no memory of chosen colors" in each for each in valat.PAPER.differences(made_up(), ABOUT))


def test_colored_memory_is_a_column_where_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valat_cases, "has_colored", lambda: True)
    found = made_up()
    grid = grid_named(valat.PAPER.grids(found, ABOUT), "figure 3: a load of a repeated pass in order")
    assert float(cells(grid, "2,048 KiB")["colored pages"]) > 0
    sides = {row.name: [side.label for side in row.sides] for row in found.rows if "colored" in row.name}
    assert sides
    assert all(labels == ["glibc"] for labels in sides.values())
    assert not any("chosen colors" in each for each in valat.PAPER.differences(found, ABOUT))


@pytest.mark.parametrize("status", [0, 1])
def test_colored_memory_is_looked_for_by_the_workload(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", run)
    assert HAS_COLORED() == (status == 0)
    assert seen[0][:3] == ["build/array-sweep", "--memory", "colored"]


def test_gains_are_to_glibc_with_standard_pages() -> None:
    about = replace(ABOUT, set_huge_pages=True)
    grids = valat.PAPER.grids(made_up(about), about)
    one, eight = grid_named(grids, "figure 4"), grid_named(grids, "figure 5")
    assert cells(one, "cg-like")["glibc, huge pages always"].startswith("+50.0 % ")
    assert cells(eight, "cg-like")["glibc, huge pages always"].startswith("-50.0 % ")
    assert cells(one, "geometric mean")["calmalloc"].startswith("+0.0 % ")
    assert cells(one, "geometric mean")["glibc, huge pages always"].startswith("+50.0 % ")
    assert cells(eight, "geometric mean")["calmalloc, huge pages always"].startswith("-50.0 % ")
    both = cells(grid_named(grids, "figures 6 and 7"), "calmalloc, huge pages always")
    assert [both[f"{number}: least, largest"] for number in valat_cases.PROCESSES] == [
        *("+50.0 %, +50.0 %", "+0.0 %, +0.0 %", "-25.0 %, -25.0 %", "-50.0 %, -50.0 %")
    ]
    # glibc's standard pages are what all is compared with.
    assert "glibc" not in [line[0] for line in grid_named(grids, "figures 6 and 7").rows]


def test_the_least_and_largest_gain_are_of_different_programs() -> None:
    def time(program: str, options: dict[str, str], label: str, always_huge: bool) -> float:
        found = as_it_comes(program, options, label, always_huge)
        if label == "calmalloc":
            found *= {"cg-like": 0.9, "ep-like": 1.2}.get(program, 1.0)
        return found

    grid = grid_named(valat.PAPER.grids(made_up(time=time), ABOUT), "figures 6 and 7")
    assert cells(grid, "calmalloc")["4: least, largest"] == "-20.0 %, +10.0 %"


def test_figures_8_to_10() -> None:
    grids = valat.PAPER.grids(made_up(), ABOUT)
    solver = grid_named(grids, "figures 8 and 9")
    assert cells(solver, "glibc")["malloc to padded"].startswith("2.00 ")
    assert cells(solver, "calmalloc, random placement")["malloc to padded"].startswith("1.00 ")
    # Arrays that each begin with a line do not help by themselves.
    aligned = made_up(time=lambda *given: 3.0 if given[1].get("memory") == "aligned" else as_it_comes(*given))
    line = cells(grid_named(valat.PAPER.grids(aligned, ABOUT), "figures 8 and 9"), "glibc")
    assert [line[memory] for memory in valat_cases.MHD_MEMORY] == ["2", "3", "1"]
    assert (line["malloc to padded"][:4], line["aligned to padded"][:4]) == ("2.00", "3.00")
    update = grid_named(grids, "figure 10: update, 2 threads")
    few, many = cells(update, "8"), cells(update, "16")
    assert few["calmalloc to no placement (95 %)"].startswith("1.00 ")
    assert many["calmalloc to no placement (95 %)"].startswith("0.25 ")
    assert (many["gap 128 KiB"], many["gap 128 KiB + 64 B"]) == ("4", "1")


def test_table_1() -> None:
    grid = grid_named(valat.PAPER.grids(made_up(), ABOUT), "table 1")
    default = cells(grid, "published, Core 2 Duo: default allocation")
    assert (default["original"], default["rewritten"]) == ("51.0", "21.7")
    assert default["original to padded by hand (95 %)"] == "2.34"
    assert cells(grid, "glibc: malloc")["original to rewritten (95 %)"].startswith("2.50 ")
    assert cells(grid, "glibc: malloc")["original to padded by hand (95 %)"].startswith("2.50 ")
    assert cells(grid, "calmalloc: malloc")["original to padded by hand (95 %)"].startswith("1.00 ")
    assert cells(grid, "glibc: padded by hand")["original to padded by hand (95 %)"] == ""


def test_the_share_of_the_work_is_told() -> None:
    assert not any("scale" in line for line in valat.PAPER.differences(made_up(), ABOUT))
    less = replace(ABOUT, scale=0.25)
    assert "scale 0.25: as much of the work of each run" in valat.PAPER.differences(made_up(less), less)


def test_what_was_not_run_is_no_table() -> None:
    found = made_up()
    found.rows = [row for row in found.rows if row.name.startswith("alias4k")]
    found.left_out = {"streams, 2": "it is missing", "streams, 4": "it is missing", "cg": "no such"}
    assert [grid.title[:7] for grid in valat.PAPER.grids(found, ABOUT)] == ["table 1"]
    lines = valat.PAPER.differences(found, ABOUT)
    assert "not run: streams, 2, and 1 more: it is missing" in lines
    assert "not run: cg: no such" in lines
    found.rows = []
    assert valat.PAPER.grids(found, ABOUT) == []


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_picture(tmp_path: Path, ending: str) -> None:
    assert valat.PAPER.draw
    path = tmp_path / f"valat.{ending}"
    valat.PAPER.draw(made_up(replace(ABOUT, set_huge_pages=True)), ABOUT, path)
    first = path.read_bytes()
    assert len(first) > 10_000
    # With less, there is less to see, and no error.
    found = made_up()
    found.rows = [row for row in found.rows if row.family == FRAMES]
    valat.PAPER.draw(found, ABOUT, path)
    assert path.read_bytes() != first


def test_there_are_colors_for_however_many_take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = replace(ABOUT, set_huge_pages=True)
    monkeypatch.setattr(sys.modules[__name__], "LABELS", (*LABELS, "mimalloc", "tcmalloc"))
    assert valat.PAPER.draw
    valat.PAPER.draw(made_up(about), about, tmp_path / "valat.svg")
    drawn = (tmp_path / "valat.svg").read_text()
    assert "<!-- tcmalloc, huge pages always -->" in drawn
    # Sizes are in MiB: all of the cache is 2.
    assert "<!-- size of the array, MiB -->" in drawn


def test_a_file_without_runs_is_shown_and_drawn_alike(tmp_path: Path) -> None:
    about = replace(ABOUT, set_huge_pages=True)
    found = made_up(about)
    path = tmp_path / "valat.json"
    path.write_text(without_runs(documents.text(saved(rerun.complete(found), {}))))
    read = documents.read(str(path), PaperResults)
    assert valat.PAPER.grids(read, about) == valat.PAPER.grids(found, about)
    assert valat.PAPER.draw
    for name, each in (("read", read), ("found", found)):
        valat.PAPER.draw(each, about, tmp_path / f"{name}.svg")
    assert (tmp_path / "read.svg").read_text() == (tmp_path / "found.svg").read_text()


def test_a_file_is_shown_and_drawn_again(tmp_path: Path) -> None:
    path = tmp_path / "valat.json"
    path.write_text(documents.text(rerun.complete(made_up())))
    shown = paper("report", path, "--plot", tmp_path / "out.svg")
    assert shown.returncode == 0, shown.stderr
    assert "figure 10: update, 2 threads" in shown.stdout
    assert (tmp_path / "out.svg").read_text().count("figure 10: update") == 1
    assert "| published, Core 2 Duo: padded arrays | 21.8 |" in paper("report", path, "--markdown").stdout


# ---- frames ----


def pages_of_one_color(memory: mmap.mmap, pages: int) -> Ints:
    del memory
    return np.arange(pages) * L2.colors


def pages_in_a_row(memory: mmap.mmap, pages: int) -> Ints:
    del memory
    return 7 + np.arange(pages)


def test_conflicts_of_frames() -> None:
    shares = [0.25, 1.0, 2.0]
    room = L2.bytes // 4096
    worst = valat_frames.measured(L2, shares, 2, pages_of_one_color)
    pages = [int(share * room) for share in shares]
    expected = [number - L2.ways - max(0, number - room) for number in pages]
    for kind in valat_frames.KINDS:
        assert worst[valat_frames.key(valat_frames.LINUX, kind)] == expected
    best = valat_frames.measured(L2, shares, 2, pages_in_a_row)
    assert list(best.values()) == [[0.0] * len(shares)] * 2 * len(valat_frames.KINDS)


def test_an_array_is_of_standard_pages_then_of_huge_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    mapped = valat_frames._mapped

    def note(pages: int, advice: int) -> mmap.mmap:
        held.append(advice)
        return mapped(pages, advice)

    def read(memory: mmap.mmap, pages: int) -> Ints:
        # As where there are huge pages for all.
        return (pages_in_a_row if held[-1] == mmap.MADV_HUGEPAGE else pages_of_one_color)(memory, pages)

    monkeypatch.setattr(valat_frames, "_mapped", note)
    curves = valat_frames.measured(L2, [0.25, 0.5], 2, read)
    assert held == [mmap.MADV_NOHUGEPAGE] * 2 + [mmap.MADV_HUGEPAGE] * 2
    assert curves[valat_frames.key(valat_frames.LINUX, "mean")][1] == 256 - L2.ways
    assert curves[valat_frames.key(valat_frames.LINUX_HUGE, "mean")][1] == 0


def test_frames_are_of_the_papers_cache_and_of_this_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And why there are none of this machine's, where there are none."""
    told = [({}, None), ({}, "it takes root")]
    asked: list[tuple[Cache, float]] = []
    saved: list[tuple[int, str]] = []

    def curves_of(cache: Cache, scale: float, step: Callable[[str], None]) -> Any:
        asked.append((cache, scale))
        return told[len(asked) - 1]

    monkeypatch.setattr(valat_frames, "curves_of", curves_of)
    found = made_up(replace(ABOUT, scale=0.5))
    found.rows = []
    assert valat.PAPER.further

    def save(results: PaperResults) -> None:
        saved.append((len(results.rows), results.how[FRAMES]))

    valat.PAPER.further(model.Further(found, [], tmp_path, 10, save))
    assert asked == [(NEHALEM[2], 0.5), (L2, 0.5)]
    assert [row.name for row in found.rows] == ["frames in the paper's L3", "frames in this machine's L2"]
    assert [number for number, _ in saved] == [1, 2]
    assert saved[0][1].startswith("this machine's pages: frames from ")
    assert saved[1][1] == "not measured: this machine's own pages: it takes root"


def test_frames_are_read_from_the_page_table(tmp_path: Path) -> None:
    page, pages = mmap.PAGESIZE, 3
    with mmap.mmap(-1, pages * page) as memory:
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        pagemap = tmp_path / str(os.getpid()) / "pagemap"
        pagemap.parent.mkdir()

        def written(*entries: int) -> Path:
            with pagemap.open("wb") as file:
                file.truncate(0)
                file.seek(address // page * 8)
                file.write(struct.pack(f"{len(entries)}Q", *entries))
            return tmp_path

        # And the bits of a page that was written, and is mapped once.
        present = 1 << 63 | 1 << 56 | 1 << 55
        found = valat_frames.frames(memory, pages, written(*(present | frame for frame in (9, 3, 5))))
        assert found.tolist() == [9, 3, 5]
        # Without privilege they are there, and all 0.
        with pytest.raises(CalmError, match="frames are hidden: it takes root, or CAP_SYS_ADMIN"):
            valat_frames.frames(memory, pages, written(*[present] * pages))
        with pytest.raises(CalmError, match="not tell of every page"):
            valat_frames.frames(memory, pages, written(present | 9, 0, present | 5))


def test_without_privilege_the_policies_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> Any:
        raise PermissionError(1, "Operation not permitted", "/proc/self/pagemap")

    monkeypatch.setattr(valat_frames, "measured", denied)
    curves, why = valat_frames.curves_of(L2, 0.01, lambda _: None)
    assert why
    assert "Operation not permitted" in why
    assert valat_frames.cache_of(curves) == L2
    whole = valat_frames.shares_of(curves).index(1.0)
    assert curves[valat_frames.key("random", "mean")][whole] > 10
    assert curves[valat_frames.key("huge", "maximum")][whole] == 0


# ---- huge pages by turns ----


def test_the_mode_goes_by_the_case(tmp_path: Path) -> None:
    mode = tmp_path / "enabled"
    mode.write_text("always [madvise] never\n")
    with huge_pages.always(mode):
        switching = huge_pages.Switching({"b"}, "madvise", mode)
        switching.begin([(case, "glibc") for case in "ab"], 3)
        # Before the first run the machine is described.
        assert mode.read_text() == "madvise"
        for case, expected in zip("abba", ("madvise", "always", "always", "madvise"), strict=True):
            switching.turn(1, case, "glibc")
            assert mode.read_text() == expected
            switching.done(case, "glibc", 1.0)
    wait_for(mode, "madvise\n")


# Everything but the programs: in their place is one that says what the mode is, and prints all figures.
DRIVER = """
from pathlib import Path
from research.bench import workloads
from research.papers import command, huge_pages, valat_cases
from research.colors.caches import Cache
command.inputs_folder = lambda: Path({folder!r})
workloads.find = lambda name: Path({folder!r}) / name
huge_pages.always.__wrapped__.__defaults__ = (Path({mode!r}),)
huge_pages.Switching.__init__.__defaults__ = (Path({mode!r}),)
huge_pages.mode.__defaults__ = (Path({mode!r}),)
valat_cases.outer_cache = lambda: Cache(2, 1 << 20, 8)
valat_cases.SIZES, valat_cases.PROCESSES, valat_cases.ARRAYS = (0.5, 1.0), (1, 8), (16,)
"""
PROGRAM = """#!/bin/sh
echo "$* in $(cat {mode})" >>{log}
case " $* " in *" colored "*) exit 2 ;; esac
echo '{{"seconds": 0.5, "ns_per_load": 2, "ns_per_element": 3, "cycles_per_iteration": 4, "huge_kib": 2048}}'
"""


@pytest.fixture
def set_up(tmp_path: Path) -> str:
    """Python code, before calm begins."""
    folder, mode = tmp_path / "in", tmp_path / "enabled"
    folder.mkdir()
    mode.write_text("always [madvise] never\n")
    for name in ("array-sweep", "mhd-like", "streams", "alias4k", *valat_cases.KERNELS):
        (folder / name).write_text(PROGRAM.format(mode=mode, log=tmp_path / "log"))
        (folder / name).chmod(0o755)
    return DRIVER.format(folder=str(folder), mode=str(mode))


def test_runs_writes_draws_and_shows_again(set_up: str, tmp_path: Path) -> None:
    out, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    words = ("run", "valat", "--no-touch", "--scale", "0.01", "-a", "calmalloc", "-n", "2")
    more = ("--set-thp", "--json", out, "--plot", drawn)
    done = paper(*words, *more, set_up=set_up)
    assert done.returncode == 0, done.stderr
    wait_for(tmp_path / "enabled", "madvise\n")
    data = json.loads(out.read_text())
    rows = {row["name"]: row for row in data["rows"]}
    # What it was run in is what its name says; the others had what was there before.
    log = (tmp_path / "log").read_text().splitlines()
    modes = {line.partition(" in ")[2].split()[0] for line in log if "--processes" not in line}
    assert modes <= {"madvise", "always"}
    kernels = [line for line in log if "--processes" in line]
    assert sum(line.endswith(" in always") for line in kernels) * 2 == len(kernels)
    assert sum(name.endswith("huge pages always") for name in rows) == len(valat_cases.KERNELS) * 2
    # Mapped by the program: under glibc alone.
    assert [side["label"] for side in rows["array-sweep, 512 KiB, huge, stride"]["sides"]] == ["glibc"]
    # Two sizes and two ways to walk, in three rounds.
    assert sum("--memory huge " in line for line in log) == 2 * 2 * 3
    assert sum("--memory malloc --walk" in line for line in log) == 2 * 2 * 3 * 2
    both = rows["array-sweep, 512 KiB, malloc, stride"]["sides"]
    assert [side["label"] for side in both] == ["glibc", "calmalloc"]
    assert rows["array-sweep, 512 KiB, huge, stride"]["sides"][0]["runs"][0]["figures"]["huge_kib"] == 2048
    # Counting shootdowns takes longer than many of these runs do.
    assert not any("shootdowns" in name for name in both[0]["runs"][0]["figures"])
    # The program knows of no colored memory.
    assert not any("colored" in name for name in rows)
    assert rows["frames in this machine's L2"]["family"] == FRAMES
    # Another order of the cases in each round.
    told = re.findall(r"^round (\d) of 2, (.*?): (?:glibc|calmalloc) ", done.stderr, re.MULTILINE)
    orders = [[name for number, name in told if number == each] for each in "12"]
    assert sorted(orders[0]) == sorted(orders[1])
    assert len(orders[0]) == len(rows) - 2
    assert orders[0] != orders[1]
    assert drawn.stat().st_size > 10_000
    again = paper("report", out)
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_other_papers_are_not_drawn() -> None:
    assert [paper.name for paper in rerun.PAPERS.values() if paper.draw] == ["valat"]
    assert isinstance(valat.PAPER, model.Paper)
