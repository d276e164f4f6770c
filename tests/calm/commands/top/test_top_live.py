"""calm top's live view, on a terminal of our own: keys, sizes, and that all is as it was when it ends."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest
from calm_helpers import ROOT
from waiting import TIMEOUT_S

from calm.commands.top.terminal import keys_of

IN, OUT = b"\x1b[?1049h", b"\x1b[?1049l"
CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal with calm top on it."""

    def __init__(self, *arguments: str, size: tuple[int, int] = (24, 110)) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(*size)
        self.modes = termios.tcgetattr(self.slave)
        drop = ("COLUMNS", "LINES")
        env = {name: value for name, value in os.environ.items() if name not in drop}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "calm", "top", "-d", "200ms", *arguments],
            cwd=ROOT,
            env=env | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.output = b""

    def resize(self, lines: int, columns: int) -> None:
        self.lines, self.columns = lines, columns
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def read(self, seconds: float) -> None:
        ready, _, _ = select.select([self.master], [], [], seconds)
        if ready:
            self.output += os.read(self.master, 1 << 16)

    def frame(self) -> list[str]:
        """The lines that were drawn last, if all of them have arrived; each is padded to its full length."""
        frames = self.output.split(b"\x1b[H")
        text = CODE.sub("", frames[-1].decode(errors="replace")).replace("\r", "")
        lines = text.split("\n")
        if len(lines) != self.lines or any(len(line) != self.columns for line in lines):
            return []
        return [line.rstrip() for line in lines]

    def until(self, pattern: str) -> list[str]:
        """Waits for a frame in which a line is so."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            self.read(0.05)
            frame = self.frame()
            if any(re.search(pattern, line) for line in frame):
                return frame
            assert time.monotonic() < deadline, f"no {pattern} in {frame}"
            assert self.process.poll() is None, self.output[-2000:]

    def ends(self) -> int:
        """Waits for the end, and sees that the terminal is as it was."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None:
            self.read(0.05)
            assert time.monotonic() < deadline
        while select.select([self.master], [], [], 0)[0]:
            self.output += os.read(self.master, 1 << 16)
        assert self.output.count(IN) == self.output.count(OUT)
        assert self.output.rfind(b"\x1b[?25h") > self.output.rfind(b"\x1b[?25l")
        assert termios.tcgetattr(self.slave) == self.modes
        assert b"Traceback" not in self.output
        return self.process.returncode

    @property
    def after(self) -> str:
        """What it left behind on the usual screen."""
        return CODE.sub("", self.output.rpartition(OUT)[2].decode(errors="replace"))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def open_terminal() -> Iterator[type[Terminal]]:
    opened: list[Terminal] = []

    class Closed(Terminal):
        def __init__(self, *arguments: str, size: tuple[int, int] = (24, 110)) -> None:
            opened.append(self)
            super().__init__(*arguments, size=size)

    yield Closed
    for terminal in opened:
        terminal.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_keys(open_terminal: type[Terminal], sleeper: subprocess.Popen[bytes]) -> None:
    top = open_terminal("-p", f"{sleeper.pid},{os.getpid()}")
    frame = top.until(r"q quit  s sort: rss ")
    assert len(frame) == 24
    assert termios.tcgetattr(top.slave) != top.modes
    assert "2 processes, every 0.2 s" in frame[0]
    rows = [int(line.split()[0]) for line in frame if re.match(r"\s+\d+ ", line)]
    assert rows == [os.getpid(), sleeper.pid]
    top.press(b"r")
    top.until(r"sort: rss \(reversed\)")
    top.press(b"rs")
    top.until(r"sort: change ")
    top.press(b"S")
    top.until(r"sort: rss ")
    top.press(b"?")
    top.until(r"sort by the next column")
    top.press(b"\x1b")
    top.until(r"q quit")
    top.press(b"/slee")
    frame = top.until(r"^/slee_$")
    top.press(b"x\x7f\r")
    frame = top.until(r"filter: slee")
    assert [int(line.split()[0]) for line in frame if re.match(r"\s+\d+ ", line)] == [sleeper.pid]
    top.press(b"\r")
    top.until(rf"^{sleeper.pid} sleep 1000")
    top.until(r"^allocator +glibc")
    top.press(b"q")
    top.until(r"filter: slee")
    top.press(b"\x1b")
    top.until(rf"{os.getpid()} ")
    top.press(b"\x1b[B\x1b[B\r")
    top.until(rf"^{sleeper.pid} sleep 1000")
    top.press(b"\x1b[Zq")  # a key that means nothing here
    top.until(r"PID COMMAND")
    top.press(b"q")
    assert top.ends() == 0


