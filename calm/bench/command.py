"""`calm bench`: the suite under every allocator, or a report of what it found before."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from calm import allocators, environment, options, places, plot, ranges, report
from calm.allocators import Allocator
from calm.bench import picture, programs, results, runner, tables, workloads
from calm.bench.analysis import analyse
from calm.bench.cases import Case
from calm.bench.paper import rerun
from calm.bench.paper.model import ONCE, Paper
from calm.bench.progress import Shown
from calm.bench.results import Results
from calm.errors import USAGE, CalmError

SUITES = ("quick", "full", "stand-ins")
_ROUNDS = {"quick": 3, "full": 7, "stand-ins": 5}
# calmalloc's peers are allocators; ptlbmalloc2 governs one, and Debian's builds and variants are second ones.
_NOT_BY_DEFAULT = ("ptlbmalloc2",)


def all_cases() -> tuple[Case, ...]:
    """Every case that there is."""
    return (*workloads.CASES, *programs.CASES)


def choose(cases: Sequence[Case], suite: str, names: Sequence[str]) -> list[Case]:
    """Those named, or else the suite's."""
    known = {case.name: case for case in cases}
    if unknown := [name for name in names if name not in known]:
        raise CalmError(f"no such case: {', '.join(unknown)} (see `calm bench --list`)", USAGE)
    if names:
        return [case for case in cases if case.name in names]
    if suite == "stand-ins":
        return [
            case for case in cases if case.family == "stand-in" or case.name in workloads.BESIDE_STAND_INS
        ]
    return [case for case in cases if case.quick or suite == "full"]


def default_allocators() -> list[str]:
    """glibc, and all on this machine that are allocators of their own."""
    return [
        name
        for name in allocators.KNOWN
        if name not in _NOT_BY_DEFAULT
        and not name.endswith("-debian")
        and allocators.KNOWN[name].variant_of is None
        and allocators.is_here(name)
    ]


def inputs_folder() -> Path:
    """Where inputs are kept from one run to the next."""
    if root := places.checkout():
        return root / "build" / "bench"
    return places.user_cache() / "bench"


def _hidden() -> dict[str, str]:
    """Folders that the file of results names by what they are for."""
    root = places.checkout()
    return {str(inputs_folder()): "INPUTS"} | ({str(root): "."} if root else {})


def _list(cases: Sequence[Case]) -> None:
    table = report.table()
    for heading in ("case", "family", "quick", "compared by", "what it does"):
        table.add_column(heading, no_wrap=heading != "what it does")
    for case in cases:
        reason = runner.obstacle(case)
        compared = case.metric.key if case.metric else "wall time"
        summary = f"{case.summary} (not run: {reason})" if reason else case.summary
        style = "dim" if reason else None
        table.add_row(case.name, case.family, "yes" if case.quick else "", compared, summary, style=style)
    report.print_table(report.console(), table)


def _ignore_interrupts() -> None:
    # What is left to do takes a second; another Ctrl-C must not lose what was measured.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _paper(
    paper: Paper,
    specs: Sequence[str],
    rounds: int | None,
    scale: float | None,
    set_huge_pages: bool,
    limit_s: float,
    touch: bool,
    output: str | None,
    markdown: bool,
    drawing: str | None,
) -> None:
    found, about = rerun.measure(
        paper,
        specs,
        scale=scale,
        set_huge_pages=set_huge_pages,
        rounds=rounds,
        limit_s=limit_s,
        touch=touch,
        folder=inputs_folder(),
        write=rerun.write_to(output),
        hidden=_hidden(),
    )
    if found.interrupted_by is not None:
        _ignore_interrupts()
        done = [
            len(side.runs)
            for row in found.rows
            for side in row.sides
            if not side.failure and row.family not in ONCE
        ]
        click.echo(f"calm: stopped after {min(done, default=0)} of {found.rounds} rounds", err=True)
    if output:
        report.write(output, rerun.dump(found, about, _hidden()))
    if any(side.runs or side.failure for row in found.rows for side in row.sides):
        rerun.show(found, about, markdown, report.console(sys.stderr if output == "-" else sys.stdout))
        if paper.draw and drawing:
            paper.draw(found, about, Path(drawing))
    elif found.interrupted_by is None:
        reasons = "; ".join(dict.fromkeys(found.left_out.values()))
        raise CalmError(f"none of the paper's programs can be run on this machine: {reasons}")
    raise SystemExit(_exit_code(found))


