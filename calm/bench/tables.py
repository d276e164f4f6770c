"""The tables and sentences of a report, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.table import Table

from calm import report, said
from calm.bench.analysis import (
    AVERAGE,
    PARETO_MARGIN,
    PEAK,
    TIME,
    Analysis,
    Entry,
    Mean,
    Measure,
    Ranking,
    resident_rows,
)
from calm.bench.results import RESIDENT, Results, Row, Side
from calm.measure import METRIC
from calm.statistics import CONFIDENCE, RESAMPLES, Ratio

# As many as fit on a line, where each takes a lot of it.
_SIDE_BY_SIDE = (TIME, PEAK)
KINDS = ("time", "peak", "average", "shootdowns", "peers", "worst", "summary")


@dataclass
class Grid:
    """A table before it has a look: the first column is text, the others are figures."""

    title: str
    headings: list[str]
    rows: list[list[str]] = field(default_factory=list)
    closing: list[list[str]] = field(default_factory=list)
    """Rows about all the others, below a line."""
    notes: list[str] = field(default_factory=list)
    words: tuple[int, ...] = ()
    """Further columns that are text."""


def amount(value: float, unit: str) -> str:
    """A figure in its unit, short enough for a column."""
    if unit == "s":
        return report.duration(value)
    if unit == "KiB":
        return report.memory(value)
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


def times(ratio: float) -> str:
    """1.04, 12.3, 160: what one looks at is the first figures."""
    if ratio >= 100:
        return f"{ratio:,.0f}"
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def interval(ratio: Ratio) -> str:
    """Its value and where it lies."""
    if ratio.value is None:
        return "-"
    if ratio.low is None or ratio.high is None:
        return times(ratio.value)
    return f"{times(ratio.value)} ({times(ratio.low)} to {times(ratio.high)})"


def _unit(row: Row, what: Measure) -> str:
    if what.memory:
        return "KiB"
    return row.metric.unit if row.metric else "s"


def _cell(ranking: Ranking, label: str, shown: Callable[[Entry], str]) -> str:
    side = ranking.row.side(label)
    if side is not None and side.failure:
        return "failed"
    entry = ranking.entry(label)
    return shown(entry) if entry else "-"


def _ratio_row(ranking: Ranking, labels: Sequence[str]) -> list[str]:
    best = ranking.best()
    figure = amount(best.median, _unit(ranking.row, ranking.what)) if best else "-"

    def shown(entry: Entry) -> str:
        return times(entry.ratio.value or 0)

    return [ranking.row.name, figure, *(_cell(ranking, label, shown) for label in labels)]


def _to_best(mean: Mean, labels: Sequence[str]) -> Iterator[str]:
    for label in labels:
        ratio = mean.to_best[label]
        # Over fewer rows than the others' it cannot be compared with them as it stands.
        fewer = "*" if ratio.n < len(mean.rows) else ""
        yield times(ratio.value) + fewer if ratio.value is not None else "-"


def _fewer_rows(means: Sequence[Mean]) -> list[str]:
    if any(ratio.n < len(mean.rows) for mean in means for ratio in mean.to_best.values()):
        return ["* over fewer rows: it failed in the others, or has no figure there"]
    return []


def _mean_rows(mean: Mean, analysis: Analysis) -> Iterator[list[str]]:
    labels = analysis.results.labels
    name = "geometric mean" if mean.scope == "all" else mean.scope
    yield [name, f"{len(mean.rows)} rows", *_to_best(mean, labels)]
    cells = []
    for label in labels:
        value = mean.subject_to[label].value if label in mean.subject_to else None
        cells.append("" if label == analysis.subject else times(value) if value is not None else "-")
    yield [f"  {analysis.subject} to it", "", *cells]


def ratio_grid(analysis: Analysis, what: Measure) -> Grid:
    """One measure: each row's best, and how far the others are from it."""
    labels = analysis.results.labels
    grid = Grid(f"{what.title}: each to the best of its row", ["", "best", *labels])
    grid.rows = [_ratio_row(ranking, labels) for ranking in analysis.ranking(what, sensitive=True)]
    means = [mean for mean in analysis.means if mean.what is what]
    grid.closing = [row for mean in means for row in _mean_rows(mean, analysis)]
    grid.notes += _fewer_rows(means)
    for mean in means:
        if analysis.peers and mean.subject_to_best_peer.value is not None:
            where = "" if mean.scope == "all" else f" {mean.scope}"
            grid.notes.append(
                f"{analysis.subject} to the best of all peers in every row{where} (a bound: no one peer is "
                f"that good): {interval(mean.subject_to_best_peer)}"
            )
    return grid


