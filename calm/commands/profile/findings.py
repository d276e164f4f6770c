"""The meaning of a profile, in words: rules that each find one thing, with its numbers and its remedy."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from calm.core.profile_model import (
    CALL,
    CAUSES,
    CPU,
    FEW_SAMPLES,
    SHOOTDOWN,
    Cause,
    Finding,
    Profile,
    Stack,
)

# A smaller share is not worth a sentence; nor are fewer events.
_MIN_SHARE = 0.05
_MIN_EVENTS = 100
# Memory management that takes less of the CPU time needs no remedy.
_LITTLE = 0.02
_PAGE_KIB = 4
_REFAULTS = 4

_OWN = "keep more of what is freed: CALM_OPTIONS=memory_per_cpu=32 or more (see calmalloc(7))"
_PURGING = {
    "jemalloc": "slow down its decay: MALLOC_CONF=dirty_decay_ms:60000,background_thread:true",
    "mimalloc": "slow down its purging: MIMALLOC_PURGE_DELAY=1000 or longer",
    "tcmalloc": "slow down its release rate: TCMALLOC_RELEASE_RATE (gperftools), or the background rate",
    "snmalloc": "use a build whose decay is slower",
    "rpmalloc": "use a build with larger caches",
    "ptlbmalloc2": "raise its threshold: PTLBMALLOC2_SENSITIVITY=2 or more (see ptlbmalloc2(7))",
    "calmalloc": _OWN,
    "calmoffload": _OWN,
}
_MODULE = re.compile(f"lib({'|'.join(_PURGING)})")
_TUNE = "`calm tune` looks for settings that end it, `calm run -a calmalloc` does without it"
_MALLOC = "GLIBC_TUNABLES=glibc.malloc"


def plain(function: str) -> str:
    """A C library's function by its plain name: free for __GI___libc_free and cfree@GLIBC_2.2.5."""
    name = function.partition("@")[0].removeprefix("__GI_").lstrip("_").removeprefix("libc_")
    return "free" if name == "cfree" else name


@dataclass(frozen=True)
class Path:
    """A stack, as the rules read it."""

    stack: Stack
    functions: Sequence[str]
    """Of user mode, plain, the outermost first."""
    allocator: str | None
    """The allocator, other than the C library's, whose code is on it."""

    def has(self, functions: str) -> bool:
        """Whether any of them is on it."""
        return not set(functions.split()).isdisjoint(self.functions)

    def leads(self, functions: str, *causes: str) -> bool:
        """Whether one of the functions led to one of the causes."""
        return self.stack.cause in causes and self.has(functions)


def _path(profile: Profile, stack: Stack) -> Path:
    frames = [profile.frames[index] for index in stack.frames if not profile.frames[index].kernel]
    matches = (_MODULE.match(module) for module in sorted({frame.module for frame in frames}))
    allocator = next((match[1] for match in matches if match), None)
    return Path(stack, [plain(frame.function) for frame in frames], allocator)


class Place(NamedTuple):
    """A way in which user code makes the kernel work."""

    what: str
    remedy: str
    holds: Callable[[Path], bool]
    """Whether a stack is of it."""


_FREES = "free int_free realloc int_realloc malloc_trim malloc_arena_thread_freeres"
_THREADS = (
    "advise_stack_range nptl_free_tcb nptl_deallocate_stack nptl_free_stacks queue_stack allocate_stack "
    "pthread_create pthread_create_2_1 free_stacks nptl_stack_list_del pthread_join pthread_clockjoin_ex "
    "allocate_thread_stack setup_stack_prot nptl_free_stack"
)
# Each stack is of the first that holds.
_PLACES = (
    Place(
        "{allocator}'s purging of freed memory",
        "{purging}",
        lambda path: bool(path.allocator) and path.stack.cause in ("madvise", "process_madvise", "munmap"),
    ),
    Place(
        "arena trimming in glibc's free",
        f"a higher trim threshold ({_MALLOC}.trim_threshold=268435456) keeps the top of each arena; {_TUNE}",
        lambda path: path.has("heap_trim shrink_heap") or path.leads(_FREES, "madvise"),
    ),
    Place(
        "glibc's free shrinking the main heap",
        f"a higher trim threshold and padding ({_MALLOC}.trim_threshold=268435456:"
        f"glibc.malloc.top_pad=16777216); {_TUNE}",
        lambda path: path.has("systrim") or path.leads(_FREES, "brk"),
    ),
    Place(
        "glibc's arenas growing page by page",
        f"more padding for each growth ({_MALLOC}.top_pad=1048576), and less trimming, which makes them grow "
        f"again; {_TUNE}",
        lambda path: path.leads("grow_heap sysmalloc int_malloc new_heap", "mprotect"),
    ),
    Place(
        "blocks above the mmap threshold being freed",
        f"a higher threshold ({_MALLOC}.mmap_threshold=1073741824) keeps them on the heap; {_TUNE}",
        lambda path: path.leads(_FREES, "munmap"),
    ),
    Place(
        "threads that begin and end (their stacks)",
        "keep threads in a pool; more stacks are kept by "
        "GLIBC_TUNABLES=glibc.pthread.stack_cache_size=268435456",
        # Without debugging information, the inlined functions of a thread's end are missing.
        lambda path: (
            path.has(_THREADS)
            or (path.stack.cause in ("madvise", "munmap") and path.functions[-2:-1] == ["start_thread"])
        ),
    ),
)

