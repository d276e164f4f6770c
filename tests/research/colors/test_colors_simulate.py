"""What policies of page coloring cost on simulated caches: the paper's figures, and the proposed hash."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from calm.core import documents, errors, report
from research.colors import caches, command, policies, simulation_report
from research.colors import simulation as simulate
from research.colors.caches import NEHALEM, Cache, Ints
from research.colors.policies import POLICIES
from research.colors.simulation import Curve, Figure, Point, Simulation

L3 = NEHALEM[2]
# A machine of today: 32 colors, and an L3 whose sets are no power of two.
L2_TODAY, L3_HASHED = Cache(2, 2 << 20, 16), Cache(3, 12 * 5 * 4096, 12, cpus=8)
EVEN = ("modulo", "modulo-pid", "bin-hopping", "best-bin", "best-bin-free", "huge", "hash")
CHANCE = ("buddy", "random")
REGULAR = ("modulo", "modulo-pid", "huge")


def curve_of(figure: Figure, policy: str) -> Curve:
    return next(curve for curve in figure.curves if curve.policy == policy)


def point_at(curve: Curve, where: float) -> Point:
    return next(point for point in curve.points if math.isclose(point.at, where))


@pytest.fixture(scope="module")
def nehalem() -> Simulation:
    return simulate.run(L3, runs=60, seed=1)


def test_colors_by_chance_conflict_far_below_the_size_of_the_cache(nehalem: Simulation) -> None:
    """Figure 2: 2,048 pages fit; the most conflicts are at that, and some runs have them at two fifths."""
    figure = nehalem.figure(simulate.CONFLICTS)
    for name in CHANCE:
        curve = curve_of(figure, name)
        below = [point.mean for point in curve.points if point.at <= 1]
        above = [point.mean for point in curve.points if point.at >= 1]
        assert below == sorted(below)
        assert above == sorted(above, reverse=True)
        assert 0.2 < next(point.at for point in curve.points if point.maximum >= 1) < 0.55
        # At 5 of 8 MiB, where the paper's loop slows down, there are conflicts in nearly every run.
        assert point_at(curve, 0.625).mean > 3
        assert point_at(curve, 0.75).minimum > 0
        assert 150 < point_at(curve, 1).mean < 230
        for point in curve.points:
            assert 0 <= point.minimum <= point.mean <= point.maximum
            if 0.75 <= point.at <= 1.25:
                assert point.minimum < point.mean < point.maximum


def test_a_random_page_table_has_the_conflicts_that_are_expected(nehalem: Simulation) -> None:
    """Against the binomial distribution's mean, which is computed elsewhere and otherwise."""
    for point in curve_of(nehalem.figure(simulate.CONFLICTS), "random").points:
        pages = round(point.at * 2048)
        expected = caches.expected(pages, L3) - max(0, pages - L3.pages)
        # The standard deviation of one run is at most 17 pages, and there are 60 runs.
        assert point.mean == pytest.approx(expected, abs=4.5 * 17 / 60**0.5)


@pytest.mark.parametrize("name", EVEN)
def test_even_colorings_have_no_unnecessary_conflict_in_one_array_of_any_size(
    nehalem: Simulation, name: str
) -> None:
    curve = curve_of(nehalem.figure(simulate.CONFLICTS), name)
    assert len(curve.points) == 32
    assert {point.maximum for point in curve.points} == {0}
    # So a repeated pass finds all of an array, up to all of the cache; by chance it does not (figure 3).
    linear = nehalem.figure(simulate.LINEAR)
    assert {point.maximum for point in curve_of(linear, name).points if point.at <= 1} == {0}
    for chance in CHANCE:
        assert point_at(curve_of(linear, chance), 0.75).mean > 0.08
        assert point_at(curve_of(linear, chance), 1).minimum > 0.35


def test_counts_by_size_are_those_of_each_size(nehalem: Simulation) -> None:
    """The sums over all sizes at once are the conflicts of each array by itself."""
    colors = np.random.default_rng(3).integers(128, size=4096)
    ends = simulate.sizes(2048)
    counts = simulate.counts_by_size(colors, 128, ends)
    assert ends.tolist() == list(range(128, 4097, 128))
    for end, row in zip(ends, counts, strict=True):
        unnecessary = np.maximum(row - 16, 0).sum() - max(0, end - 2048)
        assert unnecessary == L3.unnecessary(L3.counts(colors[:end]))


