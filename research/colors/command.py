"""`calm colors`: page colors of a running program, its colliding blocks, and simulated coloring policies."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click
from click import IntRange
from click.core import ParameterSource

from calm.core import allocators, environment, options, proc, program, report
from calm.core.allocators import Allocator
from calm.core.errors import FAILED, USAGE, CalmError
from calm.core.measure import signal_name
from calm.core.options import Output
from calm.core.progress import Bar
from research.colors import analysis, policies, sample, simulation, simulation_report, watch
from research.colors import report as tables
from research.colors.analysis import Colors, Run
from research.colors.caches import NEHALEM, PAGE_BYTES, Cache, caches

_NO_BLOCKS = "blocks within mappings are not known: `calm colors run -- CMD` records them, with their places"
_ELSEWHERE = "it has a PID namespace of its own, or calm may not read it"
CACHES: dict[str, Callable[[], Sequence[Cache]]] = {"machine": caches, "nehalem": lambda: NEHALEM}


@click.group(
    "colors",
    epilog="""\b
Examples:
  calm colors run -- ./solver input
  calm colors simulate --cache machine
""",
)
def command() -> None:
    """Show page colors, and large blocks that collide in caches."""


def _of_program(
    cmd: tuple[str, ...], allocator: Allocator, min_bytes: int, interval: float, near: int, output: Output
) -> Colors:
    stdout = sys.stderr.fileno() if output.json_on_stdout else None
    watched = watch.run(cmd, allocator, min_bytes, interval, stdout)
    exit_code = watched.status if watched.status >= 0 else 128 - watched.status
    if watched.status < 0:
        click.echo(f"the program was killed by {signal_name(-watched.status)}", err=True)
    seen, elsewhere, obstacle = watched.best, len(watched.elsewhere), program.preload_obstacle(cmd)
    if seen is None:
        why = obstacle or (_ELSEWHERE if elsewhere else "it had no large memory when it was sampled")
        raise CalmError(f"the program could not be observed: {why}", exit_code or FAILED)
    library = allocator.library.name if allocator.library else ""
    found = analysis.analyse(seen, caches(seen.cpu), min_bytes, near, library)
    found.run = Run(
        exit_code=exit_code,
        allocator=allocator.label,
        wall_s=watched.wall_s,
        at_s=seen.at_s - watched.began,
        samples=watched.samples,
        processes=len(watched.seen),
        processes_elsewhere=elsewhere,
    )
    chosen = f": of {watched.samples:,} samples the one with the most memory" if watched.samples > 1 else ""
    after = f"{report.duration(found.run.at_s)} of {report.duration(watched.wall_s)}"
    notes = [f"sampled at {seen.moment}, after {after}{chosen}"]
    if len(watched.seen) > 1:
        notes.append(f"the process with the most large memory is shown, of {len(watched.seen):,}")
    if obstacle or not seen.blocks_known:
        notes.append(obstacle or "the program did not record its blocks: mappings are shown")
    if elsewhere:
        notes.append(f"{elsewhere:,} process{'es' * (elsewhere > 1)} could not be sampled: {_ELSEWHERE}")
    found.notes = notes + found.notes
    return found


def _of_process(pid: int, min_bytes: int, near: int) -> Colors:
    proc.check(pid)
    seen = sample.take(pid, "now", min_bytes)
    if not seen.regions:
        raise CalmError(f"process {pid} has no mapping with {min_bytes:,} bytes of resident data")
    found = analysis.analyse(seen, caches(seen.cpu), min_bytes, near)
    found.notes.insert(0, _NO_BLOCKS)
    return found


@command.command(
    "run",
    context_settings={"allow_interspersed_args": False, "show_default": True},
    epilog="""\b
Examples:
  calm colors run -- ./solver input
  calm colors run -a calmalloc --json colors.json -- ./solver input
  calm colors run --pid 1234
