"""A simulated program: its time and memory are a function of the setting, so a search takes no time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from calm.commands.tune.search import Budget, Search, Tuning
from calm.commands.tune.space import Knobs, Point, Setting, spaces
from calm.commands.tune.study import Study
from calm.commands.tune.trial import Run
from calm.commands.tune.verdict import Preference
from calm.core.rounds import RunFailedError, StoppedError

TRIM = "glibc.malloc.trim_threshold"
TCACHE = "glibc.malloc.tcache_count"
ARENAS = "glibc.malloc.arena_max"

Cost = Callable[[Setting | None], tuple[float, float]]


def knob(setting: Setting | None, name: str) -> int | None:
    """The value of a knob; None where it is left alone."""
    value = setting.values.get(name) if setting else None
    return None if value is None else int(value)


@dataclass
class FakeRunner:
    """Runs nothing. Each run takes its time by a clock of its own."""

    cost: Cost
    noise: float = 0.0
    drift: float = 0.0
    """Every run is slower by so much than the one before it."""
    fails: Callable[[Setting | None], str | None] = lambda _: None
    """Or raises what ends the search."""
    stop_at: int | None = None
    seed: int = 1
    clock: float = 0.0
    log: list[Setting | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def run(self, setting: Setting | None) -> Run:
        if self.stop_at is not None and len(self.log) >= self.stop_at:
            raise StoppedError(2)
        time, memory = self.cost(setting)
        time *= (1 + self.drift) ** len(self.log)
        self.log.append(setting)
        self.clock += time
        if failure := self.fails(setting):
            raise RunFailedError(failure)
        spread = np.exp(self._random.normal(0, self.noise, 2)) if self.noise else (1, 1)
        return Run(float(time * spread[0]), float(memory * spread[1]))


@dataclass
class Watched:
    """Keeps what it gets."""

    phases: list[tuple[str, int | None]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    steps: int = 0

    @property
    def now(self) -> str:
        return self.phases[-1][0] if self.phases else ""

    def phase(self, what: str, total: int | None) -> None:
        self.phases.append((what, total))

    def step(self, front: Sequence[Point]) -> None:
        assert front
        self.steps += 1

    def say(self, line: str) -> None:
        self.said.append(line)


def glibc_space() -> dict[str, Knobs]:
    return spaces(["glibc"], {})[0]


def search(
    runner: FakeRunner,
    *,
    trials: int | None = 20,
    seconds: float | None = None,
    preference: Preference | None = None,
    seed: int = 1,
    watched: Watched | None = None,
    study: Study | None = None,
) -> Tuning:
    """A whole search."""
    budget = Budget(seconds, trials, now=lambda: runner.clock)
    budget.runs_s.append(runner.cost(None)[0])
    result = Tuning(preference=preference or Preference())
    study = study or Study(glibc_space(), seed=seed)
    return Search(study, runner.run, budget, result, watched or Watched()).run()
