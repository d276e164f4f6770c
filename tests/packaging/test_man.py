"""The manual pages are well-formed, and complete with respect to the sources."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from packaging_helpers import REPOSITORY, run, tool

PAGES = sorted((REPOSITORY / "docs/man").iterdir())


def page(name: str) -> str:
    return (REPOSITORY / "docs/man" / name).read_text()


def options_script() -> ModuleType:
    """scripts/options, which generates the same table for docs/allocator.md."""
    loader = importlib.machinery.SourceFileLoader("options_script", str(REPOSITORY / "scripts/options"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_lint(path: Path) -> None:
    result = run(tool("mandoc", "mandoc"), "-T", "lint", "-W", "warning", path)
    assert result.stdout + result.stderr == ""


def test_every_option_with_its_values_and_default() -> None:
    script = options_script()
    row = re.compile(r"^\| `(\w+)` \| (.*?) \| `?(\w+)`? \|", re.MULTILINE)
    wanted = {}
    for name, values, default in row.findall(script.table(script.read_source())):
        wanted[name] = (values.replace("`", "").replace(" to ", "..").replace(", ", " | "), default)
    described = re.compile(
        r"^\.It Cm (\w+) Ns = Ns Ar (.*)\n(?:(?!\.It).*\n)*?The default is\n\.Ar (\w+) \.$", re.MULTILINE
    )
    found = {name: (values, default) for name, values, default in described.findall(page("calmalloc.7"))}
    assert len(wanted) > 5
    assert found == wanted


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
