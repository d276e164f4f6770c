"""The figures that `calm predict offload` starts from: runs under calmalloc, a profile, or the user's.

The counters at exit, the calls and the time in slow paths each take runs of their own, so that measuring one
does not slow another.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from calm.core import allocators, documents, elf, measure, proc, program, protobuf, report
from calm.core.allocators import CALM_OPTIONS
from calm.core.errors import INTERRUPTED, USAGE, CalmError
from calm.core.measure import HARDWARE_GROUP, Measurement
from calm.core.profile_model import CPU, FEW_SAMPLES, Profile, Stack
from calm.core.progress import Bar
from calm.core.protobuf import numbers
from calm.core.statistics import median
from research.predict.model import Span
from research.predict.offload import FIGURES, SLOW, TIMES, Cpus, Found, Work

CALMALLOC = "calmalloc"
# Functions of the library (src/api) on the stack of whatever left the fast path: those of free, of large
# blocks, and of all else. The first set that has one decides.
SLOW_FUNCTIONS = {
    "free_s": {"release_slow", "spill"},
    "large_s": {"allocate_large", "take_pages", "arena_resize_large"},
    "refill_s": {"allocate_slow", "allocate_counted", "refill"},
}
# Samples of CPU time a second: with ten seconds of a program, a share of 1 % is of 100 of them.
_FREQUENCY = 997
# Bytes between two samples of the heap profile at first; then fewer, if the number of calls is not known to a
# tenth.
_PERIOD, _CLOSE = 512 << 10, 0.1
_DEVIATIONS = 1.96
# What is divided by less would have no limit.
MIN_FIGURE, MAX_FIGURE = 1e-12, 1e18
_NOT_ZERO = ("atomic_cycles", "atomics", "miss_cycles", "cpu_s", "wall_s")
_REPORT = '{"allocator": "calmalloc"'
_SUFFIX = re.compile(r"\.(constprop|isra|part|cold|lto_priv|localalias)\b.*$")


def quota(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The lowest quota of CPU time, in CPUs, of this process's control group and those above it."""
    found = []
    for line in proc.text(own.name, own.parent).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        # Seen from within a container, the group may be a path that leads out of it.
        group = Path(*(part for part in Path(path).parts if part not in ("/", "..")))
        for mount in (controllers, "cpu") if controllers else ("",):
            for each in (group, *group.parents):
                words = " ".join(proc.text(name, root / mount / each) for name in names)
                if limit := re.fullmatch(r"(\d+)\s+([1-9]\d*)\s*", words):
                    found.append(int(limit[1]) / int(limit[2]))
    return min(found, default=None)


def cpus_here() -> Cpus:
    """The CPUs of this process and its children."""
    return Cpus(len(os.sched_getaffinity(0)), quota())


def parse_figures(texts: Sequence[str]) -> dict[str, float]:
    """NAME=VALUE,NAME=VALUE."""
    found: dict[str, float] = {}
    for piece in ",".join(texts).split(",") if texts else ():
        name, _, value = piece.strip().partition("=")
        number = math.nan
        with suppress(ValueError):
            number = float(value)
        wrong = {
            f"is not NAME=VALUE of {', '.join(FIGURES)}": name not in FIGURES,
            f"has no number from {MIN_FIGURE:g} to {MAX_FIGURE:g}, or 0": (
                number != 0 and not MIN_FIGURE <= number < MAX_FIGURE
            ),
            "cannot be 0": number == 0 and name in _NOT_ZERO,
            "is given twice": name in found,
        }
        for reason in (reason for reason, holds in wrong.items() if holds):
            raise CalmError(f"--figures: {piece!r} {reason}", USAGE)
        found[name] = number
    return found


def _share(samples: int, weight: float, total: float) -> Span:
    """The share of some samples, and its error by chance (of few, as of events that are rare)."""
    value = weight / total
    if not samples:
        return Span(value, 0.0, value)
    apart = _DEVIATIONS / math.sqrt(samples)
    return Span(value, value * max(0.0, 1 - apart), min(1.0, value * (1 + apart + 2 / samples)))


def function(name: str) -> str:
    """A function without the suffixes that compilers add."""
    return _SUFFIX.sub("", name)


def _pot(profile: Profile, stack: Stack) -> str | None:
    """The name in Work of a sample's time; None for the time of the program's own code."""
    frames = [profile.frames[index] for index in stack.frames]
    own = {function(frame.function) for frame in frames if frame.module.startswith(f"lib{CALMALLOC}.")}
    for pot, functions in SLOW_FUNCTIONS.items():
        if own & functions:
            return pot
    return "fault_s" if stack.cause == "fault" and not own else None


