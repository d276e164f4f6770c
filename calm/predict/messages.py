"""What a message between two CPUs costs here: measured by calm-probe, and kept as calibrations are."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from calm import places, report
from calm.errors import CalmError
from calm.measure import find_probe
from calm.predict import calibration
from calm.profile import checked

VERSION = 1

# How near two CPUs are, the nearest first; what a person is told of each.
SIBLING, COMPLEX, SOCKET, REMOTE = "sibling", "complex", "socket", "remote"
KINDS: Mapping[str, str] = {
    SIBLING: "two threads of a core",
    COMPLEX: "cores that share the last cache",
    SOCKET: "cores of a socket that share no cache",
    REMOTE: "cores of two sockets",
}
# Of each kind so many pairs are tried, from one end of the machine to the other.
_EACH = 3
_SYSTEM = Path("/sys/devices/system/cpu")
# The probe needs half a second for a pair at most, if it gets a CPU.
_LIMIT_S = 60.0


class UnmeasuredError(CalmError):
    """There is nobody to send a message to, or nobody who answers."""


@dataclass(frozen=True)
class Spread:
    """Nanoseconds: the median; one sample of ten lies below low, and one above high."""

    median: float
    low: float
    high: float
    samples: int


@dataclass(frozen=True)
class Pair:
    """Two CPUs, and what lies between them. None: it could not be measured."""

    a: int
    b: int
    kind: str
    round_trip_ns: Spread | None
    wake_ns: Spread | None
    wake_round_trip_ns: Spread | None


@dataclass(frozen=True)
class Messages:
    """All that was measured."""

    machine: Mapping[str, Any]
    date: str
    reference_mhz: float | None
    """Of the time stamp counter; None where there is none."""
    atomic_ns: Spread | None
    """A read-modify-write of a cache line that nobody else has."""
    pairs: list[Pair]
    notes: list[str] = field(default_factory=list)

    def kinds(self) -> dict[str, list[Pair]]:
        """The pairs that messages went between, the nearest kind first."""
        found: dict[str, list[Pair]] = {}
        for kind in KINDS:
            if pairs := [pair for pair in self.pairs if pair.kind == kind and pair.round_trip_ns]:
                found[kind] = pairs
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"calm_messages": VERSION} | asdict(self)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _last_cache(cpu: Path) -> str:
    """The CPUs that share its last cache, as the kernel lists them; "" where it does not."""
    caches = [each for each in (cpu / "cache").glob("index[0-9]*") if _text(each / "level").isdigit()]
    last = max(caches, key=lambda each: int(_text(each / "level")), default=None)
    return _text(last / "shared_cpu_list") if last else ""


def plan(cpus: Iterable[int] | None = None, system: Path = _SYSTEM) -> list[tuple[int, int, str]]:
    """Pairs of CPUs that may be used, some of each kind that there is."""
    allowed = sorted(os.sched_getaffinity(0) if cpus is None else cpus)
    places_of = {}
    for cpu in allowed:
        folder = system / f"cpu{cpu}"
        socket = _text(folder / "topology/physical_package_id")
        core = _text(folder / "topology/core_id") or str(cpu)
        # Where no cache is told of, a socket is taken to have one.
        places_of[cpu] = (socket, (socket, core), _last_cache(folder) or socket)
    by_kind: dict[str, list[tuple[int, int, str]]] = {kind: [] for kind in KINDS}
    for index, a in enumerate(allowed):
        for b in allowed[index + 1 :]:
            first, second = places_of[a], places_of[b]
            if first[0] != second[0]:
                kind = REMOTE
            elif first[1] == second[1]:
                kind = SIBLING
            else:
                kind = COMPLEX if first[2] == second[2] else SOCKET
            by_kind[kind].append((a, b, kind))
    found = []
    for pairs in by_kind.values():
        last = len(pairs) - 1
        found += [pairs[at] for at in sorted({last * step // (_EACH - 1) for step in range(_EACH)}) if pairs]
    return found


def measure(pairs: Sequence[tuple[int, int, str]] | None = None) -> Messages:
    """Sends messages between pairs of CPUs: half a second for each pair at most."""
    wanted = plan() if pairs is None else list(pairs)
    if not wanted:
        raise UnmeasuredError("there is one CPU, so no other to send a message to")
    words = ",".join(f"{a}:{b}" for a, b, _ in wanted)
    try:
        result = subprocess.run(
            [find_probe(), "-p", "-f", "1", "-m", words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        )
        found = json.loads(result.stdout)
    except subprocess.TimeoutExpired as error:
        raise UnmeasuredError(f"calm-probe measured no messages within {_LIMIT_S:.0f} s") from error
    except ValueError as error:
        said = (result.stderr.strip() or f"it ended with {result.returncode}").splitlines()[-1]
        raise UnmeasuredError(f"messages could not be measured: {said}") from error
    nothing = dict.fromkeys(("round_trip_ns", "wake_ns", "wake_round_trip_ns"))
    made = [
        {"a": a, "b": b, "kind": kind} | (found["pairs"].get(f"{a}:{b}") or nothing) for a, b, kind in wanted
    ]
    messages = checked.build(
        Messages,
        {
            "machine": calibration.identity(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "reference_mhz": found["reference_mhz"],
            "atomic_ns": found["atomic_ns"],
            "pairs": made,
        },
    )
    if not messages.kinds():
        raise UnmeasuredError("no message was answered in time: the machine is too busy to measure any")
    return messages


def default_path() -> Path:
    """Where this user's are kept."""
    return places.user_cache() / "messages.json"


