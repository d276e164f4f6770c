"""The terminal of a live view: its alternate screen and its keys. Its state is restored at the end."""

import contextlib
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

_KEYS = {
    **{b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down"},
    **{b"\r": "enter", b"\n": "enter", b"\x1b": "escape", b"\x7f": "backspace", b"\x08": "backspace"},
}
# An escape sequence, a byte of ASCII, or characters of more bytes.
_KEY = re.compile(rb"\x1b[\[O][^@-~]*[@-~]?|[\x00-\x7f]|[\x80-\xff]+")
_ENDING = (signal.SIGTERM, signal.SIGHUP)
# A new size and Ctrl-Z take effect after this time at most.
_POLL_S = 0.1


def keys_of(data: bytes) -> list[str]:
    """The characters and named keys that were pressed, without sequences that have no meaning here."""
    found = []
    for key in _KEY.findall(data):
        if key in _KEYS:
            found.append(_KEYS[key])
        elif not key.startswith(b"\x1b"):
            found += [each for each in key.decode(errors="ignore") if each.isprintable()]
    return found


class Screen:
    """The terminal; `opened` makes one."""

    def __init__(self) -> None:
        self._console = Console(markup=False, highlight=False, emoji=False)
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._modes: list[Any] | None = None
        self._live: Live | None = None
        self._drawn = self.size
        self.stopping = False

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, now."""
        return self._console.size

    def take(self) -> None:
        if self._keys is not None:
            self._modes = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSANOW)
        self._live = Live(console=self._console, screen=True, auto_refresh=False, transient=True)
        self._live.start()

    def give_back(self) -> None:
        # The terminal may be gone.
        with contextlib.suppress(OSError):
            if self._live is not None:
                self._live.stop()
        with contextlib.suppress(OSError, termios.error):
            if self._keys is not None and self._modes is not None:
                termios.tcsetattr(self._keys, termios.TCSANOW, self._modes)

    def draw(self, lines: Sequence[Text]) -> None:
        """Shows lines from the top."""
        assert self._live is not None
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        self._drawn = self.size
        self._live.update(Group(*lines), refresh=True)

    def wait(self, until: float) -> list[str]:
        """The keys that are pressed until a time of the monotonic clock. A new size ends the wait too."""
        while (left := until - time.monotonic()) > 0 and self.size == self._drawn:
            if self.stopping:
                # Ctrl-Z: the shell gets its terminal back until the program continues.
                self.stopping = False
                self.give_back()
                os.kill(os.getpid(), signal.SIGSTOP)
                self.take()
                break
            watched = [] if self._keys is None else [self._keys]
            for keys in select.select(watched, [], [], min(left, _POLL_S))[0]:
                if data := os.read(keys, 256):
                    return keys_of(data)
                raise SystemExit(128 + signal.SIGHUP)
        return []


@contextlib.contextmanager
def opened() -> Iterator[Screen]:
    """The terminal until the end of the block. SIGTERM and SIGHUP end the program as SystemExit."""
    screen = Screen()

    def stop(_number: int, _frame: FrameType | None) -> None:
        screen.stopping = True

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTSTP, signal.SIGINT, *_ENDING)}
    try:
        signal.signal(signal.SIGTSTP, stop)
        for number in _ENDING:
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, end)
        screen.take()
        yield screen
    finally:
        # A second signal must not interrupt the restoring.
        for number in (*_ENDING, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        screen.give_back()
        for number, handler in before.items():
            signal.signal(number, handler)
