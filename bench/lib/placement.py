"""The figures that judge the placement of large blocks.

placement-streams: the gain where arrays conflict, and the cost where they do not. placement-alias: whether
malloc's blocks are as good as arrays padded by hand. placement-suite: the cost in memory and time for
programs that do not benefit. placement_peer compares it with jemalloc.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from calm.core import allocators, documents, report
from calm.core.environment import clean_environment
from calm.core.rounds import orders
from calm.core.statistics import SEED, Ratio, median
from research.bench.analysis import PEAK, TIME, Measure, costs
from research.bench.results import Results
from research.statistics import geometric_mean_of_ratios

from . import judged, offload, placement_peer, suite
from .judged import Goal
from .offload import Figure, Row, printed
from .results import BUILD, REPOSITORY, Store, machine, summarize
from .rounds import CALMALLOC, origin, run_once, version_of

GROUP = "placement"
UNPLACED = placement_peer.UNPLACED
_CALM = str(REPOSITORY / "bin/calm")
_ROUNDS = 7
# The limit for "as good as padded by hand".
_AS_PADDED = 1.03

# ---- streams: compared with test_placement=off ----


def _streams(arrays: int, at_most: float) -> Row:
    words = ("streams", "--work", "update", "--memory", "malloc", "--bytes", str(1 << 20))
    command = (*words, "--arrays", str(arrays), "--repeats", "40000")
    return Row(f"{arrays} arrays", command, (Goal("seconds", CALMALLOC, UNPLACED, at_most),))


STREAMS = Figure(
    "placement-streams",
    printed,
    (
        *(_streams(arrays, 1.02) for arrays in (2, 4, 8)),
        *(_streams(arrays, 0.25) for arrays in (16, 32, 64)),
    ),
)

# ---- alias: compared with arrays padded by hand ----

MALLOC, PADDED = "malloc", "padded by hand"
WITHOUT = "malloc, test_placement=off"


@dataclass(frozen=True)
class Pair:
    """A workload with blocks from malloc, and with blocks padded by hand."""

    name: str
    command: tuple[str, ...]
    metric: str

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Blocks of malloc must be as good; the cost without placement is reported."""
        return (Goal(self.metric, MALLOC, PADDED, _AS_PADDED), Goal(self.metric, WITHOUT, PADDED))

    @property
    def sides(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """The allocator and the command, by name."""
        return [
            (name, label, (*self.command, "--memory", memory))
            for name, label, memory in (
                (MALLOC, CALMALLOC, "malloc"),
                (PADDED, CALMALLOC, "padded"),
                (WITHOUT, UNPLACED, "malloc"),
            )
        ]


def _alias(name: str, *more: str) -> Pair:
    return Pair(name, ("alias4k", *more), "cycles_per_iteration")


PAIRS = (
    _alias("mesh of 4 streams", "--work", "mesh", "--streams", "4", "--head", "2048"),
    _alias("moves, 1 stream", "--work", "move", "--streams", "1"),
    _alias("moves, 2 streams", "--work", "move", "--streams", "2"),
    Pair("mhd-like", ("mhd-like", "--grid", "256", "--steps", "10"), "seconds"),
)

Run = Callable[[Sequence[str], allocators.Allocator], dict[str, Any]]


def measure_pair(pair: Pair, rounds: int, run: Run = run_once) -> dict[str, Any]:
    """Runs all sides once per round, in a different order each time; the first round is discarded."""
    print(f"\nplacement-alias: {pair.name}: {' '.join(pair.command)}", flush=True)
    sides = []
    turns = []
    for name, label, command in pair.sides:
        allocator = allocators.parse(label)
        own = [str(BUILD / command[0]), *command[1:]]
        side: dict[str, Any] = {"label": name, "command": own, "origin": origin(allocator), "runs": []}
        sides.append(side | {"allocator": label, "failure": None})
        turns.append((sides[-1], partial(run, own, allocator)))
    for number, order in enumerate(orders(turns, rounds + 1, SEED, pair.name)):
        for side, once in order:
            if side["failure"] is not None:
                continue
            try:
                found = once()
            except (subprocess.SubprocessError, json.JSONDecodeError) as error:
                side["failure"], side["runs"] = str(error), []
                print(f"  {side['label']}: {error}", flush=True)
                continue
            if number > 0:
                side["runs"].append(found)
    summarize(sides, [pair.metric])
    row = {"name": pair.name, "allocators": sides}
    verdicts = judged.judge(row, pair.goals)
    for verdict in verdicts:
        print(f"  {judged.told(verdict)}", flush=True)
    return row | {"ratios": verdicts}


def _measure_alias(store: Store, runs: int | None) -> None:
    rows = [measure_pair(pair, runs or _ROUNDS) for pair in PAIRS]
    outcome = judged.of_all([verdict for row in rows for verdict in row["ratios"]])
    print(f"\n{ALIAS}: {outcome}", flush=True)
    store.save(ALIAS, {"rows": rows, "outcome": outcome})


# ---- the suite: compared with test_placement=off ----

_SUITE_GOALS = ((TIME, 1.0), (PEAK, 1.005))


def expected_s(store: Store, rounds: int) -> float | None:
    """The suite's estimated duration, from its last run; None if there was none."""
    path = suite.result(store.folder)
    if not path.exists():
        return None
    total = sum(row.median(CALMALLOC, "wall_s") or 0.0 for row in suite.load(store.folder).rows)
    return total * 2 * (rounds + 1)


def suite_rows(found: Results, what: Measure) -> list[tuple[str, list[float], list[float]]]:
    """The costs with and without placement of each case that ran under both."""
    kept = []
    for row in found.rows:
        sides = [row.side(label) for label in (CALMALLOC, UNPLACED)]
        both = [costs(row, side, what) if side and not side.failure else [] for side in sides]
        if both[0] and len(both[0]) == len(both[1]):
            kept.append((row.name, both[0], both[1]))
    return kept


def _verdict(what: Measure, at_most: float, found: Ratio) -> dict[str, Any]:
    judged_as = "not known" if found.value is None else judged.outcome(at_most, found.low, found.high)
    goal = asdict(Goal(what.key, CALMALLOC, UNPLACED, at_most))
    interval = {"value": found.value, "low": found.low, "high": found.high}
    return goal | interval | {"n": found.n, "outcome": judged_as}


def judge_suite(found: Results) -> dict[str, Any]:
    """The means over all cases, and the cases' values."""
    measured = {what.key: suite_rows(found, what) for what, _ in _SUITE_GOALS}
    verdicts = []
    for what, at_most in _SUITE_GOALS:
        pairs = [(above, below) for _, above, below in measured[what.key]]
        verdicts.append(_verdict(what, at_most, geometric_mean_of_ratios(pairs)))
    return {
        "ratios": verdicts,
        "cases": {
            key: [
                {"name": name, CALMALLOC: median(above), UNPLACED: median(below)}
                for name, above, below in rows
            ]
            for key, rows in measured.items()
        },
        "failures": [f"{row.name} under {side.label}: {side.failure}" for row, side in found.failures],
        "outcome": judged.of_all(verdicts),
    }


def _measure_suite(store: Store, runs: int | None) -> None:
    rounds = runs or _ROUNDS
    if (seconds := expected_s(store, rounds)) is not None:
        about = report.rough_duration(seconds)
        print(f"\n{SUITE}: takes about {about}, and longer the first time, to create the inputs", flush=True)
    path = str(store.runs(SUITE))
    command = [_CALM, "bench", "run", "--suite", "full", "-n", str(rounds), "--json", path]
    command += ["-a", f"{CALMALLOC},{UNPLACED}", "--table", "time", "--table", "peak"]
    done = subprocess.run(command, cwd=REPOSITORY, env=clean_environment())
    # 1: a program failed under one of them, as the result says.
    if done.returncode not in (0, 1):
        sys.exit(f"bench/figures: {SUITE}: calm bench ended with {done.returncode}")
    found = judge_suite(documents.read(path, Results))
    for verdict in found["ratios"]:
        print(f"  {judged.told(verdict)}", flush=True)
    print(f"\n{SUITE}: {found['outcome']}", flush=True)
    store.keep(SUITE, {"rounds": rounds} | found | {"machine": machine()})


# ---- all figures ----

ALIAS, SUITE = "placement-alias", "placement-suite"
NAMES = (STREAMS.name, placement_peer.NAME, ALIAS, SUITE)


def expand(names: Sequence[str]) -> list[str]:
    """Expands the group's name to all of its figures."""
    return [each for name in names for each in (NAMES if name == GROUP else (name,))]


def measure(name: str, store: Store, runs: int | None, set_huge_pages: bool) -> None:
    """Measures one figure, and saves it."""
    if name == STREAMS.name:
        offload.measure_figure(STREAMS, store, runs)
    elif name == placement_peer.NAME:
        placement_peer.measure(store, runs, set_huge_pages)
    elif name == ALIAS:
        _measure_alias(store, runs)
    else:
        _measure_suite(store, runs)


def table(store: Store) -> str:
    """Goals and results, in Markdown; empty if nothing was measured."""
    lines: list[str] = []
    versions: set[str] = set()
    for name in (STREAMS.name, ALIAS):
        result = store.load(name)
        for row in result["rows"] if result else ():
            what = f"{name.removeprefix(f'{GROUP}-')}: {row['name']}"
            lines += [judged.cells(what, verdict) for verdict in row["ratios"]]
            versions |= {f"- {CALMALLOC}: {version_of(side)}" for side in row["allocators"]}
    if result := store.load(SUITE):
        lines += [
            judged.cells(f"suite: {verdict['n']} cases", verdict | {"n": result["rounds"]})
            for verdict in result["ratios"]
        ]
    if result := store.load(placement_peer.NAME):
        lines += placement_peer.lines(result)
        versions |= placement_peer.versions(result)
    if not lines:
        return ""
    return "\n".join([judged.HEAD, *lines, "", *sorted(versions)]) + "\n"