def slow_shares(profile: Profile) -> tuple[dict[str, Span], str | None]:
    """The shares of the CPU time, by the names of Work; or why they are not known."""
    if profile.allocator != CALMALLOC:
        return {}, f"the slow paths of {profile.allocator} cannot be told from its fast ones: run calmalloc"
    ticks = [stack for stack in profile.stacks if stack.kind == CPU]
    total, samples = sum(stack.weight for stack in ticks), sum(stack.samples for stack in ticks)
    if not total:
        why = next((note for note in profile.notes if "stacks" in note), "there are no samples of CPU time")
        return {}, f"the time in its slow paths is not known: {why}"
    if samples < FEW_SAMPLES:
        return {}, f"the time in its slow paths is not known: {samples} samples of CPU time are too few"
    pots: dict[str | None, list[Stack]] = {}
    for stack in ticks:
        pots.setdefault(_pot(profile, stack), []).append(stack)
    shares = {}
    # Without the kernel's stacks, its page faults and system calls are no part of the samples.
    for name in TIMES if profile.kernel_stacks else SLOW:
        stacks = pots.get(name, [])
        shares[name] = _share(sum(s.samples for s in stacks), sum(s.weight for s in stacks), total)
    return shares, None


def _with_profile(found: Found, profile: Profile, no_symbols: str | None = None) -> str | None:
    """Adds the times of a profile; returns why they are not known."""
    shares, why = slow_shares(profile)
    if no_symbols and shares and not any(shares[pot].value for pot in SLOW):
        shares, why = {}, no_symbols
    if shares and (cpu_s := found.work.cpu_s):
        for name, share in shares.items():
            setattr(found.work, name, share * cpu_s)
        if not profile.kernel_stacks:
            found.notes.append(
                "stacks are of user code alone: page faults and system calls are no part of slow paths here, "
                "and more would be saved"
            )
    started = profile.value("threads_started")
    found.threads = None if started is None else started + 1
    return why


def from_profile(path: str) -> Found:
    """The times; a profile has no numbers of calls or messages."""
    profile = documents.read(path, Profile)
    user, system = profile.value("user_s"), profile.value("system_s")
    if user is None or system is None:
        raise CalmError(f"{path}: the CPU time is missing", USAGE)
    found = Found(Work(cpu_s=user + system or None, wall_s=profile.wall_s or None))
    why = _with_profile(found, profile)
    found.missing = why or "a profile has no messages: give them by --figures cache_misses=…,large=…"
    if profile.interrupted_by:
        found.notes.append(f"{path} is of a run that was stopped, so of a part of the work")
    return found


def reports(text: str) -> list[dict[str, float]]:
    """The lines that calmalloc wrote at the exit of each process."""
    found, decoder = [], json.JSONDecoder()
    for match in re.finditer(re.escape(_REPORT), text):
        # Another thread may have written into the midst of it.
        with suppress(ValueError, KeyError, TypeError):
            line, _ = decoder.raw_decode(text, match.start())
            found.append({name: float(line[name]) for name in ("cache_misses", "large_allocations")})
    return found


@dataclass(frozen=True)
class Calls:
    """The calls that heap profiles estimate, and the standard deviation of their number."""

    mallocs: float = 0.0
    frees: float = 0.0
    deviation: float = 0.0
    dropped: int = 0

    @property
    def apart(self) -> float:
        """The error of the number by chance, relative to it; without a sample nothing is known."""
        return _DEVIATIONS * self.deviation / self.mallocs if self.mallocs else math.inf


_SAMPLE, _VALUE, _PERIOD_FIELD = 2, 2, 12


def read_heap_profiles(*contents: bytes) -> Calls:
    """The alloc_objects of pprof, one for each process, and those that are not in use any more."""
    mallocs = frees = variance = 0.0
    dropped = 0
    try:
        for content in contents:
            parts = list(protobuf.fields(content))
            period = max(
                [1, *(value for tag, value in parts if tag == _PERIOD_FIELD and isinstance(value, int))]
            )
            for sample in (value for tag, value in parts if tag == _SAMPLE and isinstance(value, bytes)):
                values = [
                    each for tag, value in protobuf.fields(sample) if tag == _VALUE for each in numbers(value)
                ]
                objects, space, in_use = values[:3]
                mallocs, frees = mallocs + objects, frees + objects - in_use
                # A block of `size` bytes is hit with this probability, and then stands for its inverse.
                hit = -math.expm1(-space / max(1, objects) / period)
                variance += objects * (1 - hit) / hit if hit else 0.0
            if found := re.search(rb"calmalloc: (\d+) samples dropped", content):
                dropped += int(found[1])
    except (protobuf.FormatError, ValueError) as error:
        raise CalmError(f"a heap profile of calmalloc cannot be read: {error}") from error
    return Calls(mallocs, max(0.0, frees), math.sqrt(variance), dropped)


def count_calls(sampled: Callable[[int], Calls]) -> Calls:
    """The calls from a heap profile; from a second one with a shorter period if the first has few samples."""
    found = sampled(_PERIOD)
    if found.apart <= _CLOSE:
        return found
    # By chance an estimate is off by the square root of the number of samples.
    closer = 1 if math.isinf(found.apart) else max(1, int(_PERIOD * (_CLOSE / found.apart) ** 2))
    return min(found, sampled(closer), key=lambda each: each.apart)


