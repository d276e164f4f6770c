"""`calm bench`: the suite under every allocator, its report, and the list of its cases."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from calm.core import allocators, documents, environment, options, paths, report
from calm.core.documents import Document
from calm.core.errors import FAILED, USAGE, CalmError
from calm.core.options import Output
from calm.core.progress import RoundsBar
from research import cache
from research.bench import programs, published, runner, source_tree, tables, workloads
from research.bench import results as results
from research.bench.analysis import Analysis, analyse
from research.bench.cases import Case
from research.bench.results import Results, Row
from research.bench.source_tree import SourceTree


class ListedCase(msgspec.Struct):
    """A case of the suite."""

    name: str
    family: str
    summary: str
    quick: bool
    """Whether it belongs to the quick suite."""
    compared_by: str
    """The figure of a run: wall_s, or a key of what the program prints."""
    obstacle: str | None
    """Why it cannot be run on this machine."""


class CaseList(Document, kw_only=True, tag="calm-cases"):
    """What `calm bench list` knows."""

    cases: list[ListedCase]


_ROUNDS = {"quick": 3, "full": 7, "stand-ins": 5, workloads.PERIODIC: 3, published.FAMILY: 3}


def all_cases(tree: SourceTree | None = None) -> tuple[Case, ...]:
    """Of the published programs, too; these can be run only with a tree that has them."""
    return (*workloads.CASES, *programs.CASES, *published.cases(tree, inputs_folder()))


def choose(cases: Sequence[Case], suite: str, names: Sequence[str]) -> list[Case]:
    known = {case.name: case for case in cases}
    if unknown := [name for name in names if name not in known]:
        raise CalmError(f"no such case: {', '.join(unknown)} (see `calm bench list`)", USAGE)
    if names:
        return [case for case in cases if case.name in names]
    if suite == "stand-ins":
        return [
            case for case in cases if case.family == "stand-in" or case.name in workloads.BESIDE_STAND_INS
        ]
    if suite == published.FAMILY:
        # Each followed by its stand-in, so that the two are measured within the same minutes.
        stand_ins = {published.original_of(case.name): case for case in cases}
        pairs = ((case, stand_ins.get(case.name)) for case in cases if case.family == published.FAMILY)
        return [case for pair in pairs for case in pair if case]
    if suite == workloads.PERIODIC:
        return [case for case in cases if case.family == workloads.PERIODIC]
    apart = (published.FAMILY, workloads.PERIODIC)
    return [case for case in cases if case.family not in apart and (case.quick or suite == "full")]


def default_allocators() -> list[str]:
    """Without variants of others, and without those that are measured only where the user names them."""
    return [
        name
        for name, known in allocators.KNOWN.items()
        if not known.only_by_name and known.variant_of is None and allocators.is_here(name)
    ]


def inputs_folder() -> Path:
    """Where inputs are kept from one run to the next."""
    return (root / "build" if (root := paths.checkout()) else cache.user_cache()) / "bench"


def save(found: Results, output: Output, *, last: bool = False) -> None:
    """Writes the document; on standard output, once the suite has ended."""
    if last or not output.json_on_stdout:
        # Folders that the file names by what they are for.
        hidden = {str(inputs_folder()): "INPUTS"}
        hidden |= {str(root): "."} if (root := paths.checkout()) else {}
        output.write(results.saved(found, hidden))


def note_interruption(found: Results, rows: Sequence[Row]) -> None:
    """Says how many rounds of these rows are complete; another Ctrl-C must not lose them."""
    if found.interrupted_by is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        done = [len(side.runs) for row in rows for side in row.sides if not side.failure]
        click.echo(f"calm: stopped after {min(done, default=0)} of {found.rounds} rounds", err=True)


def finish(found: Results, output: Output, show: Callable[[], None], nothing: str) -> NoReturn:
    """Writes the document, shows the report, and ends with the status of a suite that was run."""
    save(found, output, last=True)
    if any(side.runs or side.failure for row in found.rows for side in row.sides):
        show()
    elif found.interrupted_by is None:
        raise CalmError(nothing)
    status = FAILED if found.failures else 0
    raise SystemExit(status if found.interrupted_by is None else 128 + found.interrupted_by)


def _show(
    analysis: Analysis, kinds: Sequence[str], markdown: bool, output: Output, plot_path: Path | None
) -> None:
    report_tables = tables.grids(analysis, kinds or tables.KINDS)
    tables.write(report_tables, tables.findings(analysis), analysis.results, output, markdown)
    if plot_path:
        # matplotlib takes longer to import than most of what calm does.
        from research.bench import picture

        picture.draw(plot_path, analysis)


_source = click.option(
    "--source",
    metavar=source_tree.METAVAR,
    help="A tree of mimalloc-bench, whose programs are the cases published/NAME.",
)


def _presentation(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--markdown", is_flag=True, help="Print the tables as Markdown."),
        click.option(
            "--table",
            "kinds",
            multiple=True,
            type=click.Choice(tables.KINDS),
            help="Print only this table; may be given several times. Default: all.",
        ),
        options.plot("Draw time against memory with the Pareto front."),
    ):
        function = option(function)
    return function


@click.group("bench")
def command() -> None:
    """Compare allocators on a suite of programs, by time, memory and TLB shootdowns."""


@command.command(
    "run",
    epilog="""\b
