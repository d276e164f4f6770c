"""The report and the picture of an analysis."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from calm.core import plot, report
from calm.core.errors import CalmError
from research.colors.analysis import Block, Colors, Count, Level
from research.colors.caches import Cache
from research.colors.pagemap import OTHER
from research.colors.pairs import Cluster, Pair

_MAX_CALLS = 2
_ALLOCATED = "allocated in"


def size(count: float) -> str:
    """Bytes, in the unit that fits."""
    return report.memory(count / 1024)


def cache_name(cache: Cache) -> str:
    """L2, 2.0 MiB, 16 ways."""
    return f"{cache.name}, {size(cache.bytes)}, {cache.ways} ways"


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def place(block: Block) -> str:
    """The function that allocated a block and its caller, or the file that it maps."""
    if block.site:
        return " < ".join(report.shown(str(call)) for call in block.site[:_MAX_CALLS])
    return report.shown(block.path or "anonymous memory")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:,.1f}"


def _cells(bytes_: int, huge: int | None, resident: int, count: Count) -> list[str]:
    share = "-" if huge is None or not resident else f"{100 * huge / resident:.0f} %"
    numbers = (count.pages, count.in_conflict, count.unavoidable, count.unnecessary)
    chance = f"{_number(round(count.random.mean, 1))} ({count.random.low:,} to {count.random.high:,})"
    return [size(bytes_), share, *map(_number, numbers), chance, _number(count.huge)]


def _largest(found: Colors, top: int) -> list[Block]:
    """The blocks with the most resident memory."""
    return sorted(found.blocks, key=lambda each: (-each.resident_bytes, -each.bytes, each.id))[:top]


def _table(*headings: str) -> Table:
    """A table of numbers, but for ids and two kinds of texts, which a narrow terminal does not cut."""
    wrap = ("start in the same", _ALLOCATED)
    table = report.table(*headings, right={*headings} - {"", *wrap}, wrap=wrap)
    for column in table.columns:
        column.overflow = "ellipsis" if column.no_wrap else "fold"
    return table


def _conflict_table(found: Colors, cache: Cache, total: Count, top: int) -> Table:
    counted = ("pages", "in conflict", "unavoidable", "unnecessary", "random (95 %)", "huge pages")
    table = _table("", "size", "huge", *counted, _ALLOCATED)
    bytes_ = sum(block.bytes for block in found.blocks)
    table.add_row("all", *_cells(bytes_, found.huge_bytes, found.resident_bytes, total), "")
    for block in _largest(found, top):
        cells = _cells(block.bytes, block.huge_bytes, block.resident_bytes, block.conflicts[cache.name])
        table.add_row(f"#{block.id}", *cells, place(block))
    return table


def _block_table(found: Colors, top: int) -> Table:
    """The blocks without counts, where no cache has colors."""
    table = _table("", "address", "size", "resident", _ALLOCATED)
    for block in _largest(found, top):
        sizes = (size(block.bytes), size(block.resident_bytes))
        table.add_row(f"#{block.id}", f"{block.address:#x}", *sizes, place(block))
    return table


def _alike(pair: Pair) -> str:
    words = ["L1 lines"] * pair.lines + ["4 KiB"] * (pair.alias_bytes is not None)
    return ", ".join(
        [*words, *(f"{name} color ({share:.0%} of pages)" for name, share in pair.colors.items())]
    )


def _pair_table(found: Colors, top: int) -> Table:
    table = _table("pairs", "the worst", "size", "start in the same", _ALLOCATED)
    for pair in found.collisions[:top]:
        places = dict.fromkeys(place(found.blocks[at]) for at in (pair.first, pair.second))
        ids = f"#{pair.first}, #{pair.second}"
        table.add_row(f"{pair.count:,}", ids, size(pair.bytes), _alike(pair), "\n".join(places))
    return table


def _cluster_line(each: Cluster, what: str) -> str:
    where = "at one line" if each.level == 1 else "in one color"
    shared = f" for each of {each.threads} threads" if each.threads > 1 else ""
    names = ", ".join(f"#{at}" for at in each.blocks[:8]) + ", …" * (len(each.blocks) > 8)
    return f"L{each.level}: {len(each.blocks):,} {what} start {where}, for {each.room} ways{shared}: {names}"


def _title(found: Colors) -> str:
    others = sum(block.kind == OTHER for block in found.blocks)
    what = "large block" if found.blocks_known else "large mapping"
    counts = ((len(found.blocks) - others, what), (others, "other large mapping"))
    words = " and ".join(_plural(count, name) for count, name in counts if count)
    total = size(sum(block.bytes for block in found.blocks))
    resident = size(found.resident_bytes)
    return f"{words}, {total}, {resident} of them resident; {_plural(found.threads, 'thread')}"


def show(console: Console, found: Colors, top: int) -> None:
    """Prints the report."""

    def heading(text: str) -> None:
        console.print(f"\n{text}", style="bold", soft_wrap=True)

    heading(f"process {found.pid}: {report.printable(' '.join(found.command))}")
    lines = [_title(found), *(f"note: {note}" for note in found.notes)]
    lines += [f"{cache_name(level.cache)}: {level.skipped}" for level in found.caches if level.skipped]
    for line in lines:
        console.print(line, soft_wrap=True)
    counted = [(level, level.conflicts) for level in found.caches if level.conflicts]
    for level, total in counted:
        heading(f"pages in conflict: {_colors_of(level)}")
        report.print_table(console, _conflict_table(found, level.cache, total, top))
    if not counted:
        console.print("")
        report.print_table(console, _block_table(found, top))
    if (others := len(found.blocks) - top) > 0:
        console.print(f"and {others:,} smaller; --top shows more, --json all")
    what = "blocks" if found.blocks_known else "mappings"
    if found.clusters:
        heading("more starts than a cache has ways")
        for cluster in found.clusters[:top]:
            console.print(_cluster_line(cluster, what), soft_wrap=True)
    if found.collisions:
        heading(f"pairs that collide: {found.pairs:,}, the worst first")
        report.print_table(console, _pair_table(found, top))
    else:
        console.print(f"\nno two {what} start {'alike' if found.blocks_known else 'in pages of one color'}")


def _colors_of(level: Level) -> str:
    return f"{cache_name(level.cache)}, {_plural(level.colors, 'color')}"


def draw(found: Colors, path: Path) -> None:
    """Draws the pages of each color, cache by cache, beside the ways. Raises CalmError without colors."""
    levels = [(level, level.pages_by_color) for level in found.caches if level.pages_by_color]
    if not levels:
        raise CalmError(f"{path} is not drawn: the colors of pages are not known")
    figure, panels = plot.pyplot().subplots(
        len(levels), figsize=(8, 2.6 * len(levels) + 0.4), layout="constrained", squeeze=False
    )
    for axes, (level, counts) in zip(panels.flat, levels, strict=True):
        axes.bar(range(len(counts)), counts, width=1, color="#0072B2")
        axes.axhline(level.cache.ways, color="#D55E00", label=f"{level.cache.ways} ways")
        axes.set(title=_colors_of(level), xlabel="color", ylabel="pages")
        axes.legend()
    plot.save(figure, path)
