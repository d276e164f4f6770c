"""The paging paper's figures 2 to 10 and table 1 as tables, beside what its text says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calm.core import report
from calm.core.allocators import GLIBC
from calm.core.statistics import Ratio
from research.bench.results import METRIC, Results, Row
from research.bench.tables import Grid, ratio_text
from research.papers import published, valat_frames
from research.papers import valat_cases as cases
from research.papers.labels import plain
from research.papers.model import FRAMES, About, less_text, middle, pairs, ratio
from research.papers.valat_cases import all_of, one_of

# What may have kept figure 2 from having this machine's pages, in the results' `how`.
HOW_FRAMES = FRAMES
_SHARES = (0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5)
_GAIN = "gain: how much less time than glibc's with standard pages takes"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def labels_of(rows: Sequence[Row]) -> list[str]:
    """The allocators of these rows, in the order of the first row that has them."""
    return list(dict.fromkeys(side.label for row in rows for side in row.sides))


# ---- figure 2 ----


def frame_rows(results: Results) -> list[Row]:
    return [row for row in results.rows if row.family == FRAMES]


def _span(curves: valat_frames.Curves, source: str, share: float) -> str:
    place = valat_frames.shares_of(curves).index(share)
    low, mean, high = (curves[valat_frames.key(source, kind)][place] for kind in valat_frames.KINDS)
    text = f"{mean:,.0f}" if mean >= 10 or mean == int(mean) else f"{mean:.1f}"
    return text if low == high else f"{text} ({low:,.0f}-{high:,.0f})"


def _figure_2(results: Results) -> list[Grid]:
    found = []
    for row in frame_rows(results):
        cache = valat_frames.cache_of(row.curves)
        there = valat_frames.shares_of(row.curves)
        shares = sorted({min(there, key=lambda each: abs(each - share)) for share in _SHARES})
        title = (
            f"figure 2: unnecessary conflicts in pages, {row.name} "
            f"({report.memory(cache.bytes / 1024)}, {cache.ways} ways)"
        )
        grid = Grid(title, ["", *(f"{100 * share:.4g} %" for share in shares)])
        for source in valat_frames.SOURCES:
            if valat_frames.key(source, "mean") in row.curves:
                grid.rows.append([source, *(_span(row.curves, source, share) for share in shares)])
        grid.notes.append(f"published: {published.VALAT_FIGURE_2}")
        grid.notes.append("by the array's size as a share of the cache: mean (least to most of all runs)")
        grid.notes.append(results.how.get(HOW_FRAMES, ""))
        found.append(grid)
    return found


# ---- figure 3 ----


def sweep_columns(results: Results, walk: str) -> list[tuple[str, str]]:
    """The columns of figure 3: an array's memory and, of malloc's, the allocator."""
    found = all_of(results, "array-sweep", walk=walk)
    memories = list(dict.fromkeys(each.options["memory"] for each in found))
    columns = [(memory, GLIBC) for memory in memories if memory != cases.MALLOC]
    blocks = [each.row for each in found if each.options["memory"] == cases.MALLOC]
    return columns + [(cases.MALLOC, label) for label in labels_of(blocks)]


def sweep_sizes(results: Results, walk: str) -> list[int]:
    return sorted({each.number("bytes") for each in all_of(results, "array-sweep", walk=walk)})


def sweep_name(memory: str, label: str) -> str:
    return f"malloc, {plain(label)}" if memory == cases.MALLOC else f"{memory} pages"


def _figure_3(results: Results) -> list[Grid]:
    found = []
    for walk in cases.WALKS:
        columns = sweep_columns(results, walk)
        if not columns:
            continue
        how = {cases.STRIDE: "in order", cases.PAGES: "page after page in any order"}[walk]
        headings = ["", *(sweep_name(*column) for column in columns), "small to huge (95 %)"]
        grid = Grid(f"figure 3: a load of a repeated pass {how}, ns, by the array's size", headings)
        for size in sweep_sizes(results, walk):
            of_size = {
                memory: one_of(results, "array-sweep", walk=walk, bytes=size, memory=memory)
                for memory, _ in columns
            }
            line = [_number(middle(of_size[memory], label, METRIC)) for memory, label in columns]
            small, huge = of_size.get(cases.SMALL), of_size.get(cases.HUGE)
            line.append(ratio_text(ratio((small, GLIBC), (huge, GLIBC), METRIC)))
            # Sizes between whole MiB matter here.
            grid.rows.append([f"{size >> 10:,} KiB", *line])
        grid.notes.append(f"published: {published.VALAT_FIGURE_3}")
        cache = next((valat_frames.cache_of(row.curves) for row in frame_rows(results)[1:]), None)
        if cache:
            size_of = report.memory(cache.bytes / 1024)
            grid.notes.append(f"around this machine's L{cache.level}: {size_of}, {cache.ways} ways")
        found.append(grid)
    return found


# ---- figures 4 to 7 ----


def systems(results: Results) -> list[tuple[str, bool]]:
    """An allocator, with huge pages always or as the system has them: glibc's with standard pages first."""
    ran = [each for program in cases.KERNELS for each in all_of(results, program)]
    found = []
    for always_huge in (False, True):
        rows = [each.row for each in ran if each.always_huge == always_huge]
        found += [(label, always_huge) for label in labels_of(rows)]
    return found


