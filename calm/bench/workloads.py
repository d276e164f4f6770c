"""The project's own workloads as cases of the suite: small programs that stress one behaviour each."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from calm import places
from calm.bench.cases import Case, Metric, Prepared
from calm.errors import CalmError

_OPERATIONS = Metric("operations_per_second", "/s", higher_is_better=True)
_FREES = Metric("frees_per_second", "/s", higher_is_better=True)
_PAIR = Metric("ns_per_pair", "ns", higher_is_better=False)


def find(name: str) -> Path:
    """A workload's file: it is built to where the probe is."""
    for probe in places.probe_candidates():
        path = probe.with_name(name)
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise CalmError(f"the workload {name} is missing: `make` builds it")


def _prepare(words: tuple[str, ...], under: str | None, folder: Path) -> Prepared:
    wrapper = (str(find(under)),) if under else ()
    return Prepared((*wrapper, str(find(words[0])), *words[1:]), folder)


def _command(*words: str, under: str | None = None) -> Callable[[Path], Prepared]:
    return partial(_prepare, words, under)


def obstacle(case: Case) -> str | None:
    """Why a workload cannot be run: it was not built."""
    if case not in CASES:
        return None
    try:
        # It has no inputs, so nothing is written.
        case.prepare(Path())
    except CalmError as error:
        return str(error)
    return None


# Real programs that belong with the stand-ins, since the suite that these stand for has them too.
BESIDE_STAND_INS = ("vips",)


def _stand_in(name: str, summary: str, *words: str) -> Case:
    """One in place of a program that no registry carries; its name says so."""
    return Case(name, "stand-in", summary, _command(name, *words))


def _fixed(name: str, summary: str, *words: str, quick: bool = False) -> Case:
    """A fixed amount of work."""
    return Case(name, "workload", summary, _command(*words), quick=quick)


CASES: tuple[Case, ...] = (
    Case(
        "listing1",
        "listing1",
        "Listing 1 of the Ptlbmalloc2 paper: 16 threads fill and empty, newest first, and touch nothing",
        _command("listing1"),
        quick=True,
    ),
    Case(
        "listing1-touched",
        "listing1",
        "the same with 4 threads that write every byte",
        _command("listing1", "--threads", "4", "--touch", "all"),
        quick=True,
    ),
    Case(
        "listing1-reversed",
        "listing1",
        "the same with 16 threads that free oldest first",
        _command("listing1", "--order", "reversed"),
    ),
    Case(
        "listing1-madvise",
        "listing1",
        "the same where process_madvise is denied, as in containers: madvise is all there is",
        _command("listing1", under="without-process-madvise"),
    ),
    Case(
        "larson",
        "workload",
        "a server whose threads hand their blocks on to new threads, after Larson and Krishnan",
        _command("larson", "--seconds", "2"),
        metric=_OPERATIONS,
        quick=True,
    ),
    Case(
        "xmalloc-test",
        "workload",
        "two threads allocate what two others free, after Lever and Boreham",
        _command("xmalloc-test", "--seconds", "2"),
        metric=_FREES,
        quick=True,
    ),
    Case(
        "glibc-thread",
        "workload",
        "two threads renew random members of a working set, after glibc's bench-malloc-thread",
        _command("glibc-thread", "--seconds", "2"),
        metric=_OPERATIONS,
    ),
    Case(
        "glibc-simple",
        "workload",
        "one thread allocates and frees up to 1,600 blocks of 64 bytes, after glibc's bench-malloc-simple",
        _command("glibc-simple", "--pairs", "20000000"),
        metric=_PAIR,
        quick=True,
    ),
    _fixed("t-test1", "threads start, allocate, free and end, after Wolfram Gloger", "ttest1", "1000"),
    _fixed(
        "cache-scratch",
        "threads write blocks that one thread allocated, after Berger et al.",
        "cache-scratch",
        "--rounds",
        "2000",
    ),
    _fixed(
        "cache-thrash",
        "threads write small blocks of their own, after Berger et al.",
        "cache-thrash",
        "--rounds",
        "2000",
    ),
    _fixed(
        "alloc-test",
        "slots filled and emptied, some far more often, after OLogN and node.cpp",
        "alloc-test",
        "--operations",
        "30000000",
    ),
    _fixed(
        "mstress",
        "threads keep blocks, swap others, and come and go, after Leijen et al.",
        "mstress",
        "--iterations",
        "60",
        quick=True,
    ),
    _fixed(
        "rptest",
        "random blocks freed within and across threads, after Jansson",
        "rptest",
        "--loops",
        "60000",
        quick=True,
    ),
    _fixed("malloc-large", "blocks of 5 to 25 MiB are replaced, after mimalloc-bench", "malloc-large"),
    _fixed(
        "mleak", "threads come, allocate a little, and go, after mimalloc-bench", "mleak", "--rounds", "20000"
    ),
    _fixed(
        "cfrac",
        "factoring by continued fractions: tiny numbers, shortly lived, after Zorn",
        "cfrac",
        quick=True,
    ),
    _fixed("espresso", "logic minimised as Espresso does: sets of bits, after Zorn and Grunwald", "espresso"),
    _stand_in("bodytrack-like", "for bodytrack: pictures and particles of a pool of threads that lives on"),
    _stand_in(
        "canneal-like", "for canneal: a netlist of small blocks is built once, and pointers are chased"
    ),
    _stand_in("dedup-like", "for dedup: a pipeline whose buffers are freed in other threads, and swell"),
    _stand_in(
        "fluidanimate-like", "for fluidanimate: a grid that is allocated once, and threads with borders"
    ),
    _stand_in(
        "streamcluster-like", "for streamcluster: blocks of points come and go, and threads wait at barriers"
    ),
    _stand_in("swaptions-like", "for swaptions: small matrices for each trial, in every thread"),
)
