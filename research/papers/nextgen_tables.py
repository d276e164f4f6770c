"""The NextGen-Malloc paper's tables, published and measured: results in, grids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calm.core import allocators
from calm.core.allocators import GLIBC
from research.bench.results import CPU_TIME, METRIC, Results, Row
from research.bench.tables import Grid, ratio_text
from research.papers import nextgen_cases as cases
from research.papers import nextgen_trace, published
from research.papers.model import (
    COUNTED,
    TRACED,
    About,
    count,
    less_text,
    middle,
    ratio,
    row_of,
    seconds,
)
from research.papers.published import Events, Rates

# Its name in results of when it was an option of calmalloc's.
_EARLIER = "calmalloc-offload"
_BASE = published.NEXTGEN_3_BASE


def _misses_row(results: Results, name: str, traced_name: str) -> Row | None:
    """Counted by the processor, if it could; or else traced."""
    return row_of(results, cases.counted(name)) or row_of(results, cases.traced(traced_name))


def _is_counted(row: Row | None) -> bool:
    return row is not None and row.family == COUNTED


def _per_1000(row: Row | None, label: str, *names: str, own: str = "") -> float | None:
    """The sum of some figures for each 1,000 instructions of the program's; own: the allocator's thread's."""
    instructions = middle(row, label, "instructions")
    found = [middle(row, label, own + name) for name in names]
    known = [each for each in found if each is not None]
    if not instructions or len(known) < len(names):
        return None
    return 1000 * sum(known) / instructions


def rate(value: float | None) -> str:
    """Misses for each 1,000 instructions: three figures that count, and of what is very rare, that it is."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if value < 0.0005:
        return "< 0.0005"
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def _published_rate(events: Events | None, name: str) -> str:
    value: float | None = getattr(events, name) if events else None
    return "-" if events is None or value is None else rate(1000 * value / events.instructions)


def _others(labels: Sequence[str], known: Mapping[str, object]) -> list[str]:
    """Those of the paper, here or not, and then all that took part."""
    return list(dict.fromkeys([*known, *labels]))


def _to(row: Row | None, label: str, base: str, figure: str) -> str:
    return "" if label == base else ratio_text(ratio((row, label), (row, base), figure))


def _table_1_times(results: Results, about: About) -> Grid:
    row = row_of(results, cases.timed_xalan(about))
    events_row = row_of(results, cases.counted(cases.timed_xalan(about)))
    grid = Grid(
        "table 1 and figure 1: xalan, time",
        [
            *("", "published: cycles", "to glibc", "measured: elapsed, s", "to glibc (95 %)"),
            *("CPU time, s", "to glibc (95 %)", "cycles", "minor page faults", "peak RSS, KiB"),
        ],
    )
    plain = published.NEXTGEN_1[GLIBC]
    for label in _others(results.labels, published.NEXTGEN_1):
        events = published.NEXTGEN_1.get(label)
        cells = ["-", "-"]
        if events:
            cells = [f"{events.cycles:.4g}", "" if label == GLIBC else f"{events.cycles / plain.cycles:.2f}"]
        cells += [seconds(middle(row, label, "wall_s")), _to(row, label, GLIBC, "wall_s")]
        cells += [seconds(middle(row, label, CPU_TIME)), _to(row, label, GLIBC, CPU_TIME)]
        cycles = middle(events_row, label, "cycles")
        cells.append("-" if cycles is None else f"{cycles:.4g}")
        cells += [count(middle(row, label, name)) for name in ("minor_faults", "peak_rss_kib")]
        grid.rows.append([label, *cells])
    times = [time for label in published.NEXTGEN_1 if (time := middle(row, label, "wall_s"))]
    spread = f"{max(times) / min(times):.2f}" if len(times) > 1 else "-"
    words = "slowest to fastest of the paper's"
    grid.closing.append([words, "", f"{published.NEXTGEN_SPEEDUP:.2f}", "", spread, *[""] * 5])
    grid.notes.append(
        "published, slowest to fastest: by execution time (figure 1); by cycles it is "
        f"{plain.cycles / min(each.cycles for each in published.NEXTGEN_1.values()):.2f}"
    )
    grid.notes += _no_cycles(results) + _polling(results, events_row)
    return grid


_EVENTS = (
    ("llc_load_misses", "LLC loads"),
    ("llc_store_misses", "LLC stores"),
    ("dtlb_load_misses", "dTLB loads"),
    ("dtlb_store_misses", "dTLB stores"),
)


def _table_1_misses(results: Results, about: About) -> Grid:
    row = _misses_row(results, cases.timed_xalan(about), cases.traced_xalan(about))
    grid = Grid("table 1: xalan, misses for each 1,000 instructions", [""])
    for _, words in _EVENTS:
        grid.headings += [f"published: {words}", "measured"]
    # What Intel's processors count as misses of the dTLB; Arm's count those of its first level.
    grid.headings.append("dTLB loads, 2nd level")
    grid.headings.append("instructions to glibc: published")
    grid.headings.append("measured")
    plain = published.NEXTGEN_1[GLIBC]
    for label in _others(results.labels, published.NEXTGEN_1):
        events = published.NEXTGEN_1.get(label)
        cells = []
        for name, _ in _EVENTS:
            cells += [_published_rate(events, name), rate(_per_1000(row, label, name))]
        cells.append(rate(_per_1000(row, label, "dtlb_load_walks")))
        then = f"{events.instructions / plain.instructions:.3f}" if events else "-"
        mine, theirs = (middle(row, each, "instructions") for each in (label, GLIBC))
        now = f"{mine / theirs:.3f}" if mine and theirs else "-"
        grid.rows.append([label, *cells, *(["", ""] if label == GLIBC else [then, now])])
    grid.notes += _whence(results, row)
    return grid


def _no_cycles(results: Results) -> list[str]:
    how = results.how.get(COUNTED, "not counted")
    return [f"CPU time, user and system, stands for cycles: {how}"] if how.startswith("not ") else []


def _offloading(results: Results) -> list[str]:
    """Those that took part with a server thread of their own."""
    labels = (each.label for each in results.allocators)
    return [label for label in labels if label.partition(":")[0] in (nextgen_trace.OFFLOADED, _EARLIER)]


def _polling(results: Results, row: Row | None) -> list[str]:
    """How a server that polls inflates a counter of the whole process."""
    labels = [label for label in _offloading(results) if middle(row, label, "instructions") is not None]
    if not _is_counted(row) or not labels:
        return []
    return [
        f"the processor counts the allocator's thread of {' and '.join(labels)} with the program's: while it "
        "looks for news it runs instructions that hardly miss, so cycles and instructions are more, and "
        "misses for each 1,000 instructions fewer, than the program's own"
    ]


def _whence(results: Results, row: Row | None) -> list[str]:
    if row is None:
        return [f"no misses: {results.how.get(TRACED, 'not traced')}"]
    if _is_counted(row):
        return [f"misses: {results.how.get(COUNTED, '')}", *_polling(results, row)]
    return [f"misses: {results.how.get(TRACED, '')}: {row.name.removesuffix(': traced')}"]


_PRIVATE = ("l2_load_misses", "l2_store_misses")
_LOST = ("coherence_load_misses", "coherence_store_misses")


def _xmalloc_cells(row: Row | None, label: str, first: Row | None) -> list[str]:
    """What is measured with some number of threads, and how a CPU's own caches do beside those with one."""
    groups = (("llc_load_misses",), ("llc_store_misses",), _PRIVATE, _LOST, ("upgrades",))
    cells = [rate(_per_1000(row, label, *names)) for names in groups]
    now, before = (_per_1000(each, label, *_PRIVATE, "upgrades") for each in (row, first))
    if row is not None and row is first:
        return [*cells, ""]
    return [*cells, f"{now / before:.2f}" if now is not None and before else "-"]


