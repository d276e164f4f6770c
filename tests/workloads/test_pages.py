"""README.md and docs/ contain the tables generated from bench/results, whose files are small."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from lib import pages, results, suite  # noqa: E402
from lib.results import RESULTS, Store, compact, summarize, text_of  # noqa: E402

LARGEST_BYTES = 400_000
# From the tables of the code.
OF_THE_CODE = ("options", "test-options", "counters", "metrics", "releases")
BLOCK = re.compile(r"(<!-- ([\w-]+): begin -->\n)(.*?)(<!-- \2: end -->\n)", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# Identifiers of elements, from a hash of their numbers.
NAME = re.compile(r"\b[a-z][0-9a-f]{10}\b")
KEPT = sorted(RESULTS.glob("*.json"))


def texts(root: Path) -> dict[str, str]:
    return {
        str(page.relative_to(root)): page.read_text()
        for page in (root / "README.md", *sorted((root / "docs").glob("*.md")))
    }


def emptied(text: str) -> str:
    """A page with nothing between its marks."""
    return BLOCK.sub(lambda found: found[0] if found[2] in OF_THE_CODE else found[1] + found[4], text)


def rendered(store: Store, root: Path) -> Path:
    """Renders the results into pages without tables and pictures."""
    for name, text in texts(ROOT).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(emptied(text))
    pages.render_figures(store, root)
    pages.render_emulated(store, root)
    pages.render_abis(store.folder / "abis.json", root)
    pages.render_compatibility(store, root)
    return root


def differing(found: dict[str, str], expected: dict[str, str]) -> set[str]:
    return {name for name, text in expected.items() if found[name] != text}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """All pages, and the results that were read for them."""
    read: set[str] = set()

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(path: Path, *arguments: Any, **more: Any) -> Any:
            if path.parent == RESULTS:
                read.add(path.stem)
            return method(path, *arguments, **more)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("read_text", "read_bytes"):
            patch.setattr(Path, name, noting(getattr(Path, name)))
        root = rendered(Store(), tmp_path_factory.mktemp("pages"))
    return root, read


def test_every_table_is_made_of_the_results(made: tuple[Path, set[str]]) -> None:
    root, _ = made
    assert differing(texts(root), texts(ROOT)) == set()
    blocks = {name: [block[1] for block in BLOCK.findall(text)] for name, text in texts(ROOT).items()}
    assert sum(len(names) for names in blocks.values()) >= 14


def test_the_rows_that_others_win_are_counted() -> None:
    """README.md's counts, from the medians themselves."""
    found = suite.load(RESULTS)
    faster, smaller, both = set(), set(), set()
    for row in found.rows:
        rate = row.metric is not None and row.metric.higher_is_better
        times = [row.median(label, "metric" if row.metric else "wall_s") for label in found.labels]
        peaks = [row.median(label, "peak_rss_kib") for label in found.labels]
        ours = found.labels.index("calmalloc")
        for time, peak in zip(times, peaks, strict=True):
            # A program may have failed under an allocator.
            if time and peak:
                slower = time / times[ours] if rate else times[ours] / time
                larger = peaks[ours] / peak
                faster |= {row.name} if slower > 1 else set()
                smaller |= {row.name} if larger > 1 else set()
                both |= {row.name} if min(slower, larger) > 1.02 else set()
    blocks = {mark: text for _, mark, text, _ in BLOCK.findall((ROOT / "README.md").read_text())}
    text = " ".join(blocks["losses"].split())
    assert f"is faster than calmalloc in {len(faster)} of the {len(found.rows)} programs" in text
    assert f"a lower peak in {len(smaller)} (" in text
    assert f"In {len(both)} programs, one allocator is both" in text
    assert set(re.findall(r"`([^`]+)`", text)) == both


def test_every_picture_is_made_of_the_results(made: tuple[Path, set[str]]) -> None:
    root, _ = made
    committed = sorted((ROOT / "docs").glob("*.svg"))
    assert [path.name for path in sorted((root / "docs").glob("*.svg"))] == [path.name for path in committed]
    for path in committed:
        now, before = (NAME.sub("", each.read_text()) for each in (root / "docs" / path.name, path))
        words = [set(re.findall(r"<!-- (.*?) -->", text)) for text in (now, before)]
        assert words[0] == words[1], path.name
        versions = [re.findall(r"Matplotlib v[\d.]+", text) for text in (now, before)]
        if versions[0] == versions[1]:
            assert NUMBER.sub("", now) == NUMBER.sub("", before), path.name
            numbers = [[float(number) for number in NUMBER.findall(text)] for text in (now, before)]
            assert numbers[0] == pytest.approx(numbers[1], abs=0.001), path.name


