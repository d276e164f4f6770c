"""calm trim: what processes give back, and what it says of those that do not."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from calm_helpers import ROOT, Calm
from commanded import commanded
from waiting import wait_until

from calm.commands import trim
from calm.core import allocators, control, counters, proc
from calm.core.control import Memory
from calm.core.counters import Table
from calm.core.errors import CalmError

MIB = 1 << 20
PAPER = "test_policy=paper,memory_per_cpu=160,background=off"
ASKED = 16


def row(calm: Calm, pid: int, *more: str) -> dict[str, object]:
    done = calm("trim", pid, *more, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["processes"]
    assert found["reason"] is None
    return dict(found)


@pytest.mark.parametrize("way", ["plain", "linked", "static"])
def test_gives_back(calm: Calm, way: str) -> None:
    """Preloaded, linked and in a static program; the figures fit each other."""
    with commanded(way, "calmalloc" if way == "plain" else "", PAPER) as program:
        program.do("hold 200 1000000", "free-every 2", "busy")
        before = proc.rss_kib(program.pid)
        found = row(calm, program.pid)
        assert found["library"] == "calmalloc"
        assert 80 * MIB < int(str(found["given_back_bytes"])) < 110 * MIB
        assert before - proc.rss_kib(program.pid) > 70 * 1024
        assert int(str(found["rss_before_kib"])) - int(str(found["rss_after_kib"])) > 70 * 1024


def test_keeps(calm: Calm) -> None:
    with commanded(preload="calmalloc", options=PAPER) as program:
        program.do("hold 200 1000000", "free-every 2", "busy")
        assert 30 * MIB < int(str(row(calm, program.pid, "--keep", "50M")["given_back_bytes"])) < 65 * MIB
        done = calm("trim", program.pid)
        assert done.returncode == 0
        assert f"{program.pid} commanded-plain: calmalloc gave back " in done.stdout
        assert " before, " in done.stdout


def test_offload(calm: Calm) -> None:
    with commanded(preload="calmoffload", options=PAPER) as program:
        program.do("hold 200 1000000", "free-every 2", "busy")
        assert int(str(row(calm, program.pid)["given_back_bytes"])) > 30 * MIB


def test_ptlbmalloc2(calm: Calm) -> None:
    """It frees the top of the arena: what is above the last block in use."""
    with commanded(preload="ptlbmalloc2") as program:
        program.do("hold 3000 100000", "free", "busy")
        assert row(calm, program.pid, "--timeout", "1min")["library"] == "ptlbmalloc2"


def test_child_answers_for_itself(calm: Calm) -> None:
    with commanded(preload="calmalloc", options=PAPER) as program:
        parent = program.pid
        child = program.do("hold 200 1000000", "free-every 2", "fork", "busy")
        assert child != parent
        assert row(calm, child)["pid"] == child
        done = calm("trim", parent, "--timeout", "50ms")
        assert done.returncode == 1
        assert "no thread of it has come to the allocator within 0.05 s" in done.stderr
        os.kill(parent, signal.SIGKILL)
        program.end()


def test_idle(calm: Calm) -> None:
    """It says so, and what is asked in vain does not happen later."""
    with commanded(preload="calmalloc", options=PAPER) as program:
        program.do("hold 200 1000000", "free-every 2")
        done = calm("trim", program.pid, "--timeout", "50ms")
        assert done.returncode == 1
        assert "the program is idle, or its threads find what they need in their caches" in done.stderr
        assert "MiB of free memory" in done.stderr
        rss = proc.rss_kib(program.pid)
        program.do("large")
        assert proc.rss_kib(program.pid) > rss - 10 * 1024


def test_stopped(calm: Calm) -> None:
    with commanded(preload="calmalloc") as program:
        program.do("busy")
        os.kill(program.pid, signal.SIGSTOP)
        wait_until(lambda: proc.stat(program.pid).state == "T")
        done = calm("trim", program.pid, "--timeout", "50ms")
        assert done.returncode == 1
        assert "it is stopped by a signal or a debugger" in done.stderr


def test_ends_meanwhile(calm: Calm) -> None:
    with commanded(preload="calmalloc") as program:
        timer = threading.Timer(0.3, program.process.kill)
        timer.start()
        done = calm("trim", program.pid, "--timeout", "10min")
        timer.join()
    assert done.returncode == 1
    assert f"process {program.pid}: it has ended" in done.stderr


def test_other_allocators(calm: Calm) -> None:
    """What they keep, and what makes them return it, as far as that is worth a line."""
    with commanded() as program:
        done = calm("trim", program.pid)
        assert done.returncode == 1
        assert done.stderr.endswith("is in it, nor a heap that is known to keep 8.0 MiB of free memory\n")
        program.do("hold 3000 100000", "free-every 2")
        done = calm("trim", program.pid, "--json")
        assert done.returncode == 1
        (found,) = json.loads(done.stdout)["processes"]
        (kept,) = found["elsewhere"]
        assert kept["heap"] == "glibc"
        assert 100 * MIB < kept["bytes"] < 160 * MIB
        assert f"`gdb -p {program.pid} -batch -ex 'call (int)malloc_trim(0)'`" in kept["step"]
        assert "glibc keeps " in done.stderr


def test_what_a_library_keeps(calm: Calm, tmp_path: Path) -> None:
    """A library brought a jemalloc: its free memory is named beside what ours gives back."""
    built = allocators.find_library("jemalloc")
    assert built is not None
    shutil.copy(built, tmp_path / "libother.so")
    program = f"""
