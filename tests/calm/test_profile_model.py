"""A profile's JSON: what was written is read again, and what is broken gets one line that names the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import profile_samples as samples
import pytest

from calm.errors import CalmError
from calm.profile import model
from calm.profile.model import Profile

Break = Callable[[dict[str, Any]], Any]


def write(path: Path, profile: Profile) -> dict[str, Any]:
    text = json.dumps(profile.as_dict())
    path.write_text(text)
    value: dict[str, Any] = json.loads(text)
    return value


@pytest.mark.parametrize("sample", [samples.listing1, samples.unprivileged, samples.empty, samples.hostile])
def test_what_was_written_is_read(tmp_path: Path, sample: Callable[[], Profile]) -> None:
    path = tmp_path / "profile.json"
    write(path, sample())
    assert model.load(str(path)) == sample()


def test_what_has_a_default_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    value = write(path, samples.listing1())
    del value["notes"], value["interrupted"], value["frames"][0]["inlined"], value["causes"][0]["cpu_s"]
    path.write_text(json.dumps(value))
    profile = model.load(str(path))
    assert profile.notes == []
    assert profile.causes[0].cpu_s is None


BROKEN: dict[str, tuple[Break, str]] = {
    "no command": (lambda v: v.pop("command"), "command is missing"),
    "a field of the future": (lambda v: v.update(later=1), "later is not known"),
    "command is text": (lambda v: v.update(command="ls"), "command is not a list"),
    "a word that is none": (lambda v: v.update(command=["ls", 1]), "command[1] is not text"),
    "wall is text": (lambda v: v.update(wall_s="1"), "wall_s is not a number"),
    "wall is true": (lambda v: v.update(wall_s=True), "wall_s is not a number"),
    "wall is negative": (lambda v: v.update(wall_s=-1), "wall_s is negative"),
    "wall beyond numbers": (lambda v: v.update(wall_s=10**400), "wall_s is not a number of sensible size"),
    "pid in halves": (lambda v: v.update(pid=1.5), "pid is not a whole number"),
    "privileged by number": (lambda v: v.update(privileged=1), "privileged is not true or false"),
    "no machine": (lambda v: v.update(machine=None), "machine is not an object"),
    "totals are a list": (lambda v: v.update(totals=[]), "totals is not an object"),
    "a bare total": (lambda v: v["totals"].update(user_s=1), "totals['user_s'] is not an object"),
    "a total's value": (
        lambda v: v["totals"]["user_s"].update(value=[]),
        "totals['user_s'].value is not a number",
    ),
    "a total's unit": (
        lambda v: v["totals"]["user_s"].update(unit="MiB"),
        "totals['user_s'].unit is none of count, s, KiB",
    ),
    "a total without a reason": (
        lambda v: v["totals"]["user_s"].pop("how"),
        "totals['user_s'].how is missing",
    ),
    "a cause that is text": (lambda v: v["causes"].insert(1, "madvise"), "causes[1] is not an object"),
    "a cause's calls": (lambda v: v["causes"][2].update(calls="1"), "causes[2].calls is not a number"),
    "a nameless frame": (lambda v: v["frames"][3].update(function=None), "frames[3].function is not text"),
    "a stack of text": (lambda v: v["stacks"][0].update(frames="abc"), "stacks[0].frames is not a list"),
    "a stack of halves": (
        lambda v: v["stacks"][0].update(frames=[0.5]),
        "stacks[0].frames[0] is not a whole number",
    ),
    "a stack of what is not there": (
        lambda v: v["stacks"][1].update(frames=[999]),
        "stacks[1].frames has one that is not among the frames",
    ),
    "a stack counted from the end": (
        lambda v: v["stacks"][1].update(frames=[-1]),
        "stacks[1].frames has one that is not among the frames",
    ),
    "a stack's kind": (
        lambda v: v["stacks"][0].update(kind="heat"),
        "stacks[0].kind is none of shootdown, fault, call, cpu",
    ),
    "a stack below nothing": (lambda v: v["stacks"][0].update(weight=-2), "stacks[0].weight is negative"),
    "bins of no width": (lambda v: v["timeline"].update(bin_s=0), "timeline.bin_s is not above zero"),
    "a gap in a series": (
        lambda v: v["timeline"]["series"]["fault"].__setitem__(4, None),
        "timeline.series['fault'][4] is not a number",
    ),
    "a short curve": (
        lambda v: v["curves"]["rss"]["kib"].pop(),
        "curves['rss'] has more moments than values, or fewer",
    ),
    "a finding's share": (
        lambda v: v["findings"][0].update(share="all"),
        "findings[0].share is not a number",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_profiles_are_named_in_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "profile.json"
    value = write(path, samples.listing1())
    spoil, message = BROKEN[name]
    spoil(value)
    path.write_text(json.dumps(value))
    with pytest.raises(CalmError) as caught:
        model.load(str(path))
    assert str(caught.value) == f"{path} is not a whole profile: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"calm_profile": NaN}', "is not JSON: NaN is no number there"),
        (b"[]", "is not a profile: write one by `calm profile --json FILE -- CMD`"),
        (b'{"command": []}', "is not a profile: write one by `calm profile --json FILE -- CMD`"),
        (b'{"calm_profile": 2}', "was written by another version of calm"),
        (b'{"calm_profile": "1"}', "was written by another version of calm"),
        (b'{"calm_profile": 1}', "is not a whole profile: command is missing"),
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(text)
    with pytest.raises(CalmError) as caught:
        model.load(str(path))
    assert str(caught.value).startswith(f"{path} {message}")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CalmError, match=r"^cannot read .*/none: No such file or directory$"):
        model.load(str(tmp_path / "none"))
    with pytest.raises(CalmError, match=r"^cannot read .*: Is a directory$"):
        model.load(str(tmp_path))