def test_every_result_is_on_a_page(made: tuple[Path, set[str]]) -> None:
    _, read = made
    assert {path.stem for path in KEPT} == read


def test_a_table_edited_by_hand_is_found(made: tuple[Path, set[str]]) -> None:
    root, _ = made
    expected = texts(root)
    for name, text in expected.items():
        for begin, mark, table, end in BLOCK.findall(text):
            # One without a result yet has no table.
            if mark not in OF_THE_CODE and table:
                digit = max(found.start() for found in re.finditer(r"\d", table))
                other = str((int(table[digit]) + 1) % 10)
                edited = text.replace(begin + table, begin + table[:digit] + other + table[digit + 1 :])
                assert edited.endswith(text.partition(begin + table + end)[2])
                assert differing(expected, expected | {name: edited}) == {name}, mark


def test_a_result_that_is_missing_is_found(made: tuple[Path, set[str]], tmp_path: Path) -> None:
    root, _ = made
    folder = tmp_path / "results"
    shutil.copytree(RESULTS, folder)
    # One of each kind.
    missing = {
        "suite": {"README.md", "docs/comparison.md", "docs/figures.md", "docs/suite.md"},
        "larson": {"docs/figures.md"},
        "scaling": {"docs/comparison.md", "docs/figures.md"},
        "ttest1": {"docs/figures.md", "docs/ptlbmalloc2.md"},
        "idle-curve": {"README.md", "docs/comparison.md"},
        "paper-oracle": {"docs/papers.md"},
        "offload-sync": {"docs/offload.md"},
        "placement-alias": {"docs/placement.md"},
        "emulated-figure-1b": {"docs/calm-lab.md"},
        "emulated-16cpu-locks": {"docs/figures.md"},
        "compatibility": {"docs/compatibility.md"},
    }
    for name in missing:
        (folder / f"{name}.json").unlink()
    found = texts(rendered(Store(folder), tmp_path / "pages"))
    assert differing(found, texts(root)) == set().union(*missing.values())


def test_results_are_light() -> None:
    sizes = {path.name: path.stat().st_size for path in RESULTS.iterdir()}
    assert sum(sizes.values()) <= LARGEST_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_results_are_as_a_measurement_writes_them(path: Path) -> None:
    result = json.loads(path.read_text())
    assert path.read_text() == text_of(compact(result)) + "\n"
    assert result["machine"]


def test_what_is_compact() -> None:
    whole = {
        "command": ["a", "b c"],
        "rate": 1234567.891,
        "time_s": 0.000123456789,
        "count": 123456789.0,
        "failure": None,
        "said": [],
        "sides": [{"label": "x", "ratio": [2.0, None, None, 1], "runs": [{"time_s": 1.0}]}],
        "to_best": {"time": {"x": [1.0, 1.0, 1.0, 1]}},
        "analysis": {"more": 1},
    }
    assert compact(whole) == {
        "command": ["a", "b c"],
        "rate": 1234568,
        "time_s": 0.00012346,
        "count": 123456789,
        "sides": [{"label": "x", "ratio": [2, None, None, 1]}],
    }
    assert compact(compact(whole)) == compact(whole)


def test_lines_are_short_and_the_same_data() -> None:
    data = {"a": [{"name": f"number {number}", "values": [number] * 30} for number in range(40)], "b": "ü"}
    text = text_of(data)
    assert json.loads(text) == data
    assert 5 < text.count("\n") < 60
    assert max(map(len, text.splitlines())) <= 310
    assert text_of([1, {"a": None}]) == '[1,{"a":null}]'


def test_runs_have_a_file_of_their_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    side = {"label": "x", "runs": [{"time_s": 3.0}, {"time_s": 1.0}, {"time_s": None}, {"time_s": 2.0}]}
    summarize([side], ["time_s", "peak_rss_kib"])
    alone: dict[str, Any] = {"runs": side["runs"][:1]}
    summarize([alone], ["time_s"])
    assert (alone["median"], alone["range"]) == ({"time_s": 3}, {})
    store.save("it", {"allocators": [side]})
    kept = store.load("it")
    assert kept
    assert kept["machine"]["cpus"]
    (found,) = kept["allocators"]
    assert found == {"label": "x", "n": 4, "median": {"time_s": 2}, "range": {"time_s": [1, 3]}}
    whole = json.loads((tmp_path / "runs/it.json").read_text())
    assert whole["allocators"] == [side]
    assert Store().runs("it") == results.RUNS / "it.json"
    assert not RESULTS.is_relative_to(results.RUNS)
