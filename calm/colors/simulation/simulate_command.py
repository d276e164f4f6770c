"""The options of `calm colors --simulate`, and what it does."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from calm import plot, report
from calm.colors import conflicts
from calm.colors.geometry import NEHALEM, Cache, caches
from calm.colors.simulation import simulate as engine
from calm.colors.simulation import simulate_report
from calm.colors.simulation.policies import POLICIES
from calm.errors import USAGE, CalmError
from calm.progress import Bar

MACHINE = "machine"
CACHES: dict[str, Callable[[], Sequence[Cache]]] = {MACHINE: caches, "nehalem": lambda: NEHALEM}
PAPER = "nehalem"

_OPTIONS = (
    click.option(
        "--policy",
        "policies",
        multiple=True,
        type=click.Choice(list(POLICIES)),
        help="With --simulate: a policy for pages' colors; may be given again. Default: all.",
    ),
    click.option(
        "--pattern",
        "patterns",
        multiple=True,
        type=click.Choice(list(engine.PATTERNS)),
        help="With --simulate: how memory is used; may be given again. Default: all.",
    ),
    click.option(
        "--cache",
        "caches_of",
        type=click.Choice(list(CACHES)),
        default=PAPER,
        show_default=True,
        help="With --simulate: this machine's caches, or those of the paper's Intel Nehalem.",
    ),
    click.option(
        "--runs",
        type=click.IntRange(1, 100_000),
        help="With --simulate: how often what goes by chance is done. "
        f"Default: {engine.RUNS}, fewer for a cache larger than the paper's 8 MiB.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**63),
        default=0,
        show_default=True,
        help="With --simulate: another one gives other runs.",
    ),
    click.option(
        "--picture",
        "picture_path",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="With --simulate: draw it; .svg or .png.",
    ),
)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Those that only --simulate has."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def chosen(caches_of: str, level: int | None) -> Cache:
    """The cache of a level; without one, the outermost that is not hashed and in which pages have colors."""
    found = [cache for cache in CACHES[caches_of]() if cache.colors(conflicts.PAGE_BYTES) > 1]
    if level is not None:
        found = [cache for cache in found if cache.level == level]
    else:
        found = [cache for cache in found if not conflicts.is_hashed(cache)] or found
    if not found:
        which = "no cache" if level is None else f"no L{level}"
        raise CalmError(f"--cache {caches_of}: {which} is known in which pages have colors", USAGE)
    if found[-1].way_bytes % conflicts.PAGE_BYTES:
        raise CalmError(
            f"--cache {caches_of}: a way of its L{found[-1].level} is no whole number of pages", USAGE
        )
    return found[-1]


def simulate(
    *,
    policies: Sequence[str] = (),
    patterns: Sequence[str] = (),
    caches_of: str = PAPER,
    level: int | None = None,
    runs: int | None = None,
    seed: int = 0,
    json_path: str | None = None,
    picture_path: str | None = None,
) -> None:
    """Simulates, and says, writes and draws what came of it."""
    if picture_path and Path(picture_path).suffix not in plot.ENDINGS:
        raise CalmError(f"--picture {picture_path}: the name must end in {' or '.join(plot.ENDINGS)}", USAGE)
    for path in (json_path, picture_path):
        if path and path != "-":
            report.check_writable(path)
    cache = chosen(caches_of, level)
    with Bar(what="simulating") as bar:
        result = engine.run(
            cache,
            policies=list(dict.fromkeys(policies)) or list(POLICIES),
            patterns=list(dict.fromkeys(patterns)) or list(engine.PATTERNS),
            runs=runs,
            seed=seed,
            step=lambda what: bar.update(what=what),
        )
    simulate_report.report(result, report.console(sys.stderr if json_path == "-" else sys.stdout))
    if json_path:
        found = {"caches_of": caches_of} | simulate_report.as_json(result)
        report.write(json_path, json.dumps(found, indent=2) + "\n")
    if picture_path:
        simulate_report.picture(result, Path(picture_path))
