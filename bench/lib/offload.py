"""The figures that judge calmoffload, in which a server thread does the slow part of malloc.

Each figure has several rows: a program or a workload, its allocators, and the limit on the ratio of their
costs. Less is better in all ratios; rates are inverted.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from calm.core import allocators, measure, program
from calm.core.allocators import Allocator
from calm.core.environment import clean_environment
from calm.core.errors import CalmError
from research.bench.inputs import (
    FURTHER_PROGRAMS,
    PROGRAMS,
    WORDS,
    XALAN,
    Program,
    xml_orders,
)
from research.papers.labels import plain

from . import allocator_share, client_time, judged, server_time
from .judged import BEST_PEER, Goal
from .results import BUILD, REPOSITORY, Store, summarize
from .rounds import CALMALLOC, GLIBC, LONGEST_RUN_S, interleaved, note, present, run_once, version_of

GROUP = "offload"
OFFLOAD = "calmoffload"
SYNC = f"{OFFLOAD}:CALM_OPTIONS=test_sync=on,test_cache=off"
MIMALLOC = "mimalloc"
PEERS = (GLIBC, "jemalloc", MIMALLOC, "snmalloc", "rpmalloc", "tcmalloc", "gperftools")
INPUTS = REPOSITORY / "build/bench-inputs"
IDLE_S = 10
_LARGE = 400_000

Run = Callable[[Allocator], dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A command under some allocators; the goals name the comparisons."""

    name: str
    command: tuple[str, ...]
    """A workload and its arguments, or the name of a program with inputs."""
    goals: tuple[Goal, ...]
    more: tuple[str, ...] = ()
    """Additional allocators that no goal names."""
    rounds: int = 7

    @property
    def labels(self) -> list[str]:
        """All allocators, each before those compared with it."""
        named = [label for goal in self.goals for label in (goal.to, goal.of)]
        return list(dict.fromkeys(label for label in (*self.more, *named) if label and label != BEST_PEER))


@dataclass(frozen=True)
class Figure:
    """Rows that run in the same way."""

    name: str
    how: Callable[[Row], Run]
    rows: tuple[Row, ...] = field(default_factory=tuple)
    cpus: int | None = None
    """The maximum number of allocators."""
    with_share: bool = False
    """Reports the allocator's share of the time; one row with a large enough share suffices."""


def policy(label: str, name: str) -> str:
    """An allocator under a policy."""
    return f"{label}:CALM_OPTIONS=test_policy={name}"


# ---- ways to run ----


def json_orders(count: int) -> Iterator[str]:
    """Roughly the same orders as of xml_orders, as one array with an order in each line."""
    rng = random.Random(6)
    for i in range(count):
        order = {
            "id": i,
            "region": rng.choice(WORDS),
            "note": " ".join(rng.choices(WORDS, k=8)),
            "items": [
                {
                    "sku": f"{rng.choice(WORDS)}-{rng.randrange(1000)}",
                    "count": rng.randrange(1, 9),
                    "price": rng.randrange(100, 9999) / 100,
                }
                for _ in range(rng.randrange(1, 6))
            ],
        }
        yield f"{',' if i else '['}{json.dumps(order)}\n"
    yield "]\n"


# The whole document is in memory while it is sorted and grouped.
_JQ = (
    "group_by(.region) | map({region: .[0].region, orders: length, items: (map(.items | length) | add),"
    " last: (sort_by(.note) | last | .id)})"
)
_LARGE_PROGRAMS = (
    replace(XALAN, name="xalan-large", inputs={**XALAN.inputs, "orders.xml": lambda: xml_orders(_LARGE)}),
    Program(
        "jq",
        "a document sorted and grouped",
        f"jq -c {shlex.quote(_JQ)} {{inputs}}/orders.json",
        {"orders.json": lambda: json_orders(150_000)},
        "jq",
    ),
)
PROGRAMS_BY_NAME = {each.name: each for each in (*PROGRAMS, *FURTHER_PROGRAMS, *_LARGE_PROGRAMS)}