""",
)
@click.option("--pid", type=IntRange(min=1), metavar="PID", help="Sample this process, once.")
@click.option(
    "-a",
    "--allocator",
    default=allocators.GLIBC,
    shell_complete=allocators.complete,
    metavar="NAME",
    help="Allocator to run CMD with; see `calm allocators`.",
)
@options.duration(
    "--interval",
    default="1s",
    at_least="10ms",
    at_most="1h",
    text="Time between samples of CMD; longer where samples take long. "
    "CMD is also sampled at peaks of its memory, and at its end.",
)
@click.option(
    "--min-size", type=IntRange(min=4096), default=64 << 10, metavar="BYTES", help="Ignore smaller blocks."
)
@click.option(
    "--near",
    type=IntRange(1, 32),
    default=1,
    metavar="LINES",
    help="Starts less than LINES apart collide in L1.",
)
@click.option(
    "--top", type=IntRange(min=1), default=10, metavar="N", help="Blocks, and kinds of pairs, to show."
)
@options.plot("Draw the number of pages of each color.")
@options.output("the analysis")
@options.program(required=False)
@click.pass_context
def run(
    context: click.Context,
    pid: int | None,
    allocator: str,
    interval: float,
    min_size: int,
    near: int,
    top: int,
    plot_path: Path | None,
    output: Output,
    cmd: tuple[str, ...],
) -> None:
    """Show how the large blocks of a program share the caches.

    Pages of one color compete for the ways of a cache. The report counts pages beyond the ways, and those
    that an even coloring, random frames and huge pages would have. It lists pairs of large blocks that start
    in the same lines, a multiple of 4 KiB apart, or in pages of one color, and where they were allocated.

    The report on CMD goes to standard error, unless -o is given. The exit status is that of CMD.
    """
    if (pid is not None) == bool(cmd):
        raise click.UsageError("give either CMD or --pid PID")
    if pid is not None:
        for name in ("allocator", "interval"):
            if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
                raise click.UsageError(f"--{name} is for CMD, and not for --pid")
        found = _of_process(pid, min_size, near)
    else:
        chosen = allocators.parse(allocator)
        environment.tell(chosen.environment)
        found = _of_program(cmd, chosen, min_size, interval, near, output)
    # Standard output is CMD's, so that it can be piped.
    with replace(output, stdout_is_taken=pid is None).console() as console:
        tables.show(console, found, top)
    output.write(found)
    if plot_path:
        tables.draw(found, plot_path)
    if found.run:
        raise SystemExit(found.run.exit_code)


def choose(caches_of: str, level: int | None) -> Cache:
    """The cache of a level, or by default the outermost that is not hashed and in which pages have colors."""
    found = [cache for cache in CACHES[caches_of]() if cache.colors > 1 and level in (None, cache.level)]
    if level is None:
        found = [cache for cache in found if not cache.is_hashed] or found
    if not found:
        which = "no cache" if level is None else f"no L{level}"
        raise CalmError(f"--cache {caches_of}: {which} is known in which pages have colors", USAGE)
    if found[-1].way_bytes % PAGE_BYTES:
        what = f"a way of its {found[-1].name} is no whole number of pages"
        raise CalmError(f"--cache {caches_of}: {what}", USAGE)
    return found[-1]


@command.command(
    "simulate",
    context_settings={"show_default": True},
    epilog="""\b
Examples:
  calm colors simulate
  calm colors simulate --cache machine --level 2
  calm colors simulate --policy random --policy hash --plot colors.svg
""",
)
@click.option(
    "--policy",
    "chosen",
    multiple=True,
    type=click.Choice(list(policies.POLICIES)),
    help="A policy that chooses pages' colors; may be given several times. Default: all.",
)
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    type=click.Choice(list(simulation.PATTERNS)),
    help="A pattern of accesses; may be given several times. Default: all.",
)
@click.option(
    "--cache",
    "caches_of",
    type=click.Choice(list(CACHES)),
    default="nehalem",
    help="The caches of this machine, or of the paper's Intel Nehalem.",
)
@click.option(
    "--level",
    type=IntRange(min=1),
    metavar="N",
    help="A level of cache. Default: the last that is not hashed.",
)
@options.rounds(
    None,
    f"Repetitions of what is random. Default: {simulation.RUNS}, fewer for caches of more than 8 MiB.",
)
@click.option("--seed", type=IntRange(0, 2**63), metavar="N", default=0, help="Seed of the random numbers.")
@options.plot("Draw conflicts and misses, a panel for each pattern.")
@options.output("every curve")
def simulate(
    chosen: tuple[str, ...],
    patterns: tuple[str, ...],
    caches_of: str,
    level: int | None,
    rounds: int | None,
    seed: int,
    plot_path: Path | None,
    output: Output,
) -> None:
    """Compare page coloring policies on simulated caches.

    A policy chooses the color of each page that a program touches first. The simulation counts unnecessary
    conflicts, and misses of several patterns of accesses, on a set-associative cache with LRU replacement.
    """
    cache = choose(caches_of, level)
    with Bar(what="simulating") as bar:
        found = simulation.run(
            cache,
            policies=list(dict.fromkeys(chosen)) or list(policies.POLICIES),
            patterns=list(dict.fromkeys(patterns)) or list(simulation.PATTERNS),
            runs=rounds,
            seed=seed,
            step=lambda what: bar.update(what=what),
        )
    found.caches_of = caches_of
    with output.console() as console:
        simulation_report.show(console, found)
    output.write(found)
    if plot_path:
        simulation_report.draw(found, plot_path)
