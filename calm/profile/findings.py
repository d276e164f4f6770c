"""What a profile means, in words: rules that each look for one thing, with its numbers and its remedy."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from calm.profile.model import CALL, CAUSES, CPU, SHOOTDOWN, Finding, Profile, Stack

# A thing that is less of its kind is not worth a sentence; nor is one that happened this seldom.
_LEAST_SHARE = 0.05
_LEAST_CALLS = 100
_LEAST_SHOOTDOWNS = 100
# What memory management may take of the CPU time before it is worth mending.
_LITTLE = 0.02
_PAGE_KIB = 4
_REFAULTS = 4

_OWN = "keep more of what is freed: CALM_OPTIONS=slack=200 or more (see calmalloc(7))"
_ELSE = "; or `calm run -a calmalloc`"
_ALLOCATORS = {
    "jemalloc": f"slow down its decay: MALLOC_CONF=dirty_decay_ms:60000,background_thread:true{_ELSE}",
    "mimalloc": f"slow down its purging: MIMALLOC_PURGE_DELAY=1000 or longer{_ELSE}",
    "tcmalloc": "slow down its release rate: TCMALLOC_RELEASE_RATE (gperftools), or the background release "
    f"rate{_ELSE}",
    "snmalloc": f"use a build whose decay is slower{_ELSE}",
    "rpmalloc": f"use a build with larger caches{_ELSE}",
    "ptlbmalloc2": f"raise its threshold: PTLBMALLOC2_SENSITIVITY=2 or more (see ptlbmalloc2(7)){_ELSE}",
    "calmalloc": _OWN,
}
_MODULE = re.compile(f"lib({'|'.join(_ALLOCATORS)})")
_CALMER = "`calm tune` looks for settings that end it, `calm run -a calmalloc` does without it"


def plain(function: str) -> str:
    """A C library's function by its plain name: free for __GI___libc_free and cfree@GLIBC_2.2.5."""
    name = function.partition("@")[0].removeprefix("__GI_").lstrip("_").removeprefix("libc_")
    return "free" if name == "cfree" else name


@dataclass(frozen=True)
class Path:
    """A stack, by what the rules ask."""

    stack: Stack
    functions: tuple[str, ...]
    """Of user mode, plain, the outermost first."""
    modules: frozenset[str]

    def has(self, *names: str) -> bool:
        """One of the functions is on it."""
        return any(name in self.functions for name in names)

    @property
    def allocator(self) -> str | None:
        """The allocator, other than the C library's, whose code is on it."""
        found = (_MODULE.match(module) for module in sorted(self.modules))
        return next((match[1] for match in found if match), None)


_FREES = ("free", "int_free", "realloc", "int_realloc", "malloc_trim", "malloc_arena_thread_freeres")


def is_arena_trim(path: Path) -> bool:
    """The top of a secondary arena's heap is given back by glibc; heap_trim may be inlined."""
    if path.allocator:
        return False
    named = path.has("heap_trim", "shrink_heap")
    return named or (path.stack.cause == "madvise" and path.has(*_FREES))


def is_brk_shrink(path: Path) -> bool:
    """The top of the main heap is given back by glibc."""
    return path.has("systrim") or (path.stack.cause == "brk" and path.has(*_FREES))


def is_heap_growth(path: Path) -> bool:
    """More of a secondary arena's heap is made accessible by glibc, a little at a time."""
    grows = path.has("grow_heap", "sysmalloc", "int_malloc", "new_heap")
    return path.stack.cause == "mprotect" and grows


def is_mmap_churn(path: Path) -> bool:
    """A block above the mmap threshold is freed."""
    return path.stack.cause == "munmap" and path.has(*_FREES)


def is_thread_end(path: Path) -> bool:
    """A thread's stack is made, given back or unmapped."""
    named = path.has(
        *("advise_stack_range", "nptl_free_tcb", "nptl_deallocate_stack", "nptl_free_stacks", "queue_stack"),
        *("allocate_stack", "pthread_create", "pthread_create_2_1", "free_stacks", "nptl_stack_list_del"),
        *(
            "pthread_join",
            "pthread_clockjoin_ex",
            "allocate_thread_stack",
            "setup_stack_prot",
            "nptl_free_stack",
        ),
    )
    bare = path.functions[-2:-1] == ("start_thread",) and path.stack.cause in ("madvise", "munmap")
    return (named or bare) and not path.has(*_FREES)


def is_purge(path: Path) -> bool:
    """An allocator other than glibc's gives memory back."""
    return path.allocator is not None and path.stack.cause in ("madvise", "process_madvise", "munmap")


