"""What calm top makes of two looks: rates, who is counted, and what is dear now and then."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from calm.measure import SYSCALLS
from calm.top import sampler, system, view
from calm.top.events import SHOOTDOWNS
from calm.top.sampler import Row, Sampler

# No process has such a number, so that nothing else is found out of it.
FIRST = 1 << 29
IDLE = system.Stat(FIRST, "x", "S", 1, 0.0, 0.0, 0, 0, (1, 1, "x"), is_kernel=False, rss_kib=1000)


@dataclass
class World:
    """Processes, a clock, and the kernel's counters, as the sampler sees them."""

    stats: dict[int, system.Stat] = field(default_factory=dict)
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
        return SimpleNamespace(pid=pid, read=lambda: dict(self.world.events)), ""

    def detach(self, counting: SimpleNamespace) -> None:
        self.world.counted.remove(counting.pid)

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    clock = SimpleNamespace(monotonic=lambda: made.now, time=time.time, thread_time=lambda: made.cpu_s)
    monkeypatch.setattr(sampler, "time", clock)
    monkeypatch.setattr(sampler.system, "stat", lambda pid: made.stats[pid])
    monkeypatch.setattr(sampler.system, "rollup", made.rollup)
    monkeypatch.setattr(sampler.machine, "broadcast_here", lambda: None)
    monkeypatch.setattr(Counters, "world", made, raising=False)
    monkeypatch.setattr(sampler, "Events", Counters)
    return made


def looker(world: World, every: bool = False) -> Sampler:
    return Sampler(lambda: list(world.stats), every=every)


def test_rates_are_by_the_second_and_of_the_last_interval(world: World) -> None:
    world.stats[FIRST] = replace(IDLE, user_s=1.0, system_s=2.0, minor_faults=100, major_faults=10)
    world.events = dict.fromkeys((SHOOTDOWNS, *SYSCALLS), 1000)
    looking = looker(world)
    assert looking.look().rows[0].user_percent is None
    for _ in range(2):
        world.now += 2
        before = world.stats[FIRST]
        world.stats[FIRST] = replace(
            before,
            user_s=before.user_s + 0.5,
            system_s=before.system_s + 1.0,
            minor_faults=before.minor_faults + 200,
            major_faults=before.major_faults + 4,
            rss_kib=before.rss_kib - 100,
        )
        world.events |= {
            SHOOTDOWNS: world.events[SHOOTDOWNS] + 6,
            "madvise": world.events["madvise"] + 10,
            "brk": world.events["brk"] + 1,
        }
        snapshot = looking.look()
        (row,) = snapshot.rows
        assert snapshot.interval_s == 2
        assert (row.user_percent, row.system_percent) == (25, 50)
        assert (row.minor_faults, row.major_faults, row.change_kib) == (100, 2, -100)
        assert (row.shootdowns, row.calls, row.calls_each["madvise"]) == (3, 5.5, 5)


def test_the_busiest_are_counted_and_leave_their_place_to_busier_ones(world: World) -> None:
    world.stats = {pid: replace(IDLE, pid=pid) for pid in range(FIRST, FIRST + sampler.COUNTED_MOST + 5)}
    quiet, busy = list(world.stats)[:5], list(world.stats)[5:]

    def interval(work: Callable[[int], float]) -> None:
        world.now += 1
        for pid in world.stats:
            world.work(pid, work(pid))
        looking.look()

    looking = looker(world, every=True)
    looking.look()
    for _ in range(3):
        interval(lambda pid: 0.9 if pid in busy else 0.1)
    assert world.counted == set(busy)
    # One that pauses for an interval keeps its place, and one that ends its work does not.
    interval(lambda pid: 0.0 if pid == busy[0] else 0.9 if pid in busy else 0.1)
    assert world.counted == set(busy)
    for _ in range(10):
        interval(lambda pid: 0.9 if pid in quiet else 0.1)
    assert len(world.counted) == sampler.COUNTED_MOST
    assert set(quiet) <= world.counted
    looking.close()
    assert not world.counted


