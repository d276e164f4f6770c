"""What calm top makes of two looks: rates, who is counted, and what is dear now and then."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from calm.commands.top import sampler, view
from calm.commands.top.sampler import Row, Sampler
from calm.core import event_counters, proc
from calm.core.event_counters import SHOOTDOWNS
from calm.core.measure import SYSCALLS

# No process has such a number, so that nothing else is found out of it.
FIRST = 1 << 29
IDLE = proc.Stat(FIRST, "x", "S", 1, 1, 0.0, 0.0, 0, 0, 1, 1, is_kernel=False, children=(0, 0, 0.0, 0.0))


@dataclass
class World:
    """Processes, a clock, and the kernel's counters, as the sampler sees them."""

    stats: dict[int, proc.Stat] = field(default_factory=dict)
    rss_kib: int = 1000
    now: float = 1000.0
    events: dict[str, int] = field(default_factory=dict)
    counted: set[int] = field(default_factory=set)
    rollups: int = 0
    cpu_s: float = 0.0

    def rollup(self, _pid: int) -> dict[str, int]:
        self.rollups += 1
        self.cpu_s += 0.1
        return {"AnonHugePages": 2048, "FilePmdMapped": 4096, "Rss": 9000, "Swap": 7}

    def work(self, pid: int, cpu_s: float) -> None:
        self.stats[pid] = replace(self.stats[pid], user_s=self.stats[pid].user_s + cpu_s)


class Counters:
    """In the place of the kernel's."""

    world: World
    threads_only = True

    def __init__(self, *_: object) -> None:
        self.reasons: dict[str, str] = {}

    def attach(self, pid: int) -> tuple[SimpleNamespace, str]:
        self.world.counted.add(pid)
        return SimpleNamespace(pid=pid), ""

    def detach(self, counting: SimpleNamespace) -> None:
        self.world.counted.remove(counting.pid)

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    clock = SimpleNamespace(**vars(time) | {"monotonic": lambda: made.now, "thread_time": lambda: made.cpu_s})
    monkeypatch.setattr(sampler, "time", clock)
    monkeypatch.setattr(proc, "stat", lambda pid: made.stats[pid])
    monkeypatch.setattr(proc, "rss_kib", lambda _: made.rss_kib)
    monkeypatch.setattr(proc, "rollup", made.rollup)
    monkeypatch.setattr(proc, "swap_kib", lambda _: 7)
    monkeypatch.setattr(event_counters, "read", lambda _: dict(made.events))
    monkeypatch.setattr(sampler.machine, "broadcast_here", lambda: None)
    monkeypatch.setattr(Counters, "world", made, raising=False)
    monkeypatch.setattr(sampler, "Events", Counters)
    return made


def sampler_of(world: World, every: bool = False) -> Sampler:
    return Sampler(lambda: list(world.stats), every=every)


def test_rates_are_by_the_second_and_of_the_last_interval(world: World) -> None:
    world.stats[FIRST] = replace(IDLE, user_s=1.0, system_s=2.0, minor_faults=100, major_faults=10)
    world.events = dict.fromkeys((SHOOTDOWNS, *SYSCALLS), 1000)
    looking = sampler_of(world)
    assert looking.sample().processes[0].user_percent is None
    for _ in range(2):
        world.now += 2
        before = world.stats[FIRST]
        world.stats[FIRST] = replace(
            before,
            user_s=before.user_s + 0.5,
            system_s=before.system_s + 1.0,
            minor_faults=before.minor_faults + 200,
            major_faults=before.major_faults + 4,
        )
        world.rss_kib -= 100
        world.events |= {
            SHOOTDOWNS: world.events[SHOOTDOWNS] + 6,
            "madvise": world.events["madvise"] + 10,
            "brk": world.events["brk"] + 1,
        }
        snapshot = looking.sample()
        (row,) = snapshot.processes
        assert snapshot.interval_s == 2
        assert (row.user_percent, row.system_percent) == (25, 50)
        assert (row.minor_faults, row.major_faults, row.rss_change_kib) == (100, 2, -100)
        assert row.calls is not None
        assert (row.shootdowns, sum(row.calls.values()), row.calls["madvise"]) == (3, 5.5, 5)


