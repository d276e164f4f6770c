"""`bench/figures placement`: commands, verdicts, and restoring the huge-page setting."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from lib import papers, placement, placement_peer, rounds, suite  # noqa: E402
from lib.results import Store  # noqa: E402

from calm.core import allocators, documents  # noqa: E402
from research.bench.results import Results, Row, Run, Side, Subject  # noqa: E402
from research.papers import rerun  # noqa: E402

BUILD = ROOT / "build/release"
ROWS = placement.STREAMS.rows


def test_the_group_stands_for_its_figures() -> None:
    assert placement.expand(["larson", "placement"]) == ["larson", *placement.NAMES]
    assert all(name.startswith("placement-") for name in placement.NAMES)
    helped = subprocess.run([ROOT / "bench/figures", "--help"], capture_output=True, text=True, check=True)
    text = "".join(helped.stdout.split())
    assert all(name in text for name in placement.NAMES)
    page = (ROOT / "docs/bench.md").read_text()
    assert all(f"| `{name}` |" in page for name in placement.NAMES)


def test_every_paper_is_measured() -> None:
    assert set(papers.PAPERS) == set(rerun.PAPERS)


def test_every_command_is_one_and_prints_what_is_compared() -> None:
    little = {"streams": ("--repeats", "5"), "alias4k": ("--repeats", "5"), "mhd-like": ("--steps", "1")}
    commands = [(row.command, row.goals[0].metric) for row in ROWS]
    commands += [(command, pair.metric) for pair in placement.PAIRS for _, _, command in pair.sides]
    cell = placement_peer.command(65536, 4, 2)
    commands.append(((Path(cell[0]).name, *cell[1:]), placement_peer.METRIC))
    for (program, *words), metric in commands:
        options = list(words)
        for name, value in zip(little[program][::2], little[program][1::2], strict=True):
            if name in options:
                options[options.index(name) + 1] = value
            else:
                options += [name, value]
        found = rounds.run_once([str(BUILD / program), *options], allocators.parse("glibc"))
        assert found[metric] > 0, (program, words)


def test_the_library_knows_the_option() -> None:
    """Otherwise a variant with an unknown option would be compared with itself."""
    for label in ("calmalloc", placement.UNPLACED):
        found = rounds.run_once([str(BUILD / "streams"), "--repeats", "1"], allocators.parse(label))
        assert "said" not in found
    starts = {
        label: rounds.run_once([str(BUILD / "streams"), "--repeats", "1"], allocators.parse(label))
        for label in ("calmalloc", placement.UNPLACED)
    }
    assert starts["calmalloc"]["distinct_starts"] > starts[placement.UNPLACED]["distinct_starts"] == 1


def measured_pair(figures: dict[str, float], fails: str = "") -> dict[str, Any]:
    """Results by allocator and by the arrays' memory."""
    taken = []

    def run(command: Sequence[str], allocator: allocators.Allocator) -> dict[str, Any]:
        key = f"{allocator.label.partition(':')[2][-3:]} {command[-1]}".strip()
        taken.append(key)
        if key == fails:
            raise subprocess.CalledProcessError(1, "it")
        return {"seconds": figures[key] * (1 + 0.0001 * len(taken))}

    pair = placement.Pair("it", ("mhd-like",), "seconds")
    row = placement.measure_pair(pair, 5, run)
    assert len(taken) == 18 - (5 if fails else 0)
    return row


def test_malloc_is_to_be_as_good_as_padding_by_hand() -> None:
    row = measured_pair({"malloc": 1.0, "padded": 1.0, "off malloc": 3.0})
    first, told = row["ratios"]
    assert (first["outcome"], first["n"]) == ("met", 5)
    assert (told["outcome"], round(told["value"], 1)) == (None, 3.0)
    assert [len(side["runs"]) for side in row["allocators"]] == [5, 5, 5]
    assert (
        measured_pair({"malloc": 1.1, "padded": 1.0, "off malloc": 3.0})["ratios"][0]["outcome"] == "missed"
    )


def test_a_side_that_fails_leaves_the_figure_not_known() -> None:
    row = measured_pair({"malloc": 1.0, "padded": 1.0, "off malloc": 3.0}, fails="padded")
    assert row["ratios"][0]["outcome"] == "not known"
    failed = [side for side in row["allocators"] if side["failure"]]
    assert [side["label"] for side in failed] == [placement.PADDED]


# ---- the suite ----


