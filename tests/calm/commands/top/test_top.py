"""calm top: what it says of programs that do known things, to whoever asks, whatever they pretend to have."""

import dataclasses
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from calm_helpers import ROOT, Calm, Compile
from impostor import FLAGS, impostor
from unprivileged import readable_by_all, unprivileged
from waiting import wait_until

from calm.cli import main
from calm.commands.top import command as top_command
from calm.commands.top import sampler, view
from calm.commands.top.sampler import Row, Snapshot
from calm.core import counters, event_counters, machine, proc, processes
from calm.core.event_counters import Events

BUILD = ROOT / "build/release"
# As /proc/PID/syscall has it.
CLOCK_NANOSLEEP = {"x86_64": "230", "aarch64": "115"}[os.uname().machine]

# Does what its arguments say, prints a line, and waits for the end of its input.
SOURCE = r"""
    #define _GNU_SOURCE
    #include <pthread.h>
    #include <sched.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <unistd.h>
    #ifndef LINKED
    __attribute__((weak))
    #endif
    int calm_stats_json(char *buffer, size_t size);
    static void *spin(void *unused) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(1, &set);
        sched_setaffinity(0, sizeof set, &set);
        for (;;) {}
        return unused;
    }
    int main(int argc, char **argv) {
        static void *blocks[3000];
        const char *what = argc > 1 ? argv[1] : "";
        for (int i = 0; i < 3000; i++) memset(blocks[i] = malloc(100 + i * 10), 1, 100);
        for (int i = 0; i < 3000; i += 2) free(blocks[i]);
        pthread_t thread;
        if (strcmp(what, "storm") == 0) pthread_create(&thread, NULL, spin, NULL);
        if (strcmp(what, "fork") == 0 && fork() != 0) pause();
        static char text[16384] = "{}";
        if (calm_stats_json) calm_stats_json(text, sizeof text);
        setvbuf(stdout, NULL, _IONBF, 0);
        printf("%d %s\n", getpid(), text);
        if (strcmp(what, "storm") == 0) {
            char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            for (;;) {
                *(volatile char *)page = 1;
                madvise(page, 4096, MADV_DONTNEED);
                usleep(200);
            }
        }
        char byte;
        while (read(0, &byte, 1) > 0) {}
        return 0;
    }
"""

Start = Callable[..., tuple[subprocess.Popen[str], int, dict[str, Any]]]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("top")
    folder.chmod(0o755)

    def make(name: str, *flags: str | Path, source: str = SOURCE) -> Path:
        path = folder / name
        if not path.exists():
            code = folder / f"{name}.c"
            code.write_text(source)
            command = ["cc", "-O1", "-fno-builtin", "-pthread", code, *flags, "-o", path]
            subprocess.run([str(word) for word in command], check=True)
        return path

    return make


