"""What `calm calibrate` measures: its documents, those kept in the user's cache, and messages of CPUs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

import msgspec

from calm.core import documents, machine, paths, proc, report
from calm.core.documents import Document
from calm.core.environment import clean_environment
from calm.core.errors import USAGE, CalmError
from calm.core.machine import SYSTEM
from calm.core.options import Output
from calm.core.statistics import median
from research import cache, topology

if TYPE_CHECKING:
    from rich.table import Table

# The number of pairs of each kind that are measured, from one end of the machine to the other.
_PAIRS = 3
# The probe needs at most half a second for a pair, if it gets a CPU.
_MESSAGES = "calm-messages"
_LIMIT_S = 60.0

Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e300)]


def this_machine() -> dict[str, str | int | bool]:
    """What costs depend on."""
    described = machine.describe()
    sockets = topology.sockets(range(os.cpu_count() or 1))
    return {name: described[name] for name in ("cpu", "architecture", "kernel")} | {
        "cpus": sum(map(len, sockets)),
        "sockets": len(sockets),
        "virtual": bool(topology.is_virtual()),
    }


def check_interrupts(what: str) -> None:
    """Raises CalmError where the CPUs never send a TLB interrupt, so that there are none to count."""
    broadcast = machine.broadcast_here()
    if broadcast and broadcast.always:
        raise CalmError(f"{broadcast.note}, so there is nothing to {what}")
    if len(os.sched_getaffinity(0)) == 1:
        raise CalmError(f"one CPU sends no TLB interrupts, so there is nothing to {what}")


@dataclass(frozen=True)
class Sample:
    """One run: threads that repeatedly give a page back."""

    round: int
    cpus: int
    sockets: int
    threads: int
    madvise: int
    interrupts: int
    cpu_s: float
    wall_s: float


@dataclass
class Experiment:
    """The runs in interleaved rounds, with the warm-up left out."""

    samples: list[Sample] = field(default_factory=list)
    rounds: int = 0
    """Those that are complete."""
    reference_mhz: list[Positive] = field(default_factory=list)
    """Of the time stamp counter in each run; empty where there is none."""
    exact: bool = True
    """The interrupts are the program's own, not those of all processes."""
    busy_cpus: float = 0.0
    """CPUs that other programs used meanwhile, on average."""
    interrupted_by: int | None = None


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of CPU time."""

    call_ns: float
    """A call that no call of another thread overlaps."""
    overlap_ns: float
    """The additional cost of a call that overlaps another."""
    overlap_chance: float
    """The probability that a given other thread is within a call."""
    local_ns: Positive
    """An interrupt within a socket."""
    remote: float | None
    """The cost of an interrupt to another socket, as a multiple; None where there is one socket."""


@dataclass(frozen=True)
class Residual:
    """The error of the costs at a point, as a ratio: 0.05 is predicted 5 % too high."""

    sockets: int
    cpus: int
    threads: int
    held_out: bool
    interrupts_per_call: float
    cpu_ns_per_call: float
    cpu_error: float
    wall_error: float
    """Assumes that the threads never wait for a CPU."""


class Calibration(Document, tag="calm-calibration", kw_only=True):
    """What `calm calibrate shootdowns` writes: the cost of a shootdown, and the runs that it is fitted to."""

    FILE: ClassVar[str] = "calibration.json"
    COMMAND: ClassVar[str] = "calm calibrate shootdowns"
    machine: dict[str, str | int | bool]
    experiment: Experiment
    costs: Costs
    interval_ns: tuple[Positive, Positive] | None
    """The 95 % interval of an interrupt within a socket."""
    residuals: list[Residual]
    notes: list[str]

    @property
    def reference_mhz(self) -> float | None:
        return median(self.experiment.reference_mhz)


@dataclass(frozen=True)
class Spread:
    """Nanoseconds: the median, and the first and last deciles."""

    median: Positive
    low: float
    high: float
    samples: int


@dataclass(frozen=True)
class Pair:
    """Two CPUs, and the costs of messages between them; None where they could not be measured."""

    a: int
    b: int
    kind: str
    round_trip_ns: Spread | None = None
    wake_ns: Spread | None = None
    wake_round_trip_ns: Spread | None = None


# The relations of two CPUs, the nearest first.
SIBLING, COMPLEX, SOCKET, REMOTE = "sibling", "complex", "socket", "remote"
KINDS = {
    SIBLING: "two threads of a core",
    COMPLEX: "cores that share the last cache",
    SOCKET: "cores of a socket that share no cache",
    REMOTE: "cores of two sockets",
}


class Messages(Document, tag="calm-messages", kw_only=True):
    """What `calm calibrate messages` writes: the costs of messages between the CPUs of a machine."""

    FILE: ClassVar[str] = "messages.json"
    COMMAND: ClassVar[str] = "calm calibrate messages"
    machine: dict[str, str | int | bool]
    reference_mhz: Positive | None
    """The frequency of the time stamp counter; None where there is none."""
    atomic_ns: Spread | None
    """A read-modify-write of a cache line that no other CPU has."""
    pairs: list[Pair]

    def __post_init__(self) -> None:
        if not self.kinds():
            raise ValueError("no pair of CPUs has a round trip")

    def kinds(self) -> dict[str, list[Pair]]:
        """The pairs that were measured, the nearest kind first."""
        measured = [pair for pair in self.pairs if pair.round_trip_ns]
        found = {kind: [pair for pair in measured if pair.kind == kind] for kind in KINDS}
        return {kind: pairs for kind, pairs in found.items() if pairs}


Kind = TypeVar("Kind", Calibration, Messages)


def load(path: str | Path, kind: type[Kind]) -> Kind:
    """A document of this machine. Raises CalmError with USAGE if the file cannot be used."""
    try:
        found = documents.read(str(path), kind)
    except CalmError as error:
        raise CalmError(f"{error}: run `{kind.COMMAND}` again", USAGE) from error
    for name, here in this_machine().items():
        if (there := found.machine.get(name)) != here:
            what = f"{path} is of another machine ({name} {there}, and here {here})"
            raise CalmError(f"{what}: run `{kind.COMMAND}` on this one", USAGE)
    return found


def given_or_kept(
    path: str | None, kind: type[Kind], otherwise: str, missing: Iterable[str] = ()
) -> tuple[Kind | None, list[str]]:
    """The user's document, or that of the cache if it can be used; and notes if there is none to use."""
    if path is not None:
        return load(path, kind), []
    kept = cache.user_cache() / kind.FILE
    if not kept.exists():
        return None, [*missing]
    try:
        return load(kept, kind), []
    except CalmError as error:
        return None, [f"{otherwise}: {error}"]


