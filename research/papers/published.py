"""What the papers published, number by number; nothing here was measured by this project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Citation:
    """Which paper, and what it measured on."""

    text: str
    machine: str


ORACLE = Citation(
    "Tuning glibc malloc on ARM: a case study (Oracle Linux blog, April 25, 2023)",
    "Oracle Linux 9 on an A1 virtual machine (64-bit Arm, pages of 4 KiB), t-test1 as Phoronix has it",
)
PTLBMALLOC2 = Citation(
    "S. Schildermans, K. Aerts, J. Shan and X. Ding, Ptlbmalloc2: Reducing TLB Shootdowns with High Memory "
    "Efficiency, section 7",
    "4 to 64 CPUs in 1 to 4 sockets, native and virtualized, with PARSEC 3.0",
)
NEXTGEN = Citation(
    "R. Li, Q. Wu, K. Kavi, G. Mehta, N. J. Yadwadkar and L. K. John, NextGen-Malloc: Giving Memory "
    "Allocator Its Own Room in the House (HotOS '23)",
    "table 3: AWS A1, bare metal: 16 Cortex-A72, 32 GiB; tables 1 and 2: a machine that it does not name",
)

VALAT = Citation(
    "S. Valat, Impact of the Operating System Memory Allocation on CPU Intensive Applications",
    "two Intel Nehalem E5520 (8 cores, an L3 of 8 MiB with 16 ways each), 24 GB: Linux 2.6.38, OpenSolaris "
    "2009.06 and FreeBSD 8.2; table 1: Core 2 Duo",
)


@dataclass(frozen=True)
class Run:
    """A row of the case study's table 1."""

    user_s: float
    system_s: float
    elapsed_s: float
    minor_faults: int
    max_rss_kib: int


@dataclass(frozen=True)
class Trimming:
    """A row of table 3: the default trim threshold, and none."""

    default_s: float
    never_s: float
    default_faults: int
    never_faults: int


@dataclass(frozen=True)
class Padding:
    """A row of table 4."""

    elapsed_s: float
    rss_kib: int
    huge_kib: int


@dataclass(frozen=True)
class Alternative:
    """A row of table 5."""

    rss_kib: int
    huge_kib: int
    one_thread_s: float
    two_threads_s: float


# t-test1's parameters (table 2): n_total_max, of which a run takes --scale; the others are left at these.
TTEST1_THREADS = 4000
TTEST1_PARAMETERS: Mapping[str, int] = {"i_max": 10_000, "size": 10_000, "bins": 6710}

# Tables 1 and 3, by the number of threads at once.
TABLE_1: Mapping[int, Run] = {
    1: Run(8.85, 12.08, 21.08, 12_304_107, 13_996),
    2: Run(6.88, 7.07, 14.07, 6_846_809, 16_700),
}
TABLE_3: Mapping[int, Trimming] = {
    1: Trimming(21.08, 8.23, 12_304_107, 4_766),
    2: Trimming(14.07, 6.29, 6_846_809, 5_029),
}
# By the padding in MB.
TABLE_4: Mapping[int, Padding] = {
    4: Padding(20.52, 14_788, 4_096),
    12: Padding(13.48, 17_048, 12_288),
    20: Padding(9.09, 22_012, 20_480),
    28: Padding(9.03, 21_864, 20_480),
}
# By calm's name; the study's tcmalloc is the one of gperftools.
TABLE_5: Mapping[str, Alternative] = {
    "glibc": Alternative(13_564, 0, 21.83, 14.81),
    "gperftools": Alternative(37_092, 4_096, 5.78, 4.21),
    "jemalloc": Alternative(37_980, 24_576, 5.10, 3.93),
}

# Figures 3 and 4 are drawings, so what there is to compare with is what section 7 says of them.
FIGURE_3: Mapping[str, str] = {
    "dedup": "many with glibc, almost all eliminated",
    "vips": "many with glibc, almost all eliminated",
}
FIGURE_3_OTHERS = "few with glibc, not significantly affected"
FIGURE_4: Mapping[str, str] = {
    "dedup": "noticeable speedup (4b)",
    "vips": "noticeable speedup (4b); slightly more time and cycles, memory 5 % better (4a)",
    "fluidanimate": "about 5 % better throughout",
    "bodytrack": "more memory, never above 15 % (of 30 MB)",
    "swaptions": "more memory, never above 15 % (of 4 MB)",
}
FIGURE_4_OTHERS = "very close to glibc"


@dataclass(frozen=True)
class Configuration:
    """A row of table 2."""

    virtual: bool
    cpus: int
    sockets: int