import ctypes, sys
library = ctypes.CDLL("{tmp_path}/libother.so", ctypes.DEFAULT_MODE)
library.mallocx.restype = ctypes.c_void_p
library.dallocx.argtypes = [ctypes.c_void_p, ctypes.c_int]
blocks = [library.mallocx(ctypes.c_size_t({MIB}), 0) for _ in range(40)]
for block in blocks:
    ctypes.memset(block, 1, {MIB})
for block in blocks:
    library.dallocx(block, 0)
print("ready", flush=True)
sys.stdin.read()
"""
    env = os.environ | {
        "LD_PRELOAD": str(ROOT / "build/release/libcalmalloc.so"),
        "MALLOC_CONF": "dirty_decay_ms:-1",
        # Builds for preloading have threads' variables in a place that is small for opened libraries.
        "GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=65536",
    }
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        done = calm("trim", child.pid, "--timeout", "50ms", "--json")
        child.communicate()
    (found,) = json.loads(done.stdout)["processes"]
    assert found["library"] == "calmalloc"
    (kept,) = found["elsewhere"]
    assert kept["heap"] == "jemalloc"
    assert 30 * MIB < kept["bytes"] <= 41 * MIB
    assert 'call (int)mallctl("arena.4096.purge", 0, 0, 0, 0)' in kept["step"]


def test_heaps_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not said to be empty; and what trimmed has trimmed."""

    def refuse(_: int) -> None:
        raise CalmError("the memory may not be read")

    monkeypatch.setattr(trim, "_elsewhere", refuse)
    row = trim.Trimmed(1, "program", reason=trim._WITHOUT_US)
    trim._look_elsewhere(row)
    assert str(row.reason).endswith("is in it; the memory may not be read")
    row = trim.Trimmed(1, "program", given_back_bytes=5)
    trim._look_elsewhere(row)
    assert row.reason is None


def test_several(calm: Calm) -> None:
    """Each has its own line, and one that fails makes the status 1."""
    with commanded(preload="calmalloc") as program:
        program.do("busy")
        done = calm("trim", program.pid, 2**30, "--json")
        assert done.returncode == 1
        rows = json.loads(done.stdout)["processes"]
        assert [each["reason"] for each in rows] == [None, "there is no such process"]
        assert "1 of 2 processes did not trim" in done.stderr
        assert calm("trim", program.pid, program.pid).returncode == 0


