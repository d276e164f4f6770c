"""Runs calm as a user without rights, and lets that user read what it needs."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from calm_helpers import ROOT

NOBODY = 65534


def unprivileged(imports: str, *arguments: str | int) -> subprocess.CompletedProcess[str]:
    """The modules are imported before: perhaps only root may read the checkout."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    code = (
        f"import os, sys; sys.path.insert(0, sys.argv.pop(1)); import calm.cli, {imports};"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY});"
        "sys.argv[0] = 'calm'; calm.cli.main()"
    )
    command = [sys.executable, "-c", code, str(ROOT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@contextmanager
def readable_by_all(*files: Path) -> Iterator[list[Path]]:
    """Copies of files where any user may read and execute them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        copies = [Path(shutil.copy(file, folder)) for file in files]
        for copy in copies:
            copy.chmod(0o755)
        yield copies