def suite_of(peaks: tuple[float, float], times: tuple[float, float], failure: str | None = None) -> Results:
    def row(name: str) -> Row:
        sides = [
            Side(
                label,
                [
                    Run(number, {"wall_s": time + number / 1e6, "peak_rss_kib": peak + number / 1e3})
                    for number in range(1, 6)
                ],
            )
            for label, peak, time in zip(("calmalloc", placement.UNPLACED), peaks, times, strict=True)
        ]
        return Row(name, "workload", None, [name], [], {}, sides)

    rows = [row("one"), row("other")]
    rows[1].sides[1].failure = failure
    return Results(
        date="",
        calm="0",
        machine={},
        suite="full",
        rounds=5,
        seed=1,
        timeout_s=1,
        touched_kib=0,
        how={},
        notes=[],
        allocators=[Subject(side.label, None, None, None, None, {}) for side in rows[0].sides],
        rows=rows,
        left_out={},
    )


@pytest.mark.parametrize(
    ("peaks", "times", "outcomes"),
    [
        ((1000.0, 1000.0), (1.0, 1.1), ["met", "met"]),
        ((1010.0, 1000.0), (1.0, 1.1), ["met", "missed"]),
        ((1000.0, 1000.0), (1.2, 1.1), ["missed", "met"]),
        # Memory may be a little more, time not.
        ((1003.0, 1000.0), (1.003, 1.0), ["missed", "met"]),
    ],
)
def test_the_suite_costs_neither_time_nor_memory(
    peaks: tuple[float, float], times: tuple[float, float], outcomes: list[str]
) -> None:
    found = placement.judge_suite(suite_of(peaks, times))
    assert [verdict["outcome"] for verdict in found["ratios"]] == outcomes
    assert found["outcome"] == ("missed" if "missed" in outcomes else "met")
    assert [verdict["n"] for verdict in found["ratios"]] == [2, 2]
    for key, (placed, unplaced) in ((placement.TIME.key, times), (placement.PEAK.key, peaks)):
        for case in found["cases"][key]:
            assert case["calmalloc"] == pytest.approx(placed, rel=1e-4)
            assert case[placement.UNPLACED] == pytest.approx(unplaced, rel=1e-4)


def test_the_suites_interval_is_about_its_mean() -> None:
    found = suite_of((1000.0, 1000.0), (1.0, 1.0))
    for row in found.rows:
        for run, taken in zip(row.sides[0].runs, (0.8, 0.9, 1.0, 1.1, 1.2), strict=True):
            run.figures["wall_s"] = taken
    first = placement.judge_suite(found)["ratios"][0]
    assert 0.8 <= first["low"] < first["value"] < first["high"] <= 1.2


def test_streams_are_to_take_less_than_without_placement() -> None:
    goals = {row.name: row.goals[0] for row in ROWS}
    assert {(goal.metric, goal.of, goal.to) for goal in goals.values()} == {
        ("seconds", "calmalloc", placement.UNPLACED)
    }
    # Where there are no more arrays than ways it may cost little; beyond, it is to gain much.
    assert all((goal.at_most or 0) < 1 for name, goal in goals.items() if int(name.split()[0]) > 8)
    assert all(1 < (goal.at_most or 0) < 1.05 for name, goal in goals.items() if int(name.split()[0]) <= 8)


def test_a_case_that_failed_is_in_no_mean() -> None:
    found = placement.judge_suite(suite_of((1000.0, 1000.0), (1.0, 1.1), "it broke"))
    assert [verdict["n"] for verdict in found["ratios"]] == [1, 1]
    assert found["failures"] == [f"other under {placement.UNPLACED}: it broke"]
    json.dumps(found)


def test_what_the_suite_takes_is_known_from_the_suite(tmp_path: Path) -> None:
    assert placement.expected_s(Store(tmp_path), 7) is None
    found = placement.expected_s(Store(), 7)
    assert found
    assert found == pytest.approx(2 * (placement.expected_s(Store(), 3) or 0))
    # Two cases of 3 s, under both, in five rounds and one more.
    suite.result(tmp_path).write_text(documents.text(suite_of((1.0, 1.0), (3.0, 9.0))))
    assert placement.expected_s(Store(tmp_path), 5) == pytest.approx(2 * 3 * 2 * 6, rel=1e-4)


# ---- the peer ----


def grid(tmp_path: Path, ratio: float, slower: int | None = None, **more: Any) -> dict[str, Any]:
    """Results in which calmalloc takes this share of jemalloc's time, and twice that in one cell."""
    asked: list[str] = []

    def measured(command: Sequence[str], rounds: int, case: str) -> list[dict[str, Any]]:
        assert command[0] == "build/release/streams"
        asked.append(case)
        time = 2.0 if len(asked) - 1 == slower else ratio
        return [
            {
                "label": label,
                "origin": {},
                "runs": [{"seconds": each + number / 1e4, "arrays": 2} for number in range(rounds)],
            }
            for label, each in (("calmalloc", time), ("jemalloc", 1.0))
        ]

    store = Store(tmp_path / "results")
    more = {"path": tmp_path / "enabled", "measured": measured} | more
    set_huge_pages = more.pop("set_huge_pages", False)
    placement_peer.measure(store, 3, set_huge_pages, sizes=(65536,), numbers=(2, 4), **more)
    found = store.load(placement_peer.NAME)
    assert found
    assert [placement_peer.name_of(cell) for cell in found["cells"]] == asked
    return found


