"""Measures a paper's tables again, keeps them in a file, and shows them beside what was published."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from calm import allocators, environment, report, said, topology
from calm.allocators import Allocator
from calm.bench import results, runner, tables
from calm.bench.paper import huge_pages, nextgen, oracle, ptlbmalloc2, valat
from calm.bench.paper.model import ALWAYS_HUGE, About, Further, Paper, present
from calm.bench.progress import Shown
from calm.bench.results import Results
from calm.errors import USAGE, CalmError

PAPERS: Mapping[str, Paper] = {
    paper.name: paper for paper in (oracle.PAPER, ptlbmalloc2.PAPER, nextgen.PAPER, valat.PAPER)
}
ROUNDS = 5
_KEY = "paper"


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
    """Options that this paper has no use for."""
    if scale is not None and not paper.scales:
        raise CalmError(f"--scale says nothing for --paper {paper.name}", USAGE)
    if set_huge_pages and not (paper.samples_huge_pages or paper.switches_huge_pages):
        raise CalmError(f"--set-thp says nothing for --paper {paper.name}", USAGE)


def measure(
    paper: Paper,
    specs: Sequence[str],
    *,
    scale: float | None,
    set_huge_pages: bool,
    rounds: int | None,
    limit_s: float,
    touch: bool,
    folder: Path,
    write: Callable[[str], None],
    hidden: Mapping[str, str],
) -> tuple[Results, About]:
    """Runs everything; write is given the file's text after each round."""
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
        shown = stack.enter_context(Shown())
        watcher: runner.Watcher = shown
        if set_huge_pages and paper.switches_huge_pages:
            always = {case.name for case in cases if case.family == ALWAYS_HUGE}
            watcher = huge_pages.Switching(shown, always, before)
        sampling = None
        if paper.samples_huge_pages:
            sampling = huge_pages.Sampling(watcher, stack.enter_context(huge_pages.Sampler()))

        def save(found: Results) -> None:
            if sampling:
                sampling.note(found)
            write(dump(found, about, hidden))

        found = runner.run_suite(
            cases,
            sides,
            suite=f"paper {paper.name}",
            rounds=rounds or ROUNDS,
            folder=folder,
            limit_s=limit_s,
            watcher=sampling or watcher,
            save=save,
            touch=touch,
            hardware=paper.counts_cycles,
            shootdowns=paper.counts_shootdowns,
            shuffled=paper.shuffled,
        )
        if sampling:
            sampling.note(found)
    if paper.further and found.rows and found.interrupted_by is None:
        paper.further(Further(found, about, sides, folder, limit_s, save))
    return found, about


def dump(found: Results, about: About, hidden: Mapping[str, str]) -> str:
    """The file of `calm bench -o`, and what the tables need beside it."""
    paper = PAPERS[about.name]
    of_paper = asdict(about) | {
        "citation": asdict(paper.citation),
        "tables": [asdict(grid) for grid in paper.grids(found, about)] if found.rows else [],
        "differences": paper.differences(found, about),
    }
    # After the tables, as what they took from the runs is in the file.
    data: dict[str, Any] = json.loads(results.dump(found, hidden)) | {_KEY: of_paper}
    return json.dumps(data, indent=1) + "\n"


def load_about(path: str) -> About | None:
    """What a file has beside the results; None if it is a suite's and not a paper's."""
    data = json.loads(Path(path).read_text()).get(_KEY)
    if data is None:
        return None
    try:
        data = {"virtual": None, "extra": ()} | data
        about = About(**{name: data[name] for name in About.__dataclass_fields__})
        if about.name not in PAPERS or not about.scale > 0:
            raise ValueError(f"there is no paper {about.name!r} at scale {about.scale!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise CalmError(f"{path} is not a whole file of results: {error}", USAGE) from error
    return replace(about, extra=tuple(about.extra))


def show(found: Results, about: About, markdown: bool, console: Console) -> None:
    """All tables, and what is not as in the paper."""
    paper = PAPERS[about.name]
    grids = paper.grids(found, about)
    lines = paper.differences(found, about)
    failures = [f"failed: {row.name} under {side.label}: {side.failure}" for row, side in found.failures]
    lines += [*failures, *(f"note: {note}" for note in (*found.notes, *said.notes(found.said)))]
    if markdown:
        parts = [tables.grid_markdown(grid) for grid in grids]
        parts += ["\n".join(f"- {line}" for line in lines), " ".join(tables.conditions(found))]
        console.file.write("\n\n".join(parts) + "\n")
        return
    for grid in grids:
        tables.show(grid, console)
    console.print()
    for line in lines + tables.conditions(found):
        console.print(line, soft_wrap=True)


def write_to(output: str | None) -> Callable[[str], None]:
    """Writes a file while runs go on; standard output has to wait for the end."""

    def write(text: str) -> None:
        if output and output != "-":
            report.write(output, text)

    return write