def calmalloc_environment(own: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment for calmalloc. Of two options the last one, calm's, counts."""
    variables = allocators.parse(CALMALLOC).variables(inherited)
    options = [each for each in (inherited.get(CALM_OPTIONS), own) if each]
    return variables | ({CALM_OPTIONS: ",".join(options)} if options else {})


def _run(command: Sequence[str], options: str) -> tuple[Measurement, str]:
    """One run, whose output is dropped, and its standard error."""
    with tempfile.TemporaryFile() as errors:
        run = measure.measure(
            command,
            calmalloc_environment(options, os.environ),
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
        words = io.BytesIO(re.sub(rb"(?m)^" + re.escape(_REPORT.encode()) + rb".*\n?", b"", content))
        raise CalmError(f"{command[0]}: {run.failure}{report.last_words(words)}")
    return run, content.decode(errors="replace")


def _sampled(command: Sequence[str], period: int) -> Calls:
    with tempfile.TemporaryDirectory(prefix="calm-") as folder:
        _run(command, f"profile={period},profile_file={folder}/calls")
        return read_heap_profiles(*(path.read_bytes() for path in Path(folder).glob("*.heap")))


def _profile(command: Sequence[str]) -> Profile:
    from calm.commands.profile.watch import Watcher

    wrapped = program.with_variables(command, calmalloc_environment("", os.environ))
    quiet = 'exec "$@" </dev/null 2>/dev/null'
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - it is no file of ours
        found = Watcher(_FREQUENCY).run(["sh", "-c", quiet, "sh", *wrapped], nowhere.fileno())
    if found.interrupted_by:
        raise SystemExit(INTERRUPTED)
    if found.exit_code:
        raise CalmError(f"{command[0]}: exit code {found.exit_code} while it was profiled")
    return found


def _no_symbols() -> str | None:
    """A reason if the library has no symbols of its own functions, beside those that it exports."""
    if library := allocators.find_library(CALMALLOC):
        with elf.opened(library) as file:
            if not file.get_section_by_name(".symtab"):
                return f"the time in its slow paths is not known: {library} has no symbols"
    return None


def from_runs(command: Sequence[str], rounds: int) -> Found:
    """Runs it that many times for its counters, and two or three times more for the rest."""
    program.find(command[0])
    if obstacle := program.preload_obstacle(command):
        raise CalmError(f"nothing can be counted: {obstacle}")
    runs: list[Measurement] = []
    lines: list[list[dict[str, float]]] = []
    with Bar(rounds + 2) as bar:
        for number in range(rounds):
            bar.update(number, f"round {number + 1} of {rounds}")
            run, errors = _run(command, "report=exit")
            runs.append(run)
            lines.append(reports(errors))
        bar.update(rounds, "counting calls")
        calls = count_calls(lambda period: _sampled(command, period))
        bar.update(rounds + 1, "profiling")
        profile = _profile(command)
    work = Work(
        cpu_s=median([run.user_s + run.system_s for run in runs]) or None,
        wall_s=median([run.wall_s for run in runs]),
    )
    found = Found(work)
    missing = None
    misses = [[run.counters[name] for name in ("llc_load_misses", "dtlb_load_misses")] for run in runs]
    if reason := next((each.reason for both in misses for each in both if each.value is None), None):
        found.notes.append(f"cache and TLB misses are not counted: {reason}")
    else:
        work.hardware_misses = median([sum(each.value or 0 for each in both) for both in misses])
    if all(lines):
        work.cache_misses = median([sum(line["cache_misses"] for line in each) for each in lines])
        work.large = median([sum(line["large_allocations"] for line in each) for each in lines])
        if (processes := max(map(len, lines))) > 1:
            found.notes.append(
                f"{processes} processes: a child counts again the calls of its parent before the fork"
            )
    else:
        missing = "calmalloc wrote no report at its exit (it ended by _exit, or closed its standard error)"
    if calls.mallocs:
        work.mallocs, work.frees = calls.mallocs, calls.frees
        apart = calls.apart * calls.mallocs
        found.estimated = {
            name: Span(value, max(0.0, value - apart), value + apart)
            for name, value in (("mallocs", calls.mallocs), ("frees", calls.frees))
        }
        found.notes.append(
            f"calls are estimated from a heap profile, to {calls.apart:.1%}; "
            "a realloc that moves its block is one of each"
        )
        if calls.dropped:
            found.notes.append(f"the heap profile dropped {calls.dropped:,} samples: there are more calls")
    elif not missing:
        found.notes.append("it left no heap profile at its exit, so its calls are not known")
    why = _with_profile(found, profile, _no_symbols())
    found.missing = missing or why or "its CPU time is too short to be measured"
    return found
