"""The cost model of TLB shootdowns. Pure: figures in, figures out.

Schildermans et al., Ptlbmalloc2, section 3.2: I interrupts over s sockets take

    cycles = a I / s + n a I (1 - 1/s) + C

with a the cycles of an interrupt within its socket, n how many times as dear one to another socket is, and C
all other work. (The paper prints a as the ratio cycles(local) / cycles(remote). That is a slip: its own a,
3200, is a number of cycles.) A program interrupts each other CPU that it runs on, so the interrupts of one
shootdown grow with the CPUs, up to the number of threads (figure 1a).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Section 3.2.2 and 3.2.3.
LOCAL_CYCLES = 3200.0
REMOTE = 3.0
VIRTUAL = 3.0
OVERCOMMITTED = 10.0

NATIVE, VIRT, OVERCOMMIT = "native", "virt", "overcommit"
ENVIRONMENTS = {
    NATIVE: "native",
    VIRT: "virtual machine",
    OVERCOMMIT: "overcommitted",
}


def socket_factor(sockets: int, remote: float = REMOTE) -> float:
    """What an interrupt costs over so many sockets, in interrupts within one: 1, 2, 2.33, 2.5 with n = 3."""
    return 1 / sockets + remote * (1 - 1 / sockets)


def cycles(
    interrupts: float,
    sockets: int = 1,
    *,
    local: float = LOCAL_CYCLES,
    remote: float = REMOTE,
    rest: float = 0.0,
) -> float:
    """The paper's formula; in whatever unit local and rest are."""
    return local * interrupts * socket_factor(sockets, remote) + rest


def others(threads: float, cpus: int) -> int:
    """The CPUs that one shootdown of a program interrupts, if all its threads run."""
    return int(max(0, min(threads, cpus) - 1))


def environment_factor(environment: str, sockets: int, remote: float) -> float:
    """What an interrupt costs, in native ones within one socket.

    The published worst case holds what several sockets cost, hidden from the guest as they are: it is not
    multiplied by them again.
    """
    spread = socket_factor(sockets, remote)
    if environment == NATIVE:
        return spread
    if environment == VIRT:
        return VIRTUAL * spread
    return max(OVERCOMMITTED, VIRTUAL * spread)


@dataclass(frozen=True)
class Estimate:
    """The time of one native interrupt within a socket, and where it is from."""

    source: str
    local_ns: float
    low_ns: float
    high_ns: float
    remote: float = REMOTE


@dataclass(frozen=True)
class Span:
    """A figure, and how far it may lie to either side."""

    value: float
    low: float
    high: float

    def __add__(self, other: "Span") -> "Span":
        return Span(self.value + other.value, self.low + other.low, self.high + other.high)


@dataclass(frozen=True)
class Target:
    """The machine to predict for."""

    cpus: int
    sockets: int = 1
    threads: int | None = None
    """How many of the program's threads run at once, where the user knows better than the count of them."""


@dataclass(frozen=True)
class Observed:
    """What a program did on the machine that it was measured on."""

    label: str
    interrupts: float
    shootdowns: float | None
    cpu_s: float
    cpus: int
    threads: float | None
    """With the first one; None where they were not counted."""
    calls: float | None = None
    """System calls that may begin a shootdown; None where they were not counted."""
    system_wide: bool = False
    """The interrupts are of all processes."""


@dataclass(frozen=True)
class Prediction:
    """What it would do there. Seconds are of CPU time, over all CPUs."""

    label: str
    interrupts: Span
    shootdown_s: Span
    rest_s: float

    @property
    def total_s(self) -> float:
        """All CPU time."""
        return self.rest_s + self.shootdown_s.value

    @property
    def share(self) -> Span:
        """Of its CPU time that goes into shootdowns."""

        def part(seconds: float) -> float:
            return seconds / (self.rest_s + seconds) if seconds else 0.0

        cost = self.shootdown_s
        return Span(part(cost.value), part(cost.low), part(cost.high))


def interrupt_ns(estimates: Sequence[Estimate], environment: str, sockets: int) -> Span:
    """The time of one interrupt there: by the first estimate, and the least and the most that any gives."""

    def scaled(ns: float, estimate: Estimate) -> float:
        return ns * environment_factor(environment, sockets, estimate.remote)

    first = estimates[0]
    return Span(
        scaled(first.local_ns, first),
        min(scaled(each.low_ns, each) for each in estimates),
        max(scaled(each.high_ns, each) for each in estimates),
    )


def interrupts_there(observed: Observed, target: Target) -> Span:
    """The same shootdowns on another number of CPUs.

    A program of one thread has interrupted CPUs that it ran on before; more CPUs do not make these more.
    The least is for a first thread that only waits for the others. The most is for calls that had nothing to
    flush here: with more threads at once a call is likelier to overlap another, and then flushes everything.
    """
    if target.cpus == 1:
        return Span(0.0, 0.0, 0.0)

    def scaled(threads: float) -> float:
        return (
            observed.interrupts
            * max(1, others(threads, target.cpus))
            / max(1, others(threads, observed.cpus))
        )

    if target.threads is not None:
        threads = float(target.threads)
        value = least = scaled(threads)
    elif observed.threads is None:
        threads = float("inf")
        value = least = scaled(threads)
    else:
        threads = observed.threads
        value, least = scaled(threads), scaled(threads - 1)
    most = value
    if observed.calls is not None and observed.interrupts > 0 and threads > 1:
        most = max(value, observed.calls * others(threads, target.cpus))
    return Span(value, min(value, least), max(most, least))


def predict(observed: Observed, target: Target, here_ns: float, there_ns: Span) -> Prediction:
    """What the work costs there: all but shootdowns takes what it took here."""
    interrupts = interrupts_there(observed, target)
    cost = Span(
        interrupts.value * there_ns.value * 1e-9,
        interrupts.low * there_ns.low * 1e-9,
        interrupts.high * there_ns.high * 1e-9,
    )
    rest = max(0.0, observed.cpu_s - observed.interrupts * here_ns * 1e-9)
    return Prediction(observed.label, interrupts, cost, rest)


def total(predictions: Iterable[Prediction]) -> Prediction:
    """Of several programs under one allocator."""
    first, *rest = predictions
    for each in rest:
        first = Prediction(
            first.label,
            first.interrupts + each.interrupts,
            first.shootdown_s + each.shootdown_s,
            first.rest_s + each.rest_s,
        )
    return first
