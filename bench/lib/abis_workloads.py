"""The workloads of Amit's paper on page access tracking, as scripts for the guest, and the paper's results.

Sizes are chosen so that a run causes some thousands of TLB shootdowns at most: each takes the emulator
milliseconds, and ratios of counts need no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from research.lab.payload import Payload

from . import abis_apache, abis_packages, abis_pbzip2
from .abis_guest import DISK, LIMITED, words
from .guest import CALMALLOC, PTLBMALLOC2, RELEASE
from .paper_figures import STAND_INS, THREADS

PARSEC, LISTING1, ANON_R_SEQ, APACHE, PBZIP2 = "parsec", "listing1", "anon-r-seq", "apache", "pbzip2"
INSTRUCTIONS = "instructions"
STALE_READS = "stale-reads"
STRESS_S = 600
_NUMBER = int | float
_CHANGES = {"count": int, "pages": int, "reads": int, "writes": int}
# The paper's mean over PARSEC's programs, and the memory of page tables with the metadata of their entries.
PARSEC_GOAL = 0.04
PAGE_TABLES_GOAL = 1.25
_MIB = 1 << 20
# Long enough for some shootdowns between the threads' start and end.
_SIZES = {
    **STAND_INS,
    "dedup": "--mib 32",
    "streamcluster": "--points 16384 --block 1024 --dimensions 32",
    "bodytrack": "--frames 60 --particles 400",
    "fluidanimate": "--particles 20000 --frames 20",
}
_LIBRARIES: Mapping[str, str] = {CALMALLOC: "CALM_OPTIONS=report=exit", PTLBMALLOC2: "PTLBMALLOC2_STATS=json"}


@dataclass(frozen=True)
class Goals:
    """The paper's results, as ratios of ABIS to the kernel without it; None if it reports none."""

    sent: float | None = None
    received: float | None = None


@dataclass(frozen=True)
class Group:
    """Workloads that share a boot."""

    name: str
    packages: Sequence[str] = ()
    add: Callable[[Payload], None] | None = None
    """Files other than this project's programs."""
    cpus: tuple[int, ...] = (16,)
    """The default numbers of CPUs of its machines."""
    counts_instructions: bool = False
    """The guest's clock counts the instructions of its only CPU, a nanosecond each."""
    stress_s: int = 0
    """The duration of a test that runs once, under a kernel with self-checks, without comparison."""

    def machines(self, asked: Sequence[int] | None) -> Sequence[int]:
        """The numbers of CPUs to run it on."""
        return self.cpus if asked is None or self.counts_instructions else asked


_PROGRAMS = Group("programs", abis_packages.E2FSPROGS)


@dataclass(frozen=True)
class Workload:
    """A program that runs in the guest and is counted separately."""

    name: str
    body: Callable[[int], str]
    """The script, given the machine's number of CPUs."""
    goals: Goals = Goals()
    group: Group = _PROGRAMS
    program: str | None = None
    """Programs of build/release."""
    library: str | None = None
    """The preloaded allocator."""
    prints: Mapping[Any, Any] = field(default_factory=dict, hash=False)
    """The shape of the values in its line of JSON that figures depend on: see abis_shape."""


def _program(name: str) -> str:
    return str(RELEASE / name)


def _migrate(cpus: int) -> str:
    # The file is on the first node, and moves to the second. Each additional busy CPU slows the emulator.
    size = 4 * _MIB
    make = words("taskset", "-c", 0, "dd", "if=/dev/zero", "of=/tmp/pages", f"bs={size}", "count=1")
    busy = max(1, min(cpus - 2, 6))
    command = (_program("migrate"), "--file", "/tmp/pages", "--size", size, "--call", "move_pages")
    return f"{make} 2>/dev/null\n{words('count', *command, '--rounds', 1, '--readers', 1, '--threads', busy)}"


def _cow_mt(cpus: int) -> str:
    return words("count", _program("cow-mt"), "--threads", cpus, "--size", 64 * _MIB, "--rounds", 1)


def _mmap_read(cpus: int) -> str:
    command = (_program("mmap-read"), "--processes", cpus, "--file", f"{DISK}/sparse", "--size", 48 * _MIB)
    return f"make_disk 256\nmake_limit 12\n{words('count', LIMITED, *command)}"


