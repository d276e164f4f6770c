"""Whether running the allocator on a CPU of its own would pay: two models. Pure: figures in, figures out.

Li et al., NextGen-Malloc, section 4.1 (`sync`): every malloc and every free is a message that is waited for.
The work itself is waited for too, so nothing can pay for messages but cache and TLB misses saved:

    cycles = calls x atomics of a call x cycles of an atomic
    misses that each call must save = atomics of a call x cycles of an atomic / cycles of a miss

calmalloc's own (`on`): a CPU's cache of free blocks stays where it is, and only what leaves the fast path is
a message: a magazine of blocks that goes or comes, or a large block. A magazine that goes is not waited for,
one that comes is prepared ahead where that can be foreseen, and a large block is waited for. What is not
waited for is time saved: in the allocator's slow paths, with the page faults and memory calls beneath them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from calm.predict.limits import Cpus
from calm.predict.model import Span

# Section 4.1. That each call has four atomics is not said, but follows from the 75 billion cycles.
ATOMIC_CYCLES = 67.0
ATOMICS = 4.0
MISS_CYCLES = 214.0

# What saves less of the time is not worth a CPU.
LITTLE = 0.01
# With less of a CPU idle there is none for the server.
IDLE_LEAST = 0.1
# The quota below which calmalloc declines to offload.
QUOTA_LEAST = 2.0


@dataclass(frozen=True)
class Work:
    """What a program asks of its allocator, and what that takes now. None: not known.

    Seconds are of CPU time.
    """

    mallocs: float | None = None
    frees: float | None = None
    """Calls that return memory."""
    cache_misses: float | None = None
    """Calls that left the fast path with a magazine of small blocks, either way."""
    large: float | None = None
    """Blocks too large for a magazine."""
    cpu_s: float | None = None
    """Of the whole program."""
    wall_s: float | None = None
    refill_s: Span | None = None
    """In slow paths that fetch small blocks, with what the kernel does for them."""
    free_s: Span | None = None
    """In slow paths of free."""
    large_s: Span | None = None
    """In fetching large blocks."""
    fault_s: Span | None = None
    """In page faults of the program's own code, which a server might take ahead of it."""
    hardware_misses: float | None = None
    """Of the last cache and of the TLB, by loads."""

    @property
    def calls(self) -> float | None:
        """All."""
        return None if self.mallocs is None or self.frees is None else self.mallocs + self.frees

    @property
    def messages(self) -> float | None:
        """Of `on`: a magazine each, and each large block comes and goes."""
        if self.cache_misses is None or self.large is None:
            return None
        return self.cache_misses + 2 * self.large

    @property
    def cpus_used(self) -> float | None:
        """On average."""
        return self.cpu_s / self.wall_s if self.cpu_s is not None and self.wall_s else None

    @property
    def misses_a_call(self) -> float | None:
        """Of the hardware; an average over the whole program."""
        if self.hardware_misses is None or not self.calls:
            return None
        return self.hardware_misses / self.calls


@dataclass(frozen=True)
class Published:
    """The paper's constants, or the user's in their place."""

    atomic_cycles: float = ATOMIC_CYCLES
    atomics: float = ATOMICS
    miss_cycles: float = MISS_CYCLES

    @property
    def call_cycles(self) -> float:
        """What a message adds to a call."""
        return self.atomics * self.atomic_cycles

    @property
    def break_even(self) -> float:
        """Misses that each call, and what follows it, must save."""
        return self.call_cycles / self.miss_cycles


@dataclass(frozen=True)
class Latency:
    """Of this machine, in nanoseconds; the figure to go by, and how far it may lie to either side."""

    round_trip_ns: Span
    """Of a message and its answer by cache lines that both sides look at."""
    wake_ns: Span | None
    """Waking a server that sleeps, to the answer."""
    ghz: float
    """Of the clock that cycles are counted by."""


@dataclass(frozen=True)
class Sync:
    """The paper's model: by its constants, and by this machine's latency where that is known."""

    calls: float | None
    published_cycles: float | None
    """All calls'."""
    published_break_even: float
    """Misses a call."""
    call_ns: Span | None = None
    cost_s: Span | None = None
    break_even: Span | None = None
    """Misses a call."""
    share: Span | None = None
    """Of the CPU time that messages would add."""


@dataclass(frozen=True)
class On:
    """calmalloc's own model. Low of a cost is its least, low of a saving is the least saved."""

    messages: float | None
    per_call: float | None = None
    message_ns: Span | None = None
    """On average over the kinds of messages."""
    cost_s: Span | None = None
    cost_share: Span | None = None
    """Of the CPU time: what must at least move, for messages to be worth it."""
    break_even: Span | None = None
    """Misses a call, if nothing but misses paid for the messages."""
    moved_s: Span | None = None
    """Out of the program's threads, and not waited for."""
    server_s: float | None = None
    """What the server would do."""
    saved_s: Span | None = None
    saved_share: Span | None = None
    """Of the CPU time of the program's threads."""
    asleep: float | None = None
    """The chance that a message finds the server asleep."""
    crowded: bool = False
    """More would move than one server, or what is idle, has time for."""


