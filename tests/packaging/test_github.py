"""The repository host's files: forms for reports, and workflows whose commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging_helpers import REPOSITORY

GITHUB = REPOSITORY / ".github"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FIELDS = {"markdown": "value", "textarea": "label", "dropdown": "label"}
# Registries are found by their clients' defaults, which a fork or a mirror may change.
REGISTRIES = ("crates.io", "pypi.org", "pythonhosted.org", "docker.io", "ghcr.io", "quay.io")


def read(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def commands(workflow: dict[str, Any]) -> list[list[str]]:
    """The commands of all steps, as words."""
    lines = [line for step in steps(workflow) for line in step.get("run", "").splitlines()]
    return [shlex.split(part) for line in lines for part in line.split("&&")]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms(path: Path) -> None:
    form = read(path)
    assert set(form) == {"name", "description", "body"}
    names = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(names) == len(set(names)) >= 3
    for field in form["body"]:
        assert field["attributes"][FIELDS[field["type"]]]
        assert field["type"] == "markdown" or field["validations"] == {"required": True}
        assert field["type"] != "dropdown" or all(
            type(word) is str for word in field["attributes"]["options"]
        )


def test_forms_ask_for_what_is_needed() -> None:
    texts = {path.stem: path.read_text() for path in FORMS}
    assert set(texts) == {"misbehaviour", "memory-or-time"}
    for text in texts.values():
        for wanted in ("calm --version", "uname -r", "ldd --version", "LD_PRELOAD", "CALM_OPTIONS"):
            assert wanted in text
    assert "calm explain PID" in texts["memory-or-time"]
    assert "SECURITY.md" in texts["misbehaviour"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True]  # YAML 1.1 reads the key "on" so
    assert all(("run" in step) != ("uses" in step) for step in steps(workflow))
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for command in commands(workflow):
        if command[0] == "make":
            assert command[1] in targets
        if command[0].startswith("scripts/"):
            assert (REPOSITORY / command[0]).is_file()


@pytest.mark.parametrize("path", [*FORMS, *WORKFLOWS], ids=lambda path: path.stem)
def test_no_registry_is_named(path: Path) -> None:
    assert not [name for name in REGISTRIES if name in path.read_text()]


def test_a_tag_builds_what_the_release_check_builds() -> None:
    workflow = read(GITHUB / "workflows/release.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    assert ["scripts/release-check"] in commands(workflow)
    kept = [step["with"]["path"] for step in steps(workflow) if "upload-artifact" in step.get("uses", "")]
    assert kept == ["build/packages"]
