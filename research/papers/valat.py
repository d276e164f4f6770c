"""The paging paper: how the choice of pages and of arrays' starts meets caches (figures 2 to 10, table 1).

Its operating systems are not here, but what they do is: Linux's pages and huge ones, policies for pages'
colors in a simulation, and arrays that start on boundaries or spread out, by hand and by allocators.
"""

from __future__ import annotations

import signal

import click

from calm.core.allocators import GLIBC
from research.bench.results import Row, Run, Side
from research.papers import published, valat_cases, valat_frames, valat_picture, valat_tables
from research.papers.model import FRAMES, Further, Paper


def _further(further: Further) -> None:
    """Figure 2: nothing is timed, so it takes part in no round."""
    results = further.results
    try:
        for name, cache in valat_frames.wanted(valat_cases.outer_cache()):
            click.echo(f"calm: {name}", err=True)
            curves, obstacle = valat_frames.curves_of(cache, results.paper.scale, lambda _: None)
            sides = [Side(GLIBC, [Run(1, {})])]
            results.rows.append(Row(name, FRAMES, sides=sides, curves=curves))
            results.how[valat_tables.HOW_FRAMES] = (
                f"not measured: this machine's own pages: {obstacle}"
                if obstacle
                else "this machine's pages: frames from /proc/self/pagemap; of a guest, the guest's own"
            )
            further.save(results)
    except KeyboardInterrupt:
        results.interrupted_by = signal.SIGINT


PAPER = Paper(
    name="valat",
    citation=published.VALAT,
    allocators=(GLIBC,),
    extra=valat_cases.BESIDE,
    cases=valat_cases.cases,
    grids=valat_tables.grids,
    differences=valat_tables.differences,
    scales=True,
    scale=1.0,
    groups=(),
    switches_huge_pages=True,
    shuffled=True,
    draw=valat_picture.draw,
    further=_further,
)