@dataclass(frozen=True)
class Verdict:
    """On one way to offload. None: the figures do not say."""

    way: str
    pays: bool | None
    text: str


def _times(span: Span, factor: float) -> Span:
    return Span(span.value * factor, span.low * factor, span.high * factor)


def _less(span: Span, other: Span) -> Span:
    return Span(span.value - other.value, span.low - other.high, span.high - other.low)


def sync(work: Work, published: Published, latency: Latency | None) -> Sync:
    """Every call a message that is waited for."""
    calls = work.calls
    found = Sync(calls, None if calls is None else calls * published.call_cycles, published.break_even)
    if latency is None:
        return found
    call_ns = latency.round_trip_ns
    found = replace(found, call_ns=call_ns, break_even=_times(call_ns, latency.ghz / published.miss_cycles))
    if calls is not None:
        found = replace(found, cost_s=_times(call_ns, calls * 1e-9))
        if work.cpu_s and found.cost_s:
            found = replace(found, share=_times(found.cost_s, 1 / work.cpu_s))
    return found


def asleep_chance(wall_s: float, messages: float, wake_ns: float) -> float:
    """That a message finds the server asleep, if messages come by chance.

    It is taken to look on for as long as waking it costs, before it sleeps: whoever does never
    waits more than twice what it must.
    """
    return math.exp(-wake_ns * messages / (wall_s * 1e9))


def _message_costs(
    work: Work, cache_misses: float, large: float, latency: Latency
) -> tuple[Span, float | None]:
    """Seconds that all messages take from the program's threads; and the chance that the server is asleep.

    Half of a round trip is one cache line that changes hands. At the least a magazine is one such, and a
    large block a round trip. Expected are twice as many: the ring's index and the record in it, the call's
    slot and its answer. At the most every other magazine that comes has to be called for, like a large block:
    the call that brings one lets the server prepare the next.
    """
    line = _times(latency.round_trip_ns, 0.5)
    wake, asleep = Span(0.0, 0.0, 0.0), None
    messages = cache_misses + 2 * large
    if latency.wake_ns is not None and work.wall_s:
        asleep = asleep_chance(work.wall_s, messages, latency.wake_ns.value)
        wake = _times(latency.wake_ns, asleep)
    # Every block that came goes some time: half of the magazines come.
    comes = cache_misses / 2
    goes = cache_misses / 2 + large
    low = (comes + goes + 2 * large) * line.low
    value = (2 * comes + 2 * goes + 4 * large) * line.value + large * wake.value
    called = comes / 2
    high = (2 * called + 4 * called + 2 * goes + 4 * large) * line.high + (called + large) * wake.high
    return Span(value * 1e-9, low * 1e-9, high * 1e-9), asleep


def on(work: Work, published: Published, latency: Latency | None, cpus: Cpus) -> On:
    """A message for each magazine, and for large blocks."""
    found = On(work.messages)
    if work.cache_misses is None or work.large is None or work.messages is None:
        return found
    if work.calls:
        found = replace(found, per_call=work.messages / work.calls)
    if latency is None:
        return found
    cost, asleep = _message_costs(work, work.cache_misses, work.large, latency)
    found = replace(found, cost_s=cost, asleep=asleep)
    if work.messages:
        found = replace(found, message_ns=_times(cost, 1e9 / work.messages))
    if work.calls:
        cycles = 1e9 * latency.ghz / work.calls
        found = replace(found, break_even=_times(cost, cycles / published.miss_cycles))
    if work.cpu_s:
        found = replace(found, cost_share=_times(cost, 1 / work.cpu_s))
    refill, free, large = work.refill_s, work.free_s, work.large_s
    if refill is None or free is None or large is None:
        return found
    faults = work.fault_s or Span(0.0, 0.0, 0.0)
    # At the least every other magazine is waited for; at the most the server takes page faults as well.
    moved = Span(refill.value + free.value, refill.low / 2 + free.low, refill.high + free.high + faults.high)
    server_s = refill.value + free.value + large.value
    crowded = False
    if work.wall_s and work.cpus_used is not None:
        # Its large blocks are waited for, and it has to fetch them all the same.
        alone = work.wall_s * min(1.0, max(0.0, cpus.available - work.cpus_used))
        room = Span(*(max(0.0, alone - each) for each in (large.value, large.high, large.low)))
        crowded = moved.value > room.value
        moved = Span(min(moved.value, room.value), min(moved.low, room.low), min(moved.high, room.high))
    saved = _less(moved, cost)
    found = replace(found, moved_s=moved, server_s=server_s, saved_s=saved, crowded=crowded)
    return replace(found, saved_share=_times(saved, 1 / work.cpu_s)) if work.cpu_s else found


