"""Runs the program under a setting, and pairs of such a run with one of the baseline."""

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from statistics import fmean, geometric_mean
from types import FrameType

from calm.commands.tune import space
from calm.commands.tune.space import Point, Setting
from calm.core import messages, report
from calm.core.errors import CalmError
from calm.core.measure import Measurement, measure
from calm.core.rounds import RunFailedError, StoppedError

# A shorter program is run several times for one figure.
SHORT_S = 0.05
_MAX_REPEATS = 20
# A run is killed after this many times the baseline's time and a second more: the baseline later than others.
_TIMEOUT_TIMES = 5.0
_BASELINE_TIMEOUT_TIMES = 4.0
_SAMPLES = 100
_MIN_AVERAGE_S = 0.02
# The baseline, which runs under whatever allocator the environment sets.
AS_IT_IS = "CMD as it is now"
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Handles the signals that stop a command, except those that are ignored, as under nohup."""
    old = {n: signal.signal(n, handler) for n in _STOPPING if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


class BaselineError(CalmError):
    """The program fails without any setting, so that there is nothing to compare with."""


@dataclass(frozen=True)
class Run:
    """What one run took, or the mean of several short ones."""

    time_s: float
    memory_kib: float


Runner = Callable[[Setting | None], Run]
"""Runs the program under a setting, or the baseline (None).

Raises RunFailedError if the program fails under the setting, BaselineError if it fails without, and
StoppedError if the user stops it.
"""


@dataclass
class ProgramRunner:
    """Runs a real program."""

    command: tuple[str, ...]
    by_cpu_time: bool = False
    by_peak: bool = False
    show_output: bool = False
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    wall_s: float = 0.0
    """Of the baseline, once it is calibrated."""
    repeats: int = 1
    stop_signal: int | None = None
    """Set by a signal handler while no program runs."""
    messages: dict[str, list[str]] = field(default_factory=dict)
    """What calmalloc printed, by allocator."""
    _interval_ms: int = 10
    _slowest_s: float = 0.0

    def calibrate(self, limit_s: float | None) -> None:
        """Runs the baseline once, which also warms up, to learn how long it takes."""
        run, failure = self._measure(None, limit_s)
        if run.timed_out:
            raise CalmError(f"one run takes longer than --for {limit_s:g}s allows")
        if failure:
            raise BaselineError(failure)
        self.wall_s = max(run.wall_s, 1e-4)
        self.repeats = min(_MAX_REPEATS, math.ceil(SHORT_S / self.wall_s))
        self._interval_ms = max(1, min(10, int(self.wall_s * 1e3 / _SAMPLES)))
        self._slowest_s = self.wall_s
        # A shorter run has too few samples for an average.
        self.by_peak |= self.wall_s < _MIN_AVERAGE_S

    def _measure(self, setting: Setting | None, limit_s: float | None) -> tuple[Measurement, str | None]:
        """One run; and why it failed, if it did, with the program's last line."""
        changed = space.variables(setting, self.inherited) if setting else {}
        with tempfile.TemporaryFile() as errors:
            run = measure(
                self.command,
                changed,
                groups=(),
                interval_ms=self._interval_ms,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if self.show_output else subprocess.DEVNULL,
                stderr=None if self.show_output else errors,
                inherited=self.inherited,
                limit_s=limit_s,
            )
            if run.interrupted_by is not None:
                raise StoppedError(run.interrupted_by)
            # Empty with --show-output, which has let calmalloc's messages through.
            messages.listen(self.messages, setting.allocator if setting else AS_IT_IS, errors)
            return run, run.failure + report.last_words(errors) if run.failure else None

    def run(self, setting: Setting | None) -> Run:
        times, sizes = [], []
        for _ in range(self.repeats):
            if self.stop_signal is not None:
                raise StoppedError(self.stop_signal)
            # A machine that is busy for a while slows the baseline, too.
            limit_s = _TIMEOUT_TIMES * self._slowest_s + 1.0
            run, failure = self._measure(setting, limit_s if setting else _BASELINE_TIMEOUT_TIMES * limit_s)
            if failure:
                raise RunFailedError(failure) if setting else BaselineError(failure)
            if setting is None:
                self._slowest_s = max(self._slowest_s, run.wall_s)
            times.append(run.user_s + run.system_s if self.by_cpu_time else run.wall_s)
            # A run too short for an average has its peak, which is never less.
            average = None if self.by_peak else run.average_rss_kib
            sizes.append(run.peak_rss_kib if average is None else average)
        # The clock of CPU time has steps.
        return Run(max(fmean(times), 1e-6 / len(times)), max(fmean(sizes), 1.0))


@dataclass(frozen=True)
class Pair:
    """A setting's time and memory, each divided by the baseline's of the run beside it."""

    time: float
    memory: float


@dataclass
class Tried:
    """All that the search knows of a setting."""

    setting: Setting
    pairs: list[Pair] = field(default_factory=list)
    failure: str | None = None
    machines: list[str] = field(default_factory=list)

    @property
    def point(self) -> Point:
        time, memory = (geometric_mean(ratios) for ratios in zip(*map(astuple, self.pairs), strict=True))
        return Point(self.setting, time, memory)


@dataclass
class Pairs:
    """Runs of a setting and of the baseline in turn: A B, B A, and so on, so that drift cancels out.

    core.rounds does not fit here: it takes all sides and the number of rounds beforehand. The optimizer names
    the next setting only when it has the figures of the last one, and these say whether another pair is worth
    its time.
    """

    run: Runner
    base: Setting | None = None
    _base_first: bool = False

    def measure(self, setting: Setting) -> Pair:
        self._base_first = not self._base_first
        if self._base_first:
            base, run = self.run(self.base), self.run(setting)
        else:
            run, base = self.run(setting), self.run(self.base)
        return Pair(run.time_s / base.time_s, run.memory_kib / base.memory_kib)