def _show(found: Results, kinds: Sequence[str], markdown: bool, to_stderr: bool, drawing: str | None) -> None:
    analysis = analyse(found)
    if markdown:
        click.echo(tables.to_markdown(analysis, kinds), nl=False, err=to_stderr)
    else:
        tables.to_terminal(analysis, kinds, report.console(sys.stderr if to_stderr else sys.stdout))
    if drawing:
        picture.draw(Path(drawing), analysis)


def _exit_code(found: Results) -> int:
    if found.interrupted_by is not None:
        return 128 + found.interrupted_by
    return 1 if found.failures else 0


def _measure(
    cases: Sequence[Case],
    sides: Sequence[Allocator],
    suite: str,
    rounds: int,
    limit_s: float,
    touch: bool,
    output: str | None,
) -> Results:
    def save(found: Results) -> None:
        if output and output != "-":
            report.write(output, results.dump(found, _hidden()))

    with Shown() as watcher:
        found = runner.run_suite(
            cases,
            sides,
            suite=suite,
            rounds=rounds,
            folder=inputs_folder(),
            limit_s=limit_s,
            watcher=watcher,
            save=save,
            touch=touch,
        )
    if found.interrupted_by is not None:
        _ignore_interrupts()
        done = [len(side.runs) for row in found.rows for side in row.sides if not side.failure]
        click.echo(f"calm: stopped after {min(done, default=0)} of {rounds} rounds", err=True)
    for name, reason in found.left_out.items():
        click.echo(f"calm: {name} is not run: {reason}", err=True)
    if output:
        # At first without the analysis, which takes some seconds.
        save(found)
        analysis = analyse(found).as_dict() if found.rows else None
        report.write(output, results.dump(found, _hidden(), analysis))
    return found


_EPILOG = """\b
Examples:
  calm bench
  calm bench --suite full -o all.json --picture all.svg
  calm bench -a glibc,calmalloc,jemalloc -n 9 larson redis-set
  calm bench --report all.json --table time --markdown
  calm bench --paper oracle --set-thp -o oracle.json
  calm bench --paper nextgen --scale 0.1
  calm bench --paper valat -o valat.json --picture valat.svg
"""


