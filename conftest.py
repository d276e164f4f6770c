"""What concerns all tests: the seed of what they draw by chance, and the features that a build may lack.

The seed is another in each run, printed, and given again by CALM_TEST_SEED.
"""

import gc
import os
import random

import pytest
from features import lacks

SEED = "CALM_TEST_SEED"


def pytest_configure() -> None:
    """Draws it, if none is given. The workers of a run inherit it, so that all have the same."""
    os.environ.setdefault(SEED, str(random.randrange(1, 1 << 30)))


def pytest_report_header() -> str:
    """Before the tests run."""
    return f"seed: {SEED}={os.environ[SEED]}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Where tests have failed, and the header was left out for brevity."""
    if exitstatus and config.get_verbosity() < 0:
        terminalreporter.write_line(pytest_report_header())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests of features that the library was built without."""
    left_out = [item for item in items if any(lacks(mark.args[0]) for mark in item.iter_markers("feature"))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """What was collected stays to the end: the collector need not look at it, nor a forked child copy it."""
    gc.collect()
    gc.freeze()