@pytest.mark.parametrize("cache", [NEHALEM[1], L3_HASHED])
@pytest.mark.parametrize("name", ["random", "buddy", "hash", "modulo"])
def test_what_is_computed_for_a_linear_access_is_what_is_simulated(name: str, cache: Cache) -> None:
    result = simulate.run(cache, policies=[name], patterns=[simulate.LINEAR], runs=5, seed=8)
    seeds = np.random.SeedSequence(8).generate_state(5, np.uint64).tolist()
    for share in (0.5, 0.75, 1.0, 1.25):
        pages = int(share * result.pages)

        # The policy has all of the largest array's pages to place, of which these are the first.
        def policy(touches: policies.Touches, colors: int, seed: int, pages: int = pages) -> Ints:
            return POLICIES[name](policies.segment(2 * result.pages, simulate.START), colors, seed)[:pages]

        found = simulate.miss_ratios(cache, simulate.blocked(pages, tiles=1), policy, seeds)
        point = point_at(curve_of(result.figure(simulate.LINEAR), name), share)
        if name == "modulo":
            found = found[:1]
        assert found.mean() == pytest.approx(point.mean)
        assert (found.min(), found.max()) == pytest.approx((point.minimum, point.maximum))


def test_regular_colors_fail_where_more_arrays_are_aligned_than_there_are_ways(nehalem: Simulation) -> None:
    """Section 4.2, figure 10: 17 pages, of 2,048, and every access misses; others lose nothing up to 64."""
    figure = nehalem.figure(simulate.ARRAYS)
    for curve in figure.curves:
        for point in curve.points:
            regular = curve.policy in REGULAR and point.at > 16
            assert (point.minimum, point.maximum) == ((1, 1) if regular else (0, 0))
    assert [point.at for point in curve_of(figure, "hash").points] == [8, 16, 17, 24, 32, 64]


def test_starts_that_are_spread_help_every_policy(nehalem: Simulation) -> None:
    """What an allocator can do where no policy can: in huge pages, colors are the address's."""
    for curve in nehalem.figure(simulate.SPREAD).curves:
        assert {point.maximum for point in curve.points} == {0}, curve.policy


def test_processes_with_equal_addresses_fail_together_with_regular_colors(nehalem: Simulation) -> None:
    """Section 4.3: four aligned arrays are all that each of four processes may have, with 16 ways."""
    figure = nehalem.figure(simulate.PROCESSES)
    for name in ("modulo", "huge"):
        assert [point_at(curve_of(figure, name), count).minimum for count in (1, 2, 4, 6, 8)] == [
            0,
            0,
            0,
            1,
            1,
        ]
    # The process's number moves it by a page only.
    assert point_at(curve_of(figure, "modulo-pid"), 8).minimum > 0.85
    for name in ("bin-hopping", "best-bin", "best-bin-free"):
        assert {point.maximum for point in curve_of(figure, name).points} == {0}
    assert point_at(curve_of(figure, "hash"), 8).maximum < 0.05
    assert point_at(curve_of(figure, "hash"), 8).mean <= point_at(curve_of(figure, "random"), 8).mean < 0.05


def test_tiles_use_the_whole_cache_by_the_hash_if_they_leave_a_way_or_begin_with_a_piece(
    nehalem: Simulation,
) -> None:
    figure = nehalem.figure(simulate.BLOCKED)
    shares = [point.at for point in figure.curves[0].points]
    assert shares == [0.5, 0.625, 0.75, 0.875, 0.9375, 0.984375, 1]
    for name in EVEN:
        if name != "hash":
            assert {point.maximum for point in curve_of(figure, name).points} == {0}, name
    curve = curve_of(figure, "hash")
    assert {point.maximum for point in curve.points if point.at != 0.984375} == {0}
    # Nearly all of the cache, from within a piece: it loses something, and far less than chance does.
    assert 0.02 < point_at(curve, 0.984375).minimum <= point_at(curve, 0.984375).maximum < 0.15
    assert point_at(curve_of(figure, "random"), 0.984375).minimum > 0.4
    assert point_at(curve_of(figure, "buddy"), 0.75).minimum > 0.02