@dataclass(frozen=True)
class _Place:
    """A way in which user code makes the kernel work."""

    holds: Callable[[Path], bool]
    what: str
    remedy: Callable[[str], str]


# Each stack is of the first that holds.
_PLACES = (
    _Place(
        is_purge,
        "{allocator}'s purging of freed memory",
        lambda allocator: _ALLOCATORS[allocator],
    ),
    _Place(
        is_arena_trim,
        "arena trimming in glibc's free",
        lambda _: (
            "a higher trim threshold (GLIBC_TUNABLES=glibc.malloc.trim_threshold=268435456) keeps the top of "
            f"each arena; {_CALMER}"
        ),
    ),
    _Place(
        is_brk_shrink,
        "glibc's free shrinking the main heap",
        lambda _: (
            "a higher trim threshold and padding (GLIBC_TUNABLES=glibc.malloc.trim_threshold=268435456:"
            f"glibc.malloc.top_pad=16777216); {_CALMER}"
        ),
    ),
    _Place(
        is_heap_growth,
        "glibc's arenas growing page by page",
        lambda _: (
            "more padding for each growth (GLIBC_TUNABLES=glibc.malloc.top_pad=1048576), and less trimming, "
            f"which makes them grow again; {_CALMER}"
        ),
    ),
    _Place(
        is_mmap_churn,
        "blocks above the mmap threshold being freed",
        lambda _: (
            "a higher threshold (GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1073741824) keeps them on the "
            f"heap; {_CALMER}"
        ),
    ),
    _Place(
        is_thread_end,
        "threads that begin and end (their stacks)",
        lambda _: (
            "keep threads in a pool; more stacks are kept by "
            "GLIBC_TUNABLES=glibc.pthread.stack_cache_size=268435456"
        ),
    ),
)

# Causes that are the kernel's own, and what ends them.
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
    "msync": ("writing back of mapped files", "msync more at once and more seldom"),
    "membarrier": ("membarrier", "a use for each purge of a grace period is too many: batch them"),
}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def _paths(profile: Profile) -> list[Path]:
    found = []
    for stack in profile.stacks:
        frames = [profile.frames[index] for index in stack.frames]
        users = [frame for frame in frames if not frame.kernel]
        found.append(
            Path(
                stack,
                tuple(plain(frame.function) for frame in users),
                frozenset(frame.module for frame in users),
            )
        )
    return found


def _place(
    profile: Profile, paths: list[Path], place: _Place, earlier: tuple[_Place, ...]
) -> Iterator[Finding]:
    met = [path for path in paths if place.holds(path) and not any(e.holds(path) for e in earlier)]
    shot = sum(path.stack.weight for path in met if path.stack.kind == SHOOTDOWN)
    shootdowns = profile.value("shootdowns") or 0
    calls: dict[str, float] = {}
    for path in met:
        if path.stack.kind == CALL:
            calls[path.stack.cause] = calls.get(path.stack.cause, 0) + path.stack.weight
    cpu = sum(path.stack.weight for path in met if path.stack.kind == CPU)
    call = max(calls, key=lambda name: calls[name], default=None)
    all_calls = (profile.value(call) or sum(calls.values())) if call else 0
    share = shot / shootdowns if shootdowns else 0.0
    of_shootdowns = shot >= _LEAST_SHOOTDOWNS and share >= _LEAST_SHARE
    of_calls = call is not None and calls[call] >= max(_LEAST_CALLS, _LEAST_SHARE * all_calls)
    if not (of_shootdowns or of_calls):
        return
    allocators = {path.allocator for path in met if path.allocator}
    allocator = min(allocators) if allocators else profile.allocator
    what = place.what.format(allocator=allocator)
    parts = []
    if call is not None and of_calls:
        part = min(1.0, calls[call] / all_calls)
        parts.append(f"{_percent(part)} of {all_calls:,.0f} {call} calls")
        # Many calls of a kind that is rare matter little.
        every = sum(cause.calls or 0 for cause in profile.causes)
        share = share if of_shootdowns else min(1.0, calls[call] / every) if every else part
    if of_shootdowns:
        parts.append(f"{_percent(share)} of the program's {shootdowns:,.0f} shootdowns")
    evidence = [f"about {shot:,.0f} shootdowns"] if shot else []
    evidence += [
        f"about {number:,.0f} {name} calls" for name, number in sorted(calls.items(), key=lambda c: -c[1])
    ]
    evidence += [f"{cpu:.2f} s of CPU time"] if cpu else []
    samples = sum(path.stack.samples for path in met)
    yield Finding(
        f"{' and '.join(parts)} come from {what}.",
        f"{', '.join(evidence)}, by {samples:,} samples",
        place.remedy(allocator),
        round(min(1.0, share), 4),
    )


