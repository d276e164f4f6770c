"""The emulated machine on which ABIS is counted: its kernels, boot options, and the runs of a boot."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calm.core.errors import CalmError
from calm.core.progress import Bar
from research.lab import session
from research.lab.guest import APPLETS, Run, Turn
from research.lab.machine import PARAMETERS as KERNEL_PARAMETERS
from research.lab.machine import QEMU, TCG, Topology
from research.lab.payload import Payload
from research.lab.session import Outcome, Plan

from . import abis_apache, abis_guest, abis_packages
from .abis_shape import complaint
from .abis_workloads import APACHE, Group, Workload
from .guest import RELEASE, report_of
from .results import REPOSITORY

BUILD = REPOSITORY / "build/abis"
MEMORY = 3 << 30
# By default the emulator's TLB grows without a limit. This one has a second level of 256 sets of 8, 2,048
# entries, like today's CPUs.
_TLB_FIRST_LEVEL = 256
TLB_SETS = 256
# Limits of QEMU.
MOST_TLB_SETS = 1 << 22
# Compressed memory for a file system and for swap.
_PARAMETERS = "zram.num_devices=2"
# It changes whenever a package with a library is installed, without effect on the guest.
_LINKER_CACHE = "/etc/ld.so.cache"
_DIGITS = 12


@dataclass(frozen=True)
class Variant:
    """A kernel, its boot parameters and its CPUs' features."""

    kernel: str
    """The kernel's folder in the build."""
    what: str
    parameters: str = ""
    cpu: str = "max"


BASELINE, ABIS, TLBINS, DEBUG = "baseline", "abis", "tlbins", "debug"
# Cheap checks that are enabled at boot; not debug_pagealloc, see kernel/abis/linux/config.debug.
_WATCHING = "page_poison=1 page_owner=on"
VARIANTS: Mapping[str, Variant] = {
    BASELINE: Variant(BASELINE, "the kernel without the series"),
    ABIS: Variant(ABIS, "with the series"),
    TLBINS: Variant(
        ABIS, "the same, on CPUs with an instruction that inserts translations", cpu="max,tlbins=on"
    ),
    "private": Variant(ABIS, "private pages only", "abis=private"),
    "version": Variant(ABIS, "idle pages only", "abis=version"),
    "off": Variant(ABIS, "neither private nor idle pages", "abis=off"),
    DEBUG: Variant(DEBUG, "with the series and all checks of memory management", _WATCHING),
    "debug-tlbins": Variant(DEBUG, "the same, on CPUs with the instruction", _WATCHING, cpu="max,tlbins=on"),
}


def usual_variants(group: Group) -> Sequence[str]:
    """The default variants of a workload."""
    return (DEBUG,) if group.stress_s else (BASELINE, ABIS, TLBINS)


@dataclass(frozen=True)
class Build:
    """A folder that `make abis` fills."""

    folder: Path = BUILD

    @property
    def qemu(self) -> Path:
        """The emulator."""
        return self._there(QEMU)

    @property
    def firmware(self) -> Path:
        """The emulator's firmware."""
        return self._there("firmware")

    def kernel(self, variant: Variant) -> Path:
        """The kernel image of a variant."""
        return self._there(f"{variant.kernel}/bzImage")

    def _there(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            raise CalmError(f"{path} is missing: run make abis, or kernel/abis/build")
        return path.absolute()

    def digest(self, path: Path) -> str:
        """A digest that distinguishes builds."""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGITS]


@dataclass(frozen=True)
class Settings:
    """The number of rounds and the timeout."""

    build: Build
    rounds: int
    timeout_s: float
    tlb_sets: int = TLB_SETS


def topology_of(cpus: int, group: Group) -> Topology:
    """Four sockets, or two on a small machine; each is a memory node."""
    if group.counts_instructions:
        return Topology(1, 1)
    return Topology(cpus, 4 if cpus >= 16 else 2)


def options_of(build: Build, variant: Variant, group: Group, tlb_sets: int) -> dict[str, str]:
    """QEMU's options, where they differ from those of `calm lab`."""
    threads = "multi" if group.stress_s else "single"
    # One set is no second level, but the few places for victims that QEMU's TLBs always have.
    tlb = f"tlb-size={max(tlb_sets, _TLB_FIRST_LEVEL)},tlb-victim-sets={tlb_sets or 1}"
    return {
        "-L": str(build.firmware),
        "-accel": f"{TCG},thread={threads},{tlb}",
        "-cpu": variant.cpu,
        "-append": f"{KERNEL_PARAMETERS[TCG]} {_PARAMETERS} {variant.parameters}".strip(),
        **({"-icount": "shift=0"} if group.counts_instructions else {}),
    }


def _last_of_console(reason: str, lines: int = 20) -> list[str]:
    """The end of the console that a failure names, if it names one."""
    _, found, path = reason.rpartition(session.CONSOLE_IN)
    return Path(path).read_text(errors="replace").splitlines()[-lines:] if found else []


def _environment(group: Group) -> dict[str, str]:
    environment = {"PATH": f"/usr/bin:/bin:{APPLETS}", "HOME": "/root", "LANG": "C.UTF-8"}
    if group.packages:
        environment["PATH"] = f"{abis_packages.paths(abis_packages.E2FSPROGS)}:{environment['PATH']}"
        environment["LD_LIBRARY_PATH"] = abis_packages.libraries(group.packages)
    return environment


