"""The NextGen-Malloc paper: tables 1, 2 and 3, and what its figure 2 says of layouts.

Times and page faults are of interleaved rounds. Misses are of one run each: by the processor's counters
where the machine has them, or else by a model of its caches (research.papers.nextgen_trace). SPEC's
xalancbmk is not free: Debian's xalan, which is today's program of the same library, transforms a document of
our own making. NextGen-Malloc itself was never published: calmoffload stands for it, where this calm
knows it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

import click

from calm.core import allocators
from calm.core.allocators import GLIBC, Allocator
from calm.core.errors import CalmError
from research.bench import runner
from research.bench.cases import Case, Prepared
from research.bench.results import Row, Run, Side
from research.papers import nextgen_cases as cases
from research.papers import nextgen_counters, nextgen_tables, nextgen_trace, published
from research.papers.model import COUNTED, TRACED, Further, Paper
from research.papers.nextgen_trace import OFFLOADED

Figures = dict[str, float | None]


def _once(
    further: Further,
    case: Case,
    name: str,
    family: str,
    sides: Sequence[Allocator],
    run: Callable[[Prepared, Allocator], Figures],
) -> None:
    """A row with one run for each allocator."""
    results = further.results
    try:
        prepared = runner.prepare(case, further.folder)
    except CalmError as error:
        results.left_out[name] = str(error)
        return
    row = Row(name, family, command=list(prepared.command))
    results.rows.append(row)
    for allocator in sides:
        side = Side(allocator.label, n=0)
        row.sides.append(side)
        click.echo(f"calm: {name}: {allocator.label}", err=True)
        try:
            side.runs.append(Run(1, run(prepared, allocator)))
        except (CalmError, OSError) as error:
            side.failure = str(error)
            click.echo(f"calm: {name}: {allocator.label}: {error}", err=True)
        further.save(results)


def _further(further: Further) -> None:
    results, about, limit_s = further.results, further.results.paper, further.limit_s

    def count_events(prepared: Prepared, allocator: Allocator) -> Figures:
        return nextgen_counters.count(prepared.command, prepared.folder, allocator, limit_s, results.messages)

    def record(prepared: Prepared, allocator: Allocator) -> Figures:
        del allocator
        return nextgen_trace.layouts(prepared.command, prepared.folder, limit_s)

    def simulate(warm: int, limit: int) -> Callable[[Prepared, Allocator], Figures]:
        def run(prepared: Prepared, allocator: Allocator) -> Figures:
            return nextgen_trace.trace(
                prepared.command,
                prepared.folder,
                allocator,
                limit_s,
                warm=warm,
                limit=limit,
                heard=results.messages,
            )

        return run

    try:
        no_counters = nextgen_counters.obstacle()
        results.how[COUNTED] = f"not counted: {no_counters}" if no_counters else "perf stat, one run each"
        for case in cases.rounds(about) if not no_counters else ():
            _once(further, case, cases.counted(case.name), COUNTED, further.sides, count_events)
        if reason := nextgen_trace.obstacle():
            results.how[TRACED] = f"not traced: {reason}"
            click.echo(f"calm: nothing is traced: {reason}", err=True)
            return
        results.how[TRACED] = "a model of caches, fed by a plugin of QEMU's user mode, one run each"
        for case, warm, limit in cases.traced_runs(about) if no_counters else ():
            _once(further, case, cases.traced(case.name), TRACED, further.sides, simulate(warm, limit))
        # The blocks that are recorded are glibc's, whatever is simulated with them.
        plain = [side for side in further.sides if side.label == GLIBC]
        for case in cases.layout_runs(about):
            _once(further, case, cases.laid_out(case.name), TRACED, plain, record)
    except KeyboardInterrupt:
        results.interrupted_by = signal.SIGINT


PAPER = Paper(
    name="nextgen",
    citation=published.NEXTGEN,
    allocators=(*published.NEXTGEN_1, *((OFFLOADED,) if OFFLOADED in allocators.KNOWN else ())),
    extra=("calmalloc",),
    cases=cases.rounds,
    grids=nextgen_tables.grids,
    differences=nextgen_tables.differences,
    scales=True,
    scale=1.0,
    further=_further,
)
