"""The terminal of a live view: its other screen, keys as they are pressed, and at the end all as it was."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b": "escape",
    b"\x7f": "backspace",
    b"\x08": "backspace",
}
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_Handler = Callable[[int, FrameType | None], Any]


def keys_of(data: bytes) -> list[str]:
    """What was pressed: a character each, or a key's name. A sequence that means nothing here is dropped."""
    found = []
    while data:
        for sequence, name in _SEQUENCES.items():
            if sequence != b"\x1b" and data.startswith(sequence):
                found.append(name)
                data = data[len(sequence) :]
                break
        else:
            if data[:2] in (b"\x1b[", b"\x1bO"):
                end = next((i for i in range(2, len(data)) if 0x40 <= data[i] <= 0x7E), len(data) - 1)
                data = data[end + 1 :]
            elif data[:1] == b"\x1b":
                found.append("escape")
                data = data[1:]
            else:
                character = data[:1] if data[0] < 0x80 else data
                text = character.decode(errors="ignore")
                found += [one for one in text if one.isprintable()]
                data = data[len(character) :]
    return found


class Screen:
    """Used as a context. SIGTERM and SIGHUP end the program through it, as SystemExit."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stdout, markup=False, highlight=False, emoji=False)
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._modes: list[Any] | None = None
        self._live: Live | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._stopping = False

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, now."""
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(self._console.file.fileno())
            if columns > 0 and lines > 0:
                return columns, lines
        return 80, 24

    @property
    def has_unicode(self) -> bool:
        """Whether bars can be drawn."""
        return (self._console.encoding or "").lower().startswith("utf")

    def __enter__(self) -> "Screen":
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wake = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._handle(signal.SIGWINCH, _nothing)
        self._handle(signal.SIGTSTP, self._stop)
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handle(number, _end)
        try:
            self._take()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # A second signal must not come in between.
        for number in (*_ENDING, signal.SIGINT):
            self._handle(number, _nothing)
        self._give_back()
        signal.set_wakeup_fd(self._old_wake)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _handle(self, number: signal.Signals, handler: _Handler) -> None:
        old = signal.signal(number, handler)
        self._handlers.setdefault(number, old)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True

    def _take(self) -> None:
        if self._keys is not None:
            self._modes = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSANOW)
        self._live = Live(console=self._console, screen=True, auto_refresh=False, transient=True)
        self._live.start()

    def _give_back(self) -> None:
        if self._live is not None:
            # The terminal may be gone.
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None
        if self._keys is not None and self._modes is not None:
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self._keys, termios.TCSANOW, self._modes)
            self._modes = None

    def draw(self, lines: Sequence[Text]) -> None:
        """Shows lines from the top on."""
        if self._live is not None:
            for line in lines:
                line.no_wrap, line.overflow = True, "crop"
            self._live.update(Group(*lines), refresh=True)

    def wait(self, until: float) -> list[str]:
        """Keys that are pressed until then, by the monotonic clock. A new size ends it too."""
        watched = [self._wake_read] + ([self._keys] if self._keys is not None else [])
        while True:
            if self._stopping:
                self._suspend()
                return []
            left = until - time.monotonic()
            if left <= 0:
                return []
            ready, _, _ = select.select(watched, [], [], left)
            if self._wake_read in ready:
                os.read(self._wake_read, 512)
                if not self._stopping:
                    return []
            elif self._keys in ready and self._keys is not None:
                data = os.read(self._keys, 256)
                if not data:
                    self._keys = None
                    raise SystemExit(128 + signal.SIGHUP)
                return keys_of(data)

    def _suspend(self) -> None:
        """Ctrl-Z: the shell gets its terminal as it was."""
        self._stopping = False
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """What matters is that the wait ends."""


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