def test_the_busiest_are_counted_and_leave_their_place_to_busier_ones(world: World) -> None:
    world.stats = {pid: replace(IDLE, pid=pid) for pid in range(FIRST, FIRST + sampler.MAX_COUNTED + 5)}
    quiet, busy = list(world.stats)[:5], list(world.stats)[5:]

    def interval(work: Callable[[int], float]) -> None:
        world.now += 1
        for pid in world.stats:
            world.work(pid, work(pid))
        looking.sample()

    looking = sampler_of(world, every=True)
    looking.sample()
    for _ in range(3):
        interval(lambda pid: 0.9 if pid in busy else 0.1)
    assert world.counted == set(busy)
    # One that pauses for an interval keeps its place, and one that ends its work does not.
    interval(lambda pid: 0.0 if pid == busy[0] else 0.9 if pid in busy else 0.1)
    assert world.counted == set(busy)
    for _ in range(10):
        interval(lambda pid: 0.9 if pid in quiet else 0.1)
    assert len(world.counted) == sampler.MAX_COUNTED
    assert set(quiet) <= world.counted
    looking.close()
    assert not world.counted


def test_a_walk_through_all_pages_takes_no_more_than_its_share(world: World) -> None:
    """Of 2 %: a tenth of a second is followed by five without."""
    world.stats[FIRST] = IDLE
    looking = sampler_of(world)
    for after, walks in ((0, 1), (4.9, 1), (0.2, 2), (1, 2)):
        world.now += after
        (row,) = looking.sample().processes
        assert world.rollups == walks
        assert (row.huge_kib, row.swap_kib) == (6144, 7)


def test_a_process_that_only_waits_for_its_parent_has_ended(world: World) -> None:
    world.stats[FIRST] = IDLE
    looking = sampler_of(world)
    looking.sample()
    world.stats[FIRST] = replace(IDLE, state="Z")
    snapshot = looking.sample()
    assert (snapshot.processes, snapshot.ended) == ([], [sampler.Ended(FIRST, "x")])


def test_a_view_is_of_one_process_and_not_of_the_next_of_its_number(world: World) -> None:
    other = FIRST + 1
    world.stats = {FIRST: IDLE, other: replace(IDLE, pid=other)}
    looking = sampler_of(world)
    state = view.State(detail=FIRST)
    for _ in range(3):
        state.record(looking.sample())
    assert state.detail == FIRST
    assert list(state.histories[FIRST]["rss"]) == [1000] * 3
    world.stats[FIRST] = replace(IDLE, started_ticks=2)
    world.rss_kib = 50
    del world.stats[other]
    state.record(looking.sample())
    assert state.detail is None
    assert list(state.histories) == [FIRST]
    assert list(state.histories[FIRST]["rss"]) == [50]


def test_libraries_are_searched_for_now_and_then(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without tables may load a library yet, and to look at each interval would be dear."""
    searches = []
    monkeypatch.setattr(sampler.counters, "images", lambda pid: searches.append(pid) or [])
    world.stats[FIRST] = IDLE
    looking = sampler_of(world)
    for after, many in ((0, 1), (4.9, 1), (0.2, 2), (1, 2)):
        world.now += after
        looking.sample()
        assert len(searches) == many


def test_the_fields_of_stat(tmp_path: Path) -> None:
    """As proc(5) numbers them, from 3 on; each has its number as its value."""
    fields = " ".join(["S", *map(str, range(4, 53))])
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a b) {fields}\n")
    found = proc.stat(7, tmp_path)
    assert (found.user_s, found.system_s) == (14 / proc.TICKS, 15 / proc.TICKS)
    assert (found.minor_faults, found.major_faults, found.threads) == (10, 12, 20)
    assert found.image == (22, 26, "a b")
    assert proc.stat_or_none(8, tmp_path) is None


def test_what_the_libraries_gave_back() -> None:
    row = Row(1, "x", [], 1, 0)
    before = {"purges_limit": 1, "purges_epoch": 5, "purges_request": 0, "purged": 1000}
    now = {"purges_limit": 2, "purges_epoch": 9, "purges_request": 1, "purged": 5000}
    sampler.summarize(row, "calmalloc", now | {"dirty": 70, "dirty_limit": 90}, before, 2.0)
    assert (row.purges, row.purged_bytes, row.dirty_bytes, row.limit_bytes) == (3, 2000, 70, 90)
    row = Row(1, "x", [], 1, 0, allocator="ptlbmalloc2")
    now = {"trims": 4, "bytes_trimmed": 800, "free_top_bytes": 5, "threshold_bytes": 6, "state": 1}
    sampler.summarize(row, "ptlbmalloc2", now, {"trims": 2, "bytes_trimmed": 0}, 2.0)
    assert (row.purges, row.purged_bytes, row.dirty_bytes, row.limit_bytes) == (1, 400, 5, 6)
    assert row.allocator == "ptlbmalloc2"
    sampler.summarize(row, "ptlbmalloc2", now | {"state": 2}, None, 2.0)
    assert row.allocator == "glibc (ptlbmalloc2 left to glibc)"
