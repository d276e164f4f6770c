"""The cost model of TLB shootdowns, as pure functions: docs/calm-predict.md explains it.

It is that of Schildermans et al., Ptlbmalloc2, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

# Section 3.2.2 and 3.2.3.
LOCAL_CYCLES = 3200.0
REMOTE = 3.0
VIRTUAL = 3.0
OVERCOMMITTED = 10.0

NATIVE, VIRT, OVERCOMMIT = "native", "virt", "overcommit"
ENVIRONMENTS = {NATIVE: "native", VIRT: "virtual machine", OVERCOMMIT: "overcommitted"}


@dataclass(frozen=True)
class Span:
    """A figure and its range."""

    value: float
    low: float
    high: float

    def __add__(self, other: Span) -> Span:
        return Span(self.value + other.value, self.low + other.low, self.high + other.high)

    def __sub__(self, other: Span) -> Span:
        return Span(self.value - other.value, self.low - other.high, self.high - other.low)

    def __mul__(self, factor: float) -> Span:
        return Span(self.value * factor, self.low * factor, self.high * factor)

    def range(self, text: Callable[[float], str]) -> str:
        """Its ends as a text; empty if they are the same."""
        return f"{text(self.low)} to {text(self.high)}" if self.low != self.high else ""


def exactly(value: float) -> Span:
    return Span(value, value, value)


@dataclass(frozen=True)
class Estimate:
    """The time of one native interrupt within a socket, and its source."""

    source: str
    local_ns: float
    low_ns: float
    high_ns: float
    remote: float = REMOTE


@dataclass(frozen=True)
class Target:
    """The machine to predict for."""

    cpus: int
    sockets: int = 1
    threads: int | None = None
    """Threads that run at once; replaces the number that was counted."""


@dataclass(frozen=True)
class Observed:
    """What a program did on the machine where it was measured."""

    label: str
    interrupts: float
    shootdowns: float | None
    cpu_s: float
    cpus: int
    threads: float | None
    """The initial thread included; None where they were not counted."""
    calls: float | None = None
    """System calls that may begin a shootdown; None where they were not counted."""
    system_wide: bool = False
    """The interrupts are of all processes."""


@dataclass
class Prediction:
    """What it would do on the target. Seconds are of CPU time, over all CPUs."""

    interrupts: Span
    shootdown_s: Span
    rest_s: float
    cpu_s: float = field(init=False)
    share: Span = field(init=False)
    """The share of shootdowns in its CPU time."""
    ratio: Span | None = None
    """The ratio of all CPU time to the first allocator's."""

    def __post_init__(self) -> None:
        cost = self.shootdown_s
        self.cpu_s = self.rest_s + cost.value
        self.share = Span(*(s / (self.rest_s + s) if s else 0.0 for s in (cost.value, cost.low, cost.high)))

    def __add__(self, other: Prediction) -> Prediction:
        return Prediction(
            self.interrupts + other.interrupts,
            self.shootdown_s + other.shootdown_s,
            self.rest_s + other.rest_s,
        )


def socket_factor(sockets: int, remote: float | None = None) -> float:
    """The cost of an interrupt over so many sockets, to one within a socket: 1, 2, 2.33, 2.5 with n = 3."""
    return 1 / sockets + (REMOTE if remote is None else remote) * (1 - 1 / sockets)


def environment_factor(environment: str, sockets: int, remote: float | None = None) -> float:
    """The cost of an interrupt, to a native one within one socket."""
    spread = socket_factor(sockets, remote)
    if environment == NATIVE:
        return spread
    # The published worst case includes the cost of sockets, which the guest cannot see.
    return VIRTUAL * spread if environment == VIRT else max(OVERCOMMITTED, VIRTUAL * spread)


def interrupt_ns(estimates: Sequence[Estimate], environment: str, sockets: int) -> Span:
    """The time of one interrupt on the target: by the first estimate, with the range over all."""
    spans = [
        Span(each.local_ns, each.low_ns, each.high_ns) * environment_factor(environment, sockets, each.remote)
        for each in estimates
    ]
    return Span(spans[0].value, min(each.low for each in spans), max(each.high for each in spans))


def others(threads: float, cpus: int) -> int:
    """The number of CPUs that one shootdown interrupts if all threads of the program run."""
    return int(max(0, min(threads, cpus) - 1))


def target_interrupts(observed: Observed, target: Target) -> Span:
    """The interrupts of the same shootdowns on another number of CPUs.

    At least those without the initial thread, at most those of every call that may begin a shootdown.
    """
    if target.cpus == 1:
        return exactly(0.0)

    def scaled(threads: float) -> float:
        # A program of one thread has interrupted CPUs that it ran on before; more CPUs do not add to these.
        factor = max(1, others(threads, target.cpus)) / max(1, others(threads, observed.cpus))
        return observed.interrupts * factor

    threads = inf if observed.threads is None else observed.threads
    if target.threads is not None:
        threads = target.threads
    value = high = scaled(threads)
    low = scaled(threads - 1) if target.threads is None else value
    if observed.calls is not None and observed.interrupts > 0 and threads > 1:
        high = max(value, observed.calls * others(threads, target.cpus))
    return Span(value, min(value, low), max(high, low))


def predict(observed: Observed, target: Target, observed_ns: float, target_ns: Span) -> Prediction:
    """The CPU time of the work on the target: all but shootdowns takes the time that it took."""
    found = target_interrupts(observed, target)
    cost = Span(found.value * target_ns.value, found.low * target_ns.low, found.high * target_ns.high)
    rest = max(0.0, observed.cpu_s - observed.interrupts * observed_ns * 1e-9)
    return Prediction(found, cost * 1e-9, rest)


def ratio(own: Prediction, base: Prediction, each_ns: Span) -> Span | None:
    """The ratio of all CPU time to the first allocator's."""
    if base.cpu_s == 0:
        return None
    value = own.cpu_s / base.cpu_s
    if own is base:
        return exactly(value)
    # The cost of an interrupt and the number of threads are the same for both, the further calls are not.
    mine, its = own.interrupts, base.interrupts
    counts = (mine.low, its.low), (mine.value, its.high), (mine.high, its.value), (mine.high, its.high)
    edges = [
        (own.rest_s + count * ns * 1e-9) / (base.rest_s + other * ns * 1e-9)
        for ns in (each_ns.low, each_ns.high)
        for count, other in counts
        if base.rest_s + other > 0
    ]
    return Span(value, min(value, *edges), max(value, *edges)) if edges else exactly(value)
