"""Adds samples up: weights by stack, by cause and over time, scaled to the totals that are known."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import NamedTuple

from msgspec.structs import replace

from calm.commands.profile.causes import classify
from calm.commands.profile.recording import CLOCK, Sample
from calm.core import symbols
from calm.core.events import CALL_PREFIX, EVENTS
from calm.core.profile_model import (
    CALL,
    CAUSES,
    CPU,
    FAULT,
    FEW_SAMPLES,
    SHOOTDOWN,
    Cause,
    Frame,
    Stack,
    Timeline,
    Total,
)
from calm.core.symbols import Address

_MAX_BINS = 100
# Bits of an x86 page fault's error code.
_PRESENT, _WRITE = 1, 2
_KINDS = {
    CLOCK: CPU,
    EVENTS["shootdowns"].perf: SHOOTDOWN,
    EVENTS["faults"].perf: FAULT,
    "page-faults": FAULT,
}

_Key = tuple[str, str, tuple[Address, ...]]


class Parts(NamedTuple):
    """The parts of a profile that come from samples."""

    causes: list[Cause]
    frames: list[Frame]
    stacks: list[Stack]
    timeline: Timeline
    sampled: dict[str, float]


def bin_width(wall_s: float) -> float:
    """1, 2 or 5 times a power of ten seconds, from 10 ms: the smallest that gives at most _MAX_BINS."""
    widths = (digit * 10.0**power / 100 for power in count() for digit in (1, 2, 5))
    return next(width for width in widths if wall_s <= _MAX_BINS * width)


def kind_of(event: str) -> str | None:
    """The kind of a sample, by perf's name of the event."""
    return CALL if event.startswith(CALL_PREFIX) else _KINDS.get(event.removesuffix(":u"))


def cause_of(sample: Sample, kind: str) -> str:
    """A key of CAUSES."""
    if kind == CALL:
        return sample.event.removeprefix(CALL_PREFIX)
    if kind == FAULT:
        code = sample.trace.partition("error_code=0x")[2].split(" ")[0]
        copy = _PRESENT | _WRITE
        return "cow" if code.isalnum() and int(code, 16) & copy == copy else "fault"
    return classify(address.symbol for address in sample.stack if address.kernel)


def _total_key(kind: str, cause: str, counted: bool = False) -> str:
    """The total that a sample is scaled to: of what is counted by cause, each cause's own."""
    return f"{kind}:{cause}" if kind == CALL or (kind == SHOOTDOWN and counted) else kind


def _exact(
    totals: Mapping[str, Total], counted: Mapping[str, int] | None, kernel_stacks: bool
) -> dict[str, float]:
    """The known totals by _total_key. Without the kernel's part of stacks, CPU samples are of user time."""
    names = {
        SHOOTDOWN: ["shootdowns"],
        FAULT: ["minor_faults", "major_faults"],
        CPU: ["user_s", "system_s"] if kernel_stacks else ["user_s"],
        **{f"{CALL}:{name}": [name] for name in totals if name in CAUSES},
    }
    known = {name: total.value for name, total in totals.items() if total.value is not None}
    found = {
        key: sum(known.get(name, 0) for name in parts)
        for key, parts in names.items()
        if not known.keys().isdisjoint(parts)
    }
    if counted is not None and SHOOTDOWN in found:
        all_counted = max(1, sum(counted.values()))
        found |= {
            f"{SHOOTDOWN}:{cause}": found[SHOOTDOWN] * counted.get(cause, 0) / all_counted for cause in CAUSES
        }
    return found


class _Series:
    """Events over time. A sample of one event in N stands for N since the sample before it."""

    def __init__(self, began: float, width: float, bins: int) -> None:
        self._began, self._width, self._bins = began, width, bins
        self._samples: defaultdict[str, list[tuple[float, str, float]]] = defaultdict(list)

    def add(self, stream: str, name: str, at_s: float, weight: float) -> None:
        """A sample of a stream that counts by itself."""
        self._samples[stream].append((at_s, name, weight))

    def values(self) -> dict[tuple[str, str], list[float]]:
        """By stream and name, for each bin."""
        found: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * self._bins)
        for stream, samples in self._samples.items():
            before = self._began
            for at_s, name, weight in sorted(samples):
                # The sampling clock tells of its own moment alone.
                first = self._bin(at_s if stream == CPU else before)
                last = self._bin(at_s)
                for index in range(first, last + 1):
                    found[stream, name][index] += weight / (last + 1 - first)
                before = at_s
        return found

    def _bin(self, at_s: float) -> int:
        return min(max(int((at_s - self._began) / self._width), 0), self._bins - 1)