# Causes that are the kernel's own, and their remedies.
_KERNELS = {
    "cow": (
        "copy-on-write",
        "fork while little is mapped writable, or start programs by posix_spawn or vfork; snapshots by fork "
        "cost one copy for each page written meanwhile",
    ),
    "fork": ("fork", "start programs by posix_spawn or vfork, which copy no page tables"),
    "collapse": (
        "huge pages that the kernel forms or splits",
        "let purges cover whole huge pages, or turn them off for this program (prctl PR_SET_THP_DISABLE, or "
        "`madvise` in /sys/kernel/mm/transparent_hugepage/enabled)",
    ),
    "numa": (
        "NUMA balancing",
        "pin the program to a node (numactl --cpunodebind=0 --membind=0), or sysctl kernel.numa_balancing=0",
    ),
    "ksm": ("merging of same pages (KSM)", "echo 2 > /sys/kernel/mm/ksm/run unmerges and stops it"),
    "reclaim": (
        "reclaim: the machine, or the cgroup, is short of memory",
        "raise memory.high or memory.max, or need less: `calm compare` shows which allocator does",
    ),
    "compaction": (
        "compaction for huge pages",
        "`defer` or `madvise` in /sys/kernel/mm/transparent_hugepage/defrag",
    ),
    "migration": ("pages moving between nodes", "pin the program's memory, or move it once"),
    "mremap": (
        "mremap of blocks that move",
        "reserve the size that a buffer will have; each move of a large block is a shootdown",
    ),
    "msync": ("writing back of mapped files", "msync more at once and less often"),
    "membarrier": ("membarrier", "one call for each purge of a grace period is too many: batch them"),
}
assert set(_KERNELS) <= set(CAUSES)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def _sum(profile: Profile, *names: str) -> float:
    return sum(profile.value(name) or 0 for name in names)


def _evidence(numbers: Mapping[str, float | None], cpu_s: float | None) -> str:
    found = [f"about {number:,.0f} {what}" for what, number in numbers.items() if number]
    return ", ".join([*found, f"{cpu_s:.2f} s of CPU time"] if cpu_s else found)


def _finding(
    source: str,
    remedy: str,
    evidence: str,
    *parts: tuple[str, float, float, float],
    share: float | None = None,
) -> Iterator[Finding]:
    """One, if any part is notable; each is its whole in words, the part, the whole, and the smallest part."""
    shares = {
        what: min(1.0, part / whole)
        for what, part, whole, at_least in parts
        if whole and part >= at_least and part / whole >= _MIN_SHARE
    }
    if shares:
        text = " and ".join(f"{_percent(each)} of {what}" for what, each in shares.items())
        share = max(shares.values()) if share is None else share
        yield Finding(f"{text} come from {source}.", evidence, remedy, round(min(1.0, share), 4))


