"""The metrics of `calm export`: names, units, kinds, help texts, and the counters that they are read from.

Names and units follow OpenTelemetry's semantic conventions (v1.44): `process.*` metrics are theirs, and the
others are named in the same style. Names and labels of Prometheus are derived as OpenTelemetry specifies.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from calm.core.library_tables import COUNTERS, OPTIONS

PROCESS = "process"
"""In the place of a library's name: what the kernel counts."""
CALMALLOC, PTLBMALLOC2 = "calmalloc", "ptlbmalloc2"
LIBRARIES = (CALMALLOC, PTLBMALLOC2)
POLICIES = OPTIONS["test_policy"]
GOVERNS = "state = 1"
"""1 where ptlbmalloc2's counter `state` says that it governs, otherwise 0."""

PID = "process.pid"
EXECUTABLE = "process.executable.name"
COMMAND = "process.command"
LIBRARY = "calmalloc.library"
TEXTFILE = "calm.export.textfile"
"""The attribute of the exporter's own metrics in a file: its name."""
RELEASE = "calmalloc.release"
POLICY = "calmalloc.policy"
REASON = "calm.export.reason"
REASONS = ("permission", "ended", "version", "damaged", "limit")
"""Why a process could not be read."""

Number = int | float


class Kind(enum.Enum):
    """The kinds of instruments, by OpenTelemetry's names."""

    COUNTER = "counter"
    UP_DOWN = "updowncounter"
    GAUGE = "gauge"
    INFO = "info"
    """Always 1; its attributes have the information."""


class Source(NamedTuple):
    """The counter that a data point is read from."""

    library: str
    """PROCESS for what the kernel counts, "" for what the exporter itself counts."""
    counter: str
    value: str = ""
    """Of the metric's own attribute."""