def build(
    samples: Iterable[Sample],
    totals: Mapping[str, Total],
    began: float,
    wall_s: float,
    tick_s: float,
    kernel_stacks: bool = True,
    counted: Mapping[str, int] | None = None,
) -> Parts:
    """Adds samples up. `began` is by their clock; a sample of CPU time stands for tick_s.

    `counted` has the shootdowns by cause, where they were counted: their shares are then exact.
    """
    weights: defaultdict[_Key, float] = defaultdict(float)
    numbers: Counter[_Key] = Counter()
    sums: defaultdict[str, float] = defaultdict(float)
    whole: defaultdict[str, float] = defaultdict(float)
    squares: defaultdict[str, float] = defaultdict(float)
    width = bin_width(wall_s)
    series = _Series(began, width, max(1, int(wall_s / width + 0.999999)))
    for sample in samples:
        if (kind := kind_of(sample.event)) is None:
            continue
        cause = cause_of(sample, kind)
        weight = sample.period * (tick_s if kind == CPU else 1)
        key = (kind, cause, sample.stack)
        weights[key] += weight
        numbers[key] += 1
        sums[_total_key(kind, cause, counted is not None)] += weight
        whole[kind] += weight
        squares[kind] += weight * weight
        name = f"{kind}:{cause}" if kind in (SHOOTDOWN, CALL) else kind
        if kind == CPU:
            name = "cpu:system" if sample.stack and sample.stack[0].kernel else "cpu:user"
        series.add(_total_key(kind, cause), name, sample.at_s, weight)
    known = _exact(totals, counted, kernel_stacks)
    scale = {key: known.get(key, total) / total if total else 1.0 for key, total in sums.items()}

    def scaled(kind: str, cause: str) -> float:
        return scale[_total_key(kind, cause, counted is not None)]

    frames, stacks = _stacks(weights, numbers, scaled)
    ticks = sum(stack.samples for stack in stacks if stack.kind == CPU)
    curves = {
        name: [round(value * scaled(*_of_curve(name)), 6) for value in values]
        for (key, name), values in series.values().items()
        # With few samples, one would be several CPUs at its moment.
        if key != CPU or ticks >= FEW_SAMPLES
    }
    causes = sorted(
        _causes(stacks, totals, known, kernel_stacks),
        key=lambda c: (c.key == "other", -(c.shootdowns or 0), -(c.cpu_s or 0), -(c.calls or 0)),
    )
    # As many samples of equal weight would be as sure.
    sampled = {kind: round(whole[kind] ** 2 / squares[kind], 1) for kind in whole}
    return Parts(causes, frames, stacks, Timeline(width, curves), sampled)


def _of_curve(name: str) -> tuple[str, str]:
    """Kind and cause."""
    kind, _, cause = name.partition(":")
    return kind, cause


def _stacks(
    weights: Mapping[_Key, float], numbers: Mapping[_Key, int], scaled: Callable[[str, str], float]
) -> tuple[list[Frame], list[Stack]]:
    resolved = symbols.resolve({address for _, _, stack in weights for address in stack})
    index: dict[Frame, int] = {}
    merged: defaultdict[tuple[str, str, tuple[int, ...]], list[float]] = defaultdict(lambda: [0.0, 0])
    for (kind, cause, stack), weight in weights.items():
        frames = [frame for address in reversed(stack) for frame in resolved[address]]
        # The line within a function at which the clock sampled it is a matter of chance.
        if kind == CPU and frames:
            frames[-1] = replace(frames[-1], source=None)
        into = merged[kind, cause, tuple(index.setdefault(frame, len(index)) for frame in frames)]
        into[0] += weight * scaled(kind, cause)
        into[1] += numbers[kind, cause, stack]
    made = [Stack(*key, round(weight, 6), int(number)) for key, (weight, number) in merged.items()]
    return list(index), sorted(made, key=lambda stack: (stack.kind, -stack.weight))


def _causes(
    stacks: list[Stack], totals: Mapping[str, Total], known: Mapping[str, float], kernel_stacks: bool
) -> Iterator[Cause]:
    """The figures of each cause: None where they are unknown, and 0 where samples were taken without it."""
    weights: defaultdict[tuple[str, str], float] = defaultdict(float)
    for stack in stacks:
        weights[stack.kind, stack.cause] += stack.weight
    sampled = {stack.kind for stack in stacks} | {kind for kind, total in known.items() if total == 0}
    if not kernel_stacks:
        sampled.discard(CPU)

    def weight(kind: str, cause: str) -> float | None:
        if kind == SHOOTDOWN and (count := known.get(f"{kind}:{cause}")) is not None:
            return round(count, 6)
        return weights[kind, cause] if kind in sampled else None

    for key in CAUSES:
        calls = totals[key].value if key in totals else None
        if calls is None and (CALL, key) in weights:
            calls = weights[CALL, key]
        cause = Cause(key, weight(SHOOTDOWN, key), weight(FAULT, key), calls, weight(CPU, key))
        if cause.shootdowns or cause.faults or cause.calls or cause.cpu_s:
            yield cause