# How many percent fewer cycles, on average over all of PARSEC.
TABLE_2: Mapping[Configuration, int] = {
    Configuration(False, 4, 1): 0,
    Configuration(False, 4, 4): -1,
    Configuration(False, 16, 1): -1,
    Configuration(False, 16, 4): 2,
    Configuration(False, 64, 4): 5,
    Configuration(True, 4, 1): 1,
    Configuration(True, 4, 4): 2,
    Configuration(True, 16, 1): 4,
    Configuration(True, 16, 4): 4,
    Configuration(True, 64, 4): 7,
}
TABLE_2_AVERAGE = 3


@dataclass(frozen=True)
class Events:
    """A column of the NextGen-Malloc paper's tables 1 and 2: counts by the processor."""

    cycles: float
    instructions: float
    llc_load_misses: float
    llc_store_misses: float
    dtlb_load_misses: float | None = None
    dtlb_store_misses: float | None = None


# Table 1, SPEC's xalancbmk, by calm's names: PTMalloc2 is glibc's, and its TCMalloc is Google's.
NEXTGEN_1: Mapping[str, Events] = {
    "glibc": Events(1.177e12, 1.282e12, 4.059e8, 3.554e8, 1.804e9, 3.669e7),
    "jemalloc": Events(7.115e11, 1.320e12, 9.445e7, 1.630e8, 1.482e8, 2.937e7),
    "tcmalloc": Events(7.091e11, 1.264e12, 1.016e8, 1.254e8, 1.641e8, 2.591e7),
    "mimalloc": Events(6.959e11, 1.262e12, 1.477e8, 1.321e8, 1.628e8, 2.787e7),
}
# Figure 1: how much faster the fastest of them is than the slowest, by execution time.
NEXTGEN_SPEEDUP = 1.72
# Table 2, xmalloc with TCMalloc, by the number of threads.
NEXTGEN_2_ALLOCATOR = "tcmalloc"
NEXTGEN_2: Mapping[int, Events] = {
    1: Events(4.333e10, 2.387e10, 1.223e5, 3.676e6),
    2: Events(6.708e10, 2.979e10, 2.196e5, 4.231e6),
    4: Events(1.148e11, 3.893e10, 2.477e6, 1.650e7),
    8: Events(1.963e11, 4.874e10, 1.175e7, 5.402e7),
}


@dataclass(frozen=True)
class Rates:
    """A column of table 3: seconds, and misses for each 1,000 instructions."""

    wall_s: float
    dtlb_load_misses: float
    llc_load_misses: float
    llc_store_misses: float


# xalancbmk; what it is measured against, and NextGen-Malloc itself.
NEXTGEN_3_BASE = "mimalloc"
NEXTGEN_3: Mapping[str, Rates] = {
    "mimalloc": Rates(532, 6.092, 8.911, 0.783),
    "nextgen": Rates(508, 3.452, 6.889, 0.496),
}
# And the improvements in percent, as printed.
NEXTGEN_3_IMPROVEMENT = Rates(4.51, 43.33, 22.69, 36.59)
# Section 4.1: calls in one run of xalancbmk.
NEXTGEN_MALLOCS = 138_401_260
NEXTGEN_FREES = 141_394_145


@dataclass(frozen=True)
class Variants:
    """A row of the paging paper's table 1: cycles for an iteration."""

    original: float
    optimized: float


# By whether the arrays were padded. The figures are drawings: beside these stands what its text says.
VALAT_1: Mapping[bool, Variants] = {False: Variants(51.0, 21.7), True: Variants(21.8, 21.3)}
VALAT_FIGURE_2 = (
    "Linux is no better than a fully random page table, whose results vary more; in parallel with a kernel's "
    "compilation, they are equal (section 2.3)"
)
VALAT_FIGURE_3 = (
    "standard pages begin to leak after 5 MB of 8 (62 %); huge pages, FreeBSD and OpenSolaris do not "
    "(section 2.3)"
)
VALAT_FIGURE_4 = (
    "one process: 7 % better on average with Linux's huge pages, FreeBSD or OpenSolaris; EP up to 51 % "
    "(OpenSolaris) and 19 % (FreeBSD); the worst lose up to 5 % (section 3.2)"
)
VALAT_FIGURES_6_7 = (
    "the more processes or threads, the worse the worst with page coloring or huge pages, to a loss of up to "
    "80 % (abstract); not so with Linux's random pages (section 3.2)"
)
VALAT_FIGURES_8_9 = (
    "arrays on boundaries of 2 MiB take twice as long on FreeBSD, and on OpenSolaris with a malloc of whole "
    "mappings; offsets of multiples of 4 KiB undo it there; Linux's huge pages gain 4 % (sections 3.3, 4.1); "
    "padding by random multiples of 64 bytes gains up to 7 % (section 5.3)"
)
VALAT_FIGURE_10 = (
    "a factor of two is lost where more aligned arrays are in use than the cache has ways; otherwise placed, "
    "even 64 do well (section 4.3)"
)
