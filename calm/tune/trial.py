"""Running the program under a setting, beside the baseline: what one look at a setting is."""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from calm import report, said
from calm.errors import CalmError
from calm.measure import Measurement, measure
from calm.tune.space import Setting, Space, variables

# A program that ends sooner is run several times for one figure.
SHORT_S = 0.05
_REPEATS_MOST = 20
# So many times the baseline, and a second more, and a run is hopeless.
_PATIENCE = 5.0
_MORE_PATIENCE = 4.0
_SAMPLES = 100
_AVERAGE_S = 0.02
# The baseline, which is under whatever allocator the environment says.
AS_IT_IS = "CMD as it is now"


class Stopped(Exception):  # noqa: N818 - no error
    """The user wants it to end."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class BaselineError(CalmError):
    """The program itself fails, so that there is nothing to compare with."""


class OutOfTimeError(CalmError):
    """A single run takes more than there is."""


@dataclass(frozen=True)
class Run:
    """What one run took, or the mean of several short ones; or why it failed."""

    time_s: float
    memory_kib: float
    failure: str | None = None


class Runner(Protocol):
    """Runs the program; None is the baseline: as the user runs it now."""

    def run(self, setting: Setting | None) -> Run:
        """Raises Stopped if the user stops it."""
        ...


@dataclass
class ProgramRunner:
    """The real one."""

    command: tuple[str, ...]
    spaces: Sequence[Space]
    by_cpu_time: bool = False
    by_peak: bool = False
    show_output: bool = False
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    wall_s: float = 0.0
    """Of the baseline, once it is calibrated."""
    repeats: int = 1
    stop_signal: int | None = None
    """Set by whoever catches signals while no program runs."""
    said: dict[str, list[str]] = field(default_factory=dict)
    """By allocator, what calmalloc itself had to say."""
    _interval_ms: int = 10
    _slowest_s: float = 0.0

    def calibrate(self, limit_s: float | None) -> None:
        """Runs the baseline once, to learn how long it takes; this run warms up, and is not counted."""
        run, failure = self._measure(None, limit_s)
        if run.timed_out:
            raise OutOfTimeError("")
        if failure:
            raise BaselineError(failure)
        self.wall_s = max(run.wall_s, 1e-4)
        self.repeats = min(_REPEATS_MOST, math.ceil(SHORT_S / self.wall_s))
        self._interval_ms = max(1, min(10, int(self.wall_s * 1e3 / _SAMPLES)))
        self._slowest_s = self.wall_s
        # Where too few samples can be taken there is no average.
        self.by_peak |= self.wall_s < _AVERAGE_S

    def _measure(self, setting: Setting | None, limit_s: float | None) -> tuple[Measurement, str | None]:
        """One run; and why it failed, if it did, with the program's last words."""
        changed: Mapping[str, str] = {}
        if setting is not None:
            space = next(space for space in self.spaces if space.allocator == setting.allocator)
            changed = variables(setting, space, self.inherited)
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
                raise Stopped(run.interrupted_by)
            # With its output let through, nothing is in there, and the line has been seen.
            said.listen(self.said, setting.allocator if setting else AS_IT_IS, errors)
            return run, run.failure + report.last_words(errors) if run.failure else None

    def run(self, setting: Setting | None) -> Run:
        """See Runner."""
        times, sizes = [], []
        for _ in range(self.repeats):
            if self.stop_signal is not None:
                raise Stopped(self.stop_signal)
            # On a machine that is busy now and then the baseline may be slow, too.
            limit_s = _PATIENCE * self._slowest_s + 1.0
            run, failure = self._measure(setting, limit_s if setting else _MORE_PATIENCE * limit_s)
            if failure:
                if setting is None:
                    raise BaselineError(failure)
                return Run(run.wall_s, 0, failure)
            if setting is None:
                self._slowest_s = max(self._slowest_s, run.wall_s)
            times.append(run.user_s + run.system_s if self.by_cpu_time else run.wall_s)
            # A run too short to have an average has its peak, which is never less.
            average = None if self.by_peak else run.average_rss_kib
            sizes.append(run.peak_rss_kib if average is None else average)
        # The clock of CPU time has steps.
        return Run(max(sum(times), 1e-6) / len(times), max(sum(sizes), 1.0) / len(sizes))


@dataclass(frozen=True)
class Look:
    """A setting's time and memory, each divided by the baseline's run beside it."""

    time: float
    memory: float


@dataclass
class Pairs:
    """Runs of a setting and of the baseline in turn: A B, B A, and so on, so that drift cancels out."""

    runner: Runner
    _turned: bool = False

    def look(self, setting: Setting) -> Look | str:
        """One pair; or why the setting's run failed."""
        self._turned = not self._turned
        if self._turned:
            base, run = self.runner.run(None), self.runner.run(setting)
        else:
            run = self.runner.run(setting)
            base = self.runner.run(None)
        if failure := run.failure or base.failure:
            return failure
        return Look(run.time_s / base.time_s, run.memory_kib / base.memory_kib)


@dataclass
class Rounds:
    """Rounds of the baseline and several settings: time and memory of each, one figure for each round."""

    base: list[Run] = field(default_factory=list)
    runs: dict[Setting, list[Run]] = field(default_factory=dict)
    failures: dict[Setting, str] = field(default_factory=dict)

    def run(self, runner: Runner, settings: Sequence[Setting]) -> None:
        """One round more. The order turns from round to round; a round that is stopped leaves nothing."""
        alive: list[Setting | None] = [
            None,
            *(setting for setting in settings if setting not in self.failures),
        ]
        number = len(self.base)
        start = number // 2 % len(alive)
        order = alive[start:] + alive[:start]
        found: dict[Setting | None, Run] = {}
        for each in reversed(order) if number % 2 else order:
            found[each] = runner.run(each)
        self.base.append(found[None])
        for setting in settings:
            if setting in self.failures:
                continue
            run = found[setting]
            if run.failure:
                self.failures[setting] = run.failure
                self.runs.pop(setting, None)
            else:
                self.runs.setdefault(setting, []).append(run)
