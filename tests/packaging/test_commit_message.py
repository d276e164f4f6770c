"""scripts/commit-message: what a commit's message must have, as git's hook checks it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from packaging_helpers import REPOSITORY, run

CHECK = REPOSITORY / "scripts/commit-message"
LONG, LONGER = "x" * 72, "x" * 73
REASON = "\n\nThe reason.\n"
GIVEN = "\n# Please enter the commit message for your changes.\n# On branch main\n"


@pytest.mark.parametrize(
    "message",
    [
        f"Subject{REASON}",
        LONG + REASON,
        # Characters, not bytes.
        "é" * 72 + REASON,
        f"Subject{REASON}\nSigned-off-by: A <a@b>\n",
        f"# A comment first\nSubject{REASON}{GIVEN}",
        f"Subject{REASON}# ---------- >8 ----------\ndiff --git a/{LONGER} b/{LONGER}\n",
        "Merge branch 'other'\n",
        'Revert "Subject"\n\nThis reverts commit 0123456.\n',
        "fixup! Subject\n",
        # An empty message is git's to refuse.
        f"\n{GIVEN}",
    ],
)
def test_good(message: str, tmp_path: Path) -> None:
    file = tmp_path / "message"
    file.write_text(message)
    done = run(CHECK, file)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (LONGER + REASON, ["the subject has 73 characters; 72 is the limit"]),
        (f"Merge {LONGER}\n", ["the subject has 79 characters; 72 is the limit"]),
        ("Subject\nThe reason.\n", ["the second line must be empty"]),
        ("Subject\n", ["there is no body: say why, below an empty line"]),
        (f"Subject\n{GIVEN}", ["there is no body: say why, below an empty line"]),
        ("Subject\n\nSigned-off-by: A <a@b>\n", ["there is no body: say why, below an empty line"]),
        ("Subject\n# ---------- >8 ----------\ndiff\n", ["there is no body: say why, below an empty line"]),
        (
            f"{LONGER}\n",
            [
                "the subject has 73 characters; 72 is the limit",
                "there is no body: say why, below an empty line",
            ],
        ),
    ],
)
def test_bad(message: str, says: list[str], tmp_path: Path) -> None:
    file = tmp_path / "message"
    file.write_text(message)
    done = run(CHECK, file, fails=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"commit-message: {line}" for line in says]


def test_no_file(tmp_path: Path) -> None:
    assert run(CHECK, tmp_path / "none", fails=True).returncode == 2


def test_as_a_hook(tmp_path: Path) -> None:
    """git itself runs it, and makes no commit that it refuses."""

    def git(*arguments: str, fails: bool = False) -> str:
        names = ("-c", "user.name=A", "-c", "user.email=a@b", "-c", f"core.hooksPath={hooks}")
        return run("git", *names, *arguments, cwd=tmp_path, fails=fails).stdout

    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "commit-msg").symlink_to(CHECK)
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "Subject", fails=True)
    git("commit", "-q", "--allow-empty", "-m", "Subject", "-m", "The reason.")
    assert git("log", "--format=%s") == "Subject\n"


def test_pre_commit_runs_each_script_in_its_stage() -> None:
    config = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    hooks = {hook["entry"]: hook["stages"] for hook in config["repos"][0]["hooks"]}
    assert hooks == {"scripts/lint": ["pre-commit"], "scripts/commit-message": ["commit-msg"]}
    assert config["default_install_hook_types"] == ["pre-commit", "commit-msg"]
