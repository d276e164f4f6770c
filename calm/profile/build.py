"""A profile out of samples and totals: weights by stack, by cause and over time."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from calm.profile import symbols
from calm.profile.causes import classify
from calm.profile.model import CALL, CAUSES, CPU, FAULT, SHOOTDOWN, Cause, Frame, Stack, Timeline, Total
from calm.profile.recorder import FAULT_EVENT, SHOOTDOWN_EVENT
from calm.profile.script import CLOCK, Address, Sample

# With fewer samples of the CPU's time shares of it are rough, and there is no curve: one sample would be
# several CPUs, in the moment that it was taken.
FEW = 20

_BINS = 100
_LEAST_BIN_S = 0.01
_CALL_PREFIX = "syscalls:sys_enter_"
# x86: the page was there, and was written to.
_PRESENT, _WRITE = 1, 2


@dataclass
class Parts:
    """What becomes of samples."""

    causes: list[Cause] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    timeline: Timeline = field(default_factory=lambda: Timeline(_LEAST_BIN_S))
    samples: Mapping[str, int] = field(default_factory=dict)
    """By kind."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """Periods, by the name of what was counted: the estimate where there is no count."""


def bin_width(wall_s: float) -> float:
    """1, 2 or 5 times a power of ten seconds: the least that gives no more bins than are wanted."""
    width, steps = _LEAST_BIN_S, 0
    while wall_s / width > _BINS:
        width *= (2, 2.5, 2)[steps % 3]
        steps += 1
    return round(width, 6)


def kind_of(event: str) -> str | None:
    """What a sample is of, by perf's name of the event."""
    base = event.removesuffix(":u")
    if base == CLOCK:
        return CPU
    if event == SHOOTDOWN_EVENT:
        return SHOOTDOWN
    if event.startswith(_CALL_PREFIX):
        return CALL
    return FAULT if base in (FAULT_EVENT, "page-faults") else None


def _error_code(trace: str) -> int:
    word = trace.partition("error_code=")[2].split(" ")[0]
    try:
        return int(word, 16)
    except ValueError:
        return 0


def cause_of(sample: Sample, kind: str) -> str:
    """Why it happened."""
    if kind == CALL:
        return sample.event.removeprefix(_CALL_PREFIX)
    if kind == FAULT:
        copy = _PRESENT | _WRITE
        return "cow" if _error_code(sample.trace) & copy == copy else "fault"
    return classify(address.symbol for address in sample.stack if address.kernel)


def total_key(kind: str, cause: str) -> str:
    """What a sample is scaled by: calls each by their own number, all else by that of the kind."""
    return f"{kind}:{cause}" if kind == CALL else kind


def exact(totals: Mapping[str, Total], kernel_stacks: bool = True) -> dict[str, float]:
    """The known totals by total_key: of what has samples, so CPU time without the kernel's is user time."""

    def value(name: str) -> float | None:
        return totals[name].value if name in totals else None

    found: dict[str, float | None] = {SHOOTDOWN: value("shootdowns")}
    times = ("user_s", "system_s") if kernel_stacks else ("user_s",)
    for key, names in ((FAULT, ("minor_faults", "major_faults")), (CPU, times)):
        parts = [part for name in names if (part := value(name)) is not None]
        found[key] = sum(parts) if parts else None
    found |= {f"{CALL}:{name}": value(name) for name in totals if name in CAUSES}
    return {key: number for key, number in found.items() if number is not None}