@pytest.mark.parametrize("cache", [L2_TODAY, L3_HASHED])
def test_other_caches_show_the_same(cache: Cache) -> None:
    result = simulate.run(cache, policies=["modulo", "random", "hash"], runs=30, seed=2)
    figure = result.figure(simulate.CONFLICTS)
    assert {point.maximum for point in curve_of(figure, "hash").points} == {0}
    assert point_at(curve_of(figure, "random"), 1).minimum > 0
    arrays = result.figure(simulate.ARRAYS)
    aligned = cache.ways + 1
    assert point_at(curve_of(arrays, "modulo"), aligned).minimum == 1
    # Pages of 32 colors fill 16 ways by chance hardly ever; 13 pages of 5 colors 12 ways neither.
    assert point_at(curve_of(arrays, "hash"), aligned).maximum == 0
    assert point_at(curve_of(result.figure(simulate.PROCESSES), "modulo"), 8).minimum == 1
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
    def some(seed: int) -> Simulation:
        return simulate.run(
            NEHALEM[1], policies=["random", "hash"], patterns=["linear", "processes"], runs=4, seed=seed
        )

    assert some(5).figures == some(5).figures
    assert some(5).figures != some(6).figures


def test_a_cache_without_colors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.CalmError, match="no L1 is known in which pages have colors"):
        command.choose("nehalem", 1)
    # A way has five halves of a page.
    monkeypatch.setitem(command.CACHES, "machine", lambda: [Cache(2, 8 * 10240, 8)])
    with pytest.raises(errors.CalmError, match="a way of its L2 is no whole number of pages"):
        command.choose("machine", 2)


def test_streams_are_the_arrays_in_turns() -> None:
    trace = simulate.streams(3, 512, 8192, processes=2, passes=2)
    touched = trace.touches
    assert trace.line is None
    assert touched.pages.tolist() == [512, 1024, 1536] * 2 + [513, 1025, 1537] * 2
    assert touched.pids.tolist() == ([1000] * 3 + [1001] * 3) * 2
    assert touched.segments.tolist() == [512, 1024, 1536] * 4
    assert trace.page.tolist() == list(range(12)) * 2
    assert trace.repeated.tolist() == [False] * 12 + [True] * 12


def test_streams_that_start_within_pages_go_by_lines_and_over_their_pages_ends() -> None:
    trace = simulate.streams(2, 512, 4096, spread_bytes=4096, passes=1)
    assert trace.touches.pages.tolist() == [512, 1024, 1025]
    assert trace.line is not None
    second = trace.page != 0
    assert trace.line[~second].tolist() == list(range(64))
    assert trace.line[second].tolist() == [*range(32, 64), *range(32)]
    assert trace.page[second].tolist() == [1] * 32 + [2] * 32
    lines = trace.accessed(np.array([[5, 9, 7]]), 64)[0]
    assert lines[:4].tolist() == [5 * 64, 9 * 64 + 32, 5 * 64 + 1, 9 * 64 + 33]


def test_whole_pages_of_a_trace_are_accessed_by_their_frames() -> None:
    trace = simulate.blocked(pages=40, tiles=2, passes=2)
    assert trace.page.tolist() == [*range(40)] * 2 + [*range(40, 80)] * 2
    assert trace.repeated.tolist() == ([False] * 40 + [True] * 40) * 2
    frames = policies.random(trace.touches, 8, 3)
    assert trace.accessed(frames[None], 64).tolist() == [frames[trace.page].tolist()]


def test_the_report_says_what_the_figures_do(nehalem: Simulation) -> None:
    file = io.StringIO()
    simulation_report.show(report.console(file), nehalem)
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
        point_at(curve_of(nehalem.figures[0], "random"), 0.5).mean, abs=0.06
    )


def test_a_cell_is_the_mean_and_what_it_lies_between() -> None:
    point = simulate.Point(16, 0.125, 0.6, 0.75)
    figure = simulate.Figure(simulate.ARRAYS, "", [])
    assert simulation_report._cell(figure, point) == "60 % (12-75)"
    assert simulation_report._cell(figure, simulate.Point(16, 0.5, 0.5, 0.5)) == "50 %"
    counted = simulate.Figure(simulate.CONFLICTS, "", [])
    assert simulation_report._cell(counted, simulate.Point(1, 0.0, 1.5, 20.0)) == "1.5 (0-20)"


