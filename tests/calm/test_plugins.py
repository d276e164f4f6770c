"""Commands that other packages add to calm; and calm without the package research."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from calm_helpers import ROOT, Calm

from calm.cli import COMMANDS, RESEARCH
from calm.core.errors import FAILED

ALONE = (
    "import importlib.metadata as metadata; metadata.entry_points = lambda **named: ();"
    "from calm.cli import main; main()"
)
MODULES = {
    "good": """
        import click
        from calm.core.plugins import Listed
        @click.command()
        def command():
            "Do it."
            print("done")
        HELLO = Listed("good", "Say hello.", "Does it say hello?", "calm hello")
        STAT = Listed("good", "Say nothing.", "Is it calm's own?", "calm stat")
        NEEDS = Listed("good_but_for_numbers", "Count.", "Does it count?", "calm needs")
        OTHER = 7
    """,
    "good_but_for_numbers": "import no_such_numbers",
}


def plugin(folder: Path, **commands: str) -> Path:
    """Installs a package `added` with these entry points."""
    for name, text in MODULES.items():
        lines = text.splitlines()
        (folder / f"{name}.py").write_text("\n".join(line.removeprefix(" " * 8) for line in lines))
    metadata = folder / "added-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1.0\n")
    lines = [f"{name} = {value}\n" for name, value in commands.items()]
    (metadata / "entry_points.txt").write_text("[calm.commands]\n" + "".join(lines))
    return folder


def run(*arguments: str, beside: Path | None = None) -> subprocess.CompletedProcess[str]:
    """calm as a process of its own, with the package of a folder."""
    path = str(ROOT) if beside is None else f"{ROOT}:{beside}"
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def calm_with(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "calm", *arguments, beside=folder)


def test_a_command_of_another_package(tmp_path: Path) -> None:
    folder = plugin(tmp_path, hello="good:HELLO", stat="good:STAT")
    overview = calm_with(folder, "--help")
    assert overview.stderr == ""
    assert "\n  hello       Say hello.\n" in overview.stdout
    assert "\n  Does it say hello?\n    calm hello\n" in overview.stdout
    # It replaces no command of calm's own.
    assert "Say nothing" not in overview.stdout
    assert calm_with(folder, "hello").stdout == "done\n"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("absent:HELLO", "No module named 'absent'"),
        ("good:ABSENT", "module 'good' has no attribute 'ABSENT'"),
        ("good:OTHER", "is a int, not a Listed"),
    ],
)
def test_a_broken_entry_point_is_named_and_harms_no_other(tmp_path: Path, value: str, why: str) -> None:
    folder = plugin(tmp_path, hello="good:HELLO", torn=value)
    line = f"calm: torn: added's entry point {value} is broken: {why}\n"
    used = calm_with(folder, "torn", "--help")
    assert (used.returncode, used.stdout, used.stderr) == (FAILED, "", line)
    overview = calm_with(folder, "--help")
    assert (overview.returncode, overview.stderr) == (0, line)
    assert "Say hello." in overview.stdout
    assert calm_with(folder, "hello").stdout == "done\n"
    own = calm_with(folder, "allocators")
    assert (own.returncode, own.stderr) == (0, "")


def test_a_command_whose_module_lacks_another(tmp_path: Path) -> None:
    folder = plugin(tmp_path, needs="good:NEEDS")
    done = calm_with(folder, "needs")
    why = "cannot import good_but_for_numbers: No module named 'no_such_numbers'"
    assert (done.returncode, done.stderr) == (FAILED, f"calm: needs: {why}\n")


@pytest.mark.parametrize("name", RESEARCH)
def test_without_the_package_research(name: str) -> None:
    """One line says where the command is; the others are there."""
    done = run("-c", ALONE, name, "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"calm: {name} is in calmalloc's research package, which is not installed")
    assert done.stderr.count("\n") == 1


def test_the_overview_without_the_package_research() -> None:
    done = run("-c", ALONE, "--help")
    assert done.stderr == ""
    listed = done.stdout.partition("\nCommands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == sorted(COMMANDS)


def test_a_checkout_has_them_all(calm: Calm) -> None:
    overview = calm("--help").stdout
    assert [name for name in (*COMMANDS, *RESEARCH) if f"\n  {name} " not in overview] == []
    shown = subprocess.run([ROOT / "bin/calm", "--help"], capture_output=True, text=True, check=True)
    assert shown.stdout == overview


def test_calm_imports_nothing_of_research() -> None:
    for path in (ROOT / "calm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named = [each.name for each in node.names]
            else:
                named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"research", "bench"} & {name.partition(".")[0] for name in named}, path
