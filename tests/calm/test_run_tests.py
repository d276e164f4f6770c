"""scripts/run-tests: what it says where it cannot run, and of reports that are missing or cut off."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from calm_helpers import ROOT, load_script

SCRIPT = ROOT / "scripts/run-tests"


@pytest.fixture(scope="module")
def run_tests() -> ModuleType:
    return load_script("run-tests")


@pytest.mark.parametrize("seed", ["abc", "1.5", "010"])
def test_a_seed_that_is_no_number_is_told(seed: str) -> None:
    env = os.environ | {"CALM_TEST_SEED": seed}
    done = subprocess.run([SCRIPT], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"run-tests: CALM_TEST_SEED={seed} is not a number\n"


def test_without_ctest_nothing_is_begun(tmp_path: Path) -> None:
    """The script's own interpreter aside, nothing is in PATH."""
    (tmp_path / "python3").symlink_to("/usr/bin/python3")
    env = {"PATH": str(tmp_path)}
    done = subprocess.run(["/usr/bin/env", "python3", SCRIPT], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "run-tests: ctest is missing: run make build-tests\n"


def test_reports(run_tests: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "pytest.xml"
    assert run_tests.failures(report) == ["pytest: wrote no report"]
    case = '<testsuite><testcase classname="c" name="{}">{}</testcase>'
    text = case.format("good", "") + case.format("bad", "<failure/>") + "</testsuite></testsuite>"
    report.write_text(text)
    assert run_tests.failures(report) == ["pytest: c::bad"]
    report.write_text(text[:-5])
    assert run_tests.failures(report) == ["pytest: wrote no report"]
