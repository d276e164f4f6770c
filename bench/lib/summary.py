"""The README's figures: the suite's summary, the rows that others win, and the memory kept after bursts."""

from __future__ import annotations

import textwrap

from research.bench.analysis import PARETO_MARGIN, PEAK, TIME, Analysis, analyse
from research.bench.tables import times

from . import idle_curve, suite
from .results import Store
from .rounds import CALMALLOC, GLIBC
from .tables import line

LABELS = (CALMALLOC, GLIBC, "jemalloc", "mimalloc", "snmalloc", "tcmalloc")


def means(analysis: Analysis, key: str) -> dict[str, str]:
    """Each allocator's ratio to the best, over all rows."""
    mean = next(mean for mean in analysis.means if mean.what.key == key and mean.scope == "all")
    return {label: times(ratio.value) for label, ratio in mean.to_best.items() if ratio.value is not None}


def table(store: Store) -> str:
    """The table; empty until the suite and the curve have been measured."""
    curve = store.load(idle_curve.NAME)
    if curve is None or "bursts" not in curve or not suite.result(store.folder).exists():
        return ""
    analysis = analyse(suite.load(store.folder))
    left = {each["label"]: f"{each['kept_mib']:,.0f} MiB" for each in curve["curves"]}
    average = {each["label"]: f"{each['average_mib']:,.0f} MiB" for each in curve["bursts"]}
    cpu = {each["label"]: f"{each['cpu_s']:.2f} s" for each in curve["bursts"]}
    bursts = f"{idle_curve.BURSTS} bursts of {idle_curve.BURST_MIB} MiB, {idle_curve.REST_S} s apart"
    worst = {each.label: times(each.ratio) for each in analysis.worst[TIME.key]}
    shootdowns = {label: f"{total:,.0f}" for label, (total, _) in analysis.shootdowns.items()}
    count = len(analysis.results.rows)
    rows = (
        (f"memory kept {idle_curve.IDLE_S} s after 1 GiB was freed", left),
        (f"{bursts}: average memory", average),
        ("the same: CPU time", cpu),
        (f"time, mean of {count} programs", means(analysis, TIME.key)),
        ("time, worst program", worst),
        (f"peak memory, mean of {count} programs", means(analysis, PEAK.key)),
        ("TLB shootdowns, all programs", shootdowns),
    )
    machine = analysis.results.machine
    return (
        "\n".join(
            [
                line(["", *LABELS]),
                line(["---", *["---:"] * len(LABELS)]),
                *(line([name, *(found.get(label, "") for label in LABELS)]) for name, found in rows),
                "",
                "Times and peaks are ratios to the best of eight allocators in each program (1 is the best). "
                f"{machine['cpus']} CPUs ({machine['cpu']}), {machine['distribution']}, "
                f"Linux {machine['kernel']}; "
                "newest versions of all peers; [all figures](docs/figures.md).",
            ]
        )
        + "\n"
    )


def losses(store: Store) -> str:
    """How many rows of the suite another allocator wins; empty until the suite has been measured."""
    if not suite.result(store.folder).exists():
        return ""
    analysis = analyse(suite.load(store.folder))
    ratios = {
        key: [found[1].value for found in rows if found is not None and found[1].value is not None]
        for key, rows in analysis.to_best_peer.items()
    }
    won, clearly = (
        {key: sum(ratio > least for ratio in found) for key, found in ratios.items()}
        for least in (1, PARETO_MARGIN)
    )
    beaten = list(dict.fromkeys(f"`{each.row}`" for each in analysis.beaten))
    margin = f"{PARETO_MARGIN - 1:.0%}".replace("%", " %")
    count = len(analysis.results.rows)
    text = (
        f"Another allocator is faster than {CALMALLOC} in {won[TIME.key]} of the {count} "
        f"programs of our suite (in {clearly[TIME.key]} by more than {margin}), and another has a lower peak "
        f"in {won[PEAK.key]} (in {clearly[PEAK.key]} by more than {margin}). In {len(beaten) or 'no'} "
        f"programs, one allocator is both faster and smaller by more than {margin}"
    )
    text += f": {', '.join(beaten)}; [all rows](docs/suite.md)." if beaten else "; [all rows](docs/suite.md)."
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False) + "\n"