def test_beside_the_peer(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    good = grid(tmp_path, 0.9)
    assert (good["outcome"], good.get("slower"), len(good["cells"])) == ("met", None, 4)
    assert good["mean"]["value"] == pytest.approx(0.9, rel=1e-3)
    assert good["cells"][0]["median"] == {"calmalloc": 0.9001, "jemalloc": 1.0001}
    one = grid(tmp_path, 0.7, slower=2)
    assert one["slower"] == ["4 arrays of 64 KiB, 1 thread, huge pages madvise"]
    assert (one["mean"]["outcome"], one["cells_outcome"], one["outcome"]) == ("met", "missed", "missed")
    lines = placement_peer.lines(one)
    assert "| 1 of 4 | 0 | missed |" in lines[1]
    assert one["slower"][0] in lines[2]
    # Each a little slower, which is no cell's fault.
    assert grid(tmp_path, 1.03)["outcome"] == "missed"
    assert (tmp_path / "enabled").read_text() == "always [madvise] never\n"


def test_a_cell_is_slower_if_all_of_its_interval_is() -> None:
    runs = [{"seconds": 1.0}] * 3
    sides = [{"label": label, "runs": runs} for label in ("calmalloc", "jemalloc")]
    # In part, all, little, and not known.
    intervals = (1.0, 1.2), (1.06, 1.2), (1.01, 1.04), (None, None)
    cells = [
        {"huge_pages": "madvise", "bytes": 1024, "arrays": number, "threads": 2}
        | {"ratio": [1.0, low, high, 3], "runs": sides}
        for number, (low, high) in enumerate(intervals)
    ]
    assert placement_peer.judge(cells)["slower"] == ["1 arrays of 1 KiB, 2 threads, huge pages madvise"]
    assert placement_peer.judge([cells[0], *cells[2:]])["cells_outcome"] == "met"
    # One that the peer was not in is no cell that is met.
    alone = cells[0] | {"runs": sides[:1]}
    assert placement_peer.judge([alone, *cells[2:]])["cells_outcome"] == "not known"


def test_without_the_peer_nothing_is_known(tmp_path: Path) -> None:
    def alone(command: Sequence[str], rounds: int, case: str) -> list[dict[str, Any]]:
        del command, case
        return [{"label": "calmalloc", "origin": {}, "runs": [{"seconds": 1.0}] * rounds}]

    store = Store(tmp_path)
    placement_peer.measure(
        store, 3, False, path=tmp_path / "no", measured=alone, sizes=(65536,), numbers=(2,)
    )
    found = store.load(placement_peer.NAME)
    assert found
    assert (found["outcome"], found["cells_outcome"]) == ("not known", "not known")
    assert "slower" not in found


def test_huge_pages_by_turns_and_back(tmp_path: Path) -> None:
    mode = tmp_path / "enabled"
    mode.write_text("always [madvise] never\n")
    seen = []

    def looking(command: Sequence[str], rounds: int, case: str) -> list[dict[str, Any]]:
        del command, rounds
        seen.append((case.split()[-1], mode.read_text()))
        if len(seen) == 6:
            raise KeyboardInterrupt
        runs = [{"seconds": 1.0}] * 2
        return [{"label": label, "origin": {}, "runs": runs} for label in ("calmalloc", "jemalloc")]

    with pytest.raises(KeyboardInterrupt):
        placement_peer.measure(Store(tmp_path), 2, True, path=mode, measured=looking, sizes=(65536,))
    assert seen == [("madvise", "madvise"), ("always", "always")] * 3
    deadline = time.monotonic() + TIMEOUT_S
    while mode.read_text() != "madvise\n":  # by a guard that is not waited for
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_table(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert placement.table(store) == ""
    store.save(placement.ALIAS, {"rows": [measured_pair({"malloc": 1, "padded": 1, "off malloc": 2})]})
    found = placement.judge_suite(suite_of((1000.0, 1000.0), (1.0, 1.1)))
    store.save(placement.SUITE, {"rounds": 5} | found)
    lines = placement.table(store).splitlines()
    assert lines[2].startswith("| alias: it | seconds | malloc | padded by hand | 1 (95 %: ")
    assert lines[2].endswith("| 1.03 | met |")
    assert any(line.startswith("| suite: 2 cases | peak_rss_kib | calmalloc | ") for line in lines)