def test_a_walk_through_all_pages_takes_no_more_than_its_share(world: World) -> None:
    """Of 2 %: a tenth of a second is followed by five without."""
    world.stats[FIRST] = IDLE
    looking = looker(world)
    for after, walks in ((0, 1), (4.9, 1), (0.2, 2), (1, 2)):
        world.now += after
        (row,) = looking.look().rows
        assert world.rollups == walks
        assert (row.huge_kib, row.swap_kib) == (6144, 7)


def test_a_process_that_only_waits_for_its_parent_has_ended(world: World) -> None:
    world.stats[FIRST] = IDLE
    looking = looker(world)
    looking.look()
    world.stats[FIRST] = replace(IDLE, state="Z")
    snapshot = looking.look()
    assert (snapshot.rows, snapshot.ended) == ([], [(FIRST, "x")])


def test_a_view_is_of_one_process_and_not_of_the_next_of_its_number(world: World) -> None:
    other = FIRST + 1
    world.stats = {FIRST: IDLE, other: replace(IDLE, pid=other)}
    looking = looker(world)
    state = view.State(detail=FIRST)
    for _ in range(3):
        state.note(looking.look())
    assert state.detail == FIRST
    assert list(state.histories[FIRST]["rss"]) == [1000] * 3
    world.stats[FIRST] = replace(IDLE, identity=(2, 1, "x"), rss_kib=50)
    del world.stats[other]
    state.note(looking.look())
    assert state.detail is None
    assert list(state.histories) == [FIRST]
    assert list(state.histories[FIRST]["rss"]) == [50]


def test_libraries_are_searched_for_now_and_then(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without tables may load a library yet, and to look at each interval would be dear."""
    searches = []
    monkeypatch.setattr(sampler.figures, "images", lambda pid: searches.append(pid) or [])
    world.stats[FIRST] = IDLE
    looking = looker(world)
    for after, many in ((0, 1), (4.9, 1), (0.2, 2), (1, 2)):
        world.now += after
        looking.look()
        assert len(searches) == many


def test_the_fields_of_stat(monkeypatch: pytest.MonkeyPatch) -> None:
    """As proc(5) numbers them, from 3 on; each has its number as its value."""
    fields = " ".join(["S", *map(str, range(4, 53))])
    texts = {"/proc/7/stat": f"7 (a b) {fields}\n", "/proc/7/statm": "100 25 3 4 5 6 7\n"}
    monkeypatch.setattr(system, "_read", texts.__getitem__)
    found = system.stat(7)
    ticks = os.sysconf("SC_CLK_TCK")
    assert (found.user_s, found.system_s) == (14 / ticks, 15 / ticks)
    assert (found.minor_faults, found.major_faults, found.threads) == (10, 12, 20)
    assert found.identity == (22, 26, "a b")
    assert found.rss_kib == 25 * os.sysconf("SC_PAGE_SIZE") // 1024


def test_what_the_libraries_gave_back() -> None:
    row = Row(1, "x", "", 1, 0)
    before = {"purges": 1, "purges_timed": 5, "purges_asked": 0, "purged": 1000}
    now = {"purges": 2, "purges_timed": 9, "purges_asked": 1, "purged": 5000}
    sampler._summarize(row, "calmalloc", now | {"retained": 70, "retained_limit": 90}, before, 2.0)
    assert (row.purges, row.purged_bytes, row.retained_bytes, row.limit_bytes) == (3, 2000, 70, 90)
    row = Row(1, "x", "", 1, 0)
    now = {"trims": 4, "bytes_trimmed": 800, "free_top_bytes": 5, "threshold_bytes": 6, "state": 1}
    sampler._summarize(row, "ptlbmalloc2", now, {"trims": 2, "bytes_trimmed": 0}, 2.0)
    assert (row.purges, row.purged_bytes, row.retained_bytes, row.limit_bytes) == (1, 400, 5, 6)
    assert row.allocator == "ptlbmalloc2"
    sampler._summarize(row, "ptlbmalloc2", now | {"state": 2}, None, 2.0)
    assert row.allocator == "glibc (ptlbmalloc2 left to glibc)"
