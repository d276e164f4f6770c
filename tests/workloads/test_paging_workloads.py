"""The workloads on page tables work, and stale-reads detects each wrong translation."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ran_workloads import BUILD, preloadable, run, start
from waiting import wait_until

SOURCES = BUILD.parents[1] / "workloads"
PAGE = os.sysconf("SC_PAGESIZE")
NODES = [path for path in Path("/sys/devices/system/node").glob("node*") if path.name[4:].isdigit()]
KSM = Path("/sys/kernel/mm/ksm/run")

SMALL: dict[str, tuple[str, ...]] = {
    "anon-r-seq": ("--size", str(300 * PAGE), "--rounds", "3"),
    "cow-mt": ("--size", str(300 * PAGE), "--threads", "3", "--rounds", "2"),
    "mmap-read": ("--size", str(300 * PAGE), "--processes", "3", "--rounds", "2"),
    "msync-mt": ("--size", str(50 * PAGE), "--threads", "3", "--rounds", "2"),
    "stale-reads": ("--seconds", "1", "--threads", "3", "--changers", "2", "--slots", "6", "--pages", "9"),
}
FILED = ("cow-mt", "mmap-read", "msync-mt")
# Fields that depend on the machine, not on the workload.
MEASURED = {"seconds", "minor_faults", "resident_pages"}

OPERATIONS = (
    *("munmap", "dontneed", "mremap", "mmap", "mprotect", "cow", "fork", "free", "pageout", "age", "msync"),
    *("punch", "huge"),
)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_parameters_are_as_given_and_the_help_has_them(name: str) -> None:
    printed = run(name, *SMALL[name])
    helped = start(name, "--help")
    assert helped.returncode == 0
    assert helped.stdout.startswith(f"usage: {name} [options]\n")
    for option, value in zip(SMALL[name][::2], SMALL[name][1::2], strict=True):
        assert f"  {option} N " in helped.stdout
        if option != "--seconds":
            assert str(printed[option.removeprefix("--")]) == value


@pytest.mark.parametrize("name", sorted({"migrate", *SMALL}))
@pytest.mark.parametrize("arguments", [("--no-such",), ("more",), ("--seconds", "0"), ("--rounds", "-1")])
def test_bad_arguments_get_one_line(name: str, arguments: tuple[str, ...]) -> None:
    done = start(name, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert name in done.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("cow-mt", ("--order", "any"), "one of sequential|random"),
        ("cow-mt", ("--part", "any"), "one of own|shared"),
        ("migrate", ("--call", "mbind"), "one of migrate_pages|move_pages"),
        ("mmap-read", ("--processes", "0"), "a number from 1"),
        ("msync-mt", ("--batch", "0"), "a number from 1"),
        ("stale-reads", ("--threads", "65"), "a number from 1 to 64"),
        ("stale-reads", ("--slots", "2", "--changers", "3"), "--slots is less than --changers"),
        ("stale-reads", ("--ops", "munmap,mumap"), "none of those --help lists"),
        ("stale-reads", ("--ops", "munmap,"), "none of those --help lists"),
        ("stale-reads", ("--ops", "munmap", "--plant", "share"), "--plant share is for --ops fork"),
        ("stale-reads", ("--ops", "fork", "--plant", "lose"), "--plant lose is for --ops msync"),
        ("stale-reads", ("--directory", "x" * 5000), "--directory is too long"),
    ],
)
def test_arguments_that_make_no_sense_get_one_line(
    name: str, arguments: tuple[str, ...], message: str
) -> None:
    done = start(name, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", sorted(set(SMALL) - {"stale-reads"}))
def test_the_work_repeats_exactly(name: str) -> None:
    first, second = ({**run(name, *SMALL[name])} for _ in range(2))
    assert {key: first[key] for key in first.keys() - MEASURED} == {
        key: second[key] for key in second.keys() - MEASURED
    }


@pytest.mark.parametrize("name", sorted({"migrate", *SMALL}))
def test_each_runs_as_a_small_systems_only_program(name: str, tmp_path: Path) -> None:
    """Linked statically, without this build's help."""
    sources = sorted(SOURCES.glob("stale-*.c")) if name == "stale-reads" else [SOURCES / f"{name}.c"]
    shared = [SOURCES / "paging.c", SOURCES / "support.c"]
    program = tmp_path / name
    subprocess.run(
        ["gcc", "-std=gnu17", "-O1", "-static", "-pthread", "-o", program, *sources, *shared], check=True
    )
    # An environment that a first process has.
    done = subprocess.run(
        [program, *SMALL.get(name, ())], capture_output=True, text=True, env={}, check=False
    )
    assert done.returncode == (3 if name == "migrate" and len(NODES) < 2 else 0), done.stderr


