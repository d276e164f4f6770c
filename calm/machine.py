"""The machine that figures depend on, and what its CPUs do that no counter of interrupts can see."""

import os
import platform
import re
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


def _found(path: str, pattern: str) -> str:
    found = re.search(pattern, _text(path), re.MULTILINE)
    return found.group(1).strip() if found else "unknown"


def memory_kib(field: str) -> int:
    """A field of /proc/meminfo; 0 where it does not say."""
    found = _found("/proc/meminfo", rf"^{field}:\s*(\d+) kB$")
    return int(found) if found.isdigit() else 0


def describe() -> dict[str, str | int]:
    """What figures of time and memory depend on."""
    return {
        "cpu": _found("/proc/cpuinfo", r"^model name\s*:\s*(.*)$"),
        "architecture": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_kib": memory_kib("MemTotal"),
        "kernel": platform.release(),
        "distribution": _found("/etc/os-release", r'^PRETTY_NAME="(.*)"$'),
        "glibc": (os.confstr("CS_GNU_LIBC_VERSION") or "unknown").removeprefix("glibc "),
        "transparent_huge_pages": _found("/sys/kernel/mm/transparent_hugepage/enabled", r"\[(\w+)\]"),
        "huge_page_defrag": _found("/sys/kernel/mm/transparent_hugepage/defrag", r"\[([\w+]+)\]"),
    }


def tlb_interrupts() -> int | None:
    """The TLB row of /proc/interrupts: all CPUs', and every process's. None where there is no such row."""
    lines = _text("/proc/interrupts").splitlines()
    row = next((line.split() for line in lines if line.lstrip().startswith("TLB:")), None)
    return sum(int(word) for word in row[1:] if word.isdigit()) if row else None
