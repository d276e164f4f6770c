"""The architectures of guests: how QEMU emulates each, and the names of its parts in Debian and in a build.

One that is not this machine's is called foreign: its programs cannot run here, and neither can its `ldd`.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from calm.core import paths
from calm.core.errors import CalmError


@dataclass(frozen=True)
class Architecture:
    """A guest's, with the pages of its kernel."""

    name: str
    machine: str
    """As `uname -m` prints it. `build/` has a folder of this name, where it was cross-compiled."""
    elf: tuple[str, ...]
    """Machines of ELF files that run there."""
    debian: str
    flavour: str
    """The end of the name of Debian's kernel package."""
    qemu: str
    qemu_package: str
    cpu: str
    """The CPU that is emulated."""
    threads: str
    """QEMU's, of emulated CPUs: `multi` has one for each, `single` one for all."""
    parameters: str
    """Of the kernel: its console is the first serial port."""
    emulated_parameters: str
    """Further ones, without KVM."""
    port: str
    """The second serial port, which has the script's reports."""
    port_options: tuple[str, ...]
    """They connect that port with QEMU's standard output."""
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def foreign(self) -> bool:
        return self.machine != platform.machine()

    def built(self, name: str) -> Path:
        """A file that was cross-compiled in this checkout."""
        root = paths.checkout()
        path = root / "build" / self.machine / name if root else None
        if path is None or not path.is_file():
            raise CalmError(
                f"{name} is not built for {self.name}: in a checkout, `cmake --preset aarch64` and "
                f"`cmake --build --preset aarch64` build it for arm64, in build/{self.machine}"
            )
        return path


X86_64 = Architecture(
    name="x86-64",
    machine="x86_64",
    elf=("EM_X86_64", "EM_386"),
    debian="amd64",
    flavour="cloud-amd64",
    qemu="qemu-system-x86_64",
    qemu_package="qemu-system-x86",
    cpu="max",
    threads="multi",
    parameters="console=ttyS0",
    # The TSCs of emulated CPUs differ; unless told so, the kernel detects it by long checks.
    emulated_parameters="tsc=unstable",
    port="ttyS1",
    port_options=("-serial", "stdio"),
)
ARM64 = Architecture(
    name="arm64",
    machine="aarch64",
    elf=("EM_AARCH64",),
    debian="arm64",
    flavour="cloud-arm64",
    qemu="qemu-system-aarch64",
    qemu_package="qemu-system-arm",
    # QEMU takes three times as long for the architected algorithm, by which the kernel signs its pointers.
    cpu="max,pauth-impdef=on",
    # The kernel's spinlocks are fair: all who wait spin until the next in line runs. With a thread for each,
    # a guest of many more CPUs than this machine has hardly boots. In one thread, a CPU that spins yields.
    # (On x86-64 the kernel uses unfair spinlocks in a virtual machine.)
    threads="single",
    parameters="console=ttyAMA0",
    emulated_parameters="",
    # This machine has one serial port of its own.
    port="ttyS0",
    port_options=("-chardev", "stdio,id=reports", "-device", "pci-serial,chardev=reports"),
    # The default interrupt controller has eight CPUs at most.
    options={"-M": "virt,gic-version=max"},
)
ARM64_16K = replace(ARM64, name="arm64-16k", flavour="arm64-16k")
ARCHITECTURES = {each.name: each for each in (X86_64, ARM64, ARM64_16K)}


def host() -> Architecture:
    """That of this machine; x86-64 where this machine is of neither."""
    return next((each for each in ARCHITECTURES.values() if not each.foreign), X86_64)


def named(machine: str) -> Architecture | None:
    """The architecture that an ELF file's machine belongs to."""
    return next((each for each in ARCHITECTURES.values() if machine in each.elf), None)
