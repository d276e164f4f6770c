"""The case study of glibc's tunables on Arm: tables 1, 3, 4 and 5, all from the same interleaved runs.

The variable that the study prints as MALLOC_TRIM_THRESHOLD is MALLOC_TRIM_THRESHOLD_ to glibc: without the
underscore at its end it does nothing.
"""

from __future__ import annotations

from pathlib import Path

from calm.core import allocators
from calm.core.allocators import GLIBC
from research.bench import workloads
from research.bench.cases import Case, Prepared
from research.bench.results import Results, Row
from research.bench.tables import Grid, ratio_text
from research.papers import huge_pages, published
from research.papers.model import (
    About,
    Paper,
    count,
    middle,
    published_ratio,
    ratio,
    row_of,
    seconds,
)

MIB = 1024 * 1024
NEVER_TRIM = "glibc:MALLOC_TRIM_THRESHOLD_=-1"
THREADS = (1, 2)
NAMES = {1: "t-test1, 1 thread", 2: "t-test1, 2 threads"}


def padded(megabytes: int) -> str:
    return f"glibc:MALLOC_TOP_PAD_={megabytes * MIB}"


def total(scale: float) -> int:
    """n_total_max of a run at that scale."""
    return max(1, round(published.TTEST1_THREADS * scale))


def _case(threads: int, scale: float) -> Case:
    def prepare(folder: Path) -> Prepared:
        # i_max and size are the workload's defaults; bins follow from them and the threads.
        return Prepared((str(workloads.find("ttest1")), str(total(scale)), str(threads)), folder)

    return Case(NAMES[threads], "workload", "threads that fill, churn and free all they have", prepare)


def _cases(about: About) -> list[Case]:
    return [_case(threads, about.scale) for threads in THREADS]


def _full(figure: float | None, about: About) -> float | None:
    """What a run of the study's size would take: work is proportional to the threads that it runs."""
    return None if figure is None else figure * published.TTEST1_THREADS / total(about.scale)


def _table_1(results: Results, about: About) -> Grid:
    scaled = total(about.scale) != published.TTEST1_THREADS
    grid = Grid(
        "table 1: t-test1 with glibc's defaults",
        ["", "published", "measured", *([f"for {published.TTEST1_THREADS:,} threads"] if scaled else [])],
    )
    rows = {threads: row_of(results, NAMES[threads]) for threads in THREADS}
    for threads, then in published.TABLE_1.items():
        words = "1 thread" if threads == 1 else f"{threads} threads"
        figures: tuple[tuple[str, str, float, bool], ...] = (
            ("user, s", "user_s", then.user_s, True),
            ("system, s", "system_s", then.system_s, True),
            ("elapsed, s", "wall_s", then.elapsed_s, True),
            ("minor page faults", "minor_faults", then.minor_faults, False),
            ("maxresident, KiB", "peak_rss_kib", then.max_rss_kib, False),
        )
        for name, figure, known, in_seconds in figures:
            show = seconds if in_seconds else count
            now = middle(rows[threads], GLIBC, figure)
            cells = [show(known), show(now)]
            if scaled:
                # Memory does not add up: one thread's is free before the next one's is taken.
                cells.append(show(now if figure == "peak_rss_kib" else _full(now, about)))
            grid.rows.append([f"{words}: {name}", *cells])
    first, second = (published.TABLE_1[threads] for threads in THREADS)
    for name, figure, text in (
        ("elapsed, 2 threads to 1", "wall_s", published_ratio(second.elapsed_s, first.elapsed_s)),
        ("faults, 2 threads to 1", "minor_faults", published_ratio(second.minor_faults, first.minor_faults)),
    ):
        found = ratio((rows[2], GLIBC), (rows[1], GLIBC), figure)
        grid.closing.append([name, text, ratio_text(found), *([""] if scaled else [])])
    return grid


def _table_3(results: Results, about: About) -> Grid:
    del about
    grid = Grid(
        "table 3: no trimming (MALLOC_TRIM_THRESHOLD_=-1)",
        [
            *("", "published: default", "-1", "ratio"),
            *("measured: default", "-1", "ratio (95 %)"),
        ],
    )
    for name, figure in (("elapsed, s", "wall_s"), ("minor faults", "minor_faults")):
        for threads, then in published.TABLE_3.items():
            known = (
                (then.default_s, then.never_s)
                if figure == "wall_s"
                else (then.default_faults, then.never_faults)
            )
            show = seconds if figure == "wall_s" else count
            row = row_of(results, NAMES[threads])
            cells = [show(each) for each in known] + [published_ratio(known[1], known[0])]
            cells += [show(middle(row, label, figure)) for label in (GLIBC, NEVER_TRIM)]
            cells.append(ratio_text(ratio((row, NEVER_TRIM), (row, GLIBC), figure)))
            grid.rows.append([f"{'1 thread' if threads == 1 else f'{threads} threads'}: {name}", *cells])
    return grid


def _mode(results: Results) -> str:
    return str(results.machine.get("transparent_huge_pages", "unknown"))


def _not_as_asked(results: Results) -> list[str]:
    if (found := _mode(results)) == "always":
        return []
    return [
        f"not measured as published: huge pages are `{found}` on this machine, and the study had them "
        "without asking for any (`always`); --set-thp sets that while it runs, as root"
    ]


