"""The machine's CPUs by socket, and whether it is virtual."""

import os
from collections.abc import Iterable
from pathlib import Path

from calm.core import proc
from calm.core.machine import SYSTEM, number


def sockets(cpus: Iterable[int] | None = None, system: Path = SYSTEM) -> list[list[int]]:
    """The CPUs that may be used, by socket; in each, one thread of every core before the cores' others."""
    packages: dict[int, dict[int, list[int]]] = {}
    for cpu in sorted(os.sched_getaffinity(0) if cpus is None else cpus):
        topology = system / f"cpu{cpu}" / "topology"
        cores = packages.setdefault(max(0, number(topology / "physical_package_id", 0)), {})
        cores.setdefault(number(topology / "core_id", cpu), []).append(cpu)
    return [
        [
            cpu
            for _, cpu in sorted(
                (rank, cpu) for threads in cores.values() for rank, cpu in enumerate(threads)
            )
        ]
        for _, cores in sorted(packages.items())
    ]


def is_virtual(cpuinfo: str | None = None) -> bool | None:
    """Whether the CPU reports a hypervisor; None where it has no such flag, which only x86 has."""
    flags = proc.cpu_flags(cpuinfo)
    return None if flags is None else "hypervisor" in flags
