"""Running the command, and building the programs that it measures."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from calm_helpers import PROGRAMS, ROOT, Calm, Compile, probe

# In the background, or under nohup, these are ignored, and what the tests start would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    directory = tmp_path_factory.mktemp("programs")
    directory.chmod(0o755)

    def build(name: str) -> Path:
        path = directory / name
        if not path.exists():
            source = directory / f"{name}.c"
            source.write_text(PROGRAMS[name])
            subprocess.run(["cc", "-O1", "-pthread", "-o", str(path), str(source)], check=True)
        return path

    return build


@pytest.fixture
def calm() -> Calm:
    """Runs a command of calm to its end, forked from this process; process=True: as `python -m calm`."""

    def run(
        *arguments: str | Path, process: bool = False, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        words = list(map(str, arguments))
        options["env"] = os.environ | {"PYTHONPATH": str(ROOT)} | options.get("env", {})
        if process:
            command = [sys.executable, "-m", "calm", *words]
            result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        else:
            result = forked.run(words, **options)
        assert "Traceback" not in result.stderr
        return result

    return run


@pytest.fixture(scope="session")
def traced() -> None:
    """Asked for by tests that need the kernel's tracepoints."""
    for name, counter in probe("-c", "tlb,syscalls", "--", "true")["counters"].items():
        if counter["value"] is None and counter["reason"] != "not asked for":
            pytest.skip(f"{name}: {counter['reason']}")