def insensitive_grid(analysis: Analysis, what: Measure) -> Grid | None:
    """Rows in which the allocators differ by no more than the runs do."""
    grid = Grid(
        f"{what.title}: rows that tell nobody apart, and are in no mean",
        ["", "best", "medians span", "by chance up to"],
    )
    for ranking in analysis.ranking(what, sensitive=False):
        span = ranking.span
        best = ranking.best()
        if span and best and span.by_chance is not None:
            figure = amount(best.median, _unit(ranking.row, what))
            grid.rows.append(
                [ranking.row.name, figure, f"{span.medians - 1:.2%}", f"{span.by_chance - 1:.2%}"]
            )
    return grid if grid.rows else None


def shootdown_grid(analysis: Analysis) -> Grid:
    """Counts, since a ratio to none says nothing."""
    labels = analysis.results.labels
    key = analysis.shootdown_key
    metric = METRIC[key]
    grid = Grid(f"{metric.label} (medians)", ["", "threads", *labels])
    for row in analysis.results.rows:
        sides = [row.side(label) for label in labels]
        cells = [_count(side, key) for side in sides]
        started = [side.median("threads_started") for side in row.sides if not side.failure]
        least = min((value for value in started if value is not None), default=None)
        most = max((value for value in started if value is not None), default=None)
        threads = "-" if least is None or most is None else f"{least:,.0f}"
        if least is not None and most is not None and most > least:
            threads += f" to {most:,.0f}"
        if any(cell not in ("-", "") for cell in cells):
            grid.rows.append([row.name, threads, *cells])
    most_rows = max((count for _, count in analysis.shootdowns.values()), default=0)
    sums = [analysis.shootdowns.get(label) for label in labels]
    grid.closing.append(
        [
            "sum",
            "",
            *(f"{each[0]:,.0f}" + ("*" if each[1] < most_rows else "") if each else "-" for each in sums),
        ]
    )
    if any(each and each[1] < most_rows for each in sums):
        grid.notes.append("* over fewer rows: it failed in the others")
    grid.notes.append(analysis.results.how.get(key, metric.how))
    if key == "shootdowns_begun":
        grid.notes.append(
            "threads: started in a run; the C library gives back the stack of each that ends, so at most so "
            "many of the shootdowns are its own and not the allocator's"
        )
    else:
        grid.notes.append(analysis.results.how.get("shootdowns_begun", ""))
    return grid


def _count(side: Side | None, key: str) -> str:
    if side is None:
        return "-"
    if side.failure:
        return "failed"
    value = side.median(key)
    return "-" if value is None else f"{value:,.0f}"


def resident_grid(analysis: Analysis) -> Grid | None:
    """What servers still hold at the end, after they were told to delete."""
    rows = resident_rows(analysis.results)
    if not rows:
        return None
    labels = analysis.results.labels
    grid = Grid("resident at the end (medians)", ["", *labels])
    for row in rows:
        cells = []
        for label in labels:
            side = row.side(label)
            value = side.median(RESIDENT) if side and not side.failure else None
            cells.append(
                "failed" if side and side.failure else "-" if value is None else report.memory(value)
            )
        grid.rows.append([row.name, *cells])
    return grid


def peer_grid(analysis: Analysis) -> Grid | None:
    """The subject against the best peer of each row, with intervals."""
    if not analysis.peers:
        return None
    grid = Grid(
        f"{analysis.subject} against the best peer of each row (ratio, {CONFIDENCE:.0%} interval)",
        ["", *(what.title for what in _SIDE_BY_SIDE)],
    )
    for index, row in enumerate(analysis.results.rows):
        cells = []
        for what in _SIDE_BY_SIDE:
            ranking, found = analysis.rankings[what.key][index], analysis.to_best_peer[what.key][index]
            if found is None:
                side = row.side(analysis.subject)
                cells.append("failed" if side and side.failure else "-")
                continue
            peer, ratio = found
            cells.append(f"{peer} {interval(ratio)}" + (" ~" if ranking.insensitive else ""))
        grid.rows.append([row.name, *cells])
    if any(cell.endswith(" ~") for row in grid.rows for cell in row):
        grid.notes.append("~ the row tells nobody apart, and is in no mean")
    return grid


def worst_grid(analysis: Analysis) -> Grid:
    """Each allocator where it does worst."""
    grid = Grid(
        "worst row of each, against the best of all others in it",
        ["", *(what.title for what in _SIDE_BY_SIDE)],
    )
    for label in analysis.results.labels:
        cells = []
        for what in _SIDE_BY_SIDE:
            worst = next((each for each in analysis.worst[what.key] if each.label == label), None)
            cells.append(f"{times(worst.ratio)} {worst.row} ({worst.against})" if worst else "-")
        if set(cells) != {"-"}:
            grid.rows.append([label, *cells])
    return grid


