"""The rules of `calm tune advise`: what each reads, from where on it matters, and what to set.

After "Tuning glibc malloc on ARM: a case study" (2023), whose diagnosis of t-test1 the first four repeat, and
Schildermans et al., "Ptlbmalloc2" for shootdowns. Each rule is a function of the facts alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from calm.commands.tune.facts import Calls, Facts, UnknownFactError
from calm.core.environment import TUNABLES
from calm.core.report import memory

_MIB = 1024 * 1024
_MAX_MMAP_THRESHOLD = 32 * _MIB

# Below these, what a rule is about costs too little to be noticed: some ten ms of a second at most.
MIN_FAULTS = 20_000
FAULTS_A_PAGE = 5.0
RETURNED_SHARE = 0.3
MIN_COUNT = 100
OFTEN = 50.0
MIN_GROWN = 256
MAX_GROWN_BYTES = 256 * 1024
HUGE_RSS_KIB = 8 * 1024
MIN_ARENAS = 8
ARENAS_RSS_KIB = 64 * 1024
SHOOTDOWNS_A_SECOND = 1000.0
BLOAT_RATIO = 1.25
BLOAT_KIB = 32 * 1024


@dataclass(frozen=True)
class Remedy:
    """What to set, or to do, and what that costs."""

    cost: str
    environment: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""
    """What to do if no variable helps."""


@dataclass(frozen=True)
class Finding:
    """A rule that fires."""

    rule: str
    sentence: str
    evidence: Mapping[str, float | int | str]
    threshold: str
    remedies: Sequence[Remedy] = ()


@dataclass(frozen=True)
class Unjudged:
    """A rule whose facts are not known, and why."""

    rule: str
    reason: str


Judged = tuple[bool, Mapping[str, Any], Sequence[Remedy]]
Check = Callable[[Facts], Judged]
"""Whether a rule fires, and if so its evidence and remedies. Raises UnknownFactError."""

RULES: list[tuple[Finding, Check]] = []
"""What each finds, without the evidence and the remedies, which its function returns."""


def _rule(name: str, sentence: str, threshold: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES.append((Finding(name, sentence, {}, threshold), check))
        return check

    return register


def _often(count: int, seconds: float, a_second: float = OFTEN) -> bool:
    return count >= MIN_COUNT and count / seconds >= a_second


def _power_of_two(at_least: int) -> int:
    return 1 << max(0, at_least - 1).bit_length()


def _trim_remedy(facts: Facts) -> Remedy:
    """A trim threshold that the program does not reach, 32 MiB at least, as in the case study."""
    threshold = max(32 * _MIB, _power_of_two(facts.peak_rss_kib * 1024))
    cost = (
        f"each arena may keep {memory(threshold / 1024)} that it does not use; and glibc stops adapting its "
        "thresholds, so blocks from 128 KiB on are mapped one by one unless MALLOC_MMAP_THRESHOLD_ is set too"
    )
    return Remedy(cost, {"MALLOC_TRIM_THRESHOLD_": str(threshold)})


@_rule(
    "page-faults",
    "memory that malloc returns is touched again: far more page faults than the footprint has pages",
    f"at least {MIN_FAULTS:,} faults, {FAULTS_A_PAGE:g} for each page of the peak RSS, and "
    f"{RETURNED_SHARE:.0%} as many pages returned: a program that touches each page once has one fault for "
    "each (the case study: 12,304,107 faults where some 5,000 would do)",
)
def _page_faults(facts: Facts) -> Judged:
    calls, faults = facts.calls, facts.minor_faults
    pages = max(1, facts.peak_rss_kib // facts.page_kib)
    fires = faults >= MIN_FAULTS and faults / pages >= FAULTS_A_PAGE
    evidence = {
        "minor_faults": faults,
        "pages_at_the_peak": pages,
        "faults_for_each_page": round(faults / pages, 1),
    }
    if fires and facts.processes > 1:
        # Each of several programs faults its text in.
        calls = facts.known("calls")
    if calls is not None:
        returned = calls.returned_bytes / 1024 / facts.page_kib
        # A record of a part of the run is compared with the same part of the faults.
        recorded = min(1.0, calls.wall_s / facts.wall_s) if calls.truncated else 1.0
        fires = fires and returned >= RETURNED_SHARE * faults * recorded
        evidence["pages_returned"] = round(returned)
    return fires, evidence, [_trim_remedy(facts)]


@_rule(
    "heap-churn",
    "heaps are shrunk, and used again right away: each time is a system call, faults, and with several "
    "threads a TLB shootdown",
    f"at least {MIN_COUNT} times, and {OFTEN:g} a second: a program whose heap only follows its "
    "load shrinks it a few times",
)
def _heap_churn(facts: Facts) -> Judged:
    calls: Calls = facts.known("calls")
    shrunk = calls.brk_shrunk + calls.trimmed
    evidence = {
        "heaps_shrunk": shrunk,
        "heaps_grown": calls.brk_grown + calls.grown,
        "shrunk_a_second": round(shrunk / calls.wall_s),
        "bytes_returned": calls.brk_shrunk_bytes + calls.trimmed_bytes,
    }
    pad = Remedy("as much memory at the end of each arena", {"MALLOC_TOP_PAD_": str(4 * _MIB)})
    return _often(shrunk, calls.wall_s), evidence, [_trim_remedy(facts), pad]


@_rule(
    "small-steps",
    "heaps are made writable a few pages at a time, so that the kernel can use no huge page for them",
    f"at least {MIN_GROWN} mprotect calls with a median below {memory(MAX_GROWN_BYTES / 1024)}, under a "
    f"tenth of it in huge pages, and a peak RSS from {memory(HUGE_RSS_KIB)}: below four huge pages there is "
    "nothing to gain",
)
def _small_steps(facts: Facts) -> Judged:
    calls: Calls = facts.known("calls")
    fires = (
        calls.grown >= MIN_GROWN
        and calls.grown_median_bytes < MAX_GROWN_BYTES
        and facts.peak_rss_kib >= HUGE_RSS_KIB
        and facts.huge_pages in ("always", "madvise")
        and facts.known("huge_kib") * 10 < facts.peak_rss_kib
    )
    evidence = {
        "mprotect_to_grow": calls.grown,
        "median_bytes": round(calls.grown_median_bytes),
        "anon_huge_pages_kib": facts.huge_kib,
        "peak_rss_kib": facts.peak_rss_kib,
        "transparent_huge_pages": facts.huge_pages,
    }
    cost = "up to that much more resident in each arena: the case study's program went from 14 to 22 MiB"
    pad = Remedy(cost, {"MALLOC_TOP_PAD_": str(20 * _MIB)})
    cost = "memory in units of 2 MiB, resident where a few bytes of it are touched"
    huge = Remedy(cost, {TUNABLES: "glibc.malloc.hugetlb=1"})
    return fires, evidence, [pad, huge] if facts.huge_pages == "always" else [huge]


@_rule(
    "large-blocks",
    "large blocks are mapped for each allocation and unmapped by each free",
    f"at least {MIN_COUNT} times, and {OFTEN:g} a second: each costs two system calls, a fault for "
    "each of its pages, and with several threads a TLB shootdown",
)
def _large_blocks(facts: Facts) -> Judged:
    calls: Calls = facts.known("calls")
    evidence = {
        "mapped": calls.mapped_large,
        "unmapped": calls.unmapped_large,
        "unmapped_a_second": round(calls.unmapped_large / calls.wall_s),
        "largest_bytes": calls.largest_bytes,
    }
    threshold = _power_of_two(calls.largest_bytes + 1)
    remedy = Remedy(
        f"such blocks come from the heap, which may keep {memory(2 * threshold / 1024)}",
        {"MALLOC_MMAP_THRESHOLD_": str(threshold), "MALLOC_TRIM_THRESHOLD_": str(2 * threshold)},
    )
    if calls.largest_bytes >= _MAX_MMAP_THRESHOLD:
        remedy = Remedy(
            "memory that it keeps for a while",
            otherwise="glibc maps blocks from 32 MiB on in any case: reuse them in the program, or take an "
            "allocator that keeps them (`calm run -a calmalloc -- CMD`)",
        )
    return _often(calls.unmapped_large, calls.wall_s), evidence, [remedy]


@_rule(
    "arenas",
    "most of the memory is in the arenas of many threads: what is free in one serves no other",
    f"at least {MIN_ARENAS} heaps and twice the CPUs, with {memory(ARENAS_RSS_KIB)} and half of the peak RSS "
    "in them. How much of it is free cannot be seen from outside: compare peak RSS with and without",
)
def _arenas(facts: Facts) -> Judged:
    fires = (
        facts.peak_rss_kib >= ARENAS_RSS_KIB
        and facts.known("heaps") >= max(MIN_ARENAS, 2 * facts.cpus)
        and facts.known("heaps_rss_kib") >= max(ARENAS_RSS_KIB, facts.peak_rss_kib / 2)
    )
    evidence = {
        "heaps_of_threads": facts.heaps,
        "resident_in_them_kib": facts.heaps_rss_kib,
        "peak_rss_kib": facts.peak_rss_kib,
        "cpus": facts.cpus,
    }
    cost = "threads that allocate at once wait for each other"
    return fires, evidence, [Remedy(cost, {"MALLOC_ARENA_MAX": str(max(2, facts.cpus))})]


@_rule(
    "short-threads",
    "threads start and end all the time: each end returns a stack, by madvise or munmap, and can begin a TLB "
    "shootdown that no allocator can avoid",
    f"at least {MIN_COUNT} threads, and {OFTEN:g} a second",
)
def _short_threads(facts: Facts) -> Judged:
    started: int = facts.known("threads_started")
    evidence = {"threads_started": started, "started_a_second": round(started / facts.wall_s)}
    if facts.calls is not None:
        evidence["stacks_returned"] = facts.calls.stacks_returned
    pool = Remedy("a change of the program", otherwise="keep threads in a pool")
    cost = "up to 256 MiB of addresses of stacks; their touched pages are returned all the same"
    cache = Remedy(cost, {TUNABLES: "glibc.pthread.stack_cache_size=268435456"})
    return _often(started, facts.wall_s), evidence, [pool, cache]


@_rule(
    "shootdowns",
    "memory is returned so often that CPUs spend their time on TLB shootdowns",
    f"at least {MIN_COUNT}, and {SHOOTDOWNS_A_SECOND:,.0f} a second: at 5 to 20 µs each that is a "
    "percent of a CPU, and on a machine with many CPUs each costs more",
)
def _shootdowns(facts: Facts) -> Judged:
    shootdowns: int = facts.known("shootdowns")
    own = "an allocator of its own, with its own use of memory"
    governor = "glibc's malloc stays; it trims by the whole program"
    return (
        _often(shootdowns, facts.wall_s, SHOOTDOWNS_A_SECOND),
        {"shootdowns": shootdowns, "begun_a_second": round(shootdowns / facts.wall_s)},
        [
            Remedy(own, otherwise="calm run -a calmalloc -- CMD"),
            Remedy(governor, otherwise="calm run -a ptlbmalloc2 -- CMD"),
        ],
    )


@_rule(
    "huge-bloat",
    "huge pages make much more resident than the program touches",
    f"{BLOAT_RATIO:g} times the peak RSS of a run without huge pages, and {memory(BLOAT_KIB)} more",
)
def _huge_bloat(facts: Facts) -> Judged:
    fires = False
    if facts.peak_rss_kib >= BLOAT_KIB and facts.known("huge_kib") and facts.has_huge_pages:
        less = facts.known("peak_without_huge_kib")
        fires = facts.peak_rss_kib >= max(BLOAT_RATIO * less, less + BLOAT_KIB)
    evidence = {
        "peak_rss_kib": facts.peak_rss_kib,
        "peak_rss_without_huge_pages_kib": facts.peak_without_huge_kib,
        "anon_huge_pages_kib": facts.huge_kib,
    }
    remedy = Remedy(
        "more TLB misses and faults for what is touched; the machine's setting "
        "/sys/kernel/mm/transparent_hugepage/enabled is for all programs",
        otherwise="leave glibc.malloc.hugetlb unset, and let the machine's setting be madvise; or disable "
        "huge pages for this program by prctl(PR_SET_THP_DISABLE)",
    )
    return fires, evidence, [remedy]


# About the behaviour of glibc's malloc alone, or with remedies for it alone.
_ABOUT_GLIBC = {"page-faults", "heap-churn", "small-steps", "large-blocks", "arenas"}


def _not_glibc(facts: Facts) -> Finding | None:
    """The program's malloc is not glibc's, or cannot be replaced."""
    if facts.static:
        how = "link it dynamically, or with an allocator in it (libcalmalloc.a)"
        return Finding(
            "static",
            "the program is statically linked: no allocator can be preloaded, and glibc's settings reach it "
            "only if the malloc in it is glibc's",
            {"program": facts.command[0]},
            "a program without a dynamic linker",
            [Remedy("a new build", otherwise=how)],
        )
    if (name := facts.allocator) in (None, "glibc"):
        return None
    governor = "a governor that sets glibc's thresholds itself"
    what = governor if name == "ptlbmalloc2" else "an allocator of its own"
    return Finding(
        "other-allocator",
        f"the program's malloc is that of {name}, {what}: glibc's settings do nothing here",
        {"allocator": name or ""},
        "any allocator but glibc's, by the libraries that are mapped and by the program's own text",
        [Remedy("none", otherwise=f"the settings of {name}, or `calm compare` against glibc")],
    )


def judge(facts: Facts, warnings: Sequence[str] = ()) -> tuple[list[Finding], list[Unjudged], list[str]]:
    """What fires, what could not be judged, and the names of the rules that do not fire."""
    threshold = "any setting of malloc that malloc does not take"
    found = [Finding("environment", line, {"warning": line}, threshold) for line in warnings]
    unjudged: list[Unjudged] = []
    quiet: list[str] = []
    if other := _not_glibc(facts):
        found.append(other)
    for finding, check in RULES:
        if other and finding.rule in _ABOUT_GLIBC:
            unjudged.append(Unjudged(finding.rule, f"it is about glibc's malloc ({other.rule})"))
            continue
        try:
            fires, evidence, remedies = check(facts)
        except UnknownFactError as error:
            unjudged.append(Unjudged(finding.rule, str(error)))
            continue
        if fires:
            found.append(replace(finding, evidence=evidence, remedies=remedies))
        else:
            quiet.append(finding.rule)
    return found, unjudged, quiet


def combined(findings: Sequence[Finding]) -> dict[str, str]:
    """All variables at once: of two values the larger, and tunables side by side."""
    variables: dict[str, str] = {}
    tunables: dict[str, str] = {}
    for remedy in (remedy for finding in findings for remedy in finding.remedies):
        for name, value in remedy.environment.items():
            if name == TUNABLES:
                tunables[value.partition("=")[0]] = value
            else:
                variables[name] = str(max(int(value), int(variables.get(name, value))))
    return variables | ({TUNABLES: ":".join(tunables.values())} if tunables else {})
