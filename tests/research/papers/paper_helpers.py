"""Runs `bench/paper` in a process of its own, with or without some of its parts replaced."""

import os
import subprocess
import sys
from pathlib import Path

from calm_helpers import ROOT


def code(set_up: str) -> str:
    """The script; set_up is run before its command."""
    return (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{set_up}\n"
        "from calm.cli import run\nfrom research.papers.command import command\n"
        "sys.exit(run(command, 'bench/paper'))\n"
    )


def paper(
    *arguments: str | float | Path, set_up: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """To its end."""
    command = [sys.executable, "-P", "-c", code(set_up), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | variables, cwd="/"
    )
    assert "Traceback" not in done.stderr
    return done
