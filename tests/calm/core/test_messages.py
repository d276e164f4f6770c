"""calmalloc's own messages are kept where the program's output is dropped."""

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from calm_helpers import Calm

from calm.commands.tune.space import Setting
from calm.commands.tune.trial import AS_IT_IS, ProgramRunner
from calm.core import allocators, messages

DECLINED = re.compile("calmoffload: calmalloc: .*CPU.*")


@pytest.fixture
def one_cpu() -> Callable[[], None]:
    """For the process that is started: what calmoffload then declines, and says so."""
    if not allocators.find_library("calmoffload"):
        pytest.skip("calmoffload is not built")
    cpu = min(os.sched_getaffinity(0))
    return lambda: os.sched_setaffinity(0, [cpu])


def test_its_own_lines_alone_and_each_once() -> None:
    heard: dict[str, list[str]] = {}
    words = b"a line\ncalmalloc: one\x1b[2J\nnot calmalloc: this\ncalmalloc: one\x1b[2J\n\xff\ncalmalloc: two"
    for label in ("a", "b", "a"):
        messages.listen(heard, label, io.BytesIO(words))
    assert heard == {label: ["calmalloc: one [2J", "calmalloc: two"] for label in ("a", "b")}
    assert messages.notes(heard)[:2] == ["a: calmalloc: one [2J", "a: calmalloc: two"]
    messages.listen(heard, "c", io.BytesIO(b"nothing of it"))
    assert list(heard) == ["a", "b"]


def test_of_complaints_without_an_end_the_first_are_kept() -> None:
    heard: dict[str, list[str]] = {}
    messages.listen(
        heard, "a", io.BytesIO(b"".join(b"calmalloc: double free: %d\n" % n for n in range(10**5)))
    )
    assert heard["a"][0] == "calmalloc: double free: 0"
    assert len(heard["a"]) < 10


def test_compare_tells_that_offload_was_declined(
    calm: Calm, one_cpu: Callable[[], None], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    result = calm(
        *("compare", "-a", "calmalloc,calmoffload", "-n", "2", "--json", out, "--", "true"),
        set_up=one_cpu,
    )
    assert result.returncode == 0, result.stderr
    (note,) = (note for note in json.loads(out.read_text())["notes"] if "calmalloc: " in note)
    assert DECLINED.fullmatch(note)
    assert result.stdout.count(f"note: {note}\n") == 1


def test_tune_tells_whose_words_they_are(tmp_path: Path) -> None:
    script = tmp_path / "program"
    script.write_text('#!/bin/sh\necho "calmalloc: option $CALM_OPTIONS" >&2\n')
    script.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name != "CALM_OPTIONS"}
    runner = ProgramRunner((str(script),), inherited=inherited)
    for setting in (None, Setting("calmalloc", {"huge_pages": "never"}), Setting("calmalloc")):
        runner.run(setting)
    assert runner.messages == {
        AS_IT_IS: ["calmalloc: option "],
        "calmalloc": ["calmalloc: option huge_pages=never", "calmalloc: option "],
    }


def test_tune_tells_that_offload_was_declined(calm: Calm, one_cpu: Callable[[], None]) -> None:
    pytest.importorskip("optuna")
    result = calm(
        *("tune", "search", "-a", "calmoffload", "--trials", "1", "--json", "-", "--", "sleep", "0.05"),
        set_up=one_cpu,
    )
    assert result.returncode == 0, result.stderr
    (note,) = filter(DECLINED.fullmatch, json.loads(result.stdout)["notes"])
    assert result.stderr.count(f"note: {note}\n") == 1
