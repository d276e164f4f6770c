"""calm heap: amounts of known programs, forms that other programs open, and bad input."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from calm_helpers import ROOT, Calm
from commanded import BUILD
from waiting import wait_until

from calm.commands.heap import formats, html, summary, watch
from calm.commands.heap.difference import difference
from calm.core import elf, heap_live, places, pprof, proc, protobuf
from calm.core.errors import CalmError
from calm.core.heap_profile import (
    TYPES,
    HeapProfile,
    HeapStack,
    SampleType,
    merged,
    numbered,
    stacks_by_frames,
)
from calm.core.places import Place
from calm.core.profile_model import Frame
from calm.core.progress import Bar
from calm.core.protobuf import field

pytestmark = pytest.mark.feature("profile")

MIB = 1 << 20
LIBRARY = BUILD / "libcalmalloc.so"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heap") / "heap_program"
    source = Path(__file__).with_name("heap_program.c")
    flags = ["-std=gnu17", "-O2", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, source, "-o", path], check=True)
    return path


class Started:
    """The program, which does what it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid

    def do(self, *lines: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for line in lines:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            assert self.process.stdout.readline(), f"it has ended at {line!r}"


@contextmanager
def started(program: Path, options: str = "", preload: Path | None = LIBRARY) -> Iterator[Started]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "CALM_"))}
    env |= ({"LD_PRELOAD": str(preload)} if preload else {}) | ({"CALM_OPTIONS": options} if options else {})
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [program], env=env, stdin=pipe, stdout=pipe, text=True, cwd=program.parent
    ) as process:
        try:
            running = Started(process)
            # Its answer comes after its libraries are loaded.
            running.do("join")
            yield running
        finally:
            process.kill()


def by_function(profile: HeapProfile, name: str) -> dict[str, int]:
    """What each function has, itself or in those that it calls."""
    at = formats.column(profile, name)
    sums: dict[str, int] = {}
    for frames, values in stacks_by_frames(profile).items():
        for function in {frame.function for frame in frames}:
            sums[function] = sums.get(function, 0) + values[at]
    return sums


def about(value: float, wanted: float) -> bool:
    """Within six standard deviations of the sampling error, with six hundred samples or more."""
    return abs(value - wanted) <= 0.25 * wanted


def frame(name: str, line: int = 1) -> Frame:
    return Frame(name, "program", source=f"{name}.c:{line}")


def profile_of(stacks: dict[tuple[Frame, ...], list[int]], **more: Any) -> HeapProfile:
    frames, found = numbered(stacks)
    return HeapProfile(command=["./program"], types=list(TYPES), frames=frames, stacks=found, **more)


MAIN, SHORT, LONG = frame("main"), frame("parse", 10), frame("Cache::store(std::string)", 20)
EXAMPLE = {
    (MAIN, SHORT): [1000, 64 << 20, 0, 0, 10, 640 << 10, 2_000_000, 0],
    (MAIN, LONG): [100, 10 << 20, 90, 9 << 20, 100, 10 << 20, 30_000_000_000, 5_400_000_000_000],
}


# --- of a process


def test_live(program: Path) -> None:
    """Switched on without a restart: amounts, the peak, and off again. No stack is of the allocator."""
    with started(program) as running:
        running.do("keep 1000 1000", "threads 1")
        with heap_live.attached(running.pid) as process:
            assert process.snapshot().mean_bytes == 0
            assert process.ask(4096) == 4096
            running.do("join", "keep 20000 1000", "churn 20000 2000")
            before = process.snapshot()
            assert before.mean_bytes == 4096
            running.do("drop", "keep 64 1048576", "drop")
            after = process.snapshot()
        profile = heap_live.profile(running.pid, before)
        assert about(by_function(profile, "inuse_space")["keep_site"], 20e6)
        assert about(by_function(profile, "inuse_objects")["keep_site"], 20_000)
        assert about(by_function(profile, "alloc_space")["churn_site"], 40e6)
        assert by_function(profile, "inuse_space")["churn_site"] == 0
        (kept,) = (
            frames
            for frames in stacks_by_frames(profile)
            if any(each.function == "keep_site" for each in frames)
        )
        assert [each.function for each in kept[-2:]] == ["main", "keep_site"]
        assert kept[-1].source is not None
        assert re.fullmatch(r"heap_program\.c:\d+", kept[-1].source)
        assert kept[-1].module == "heap_program"
        later = heap_live.profile(running.pid, after, before)
        assert about(by_function(later, "peak_space")["keep_site"], 64 * MIB)
        assert by_function(later, "inuse_space")["keep_site"] == 0
        assert about(by_function(later, "alloc_space")["keep_site"], 64 * MIB)
        assert "churn_site" not in by_function(later, "alloc_space")
        running.do("threads 1")
        with heap_live.attached(running.pid) as process:
            assert process.ask(0) == 0
            assert process.snapshot().mean_bytes == 0