def _table_2(results: Results, about: About) -> Grid:
    del about
    headings = ["", "published: LLC loads", "LLC stores", "measured: LLC loads", "LLC stores", "own caches"]
    headings += ["of which lost to others", "taken from others", "to 1 thread", "frees, million/s"]
    grid = Grid("table 2: xmalloc, misses by the number of threads, for each 1,000 instructions", headings)
    first = _xmalloc_misses(results, cases.THREADS[0])
    for label in _others(results.labels, {published.NEXTGEN_2_ALLOCATOR: None}):
        for threads in cases.THREADS:
            events = published.NEXTGEN_2[threads] if label == published.NEXTGEN_2_ALLOCATOR else None
            cells = [_published_rate(events, each) for each in ("llc_load_misses", "llc_store_misses")]
            cells += _xmalloc_cells(_xmalloc_misses(results, threads), label, first)
            frees = middle(row_of(results, cases.xmalloc_name(threads)), label, METRIC)
            cells.append("-" if frees is None else f"{frees / 1e6:.1f}")
            grid.rows.append([f"{label}, {threads}", *cells])
    grid.notes.append("frees: by this machine's CPUs, however many threads there are")
    if not _is_counted(first):
        grid.notes.append(
            "misses: with a CPU for each thread. Own caches: of the private L1 and L2 together; lost to "
            "others: of those, lines that another CPU's store had taken away; taken from others: stores that "
            "had their line, but shared. To 1 thread: own caches and taken from others"
        )
    grid.notes += _whence(results, first)
    return grid


