"""What policies of page coloring cost on simulated caches: the paper's figures, and the proposed hash."""

import io
import json
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from calm import errors, report
from calm.colors import conflicts
from calm.colors.geometry import NEHALEM, Cache
from calm.colors.simulation import (
    caches_model,
    patterns,
    policies,
    simulate,
    simulate_command,
    simulate_report,
)
from calm.colors.simulation.buddy import Ints
from calm.colors.simulation.policies import POLICIES
from calm.colors.simulation.simulate import Result

L3 = NEHALEM[2]
# A machine of today: 32 colors, and an L3 whose sets are no power of two.
L2_TODAY, L3_HASHED = Cache(2, 2 << 20, 16), Cache(3, 12 * 5 * 4096, 12, cpus=8)
EVEN = ("modulo", "modulo-pid", "bin-hopping", "best-bin", "best-bin-free", "huge", "hash")
CHANCE = ("buddy", "random")
REGULAR = ("modulo", "modulo-pid", "huge")


@pytest.fixture(scope="module")
def nehalem() -> Result:
    return simulate.run(L3, runs=60, seed=1)


def test_colors_by_chance_conflict_far_below_the_size_of_the_cache(nehalem: Result) -> None:
    """Figure 2: 2,048 pages fit; the most conflicts are at that, and some runs have them at two fifths."""
    figure = nehalem.figure(simulate.CONFLICTS)
    for name in CHANCE:
        curve = figure.curve(name)
        below = [point.mean for point in curve.points if point.at <= 1]
        above = [point.mean for point in curve.points if point.at >= 1]
        assert below == sorted(below)
        assert above == sorted(above, reverse=True)
        begin = simulate_report.begin(curve, lambda point: point.maximum, 1)
        assert begin is not None
        assert 0.2 < begin < 0.55
        # At 5 of 8 MiB, where the paper's loop slows down, there are conflicts in nearly every run.
        assert curve.at(0.625).mean > 3
        assert curve.at(0.75).minimum > 0
        assert 150 < curve.at(1).mean < 230
        for point in curve.points:
            assert 0 <= point.minimum <= point.mean <= point.maximum
            if 0.75 <= point.at <= 1.25:
                assert point.minimum < point.mean < point.maximum


def test_a_random_page_table_has_the_conflicts_that_are_expected(nehalem: Result) -> None:
    """Against the binomial distribution's mean, which is computed elsewhere and otherwise."""
    for point in nehalem.figure(simulate.CONFLICTS).curve("random").points:
        pages = round(point.at * 2048)
        expected = conflicts.expected(pages, L3) - conflicts.unavoidable(pages, L3)
        # The standard deviation of one run is at most 17 pages, and there are 60 runs.
        assert point.mean == pytest.approx(expected, abs=4.5 * 17 / 60**0.5)


@pytest.mark.parametrize("name", EVEN)
def test_even_colorings_have_no_unnecessary_conflict_in_one_array_of_any_size(
    nehalem: Result, name: str
) -> None:
    curve = nehalem.figure(simulate.CONFLICTS).curve(name)
    assert len(curve.points) == 32
    assert {point.maximum for point in curve.points} == {0}
    # So a repeated pass finds all of an array, up to all of the cache; by chance it does not (figure 3).
    linear = nehalem.figure(simulate.LINEAR)
    assert {point.maximum for point in linear.curve(name).points if point.at <= 1} == {0}
    for chance in CHANCE:
        assert linear.curve(chance).at(0.75).mean > 0.08
        assert linear.curve(chance).at(1).minimum > 0.35


def test_counts_by_size_are_those_of_each_size(nehalem: Result) -> None:
    """The sums over all sizes at once are the conflicts of each array by itself."""
    colors = np.random.default_rng(3).integers(128, size=4096)
    ends = simulate.sizes(2048)
    counts = simulate.counts_by_size(colors, 128, ends)
    assert ends.tolist() == list(range(128, 4097, 128))
    for end, row in zip(ends, counts, strict=True):
        unnecessary = np.maximum(row - 16, 0).sum() - max(0, end - 2048)
        assert unnecessary == conflicts.unnecessary(colors[:end], L3)