def test_program_that_was_replaced(program: Path, tmp_path: Path) -> None:
    """As by an update: its functions are still named."""
    path = tmp_path / "program"
    shutil.copy(program, path)
    with started(path, "profile=4k") as running:
        running.do("keep 1000 1000")
        path.unlink()
        shutil.copy("/bin/true", path)
        with heap_live.attached(running.pid) as process:
            found = heap_live.profile(running.pid, process.snapshot())
    assert "keep_site" in by_function(found, "inuse_space")
    assert "program" in {each.module for each in found.frames}


def test_while_threads_allocate(program: Path) -> None:
    """No reader fails, and what it reads fits together."""
    with started(program, "profile=1k") as running, heap_live.attached(running.pid) as process:
        running.do("threads 4")
        allocated = torn = stacks = 0
        for _ in range(150):
            found = process.snapshot()
            torn += found.torn
            stacks += len(found.stacks)
            sums = [sum(values) for values in zip(*found.stacks.values(), strict=True)]
            if not sums:
                continue
            objects, space, inuse_objects, inuse_space, _, peak_space, _, _ = sums
            for values in found.stacks.values():
                assert 0 <= values[2] <= values[0]
                assert 0 <= values[3] <= values[1]
            assert space >= allocated or found.torn, "allocations only grow"
            allocated = space
            # At most 100 blocks of each thread, of up to 300,000 bytes.
            assert inuse_space <= 1.5 * 4 * 100 * 300_000
            assert inuse_objects <= objects
            assert peak_space <= 1.5 * 4 * 101 * 300_000
        assert torn <= stacks / 2
        running.do("join")
        rest = process.snapshot()
        assert rest.torn == 0
        assert sum(values[3] for frames, values in rest.stacks.items()) < MIB


def test_process(calm: Calm, program: Path, tmp_path: Path) -> None:
    """The command: it switches the profile on and off, and says what is not in it."""
    with started(program) as running:
        running.do("keep 2000 10000", "threads 2")
        series = tmp_path / "heap.pb.gz"
        done = calm(
            *("heap", "run", "--pid", running.pid, "--for", "1s", "--every", "16k", "--json"),
            *("--each", "100ms", "--pprof", series),
        )
        assert done.returncode == 0, done.stderr
        found = msgspec.json.decode(done.stdout, type=HeapProfile)
        assert found.pid == running.pid
        assert found.window_s is not None
        assert found.window_s >= 1
        assert found.mean_bytes == 16 << 10
        assert by_function(found, "alloc_space")["thread_site"] > MIB
        assert "keep_site" not in by_function(found, "inuse_space")
        assert "note: blocks allocated before the profile was on are not in it" in done.stderr
        with heap_live.attached(running.pid) as process:
            assert process.snapshot().mean_bytes == 0
        first, last = (pprof.read(str(tmp_path / f"heap{part}.pb.gz")) for part in (".1", ""))
        assert by_function(difference(last, first), "alloc_space")["thread_site"] > 0


def test_process_that_samples_already(calm: Calm, program: Path) -> None:
    """Read at once, with its own mean, which stays."""
    with started(program, "profile=8k") as running:
        running.do("keep 20000 1000")
        done = calm("heap", "run", "--pid", running.pid, "--every", "64k")
        assert done.returncode == 0
        assert f"process {running.pid} samples each 8192 bytes already: --every is not applied" in done.stderr
        assert "keep_site ← main" in done.stdout
        assert "one sample for each 8 KiB on average" in done.stdout
        with heap_live.attached(running.pid) as process:
            assert process.snapshot().mean_bytes == 8192


def test_nothing_sampled(calm: Calm, program: Path) -> None:
    with started(program, "profile=1g") as running:
        running.do("keep 1 1")
        done = calm("heap", "run", "--pid", running.pid)
        assert done.returncode == 0
        assert "nothing was sampled: a smaller --every samples more" in done.stdout


def test_idle(calm: Calm, program: Path) -> None:
    """A process that does not come to the allocator cannot be asked."""
    with started(program) as running:
        running.do("keep 1 100")
        with heap_live.attached(running.pid) as process, pytest.raises(CalmError, match="no thread"):
            process.ask(4096, wait_s=0.05)
        done = calm("heap", "run", "--pid", running.pid, "--for", "1ms")
        assert done.returncode == 1
        assert done.stderr.startswith(f"calm: process {running.pid} cannot be asked for a profile: no thread")
        assert done.stderr.count("\n") == 1


