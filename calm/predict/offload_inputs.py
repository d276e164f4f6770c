"""What `calm predict --offload` starts from: runs of a program under calmalloc, a profile, figures by hand.

No single run can tell all: the counters at exit and the hardware's are had for nothing, calls of malloc are
known from a heap profile, and the time in slow paths from samples of stacks. Each is a run of its own, so
that none pays for the other.
"""

import io
import json
import math
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from calm import allocators, measure, program, report
from calm.allocators import CALM_OPTIONS
from calm.errors import USAGE, CalmError
from calm.measure import HARDWARE_GROUP, Measurement
from calm.predict.model import Span
from calm.predict.offload import FIGURES, Work
from calm.profile import model as profile_model
from calm.profile.build import FEW
from calm.profile.findings import plain
from calm.profile.model import CPU, Profile
from calm.profile.watch import Progress, Watcher
from calm.progress import Bar
from calm.statistics import median

CALMALLOC = "calmalloc"
# Functions of the library (src/api) that are on the stack of whatever left the fast path: those of free, of
# large blocks, and of all else. What stands first decides.
SLOW_FREE = frozenset(("release_slow", "spill"))
SLOW_LARGE = frozenset(("allocate_large", "take_pages", "governor_resize_large", "governor_populate"))
SLOW_REFILL = frozenset(("allocate_slow", "allocate_counted", "refill"))

SLOW = ("refill_s", "free_s", "large_s")

_REPORT = '{"allocator": "calmalloc"'
# Samples of CPU time a second: with ten seconds of a program, a share of 1 % is of 100 of them.
_FREQUENCY = 997
# Bytes between two samples of the heap profile at first; then fewer, if there were so few samples that the
# number of calls is not known to a tenth.
_PERIOD, _CLOSE = 512 << 10, 0.1
_DEVIATIONS = 1.96
_SHT_SYMTAB = 2
# Less is no time and no number of anything; what is divided by it would be without a limit.
LEAST = 1e-12
_MARK = re.compile(r"\.(constprop|isra|part|cold|lto_priv|localalias)\b.*$")


@dataclass
class Found:
    """The figures, and what is to be said of them."""

    work: Work
    missing: str = "no figures of its messages are given (cache_misses, large)"
    """Why what is not known is not."""
    calls: Mapping[str, Span] = field(default_factory=dict)
    """How far the estimated numbers of calls may lie apart."""
    threads: float | None = None
    notes: list[str] = field(default_factory=list)


def parse_figures(texts: Sequence[str]) -> dict[str, float]:
    """NAME=VALUE,NAME=VALUE."""
    found: dict[str, float] = {}
    for piece in (piece for text in texts for piece in text.split(",")):
        name, equals, value = piece.strip().partition("=")
        if name not in FIGURES or not equals:
            raise CalmError(f"--figures: {piece!r} is not NAME=VALUE of {', '.join(FIGURES)}", USAGE)
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and 0 <= number < 1e18):
            raise CalmError(f"--figures: {piece!r}: {value!r} is no number from 0 on", USAGE)
        if 0 < number < LEAST:
            raise CalmError(f"--figures: {piece!r}: it is too little: at least {LEAST:g}, or 0", USAGE)
        if name in ("atomic_cycles", "atomics", "miss_cycles", "cpu_s", "wall_s") and number == 0:
            raise CalmError(f"--figures: {piece!r}: it cannot be 0", USAGE)
        if name in found:
            raise CalmError(f"--figures: {name} is given twice", USAGE)
        found[name] = number
    return found


def _share(samples: int, weight: float, total: float) -> Span:
    """Of a part of all samples; how far off it may be by chance (of few, as of events that are rare)."""
    value = weight / total
    if not samples:
        return Span(value, 0.0, value)
    apart = _DEVIATIONS * math.sqrt(samples)
    return Span(
        value, value * max(0.0, samples - apart) / samples, min(1.0, value * (samples + apart + 2) / samples)
    )


def _function(name: str) -> str:
    return _MARK.sub("", plain(name))


