"""Waiting for conditions, with timeouts that no slow machine exceeds."""

import time
from collections.abc import Callable

TIMEOUT_S = 1200.0
"""More than ten times what anything here takes; less than pytest's own limit, which has no better message."""


def wait_until(condition: Callable[[], object], what: object = "") -> None:
    """Looks again and again."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
