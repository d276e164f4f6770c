"""The rules by which a picture of a process's memory, or the difference of two, becomes a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from calm.commands.explain import advice
from calm.commands.explain.model import Certainty, Figure, Heap, SizeClass
from calm.commands.explain.picture import HEAP_PARTS, SMALL_BYTES, Picture
from calm.core import report

VERDICTS = {
    "leak_suspected": "Blocks that the program holds grew from the first sample to the last.",
    "in_use": "The program holds most of it in blocks.",
    "cached": "Free blocks in the caches of threads or CPUs.",
    "retained": "Free pages that the allocator keeps.",
    "fragmentation": "Free memory between blocks in use, which no allocator can return.",
    "huge_pages": "Huge pages of which the program uses a part.",
    "shared": "Memory that other processes have as well.",
    "other_mappings": "Memory that no allocator owns: mappings, files, stacks.",
    "small": "No part is large.",
    "unknown": "The allocator's records cannot be read.",
}

GROWN_BYTES, GROWN_SHARE = 1 << 20, 0.01
"""RSS or a part has grown by more than this, and this share of RSS."""
ALSO_SHARE = 0.15
_OTHER = ("other", "stacks", "files", "data")


def _size(count: float) -> str:
    return report.memory(count / 1024)


@dataclass(frozen=True)
class Finding:
    """A verdict and what it rests on."""

    verdict: str
    bytes: int
    certainty: Certainty
    words: str


@dataclass(frozen=True)
class Explanation:
    """What `calm explain` says."""

    verdict: str
    grew: bool
    """Explains what grew; otherwise what is large."""
    summary: str
    evidence: tuple[str, ...]
    certainty: Certainty
    why: str
    also: tuple[Finding, ...]
    steps: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """One possible answer."""

    verdict: str
    figure: Callable[[Picture], Figure]
    """How much of the memory it explains."""
    words: Callable[[Picture], str]
    overlaps: bool = False
    """Explains memory that other rules explain, too: applies where that is at least half of RSS."""


def _part(*names: str) -> Callable[[Picture], Figure]:
    def figure(found: Picture) -> Figure:
        figures = [found.parts[name] for name in names]
        order = ("exact", "estimate", "unknown")
        return Figure(found.bytes(*names), max((each.certainty for each in figures), key=order.index))

    return figure


def _classes(heap: Heap | None, key: Callable[[SizeClass], int], text: Callable[[SizeClass], str]) -> str:
    """The classes with most of something."""
    classes = sorted(heap.classes if heap else (), key=key, reverse=True)
    total = sum(map(key, classes))
    shown = [text(each) for each in classes[:3] if key(each) > total / 10]
    return "; the most in " + ", ".join(shown) if shown else ""


def _in_use(found: Picture) -> str:
    heap = found.heap_of("in_use")
    text = f"The program holds {_size(found.bytes('in_use'))} in blocks that it has not freed"
    if heap and (large := heap.facts.get("large_bytes", 0)) >= SMALL_BYTES:
        text += f", {_size(large)} of it in large blocks"
    return text + _classes(
        heap,
        lambda each: each.used * each.size,
        lambda each: f"{each.used:,} blocks of {each.size} bytes ({_size(each.used * each.size)})",
    )


def _cached(found: Picture) -> str:
    heap = found.heap_of("cached")
    threads = heap.facts.get("tcaches") if heap else None
    of = f" of {threads} threads" if threads else ""
    return f"{_size(found.bytes('cached'))} of freed blocks are in the allocator's caches{of}" + _classes(
        heap,
        lambda each: each.cached * each.size,
        lambda each: f"{each.cached:,} blocks of {each.size} bytes",
    )


def _waiting(facts: Mapping[str, int]) -> str:
    """When the largest part of calmalloc's free memory goes, and why then."""
    if not facts.get("waiting_bytes"):
        return ""
    unused, reuse, until = (facts[f"waiting_{name}_ns"] / 1e9 for name in ("unused", "reuse", "until"))
    text = f"; {_size(facts['waiting_bytes'])}, last needed {unused:.1f} s ago"
    text += f", usually needed again after {reuse:.1f} s" if reuse else ", never needed again so far"
    return f"{text}, goes at {until:.1f} s"


