"""Runs programs in sessions of their own, which end with them."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def whole(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str] | None,
    output: int,
    errors: int | IO[bytes],
    text: bool = False,
) -> Iterator[subprocess.Popen[Any]]:
    """A command in a session of its own, without input; waited for at the end.

    If that is left by an exception, as when its time is over or an interrupt comes, all of the session is
    killed: what runs other programs would end without them.
    """
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        text=text,
        errors="replace" if text else None,
        start_new_session=True,
    ) as process:
        try:
            yield process
        except BaseException:
            # It may have ended by itself just now.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def run_whole(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    errors: IO[bytes],
    limit_s: float,
) -> int:
    """Runs a command so, its output dropped; returns its exit code. TimeoutExpired when its time is over."""
    output = subprocess.DEVNULL
    with whole(command, folder=folder, environment=environment, output=output, errors=errors) as process:
        return process.wait(timeout=limit_s)
