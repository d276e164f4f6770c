"""Which CPUs share a socket, and whether they are a hypervisor's."""

import os
from collections.abc import Iterable
from pathlib import Path

SYSTEM = Path("/sys/devices/system/cpu")


def number(path: Path, otherwise: int) -> int:
    """What a file of the kernel's says, if it is there and is a number."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return otherwise


def sockets(cpus: Iterable[int] | None = None, system: Path = SYSTEM) -> list[list[int]]:
    """The CPUs that may be used, by socket; in each, one thread of every core before the cores' others."""
    packages: dict[int, dict[int, list[int]]] = {}
    for cpu in sorted(os.sched_getaffinity(0) if cpus is None else cpus):
        topology = system / f"cpu{cpu}" / "topology"
        cores = packages.setdefault(max(0, number(topology / "physical_package_id", 0)), {})
        cores.setdefault(number(topology / "core_id", cpu), []).append(cpu)
    found = []
    for _, cores in sorted(packages.items()):
        ranked = [(rank, cpu) for threads in cores.values() for rank, cpu in enumerate(threads)]
        found.append([cpu for _, cpu in sorted(ranked)])
    return found


def is_virtual(cpuinfo: str | None = None) -> bool | None:
    """Whether the CPU says that a hypervisor lends it. None: it has no such flag, as only x86 has one."""
    text = Path("/proc/cpuinfo").read_text(errors="replace") if cpuinfo is None else cpuinfo
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return "hypervisor" in value.split()
    return None