def obstacle(work: Work, cpus: Cpus) -> str | None:
    """Why no CPU can be spared, whatever it would save."""
    if cpus.mask == 1:
        return "there is one CPU to run on, and none for a server"
    if cpus.quota is not None and cpus.quota < QUOTA_LEAST:
        return f"its control group may use {cpus.quota:.3g} CPUs: what a server takes, it would not have"
    used = work.cpus_used
    if used is not None and used > cpus.available - IDLE_LEAST:
        return f"it keeps {used:.2f} of {cpus.available:.4g} CPUs busy by itself: none is left for a server"
    return None


def percent(share: float) -> str:
    """7.1 %; with more digits where it is little."""
    if share == 0:
        return "0 %"
    return f"{100 * share:,.1f} %" if abs(share) >= 0.001 else f"{100 * share:.1g} %"


def judge_on(work: Work, found: On, cpus: Cpus, missing: str) -> Verdict:
    """missing: why the time in slow paths is not known."""
    way = "on"
    if (why := obstacle(work, cpus)) is not None:
        return Verdict(way, False, f"offload=on will not pay because {why}")
    if found.messages is None:
        return Verdict(way, None, f"offload=on: cannot be said, because {missing}")
    share, saved, moved = found.cost_share, found.saved_share, found.moved_s
    if share is None or saved is None or moved is None:
        needs = f"; its slow paths must take more than {percent(share.value)} of the time" if share else ""
        return Verdict(way, None, f"offload=on: cannot be said, because {missing}{needs}")
    between = f"(between {percent(saved.low)} and {percent(saved.high)})"
    if saved.value >= LITTLE:
        return Verdict(way, True, f"offload=on should save about {percent(saved.value)} {between}")
    could = moved.high / work.cpu_s if work.cpu_s else 0.0
    if could < LITTLE:
        why = f"at most {percent(could)} of its time could move to a server"
    elif saved.value <= 0:
        moves = moved.value / work.cpu_s if work.cpu_s else 0.0
        why = (
            f"messages would take {percent(share.value)} of its time, and {percent(moves)} would move: "
            f"it saves {percent(saved.value)} {between}"
        )
    else:
        why = f"it should save about {percent(saved.value)} {between}, which is too little for a CPU"
    return Verdict(way, False, f"offload=on will not pay because {why}")


def judge_sync(work: Work, found: Sync, cpus: Cpus) -> Verdict:
    """Only misses can pay for it, and how many it saves nobody knows beforehand: it pays by no model."""
    way = "sync"
    if (why := obstacle(work, cpus)) is not None:
        return Verdict(way, False, f"offload=sync will not pay because {why}")
    need = found.break_even.value if found.break_even else found.published_break_even
    where = "here" if found.break_even else "by the published costs"
    have = work.misses_a_call
    if have is not None and have < need:
        return Verdict(
            way,
            False,
            f"offload=sync will not pay because it must save {need:.2f} misses a call {where}, "
            f"and there are {have:.2f}",
        )
    of = f" of {have:.2f}" if have is not None else ", which are not counted"
    adds = f"; if it saves none, it adds {percent(found.share.value)} to its time" if found.share else ""
    return Verdict(way, None, f"offload=sync pays only if it saves {need:.2f} misses a call{of}{adds}")


# What may be given by hand: the name, where it goes, and what it is.
FIGURES: Mapping[str, str] = {
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
_SPANS = frozenset(("refill_s", "free_s", "large_s", "fault_s"))
_OF_WORK = frozenset(each.name for each in fields(Work))


def with_figures(work: Work, given: Mapping[str, float]) -> tuple[Work, Published]:
    """The user's figures in place of those that were found. Slow time of one kind given, others are none."""
    found: dict[str, float | Span] = {
        name: Span(value, value, value) if name in _SPANS else value
        for name, value in given.items()
        if name in _OF_WORK
    }
    pots: Sequence[str] = ("refill_s", "free_s", "large_s")
    if any(name in found for name in pots):
        for name in pots:
            if getattr(work, name) is None:
                found.setdefault(name, Span(0.0, 0.0, 0.0))
    if "cache_misses" in found and work.large is None:
        found.setdefault("large", 0.0)
    constants = {name: value for name, value in given.items() if name not in _OF_WORK}
    return replace(work, **found), Published(**constants)  # type: ignore[arg-type]