def system_name(label: str, always_huge: bool) -> str:
    return f"{plain(label)}, huge pages always" if always_huge else plain(label)


def gain(results: Results, program: str, processes: int, label: str, always_huge: bool) -> Ratio:
    base = one_of(results, program, processes=processes)
    row = one_of(results, program, processes=processes, always_huge=always_huge)
    return ratio((row, label), (base, GLIBC), METRIC)


def _mean_gain(results: Results, processes: int, label: str, always_huge: bool) -> Ratio:
    found = []
    for program in cases.KERNELS:
        base = one_of(results, program, processes=processes)
        row = one_of(results, program, processes=processes, always_huge=always_huge)
        above, below = pairs((row, label), (base, GLIBC), METRIC)
        if above:
            found.append((above, below))
    name = f"{METRIC}: {system_name(label, always_huge)} to {GLIBC}, processes: {processes}"
    return results.mean(name, found)


def _others(results: Results) -> list[tuple[str, bool]]:
    return [each for each in systems(results) if each != (GLIBC, False)]


def _figure_4_or_5(results: Results, number: int, processes: int, words: str) -> Grid:
    columns = _others(results)
    plural = "es" if processes > 1 else ""
    grid = Grid(
        f"figure {number}: gain to glibc with standard pages, {processes} process{plural} (95 %)",
        ["", "glibc, s", *(system_name(*column) for column in columns)],
    )
    for program in cases.KERNELS:
        base = one_of(results, program, processes=processes)
        if base is None:
            continue
        cells = [less_text(gain(results, program, processes, *column)) for column in columns]
        grid.rows.append([program, _number(middle(base, GLIBC, METRIC)), *cells])
    means = [less_text(_mean_gain(results, processes, *column)) for column in columns]
    grid.closing.append(["geometric mean", "", *means])
    grid.notes += [f"published: {words}", _GAIN]
    return grid


def gains(results: Results, processes: int, label: str, always_huge: bool) -> list[float]:
    found = [gain(results, program, processes, label, always_huge) for program in cases.KERNELS]
    return [100 * (1 - each.value) for each in found if each.value is not None]


def numbers_of_processes(results: Results) -> list[int]:
    ran = [each for program in cases.KERNELS for each in all_of(results, program)]
    return sorted({each.number("processes") for each in ran})


def _figures_6_7(results: Results) -> Grid:
    numbers = numbers_of_processes(results)
    grid = Grid(
        "figures 6 and 7: least and largest gain of all programs, by processes",
        ["", *(f"{processes}: least, largest" for processes in numbers)],
    )
    for column in _others(results):
        cells = []
        for processes in numbers:
            found = gains(results, processes, *column)
            cells.append(f"{min(found):+.1f} %, {max(found):+.1f} %" if found else "-")
        grid.rows.append([system_name(*column), *cells])
    grid.notes += [f"published: {published.VALAT_FIGURES_6_7}", _GAIN]
    return grid


# ---- figures 8 to 10, and table 1 ----


def _figures_8_9(results: Results) -> Grid:
    ran = all_of(results, "mhd-like")
    labels = labels_of([each.row for each in ran])
    grid = Grid(
        "figures 8 and 9: a solver with twelve arrays, seconds, and to its arrays padded by hand (95 %)",
        ["", *cases.MHD_MEMORY, *(f"{memory} to padded" for memory in cases.MHD_MEMORY[:-1])],
    )
    rows = [one_of(results, "mhd-like", memory=memory) for memory in cases.MHD_MEMORY]
    for label in labels:
        cells = [_number(middle(row, label, METRIC)) for row in rows]
        cells += [ratio_text(ratio((row, label), (rows[-1], label), METRIC)) for row in rows[:-1]]
        grid.rows.append([plain(label), *cells])
    grid.notes.append(f"published: {published.VALAT_FIGURES_8_9}")
    return grid


def gap_name(gap: int, least: int) -> str:
    """A gap as a heading, by what it is more than the least."""
    more = gap - least
    return f"gap {report.memory(least / 1024)}" + (f" + {more:,} B" if more else "")


def stream_gaps(results: Results) -> list[int]:
    return sorted({each.number("gap") for each in all_of(results, "streams", memory="mmap")})


def stream_labels(results: Results) -> list[str]:
    return labels_of([each.row for each in all_of(results, "streams", memory="malloc")])


