"""The tables and sentences of a report, for a terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from rich.table import Table

from calm.core import messages, report
from calm.core.allocators import dated
from calm.core.measure import METRIC
from calm.core.options import Output
from calm.core.statistics import CONFIDENCE, RESAMPLES, Ratio
from research.bench import load, pairs, published
from research.bench.analysis import (
    AVERAGE,
    PARETO_MARGIN,
    PEAK,
    TIME,
    Analysis,
    Mean,
    Measure,
    Ranking,
)
from research.bench.results import RESIDENT, Results, Row, known

# As many wide columns as fit on a line.
_SIDE_BY_SIDE = (TIME, PEAK)


@dataclass
class Grid:
    """A table before it is laid out: the first column is text, the others are figures."""

    title: str
    headings: list[str]
    rows: list[list[str]] = field(default_factory=list)
    closing: list[list[str]] = field(default_factory=list)
    """Rows about all the others, below a line."""
    notes: list[str] = field(default_factory=list)
    words: tuple[int, ...] = ()
    """Further columns that are text."""


def amount(value: float, unit: str) -> str:
    if unit == "s":
        return report.duration(value)
    if unit == "KiB":
        return report.memory(value)
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


def times(ratio: float) -> str:
    """1.04, 12.3 or 160: three digits."""
    if ratio >= 100:
        return f"{ratio:,.0f}"
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def ratio_text(ratio: Ratio) -> str:
    """A ratio with its interval: two digits near one, and more where it is small, as 0.00039."""

    def text(value: float) -> str:
        small = 0 < value < 0.1
        return f"{value:.{1 - math.floor(math.log10(value))}f}" if small else times(value)

    if ratio.value is None:
        return "-"
    if ratio.low is None and ratio.high is None:
        return text(ratio.value)
    low, high = ("∞" if end is None else text(end) for end in (ratio.low, ratio.high))
    return f"{text(ratio.value)} ({low} to {high})"


def _cells(row: Row, labels: Sequence[str], texts: Mapping[str, str]) -> list[str]:
    """A cell for each allocator: its text, or that it failed."""
    failed = {side.label: "failed" for side in row.sides if side.failure}
    return [failed.get(label) or texts.get(label, "-") for label in labels]


def _best(ranking: Ranking) -> str:
    row, best = ranking.row, ranking.best(list(ranking.ratios))
    unit = "KiB" if ranking.what is not TIME else row.metric.unit if row.metric else "s"
    median = row.median(best, ranking.what.figure(row)) if best else None
    return "-" if median is None else amount(median, unit)


def _to_best(mean: Mean, labels: Sequence[str]) -> Iterator[str]:
    for ratio in (mean.to_best[label] for label in labels):
        # Over fewer rows than the others', it cannot be compared with them as it stands.
        fewer = "*" if ratio.n < len(mean.rows) else ""
        yield times(ratio.value) + fewer if ratio.value is not None else "-"


def _fewer_rows(means: Sequence[Mean]) -> list[str]:
    if any(ratio.n < len(mean.rows) for mean in means for ratio in mean.to_best.values()):
        return ["* over fewer rows: it failed in the others, or has no figure there"]
    return []


def ratio_grid(analysis: Analysis, what: Measure) -> Grid:
    """One measure: each row's best, and how far the others are from it."""
    labels, subject = analysis.results.labels, analysis.subject
    grid = Grid(f"{what.title}: each to the best of its row", ["", "best", *labels])
    for ranking in analysis.ranking(what, sensitive=True):
        costs = {label: times(ranking.cost(label)) for label in ranking.ratios}
        grid.rows.append([ranking.row.name, _best(ranking), *_cells(ranking.row, labels, costs)])
    means = [mean for mean in analysis.means if mean.what is what]
    grid.notes += _fewer_rows(means)
    for mean in means:
        where = "" if mean.scope == "all" else f" {mean.scope}"
        name = where.strip() or "geometric mean"
        values = {label: ratio.value for label, ratio in mean.subject_to.items()}
        others = {label: "-" if value is None else times(value) for label, value in values.items()}
        grid.closing.append([name, f"{len(mean.rows)} rows", *_to_best(mean, labels)])
        grid.closing.append([f"  {subject} to it", "", *(others.get(label, "") for label in labels)])
        if analysis.peers and mean.subject_to_best_peer.value is not None:
            grid.notes.append(
                f"{subject} to the best of all peers in every row{where} (a bound: no one peer is "
                f"that good): {ratio_text(mean.subject_to_best_peer)}"
            )
    return grid


