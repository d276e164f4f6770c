"""The tables of docs/figures.md, and the curve of docs/ptlbmalloc2.md, from existing results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from calm.core.statistics import Ratio

from . import idle
from .comparisons import PROGRAMS
from .results import Store, side_of
from .rounds import CALMALLOC, GLIBC, PEERS, PTLBMALLOC2

EMULATED = "emulated, 16 CPUs in 4 sockets: shootdown interrupts"


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    case: str
    what: str
    metric: str


PTLBMALLOC2_ROWS = (
    Row("listing1", "Listing 1, 16 threads: shootdowns begun", "shootdowns"),
    Row("listing1", "the same: wall time", "wall_s"),
    Row("listing1", "the same: average RSS", "average_rss_kib"),
    Row("listing1-without-process-madvise", "without process_madvise: shootdowns begun", "shootdowns"),
    Row("listing1-without-process-madvise", "without process_madvise: wall time", "wall_s"),
    Row("listing1-touched", "Listing 1, 4 threads, every byte touched: wall time", "wall_s"),
    Row("listing1-touched", "the same: minor faults", "minor_faults"),
    Row("listing1-reversed", "Listing 1, freed in order: wall time", "wall_s"),
    Row("listing1-reversed", "the same: average RSS", "average_rss_kib"),
    Row("listing1-reversed", "the same: peak RSS", "peak_rss_kib"),
    Row("ttest1", "t-test1: minor faults", "minor_faults"),
    Row("ttest1", "t-test1: wall time", "wall_s"),
    *(
        Row(f"program-{name}", f"{name}: {what}", metric)
        for name in PROGRAMS
        for what, metric in (("wall time", "wall_s"), ("peak RSS", "peak_rss_kib"))
    ),
)
CALMALLOC_ROWS = (
    Row("listing1", "Listing 1, 16 threads: shootdowns begun", "shootdowns"),
    Row("listing1", "the same: wall time", "wall_s"),
    Row("listing1", "the same: average RSS", "average_rss_kib"),
    Row("listing1-without-process-madvise", "without process_madvise: shootdowns begun", "shootdowns"),
    Row("listing1-without-process-madvise", "without process_madvise: wall time", "wall_s"),
    Row("listing1-touched", "Listing 1, 4 threads, every byte touched: wall time", "wall_s"),
    Row("listing1-touched", "the same: minor faults", "minor_faults"),
    Row("listing1-touched", "the same: peak RSS", "peak_rss_kib"),
    Row("larson", "larson, 2 threads: operations per second", "operations_per_second"),
    Row("xmalloc-test", "xmalloc-test, 2 and 2 threads: frees per second", "frees_per_second"),
    Row("glibc-simple", "glibc-simple: a pair of malloc and free", "ns_per_pair"),
    *(
        Row(f"program-{name}", f"{name}: {what}", metric)
        for name in PROGRAMS
        for what, metric in (("wall time", "wall_s"), ("peak RSS", "peak_rss_kib"))
    ),
)


def number(figure: float, metric: str) -> str:
    """A median in a readable unit."""
    if metric.endswith("_s"):
        return f"{figure:.2f} s"
    if metric.endswith("_kib"):
        return f"{figure / 1024:.1f} MiB"
    if metric.startswith("ns_"):
        return f"{figure:.2f} ns"
    if metric.endswith("_per_second"):
        return f"{figure / 1e6:.1f} million"
    return f"{figure:,.0f}"


def line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def medians(result: dict[str, Any], labels: Sequence[str], metric: str) -> dict[str, float]:
    """The medians of the allocators that have this figure."""
    sides = {label: side_of(result, label) for label in labels}
    found = {label: side.get("median", {}).get(metric) for label, side in sides.items() if side}
    return {label: middle for label, middle in found.items() if middle is not None}


def ratio_text(found: Ratio) -> str:
    """A ratio with its interval, if there is one."""
    if found.value is None:
        return ""
    if found.low is None or found.high is None:
        return f"{found.value:.3g}"
    return f"{found.value:.3g} ({found.low:.3g} to {found.high:.3g})"


def where(store: Store, *names: str) -> list[str]:
    """The line that describes the measurement."""
    for name in names:
        if result := store.load(name):
            at = result["machine"]
            return [
                "",
                f"Measured by `bench/figures` on {at['cpus']} CPUs ({at['cpu']}), {at['distribution']}, "
                f"{at['glibc']}, Linux {at['kernel']}.",
            ]
    return []


def calmalloc_rows(store: Store) -> list[str]:
    """Each figure under calmalloc and its peers, with ratios to glibc and to the best peer."""
    lines = []
    for row in CALMALLOC_ROWS:
        result = store.load(row.case)
        if result is None:
            continue
        found = medians(result, [CALMALLOC, *PEERS], row.metric)
        if CALMALLOC not in found:
            continue
        cells = [number(found[label], row.metric) if label in found else "" for label in (CALMALLOC, *PEERS)]
        ours = side_of(result, CALMALLOC) or {}
        to_glibc, to_best = (ours.get(key, {}).get(row.metric) for key in ("ratio", "to_best_peer"))
        cells.append(ratio_text(Ratio(*to_glibc)) if to_glibc else "")
        told = ""
        if to_best and len(found) > 2:
            told = f"{to_best['peer']}: {ratio_text(Ratio(*to_best['ratio']))}"
        lines.append(line([row.what, *cells, told]))
    counted = store.load("instructions") or {}
    bodies = counted.get("bodies_of_malloc_and_free", {}).get("64", {})
    if CALMALLOC in bodies:
        cells = [f"{bodies[label]:.0f}" if label in bodies else "" for label in (CALMALLOC, *PEERS)]
        told = f"mimalloc: {bodies[CALMALLOC] / bodies['mimalloc']:.3g}" if "mimalloc" in bodies else ""
        name = "instructions of malloc(64) and free"
        lines.append(line([name, *cells, f"{bodies[CALMALLOC] / bodies[GLIBC]:.3g}", told]))
    emulated = store.load("emulated-16cpu-calmalloc")
    if emulated is not None:
        figures = {CALMALLOC: emulated["median_library"], GLIBC: emulated["median_glibc"]}
        cells = [f"{figures[label]:,.0f}" if label in figures else "" for label in (CALMALLOC, *PEERS)]
        told = f"{emulated['ratio']:.3g}" if "ratio" in emulated else ""
        lines.append(line([EMULATED, *cells, told, ""]))
    return lines


def calmalloc_table(store: Store) -> list[str]:
    """The table; empty if calmalloc was not measured."""
    rows = calmalloc_rows(store)
    if not rows:
        return []
    names = [CALMALLOC, *PEERS]
    return [
        line(["figure (medians)", *names, "ratio to glibc (95 %)", "to the best peer (95 %)"]),
        line(["---", *["---:"] * len(names), "---", "---"]),
        *rows,
    ]


def idle_rows(store: Store, name: str) -> tuple[list[str], str]:
    """The memory kept, in MiB, and how it was measured."""
    result = store.load(name)
    if result is None:
        return [], ""
    huge_pages = name == idle.WITH_HUGE_PAGES
    labels = (CALMALLOC, idle.WITHOUT_BACKGROUND, *PEERS)
    configurations = result["configurations"]
    metric = "cgroup_retained_kib"
    ran = [side for each in configurations for side in each["allocators"] if side["n"]]
    counted = huge_pages and all(metric in side["median"] for side in ran)
    if not counted:
        metric = "retained_kib"
    lines = []
    for configuration in configurations:
        found = medians(configuration, labels, metric)
        if CALMALLOC not in found:
            continue
        what = f"{configuration['threads']} threads, main thread {configuration['main']}"
        what += ", huge pages always" if huge_pages else ""
        cells = [f"{found[label] / 1024:,.1f}" if label in found else "" for label in labels]
        lines.append(line([what, *cells]))
    if not huge_pages or not lines:
        return lines, ""
    how = "memory.current of a fresh cgroup" if counted else f"resident memory ({result['cgroup']})"
    return lines, f" With huge pages: {how}."


def idle_table(store: Store) -> list[str]:
    """The table; empty if calmalloc was not measured."""
    plain, _ = idle_rows(store, idle.NAME)
    huge, how = idle_rows(store, idle.WITH_HUGE_PAGES)
    if not plain + huge:
        return []
    names = [CALMALLOC, "background=off", *PEERS]
    return [
        "",
        "Memory kept after threads freed 1 GiB and became idle: MiB of resident memory after "
        f"{idle.IDLE_S} s, minus that at the start (`idle-burst`, medians).{how}",
        "",
        line(["threads", *names]),
        line(["---", *["---:"] * len(names)]),
        *plain,
        *huge,
    ]


def ptlbmalloc2_table(store: Store) -> list[str]:
    """ptlbmalloc2's ratios to glibc."""
    lines = [
        "| figure (medians) | glibc | ptlbmalloc2 | ratio | 95 % interval |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in PTLBMALLOC2_ROWS:
        result = store.load(row.case)
        if result is None:
            continue
        plain, ours = result["allocators"][:2]
        if row.metric not in ours.get("ratio", {}):
            continue
        found = Ratio(*ours["ratio"][row.metric])
        cells = [number(side["median"][row.metric], row.metric) for side in (plain, ours)]
        interval = f"{found.low:.2g} to {found.high:.2g}" if None not in (found.low, found.high) else ""
        lines.append(line([row.what, *cells, f"{found.value:.2g}", interval]))
    counted = store.load("instructions")
    if counted is not None and "added" in (pair := counted["pair_of_malloc_and_free"]["64"]):
        lines.append(
            f"| instructions of malloc(64) and free | {pair[GLIBC]:.0f} | {pair[PTLBMALLOC2]:.0f} "
            f"| +{pair['added']:.0f} | exact |"
        )
    emulated = store.load("emulated-16cpu")
    if emulated is not None:
        lines.append(
            f"| {EMULATED} | {emulated['median_glibc']:,.0f} "
            f"| {emulated['median_library']:,.0f} | {emulated['ratio']:.2g} | |"
        )
    return lines


def figures(store: Store) -> str:
    """Both tables: calmalloc's first, once it has been measured."""
    first = calmalloc_table(store) + idle_table(store)
    lines = [*first, "", "ptlbmalloc2, relative to glibc:", ""] if first else []
    lines += ptlbmalloc2_table(store) + where(store, "listing1", "larson", idle.NAME)
    return "\n".join(lines).strip("\n") + "\n"


def curve(store: Store) -> str:
    """t-test1 by sensitivity, for docs/ptlbmalloc2.md."""
    result = store.load("ttest1")
    if result is None:
        return ""
    lines = [
        "| setting | minor faults | wall time | peak RSS | average RSS |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for side in result["allocators"]:
        label = side["label"].replace("ptlbmalloc2:PTLBMALLOC2_SENSITIVITY=", "sensitivity ")
        cells = [
            number(side["median"][metric], metric)
            for metric in ("minor_faults", "wall_s", "peak_rss_kib", "average_rss_kib")
        ]
        lines.append(line([label, *cells]))
    return "\n".join(lines) + "\n"
