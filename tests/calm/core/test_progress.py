"""The bar: on a terminal alone, and for what takes long."""

import io
import sys
from types import SimpleNamespace

import pytest

from calm.core import progress
from calm.core.progress import Bar, RoundsBar


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


def turns(bar: RoundsBar) -> None:
    bar.begin([("a", "x"), ("a", "y")], 2)
    for number in (0, 1):
        bar.turn(number, "a", "x")
        bar.done("a", "x", 2.0)
        if number == 0:
            bar.turn(number, "a", "y")
            bar.failed("a", "y", "exit code 1")
            bar.done("a", "y", 1.0)
        bar.row_done()


def test_rounds_have_a_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    with RoundsBar() as bar:
        turns(bar)
    assert capsys.readouterr().err.splitlines() == [
        "calm: a: y: exit code 1",
        "warm-up, a: x 2.0 s, y 1.0 s; 2 s left",
        "round 1 of 1, a: x 2.0 s",
    ]
    with RoundsBar(lines=False) as bar:
        turns(bar)
    assert capsys.readouterr().err == "calm: a: y: exit code 1\n"


def test_rounds_on_a_terminal_show_every_turn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with RoundsBar() as bar:
        turns(bar)
    for text in ("0 of 4 runs, time left not known yet", "warm-up, a: y", "2 s left, round 1 of 1, a: x"):
        assert text in screen.getvalue()
    assert "calm: a: y: exit code 1" in screen.getvalue()