@dataclass(frozen=True)
class Metric:
    """A row of the table."""

    name: str
    unit: str
    """By UCUM, as OpenTelemetry writes it."""
    kind: Kind
    help: str
    sources: tuple[Source, ...] = ()
    attribute: str = ""
    """The attribute that distinguishes the metric's data points within one process."""
    scale: float = 1
    """What a counter is multiplied by."""
    may_be_unused: bool = False
    """Left out where the counter is 0."""

    @property
    def prometheus_unit(self) -> str:
        if self.unit == "1":
            return "ratio"
        return {"By": "bytes", "s": "seconds"}.get(self.unit, "")

    @property
    def family(self) -> str:
        """The name of the family in Prometheus, without the suffix that its kind adds."""
        name = label(self.name).removesuffix("_info" if self.kind is Kind.INFO else "")
        return "_".join(filter(None, (name, self.prometheus_unit)))

    @property
    def prometheus_name(self) -> str:
        return self.family + {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(self.kind, "")


def label(attribute: str) -> str:
    """The label of Prometheus for an attribute."""
    return attribute.replace(".", "_")


def _of_both(calmalloc: str = "", ptlbmalloc2: str = "", value: str = "") -> tuple[Source, ...]:
    pairs = ((CALMALLOC, calmalloc), (PTLBMALLOC2, ptlbmalloc2))
    return tuple(Source(library, counter, value) for library, counter in pairs if counter)


def _library(name: str, counter: str, ptlbmalloc2: str = "", there: str = "") -> Metric:
    """The metric of one of calmalloc's counters; and the counter of ptlbmalloc2, and what it is `there`."""
    unit, is_total, text = COUNTERS[counter]
    return Metric(
        name,
        {"bytes": "By", "ns": "s", "byte_second": "By.s"}.get(unit, f"{{{unit}}}"),
        Kind.COUNTER if is_total else Kind.UP_DOWN,
        text.replace("`", "") if not there else f"{text[:-1].replace('`', '')}; ptlbmalloc2: {there}.",
        _of_both(counter, ptlbmalloc2),
        scale=1e-9 if unit == "ns" else 1,
    )


def _of_kernel(counter: str, value: str = "") -> tuple[Source, ...]:
    return (Source(PROCESS, counter, value),)


_FAULT = "system.paging.fault.type"
_MODE = "cpu.mode"
_PURGE_REASON = "calmalloc.purge.reason"
_CALL = "calmalloc.purge.call"
_COUNT, _NOW = Kind.COUNTER, Kind.UP_DOWN

METRICS: tuple[Metric, ...] = (
    Metric("process.memory.usage", "By", _NOW, "Resident memory.", _of_kernel("resident")),
    Metric("process.memory.virtual", "By", _NOW, "Address space.", _of_kernel("virtual")),
    Metric(
        "process.paging.faults",
        "{fault}",
        _COUNT,
        "Page faults.",
        (*_of_kernel("minor_faults", value="minor"), *_of_kernel("major_faults", value="major")),
        _FAULT,
    ),
    Metric(
        "process.cpu.time",
        "s",
        _COUNT,
        "CPU time.",
        (*_of_kernel("user_s", value="user"), *_of_kernel("system_s", value="system")),
        _MODE,
    ),
    Metric("process.uptime", "s", Kind.GAUGE, "Time since the process started.", _of_kernel("uptime_s")),
    Metric(
        "calmalloc.tlb.shootdowns",
        "{shootdown}",
        _COUNT,
        "TLB shootdowns that threads of the process began since the exporter first read it.",
        _of_kernel("shootdowns"),
    ),
    Metric("calmalloc.info", "", Kind.INFO, "The library, its release, and its policy."),
    _library("calmalloc.footprint", "footprint", "footprint_bytes", "memory of all arenas"),
    _library("calmalloc.in_use", "in_use"),
    _library(
        "calmalloc.dirty", "dirty", "free_top_bytes", "free memory at the arenas' tops, resident or not"
    ),
    _library("calmalloc.dirty_limit", "dirty_limit", "threshold_bytes", "the trim threshold"),
    _library("calmalloc.cached", "cached"),
    _library("calmalloc.dirtied", "dirtied"),
    _library("calmalloc.purged", "purged", "bytes_purged"),
    Metric(
        "calmalloc.purges",
        "{purge}",
        _COUNT,
        "Purges because free memory exceeded the limit, because it was unused or memory is scarce, and on "
        "request; ptlbmalloc2: trims.",
        (
            *_of_both("purges_limit", "trims", value="limit"),
            *_of_both("purges_epoch", value="epoch"),
            *_of_both("purges_request", value="request"),
        ),
        _PURGE_REASON,
    ),
    Metric(
        "calmalloc.purge.calls",
        "{call}",
        _COUNT,
        "System calls that returned memory to the kernel.",
        (
            *_of_both("purge_vectored_calls", "process_madvise_calls", value="process_madvise"),
            *_of_both("purge_single_calls", "madvise_calls", value="madvise"),
            *_of_both("", "break_calls", value="brk"),
        ),
        _CALL,
    ),
    _library("calmalloc.purge.ranges", "purge_ranges", "ranges"),
    _library("calmalloc.purge.failures", "purge_failures", "failed_purges"),
    _library("calmalloc.purge.time", "purge_ns"),
    _library("calmalloc.purge.wasted_time", "purge_wasted_ns"),
    Metric(
        "calmalloc.memory_per_cpu",
        "By",
        Kind.GAUGE,
        "The price of memory: bytes kept for a second that are worth a second of CPU time.",
        _of_both("memory_per_cpu_bytes"),
    ),
    Metric(
        "calmalloc.break_even",
        "s",
        Kind.GAUGE,
        "How long free memory is kept while nothing is known of when it is needed again.",
        _of_both("break_even_ns"),
        scale=1e-9,
    ),
    _library("calmalloc.retention.saved_time", "dirty_saved_ns"),
    _library("calmalloc.retention.memory_time", "dirty_byte_seconds"),
    Metric(
        "calmalloc.helper.enabled",
        "",
        Kind.GAUGE,
        "Option background: 1 if a helper thread may purge, 0 if not.",
        _of_both("background"),
    ),
    _library("calmalloc.cache.misses", "cache_misses"),
    _library("calmalloc.cache.flushes", "cache_flushes"),
    _library("calmalloc.heap.locks", "heap_locks"),
    _library("calmalloc.heap.contended_locks", "heap_locks_contended"),
    _library("calmalloc.limit.checks", "limit_checks", "walks", "walks over all arenas"),
    _library("calmalloc.large.allocations", "large_allocations"),
    _library("calmalloc.large.moves", "large_moves"),
    Metric(
        "ptlbmalloc2.active",
        "",
        Kind.GAUGE,
        "1 if ptlbmalloc2 governs glibc's malloc, 0 if it leaves it to glibc.",
        _of_both("", GOVERNS),
    ),
    Metric("ptlbmalloc2.arenas", "{arena}", _NOW, "Arenas of glibc's malloc.", _of_both("", "arenas")),
    Metric(
        "ptlbmalloc2.busy_arenas",
        "{arena}",
        _COUNT,
        "Arenas that were left for the next trim because another thread held their lock.",
        _of_both("", "busy_arenas"),
    ),
    Metric(
        "ptlbmalloc2.threshold.changes",
        "{change}",
        _COUNT,
        "Changes of the trim threshold.",
        _of_both("", "threshold_changes"),
    ),
)
"""Of each process."""

OWN: tuple[Metric, ...] = (
    Metric(
        "calm.export.processes",
        "{process}",
        _NOW,
        "Processes whose metrics are here.",
        (Source("", "processes"),),
    ),
    Metric(
        "calm.export.unreadable_processes",
        "{process}",
        _NOW,
        "Processes that could not be read: for want of permission, ended meanwhile, with a table of another "
        "version or a damaged one, or beyond the number of processes that are exported at once.",
        tuple(Source("", reason, reason) for reason in REASONS),
        REASON,
    ),
    Metric(
        "calm.export.scrape.duration",
        "s",
        Kind.GAUGE,
        "Time that reading these processes took.",
        (Source("", "duration_s"),),
    ),
    Metric(
        "calm.export.scrapes",
        "{scrape}",
        _COUNT,
        "Times that processes were read.",
        (Source("", "scrapes"),),
    ),
    Metric(
        "calm.export.otlp.failures",
        "{push}",
        _COUNT,
        "Pushes that the endpoint of --otlp did not accept.",
        (Source("", "otlp_failures"),),
        may_be_unused=True,
    ),
    Metric(
        "calm.export.textfile.failures",
        "{write}",
        _COUNT,
        "Times that the file of --textfile could not be written.",
        (Source("", "textfile_failures"),),
        may_be_unused=True,
    ),
)
"""Of the exporter itself."""


@dataclass
class Library:
    """What a library's table in a process says."""

    release: str
    counters: Mapping[str, int]

    @property
    def policy(self) -> str:
        number = self.counters.get("policy", -1)
        return POLICIES[number] if 0 <= number < len(POLICIES) else ""


@dataclass
class Process:
    """A process as it was read."""

    pid: int
    executable: str
    command: str
    started_s: float
    """In seconds since 1970."""
    counters: Mapping[str, Number]
    """What the kernel counts."""
    libraries: Mapping[str, Library] = field(default_factory=dict)

    @property
    def attributes(self) -> dict[str, str]:
        return {PID: str(self.pid), EXECUTABLE: self.executable, COMMAND: self.command}


class Point(NamedTuple):
    """A value of a metric, with the attributes that distinguish it from others of the same process."""

    attributes: dict[str, str]
    value: Number


def points(metric: Metric, process: Process) -> Iterator[Point]:
    """A metric's values in a process. Counters that could not be read have none."""
    if metric.kind is Kind.INFO:
        for name, library in process.libraries.items():
            yield Point({LIBRARY: name, RELEASE: library.release, POLICY: library.policy}, 1)
    for source in metric.sources:
        counters: Mapping[str, Number] | None = process.counters
        if source.library != PROCESS:
            of_library = process.libraries.get(source.library)
            counters = of_library.counters if of_library else None
        if counters is not None and (value := _value(metric, source, counters)) is not None:
            attributes = {metric.attribute: source.value} if metric.attribute else {}
            yield Point(attributes | ({} if source.library == PROCESS else {LIBRARY: source.library}), value)


def own_points(metric: Metric, counters: Mapping[str, Number]) -> Iterator[Point]:
    """The same of the exporter itself."""
    for source in metric.sources:
        if (value := _value(metric, source, counters)) is not None:
            yield Point({metric.attribute: source.value} if metric.attribute else {}, value)


def _value(metric: Metric, source: Source, counters: Mapping[str, Number]) -> Number | None:
    value = counters.get(source.counter)
    if value is None or (metric.may_be_unused and not value):
        return None
    return value if metric.scale == 1 else value * metric.scale


def _table(metrics: tuple[Metric, ...]) -> str:
    lines = ["| Prometheus | OpenTelemetry | unit | kind | what it is | read from |", f"|{' --- |' * 6}"]
    for metric in metrics:
        values = dict.fromkeys(f"`{source.value}`" for source in metric.sources if source.value)
        text = metric.help
        if values:
            text += f" Label `{label(metric.attribute)}`: {', '.join(values)}."
        counters = dict.fromkeys(
            f"`{source.counter}`" for source in metric.sources if source.library in LIBRARIES
        )
        cells = (
            f"`{metric.prometheus_name}`",
            f"`{metric.name}`",
            f"`{metric.unit}`" if metric.unit else "",
            metric.kind.value,
            text,
            ", ".join(counters),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """The tables of docs/calm-export.md."""
    return f"{_table(METRICS)}\nOf the exporter itself:\n\n{_table(OWN)}"
