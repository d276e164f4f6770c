"""The bar: on a terminal alone, and for what takes long."""

import io
import sys
from types import SimpleNamespace

import pytest

from calm import progress
from calm.progress import Bar


class Terminal(io.StringIO):
    """Standard error, where somebody looks at it."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_a_bar_appears_after_two_seconds(monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with Bar(total=3, what="first") as bar:
        clock.now += 1.9
        bar.update(1)
        assert screen.getvalue() == ""
        clock.now += 0.2
        bar.update(2, "second")
        assert "second" in screen.getvalue()
        # Ten times a second is enough.
        clock.now += 0.05
        bar.update(2, "third")
        assert "third" not in screen.getvalue()
        bar.say("a line that stays")
    assert "a line that stays" in screen.getvalue()


def test_without_a_terminal_there_are_lines_alone(
    capsys: pytest.CaptureFixture[str], clock: SimpleNamespace
) -> None:
    with Bar(total=3, what="first") as bar:
        clock.now += 60
        bar.update(1)
        bar.say("one is done")
    assert capsys.readouterr() == ("", "one is done\n")