def _table_4(results: Results, about: About) -> Grid:
    del about
    row = row_of(results, NAMES[1])
    grid = Grid(
        f"table 4: top padding (MALLOC_TOP_PAD_), 1 thread, huge pages {_mode(results)}",
        [
            *("pad", "published: s", "RSS, KiB", "AnonHuge", "to none"),
            *("measured: s", "RSS, KiB", "AnonHuge", "to none (95 %)"),
        ],
        notes=_not_as_asked(results),
    )
    plain = published.TABLE_1[1]
    known = {GLIBC: ("none", published.Padding(plain.elapsed_s, plain.max_rss_kib, 0))}
    known |= {padded(size): (f"{size} MB", then) for size, then in published.TABLE_4.items()}
    for label, (name, then) in known.items():
        own = ["", ""]
        if label != GLIBC:
            own = [
                published_ratio(then.elapsed_s, plain.elapsed_s),
                ratio_text(ratio((row, label), (row, GLIBC), "wall_s")),
            ]
        cells = [seconds(then.elapsed_s), count(then.rss_kib), count(then.huge_kib), own[0]]
        cells += [*_measured(row, label), own[1]]
        grid.rows.append([name, *cells])
    grid.notes.append("the study's row without padding is from its tables 1 and 5")
    return grid


def _measured(row: Row | None, label: str) -> list[str]:
    figures = ("peak_rss_kib", huge_pages.PEAK)
    return [seconds(middle(row, label, "wall_s")), *(count(middle(row, label, each)) for each in figures)]


def _alternatives(results: Results) -> list[str]:
    """The study's allocators, present or not, then all others; glibc's settings have tables of their own."""
    others = [label for label in results.labels if not label.startswith("glibc:")]
    return list(dict.fromkeys([*published.TABLE_5, *others]))


def _shown(label: str) -> str:
    return "gperftools (the study's tcmalloc)" if label == "gperftools" else label


def _table_5_time(results: Results, about: About) -> Grid:
    del about
    grid = Grid(
        f"table 5: other allocators, elapsed time, huge pages {_mode(results)}",
        [
            *("", "published: 1 thread, s", "to glibc", "2 threads, s", "to glibc"),
            *("measured: 1 thread, s", "to glibc (95 %)", "2 threads, s", "to glibc (95 %)"),
        ],
        notes=_not_as_asked(results),
    )
    plain = published.TABLE_5[GLIBC]
    rows = [row_of(results, NAMES[threads]) for threads in THREADS]
    for label in _alternatives(results):
        cells = ["-"] * 4
        if then := published.TABLE_5.get(label):
            known = (
                (then.one_thread_s, plain.one_thread_s),
                (then.two_threads_s, plain.two_threads_s),
            )
            cells = [
                text for above, below in known for text in (seconds(above), published_ratio(above, below))
            ]
        for row in rows:
            cells.append(seconds(middle(row, label, "wall_s")))
            cells.append(ratio_text(ratio((row, label), (row, GLIBC), "wall_s")))
        if label == GLIBC:
            cells[1::2] = [""] * 4
        grid.rows.append([_shown(label), *cells])
    return grid


def _table_5_memory(results: Results, about: About) -> Grid:
    del about
    grid = Grid(
        f"table 5: other allocators, memory, 1 thread, huge pages {_mode(results)}",
        ["", "published: RSS, KiB", "AnonHuge", "measured: RSS, KiB", "AnonHuge"],
        notes=_not_as_asked(results),
    )
    row = row_of(results, NAMES[1])
    for label in _alternatives(results):
        then = published.TABLE_5.get(label)
        cells = [count(then.rss_kib), count(then.huge_kib)] if then else ["-", "-"]
        cells += [count(middle(row, label, each)) for each in ("peak_rss_kib", huge_pages.PEAK)]
        grid.rows.append([_shown(label), *cells])
    grid.notes.append(
        "measured: the peaks of a run; the study says neither when it looked, nor with how many threads"
    )
    return grid


_TABLES = (_table_1, _table_3, _table_4, _table_5_time, _table_5_memory)


def _grids(results: Results, about: About) -> list[Grid]:
    return [table(results, about) for table in _TABLES]


def _differences(results: Results, about: About) -> list[str]:
    lines = [
        f"published: {published.ORACLE.text}; {published.ORACLE.machine}",
        "t-test1 here is `workloads/ttest1`, written from the published description of its parameters: it "
        "does the same kind of work, not the very same, so compare ratios, not seconds or faults",
    ]
    if (threads := total(about.scale)) != published.TTEST1_THREADS:
        lines.append(
            f"scale {about.scale:g}: a run has {threads:,} threads one after the other, not "
            f"{published.TTEST1_THREADS:,}; faults that a process takes only once, which are all that is "
            "left with a trim threshold of -1, weigh so much more in a ratio"
        )
    lines.append(
        "the variable is MALLOC_TRIM_THRESHOLD_, with an underscore at its end; the study prints it without, "
        "and so written it does nothing"
    )
    if about.set_huge_pages:
        lines.append("huge pages were set to `always` for these runs, and put back")
    lines.append(f"AnonHugePages: {results.how.get(huge_pages.PEAK, 'not counted')}")
    if missing := [name for name in published.TABLE_5 if name not in results.labels]:
        hints = "; ".join(f"{name}: {allocators.KNOWN[name].hint}" for name in missing)
        lines.append(f"not on this machine: {hints}")
    return lines


PAPER = Paper(
    name="oracle",
    citation=published.ORACLE,
    allocators=(
        *(GLIBC, NEVER_TRIM),
        *(padded(size) for size in published.TABLE_4),
        *(name for name in published.TABLE_5 if name != GLIBC),
    ),
    extra=("calmalloc", "ptlbmalloc2"),
    cases=_cases,
    grids=_grids,
    differences=_differences,
    scales=True,
    samples_huge_pages=True,
)
