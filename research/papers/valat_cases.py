"""The programs that the paging paper's figures are measured with, and their allocators.

Programs whose arrays come from malloc run under every allocator; those that map their arrays themselves run
once, under glibc. The options of a row's command say what the row measures.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calm.core.allocators import CALM_OPTIONS, GLIBC
from calm.core.environment import clean_environment
from calm.core.errors import CalmError
from research.bench import workloads
from research.bench.cases import Case, Prepared
from research.bench.results import Metric, Results, Row
from research.colors.caches import PAGE_BYTES, Cache, caches
from research.papers.model import ALWAYS_HUGE, About

CALMALLOC, JEMALLOC = "calmalloc", "jemalloc"


def placed(how: str) -> str:
    return f"{CALMALLOC}:{CALM_OPTIONS}=test_placement={how}"


UNPLACED, LINES, RANDOM = (placed(how) for how in ("off", "lines", "random"))
GLIBC_PLACED = "ptlbmalloc2:PTLBMALLOC2_PLACEMENT=1"
# Other ways to place, beside calmalloc's own: only where placement is all that matters.
WAYS_TO_PLACE = (LINES, RANDOM, GLIBC_PLACED)
BESIDE = (CALMALLOC, UNPLACED, JEMALLOC, *WAYS_TO_PLACE)

SMALL, HUGE, COLORED, MALLOC = "small", "huge", "colored", "malloc"
STRIDE, PAGES = "stride", "pages"
WALKS = (STRIDE, PAGES)
# Shares of the cache.
SIZES = (0.25, 0.5, 0.625, 0.75, 0.8125, 0.875, 0.9375, 1.0, 1.125, 1.25, 1.5, 2.0)
# A sweep over a larger cache than this would be no small program any more.
_LARGEST = 64 << 20
_LOADS = 1 << 23
# So that each takes a fifth of a second or less with one process.
KERNELS = {
    "cg-like": ("W", 10),
    "ep-like": ("S", 128),
    "ft-like": ("S", 12),
    "mg-like": ("W", 4),
}
PROCESSES = (1, 2, 4, 8)
MHD_MEMORY = ("malloc", "aligned", "padded")
_MHD_GRID, _MHD_STEPS = 256, 10
ARRAYS = (2, 4, 8, 16, 32, 64)
THREADS = (1, 2)
STREAM_WORK = ("sum", "update")
_STREAM_REPEATS = 5_000
_STREAM_BYTES = 1 << 20
_WAY_BYTES = 128 << 10
ALIAS_VARIANTS = ("original", "rewritten")
ALIAS_MEMORY = ("malloc", "padded")
_ALIAS_REPEATS = 20_000

_SECONDS = Metric("seconds", "s", higher_is_better=False)


def outer_cache(found: Sequence[Cache] | None = None) -> Cache | None:
    """The outermost of this machine's caches in which pages have colors, and which is not hashed."""
    fitting = [
        cache
        for cache in (caches() if found is None else found)
        if cache.colors > 1
        and not cache.is_hashed
        and cache.way_bytes % PAGE_BYTES == 0
        and cache.bytes <= _LARGEST
    ]
    return fitting[-1] if fitting else None


def _glibc_alone(label: str) -> bool:
    return label == GLIBC


def _not_each_way(label: str) -> bool:
    return label not in WAYS_TO_PLACE


def _case(
    name: str,
    words: Sequence[object],
    metric: Metric,
    summary: str,
    under: Callable[[str], bool] | None = None,
    more_keys: tuple[str, ...] = (),
) -> Case:
    program, *rest = map(str, words)

    def prepare(folder: Path) -> Prepared:
        return Prepared((str(workloads.find(program)), *rest), folder)

    return Case(name, "workload", summary, prepare, metric=metric, more_keys=more_keys, runs_under=under)


def _scaled(amount: float, about: About) -> int:
    return max(1, round(amount * about.scale))