def insensitive_grid(analysis: Analysis, what: Measure) -> Grid:
    grid = Grid(
        f"{what.title}: rows without a difference, left out of the means",
        ["", "best", "medians span", "by chance up to"],
    )
    for ranking in analysis.ranking(what, sensitive=False):
        if (span := ranking.span) and span.by_chance is not None:
            shares = f"{span.medians - 1:.2%}", f"{span.by_chance - 1:.2%}"
            grid.rows.append([ranking.row.name, _best(ranking), *shares])
    return grid


def _sums(analysis: Analysis, mark: str = "") -> list[str]:
    """Each allocator's shootdowns over all rows; marked if it failed in some."""
    most = max((rows for _, rows in analysis.shootdowns.values()), default=0)
    found = [analysis.shootdowns.get(label) for label in analysis.results.labels]
    return [f"{each[0]:,.0f}" + (mark if each[1] < most else "") if each else "-" for each in found]


def _medians_grid(title: str, results: Results, figure: str, text: Callable[[float], str]) -> Grid:
    labels = results.labels
    grid = Grid(title, ["", *labels])
    for row in results.rows:
        medians = ((label, row.median(label, figure)) for label in labels)
        if texts := {label: text(median) for label, median in medians if median is not None}:
            grid.rows.append([row.name, *_cells(row, labels, texts)])
    return grid


def _latency_grid(analysis: Analysis, title: str, figure: str) -> Grid:
    """Of servers whose load generator reports latencies."""
    return _medians_grid(f"{title} latency of requests (medians)", analysis.results, figure, report.duration)


def shootdown_grid(analysis: Analysis) -> Grid:
    results, key = analysis.results, analysis.shootdown_key
    grid = _medians_grid(f"{METRIC[key].label} (medians)", results, key, "{:,.0f}".format)
    grid.headings.insert(1, "threads")
    rows = {row.name: row for row in results.rows}
    for cells in grid.rows:
        started = known([rows[cells[0]].median(label, "threads_started") for label in results.labels])
        ends = dict.fromkeys(f"{end(started):,.0f}" for end in (min, max) if started)
        cells.insert(1, " to ".join(ends) or "-")
    grid.closing.append(["sum", "", *_sums(analysis, "*")])
    if any(cell.endswith("*") for cell in grid.closing[0]):
        grid.notes.append("* over fewer rows: it failed in the others")
    grid.notes.append(results.how.get(key, METRIC[key].how))
    grid.notes.append(
        "threads: started in a run; the C library gives back the stack of each that ends, so at most so "
        "many of the shootdowns are its own and not the allocator's"
        if key == "shootdowns"
        else results.how.get("shootdowns", "")
    )
    return grid


def peer_grid(analysis: Analysis) -> Grid:
    """Each row's best peer, and how far the subject is from it: rows that the subject loses come first."""
    subject, rows = analysis.subject, analysis.results.rows
    beaten_by: dict[str, list[str]] = {}
    for each in analysis.beaten:
        beaten_by.setdefault(each.row, []).append(each.peer)
    grid = Grid(
        f"{subject} against the best peer of each row (ratio, {CONFIDENCE:.0%} interval)",
        ["", *(what.title for what in _SIDE_BY_SIDE), "beaten in both by"],
    )
    in_order = sorted(range(len(rows)), key=lambda index: rows[index].name not in beaten_by)
    for index in in_order if analysis.peers else ():
        cells = []
        for what in _SIDE_BY_SIDE:
            ranking, found = analysis.rankings[what.key][index], analysis.to_best_peer[what.key][index]
            mark = " ~" if ranking.insensitive else ""
            text = f"{found[0]} {ratio_text(found[1])}{mark}" if found else "-"
            cells += _cells(rows[index], [subject], {subject: text})
        grid.rows.append([rows[index].name, *cells, ", ".join(beaten_by.get(rows[index].name, []))])
    if grid.rows:
        grid.notes.append(f"below 1: {subject} is the best of all")
    if any(cell.endswith(" ~") for row in grid.rows for cell in row):
        grid.notes.append("~ no difference in this row: it is left out of the means")
    return grid


def worst_grid(analysis: Analysis) -> Grid:
    grid = Grid(
        "worst row of each, against the best of all others in it",
        ["", *(what.title for what in _SIDE_BY_SIDE)],
    )
    worst = {(what, each.label): each for what in _SIDE_BY_SIDE for each in analysis.worst[what.key]}
    for label in analysis.results.labels:
        found = [worst.get((what, label)) for what in _SIDE_BY_SIDE]
        if any(found):
            cells = (f"{times(each.ratio)} {each.row} ({each.against})" if each else "-" for each in found)
            grid.rows.append([label, *cells])
    return grid