def _retained(found: Picture) -> str:
    heap = found.heap_of("retained")
    text = f"The allocator keeps {_size(found.bytes('retained'))} of free pages"
    facts = heap.facts if heap else {}
    if "top" in facts:
        return text + f"; {_size(facts['top'])} lie at the arenas' tops, the rest between blocks"
    if "limit" in facts:
        text += f"; its limit is {_size(facts['limit'])}"
    return text + _waiting(facts)


def _fragmentation(found: Picture) -> str:
    heap = found.heap_of("fragmentation")
    movable = heap.movable if heap else Figure()
    text = f"{_size(found.bytes('fragmentation'))} are free, but share pages with blocks in use"
    if movable.is_known:
        text += f"; {_size(movable.bytes)} would return if those blocks could move"
    return text + _classes(
        heap,
        lambda each: each.movable,
        lambda each: f"blocks of {each.size} bytes ({each.used:,} hold {_size(each.bytes)})",
    )


def _other(found: Picture) -> str:
    kinds = {
        "other": "anonymous mappings outside of the allocator",
        "files": "mapped files",
        "stacks": "stacks",
        "data": "data of programs and libraries",
    }
    parts = [
        f"{_size(found.bytes(name))} are {kinds[name]}"
        for name in sorted(_OTHER, key=lambda name: -found.bytes(name))
        if found.bytes(name) >= found.bytes(*_OTHER) / 10
    ]
    text = ", ".join(parts)
    if found.largest and found.largest[0].resident >= found.bytes(*_OTHER) / 10:
        first = found.largest[0]
        text += f"; the largest is {_size(first.resident)} at {first.start:#x} ({first.name})"
    return text


def _shared(found: Picture) -> str:
    memory = found.bytes("shmem")
    return (
        f"{_size(found.shared)} are shared with other processes: {_size(memory)} of shared memory, and"
        f" {_size(found.shared - memory)} that neither parent nor child has written since fork"
    )


def _huge(found: Picture) -> str:
    return (
        f"{_size(found.huge)} are in huge pages; {_size(found.empty_huge.bytes)} of that are pages of zeros,"
        " which the program probably never wrote"
    )


def _unknown(found: Picture) -> str:
    name = found.unread or (found.heap.title if found.heap else "the allocator")
    return f"{_size(found.bytes('unaccounted'))} belong to {name}, whose records do not say what they are"


# In this order where two explain the same: those that overlap first.
RULES = (
    Rule("shared", lambda found: Figure(found.shared, "exact"), _shared, overlaps=True),
    Rule("huge_pages", lambda found: found.empty_huge, _huge, overlaps=True),
    Rule("in_use", _part("in_use"), _in_use),
    Rule("fragmentation", _part("fragmentation"), _fragmentation),
    Rule("retained", _part("retained"), _retained),
    Rule("cached", _part("cached"), _cached),
    Rule("other_mappings", _part(*_OTHER), _other),
    Rule("unknown", _part("unaccounted"), _unknown),
)


def _finding(rule: Rule, found: Picture, amount: int) -> Finding:
    return Finding(rule.verdict, amount, rule.figure(found).certainty, rule.words(found))


def _ranked(found: Picture, before: Picture | None) -> list[Finding]:
    """What each rule explains, of RSS or of its growth, the largest first."""
    whole = found.rss
    if before:
        whole = max(whole - before.rss, found.bytes("in_use") - before.bytes("in_use"))
    ranked = []
    for rule in RULES:
        amount = rule.figure(found).bytes - (rule.figure(before).bytes if before else 0)
        if rule.overlaps and amount < whole / 2:
            continue
        ranked.append((not rule.overlaps, -amount, _finding(rule, found, amount)))
    ranked.sort(key=lambda each: each[:2])
    return [finding for _, _, finding in ranked]


