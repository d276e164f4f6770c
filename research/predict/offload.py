"""Whether running the allocator on a CPU of its own would pay: two models, their document and its report.

docs/calm-predict.md explains the models: `sync` is that of Li et al., NextGen-Malloc, section 4.1, and
`on` that of calmoffload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from calm.core import report
from calm.core.documents import Document
from calm.core.errors import USAGE, CalmError
from calm.core.options import Output
from research.predict.calibration import KINDS, SIBLING, Messages, Pair, finish
from research.predict.model import Span, exactly

# Section 4.1. It does not state that each call has four atomics; that follows from the 75 billion cycles.
ATOMIC_CYCLES = 67.0
ATOMICS = 4.0
MISS_CYCLES = 214.0

# A smaller saving is not worth a CPU.
_MIN_SAVING = 0.01
# With less of a CPU idle there is none for the server.
_MIN_IDLE = 0.1
# The quota below which calmoffload starts no server.
_MIN_QUOTA = 2.0
_NOTHING = exactly(0.0)

# The figures of Work, which --figures can replace.
FIGURES = {
    "mallocs": "calls of malloc and its kin",
    "frees": "calls of free",
    "cache_misses": "calls that leave the fast path, as in calmalloc's report",
    "large": "large_allocations, as in calmalloc's report",
    "cpu_s": "CPU time, seconds",
    "wall_s": "wall time, seconds",
    "refill_s": "seconds in slow paths that fetch small blocks",
    "free_s": "seconds in slow paths of free",
    "large_s": "seconds in fetching large blocks",
    "fault_s": "seconds in page faults of its own code",
    "hardware_misses": "last-level cache and TLB misses",
    "atomic_cycles": f"cycles of an atomic operation ({ATOMIC_CYCLES:g})",
    "atomics": f"atomic operations of a call ({ATOMICS:g})",
    "miss_cycles": f"cycles of a miss ({MISS_CYCLES:g})",
}
TIMES = {
    "refill_s": "fetching small blocks",
    "free_s": "taking blocks back",
    "large_s": "fetching large blocks (waited for)",
    "fault_s": "page faults of its own code (moved at best)",
}
SLOW = tuple(TIMES)[:3]


@dataclass
class Work:
    """The calls of a program into its allocator, and their time, as FIGURES has them; None: not known.

    Seconds are of CPU time. Those in slow paths include the kernel's part. Cycles are the paper's constants.
    """

    mallocs: float | None = None
    frees: float | None = None
    cache_misses: float | None = None
    large: float | None = None
    cpu_s: float | None = None
    wall_s: float | None = None
    refill_s: Span | None = None
    free_s: Span | None = None
    large_s: Span | None = None
    fault_s: Span | None = None
    hardware_misses: float | None = None
    atomic_cycles: float = ATOMIC_CYCLES
    atomics: float = ATOMICS
    miss_cycles: float = MISS_CYCLES

    @property
    def call_cycles(self) -> float:
        return self.atomics * self.atomic_cycles

    @property
    def calls(self) -> float | None:
        return None if self.mallocs is None or self.frees is None else self.mallocs + self.frees

    @property
    def cpus_used(self) -> float | None:
        return self.cpu_s / self.wall_s if self.cpu_s is not None and self.wall_s else None

    @property
    def misses_per_call(self) -> float | None:
        """Hardware misses; an average over the whole program."""
        return None if self.hardware_misses is None or not self.calls else self.hardware_misses / self.calls

    def share(self, seconds: Span) -> Span | None:
        return seconds * (1 / self.cpu_s) if self.cpu_s else None


@dataclass(frozen=True)
class Cpus:
    """The CPUs of the affinity mask, and the control group's quota in CPUs."""

    mask: int
    quota: float | None = None

    @property
    def available(self) -> float:
        """CPUs that can be busy at once, on average."""
        return float(self.mask) if self.quota is None else min(float(self.mask), self.quota)


