"""calm profile on programs: what it finds, passes on and leaves behind, and what it does without."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from calm_helpers import ROOT, Calm, Compile
from namespaces import needs_first_pid_namespace
from waiting import wait_until

from calm.commands.profile import watch
from calm.core import documents, proc, symbols
from calm.core.errors import FAILED, CalmError
from calm.core.profile_model import CALL, CPU, FAULT, FEW_SAMPLES, SHOOTDOWN, Profile, Total

PERF = shutil.which("perf")
needs_perf = pytest.mark.skipif(PERF is None, reason="there is no perf")
two_cpus = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU has no other to shoot at")

# On a busy machine threads may not run at the same time, and then there is nothing to shoot at.
LEAST_SHOOTDOWNS = 1000

SOURCES = {
    # Threads whose arenas grow and are trimmed again and again.
    "trims.c": r"""
        #include <pthread.h>
        #include <stdlib.h>
        #include <string.h>
        static void *work(void *unused) {
            static _Thread_local char *blocks[200];
            for (int round = 0; round < 60; round++) {
                for (int i = 0; i < 200; i++) {
                    blocks[i] = malloc(120000);
                    blocks[i][0] = 1;
                }
                for (int i = 199; i >= 0; i--) free(blocks[i]);
            }
            return unused;
        }
        int main(void) {
            pthread_t threads[2];
            for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, work, NULL);
            for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
            return 0;
        }
    """,
    # A page is given back again and again, by munmap in so many of a hundred cases.
    "splits.c": r"""
        #include <pthread.h>
        #include <stdlib.h>
        #include <sys/mman.h>
        #include <time.h>
        static volatile int done;
        static void *spin(void *unused) {
            while (!done) {}
            return unused;
        }
        static char **argv;
        static void *split(void *unused) {
            int flags = MAP_PRIVATE | MAP_ANONYMOUS, percent = atoi(argv[2]);
            volatile char *kept = mmap(NULL, 4096, PROT_READ | PROT_WRITE, flags, -1, 0);
            unsigned random = 1;
            pthread_t thread;
            pthread_create(&thread, NULL, spin, NULL);
            for (int i = 0; i < atoi(argv[1]); i++) {
                random = random * 1664525 + 1013904223;
                if ((int)((random >> 16) % 100) < percent) {
                    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, flags, -1, 0);
                    *page = 1;
                    munmap(page, 4096);
                } else {
                    *kept = 1;
                    madvise((void *)kept, 4096, MADV_DONTNEED);
                }
                nanosleep(&(struct timespec){.tv_nsec = atoi(argv[3]) * 1000}, NULL);
            }
            done = 1;
            pthread_join(thread, NULL);
            return unused;
        }
        int main(int argc, char **given) {
            pthread_t thread;
            argv = given;
            if (argc == 4) return split(NULL) != NULL;
            // The process goes on without its first thread.
            pthread_create(&thread, NULL, split, NULL);
            pthread_exit(NULL);
        }
    """,
    # Parent and child write to what they share; the shell's exec stands before both.
    "forks.c": r"""
        #include <stdlib.h>
        #include <string.h>
        #include <sys/mman.h>
        #include <sys/wait.h>
        #include <unistd.h>
        __attribute__((noipa)) static void write_all(char *memory, size_t size) {
            for (size_t i = 0; i < size; i += 4096) memory[i]++;
        }
        int main(void) {
            size_t size = 16 << 20;
            char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            madvise(memory, size, MADV_NOHUGEPAGE);
            memset(memory, 1, size);
            for (int i = 0; i < 3; i++) {
                if (fork() == 0) {
                    write_all(memory, size);
                    _exit(0);
                }
                wait(NULL);
            }
            return 0;
        }
    """,
    # Workers with as much memory each.
    "workers.c": r"""
        #include <stdlib.h>
        #include <string.h>
        #include <sys/mman.h>
        #include <sys/wait.h>
        #include <unistd.h>
        int main(int argc, char **argv) {
            size_t size = 20 << 20;
            for (int i = 0; i < 4; i++) {
                if (fork() == 0) {
                    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
                    memset(mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0), 1, size);
                    sleep(atoi(argv[1]));
                    _exit(0);
                }
            }
            while (wait(NULL) > 0) {}
            return 0;
        }
    """,
    # A child that shares its parent's memory for a while.
    "shares.c": r"""
        #include <stdlib.h>
        #include <string.h>
        #include <sys/mman.h>
        #include <unistd.h>
        int main(int argc, char **argv) {
            size_t size = 40 << 20;
            int flags = MAP_PRIVATE | MAP_ANONYMOUS;
            memset(mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0), 1, size);
            if (vfork() == 0) {
                usleep(atoi(argv[1]));
                _exit(0);
            }
            return 0;
        }
    """,
    "inlines.cpp": r"""
        #include <sys/mman.h>
        namespace shop {
        template <class T> struct Counter {
            static inline __attribute__((always_inline)) void give(T *page) {
                madvise(page, 4096, MADV_DONTNEED);
            }
            __attribute__((noinline)) static void many(T *page, int rounds) {
                for (int i = 0; i < rounds; i++) {
                    *page = 1;
                    give(page);
                }
                asm volatile("" ::: "memory");
            }
        };
        }
        int main() {
            auto *page = static_cast<int *>(
                mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
            shop::Counter<int>::many(page, 20000);
        }
    """,
    "inlines.rs": r"""
        mod shop {
            pub struct Till;
            pub trait Give { fn give(&self, page: *mut u8); }
            extern "C" { fn madvise(page: *mut u8, length: usize, advice: i32) -> i32; }
            impl Give for Till {
                #[inline(never)]
                fn give(&self, page: *mut u8) { back(page) }
            }
            #[inline(always)]
            fn back(page: *mut u8) {
                unsafe { page.write_volatile(1); madvise(page, 4096, 4); }
                std::hint::black_box(page);
            }
        }
        use shop::Give;
        fn main() {
            let layout = std::alloc::Layout::from_size_align(4096, 4096).unwrap();
            let page = unsafe { std::alloc::alloc(layout) };
            for _ in 0..20000 { shop::Till.give(page); }
        }
    """,
}

Build = Callable[..., Path]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    directory = tmp_path_factory.mktemp("profiled")

    def build(name: str, *options: str) -> Path:
        source = directory / name
        target = directory / (name.replace(".", "-") + "".join(options).replace("/", "") + " with a space")
        if not target.exists():
            source.write_text(SOURCES[name])
            if name.endswith(".rs"):
                path = f"{os.environ['PATH']}:{Path.home()}/.cargo/bin"
                rustc = shutil.which("rustc", path=path)
                if rustc is None:
                    pytest.skip("there is no rustc")
                compiler = [rustc, "-g", "-O", *options]
            else:
                compiler = ["c++" if name.endswith("cpp") else "cc", "-g", "-O2", "-pthread", *options]
            subprocess.run([*compiler, "-o", str(target), str(source)], check=True)
        return target

    return build


def profiled(calm: Calm, path: Path, *arguments: str | Path, **options: Any) -> Profile:
    result = calm("profile", "--json", path, *arguments, **options)
    assert result.returncode == 0, result.stderr
    return documents.read(str(path), Profile)


def functions(profile: Profile, kind: str, cause: str) -> list[str]:
    """Of user code, on the heaviest stack of a kind and cause, the innermost first."""
    stack = max((s for s in profile.stacks if (s.kind, s.cause) == (kind, cause)), key=lambda s: s.weight)
    frames = [profile.frames[index] for index in reversed(stack.frames)]
    return [frame.function for frame in frames if not frame.kernel]


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """A folder for temporary files, which has to be empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


@needs_perf
@two_cpus
@pytest.mark.usefixtures("traced")
def test_shootdowns_have_their_cause(calm: Calm, compiled: Compile, tmp_path: Path) -> None:
    for number in range(20):
        path = tmp_path / f"{number}.json"
        made = profiled(calm, path, "--", compiled("shootdowns"), "20000", "two")
        total = made.totals["shootdowns"].value
        assert total is not None
        if total > LEAST_SHOOTDOWNS:
            break
    else:
        pytest.fail("twenty runs had next to no shootdowns")
    causes = {cause.key: cause.shootdowns for cause in made.causes}
    assert causes["madvise"] == pytest.approx(total, rel=0.05)
    stack = functions(made, SHOOTDOWN, "madvise")
    assert stack[-1] == "_start"
    assert "main" in stack


def split_is_true(made: Profile, percent: int) -> bool:
    """Within five points of munmap's share of the shootdowns, or its interval holds it."""
    causes = {cause.key: cause.shootdowns or 0 for cause in made.causes}
    share = causes.get("munmap", 0) / max(1, sum(causes.values()))
    interval = made.interval(SHOOTDOWN, share)
    if abs(share - percent / 100) <= 0.05:
        return True
    return not made.causes_counted and interval is not None and interval[0] <= percent / 100 <= interval[1]


@needs_perf
@two_cpus
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("rounds", [1, pytest.param(7, marks=pytest.mark.long)])
@pytest.mark.parametrize("arguments", [("10",), ("50",), ("90", "in-a-thread")])
@pytest.mark.parametrize("way", [pytest.param("counted", marks=needs_first_pid_namespace), "sampled"])
def test_how_shootdowns_divide(
    calm: Calm, built: Build, tmp_path: Path, way: str, arguments: tuple[str, ...], rounds: int
) -> None:
    """Two causes of known parts. Without bpftrace there are an interval, and a word where samples are few."""
    # More in a second are not counted.
    events, pause_us = (8000, 150) if way == "counted" else (40000, 0)
    environment = {}
    if way == "sampled":
        tools = tmp_path / "tools"
        tools.mkdir()
        (tools / "perf").symlink_to(str(PERF))
        environment["PATH"] = str(tools)
    elif not shutil.which("bpftrace"):
        pytest.skip("there is no bpftrace")
    left = rounds
    for number in range(20 * rounds):
        path = tmp_path / f"{number}.json"
        program = (built("splits.c"), events, arguments[0], pause_us, *arguments[1:])
        result = calm("profile", "--json", path, "--", *program, env=environment)
        assert result.returncode == 0, result.stderr
        made = documents.read(str(path), Profile)
        if (made.totals["shootdowns"].value or 0) < LEAST_SHOOTDOWNS:
            continue
        if why := next(
            (each for each in made.notes if re.search("not counted: bpftrace(:| did)", each)), None
        ):
            pytest.skip(f"bpftrace cannot count here: {why}")
        assert made.causes_counted == (way == "counted"), made.notes
        if way == "sampled" and made.sampled.get(SHOOTDOWN, 0) < FEW_SAMPLES:
            assert re.search(r"^(munmap|madvise) .* too few ", result.stderr, re.MULTILINE), result.stderr
        else:
            assert split_is_true(made, int(arguments[0])), (made.causes, made.sampled)
        if way == "sampled":
            assert "not counted: there is no bpftrace in PATH" in result.stderr
        left -= 1
        if not left:
            return
    pytest.fail("hardly a run had shootdowns")


@needs_perf
@pytest.mark.usefixtures("traced")
def test_arena_trimming_is_named(calm: Calm, built: Build, tmp_path: Path, temporary: Path) -> None:
    path = tmp_path / "p.json"
    program = built("trims.c")
    result = calm("profile", "--json", path, "--", program, env={"TMPDIR": str(temporary)})
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    for words in ("TLB shootdowns", "memory calls come from", "findings", "cost of profiling"):
        assert words in result.stderr
    made = documents.read(str(path), Profile)
    assert made.privileged
    assert made.allocator == "glibc"
    assert made.command == [str(program)]
    calls = made.totals["madvise"].value
    assert calls is not None
    assert calls > 10_000
    # The stacks of a kind add up to what was counted.
    faults = sum(s.weight for s in made.stacks if s.kind == FAULT)
    counted = sum(made.totals[name].value or 0 for name in ("minor_faults", "major_faults"))
    assert faults == pytest.approx(counted, rel=0.01)
    by_madvise = sum(s.weight for s in made.stacks if (s.kind, s.cause) == (CALL, "madvise"))
    assert by_madvise == pytest.approx(calls, rel=0.01)
    stack = functions(made, CALL, "madvise")
    # glibc 2.41 has parts of _int_free by names of their own: _int_free_chunk, _int_free_maybe_trim.
    inner = next(index for index, name in enumerate(stack) if name.startswith("_int_free"))
    assert inner < stack.index("work")
    assert any("free" in name and "int" not in name for name in stack)
    # Beside the program's own count the machine's says nothing.
    assert ("interrupts_system_wide" in made.totals) == (made.totals["interrupts"].value is None)
    trimming = next(f for f in made.findings if "arena trimming in glibc's free" in f.text)
    assert f"of {calls:,.0f} madvise calls" in trimming.text
    assert re.match("CPU time of profiling: perf .*, calm .*, calm-probe ", made.own_cost[0])
    assert made.own_share is not None
    assert made.own_share > 0


@needs_perf
@pytest.mark.usefixtures("traced")
def test_children_and_their_copies_are_seen(calm: Calm, built: Build, tmp_path: Path) -> None:
    program = built("forks.c")
    made = profiled(calm, tmp_path / "p.json", "--", "sh", "-c", 'cd /; "$0"; true', program)
    causes = {cause.key: cause for cause in made.causes}
    assert causes["cow"].faults is not None
    assert causes["cow"].faults > 8_000
    # Whole, although a shell with the same library was there before: see calm/commands/profile/recording.py.
    stack = functions(made, FAULT, "cow")
    assert stack[:2] == ["write_all", "main"]
    assert stack[-1] == "_start"
    assert any("copy-on-write" in finding.text for finding in made.findings)


def test_the_curve_has_all_of_several_workers(calm: Calm, built: Build, tmp_path: Path) -> None:
    for seconds in ("1", "10", "100"):  # a busy machine may come to look at them late
        made = profiled(calm, tmp_path / "p.json", "--", built("workers.c"), seconds)
        peak, kib = made.totals["peak_rss_kib"].value, sorted(made.curves["rss"].kib)
        assert peak is not None
        if min(peak, kib[len(kib) // 2]) > 80 * 1024:
            break
    assert kib[-1] == pytest.approx(peak, rel=0.1)
    assert kib[len(kib) // 2] > 80 * 1024


def test_the_curve_has_shared_memory_once(calm: Calm, built: Build, tmp_path: Path) -> None:
    for us in ("800000", "8000000", "80000000"):  # a busy machine may come to look at it late
        made = profiled(calm, tmp_path / "p.json", "--", built("shares.c"), us)
        highest = max(made.curves["rss"].kib)
        assert highest < 60 * 1024
        if highest > 40 * 1024:
            return
    raise AssertionError("its memory was not seen")


@needs_perf
@pytest.mark.usefixtures("traced")
def test_programs_that_start_and_end_give_nothing_back(calm: Calm, tmp_path: Path) -> None:
    # 45 to 50 faults each, so that there are more than the 10,000 from which on a finding is made of them.
    loop = "for i in $(seq 300); do /bin/true; done"
    made = profiled(calm, tmp_path / "p.json", "--", "sh", "-c", loop)
    faults, peak = made.totals["minor_faults"].value, made.totals["peak_rss_kib"].value
    assert faults is not None
    assert peak is not None
    assert faults > 10_000
    assert faults * 4 > 8 * peak
    assert not any("given back and" in finding.text for finding in made.findings)


@needs_perf
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("name", "options", "inlined", "around"),
    [
        ("inlines.cpp", (), "shop::Counter<int>::give(int*)", "shop::Counter<int>::many(int*, int)"),
        ("inlines.rs", (), "shop::back", "as inlines::shop::Give>::give"),
        ("inlines.rs", ("-Csymbol-mangling-version=v0",), "shop::back", "as inlines::shop::Give>::give"),
    ],
)
def test_names_of_languages_and_inlined_functions(
    calm: Calm, built: Build, tmp_path: Path, name: str, options: tuple[str, ...], inlined: str, around: str
) -> None:
    if not shutil.which("llvm-symbolizer") and not shutil.which("addr2line"):
        pytest.skip("nothing here reads debugging information")
    made = profiled(calm, tmp_path / "p.json", "--", built(name, *options))
    stack = max((s for s in made.stacks if s.kind == CALL and s.cause == "madvise"), key=lambda s: s.weight)
    frames = [made.frames[index] for index in stack.frames]
    found = next(index for index, frame in enumerate(frames) if inlined in frame.function)
    assert frames[found].inlined
    assert around in frames[found - 1].function
    assert not frames[found - 1].inlined
    assert str(frames[found].source).startswith(f"{name}:")
    assert not any(frame.function.startswith(("_Z", "_R")) for frame in frames)


@pytest.mark.skipif(not shutil.which("llvm-symbolizer") or not shutil.which("addr2line"), reason="needs both")
def test_both_readers_of_symbols_agree(built: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    program = str(built("inlines.cpp"))
    table = subprocess.run(["nm", program], capture_output=True, text=True, check=True).stdout
    line = next(line for line in table.splitlines() if "4many" in line)
    begin, mangled = int(line.split()[0], 16), line.split()[2]
    offset = next(o for o in range(1 << 16) if symbols.file_address(program, o) == begin)
    addresses = [symbols.Address(program, offset + step, mangled) for step in range(0, 32, 4)]
    by_llvm = symbols.resolve(addresses)
    monkeypatch.setattr(symbols, "_TOOLS", symbols._TOOLS[1:])
    assert symbols.resolve(addresses) == by_llvm
    assert any(frame.inlined for frames in by_llvm.values() for frame in frames)
    monkeypatch.setattr(symbols, "_TOOLS", ())
    assert [f[0].function for f in symbols.resolve(addresses).values()] == [
        "shop::Counter<int>::many(int*, int)"
    ] * len(addresses)


@needs_perf
@pytest.mark.usefixtures("traced")
def test_a_running_process_is_watched(calm: Calm, compiled: Compile, tmp_path: Path) -> None:
    with subprocess.Popen([compiled("shootdowns"), "2000000000"]) as process:
        try:
            # It faults once for each call: both are counted in the same time, not while perf starts and ends.
            # A busy machine may put off the one and not the other, for part of a second.
            for duration_s in (1, 10, 60):
                began = time.monotonic()
                made = profiled(
                    calm, tmp_path / "p.json", "--pid", str(process.pid), "--for", f"{duration_s}s"
                )
                assert 0.9 * duration_s < made.wall_s < time.monotonic() - began
                calls, faults = made.totals["madvise"].value, made.totals["minor_faults"].value
                assert calls is not None
                assert faults is not None
                if calls == pytest.approx(faults, rel=0.2):
                    break
            assert process.poll() is None
        finally:
            process.kill()
    assert made.pid == process.pid
    assert made.exit_code is None
    assert made.command[1:] == ["2000000000"]
    assert calls > 1000
    assert calls == pytest.approx(faults, rel=0.2)
    assert functions(made, CALL, "madvise")[-1] == "_start"
    assert any(stack.kind == CPU for stack in made.stacks)


def test_a_process_of_any_name_is_watched(calm: Calm, tmp_path: Path) -> None:
    # The kernel keeps 15 bytes of it: half of the last character.
    program = shutil.copy(shutil.which("sleep") or "", tmp_path / "fourteen-bytesü")
    with subprocess.Popen([program, "6000"]) as process:
        try:
            made = profiled(calm, tmp_path / "p.json", "--pid", str(process.pid), "--for", "200ms")
        finally:
            process.kill()
    assert made.command == [str(program), "6000"]


WORKER = """
import sys, time
for seconds in (0.5, 0.2):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
    print("done", flush=True)
    sys.stdin.readline()
"""
PARENT = """
import signal, subprocess, sys
# Another has ended before, with more faults than the worker will have.
subprocess.run([sys.executable, "-S", "-c", "bytearray(1 << 26)"])
if sys.argv[2] == "ignores": signal.signal(signal.SIGCHLD, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1]])
worker.wait()
print("ended", flush=True)
sys.stdin.read()
"""


@contextmanager
def talking(*arguments: str) -> Iterator[tuple[int, Callable[[], str], Callable[[], str]]]:
    """Python runs this: its process, what it says next, and what it says when it was told to go on."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, heard = process.stdin, process.stdout

        def hear() -> str:
            return heard.readline().strip()

        def go_on() -> str:
            to.write("\n")
            to.flush()
            return hear()

        try:
            yield process.pid, hear, go_on
        finally:
            process.kill()


def seconds_of(totals: dict[str, Total]) -> float:
    return sum(totals[name].value or 0 for name in ("user_s", "system_s"))


@pytest.mark.parametrize("parent", ["waits", "ignores"])
def test_what_a_child_spent_before_is_not_counted_when_it_ends(parent: str) -> None:
    with talking(PARENT, WORKER, parent) as (pid, hear, go_on):
        assert hear() == "done"
        before = watch._Spending(pid)
        assert go_on() == "done"
        before.update()
        assert go_on() == "ended"
        totals = before.totals()
    assert 0.15 < seconds_of(totals) < 0.4


ORPHAN = """
import sys, time
print("ready", flush=True)
sys.stdin.readline()
end = time.process_time() + 0.3
while time.process_time() < end: pass
print("done", flush=True)
sys.stdin.readline()
"""
BETWEEN = """
import os, subprocess, sys, time
print(os.getpid(), flush=True)
subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1]])
time.sleep(60)
"""
ABOVE = """
import subprocess, sys, time
subprocess.run([sys.executable, "-S", "-c", sys.argv[1], sys.argv[2]])
time.sleep(60)
"""


def test_who_has_lost_its_parent_is_counted_on() -> None:
    with talking(ABOVE, BETWEEN, ORPHAN) as (pid, hear, go_on):
        between = int(hear())
        assert hear() == "ready"
        before = watch._Spending(pid)
        os.kill(between, signal.SIGTERM)
        assert go_on() == "done"
        totals = before.totals()
    assert 0.25 < seconds_of(totals) < 0.5


def started(*arguments: str | Path, temporary: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "calm", "profile", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def written(pid: int) -> int:
    """Bytes of a process's standard output, if that is a file."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/fd/1").stat().st_size
    return 0


def wait_for_recording(profiler: int, pid: int) -> None:
    """Until perf has begun to write, and the program to do what is written."""
    wait_until(lambda: any(written(each) for each in proc.descendants(profiler)))
    before_s = cpu_s(pid)
    wait_until(lambda: cpu_s(pid) > before_s + 0.5)


def cpu_s(pid: int) -> float:
    found = proc.stat(pid)
    return found.user_s + found.system_s


@needs_perf
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_ends_it_and_nothing_is_left(
    compiled: Compile, temporary: Path, number: int, code: int
) -> None:
    with subprocess.Popen([compiled("shootdowns"), "2000000000"]) as process:
        try:
            watcher = started("--pid", str(process.pid), "--for", "60s", temporary=temporary)
            wait_for_recording(watcher.pid, process.pid)
            children = proc.descendants(watcher.pid)
            assert children
            watcher.send_signal(number)
            report, errors = watcher.communicate()
        finally:
            process.kill()
    assert watcher.returncode == code, errors
    assert "Traceback" not in errors
    # Ctrl-C asks for what is known, other signals for the end.
    assert ("memory calls come from" in report) == (number == signal.SIGINT)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def test_codes_signals_and_output_pass_through(calm: Calm) -> None:
    result = calm("profile", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert result.returncode == 3
    assert result.stdout == "out\n"
    assert "err\n" in result.stderr
    killed = calm("profile", "--", "sh", "-c", "kill -SEGV $$")
    assert killed.returncode == 128 + signal.SIGSEGV
    assert "SIGSEGV (11)" in killed.stderr


@pytest.mark.parametrize("by_env", [True, False])
def test_the_allocator_is_the_programs_own(calm: Calm, tmp_path: Path, by_env: bool) -> None:
    library = tmp_path / "libjemalloc.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"]
    subprocess.run(command, input="int no_allocator;", text=True, check=True)
    # calm-probe stands before the program, and env before what it runs: neither has that allocator.
    before = ("env", f"LD_PRELOAD={library}") if by_env else ()
    variables = {} if by_env else {"LD_PRELOAD": str(library)}
    for seconds in ("0.3", "3", "30"):  # a busy machine may come to look at it late
        made = profiled(calm, tmp_path / "p.json", "--", *before, "sleep", seconds, env=variables)
        if made.allocator == "jemalloc":
            return
    raise AssertionError(made.allocator)


def test_json_on_standard_output_is_alone(calm: Calm, monkeypatch: pytest.MonkeyPatch) -> None:
    # However long it takes here.
    monkeypatch.setattr(watch, "_SHORT_S", 3600.0)
    result = calm("profile", "--json", "-", "--", "echo", "noise")
    made = json.loads(result.stdout)
    assert made["schema"] == "calm-profile"
    assert "noise" in result.stderr
    # A millisecond holds no stacks, and that is said.
    assert "too short for stacks" in result.stderr or PERF is None


def test_without_perf_there_are_counts_and_the_reason(calm: Calm, tmp_path: Path, compiled: Compile) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    result = calm("profile", "--", compiled("hold"), "8", "200", env={"PATH": str(tools)})
    assert result.returncode == 0, result.stderr
    assert "no stacks, and no causes: there is no perf in PATH" in result.stderr
    assert "minor faults" in result.stderr
    assert "there are no stacks to judge by" in result.stderr


@needs_perf
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
def test_without_rights_user_code_is_seen(built: Build, tmp_path: Path) -> None:
    if int(Path("/proc/sys/kernel/perf_event_paranoid").read_text()) != 2:
        pytest.skip("rights are other than by default")
    path = tmp_path / "p.json"
    result = subprocess.run(
        [
            *("setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-m", "calm", "profile"),
            *("--json", path, "--", built("forks.c")),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    made = documents.read(str(path), Profile)
    assert not made.privileged
    assert not made.kernel_stacks
    assert "CAP_PERFMON" in result.stderr
    assert "kernel.perf_event_paranoid=-1 (it is 2)" in result.stderr
    # Never a zero for what was not counted.
    assert made.totals["shootdowns"].value is None
    assert made.totals["madvise"].how.startswith("not counted: ")
    assert all(cause.shootdowns is None for cause in made.causes)
    assert all(cause.cpu_s is None for cause in made.causes)
    # Nor the kernel's time as that of user code.
    seen, user = sum(s.weight for s in made.stacks if s.kind == CPU), made.totals["user_s"].value
    assert user is not None
    assert seen <= 1.01 * user
    assert functions(made, FAULT, "fault")[0] in ("write_all", "main") or made.frames
    assert {stack.kind for stack in made.stacks} <= {FAULT, CPU}
    assert not any(made.frames[index].kernel for stack in made.stacks for index in stack.frames)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--", "no-such-program"), 127, "no such program: 'no-such-program'"),
        (("--", "/etc/passwd"), 126, "/etc/passwd is not executable"),
        ((), 2, "give either a command to run, or --pid"),
        (("--pid", "1", "--", "true"), 2, "give either a command to run, or --pid"),
        (("--for", "3s", "--", "true"), 2, "--for goes with --pid"),
        (("--pid", "1", "--for", "soon"), 2, "'soon' is not a duration"),
        (("--pid", "4999999", "--for", "1s"), 1, "there is no process 4999999"),
        (("--pid", "1", "--for", "5"), 2, "'5' is not a duration with a unit"),
        (("--pid", "0"), 2, "--pid"),
        (("--freq", "0", "--", "true"), 2, "--freq"),
        (("--json", "/no/such/folder/p.json", "--", "true"), 1, "no such directory"),
        (("--html", "/no/such/folder/p.html", "--", "true"), 1, "no such directory"),
        (("--plot", "memory.gif", "--", "true"), 2, "the name must end in .svg or .png"),
        (("--json", "/bin/true"), 2, "/bin/true: is a program; where CMD follows, put `--` before it"),
    ],
)
def test_bad_input_gets_one_line(calm: Calm, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = calm("profile", *arguments)
    assert result.returncode == code
    assert message in result.stderr
    assert result.stderr.startswith("calm: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--html", "-o"])
def test_a_full_disk_gets_one_line(calm: Calm, option: str) -> None:
    result = calm("profile", option, "/dev/full", "--", "true")
    assert result.returncode == FAILED
    assert result.stderr.endswith("calm: cannot write /dev/full: No space left on device\n")


def test_the_report_and_a_picture_go_to_files(calm: Calm, compiled: Compile, tmp_path: Path) -> None:
    for milliseconds in ("300", "3000", "30000"):  # a busy machine may sample its memory late
        files = ("-o", tmp_path / "report", "--plot", tmp_path / "memory.svg")
        result = calm("profile", *files, "--", compiled("hold"), "8", milliseconds)
        if result.returncode == 0:
            break
        assert "ended before its memory was sampled" in result.stderr
    assert (result.stdout, result.stderr) == ("", "")
    assert "peak RSS" in (tmp_path / "report").read_text()
    assert (tmp_path / "memory.svg").read_text().count("<path") > 3


@pytest.mark.skipif(os.geteuid() != 0, reason="any process is root's")
def test_processes_that_cannot_be_watched(calm: Calm) -> None:
    if Path("/proc/2/comm").exists() and Path("/proc/2/comm").read_text() == "kthreadd\n":
        assert "process 2 is a thread of the kernel" in calm("profile", "--pid", "2").stderr
    with subprocess.Popen(["true"]) as ended:
        while Path(f"/proc/{ended.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert "has ended" in calm("profile", "--pid", str(ended.pid)).stderr


def test_a_thread_is_no_process(calm: Calm) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        result = calm("profile", "--pid", str(thread.native_id), "--for", "1s")
    finally:
        done.set()
        thread.join()
    assert f"is a thread of process {os.getpid()}\n" in result.stderr


def test_a_process_that_ended_before_the_profile_began() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    with pytest.raises(CalmError, match=f"process {process.pid} has ended"):
        watch._Spending(process.pid)
