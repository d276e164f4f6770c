"""Measures a paper's tables again, keeps them in a file, and shows them beside what was published."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click

from calm.core import allocators, environment, messages
from calm.core.allocators import Allocator
from calm.core.errors import USAGE, CalmError
from calm.core.progress import RoundsBar
from research import topology
from research.bench import runner
from research.papers import huge_pages, nextgen, oracle, ptlbmalloc2, valat
from research.papers.model import ALWAYS_HUGE, About, Further, Paper, PaperResults, present

PAPERS: Mapping[str, Paper] = {
    paper.name: paper for paper in (oracle.PAPER, ptlbmalloc2.PAPER, nextgen.PAPER, valat.PAPER)
}
ROUNDS = 5


def _about(paper: Paper, extra: Sequence[Allocator], scale: float | None, set_huge_pages: bool) -> About:
    return About(
        name=paper.name,
        scale=scale or (paper.scale if paper.scales else 1.0),
        threads=len(os.sched_getaffinity(0)),
        sockets=len(topology.sockets()),
        virtual=topology.is_virtual(),
        extra=tuple(each.label for each in extra),
        set_huge_pages=set_huge_pages,
    )


def check(paper: Paper, scale: float | None, set_huge_pages: bool) -> None:
    if scale is not None and not paper.scales:
        raise CalmError(f"--scale has no effect on {paper.name}", USAGE)
    if set_huge_pages and not (paper.samples_huge_pages or paper.switches_huge_pages):
        raise CalmError(f"--set-thp has no effect on {paper.name}", USAGE)


def measure(
    paper: Paper,
    specs: Sequence[str],
    *,
    scale: float | None,
    set_huge_pages: bool,
    rounds: int,
    limit_s: float,
    touch: bool,
    folder: Path,
    write: Callable[[PaperResults], None],
) -> PaperResults:
    """Runs everything; write is called after each round."""
    extra = allocators.parse_list(specs or present(paper.extra)[0])
    extra = [each for each in extra if each.label not in paper.allocators]
    environment.tell(*(each.environment for each in extra))
    about = _about(paper, extra, scale, set_huge_pages)
    own, missing = present(paper.allocators)
    for label in missing:
        name = label.partition(":")[0]
        click.echo(f"calm: {label} is left out: {name} is not here: {allocators.KNOWN[name].hint}", err=True)
    sides = [*allocators.parse_list(own), *extra]
    cases = paper.cases(about)
    with ExitStack() as stack:
        before = huge_pages.mode()
        if set_huge_pages:
            stack.enter_context(huge_pages.always())
        sampling, watcher = None, RoundsBar()
        if set_huge_pages and paper.switches_huge_pages:
            always = {case.name for case in cases if case.family == ALWAYS_HUGE}
            watcher = huge_pages.Switching(always, before)
        elif paper.samples_huge_pages:
            watcher = sampling = huge_pages.Sampling(stack.enter_context(huge_pages.Sampler()))
        stack.enter_context(watcher)

        def save(found: PaperResults) -> None:
            if sampling:
                sampling.note(found)
            write(complete(found))

        found = runner.run_suite(
            cases,
            sides,
            partial(PaperResults, paper=about),
            suite=f"paper {paper.name}",
            count=rounds,
            folder=folder,
            limit_s=limit_s,
            watcher=watcher,
            save=save,
            touch=touch,
            groups=paper.groups,
            shuffled=paper.shuffled,
        )
        if sampling:
            sampling.note(found)
    if paper.further and found.rows and found.interrupted_by is None:
        paper.further(Further(found, sides, folder, limit_s, save))
    return complete(found)


def complete(found: PaperResults) -> PaperResults:
    """The same with the tables, which leave in the results what they take from the runs."""
    paper = PAPERS[found.paper.name]
    found.citation = paper.citation
    found.tables = paper.grids(found, found.paper) if found.rows else []
    found.differences = paper.differences(found, found.paper)
    return found


def lines(found: PaperResults) -> list[str]:
    failures = [f"failed: {row.name} under {side.label}: {side.failure}" for row, side in found.failures]
    notes = [f"note: {note}" for note in (*found.notes, *messages.notes(found.messages))]
    return found.differences + failures + notes
