"""The published benchmark programs as cases: those of mimalloc-bench, with the arguments that it gives them.

A case has the name of the stand-in that was written after its program, below `published/`. A program that
runs for a fixed time, or prints a rate, is compared by its rate.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from calm.core.errors import USAGE, CalmError
from research.bench import source_tree
from research.bench.cases import Case, Prepared
from research.bench.results import Metric, Source
from research.bench.source_tree import MIMALLOC_BENCH, SourceTree

FAMILY = "published"
PREFIX = f"{FAMILY}/"
_SOURCE = f"--source {source_tree.METAVAR}"
# A shell that gives way to the program, so that the command is whole in the result.
_WITH_INPUT = 'exec "$0" <"$1"'


@dataclass(frozen=True)
class _Program:
    name: str
    command: str
    """A target of the tree's build, and its arguments."""
    summary: str
    metric: Metric | None = None
    pattern: str = ""
    standard_input: str = ""
    """A file of the tree."""
    withheld: str = ""
    """A source that the tree may lack."""

    @property
    def case(self) -> str:
        return f"{PREFIX}{self.name}"

    @property
    def target(self) -> str:
        return self.command.split()[0]


_LARSON = Metric("operations_per_second", "/s", higher_is_better=True), r"Throughput = *(\d+) operations"
_PROGRAMS = (
    _Program(
        "cfrac",
        "cfrac 17545186520507317056371138836327483792789528",
        "factoring by continued fractions, by Dave Barrett",
    ),
    _Program(
        "espresso", "espresso {source}/espresso/largest.espresso", "minimization of logic, from Berkeley"
    ),
    _Program(
        "barnes", "barnes", "bodies that attract each other, from SPLASH", standard_input="barnes/input"
    ),
    _Program("alloc-test", "alloc-test {up_to_16}", "slots filled and emptied by all threads, by OLogN"),
    _Program("alloc-test-1", "alloc-test 1", "the same with one thread"),
    _Program(
        "larson",
        "larson 5 8 1000 5000 100 4141 {cpus}",
        "5 s of a server whose threads hand blocks on to new threads, by Larson and Krishnan",
        *_LARSON,
    ),
    _Program(
        "larson-sized",
        "larson-sized 5 8 1000 5000 100 4141 {cpus}",
        "the same with C++'s sized delete",
        *_LARSON,
    ),
    _Program("mstress", "mstress {cpus} 50 25", "threads keep blocks, swap others, start and end, by Leijen"),
    _Program(
        "rptest",
        "rptest {cpus} 0 1 2 500 1000 100 8 16000",
        "random blocks freed within and across threads, by Jansson",
        Metric("operations_per_cpu_second", "/CPU s", higher_is_better=True),
        r"(\d+) memory ops/CPU second",
    ),
    _Program(
        "xmalloc-test",
        "xmalloc-test -w {cpus} -t 5 -s 64",
        "5 s of threads that allocate what others free, by Lever and Boreham",
        Metric("million_frees_per_second", "M/s", higher_is_better=True),
        r"free/sec: *([\d.]+) M",
    ),
    _Program(
        "cache-scratch",
        "cache-scratch {cpus} 1000 1 2000000 {cpus}",
        "threads write blocks that one thread allocated, by Berger et al.",
    ),
    _Program("cache-scratch-1", "cache-scratch 1 1000 1 2000000 {cpus}", "the same with one thread"),
    _Program(
        "cache-thrash",
        "cache-thrash {cpus} 1000 1 2000000 {cpus}",
        "threads write small blocks of their own, by Berger et al.",
    ),
    _Program("cache-thrash-1", "cache-thrash 1 1000 1 2000000 {cpus}", "the same with one thread"),
    _Program("glibc-simple", "glibc-simple", "one thread allocates and frees small blocks, of glibc"),
    _Program(
        "glibc-thread",
        "glibc-thread {cpus}",
        "2 s of threads that renew members of a working set, of glibc",
        Metric("iterations_in_2_s", "/2 s", higher_is_better=True),
        r"(\d+) iterations",
    ),
    _Program("malloc-large", "malloc-large", "large blocks are replaced, of mimalloc-bench"),
    _Program("mleak", "mleak 5", "threads start, allocate a little, and end, of mimalloc-bench (mleak10)"),
    _Program("mleak-100", "mleak 50", "the same with ten times as many threads (mleak100)"),
    _Program(
        "sh6bench",
        "sh6bench {twice}",
        "blocks freed in both orders, for SmartHeap, by MicroQuill",
        withheld="shbench/sh6bench-new.c",
    ),
    _Program(
        "sh8bench",
        "sh8bench {twice}",
        "blocks that other threads free, for SmartHeap, by MicroQuill",
        withheld="shbench/sh8bench-new.c",
    ),
)


def _arguments(program: _Program, source: Path) -> list[str]:
    """Its arguments; the numbers of threads are mimalloc-bench's for so many CPUs."""
    cpus = len(os.sched_getaffinity(0))
    values = {"source": source, "cpus": cpus, "up_to_16": min(cpus, 16), "twice": 2 * cpus}
    return [word.format_map(values) for word in program.command.split()[1:]]


def _prepare(program: _Program, inputs: Path, folder: Path) -> Prepared:
    source = source_tree.sources(MIMALLOC_BENCH, inputs).absolute()
    binary = source_tree.binaries(MIMALLOC_BENCH, inputs).absolute() / program.target
    command = (str(binary), *_arguments(program, source))
    if program.standard_input:
        command = ("sh", "-c", _WITH_INPUT, *command, str(source / program.standard_input))
    return Prepared(command, folder)


def _obstacle(program: _Program, tree: SourceTree | None) -> str | None:
    if tree is None:
        return f"it needs {_SOURCE}"
    if program.withheld and not tree.has_source(program.withheld):
        return f"the tree has no source of it in bench/{program.withheld}, which may not be redistributed"
    return None


def cases(tree: SourceTree | None, inputs: Path) -> tuple[Case, ...]:
    """All programs; without a tree, none can be run. inputs is the suite's folder for inputs."""
    return tuple(
        Case(
            program.case,
            FAMILY,
            program.summary,
            partial(_prepare, program, inputs),
            metric=program.metric,
            pattern=program.pattern,
            obstacle=_obstacle(program, tree),
        )
        for program in _PROGRAMS
    )


def original_of(name: str) -> str:
    """The name of the published program that a stand-in of this name was written after."""
    return f"{PREFIX}{name}"


def build(tree: SourceTree | None, chosen: Sequence[Case], inputs: Path) -> list[Source]:
    """Builds the chosen programs of the tree, and describes it. Raises CalmError with USAGE if that fails."""
    wanted = [case.name for case in chosen if case.family == FAMILY]
    if not wanted:
        return []
    if tree is None:
        raise CalmError(f"{wanted[0]} needs {_SOURCE}", USAGE)
    targets = [each.target for each in _PROGRAMS if each.case in wanted and not _obstacle(each, tree)]
    if targets:
        source_tree.build(tree, targets, inputs)
    return [source_tree.describe(tree)]