def made(figure: simulate.Figure) -> Simulation:
    return Simulation(
        cache=L3, colors=128, pages=2048, rounds=5, traced=5, seed=1, figures=[figure], notes=[]
    )


def test_what_goes_wrong_is_so_by_the_mean_of_the_runs() -> None:
    points = [simulate.Point(8, 0, 0.4, 0.6), simulate.Point(16, 0.3, 0.5, 0.7), simulate.Point(32, 1, 1, 1)]
    figure = simulate.Figure(simulate.ARRAYS, "", [simulate.Curve("random", points)])
    (said,) = simulation_report.findings(made(figure))
    assert said == "arrays: most accesses miss though there is room, from 16 on: random"


def test_json_has_every_figure(nehalem: Simulation, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(documents.text(nehalem))
    assert documents.read(str(tmp_path / "a.json"), Simulation) == nehalem
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["schema"], found["version"]) == ("calm-color-simulation", 1)
    assert (found["colors"], found["pages"], found["rounds"], found["traced"]) == (128, 2048, 60, 20)
    assert found["cache"]["bytes"] == 8 << 20
    figure = next(figure for figure in found["figures"] if figure["name"] == "conflicts")
    curve = next(curve for curve in figure["curves"] if curve["policy"] == "buddy")
    own = curve_of(nehalem.figure("conflicts"), "buddy").points
    assert [point["mean"] for point in curve["points"]] == [point.mean for point in own]


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_a_picture_is_drawn_of_all_figures_or_of_one(
    nehalem: Simulation, tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"all{ending}"
    simulation_report.draw(nehalem, path)
    assert path.read_bytes()[:5] == (b"<?xml" if ending == ".svg" else b"\x89PNG\r")
    one = simulate.run(NEHALEM[1], policies=["random"], patterns=["arrays"], runs=2)
    simulation_report.draw(one, tmp_path / f"one{ending}")
    assert (tmp_path / f"one{ending}").stat().st_size < path.stat().st_size


def test_the_options_choose_what_is_simulated(tmp_path: Path) -> None:
    chosen = [f"--policy={name}" for name in ("hash", "random", "hash")]
    words = [*chosen, "--pattern=arrays", "--level=2", "-n", "3", "--seed=4"]
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]
    result = CliRunner().invoke(command.simulate, [*words, *files, "-o", str(tmp_path / "a.txt")])
    assert result.exit_code == 0, result.exception
    assert result.output == ""
    assert "L2: 256 KiB, 8 ways, 8 colors of 4 KiB pages; 3 runs" in (tmp_path / "a.txt").read_text()
    found = json.loads((tmp_path / "a.json").read_text())
    assert [figure["name"] for figure in found["figures"]] == ["arrays"]
    assert [curve["policy"] for curve in found["figures"][0]["curves"]] == ["hash", "random"]
    assert (found["caches_of"], found["seed"], found["rounds"]) == ("nehalem", 4, 3)
    assert (tmp_path / "a.svg").stat().st_size > 0


def test_a_picture_of_another_kind_is_refused_before_anything_is_simulated(tmp_path: Path) -> None:
    result = CliRunner().invoke(command.simulate, ["--plot", str(tmp_path / "a.gif")])
    assert result.exit_code == 2
    assert "must end in .svg or .png" in result.output


def test_the_outermost_cache_that_is_not_hashed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.choose("nehalem", None) == L3
    today = [Cache(1, 48 << 10, 12), L2_TODAY, L3_HASHED]
    monkeypatch.setitem(command.CACHES, "machine", lambda: today)
    assert command.choose("machine", None) == L2_TODAY
    assert command.choose("machine", 3) == L3_HASHED
    monkeypatch.setitem(command.CACHES, "machine", lambda: [])
    with pytest.raises(errors.CalmError, match="no cache is known"):
        command.choose("machine", None)


def test_larger_caches_have_fewer_runs() -> None:
    assert simulate.default_runs(L3) == simulate.default_runs(NEHALEM[1]) == 500
    assert simulate.default_runs(Cache(3, 32 << 20, 16)) == 125
    assert simulate.default_runs(Cache(3, 480 << 20, 16)) == 20
