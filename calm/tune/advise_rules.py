"""The rules of `calm tune --advise`: what to look at, from where on it matters, and what to set.

After "Tuning glibc malloc on ARM: a case study" (2023), whose diagnosis of t-test1 the first four retell, and
Schildermans et al., "Ptlbmalloc2" for shootdowns. Each rule is a function of the facts alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from calm import report
from calm.environment import TUNABLES
from calm.tune.advise_facts import Calls, Facts, is_huge

_MIB = 1024 * 1024
_MOST_MMAP_THRESHOLD = 32 * _MIB

# Below this, what a rule is about costs too little for anybody to see it: some ten ms of a second at most.
FAULTS_LEAST = 20_000
FAULTS_RATIO = 5.0
RETURNED_SHARE = 0.3
CALLS_LEAST = 100
CALLS_A_SECOND = 50.0
GROWN_LEAST = 256
GROWN_MOST_BYTES = 256 * 1024
HUGE_RSS_KIB = 8 * 1024
ARENAS_LEAST = 8
ARENAS_RSS_KIB = 64 * 1024
THREADS_LEAST = 100
THREADS_A_SECOND = 50.0
SHOOTDOWNS_LEAST = 100
SHOOTDOWNS_A_SECOND = 1000.0
BLOAT_RATIO = 1.25
BLOAT_KIB = 32 * 1024


@dataclass(frozen=True)
class Remedy:
    """What to set, or to do, and what that costs."""

    cost: str
    environment: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""
    """What no variable can do."""


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
    """A rule that nothing can be said by, and why."""

    rule: str
    reason: str


Verdict = Finding | Unjudged | None


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _power_of_two(least: float) -> int:
    power = 1
    while power < least:
        power *= 2
    return power


def _keep(facts: Facts) -> dict[str, str]:
    """A trim threshold that the program does not reach, 32 MiB at least, as in the case study."""
    threshold = max(32 * _MIB, _power_of_two(facts.peak_rss_kib * 1024))
    return {"MALLOC_TRIM_THRESHOLD_": str(threshold)}


def _trim_remedy(facts: Facts) -> Remedy:
    kept = report.memory(int(_keep(facts)["MALLOC_TRIM_THRESHOLD_"]) / 1024)
    return Remedy(
        f"each arena may keep {kept} that it does not use; and glibc stops adapting its thresholds, so "
        "blocks "
        "from 128 KiB on are mapped one by one unless MALLOC_MMAP_THRESHOLD_ is set too",
        _keep(facts),
    )


def _unknown(rule: str, facts: Facts, name: str) -> Unjudged:
    return Unjudged(rule, facts.missing.get(name, "not counted"))


def page_faults(facts: Facts) -> Verdict:
    """Far more faults than the footprint has pages: memory is given back and touched anew."""
    rule = "page-faults"
    pages = max(1, facts.peak_rss_kib // facts.page_kib)
    ratio = facts.faults / pages
    if facts.faults < FAULTS_LEAST or ratio < FAULTS_RATIO:
        return None
    evidence: dict[str, float | int | str] = {
        "minor_faults": facts.faults,
        "pages_at_the_peak": pages,
        "faults_for_each_page": round(ratio, 1),
    }
    calls = facts.calls
    if calls is None:
        if facts.processes > 1:
            return Unjudged(rule, f"of several processes only the calls tell: {facts.missing.get('calls')}")
    else:
        returned = calls.returned_bytes / 1024 / facts.page_kib
        # A record that was cut short has seen that part of the faults alone.
        faults = facts.faults * min(1.0, calls.seconds / facts.wall_s) if calls.truncated else facts.faults
        if returned < RETURNED_SHARE * faults:
            return None
        evidence["pages_given_back"] = round(returned)
    return Finding(
        rule,
        "memory that malloc gives back is touched again: far more page faults than the footprint has pages",
        evidence,
        f"at least {FAULTS_LEAST:,} faults, {FAULTS_RATIO:g} for each page of the peak RSS, and "
        f"{RETURNED_SHARE:.0%} as many pages given back: a program that touches each page once has one fault "
        "for each (the case study: 12,304,107 faults where some 5,000 would do)",
        [_trim_remedy(facts)],
    )


def _shrunk(calls: Calls) -> int:
    return calls.brk_shrunk + calls.trimmed


def heap_churn(facts: Facts) -> Verdict:
    """Heaps are shrunk and grown again."""
    calls = facts.calls
    if calls is None:
        return _unknown("heap-churn", facts, "calls")
    shrunk, grown = _shrunk(calls), calls.brk_grown + calls.grown
    if shrunk < CALLS_LEAST or _rate(shrunk, calls.seconds) < CALLS_A_SECOND:
        return None
    return Finding(
        "heap-churn",
        "heaps are shrunk, and used again right away: each time is a system call, faults, and with several "
        "threads a TLB shootdown",
        {
            "heaps_shrunk": shrunk,
            "heaps_grown": grown,
            "shrunk_a_second": round(_rate(shrunk, calls.seconds)),
            "bytes_given_back": calls.brk_shrunk_bytes + calls.trimmed_bytes,
        },
        f"at least {CALLS_LEAST} times, and {CALLS_A_SECOND:g} a second: a program whose heap only "
        "breathes with "
        "its load shrinks it a few times",
        [
            _trim_remedy(facts),
            Remedy("as much memory at the end of each arena", {"MALLOC_TOP_PAD_": str(4 * _MIB)}),
        ],
    )


def small_steps(facts: Facts) -> Verdict:
    """Heaps grow by so little at a time that no huge page ever forms."""
    rule = "small-steps"
    if facts.calls is None:
        return _unknown(rule, facts, "calls")
    calls, huge = facts.calls, facts.huge_kib
    grown = calls.grown >= GROWN_LEAST and calls.grown_median_bytes < GROWN_MOST_BYTES
    if not grown or facts.peak_rss_kib < HUGE_RSS_KIB or facts.huge_pages not in ("always", "madvise"):
        return None
    if huge is None:
        return _unknown(rule, facts, "huge_kib")
    if huge * 10 >= facts.peak_rss_kib:
        return None
    remedies = []
    if facts.huge_pages == "always":
        remedies.append(
            Remedy(
                "up to that much more resident in each arena: the case study's program went from 14 to "
                "22 MiB",
                {"MALLOC_TOP_PAD_": str(20 * _MIB)},
            )
        )
    if facts.glibc >= (2, 35):
        remedies.append(
            Remedy(
                "memory in units of 2 MiB, resident where a few bytes of it are touched",
                {TUNABLES: "glibc.malloc.hugetlb=1"},
            )
        )
    if not remedies:
        return None
    return Finding(
        rule,
        "heaps are made writable a few pages at a time, so that the kernel can use no huge page for them",
        {
            "mprotect_to_grow": calls.grown,
            "median_bytes": round(calls.grown_median_bytes),
            "anon_huge_pages_kib": huge,
            "peak_rss_kib": facts.peak_rss_kib,
            "transparent_huge_pages": facts.huge_pages,
        },
        f"at least {GROWN_LEAST} mprotect calls with a median below "
        f"{report.memory(GROWN_MOST_BYTES / 1024)}, "
        f"under a tenth of it in huge pages, and a peak RSS from {report.memory(HUGE_RSS_KIB)}: below "
        "four huge "
        "pages there is nothing to gain",
        remedies,
    )


def large_blocks(facts: Facts) -> Verdict:
    """Large blocks are mapped and unmapped one by one."""
    calls = facts.calls
    if calls is None:
        return _unknown("large-blocks", facts, "calls")
    if calls.unmapped_large < CALLS_LEAST or _rate(calls.unmapped_large, calls.seconds) < CALLS_A_SECOND:
        return None
    evidence = {
        "mapped": calls.mapped_large,
        "unmapped": calls.unmapped_large,
        "unmapped_a_second": round(_rate(calls.unmapped_large, calls.seconds)),
        "largest_bytes": calls.largest,
    }
    threshold = _power_of_two(calls.largest + 1)
    remedy = Remedy(
        f"such blocks come from the heap, which may keep {report.memory(2 * threshold / 1024)}",
        {"MALLOC_MMAP_THRESHOLD_": str(threshold), "MALLOC_TRIM_THRESHOLD_": str(2 * threshold)},
    )
    if calls.largest >= _MOST_MMAP_THRESHOLD:
        remedy = Remedy(
            "memory that it keeps for a while",
            otherwise="glibc maps blocks from 32 MiB on in any case: use them again in the program, or "
            "take an "
            "allocator that keeps them (`calm run -a calmalloc -- CMD`)",
        )
    return Finding(
        "large-blocks",
        "large blocks are mapped for each allocation and unmapped by each free",
        evidence,
        f"at least {CALLS_LEAST} times, and {CALLS_A_SECOND:g} a second: each costs two system calls, a "
        "fault for "
        "each of its pages, and with several threads a TLB shootdown",
        [remedy],
    )


def arenas(facts: Facts) -> Verdict:
    """Each thread has an arena of its own, and what one has free the others cannot use."""
    if facts.peak_rss_kib < ARENAS_RSS_KIB:
        return None
    if facts.heaps is None or facts.heaps_rss_kib is None:
        return _unknown("arenas", facts, "heaps")
    most = max(ARENAS_LEAST, 2 * facts.cpus)
    if facts.heaps < most or facts.heaps_rss_kib < max(ARENAS_RSS_KIB, facts.peak_rss_kib / 2):
        return None
    few = max(2, facts.cpus)
    return Finding(
        "arenas",
        "most of the memory lies in the arenas of many threads: what is free in one serves no other",
        {
            "heaps_of_threads": facts.heaps,
            "resident_in_them_kib": facts.heaps_rss_kib,
            "peak_rss_kib": facts.peak_rss_kib,
            "cpus": facts.cpus,
        },
        f"at least {ARENAS_LEAST} heaps and twice the CPUs, with {report.memory(ARENAS_RSS_KIB)} and half "
        "of the "
        "peak RSS in them. How much of it is free cannot be seen from outside: compare peak RSS with and "
        "without",
        [Remedy("threads that allocate at once wait for each other", {"MALLOC_ARENA_MAX": str(few)})],
    )


def short_threads(facts: Facts) -> Verdict:
    """Many threads come and go, and each that ends gives back its stack."""
    if facts.threads_started is None:
        return _unknown("short-threads", facts, "threads_started")
    rate = _rate(facts.threads_started, facts.wall_s)
    if facts.threads_started < THREADS_LEAST or rate < THREADS_A_SECOND:
        return None
    evidence: dict[str, float | int | str] = {
        "threads_started": facts.threads_started,
        "started_a_second": round(rate),
    }
    if facts.calls is not None:
        evidence["stacks_returned"] = facts.calls.stacks_returned
    remedies = [Remedy("a change of the program", otherwise="keep threads in a pool")]
    if facts.glibc >= (2, 34):
        remedies.append(
            Remedy(
                "up to 256 MiB of addresses of stacks; what of them was touched is given back all the same",
                {TUNABLES: "glibc.pthread.stack_cache_size=268435456"},
            )
        )
    return Finding(
        "short-threads",
        "threads are started and end all the time: each end gives back a stack, by madvise or munmap, "
        "and can "
        "begin a TLB shootdown that no allocator has a say in",
        evidence,
        f"at least {THREADS_LEAST} threads, and {THREADS_A_SECOND:g} a second",
        remedies,
    )


def shootdowns(facts: Facts) -> Verdict:
    """Other CPUs are interrupted too often."""
    if facts.shootdowns is None:
        return _unknown("shootdowns", facts, "shootdowns")
    rate = _rate(facts.shootdowns, facts.wall_s)
    if facts.shootdowns < SHOOTDOWNS_LEAST or rate < SHOOTDOWNS_A_SECOND:
        return None
    governed = "an allocator of its own, with its own use of memory"
    return Finding(
        "shootdowns",
        "memory is given back so often that CPUs spend their time on TLB shootdowns",
        {"shootdowns_begun": facts.shootdowns, "begun_a_second": round(rate)},
        f"at least {SHOOTDOWNS_LEAST}, and {SHOOTDOWNS_A_SECOND:,.0f} a second: at 5 to 20 µs each that is a "
        "percent of a CPU, and on a "
        "machine with many CPUs each costs more",
        [
            Remedy(governed, otherwise="calm run -a calmalloc -- CMD"),
            Remedy(
                "glibc's malloc stays; it trims by the whole program",
                otherwise="calm run -a ptlbmalloc2 -- CMD",
            ),
        ],
    )


def huge_bloat(facts: Facts) -> Verdict:
    """Huge pages make resident what was never touched."""
    if facts.peak_rss_kib < BLOAT_KIB:
        return None
    if facts.huge_kib is None:
        return _unknown("huge-bloat", facts, "huge_kib")
    if not is_huge(facts):
        return None
    if facts.peak_without_huge_kib is None:
        return _unknown("huge-bloat", facts, "peak_without_huge_kib")
    less = facts.peak_without_huge_kib
    if facts.peak_rss_kib < BLOAT_RATIO * less or facts.peak_rss_kib - less < BLOAT_KIB:
        return None
    return Finding(
        "huge-bloat",
        "huge pages make much more resident than the program touches",
        {
            "peak_rss_kib": facts.peak_rss_kib,
            "peak_rss_without_huge_pages_kib": less,
            "anon_huge_pages_kib": facts.huge_kib,
        },
        f"{BLOAT_RATIO:g} times the peak RSS of a run without huge pages, and {report.memory(BLOAT_KIB)} "
        "more",
        [
            Remedy(
                "more TLB misses and faults for what is touched; the machine's setting "
                "/sys/kernel/mm/transparent_hugepage/enabled is for all programs",
                otherwise="leave glibc.malloc.hugetlb unset, and let the machine's setting be madvise; "
                "or keep "
                "the program alone from huge pages by prctl(PR_SET_THP_DISABLE)",
            )
        ],
    )


RULES: tuple[tuple[str, Callable[[Facts], Verdict]], ...] = (
    ("page-faults", page_faults),
    ("heap-churn", heap_churn),
    ("small-steps", small_steps),
    ("large-blocks", large_blocks),
    ("arenas", arenas),
    ("short-threads", short_threads),
    ("shootdowns", shootdowns),
    ("huge-bloat", huge_bloat),
)
# What only glibc's malloc does, or can be told.
_OF_GLIBC = {"page-faults", "heap-churn", "small-steps", "large-blocks", "arenas"}
_UNDER_OTHERS = {"ptlbmalloc2": "a governor that sets glibc's thresholds itself"}


def misspelt(warnings: Sequence[str]) -> list[Finding]:
    """Settings in the environment that will not do what they seem to."""
    return [
        Finding("environment", line, {"warning": line}, "any setting of malloc that malloc does not take")
        for line in warnings
    ]


def whose_malloc(facts: Facts) -> Finding | None:
    """The program's malloc is not glibc's, or cannot be replaced."""
    if facts.static:
        return Finding(
            "static",
            "the program is statically linked: no allocator can be preloaded, and glibc's settings reach "
            "it only "
            "if it is glibc's malloc that it has in it",
            {"program": facts.command[0]},
            "a program without a dynamic linker",
            [
                Remedy(
                    "a new build",
                    otherwise="link it dynamically, or with an allocator in it (libcalmalloc.a)",
                )
            ],
        )
    if facts.allocator in (None, "glibc"):
        return None
    what = _UNDER_OTHERS.get(facts.allocator or "", "an allocator of its own")
    return Finding(
        "other-allocator",
        f"the program's malloc is that of {facts.allocator}, {what}: glibc's settings do nothing here",
        {"allocator": facts.allocator or ""},
        "any allocator but glibc's, by the libraries that are mapped and by the program's own text",
        [Remedy("none", otherwise=f"the settings of {facts.allocator}, or `calm compare` against glibc")],
    )


def judge(facts: Facts, warnings: Sequence[str] = ()) -> tuple[list[Finding], list[Unjudged], list[str]]:
    """What fires, what could not be judged, and the names of the rules that have nothing to say."""
    found = misspelt(warnings)
    unjudged: list[Unjudged] = []
    quiet: list[str] = []
    other = whose_malloc(facts)
    if other:
        found.append(other)
    for rule, check in RULES:
        if other and rule in _OF_GLIBC:
            unjudged.append(Unjudged(rule, f"it is about glibc's malloc ({other.rule})"))
            continue
        verdict = check(facts)
        if isinstance(verdict, Finding):
            found.append(verdict)
        elif isinstance(verdict, Unjudged):
            unjudged.append(verdict)
        else:
            quiet.append(rule)
    return found, unjudged, quiet


def combined(findings: Sequence[Finding]) -> dict[str, str]:
    """All variables at once: of two values the larger, and tunables side by side."""
    variables: dict[str, str] = {}
    tunables: dict[str, str] = {}
    for finding in findings:
        for remedy in finding.remedies:
            for name, value in remedy.environment.items():
                if name == TUNABLES:
                    tunable, _, setting = value.partition("=")
                    tunables[tunable] = setting
                else:
                    variables[name] = str(max(int(value), int(variables.get(name, value))))
    if tunables:
        variables[TUNABLES] = ":".join(f"{name}={value}" for name, value in tunables.items())
    return variables
