"""What to do about a verdict: commands, and the settings of the allocator in question."""

from __future__ import annotations

from collections.abc import Sequence

from calm.commands.explain.model import Heap

_ANY = ""
_PROFILE = "`calm heap run --pid {pid} --for 30s` names the stacks whose blocks stay, without a restart."
_PROFILE_WITH = (
    "`calm heap run -- CMD` runs the program with calmalloc, and names the stacks that hold memory."
)
_TRACEMALLOC = (
    "`python3 -X tracemalloc` records which lines hold memory; tracemalloc.take_snapshot() has them by size."
)

# By verdict and allocator; those of _ANY apply to every one, and follow. {pid} is the process.
_STEPS: dict[str, dict[str, tuple[str, ...]]] = {
    "leak_suspected": {
        "calmalloc": (_PROFILE,),
        "glibc": (_PROFILE_WITH,),
        "mimalloc": (_PROFILE_WITH,),
        "jemalloc": (
            "{settings}=prof:true,prof_final:true writes a heap profile for jeprof, if jemalloc was built"
            " with profiling.",
        ),
        "pymalloc": (_TRACEMALLOC,),
        _ANY: ("Repeat with a longer interval, `calm explain --for 10min {pid}`: a cache stops growing.",),
    },
    "in_use": {
        "calmalloc": (_PROFILE,),
        "glibc": (_PROFILE_WITH,),
        "jemalloc": (_PROFILE_WITH,),
        "mimalloc": (_PROFILE_WITH,),
        "pymalloc": (_TRACEMALLOC,),
        _ANY: (
            "No setting of an allocator changes this: the program must hold less.",
            "`calm explain --for 1min {pid}` shows whether it grows.",
        ),
    },
    "cached": {
        "calmalloc": (
            "`calm trim {pid}` flushes the caches. They are bounded for each CPU, whatever the threads.",
        ),
        "glibc": (
            "GLIBC_TUNABLES=glibc.malloc.tcache_count=0 disables the threads' caches.",
            "A pool with fewer threads has fewer caches.",
            "calmalloc has caches for CPUs instead: `calm compare -a glibc,calmalloc -- CMD`.",
        ),
        "jemalloc": (
            "{settings}=tcache_max:1024 limits the caches to small blocks; tcache:false disables them.",
            'A thread that becomes idle can call {control}("thread.tcache.flush", 0, 0, 0, 0).',
        ),
        "mimalloc": (
            "A thread that becomes idle can call {control}(true).",
            "A pool with fewer threads has fewer caches.",
        ),
    },
    "retained": {
        "calmalloc": (
            "`calm trim {pid}` returns it at once; what stays unused is returned without it.",
            "CALM_OPTIONS=memory_per_cpu=1 keeps it for a shorter time (docs/retention.md).",
        ),
        "glibc": (
            "malloc_trim(0), called by the program, returns it at once.",
            "`calm run -a ptlbmalloc2 -- CMD` trims all arenas by one threshold.",
            "`calm run -a calmalloc -- CMD` returns free pages wherever they are.",
            "GLIBC_TUNABLES=glibc.malloc.arena_max=2 keeps fewer arenas; trim_threshold limits only tops.",
        ),
        "ptlbmalloc2": (
            "`calm trim {pid}` trims all arenas at the library's next check.",
            "malloc_trim(0), called by the program, also returns pages between blocks.",
        ),
        "jemalloc": (
            "{settings}=background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0 returns it within about"
            " a second, also while the program is idle.",
            '{control}("arena.4096.purge", 0, 0, 0, 0), called by the program, returns it at once.',
        ),
        "mimalloc": (
            "MIMALLOC_PURGE_DELAY=0 returns pages as soon as they are free, for more system calls.",
            "{control}(true) returns what the calling thread keeps.",
        ),
        "gperftools": ("TCMALLOC_RELEASE_RATE=10 returns it sooner, while the program frees memory.",),
        "tcmalloc": ("MallocExtension::ReleaseMemoryToSystem, called by the program, returns it.",),
    },
    "fragmentation": {
        "glibc": ("GLIBC_TUNABLES=glibc.malloc.arena_max=1 packs the blocks of all threads into one arena.",),
        "jemalloc": ("{settings}=narenas:1 packs the blocks of all threads into one arena.",),
        _ANY: (
            "It returns when the program frees those blocks, or restarts.",
            "Allocate long-lived blocks first, or from a pool of their own, apart from short-lived ones.",
            "Other allocators place blocks differently: `calm compare -a glibc,calmalloc,jemalloc -- CMD`.",
        ),
    },
    "huge_pages": {
        "glibc": ("GLIBC_TUNABLES=glibc.malloc.hugetlb=0, the default, requests no huge pages.",),
        "calmalloc": ("CALM_OPTIONS=huge_pages=never makes calmalloc request none.",),
        "jemalloc": ("{settings}=thp:never makes jemalloc decline them.",),
        "mimalloc": ("MIMALLOC_ALLOW_THP=0 makes mimalloc decline them.",),
        _ANY: (
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` limits them to memory for which the"
            " program requests them.",
        ),
    },
    "shared": {
        _ANY: (
            "The end of this process alone does not return it. Add up Pss of /proc/PID/smaps_rollup over all"
            " processes that share it.",
            "`calm explain --for 1min {pid}` shows whether it writes to shared pages, and so copies them.",
        ),
    },
    "other_mappings": {
        _ANY: (
            "`pmap -XX {pid}` lists the mappings; `perf trace -p {pid} -e mmap,munmap` shows new ones.",
            "A runtime with a heap of its own (JVM, Go, a JIT compiler) has tools and limits of its own; no"
            " preloaded allocator changes it.",
        ),
    },
    "unknown": {
        _ANY: ("Run it with an allocator that can be read: `calm explain -- calm run -a calmalloc -- CMD`.",),
    },
}

# Calls by which a library's users make its allocator return what it retains, by a word in the library's name.
_CALLS = {
    ("duckdb", "jemalloc"): (
        "`SET allocator_background_threads=true`, executed in SQL at any time, returns it within about a"
        " second."
    ),
    ("libarrow", "mimalloc"): (
        "`pyarrow.default_memory_pool().release_unused()` returns it at once; the method of any pool acts on"
        " the default pool."
    ),
}
# For a process as it is. By allocator: the function that gdb calls, with its type and arguments.
_BY_GDB = {
    "glibc": "(int)malloc_trim(0)",
    "jemalloc": '(int){control}("arena.4096.purge", 0, 0, 0, 0)',
    "mimalloc": "(void){control}(1)",
    "gperftools": "(void)MallocExtension_ReleaseFreeMemory()",
}
_GDB = (
    "`gdb -p {pid} -batch -ex 'call %s'` returns it. That stops the program, hangs if a thread is in malloc,"
    " and with an old gdb (13.1, on processors with AMX) breaks the system call in which the program waits"
)


def _of(verdict: str, allocator: str) -> tuple[str, ...]:
    """Those of one allocator alone."""
    found = _STEPS.get(verdict, {})
    if allocator == "ptlbmalloc2" and allocator not in found:
        allocator = "glibc"
    return found.get(allocator, ()) if allocator != _ANY else ()


def steps(
    verdict: str, heap: Heap | None, pid: int, also: Sequence[tuple[str, Heap | None]] = ()
) -> tuple[str, ...]:
    """For a verdict on a heap. Each further one adds its allocator's first step."""
    words = [*_steps(verdict, heap, pid)]
    for further, other in also:
        of_other = _applied(_of(further, other.allocator if other else _ANY), further, other, pid)[:1]
        words += [each for each in of_other if each not in words]
    return tuple(words)


def release(allocator: str, heap: Heap | None, pid: int) -> str:
    """How a running process's allocator is made to return what it retains; "" where no way is known."""
    if call := _call(heap):
        return call
    if allocator in _BY_GDB and (_control(heap) or "{control}" not in _BY_GDB[allocator]):
        words: tuple[str, ...] = (_GDB % _BY_GDB[allocator],)
    else:
        words = _of("retained", allocator)[:1]
    return next(iter(_applied(words, "retained", heap, pid)), "")


def _call(heap: Heap | None) -> str:
    """Of the library that brought the heap."""
    if heap is None:
        return ""
    found = (words for (name, of), words in _CALLS.items() if of == heap.allocator and name in heap.library)
    return next(found, "")


def _control(heap: Heap | None) -> str:
    return heap.control if heap else ""


def _settings(heap: Heap | None) -> str:
    return (heap.settings if heap else "") or "MALLOC_CONF"


def _steps(verdict: str, heap: Heap | None, pid: int) -> tuple[str, ...]:
    words = (*_of(verdict, heap.allocator if heap else _ANY), *_STEPS.get(verdict, {}).get(_ANY, ()))
    if verdict == "retained" and (call := _call(heap)):
        words = (call, *words)
    return _applied(words, verdict, heap, pid)


def _applied(words: tuple[str, ...], verdict: str, heap: Heap | None, pid: int) -> tuple[str, ...]:
    """Those that apply to a heap, with its names."""
    if heap and heap.facts.get("arenas") == 1:
        words = tuple(each for each in words if "arena_max" not in each)
    if heap and heap.facts.get("top", 0) < heap.retained.bytes / 2:
        # It returns what is free at the tops alone.
        words = tuple(each for each in words if "-a ptlbmalloc2" not in each)
    if heap and heap.library and verdict != "unknown":
        # No preloaded allocator takes its place.
        words = tuple(each for each in words if "-- CMD`" not in each)
    control = _control(heap)
    if not control:
        words = tuple(each for each in words if "{control}" not in each)
    return tuple(each.format(pid=pid, settings=_settings(heap), control=control) for each in words)