@pytest.mark.parametrize("cache", [NEHALEM[1], L3_HASHED])
@pytest.mark.parametrize("name", ["random", "buddy", "hash", "modulo"])
def test_what_is_computed_for_a_linear_access_is_what_is_simulated(name: str, cache: Cache) -> None:
    result = simulate.run(cache, policies=[name], patterns=[simulate.LINEAR], runs=5, seed=8)
    seeds = np.random.SeedSequence(8).generate_state(5, np.uint64).tolist()
    for share in (0.5, 0.75, 1.0, 1.25):
        pages = int(share * result.pages)

        # The policy has all of the largest array's pages to place, of which these are the first.
        def policy(touches: policies.Touches, colors: int, seed: int, pages: int = pages) -> Ints:
            return POLICIES[name](policies.segment(2 * result.pages, patterns.START), colors, seed)[:pages]

        found = simulate.miss_ratios(cache, patterns.blocked(pages, tiles=1), policy, seeds)
        point = result.figure(simulate.LINEAR).curve(name).at(share)
        if name == "modulo":
            found = found[:1]
        assert found.mean() == pytest.approx(point.mean)
        assert (found.min(), found.max()) == pytest.approx((point.minimum, point.maximum))


def test_regular_colors_fail_where_more_arrays_are_aligned_than_there_are_ways(nehalem: Result) -> None:
    """Section 4.2, figure 10: 17 pages, of 2,048, and every access misses; others lose nothing up to 64."""
    figure = nehalem.figure(simulate.ARRAYS)
    for curve in figure.curves:
        for point in curve.points:
            regular = curve.policy in REGULAR and point.at > 16
            assert (point.minimum, point.maximum) == ((1, 1) if regular else (0, 0))
    assert [point.at for point in figure.curve("hash").points] == [8, 16, 17, 24, 32, 64]


def test_starts_that_are_spread_help_every_policy(nehalem: Result) -> None:
    """What an allocator can do where no policy can: in huge pages, colors are the address's."""
    for curve in nehalem.figure(simulate.SPREAD).curves:
        assert {point.maximum for point in curve.points} == {0}, curve.policy


def test_processes_with_equal_addresses_fail_together_with_regular_colors(nehalem: Result) -> None:
    """Section 4.3: four aligned arrays are all that each of four processes may have, with 16 ways."""
    figure = nehalem.figure(simulate.PROCESSES)
    for name in ("modulo", "huge"):
        assert [figure.curve(name).at(count).minimum for count in (1, 2, 4, 6, 8)] == [0, 0, 0, 1, 1]
    # The process's number moves it by a page only.
    assert figure.curve("modulo-pid").at(8).minimum > 0.85
    for name in ("bin-hopping", "best-bin", "best-bin-free"):
        assert {point.maximum for point in figure.curve(name).points} == {0}
    assert figure.curve("hash").at(8).maximum < 0.05
    assert figure.curve("hash").at(8).mean <= figure.curve("random").at(8).mean < 0.05


def test_tiles_use_the_whole_cache_by_the_hash_if_they_leave_a_way_or_begin_with_a_piece(
    nehalem: Result,
) -> None:
    figure = nehalem.figure(simulate.BLOCKED)
    shares = [point.at for point in figure.curves[0].points]
    assert shares == [0.5, 0.625, 0.75, 0.875, 0.9375, 0.984375, 1]
    for name in EVEN:
        if name != "hash":
            assert {point.maximum for point in figure.curve(name).points} == {0}, name
    curve = figure.curve("hash")
    assert {point.maximum for point in curve.points if point.at != 0.984375} == {0}
    # Nearly all of the cache, from within a piece: it loses something, and far less than chance does.
    assert 0.02 < curve.at(0.984375).minimum <= curve.at(0.984375).maximum < 0.15
    assert figure.curve("random").at(0.984375).minimum > 0.4
    assert figure.curve("buddy").at(0.75).minimum > 0.02


@pytest.mark.parametrize("cache", [L2_TODAY, L3_HASHED])
def test_other_caches_show_the_same(cache: Cache) -> None:
    result = simulate.run(cache, policies=["modulo", "random", "hash"], runs=30, seed=2)
    figure = result.figure(simulate.CONFLICTS)
    assert {point.maximum for point in figure.curve("hash").points} == {0}
    assert figure.curve("random").at(1).minimum > 0
    arrays = result.figure(simulate.ARRAYS)
    aligned = cache.ways + 1
    assert arrays.curve("modulo").at(aligned).minimum == 1
    # Pages of 32 colors fill 16 ways by chance hardly ever; 13 pages of 5 colors 12 ways neither.
    assert arrays.curve("hash").at(aligned).maximum == 0
    assert result.figure(simulate.PROCESSES).curve("modulo").at(8).minimum == 1
    assert any("hashed" in note for note in result.notes) == (cache is L3_HASHED)
    assert any("serves one CPU" in note for note in result.notes) == (cache is L2_TODAY)


