"""`bench/paper`: measures the tables of a paper again, and shows them beside what was published."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from calm.core import documents, options
from calm.core.errors import USAGE, CalmError
from calm.core.options import Output
from research.bench import tables
from research.bench.command import finish, inputs_folder, note_interruption, save
from research.papers import rerun
from research.papers.model import ONCE, PaperResults


@click.group()
def command() -> None:
    """Measure the tables of a paper again, and show them beside what was published."""


@command.command(
    "run",
    epilog="""\b
Examples:
  bench/paper run oracle --set-thp --json oracle.json
  bench/paper run nextgen --scale 0.1
  bench/paper run valat --json valat.json --plot valat.svg
""",
)
@options.allocator_list("Allocators, in the place of calmalloc's.")
@options.rounds(rerun.ROUNDS, "Rounds that count.")
@options.timeout("2min", "Kill a run that takes longer; it has failed.")
@click.option("--touch/--no-touch", default=True, help="Touch memory before the first run.")
@click.option(
    "--scale",
    type=options.FloatRange(min=0, min_open=True, max=100),
    metavar="FACTOR",
    help="The share of the work that a run does: of the paper's with oracle (default 0.1), of ours with "
    "nextgen and valat (default 1).",
)
@click.option(
    "--set-thp",
    is_flag=True,
    help="Set transparent huge pages to `always` meanwhile, as root, and put them back: with oracle for all "
    "runs, with valat for further runs.",
)
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@options.plot("Draw the paper's figures; valat only.")
@options.output("every run's figures")
@click.argument("name", metavar="PAPER", type=click.Choice(tuple(rerun.PAPERS)))
def run(
    specs: tuple[str, ...],
    rounds: int,
    timeout: float,
    touch: bool,
    scale: float | None,
    set_thp: bool,
    markdown: bool,
    plot_path: Path | None,
    output: Output,
    name: str,
) -> None:
    """Run the programs of PAPER: oracle, ptlbmalloc2, nextgen or valat."""
    paper = rerun.PAPERS[name]
    rerun.check(paper, scale, set_thp)
    _check_plot(name, plot_path)
    found = rerun.measure(
        paper,
        specs,
        scale=scale,
        set_huge_pages=set_thp,
        rounds=rounds,
        limit_s=timeout,
        touch=touch,
        folder=inputs_folder(),
        write=partial(save, output=output),
    )
    note_interruption(found, [row for row in found.rows if row.family not in ONCE])
    reasons = "; ".join(dict.fromkeys(found.left_out.values()))
    nothing = f"none of the paper's programs can be run on this machine: {reasons}"
    finish(found, output, partial(_show, found, markdown, output, plot_path), nothing)


@command.command(
    "report",
    epilog="""\b
Examples:
  bench/paper report oracle.json --markdown
""",
)
@click.argument("path", metavar="FILE.json", type=click.Path())
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@options.plot("Draw the paper's figures; valat only.")
@options.output("the file, read and written anew,")
def report_command(path: str, markdown: bool, plot_path: Path | None, output: Output) -> None:
    """Show what `bench/paper run --json` wrote."""
    found = documents.read(path, PaperResults)
    _check_plot(found.paper.name, plot_path)
    _show(found, markdown, output, plot_path)
    output.write(found)


def _show(found: PaperResults, markdown: bool, output: Output, plot_path: Path | None) -> None:
    rerun.complete(found)
    tables.write(found.tables, rerun.lines(found), found, output, markdown)
    if plot_path and (draw := rerun.PAPERS[found.paper.name].draw):
        draw(found, found.paper, plot_path)


def _check_plot(name: str, plot_path: Path | None) -> None:
    if plot_path and not rerun.PAPERS[name].draw:
        raise CalmError(f"--plot: there is no picture of {name}", USAGE)
