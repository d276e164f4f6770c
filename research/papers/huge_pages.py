"""Transparent huge pages: the system's mode, set for a while if asked to, and how many a program has.

The mode is put back whatever ends this process, SIGKILL included: a shell that outlives it waits for the end
of a pipe. It is no descendant, since the suite ends all of these after each run. One run at a time may set
it: a second one would take `always` for what to put back.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from calm.core import proc
from calm.core.errors import CalmError
from calm.core.progress import RoundsBar
from research.bench.results import Results

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
INTERVAL_S = 0.05
PEAK = "peak_anon_huge_kib"

# How long a run that has just ended may take to put its mode back.
_TIMEOUT_S = 2.0
# A background job's input would be /dev/null, were it not named.
_GUARD = 'exec 3<&0; (cat <&3 >/dev/null; echo "$0" >"$1") & '


def mode(path: Path = MODE) -> str:
    """The word that is chosen, or "unknown"."""
    try:
        found = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return "unknown"
    return found[1] if found else "unknown"


@contextmanager
def _alone(path: Path) -> Iterator[int]:
    """A lock on the setting: the descriptor, for the guard to keep until the mode is back."""
    with path.open() as file:
        # Higher than those that the guard's shell uses itself.
        held = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 10)
    try:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CalmError(f"another run has set {path}, and is not done yet") from None
                time.sleep(0.05)
        yield held
    finally:
        os.close(held)


@contextmanager
def always(path: Path = MODE) -> Iterator[None]:
    """The mode `always` for a while. Must begin before this process adopts orphans."""
    if mode(path) == "unknown" or not os.access(path, os.W_OK):
        raise CalmError(f"{path} cannot be written: it needs root, and a kernel with huge pages")
    with _alone(path) as held:
        before = mode(path)
        guard = subprocess.Popen(
            ["sh", "-c", _GUARD, before, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(held,),
        )
        guard.wait()
        try:
            path.write_text("always")
            yield
        finally:
            path.write_text(before)
            if guard.stdin:
                guard.stdin.close()


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _anon_huge_kib(pid: int) -> int | None:
    try:
        return proc.rollup(pid).get("AnonHugePages")
    except CalmError:
        return None


def of_programs(root: int) -> int | None:
    """KiB of huge pages of all that the probes below a process run; None where nothing runs, or tells."""
    try:
        waiting = [pid for probe in _children(root) for pid in _children(probe)]
        total: int | None = None
        while waiting:
            pid = waiting.pop()
            if (huge := _anon_huge_kib(pid)) is not None:
                total = (total or 0) + huge
            waiting += _children(pid)
    except OSError:
        return None
    return total


class Sampler:
    """Samples every 50 ms, in a thread that blocks all signals: the waiting thread gets them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peak: int | None = None
        self._on = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._on.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(INTERVAL_S):
            self._on.wait()
            found = of_programs(os.getpid())
            with self._lock:
                if found is not None and self._on.is_set():
                    self._peak = max(found, self._peak or 0)

    def begin(self) -> None:
        with self._lock:
            self._peak = None
            self._on.set()

    def end(self) -> int | None:
        """It has ended: its peak, or None where it was too short, or the kernel does not tell."""
        with self._lock:
            self._on.clear()
            return self._peak


class Switching(RoundsBar):
    """Sets the mode before each run, by its case.

    Within `always`, whose guard restores the former mode. Between runs the mode is as for other cases.
    """

    def __init__(self, cases: Container[str], otherwise: str, path: Path = MODE) -> None:
        super().__init__()
        self._cases, self._otherwise, self._path = cases, otherwise, path
        self._mode = ""
        self._set(otherwise)

    def _set(self, wanted: str) -> None:
        if wanted != self._mode:
            self._path.write_text(wanted)
            self._mode = wanted

    def turn(self, number: int, row: str, side: str) -> None:
        self._set("always" if row in self._cases else self._otherwise)
        super().turn(number, row, side)


class Sampling(RoundsBar):
    """Notes each run's peak of huge pages."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler
        self._turn = (0, "", "")
        self.peaks: dict[tuple[int, str, str], int | None] = {}
        """By round, case and allocator."""

    def turn(self, number: int, row: str, side: str) -> None:
        super().turn(number, row, side)
        self._turn = (number, row, side)
        self._sampler.begin()

    def done(self, row: str, side: str, seconds: float) -> None:
        self.peaks[self._turn] = self._sampler.end()
        super().done(row, side, seconds)

    def note(self, results: Results) -> None:
        for row in results.rows:
            for side in row.sides:
                for run in side.runs:
                    peak = self.peaks.get((run.round, row.name, side.label))
                    run.figures[PEAK] = float(peak) if peak is not None else None
        results.how[PEAK] = f"smaps_rollup of the process tree, every {INTERVAL_S * 1e3:.0f} ms"
