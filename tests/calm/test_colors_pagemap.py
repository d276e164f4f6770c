"""The kernel's files are read as they are written: mappings, resident pages, frames."""

import struct
from pathlib import Path

import numpy as np
import pytest

from calm.colors import analysis, look, pagemap
from calm.colors.blocks import Block
from calm.colors.geometry import NEHALEM
from calm.errors import CalmError

PAGE = pagemap.PAGE_BYTES
HUGE = (2 << 20) // PAGE
PRESENT, SWAPPED = 1 << 63, 1 << 62
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
    entries = [PRESENT | (5 * HUGE + at) for at in range(HUGE)]
    entries += [SWAPPED | 99, 0] + [PRESENT | frame for frame in (3, 3 + 128, 3 + 256, 17)]
    with (folder / "pagemap").open("wb") as file:
        file.seek(BASE * 8)
        file.write(struct.pack(f"<{len(entries)}Q", *entries))
    return tmp_path


def test_smaps() -> None:
    found = pagemap.parse(SMAPS.format(0x1000, 0x2000, 4))
    assert [mapping.path for mapping in found] == [
        "",
        "/usr/lib/a name.so",
        "/usr/lib/a name.so",
        "/data/input (deleted)",
        "/anon_hugepage (deleted)",
        "[vvar]",
    ]
    assert [mapping.is_data for mapping in found] == [True, False, True, True, True, False]
    assert (found[0].start, found[0].end, found[0].resident_kib, found[0].huge_kib) == (
        0x1000,
        0x2000,
        4,
        2048,
    )
    assert (found[1].offset, found[1].huge_kib) == (0x1000, 0)
    assert (found[4].resident_kib, found[4].huge_kib) == (4096, 4096)


def test_maps_alone_know_nothing_of_residence() -> None:
    text = "\n".join(line for line in SMAPS.format(1, 2, 3).splitlines() if "-" in line.split()[0])
    found = pagemap.parse(text)
    assert len(found) == 6
    assert {mapping.resident_kib for mapping in found} == {None}


def test_pages(proc: Path) -> None:
    with pagemap.Pagemap(123, proc) as pages:
        found = pages.pages(BASE * PAGE + 16, HUGE * PAGE + 3 * PAGE)
        assert pages.readable
        assert pages.reason is None
    # What is swapped out, and what was never there, is not resident. Of the last page the range has 16 bytes.
    assert list(found.numbers - BASE) == [*range(HUGE), HUGE + 2, HUGE + 3]
    assert found.frames is not None
    assert list(found.frames[-2:]) == [3, 131]
    assert found.bytes == (HUGE + 2) * PAGE


def test_huge_pages_are_seen_by_their_frames(proc: Path) -> None:
    with pagemap.Pagemap(123, proc) as pages:
        whole = pages.pages(BASE * PAGE, 4 * HUGE * PAGE)
        part = pages.pages((BASE + 1) * PAGE, HUGE * PAGE)
    assert whole.huge_bytes() == HUGE * PAGE
    assert part.huge_bytes() == 0
    assert pagemap.Pages(whole.numbers, None).huge_bytes() is None
    assert pagemap.NO_PAGES.huge_bytes() is None
    # As near each other, but not aligned.
    numbers = np.arange(BASE, BASE + 2 * HUGE)
    assert pagemap.Pages(numbers, numbers * 0 + np.arange(2 * HUGE) + 1).huge_bytes() == 0


def test_a_range_that_is_read_in_pieces(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pagemap.Pagemap(123, proc) as pages:
        wanted = pages.pages(BASE * PAGE, 2 * HUGE * PAGE)
        monkeypatch.setattr(pagemap, "_AT_ONCE", 7)
        found = pages.pages(BASE * PAGE, 2 * HUGE * PAGE)
    assert wanted.frames is not None
    assert found.frames is not None
    assert list(found.numbers) == list(wanted.numbers)
    assert list(found.frames) == list(wanted.frames)


def test_hidden_frames(proc: Path) -> None:
    path = proc / "123/pagemap"
    data = bytearray(path.read_bytes())
    for at in range(BASE * 8, len(data), 8):
        (entry,) = struct.unpack_from("<Q", data, at)
        struct.pack_into("<Q", data, at, entry & (PRESENT | SWAPPED))
    path.write_bytes(data)
    seen = look.take(123, "now", 64 << 10, proc=proc)
    assert "CAP_SYS_ADMIN" in str(seen.hidden)
    assert seen.resident_known
    assert all(region.pages.frames is None for region in seen.regions)
    assert seen.resident_bytes == (HUGE + 4) * PAGE
    found = analysis.analyse(seen, NEHALEM, 1)
    assert all(level.all.in_conflict is None for level in found.levels)
    assert any("CAP_SYS_ADMIN" in note for note in found.notes)


def test_a_look_by_mappings(proc: Path) -> None:
    seen = look.take(123, "now", 64 << 10, proc=proc)
    assert (seen.pid, seen.command, seen.threads, seen.told) == (123, "./x one two", 7, False)
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
        Block(BASE * PAGE, HUGE * PAGE, 0, 1),
        Block((BASE + HUGE) * PAGE - 16, 6 * PAGE, 1, 1),
    ]
    seen = look.take(123, "peak", 64 << 10, blocks, proc=proc)
    # The mapping that they lie in is not looked at again; the others are.
    assert [(region.kind, region.bytes) for region in seen.regions] == [
        ("block", HUGE * PAGE),
        ("block", 6 * PAGE),
        ("other", 1 << 20),
        ("other", 4 << 20),
    ]
    # They share a page, which counts once.
    assert [region.pages.bytes // PAGE for region in seen.regions[:2]] == [HUGE, 1 + 4]
    assert seen.resident_bytes == (HUGE + 4) * PAGE
    assert seen.weight == ((HUGE + 5) * PAGE, (HUGE + 5) * PAGE)
    frames = look.frames_by_page(seen.regions[1])
    assert frames is not None
    assert list(frames) == [6 * HUGE - 1, -1, -1, 3, 131, 259, 17]


def test_the_counts(proc: Path) -> None:
    """512 pages of 16 colors of a huge page, and three more of one color."""
    seen = look.take(123, "now", 64 << 10, proc=proc)
    found = analysis.analyse(seen, NEHALEM, 1)
    assert [cache.level for cache, _ in found.skipped] == [1]
    counts = {level.cache.level: level.all for level in found.levels}
    pages = HUGE + 4
    assert {count.pages for count in counts.values()} == {pages}
    for level, count in counts.items():
        cache = NEHALEM[level - 1]
        colors = cache.bytes // cache.ways // PAGE
        by_color = [HUGE // colors] * colors
        for frame in (3, 131, 259, 17):
            by_color[frame % colors] += 1
        assert count.in_conflict == sum(max(0, number - cache.ways) for number in by_color)
        assert count.unavoidable == max(0, pages - cache.bytes // PAGE)
        assert count.unnecessary == count.in_conflict - count.unavoidable


def test_a_frame_that_several_pages_share_counts_once() -> None:
    frames = np.array([7] * 100 + [8])
    pages = pagemap.Pages(np.arange(101), frames)
    count = analysis._count(pages, NEHALEM[1])
    assert (count.pages, count.in_conflict) == (2, 0)


@pytest.mark.parametrize("pid", [999, 123])
def test_a_process_that_is_not_there(proc: Path, pid: int) -> None:
    (proc / "123/smaps").unlink()
    with pytest.raises(CalmError, match="there is no process"):
        pagemap.mappings(pid, proc)