AS_NOBODY = """
import os, sys
from calm.commands import trim
wish = trim._Wish(0, 1.0)
os.setgid(65534)
os.setuid(65534)
print(trim._trim(int(sys.argv[1]), wish).reason)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_no_permission() -> None:
    with commanded(preload="calmalloc") as program:
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(program.pid)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"another user's process: needs root: sudo calm trim {program.pid}\n"


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = PermissionError(13, "no")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(proc, "owner", lambda pid: 0)
    assert proc.refusal(1, denied) == "another user's process: needs root"
    monkeypatch.setattr(proc, "owner", lambda pid: 1000)
    monkeypatch.setattr(proc, "text", lambda name: "1\n")
    assert proc.refusal(1, denied) == "kernel.yama.ptrace_scope is 1: needs root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "needs CAP_SYS_PTRACE" in proc.refusal(1, denied)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing argument 'PID...'"),
        (["x"], "'x' is not a process id"),
        (["0"], "'0' is not a process id"),
        (["12", "--keep", "1X"], "'1X' is not a number of bytes"),
        (["12", "--keep", "99999999T"], "is not in the range 0 to 8388607T"),
        (["12", "--timeout", "5"], "not a duration"),
    ],
)
def test_bad_usage(calm: Calm, arguments: list[str], message: str) -> None:
    done = calm("trim", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


class Fake(Memory):
    """A block in this process, and a library that answers when the asker sleeps."""

    def __init__(self, **fields: object) -> None:
        super().__init__(os.open(os.devnull, os.O_RDWR))
        values = {"magic": b"calmctrl", "version": 1, "size": 56} | fields
        self.block = bytearray(
            struct.pack("<8sIIIIIIQQiI", values["magic"], values["version"], values["size"], *[0] * 8)
        )
        self.answer: Callable[[], None] = lambda: None
        self.writes: list[tuple[int, bytes]] = []

    def read(self, address: int, size: int) -> bytes | None:
        return bytes(self.block[address - 1000 : address - 1000 + size])

    def write(self, address: int, data: bytes) -> None:
        self.writes.append((address - 1000, data))
        self.block[address - 1000 : address - 1000 + len(data)] = data

    def word(self, at: int) -> int:
        return int.from_bytes(self.block[at : at + 4], "little")


def ask(fake: Fake, at: int = 1000) -> int:
    time = [0.0]

    def sleep(seconds: float) -> None:
        time[0] += seconds
        fake.answer()

    table = Table("calmalloc", (), control=at)
    return control.ask(fake, table, control.TRIM, 9, 1, clock=lambda: time[0], sleep=sleep)


def test_protocol() -> None:
    """`asked` is written last, and is the ticket's number."""
    fake = Fake()

    def answer() -> None:
        fake.block[20:24] = fake.block[16:20]
        fake.block[40:48] = (77).to_bytes(8, "little")
        fake.block[16:20] = bytes(4)

    fake.answer = answer
    assert ask(fake) == 77
    assert [at for at, _ in fake.writes] == [ASKED, 24, ASKED]
    assert fake.writes[2][1] == fake.writes[1][1][:4] != bytes(4)
    assert fake.writes[1][1][4:] == struct.pack("<IQ", control.TRIM, 9)


def test_withdrawn() -> None:
    fake = Fake()
    with pytest.raises(control.IdleError):
        ask(fake)
    assert fake.word(ASKED) == 0

    def begin() -> None:
        fake.block[52:56] = fake.block[24:28]

    fake.answer = begin
    with pytest.raises(control.TimedOutError, match="it has begun"):
        ask(fake)


@pytest.mark.parametrize(
    ("fields", "at", "message"),
    [
        ({"magic": b"calmstat"}, 1000, "does not begin as one"),
        ({"version": 2}, 1000, "of version 2; this calm writes 1"),
        ({"size": 1 << 20}, 1000, "does not begin as one"),
        ({}, 0, "its library takes no requests"),
    ],
)
def test_foreign_blocks(fields: dict[str, object], at: int, message: str) -> None:
    fake = Fake(**fields)
    with pytest.raises(control.NoControlError, match=message):
        ask(fake, at)
    assert not fake.writes


def test_refused_by_the_library() -> None:
    with commanded(preload="ptlbmalloc2") as program:
        program.do("hold 3000 100000", "free", "busy")
        with control.memory(program.pid) as there:
            (table,), _ = counters.Finder().tables(there.read, counters.images(program.pid))
            with pytest.raises(control.RefusedError, match="not implemented"):
                control.ask(there, table, control.PROFILE, 1 << 19, 60)


def test_one_at_a_time() -> None:
    """Two that ask at once wait for each other."""
    with commanded(preload="calmalloc") as program, control.memory(program.pid) as first:
        program.do("busy")
        with control.memory(program.pid) as second:
            (table,), _ = counters.Finder().tables(second.read, counters.images(program.pid))
            with first.locked(lambda: True), pytest.raises(control.TimedOutError, match="another calm"):
                control.ask(second, table, control.TRIM, 0, 0.05)
            assert control.ask(second, table, control.TRIM, 0, 60) >= 0