def _pot(profile: Profile, stack: profile_model.Stack) -> str | None:
    """Which time a sample is of, by the names of Work; None: of what stays where it is."""
    frames = [profile.frames[index] for index in stack.frames]
    own = {_function(frame.function) for frame in frames if frame.module.startswith(f"lib{CALMALLOC}.")}
    if own & SLOW_FREE:
        return "free_s"
    if own & SLOW_LARGE:
        return "large_s"
    if own & SLOW_REFILL:
        return "refill_s"
    return "fault_s" if stack.cause == "fault" and not own else None


def _has_symbols(library: Path) -> bool:
    """Those of its own functions, beside what it exports."""
    content = library.read_bytes()
    if content[:6] != b"\x7fELF\x02\x01":
        return False
    (table,) = struct.unpack_from("<Q", content, 0x28)
    size, count = struct.unpack_from("<HH", content, 0x3A)
    kinds = (struct.unpack_from("<I", content, table + size * index + 4)[0] for index in range(count))
    return _SHT_SYMTAB in kinds


def slow_shares(profile: Profile) -> tuple[dict[str, Span], str | None]:
    """Of the CPU time, what is spent where, by the names of Work; or why it is not known."""
    if profile.allocator != CALMALLOC:
        return {}, f"the slow paths of {profile.allocator} cannot be told from its fast ones: run calmalloc"
    ticks = [stack for stack in profile.stacks if stack.kind == CPU]
    total, samples = sum(stack.weight for stack in ticks), sum(stack.samples for stack in ticks)
    if not total:
        why = next((note for note in profile.notes if "stacks" in note), "there are no samples of CPU time")
        return {}, f"the time in its slow paths is not known: {why}"
    if samples < FEW:
        return {}, f"the time in its slow paths is not known: {samples} samples of CPU time are too few"
    weights = dict.fromkeys((*SLOW, "fault_s"), 0.0)
    numbers = dict.fromkeys(weights, 0)
    for stack in ticks:
        if (pot := _pot(profile, stack)) is not None:
            weights[pot] += stack.weight
            numbers[pot] += stack.samples
    shares = {pot: _share(numbers[pot], weights[pot], total) for pot in weights}
    if not profile.kernel_stacks:
        # Its page faults and memory calls are then no part of the samples.
        del shares["fault_s"]
    return shares, None


def _seconds(shares: Mapping[str, Span], cpu_s: float) -> dict[str, Span]:
    return {
        pot: Span(share.value * cpu_s, share.low * cpu_s, share.high * cpu_s) for pot, share in shares.items()
    }


def _notes_of(profile: Profile) -> list[str]:
    if profile.kernel_stacks:
        return []
    return [
        "stacks are of user code alone: page faults and memory calls are no part of slow paths here, and "
        "more would be saved"
    ]


def from_profile(path: str) -> Found:
    """Times; a profile has no numbers of calls or messages."""
    profile = profile_model.load(path)
    user, system = profile.value("user_s"), profile.value("system_s")
    if user is None or system is None:
        raise CalmError(f"{path}: the CPU time is missing")
    shares, why = slow_shares(profile)
    work = Work(cpu_s=user + system or None, wall_s=profile.wall_s or None)
    if shares and work.cpu_s:
        work = replace(work, **_seconds(shares, work.cpu_s))  # type: ignore[arg-type]
    started = profile.value("threads_started")
    missing = why or "a profile has no numbers of messages: give them by --figures cache_misses=…,large=…"
    notes = _notes_of(profile) if shares else []
    if profile.interrupted:
        notes.append(f"{path} is of a run that was stopped, so of a part of the work")
    return Found(work, missing, threads=None if started is None else started + 1, notes=notes)


