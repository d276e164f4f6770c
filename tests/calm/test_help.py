"""Each command's help has an example, and figures can be had as JSON."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from calm_helpers import ROOT, leaves

from calm.cli import cli

# These report no figures.
WITHOUT_FIGURES = {"completion", "export", "run"}
_CONTEXT = click.Context(cli, info_name="calm", **cli.context_settings)
COMMANDS_AND_MODES = dict(leaves())


@pytest.fixture(params=COMMANDS_AND_MODES)
def name(request: pytest.FixtureRequest) -> str:
    """A command's, with its mode where it has some: `bench run`."""
    found: str = request.param
    return found


def examples(name: str) -> list[str]:
    """The lines of its help that begin with the command, up to what a shell would interpret."""
    lines = re.findall(
        rf"^ +(?:\S+ \"\$\()?calm {name}\b(.*)$", COMMANDS_AND_MODES[name].epilog or "", re.MULTILINE
    )
    return [re.sub(r"\s*[>|)].*| {2,}.*", "", line) for line in lines]


def test_help_ends_with_an_example(name: str) -> None:
    assert examples(name)
    command = COMMANDS_AND_MODES[name]
    text = command.get_help(click.Context(command, info_name=name, parent=_CONTEXT))
    assert text.index("\nOptions:\n") < text.index(f"calm {name}", text.index("\nOptions:\n"))


def test_examples_are_accepted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their options, though not run."""
    monkeypatch.chdir(tmp_path)
    for example in examples(name):
        COMMANDS_AND_MODES[name].make_context(name, shlex.split(example), parent=_CONTEXT)


def test_figures_can_be_had_as_json(name: str) -> None:
    if name not in WITHOUT_FIGURES:
        options = [option for each in COMMANDS_AND_MODES[name].params for option in each.opts]
        assert {"--json", "--output"} <= set(options)


def test_every_option_says_what_it_is(name: str) -> None:
    for parameter in COMMANDS_AND_MODES[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.opts


def test_one_name_and_one_form_for_one_thing(name: str) -> None:
    """No option takes bare seconds or milliseconds, and pictures are --plot everywhere."""
    for parameter in COMMANDS_AND_MODES[name].params:
        assert parameter.metavar not in ("SECONDS", "S", "MS", "MINUTES"), parameter.opts
        assert not {"--picture", "--duration-s"} & set(parameter.opts)


@pytest.mark.parametrize("name", [name for name in COMMANDS_AND_MODES if " " in name])
def test_summaries_of_modes_are_not_cut(name: str) -> None:
    parent, _, mode = name.rpartition(" ")
    if parent:
        group = cli.get_command(_CONTEXT, parent)
        assert group is not None
        listed = group.get_help(click.Context(group, info_name=parent, parent=_CONTEXT)).partition(
            "Commands:"
        )[2]
        assert f"\n  {mode}" in listed
        assert "..." not in listed


def test_the_overview_names_each_command_and_has_an_example_of_it() -> None:
    text = cli.get_help(_CONTEXT) + "\n"
    epilogs = "\n".join(command.epilog or "" for command in COMMANDS_AND_MODES.values()) + "\n"
    for name, listed in cli.listed.items():
        assert len(listed.summary) <= 70
        # Whole, not cut where the line ends.
        assert f"\n  {name:<10}  {listed.summary}\n" in text
        assert f"\n  {listed.question}\n    {listed.example}\n" in text
        assert re.search(rf"^ +{re.escape(listed.example)}(  |$)", epilogs, re.MULTILINE), name


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
        *("calm", "calm.cli", "calm.core", "calm.core.errors", "calm.core.plugins"),
    }


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["run", "-a", "glibc", "--", "true"], set()),
        (["stat", "--", "true"], {"rich"}),
        (["top", "-n", "1"], {"rich"}),
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
