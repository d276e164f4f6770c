"""The counts with and without ABIS, as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from calm.core.statistics import Ratio

from .abis_machine import ABIS, BASELINE, VARIANTS
from .abis_results import REASONS, Results
from .abis_workloads import (
    ANON_R_SEQ,
    APACHE,
    INSTRUCTIONS,
    PAGE_TABLES_GOAL,
    PARSEC,
    PARSEC_GOAL,
    WORKLOADS,
    Workload,
)
from .tables import line, ratio_text

_REASONS = dict(
    zip(
        REASONS,
        (
            *("held by no other CPU", "held by no CPU", "sent to some CPUs"),
            *("held by another CPU", "of these, false sharing", "insertions"),
        ),
        strict=True,
    )
)


_COUNTS_HEAD = (
    "| workload | CPUs | sent, without | with | ratio (range) | received, ratio (range) "
    "| CPUs each, without | with | goals |",
    "| --- | ---: | ---: | ---: | --- | --- | ---: | ---: | --- |",
)
_MEMBERS = [workload for workload in WORKLOADS.values() if workload.name.startswith(f"{PARSEC}:")]


def number(value: float | None) -> str:
    """Formats a number: counts are integers, ratios are not."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def _judged(ratio: Ratio, goal: float | None) -> str:
    if goal is None:
        return ""
    met = "" if ratio.value is None else ": met" if ratio.value <= goal else ": not met"
    return f"{goal:.2f}{met}"


def _goals(workload: Workload, of: Mapping[str, Ratio]) -> str:
    goals = workload.goals
    wanted = {"sent": goals.sent, "received": goals.received}
    return "; ".join(f"{name} {_judged(of[name], goal)}" for name, goal in wanted.items() if goal is not None)


def _compared(results: Results) -> Iterator[tuple[Workload, int]]:
    """The workloads whose shootdowns are counted."""
    for workload, cpus in results.places():
        if workload.name != INSTRUCTIONS and not workload.group.stress_s:
            yield workload, cpus


def counts(results: Results, variant: str) -> list[str]:
    """The table of all workloads, and the mean over PARSEC's programs."""
    lines = []
    of_parsec: dict[int, list[float]] = {}
    for workload, cpus in _compared(results):
        if not results.rounds(workload, cpus, variant):
            continue
        why_none = _why_none(results, workload, cpus, variant)
        ratios = {name: results.ratio(workload, cpus, variant, name) for name in ("sent", "received")}
        cells = [
            workload.name + (", each request" if workload.name == APACHE else ""),
            str(cpus),
            *(number(results.median(workload, cpus, of, "sent")) for of in (BASELINE, variant)),
            *(why_none or ratio_text(ratios[name]) for name in ("sent", "received")),
            *(number(results.median(workload, cpus, of, "receivers")) for of in (BASELINE, variant)),
            "" if why_none else _goals(workload, ratios),
        ]
        lines.append(line(cells))
        value = ratios["sent"].value
        if workload in _MEMBERS and not why_none and value is not None:
            of_parsec.setdefault(cpus, []).append(value)
    for cpus, values in of_parsec.items():
        mean = Ratio(statistics.fmean(values), None, None, len(values))
        what = f"{PARSEC}, mean of {len(values)} of {len(_MEMBERS)}"
        goal = f"sent {_judged(mean, PARSEC_GOAL)}"
        lines.append(line([what, str(cpus), "", "", ratio_text(mean), "", "", "", goal]))
    return [*_COUNTS_HEAD, *lines] if lines else []


def _why_none(results: Results, workload: Workload, cpus: int, variant: str) -> str | None:
    """Why there is no ratio to the kernel without ABIS; None if there is one."""
    for of in (variant, BASELINE):
        if not results.rounds(workload, cpus, of):
            return f"{of} failed" if results.failed(workload, cpus, of) else f"{of} was not run"
    some = results.ratio(workload, cpus, variant, "sent").value is not None
    return None if some and results.enough(workload, cpus) else "few"


def left_out(results: Results, variant: str) -> list[str]:
    """The PARSEC programs that a mean does not include, and why."""
    lines = []
    for cpus in sorted({cpus for workload, cpus in results.places() if workload in _MEMBERS}):
        why = {workload.name: _why_none(results, workload, cpus, variant) for workload in _MEMBERS}
        told = [f"{name.removeprefix(f'{PARSEC}:')} ({reason})" for name, reason in why.items() if reason]
        if told:
            lines.append(f"- {PARSEC} on {cpus} CPUs: the mean excludes {', '.join(told)}")
    return lines


