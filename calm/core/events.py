"""The tracepoints that calm counts and samples, by the names of their figures.

The probe has the same table in calm/probe/counters.c.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from calm.core.measure import SYSCALLS

TRACEFS = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
CALL_PREFIX = "syscalls:sys_enter_"


class Event(NamedTuple):
    """A tracepoint, and the filter of the events that count."""

    group: str
    name: str
    condition: str = ""

    @property
    def perf(self) -> str:
        """As perf writes it: tlb:tlb_flush."""
        return f"{self.group}:{self.name}"

    @property
    def path(self) -> str:
        """Its folder below tracefs: events/tlb/tlb_flush."""
        return f"events/{self.group}/{self.name}"


# The reasons are those of enum tlb_flush_reason; 0x10000 is CLONE_THREAD.
EVENTS: Mapping[str, Event] = {
    "shootdowns": Event("tlb", "tlb_flush", "reason == 4"),
    "interrupts": Event("csd", "csd_queue_cpu", "func.function == flush_tlb_func"),
    "interrupts_received": Event("tlb", "tlb_flush", "reason == 1"),
    "threads_started": Event("task", "task_newtask", "clone_flags & 0x10000"),
    # It tells a copy-on-write from other faults, but only x86 has it.
    "faults": Event("exceptions", "page_fault_user"),
    **{name: Event("syscalls", f"sys_enter_{name}") for name in (*SYSCALLS, "mmap")},
}


def tracefs() -> Path | None:
    """Where tracefs is mounted and can be read."""
    return next(
        (root for root in TRACEFS if os.access(root / "events/header_event", os.R_OK, effective_ids=True)),
        None,
    )
