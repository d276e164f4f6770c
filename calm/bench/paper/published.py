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
