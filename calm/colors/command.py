"""`calm colors`: page colors of a running program and its colliding blocks, and policies simulated."""

import json
import sys
from pathlib import Path

import click

from calm import allocators, environment, options, report
from calm.allocators import Allocator
from calm.colors.simulation import simulate_command
from calm.errors import CalmError
from calm.measure import signal_name
from calm.ranges import FloatRange

LEAST_BYTES = 64 << 10
NO_BLOCKS = (
    "blocks within mappings are not known: `calm colors -- CMD` sees them, and where they were allocated"
)
_ELSEWHERE = "it may not be looked at, or knows itself by another number, in a PID namespace of its own"
# What only makes sense with one of the three things that the command does.
_OF_COMMAND = ("allocator", "interval")
_OF_LOOK = ("least", "near", "top")
_OF_SIMULATION = ("level", "policies", "patterns", "caches_of", "runs", "seed", "picture_path")


def _given(names: tuple[str, ...]) -> bool:
    source = click.get_current_context().get_parameter_source
    return any(source(name) is not click.core.ParameterSource.DEFAULT for name in names)


def _watch(
    cmd: tuple[str, ...],
    allocator: Allocator,
    least: int,
    interval: float,
    near: int,
    json_path: str | None,
    top: int,
) -> int:
    """Runs the program; the exit code."""
    from calm.colors import analysis, geometry, watch
    from calm.colors import report as shown

    stdout = sys.stderr.fileno() if json_path == "-" else None
    watched = watch.run(cmd, allocator, least, interval, stdout)
    if watched.signal is not None:
        click.echo(f"the program was killed by {signal_name(watched.signal)}", err=True)
    if watched.look is None:
        elsewhere = _ELSEWHERE if watched.elsewhere else None
        why = watched.obstacle or elsewhere or "it had no large memory when it was looked at"
        raise CalmError(f"nothing was seen of the program: {why}", watched.exit_code or 1)
    library = allocator.library.name if allocator.library else ""
    found = analysis.analyse(watched.look, geometry.caches(watched.look.cpu), near, library)
    lines = [
        f"seen at {watched.look.moment}, after {report.duration(watched.at_s)} of "
        f"{report.duration(watched.wall_s)}: the look with the most large memory, of {watched.looks:,}"
    ]
    if watched.processes > 1:
        lines.append(f"of {watched.processes:,} processes, that with the most large memory is shown")
    if watched.obstacle or not watched.look.told:
        lines.append(watched.obstacle or "the program did not tell of its blocks: mappings are shown")
    if watched.elsewhere:
        count = watched.elsewhere
        lines.append(f"of {count:,} process{'es' * (count > 1)} nothing is known: {_ELSEWHERE}")
    # On standard error, so that the program's own output can still be piped.
    shown.show(report.console(sys.stderr), found, lines, top)
    if json_path:
        told = {
            "exit_code": watched.exit_code,
            "allocator": allocator.label,
            "wall_s": watched.wall_s,
            "at_s": watched.at_s,
            "looks": watched.looks,
            "processes": watched.processes,
            "processes_elsewhere": watched.elsewhere,
            "least_bytes": least,
        }
        report.write(json_path, json.dumps(shown.as_dict(found) | told, indent=2) + "\n")
    sys.stdout.flush()
    return watched.exit_code


def _look(pid: int, least: int, near: int, json_path: str | None, top: int) -> None:
    from calm.colors import analysis, geometry, look
    from calm.colors import report as shown

    seen = look.take(pid, "now", least)
    if not seen.regions:
        raise CalmError(f"process {pid} has no mapping with {least:,} bytes of resident data")
    found = analysis.analyse(seen, geometry.caches(seen.cpu), near)
    shown.show(report.console(sys.stderr if json_path == "-" else sys.stdout), found, [NO_BLOCKS], top)
    if json_path:
        report.write(json_path, json.dumps(shown.as_dict(found) | {"least_bytes": least}, indent=2) + "\n")


@click.command(
    "colors",
    context_settings={"allow_interspersed_args": False},
    epilog="\b\nExamples:\n"
    "  calm colors -- ./solver input\n"
    "  calm colors -a calmalloc --json colors.json -- ./solver input\n"
    "  calm colors --pid 1234\n"
    "  calm colors --simulate --policy random --policy hash",
)
@click.option("--pid", type=click.IntRange(min=1), metavar="PID", help="Look at this process, once.")
@click.option(
    "--simulate",
    "simulated",
    is_flag=True,
    help="Compare policies that give pages their colors, on simulated caches; no program is run.",
)
@click.option(
    "-a",
    "--allocator",
    default=allocators.GLIBC,
    show_default=True,
    shell_complete=allocators.complete,
    metavar="NAME",
    help="Allocator to run CMD with; see `calm allocators`.",
)
@click.option(
    "--least",
    type=click.IntRange(min=4096),
    default=LEAST_BYTES,
    show_default=True,
    metavar="BYTES",
    help="What is smaller is not looked at.",
)
@click.option(
    "--interval",
    type=FloatRange(min=0.01, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="From one look at CMD to the next, or more where looks take long; "
    "peaks of its memory, and its end, are looked at besides.",
)
@click.option(
    "--near",
    type=click.IntRange(min=1, max=32),
    default=1,
    show_default=True,
    metavar="LINES",
    help="Starts less than so many cache lines apart collide in the innermost cache.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="Blocks, and kinds of pairs, that are shown.",
)
@click.option(
    "--level",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --simulate: the cache of this level. Default: the outermost that is not hashed.",
)
@simulate_command.options
@options.json_file("Write everything as JSON; '-' is stdout, and all else then goes to stderr.")
@options.program(required=False)
def command(
    pid: int | None,
    simulated: bool,
    allocator: str,
    least: int,
    interval: float,
    near: int,
    top: int,
    level: int | None,
    policies: tuple[str, ...],
    patterns: tuple[str, ...],
    caches_of: str,
    runs: int | None,
    seed: int,
    picture_path: str | None,
    json_path: str | None,
    cmd: tuple[str, ...],
) -> None:
    """Show the page colors of CMD's memory, or of a process's, and which large blocks collide in caches.

    Pages of one color compete for the ways of a cache. Counted are pages beyond the ways, beside those of an
    even coloring, of random frames and of huge pages; and pairs of large blocks that start in the same lines,
    a multiple of 4 KiB apart, or in pages of one color, with the place where each was allocated.
    """
    if (pid is not None) + bool(cmd) + simulated != 1:
        raise click.UsageError("give a command to run, or --pid of a process, or --simulate")
    if not cmd and _given(_OF_COMMAND):
        raise click.UsageError("-a and --interval go with a command: a process is looked at once, as it is")
    if simulated and _given(_OF_LOOK):
        raise click.UsageError("--least, --near and --top go with a command or a process")
    if not simulated and _given(_OF_SIMULATION):
        raise click.UsageError(
            "--policy, --pattern, --cache, --level, --runs, --seed and --picture go with --simulate"
        )
    if simulated:
        simulate_command.simulate(
            policies=policies,
            patterns=patterns,
            caches_of=caches_of,
            level=level,
            runs=runs,
            seed=seed,
            json_path=json_path,
            picture_path=picture_path,
        )
        return
    if json_path and json_path != "-":
        report.check_writable(json_path)
    if pid is not None:
        if not Path(f"/proc/{pid}").is_dir():
            raise CalmError(f"there is no process {pid}")
        _look(pid, least, near, json_path, top)
        return
    chosen = allocators.parse(allocator)
    environment.tell(chosen.environment)
    raise SystemExit(_watch(cmd, chosen, least, interval, near, json_path, top))
