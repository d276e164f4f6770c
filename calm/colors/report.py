"""How an analysis looks on a terminal, and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from calm import report
from calm.colors import pairs
from calm.colors.analysis import Analysis, Collision, Count, Level
from calm.colors.geometry import Cache
from calm.colors.look import OTHER
from calm.colors.pagemap import PAGE_BYTES, Pages
from calm.colors.sites import Call

_MOST_CALLS = 2
_DASH = "-"


def size(count: float) -> str:
    """Bytes, in the unit that fits."""
    return report.memory(count / 1024)


def cache_name(cache: Cache) -> str:
    """L2, 2.0 MiB, 16 ways, 32 colors."""
    colors = cache.colors(PAGE_BYTES)
    kinds = f"{colors} colors" if colors > 1 else "1 color"
    return f"L{cache.level}, {size(cache.bytes)}, {cache.ways} ways, {kinds}"


def place(found: Analysis, at: int) -> str:
    """Where a region comes from: the function that allocated it and its caller, or the file mapped."""
    if site := found.sites[at]:
        return " < ".join(report.shown(str(call)) for call in site[:_MOST_CALLS])
    region = found.look.regions[at]
    return report.shown(region.path) or "anonymous memory"


def _number(value: float | None) -> str:
    if value is None:
        return _DASH
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:,.1f}"


def _huge(pages: Pages) -> str:
    """How much of them lies as in huge pages."""
    huge = pages.huge_bytes()
    return _DASH if huge is None or not pages.bytes else f"{100 * huge / pages.bytes:.0f} %"


def _count_cells(count: Count) -> list[str]:
    spread = count.random
    least = count.unavoidable
    chance = f"{_number(round(spread.mean - least, 1))} ({spread.low - least:,} to {spread.high - least:,})"
    cells = [f"{count.pages:,}", _number(count.in_conflict), _number(least), _number(count.unnecessary)]
    return [*cells, chance, _number(count.huge - least)]


def _conflict_table(found: Analysis, level: Level, top: int) -> Table:
    table = report.table()
    table.add_column("", no_wrap=True)
    for heading in (
        "size",
        "huge",
        "pages",
        "in conflict",
        "unavoidable",
        "unnecessary",
        "random (95 %)",
        "huge pages",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("where from", overflow="fold")
    regions = found.look.regions
    total = size(sum(region.bytes for region in regions))
    table.add_row("all", total, _huge(found.look.pages), *_count_cells(level.all), "")
    for at in _chosen(found, top):
        cells = [f"#{at}", size(regions[at].bytes), _huge(regions[at].pages)]
        table.add_row(*cells, *_count_cells(level.each[at]), place(found, at))
    return table


def _chosen(found: Analysis, top: int) -> list[int]:
    """Those with the most resident memory."""
    regions = found.look.regions
    order = sorted(range(len(regions)), key=lambda at: (-regions[at].pages.bytes, -regions[at].bytes, at))
    return order[:top]


def _region_table(found: Analysis, top: int) -> Table:
    """The regions without a count, where frames are hidden or no cache has colors."""
    table = report.table()
    for heading in ("", "address", "size", "resident"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    table.add_column("where from", overflow="fold")
    for at in _chosen(found, top):
        region = found.look.regions[at]
        resident = size(region.pages.bytes) if found.look.resident_known else _DASH
        table.add_row(f"#{at}", f"{region.address:#x}", size(region.bytes), resident, place(found, at))
    return table


def _alike(pair: pairs.Pair) -> str:
    words = ["L1 lines"] if pair.inner else []
    if pair.aliased is not None:
        words.append("4 KiB")
    words += [f"L{level} color ({share:.0%} of pages)" for level, share in sorted(pair.outer.items())]
    return ", ".join(words)


def _pair_table(found: Analysis, top: int) -> Table:
    table = report.table()
    for heading in ("pairs", "the worst", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("start in the same", overflow="fold")
    table.add_column("allocated in", overflow="fold")
    for collision in found.collisions[:top]:
        pair = collision.example
        first, second = place(found, pair.first), place(found, pair.second)
        ends = first if first == second else f"{first}\n{second}"
        table.add_row(
            f"{collision.count:,}", f"#{pair.first}, #{pair.second}", size(pair.bytes), _alike(pair), ends
        )
    return table


def _crowd_lines(found: Analysis, top: int) -> list[str]:
    lines = []
    what = "blocks" if found.look.told else "mappings"
    for crowd in found.crowds[:top]:
        where = "at one line" if crowd.level == 1 else "in one color"
        room = (
            f"{crowd.room} ways"
            if crowd.sharers == 1
            else f"{crowd.room} ways for each of {crowd.sharers} threads"
        )
        names = ", ".join(f"#{at}" for at in crowd.members[:8]) + (", …" if len(crowd.members) > 8 else "")
        lines.append(f"L{crowd.level}: {len(crowd.members):,} {what} start {where}, for {room}: {names}")
    return lines


def _title(found: Analysis) -> str:
    seen = found.look
    kinds = [region.kind for region in seen.regions]
    counts = [
        (len(kinds) - kinds.count(OTHER), "large blocks" if seen.told else "large mappings"),
        (kinds.count(OTHER), "other large mappings"),
    ]
    words = " and ".join(
        f"{count:,} {what.removesuffix('s' * (count == 1))}" for count, what in counts if count
    )
    total = sum(region.bytes for region in seen.regions)
    resident = f", {size(seen.resident_bytes)} of them resident" if seen.resident_known else ""
    threads = f"{seen.threads} thread" + ("s" if seen.threads != 1 else "")
    return f"{words}, {size(total)}{resident}; {threads}"


def show(console: Console, found: Analysis, lines: Sequence[str], top: int) -> None:
    """Prints it; the lines come behind the title."""
    console.print(
        f"\nprocess {found.look.pid}: {report.printable(found.look.command)}", style="bold", soft_wrap=True
    )
    console.print(_title(found), soft_wrap=True)
    for line in (*lines, *found.notes):
        console.print(f"note: {line}", soft_wrap=True)
    for cache, why in found.skipped:
        console.print(f"{cache_name(cache).rpartition(', ')[0]}: {why}", soft_wrap=True)
    for level in found.levels:
        console.print(f"\npages in conflict: {cache_name(level.cache)}", style="bold", soft_wrap=True)
        report.print_table(console, _conflict_table(found, level, top))
    if not found.levels:
        console.print("")
        report.print_table(console, _region_table(found, top))
    others = len(found.look.regions) - top
    if others > 0:
        console.print(f"and {others:,} smaller; --top shows more, --json all")
    if crowds := _crowd_lines(found, top):
        console.print("\nstarts beyond the ways of a cache", style="bold")
        for line in crowds:
            console.print(line, soft_wrap=True)
    if found.collisions:
        console.print(f"\npairs that collide: {found.pair_count:,}, the worst first", style="bold")
        report.print_table(console, _pair_table(found, top))
    elif found.look.told:
        console.print("\nno two starts collide")
    else:
        console.print("\nno two mappings start in pages of one color")


def _call(call: Call) -> dict[str, Any]:
    return {"function": call.function, "source": call.source, "module": call.module}


def _region(found: Analysis, at: int) -> dict[str, Any]:
    region = found.look.regions[at]
    return {
        "id": at,
        "kind": region.kind,
        "address": region.address,
        "bytes": region.bytes,
        "resident_bytes": region.pages.bytes if found.look.resident_known else None,
        "huge_bytes": region.pages.huge_bytes(),
        "path": region.path or None,
        "thread": region.thread or None,
        "site": [_call(call) for call in found.sites[at]],
        "conflicts": {f"L{level.cache.level}": level.each[at].as_dict() for level in found.levels},
    }


def _pair(collision: Collision) -> dict[str, Any]:
    pair = collision.example
    return {
        "count": collision.count,
        "first": pair.first,
        "second": pair.second,
        "bytes": pair.bytes,
        "lines": pair.inner,
        "apart_bytes": pair.apart,
        "alias_bytes": pair.aliased,
        "colors": {f"L{level}": share for level, share in pair.outer.items()},
    }


def _cache(cache: Cache) -> dict[str, Any]:
    return {
        "level": cache.level,
        "bytes": cache.bytes,
        "ways": cache.ways,
        "line_bytes": cache.line_bytes,
        "sets": cache.sets,
        "cpus": cache.cpus,
        "colors": cache.colors(PAGE_BYTES),
    }


def as_dict(found: Analysis) -> dict[str, Any]:
    """For JSON."""
    seen = found.look
    blocks_huge = sum(mapping.huge_kib for mapping in seen.mappings)
    return {
        "pid": seen.pid,
        "command": seen.command,
        "moment": seen.moment,
        "threads": seen.threads,
        "page_bytes": PAGE_BYTES,
        "frames": seen.hidden is None,
        "blocks_known": seen.told,
        "huge_kib": blocks_huge,
        "blocks_lost": seen.lost,
        "notes": list(found.notes),
        "caches": [_cache(level.cache) for level in found.levels],
        "skipped": [_cache(cache) | {"why": why} for cache, why in found.skipped],
        "resident_bytes": seen.resident_bytes if seen.resident_known else None,
        "conflicts": {f"L{level.cache.level}": level.all.as_dict() for level in found.levels},
        "blocks": [_region(found, at) for at in range(len(seen.regions))],
        "pairs": found.pair_count,
        "near_lines": found.near_lines,
        "collisions": [_pair(collision) for collision in found.collisions],
        "crowds": [
            {
                "level": f"L{crowd.level}",
                "place": crowd.place,
                "ways": crowd.ways,
                "threads": crowd.sharers,
                "room": crowd.room,
                "blocks": list(crowd.members),
            }
            for crowd in found.crowds
        ],
    }