def _place(profile: Profile, place: Place, paths: Sequence[Path]) -> Iterator[Finding]:
    weights: defaultdict[str, float] = defaultdict(float)
    called: defaultdict[str, float] = defaultdict(float)
    for stack in (path.stack for path in paths):
        weights[stack.kind] += stack.weight
        if stack.kind == CALL:
            called[stack.cause] += stack.weight
    calls = sorted(called.items(), key=lambda call: -call[1])
    shootdowns, begun = profile.value("shootdowns") or 0, weights[SHOOTDOWN]
    share = begun / shootdowns if shootdowns else 0.0
    parts = []
    for call, number in calls[:1]:
        every_call = profile.value(call) or sum(called.values())
        parts.append((f"{every_call:,.0f} {call} calls", number, every_call, _MIN_EVENTS))
        # Many calls of a kind that is rare matter little.
        if begun < _MIN_EVENTS or share < _MIN_SHARE:
            share = number / (sum(cause.calls or 0 for cause in profile.causes) or every_call)
    if profile.causes_counted or profile.sampled.get(SHOOTDOWN, 0.0) >= FEW_SAMPLES:
        parts.append((f"the program's {shootdowns:,.0f} shootdowns", begun, shootdowns, _MIN_EVENTS))
    allocator = min((path.allocator for path in paths if path.allocator), default=profile.allocator)
    purging = _PURGING.get(allocator, "")
    purging += "" if purging == _OWN else "; or `calm run -a calmalloc`"
    evidence = _evidence({"shootdowns": begun} | {f"{name} calls": n for name, n in calls}, weights[CPU])
    yield from _finding(
        place.what.format(allocator=allocator),
        place.remedy.format(purging=purging),
        f"{evidence}, by {sum(path.stack.samples for path in paths):,} samples",
        *parts,
        share=share,
    )


def _kernel(profile: Profile, found: Cause) -> Iterator[Finding]:
    shootdowns, cpu = _sum(profile, "shootdowns"), _sum(profile, "user_s", "system_s")
    faults = _sum(profile, "minor_faults", "major_faults")
    yield from _finding(
        *_KERNELS[found.key],
        _evidence({"shootdowns": found.shootdowns, "faults": found.faults}, found.cpu_s),
        (f"the program's {shootdowns:,.0f} shootdowns", found.shootdowns or 0, shootdowns, _MIN_EVENTS),
        (f"{faults:,.0f} page faults", found.faults or 0, faults, 10 * _MIN_EVENTS),
        ("the CPU time", found.cpu_s or 0, cpu, 0.05),
    )


def _refaults(profile: Profile, processes: int) -> Iterator[Finding]:
    faults, peak = _sum(profile, "minor_faults"), _sum(profile, "peak_rss_kib")
    # Each process may have touched the whole peak once, and given nothing back before its end.
    if not peak or faults < 10_000 or faults * _PAGE_KIB < _REFAULTS * peak * processes:
        return
    spent = sum(s.weight for s in profile.stacks if s.kind == CPU and s.cause == "fault")
    cpu = _sum(profile, "user_s", "system_s")
    evidence = [f"{faults:,.0f} minor faults for a peak of {peak / 1024:.1f} MiB", _evidence({}, spent)]
    yield Finding(
        f"Page faults brought in {faults * _PAGE_KIB / peak:.0f} times the largest footprint: memory is "
        "given back and taken again.",
        ", ".join(filter(None, evidence)),
        _OWN if _PURGING.get(profile.allocator) == _OWN else f"keep freed memory longer; {_TUNE}",
        round(min(1.0, spent / cpu), 4) if cpu and profile.kernel_stacks else None,
    )


def managing_share(profile: Profile) -> float | None:
    """The part of the CPU time that memory management in the kernel took; None if it was not sampled."""
    ticks = [stack for stack in profile.stacks if stack.kind == CPU]
    total = sum(stack.weight for stack in ticks)
    if not total or not profile.kernel_stacks:
        return None
    return sum(stack.weight for stack in ticks if stack.cause != "other") / total


def find(profile: Profile, processes: int = 1) -> list[Finding]:
    """All findings, the largest share first; `processes` counts those that have ended, too."""
    share = managing_share(profile)
    ticks = sum(stack.samples for stack in profile.stacks if stack.kind == CPU)
    rate = _sum(profile, "shootdowns") / max(profile.wall_s, 1e-9)
    if share is not None and share < _LITTLE and ticks >= 50 and rate < 1000:
        return [
            Finding(
                f"Memory management takes {_percent(share)} of the CPU time: nothing to mend here.",
                f"{ticks:,} samples of CPU time, {rate:,.0f} shootdowns a second",
                share=round(share, 4),
            )
        ]
    by_place: dict[Place, list[Path]] = {place: [] for place in _PLACES}
    for path in (_path(profile, stack) for stack in profile.stacks):
        if place := next((place for place in _PLACES if place.holds(path)), None):
            by_place[place].append(path)
    found = [finding for place, paths in by_place.items() for finding in _place(profile, place, paths)]
    for cause in profile.causes:
        found += _kernel(profile, cause) if cause.key in _KERNELS else ()
    found += _refaults(profile, processes)
    return sorted(found, key=lambda finding: -(finding.share or 0))
