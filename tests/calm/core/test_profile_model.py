"""The document of a profile: what is written can be read, and a broken file gets one line with the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import profile_samples as samples
import pytest

from calm.core import documents
from calm.core.errors import USAGE, CalmError
from calm.core.profile_model import Profile

Break = Callable[[dict[str, Any]], Any]


def write(path: Path, profile: Profile) -> dict[str, Any]:
    path.write_text(documents.text(profile))
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def refusal(path: Path) -> str:
    """The error of reading a file, without its name."""
    with pytest.raises(CalmError) as caught:
        documents.read(str(path), Profile)
    assert caught.value.exit_code == USAGE
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize("sample", [samples.listing1, samples.unprivileged, samples.empty, samples.hostile])
def test_a_written_profile_can_be_read(tmp_path: Path, sample: Callable[[], Profile]) -> None:
    path = tmp_path / "profile.json"
    made = sample()
    value = write(path, made)
    assert (value["schema"], value["version"]) == ("calm-profile", 1)
    assert documents.read(str(path), Profile) == made


def test_fields_with_a_default_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    value = write(path, samples.listing1())
    del value["notes"], value["interrupted_by"], value["frames"][0]["inlined"], value["causes"][0]["cpu_s"]
    path.write_text(json.dumps(value))
    profile = documents.read(str(path), Profile)
    assert profile.notes == []
    assert profile.causes[0].cpu_s is None


BROKEN: dict[str, tuple[Break, str]] = {
    "no command": (lambda v: v.pop("command"), "`command`"),
    "command is text": (lambda v: v.update(command="ls"), "$.command"),
    "a word that is a number": (lambda v: v.update(command=["ls", 1]), "$.command[1]"),
    "wall is text": (lambda v: v.update(wall_s="1"), "$.wall_s"),
    "wall is true": (lambda v: v.update(wall_s=True), "$.wall_s"),
    "wall is negative": (lambda v: v.update(wall_s=-1), "$.wall_s"),
    "wall beyond numbers": (lambda v: v.update(wall_s=10**400), "wall_s"),
    "wall is not a number": (lambda v: v.update(wall_s=float("nan")), "$.wall_s"),
    "pid in halves": (lambda v: v.update(pid=1.5), "$.pid"),
    "privileged by number": (lambda v: v.update(privileged=1), "$.privileged"),
    "no machine": (lambda v: v.update(machine=None), "$.machine"),
    "totals are a list": (lambda v: v.update(totals=[]), "$.totals"),
    "a bare total": (lambda v: v["totals"].update(user_s=1), "$.totals[...]"),
    "a total's value": (lambda v: v["totals"]["user_s"].update(value=[]), "$.totals[...].value"),
    "a total's unit": (lambda v: v["totals"]["user_s"].update(unit="MiB"), "$.totals[...].unit"),
    "a total without a reason": (lambda v: v["totals"]["user_s"].pop("how"), "`how`"),
    "a cause that is text": (lambda v: v["causes"].insert(1, "madvise"), "$.causes[1]"),
    "a cause's calls": (lambda v: v["causes"][2].update(calls="1"), "$.causes[2].calls"),
    "a nameless frame": (lambda v: v["frames"][3].update(function=None), "$.frames[3].function"),
    "a stack of text": (lambda v: v["stacks"][0].update(frames="abc"), "$.stacks[0].frames"),
    "a stack of halves": (lambda v: v["stacks"][0].update(frames=[0.5]), "$.stacks[0].frames[0]"),
    "a frame that does not exist": (
        lambda v: v["stacks"][1].update(frames=[999]),
        "a stack has a frame that is not among the frames",
    ),
    "a frame counted from the end": (lambda v: v["stacks"][1].update(frames=[-1]), "$.stacks[1].frames[0]"),
    "a stack's kind": (lambda v: v["stacks"][0].update(kind="heat"), "$.stacks[0].kind"),
    "a negative weight": (lambda v: v["stacks"][0].update(weight=-2), "$.stacks[0].weight"),
    "bins of no width": (lambda v: v["timeline"].update(bin_s=0), "$.timeline"),
    "a gap in a series": (
        lambda v: v["timeline"]["series"]["fault"].__setitem__(4, None),
        "$.timeline.series[...][4]",
    ),
    "a short curve": (lambda v: v["curves"]["rss"]["kib"].pop(), "$.curves[...]"),
    "a finding's share": (lambda v: v["findings"][0].update(share="all"), "$.findings[0].share"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_profiles_are_named_in_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "profile.json"
    value = write(path, samples.listing1())
    spoil, place = BROKEN[name]
    spoil(value)
    path.write_text(json.dumps(value))
    message = refusal(path)
    assert message.startswith("FILE is not a whole calm-profile: ")
    assert place in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "FILE is not JSON"),
        (b'{"schema": "calm-profile", "version": 1, "comma', "FILE is not JSON, or was cut short"),
        (b"[]", "FILE is no document of calm, and calm-profile is needed"),
        (b'{"command": []}', "FILE is no document of calm, and calm-profile is needed"),
        (b'{"schema": "calm-stat", "version": 1}', "FILE is of the schema calm-stat, and calm-profile is"),
        (b'{"schema": "calm-profile", "version": 9}', "FILE has version 9 of calm-profile; "),
        (b'{"schema": "calm-profile", "version": 1}', "FILE is not a whole calm-profile: "),
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(text)
    assert refusal(path).startswith(message)
