"""`calm predict --offload`: the two models side by side, the break-even, and what follows from them."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm import report
from calm.errors import USAGE, CalmError
from calm.predict import limits, messages, offload, offload_inputs
from calm.predict.limits import Cpus
from calm.predict.messages import SIBLING, Messages, Pair
from calm.predict.model import Span
from calm.predict.offload import Latency, On, Published, Sync, Verdict, Work
from calm.predict.offload_inputs import Found

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Report:
    """All that is said."""

    found: Found
    published: Published
    cpus: Cpus
    measured: Messages | None
    latency: Latency | None
    sync: Sync
    on: On
    verdicts: list[Verdict]
    notes: list[str] = field(default_factory=list)

    @property
    def work(self) -> Work:
        """What the program asks."""
        return self.found.work


def _span(pairs: Sequence[Pair], everywhere: Sequence[Pair], name: str) -> Span | None:
    """The middle of the pairs to go by; the least and the most of all."""
    near = sorted(each.median for pair in pairs if (each := getattr(pair, name)))
    far = [each for pair in everywhere if (each := getattr(pair, name))]
    if not near:
        return None
    return Span(near[len(near) // 2], min(each.low for each in far), max(each.high for each in far))


def latency(measured: Messages, ghz: float | None) -> Latency | None:
    """By the nearest CPUs that are no threads of one core, if there are others; ranges are over all."""
    kinds = measured.kinds()
    everywhere = [pair for pairs in kinds.values() for pair in pairs]
    nearest = next((pairs for kind, pairs in kinds.items() if kind != SIBLING), everywhere)
    round_trip = _span(nearest, everywhere, "round_trip_ns")
    clock = ghz or (measured.reference_mhz or 0.0) / 1000 or None
    if round_trip is None:
        return None
    if clock is None:
        raise CalmError("the clock that cycles are counted by is not known here: give it by --ghz", USAGE)
    return Latency(round_trip, _span(nearest, everywhere, "wake_round_trip_ns"), clock)


def make(
    found: Found, published: Published, cpus: Cpus, measured: Messages | None, ghz: float | None
) -> Report:
    """Both models."""
    costs = latency(measured, ghz) if measured else None
    by_sync = offload.sync(found.work, published, costs)
    by_on = offload.on(found.work, published, costs, cpus)
    missing = found.missing
    if measured is None:
        missing = "what a message takes here is not known"
    verdicts = [
        offload.judge_sync(found.work, by_sync, cpus),
        offload.judge_on(found.work, by_on, cpus, missing),
    ]
    notes = [*found.notes, *(measured.notes if measured else [])]
    if by_on.crowded:
        notes.append(
            "more would move than one server, or the CPU time that is idle, has time for: the rest stays"
        )
    return Report(found, published, cpus, measured, costs, by_sync, by_on, verdicts, notes)


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"-{report.duration(-value)}" if value < 0 else report.duration(value)


def _between(span: Span | None, text: Callable[[float], str], unit: str = "") -> str:
    """A figure and its range, with the unit that both have."""
    if span is None:
        return "-"
    if span.low == span.high:
        return text(span.value) + unit
    return f"{text(span.value)}{unit} ({text(span.low)} to {text(span.high)})"


def _table(made: Report) -> "Table":
    work, published, sync, on = made.work, made.published, made.sync, made.on
    latency = made.latency
    table = report.table()
    table.add_column("", no_wrap=True)
    for heading in ("sync, published", "sync, here", "on, here"):
        table.add_column(heading, no_wrap=True, justify="right")

    def row(title: str, *cells: str) -> None:
        if any(cell not in ("", "-") for cell in cells):
            table.add_row(title, *cells)

    def whole(value: float) -> str:
        return f"{value:,.0f}"

    def misses(value: float) -> str:
        return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"

    calls = _count(sync.calls)
    row("messages", calls, calls, _count(on.messages))
    row("messages a call", "1", "1", "-" if on.per_call is None else f"{on.per_call:.3g}")
    row(
        "a message",
        f"{published.call_cycles:,.0f} cycles",
        _between(sync.call_ns, whole, " ns"),
        _between(on.message_ns, whole, " ns"),
    )
    published_s = "-"
    if sync.published_cycles is not None:
        published_s = f"{sync.published_cycles:,.0f} cycles"
    row("all of them", published_s, _between(sync.cost_s, _seconds), _between(on.cost_s, _seconds))
    share = "-"
    if sync.published_cycles is not None and latency and work.cpu_s:
        share = offload.percent(sync.published_cycles / latency.ghz * 1e-9 / work.cpu_s)
    row("of the time", share, _between(sync.share, offload.percent), _between(on.cost_share, offload.percent))
    row(
        "break-even, misses a call",
        f"{published.break_even:.2f}",
        _between(sync.break_even, misses),
        _between(on.break_even, misses),
    )
    row("moved to the server", "waited for", "waited for", _between(on.moved_s, _seconds))
    row("saved", "", "", _between(on.saved_s, _seconds))
    row("saved, of the time", "", "", _between(on.saved_share, offload.percent))
    return table


def terms(made: Report) -> list[str]:
    """What went into the models, in sentences."""
    work, published, found = made.work, made.published, made.found
    lines = []
    if work.calls is not None:
        lines.append(
            f"{_count(work.mallocs)} malloc + {_count(work.frees)} free = {_count(work.calls)} calls"
            + (f"; {_count(work.cache_misses)} left the fast path" if work.cache_misses is not None else "")
            + (f", {_count(work.large)} large blocks" if work.large is not None else "")
        )
    if work.cpu_s is not None and work.wall_s is not None:
        used = f", {work.cpus_used:.2f} CPUs at work" if work.cpus_used is not None else ""
        threads = f" ({found.threads:,.0f} threads in all)" if found.threads and found.threads > 1 else ""
        lines.append(
            f"{report.duration(work.cpu_s)} of CPU time in {report.duration(work.wall_s)}{used}{threads}"
        )
    pots = (
        ("refill_s", "fetching small blocks"),
        ("free_s", "taking blocks back"),
        ("large_s", "fetching large blocks (waited for)"),
        ("fault_s", "page faults of its own code (moved at best)"),
    )
    told = [
        f"{what} {_between(span, _seconds)}"
        for name, what in pots
        if (span := getattr(work, name)) is not None
    ]
    if told:
        lines.append(f"slow paths: {', '.join(told)}")
    lines.append(
        f"published: {published.atomics:g} atomics of {published.atomic_cycles:g} cycles for each call, "
        f"{published.miss_cycles:g} cycles for a cache or TLB miss"
    )
    if work.misses_a_call is not None:
        lines.append(
            f"{_count(work.hardware_misses)} cache and TLB misses, {work.misses_a_call:.2f} a call: "
            "no model says how many of them would be saved"
        )
    if made.measured and made.latency:
        kinds = ", ".join(messages.KINDS[kind] for kind in made.measured.kinds())
        wake = made.latency.wake_ns
        lines.append(
            f"measured here: a message and its answer {made.latency.round_trip_ns.value:,.0f} ns ({kinds}); "
            + (f"waking a server that sleeps {wake.value:,.0f} ns; " if wake else "")
            + (f"an atomic {made.measured.atomic_ns.median:.1f} ns; " if made.measured.atomic_ns else "")
            + f"cycles by a clock of {made.latency.ghz:.2f} GHz"
        )
    if made.on.asleep is not None:
        lines.append(
            f"a message finds the server asleep by a chance of {made.on.asleep:.0%}: that costs those which "
            "are waited for"
        )
    quota = "" if made.cpus.quota is None else f", by the control group's quota {made.cpus.quota:.3g} of them"
    lines.append(f"CPUs that it may run on: {made.cpus.mask}{quota}")
    return lines


def as_json(made: Report) -> dict[str, Any]:
    """Everything."""
    return {
        "calm_offload": 1,
        "work": asdict(made.work)
        | {
            "calls": made.work.calls,
            "messages": made.work.messages,
            "misses_a_call": made.work.misses_a_call,
        },
        "estimated": {name: asdict(span) for name, span in made.found.calls.items()},
        "cpus": asdict(made.cpus) | {"available": made.cpus.available, "used": made.work.cpus_used},
        "published": asdict(made.published)
        | {"call_cycles": made.published.call_cycles, "break_even": made.published.break_even},
        "latency": asdict(made.latency) if made.latency else None,
        "measured": made.measured.as_dict() if made.measured else None,
        "sync": asdict(made.sync),
        "on": asdict(made.on),
        "verdicts": [asdict(each) for each in made.verdicts],
        "notes": made.notes,
    }


def show(made: Report, to_stderr: bool) -> None:
    """The table, what it rests on, and the verdicts."""
    console = report.console(sys.stderr if to_stderr else sys.stdout)
    console.print("the allocator on a CPU of its own", style="bold")
    report.print_table(console, _table(made))
    for line in terms(made):
        console.print(line, soft_wrap=True)
    for note in made.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for verdict in made.verdicts:
        console.print(verdict.text, style="bold", soft_wrap=True)


def run(
    cmd: Sequence[str],
    profile: str | None,
    figures: Sequence[str],
    rounds: int,
    cpus: int | None,
    ghz: float | None,
    calibration_path: str | None,
    json_path: str | None,
) -> None:
    """The whole command."""
    given = offload_inputs.parse_figures(figures)
    available = limits.here() if cpus is None else Cpus(cpus)
    # Before the runs, not after them.
    unmeasured, measured = [], None
    try:
        measured = (
            messages.kept_or_measured() if calibration_path is None else messages.load(Path(calibration_path))
        )
        latency(measured, ghz)
    except messages.UnmeasuredError as error:
        unmeasured.append(f"messages are not measured: {error}")
    if cmd:
        found = offload_inputs.from_runs(cmd, rounds)
    elif profile:
        found = offload_inputs.from_profile(profile)
    else:
        found = Found(Work())
    found.notes += unmeasured
    found.work, published = offload.with_figures(found.work, given)
    made = make(found, published, available, measured, ghz)
    show(made, json_path == "-")
    if json_path:
        report.write(json_path, json.dumps(as_json(made), indent=2) + "\n")
