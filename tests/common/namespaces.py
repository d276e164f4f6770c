"""Whether the numbers of processes are those of the whole machine."""

from __future__ import annotations

from pathlib import Path

import pytest

# The inode of the kernel's first PID namespace: include/linux/proc_ns.h.
_FIRST = "pid:[4026531836]"

needs_first_pid_namespace = pytest.mark.skipif(
    str(Path("/proc/self/ns/pid").readlink()) != _FIRST,
    reason="processes have other numbers in this PID namespace than for the kernel's tracers",
)