def summary_grid(analysis: Analysis) -> Grid:
    """The closing rows of the other tables, in one."""
    labels = analysis.results.labels
    grid = Grid("all rows at once: geometric means of the ratios to the best of each row", ["", *labels])
    for mean in analysis.means:
        name = mean.what.title if mean.scope == "all" else f"  {mean.scope}"
        grid.rows.append([name, *_to_best(mean, labels)])
    grid.notes += _fewer_rows(analysis.means)
    slowest = {each.label: times(each.ratio) for each in analysis.worst[TIME.key]}
    grid.closing.append(["worst time of a row", *(slowest.get(label, "-") for label in labels)])
    name = "shootdowns, sum" if analysis.shootdown_key == "shootdowns" else "TLB interrupts, sum"
    grid.closing.append([name, *_sums(analysis)])
    return grid


def published_grid(analysis: Analysis) -> Grid:
    """The published programs alone, by time and by peak."""
    labels = analysis.results.labels
    grid = Grid("published programs: time, and peak RSS, each to the best of its row", ["", *labels])
    rankings = zip(*(analysis.rankings[what.key] for what in _SIDE_BY_SIDE), strict=True)
    for ranking in rankings:
        row = ranking[0].row
        if row.family == published.FAMILY:
            cells = {label: ", ".join(_mark(each, label) for each in ranking) for label in labels}
            grid.rows.append([row.name.removeprefix(published.PREFIX), *_cells(row, labels, cells)])
    # Those over no other rows; if there are no others, that is the mean of all.
    names = {row.name for row in analysis.results.rows if row.family == published.FAMILY}
    means = [mean for mean in analysis.means if mean.what in _SIDE_BY_SIDE and names.issuperset(mean.rows)]
    if grid.rows and len(means) == len(_SIDE_BY_SIDE):
        values = zip(*(_to_best(mean, labels) for mean in means), strict=True)
        grid.closing.append(["geometric mean", *map(", ".join, values)])
        grid.notes += _fewer_rows(means)
    if any("~" in cell for row in grid.rows for cell in row):
        grid.notes.append("~ no difference in this row: it is left out of the mean")
    return grid


def _mark(ranking: Ranking, label: str) -> str:
    return "-" if label not in ranking.ratios else times(ranking.cost(label)) + "~" * ranking.insensitive


def pair_grid(analysis: Analysis, what: Measure) -> Grid:
    """How far the stand-ins are from the published programs."""
    labels, found = analysis.results.labels, pairs.find(analysis.rankings[what.key])
    grid = Grid(
        f"{what.title} of stand-in/published program, each to the best of its row",
        ["", *labels, "differ by"],
    )

    def cells(pair: pairs.Pair) -> list[str]:
        sides = ((pair.stand_in.get(label), pair.original.get(label)) for label in labels)
        texts = ("/".join("-" if cost is None else times(cost) for cost in both) for both in sides)
        return [pair.name, *texts, times(pair.discrepancy) if pair.discrepancy else "-"]

    grid.rows += map(cells, found)
    if found:
        grid.closing.append(cells(pairs.mean(found)))
        grid.notes.append(
            "differ by: the largest factor by which the ratio of two allocators differs between stand-in and "
            "published program"
        )
    return grid


_MAKERS: dict[str, Sequence[Callable[[Analysis], Grid]]] = {
    **{
        kind: (partial(ratio_grid, what=what), partial(insensitive_grid, what=what))
        for kind, what in (("time", TIME), ("peak", PEAK), ("average", AVERAGE))
    },
    # The memory of servers at the end, after their keys were deleted, beside the shootdowns.
    "shootdowns": (
        shootdown_grid,
        lambda analysis: _medians_grid(
            "resident at the end (medians)", analysis.results, RESIDENT, report.memory
        ),
    ),
    "latency": tuple(
        partial(_latency_grid, title=title, figure=figure)
        for title, figure in (("p99", load.P99), ("p99.9", load.P99_9))
    ),
    "peers": (peer_grid,),
    "worst": (worst_grid,),
    "summary": (summary_grid,),
    "published": (
        published_grid,
        partial(pair_grid, what=TIME),
        partial(pair_grid, what=PEAK),
    ),
}
KINDS = tuple(_MAKERS)


def grids(analysis: Analysis, kinds: Sequence[str]) -> list[Grid]:
    found = (make(analysis) for kind in kinds for make in _MAKERS[kind])
    return [grid for grid in found if grid.rows + grid.notes]


