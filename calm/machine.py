"""What the machine's CPUs do instead of interrupting each other, which no counter of interrupts can see."""

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Broadcast:
    """How TLB entries of other CPUs can go away without an interrupt."""

    note: str
    always: bool
    """No shootdown is ever an interrupt here, so a count of interrupts says nothing."""


def broadcast(machine: str, cpuinfo: str, hypervisor: str = "") -> Broadcast | None:
    """Judges by `uname -m`, the text of /proc/cpuinfo and the name of the hypervisor's vendor."""
    if machine.startswith(("aarch64", "arm64")):
        return Broadcast(
            "arm64 CPUs invalidate TLBs by broadcast (TLBI): no interrupt is sent for it", always=True
        )
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            if "invlpgb" in value.split():
                return Broadcast(
                    "this CPU can invalidate TLBs by broadcast (INVLPGB): "
                    "shootdowns made that way are not counted, so the figures are lower bounds",
                    always=False,
                )
            break
    if "microsoft" in hypervisor.lower():
        return Broadcast(
            "under Hyper-V the kernel may flush TLBs by hypercall: "
            "shootdowns made that way are not counted, so the figures are lower bounds",
            always=False,
        )
    return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def broadcast_here() -> Broadcast | None:
    """What holds on this machine."""
    return broadcast(platform.machine(), _text("/proc/cpuinfo"), _text("/sys/class/dmi/id/sys_vendor"))
