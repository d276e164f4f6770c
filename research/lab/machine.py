"""The machine that QEMU emulates: its CPUs, sockets and memory, and the command that starts it."""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from calm.core.errors import USAGE, CalmError
from calm.core.proc import memory_kib
from research.lab.architecture import X86_64, Architecture

TCG, KVM = "tcg", "kvm"
# Without interrupt remapping, which the emulated machine lacks, an interrupt addresses its CPU by eight bits.
_MAX_APIC_ID = 254
_MIB = 1 << 20
_MIN = 512 * _MIB
_DEFAULT = 4096 * _MIB
_MIN_NODE = 128 * _MIB


@dataclass(frozen=True)
class Topology:
    """CPUs in sockets, each of which is a NUMA node."""

    cpus: int
    sockets: int

    def __post_init__(self) -> None:
        if self.cpus % self.sockets:
            raise CalmError(f"--cpus {self.cpus} is not a multiple of --sockets {self.sockets}", USAGE)
        # The numbers of each socket begin at a multiple of a power of two.
        if (self.sockets - 1) * (1 << (self.cores - 1).bit_length()) + self.cores - 1 > _MAX_APIC_ID:
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

    def nodes(self, memory: int) -> int:
        """Each socket has memory of its own, unless that would be too little."""
        return self.sockets if memory // self.sockets >= _MIN_NODE else 1


def available() -> int:
    """Bytes that this machine can give away without swapping."""
    return memory_kib("MemAvailable") * 1024


def choose_memory(wanted: int | None, files: int) -> int:
    """Bytes for the guest, in whole MiB. Its files are in its memory, and twice while it boots.

    The kernel limits files to half of the memory.
    """
    minimum, free = _MIN + 3 * files, available()
    if wanted is None:
        if minimum > free:
            raise CalmError(
                f"the guest needs {-(-minimum // _MIB)}M of memory, and {free // _MIB}M are available"
            )
        return max(minimum, min(_DEFAULT + 3 * files, free * 3 // 4)) // _MIB * _MIB
    if wanted < minimum:
        raise CalmError(f"--memory: the guest's files need at least {-(-minimum // _MIB)}M", USAGE)
    if wanted > free:
        raise CalmError(f"--memory: only {free // _MIB}M are available on this machine", USAGE)
    return wanted


@dataclass(frozen=True)
class Qemu:
    """The emulator."""

    path: str
    version: str
    architecture: Architecture = X86_64


def find_qemu(chosen: Path | None = None, architecture: Architecture = X86_64) -> Qemu:
    """The chosen one, else the one on PATH."""
    path = str(chosen) if chosen else shutil.which(architecture.qemu)
    if path is None:
        raise CalmError(
            f"{architecture.qemu} is not installed: it is in the Debian package {architecture.qemu_package}"
        )
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CalmError(f"{path} does not run: {error.strerror}") from error
    if done.returncode or not done.stdout.strip():
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CalmError(f"{path} does not run: {reason}")
    return Qemu(path, done.stdout.splitlines()[0], architecture)


def parameters(architecture: Architecture, accelerator: str) -> str:
    """Of the guest's kernel."""
    more = architecture.emulated_parameters if accelerator == TCG else ""
    return f"{architecture.parameters} quiet panic=-1 mitigations=off {more}".rstrip()


# For programs that emulate x86-64 only.
QEMU = X86_64.qemu
PARAMETERS = {each: parameters(X86_64, each) for each in (KVM, TCG)}


def command(
    qemu: Qemu,
    topology: Topology,
    memory: int,
    accelerator: str,
    kernel: Path,
    initrd: Path,
    console: Path,
    changes: Mapping[str, str] | None = None,
) -> list[str]:
    """Starts the machine: the kernel's console is a file, and the script's port is standard output.

    `changes` are further options of QEMU, and other values of these.
    """
    mib, cores, architecture = memory // _MIB, topology.cores, qemu.architecture
    options = {
        **dict.fromkeys(("-display", "-monitor", "-nic"), "none"),
        "-accel": KVM if accelerator == KVM else f"{TCG},thread={architecture.threads}",
        "-cpu": "host" if accelerator == KVM else architecture.cpu,
        "-m": f"{mib}M",
        "-smp": f"{topology.cpus},sockets={topology.sockets},cores={cores},threads=1",
        "-kernel": str(kernel),
        "-initrd": str(initrd),
        "-append": parameters(architecture, accelerator),
        **architecture.options,
        **(changes or {}),
    }
    words = [qemu.path, "-no-reboot", *chain.from_iterable(options.items())]
    nodes = topology.nodes(memory)
    for node in range(nodes if nodes > 1 else 0):
        # The first node has the remainder.
        size = mib // nodes + (mib % nodes if node == 0 else 0)
        words += ["-object", f"memory-backend-ram,id=node{node},size={size}M"]
        cpus = f"cpus={node * cores}-{(node + 1) * cores - 1}"
        words += ["-numa", f"node,nodeid={node},{cpus},memdev=node{node}"]
    return [*words, "-serial", f"file:{console}", *architecture.port_options]