def _has_grown(first: Picture, last: Picture) -> bool:
    least = max(GROWN_BYTES, GROWN_SHARE * first.rss)
    return last.rss - first.rss >= least or last.bytes("in_use") - first.bytes("in_use") >= least


def _held(heap: Heap, part: str, last: Picture, first: Picture | None) -> int:
    """What a heap has of a part; or by how much that grew."""
    return last.bytes_of(heap, part) - (first.bytes_of(heap, part) if first else 0)


def _heap_for(part: str, last: Picture, first: Picture | None) -> Heap | None:
    """That which has most of a part, or of its growth."""
    if part not in HEAP_PARTS or first is None:
        return last.heap_of(part)
    return max(last.heaps, key=lambda heap: _held(heap, part, last, first), default=None)


def _why(found: Picture, best: Finding) -> str:
    if best.certainty == "exact":
        return "Read from the allocator's own records and the kernel's, which agree."
    if best.certainty == "estimate":
        return " ".join(found.notes) or "Derived from records that were not read at one moment."
    return " ".join(found.notes) or "This allocator's records cannot be read."


def explain(samples: Sequence[Picture]) -> Explanation:
    """The verdict on one sample, or on the growth from the first of several to the last."""
    first, last = samples[0], samples[-1]
    grew = len(samples) > 1 and _has_grown(first, last)
    ranked = _ranked(last, first if grew else None)
    best = ranked[0]
    whole = last.rss - first.rss if grew else last.rss
    verdict = best.verdict
    if grew:
        verdict = "leak_suspected" if verdict == "in_use" else verdict
        change = f"fell by {_size(-whole)}" if whole < 0 else f"grew by {_size(whole)}"
        summary = f"RSS {change} to {_size(last.rss)}. {VERDICTS[verdict]}"
    elif best.bytes < SMALL_BYTES:
        verdict = "small"
        summary = f"RSS is {_size(last.rss)}. {VERDICTS[verdict]}"
    else:
        summary = f"RSS is {_size(last.rss)}. {VERDICTS[verdict]}"
    evidence = [best.words + "."]
    before = first if grew else None
    heap = _heap_for(best.verdict, last, before)
    if len(last.heaps) > 1 and heap and best.verdict in HEAP_PARTS:
        evidence.append(f"{_size(_held(heap, best.verdict, last, before))} of it is {heap.title}'s.")
    if grew:
        if best.bytes > whole:
            evidence.insert(0, f"This part grew by {_size(best.bytes)}, while others shrank.")
        else:
            evidence.insert(0, f"{_size(best.bytes)} of the growth is of this kind.")
    elif len(samples) > 1:
        evidence.append(f"RSS did not grow between the samples ({_size(last.rss - first.rss)}).")
    also = tuple(
        each
        for each in ranked[1:]
        if each.bytes >= max(SMALL_BYTES, ALSO_SHARE * abs(whole)) and verdict != "small"
    )
    certainty, why = best.certainty, _why(last, best)
    if missing := max(each.mismatch for each in samples):
        changed = (
            f"The parts and RSS, read one after the other, differ by {_size(missing)}:"
            " the process changed meanwhile."
        )
        certainty, why = ("estimate", changed) if certainty == "exact" else (certainty, f"{changed} {why}")
    return Explanation(
        verdict=verdict,
        grew=grew,
        summary=summary,
        evidence=tuple(evidence),
        certainty=certainty,
        why=why,
        also=also,
        steps=advice.steps(
            verdict,
            heap,
            last.pid,
            [(each.verdict, _heap_for(each.verdict, last, before)) for each in also],
        ),
    )
