"""The manual pages are well-formed, and complete with respect to the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging_helpers import REPOSITORY, run, tool

from calm.core.library_tables import OPTIONS

PAGES = sorted((REPOSITORY / "docs/man").iterdir())


def page(name: str) -> str:
    return (REPOSITORY / "docs/man" / name).read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_lint(path: Path) -> None:
    result = run(tool("mandoc", "mandoc"), "-T", "lint", "-W", "warning", path)
    assert result.stdout + result.stderr == ""


def test_options_and_counters_are_as_the_tables_have_them() -> None:
    done = run(REPOSITORY / ".venv/bin/python", REPOSITORY / "scripts/generate", "--check")
    assert done.stdout == ""
    described = re.findall(r"^\.It Cm (\w+) Ns = Ns Ar", page("calmalloc.7"), re.MULTILINE)
    assert described == [name for name in OPTIONS if not name.startswith("test_")]


def test_every_function_and_field() -> None:
    header = re.sub(r"/\*.*?\*/", "", (REPOSITORY / "include/calmalloc.h").read_text(), flags=re.DOTALL)
    text = page("calmalloc.3")
    functions = set(re.findall(r"^CALM_API [^(]*?(\w+)\(", header, re.MULTILINE))
    assert len(functions) > 10
    assert set(re.findall(r"^\.Fn (calm_\w+) \"", text, re.MULTILINE)) == functions
    assert set(re.findall(r"^\.Nm (calm_\w+)", text, re.MULTILINE)) == functions
    fields = set(re.findall(r"uint(?:32|64)_t\s+(\w+);", header))
    assert len(fields) > 10
    listed = re.findall(r"^\.It (Fa .*)$", text, re.MULTILINE)
    assert {name for line in listed for name in re.findall(r"Fa (\w+)", line)} == fields


def test_every_variable_of_ptlbmalloc2() -> None:
    sources = "".join(path.read_text() for path in (REPOSITORY / "ptlbmalloc2").glob("*.c"))
    variables = set(re.findall(r'"(PTLBMALLOC2_\w+)"', sources))
    assert len(variables) >= 3
    assert set(re.findall(r"^\.It Ev (PTLBMALLOC2_\w+)$", page("ptlbmalloc2.7"), re.MULTILINE)) == variables


def test_the_commands_are_as_calm_has_them() -> None:
    """Each command, option and exit status: scripts/manual generates them from the text of `calm --help`."""
    done = run(REPOSITORY / ".venv/bin/python", REPOSITORY / "scripts/manual", "--check")
    assert done.stdout == ""
    shown = run("mandoc", "-T", "utf8", REPOSITORY / "docs/man/calm.1").stdout
    assert "compare" in shown
