"""The manual pages are well-formed, and name all that the sources have."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import click
import pytest
from packaging_helpers import REPOSITORY, run, tool

from calm.cli import cli

PAGES = sorted((REPOSITORY / "docs/man").iterdir())


def page(name: str) -> str:
    return (REPOSITORY / "docs/man" / name).read_text()


def options_script() -> ModuleType:
    """scripts/options, which makes the same table for docs/allocator.md."""
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


def section(name: str) -> str:
    found = re.search(
        rf"^\.It Cm {name}\n(.*?)(?=^\.It Cm |^\.Sh )", page("calm.1"), re.MULTILINE | re.DOTALL
    )
    assert found is not None, f"calm.1 has no subcommand {name}"
    return found[1]


def commands() -> list[str]:
    return cli.list_commands(click.Context(cli))


@pytest.mark.parametrize("name", commands())
def test_every_subcommand_and_option_of_calm(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option) and "--help" not in parameter.opts:
            for flag in parameter.opts:
                assert re.search(rf"^\.It .*\bFl {re.escape(flag[1:])}\b", section(name), re.MULTILINE), flag


@pytest.mark.parametrize("name", commands())
def test_numbers_said_to_be_defaults_are(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    options = {flag: option for option in command.params for flag in option.opts}
    for item in re.split(r"^\.It Fl ", section(name), flags=re.MULTILINE)[1:]:
        said = re.search(r"^The default is (\d[\d.]*)(?:\.$|, |;)", item, re.MULTILINE)
        option = options.get(f"-{item.split()[0]}")
        if said is not None and isinstance(option, click.Option):
            # What depends on other options is in the help alone.
            told = f"default: {option.default} {option.help} default: {option.show_default}"
            shown = [float(number) for number in re.findall(r"efault: (\d+(?:\.\d+)?)", told)]
            assert float(said[1]) in shown, item


def test_every_subcommand_is_in_the_synopsis() -> None:
    synopsis = page("calm.1").split(".Sh DESCRIPTION")[0]
    assert set(re.findall(r"^\.Cm (\w+)", synopsis, re.MULTILINE)) == set(commands())