@dataclass(frozen=True)
class Latency:
    """The costs of a message until its answer: by cache lines that both sides poll, or to a sleeping server.

    Cycles are those of the clock.
    """

    round_trip_ns: Span
    wake_ns: Span | None
    ghz: float


@dataclass
class Sync:
    """The paper's model: by its constants, and by this machine's latency where that is known.

    Costs are of all calls, shares of the CPU time; the break-even is misses per call that must be saved.
    """

    calls: float | None
    published_cycles: float | None
    published_break_even: float
    call_ns: Span | None = None
    cost_s: Span | None = None
    break_even: Span | None = None
    share: Span | None = None


@dataclass
class On:
    """The model of calmoffload. The low end of a cost and of a saving is its minimum."""

    messages: float | None = None
    """A magazine each; each large block is one at its allocation, and one at its free."""
    per_call: float | None = None
    message_ns: Span | None = None
    """The average over the kinds of messages."""
    cost_s: Span | None = None
    cost_share: Span | None = None
    break_even: Span | None = None
    """Misses per call, if nothing but misses paid for the messages."""
    moved_s: Span | None = None
    """Moved from the program's threads, and not waited for."""
    server_s: float | None = None
    saved_s: Span | None = None
    saved_share: Span | None = None
    asleep: float | None = None
    """The probability that a message finds the server asleep."""
    crowded: bool = False
    """More would move than one server, or the idle CPU time, has room for."""


@dataclass(frozen=True)
class Verdict:
    """The conclusion on one way to offload; pays is None where the figures do not decide."""

    way: str
    pays: bool | None
    text: str


def sync(work: Work, latency: Latency | None) -> Sync:
    """Every call is a message that is waited for."""
    calls, cycles = work.calls, work.call_cycles
    found = Sync(calls, None if calls is None else calls * cycles, cycles / work.miss_cycles)
    if latency is not None:
        found.call_ns = latency.round_trip_ns
        found.break_even = found.call_ns * (latency.ghz / work.miss_cycles)
        if calls is not None:
            found.cost_s = found.call_ns * (calls * 1e-9)
            found.share = work.share(found.cost_s)
    return found


def _message_costs(cache_misses: float, large: float, line: Span, wake: Span) -> Span:
    """The time of all messages in the program's threads, by that of a cache line that changes hands."""
    # Every block that is allocated is freed some time: half of the magazines are refills.
    refills = cache_misses / 2
    flushes, called = refills + large, refills / 2
    low = (refills + flushes + 2 * large) * line.low
    value = (2 * refills + 2 * flushes + 4 * large) * line.value + large * wake.value
    high = (6 * called + 2 * flushes + 4 * large) * line.high + (called + large) * wake.high
    return Span(value, low, high) * 1e-9


def on(work: Work, latency: Latency | None, cpus: Cpus) -> On:
    """Each magazine and each large block is a message."""
    if work.cache_misses is None or work.large is None:
        return On()
    messages = work.cache_misses + 2 * work.large
    found = On(messages, per_call=messages / work.calls if work.calls else None)
    if latency is None:
        return found
    wake = latency.wake_ns or _NOTHING
    if latency.wake_ns is not None and work.wall_s:
        # If messages come by chance, and the server polls for as long as waking it takes before it sleeps.
        found.asleep = math.exp(-wake.value * messages / (work.wall_s * 1e9))
    wake *= found.asleep or 0.0
    cost = _message_costs(work.cache_misses, work.large, latency.round_trip_ns * 0.5, wake)
    found.cost_s, found.cost_share = cost, work.share(cost)
    if messages:
        found.message_ns = cost * (1e9 / messages)
    if work.calls:
        found.break_even = cost * (1e9 * latency.ghz / work.calls / work.miss_cycles)
    refill, free, large = work.refill_s, work.free_s, work.large_s
    if refill is None or free is None or large is None:
        return found
    faults = work.fault_s or _NOTHING
    # At worst every other magazine is waited for; at best the server takes page faults as well.
    moved = Span(refill.value + free.value, refill.low / 2 + free.low, refill.high + free.high + faults.high)
    found.server_s = refill.value + free.value + large.value
    if work.wall_s and work.cpus_used is not None:
        # Its large blocks are waited for, and it has to fetch them all the same.
        alone = work.wall_s * min(1.0, max(0.0, cpus.available - work.cpus_used))
        room = Span(*(max(0.0, alone - each) for each in (large.value, large.high, large.low)))
        found.crowded = moved.value > room.value
        moved = Span(min(moved.value, room.value), min(moved.low, room.low), min(moved.high, room.high))
    found.moved_s, found.saved_s = moved, moved - cost
    found.saved_share = work.share(found.saved_s)
    return found


