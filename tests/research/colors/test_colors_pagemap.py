"""The kernel's files are read as they are written: mappings, resident pages, frames."""

import io
import os
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from calm.core.errors import CalmError
from calm.core.proc import parse_mappings
from calm.core.report import console
from research import topology
from research.colors import analysis, caches, pagemap, report, sample
from research.colors.caches import NEHALEM, Cache, Random
from research.colors.pagemap import Region
from research.colors.sites import Call

PAGE = caches.PAGE_BYTES
MIN = 64 << 10
HUGE = (2 << 20) // PAGE
PRESENT, SWAPPED = 1 << 63, 1 << 62
# As nearly all pages are: written since the kernel was asked last, and nobody else's.
DIRTY = 1 << 55 | 1 << 56
BASE = 0x10000
SMAPS = """\
{0:x}-{1:x} rw-p 00000000 00:00 0
Size:               8192 kB
Rss:                {2} kB
AnonHugePages:      2048 kB
Private_Hugetlb:       0 kB
VmFlags: rd wr mr mw me ac
7f0000000000-7f0000100000 r-xp 00001000 08:01 77                         /usr/lib/a name.so
Rss:                 512 kB
7f0000100000-7f0000200000 r--p 00001000 08:01 77                         /usr/lib/a name.so
Rss:                 512 kB
7f0000200000-7f0000300000 r--p 00000000 08:01 78                         /data/input (deleted)
Rss:                  64 kB
7f0000400000-7f0000800000 rw-s 00000000 00:10 9                          /anon_hugepage (deleted)
Rss:                   0 kB
Shared_Hugetlb:     4096 kB
7ffc00000000-7ffc00004000 r--p 00000000 00:00 0                          [vvar]
Rss:                   0 kB
"""


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A process with two huge pages' worth of memory, half of it resident: a huge page, and 4 scattered."""
    folder = tmp_path / "123"
    folder.mkdir()
    start, end = BASE * PAGE, (BASE + 4 * HUGE) * PAGE
    (folder / "smaps").write_text(SMAPS.format(start, end, (HUGE + 4) * PAGE // 1024))
    (folder / "status").write_text("Name:\tx\nThreads:\t7\n")
    (folder / "cmdline").write_bytes(b"./x\0one two\0")
    entries = [PRESENT | DIRTY | (5 * HUGE + at) for at in range(HUGE)]
    entries += [SWAPPED | 99, 0] + [PRESENT | frame for frame in (3, 3 + 128, 3 + 256, 17)]
    with (folder / "pagemap").open("wb") as file:
        file.seek(BASE * 8)
        file.write(struct.pack(f"<{len(entries)}Q", *entries))
        # The kernel's has entries for all addresses.
        file.truncate((1 << 47) // PAGE * 8)
    return tmp_path


def test_smaps() -> None:
    found = parse_mappings(SMAPS.format(0x1000, 0x2000, 4))
    assert [mapping.path for mapping in found] == [
        "",
        "/usr/lib/a name.so",
        "/usr/lib/a name.so",
        "/data/input (deleted)",
        "/anon_hugepage (deleted)",
        "[vvar]",
    ]
    assert [sample.is_data(mapping) for mapping in found] == [True, False, True, True, True, False]
    assert (found[0].start, found[0].end, found[0].resident_kib, found[0].huge_kib) == (
        0x1000,
        0x2000,
        4,
        2048,
    )
    assert (found[1].offset, found[1].huge_kib) == (0x1000, 0)
    assert (found[4].resident_kib, found[4].huge_kib) == (4096, 4096)


def test_huge_pages_of_all_kinds_and_what_the_kernel_puts_there() -> None:
    lines = [
        "1000-2000 rw-s 00000000 00:01 5 /dev/shm/x",
        *("Rss: 8 kB", "ShmemPmdMapped: 2048 kB", "FilePmdMapped: 4096 kB", "Private_Hugetlb: 1024 kB"),
        "3000-4000 r--p 00000000 00:00 0 [vvar_vclock]",
    ]
    shared, clock = parse_mappings("\n".join(lines))
    assert (shared.resident_kib, shared.huge_kib, sample.is_data(shared)) == (
        8 + 1024,
        2048 + 4096 + 1024,
        True,
    )
    assert not sample.is_data(clock)


def test_maps_alone_know_nothing_of_residence() -> None:
    text = "\n".join(line for line in SMAPS.format(1, 2, 3).splitlines() if "-" in line.split()[0])
    found = parse_mappings(text)
    assert len(found) == 6
    assert {mapping.resident_kib for mapping in found} == {None}


def test_pages(proc: Path) -> None:
    with pagemap.pagemap(123, proc) as pages:
        found = pages(BASE * PAGE + 16, HUGE * PAGE + 3 * PAGE)
    # What is swapped out, and what was never there, is not resident. Of the last page the range has 16 bytes.
    assert list(found.numbers - BASE) == [*range(HUGE), HUGE + 2, HUGE + 3]
    assert found.frames is not None
    assert list(found.frames[-2:]) == [3, 131]
    assert found.bytes == (HUGE + 2) * PAGE
    # Up to a page's end, it has nothing of the next one.
    with pagemap.pagemap(123, proc) as pages:
        assert pages(BASE * PAGE, (HUGE + 2) * PAGE).bytes == HUGE * PAGE


def test_huge_pages_are_seen_by_their_frames(proc: Path) -> None:
    with pagemap.pagemap(123, proc) as pages:
        whole = pages(BASE * PAGE, 4 * HUGE * PAGE)
        part = pages((BASE + 1) * PAGE, HUGE * PAGE)
    assert whole.huge_bytes() == HUGE * PAGE
    assert part.huge_bytes() == 0
    assert pagemap.Pages(whole.numbers, None).huge_bytes() is None
    assert pagemap.NO_PAGES.huge_bytes() is None
    # As near each other, but not aligned.
    numbers = np.arange(BASE, BASE + 2 * HUGE)
    assert pagemap.Pages(numbers, numbers * 0 + np.arange(2 * HUGE) + 1).huge_bytes() == 0
    # Of two, one has a gap.
    numbers = np.delete(numbers, 5)
    assert pagemap.Pages(numbers, numbers + 3 * HUGE).huge_bytes() == HUGE * PAGE


def test_a_range_that_is_read_in_pieces(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pagemap.pagemap(123, proc) as pages:
        wanted = pages(BASE * PAGE, 2 * HUGE * PAGE)
        monkeypatch.setattr(pagemap, "_AT_ONCE", 7)
        pieces = [pages(BASE * PAGE, 2 * HUGE * PAGE)]
        # Of which the kernel may give less than was asked for.
        read = os.pread
        monkeypatch.setattr(os, "pread", lambda file, size, at: read(file, min(size, 3 * 8), at))
        pieces.append(pages(BASE * PAGE, 2 * HUGE * PAGE))
    assert wanted.frames is not None
    for found in pieces:
        assert found.frames is not None
        assert list(found.numbers) == list(wanted.numbers)
        assert list(found.frames) == list(wanted.frames)


def test_hidden_frames(proc: Path) -> None:
    path = proc / "123/pagemap"
    with path.open("r+b") as file:
        file.seek(BASE * 8)
        entries = np.frombuffer(file.read(4 * HUGE * 8), np.uint64)
        file.seek(BASE * 8)
        file.write((entries & np.uint64(PRESENT | SWAPPED)).tobytes())
    seen = sample.take(123, "now", MIN, proc=proc)
    assert "CAP_SYS_ADMIN" in str(seen.hidden)
    assert all(region.pages.frames is None for region in seen.regions)
    assert seen.pages.bytes == (HUGE + 4) * PAGE
    found = analysis.analyse(seen, NEHALEM, MIN, 1)
    assert [level.conflicts and level.conflicts.in_conflict for level in found.caches] == [None] * 3
    assert not any(level.pages_by_color for level in found.caches)
    assert any("CAP_SYS_ADMIN" in note for note in found.notes)
    # Nor are they known of what was looked at before that was seen.
    blocks = [Region((BASE + at * HUGE) * PAGE, HUGE * PAGE) for at in (2, 0)]
    seen = sample.take(123, "now", MIN, blocks, proc=proc)
    assert [region.pages.bytes for region in seen.regions[:2]] == [HUGE * PAGE, 0]
    assert all(region.pages.frames is None for region in seen.regions)


def test_a_look_by_mappings(proc: Path) -> None:
    seen = sample.take(123, "now", MIN, proc=proc)
    assert (seen.pid, seen.command, seen.threads, seen.blocks_known) == (123, ["./x", "one two"], 7, False)
    # Not the library's code, nor what it only reads beside it; not what the kernel has put there.
    assert [region.path for region in seen.regions] == [
        "",
        "/data/input (deleted)",
        "/anon_hugepage (deleted)",
    ]
    assert [region.pages.bytes for region in seen.regions] == [(HUGE + 4) * PAGE, 0, 0]
    assert seen.hidden is None


def test_a_look_by_blocks(proc: Path) -> None:
    blocks = [
        Region(BASE * PAGE, HUGE * PAGE),
        Region((BASE + HUGE) * PAGE - 16, 6 * PAGE),
    ]
    seen = sample.take(123, "peak", MIN, blocks, proc=proc)
    # The mapping that they lie in is not looked at again; the others are.
    assert [(region.kind, region.bytes) for region in seen.regions] == [
        ("block", HUGE * PAGE),
        ("block", 6 * PAGE),
        ("other", 1 << 20),
        ("other", 4 << 20),
    ]
    # They share a page, which counts once.
    assert [region.pages.bytes // PAGE for region in seen.regions[:2]] == [HUGE, 1 + 4]
    assert seen.pages.bytes == (HUGE + 4) * PAGE
    assert seen.weight == ((HUGE + 4) * PAGE, (HUGE + 5) * PAGE)
    frames = seen.regions[1].frames
    assert frames is not None
    assert list(frames) == [6 * HUGE - 1, -1, -1, 3, 131, 259, 17]
    # Its end is a page's.
    frames = seen.regions[0].frames
    assert frames is not None
    assert list(frames) == [5 * HUGE + at for at in range(HUGE)]
    assert seen.pages.frames is not None
    assert list(seen.pages.frames) == [*frames, 3, 131, 259, 17]


SEVERAL = """\
10000000-10100000 rw-p 00000000 00:00 0
Rss:                1024 kB
10100000-10180000 r--p 00000000 00:00 0
Rss:                 512 kB
10180000-10200000 rw-p 00000000 00:00 0
Rss:                 512 kB
20000000-20100000 r-xp 00000000 08:01 77                         /usr/lib/a.so
Rss:                1024 kB
20100000-20200000 r--p 00100000 08:01 77                         /usr/lib/a.so
Rss:                1024 kB
20200000-20300000 rw-p 00200000 08:01 77                         /usr/lib/a.so
Rss:                1024 kB
"""


def test_a_block_in_several_mappings_and_what_a_library_writes(proc: Path) -> None:
    """Of a block of which a part was protected; of a library's data it is what it may write."""
    (proc / "123/smaps").write_text(SEVERAL)
    seen = sample.take(123, "now", MIN, [Region(0x10080000, 0x180000)], proc=proc)
    assert [(region.kind, region.address) for region in seen.regions] == [
        ("block", 0x10080000),
        ("other", 0x20200000),
    ]


@pytest.mark.parametrize(("name", "what"), [("smaps", "mappings"), ("pagemap", "pages")])
def test_files_that_may_not_be_read(
    proc: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    opened = Path.open

    def refused(path: Path, *words: str, **named: int) -> Any:
        if path.name == name:
            raise PermissionError
        return opened(path, *words, **named)  # type: ignore[call-overload]

    def refused_raw(path: str) -> Any:
        return refused(Path(path), "rb", buffering=0)

    monkeypatch.setattr(Path, "open", refused)
    monkeypatch.setattr("calm.core.proc.FileIO", refused_raw)
    with pytest.raises(CalmError, match=f"^the {what} of process 123 cannot be read: permission denied$"):
        sample.take(123, "now", MIN, proc=proc)


def test_the_counts(proc: Path) -> None:
    """512 pages of 16 colors of a huge page, and three more of one color."""
    seen = sample.take(123, "now", MIN, proc=proc)
    found = analysis.analyse(seen, NEHALEM, MIN, 1)
    assert [level.cache.level for level in found.caches if level.skipped] == [1]
    counts = {level.cache.level: level.conflicts for level in found.caches if level.conflicts}
    pages = HUGE + 4
    assert {count.pages for count in counts.values()} == {pages}
    for level, count in counts.items():
        cache = NEHALEM[level - 1]
        colors = cache.bytes // cache.ways // PAGE
        by_color = [HUGE // colors] * colors
        for frame in (3, 131, 259, 17):
            by_color[frame % colors] += 1
        assert found.caches[level - 1].pages_by_color == by_color
        assert count.in_conflict == sum(max(0, number - cache.ways) for number in by_color)
        assert count.unavoidable == max(0, pages - cache.bytes // PAGE)
        assert count.unnecessary == count.in_conflict - count.unavoidable


def test_a_frame_that_several_pages_share_counts_once() -> None:
    frames = np.array([7] * 100 + [8])
    pages = pagemap.Pages(np.arange(101), frames)
    count, _ = analysis._count(pages, NEHALEM[1])
    assert (count.pages, count.in_conflict) == (2, 0)
    # What huge pages would give is of the pages that are counted: of 20 of one color, and one of another.
    numbers = np.arange(160)
    pages = pagemap.Pages(numbers, np.where(numbers % 8 == 0, 1000 + numbers, 7))
    count, _ = analysis._count(pages, NEHALEM[1])
    assert (count.pages, count.huge) == (21, 20 - 8)


def test_what_is_calms_own_is_left_out(proc: Path) -> None:
    seen = sample.take(123, "now", MIN, [], own="/data/", proc=proc)
    assert [region.path for region in seen.regions] == ["", "/anon_hugepage (deleted)"]


def test_looks_are_chosen_by_all_memory_then_by_what_was_told(proc: Path) -> None:
    told = [Region(BASE * PAGE, HUGE * PAGE)]
    one, other = (sample.take(123, "now", MIN, blocks, proc=proc) for blocks in (told, None))
    assert one.weight == (HUGE * PAGE, HUGE * PAGE)
    # All of the mapping that the block lies in is resident: four pages more.
    assert other.weight > one.weight
    untold = [replace(each, kind="other") for each in other.regions]
    assert replace(other, regions=untold).weight < other.weight


def test_a_process_that_ends_meanwhile_is_not_shown_as_if_it_were_all(proc: Path) -> None:
    with (proc / "123/pagemap").open("r+b") as file:
        file.truncate((BASE + 4 * HUGE) * 8)
    with pytest.raises(CalmError, match=r"^process 123 ended while it was sampled$"):
        sample.take(123, "now", MIN, proc=proc)


def test_a_process_that_ended_before_a_large_mapping_was_found(proc: Path) -> None:
    (proc / "123/pagemap").write_bytes(b"")
    with pytest.raises(CalmError, match=r"^process 123 ended while it was sampled$"):
        sample.take(123, "now", 1 << 40, proc=proc)


def test_a_process_that_ended_between_two_files(proc: Path) -> None:
    (proc / "123/pagemap").unlink()
    with pytest.raises(CalmError, match=r"^there is no process 123$"):
        sample.take(123, "now", MIN, proc=proc)


def test_a_zombie_has_ended(proc: Path) -> None:
    (proc / "123/smaps").write_text("")
    with pytest.raises(CalmError, match=r"^process 123 has ended, or has no memory of its own$"):
        sample.take(123, "now", MIN, proc=proc)
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(CalmError, match=f"process {process.pid}"):
            sample.take(process.pid, "now", MIN)


def test_mappings_begin_with_pages_and_are_compared_by_color_alone(proc: Path) -> None:
    seen = sample.take(123, "now", MIN, proc=proc)
    found = analysis.analyse(seen, NEHALEM, MIN, 1)
    assert len(seen.regions) == 3
    assert (found.collisions, found.clusters) == ([], [])
    assert [level.cache.level for level in found.caches if level.conflicts] == [2, 3]
    told = analysis.analyse(replace(seen, blocks_known=True), NEHALEM, MIN, 1)
    assert any(pair.lines for pair in told.collisions)


def test_a_machine_without_known_caches_is_said_to_be_one(proc: Path) -> None:
    seen = sample.take(123, "now", MIN, proc=proc)
    assert any("describes no caches" in note for note in analysis.analyse(seen, [], MIN, 1).notes)
    assert not any("describes no caches" in note for note in analysis.analyse(seen, NEHALEM, MIN, 1).notes)


def test_the_caches_are_those_of_a_cpu_that_the_process_may_run_on(
    proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def affinity(pid: int) -> set[int]:
        asked.append(pid)
        return {5, 3} if pid == 123 else {7}

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    assert sample.take(123, "now", MIN, proc=proc).cpu == 3
    for cpu, ways in ((0, 8), (3, 12), (7, 16)):
        index = tmp_path / f"cpu{cpu}/cache/index0"
        index.mkdir(parents=True)
        texts = {"type": "Data", "level": "1", "size": "48K", "shared_cpu_list": f"{cpu}"}
        for name, text in (texts | {"ways_of_associativity": str(ways)}).items():
            (index / name).write_text(text + "\n")
    assert [cache.ways for cache in caches.caches(3, tmp_path)] == [12]
    assert [cache.ways for cache in caches.caches(system=tmp_path)] == [16]


def test_caches_as_the_kernel_describes_them(tmp_path: Path) -> None:
    names = ("type", "level", "size", "shared_cpu_list", "ways_of_associativity", "coherency_line_size")
    described = (
        ("Unified", "3", "32M", "0-3,8-11,16", "16", "128"),
        ("Data", "1", "48K", "0,8", "12", "64"),
        ("Instruction", "1", "64K", "0", "16", "64"),
        # One set: it says 0.
        ("Unified", "2", "2048K", "0", "0", "64"),
        ("Unified", "4", "much", "0", "16", "64"),
    )
    for number, texts in enumerate(described):
        index = tmp_path / f"cpu0/cache/index{number}"
        index.mkdir(parents=True)
        for name, text in zip(names, texts, strict=True):
            (index / name).write_text(text + "\n")
    assert caches.caches(0, tmp_path) == [
        Cache(1, 48 << 10, 12, 64, 2),
        Cache(2, 2 << 20, 2 << 14, 64, 1),
        Cache(3, 32 << 20, 16, 128, 9),
    ]
    assert caches.caches(1, tmp_path) == []


def test_a_title_has_blocks_and_others_apart_and_names_without_controls(proc: Path) -> None:
    blocks = [Region(BASE * PAGE, HUGE * PAGE)]
    seen = sample.take(123, "peak", MIN, blocks, proc=proc)
    assert report._title(analysis.analyse(seen, NEHALEM, MIN, 1)).startswith(
        "1 large block and 2 other large mappings, 7.0 MiB"
    )
    alone = sample.take(123, "now", MIN, proc=proc)
    assert report._title(analysis.analyse(alone, NEHALEM, MIN, 1)).startswith("3 large mappings, ")
    file = io.StringIO()
    command = replace(alone, command=["\x1b[31m" + 300 * "z"])
    report.show(console(file), analysis.analyse(command, NEHALEM, MIN, 1), 3)
    assert f"process 123:  [31m{195 * 'z'}\n" in file.getvalue()
    path = "/data/\x1b[31mred" + 300 * "x"
    odd = replace(seen, regions=[replace(each, path=path) for each in seen.regions[-1:]])
    (block,) = analysis.analyse(odd, NEHALEM, MIN, 1).blocks
    assert report.place(block) == path.replace("\x1b", " ")
    site = (Call("f<\x07>" + 300 * "y", None, "m"),)
    assert report.place(replace(block, site=site)) == "f< >" + 300 * "y" + " (m)"


# A machine of two threads, whose innermost cache has ways of 16 KiB.
WIDE = Cache(1, 128 << 10, 8, cpus=2)
ONE, OTHER = (0x10,), (0x20,)


@pytest.fixture
def made(proc: Path) -> sample.Sample:
    """A mapping, and blocks: five from two places that start alike, and one that is 4 KiB off."""
    seen = sample.take(123, "now", MIN, [], proc=proc)
    pages = [(at, size, site) for at, (size, site) in enumerate([(9, ONE), (3, OTHER), (5, ONE), (4, OTHER)])]
    blocks = [Region(at << 20, size << 12, "block", site) for at, size, site in pages]
    blocks += [
        Region(4 << 20, 7 << 12, "block", ONE),
        Region((5 << 20) + 4096, 8 << 12, "block", ONE),
    ]
    whole = pagemap.Pages(np.arange(40), None)
    regions = [Region(1 << 40, 40 * PAGE, "other", pages=whole), *blocks]
    return replace(seen, regions=regions, blocks_known=True, hidden="no frames", threads=2, mappings=[])


def test_collisions_are_of_the_blocks_and_by_the_places_of_both(made: sample.Sample) -> None:
    found = analysis.analyse(made, [WIDE], MIN, 1)
    alike = [
        (each.first, each.second, each.bytes // PAGE, each.lines, each.count) for each in found.collisions
    ]
    # The largest of each; those at the 4 KiB alone come last. From one place and the other, in either order.
    assert alike == [
        (1, 5, 7, True, 3),
        (1, 4, 4, True, 6),
        (2, 4, 3, True, 1),
        (1, 6, 8, False, 3),
        (4, 6, 4, False, 2),
    ]
    assert found.pairs == 15
    assert [(each.blocks, each.threads) for each in found.clusters] == [((1, 2, 3, 4, 5), 2)]
    assert analysis.analyse(replace(made, threads=1), [WIDE], MIN, 1).clusters == []


def test_collisions_as_they_are_shown(made: sample.Sample) -> None:
    found = analysis.analyse(made, [WIDE], MIN, 1)
    last = [[*column.cells][-1] for column in report._pair_table(found, 4).columns]
    assert last == ["3", "#1, #6", "32 KiB", "4 KiB", "0x10"]
    (second,) = [[*column.cells][1] for column in report._pair_table(found, 2).columns[4:]]
    assert second == "0x10\n0x20"
    line = report._cluster_line(found.clusters[0], "blocks")
    assert line == "L1: 5 blocks start at one line, for 4 ways for each of 2 threads: #1, #2, #3, #4, #5"
    line = report._cluster_line(replace(found.clusters[0], level=2, threads=1), "blocks")
    assert line == "L2: 5 blocks start in one color, for 8 ways: #1, #2, #3, #4, #5"
    told = msgspec.to_builtins(found)["collisions"][3]
    assert told == {
        **{"count": 3, "first": 1, "second": 6, "bytes": 8 * PAGE, "lines": False},
        **{"apart_bytes": 4096, "alias_bytes": 0, "colors": {}},
    }


def test_counts_as_they_are_shown(proc: Path) -> None:
    count = analysis.Count(100, 40, 10, 30, Random(15.25, 10, 21), 2)
    found = analysis.analyse(sample.take(123, "now", MIN, proc=proc), NEHALEM, MIN, 1)
    for block in found.blocks:
        block.conflicts["L2"] = replace(count, pages=block.id)
    assert found.caches[1].conflicts is not None
    table = report._conflict_table(found, NEHALEM[1], found.caches[1].conflicts, 2)
    last = {column.header: [*column.cells][-1] for column in table.columns}
    # The largest of those with nothing resident.
    assert last == {
        **{"": "#2", "size": "4.0 MiB", "huge": "-", "pages": "2", "in conflict": "40", "unavoidable": "10"},
        **{"unnecessary": "30", "random (95 %)": "15.2 (10 to 21)", "huge pages": "2"},
        "allocated in": "/anon_hugepage (deleted)",
    }
    assert [*table.columns[0].cells] == ["all", "#0", "#2"]
    # 512 of 516 pages.
    assert [*table.columns[2].cells] == ["99 %", "99 %", "-"]


def test_what_to_bear_in_mind(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = sample.take(123, "now", MIN, proc=proc)
    for is_virtual in (True, False, None):
        monkeypatch.setattr(topology, "is_virtual", lambda found=is_virtual: found)
        notes = analysis.analyse(seen, NEHALEM, MIN, 1).notes
        assert (analysis.VIRTUAL_MACHINE in notes) == bool(is_virtual)
        assert not any("no room in the table" in note for note in notes)
    notes = analysis.analyse(replace(seen, lost=1234), NEHALEM, MIN, 1).notes
    assert "1,234 large blocks found no room in the table and are missing" in notes


@pytest.mark.parametrize("pid", [999, 123])
def test_a_process_that_is_not_there(proc: Path, pid: int) -> None:
    (proc / "123/smaps").unlink()
    with pytest.raises(CalmError, match=f"^there is no process {pid}$"):
        sample.take(pid, "now", MIN, proc=proc)
