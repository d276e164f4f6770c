"""CPU time that a program's own threads spend in page faults and in memory system calls.

A thread's system time (getrusage) is separated from user time by ticks of some milliseconds, too coarse for a
time that should fall to a tenth. Therefore perf's software clock samples every CPU 5,000 times a second, and
each sample of the program's threads in the kernel is classified by the kernel functions on the stack, as in
`calm profile`. All CPUs are sampled, because inherited per-thread counters lose the rest of a period with
each thread that ends.

Samples count for the threads that the program has started: all threads of its process except the allocator's,
which are named "calmalloc", and the main thread, which starts the others, maps their stacks and ends the
process.
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

from calm.commands.profile.causes import classify
from calm.core.allocators import Allocator
from calm.core.environment import clean_environment

from .rounds import CALMALLOC, note, run_to_end, under

# A prime number of nanoseconds, so that no loop is synchronous with it.
PERIOD_NS = 199_999
# Those of calm profile's causes that are memory management by the thread itself.
MEMORY = frozenset(
    (
        *("fault", "cow", "collapse", "reclaim", "compaction", "migration"),
        *("madvise", "process_madvise", "munmap", "mprotect", "brk", "mremap", "mmap", "membarrier"),
    )
)
# A shell that writes its process ID, and then executes the program.
_TELL = 'echo $$ >"$0" && exec "$@"'
_HEAD = re.compile(r"^(?P<comm>.*?)\s+(?P<pid>\d+)/(?P<tid>\d+)\s+\d+\.\d+:")
_FRAME = re.compile(r"^\s+[0-9a-f]+ (\S+)")


@dataclass
class Looks:
    """Numbers of samples of threads."""

    in_kernel: Counter[str] = field(default_factory=Counter)
    """By cause."""
    all: int = 0
    """In the kernel or not."""

    def figures(self) -> dict[str, Any]:
        """The times in seconds."""
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
    """Parses the output of `perf script` for all processes, and counts the threads that one has started."""
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
    """Why perf cannot sample all CPUs with kernel stacks here; None if it can."""
    if shutil.which("perf") is None:
        return "there is no perf in PATH (Debian's package linux-perf)"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "perf.data"
        done = subprocess.run(_record(file, ["true"]), capture_output=True, text=True, check=False)
        if done.returncode:
            return f"perf record: {(done.stderr.split(chr(10)) or [''])[0] or 'refused'}"
    return None


def run_once(command: Sequence[str], allocator: Allocator) -> dict[str, Any]:
    """Runs a workload, and adds its threads' times to its output."""
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