def obstacle(work: Work, cpus: Cpus) -> str | None:
    """Why no CPU can be spared, whatever it would save."""
    if cpus.mask == 1:
        return "there is one CPU to run on, and none for a server"
    if cpus.quota is not None and cpus.quota < _MIN_QUOTA:
        return f"its control group may use {cpus.quota:.3g} CPUs: a server would take its time from them"
    used = work.cpus_used
    if used is not None and used > cpus.available - _MIN_IDLE:
        return f"it keeps {used:.2f} of {cpus.available:.4g} CPUs busy by itself: none is left for a server"
    return None


def percent(share: float) -> str:
    """7.1 %; with one significant digit below 0.1 %."""
    return f"{100 * share:,.1f} %" if abs(share) >= 0.001 else f"{100 * share:.1g} %"


def judge_on(work: Work, found: On, cpus: Cpus, missing: str) -> Verdict:
    """The verdict on `on`. missing: why the time in slow paths is not known."""
    if (why := obstacle(work, cpus)) is None:
        share, saved, moved = found.cost_share, found.saved_share, found.moved_s
        if found.messages is None or share is None or saved is None or moved is None or not work.cpu_s:
            needs = (
                f"; its slow paths must take more than {percent(share.value)} of the time" if share else ""
            )
            return Verdict("on", None, f"calmoffload: unknown, because {missing}{needs}")
        saves = f"about {percent(saved.value)} (between {percent(saved.low)} and {percent(saved.high)})"
        if saved.value >= _MIN_SAVING:
            return Verdict("on", True, f"calmoffload should save {saves}")
        if moved.high / work.cpu_s < _MIN_SAVING:
            why = f"at most {percent(moved.high / work.cpu_s)} of its time could move to a server"
        elif saved.value <= 0:
            moves = percent(moved.value / work.cpu_s)
            why = f"messages would take {percent(share.value)} of its time, and {moves} would move: "
            why += saves.replace("about", "it saves", 1)
        else:
            why = f"it should save {saves}, which is too little for a CPU"
    return Verdict("on", False, f"calmoffload will not pay because {why}")


def judge_sync(work: Work, found: Sync, cpus: Cpus) -> Verdict:
    """The verdict on `sync`: no model predicts the misses that it saves, so it is never known to pay."""
    need = found.break_even.value if found.break_even else found.published_break_even
    have, why = work.misses_per_call, obstacle(work, cpus)
    if why is None and have is not None and have < need:
        where = "here" if found.break_even else "by the published costs"
        why = f"it must save {need:.2f} misses a call {where}, and there are {have:.2f}"
    if why is not None:
        return Verdict("sync", False, f"the paper's scheme will not pay because {why}")
    of = f" of {have:.2f}" if have is not None else ", which are not counted"
    adds = f"; if it saves none, it adds {percent(found.share.value)} to its time" if found.share else ""
    return Verdict(
        "sync", None, f"the paper's scheme pays only if it saves {need:.2f} misses a call{of}{adds}"
    )


def with_figures(work: Work, given: Mapping[str, float]) -> Work:
    """The user's figures in place of those that were found. Slow time of one kind given, others are none."""
    found = {name: exactly(value) if name in TIMES else value for name, value in given.items()}
    if any(name in found for name in SLOW):
        for name in SLOW:
            if getattr(work, name) is None:
                found.setdefault(name, _NOTHING)
    if "cache_misses" in found and work.large is None:
        found.setdefault("large", 0.0)
    return replace(work, **found)  # type: ignore[arg-type]