def variants(results: Results) -> list[str]:
    """Shootdowns sent, by variant, as ratios to those without ABIS."""
    there = [name for name in VARIANTS if name != BASELINE and _has(results, name)]
    lines = []
    for workload, cpus in _compared(results):
        if there and results.enough(workload, cpus):
            cells = (ratio_text(results.ratio(workload, cpus, name, "sent")) for name in there)
            lines.append(line([workload.name, str(cpus), *cells]))
    head = [line(["workload", "CPUs", *there]), line(["---", "---:", *("---" for _ in there)])]
    title = "Sent, by variant, as ratios to the kernel without ABIS:"
    what = [f"- {name}: {variant.what}" for name, variant in VARIANTS.items() if _has(results, name)]
    return [title, "", *head, *lines, "", *what] if lines else []


def _has(results: Results, variant: str) -> bool:
    return any(results.rounds(workload, cpus, variant) for workload, cpus in _compared(results))


def reasons(results: Results) -> list[str]:
    """The reasons for which shootdowns were saved, or not."""
    lines = []
    for workload, cpus in _compared(results):
        if results.rounds(workload, cpus, ABIS):
            cells = (number(results.median(workload, cpus, ABIS, name)) for name in _REASONS)
            lines.append(line([workload.name, str(cpus), *cells]))
    head = [
        line(["workload", "CPUs", *_REASONS.values()]),
        line(["---", "---:", *("---:" for _ in _REASONS)]),
    ]
    title = "Reasons (changed page table entries; the rows' medians):"
    return [title, "", *head, *lines] if lines else []


def costs(results: Results) -> list[str]:
    """The additional cost of page faults and page tables."""
    lines = []
    for workload, cpus in results.places(INSTRUCTIONS):
        base = results.median(workload, cpus, BASELINE, "instructions")
        for name, variant in VARIANTS.items():
            found = results.median(workload, cpus, name, "instructions")
            if found is not None:
                added = f"{found - base:+,.0f}" if base is not None and name != BASELINE else ""
                lines.append(line([f"{name}: {variant.what}", number(found), added]))
    if lines:
        lines = ["| kernel | instructions per page fault | added |", "| --- | ---: | ---: |", *lines]
    for workload, cpus in results.places(ANON_R_SEQ):
        found = results.median(workload, cpus, ABIS, "page_tables")
        pages = results.median(workload, cpus, ABIS, "page_table_pages")
        if found is not None:
            judged = _judged(Ratio(found, None, None, 1), PAGE_TABLES_GOAL)
            lines += [
                *([""] if lines else []),
                f"Page tables with the metadata of their entries take {found:.3f} times the memory of "
                f"{number(pages)} page tables alone (goal: at most {judged}).",
            ]
    return lines


def stress(results: Results) -> list[str]:
    """The work and the result of the coherence test."""
    lines = []
    for workload, cpus in results.places():
        for name in VARIANTS if workload.group.stress_s else ():
            entry = results.entry(workload, cpus, name)
            if entry and (done := entry.get("stress")):
                lines.append(
                    f"- {workload.name}, {done['seconds']:,.0f} s on {cpus} CPUs, {name}: "
                    f"**{done['stale']}** stale of {done['uses']:,} reads and writes, while mappings were "
                    f"changed {done['changes']:,} times in {done['ways']} ways ({done['pages']:,} pages)"
                )
    return ["Uses of stale translations, detected by content:", "", *lines] if lines else []


def failures(results: Results) -> list[str]:
    """The workloads without figures."""
    return [
        f"- {entry['workload']} under {entry['variant']} on {entry['cpus']} CPUs failed: {entry['failure']}"
        for entry in results.entries
        if entry.get("failure")
    ]


def text(result: Mapping[str, Any]) -> str:
    """All tables."""
    results = Results(result["entries"])
    parts = [counts(results, ABIS), left_out(results, ABIS)]
    if sum(_has(results, name) for name in VARIANTS) > 2:
        parts.append(variants(results))
    parts += [reasons(results), costs(results), stress(results), failures(results)]
    kernels = ", ".join(sorted({entry["kernel"] for entry in results.entries if entry.get("kernel")}))
    rounds = max((entry["n"] for entry in results.entries), default=0)
    of = f"; medians of up to {rounds} rounds" if rounds > 1 else "; one round" if rounds else ""
    parts.append([f"{f'Linux {kernels}, ' if kernels else ''}{result['qemu']}{of}."])
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"