def reports(text: str) -> list[dict[str, float]]:
    """The lines that calmalloc wrote at the exit of each process."""
    found, decoder = [], json.JSONDecoder()
    for match in re.finditer(re.escape(_REPORT), text):
        try:
            line, _ = decoder.raw_decode(text, match.start())
            found.append({name: float(line[name]) for name in ("cache_misses", "large_allocations")})
        except (ValueError, KeyError, TypeError):
            # What another thread wrote into the midst of it.
            continue
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Of a protocol buffer: numbers, and what has a length."""
    at = 0

    def number() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
        elif key & 7 == 2:
            length = number()
            yield key >> 3, message[at : at + length]
            at += length
        else:
            raise ValueError("it is no heap profile of calmalloc")


@dataclass(frozen=True)
class Calls:
    """Estimates of a heap profile: blocks, and the standard deviation of their number."""

    mallocs: float
    frees: float
    deviation: float
    dropped: int

    @property
    def apart(self) -> float:
        """How far off the number may be by chance, of it; without a sample nothing is known."""
        return _DEVIATIONS * self.deviation / self.mallocs if self.mallocs else math.inf

    def __add__(self, other: "Calls") -> "Calls":
        return Calls(
            self.mallocs + other.mallocs,
            self.frees + other.frees,
            math.hypot(self.deviation, other.deviation),
            self.dropped + other.dropped,
        )


NO_CALLS = Calls(0.0, 0.0, 0.0, 0)
_SAMPLE, _VALUE, _PERIOD_FIELD = 2, 2, 12


def read_heap_profile(content: bytes) -> Calls:
    """What pprof would show as alloc_objects, and what of it is not in use any more."""
    mallocs = in_use = variance = 0.0
    period, values = 1, []
    try:
        for name, value in _fields(content):
            if name == _PERIOD_FIELD and isinstance(value, int):
                period = max(1, value)
            elif name == _SAMPLE and isinstance(value, bytes):
                numbers = [each for field, each in _fields(value) if field == _VALUE]
                values.append([each for each in numbers if isinstance(each, int)])
        for objects, space, left, _ in values:
            mallocs, in_use = mallocs + objects, in_use + left
            # A block of `size` bytes is hit with this probability, and then stands for its inverse.
            hit = -math.expm1(-space / max(1, objects) / period)
            variance += objects * (1 - hit) / hit if hit else 0.0
    except (IndexError, ValueError) as error:
        raise CalmError(f"a heap profile of calmalloc cannot be read: {error}") from error
    dropped = re.search(rb"calmalloc: (\d+) samples dropped", content)
    return Calls(
        mallocs,
        max(0.0, mallocs - in_use),
        math.sqrt(variance),
        int(dropped[1]) if dropped else 0,
    )


def _environment(own: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """calmalloc, with options of ours behind the user's: the last of two counts.

    What offload would save is seen where it does not run yet.
    """
    variables = allocators.parse(CALMALLOC).variables(inherited)
    options = [each for each in (inherited.get(CALM_OPTIONS), own, "offload=off") if each]
    return variables | {CALM_OPTIONS: ",".join(options)}


def closer(period: int, found: Calls) -> int:
    """The period that would give samples enough: by chance an estimate is off by its square root."""
    if math.isinf(found.apart):
        return 1
    return max(1, min(period, int(period * (_CLOSE / found.apart) ** 2)))


@dataclass
class _Runs:
    """The runs of a program, whose output goes nowhere."""

    command: Sequence[str]

    def once(self, options: str) -> tuple[Measurement, str]:
        """One, and what went to its standard error."""
        with tempfile.TemporaryFile() as errors:
            run = measure.measure(
                self.command,
                _environment(options, os.environ),
                groups=[HARDWARE_GROUP],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            if run.interrupted_by is not None:
                raise SystemExit(128 + run.interrupted_by)
            errors.seek(0)
            content = errors.read()
        if run.failure:
            said = io.BytesIO(re.sub(rb"(?m)^" + re.escape(_REPORT.encode()) + rb".*\n?", b"", content))
            raise CalmError(f"{self.command[0]}: {run.failure}{report.last_words(said)}")
        return run, content.decode(errors="replace")

    def calls(self, bar: Bar) -> Calls:
        """From a heap profile, or from two, if the first had few samples."""
        found = self._sampled(_PERIOD)
        if found.apart > _CLOSE:
            bar.update(what="counting calls again, more closely")
            again = self._sampled(closer(_PERIOD, found))
            found = min(found, again, key=lambda each: each.apart)
        return found

    def _sampled(self, period: int) -> Calls:
        with tempfile.TemporaryDirectory(prefix="calm-") as folder:
            self.once(f"profile={period},profile_file={folder}/calls")
            found = [read_heap_profile(path.read_bytes()) for path in Path(folder).glob("*.heap")]
        return sum(found, NO_CALLS)

    def profile(self) -> Profile:
        """Samples of stacks."""
        wrapped = program.with_variables(self.command, _environment("", os.environ))
        quiet = 'exec "$@" </dev/null 2>/dev/null'
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - it is no file of ours
            found = Watcher(_FREQUENCY, Progress()).run(["sh", "-c", quiet, "sh", *wrapped], nowhere.fileno())
        if found.interrupted:
            raise SystemExit(130)
        if found.exit_code:
            raise CalmError(f"{self.command[0]}: exit code {found.exit_code} while it was profiled")
        return found


def _middle(values: Sequence[float | None]) -> float | None:
    return median(values) if all(value is not None for value in values) else None


def from_runs(command: Sequence[str], rounds: int) -> Found:
    """Runs it that many times for its counters, and two or three times more for the rest."""
    program.find(command[0])
    if obstacle := program.preload_obstacle(command):
        raise CalmError(f"nothing can be counted: {obstacle}")
    runs, notes = _Runs(command), []
    with Bar(rounds + 2) as bar:
        measured: list[Measurement] = []
        counted: list[list[dict[str, float]]] = []
        for number in range(rounds):
            bar.update(number, f"round {number + 1} of {rounds}")
            run, errors = runs.once("report=exit")
            measured.append(run)
            counted.append(reports(errors))
        bar.update(rounds, "counting calls")
        calls = runs.calls(bar)
        bar.update(rounds + 1, "profiling")
        profile = runs.profile()
    misses = [
        [run.counters[name].value for name in ("llc_load_misses", "dtlb_load_misses")] for run in measured
    ]
    cpu_s = median([run.user_s + run.system_s for run in measured]) or None
    work = Work(
        cpu_s=cpu_s,
        wall_s=median([run.wall_s for run in measured]),
        hardware_misses=_middle([None if None in each else sum(map(float, each)) for each in misses]),  # type: ignore[arg-type]
    )
    if work.hardware_misses is None:
        reason = (
            measured[-1].counters["llc_load_misses"].reason
            or measured[-1].counters["dtlb_load_misses"].reason
        )
        notes.append(f"cache and TLB misses are not counted: {reason}")
    missing = ""
    if all(counted):
        work = replace(
            work,
            cache_misses=median([sum(each["cache_misses"] for each in lines) for lines in counted]),
            large=median([sum(each["large_allocations"] for each in lines) for lines in counted]),
        )
        if max(map(len, counted)) > 1:
            notes.append(
                f"{max(map(len, counted))} processes: a child counts again what its parent had when it forked"
            )
    else:
        missing = "calmalloc wrote no report at its exit (it ended by _exit, or closed its standard error)"
    spans = {}
    if calls.mallocs:
        work = replace(work, mallocs=calls.mallocs, frees=calls.frees)
        apart = _DEVIATIONS * calls.deviation
        for name, value in (("mallocs", calls.mallocs), ("frees", calls.frees)):
            spans[name] = Span(value, max(0.0, value - apart), value + apart)
        notes.append(
            f"calls are estimated from a heap profile, to {apart / calls.mallocs:.1%}; "
            "a realloc that moves its block is one of each"
        )
        if calls.dropped:
            notes.append(f"the heap profile dropped {calls.dropped:,} samples: there are more calls")
    elif not missing:
        notes.append("it left no heap profile at its exit, so its calls are not known")
    shares, why = slow_shares(profile)
    library = allocators.find_library(CALMALLOC)
    if shares and not any(shares[pot].value for pot in SLOW) and library and not _has_symbols(library):
        shares, why = {}, f"the time in its slow paths is not known: {library} has no symbols"
    if shares and cpu_s:
        work = replace(work, **_seconds(shares, cpu_s))  # type: ignore[arg-type]
        notes += _notes_of(profile)
    found = Found(work, missing or why or "its CPU time is too short to be measured", spans, notes=notes)
    started = profile.value("threads_started")
    found.threads = None if started is None else started + 1
    return found