def load(path: Path) -> Messages:
    """Reads such a file; refused where it is of another machine."""
    data = calibration.read(path, "calm_messages", VERSION, "calm calibrate --messages")
    try:
        found = checked.build(Messages, data)
    except checked.WrongError as error:
        raise CalmError(f"{path} is not whole: {error}") from error
    if other := calibration.difference(found.machine, calibration.identity()):
        raise CalmError(
            f"{path} is of another machine ({other}): run `calm calibrate --messages` on this one"
        )
    if not found.kinds():
        raise CalmError(f"{path} is not whole: no pair of CPUs has a round trip")
    return found


def kept_or_measured() -> Messages:
    """What is kept of this machine; else measured now, and kept where that can be."""
    path = default_path()
    if path.exists():
        try:
            return load(path)
        except CalmError:
            # Of another machine, or of another version: as good as none.
            pass
    found = measure()
    try:
        save(path, found)
    except CalmError as error:
        found.notes.append(f"the messages' costs are not kept: {error}")
    return found


def save(path: Path, messages: Messages) -> None:
    """Writes them where predict looks."""
    calibration.save_text(path, json.dumps(messages.as_dict(), indent=1) + "\n")


def spread_text(spread: Spread | None) -> tuple[str, str]:
    """A figure, and how far it lies apart, for two cells of a table."""
    if spread is None:
        return "-", ""
    return f"{spread.median:,.0f} ns", f"{spread.low:,.0f} to {spread.high:,.0f}"


def summary(messages: Messages) -> list[str]:
    """What is not of a pair, in sentences."""
    mhz, atomic = messages.reference_mhz, messages.atomic_ns
    lines = []
    if atomic:
        cycles = f" ({atomic.median * mhz * 1e-3:,.0f} reference cycles)" if mhz else ""
        lines.append(
            f"an atomic read-modify-write that nobody contends for: {atomic.median:.2f} ns{cycles}, "
            f"{atomic.low:.2f} to {atomic.high:.2f} ns"
        )
    if mhz:
        lines.append(f"cycles are the CPU's reference cycles (TSC), {mhz:,.0f} MHz as measured")
    return lines


def print_all(messages: Messages, to_stderr: bool) -> None:
    """The table of pairs, and the rest."""
    console = report.console(sys.stderr if to_stderr else sys.stdout)
    console.print("messages between CPUs: medians, and where eight samples of ten lie", style="bold")
    table = report.table()
    for heading in ("CPUs", "which are", "round trip", "", "waking, the waker", "", "and an answer", ""):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("", "which are") else "right")
    for pair in messages.pairs:
        cells = [
            cell
            for spread in (pair.round_trip_ns, pair.wake_ns, pair.wake_round_trip_ns)
            for cell in spread_text(spread)
        ]
        table.add_row(f"{pair.a}, {pair.b}", KINDS.get(pair.kind, pair.kind), *cells)
    report.print_table(console, table)
    for line in summary(messages):
        console.print(line, soft_wrap=True)
    for note in messages.notes:
        console.print(f"note: {note}", soft_wrap=True)