@click.command("bench", epilog=_EPILOG)
@click.option(
    "--suite",
    type=click.Choice(SUITES),
    default="quick",
    show_default=True,
    help="Which cases, where none is named.",
)
@options.allocator_list(
    "Allocators, as for `calm compare`. Default: glibc, calmalloc and every peer on this machine."
)
@click.option(
    "-n",
    "rounds",
    type=click.IntRange(min=1),
    help="Rounds that count. Default: 3 of quick, 5 of stand-ins, 7 of full.",
)
@click.option(
    "-o",
    "--output",
    "--json",
    "output",
    type=click.Path(),
    metavar="FILE.json",
    help="Write every run's figures; '-' is stdout.",
)
@click.option(
    "--picture",
    "drawing",
    type=click.Path(),
    metavar="FILE.svg|png",
    help="Draw time against memory with the Pareto front.",
)
@click.option("--only", multiple=True, metavar="CASE,…", help="The same as naming them as arguments.")
@click.option("--list", "listing", is_flag=True, help="List the cases, and run nothing.")
@options.timeout(120.0, "Kill a run that takes longer: it has failed.")
@click.option(
    "--touch/--no-touch",
    default=True,
    help="Touch memory before the first run, so that a virtual machine's host has backed it.",
)
@click.option(
    "--paper",
    "paper_name",
    type=click.Choice(tuple(rerun.PAPERS)),
    help="Measure this paper's tables anew, in 5 rounds, beside what it published. -a: in the place of ours.",
)
@click.option(
    "--scale",
    type=ranges.FloatRange(min=0, min_open=True, max=100),
    metavar="FACTOR",
    help="The share of the work that a run does: with --paper oracle, of the paper's, by default 0.1; with "
    "nextgen and valat, of ours, by default 1.",
)
@click.option(
    "--set-thp",
    is_flag=True,
    help="With --paper oracle: set huge pages to `always` meanwhile, as root, and put them back; with valat: "
    "for further runs beside the others.",
)
@click.option(
    "--report",
    "report_path",
    type=click.Path(),
    metavar="FILE.json",
    help="Run nothing: show what -o wrote before.",
)
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@click.option(
    "--table",
    "kinds",
    multiple=True,
    type=click.Choice(tables.KINDS),
    help="Show this table alone; may be given several times. Default: all.",
)
@click.argument("names", nargs=-1, metavar="[CASE]...")
def command(
    suite: str,
    specs: tuple[str, ...],
    rounds: int | None,
    output: str | None,
    drawing: str | None,
    only: tuple[str, ...],
    listing: bool,
    timeout: float,
    touch: bool,
    paper_name: str | None,
    scale: float | None,
    set_thp: bool,
    report_path: str | None,
    markdown: bool,
    kinds: tuple[str, ...],
    names: tuple[str, ...],
) -> None:
    """Run a suite of programs under every allocator, and compare time, memory and TLB shootdowns.

    Rounds are interleaved, the first one is discarded as warm-up, and Ctrl-C keeps the rounds that are
    complete. Exit code 1: some program failed under some allocator; the report says which.
    """
    if drawing and Path(drawing).suffix not in plot.ENDINGS:
        raise CalmError(f"--picture {drawing}: the name must end in {' or '.join(plot.ENDINGS)}", USAGE)
    for path in (output, drawing):
        if path and path != "-":
            report.check_writable(path)
    if report_path is not None:
        asked = [
            *(("CASE", names), ("--only", only), ("-a", specs), ("-n", rounds), ("-o", output)),
            *(("--list", listing), ("--paper", paper_name), ("--scale", scale), ("--set-thp", set_thp)),
        ]
        if meaningless := [option for option, value in asked if value]:
            raise CalmError(f"--report runs nothing, so {', '.join(meaningless)} says nothing", USAGE)
        loaded = results.load(report_path)
        about = None if kinds else rerun.load_about(report_path)
        draw = rerun.PAPERS[about.name].draw if about else None
        if about and (draw or not drawing):
            rerun.show(loaded, about, markdown, report.console())
            if draw and drawing:
                draw(loaded, about, Path(drawing))
        else:
            _show(loaded, kinds or tables.KINDS, markdown, to_stderr=False, drawing=drawing)
        return
    if paper_name is not None:
        paper = rerun.PAPERS[paper_name]
        rerun.check(paper, scale, set_thp)
        asked = [("CASE", names), ("--only", only), ("--list", listing)]
        asked += [("--picture", None if paper.draw else drawing), ("--table", kinds)]
        if meaningless := [option for option, value in asked if value]:
            raise CalmError(f"--paper has cases and tables of its own: no {', '.join(meaningless)}", USAGE)
        _paper(paper, specs, rounds, scale, set_thp, timeout, touch, output, markdown, drawing)
    elif scale is not None or set_thp:
        raise CalmError(
            "--scale and --set-thp belong to --paper oracle and valat, and --scale to nextgen", USAGE
        )
    if listing:
        _list(all_cases())
        return
    wanted = [name for text in only for name in text.split(",")] + list(names)
    chosen = choose(all_cases(), suite, wanted)
    sides = allocators.parse_list(specs or default_allocators())
    environment.tell(*(side.environment for side in sides))
    found = _measure(
        chosen, sides, suite if not wanted else "named", rounds or _ROUNDS[suite], timeout, touch, output
    )
    if any(side.runs or side.failure for row in found.rows for side in row.sides):
        _show(found, kinds or tables.KINDS, markdown, to_stderr=output == "-", drawing=drawing)
    elif found.interrupted_by is None:
        raise CalmError("none of the cases can be run on this machine")
    raise SystemExit(_exit_code(found))