def keep(found: Kind) -> None:
    """Writes a document to the user's cache."""
    path = cache.user_cache() / found.FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalmError(f"cannot write {path}: {error.strerror}") from error
    report.write(str(path), documents.text(found))


def reference_cycles(ns: float, mhz: float | None) -> str:
    """A time in cycles, in parentheses; empty where there is no time stamp counter."""
    return f" ({ns * mhz * 1e-3:,.0f} reference cycles)" if mhz else ""


def finish(
    output: Output,
    found: Document,
    title: str,
    table: Table,
    lines: Iterable[str],
    notes: Iterable[str] = (),
    last: Iterable[str] = (),
) -> None:
    """Prints the report of a document, and writes it as JSON."""
    with output.console() as console:
        console.print(title, style="bold", soft_wrap=True)
        report.print_table(console, table)
        for line in (*lines, *(f"note: {note}" for note in notes)):
            console.print(line, soft_wrap=True)
        for line in last:
            console.print(line, style="bold", soft_wrap=True)
    output.write(found)


class UnmeasuredError(CalmError):
    """There is no second CPU, or no message was answered."""


def pairs_of_each_kind(
    cpus: Iterable[int] | None = None, system: Path = SYSTEM
) -> list[tuple[int, int, str]]:
    """Pairs of the CPUs that may be used, some of each kind."""
    locations = {}
    for cpu in sorted(os.sched_getaffinity(0) if cpus is None else cpus):
        folder = system / f"cpu{cpu}"
        socket = proc.text("topology/physical_package_id", folder)
        core = proc.text("topology/core_id", folder) or str(cpu)
        # Caches are numbered from the first level up. Without a description, a socket is assumed to have one.
        last = max((folder / "cache").glob("index[0-9]*"), default=folder)
        locations[cpu] = socket, core, proc.text("shared_cpu_list", last) or socket
    by_kind: dict[str, list[tuple[int, int, str]]] = {kind: [] for kind in KINDS}
    for a, b in combinations(locations, 2):
        same_socket, same_core, same_cache = map(str.__eq__, locations[a], locations[b])
        kind = REMOTE
        if same_socket and same_core:
            kind = SIBLING
        elif same_socket:
            kind = COMPLEX if same_cache else SOCKET
        by_kind[kind].append((a, b, kind))
    return [
        pairs[at]
        for pairs in by_kind.values()
        if pairs
        for at in sorted({(len(pairs) - 1) * step // (_PAIRS - 1) for step in range(_PAIRS)})
    ]


class _Report(msgspec.Struct):
    """What calm-messages writes."""

    reference_mhz: float | None
    atomic_ns: Spread | None
    pairs: dict[str, dict[str, Spread | None] | None]


def measure_messages() -> Messages:
    """Sends messages between pairs of CPUs: at most half a second for each pair."""
    wanted = pairs_of_each_kind()
    if not wanted:
        raise UnmeasuredError("there is one CPU, so no other to send a message to")
    words = ",".join(f"{a}:{b}" for a, b, _ in wanted)
    try:
        result = subprocess.run(
            [paths.find_part(_MESSAGES), words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            env=clean_environment(),
        )
        found = msgspec.json.decode(result.stdout, type=_Report)
    except subprocess.TimeoutExpired as error:
        raise UnmeasuredError(f"calm-messages measured no messages within {_LIMIT_S:.0f} s") from error
    except ValueError as error:
        reason = (result.stderr.strip() or f"it ended with {result.returncode}").splitlines()[-1]
        raise UnmeasuredError(f"messages could not be measured: {reason}") from error
    try:
        return Messages(
            machine=this_machine(),
            reference_mhz=found.reference_mhz,
            atomic_ns=found.atomic_ns,
            pairs=[Pair(a, b, kind, **(found.pairs.get(f"{a}:{b}") or {})) for a, b, kind in wanted],
        )
    except ValueError as error:
        what = "no message was answered in time: the machine is too busy to measure any"
        raise UnmeasuredError(what) from error


def messages(path: str | None = None) -> tuple[Messages, list[str]]:
    """The user's or the kept costs of this machine; otherwise they are measured now, and kept. And notes."""
    found, notes = given_or_kept(path, Messages, "messages are measured again")
    if found:
        return found, notes
    notes = [note.partition(": run `")[0] for note in notes]
    found = measure_messages()
    try:
        keep(found)
    except CalmError as error:
        notes.append(f"the costs of messages are not kept: {error}")
    return found, notes


def _cells(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "-", ""
    return f"{spread.median:,.0f} ns", f"{spread.low:,.0f} to {spread.high:,.0f}"


def print_messages(found: Messages, output: Output) -> None:
    figures = ("round trip", "", "waking, the waker", "", "and an answer", "")
    table = report.table("CPUs", "which are", *figures, right={"CPUs", *figures} - {""})
    for pair in found.pairs:
        spreads = (pair.round_trip_ns, pair.wake_ns, pair.wake_round_trip_ns)
        cells = [cell for spread in spreads for cell in _cells(spread)]
        table.add_row(f"{pair.a}, {pair.b}", KINDS.get(pair.kind, pair.kind), *cells)
    lines = []
    mhz, atomic = found.reference_mhz, found.atomic_ns
    if atomic:
        lines.append(
            f"an atomic read-modify-write without contention: {atomic.median:.2f} ns"
            f"{reference_cycles(atomic.median, mhz)}, {atomic.low:.2f} to {atomic.high:.2f} ns"
        )
    if mhz:
        lines.append(f"cycles are the CPU's reference cycles (TSC), measured at {mhz:,.0f} MHz")
    title = "messages between CPUs: medians, and the first and last deciles"
    finish(output, found, title, table, lines)
