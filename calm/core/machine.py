"""The machine that figures depend on, and TLB invalidations that send no interrupt."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from calm.core import proc

SYSTEM = Path("/sys/devices/system/cpu")
_LOWER_BOUNDS = "shootdowns made that way are not counted, so the figures are lower bounds"


@dataclass(frozen=True)
class Broadcast:
    """How TLB entries of other CPUs can be invalidated without an interrupt."""

    note: str
    always: bool
    """No shootdown is ever an interrupt here, so a count of interrupts says nothing."""


def broadcast(machine: str, cpuinfo: str, hypervisor: str = "") -> Broadcast | None:
    """Judges by `uname -m`, the text of /proc/cpuinfo and the name of the hypervisor's vendor."""
    if machine.startswith(("aarch64", "arm64")):
        return Broadcast(
            "arm64 CPUs invalidate TLBs by broadcast (TLBI): no interrupt is sent for it", always=True
        )
    if "invlpgb" in (proc.cpu_flags(cpuinfo) or ()):
        return Broadcast(
            f"this CPU can invalidate TLBs by broadcast (INVLPGB): {_LOWER_BOUNDS}", always=False
        )
    if "microsoft" in hypervisor.lower():
        return Broadcast(
            f"under Hyper-V the kernel may flush TLBs by hypercall: {_LOWER_BOUNDS}", always=False
        )
    return None


def broadcast_here() -> Broadcast | None:
    vendor = proc.text("class/dmi/id/sys_vendor", Path("/sys"))
    return broadcast(platform.machine(), proc.text("cpuinfo"), vendor)


def _found(text: str, pattern: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else "unknown"


def describe() -> dict[str, str | int]:
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage")
    return {
        "cpu": _found(proc.text("cpuinfo"), r"^model name\s*:\s*(.*)$"),
        "architecture": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_kib": proc.memory_kib("MemTotal"),
        "kernel": platform.release(),
        "distribution": _found(proc.text("os-release", Path("/etc")), r'^PRETTY_NAME="(.*)"$'),
        "glibc": (os.confstr("CS_GNU_LIBC_VERSION") or "unknown").removeprefix("glibc "),
        "transparent_huge_pages": _found(proc.text("enabled", huge_pages), r"\[(\w+)\]"),
        "huge_page_defrag": _found(proc.text("defrag", huge_pages), r"\[([\w+]+)\]"),
    }


def number(path: Path, otherwise: int) -> int:
    """The number in a file of the kernel, if it has one."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return otherwise