@pytest.fixture
def start() -> Iterator[Start]:
    running = []

    def run(
        *command: str | Path, preload: str | Path = "", **options: Any
    ) -> tuple[subprocess.Popen[str], int, dict[str, Any]]:
        env = os.environ | ({"LD_PRELOAD": str(preload)} if preload else {})
        process = subprocess.Popen(
            [str(word) for word in command],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        running.append(process)
        assert process.stdout is not None
        pid, _, text = process.stdout.readline().partition(" ")
        return process, int(pid), json.loads(text)

    yield run
    for process in running:
        process.kill()
        process.communicate()


def tables_of(pid: int) -> dict[str, dict[str, int]]:
    with proc.memory(pid) as read:
        tables, _ = counters.Finder().tables(read, counters.images(pid))
        return {table.library: table.values(read) for table in tables}


def check_agrees(pid: int, said: dict[str, Any]) -> None:
    """What is read from outside is what the program was told inside, just before it began to wait."""
    values = tables_of(pid)["calmalloc"]
    shared = set(values) & set(said)
    assert {
        "footprint",
        "in_use",
        "dirty",
        "dirty_limit",
        "cached",
        "purges_limit",
        "heap_locks",
    } <= shared
    assert {name: values[name] for name in shared} == {name: said[name] for name in shared}
    assert values["footprint"] > 1 << 20
    assert values["cached"] > 0


def test_a_preloaded_library_is_read(build: Callable[..., Path], start: Start) -> None:
    _, pid, said = start(build("plain"), preload=BUILD / "libcalmalloc.so")
    check_agrees(pid, said)


@pytest.mark.parametrize("flags", [[], ["-Wl,--gc-sections"], ["-s"], ["-fuse-ld=gold"], ["-fuse-ld=lld"]])
def test_a_static_program_is_read(build: Callable[..., Path], start: Start, flags: list[str]) -> None:
    """Stripped, and with whatever a linker leaves out."""
    for flag in flags:
        if flag.startswith("-fuse-ld=") and not shutil.which(f"ld.{flag[9:]}"):
            pytest.skip(f"there is no {flag[9:]}")
    name = "static" + "".join(flags).replace(",", "")
    _, pid, said = start(build(name, "-DLINKED", "-static", *flags, BUILD / "libcalmalloc.a"))
    check_agrees(pid, said)


def test_position_does_not_matter(build: Callable[..., Path], start: Start) -> None:
    _, pid, said = start(build("no-pie", "-no-pie", BUILD / "libcalmalloc.so", f"-Wl,-rpath,{BUILD}"))
    check_agrees(pid, said)


def test_a_library_that_was_replaced_is_read(
    build: Callable[..., Path], start: Start, tmp_path: Path
) -> None:
    copy = tmp_path / "libcalmalloc.so"
    shutil.copy(BUILD / "libcalmalloc.so", copy)
    _, pid, said = start(build("plain"), preload=copy)
    copy.unlink()
    copy.write_text("another version")
    check_agrees(pid, said)


def test_a_child_has_its_own_counters(build: Callable[..., Path], start: Start) -> None:
    process, pid, said = start(build("plain"), "fork", preload=BUILD / "libcalmalloc.so")
    assert pid != process.pid
    check_agrees(pid, said)
    os.kill(pid, signal.SIGKILL)


def test_ptlbmalloc2_is_read(build: Callable[..., Path], start: Start) -> None:
    _, pid, _ = start(build("plain"), preload=BUILD / "libptlbmalloc2.so")
    values = tables_of(pid)["ptlbmalloc2"]
    assert values["state"] in counters.STATES
    if values["state"] == 1:
        assert values["threshold_bytes"] >= 50_000
        assert values["footprint_bytes"] > 1 << 20
        assert values["walks"] >= 1


def test_a_library_that_could_not_be_read_is_looked_at_again(
    build: Callable[..., Path], start: Start
) -> None:
    """As where a process became another program between the look at what it maps and the one into it."""
    _, pid, _ = start(build("plain"), preload=BUILD / "libcalmalloc.so")
    mapped = counters.images(pid)
    finder = counters.Finder()
    with proc.memory(pid) as read:
        assert finder.tables(read, [dataclasses.replace(image, start=4096) for image in mapped])[0] == []
        assert [table.library for table in finder.tables(read, mapped)[0]] == ["calmalloc"]


def test_glibc_has_no_table(build: Callable[..., Path], start: Start) -> None:
    _, pid, _ = start(build("plain"))
    assert tables_of(pid) == {}


# What a table may look like that is not one, as statements that change a good one.
FOREIGN = {
    "magic": ("table.magic[0] = 'X';", "does not begin as one"),
    "version": ("table.version = 2;", "of version 2; this calm reads 1"),
    "count": ("table.count = 100000;", "its size"),
    "term-size": ("table.term_bytes = 8;", "its size"),
    "head-size": ("table.bytes = 8;", "its size"),
    "name": ('memcpy(one[0].name, "a\\033[2J", 6);', "a name in it"),
    "library": ("memset(table.library, 'a', 24);", "a name in it"),
    "word": ("one[0].bytes = 3;", "no known kind"),
    "unit": ("one[0].unit = 9;", "no known kind"),
    "span": ("one[0].count = 65535; one[0].stride = 1u << 31;", "too large"),
    "pointers": ("one[0].pointers = 257;", "too large"),
    "pointer-stride": ("one[0].pointers = 2; one[0].pointer_stride = 1u << 31;", "too large"),
    "weights": ("one[0].count = 65535; one[0].weight_stride = 1u << 31;", "too large"),
    "present-stride": ("one[0].present = &word; one[0].present_stride = 1u << 31;", "too large"),
    "base-offset": ("one[0].base_offset = 1u << 31;", "too large"),
    "wild": ("distance = 0x123456789;", "cannot be read"),
}
# Tables with a figure that cannot be had: the table is good, the figure is left out.
HOSTILE = {
    "address": "one[0].at = (void *)0xdead000;",
    "terms": "table.terms = (void *)0xdead000;",
    "pointer": "one[0].pointers = 1; word = 0xdead000;",
    "pointers-apart": "one[0].pointers = 200; one[0].pointer_stride = 5000; word = (uintptr_t)&word;",
    "rows": "static uint32_t rows = 4000000000u; one[0].rows = &rows;",
    "rows-address": "one[0].rows = (void *)0xdead000;",
    "much": "static uint32_t rows = 8000; one[0].rows = &rows; one[0].count = 1000; one[0].stride = 1000;",
    "much-at-one-place": "static uint32_t rows = 8000; one[0].rows = &rows; one[0].count = 65535;",
    "base": "char *half = mmap(NULL, 131072, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); "
    "munmap(half + 65536, 65536); one[0].at = half; one[0].base_offset = 65536;",
    "present": "static uint32_t rows = 5; one[0].rows = &rows; one[0].present = (void *)0xdead000;",
    "present-bytes": "static uint32_t rows = 5; one[0].rows = &rows; word = 0xdead000; "
    "one[0].present = &word;",
    "present-much": "static uint32_t rows = 5000; one[0].rows = &rows; one[0].present_stride = 1000; "
    "static void *flags = &flags; one[0].present = &flags;",
    "weights-address": "one[0].weights = (void *)0xdead000;",
}


def with_table(build: Callable[..., Path], name: str, change: str) -> Path:
    return build(f"impostor-{name}", FLAGS, source=impostor(change))


def test_a_table_of_another_library_is_read(build: Callable[..., Path], start: Start) -> None:
    process, _, _ = start(with_table(build, "good", ""))
    assert tables_of(process.pid) == {"impostor": {"counter": 42}}


def test_a_release_does_not_control_the_terminal(
    build: Callable[..., Path],
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a process says of itself comes to the terminal by a message about it, too."""
    process, _, _ = start(with_table(build, "escape", 'memcpy(table.release, "\\033[2J1.0", 8);'))
    monkeypatch.setattr(sys, "argv", ["calm", "heap", "run", "--pid", str(process.pid)])
    with pytest.raises(SystemExit):
        main()
    assert " runs impostor ?[2J1.0, which has no heap profile" in capsys.readouterr().err


def test_a_table_that_is_not_ready_is_looked_at_again(build: Callable[..., Path], start: Start) -> None:
    """As that of a library which the dynamic linker has mapped, but not yet relocated."""
    late = 'const void *right = one[0].at; one[0].at = (void *)0xdead000; puts("0 {}"); fflush(stdout);'
    late += "char go; while (read(0, &go, 1) < 1) {} one[0].at = right;"
    process, _, _ = start(with_table(build, "late", late))
    source = sampler.Sampler(processes.chosen_by_pid([process.pid]), every=False)
    assert source.sample().processes[0].counters == {"impostor": {}}
    assert process.stdin
    assert process.stdout
    process.stdin.write("x")
    process.stdin.flush()
    assert process.stdout.readline() == "0 {}\n"
    wait_until(lambda: source.sample().processes[0].counters == {"impostor": {"counter": 42}})
    source.close()


def test_how_terms_add_up(build: Callable[..., Path], start: Start) -> None:
    """Rows, weights, what is taken off, what counts against, pointers and pages."""
    source = r"""
        #include "os/counter_table.h"
        #include <stddef.h>
        #include <stdio.h>
        #include <unistd.h>
        static uint32_t rows = 3;
        static uint64_t words[3][4] = {{1, 20, 30, 0}, {500, 600, 700, 0}, {4, 50, 60, 0}};
        static struct { int other; char present; } state[3] = {{9, 1}, {9, 0}, {9, 1}};
        static void *states = state, *through = words, *nothing;
        static struct { uint64_t words[3], not_bases[3]; } stacks[3] = {
            {{8, 160, 240}, {~16UL, ~0UL, ~80UL}},
            {{4000, 4800, 5600}},
            {{32, 400, 480}, {~16UL, ~0UL, ~80UL}}};
        static struct { uint32_t weight, other; } weights[3] = {{7, 1}, {10, 1}, {100, 1}};
        static struct { int other; void *words; } places[3] = {{1, words[0]}, {2, NULL}, {3, words[1]}};
        static uint8_t small = 200;
        static uint32_t pages = 3;
        static const struct counter_term terms[] = {
                {.name = "all", .at = &through, .pointers = 1, .offset = 8, .rows = &rows,
                 .row_stride = sizeof words[0], .stride = 8, .count = 2, .bytes = 8},
                {.name = "all", .at = &small, .bytes = 1, .flags = COUNTER_SUBTRACT},
                {.name = "weighed", .at = stacks, .rows = &rows, .row_stride = sizeof stacks[0], .stride = 8,
                 .count = 3, .bytes = 8, .base_offset = offsetof(__typeof__(*stacks), not_bases),
                 .unit = COUNTER_WORDS, .weights = weights, .weight_stride = 8,
                 .present = &states, .present_offset = offsetof(__typeof__(*state), present),
                 .present_stride = sizeof *state},
                {.name = "paged", .at = &pages, .bytes = 4, .unit = COUNTER_PAGES},
                {.name = "worded", .at = &small, .bytes = 1, .unit = COUNTER_WORDS},
                {.name = "absent", .at = &nothing, .pointers = 1, .offset = 64, .bytes = 8},
                {.name = "several", .at = &places[0].words, .pointers = 3, .pointer_stride = sizeof places[0],
                 .offset = 16, .stride = 8, .count = 2, .bytes = 8, .weights = weights, .weight_stride = 8},
                {.name = "negative", .at = &small, .bytes = 1, .flags = COUNTER_SUBTRACT},
        };
        __attribute__((used, visibility("hidden"))) const struct counter_table table =
            COUNTER_TABLE("sums", terms);
        COUNTER_TABLE_NOTE(table);
        int main(void) {
            puts("0 {}");
            fflush(stdout);
            char byte;
            while (read(0, &byte, 1) > 0) {}
            return 0;
        }
    """
    process, _, _ = start(build("sums", f"-I{ROOT / 'src'}", source=source))
    assert tables_of(process.pid)["sums"] == {
        "all": 20 + 30 + 600 + 700 + 50 + 60 - 200,
        "weighed": (20 * 10 + 20 * 100) + (2 * 7 + 50 * 10 + 50 * 100),
        "paged": 3 * os.sysconf("SC_PAGE_SIZE"),
        "worded": 200 // 8,
        "absent": 0,
        "several": (30 * 7 + 0) + (700 * 7 + 0),
        "negative": 0,
    }

    # A stack that moves while it is read: its base is another one afterwards.
    bases_bytes, seen = 24, set[int]()
    with proc.memory(process.pid) as read:

        def moving(address: int, size: int) -> bytes | None:
            data = read(address, size)
            if data and size == bases_bytes and address in seen:
                data = bytes([data[0] ^ 1]) + data[1:]
            seen.add(address)
            return data

        (table,), _ = counters.Finder().tables(read, counters.images(process.pid))
        assert table.by_weight(read, "weighed") == {7: 2, 10: 20 + 50, 100: 20 + 50}
        assert table.values(moving)["weighed"] == (20 * 10 + 20 * 100) + (50 * 10 + 50 * 100)


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_a_table_is_told(build: Callable[..., Path], start: Start, kind: str) -> None:
    change, why = FOREIGN[kind]
    process, _, _ = start(with_table(build, kind, change))
    with proc.memory(process.pid) as read:
        tables, told = counters.Finder().tables(read, counters.images(process.pid))
    assert tables == []
    assert f"impostor-{kind}" in told
    assert why in told


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_figure_that_cannot_be_read_is_left_out(
    build: Callable[..., Path], start: Start, kind: str
) -> None:
    process, _, _ = start(with_table(build, kind, HOSTILE[kind]))
    asked = 0
    with proc.memory(process.pid) as read:
        (table,), _ = counters.Finder().tables(read, counters.images(process.pid))

        def counted(address: int, size: int) -> bytes | None:
            nonlocal asked
            asked += 1 + size
            return read(address, size)

        assert table.values(counted) == {}
    # However much the table claims, little is read.
    assert asked <= 2 * counters.MAX_BYTES


def one_interval(calm: Calm, *arguments: str | Path, **options: Any) -> dict[str, Any]:
    result = calm("top", "-n", "1", "-d", "300ms", *arguments, "--json", **options)
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert found["schema"] == "calm-top"
    return found


def test_one_process_as_json(calm: Calm, build: Callable[..., Path], start: Start) -> None:
    process, pid, said = start(build("plain"), preload=BUILD / "libcalmalloc.so")
    row: dict[str, Any] = {}

    def rests() -> bool:
        """What it has said comes before its read(2), whose code is not touched until then."""
        row.update(*one_interval(calm, pid)["processes"])
        return bool(row["minor_faults"] == 0 and row["rss_change_kib"] == 0)

    wait_until(rests)
    assert row["pid"] == process.pid
    assert row["name"] == "plain"
    assert row["allocator"] == "calmalloc"
    assert row["counters"]["calmalloc"]["footprint"] == said["footprint"]
    assert row["limit_bytes"] == said["dirty_limit"]
    assert row["purges"] == 0
    status = proc.fields_kib(Path(f"/proc/{pid}/status").read_text())
    assert row["rss_kib"] == pytest.approx(status["VmRSS"], abs=1024)
    assert row["user_percent"] == 0


@pytest.mark.usefixtures("traced")
def test_shootdowns_are_those_of_the_process(build: Callable[..., Path], start: Start) -> None:
    if os.cpu_count() == 1 or machine.broadcast_here():
        pytest.skip("this machine has no shootdowns to count")
    process, _, _ = start(build("plain"), "storm")
    quiet, _, _ = start(build("plain"))
    source = sampler.Sampler(processes.chosen_by_pid([process.pid, quiet.pid]), every=False)
    source.sample()
    begun = calls = faults = 0.0

    def are_seen() -> bool:
        nonlocal begun, calls, faults
        storm, still = source.sample().processes
        begun += storm.shootdowns or 0
        calls += (storm.calls or {})["madvise"]
        faults += storm.minor_faults or 0
        assert still.shootdowns == sum((still.calls or {}).values()) == still.minor_faults == 0
        return begun > 0 and calls > 0 and faults > 0

    # A busy machine may not run both threads at once for some time.
    wait_until(are_seen)
    source.close()


@pytest.mark.usefixtures("traced")
def test_calls_can_be_left_uncounted(calm: Calm, build: Callable[..., Path], start: Start) -> None:
    process, _, _ = start(build("plain"), "storm")
    (row,) = one_interval(calm, process.pid, "--no-calls")["processes"]
    assert row["calls"] is None
    assert row["reasons"]["calls"] == "not asked for"
    if not machine.broadcast_here():
        assert row["shootdowns"] is not None


@pytest.mark.usefixtures("traced")
def test_threads_that_start_later_are_counted(build: Callable[..., Path], start: Start) -> None:
    """And a child is not: it is a process of its own."""
    source = r"""
        #define _GNU_SOURCE
        #include <pthread.h>
        #include <stdio.h>
        #include <sys/mman.h>
        #include <sys/wait.h>
        #include <unistd.h>
        static void *page;
        static void *call(void *times) {
            for (long i = (long)times; i > 0; i--) madvise(page, 4096, MADV_NORMAL);
            return NULL;
        }
        int main(void) {
            page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            setvbuf(stdout, NULL, _IONBF, 0);
            printf("%d {}\n", getpid());
            char byte;
            while (read(0, &byte, 1) > 0) {
                pthread_t thread;
                pthread_create(&thread, NULL, call, (void *)100);
                pthread_join(thread, NULL);
                if (fork() == 0) { call((void *)1000); _exit(0); }
                wait(NULL);
                puts("done");
            }
        }
    """
    process, pid, _ = start(build("later", source=source))
    assert process.stdin
    assert process.stdout
    counts = Events(["madvise"])
    counting, why = counts.attach(pid)
    assert counting is not None, why
    process.stdin.write("x")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"
    wanted = 100 if counts.threads_only else 1100
    # glibc gives a thread's stack back by a call of its own.
    assert wanted <= event_counters.read(counting)["madvise"] <= wanted + 2
    counts.detach(counting)
    counts.close()


def test_descriptors_of_a_process_that_is_left_are_free_again() -> None:
    counts = Events([])
    descriptor = os.open("/dev/null", os.O_RDONLY)
    counts._open = 1
    counts.detach({"madvise": [descriptor]})
    assert counts._open == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def nobody() -> list[str]:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root, to be somebody else")
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


@pytest.fixture
def for_all() -> Iterator[Path]:
    """The library where others than root may read it, too."""
    with readable_by_all(BUILD / "libcalmalloc.so") as (library,):
        yield library


def test_without_root_what_is_missing_has_a_reason(
    build: Callable[..., Path], start: Start, for_all: Path
) -> None:
    _, mine, _ = start(*nobody(), build("plain"), preload=for_all)
    _, roots, _ = start(build("plain"), preload=BUILD / "libcalmalloc.so")
    words = ("top", "-n", "1", "-d", "200ms", mine, roots, "--json")
    result = unprivileged("calm.commands.top.command, difflib, json, rich.live", *words)
    assert result.returncode == 0, result.stderr
    look = json.loads(result.stdout)
    rows = {row["pid"]: row for row in look["processes"]}
    for row in rows.values():
        assert row["rss_kib"] > 1024
        assert row["minor_faults"] == 0
        assert row["shootdowns"] is None
        assert "root" in row["reasons"]["shootdowns"]
    assert rows[roots]["counters"] == {}
    assert rows[roots]["allocator"] is None
    assert rows[roots]["huge_kib"] is None
    for key in ("counters", "allocator", "huge_kib"):
        assert "another user's process: needs root" in rows[roots]["reasons"][key]
    assert any("needs root" in note or "need root" in note for note in look["notes"])
    assert look["interrupts_system_wide"] is None or look["interrupts_system_wide"] >= 0
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not yama.exists() or yama.read_text().strip() == "0":
        assert rows[mine]["allocator"] == "calmalloc"
        assert rows[mine]["counters"]["calmalloc"]["footprint"] > 0


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, code, words in (
        (["999999999"], 1, "there is no process 999999999"),
        (["2147483648"], 2, "'2147483648' is not a process id"),
        (["0"], 2, "'0' is not a process id"),
        (["-p", "1,x"], 2, "'x' is not a process id"),
        (["-p", ""], 2, "'' is not a process id"),
        (["--command", "no such program"], 1, "there is no process called 'no such program'"),
        (["--command", "x", "1"], 2, "exclude each other"),
        (["--once"], 2, "--once"),
        (["-n", "0"], 2, "0"),
        (["-d", "1"], 2, "'1' is not a duration"),
        (["-d", "1ms"], 2, "not in the range 50ms to 1h"),
        (["--sort", "colour"], 2, "colour"),
        (["-n", "1", "--json", "/no/such/folder/file"], 1, "no such directory"),
        (["-n", "1", "--json", "1234"], 2, "process ids go before --json"),
        (["-n", "1", "-d", "50ms", str(os.getpid()), "--json", "/dev/full"], 1, "No space left on device"),
    ):
        monkeypatch.setattr(sys, "argv", ["calm", "top", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capsys.readouterr()
        assert ended.value.code == code, (arguments, errors)
        assert output == ""
        (line,) = errors.splitlines()
        assert line.startswith("calm: ")
        assert words in line


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_closes_the_pipe_ends_it(form: list[str]) -> None:
    words = [sys.executable, "-m", "calm", "top", "-d", "50ms", str(os.getpid()), *form]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as top:
        assert top.stdout
        assert top.stdout.readline()
        top.stdout.close()
        assert top.stderr
        errors = top.stderr.read()
    assert (top.returncode, errors) == (141, "")


def test_the_report_goes_to_a_file(calm: Calm, tmp_path: Path) -> None:
    report, lines = tmp_path / "report", tmp_path / "lines"
    top = calm("top", "-n", "2", "-d", "50ms", os.getpid(), "-o", report, "--json", lines)
    assert (top.returncode, top.stdout, top.stderr) == (0, "", "")
    assert report.read_text().count("every 0.05 s") == len(lines.read_text().splitlines()) == 2


def test_a_thread_is_not_a_process(calm: Calm, build: Callable[..., Path], start: Start) -> None:
    process, _, _ = start(build("plain"), "storm")
    thread = max(int(entry.name) for entry in Path(f"/proc/{process.pid}/task").iterdir())
    result = calm("top", str(thread))
    assert result.returncode == 1
    assert result.stderr == f"calm: {thread} is a thread of process {process.pid}\n"


def test_a_process_that_ends_is_told(build: Callable[..., Path], start: Start) -> None:
    process, _, _ = start(build("plain"))
    command = [sys.executable, "-m", "calm", "top", "-d", "200ms", "-p", str(process.pid)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as top:
        assert top.stdout
        assert "calm top" in top.stdout.readline()
        process.kill()
        process.wait()
        output, errors = top.communicate()
    assert top.returncode == 0
    assert errors == f"calm: process {process.pid} (plain) has ended\n"
    assert f"ended: {process.pid} plain" in output


def test_a_process_that_ends_before_the_first_sample(calm: Calm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "chosen_by_pid", lambda _: list)
    top = calm("top", os.getpid(), "--json")
    assert (top.returncode, top.stdout, top.stderr) == (0, "", "calm: no process is left\n")


def has_ended(pid: int) -> bool:
    """Whether it is waited for or not."""
    stat = proc.stat_or_none(pid)
    return stat is None or stat.has_ended


def test_of_several_the_others_go_on(
    calm: Calm,
    build: Callable[..., Path],
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, short = (start(build("plain"))[0] for _ in range(2))
    file = tmp_path / "looks.json"

    def sleep(_: float) -> None:
        # Once the first interval is over.
        if file.read_text():
            os.kill(short.pid, signal.SIGKILL)
            wait_until(lambda: has_ended(short.pid))

    monkeypatch.setattr(top_command, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    top = calm("top", "-d", "200ms", "-n", "4", "--json", file, "--pid", f"{process.pid},{short.pid}")
    assert top.returncode == 0, top.stderr
    looks = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(looks) == 4
    assert [one for look in looks for one in look["ended"]] == [{"pid": short.pid, "name": "plain"}]
    assert [row["pid"] for row in looks[0]["processes"]] == [process.pid, short.pid]
    assert [row["pid"] for row in looks[-1]["processes"]] == [process.pid]
    assert top.stdout.count("every 0.2 s") == 4


def test_by_name(calm: Calm, build: Callable[..., Path], start: Start) -> None:
    pids = {start(build("named-program"))[0].pid for _ in range(2)}
    assert {row["pid"] for row in one_interval(calm, "--command", "named-pro*")["processes"]} == pids


def test_all_processes(calm: Calm, build: Callable[..., Path], start: Start) -> None:
    process, _, _ = start(build("plain"), preload=BUILD / "libptlbmalloc2.so")
    look = one_interval(calm)
    rows = {row["pid"]: row for row in look["processes"]}
    assert rows[process.pid]["allocator"] in ("ptlbmalloc2", "glibc")
    assert 2 not in rows  # the kernel's threads have no memory to look at
    assert look["own_cpu_percent"] > 0


def test_an_interrupt_prints_what_is_known(build: Callable[..., Path], start: Start) -> None:
    process, _, _ = start(build("plain"))
    command = [sys.executable, "-m", "calm", "top", "-d", "200ms", str(process.pid)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as top:
        assert top.stdout
        assert "calm top" in top.stdout.readline()
        top.send_signal(signal.SIGINT)
        _, errors = top.communicate()
    assert top.returncode == 130
    assert errors.strip() == ""


def test_an_interrupt_in_the_first_interval_prints_it(build: Callable[..., Path], start: Start) -> None:
    process, _, _ = start(build("plain"))
    command = [sys.executable, "-m", "calm", "top", "-d", "1000s", str(process.pid), "--json"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as top:
        # It is at it once it waits, with its counters open or refused: asleep for a long time.
        wait_until(lambda: Path(f"/proc/{top.pid}/syscall").read_text().split()[0] == CLOCK_NANOSLEEP)
        top.send_signal(signal.SIGINT)
        output, _ = top.communicate()
    assert top.returncode == 130
    (row,) = json.loads(output)["processes"]
    assert row["pid"] == process.pid
    assert row["minor_faults"] is not None


def test_a_number_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.getpid()
    source = sampler.Sampler(lambda: [pid], every=False)
    named = sampler.Sampler(processes.chosen_by_pid([pid]), every=False)
    source.sample()
    (row,) = source.sample().processes
    assert row.rss_change_kib is not None
    assert named.sample().processes
    real = proc.stat(pid)
    later = dataclasses.replace(real, started_ticks=real.started_ticks + 1, name="another")
    monkeypatch.setattr(proc, "stat", lambda *_: later)
    snapshot = source.sample()
    source.close()
    assert snapshot.ended == [sampler.Ended(pid, real.name)]
    (row,) = snapshot.processes
    assert (row.name, row.rss_change_kib) == ("another", None)
    # The process that was named has ended, whoever has its number now.
    snapshot = named.sample()
    named.close()
    assert (snapshot.processes, snapshot.ended) == ([], [sampler.Ended(pid, real.name)])


def test_a_program_that_becomes_another(calm: Calm, build: Callable[..., Path], start: Start) -> None:
    """exec keeps the number: what was known of the first program must not be told of the second."""
    source = r"""
        #include <stdio.h>
        #include <stdlib.h>
        #include <unistd.h>
        int main(void) {
            setvbuf(stdout, NULL, _IONBF, 0);
            printf("%d {}\n", getpid());
            char byte;
            if (read(0, &byte, 1) > 0) {
                unsetenv("LD_PRELOAD");
                execlp("cat", "cat", (char *)NULL);
            }
        }
    """
    process, pid, _ = start(build("becomes", source=source), preload=BUILD / "libcalmalloc.so")
    source = sampler.Sampler(processes.chosen_by_pid([pid]), every=False)
    (first,) = source.sample().processes
    assert first.allocator == "calmalloc"
    assert process.stdin
    process.stdin.write("x")
    process.stdin.flush()
    wait_until(lambda: proc.stat(pid).name == "cat" and "/libc" in Path(f"/proc/{pid}/maps").read_text())
    (second,) = source.sample().processes
    source.close()
    assert (second.name, second.allocator, second.counters) == ("cat", "glibc", {})


@pytest.mark.parametrize(
    ("library", "workload"),
    [
        ("libcalmalloc.so", ["listing1", "--threads", "4", "--rounds", "100000"]),
        ("libcalmalloc.so", ["idle-burst", "--threads", "2", "--bytes", "100000000"]),
        ("libptlbmalloc2.so", ["ttest1", "1000000", "2"]),
    ],
)
def test_real_programs(calm: Calm, library: str, workload: list[str]) -> None:
    env = os.environ | {"LD_PRELOAD": str(BUILD / library)}
    with subprocess.Popen(
        [str(BUILD / workload[0]), *workload[1:]], env=env, stdout=subprocess.DEVNULL
    ) as process:
        try:
            wait_until(lambda: tables_of(process.pid).get(library[3:-3]))
            (row,) = one_interval(calm, process.pid)["processes"]
        finally:
            process.kill()
    assert row["allocator"] == library[3:-3]
    counters = row["counters"][library[3:-3]]
    assert row["limit_bytes"] > 0
    if library == "libcalmalloc.so":
        assert counters["footprint"] > 0
        assert counters["limit_checks"] > 0
        assert row["purged_bytes"] >= 0
    else:
        assert counters["footprint_bytes"] > 0


def test_stat_survives_any_name(tmp_path: Path) -> None:
    name = "a) R (\n\x1b["
    path = tmp_path / "x"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", path)
    odd = tmp_path / name
    path.rename(odd)
    with subprocess.Popen([str(odd), "6000"]) as process:
        try:
            found = proc.stat(process.pid)
        finally:
            process.kill()
    assert found.name == "a) R (??["
    assert found.threads == 1
    assert all(c.isprintable() for c in found.name)


def row(pid: int, **fields: Any) -> Row:
    return Row(
        pid,
        fields.pop("name", f"p{pid}"),
        fields.pop("command", [f"p{pid}"]),
        1,
        fields.pop("rss_kib", 0),
        **fields,
    )


def test_order() -> None:
    rows = [row(1, shootdowns=3.0), row(2), row(3, shootdowns=9.0), row(4, shootdowns=0.0)]
    assert [r.pid for r in view.ordered(rows, "shootdowns")] == [3, 1, 4, 2]
    assert [r.pid for r in view.ordered(rows, "shootdowns", reverse=True)] == [4, 1, 3, 2]
    assert [r.pid for r in view.ordered(rows, "name")] == [1, 2, 3, 4]
    for key in view.SORT_KEYS:
        assert len(view.ordered(rows, key)) == 4


@pytest.mark.parametrize("width", [20, 40, 80, 100, 160, 300])
@pytest.mark.parametrize("sort", ["rss", "huge"])
def test_every_width_fits(width: int, sort: str) -> None:
    rows = [
        row(i, name="n" * 50, command=["n" * 50], rss_kib=10**9, shootdowns=1e9, minor_faults=1e12)
        for i in range(3)
    ]
    lines = view.table(rows, width, sort)
    if width >= 40:
        assert all(len(line.plain) <= width for line in lines)
        assert sort.upper() in lines[0].plain
    titles = [column.title for column, _ in view.columns_for(width, sort)]
    assert (len(titles) == len(view.COLUMNS)) == (width >= 160)


@pytest.mark.parametrize("height", [1, 2, 5, 24])
def test_every_height_fits(height: int) -> None:
    looked = Snapshot(
        time=0,
        interval_s=1,
        own_cpu_percent=1.0,
        interrupts_system_wide=None,
        processes=[row(i, rss_kib=i) for i in range(50)],
        ended=[],
        notes=["a note"],
    )
    state = view.State()
    state.record(looked)
    for change in ({}, {"detail": 7}, {"help": True}, {"selected": 3}, {"typing": True}):
        for name, value in change.items():
            setattr(state, name, value)
        assert len(view.screen(looked, state, 1.0, 80, height)) == height
    state = view.State(selected=0)
    if height > 6:
        # The last of fifty is scrolled to.
        shown = [line.plain for line in view.screen(looked, state, 1.0, 80, height)]
        assert any(line.split()[:1] == ["0"] for line in shown)


def test_figures_in_few_characters() -> None:
    assert [view.count(v) for v in (None, 0, 0.04, 7.26, 42, 9999, 12345, 1234567, 2e9)] == [
        "-", "0", "0.0", "7.3", "42", "9,999", "12.3k", "1.2M", "2.0G",
    ]  # fmt: skip
    assert [view.size(v) for v in (None, 0, 12, 3481, 2.5 * 1024 * 1024)] == [
        "-",
        "0K",
        "12K",
        "3.4M",
        "2.50G",
    ]
    assert [view.size(v, sign=True) for v in (0, 12, -2048)] == ["0K", "+12K", "-2.0M"]


def test_sparklines() -> None:
    assert view.sparkline([0, 1, 2, 4, 7], 5) == "▁▂▃▅█"
    assert view.sparkline([5, 0, 0], 2) == "▁▁"
    assert view.sparkline([], 10) == view.sparkline([1], 0) == ""


def test_a_note_of_any_shape_is_survived(build: Callable[..., Path]) -> None:
    """An ELF image whose headers point nowhere."""
    path = build("plain").read_bytes()
    for at, value in ((32, 1 << 60), (54, 0xFFFF), (56, 0xFFFF), (56, 0)):
        image = bytearray(path)
        image[at : at + (8 if at == 32 else 2)] = struct.pack("=Q" if at == 32 else "=H", value)

        def read(address: int, size: int, image: bytes = bytes(image)) -> bytes | None:
            return image[address : address + size] if address + size <= len(image) else None

        assert counters.table_addresses(read, 0) == []


@pytest.mark.usefixtures("compiled")
def test_completion_names_processes(compiled: Compile) -> None:
    env = os.environ | {
        "_CALM_COMPLETE": "bash_complete",
        "COMP_WORDS": f"calm top {str(os.getpid())[:-1]}",
        "COMP_CWORD": "2",
        "PYTHONPATH": str(ROOT),
    }
    code = "from calm.cli import cli; cli(prog_name='calm')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert f"plain,{os.getpid()}" in done.stdout


def test_page_tables_of_large_processes_are_not_walked(
    build: Callable[..., Path], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _, _ = start(build("plain"))
    walked: list[int] = []
    monkeypatch.setattr(proc, "rollup", lambda pid: walked.append(pid) or {})
    with closing(sampler.Sampler(lambda: [process.pid], every=False)) as top:
        monkeypatch.setattr(proc, "MAX_ROLLUP_KIB", 16)
        (row,) = top.sample().processes
        assert (walked, row.huge_kib) == ([], None)
        assert row.swap_kib is not None
        assert "delay" in row.reasons["huge_kib"]
    with closing(sampler.Sampler(lambda: [process.pid], every=False)) as top:
        monkeypatch.setattr(proc, "MAX_ROLLUP_KIB", 1 << 40)
        (row,) = top.sample().processes
        assert (walked, row.huge_kib) == ([process.pid], 0)