@pytest.mark.parametrize(("ways", "colors"), [(1, 2), (2, 2), (4, 2), (8, 8), (16, 128)])
def test_no_number_of_arrays_or_processes_is_more_than_there_is_room_for(ways: int, colors: int) -> None:
    cache = Cache(2, ways * colors * 4096, ways)
    for pattern in (simulate.ARRAYS, simulate.PROCESSES):
        traces = simulate.traces(pattern, cache)
        assert traces
        assert all(len(trace.touches) <= ways * colors for trace in traces.values())
    assert list(simulate.traces(simulate.SPREAD, cache)) == list(simulate.traces(simulate.ARRAYS, cache))


def test_the_same_seed_gives_the_same_and_another_one_another() -> None:
    def some(seed: int) -> Result:
        return simulate.run(
            NEHALEM[1], policies=["random", "hash"], patterns=["linear", "processes"], runs=4, seed=seed
        )

    assert some(5) == some(5)
    assert some(5).figures != some(6).figures


def test_a_cache_without_colors_is_refused() -> None:
    with pytest.raises(ValueError, match="no colors"):
        simulate.run(NEHALEM[0])
    with pytest.raises(errors.CalmError, match="no L1 is known in which pages have colors"):
        simulate_command.chosen("nehalem", 1)


def test_streams_are_the_arrays_in_turns() -> None:
    arrays = patterns.Arrays(3, gap_pages=512, used_bytes=8192)
    trace = patterns.streams(arrays, processes=2, passes=2)
    touched = trace.touches
    assert trace.line is None
    assert touched.pages.tolist() == [512, 1024, 1536] * 2 + [513, 1025, 1537] * 2
    assert touched.pids.tolist() == ([1000] * 3 + [1001] * 3) * 2
    assert touched.segments.tolist() == [512, 1024, 1536] * 4
    assert trace.page.tolist() == list(range(12)) * 2
    assert trace.repeated.tolist() == [False] * 12 + [True] * 12


def test_streams_that_start_within_pages_go_by_lines_and_over_their_pages_ends() -> None:
    arrays = patterns.Arrays(2, gap_pages=512, used_bytes=4096, spread_bytes=4096)
    trace = patterns.streams(arrays, passes=1)
    assert trace.touches.pages.tolist() == [512, 1024, 1025]
    assert trace.line is not None
    second = trace.page != 0
    assert trace.line[~second].tolist() == list(range(64))
    assert trace.line[second].tolist() == [*range(32, 64), *range(32)]
    assert trace.page[second].tolist() == [1] * 32 + [2] * 32
    lines = trace.lines(np.array([5, 9, 7]), 64)
    assert lines[:4].tolist() == [5 * 64, 9 * 64 + 32, 5 * 64 + 1, 9 * 64 + 33]


def test_whole_pages_of_a_trace_are_all_their_lines() -> None:
    trace = patterns.blocked(pages=40, tiles=2, passes=2)
    assert trace.page.tolist() == [*range(40)] * 2 + [*range(40, 80)] * 2
    assert trace.repeated.tolist() == ([False] * 40 + [True] * 40) * 2
    frames = policies.random(trace.touches, 8, 3)
    cache = NEHALEM[1]
    by_page = caches_model.page_hits(cache, 4096, frames[trace.page])
    lines = (frames[trace.page, None] * 64 + np.arange(64)).ravel()
    by_line = caches_model.line_hits(cache, lines)
    assert by_line.reshape(-1, 64).all(axis=1).tolist() == by_page.tolist()
    assert by_line.mean() == by_page.mean() > 0


def test_the_report_says_what_the_figures_do(nehalem: Result) -> None:
    file = io.StringIO()
    simulate_report.report(nehalem, report.console(file))
    text = file.getvalue()
    for figure in nehalem.figures:
        assert f"\n{figure.name}: {figure.what}\n" in text
    assert "from 17 on: modulo, modulo-pid, huge\n" in text
    assert "from 6 on: modulo, modulo-pid, huge\n" in text
    assert "none in any run: modulo, modulo-pid, bin-hopping, best-bin, best-bin-free, huge, hash\n" in text
    assert "the first 8.0 MiB of a segment never conflict with each other, nor any 7.5 MiB in a row" in text
    rows = {line.split()[0]: line.split() for line in text.split("linear:")[0].splitlines() if line}
    assert rows["hash"][1:] == ["0"] * 7
    assert float(rows["random"][1]) == pytest.approx(
        nehalem.figures[0].curve("random").at(0.5).mean, abs=0.06
    )