def preloaded(name: str, library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return start(name, *arguments, preload=library)


# Files.


@pytest.mark.parametrize("name", FILED)
def test_nothing_is_left_of_files(name: str, tmp_path: Path) -> None:
    run(name, *SMALL[name], TMPDIR=str(tmp_path))
    run(name, *SMALL[name], "--file", str(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cow-mt", "mmap-read"])
def test_a_file_that_is_there_is_read_and_stays_as_it_is(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    contents = os.urandom(300 * PAGE)
    file.write_bytes(contents)
    run(name, *SMALL[name], "--file", str(file))
    assert file.read_bytes() == contents
    # Memory beyond the file's end cannot be mapped.
    done = start(name, *SMALL[name], "--size", str(301 * PAGE), "--file", str(file))
    assert (done.returncode, done.stderr) == (1, f"{name}: the file is smaller than --size\n")


def test_msync_mt_writes_no_file_that_is_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"mine")
    done = start("msync-mt", *SMALL["msync-mt"], "--file", str(file))
    assert done.returncode == 1
    assert "File exists" in done.stderr
    assert file.read_bytes() == b"mine"


@pytest.mark.parametrize("name", FILED)
def test_a_file_that_cannot_be_made(name: str) -> None:
    done = start(name, *SMALL[name], "--file", "/no/such/folder/file")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "/no/such/folder/file" in done.stderr


# anon-r-seq


def test_anon_r_seq_faults_once_a_page() -> None:
    got = run("anon-r-seq", "--size", str(1000 * PAGE), "--rounds", "4", "--pin")
    assert got["reads"] == 4 * got["pages"] == 4000
    assert 4000 <= got["minor_faults"] < 4100
    assert "ns_per_fault" not in got


def test_anon_r_seq_tells_what_a_fault_takes() -> None:
    got = run("anon-r-seq", *SMALL["anon-r-seq"], "--clock")
    assert got["ns_per_fault"] == pytest.approx(got["seconds"] * 1e9 / got["minor_faults"], rel=1e-2)
    if platform.machine() == "x86_64":
        assert got["cycles_per_fault"] > 0


# cow-mt


@pytest.mark.parametrize("order", ["sequential", "random"])
@pytest.mark.parametrize("part", ["own", "shared"])
@pytest.mark.parametrize("batch", ["1", "7", "1000000"])
def test_cow_mt_copies_each_page_in_each_round(part: str, order: str, batch: str) -> None:
    size = ("--size", str(1000 * PAGE), "--threads", "3", "--rounds", "2", "--pin")
    got = run("cow-mt", *size, "--part", part, "--order", order, "--batch", batch)
    assert got["pages_copied"] == 2000
    assert got["writes"] == (2000 if part == "own" else 6000)
    # Each copy is a fault, and each look at a file's page is one for up to 16 pages.
    assert got["minor_faults"] >= 2000


# Swaps private and shared in all writable mappings of a file.
OTHER_SHARING = """
#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void *mmap(void *at, size_t size, int protection, int flags, int descriptor, off_t offset) {
    if (descriptor >= 0 && (protection & PROT_WRITE) != 0) {
        flags ^= MAP_PRIVATE | MAP_SHARED;
    }
    return (void *)syscall(SYS_mmap, at, size, protection, flags, descriptor, offset);
}
"""


def test_cow_mt_sees_writes_that_were_not_private(tmp_path: Path) -> None:
    done = preloaded("cow-mt", preloadable(tmp_path, OTHER_SHARING), *SMALL["cow-mt"])
    assert done.returncode == 1
    assert done.stderr == "cow-mt: a page holds neither what the file does nor what was written\n"


# msync-mt


def test_msync_mt_sees_writes_that_are_not_in_the_file(tmp_path: Path) -> None:
    done = preloaded("msync-mt", preloadable(tmp_path, OTHER_SHARING), *SMALL["msync-mt"])
    assert done.returncode == 1
    assert done.stderr == "msync-mt: the file does not hold what was written\n"


COUNTED_MSYNC = """
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_ulong calls, bytes;

int msync(void *at, size_t size, int flags) {
    calls += flags == MS_SYNC;
    bytes += size;
    return (int)syscall(SYS_msync, at, size, flags);
}
__attribute__((destructor)) static void tell(void) {
    FILE *told = fopen(getenv("TOLD"), "w");
    fprintf(told, "%lu %lu", calls, bytes);
    fclose(told);
}
"""


@pytest.mark.parametrize(("batch", "calls"), [(1, 300), (7, 45), (1000, 9)])
def test_msync_mt_syncs_each_page_that_it_writes(batch: int, calls: int, tmp_path: Path) -> None:
    told = tmp_path / "told"
    size = ("--size", str(100 * PAGE), "--threads", "3", "--rounds", "3", "--batch", str(batch))
    library = preloadable(tmp_path, COUNTED_MSYNC)
    got = run("msync-mt", *size, preload=library, TOLD=str(told))
    assert (got["writes"], got["calls"]) == (300, calls)
    assert told.read_text() == f"{calls} {300 * PAGE}"


# mmap-read


@pytest.mark.parametrize("order", ["sequential", "random"])
def test_mmap_read_reads_the_whole_file_in_each_process(order: str) -> None:
    got = run("mmap-read", *SMALL["mmap-read"], "--order", order, "--pin")
    assert got["reads"] == 3 * 2 * got["pages"] == 3 * 2 * 300
    # Each quarter of the file contains some of 1,800 random pages.
    assert 150 < got["resident_pages"] <= 300
    if order == "sequential":
        assert got["resident_pages"] == 300


EVERY_THIRD_PAGE = """
#define _GNU_SOURCE
#include <sys/mman.h>
#include <string.h>
#include <unistd.h>

int mincore(void *at, size_t size, unsigned char *there) {
    size_t pages = size / sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < pages; i++) {
        there[i] = i % 3 == 0 ? 0xff : 0xfe;
    }
    return 0;
}
"""


def test_mmap_read_tells_what_stayed_in_memory(tmp_path: Path) -> None:
    library = preloadable(tmp_path, EVERY_THIRD_PAGE)
    assert run("mmap-read", *SMALL["mmap-read"], preload=library)["resident_pages"] == 100


FILLED_HOLE = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>

int ftruncate(int descriptor, off_t size) {
    return (int)syscall(SYS_ftruncate, descriptor, size) | -(pwrite(descriptor, "x", 1, size / 2) != 1);
}
"""


def test_mmap_read_sees_what_no_hole_has(tmp_path: Path) -> None:
    done = preloaded("mmap-read", preloadable(tmp_path, FILLED_HOLE), *SMALL["mmap-read"])
    assert done.returncode == 1
    assert done.stdout == ""
    assert "mmap-read: a hole in the file is not zero\n" in done.stderr
    assert done.stderr.endswith("mmap-read: a process did not end as it should\n")


# migrate

SMALL_MOVE = ("--size", str(700 * PAGE), "--threads", "1", "--readers", "2")


@pytest.mark.skipif(len(NODES) > 1, reason="this machine has several memory nodes")
def test_migrate_needs_nodes() -> None:
    done = start("migrate", *SMALL_MOVE)
    assert done.returncode == 3
    assert done.stderr == "migrate: there is one memory node here: nothing can move\n"
    assert done.stdout == ""


# A machine of NODES nodes, of which memory can move to the first MOVABLE. It checks what it is asked for.
SEVERAL_NODES = """
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int node_of[4096];

static int *place(void *page) { return &node_of[(uintptr_t)page / PAGE % 4096]; }

long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    unsigned long a[6];
    for (int i = 0; i < 6; i++) {
        a[i] = va_arg(list, unsigned long);
    }
    va_end(list);
    if (number == SYS_get_mempolicy) {
        *(unsigned long *)a[1] = (1UL << NODES) - 1;
        return a[4] == 4 ? 0 : -1;
    }
    if (number == SYS_move_pages) {
        for (unsigned long i = 0; i < a[1]; i++) {
            int *node = place(((void **)a[2])[i]);
            if (a[3] != 0 && ((int *)a[3])[i] < MOVABLE) {
                *node = ((int *)a[3])[i];
            }
            ((int *)a[4])[i] = *node;
        }
        return 0;
    }
    if (number == SYS_migrate_pages) {
        unsigned long from = *(unsigned long *)a[2], to = *(unsigned long *)a[3];
        if ((from & to) != 0 || (from | to) != (1UL << NODES) - 1 || (to & (to - 1)) != 0) {
            abort();
        }
        for (int i = 0; i < 4096; i++) {
            if ((from >> node_of[i] & 1) != 0 && to < 1UL << MOVABLE) {
                node_of[i] = __builtin_ctzl(to);
            }
        }
        return 0;
    }
    abort();
}
"""


def machine_of(folder: Path, nodes: int, movable: int) -> Path:
    defined = f"#define NODES {nodes}\n#define MOVABLE {movable}\n#define PAGE {PAGE}\n"
    return preloadable(folder, defined + SEVERAL_NODES)


@pytest.mark.parametrize("again", ["none", "read", "map"])
@pytest.mark.parametrize("call", ["migrate_pages", "move_pages"])
@pytest.mark.parametrize("nodes", [2, 3])
def test_migrate_moves_all_pages_in_each_round(nodes: int, call: str, again: str, tmp_path: Path) -> None:
    library = machine_of(tmp_path, nodes, nodes)
    got = run("migrate", *SMALL_MOVE, "--rounds", "5", "--call", call, "--again", again, preload=library)
    assert got["nodes"] == nodes
    assert got["pages"] == 700
    # Pages of another mapping may be anywhere.
    assert got["pages_moved"] == 5 * 700 if again != "map" else 700 <= got["pages_moved"] <= 5 * 700
    assert 0 < got["moving_seconds"] <= got["seconds"]


@pytest.mark.parametrize("call", ["migrate_pages", "move_pages"])
def test_migrate_says_if_nothing_moved(call: str, tmp_path: Path) -> None:
    done = preloaded("migrate", machine_of(tmp_path, 2, 1), *SMALL_MOVE, "--call", call)
    assert done.returncode == 1
    assert "no page moved" in done.stderr


# stale-reads


@pytest.fixture
def ksm() -> Iterator[None]:
    """Lets the kernel merge pages for a time."""
    before = KSM.read_text() if KSM.exists() and os.access(KSM, os.W_OK) else ""
    if before not in ("0\n", "1\n"):
        pytest.skip("the kernel does not merge pages for us")
    KSM.write_text("1")
    yield
    KSM.write_text(before)


def stale_reads(*arguments: str, seed: str = os.environ["CALM_TEST_SEED"], **more: Any) -> dict[str, Any]:
    got = run("stale-reads", "--changers", "2", "--seed", seed, *arguments, **more)
    assert got["stale"] == 0
    return got


@pytest.mark.parametrize(
    "arguments", [("--threads", "1"), ("--threads", "16"), ("--threads", "6", "--migrate-threads")]
)
def test_stale_reads_raises_no_alarm(arguments: tuple[str, ...]) -> None:
    wanted = ("count", "pages", "reads", "writes", "writes_checked", "faults")
    for seconds in ("2", "20", "200"):  # what a loaded machine does in two may be nothing
        got = stale_reads("--seconds", seconds, *arguments)
        sums = [sum(counts[each] for counts in got["operations"].values()) for each in wanted]
        if min(sums) > 0:
            break
    here = set(got["operations"])
    assert here.isdisjoint(got["not_here"])
    assert here | set(got["not_here"]) == {*OPERATIONS, "ksm", "migrate"}
    assert here >= {"munmap", "mremap", "mmap", "mprotect", "cow", "fork", "msync"}
    for counts in got["operations"].values():
        assert counts["faults"] <= counts["reads"] + counts["writes"]
    assert min(sums) > 0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_stale_reads_looks_at_each_operation(operation: str) -> None:
    counts: dict[str, int] = {}
    for seconds in ("1", "20", "200"):  # what a loaded machine does in one may be nothing
        done = start("stale-reads", "--seconds", seconds, "--threads", "3", "--ops", operation)
        if done.returncode == 3:
            pytest.skip(f"{operation} is not to be had here")
        assert done.returncode == 0, done.stderr
        got = json.loads(done.stdout)
        assert list(got["operations"]) == [operation]
        counts = got["operations"][operation]
        if enough := min(counts[counted] for counted in ("count", "reads", "writes", "writes_checked")) > 0:
            break
    assert enough
    # Where there is no swap, and no huge page, these have nothing to show for it.
    assert counts["pages"] > 0 or operation in ("pageout", "free", "huge", "msync")


def test_stale_reads_in_merged_pages(ksm: None) -> None:
    for seconds in ("3", "30", "300"):
        counts = stale_reads("--seconds", seconds, "--threads", "3", "--ops", "ksm")["operations"]["ksm"]
        if counts["count"] > 0 and counts["writes"] > 0:
            return
    pytest.fail(f"nothing was merged and written: {counts}")


def test_stale_reads_takes_what_is_to_be_had_of_a_list() -> None:
    here = stale_reads("--seconds", "1", "--ops", "munmap,mprotect")
    assert list(here["operations"]) == ["munmap", "mprotect"]
    for missing in set(here["not_here"]) & {"ksm", "migrate"}:
        operations = list(stale_reads("--seconds", "1", "--ops", f"{missing},cow")["operations"])
        if missing in operations:
            continue  # another test has had the kernel merge pages since
        assert operations == ["cow"]
        done = start("stale-reads", "--seconds", "1", "--ops", missing)
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr == "stale-reads: none of these operations is to be had here\n"


def found(operation: str, plant: str, tmp_path: Path, **more: Any) -> str:
    """The message about a planted fault."""
    arguments = ("--threads", "3", "--changers", "2", "--seconds", "500", "--directory", str(tmp_path))
    planted = ("--ops", operation, "--plant", plant, "--seed", os.environ["CALM_TEST_SEED"])
    done = start("stale-reads", *arguments, *planted, **more)
    if done.returncode == 3:
        pytest.skip(f"{operation} is not to be had here")
    assert (done.returncode, done.stdout) == (1, "")
    line = re.fullmatch(
        r"stale-reads: (\w+): (.+): CPU \d+, address 0x[0-9a-f]+, slot \d+ page \d+: "
        r"expected .+, found .+; memory now holds .+\n",
        done.stderr,
    )
    assert line is not None, done.stderr
    assert line[1] == operation
    assert list(tmp_path.iterdir()) == []
    return line[2]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_stale_read_is_found(operation: str, tmp_path: Path) -> None:
    assert found(operation, "read", tmp_path) == "stale read"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_stale_write_is_found(operation: str, tmp_path: Path) -> None:
    what = found(operation, "write", tmp_path)
    # If the file was synced, the changer may be the first to detect that the write is missing.
    assert what.startswith("stale write") or (operation, what) == ("msync", "write that is not in the file")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_stale_write_is_found_where_it_went(operation: str, tmp_path: Path) -> None:
    assert found(operation, "stray", tmp_path) == "memory that no other thread uses has changed"


@pytest.mark.parametrize("plant", ["read", "write", "stray"])
def test_what_is_stale_in_merged_pages_is_found(plant: str, ksm: None, tmp_path: Path) -> None:
    assert found("ksm", plant, tmp_path)


def test_pages_that_stay_merged_are_found(ksm: None, tmp_path: Path) -> None:
    # Whether a reader, a writer or the changer itself is the first to see it is chance.
    what = found("ksm", "share", tmp_path)
    assert what in ("write into another page", "stale read", "stale read by the changer")


def test_a_child_that_shares_memory_is_found(tmp_path: Path) -> None:
    what = found("fork", "share", tmp_path)
    assert what in (
        "child sees what its parent wrote",
        "child does not have what there was when it was forked",
        "stale read",
        "stale read by the changer",
    )


def test_a_write_that_does_not_get_to_the_file_is_found(tmp_path: Path) -> None:
    assert found("msync", "lose", tmp_path) == "write that is not in the file"


# A kernel that says it did, and did not.
LAZY_KERNEL = """
#define _GNU_SOURCE
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if CASE_MUNMAP
int munmap(void *at, size_t size) { return size < 1 << 20 ? 0 : (int)syscall(SYS_munmap, at, size); }
#elif CASE_MPROTECT
int mprotect(void *at, size_t size, int protection) { return 0; }
#elif CASE_WRITABLE
int mprotect(void *at, size_t size, int protection) {
    protection |= (protection & PROT_READ) != 0 ? PROT_WRITE : 0;
    return (int)syscall(SYS_mprotect, at, size, protection);
}
#elif CASE_MADVISE
int madvise(void *at, size_t size, int advice) { return 0; }
#elif CASE_MREMAP
void *mremap(void *from, size_t size, size_t again, int flags, ...) {
    va_list list;
    va_start(list, flags);
    void *to = va_arg(list, void *);
    va_end(list);
    void *at = mmap(to, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return memcpy(at, from, size);
}
#endif
"""


@pytest.mark.parametrize(
    ("case", "operation", "what"),
    [
        ("MUNMAP", "munmap", "stale|mmap: File exists"),
        ("MPROTECT", "mprotect", "stale"),
        ("WRITABLE", "mprotect", "stale write"),
        ("MADVISE", "dontneed", "stale|no other thread uses"),
        ("MADVISE", "punch", "stale"),
        ("MREMAP", "mremap", "stale|mmap: File exists"),
    ],
)
def test_a_kernel_that_changes_nothing_is_found(case: str, operation: str, what: str, tmp_path: Path) -> None:
    library = preloadable(tmp_path, f"#define CASE_{case} 1\n{LAZY_KERNEL}")
    done = start("stale-reads", "--threads", "3", "--seconds", "500", "--ops", operation, preload=library)
    assert done.returncode == 1
    assert re.search(what, done.stderr)
    assert done.stderr.count("\n") == 1


def is_alive(pid: str) -> bool:
    """A zombie is not alive: in some containers no process reaps orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nothing_is_left_of_stale_reads_when_it_is_killed(tmp_path: Path) -> None:
    arguments = ("--seconds", "100", "--threads", "2", "--ops", "fork,msync", "--directory", str(tmp_path))
    process = subprocess.Popen([BUILD / "stale-reads", *arguments], stdout=subprocess.PIPE)
    forked: set[str] = set()

    def has_forked() -> bool:
        for path in Path(f"/proc/{process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                forked.update(path.read_text().split())
        return bool(forked)

    wait_until(has_forked)
    process.kill()
    process.communicate()
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: not any(map(is_alive, forked)))


def test_stale_reads_says_what_it_ran_with() -> None:
    got = stale_reads("--seconds", "1", "--words", "3", seed="9")
    assert (got["words"], got["seed"]) == (3, 9)
    assert got["cpus"] == len(os.sched_getaffinity(0))
