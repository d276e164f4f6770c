"""Programs that run: their large blocks are told, whatever allocator they have, with the place of each."""

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calm_helpers import ROOT, Calm

from calm.core import allocators, documents
from calm.core.errors import CalmError
from research.colors import caches, sample, watch
from research.colors import records as recorded
from research.colors.analysis import Colors

MIN_BYTES = 64 << 10
PAGE = caches.PAGE_BYTES
MIB = 1 << 20
PR_CAPBSET_DROP, CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON = 24, 19, 21, 38
ALLOCATORS = ["glibc", "calmalloc", "ptlbmalloc2"]

# Does what its first argument says.
SOURCE = r"""
    #define _GNU_SOURCE
    #include <malloc.h>
    #include <pthread.h>
    #include <stdint.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <sys/wait.h>
    #include <unistd.h>
    #define MIB ((size_t)1 << 20)
    #define PLACE __attribute__((noinline))
    static char *volatile kept[64];
    static char *touched(void *block, size_t bytes) {
        if (block == NULL || block == MAP_FAILED) exit(3);
        return memset(block, 1, bytes);
    }
    PLACE static void by_malloc(void) { kept[0] = touched(malloc(2 * MIB), 2 * MIB); }
    PLACE static void by_calloc(void) { kept[1] = touched(calloc(3, MIB), 3 * MIB); }
    PLACE static void by_realloc(void) { kept[2] = touched(realloc(malloc(MIB), 4 * MIB), 4 * MIB); }
    PLACE static void by_aligned(void) { kept[3] = touched(aligned_alloc(4096, 5 * MIB), 5 * MIB); }
    PLACE static void by_posix(void) {
        void *block;
        if (posix_memalign(&block, 8192, 6 * MIB) != 0) exit(3);
        kept[4] = touched(block, 6 * MIB);
    }
    PLACE static void by_memalign(void) { kept[5] = touched(memalign(64, 7 * MIB), 7 * MIB); }
    PLACE static void by_mmap(void) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS;
        kept[6] = touched(mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, flags, -1, 0), 8 * MIB);
    }
    PLACE static void all(void) {
        by_malloc(), by_calloc(), by_realloc(), by_aligned(), by_posix(), by_memalign(), by_mmap();
    }
    PLACE static void of_a_thread(uintptr_t number) {
        kept[number] = touched(malloc(MIB + number * 4096), MIB + number * 4096);
    }
    static void *thread(void *number) {
        for (int i = 0; i < 200; i++) free(malloc(MIB / 2 + (size_t)i * 16));
        of_a_thread((uintptr_t)number);
        return NULL;
    }
    static volatile char untouched[16 * MIB], array[MIB], large[64 * MIB];
    PLACE static void briefly(void) { free(touched(malloc(200 << 10), 200 << 10)); }
    int main(int argc, char **argv) {
        const char *what = argv[argc - 1];
        if (strcmp(what, "all") == 0) {
            all();
        } else if (strcmp(what, "freed") == 0) {
            all();
            for (int i = 0; i < 6; i++) free(kept[i]);
            munmap(kept[6], 8 * MIB);
        } else if (strcmp(what, "threads") == 0) {
            pthread_t threads[8];
            for (uintptr_t i = 0; i < 8; i++) pthread_create(&threads[i], NULL, thread, (void *)i);
            for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
        } else if (strcmp(what, "forks") == 0) {
            by_malloc();
            if (fork() == 0) {
                free(kept[0]);
                by_calloc();
                by_aligned();
                _exit(0);
            }
            wait(NULL);
        } else if (strcmp(what, "vforks") == 0) {
            by_malloc();
            if (vfork() == 0) _exit(0);
            by_calloc();
        } else if (strcmp(what, "cut") == 0) {
            by_mmap();
            munmap(kept[6], 2 * MIB);
            munmap(kept[6] + 7 * MIB, MIB);
        } else if (strcmp(what, "static") == 0) {
            memset((char *)array, 1, sizeof array);
            untouched[5] = 1;
        } else if (strcmp(what, "large") == 0) {
            briefly();
            memset((char *)large, 1, sizeof large);
        } else if (strcmp(what, "launches") == 0) {
            by_malloc();
            if (fork() == 0) {
                execl(argv[0], argv[0], "large", NULL);
                _exit(5);
            }
            wait(NULL);
        } else if (strcmp(what, "many") == 0) {
            for (int i = 0; i < 300; i++) touched(malloc(68 << 10), 68 << 10);
        } else if (strcmp(what, "small") == 0) {
            for (int i = 0; i < 64; i++) kept[i] = touched(malloc(60 << 10), 60 << 10);
        } else if (strcmp(what, "waits") == 0) {
            all();
            printf("ready\n");
            fflush(stdout);
            if (read(0, &what, 1) < 0) return 4;
        } else if (strcmp(what, "fails") == 0) {
            by_malloc();
            free(realloc(kept[0], SIZE_MAX / 2));
            if (calloc(SIZE_MAX / 2, 4) != NULL || malloc(SIZE_MAX / 2) != NULL) return 4;
            return 7;
        } else if (strcmp(what, "killed") == 0) {
            all();
            raise(9);
        }
        return 0;
    }
"""
PLACES = {
    2: "by_malloc",
    3: "by_calloc",
    4: "by_realloc",
    5: "by_aligned",
    6: "by_posix",
    7: "by_memalign",
    8: "by_mmap",
}

# Prints the number of a thread.
THREAD = (
    "import threading, sys; threading.Thread(target=lambda: "
    "(print(threading.get_native_id(), flush=True), sys.stdin.read())).start()"
)