def test_kept_on(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is asked again and again; a process that is idle meanwhile is profiled to the end."""
    asked = []
    ask = heap_live.Process.ask

    def counted(process: heap_live.Process, mean_bytes: int, wait_s: float = 0) -> int:
        asked.append(mean_bytes)
        return ask(process, mean_bytes, min(wait_s, 0.1))

    with started(program) as running, heap_live.attached(running.pid) as process:

        def wait() -> heap_live.Snapshot:
            asked.clear()
            while not asked:
                found, _, notes, _ = watch._wait(process, 0.3, 4096, None, Bar())
                assert (found.mean_bytes, notes) == (4096, [])
            assert set(asked) == {4096}
            return found

        def is_idle() -> bool:
            """The library's own work has ended, too."""
            try:
                ask(process, 4096, 1)
            except CalmError:
                return True
            return False

        running.do("threads 1")
        process.ask(4096)
        monkeypatch.setattr(heap_live.Process, "ask", counted)
        monkeypatch.setattr(watch, "LEASE_S", 0)
        wait()
        running.do("join", "keep 20000 1000")
        wait_until(is_idle)
        assert about(sum(values[3] for values in wait().stacks.values()), 20e6)


def test_switched_off_meanwhile(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise CalmError("no")

    with started(program) as running, heap_live.attached(running.pid) as process:
        running.do("threads 1")
        process.ask(4096)
        process.ask(0)
        monkeypatch.setattr(heap_live.Process, "ask", refused)
        monkeypatch.setattr(watch, "LEASE_S", 0)
        _, _, notes, _ = watch._wait(process, 0.1, 4096, None, Bar())
        assert notes == ["the profile was switched off before the end of this time"]


def test_a_series_goes_on_after_a_file_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    series = watch.Series(str(tmp_path / "folder" / "heap.pb.gz"), 1.0)
    series.write(profile_of(EXAMPLE))
    assert capsys.readouterr().err.startswith(f"calm: cannot write {tmp_path}/folder/heap.1.pb.gz: ")
    (tmp_path / "folder").mkdir()
    series.write(profile_of(EXAMPLE))
    assert stacks_by_frames(pprof.read(str(tmp_path / "folder" / "heap.2.pb.gz"))) == EXAMPLE


@contextmanager
def watching(pid: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`calm heap run --pid`, once it has switched the profile on and has read it."""
    command = [
        sys.executable,
        "-m",
        "calm",
        "heap",
        "run",
        "--pid",
        str(pid),
        "--for",
        "1h",
        "--every",
        "16k",
    ]
    command += ["--each", "100ms", "--pprof", str(folder / "heap.pb.gz")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            wait_until(lambda: (folder / "heap.1.pb.gz").exists() or process.poll() is not None)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_early(program: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The profile is off again."""
    with started(program) as running:
        running.do("threads 1")
        with watching(running.pid, tmp_path) as process:
            process.send_signal(number)
            out, error = process.communicate()
            assert process.returncode == code, error
            assert ("thread_site" in out) == (number == signal.SIGINT)
        with heap_live.attached(running.pid) as seen:
            assert seen.snapshot().mean_bytes == 0


def test_process_ends(program: Path, tmp_path: Path) -> None:
    with started(program) as running:
        running.do("threads 1")
        with watching(running.pid, tmp_path) as process:
            running.process.kill()
            running.process.wait()
            out, error = process.communicate()
            assert process.returncode == 0, error
            assert f"note: process {running.pid} has ended" in out


def test_foreign(calm: Calm, program: Path) -> None:
    with started(program, preload=None) as running:
        running.do("keep 1 1")
        done = calm("heap", "run", "--pid", running.pid)
        assert done.returncode == 1
        assert done.stderr.startswith(f"calm: process {running.pid} does not run calmalloc: it has no heap ")
        assert f"`calm explain {running.pid}`" in done.stderr
    with started(program, preload=BUILD / "libptlbmalloc2.so") as running:
        running.do("keep 1 1")
        done = calm("heap", "run", "--pid", running.pid)
        assert done.returncode == 1
        assert "runs ptlbmalloc2" in done.stderr
        assert "which has no heap profile that can be read live" in done.stderr


def test_no_such_process(calm: Calm) -> None:
    done = calm("heap", "run", "--pid", 2**22 - 1)
    assert done.returncode == 1
    assert done.stderr == f"calm: there is no process {2**22 - 1}\n"


def test_not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refused(_: int) -> Iterator[None]:
        raise PermissionError
        yield

    monkeypatch.setattr(proc, "memory", refused)
    with (
        pytest.raises(CalmError, match=f"process {os.getpid()} may not be read"),
        heap_live.attached(os.getpid()),
    ):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((0, b"otherwis"), "does not describe its heap profile as this calm expects it"),
        ((8, struct.pack("<I", 2)), "has a heap profile of version 2; this calm reads 1"),
        ((12, struct.pack("<I", 20)), "does not describe its heap profile"),
        ((40, struct.pack("<I", 0)), "does not describe its heap profile"),
        ((84, struct.pack("<I", 8)), "does not describe its heap profile"),
        ((104, struct.pack("<I", 1 << 30)), "does not describe its heap profile"),
    ],
)
def test_other_layout(program: Path, change: tuple[int, bytes], message: str) -> None:
    """Of another version, or damaged."""
    at, data = change
    with started(program) as running, proc.memory(running.pid) as read:
        running.do("keep 1 1")
        table = heap_live._table(running.pid, read)
        assert heap_live._layout(read, table.samples)

        def changed(address: int, size: int) -> bytes | None:
            found = bytearray(read(address, size) or b"")
            for index, byte in enumerate(data):
                if 0 <= (place := table.samples + at + index - address) < size:
                    found[place] = byte
            return bytes(found)

        with pytest.raises(CalmError, match=message):
            heap_live._layout(changed, table.samples)


_LAYOUT = heap_live._Layout(
    *(0x1000, 0x2000, 0x2008, 1024, 64, 100),
    *(0, 8, 16, 20, 24, 32, 40, 48),
    *(96, 0, 4, 8, 24, 40, 56, 72, 80, 88),
)


def test_samples_that_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hostile process: what is read and kept is bounded, whatever the numbers say."""

    def snapshot(sequence: int, layout: heap_live._Layout) -> tuple[heap_live.Snapshot, int, int]:
        reads = size_read = 0

        def read(address: int, size: int) -> bytes | None:
            nonlocal reads, size_read
            reads, size_read = reads + 1, size_read + size
            if address == 0x1000 + layout.stacks_end:
                return struct.pack("<I", layout.max_stacks)
            if address == 0x1000 + layout.addresses_end:
                return struct.pack("<I", 1 << 12)
            if size % layout.stack_bytes == 0:
                stack = struct.pack("<III", sequence, 0, layout.max_depth).ljust(layout.stack_bytes, b"\0")
                return stack * (size // layout.stack_bytes)
            if size == 8 << 12:
                return struct.pack("<4096Q", *range(4096))
            return bytes(size)

        return heap_live._Reader(read, layout).snapshot(1005), reads, size_read

    many = _LAYOUT._replace(max_stacks=1 << 16, max_depth=1 << 10)
    found, reads, _ = snapshot(1, many)
    assert found.torn == (1 << 16) - 1
    assert reads < 10_000
    kept = 0

    def counted(*_: object) -> list[int]:
        nonlocal kept
        kept += 1
        return [0] * 8

    monkeypatch.setattr(heap_live._Reader, "_values", counted)
    snapshot(2, many)
    assert kept == 4, "stacks have addresses of their own"
    found, _, size_read = snapshot(2, many._replace(max_stacks=1 << 20, stack_bytes=1 << 16))
    assert found.stacks == {}
    assert size_read < 100


def test_torn() -> None:
    """A stack that is being changed is read again, and dropped if that goes on."""
    layout = _LAYOUT
    memory = {
        0x2000: struct.pack("<QQ", 4096, 4096),
        0x1000: struct.pack("<QQIIQQQQ", 0x3000, 0x4000, 3, 4, 0, 7, 5, 9),
    }
    memory[0x4000] = struct.pack("<4Q", 10, 11, 12, 13)

    def stack(sequence: int, first: int, count: int, epoch: int = 9) -> bytes:
        head = struct.pack("<IIII8x", sequence, first, 2, 0)
        return head + struct.pack(
            "<QQQQQQQdd", count << 10, 100, 1 << 10, 50, 1 << 10, 70, epoch, 2048.0, 4096.0
        )

    def reader(sequences: Callable[[int], int]) -> heap_live.Snapshot:
        reads = 0

        def read(address: int, size: int) -> bytes | None:
            nonlocal reads
            reads += address >= 0x3000 and address < 0x4000
            memory[0x3000] = bytes(96) + stack(sequences(reads), 0, 2) + stack(4, 2, 3, epoch=8)
            for begin, data in memory.items():
                if begin <= address < begin + len(data):
                    return data[address - begin : address - begin + size]
            return None

        return heap_live._Reader(read, layout).snapshot(1005)

    whole = reader(lambda _: 2)
    assert whole.torn == 0
    assert whole.stacks == {
        (10, 11): [2, 100, 1, 50, 1, 70, 2, 1001],
        (12, 13): [3, 100, 1, 50, 1, 50, 2, 1001],
    }
    assert reader(lambda reads: 3 if reads < 5 else 4).stacks == whole.stacks
    for never in (lambda reads: reads * 2, lambda _: 1):
        torn = reader(never)
        assert torn.torn == 1
        assert list(torn.stacks) == [(12, 13)]


# --- of a program


def test_run(calm: Calm, program: Path, tmp_path: Path) -> None:
    """The peak of a program that frees all, its own status and output, and lifetimes."""
    document = tmp_path / "heap.json"
    done = calm(
        *("heap", "run", "--every", "64k", "--json", document, "--", program),
        process=True,
        input="keep 64 1048576\ndrop\nchurn 100000 1000\nnonsense\n",
    )
    assert done.returncode == 2
    assert done.stdout == "1\n2\n3\n"
    found = msgspec.json.decode(document.read_bytes(), type=HeapProfile)
    assert found.command == [str(program)]
    assert about(by_function(found, "peak_space")["keep_site"], 64 * MIB)
    assert by_function(found, "inuse_space").get("keep_site", 0) == 0
    assert about(by_function(found, "alloc_space")["churn_site"], 100e6)
    assert by_function(found, "freed_lifetime")["keep_site"] > 0
    assert re.search(r"in use at the peak +share +blocks +lifetime", done.stderr)
    assert re.search(r"6\d\.\d MiB .*keep_site ← main", done.stderr)
    assert re.search(r"churn_site ← main.*\(heap_program\.c:\d+\)", done.stderr)


def test_run_vanishes(program: Path, tmp_path: Path) -> None:
    """A program that ends without exit(3) has no file: what was last read of it is reported."""
    path = tmp_path / "heap.pb.gz"
    command = [sys.executable, "-m", "calm", "heap", "run", "--every", "16k", "--each", "100ms"]
    command += ["--pprof", str(path), "--", str(program)]
    pipe = subprocess.PIPE
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        running = Started(process)
        running.do("keep 10000 2000")

        def has_kept() -> bool:
            files = list(tmp_path.glob("heap.*.pb.gz"))
            read = (by_function(pprof.read(str(each)), "inuse_space") for each in files)
            return any(about(found.get("keep_site", 0), 20e6) for found in read)

        wait_until(has_kept)
        assert process.stdin is not None
        process.stdin.write("vanish\n")
        process.stdin.close()
        process.stdin = None
        _, error = process.communicate()
    assert process.returncode == 5
    assert "note: the program ended without exit(3): this is what it had about" in error
    assert about(by_function(pprof.read(str(path)), "inuse_space")["keep_site"], 20e6)


def test_run_of_nothing(calm: Calm, program: Path) -> None:
    done = calm("heap", "run", "--", program, process=True, input="vanish\n")
    assert done.returncode == 1
    assert done.stderr == "calm: the program ended without exit(3), and wrote no profile\n"


def test_run_of_several(calm: Calm, program: Path, tmp_path: Path) -> None:
    """The process with the highest peak is reported, which is neither the first nor the last."""
    document = tmp_path / "heap.json"
    script = "; ".join(f"echo keep {count} 1048576 | {program}" for count in (8, 64, 16))
    done = calm("heap", "run", "--every", "64k", "--json", document, "--", "sh", "-c", script, process=True)
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(document.read_bytes(), type=HeapProfile)
    assert about(by_function(found, "peak_space")["keep_site"], 64 * MIB)
    assert re.search(r"note: \d processes wrote profiles: this is the one with the highest peak", done.stderr)


def test_run_refusals(calm: Calm, program: Path, tmp_path: Path) -> None:
    def refused(*words: str | Path, env: dict[str, str] | None = None) -> str:
        done = calm("heap", "run", *words, env=env or {})
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
        return done.stderr

    assert "either a command to run, or --pid" in refused()
    assert "either a command to run, or --pid" in refused("--pid", "1", "--", program)
    assert "--for goes with --pid" in refused("--for", "1s", "--", program)
    assert "--each needs --pprof FILE" in refused("--each", "1s", "--", program)
    assert "2g is not in the range 1 to 1G" in refused("--every", "2g", "--", program)
    assert "0 is not in the range 1 to 1G" in refused("--every", "0", "--", program)
    assert "--type nothing: there is alloc_objects, " in refused("--type", "nothing", "--", program)
    options = {"CALM_OPTIONS": "memory_per_cpu=32,profile=1m"}
    assert "CALM_OPTIONS has profile=1m" in refused("--", program, env=options)
    done = calm("heap", "run", "--", tmp_path / "missing")
    assert done.returncode == 127
    done = calm("heap", "run", "--pprof", tmp_path / "no" / "file", "--", program)
    assert done.returncode == 1
    assert "no such directory" in done.stderr


# --- of files


def test_difference(calm: Calm, tmp_path: Path) -> None:
    """By functions and lines; what has shrunk is negative, and left out of forms that have no such thing."""
    earlier, later = tmp_path / "earlier.pb.gz", tmp_path / "later.pb.gz"
    other = (MAIN, frame("other"))
    earlier.write_bytes(pprof.encode(profile_of(EXAMPLE)))
    changed = {(MAIN, LONG): [2 * value for value in EXAMPLE[MAIN, LONG]], other: [1, 2, 3, 4, 5, 6, 7, 8]}
    later.write_bytes(pprof.encode(profile_of(changed)))
    document, folded = tmp_path / "heap.json", tmp_path / "folded"
    done = calm(
        "heap", "show", "--json", document, "--type", "alloc_space", "--folded", folded, later, earlier
    )
    assert done.returncode == 0
    assert (
        done.stderr
        == "calm: stacks that shrank are left out of folded stacks, speedscope's file and the page\n"
    )
    assert f"{later} minus {earlier}" in done.stdout
    assert "-64.0 MiB" in done.stdout
    found = msgspec.json.decode(document.read_bytes(), type=HeapProfile)
    assert stacks_by_frames(found) == {
        (MAIN, LONG): EXAMPLE[MAIN, LONG],
        other: changed[other],
        (MAIN, SHORT): [-value for value in EXAMPLE[MAIN, SHORT]],
    }
    assert folded.read_text() == f"main;Cache::store(std::string) {10 << 20}\nmain;other 2\n"
    done = calm("heap", "show", later, later)
    assert "nothing differs" in done.stdout
    # And the document itself is read.
    assert "-64.0 MiB" in calm("heap", "show", document).stdout


def go() -> str:
    found = shutil.which("go") or "/usr/local/go/bin/go"
    if not Path(found).exists():
        pytest.skip("go is not installed: scripts/setup check installs golang-go")
    return found


def test_pprof(tmp_path: Path) -> None:
    """Go's own reader has all amounts, functions and lines."""
    path = tmp_path / "heap.pb.gz"
    profile = profile_of(EXAMPLE, mean_bytes=4096, notes=["a note"])
    path.write_bytes(pprof.encode(profile))

    def tool(*words: str) -> str:
        command = [go(), "tool", "pprof", *words, str(path)]
        env = os.environ | {"PPROF_TMPDIR": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
        return done.stdout

    raw = tool("-raw")
    assert "Period: 4096" in raw
    assert "inuse_space/bytes[dflt]" in raw
    for values in EXAMPLE.values():
        assert re.search(rf"^ +{' +'.join(map(str, values))}: ", raw, re.MULTILINE)
    # The column after the line is printed by newer releases of Go only.
    assert re.search(r"Cache::store\(std::string\)\.c:20(:0)? s=0\(Cache::store\(std::string\)\)", raw)
    assert "a note" in tool("-comments")
    assert re.search(r"9MB +100% +100% +9MB +100% +Cache::store", tool("-top"))
    again = pprof.read(str(path))
    assert stacks_by_frames(again) == EXAMPLE
    assert (again.types, again.mean_bytes, again.notes) == (profile.types, 4096, ["a note"])
    # The program's file is named, whichever frame came first.
    first = Frame("_dl_start_user", "ld-linux-x86-64.so.2")
    stacks = {(first, *frames): values for frames, values in EXAMPLE.items()}
    path.write_bytes(pprof.encode(profile_of(stacks)))
    assert re.search(r"^File: program$", tool("-top"), re.MULTILINE)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    file: str | None = None
    line: int | None = None
    col: int | None = None


class _Shared(msgspec.Struct, forbid_unknown_fields=True):
    frames: list[_File]


class _Sampled(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """SampledProfile of speedscope's schema."""

    type: Literal["sampled"]
    name: str
    unit: Literal["none", "nanoseconds", "microseconds", "milliseconds", "seconds", "bytes"]
    start_value: float
    end_value: float
    samples: list[list[int]]
    weights: list[float]


class _Speedscope(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Its file."""

    schema: Literal["https://www.speedscope.app/file-format-schema.json"] = msgspec.field(name="$schema")
    shared: _Shared
    profiles: list[_Sampled]
    active_profile_index: int
    exporter: str


def test_speedscope(calm: Calm, tmp_path: Path) -> None:
    source, path = tmp_path / "heap.pb.gz", tmp_path / "heap.speedscope.json"
    source.write_bytes(pprof.encode(profile_of(EXAMPLE)))
    done = calm("heap", "show", "--type", "peak_space", "--speedscope", path, source)
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(path.read_bytes(), type=_Speedscope)
    assert [each.name for each in found.profiles] == [each.name for each in TYPES]
    assert found.profiles[found.active_profile_index].name == "peak_space"
    for at, each in enumerate(found.profiles):
        assert len(each.samples) == len(each.weights)
        assert each.end_value == sum(each.weights) == sum(values[at] for values in EXAMPLE.values())
        assert all(index < len(found.shared.frames) for sample in each.samples for index in sample)
    assert found.shared.frames[0] == _File("main", "main.c", 1)


def test_page(tmp_path: Path) -> None:
    """The page's data; test_profile_html.py has it in a browser."""
    text = html.page(profile_of(EXAMPLE), "alloc_space")
    assert text.isascii()
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)[0])
    assert next(iter(data["nouns"])) == "alloc_space"
    assert data["units"]["alloc_space"] == "bytes"
    weights = [each["weight"] for each in data["stacks"] if each["kind"] == "alloc_space"]
    assert weights == [64 << 20, 10 << 20]
    assert "Cache::store(…)" in {each["label"] for each in data["frames"]}
    assert (
        "</script>"
        not in html.page(profile_of({(frame("</script><b>"),): [1] * 8}), None)
        .split('id="data">')[1]
        .split("</script>")[0]
    )
    assert "Nothing was sampled." in html.page(profile_of({}), None)


def test_text_forms_of_odd_names() -> None:
    odd = profile_of({(frame("a;b\nc"), frame("")): [1] * 8, (): [2] * 8})
    assert formats.folded(odd, None) == "? 2\na:b c;? 1\n"
    assert pprof.encode(odd)


def test_lifetimes() -> None:
    """The mean of freed blocks; of what is mostly in use, an age."""
    profile = profile_of(EXAMPLE)
    lived = {profile.frames[stack.frames[-1]]: summary.lifetime(profile, stack) for stack in profile.stacks}
    assert lived == {SHORT: "2 µs", LONG: "> 60.000 s"}
    stack = HeapStack((0,), [1, 2])
    others = HeapProfile(
        command=[], types=[SampleType("a", "count"), SampleType("b", "bytes")], frames=[MAIN], stacks=[stack]
    )
    assert summary.lifetime(others, stack) == ""


def others(functions: bool = True, leaf: str = "leaf", drop: str = "") -> bytes:
    """As another program writes it: packed numbers or not, lines of inlined functions, one label."""
    strings = ["", "cpu", "nanoseconds", "main", leaf, "x.c", "/bin/x", "inner", "label", drop]
    lines = field(4, field(1, 3) + field(2, 7)) + field(4, field(1, 2) + field(2, 5))
    return b"".join(
        [
            field(1, field(1, 1) + field(2, 2)),
            field(2, field(1, [2, 1]) + field(2, [30]) + field(3, field(1, 8) + field(3, 1))),
            field(2, field(1, 2) + field(1, 1) + field(2, 12)),
            field(3, field(1, 1) + field(2, 4096) + field(3, 8192) + field(5, 6)),
            field(4, field(1, 1) + field(2, 1) + field(3, 4100) + field(4, field(1, 1) + field(2, 3))),
            field(4, field(1, 2) + field(2, 1) + field(3, 4200) + (lines if functions else b"")),
            field(5, field(1, 1) + field(2, 3) + field(4, 5)),
            field(5, field(1, 2) + field(2, 4) + field(4, 5)),
            field(5, field(1, 3) + field(2, 7) + field(4, 5)),
            *(field(6, text.encode()) for text in strings),
            field(7, strings.index(drop)),
        ]
    )


def test_of_another_program(calm: Calm, tmp_path: Path) -> None:
    path = tmp_path / "cpu.prof"
    path.write_bytes(others())
    found = pprof.read(str(path))
    (stack,) = stacks_by_frames(found).items()
    assert stack == (
        (
            Frame("main", "x", source="x.c:3"),
            Frame("leaf", "x", source="x.c:5"),
            Frame("inner", "x", inlined=True, source="x.c:7"),
        ),
        [42],
    )
    done = calm("heap", "show", path)
    assert done.returncode == 0
    assert "inner ← leaf ← main (x.c:7)" in done.stdout
    path.write_bytes(others(functions=False))
    assert [each.function for each in next(iter(stacks_by_frames(pprof.read(str(path)))))] == [
        "main",
        "x+0x68",
    ]


@pytest.mark.parametrize(
    "drop", ["leaf", "free|le.f", "x|(l|m)eaf", "p?valloc|.*eaf", "(un)?le.*", r"leaf|a\[\]"]
)
def test_dropped_functions(tmp_path: Path, drop: str) -> None:
    path = tmp_path / "cpu.prof"
    path.write_bytes(others(drop=drop))
    found = pprof.read(str(path))
    assert stacks_by_frames(found) == {(Frame("main", "x", source="x.c:3"),): [42]}
    assert found.notes == []


def test_the_librarys_own_functions_are_dropped(tmp_path: Path) -> None:
    """By the names that it writes into files of static programs."""
    (names,) = re.findall(rb"allocate_slow\|[^\0]*", LIBRARY.read_bytes())
    path = tmp_path / "heap.prof"
    for name in ("allocate_slow", "pvalloc", "calm_free", "operator new[](unsigned long)"):
        path.write_bytes(others(leaf=name, drop=names.decode()))
        ((frames, _),) = stacks_by_frames(pprof.read(str(path))).items()
        assert [each.function for each in frames] == ["main"]


@pytest.mark.parametrize(
    "drop",
    ["(a+)+b", "(a|a)*b", "a?" * 40 + "a" * 40, ".*a.*a" * 20 + "b", "(", "x" * 70_000],
    ids=["nested", "choices", "optional", "repeated", "no expression", "long"],
)
def test_dropped_functions_that_would_take_for_ever(tmp_path: Path, drop: str) -> None:
    path = tmp_path / "cpu.prof"
    path.write_bytes(others(leaf="a" * 2000, drop=drop))
    found = pprof.read(str(path))
    assert "its drop_frames is no list of names" in found.notes[0]
    ((frames, _),) = stacks_by_frames(found).items()
    assert len(frames) == 3


def test_a_file_that_is_too_large(calm: Calm, tmp_path: Path) -> None:
    """Or that unpacks to too much: no more than the bound is read."""
    sparse, packed = tmp_path / "sparse", tmp_path / "packed"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    packed.write_bytes(gzip.compress(bytes(pprof._MAX_BYTES + 1)))
    for path in (sparse, packed):
        done = calm("heap", "show", path)
        assert (done.returncode, done.stderr) == (2, f"calm: {path} has more than 64 MiB, unpacked\n")


def bad_files() -> Iterator[tuple[str, bytes, str]]:
    good = pprof.encode(profile_of(EXAMPLE))
    plain = gzip.decompress(good)
    yield "empty", b"", "is not a whole profile of pprof: it has no types of samples"
    yield "text", b"hello, world\n", "is not a whole profile of pprof: "
    yield "cut", plain[: len(plain) // 2], "is not a whole profile of pprof: "
    yield "cut gzip", good[:-20], "is compressed, and damaged or cut short"
    yield "bad gzip", good[:30] + b"\0\0\0" + good[33:], "is compressed, and damaged or cut short"
    yield "gzip of no profile", gzip.compress(b"hello"), "is not a whole profile of pprof: "
    yield "gperftools", b"heap profile: 1: 2 [3: 4] @ heapprofile\n", "text form of gperftools or jemalloc"
    yield "jemalloc", b"heap_v2/524288\n  t*: 1: 2 [0: 0]\n", "text form of gperftools or jemalloc"
    yield "other json", b'{"schema": "calm-stat", "version": 1}', "is of the schema calm-stat"
    yield "cut json", b'{"schema": "calm-heap"', "is not JSON, or was cut short"
    missing = others().replace(field(1, 1) + field(2, 12), field(1, 9) + field(2, 12))
    yield "missing location", missing, "is not a whole profile of pprof: "
    string = field(1, field(1, 99) + field(2, 2)) + others()
    yield "missing text", string, "it names a text that it does not have"


BAD_FILES = list(bad_files())


@pytest.mark.parametrize(("name", "data", "message"), BAD_FILES, ids=[name for name, _, _ in BAD_FILES])
def test_bad_file(calm: Calm, tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    done = calm("heap", "show", path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_every_cut() -> None:
    """No truncation, and no changed byte, is more than a FormatError."""
    data = gzip.decompress(pprof.encode(profile_of(EXAMPLE)))
    changed = (
        data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :] for at in range(len(data)) for bit in (1, 128)
    )
    for each in (*(data[:end] for end in range(len(data))), *changed):
        with suppress(protobuf.FormatError):
            pprof._profile("x", pprof._parse(each))


def test_bad_arguments(calm: Calm, tmp_path: Path) -> None:
    path = tmp_path / "heap.pb.gz"
    path.write_bytes(pprof.encode(profile_of(EXAMPLE)))
    done = calm("heap", "show", tmp_path / "missing")
    assert (done.returncode, done.stderr) == (
        2,
        f"calm: cannot read {tmp_path}/missing: No such file or directory\n",
    )
    done = calm("heap", "show", tmp_path)
    assert (done.returncode, done.stderr) == (2, f"calm: cannot read {tmp_path}: Is a directory\n")
    done = calm("heap", "show", "--type", "cpu", path)
    assert done.returncode == 2
    assert "--type cpu: the profile has alloc_objects, alloc_space, " in done.stderr
    done = calm("heap", "show", "--pprof", "/dev/full", path)
    assert (done.returncode, done.stderr) == (1, "calm: cannot write /dev/full: No space left on device\n")
    other = tmp_path / "cpu.prof"
    other.write_bytes(others())
    done = calm("heap", "show", path, other)
    assert done.returncode == 2
    assert "have no type of values in common" in done.stderr


# --- its parts


def test_numbers() -> None:
    for value in (0, 1, 127, 128, 1 << 32, -1, -(1 << 63), (1 << 63) - 1):
        ((tag, found),) = protobuf.fields(protobuf.number(7 << 3) + protobuf.number(value))
        assert isinstance(found, int)
        assert (tag, protobuf.signed(found)) == (7, value)
    # Fields of fixed width are passed over.
    assert list(protobuf.fields(b"\x09" + bytes(8) + b"\x15" + bytes(4) + b"\x08\x05")) == [(1, 5)]
    for bad in (b"\x08", b"\x0a\x05a", b"\x08" + b"\xff" * 10 + b"\x01", b"\x0b"):
        with pytest.raises(protobuf.FormatError):
            list(protobuf.fields(bad))


def test_merged() -> None:
    assert merged([((MAIN,), [1, 2]), ((MAIN,), [-1, 0]), ((SHORT,), [0, 0])]) == {(MAIN,): [0, 2]}
    assert merged([((MAIN,), [1]), ((MAIN,), [-1])]) == {}


def test_functions_without_tools(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's own symbols name what no tool does; another file of that name is not used."""
    monkeypatch.setattr("calm.core.symbols.shutil.which", lambda _: None)
    with elf.opened(program) as file:
        symbol = file.get_section_by_name(".symtab").get_symbol_by_name("keep_site")[0]
        address = symbol.entry.st_value
    segment = next(
        each for each in elf.segments(program) if each.address <= address < each.address + each.size
    )
    offset = address - segment.address + segment.offset
    build_id = elf.build_id(program)
    assert re.fullmatch("[0-9a-f]{40}", build_id)
    for wanted in ("", build_id):
        place = Place(str(program), offset + 1, wanted)
        assert places.frames([place]) == ({place: (Frame("keep_site", "heap_program"),)}, [])
    place = Place(str(program), offset + 1, "00" * 20, "renamed")
    frames, notes = places.frames([place])
    assert frames[place] == (Frame(f"renamed+{offset + 1:#x}", "renamed"),)
    assert notes == [
        f"{program} is not the file that the profile was recorded of: its functions are not named"
    ]
    gone = Place("/missing/program", 16)
    assert places.frames([gone])[0][gone] == (Frame("program+0x10", "program"),)


def test_a_line_that_is_no_decimal_number() -> None:
    """In a document of another's: "²" is a digit, and no number."""
    profile = HeapProfile(
        command=[],
        types=[SampleType("a", "count")],
        frames=[Frame("f", "m", source="f.c:²")],
        stacks=[HeapStack((0,), [1])],
        default_type="a",
    )
    assert '"file":"m"' in formats.speedscope(profile, "a")
    assert pprof.encode(profile)