def _files_of(cpus: int, group: Group, workloads: Sequence[Workload]) -> tuple[Payload, list[Turn]]:
    """The guest's files for workloads of a group, and the command of each."""
    files = Payload(_environment(group))
    for path, content in abis_guest.files().items():
        files.make(path, content)
    if group.add:
        group.add(files)
    if set(abis_packages.E2FSPROGS) <= set(group.packages):
        files.program(abis_packages.program("e2fsprogs", "mkfs.ext4"))
    turns = []
    for workload in workloads:
        for name in (workload.program, f"lib{workload.library}.so" if workload.library else None):
            if name and not (RELEASE / name).is_file():
                raise CalmError(f"{RELEASE / name} is not built: run make")
        if workload.program:
            files.program(RELEASE / workload.program)
        if workload.library:
            files.library(RELEASE / f"lib{workload.library}.so")
        path = f"{abis_guest.FOLDER}/{workload.name}"
        files.make(path, abis_guest.script(workload.body(cpus)))
        turns.append(Turn(workload.name, (path,)))
    return files, turns


def digest_of(workload: Workload, cpus: int) -> str:
    """A digest of the guest's files for a workload: scripts, programs, libraries, and input."""
    files, _ = _files_of(cpus, workload.group, [workload])
    files.finish()
    digest = hashlib.sha256()
    for path, entry in sorted(files.entries.items()):
        if path != _LINKER_CACHE:
            content = entry.read()
            digest.update(f"{path} {entry.mode:o} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:_DIGITS]


def plan_of(
    variant: Variant, cpus: int, group: Group, workloads: Sequence[Workload], settings: Settings
) -> Plan:
    """One boot, in which the workloads run in turn, in each round."""
    files, turns = _files_of(cpus, group, workloads)
    return Plan(
        turns=turns,
        rounds=1 if group.stress_s else settings.rounds,
        topology=topology_of(cpus, group),
        payload=files,
        cache=abis_packages.CACHE,
        environment=_environment(group),
        memory=MEMORY,
        accelerator=TCG,
        groups=(),
        timeout_s=max(settings.timeout_s, 2 * group.stress_s),
        kernel=settings.build.kernel(variant),
        qemu=settings.build.qemu,
        qemu_options=options_of(settings.build, variant, group, settings.tlb_sets),
    )


def described(workload: Workload, run: Run) -> dict[str, Any]:
    """The counts and the output of one run."""
    found = abis_guest.counts(run.printed).as_json()
    lines = abis_guest.rest(run.printed)
    if workload.library:
        try:
            report_of(Path(f"lib{workload.library}.so"), run)
        except ValueError:
            raise CalmError(f"the report of lib{workload.library}.so is torn") from None
    if workload.name == APACHE:
        found["requests"] = abis_apache.requests(lines)
    printed = abis_guest.reported(lines)
    if wrong := complaint(printed, workload.prints, "its line of JSON"):
        raise CalmError(wrong if printed else "it ended without its line of JSON")
    if printed:
        found["printed"] = printed
    return found


def _tell(label: str, reason: str, more: Sequence[str]) -> None:
    print(f"bench/abis: {label}: {reason}", file=sys.stderr)
    for line in more:
        print(f"    {line}", file=sys.stderr)


def _runs(where: str, workload: Workload, outcome: Outcome) -> tuple[list[dict[str, Any]], str | None]:
    """The runs of a workload, and the reason if some are missing."""
    found: list[dict[str, Any]] = []
    failure = outcome.failures.get(workload.name) or outcome.stopped
    label = f"{workload.name} {where}"
    of = [run for _, run in outcome.runs if run.label == workload.name]
    if failure:
        failed = [run for run in of if run.failure]
        _tell(label, failure, failed[0].last_words if failed else _last_of_console(failure))
        return found, failure
    for run in of:
        try:
            found.append(described(workload, run))
        except CalmError as error:
            _tell(label, str(error), run.last_words)
            return found, str(error)
    return found, None


class _NamedBar(Bar):
    """Shows the variant, too."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def update(self, done: float | None = None, what: str | None = None, total: float | None = None) -> None:
        super().update(done, what and f"{self._name}: {what}", total)


def measure(
    name: str, cpus: int, group: Group, workloads: Sequence[Workload], settings: Settings
) -> list[dict[str, Any]]:
    """Boots a variant's machine; returns an entry for each workload, with its runs or the reason for none."""
    variant = VARIANTS[name]
    where = f"under {name} on {cpus} CPUs"
    with _NamedBar(name) as bar:
        abis_packages.fetch(group.packages, lambda what: bar.update(0, what, 1))
        plan = plan_of(variant, cpus, group, workloads, settings)
        entries = [_entry(workload, name, plan, digest_of(workload, cpus)) for workload in workloads]
        try:
            outcome = session.run(plan, bar)
        except CalmError as error:
            _tell(where, str(error), _last_of_console(str(error)))
            return [entry | {"failure": str(error)} for entry in entries]
    if outcome.interrupted_by is not None:
        sys.exit(128 + outcome.interrupted_by)
    release = outcome.view.kernel if outcome.view else None
    for workload, entry in zip(workloads, entries, strict=True):
        runs, failure = _runs(where, workload, outcome)
        entry |= {"kernel": release, "failure": failure, "runs": runs}
    return entries


def _entry(workload: Workload, variant: str, plan: Plan, digest: str) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "variant": variant,
        "cpus": plan.topology.cpus,
        "sockets": plan.topology.sockets,
        "files": digest,
        "kernel": None,
        "failure": None,
        "runs": [],
    }