def test_size_changes(open_terminal: type[Terminal], sleeper: subprocess.Popen[bytes]) -> None:
    top = open_terminal("-p", f"{sleeper.pid},{os.getpid()}", "-d", "30s", size=(24, 170))
    top.process.send_signal(signal.SIGWINCH)
    deadline = time.monotonic() + TIMEOUT_S
    while "sampling" not in "".join(top.frame()):
        top.read(0.05)
        assert time.monotonic() < deadline
    # Long before the next sample.
    top.press(b" ")
    frame = top.until("KEPT/LIMIT")
    for lines, columns in ((10, 60), (3, 20), (40, 90)):
        top.resize(lines, columns)
        deadline = time.monotonic() + TIMEOUT_S
        while not (frame := top.frame()):
            top.read(0.05)
            assert time.monotonic() < deadline
    assert not any("KEPT/LIMIT" in line for line in frame)
    top.press(b"q")
    assert top.ends() == 0


def test_one_process_has_its_history(open_terminal: type[Terminal], sleeper: subprocess.Popen[bytes]) -> None:
    top = open_terminal(str(sleeper.pid))
    frame = top.until(r"^RSS .*█{3}")
    assert frame[3] == f"{sleeper.pid} sleep 1000"
    assert any(line.startswith("CPU, %") for line in frame)
    assert any("neither calmalloc nor ptlbmalloc2" in line for line in frame)
    top.press(b"q")
    assert top.ends() == 0


def test_a_process_that_ends_leaves_word(
    open_terminal: type[Terminal], sleeper: subprocess.Popen[bytes]
) -> None:
    top = open_terminal(str(sleeper.pid))
    top.until(r"^RSS ")
    sleeper.kill()
    sleeper.wait()
    assert top.ends() == 0
    assert f"calm: process {sleeper.pid} (sleep) has ended" in top.after


def test_looks_that_are_counted_leave_the_last(
    open_terminal: type[Terminal], sleeper: subprocess.Popen[bytes]
) -> None:
    top = open_terminal(str(sleeper.pid), "-n", "2")
    assert top.ends() == 0
    assert re.search(rf"^\s*{sleeper.pid} sleep 1000 ", top.after, re.MULTILINE)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_the_terminal_comes_back(
    open_terminal: type[Terminal], sleeper: subprocess.Popen[bytes], number: signal.Signals, code: int
) -> None:
    top = open_terminal(str(sleeper.pid))
    top.until(r"^RSS ")
    if number == signal.SIGINT:
        top.press(b"\x03")
    else:
        top.process.send_signal(number)
    assert top.ends() == code
    if number == signal.SIGINT:
        assert re.search(rf"^\s*{sleeper.pid} sleep 1000 ", top.after, re.MULTILINE)


def test_the_terminal_comes_back_from_an_error(sleeper: subprocess.Popen[bytes]) -> None:
    """An exception while it draws, as a fault of ours would be."""
    master, slave = pty.openpty()
    modes = termios.tcgetattr(slave)
    code = (
        "import sys; from calm.cli import main; from calm.commands.top import view\n"
        "def broken(*_): raise RuntimeError('a fault')\n"
        "view.detail = broken\n"
        f"sys.argv = ['calm', 'top', '-d', '100ms', '{sleeper.pid}']; main()"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
        )
        output = b""
        while select.select([master], [], [], 0)[0]:
            output += os.read(master, 1 << 16)
        assert done.returncode == 1
        assert b"internal error: RuntimeError: a fault" in done.stderr
        assert output.count(IN) == output.count(OUT) == 1
        assert termios.tcgetattr(slave) == modes
    finally:
        os.close(master)
        os.close(slave)


def test_stopped_and_continued(open_terminal: type[Terminal], sleeper: subprocess.Popen[bytes]) -> None:
    top = open_terminal(str(sleeper.pid))
    top.until(r"^RSS ")
    top.press(b"\x1a")
    pid, status = os.waitpid(top.process.pid, os.WUNTRACED)
    assert pid == top.process.pid
    assert os.WIFSTOPPED(status)
    assert termios.tcgetattr(top.slave) == top.modes
    top.read(0.2)
    assert top.output.count(IN) == top.output.count(OUT) == 1
    top.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + TIMEOUT_S
    while top.output.count(IN) < 2 and time.monotonic() < deadline:
        top.read(0.05)
    top.until(r"^RSS ")
    top.press(b"q")
    assert top.ends() == 0


def test_forty_columns_without_color(
    open_terminal: type[Terminal], sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    top = open_terminal("-p", f"{sleeper.pid},{os.getpid()}", size=(12, 40))
    top.until(r"^ *PID COMMAND +RSS")
    top.press(b"j")
    top.until(rf"{sleeper.pid} sleep")
    top.press(b"q")
    assert top.ends() == 0
    assert not re.search(rb"\x1b\[[0-9;]*\b3[0-7]m", top.output)


def test_keys_from_bytes() -> None:
    assert keys_of(b"q") == ["q"]
    assert keys_of(b"\x1b") == ["escape"]
    assert keys_of(b"\x1b[A\x1bOBx\r\x7f") == ["up", "down", "x", "enter", "backspace"]
    assert keys_of(b"\x1b[1;5Cq") == ["q"]
    assert keys_of("é/".encode()) == ["é", "/"]
    assert keys_of(b"\xff\x00\x01") == []
    assert keys_of(b"") == []