def build(
    samples: Iterable[Sample],
    totals: Mapping[str, Total],
    began: float,
    wall_s: float,
    tick_s: float,
    kernel_stacks: bool = True,
) -> Parts:
    """Puts samples together. began is by their clock; tick_s is what a sample of the CPU's stands for.

    Without the kernel's part of the stacks its CPU time has no samples either.
    """
    stacks: defaultdict[tuple[str, str, tuple[Address, ...]], float] = defaultdict(float)
    numbers: Counter[tuple[str, str, tuple[Address, ...]]] = Counter()
    sums: defaultdict[str, float] = defaultdict(float)
    width = bin_width(wall_s)
    bins = max(1, int(wall_s / width + 0.999999))
    series: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        kind = kind_of(sample.event)
        if kind is None:
            continue
        cause = cause_of(sample, kind)
        weight = sample.period * (tick_s if kind == CPU else 1)
        key = (kind, cause, sample.stack)
        stacks[key] += weight
        numbers[key] += 1
        sums[total_key(kind, cause)] += weight
        name = f"{kind}:{cause}" if kind in (SHOOTDOWN, CALL) else kind
        if kind == CPU:
            name = "cpu:system" if sample.stack and sample.stack[0].kernel else "cpu:user"
        at = min(max(int((sample.at_s - began) / width), 0), bins - 1)
        series.setdefault((total_key(kind, cause), name), [0.0] * bins)[at] += weight
    known = exact(totals, kernel_stacks)
    scale = {key: known.get(key, total) / total if total else 1.0 for key, total in sums.items()}
    frames, made = _stacks(stacks, numbers, scale)
    by_kind: Counter[str] = Counter()
    for (kind, _, _), number in numbers.items():
        by_kind[kind] += number
    if by_kind[CPU] < FEW:
        series = {(key, name): values for (key, name), values in series.items() if key != CPU}
    return Parts(
        causes=_causes(made, totals, by_kind, kernel_stacks),
        frames=frames,
        stacks=made,
        timeline=Timeline(
            width,
            {name: [round(v * scale[key], 6) for v in values] for (key, name), values in series.items()},
        ),
        samples=by_kind,
        sums=dict(sums),
    )


def _stacks(
    weights: Mapping[tuple[str, str, tuple[Address, ...]], float],
    numbers: Mapping[tuple[str, str, tuple[Address, ...]], int],
    scale: Mapping[str, float],
) -> tuple[list[Frame], list[Stack]]:
    resolved = symbols.resolve({address for _, _, stack in weights for address in stack})
    index: dict[Frame, int] = {}
    merged: defaultdict[tuple[str, str, tuple[int, ...]], list[float]] = defaultdict(lambda: [0.0, 0])
    for (kind, cause, stack), weight in weights.items():
        frames = [frame for address in reversed(stack) for frame in resolved[address]]
        # Where time goes within a function is a matter of chance, line by line.
        if kind == CPU and frames:
            frames[-1] = replace(frames[-1], source=None)
        key = (kind, cause, tuple(index.setdefault(frame, len(index)) for frame in frames))
        merged[key][0] += weight * scale[total_key(kind, cause)]
        merged[key][1] += numbers[kind, cause, stack]
    made = [
        Stack(kind, cause, frames, round(weight, 6), int(number))
        for (kind, cause, frames), (weight, number) in merged.items()
    ]
    return list(index), sorted(made, key=lambda stack: (stack.kind, -stack.weight))


def _causes(
    stacks: list[Stack], totals: Mapping[str, Total], samples: Mapping[str, int], kernel_stacks: bool
) -> list[Cause]:
    """Per cause; nothing where there is no knowing, and zero where it was looked at and not met."""
    weights: defaultdict[tuple[str, str], float] = defaultdict(float)
    for stack in stacks:
        weights[stack.kind, stack.cause] += stack.weight

    none = {kind for kind, total in exact(totals).items() if total == 0}

    def share(kind: str, cause: str) -> float | None:
        known = (samples.get(kind) or kind in none) and (kind != CPU or kernel_stacks)
        return weights[kind, cause] if known else None

    found = []
    for key in CAUSES:
        total = totals.get(key)
        calls = total.value if total is not None else None
        if calls is None and (CALL, key) in weights:
            calls = weights[CALL, key]
        cause = Cause(key, share(SHOOTDOWN, key), share(FAULT, key), calls, share(CPU, key))
        if cause.shootdowns or cause.faults or cause.calls or cause.cpu_s:
            found.append(cause)
    return sorted(
        found, key=lambda c: (c.key == "other", -(c.shootdowns or 0), -(c.cpu_s or 0), -(c.calls or 0))
    )