def _xmalloc_misses(results: Results, threads: int) -> Row | None:
    return _misses_row(results, cases.xmalloc_name(threads), cases.xmalloc_name(threads))


def _less(above: float | None, below: float | None) -> str:
    return f"{100 * (1 - above / below):+.1f} %" if above is not None and below else "-"


def _table_3(results: Results, about: About) -> Grid:
    row = row_of(results, cases.timed_xalan(about))
    misses = _misses_row(results, cases.timed_xalan(about), cases.traced_xalan(about))
    offloaded = _EARLIER if _EARLIER in results.labels else nextgen_trace.OFFLOADED
    mine = [label for label in results.labels if label.startswith("calmalloc") and label != offloaded]
    mine.append(offloaded)
    headings = ["", f"published: {_BASE}", "NextGen-Malloc", "less", f"measured: {_BASE}"]
    for label in mine:
        headings += [label, "less (95 %)"]
    grid = Grid(f"table 3: xalan, {_BASE} and NextGen-Malloc", headings)
    then, new = published.NEXTGEN_3[_BASE], published.NEXTGEN_3["nextgen"]
    cells = [f"{then.wall_s:.0f}", f"{new.wall_s:.0f}", f"{published.NEXTGEN_3_IMPROVEMENT.wall_s:+.1f} %"]
    cells.append(seconds(middle(row, _BASE, "wall_s")))
    for label in mine:
        cells += [
            seconds(middle(row, label, "wall_s")),
            less_text(ratio((row, label), (row, _BASE), "wall_s")),
        ]
    grid.rows.append(["execution time, s", *cells])
    further = (
        ("dTLB-load-MPKI", ("dtlb_load_misses",)),
        ("LLC-load-MPKI", ("llc_load_misses",)),
        ("LLC-store-MPKI", ("llc_store_misses",)),
        ("own caches' MPKI", (*_PRIVATE, "upgrades")),
    )
    for words, names in further:
        cells = [_rates_cell(then, names), _rates_cell(new, names)]
        known = _rates_value(published.NEXTGEN_3_IMPROVEMENT, names)
        cells.append("-" if known is None else f"{known:+.1f} %")
        base = _per_1000(misses, _BASE, *names)
        cells.append(rate(base))
        for label in mine:
            value = _per_1000(misses, label, *names)
            cells += [rate(value), _less(value, base)]
        grid.rows.append([words, *cells])
    if not _is_counted(misses):
        cells = ["-"] * 4
        for label in mine:
            own = _per_1000(misses, label, *_PRIVATE, "upgrades", own=nextgen_trace.OWN)
            cells += [rate(own), ""]
        grid.rows.append(["own caches of the allocator's thread", *cells])
        grid.notes.append(
            "MPKI: misses for each 1,000 instructions of the program's threads; those of the allocator's "
            "own thread, which has its CPU to itself, are in the last line only, for as many of the "
            "program's. Own caches: L1 and L2 together, and lines that a store had to take from others. "
            "What a thread loads while it only waits for news counts nowhere"
        )
    grid.notes += _whence(results, misses)
    if offloaded not in results.labels:
        grid.notes.append(f"{nextgen_trace.OFFLOADED} took no part: {_no_offload()}")
    return grid


def _no_offload() -> str:
    if nextgen_trace.OFFLOADED not in allocators.KNOWN:
        return "this calm does not know it"
    return allocators.KNOWN[nextgen_trace.OFFLOADED].hint or "it is not on this machine"


def _rates_value(rates: Rates, names: Sequence[str]) -> float | None:
    return getattr(rates, names[0]) if len(names) == 1 else None


def _rates_cell(rates: Rates, names: Sequence[str]) -> str:
    return rate(_rates_value(rates, names))