def summary_grid(analysis: Analysis) -> Grid:
    """What the closing rows of the other tables say, on one page."""
    labels = analysis.results.labels
    grid = Grid("all rows at once: geometric means of the ratios to the best of each row", ["", *labels])
    for mean in analysis.means:
        name = mean.what.title if mean.scope == "all" else f"  {mean.scope}"
        grid.rows.append([name, *_to_best(mean, labels)])
    grid.notes += _fewer_rows(analysis.means)
    slowest = {each.label: times(each.ratio) for each in analysis.worst[TIME.key]}
    grid.closing.append(["worst time of a row", *(slowest.get(label, "-") for label in labels)])
    sums = [analysis.shootdowns.get(label) for label in labels]
    name = "shootdowns, sum" if analysis.shootdown_key == "shootdowns_begun" else "TLB interrupts, sum"
    grid.closing.append([name, *(f"{each[0]:,.0f}" if each else "-" for each in sums)])
    return grid


def grids(analysis: Analysis, kinds: Sequence[str]) -> list[Grid]:
    """The tables asked for."""
    makers: dict[str, Callable[[], list[Grid | None]]] = {
        "time": lambda: [ratio_grid(analysis, TIME), insensitive_grid(analysis, TIME)],
        "peak": lambda: [ratio_grid(analysis, PEAK), insensitive_grid(analysis, PEAK)],
        "average": lambda: [ratio_grid(analysis, AVERAGE), insensitive_grid(analysis, AVERAGE)],
        "shootdowns": lambda: [shootdown_grid(analysis), resident_grid(analysis)],
        "peers": lambda: [peer_grid(analysis)],
        "worst": lambda: [worst_grid(analysis)],
        "summary": lambda: [summary_grid(analysis)],
    }
    return [grid for kind in kinds for grid in makers[kind]() if grid is not None and grid.rows + grid.notes]


def findings(analysis: Analysis) -> list[str]:
    """What the tables hide: worst rows, rows lost outright, failures, and what was not run."""
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
    lines += [f"note: {note}" for note in (*results.notes, *said.notes(results.said))]
    return lines


def conditions(results: Results) -> list[str]:
    """Who took part, where, and how."""
    machine = results.machine
    # One with other variables is no other version.
    named = [
        f"{each.label.partition(':')[0]} {each.version or '(version not known)'}"
        for each in results.allocators
    ]
    versions = ", ".join(dict.fromkeys(named))
    rounds = [side.rounds for row in results.rows for side in row.sides if not side.failure]
    done = f"{min(rounds, default=0)}" if len(set(rounds)) < 2 else f"{min(rounds)} to {max(rounds)}"
    few = "; with so few rounds the intervals are too narrow" if rounds and 1 < min(rounds) < 5 else ""
    stopped = f", stopped before {results.rounds}" if results.interrupted_by is not None else ""
    return [
        f"{versions}.",
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


def show(grid: Grid, console: Console) -> None:
    """Prints a table."""
    console.print(f"\n{grid.title}", style="bold", soft_wrap=True)
    if grid.rows or grid.closing:
        report.print_table(console, _rich(grid))
    for note in grid.notes:
        console.print(note, style="dim", soft_wrap=True)


def to_terminal(analysis: Analysis, kinds: Sequence[str], console: Console) -> None:
    """Prints everything."""
    for grid in grids(analysis, kinds):
        show(grid, console)
    console.print()
    for line in findings(analysis) + conditions(analysis.results):
        console.print(line, soft_wrap=True)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.strip().replace('|', '&#124;') for cell in cells)} |"


def grid_markdown(grid: Grid) -> str:
    """A table as Markdown."""
    lines = [f"{grid.title[:1].upper()}{grid.title[1:]}:", ""]
    marks = ["---" if number in grid.words else "---:" for number in range(1, len(grid.headings))]
    if grid.rows or grid.closing:
        lines += [_line(grid.headings), _line(["---", *marks])]
    lines += [_line(row) for row in grid.rows]
    lines += [_line([f"**{row[0].strip()}**", *row[1:]]) for row in grid.closing]
    if grid.notes:
        lines += ["", *(f"- {note.removeprefix('* ')}" for note in grid.notes)]
    return "\n".join(lines)


def to_markdown(analysis: Analysis, kinds: Sequence[str]) -> str:
    """The same as Markdown."""
    parts = [grid_markdown(grid) for grid in grids(analysis, kinds)]
    parts.append("\n".join(f"- {line}" for line in findings(analysis)))
    parts.append(" ".join(conditions(analysis.results)))
    return "\n\n".join(part for part in parts if part) + "\n"