def _kernel(profile: Profile, cause: str) -> Iterator[Finding]:
    found = next((c for c in profile.causes if c.key == cause), None)
    if found is None:
        return
    shootdowns = profile.value("shootdowns") or 0
    cpu = (profile.value("user_s") or 0) + (profile.value("system_s") or 0)
    faults = (profile.value("minor_faults") or 0) + (profile.value("major_faults") or 0)
    shares = {
        f"the program's {shootdowns:,.0f} shootdowns": (found.shootdowns or 0, shootdowns, _LEAST_SHOOTDOWNS),
        f"{faults:,.0f} page faults": (found.faults or 0, faults, 10 * _LEAST_SHOOTDOWNS),
        "the CPU time": (found.cpu_s or 0, cpu, 0.05),
    }
    notable = {
        what: part / whole
        for what, (part, whole, least) in shares.items()
        if whole and part >= least and part / whole >= _LEAST_SHARE
    }
    if not notable:
        return
    name, remedy = _KERNELS[cause]
    parts = [f"{_percent(min(share, 1.0))} of {what}" for what, share in notable.items()]
    evidence = [f"about {found.shootdowns:,.0f} shootdowns"] if found.shootdowns else []
    evidence += [f"about {found.faults:,.0f} faults"] if found.faults else []
    evidence += [f"{found.cpu_s:.2f} s of CPU time"] if found.cpu_s else []
    share = round(min(1.0, max(notable.values())), 4)
    yield Finding(f"{' and '.join(parts)} come from {name}.", ", ".join(evidence), remedy, share)


def _refaults(profile: Profile, processes: int) -> Iterator[Finding]:
    faults, peak = profile.value("minor_faults"), profile.value("peak_rss_kib")
    # Each process may have brought in the whole peak once, and given nothing back before its end.
    if not faults or not peak or faults < 10_000 or faults * _PAGE_KIB < _REFAULTS * peak * processes:
        return
    touched = faults * _PAGE_KIB
    spent = sum(s.weight for s in profile.stacks if s.kind == CPU and s.cause == "fault")
    cpu = (profile.value("user_s") or 0) + (profile.value("system_s") or 0)
    yield Finding(
        f"Page faults brought in {touched / peak:.0f} times the largest footprint: memory is given back and "
        "taken again.",
        f"{faults:,.0f} minor faults for a peak of {peak / 1024:.1f} MiB"
        + (f", {spent:.2f} s of CPU time" if spent else ""),
        _OWN if profile.allocator == "calmalloc" else f"keep freed memory longer; {_CALMER}",
        round(min(1.0, spent / cpu), 4) if cpu and profile.kernel_stacks else None,
    )


def managing_share(profile: Profile) -> float | None:
    """Of the CPU time, what the kernel's memory management took; None where it was not sampled."""
    ticks = [stack for stack in profile.stacks if stack.kind == CPU]
    total = sum(stack.weight for stack in ticks)
    if not total or not profile.kernel_stacks:
        return None
    return sum(stack.weight for stack in ticks if stack.cause != "other") / total


def find(profile: Profile, processes: int = 1) -> list[Finding]:
    """All that the rules see, what matters most first; of so many processes, those that ended too."""
    paths = _paths(profile)
    found: list[Finding] = []
    for index, place in enumerate(_PLACES):
        found += _place(profile, paths, place, _PLACES[:index])
    for cause in _KERNELS:
        found += _kernel(profile, cause)
    found += _refaults(profile, processes)
    found.sort(key=lambda finding: -(finding.share or 0))
    share = managing_share(profile)
    ticks = sum(stack.samples for stack in profile.stacks if stack.kind == CPU)
    if share is not None and share < _LITTLE and ticks >= 50:
        rate = (profile.value("shootdowns") or 0) / max(profile.wall_s, 1e-9)
        if rate < 1000:
            return [
                Finding(
                    f"Memory management takes {_percent(share)} of the CPU time: nothing to mend here.",
                    f"{ticks:,} samples of CPU time, {rate:,.0f} shootdowns a second",
                    None,
                    round(share, 4),
                )
            ]
    return found


assert set(_KERNELS) <= set(CAUSES)