def has_colored() -> bool:
    """Whether the workload can map memory of chosen colors on this machine."""
    try:
        command = [str(workloads.find("array-sweep")), "--memory", COLORED, "--bytes", "65536"]
        done = subprocess.run(
            [*command, "--repeats", "1"],
            env=clean_environment(),
            capture_output=True,
            timeout=30,
            check=False,
        )
    except (CalmError, OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def sweeps(about: About, cache: Cache | None) -> Iterator[Case]:
    """Figure 3: the time of a load, by the array's size and by what it is had from."""
    metric = Metric("ns_per_load", "ns", higher_is_better=False)
    memories = [SMALL, HUGE, *([COLORED] if cache and has_colored() else []), MALLOC]
    for share in SIZES if cache else ():
        page = PAGE_BYTES
        size = int(share * (cache.bytes if cache else 0)) // page * page
        repeats = max(3, _scaled(_LOADS * 64 / size, about))
        for walk in WALKS:
            for memory in memories:
                words = ["array-sweep", "--bytes", size, "--memory", memory, "--walk", walk]
                yield _case(
                    f"array-sweep, {size >> 10} KiB, {memory}, {walk}",
                    [*words, "--stride", 64, "--repeats", repeats],
                    metric,
                    "passes over an array, again and again",
                    _not_each_way if memory == MALLOC else _glibc_alone,
                    ("huge_kib",),
                )


def kernels(about: About) -> Iterator[Case]:
    """Figures 4 to 7: kernels after the NAS benchmarks', and again with huge pages where they may be set."""
    for program, (size, iterations) in KERNELS.items():
        for processes in PROCESSES:
            words = [program, "--class", size, "--processes", processes]
            case = _case(
                f"{program}, {processes} process{'es' if processes > 1 else ''}",
                [*words, "--iterations", _scaled(iterations, about)],
                _SECONDS,
                "processes side by side, each on all of the problem",
                _not_each_way,
            )
            yield case
            if about.set_huge_pages:
                yield replace(case, name=f"{case.name}, huge pages always", family=ALWAYS_HUGE)


def magnetohydrodynamics(about: About) -> Iterator[Case]:
    """Figures 8 and 9: a solver with twelve arrays in use at once."""
    for memory in MHD_MEMORY:
        words = ["mhd-like", "--grid", _MHD_GRID, "--steps", _scaled(_MHD_STEPS, about), "--memory", memory]
        keys = ("distinct_starts",)
        yield _case(f"mhd-like, {memory}", words, _SECONDS, "a solver with twelve arrays", more_keys=keys)


def gaps(cache: Cache | None) -> tuple[int, ...]:
    """Between arrays' starts: a way of the outer cache; a page more; a line more."""
    way = cache.way_bytes if cache else _WAY_BYTES
    return (way, way + PAGE_BYTES, way + 64)


def streams(about: About, cache: Cache | None) -> Iterator[Case]:
    """Figure 10: many arrays at once, mapped with a gap and as the allocators give them."""
    metric = Metric("ns_per_element", "ns", higher_is_better=False)
    for work in STREAM_WORK:
        for threads in THREADS:
            for arrays in ARRAYS:
                words: list[object] = ["streams", "--work", work, "--threads", threads, "--arrays", arrays]
                words += ["--repeats", _scaled(_STREAM_REPEATS, about)]
                name = f"streams, {work}, {arrays} arrays, {threads} threads"
                summary = "the heads of many arrays at once"
                for gap in gaps(cache):
                    mapped = ["--memory", "mmap", "--huge", "on", "--bytes", gaps(cache)[0], "--gap", gap]
                    yield _case(
                        f"{name}, gap {gap}",
                        [*words, *mapped],
                        metric,
                        summary,
                        _glibc_alone,
                        ("huge_kib",),
                    )
                blocks = ["--memory", "malloc", "--bytes", _STREAM_BYTES]
                keys = ("distinct_starts",)
                yield _case(f"{name}, malloc", [*words, *blocks], metric, summary, _not_each_way, keys)


def alias(about: About) -> Iterator[Case]:
    """Table 1: what is written and read a multiple of 4 KiB apart."""
    metric = Metric("cycles_per_iteration", "", higher_is_better=False)
    for memory in ALIAS_MEMORY:
        for variant in ALIAS_VARIANTS:
            words = ["alias4k", "--work", "mesh", "--streams", 4, "--head", 2048, "--memory", memory]
            repeats = _scaled(_ALIAS_REPEATS, about)
            yield _case(
                f"alias4k, {memory}, {variant}",
                [*words, "--variant", variant, "--repeats", repeats],
                metric,
                "arrays that are each made from the other",
                more_keys=("distinct_starts",),
            )


def cases(about: About) -> list[Case]:
    cache = outer_cache()
    return [
        *sweeps(about, cache),
        *kernels(about),
        *magnetohydrodynamics(about),
        *streams(about, cache),
        *alias(about),
    ]


# ---- what a row was ----


@dataclass(frozen=True)
class Ran:
    """A row of results, with its program and its options."""

    row: Row
    program: str
    options: dict[str, str]

    @property
    def always_huge(self) -> bool:
        return self.row.family == ALWAYS_HUGE

    def number(self, option: str) -> int:
        return int(self.options[option])


@functools.cache
def _parsed(command: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Its program and its options; tables and pictures ask thousands of times."""
    program, *words = command
    options = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=False)}
    return program.rpartition("/")[2], options


def all_of(results: Results, program: str, **options: object) -> list[Ran]:
    """The rows of a program with these options, in the order in which they were listed."""
    wanted = {name: str(value) for name, value in options.items()}
    found = []
    for row in results.rows:
        if not row.command:
            continue
        name, given = _parsed(tuple(row.command))
        if name == program and wanted.items() <= given.items():
            found.append(Ran(row, name, given))
    return found


def one_of(results: Results, program: str, *, always_huge: bool = False, **options: object) -> Row | None:
    fitting = [each.row for each in all_of(results, program, **options) if each.always_huge == always_huge]
    return fitting[0] if fitting else None
