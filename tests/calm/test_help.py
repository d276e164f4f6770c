"""Each command's help has an example, and figures can be had as JSON."""

import os
import re
import subprocess
import sys

import click
import pytest
from calm_helpers import ROOT

from calm.cli import COMMANDS, cli

# These report no figures.
WITHOUT_FIGURES = {"completion", "run"}
_CONTEXT = click.Context(cli, info_name="calm")


def command(name: str) -> click.Command:
    found = cli.get_command(_CONTEXT, name)
    assert found is not None
    return found


def help_of(name: str) -> str:
    return command(name).get_help(click.Context(command(name), info_name=name, parent=_CONTEXT))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example(name: str) -> None:
    text = help_of(name)
    # A line of its own behind the options, as it would be typed.
    _, options, behind = text.partition("\nOptions:\n")
    assert options
    assert re.search(rf"^ +(\S+ \"\$\()?calm {name}\b", behind, re.MULTILINE), text


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_accepted(name: str) -> None:
    """By their options, though not run."""
    epilog = command(name).epilog or ""
    for line in re.findall(rf"^ +calm {name}(.*)$", epilog, re.MULTILINE):
        words = re.sub(r"\s*[>|].*| {2,}.*", "", line).split()
        command(name).make_context(name, words, parent=_CONTEXT, resilient_parsing=False)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - WITHOUT_FIGURES))
def test_figures_can_be_had_as_json(name: str) -> None:
    assert "--json" in [option for parameter in command(name).params for option in parameter.opts]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is(name: str) -> None:
    for parameter in command(name).params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.opts


def test_the_overview_names_each_command_and_has_an_example_of_it() -> None:
    text = cli.get_help(_CONTEXT) + "\n"
    for name, listed in COMMANDS.items():
        # Whole, not cut where the line ends.
        assert f"\n  {name:<10}  {listed.summary}\n" in text
        assert f"\n  {listed.example}\n" in text
        assert re.search(rf"^ +{re.escape(listed.example)}(  |$)", command(name).epilog or "", re.M), name


# What each takes longer to import than all else that a short command does.
HEAVY = {"numpy", "matplotlib", "optuna", "plotly", "rich"}


def imported(*arguments: str) -> set[str]:
    """The modules that a command imports, up to its end or to the program that it becomes."""
    started = [sys.executable, "-X", "importtime", "-m", "calm", *arguments]
    done = subprocess.run(started, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"^import time: .*\| +(\S+)$", done.stderr, re.MULTILINE))


def test_the_overview_imports_no_command() -> None:
    assert {name for name in imported("--help") if name.partition(".")[0] in {"calm", *HEAVY}} == {
        "calm",
        "calm.cli",
        "calm.errors",
    }


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["run", "-a", "glibc", "--", "true"], set()),
        (["stat", "--", "true"], {"rich"}),
        (["top", "--once"], {"rich"}),
        (["completion", "bash"], set()),
        *(
            ([name, "--help"], set())
            for name in ("allocators", "compare", "lab", "predict", "profile", "tune")
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_imports_what_it_needs(arguments: list[str], needed: set[str]) -> None:
    assert {name.partition(".")[0] for name in imported(*arguments)} & HEAVY == needed