def findings(analysis: Analysis) -> list[str]:
    """Rows in which a peer wins outright, failures, cases that were not run, and notes."""
    results = analysis.results
    lines = []
    margin = f"{PARETO_MARGIN - 1:.0%}"
    for each in analysis.beaten:
        average = f", {times(each.average)} of its average" if each.average is not None else ""
        lines.append(
            f"beaten: in {each.row}, {each.peer} is both faster and smaller than {analysis.subject} by more "
            f"than {margin}: {analysis.subject} takes {times(each.time)} of its time and {times(each.peak)} "
            f"of its peak RSS{average}"
        )
    if not analysis.beaten and analysis.peers and any(row.sides for row in results.rows):
        lines.append(
            f"in no row is a peer both faster and smaller than {analysis.subject} by more than {margin}"
        )
    for row, side in results.failures:
        where = f"round {side.failed_round}" if side.failed_round else "the warm-up"
        lines.append(f"failed: {row.name} under {side.label}, in {where}: {side.failure}")
    for name, reason in results.left_out.items():
        lines.append(f"not run: {name}: {reason}")
    lines += [f"note: {note}" for note in (*results.notes, *messages.notes(results.messages))]
    return lines


def conditions(results: Results) -> list[str]:
    machine = results.machine
    # One with other variables is no other version.
    named = [
        f"{each.label.partition(':')[0]} {dated(each.version, each.date) or '(version not known)'}"
        for each in results.allocators
    ]
    versions = ", ".join(dict.fromkeys(named))
    rounds = [results.rounds_of(side) for row in results.rows for side in row.sides if not side.failure]
    done = f"{min(rounds, default=0)}" if len(set(rounds)) < 2 else f"{min(rounds)} to {max(rounds)}"
    few = "; with so few rounds the intervals are too narrow" if rounds and 1 < min(rounds) < 5 else ""
    stopped = f", stopped before {results.rounds}" if results.interrupted_by is not None else ""
    trees = [
        f"Published programs of {each.name} {each.version or '(version not known)'}"
        f"{f', {each.date}' if each.date else ''}."
        for each in results.sources
    ]
    return [
        f"{versions}.",
        *trees,
        f"{machine.get('cpus')} CPUs ({machine.get('cpu')}), "
        f"{report.memory(float(machine.get('memory_kib') or 0))}, {machine.get('distribution')}, glibc "
        f"{machine.get('glibc')}, Linux {machine.get('kernel')}, transparent huge pages "
        f"{machine.get('transparent_huge_pages')}; {results.date[:10]}.",
        f"Medians of {done} interleaved rounds after one of warm-up{stopped}; intervals: bootstrap of the "
        f"rounds, {RESAMPLES:,} draws, seed {results.seed}{few}.",
    ]


def _rich(grid: Grid) -> Table:
    table = report.table(padding=(0, 1, 0, 0))
    table.add_column(grid.headings[0], no_wrap=True)
    for number, heading in enumerate(grid.headings[1:], 1):
        justify: Literal["left", "right"] = "left" if number in grid.words else "right"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=len(grid.headings) < 6)
    for row in grid.rows:
        table.add_row(*row)
    if grid.closing:
        table.add_row()
        for row in grid.closing:
            table.add_row(*row, style="bold" if not row[0].startswith(" ") else None)
    return table


def write(
    grids: Sequence[Grid], lines: Sequence[str], results: Results, output: Output, markdown: bool
) -> None:
    """Prints a report: tables, then lines, then the conditions of the runs."""
    with output.console() as console:
        if markdown:
            console.file.write(to_markdown(grids, lines, results))
            return
        for grid in grids:
            console.print(f"\n{grid.title}", style="bold", soft_wrap=True)
            if grid.rows or grid.closing:
                report.print_table(console, _rich(grid))
            for note in grid.notes:
                console.print(note, style="dim", soft_wrap=True)
        console.print()
        for line in (*lines, *conditions(results)):
            console.print(line, soft_wrap=True)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.strip().replace('|', '&#124;') for cell in cells)} |"


def grid_markdown(grid: Grid) -> str:
    lines = [f"{grid.title[:1].upper()}{grid.title[1:]}:", ""]
    marks = ["---" if number in grid.words else "---:" for number in range(1, len(grid.headings))]
    if grid.rows or grid.closing:
        lines += [_line(grid.headings), _line(["---", *marks])]
    lines += [_line(row) for row in grid.rows]
    lines += [_line([f"**{row[0].strip()}**", *row[1:]]) for row in grid.closing]
    if grid.notes:
        # A bare asterisk would begin a list within the list.
        lines += ["", *(("- \\" if note.startswith("* ") else "- ") + note for note in grid.notes)]
    return "\n".join(lines)


def to_markdown(grids: Sequence[Grid], lines: Sequence[str], results: Results) -> str:
    parts = [*map(grid_markdown, grids), "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join(part for part in (*parts, " ".join(conditions(results))) if part) + "\n"