def prepared(command: Sequence[str]) -> tuple[list[str], Path]:
    """Writes a program's inputs; returns the command and the folder to run it in."""
    if command[0] not in PROGRAMS_BY_NAME:
        return [str(REPOSITORY / BUILD / command[0]), *command[1:]], REPOSITORY
    case = PROGRAMS_BY_NAME[command[0]]
    outputs = INPUTS / case.name / "outputs"
    outputs.mkdir(parents=True, exist_ok=True)
    case.write_inputs(outputs.parent)
    # Relative, so that results from different machines name the same command.
    return [case.binary, *case.arguments(Path(".."))], outputs


def timed(row: Row) -> Run:
    """Measures whole runs by calm's probe."""
    command, folder = prepared(row.command)

    def run(allocator: Allocator) -> dict[str, Any]:
        environment = clean_environment()
        with tempfile.TemporaryFile() as errors:
            found = measure.measure(
                command,
                allocator.variables(environment),
                groups=(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                inherited=environment,
                folder=folder,
                limit_s=LONGEST_RUN_S,
            )
            errors.seek(0)
            said = note(errors.read().decode(errors="replace"))
        if found.interrupted_by is not None:
            sys.exit(128 + found.interrupted_by)
        if found.failure:
            raise subprocess.SubprocessError(found.failure)
        names = ("wall_s", "user_s", "system_s", "minor_faults", "peak_rss_kib", "average_rss_kib")
        # CPU time of all threads: the server's time is a cost, too.
        return (
            {name: getattr(found, name) for name in names} | {"cpu_s": found.user_s + found.system_s} | said
        )

    return run


def printed(row: Row) -> Run:
    """Measures by the workload's output."""
    return partial(run_once, workload(row))


def clients(row: Row) -> Run:
    """The same, with its threads' time in the kernel."""
    return partial(client_time.run_once, workload(row))


def asleep(row: Row) -> Run:
    """Measures the allocator's threads while the program sleeps."""
    return partial(server_time.watch, workload(row), seconds=IDLE_S)


def workload(row: Row) -> list[str]:
    """The command, relative to the repository's root, in which it runs."""
    return [str(BUILD / row.command[0]), *row.command[1:]]


@contextmanager
def on_cpus(most: int | None) -> Iterator[list[int]]:
    """Limits the number of CPUs of processes started in this context."""
    before = os.sched_getaffinity(0)
    chosen = sorted(before)[:most]
    os.sched_setaffinity(0, chosen)
    try:
        yield chosen
    finally:
        os.sched_setaffinity(0, before)


# ---- rows ----


def _program_goals(at_most: float) -> tuple[Goal, ...]:
    """Goals on time; CPU time is reported, but not judged."""
    own = (Goal(metric, OFFLOAD, CALMALLOC) for metric in ("wall_s", "cpu_s"))
    return (Goal("wall_s", OFFLOAD, MIMALLOC, at_most), *own)


def _program(*command: str, name: str | None = None) -> Row:
    return Row(name or command[0], command, _program_goals(0.95))


def _pair(name: str, command: str, metric: str, at_most: float, of_policy: str | None = None) -> Row:
    """A ratio of calmoffload to calmalloc."""
    of, to = (policy(label, of_policy) if of_policy else label for label in (OFFLOAD, CALMALLOC))
    return Row(name, tuple(command.split()), (Goal(metric, of, to, at_most),))


def _latency() -> Row:
    goals = []
    for metric in ("malloc_p99_9_ns", "malloc_p99_99_ns"):
        goals += [Goal(metric, OFFLOAD, BEST_PEER, 0.5), Goal(metric, OFFLOAD, CALMALLOC)]
        goals += [Goal(metric, OFFLOAD, peer) for peer in PEERS]
    goals += [Goal(metric, OFFLOAD, BEST_PEER) for metric in ("free_p99_9_ns", "free_p99_99_ns")]
    return Row("malloc-latency", ("malloc-latency",), tuple(goals))


def _idle(threads: int) -> Row:
    command = ("idle-burst", "--threads", str(threads), "--seconds", str(IDLE_S + 5))
    goal = Goal("server_percent", OFFLOAD, at_most=0.1)
    return Row(f"{threads} threads", command, (goal,), more=(CALMALLOC,), rounds=3)


def _many(metric: str, *command: str) -> Row:
    goals = (Goal(metric, OFFLOAD, CALMALLOC, 1.3), Goal(metric, OFFLOAD, MIMALLOC))
    return Row(command[0], command, goals)


def _sync(metric: str, *command: str) -> Row:
    goals = (Goal(metric, OFFLOAD, SYNC), Goal(metric, SYNC, CALMALLOC), Goal(metric, OFFLOAD, CALMALLOC))
    return Row(command[0], command, goals)


# One client thread each. Memory that is reused, and memory that is touched for the first time.
_LISTING1_AGAIN = "listing1 --threads 1 --touch all --rounds 40"
_LISTING1_FRESH = "listing1 --threads 1 --touch all --rounds 1 --blocks 8000"
_TTEST1_AGAIN = "ttest1 200 1 10000"
_TTEST1_FRESH = "ttest1 1 1 0 10000 200000"

FIGURES = (
    Figure(
        "offload-program",
        timed,
        (
            _program("espresso"),
            _program("cfrac"),
            _program("alloc-test", "--threads", "1", "--operations", "30000000"),
            _program("glibc-simple", "--pairs", "40000000"),
            _program("dedup-like"),
            _program("mstress", "--threads", "1", "--iterations", "60"),
            _program("rptest", "--threads", "1", "--loops", "100000"),
            *(
                _program(name)
                for name in ("xalan", "gcc", "sqlite3", "python3", "python3-malloc", "z3", "lua", "jq")
            ),
        ),
        with_share=True,
    ),
    Figure(
        "offload-xalan",
        timed,
        (Row("xalan-large", ("xalan-large",), _program_goals(1.0)),),
    ),
    Figure(
        "offload-ttest1",
        printed,
        (
            _pair("test_policy=paper", _TTEST1_AGAIN, "seconds", 0.7, "paper"),
            _pair("first touch", _TTEST1_FRESH, "seconds", 0.7),
            _pair("adaptive", _TTEST1_AGAIN, "seconds", 1.02),
        ),
    ),
    Figure(
        "offload-listing1",
        printed,
        (
            _pair("test_policy=paper", _LISTING1_AGAIN, "seconds", 0.7, "paper"),
            _pair("first touch", _LISTING1_FRESH, "seconds", 0.7),
            _pair("adaptive", _LISTING1_AGAIN, "seconds", 1.02),
        ),
    ),
    Figure(
        "offload-client-time",
        clients,
        (
            _pair("ttest1, test_policy=paper", _TTEST1_AGAIN, "client_memory_s", 0.1, "paper"),
            _pair("ttest1, first touch", _TTEST1_FRESH, "client_memory_s", 0.1),
            _pair("listing1, test_policy=paper", _LISTING1_AGAIN, "client_memory_s", 0.1, "paper"),
            _pair("listing1, first touch", _LISTING1_FRESH, "client_memory_s", 0.1),
        ),
    ),
    Figure("offload-latency", printed, (_latency(),)),
    Figure(
        "offload-sync",
        timed,
        (
            _sync("wall_s", "xalan"),
            _sync("wall_s", "cfrac"),
            _sync("wall_s", "glibc-simple", "--pairs", "5000000"),
            _sync("wall_s", "alloc-test", "--threads", "1", "--operations", "10000000"),
        ),
    ),
    Figure("offload-idle", asleep, (_idle(1), _idle(2))),
    Figure(
        "offload-64",
        printed,
        (
            _many("operations_per_second", "larson", "--threads", "64"),
            _many("seconds", "ttest1", "4000", "64"),
            _many("frees_per_second", "xmalloc-test", "--threads", "32"),
        ),
        cpus=2,
    ),
)
NAMES = tuple(figure.name for figure in FIGURES)


def expand(names: Sequence[str]) -> list[str]:
    """Expands the group's name to all of its figures."""
    return [each for name in names for each in (NAMES if name == GROUP else (name,))]


# ---- measuring ----


def _obstacle(figure: Figure, row: Row) -> str | None:
    """Why a row cannot be measured here, or None."""
    if figure.how is clients and (why := client_time.obstacle()):
        return why
    name = row.command[0]
    if name in PROGRAMS_BY_NAME:
        case = PROGRAMS_BY_NAME[name]
        try:
            program.find(case.binary)
        except CalmError:
            return f"{case.binary} is not on this machine: install the package {case.package}"
    elif not (REPOSITORY / BUILD / name).is_file():
        return f"{BUILD / name} is not built: run make"
    return None


def _tell(row: dict[str, Any]) -> None:
    for side in row["allocators"]:
        print(f"  {side['label']:<44} {version_of(side)}", flush=True)
        if side["median"]:
            middles = ", ".join(f"{metric} {middle:,.6g}" for metric, middle in side["median"].items())
            print(f"    {middles}", flush=True)
        for line in dict.fromkeys(line for run in side["runs"] for line in run.get("said", ())):
            print(f"  {side['label']} printed: {line}", flush=True)
    if share := row["allocator_share"]:
        part = "not known" if share["share"] is None else f"{share['share']:.1%}"
        print(f"  the allocator's share of the time, under calmalloc: {part}", flush=True)
    for verdict in row["ratios"]:
        print(f"  {judged.told(verdict)}", flush=True)


def _measure_row(figure: Figure, row: Row, rounds: int) -> dict[str, Any]:
    command = [str(BUILD / row.command[0]), *row.command[1:]]
    if row.command[0] in PROGRAMS_BY_NAME:
        command = list(row.command)
    found: dict[str, Any] = {"name": row.name, "command": command, "allocators": [], "allocator_share": {}}
    print(f"\n{figure.name}: {row.name}: {' '.join(command)}", flush=True)
    if reason := _obstacle(figure, row):
        print(f"  skipped: {reason}", flush=True)
        found["left_out"] = reason
    else:
        found["allocators"] = interleaved(present(row.labels), figure.how(row), rounds, case=row.name)
        if figure.with_share and allocators.is_here(CALMALLOC):
            words, folder = prepared(row.command)
            found["allocator_share"] = allocator_share.measure(words, allocators.parse(CALMALLOC), folder)
    summarize(found["allocators"], dict.fromkeys(goal.metric for goal in row.goals))
    found["ratios"] = judged.judge(found, row.goals)
    _tell(found)
    return found


def measure_figure(figure: Figure, store: Store, runs: int | None) -> None:
    """Measures the rows of one figure, and saves it."""
    with on_cpus(figure.cpus) as cpus:
        rows = [_measure_row(figure, row, runs or row.rounds) for row in figure.rows]
    if figure.with_share:
        outcome = judged.of_any(rows)
    else:
        outcome = judged.of_all([verdict for row in rows for verdict in row["ratios"]])
    print(f"\n{figure.name}: {outcome}", flush=True)
    store.save(figure.name, {"cpus": cpus, "rows": rows, "outcome": outcome})


# ---- the table ----


def table(store: Store) -> str:
    """Goals and results, in Markdown; empty if nothing was measured."""
    lines: list[str] = []
    versions: set[str] = set()
    for figure in FIGURES:
        result = store.load(figure.name)
        for row in result["rows"] if result else ():
            what = f"{figure.name.removeprefix(f'{GROUP}-')}: {row['name']}"
            share = row.get("allocator_share", {}).get("share")
            what += f" (allocator {share:.0%})" if share is not None else ""
            lines += [judged.cells(what, verdict) for verdict in row["ratios"]]
            sides = row.get("allocators", ())
            versions |= {f"- {plain(side['label'])}: {version_of(side)}" for side in sides}
    if not lines:
        return ""
    return "\n".join([judged.HEAD, *lines, "", *sorted(versions)]) + "\n"
