"""A `calm` that starts at once: a fork of the test's process, which has its modules already.

Like `python -m calm` it is a process of its own, and so are its exit code, signals, exec, limits, environment
and caches. What differs is how it comes to `calm.cli.main`: not by Python's start, and with whatever the test
has patched.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from calm import cli

# Most commands print by these; and what takes longest to import is needed with some words only.
for module in ("numpy", "rich.progress", "rich.table"):
    import_module(module)
NEEDED_WITH = {"tune": "optuna", "--plot": "matplotlib.pyplot"}


def run(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | Path | None = None,
    set_up: Callable[[], object] = lambda: None,
    deadline_s: float = 600,
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run does it, output and errors being pipes. Before calm begins, set_up is called."""
    if arguments and (listed := cli.cli.listed.get(arguments[0])):
        import_module(listed.module)
    for word in NEEDED_WITH.keys() & set(arguments):
        import_module(NEEDED_WITH[word])
    with contextlib.ExitStack() as reading, contextlib.ExitStack() as writing:
        output, output_end = _pipe(reading, writing)
        errors, errors_end = _pipe(reading, writing)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child makes no use of
            child = os.fork()
        if child == 0:
            _be_calm(arguments, env, cwd, set_up, output_end, errors_end)
        try:
            writing.close()
            printed = _read(time.monotonic() + deadline_s, output, errors)
            _, status = os.waitpid(child, 0)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
    return subprocess.CompletedProcess(
        ["calm", *arguments], os.waitstatus_to_exitcode(status), printed[output], printed[errors]
    )


def _pipe(reading: contextlib.ExitStack, writing: contextlib.ExitStack) -> tuple[int, int]:
    """Both ends of a pipe, each closed with its stack."""
    read_end, write_end = os.pipe()
    reading.callback(os.close, read_end)
    writing.callback(os.close, write_end)
    return read_end, write_end


def _read(deadline: float, *ends: int) -> dict[int, str]:
    """What comes from each end of a pipe until nobody can write to it any more."""
    found = dict.fromkeys(ends, b"")
    left = set(ends)
    while left:
        ready, _, _ = select.select(left, [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"calm has not ended; it printed {found}")
        for end in ready:
            data = os.read(end, 1 << 16)
            found[end] += data
            if not data:
                left.remove(end)
    return {end: data.decode().replace("\r\n", "\n") for end, data in found.items()}


def _be_calm(
    arguments: Sequence[str],
    env: Mapping[str, str],
    cwd: str | Path | None,
    prepare: Callable[[], object],
    output: int,
    errors: int,
) -> None:
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(errors, 2)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler) and handler is not signal.default_int_handler:
                signal.signal(number, signal.SIG_DFL)
        if cwd is not None:
            os.chdir(cwd)
        prepare()
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["calm", *arguments]
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