class OffloadPrediction(Document, tag="calm-offload-prediction", kw_only=True):
    """What `calm predict offload` writes: the cost and the saving of an allocator on a CPU of its own."""

    work: Work
    estimated: Mapping[str, Span]
    """The ranges of the estimated numbers of calls."""
    threads: float | None
    """The initial thread included; None where they were not counted."""
    cpus: Cpus
    cpus_used: float | None
    misses_per_call: float | None
    latency: Latency | None
    measured: Messages | None
    sync: Sync
    on: On
    verdicts: list[Verdict]
    notes: list[str]


@dataclass
class Found:
    """What the models start from, and notes on it."""

    work: Work
    missing: str = "no figures of its messages are given (cache_misses, large)"
    """Why others are not known."""
    estimated: dict[str, Span] = field(default_factory=dict)
    threads: float | None = None
    notes: list[str] = field(default_factory=list)


def _span(pairs: Sequence[Pair], everywhere: Sequence[Pair], name: str) -> Span | None:
    """The median of the pairs, with the range over all."""
    near = sorted(each.median for pair in pairs if (each := getattr(pair, name)))
    far = [each for pair in everywhere if (each := getattr(pair, name))]
    if not near:
        return None
    return Span(near[len(near) // 2], min(each.low for each in far), max(each.high for each in far))


def latency(measured: Messages, ghz: float | None) -> Latency:
    """Of the nearest CPUs that are not threads of one core, if there are others; ranges are over all."""
    kinds = measured.kinds()
    everywhere = [pair for pairs in kinds.values() for pair in pairs]
    nearest = next((pairs for kind, pairs in kinds.items() if kind != SIBLING), everywhere)
    round_trip = _span(nearest, everywhere, "round_trip_ns")
    clock = ghz or (measured.reference_mhz or 0.0) / 1000
    if not clock:
        raise CalmError("the clock that counts cycles is not known here: give it by --ghz", USAGE)
    assert round_trip is not None
    return Latency(round_trip, _span(nearest, everywhere, "wake_round_trip_ns"), clock)


def make(
    found: Found, given: Mapping[str, float], cpus: Cpus, measured: Messages | None, costs: Latency | None
) -> OffloadPrediction:
    """Applies both models, with the user's figures in place of those that were found."""
    work = with_figures(found.work, given)
    by_sync, by_on = sync(work, costs), on(work, costs, cpus)
    missing = "the cost of a message here is not known" if measured is None else found.missing
    notes = list(found.notes)
    if by_on.crowded:
        notes.append("more would move than one server, or the idle CPU time, has room for: the rest stays")
    return OffloadPrediction(
        work=work,
        estimated=found.estimated,
        threads=found.threads,
        cpus=cpus,
        cpus_used=work.cpus_used,
        misses_per_call=work.misses_per_call,
        latency=costs,
        measured=measured,
        sync=by_sync,
        on=by_on,
        verdicts=[judge_sync(work, by_sync, cpus), judge_on(work, by_on, cpus, missing)],
        notes=notes,
    )


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"-{report.duration(-value)}" if value < 0 else report.duration(value)


def _misses(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def _between(span: Span | None, text: Callable[[float], str], unit: str = "") -> str:
    """A figure and its range, with the unit of both."""
    if span is None:
        return "-"
    ends = span.range(text)
    return text(span.value) + unit + (f" ({ends})" if ends else "")


def _terms(made: OffloadPrediction) -> list[str]:
    """The figures of the models, in sentences."""
    work = made.work
    lines = []
    if work.calls is not None:
        lines.append(
            f"{_count(work.mallocs)} malloc + {_count(work.frees)} free = {_count(work.calls)} calls"
            + (f"; {_count(work.cache_misses)} left the fast path" if work.cache_misses is not None else "")
            + (f", {_count(work.large)} large blocks" if work.large is not None else "")
        )
    if work.cpu_s is not None and work.wall_s is not None:
        used = f", {made.cpus_used:.2f} CPUs in use" if made.cpus_used is not None else ""
        threads = f" ({made.threads:,.0f} threads in all)" if made.threads and made.threads > 1 else ""
        lines.append(
            f"{report.duration(work.cpu_s)} of CPU time in {report.duration(work.wall_s)}{used}{threads}"
        )
    slow = [
        f"{what} {_between(span, _seconds)}"
        for name, what in TIMES.items()
        if (span := getattr(work, name)) is not None
    ]
    if slow:
        lines.append(f"slow paths: {', '.join(slow)}")
    lines.append(
        f"published: {work.atomics:g} atomics of {work.atomic_cycles:g} cycles for each call, "
        f"{work.miss_cycles:g} cycles for a cache or TLB miss"
    )
    if made.misses_per_call is not None:
        lines.append(
            f"{_count(work.hardware_misses)} cache and TLB misses, {made.misses_per_call:.2f} a call: "
            "no model predicts how many of them would be saved"
        )
    if made.measured and made.latency:
        kinds = ", ".join(KINDS[kind] for kind in made.measured.kinds())
        wake, atomic = made.latency.wake_ns, made.measured.atomic_ns
        lines.append(
            f"measured here: a message and its answer {made.latency.round_trip_ns.value:,.0f} ns ({kinds}); "
            + (f"waking a server that sleeps {wake.value:,.0f} ns; " if wake else "")
            + (f"an atomic {atomic.median:.1f} ns; " if atomic else "")
            + f"cycles by a clock of {made.latency.ghz:.2f} GHz"
        )
    if made.on.asleep is not None:
        chance = f"{made.on.asleep:.0%}"
        lines.append(
            f"a message finds the server asleep with a probability of {chance}: this adds to the cost"
        )
    quota = "" if made.cpus.quota is None else f", by the control group's quota {made.cpus.quota:.3g} of them"
    lines.append(f"CPUs that it may run on: {made.cpus.mask}{quota}")
    return lines


def print_prediction(made: OffloadPrediction, output: Output) -> None:
    by_sync, by_on, whole = made.sync, made.on, "{:,.0f}".format
    calls, total, share = _count(by_sync.calls), "-", "-"
    if by_sync.published_cycles is not None:
        total = f"{by_sync.published_cycles:,.0f} cycles"
        if made.latency and made.work.cpu_s:
            share = percent(by_sync.published_cycles / made.latency.ghz * 1e-9 / made.work.cpu_s)
    message = f"{made.work.call_cycles:,.0f} cycles"
    each_ns = _between(by_sync.call_ns, whole, " ns"), _between(by_on.message_ns, whole, " ns")
    even = _between(by_sync.break_even, _misses), _between(by_on.break_even, _misses)
    headings = ("sync, published", "sync, here", "on, here")
    table = report.table("", *headings, right=headings)
    for row in (
        ("messages", calls, calls, _count(by_on.messages)),
        ("messages a call", "1", "1", "-" if by_on.per_call is None else f"{by_on.per_call:.3g}"),
        ("a message", message, *each_ns),
        ("all of them", total, _between(by_sync.cost_s, _seconds), _between(by_on.cost_s, _seconds)),
        ("share of the time", share, _between(by_sync.share, percent), _between(by_on.cost_share, percent)),
        ("break-even, misses a call", f"{by_sync.published_break_even:.2f}", *even),
        ("moved to the server", "waited for", "waited for", _between(by_on.moved_s, _seconds)),
        ("saved", "", "", _between(by_on.saved_s, _seconds)),
        ("saved, share of the time", "", "", _between(by_on.saved_share, percent)),
    ):
        if any(cell not in ("", "-") for cell in row[1:]):
            table.add_row(*row)
    title = "the allocator on a CPU of its own"
    verdicts = (verdict.text for verdict in made.verdicts)
    finish(output, made, title, table, _terms(made), made.notes, verdicts)
