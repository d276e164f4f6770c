"""CPU time that a program's own threads spend in page faults and in memory system calls.

The kernel's clock of a thread's system time (getrusage) is divided from user time by ticks of some
milliseconds: too coarse for what is to become a tenth. So perf's software clock looks at every CPU 5,000
times a second, and each look that finds a thread of the program's in the kernel is judged by the kernel's
functions on the stack, as `calm profile` does it. All CPUs are looked at, as counters that each thread
inherits lose what is left of a period with each thread that ends.

Counted are the threads that the program has started: all of its process but the allocator's own, which are
called "calmalloc", and the main thread, which starts the others, maps their stacks and ends the process.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from calm.allocators import Allocator
from calm.bench.runner import clean_environment
from calm.profile.causes import classify

from .rounds import CALMALLOC, note, run_to_end, under

# A prime of nanoseconds, so that no loop keeps step with it.
PERIOD_NS = 199_999
# Causes, as calm profile has them, that are memory management of the thread's own.
MEMORY = frozenset(
    (
        *("fault", "cow", "collapse", "reclaim", "compaction", "migration"),
        *("madvise", "process_madvise", "munmap", "mprotect", "brk", "mremap", "mmap", "membarrier"),
    )
)
# A shell that tells its process id and then becomes the program.
_TELL = 'echo $$ >"$0" && exec "$@"'
_HEAD = re.compile(r"^(?P<comm>.*?)\s+(?P<pid>\d+)/(?P<tid>\d+)\s+\d+\.\d+:")
_FRAME = re.compile(r"^\s+[0-9a-f]+ (\S+)")


@dataclass
class Looks:
    """How often threads were found where."""

    in_kernel: Counter[str] = field(default_factory=Counter)
    """By cause."""
    all: int = 0
    """In the kernel or not."""

    def figures(self) -> dict[str, Any]:
        """In seconds."""
        each = PERIOD_NS * 1e-9
        memory = sum(count for cause, count in self.in_kernel.items() if cause in MEMORY)
        return {
            "client_memory_s": memory * each,
            "client_kernel_s": self.in_kernel.total() * each,
            "client_cpu_s": self.all * each,
            "client_kernel_s_by_cause": {
                cause: count * each for cause, count in sorted(self.in_kernel.items())
            },
        }


def read(lines: Iterable[str], process: int) -> Looks:
    """Takes what `perf script` prints, of all processes, for the threads that one has started."""
    looks = Looks()
    counts = False
    stack: list[str] = []

    def finish() -> None:
        nonlocal counts
        if counts:
            looks.all += 1
            if stack:
                looks.in_kernel[classify(stack)] += 1
        counts = False
        stack.clear()

    for line in lines:
        if head := _HEAD.match(line):
            finish()
            own = int(head["pid"]) == process and head["tid"] != head["pid"]
            counts = own and head["comm"].strip() != CALMALLOC
        elif counts and (frame := _FRAME.match(line)):
            stack.append(frame[1])
    finish()
    return looks


def _record(file: Path, command: Sequence[str]) -> list[str]:
    clock = ["-e", f"cpu-clock/period={PERIOD_NS}/", "-g", "--kernel-callchains"]
    return ["perf", "record", "-q", "-a", "-N", "-B", *clock, "-o", str(file), "--", *command]


@cache
def obstacle() -> str | None:
    """Why perf cannot look at all CPUs here, with the kernel's part of the stacks; None where it can."""
    if shutil.which("perf") is None:
        return "there is no perf in PATH (Debian's package linux-perf)"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "perf.data"
        done = subprocess.run(_record(file, ["true"]), capture_output=True, text=True, check=False)
        if done.returncode:
            return f"perf record: {(done.stderr.split(chr(10)) or [''])[0] or 'refused'}"
    return None


def run_once(command: Sequence[str], allocator: Allocator) -> dict[str, Any]:
    """Runs a workload, and adds what its threads spent to what it prints."""
    environment = clean_environment()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "perf.data"
        told = Path(folder) / "pid"
        # Not for perf: the preload is the program's alone.
        started = ["sh", "-c", _TELL, str(told), *under(allocator, command, environment)]
        done = run_to_end(_record(file, started), environment=environment)
        script = run_to_end(["perf", "script", "-i", str(file), "-F", "comm,pid,tid,time,ip,sym"])
        process = int(told.read_text())
    printed: dict[str, Any] = json.loads(done.stdout)
    looks = read(script.stdout.splitlines(), process)
    return printed | looks.figures() | note(done.stderr)
