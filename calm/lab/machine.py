"""The machine that QEMU emulates: its CPUs and sockets, its memory, and the command that starts it."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from calm.errors import USAGE, CalmError
from calm.machine import memory_kib

QEMU = "qemu-system-x86_64"
TCG, KVM = "tcg", "kvm"
# Without interrupt remapping, which the emulated machine has not, an interrupt names its CPU by eight bits.
_HIGHEST_APIC_ID = 254
_MIB = 1 << 20
_LEAST = 512 * _MIB
_USUAL = 4096 * _MIB
_LEAST_OF_A_NODE = 128 * _MIB


@dataclass(frozen=True)
class Topology:
    """So many CPUs in so many sockets, each a NUMA node of its own."""

    cpus: int
    sockets: int

    def __post_init__(self) -> None:
        if self.cpus % self.sockets:
            raise CalmError(
                f"{self.cpus} CPUs cannot be shared out evenly to {self.sockets} sockets: "
                f"--cpus is to be a multiple of --sockets",
                USAGE,
            )
        # The numbers of each socket begin at a multiple of a power of two.
        if (self.sockets - 1) * (1 << (self.cores - 1).bit_length()) + self.cores - 1 > _HIGHEST_APIC_ID:
            raise CalmError(
                f"{self.cpus} CPUs in {self.sockets} sockets are more than the emulated machine can number",
                USAGE,
            )

    @property
    def cores(self) -> int:
        """Of each socket."""
        return self.cpus // self.sockets

    def __str__(self) -> str:
        cpus = "1 CPU" if self.cpus == 1 else f"{self.cpus} CPUs"
        return f"{cpus} in {self.sockets} socket{'s' if self.sockets > 1 else ''}"


def bytes_of(text: str) -> int:
    """4G, 512M: an amount of memory."""
    found = re.fullmatch(r"(\d+)([MG])i?B?", text, re.IGNORECASE)
    if not found or not int(found[1]):
        raise CalmError(f"--memory {text!r}: an amount such as 4G or 512M is meant", USAGE)
    return int(found[1]) * (_MIB if found[2].upper() == "M" else 1024 * _MIB)


def available() -> int:
    """Memory that this machine can give away without swapping."""
    return memory_kib("MemAvailable") * 1024 or _USUAL


def choose_memory(wanted: int | None, files: int) -> int:
    """Bytes for the guest, in whole MiB. Its files lie there too, and while it boots, twice.

    The kernel lets files take half of all.
    """
    least = _LEAST + 3 * files
    there = available()
    if wanted is not None:
        if wanted < least:
            raise CalmError(f"--memory: the guest's files need at least {-(-least // _MIB)}M", USAGE)
        if wanted > there:
            raise CalmError(f"--memory: only {there // _MIB}M are available on this machine", USAGE)
        return wanted
    if least > there:
        raise CalmError(
            f"the guest needs at least {-(-least // _MIB)}M of memory, and {there // _MIB}M are available"
        )
    return max(least, min(_USUAL + 3 * files, there * 3 // 4)) // _MIB * _MIB


@dataclass(frozen=True)
class Qemu:
    """The emulator."""

    path: str
    version: str


@dataclass(frozen=True)
class Emulator:
    """How a machine is emulated, where not as `calm lab` does: another QEMU, or other words to it."""

    path: Path | None = None
    """The one on PATH, if nobody says."""
    firmware: Path | None = None
    threads: str = "multi"
    """multi: each of its CPUs has a thread of its own; single: all take turns in one."""
    accelerator: Mapping[str, str] = field(default_factory=dict)
    """Further properties of the accelerator."""
    cpu: str = "max"
    words: tuple[str, ...] = ()
    """Anything else."""
    parameters: str = ""
    """For the kernel, behind those that every guest has."""


USUAL = Emulator()


def find_qemu(chosen: Path | None = None) -> Qemu:
    """The one that was chosen, else the one on PATH."""
    path = str(chosen) if chosen else shutil.which(QEMU)
    if path is None:
        raise CalmError(f"{QEMU} is not installed: it is in the Debian package qemu-system-x86")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CalmError(f"{path} does not run: {error.strerror}") from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise CalmError(
            f"{path} does not run: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    return Qemu(path, lines[0])


def command(
    qemu: Qemu,
    topology: Topology,
    memory: int,
    accelerator: str,
    kernel: Path,
    initrd: Path,
    console: Path,
    emulator: Emulator = USUAL,
) -> list[str]:
    """Starts the machine. The kernel's console goes to a file, and what we are told to standard output."""
    mib = memory // _MIB
    words = [qemu.path, "-display", "none", "-monitor", "none", "-nic", "none", "-no-reboot"]
    if emulator.firmware:
        words += ["-L", str(emulator.firmware)]
    properties = {"thread": emulator.threads, **emulator.accelerator}
    tcg = ",".join([TCG, *(f"{name}={value}" for name, value in properties.items())])
    words += ["-accel", KVM if accelerator == KVM else tcg]
    words += ["-cpu", "host" if accelerator == KVM else emulator.cpu, "-m", f"{mib}M"]
    words += ["-smp", f"{topology.cpus},sockets={topology.sockets},cores={topology.cores},threads=1"]
    if has_nodes(topology, memory):
        for socket in range(topology.sockets):
            # The first has what does not divide.
            size = mib // topology.sockets + (mib % topology.sockets if socket == 0 else 0)
            first = socket * topology.cores
            words += ["-object", f"memory-backend-ram,id=node{socket},size={size}M"]
            cpus = f"cpus={first}-{first + topology.cores - 1}"
            words += ["-numa", f"node,nodeid={socket},{cpus},memdev=node{socket}"]
    # Emulated CPUs' TSCs disagree, which the kernel would otherwise find out by long checks.
    parameters = ["console=ttyS0", "quiet", "panic=-1", "mitigations=off"]
    parameters += ["tsc=unstable"] if accelerator == TCG else []
    words += ["-kernel", str(kernel), "-initrd", str(initrd)]
    words += ["-append", " ".join([*parameters, *emulator.parameters.split()]), *emulator.words]
    return [*words, "-serial", f"file:{console}", "-serial", "stdio"]


def has_nodes(topology: Topology, memory: int) -> bool:
    """Whether each socket gets memory of its own."""
    return topology.sockets > 1 and memory // topology.sockets >= _LEAST_OF_A_NODE
