"""The project's own workloads as cases of the suite: small programs that stress one behaviour each."""

from functools import partial
from pathlib import Path

from calm.core import paths
from research.bench.cases import Case, Prepared
from research.bench.results import COST, Metric

# A workload is built to where the probe is.
find = paths.find_part


def _prepare(words: tuple[str, ...], under: str | None, folder: Path) -> Prepared:
    wrapper = (str(find(under)),) if under else ()
    return Prepared((*wrapper, str(find(words[0])), *words[1:]), folder)


# Real programs that belong with the stand-ins, since the suite that these stand for has them too.
BESIDE_STAND_INS = ("vips",)

_QUICK = {
    "listing1",
    "listing1-touched",
    "larson",
    "xmalloc-test",
    "glibc-simple",
    "mstress",
    "rptest",
    "cfrac",
}
_OPERATIONS = Metric("operations_per_second", "/s", higher_is_better=True)
_METRICS = {
    "larson": _OPERATIONS,
    "xmalloc-test": Metric("frees_per_second", "/s", higher_is_better=True),
    "glibc-thread": _OPERATIONS,
    "glibc-simple": Metric("ns_per_pair", "ns", higher_is_better=False),
}
# By command.
_WORKLOADS = {
    "larson --seconds 2": "a server whose threads hand their blocks on to new threads, "
    "after Larson and Krishnan",
    "xmalloc-test --seconds 2": "two threads allocate what two others free, after Lever and Boreham",
    "glibc-thread --seconds 2": "two threads renew random members of a working set, "
    "after glibc's bench-malloc-thread",
    "glibc-simple --pairs 20000000": "one thread allocates and frees up to 1,600 blocks of 64 bytes, "
    "after glibc's bench-malloc-simple",
    "ttest1 1000": "threads start, allocate, free and end, after Wolfram Gloger",
    "cache-scratch --rounds 2000": "threads write blocks that one thread allocated, after Berger et al.",
    "cache-thrash --rounds 2000": "threads write small blocks of their own, after Berger et al.",
    "alloc-test --operations 30000000": "slots filled and emptied, some far more often, "
    "after OLogN and node.cpp",
    "mstress --iterations 60": "threads keep blocks, swap others, start and end, after Leijen et al.",
    "rptest --loops 60000": "random blocks freed within and across threads, after Jansson",
    "malloc-large": "blocks of 5 to 25 MiB are replaced, after mimalloc-bench",
    "mleak --rounds 20000": "threads start, allocate a little, and end, after mimalloc-bench",
    "cfrac": "factoring by continued fractions: tiny, short-lived numbers, after Zorn",
    "espresso": "logic minimised as Espresso does: sets of bits, after Zorn and Grunwald",
}
# Programs in the place of those that no registry carries; their names say so.
_STAND_INS = {
    "bodytrack-like": "for bodytrack: pictures and particles of a lasting pool of threads",
    "canneal-like": "for canneal: a netlist of small blocks, built once, and chased pointers",
    "dedup-like": "for dedup: a pipeline whose growing buffers are freed in other threads",
    "fluidanimate-like": "for fluidanimate: a grid that is allocated once, and threads with borders",
    "streamcluster-like": "for streamcluster: blocks of points are replaced, and threads wait at barriers",
    "swaptions-like": "for swaptions: small matrices for each trial, in every thread",
}


PERIODIC = "periodic"
_KINDS = {"small": "16 to 512", "medium": "1,000 to 60,000", "large": "100,000 to 1,000,000"}
_PATTERNS = {
    "regular": "pauses of {} s",
    "random": "random pauses of {} s on average",
    "two-sizes": "pauses of {} s, every second burst a quarter",
}
# Bursts, by the pause.
_BURSTS = {0.1: 20, 0.3: 12, 1: 8, 3: 8, 10: 5, 30: 3}


def _periodic(
    pause: float,
    mib: int = 200,
    kind: str = "medium",
    threads: int = 1,
    pattern: str = "regular",
    processes: int = 1,
) -> Case:
    """A program that allocates, writes and frees so much in each burst, and sleeps between the bursts."""
    sizes = _KINDS[kind]
    least, most = sizes.replace(",", "").split(" to ")
    words = (
        *("sawtooth", "--threads", str(threads), "--bytes", str(mib << 20), "--min", least, "--max", most),
        *("--rounds", str(_BURSTS[pause]), "--rest", str(pause), "--after", str(pause)),
        *("--pattern", pattern),
        *(("--processes", str(processes)) if processes > 1 else ()),
    )
    parts: tuple[str, ...] = (f"{pause:g}s", f"{mib}m", kind, f"{threads}t", pattern)
    summary = f"bursts of {mib} MiB in blocks of {sizes} bytes, {_PATTERNS[pattern].format(pause)}"
    summary += f", {threads} threads" if threads > 1 else ""
    summary += f", in each of {processes} processes" if processes > 1 else ""
    parts += (f"{processes}p",) if processes > 1 else ()
    name = "-".join(("periodic", *parts))
    return Case(name, PERIODIC, summary, partial(_prepare, words, None), metric=COST)


def _all_periodic() -> tuple[Case, ...]:
    """One thing varied at a time."""
    regular = [_periodic(pause) for pause in _BURSTS]
    others = [
        case
        for pause in (1, 10)
        for case in (
            *(_periodic(pause, mib=mib) for mib in (20, 2000)),
            *(_periodic(pause, kind=kind) for kind in ("small", "large")),
            *(_periodic(pause, threads=threads) for threads in (2, 16)),
            *(_periodic(pause, pattern=pattern) for pattern in ("random", "two-sizes")),
            *(_periodic(pause, mib=100, processes=processes) for processes in (2, 4, 8)),
        )
    ]
    return (*regular, *others, _periodic(3, pattern="random"), _periodic(3, pattern="two-sizes"))


def _case(family: str, command: str, summary: str, name: str = "", under: str | None = None) -> Case:
    """A case of the program's own name, if no other one is given."""
    words = tuple(command.split())
    name = name or words[0]
    prepare = partial(_prepare, words, under)
    return Case(name, family, summary, prepare, metric=_METRICS.get(name), quick=name in _QUICK)


_listing1 = partial(_case, "listing1")
CASES: tuple[Case, ...] = (
    _listing1(
        "listing1",
        "Listing 1 of the Ptlbmalloc2 paper: 16 threads fill and empty, newest first, and touch nothing",
    ),
    _listing1(
        "listing1 --threads 4 --touch all",
        "the same with 4 threads that write every byte",
        "listing1-touched",
    ),
    _listing1(
        "listing1 --order reversed", "the same with 16 threads that free oldest first", "listing1-reversed"
    ),
    _listing1(
        "listing1",
        "the same where process_madvise is denied, as in containers: madvise is all there is",
        "listing1-madvise",
        under="without-process-madvise",
    ),
    *(
        _case("workload", command, summary, "t-test1" if command.startswith("ttest1") else "")
        for command, summary in _WORKLOADS.items()
    ),
    *(_case("stand-in", command, summary) for command, summary in _STAND_INS.items()),
    *_all_periodic(),
)