def _figure_2(results: Results, about: About) -> Grid:
    grid = Grid(
        "figure 2: layouts of metadata, misses for each 1,000 instructions of the program",
        [
            *("", "L1", "own caches", "of which messages", "LLC", "dTLB", "dTLB, 2nd level"),
            "own caches of the allocator's CPU",
        ],
    )
    for case in cases.layout_runs(about):
        row = row_of(results, cases.laid_out(case.name))
        for layout in nextgen_trace.LAYOUTS if row else ():
            users = f"{layout}: users "
            own = [f"{layout}: server {name}" for name in ("l2_misses", "upgrades")]
            cells = [_per_1000(row, GLIBC, users + "l1_misses")]
            cells.append(_per_1000(row, GLIBC, users + "l2_misses", users + "upgrades"))
            cells.append(_per_1000(row, GLIBC, f"{layout}: message_misses"))
            cells += [_per_1000(row, GLIBC, users + name) for name in ("llc_misses", "tlb_misses", "walks")]
            texts = [rate(each) for each in cells]
            offloaded = layout.endswith("offloaded")
            texts.append(rate(_per_1000(row, GLIBC, *own)) if offloaded else "")
            grid.rows.append([f"{case.name}: {layout}", *texts])
    if not grid.rows:
        grid.notes.append(results.how.get(TRACED, "not traced"))
        return grid
    grid.notes.append(
        "aggregated: the list of free blocks is in their first 8 bytes; segregated: indices of 16 bits "
        "elsewhere. Inline: on the CPU of the thread that calls; offloaded: on a CPU of its own, told by "
        "messages"
    )
    grid.notes.append(
        "one recording each of what a program loads and stores, and of its calls; the allocators are "
        "simulated, and give the same blocks in all four, so all that differs is what they touch, and on "
        "which CPU"
    )
    grid.notes.append("own caches: L1 and L2 together, and lines that a store had to take from others")
    grid.notes.append(
        "published, in words (section 3.1.2): no layout is best always; segregated suits offloading better"
    )
    return grid


def grids(results: Results, about: About) -> list[Grid]:
    tables = (_table_1_times, _table_1_misses, _table_2, _table_3, _figure_2)
    return [table(results, about) for table in tables]


def differences(results: Results, about: About) -> list[str]:
    """The differences from the paper, and what the model leaves out."""
    lines = [
        f"published: {published.NEXTGEN.text}; {published.NEXTGEN.machine}",
        "xalan here is Debian's, of the library that SPEC's xalancbmk was made from, with a document and a "
        "stylesheet of our own; xmalloc-test is `workloads/xmalloc-test`, with as many consumers as "
        "producers, which are what the threads are counted by",
    ]
    row = row_of(results, cases.laid_out(cases.recorded_xalan(about)))
    instructions = published.NEXTGEN_1[_BASE].instructions
    known = 1000 * (published.NEXTGEN_MALLOCS + published.NEXTGEN_FREES) / instructions
    calls = _per_1000(row, GLIBC, "mallocs", "frees")
    lines.append(
        f"calls of malloc and free for each 1,000 instructions: published {known:.2f}, xalan here "
        f"{rate(calls)}"
    )
    if about.scale != 1:
        lines.append(
            f"scale {about.scale:g}: documents, traces and durations are that share of our own, durations "
            f"{cases.FEWEST_SECONDS:g} s at least"
        )
    if any(each.family == TRACED for each in results.rows):
        lines += _of_the_model(results)
    if about.threads < 2 * max(cases.THREADS):
        lines.append(
            f"times: on {about.threads} CPUs; with more threads than these, and with an allocator's thread "
            "beside them, they wait for one another"
        )
    lines += [f"not run: {name}: {reason}" for name, reason in results.left_out.items()]
    return lines


def _of_the_model(results: Results) -> list[str]:
    sizes, lost = "", []
    for each in results.rows:
        for side in each.sides if each.family == TRACED else ():
            sizes = sizes or _sizes(each, side.label)
            if turns := each.median(side.label, "turns_lost"):
                lost.append(f"{turns:,.0f} in {each.name.removesuffix(': traced')} under {side.label}")
    return [
        f"the model: {sizes}; lines of 64 bytes, pages of 4 KiB, no prefetcher, data only, no kernel; a "
        "line that one CPU writes leaves the others' caches. Real processors have more of all, so compare "
        "allocators, not machines",
        "under QEMU there are no restartable sequences: calmalloc then takes a lock for each CPU's cache, "
        "as on old kernels, and tcmalloc has a cache for each thread, so both run more instructions than "
        "natively",
        "threads are traced in turns of 200 instructions, so that each seems to have a CPU; xmalloc-test's "
        "counts begin when the caches are warm, and end after so many instructions, not seconds",
        *(
            [
                "turns that a thread lost, as it was stopped for longer than the others waited; two then ran "
                f"at once: {'; '.join(lost)}"
            ]
            if lost
            else []
        ),
    ]


def _sizes(row: Row, label: str) -> str:
    sizes = {name: row.median(label, f"{name}_bytes") for name in ("l1", "l2", "llc", "tlb", "stlb")}
    if sizes["l1"] is None:
        return ""
    kib = {name: f"{(size or 0) / 1024:,.0f} KiB" for name, size in sizes.items()}
    pages = {name: f"{(size or 0) / 4096:,.0f}" for name, size in sizes.items()}
    return (
        f"for each CPU an L1 of {kib['l1']}, an L2 of {kib['l2']} and a TLB of {pages['tlb']} pages, "
        f"{pages['stlb']} in its second level; {kib['llc']} of LLC for all"
    )