def _figure_10(results: Results) -> list[Grid]:
    found = []
    between, labels = stream_gaps(results), stream_labels(results)
    for work in cases.STREAM_WORK:
        for threads in cases.THREADS:
            ran = all_of(results, "streams", work=work, threads=threads)
            if not ran:
                continue
            headings = ["arrays", *(gap_name(gap, between[0]) for gap in between)]
            headings += [f"malloc, {plain(label)}" for label in labels]
            headings.append("calmalloc to no placement (95 %)")
            plural = "s" if threads > 1 else ""
            title = f"figure 10: {work}, {threads} thread{plural}, ns for an element, by the number of arrays"
            grid = Grid(title, headings)
            for arrays in sorted({each.number("arrays") for each in ran}):
                wanted: dict[str, Any] = {"work": work, "threads": threads, "arrays": arrays}
                mapped = [one_of(results, "streams", memory="mmap", gap=gap, **wanted) for gap in between]
                blocks = one_of(results, "streams", memory="malloc", **wanted)
                cells = [_number(middle(row, GLIBC, METRIC)) for row in mapped]
                cells += [_number(middle(blocks, label, METRIC)) for label in labels]
                both = (blocks, cases.CALMALLOC), (blocks, cases.UNPLACED)
                grid.rows.append([str(arrays), *cells, ratio_text(ratio(*both, METRIC))])
            grid.notes.append(f"published: {published.VALAT_FIGURE_10}")
            found.append(grid)
    return found


def _table_1(results: Results) -> Grid:
    grid = Grid(
        "table 1: cycles for an iteration, of a loop that reads and writes a multiple of 4 KiB apart",
        ["", "original", "rewritten", "original to rewritten (95 %)", "original to padded by hand (95 %)"],
    )
    for is_padded, row in published.VALAT_1.items():
        name = "published, Core 2 Duo: " + ("padded arrays" if is_padded else "default allocation")
        to_rewritten = _number(row.original / row.optimized)
        to_padded = "" if is_padded else _number(row.original / published.VALAT_1[True].original)
        grid.rows.append([name, str(row.original), str(row.optimized), to_rewritten, to_padded])
    by_hand = one_of(results, "alias4k", memory="padded", variant="original")
    for memory in cases.ALIAS_MEMORY:
        original, rewritten = (
            one_of(results, "alias4k", memory=memory, variant=variant) for variant in cases.ALIAS_VARIANTS
        )
        for label in labels_of([row for row in (original, rewritten) if row]):
            cells = [_number(middle(row, label, METRIC)) for row in (original, rewritten)]
            cells.append(ratio_text(ratio((original, label), (rewritten, label), METRIC)))
            is_padded = memory == "padded"
            to_padded = ratio_text(ratio((original, label), (by_hand, label), METRIC))
            name = f"{plain(label)}: {'padded by hand' if is_padded else 'malloc'}"
            grid.rows.append([name, *cells, "" if is_padded else to_padded])
    grid.notes.append("cycles: of the CPU's time stamp counter, which goes on at its own, steady rate")
    return grid


def grids(results: Results, about: About) -> list[Grid]:
    del about
    found = [*_figure_2(results), *_figure_3(results)]
    if systems(results):
        found.append(_figure_4_or_5(results, 4, 1, published.VALAT_FIGURE_4))
        found.append(_figure_4_or_5(results, 5, 8, published.VALAT_FIGURES_6_7))
        found.append(_figures_6_7(results))
    if all_of(results, "mhd-like"):
        found.append(_figures_8_9(results))
    found += _figure_10(results)
    if all_of(results, "alias4k"):
        found.append(_table_1(results))
    for grid in found:
        grid.notes = [note for note in grid.notes if note]
    return found


def differences(results: Results, about: About) -> list[str]:
    """The differences from the paper."""
    lines = [
        f"published: {published.VALAT.text}; {published.VALAT.machine}",
        "the paper's figures are drawings, so beside them stands what its text says; table 1 has numbers",
        "the paper compares operating systems. Here Linux is the only one, and allocators and ways to place "
        "blocks are compared; FreeBSD's and OpenSolaris's choices of pages are among the policies simulated "
        "for figure 2",
        "the programs are this project's own: cg-like, ep-like, ft-like and mg-like work after the NAS "
        "benchmarks' published descriptions, each process on all of the problem, and mhd-like for EulerMHD",
    ]
    if about.set_huge_pages:
        lines.append("huge pages were set to `always` for the runs that say so, and put back")
    else:
        lines.append("not run: huge pages always: --set-thp sets them meanwhile, as root")
    if about.scale != 1:
        lines.append(f"scale {about.scale:g}: as much of the work of each run")
    swept = {each.options["memory"] for each in all_of(results, "array-sweep")}
    if swept and cases.COLORED not in swept:
        lines.append("figure 3 has no memory of chosen colors: there is none on this machine, or not for all")
    if not swept:
        lines.append("not run: figure 3: no cache is known here whose sets follow addresses")
    for reason in dict.fromkeys(results.left_out.values()):
        names = [name for name, why in results.left_out.items() if why == reason]
        more = f", and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"not run: {names[0]}{more}: {reason}")
    return lines
