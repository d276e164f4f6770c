"""scripts/model with arguments that do not exist."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_model_that_is_not_there_is_a_wrong_use() -> None:
    command = [ROOT / "scripts/model", "ring", "no-such"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    *usage, line = done.stderr.splitlines()
    assert usage[0].startswith("usage: ")
    assert "no such model: no-such; there are call, fork" in line
    # Those of both folders.
    assert ", sleep, decision, mailbox" in line