RunColors = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colors")
    (folder / "blocks.c").write_text("#include <signal.h>\n" + SOURCE)
    command = ["cc", "-O1", "-g", "-w", "-pthread", "-o", str(folder / "blocks"), str(folder / "blocks.c")]
    subprocess.run(command, check=True)
    return folder / "blocks"


@pytest.fixture
def colors(calm: Calm, program: Path) -> RunColors:
    def run(what: str, *options: str, code: int = 0) -> dict[str, Any]:
        result = calm("colors", "run", *options, "--json", "-", "--", program, what)
        assert result.returncode == code, result.stderr
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return run


def told(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for block in found["blocks"] if block["kind"] != "other"]


def innermost(block: dict[str, Any]) -> str:
    function: str = block["site"][0]["function"]
    return function


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("what", ["all", "freed"])
def test_each_way_to_allocate_with_its_place(colors: RunColors, allocator: str, what: str) -> None:
    """Also of blocks that are freed between two samples: the first free waits for one."""
    found = colors(what, "-a", allocator, "--interval", "1h")
    places = {block["bytes"] // MIB: innermost(block) for block in told(found)}
    assert places == PLACES
    assert found["blocks_known"]
    assert found["run"]["allocator"] == allocator
    for block in told(found):
        assert block["bytes"] <= block["resident_bytes"] <= block["bytes"] + PAGE
        assert block["site"][0]["source"].startswith("blocks.c:")
        assert "all" in [call["function"] for call in block["site"]]
    kinds = {block["bytes"] // MIB: block["kind"] for block in told(found)}
    assert kinds == {size: "mapping" if size == 8 else "block" for size in PLACES}


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_threads(colors: RunColors, allocator: str) -> None:
    found = colors("threads", "-a", allocator)
    kept = [block for block in told(found) if innermost(block) == "of_a_thread"]
    # The most that was there at once: all, unless a thread's other block was larger at that moment.
    assert {block["bytes"] for block in kept} <= {MIB + number * 4096 for number in range(8)}
    assert len(kept) == 8
    assert len({block["thread"] for block in kept}) == 8


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_child_of_fork_tells_of_its_own(colors: RunColors, allocator: str) -> None:
    found = colors("forks", "-a", allocator, "--interval", "1h")
    assert found["run"]["processes"] == 2
    # The child had 8 MiB, and freed only its own copy of its parent's 2.
    assert {innermost(block) for block in told(found)} == {"by_calloc", "by_aligned"}


def test_a_child_that_has_its_parents_memory_does_not_end_it(colors: RunColors) -> None:
    found = colors("vforks", "--interval", "1h")
    assert (found["run"]["processes"], found["moment"]) == (1, "exit")
    assert {innermost(block) for block in told(found)} == {"by_malloc", "by_calloc"}


def test_a_mapping_that_becomes_shorter(colors: RunColors) -> None:
    found = colors("cut", "--interval", "1h")
    # The most was before it was cut: that is what is shown.
    assert [block["bytes"] for block in told(found)] == [8 * MIB]


def test_static_arrays_are_seen_too(colors: RunColors) -> None:
    found = colors("static")
    assert told(found) == []
    sizes = [block["resident_bytes"] for block in found["blocks"]]
    assert any(MIB <= size < 2 * MIB for size in sizes)
    assert found["collisions"] == []


def test_what_calm_needs_itself_is_not_the_programs(colors: RunColors) -> None:
    """The tables of so many blocks are larger than the size from which on mappings are sampled."""
    found = colors("many", "-a", "glibc")
    assert len(told(found)) == 300
    assert [block for block in found["blocks"] if block["kind"] == "other"] == []


@pytest.mark.parametrize("what", ["large", "launches"])
def test_the_sample_with_the_most_memory_is_shown(colors: RunColors, what: str) -> None:
    """A peak is sampled before; static arrays that come later, or in another process, are more."""
    found = colors(what)
    assert found["run"]["processes"] == 1 + (what == "launches")
    # At the exit, or soon after the start where the machine is slow.
    assert found["moment"] != "peak"
    assert max(block["resident_bytes"] for block in found["blocks"]) >= 64 * MIB
    assert told(found) == []


def test_a_process_that_knows_itself_by_another_number(calm: Calm, program: Path) -> None:
    """In a PID namespace it is the first: that number is another's here, whose memory is not to be shown."""
    unshare = ["unshare", "--pid", "--fork"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("PID namespaces are for root")
    options = ("--interval", "1h", "--min-size", str(MIB), "--json", "-")
    result = calm("colors", "run", *options, "--", *unshare, program, "all")
    assert (result.returncode, result.stdout) == (1, "")
    assert "a PID namespace of its own" in result.stderr
    script = "import subprocess, sys; own = bytearray(2 << 20); subprocess.run(sys.argv[1:], check=True)"
    command = (sys.executable, "-c", script, *unshare, program, "all")
    result = calm("colors", "run", *options, "--", *command)
    assert result.returncode == 0, result.stderr
    assert "1 process could not be sampled" in result.stderr
    found = json.loads(result.stdout)
    assert found["run"]["processes_elsewhere"] == 1
    assert found["command"][0] == sys.executable


def test_small_blocks_are_not_told(colors: RunColors) -> None:
    assert told(colors("small")) == []
    assert len(told(colors("small", "--min-size", str(60 << 10)))) == 64


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_what_fails_changes_nothing(colors: RunColors, allocator: str) -> None:
    found = colors("fails", "-a", allocator, code=7)
    assert [innermost(block) for block in told(found)] == ["by_malloc"]
    assert found["run"]["exit_code"] == 7


def test_a_program_that_is_killed(calm: Calm, program: Path) -> None:
    result = calm("colors", "run", "--interval", "10ms", "--", program, "killed")
    assert result.returncode == 137
    assert "the program was killed by SIGKILL (9)\n" in result.stderr


@pytest.fixture
def waiting(program: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([program, "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_a_process_by_its_mappings(calm: Calm, waiting: subprocess.Popen[bytes]) -> None:
    result = calm("colors", "run", "--pid", str(waiting.pid), "--json", "-")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert not found["blocks_known"]
    assert "blocks within mappings are not known" in result.stderr
    # glibc maps each of these blocks; the kernel may have made one mapping of several.
    assert 35 * MIB <= found["resident_bytes"] < 40 * MIB
    assert {block["kind"] for block in found["blocks"]} == {"mapping"}
    assert calm("colors", "run", "--pid", str(waiting.pid)).stdout.count("process") >= 1


def test_frames_are_the_kernels(waiting: subprocess.Popen[bytes]) -> None:
    """Page by page, beside another reading of the same file."""
    if os.geteuid() != 0:
        pytest.skip("frames are for root")
    seen = sample.take(waiting.pid, "now", MIN_BYTES)
    assert seen.hidden is None
    region = max(seen.regions, key=lambda region: region.bytes)
    assert region.pages.frames is not None
    with Path(f"/proc/{waiting.pid}/pagemap").open("rb") as file:
        for number, frame in list(zip(region.pages.numbers, region.pages.frames, strict=True))[:500]:
            file.seek(int(number) * 8)
            entry = int.from_bytes(file.read(8), sys.byteorder)
            assert entry >> 63
            assert entry & ((1 << 55) - 1) == frame


def lose_rights() -> None:
    """Whoever is root before exec will not see frames after it, nor others' processes."""
    if os.geteuid() == 0:
        for right in (CAP_SYS_ADMIN, CAP_SYS_PTRACE, CAP_PERFMON):
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, right, 0, 0, 0)


def test_without_rights_addresses_are_compared(calm: Calm, program: Path) -> None:
    result = calm("colors", "run", "--json", "-", "--", program, "all", preexec_fn=lose_rights, process=True)
    assert result.returncode == 0, result.stderr
    notes = [line for line in result.stderr.splitlines() if "CAP_SYS_ADMIN" in line]
    assert len(notes) == 1
    found = json.loads(result.stdout)
    assert not found["frames_known"]
    assert {innermost(block) for block in told(found)} == set(PLACES.values())
    assert any(each["lines"] for each in found["collisions"])
    assert all(not each["colors"] for each in found["collisions"])
    assert all(level["pages_by_color"] is None for level in found["caches"] if level["cache"]["level"] > 1)


@pytest.fixture
def another_users() -> Iterator[int]:
    """A process that cannot be observed without capabilities."""
    if os.geteuid() != 0:
        yield 1
        return
    with subprocess.Popen(["sleep", "6000"], user=65534, group=65534, extra_groups=[]) as process:
        yield process.pid
        process.kill()


def test_a_process_that_may_not_be_observed(calm: Calm, another_users: int) -> None:
    result = calm("colors", "run", "--pid", str(another_users), preexec_fn=lose_rights, process=True)
    assert (result.returncode, result.stdout) == (1, "")
    said = f"calm: the mappings of process {another_users} cannot be read: permission denied\n"
    assert result.stderr == said


def test_the_allocator_is_there_behind_what_tells(calm: Calm) -> None:
    result = calm("colors", "run", "-a", "calmalloc", "--interval", "10ms", "--", "cat", "/proc/self/environ")
    (preload,) = [line for line in result.stdout.split("\0") if line.startswith("LD_PRELOAD=")]
    names = [Path(path).name for path in preload.removeprefix("LD_PRELOAD=").split(":")]
    assert names == ["libcalmcolors.so", "libcalmalloc.so"]


def test_what_the_program_prints_is_not_among_the_json(calm: Calm) -> None:
    script = "print('hello', flush=True); own = bytearray(2 << 20)"
    result = calm("colors", "run", "--json", "-", "--", sys.executable, "-c", script)
    assert result.stderr.startswith("hello\n")
    assert json.loads(result.stdout)["run"]["exit_code"] == 0


def test_a_function_within_another_is_the_inner_one(calm: Calm, tmp_path: Path) -> None:
    source = tmp_path / "within.c"
    source.write_text(
        "#include <stdlib.h>\n#include <string.h>\nstatic char *volatile kept;\n"
        "static inline __attribute__((always_inline)) void inner(void) { kept = malloc(1 << 20); }\n"
        "__attribute__((noinline)) static void outer(void) { inner(); memset(kept, 1, 1 << 20); }\n"
        "int main(void) { outer(); return 0; }\n"
    )
    subprocess.run(["cc", "-O1", "-g", "-w", "-o", tmp_path / "within", source], check=True)
    result = calm("colors", "run", "--json", "-", "--", tmp_path / "within")
    (block,) = told(json.loads(result.stdout))
    assert [call["function"] for call in block["site"]][:3] == ["inner", "outer", "main"]


def test_pairs_have_the_places_of_both(colors: RunColors) -> None:
    """glibc maps blocks of this size, each a header behind a page's start."""
    found = colors("all", "-a", "glibc")
    at = {innermost(block): block for block in told(found)}
    pairs = {frozenset((each["first"], each["second"])): each for each in found["collisions"]}
    pair = pairs[frozenset((at["by_malloc"]["id"], at["by_calloc"]["id"]))]
    assert (pair["lines"], pair["apart_bytes"], pair["alias_bytes"], pair["count"]) == (True, 0, 0, 1)
    assert pair["bytes"] == 2 * MIB


def test_a_program_without_a_dynamic_linker(calm: Calm, tmp_path: Path) -> None:
    source = tmp_path / "still.c"
    source.write_text(
        "#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\n"
        "int main(int argc, char **argv) {\n"
        "char *a = malloc(4 << 20); memset(a, 1, 4 << 20); sleep(atoi(argv[1])); return a[9] - 1; }\n"
    )
    subprocess.run(
        ["cc", "-O1", "-w", "-fno-builtin", "-static", "-o", tmp_path / "still", source], check=True
    )
    for seconds in ("1", "10", "100"):  # on a busy machine it may not be sampled
        result = calm("colors", "run", "--interval", "50ms", "--json", "-", "--", tmp_path / "still", seconds)
        if result.returncode == 0:
            break
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert not found["blocks_known"]
    assert "statically linked" in result.stderr
    assert any(block["resident_bytes"] >= 4 << 20 for block in found["blocks"])


def test_a_thread_is_no_process(calm: Calm) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", THREAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        thread = process.stdout.readline().decode().strip()
        result = calm("colors", "run", "--pid", thread)
        process.stdin.close()
    assert (result.returncode, result.stderr) == (1, f"calm: {thread} is a thread of process {process.pid}\n")


def test_the_report_and_the_picture_in_files(
    calm: Calm, waiting: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    text, picture = tmp_path / "report.txt", tmp_path / "colors.svg"
    result = calm("colors", "run", "--pid", str(waiting.pid), "-o", text, "--plot", picture)
    assert result.stdout == ""
    assert text.read_text().startswith(f"\nprocess {waiting.pid}: ")
    if "CAP_SYS_ADMIN" in text.read_text() or "\npages in conflict: L" not in text.read_text():
        assert (result.returncode, result.stderr.count("\n")) == (1, 1)
        assert "the colors of pages are not known" in result.stderr
    else:
        assert (result.returncode, result.stderr) == (0, "")
        assert "<svg" in picture.read_text()


def test_the_document_is_read_again_and_another_version_is_refused(
    calm: Calm, waiting: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "colors.json"
    assert calm("colors", "run", "--pid", str(waiting.pid), "--json", path).returncode == 0
    found = documents.read(str(path), Colors)
    assert (found.pid, found.blocks_known, found.run) == (waiting.pid, False, None)
    whole = path.read_text()
    for text, message in (
        (whole.replace('"version": 1', '"version": 9'), "has version 9 of calm-colors"),
        (whole[: len(whole) // 2], "not JSON, or was cut short"),
        (whole.replace('"pid": ', '"pid": 0.5, "was": '), "not a whole calm-colors"),
    ):
        path.write_text(text)
        with pytest.raises(CalmError, match=message):
            documents.read(str(path), Colors)


def test_table(calm: Calm, program: Path) -> None:
    result = calm("colors", "run", "--top", "3", "--", program, "all")
    assert result.returncode == 0
    assert result.stdout == ""
    assert "by_mmap (blocks.c:" in result.stderr
    assert "pairs that collide" in result.stderr
    assert "smaller; --top shows more" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("run",), 2, "give either CMD or --pid PID"),
        (("run", "--pid", "1", "--", "true"), 2, "give either CMD or --pid PID"),
        (("run", "--runs", "2", "--", "true"), 2, "no such option"),
        (("run", "--pid", "1", "--interval", "2s"), 2, "--interval is for CMD"),
        (("run", "--pid", "1", "-a", "glibc"), 2, "--allocator is for CMD"),
        (("run", "--pid", "4194305"), 1, "there is no process 4194305"),
        (("run", "--", "/nonexistent"), 127, "no such program"),
        (("run", "--", "/etc/passwd"), 126, "not executable"),
        (("run", "-a", "nosuch", "--", "true"), 2, "nosuch"),
        (("run", "--json", "/nonexistent/x", "--", "true"), 1, "cannot write"),
        (("run", "-o", "/nonexistent/x", "--", "true"), 1, "cannot write"),
        (("run", "--plot", "x.gif", "--", "true"), 2, "must end in .svg or .png"),
        (("run", "--interval", "nan", "--", "true"), 2, "not a duration"),
        (("run", "--interval", "1", "--", "true"), 2, "not a duration"),
        (("run", "--interval", "1us", "--", "true"), 2, "not in the range 10ms to 1h"),
        (("run", "--min-size", "1", "--", "true"), 2, "--min-size"),
        (("simulate", "--near", "2"), 2, "no such option"),
        (("simulate", "--level", "1"), 2, "no L1 is known"),
        (("simulate", "-n", "1", "--plot", "x.txt"), 2, ".svg"),
        (("simulate", "-n", "1", "--pattern", "arrays", "--json", "/dev/full"), 1, "cannot write /dev/full"),
    ],
)
def test_errors_are_one_line(calm: Calm, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = calm("colors", *arguments)
    assert result.returncode == code
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_records_while_they_are_written(program: Path, tmp_path: Path) -> None:
    """What is read is whole at any moment: an address with its own size."""
    source = tmp_path / "churn.c"
    source.write_text(
        "#include <stdlib.h>\nint main(void) { static char *all[32];\n"
        "for (int i = 0; i < 200000; i++) { int k = i * 7 % 32; free(all[k]);\n"
        "all[k] = aligned_alloc(1 << 20, (size_t)(k + 1) << 20); if (!all[k]) return 1; } return 0; }\n"
    )
    subprocess.run(["cc", "-O1", "-w", "-o", tmp_path / "churn", source], check=True)
    place = tmp_path / "records"
    place.mkdir()
    variables = {
        "LD_PRELOAD": str(recorded.library()),
        recorded.FOLDER: str(place),
        recorded.MIN_BYTES: str(MIN_BYTES),
    }
    folder = recorded.Folder(place)
    samples = 0
    with subprocess.Popen([tmp_path / "churn"], env=os.environ | variables) as process:
        while process.poll() is None:
            for records in folder.scan():
                number = records.begin()
                found = records.blocks()
                records.done(number)
                samples += 1
                assert all(block.address % MIB == 0 and 1 <= block.bytes >> 20 <= 32 for block in found)
                assert len({block.address for block in found}) == len(found) <= 32
                assert all(block.bytes % MIB == 0 for block in found)
        assert process.returncode == 0
    assert samples > 0
    (records,) = folder.scan()
    assert len(records.blocks()) == 32
    assert records._field("bytes") == sum(block.bytes for block in records.blocks())
    assert sorted(block.bytes >> 20 for block in records.blocks()) == list(range(1, 33))


def last_records(program: Path, place: Path, preload: str | None = None) -> dict[int, recorded.Records]:
    """The records of a program's processes, by their ids; 0 is the first. Answers their requests."""
    place.mkdir()
    preload = str(recorded.library()) if preload is None else preload
    variables = {"LD_PRELOAD": preload, recorded.FOLDER: str(place), recorded.MIN_BYTES: str(MIN_BYTES)}
    folder = recorded.Folder(place)
    with subprocess.Popen([program], env=os.environ | variables) as process:
        while process.poll() is None:
            for records in folder.scan():
                records.done(records.begin())
            time.sleep(0.001)
        assert process.returncode == 0
    return {records.pid if records.pid != process.pid else 0: records for records in folder.scan()}


def sizes(records: recorded.Records) -> list[int]:
    found = sorted(block.bytes for block in records.blocks())
    assert records._field("bytes") == sum(found)
    return found


def test_a_child_has_the_blocks_of_when_it_was_forked(tmp_path: Path) -> None:
    """Not of when it gets to tell of them: its parent goes on. Handlers of fork allocate, too."""
    source = tmp_path / "late.c"
    source.write_text(
        r"""
        #include <pthread.h>
        #include <stdlib.h>
        #include <sys/wait.h>
        #include <unistd.h>
        #define KIB ((size_t)1 << 10)
        #define COUNT 64
        static char *volatile blocks[COUNT], *volatile other;
        static int go_on[2];
        static void exchange(size_t kib) {
            for (size_t i = 0; i < COUNT; i++) free(blocks[i]);
            for (size_t i = 0; i < COUNT; i++) blocks[i] = malloc((kib + i) * KIB);
        }
        static void before(void) { free(blocks[0]), blocks[0] = NULL, other = malloc(100 * KIB); }
        static void late(void) { char word; if (read(go_on[0], &word, 1) != 1) _exit(4); }
        /* Before any library: its handler in the child is the first, and that before fork the last. */
        static void begin(void) { pthread_atfork(before, NULL, late); }
        __attribute__((section(".preinit_array"), used)) static void (*first)(void) = begin;
        int main(void) {
            if (pipe(go_on) != 0) return 3;
            exchange(200);
            pid_t child = fork();
            if (child == 0) {
                for (size_t i = 0; i < COUNT; i += 2) free(blocks[i]);
                other = malloc(110 * KIB);
                _exit(0);
            }
            exchange(400);
            int status;
            if (write(go_on[1], "", 1) != 1 || wait(&status) != child) return 5;
            return status != 0;
        }
        """
    )
    subprocess.run(["cc", "-O1", "-w", "-pthread", "-o", tmp_path / "late", source], check=True)
    last = last_records(tmp_path / "late", tmp_path / "records")
    parent = last.pop(0)
    (child,) = last.values()
    assert sizes(parent) == [100 << 10, *((400 + i) << 10 for i in range(64))]
    assert sizes(child) == [100 << 10, 110 << 10, *((200 + i) << 10 for i in range(1, 64, 2))]


def compile_around(source: Path, program: Path) -> None:
    """A program that includes wrap.c, and so has what is preloaded in itself."""
    record = ROOT / "research/colors/record"
    options = ["-O1", "-w", "-D_GNU_SOURCE", "-fno-builtin", "-pthread", f"-I{record}"]
    subprocess.run(["cc", *options, "-o", program, source, record / "table.c", "-ldl"], check=True)


def test_what_is_unmapped_is_forgotten_if_it_is_unmapped(tmp_path: Path) -> None:
    """Whoever is given the memory at once tells of it first: here within the call."""
    source = tmp_path / "unmaps.c"
    source.write_text(
        r"""
        #include "wrap.c"
        #define MIB ((size_t)1 << 20)
        #define RIGHTS (PROT_READ | PROT_WRITE)
        #define FLAGS (MAP_PRIVATE | MAP_ANONYMOUS)
        static void *fresh(size_t mib) { return mmap(NULL, mib * MIB, RIGHTS, FLAGS, -1, 0); }
        static int unmap_and_reuse(void *address, size_t bytes) {
            int error = (int)syscall(SYS_munmap, address, bytes);
            return mmap(address, MIB, RIGHTS, FLAGS | MAP_FIXED_NOREPLACE, -1, 0) == address ? error : 9;
        }
        int main(void) {
            char *kept = fresh(8), *moved = fresh(3), *shorter = fresh(4), *gone = fresh(16);
            char *over = fresh(32), *front = fresh(128), *holed = fresh(256), *reused = fresh(64);
            int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
            if (munmap(kept + 1, 4096) == 0 || munmap(kept, 0) == 0) return 2;
            if (mmap(kept, MIB, RIGHTS, MAP_PRIVATE | MAP_FIXED, -1, 0) != MAP_FAILED) return 3;
            if (mmap(kept + 1, MIB, RIGHTS, FLAGS | MAP_FIXED, -1, 0) != MAP_FAILED) return 4;
            if (mremap(moved + 1, MIB, MIB, flags, kept) != MAP_FAILED) return 5;
            if (mremap(moved, 3 * MIB, 3 * MIB, flags, kept + 1) != MAP_FAILED) return 6;
            if (munmap(shorter, MIB) != 0 || munmap(gone, 16 * MIB) != 0) return 7;
            /* Without its end, and with a hole, behind which nothing is kept. */
            if (munmap(front + 100 * MIB, 28 * MIB) != 0 || munmap(holed + 50 * MIB, MIB) != 0) return 10;
            if (mmap(over, 32 * MIB, PROT_NONE, FLAGS | MAP_FIXED, -1, 0) != over) return 8;
            /* On 30 of the 32 that nobody may touch. */
            if (mremap(moved, 3 * MIB, 30 * MIB, flags, over) != over) return 9;
            real.munmap = unmap_and_reuse;
            return munmap(reused, 60 * MIB);
        }
        """
    )
    compile_around(source, tmp_path / "unmaps")
    last = last_records(tmp_path / "unmaps", tmp_path / "records", preload="")
    assert sizes(last[0]) == [size * MIB for size in (1, 3, 4, 8, 30, 50, 100)]


def test_the_table_finds_all_that_live_and_nothing_else(tmp_path: Path) -> None:
    """Full, with addresses that fall together, of which some go and others come."""
    source = tmp_path / "table.c"
    source.write_text(
        r"""
        #include "wrap.c"
        enum { SIZE = 1 << 16, CHANGES = 100000, LOST = 5 };
        static void *held[MAX_RECORDS];
        static void *another(void) {
            static uint64_t state = 1, number;
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            return (void *)(uintptr_t)((state & 0xffffff) << 24 | ++number << 4);
        }
        static void add(void *address, size_t bytes) {
            struct record block = {.kind = KIND_BLOCK, .depth = 1, .bytes = bytes, .frames = {bytes}};
            block.address = (uintptr_t)address;
            table_add(&block);
        }
        static bool is_removed(uint32_t at) {
            struct record gone;
            return table_may_have(held[at]) && table_remove(held[at], &gone) &&
                   gone.bytes == SIZE + at && gone.frames[0] == gone.bytes && !table_remove(held[at], &gone);
        }
        int main(void) {
            struct record gone;
            for (uint32_t at = 0; at < MAX_RECORDS; at++) add(held[at] = another(), SIZE + at);
            for (int more = 0; more < LOST; more++) {
                void *lost = another();
                add(lost, SIZE);
                if (table_remove(lost, &gone)) return 2;
            }
            uint32_t at = 0;
            for (int change = 0; change < CHANGES; change++) {
                at = (at * 5 + 12345) % MAX_RECORDS;
                if (!is_removed(at)) return 3;
                add(held[at] = another(), SIZE + at);
            }
            for (at = 3; at < MAX_RECORDS; at++) {
                if (!is_removed(at)) return 4;
            }
            int may = 0;
            for (at = 0; at < MAX_RECORDS; at++) may += table_may_have(held[at]);
            if (may < 3 || may > 100) return 5;
            /* Whoever is told of again has gone unseen. */
            add(held[2], SIZE + 9);
            return 0;
        }
        """
    )
    compile_around(source, tmp_path / "table")
    (records,) = last_records(tmp_path / "table", tmp_path / "records", preload="").values()
    assert sizes(records) == [MIN_BYTES, MIN_BYTES + 1, MIN_BYTES + 9]
    assert {block.stack for block in records.blocks()} == {(block.bytes,) for block in records.blocks()}
    assert records.lost == 5


@pytest.mark.parametrize("allocator", ["glibc", "calmalloc"])
def test_the_other_ways_to_allocate_and_to_free(tmp_path: Path, allocator: str) -> None:
    """Whether C++'s operators are the allocator's own, or call malloc."""
    source = tmp_path / "ways.cpp"
    source.write_text(
        r"""
        #include <cstdlib>
        #include <malloc.h>
        #include <new>
        #include <sys/mman.h>
        /* Of C23, or ours. */
        extern "C" __attribute__((weak)) void free_sized(void *, std::size_t);
        extern "C" __attribute__((weak)) void free_aligned_sized(void *, std::size_t, std::size_t);
        static const std::size_t MIB = 1 << 20;
        static const std::align_val_t PAGE{4096};
        static void *volatile kept;
        static void *fresh() { return kept = operator new(20 * MIB); }
        static void *aligned() { return kept = operator new(21 * MIB, PAGE); }
        int main() {
            kept = operator new(2 * MIB);
            kept = operator new[](3 * MIB, std::nothrow);
            kept = operator new(4 * MIB, PAGE);
            kept = valloc(5 * MIB);
            kept = pvalloc(6 * MIB);
            kept = reallocarray(nullptr, 7, MIB);
            kept = std::malloc(8 * MIB);
            kept = reallocarray(kept, 9, MIB);
            kept = mmap(nullptr, 10 * MIB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            kept = mmap(nullptr, 11 * MIB, PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            kept = mremap(kept, 11 * MIB, 12 * MIB, MREMAP_MAYMOVE);
            operator delete(fresh());
            operator delete[](fresh());
            operator delete(fresh(), 20 * MIB);
            operator delete[](fresh(), 20 * MIB);
            operator delete(fresh(), std::nothrow);
            operator delete(aligned(), PAGE);
            operator delete[](aligned(), 21 * MIB, PAGE);
            free_sized(std::malloc(22 * MIB), 22 * MIB);
            free_aligned_sized(std::aligned_alloc(64, 23 * MIB), 64, 23 * MIB);
        }
        """
    )
    options = ["-O1", "-w", "-std=c++17", "-fno-builtin"]
    subprocess.run(["c++", *options, "-o", tmp_path / "ways", source], check=True)
    preload = [str(recorded.library()), allocators.parse(allocator).variables({}).get("LD_PRELOAD", "")]
    (records,) = last_records(tmp_path / "ways", tmp_path / "records", ":".join(preload)).values()
    assert sizes(records) == [size * MIB for size in (2, 3, 4, 5, 6, 7, 9, 12)]
    assert [block.bytes // MIB for block in records.blocks() if block.kind == "mapping"] == [12]


def test_what_is_allocated_while_the_allocator_is_not_known_yet(tmp_path: Path) -> None:
    """By dlsym, from a room that a request too large for it does not fill."""
    source = tmp_path / "early.c"
    source.write_text(
        r"""
        #include <dlfcn.h>
        static void *early(void *handle, const char *name);
        #define dlsym early
        #include "wrap.c"
        #undef dlsym
        #include <malloc.h>
        static int checks = 1, wrong;
        static char *last = room;
        static void expect(int line, bool right) { if (!right && wrong == 0) wrong = line; }
        #define EXPECT(what) expect(__LINE__, what)
        static void given(int line, size_t size, char *block) {
            expect(line, block >= last && block + size <= room + ROOM && (uintptr_t)block % ALIGNMENT == 0);
            if (wrong == 0) memset(block, 1, size);
            free(block);
            last = block + size;
        }
        #define GIVEN(size, block) given(__LINE__, size, block)
        static void check(void) {
            EXPECT(malloc(ROOM + 1) == NULL && errno == ENOMEM);
            EXPECT(malloc(SIZE_MAX) == NULL && calloc(SIZE_MAX, 2) == NULL && room_used == 0);
            GIVEN(5, malloc(5));
            GIVEN(300, calloc(3, 100));
            GIVEN(1, realloc(NULL, 1));
            last = room + (last - room + 15) / 16 * 16;
            GIVEN(room + ROOM - last, malloc(room + ROOM - last));
            EXPECT(last == room + ROOM && malloc(1) == NULL && malloc(0) == NULL);
        }
        static void *early(void *handle, const char *name) {
            if (checks-- > 0) check();
            checks = 0;
            return dlsym(handle, name);
        }
        int main(void) {
            char *block = malloc(100 << 10);
            EXPECT(block != NULL && !is_in_room(block));
            free(block);
            return wrong;
        }
        """
    )
    compile_around(source, tmp_path / "early")
    assert subprocess.run([tmp_path / "early"], check=False).returncode == 0


def records_of(path: Path, pid: int) -> tuple[recorded.Records, np.ndarray]:
    """A file as a process writes it, with one block, and its records to be written."""
    with path.open("wb") as file:
        file.truncate(recorded._RECORDS_AT + recorded.MAX_RECORDS * recorded._RECORD.itemsize)
    header = np.memmap(path, recorded._HEADER, "r+", shape=1)
    header["magic"], header["record_bytes"], header["pid"] = recorded._MAGIC, recorded._RECORD.itemsize, pid
    header["used"] = 1
    written = np.memmap(path, recorded._RECORD, "r+", recorded._RECORDS_AT, recorded.MAX_RECORDS)
    written["address"][0], written["bytes"][0] = 1 * MIB, 1 * MIB
    return recorded.Records(path), written


def test_a_record_that_is_written_while_it_is_copied_is_read_again(tmp_path: Path) -> None:
    class Torn:
        """Written anew meanwhile: the copy has one block's size, and the other's address and sequence."""

        times = 0

        def __getitem__(self, what: str | slice) -> np.ndarray:
            if isinstance(what, slice) and not self.times:
                self.times += 1
                torn = written[what].copy()
                written["sequence"][0], written["address"][0], written["bytes"][0] = 2, 2 * MIB, 2 * MIB
                torn["sequence"][0], torn["address"][0] = 2, 2 * MIB
                return torn
            return written[what]

    records, written = records_of(tmp_path / "1", 1)
    assert [(block.address, block.bytes) for block in records.blocks()] == [(MIB, MIB)]
    records._records = Torn()  # type: ignore[assignment]
    assert [(block.address, block.bytes) for block in records.blocks()] == [(2 * MIB, 2 * MIB)]


def test_a_record_that_is_being_written_is_none_yet(tmp_path: Path) -> None:
    records, written = records_of(tmp_path / "1", 1)
    written["sequence"][0] = 1
    assert records.blocks() == []
    written["sequence"][0] = 2
    assert [block.address for block in records.blocks()] == [MIB]


def test_a_process_that_becomes_another_program_begins_anew(tmp_path: Path) -> None:
    """Its file is another one by the same name."""
    records_of(tmp_path / "1", 1)
    folder = recorded.Folder(tmp_path)
    (first,) = folder.scan()
    assert folder.scan() == [first]
    _, written = records_of(tmp_path / "part", 1)
    written["address"][0] = 2 * MIB
    (tmp_path / "part").rename(tmp_path / "1")
    (other,) = folder.scan()
    assert [block.address for records in (first, other) for block in records.blocks()] == [MIB, 2 * MIB]
    folder.forget(1)
    assert folder.scan() == []


def test_records_are_those_of_a_process_that_has_them_mapped(
    tmp_path: Path, waiting: subprocess.Popen[bytes]
) -> None:
    records, _ = records_of(tmp_path / "1", 1)
    assert records.is_of(os.getpid())
    assert not records.is_of(waiting.pid)
    assert not records.is_of(4194305)


def test_a_process_that_has_announced_its_end_is_not_sampled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It records no blocks any more; by its mappings, calm's own memory would be taken for the program's."""
    pid = os.getpid()
    records, _ = records_of(tmp_path / str(pid), pid)
    taken = []

    def take(of: int, moment: str, min_bytes: int, recorded: Any, **_: object) -> None:
        taken.append((of, moment, recorded is not None))
        raise CalmError("it is seen elsewhere")

    monkeypatch.setattr(sample, "take", take)
    watching = watch.Watch(pid, str(tmp_path), MIN_BYTES, 0)
    watching.tick()
    assert taken.pop() == (pid, "interval", True)
    records._header["asked"], records._header["moment"] = 1, 2
    watching.next = float("inf")
    watching.tick()
    assert records.asked() is None
    watching.next = 0
    watching.tick()
    assert taken == [(pid, "exit", True)]
    # One that has recorded nothing is sampled by its mappings.
    watch.Watch(pid, str(tmp_path), MIN_BYTES, 0).tick()
    assert taken[1:] == [(pid, "interval", False)]


def test_samples_take_at_most_a_twentieth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0

    def take(*_: object, **__: object) -> None:
        nonlocal clock
        clock += 0.25
        raise CalmError("it has ended")

    monkeypatch.setattr(sample, "take", take)
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    for interval_s, pause_s in ((1.0, 5.0), (60.0, 60.0)):
        watching = watch.Watch(os.getpid(), str(tmp_path), MIN_BYTES, interval_s)
        watching.tick()
        assert watching.next == clock + pause_s


def test_a_program_whose_watcher_has_ended(program: Path, tmp_path: Path) -> None:
    """A program whose watcher is gone ends by itself."""
    variables = {
        "LD_PRELOAD": str(recorded.library()),
        recorded.FOLDER: str(tmp_path),
        recorded.MIN_BYTES: str(MIN_BYTES),
    }
    assert subprocess.run([program, "freed"], env=os.environ | variables, check=False).returncode == 0
    (records,) = recorded.Folder(tmp_path).scan()
    assert records.asked() is not None
    assert records.blocks() == []


def test_layout_is_that_of_the_header() -> None:
    header = (ROOT / "research/colors/record/table.h").read_text()
    assert re.search(rf'RECORDS_MAGIC +"{recorded._MAGIC.decode()}"', header)
    assert f"MAX_RECORDS = 1 << {recorded.MAX_RECORDS.bit_length() - 1}" in header
    assert f"FRAMES = {recorded.FRAMES}," in header
    for name, layout in (("record", recorded._RECORD), ("header", recorded._HEADER)):
        body = re.search(rf"struct {name} {{(.*?)\n}};", header, re.DOTALL)
        assert body is not None
        fields = re.findall(r"^ *(?:_Atomic )?(\w+) (\w+)(?:\[(\w+)\])?;", body[1], re.MULTILINE)
        sizes = {"FRAMES": (recorded.FRAMES,), "": ()}
        assert layout == np.dtype(
            [
                (field, "S8") if kind == "char" else (field, kind.removesuffix("_t"), sizes[count])
                for kind, field, count in fields
            ]
        )


def test_growing_a_vector_is_the_place_that_grows_it(calm: Calm, tmp_path: Path) -> None:
    """Without optimization: calls within the library are templates, whose names follow what they return."""
    source = tmp_path / "vector.cpp"
    source.write_text(
        "#include <vector>\nstatic void grow(std::vector<double> &all) {\n"
        "    for (int i = 0; i < 100000; i++) all.push_back(i);\n}\n"
        "int main() { std::vector<double> all; grow(all); return all.size() != 100000; }\n"
    )
    subprocess.run(["c++", "-O0", "-g", "-o", tmp_path / "vector", source], check=True)
    result = calm("colors", "run", "--json", "-", "--", tmp_path / "vector")
    assert result.returncode == 0, result.stderr
    found = told(json.loads(result.stdout))
    assert found
    for block in found:
        assert innermost(block).startswith("grow(std::vector<double")
        assert block["site"][0]["source"] == "vector.cpp:3"


def test_simulation(calm: Calm, tmp_path: Path) -> None:
    told, picture = tmp_path / "simulated.json", tmp_path / "simulated.svg"
    arguments = ("--policy", "random", "--policy", "hash", "--pattern", "linear", "-n", "2")
    result = calm("colors", "simulate", *arguments, "--json", told, "--plot", picture)
    assert (result.returncode, result.stderr) == (0, "")
    assert "unnecessary conflicts of one array, none in any run: hash" in result.stdout
    assert json.loads(told.read_text())["caches_of"] == "nehalem"
    assert picture.stat().st_size > 0