def _msync_mt(cpus: int) -> str:
    command = (_program("msync-mt"), "--threads", cpus, "--file", f"{DISK}/file", "--size", 2 * _MIB)
    return f"make_disk 64\n{words('count', *command, '--rounds', 2)}"


def _anon_r_seq(_: int) -> str:
    command = words("count", _program(ANON_R_SEQ), "--size", 8192 * _MIB, "--rounds", 1)
    return f"sampled=true\n{command}"


def _instructions(_: int) -> str:
    return words("count", _program(ANON_R_SEQ), "--size", 16 * _MIB, "--rounds", 16, "--clock")


def _listing1(library: str | None, cpus: int) -> str:
    preload = ("env", f"LD_PRELOAD={RELEASE}/lib{library}.so", _LIBRARIES[library]) if library else ()
    return words("count", *preload, _program(LISTING1), "--threads", cpus, "--rounds", 1, "--pin")


def _stale_reads(more: Sequence[str], cpus: int) -> str:
    threads = ("--threads", cpus, "--changers", max(2, cpus // 4))
    command = (_program(STALE_READS), "--seconds", STRESS_S, *threads, "--directory", DISK, *more)
    return f"make_disk 128\nmake_swap 256\necho 1 >/sys/kernel/mm/ksm/run\n{words('count', *command)}"


def _stand_in(name: str, _: int) -> str:
    return words("count", _program(f"{name}-like"), "--threads", THREADS, *_SIZES[name].split())


def _apache(cpus: int) -> str:
    # wrk's CPUs are the last ones, on which the counting programs run, too.
    generators = max(1, cpus // 4)
    return abis_apache.script(cpus - generators, generators)


def _all() -> list[Workload]:
    of_suite: Mapping[str, tuple[Callable[[int], str], Goals]] = {
        "migrate": (_migrate, Goals(sent=0.08)),
        "cow-mt": (_cow_mt, Goals(sent=0.03)),
        "mmap-read": (_mmap_read, Goals(sent=0.05)),
        "msync-mt": (_msync_mt, Goals(sent=0.02)),
        ANON_R_SEQ: (_anon_r_seq, Goals()),
    }
    found = [Workload(name, body, goals, program=name) for name, (body, goals) in of_suite.items()]
    for library in (None, PTLBMALLOC2, CALMALLOC):
        name = f"{LISTING1}:{library}" if library else LISTING1
        goals = Goals() if library else Goals(sent=0.05)
        found.append(Workload(name, partial(_listing1, library), goals, program=LISTING1, library=library))
    of_parsec = {"canneal": Goals(sent=0.09), "dedup": Goals(sent=0.61)}
    for name in STAND_INS:
        goals = of_parsec.get(name, Goals())
        found.append(Workload(f"{PARSEC}:{name}", partial(_stand_in, name), goals, program=f"{name}-like"))
    web = Group(APACHE, abis_apache.PACKAGES, abis_apache.add, (4, 16))
    found.append(Workload(APACHE, _apache, Goals(sent=0.10, received=0.10), web))
    pressed = Group(PBZIP2, abis_pbzip2.PACKAGES, abis_pbzip2.add, (8,))
    found.append(Workload(PBZIP2, abis_pbzip2.script, Goals(received=0.55), pressed))
    exact = Group(INSTRUCTIONS, cpus=(1,), counts_instructions=True)
    found.append(
        Workload(
            INSTRUCTIONS, _instructions, group=exact, program=ANON_R_SEQ, prints={"ns_per_fault": _NUMBER}
        )
    )
    stress = Group("stress", abis_packages.E2FSPROGS, cpus=(8,), stress_s=STRESS_S)
    uses = {"seconds": _NUMBER, "stale": int, "operations": {...: _CHANGES}}
    for moving in ((), ("--migrate-threads",)):
        name = f"{STALE_READS}:moving" if moving else STALE_READS
        found.append(
            Workload(name, partial(_stale_reads, moving), group=stress, program=STALE_READS, prints=uses)
        )
    return found


WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _all()}


def expand(names: Sequence[str]) -> list[Workload]:
    """Workloads by name or by group: parsec selects all parsec:NAME."""
    return [each for name, each in WORKLOADS.items() if {name, name.partition(":")[0]} & {*names}]


def names() -> list[str]:
    """The names that expand accepts."""
    return list(dict.fromkeys([*WORKLOADS, *(name.partition(":")[0] for name in WORKLOADS)]))
