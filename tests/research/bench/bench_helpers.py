"""Results of `calm bench` that are made up, and their tables."""

from collections.abc import Sequence
from typing import Any

from research.bench import analysis, tables
from research.bench.results import Metric, Results, Row, Run, Side, Subject

LABELS = ("glibc", "calmalloc", "jemalloc")
RATE = Metric("rate", "/s", higher_is_better=True)
# Steady to a tenth of a percent, in three rounds.
STEADY = (0.999, 1.0, 1.001)


def side(
    label: str, time_s: float, peak: float = 1000.0, spread: Sequence[float] = STEADY, **more: Any
) -> Side:
    figures = {"wall_s": time_s, "peak_rss_kib": peak, "average_rss_kib": peak / 2, "shootdowns": 10.0}
    figures |= more
    return Side(
        label,
        [
            Run(number, {key: value * factor for key, value in figures.items()})
            for number, factor in enumerate(spread, 1)
        ],
    )


def row(name: str, *sides: Side, family: str = "workload", metric: Metric | None = None) -> Row:
    return Row(name, family, metric, [name], sides=list(sides))


def made_up(*rows: Row, labels: Sequence[str] = LABELS) -> Results:
    return Results(
        date="2026-01-02T03:04:05+00:00",
        calm="0",
        machine={"cpus": 2, "cpu": "a CPU", "memory_kib": 1 << 20},
        suite="quick",
        rounds=3,
        seed=1,
        timeout_s=120,
        touched_kib=0,
        how={"shootdowns": "counted so"},
        allocators=[Subject(label, version="1.0") for label in labels],
        rows=list(rows),
        left_out={"absent": "it is not on this machine"},
    )


def by_time(name: str, glibc: float, calmalloc: float, jemalloc: float, **more: Any) -> Row:
    values = zip(LABELS, (glibc, calmalloc, jemalloc), strict=True)
    return row(name, *(side(label, value) for label, value in values), **more)


def markdown(found: analysis.Analysis, kinds: Sequence[str]) -> str:
    return tables.to_markdown(tables.grids(found, kinds), tables.findings(found), found.results)