Examples:
  calm bench run
  calm bench run --suite full --json all.json --plot all.svg
  calm bench run -a glibc,calmalloc,jemalloc -n 9 larson redis-set
  calm bench run --source mimalloc-bench=../mimalloc-bench
""",
)
@click.option(
    "--suite",
    type=click.Choice(tuple(_ROUNDS)),
    help="The cases to run, if none is named. Default: quick; with --source, published.",
)
@_source
@options.allocator_list(
    "Allocators, as for `calm compare`. Default: glibc, calmalloc and every peer on this machine."
)
@options.rounds(
    None, "Rounds that count. Default: 3 of quick, periodic and published, 5 of stand-ins, 7 of full."
)
@options.timeout("2min", "Kill a run that takes longer; it has failed.")
@click.option(
    "--touch/--no-touch",
    default=True,
    help="Touch memory before the first run, so that a virtual machine's host has backed it.",
)
@_presentation
@options.output("every run's figures")
@click.argument("names", nargs=-1, metavar="[CASE]...")
def run(
    suite: str | None,
    source: str | None,
    specs: tuple[str, ...],
    rounds: int | None,
    timeout: float,
    touch: bool,
    markdown: bool,
    kinds: tuple[str, ...],
    plot_path: Path | None,
    output: Output,
    names: tuple[str, ...],
) -> None:
    """Run the suite under every allocator.

    Rounds are interleaved, the first one is discarded as warm-up, and Ctrl-C keeps the rounds that are
    complete. The exit status is 1 if a program failed under an allocator; the report says which.

    The suite published has the programs of a tree of mimalloc-bench, each followed by the stand-in that was
    written after it. They are built with cmake in the suite's folder for inputs; the tree is only read.
    """
    if output.json_path in {case.name for case in all_cases()}:
        raise CalmError(f"--json {output.json_path}: is a case; give --json after the cases", USAGE)
    tree = source_tree.open_tree(source) if source is not None else None
    suite = suite or (published.FAMILY if tree else "quick")
    chosen = choose(all_cases(tree), suite, names)
    sides = allocators.parse_list(specs or default_allocators())
    environment.tell(*(side.environment for side in sides))
    built = published.build(tree, chosen, inputs_folder())
    with RoundsBar() as watcher:
        found = runner.run_suite(
            chosen,
            sides,
            partial(Results, sources=built),
            suite="named" if names else suite,
            count=rounds or _ROUNDS[suite],
            folder=inputs_folder(),
            limit_s=timeout,
            watcher=watcher,
            save=partial(save, output=output),
            touch=touch,
        )
    note_interruption(found, found.rows)
    for name, reason in found.left_out.items():
        click.echo(f"calm: {name} is not run: {reason}", err=True)
    analysis = analyse(found)
    if found.rows:
        found.analysis = analysis.conclusions()
    show = partial(_show, analysis, kinds, markdown, output, plot_path)
    finish(found, output, show, "none of the cases can be run on this machine")


@command.command(
    "report",
    epilog="""\b
Examples:
  calm bench report all.json
  calm bench report all.json --table time --markdown
""",
)
@click.argument("path", metavar="FILE.json", type=click.Path())
@_presentation
@options.output("the file, read and written anew,")
def report_command(
    path: str, markdown: bool, kinds: tuple[str, ...], plot_path: Path | None, output: Output
) -> None:
    """Show what `calm bench run --json` wrote."""
    found = documents.read(path, Results)
    analysis = analyse(found)
    _show(analysis, kinds, markdown, output, plot_path)
    found.analysis = analysis.conclusions()
    output.write(found)


@command.command(
    "list",
    epilog="""\b
Examples:
  calm bench list
""",
)
@_source
@options.output("the cases")
def list_command(source: str | None, output: Output) -> None:
    """List the cases of the suite, and why some cannot be run here."""
    tree = source_tree.open_tree(source) if source is not None else None
    document = CaseList(cases=[])
    spare = ("family", "quick", "compared by")
    table = report.table("case", *spare, "what it does", wrap=["what it does"], spare=spare)
    for case in all_cases(tree):
        quick, obstacle = "yes" if case.quick else "", runner.obstacle(case)
        compared_by = case.metric.key if case.metric else "wall_s"
        listed = ListedCase(case.name, case.family, case.summary, case.quick, compared_by, obstacle)
        document.cases.append(listed)
        summary = f"{case.summary} (not run: {obstacle})" if obstacle else case.summary
        style = "dim" if obstacle else None
        table.add_row(case.name, case.family, quick, compared_by, summary, style=style)
    with output.console() as console:
        report.print_table(console, table)
    output.write(document)
