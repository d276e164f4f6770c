"""The parts of bench/figures that can go wrong unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from lib import idle, instructions, rounds, tables  # noqa: E402
from lib.results import Store  # noqa: E402


def test_a_cgroup_is_made_only_where_its_memory_is_counted(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("proc /proc proc rw 0 0\n")
    assert idle.cgroup_parent(mounts) == (None, "cgroup v2 is not mounted")
    mounts.write_text(f"cgroup2 {tmp_path}/cgroup cgroup2 rw 0 0\n")
    slice_ = tmp_path / "cgroup/user.slice"
    slice_.mkdir(parents=True)
    (tmp_path / "cgroup/cgroup.subtree_control").write_text("cpu\n")
    (slice_ / "cgroup.subtree_control").write_text("")
    parent, reason = idle.cgroup_parent(mounts, "/user.slice/session.scope")
    assert parent is None
    assert "counts its children's memory" in reason
    (slice_ / "cgroup.subtree_control").write_text("memory pids\n")
    assert idle.cgroup_parent(mounts, "/user.slice/session.scope") == (slice_, "")
    with idle.fresh_cgroup(slice_) as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_only_calls_from_main_count() -> None:
    profile = """
fn=start
1 10
cfn=main
calls=1 1
1 500
fn=main
3 7
cob=libc.so.6
cfn=malloc
calls=100 1
3 200
cfn=free
calls=100 1
3 150
fn=malloc
1 100
cfn=inner
calls=100 1
1 100
"""
    assert instructions.called_by_main(profile) == 350


def test_rounds_are_interleaved_and_a_failing_allocator_is_dropped() -> None:
    order: list[str] = []

    def run(allocator: Any) -> dict[str, Any]:
        order.append(allocator.label[-1])
        if order == ["1", "2", "1", "2"]:
            raise subprocess.CalledProcessError(1, "it")
        return {"figure": len(order)}

    sides = rounds.interleaved(["glibc:A=1", "glibc:A=2"], run, rounds=3)
    assert order == ["1", "2", "1", "2", "1", "1"]
    assert [run["figure"] for run in sides[0]["runs"]] == [3, 5, 6]
    assert sides[1]["runs"] == []
    assert "exit status 1" in sides[1]["failure"]


def side(label: str, *runs: dict[str, Any]) -> dict[str, Any]:
    return {"label": label, "runs": list(runs)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def save(store: Store, name: str, *sides: dict[str, Any]) -> None:
    (store.folder / f"{name}.json").write_text(json.dumps({"allocators": list(sides)}))


def test_the_best_peer_is_the_fastest(store: Store) -> None:
    key = "operations_per_second"
    save(
        store,
        "larson",
        side("glibc", {key: 1e6}, {key: 1e6}),
        side("mimalloc", {key: 4e6}, {key: 4e6}),
        side("calmalloc", {key: 2e6}, {key: 2e6}),
        side("jemalloc"),
    )
    (row,) = tables.calmalloc_rows(store)
    assert row == (
        "| larson, 2 threads: operations a second | 2.0 million | 1.0 million |  |  | 4.0 million "
        "| 2 (2 to 2) | mimalloc: 0.5 (0.5 to 0.5) |"
    )


def test_the_best_peer_has_the_lowest_cost(store: Store) -> None:
    key = "ns_per_pair"
    costs = {"calmalloc": 4.0, "glibc": 8.0, "gperftools": 5.0}
    sides = (side(name, {key: cost}) for name, cost in costs.items())
    save(store, "glibc-simple", *sides)
    (row,) = tables.calmalloc_rows(store)
    assert row.endswith("| 0.5 | gperftools: 0.8 |")


def test_without_figures_of_calmalloc_there_is_no_table_of_it(store: Store) -> None:
    store.save("larson", {"allocators": [side("glibc", {"operations_per_second": 1.0})]})
    assert tables.calmalloc_table(store) == []
    assert tables.idle_table(store) == []
    assert tables.readme(store).startswith("| figure (medians) | glibc | ptlbmalloc2 |")
    assert "Measured by `bench/figures` on" in tables.readme(store)