def test_a_cell_is_the_mean_and_what_it_lies_between() -> None:
    point = simulate.Point(16, 0.125, 0.6, 0.75)
    figure = simulate.Figure(simulate.ARRAYS, "", [])
    assert simulate_report._cell(figure, point) == "60 % (12-75)"
    assert simulate_report._cell(figure, simulate.Point(16, 0.5, 0.5, 0.5)) == "50 %"
    counted = simulate.Figure(simulate.CONFLICTS, "", [])
    assert simulate_report._cell(counted, simulate.Point(1, 0.0, 1.5, 20.0)) == "1.5 (0-20)"


def test_what_goes_wrong_is_so_by_the_mean_of_the_runs() -> None:
    points = [simulate.Point(8, 0, 0.4, 0.6), simulate.Point(16, 0.3, 0.5, 0.7), simulate.Point(32, 1, 1, 1)]
    figure = simulate.Figure(simulate.ARRAYS, "", [simulate.Curve("random", points)])
    (said,) = simulate_report.findings(Result(L3, 4096, 5, 5, 1, [figure]))
    assert said == "arrays: most accesses miss though there is room, from 16 on: random"


def test_json_has_every_figure(nehalem: Result) -> None:
    found = json.loads(json.dumps(simulate_report.as_json(nehalem)))
    assert (found["colors"], found["pages"], found["runs"], found["traced"]) == (128, 2048, 60, 20)
    assert found["cache"]["bytes"] == 8 << 20
    figure = next(figure for figure in found["figures"] if figure["name"] == "conflicts")
    curve = next(curve for curve in figure["curves"] if curve["policy"] == "buddy")
    own = nehalem.figure("conflicts").curve("buddy").points
    assert [point["mean"] for point in curve["points"]] == [point.mean for point in own]


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_a_picture_is_drawn_of_all_figures_or_of_one(nehalem: Result, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"all{ending}"
    simulate_report.picture(nehalem, path)
    assert path.read_bytes()[:5] == (b"<?xml" if ending == ".svg" else b"\x89PNG\r")
    one = simulate.run(NEHALEM[1], policies=["random"], patterns=["arrays"], runs=2)
    simulate_report.picture(one, tmp_path / f"one{ending}")
    assert (tmp_path / f"one{ending}").stat().st_size < path.stat().st_size


@click.command()
@click.option("--level", type=int)
@click.option("--json", "json_path")
@simulate_command.options
def command(**values: object) -> None:
    """As `calm colors` has it."""
    simulate_command.simulate(**values)  # type: ignore[arg-type]


def test_the_options_choose_what_is_simulated(tmp_path: Path) -> None:
    chosen = [f"--policy={name}" for name in ("hash", "random", "hash")]
    words = [*chosen, "--pattern=arrays", "--level=2", "--runs=3", "--seed=4"]
    result = CliRunner().invoke(
        command, [*words, "--json", str(tmp_path / "a.json"), "--picture", str(tmp_path / "a.svg")]
    )
    assert result.exit_code == 0, result.exception
    assert "L2: 256 KiB, 8 ways, 8 colors of 4 KiB pages; 3 runs" in result.output
    found = json.loads((tmp_path / "a.json").read_text())
    assert [figure["name"] for figure in found["figures"]] == ["arrays"]
    assert [curve["policy"] for curve in found["figures"][0]["curves"]] == ["hash", "random"]
    assert (found["caches_of"], found["seed"], found["runs"]) == ("nehalem", 4, 3)
    assert (tmp_path / "a.svg").stat().st_size > 0


def test_a_picture_of_another_kind_is_refused_before_anything_is_simulated(tmp_path: Path) -> None:
    with pytest.raises(errors.CalmError, match=r"must end in \.svg or \.png"):
        simulate_command.simulate(picture_path=str(tmp_path / "a.gif"))


def test_the_outermost_cache_that_is_not_hashed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulate_command.chosen("nehalem", None) == L3
    today = [Cache(1, 48 << 10, 12), L2_TODAY, L3_HASHED]
    monkeypatch.setitem(simulate_command.CACHES, "machine", lambda: today)
    assert simulate_command.chosen("machine", None) == L2_TODAY
    assert simulate_command.chosen("machine", 3) == L3_HASHED
    monkeypatch.setitem(simulate_command.CACHES, "machine", lambda: [])
    with pytest.raises(errors.CalmError, match="no cache is known"):
        simulate_command.chosen("machine", None)


def test_larger_caches_have_fewer_runs() -> None:
    assert simulate.default_runs(L3) == simulate.default_runs(NEHALEM[1]) == 500
    assert simulate.default_runs(Cache(3, 32 << 20, 16)) == 125
    assert simulate.default_runs(Cache(3, 480 << 20, 16)) == 20
