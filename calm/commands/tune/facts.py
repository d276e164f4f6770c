"""What `calm tune advise` judges by: counts of a run, samples of its memory, and a record of its calls.

The record is by perf or strace, and the calls are summed up by their effect on heaps.
"""

import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from calm.core import machine, proc, proc_maps, processes, program
from calm.core.errors import CalmError
from calm.core.measure import METRIC, Measurement, how, measure
from calm.core.progress import Bar

HEAP = 64 * 1024 * 1024
"""The maximum size and the alignment of the heaps that glibc's arenas of threads consist of, on 64 bits."""

LARGE = 128 * 1024
"""Bytes from which on glibc maps a block by itself, unless its threshold has moved."""

_INTERVAL_S = 0.05
_SMAPS_EVERY = 4
_MAX_EXECUTABLE = 64 * 1024 * 1024
_PR_SET_THP_DISABLE = 41
_HUGE_KIB = 32 * 1024
_OWN_PROCESSES = ("calm-probe", "perf", "strace")
# Of the record.
_LIMIT_S = 20.0
_LIMIT_BYTES = 32 * 1024 * 1024
_CALLS = ("mprotect", "brk", "madvise", "munmap", "mmap")
_READ_WRITE = 3
_MADV_DONTNEED = 4
_MAP_ANONYMOUS = 0x20
_MAP_STACK = 0x20000
_STACK = 8 * 1024 * 1024
_PERF = re.compile(r"^\s*(\d+)/\d+\s+syscalls:sys_enter_(\w+):\s*(.*)$")
# The arguments are all there at entry, even if another thread's call follows before the result.
_STRACE = re.compile(r"^(\d+)\s+(\w+)\((.*?)(?:\)\s+=.*| <unfinished \.\.\.>)$")


@dataclass(frozen=True)
class Calls:
    """The memory system calls of one run, by their effect on heaps."""

    recorder: str
    """perf or strace."""
    wall_s: float
    truncated: bool = False
    """Only the beginning of the run was recorded."""
    recorded: int = 0
    grown: int = 0
    """mprotect to read and write: the heap of a thread's arena grows."""
    grown_median_bytes: float = 0
    brk_grown: int = 0
    brk_shrunk: int = 0
    brk_shrunk_bytes: int = 0
    trimmed: int = 0
    """madvise(MADV_DONTNEED), except on a thread's stack."""
    trimmed_bytes: int = 0
    stacks_returned: int = 0
    mapped_large: int = 0
    unmapped_large: int = 0
    """Of a size that was mapped as a block before."""
    large_bytes: int = 0
    largest_bytes: int = 0

    @property
    def returned_bytes(self) -> int:
        """Returned to the kernel from heaps and from blocks that were mapped by themselves."""
        return self.brk_shrunk_bytes + self.trimmed_bytes + self.large_bytes


class UnknownFactError(Exception):
    """A rule needs a fact that is not known."""


@dataclass
class Facts:
    """What is known of a program. None is unknown: `missing` has the reason."""

    command: tuple[str, ...]
    wall_s: float = 0
    minor_faults: int = 0
    peak_rss_kib: int = 0
    page_kib: int = 4
    processes: int = 1
    cpus: int = 1
    huge_pages: str = "unknown"
    """The machine's setting: always, madvise or never."""
    threads_started: int | None = None
    shootdowns: int | None = None
    calls: Calls | None = None
    huge_kib: int | None = None
    """The maximum of AnonHugePages."""
    heaps: int | None = None
    """glibc's heaps of threads."""
    heaps_rss_kib: int | None = None
    allocator: str | None = None
    static: bool = False
    peak_without_huge_kib: int | None = None
    missing: dict[str, str] = field(default_factory=dict)

    def known(self, name: str) -> Any:  # noqa: ANN401
        """A fact. Raises UnknownFactError with the reason if it is None."""
        if (value := getattr(self, name)) is None:
            raise UnknownFactError(self.missing.get(name, "not counted"))
        return value

    @property
    def has_huge_pages(self) -> bool:
        """Enough of them for a run without them to be telling."""
        huge = self.huge_kib or 0
        return huge >= _HUGE_KIB and 4 * huge >= self.peak_rss_kib


def count_heaps(mappings: Iterable[proc.Mapping]) -> tuple[int, int]:
    """The heaps of threads' arenas, and their resident memory in KiB."""
    heaps: set[int] = set()
    rss = 0
    for each in mappings:
        heap = each.start - each.start % HEAP
        if each.inode or each.path or each.end > heap + HEAP:
            continue
        # The writable part begins at a multiple of their size, and ends before the next one.
        if each.rights.startswith("rw") and each.start == heap:
            heaps.add(heap)
        if heap in heaps:
            rss += each.resident_kib or 0
    return len(heaps), rss


class Sampler(threading.Thread):
    """Samples the memory of all processes below this one, within a `with` block."""

    def __init__(self, bar: Bar) -> None:
        super().__init__(daemon=True)
        self._bar = bar
        self._stopped = threading.Event()
        self.samples = 0
        self.huge_kib = 0
        self.heaps = (0, 0)
        """Their number, and their resident memory in KiB."""
        self.refused = False
        self.files: list[str] = []
        self.executable = b""
        self._executable_path: Path | None = None
        self._largest_kib = 0

    def __enter__(self) -> "Sampler":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        # Signals are for the thread that waits for the program.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._stopped.wait(_INTERVAL_S):
            self._sample()
            self._bar.update()

    def _sample(self) -> None:
        rss_kib = huge_kib = heaps = heaps_kib = 0
        for pid in proc.descendants(os.getpid()):
            try:
                if proc.stat(pid).name in _OWN_PROCESSES:
                    continue
                rollup = proc.rollup(pid)
                # Reading smaps takes long if there are many mappings, and they change little.
                found = count_heaps(proc.smaps(pid)) if self.samples % _SMAPS_EVERY == 0 else (0, 0)
                self.identify(pid, rollup.get("Rss", 0))
            except PermissionError:
                self.refused = True
                continue
            except (OSError, proc.GoneError):
                continue
            rss_kib += rollup.get("Rss", 0)
            huge_kib += rollup.get("AnonHugePages", 0)
            heaps, heaps_kib = heaps + found[0], heaps_kib + found[1]
        if rss_kib:
            self.samples += 1
            self.huge_kib = max(self.huge_kib, huge_kib)
            if heaps > self.heaps[0] or heaps_kib > self.heaps[1]:
                self.heaps = heaps, heaps_kib

    def identify(self, pid: int, rss_kib: int, root: Path = proc.PROC) -> None:
        """Reads the files and the program of the largest process, whose allocator is taken for all."""
        if rss_kib <= self._largest_kib and self.files:
            return
        self.files = proc.files(pid, root)
        executable = root / str(pid) / "exe"
        if (path := executable.readlink()) != self._executable_path:
            with executable.open("rb") as file:
                self.executable = file.read(_MAX_EXECUTABLE)
            self._executable_path = path
        self._largest_kib = max(self._largest_kib, rss_kib)


def _run(command: tuple[str, ...], **options: Any) -> Measurement:  # noqa: ANN401
    """One silent run. What it leaves behind is killed, so that it does not run beside the next one."""
    null = subprocess.DEVNULL
    processes.adopt_orphans()
    try:
        return measure(command, stdin=null, stdout=null, stderr=null, **options)
    finally:
        processes.end_orphans()


def first_run(command: tuple[str, ...], bar: Bar) -> tuple[Facts, Measurement]:
    with Sampler(bar) as sampler:
        run = _run(command)
    missing: dict[str, str] = {}
    for name in ("threads_started", "shootdowns"):
        if METRIC[name].get(run) is None:
            missing[name] = how(METRIC[name], run).removeprefix("not counted: ")
    here = machine.describe()
    facts = Facts(
        command=command,
        wall_s=run.wall_s,
        minor_faults=run.minor_faults,
        peak_rss_kib=run.peak_rss_kib,
        page_kib=proc.PAGE_KIB,
        processes=run.processes,
        cpus=int(here["cpus"]),
        huge_pages=str(here["transparent_huge_pages"]),
        threads_started=run.counters["threads_started"].value,
        shootdowns=None if "shootdowns" in missing else run.counters["shootdowns"].value,
        static="statically linked" in (program.preload_obstacle(command) or ""),
        missing=missing,
    )
    if sampler.samples:
        facts.huge_kib, (facts.heaps, facts.heaps_rss_kib) = sampler.huge_kib, sampler.heaps
        facts.allocator = proc_maps.allocator(sampler.files, sampler.executable)
    else:
        refused = "its /proc files may not be read" if sampler.refused else "it ended before the first sample"
        missing |= dict.fromkeys(("huge_kib", "heaps", "allocator"), refused)
    return facts, run


@contextmanager
def without_huge_pages() -> Iterator[None]:
    """Processes that are started meanwhile get no transparent huge pages."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)


def run_without_huge_pages(command: tuple[str, ...]) -> Measurement | None:
    """Another run: what is resident in it is what the program touches."""
    with suppress(CalmError), without_huge_pages():
        return _run(command, groups=())
    return None


def parse(lines: Iterable[str]) -> Iterator[tuple[int, str, list[int]]]:
    """Process, name and arguments, of `perf script` or of strace. Other lines are skipped.

    strace knows threads alone; the process is 0 then, and `summarise` tells heaps apart by their addresses.
    """
    for line in lines:
        if found := _PERF.match(line):
            process, values = int(found[1]), [part.partition(":")[2] for part in found[3].split(",")]
        elif found := _STRACE.match(line):
            process, values = 0, found[3].split(",")
        else:
            continue
        if found[2] in _CALLS:
            yield process, found[2], [int(value.replace("NULL", "0"), 0) for value in values]


def _stack_bytes() -> int:
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return _STACK if limit == resource.RLIM_INFINITY else limit


def summarise(
    calls: Iterable[tuple[int, str, list[int]]], recorder: str, wall_s: float, truncated: bool
) -> Calls:
    """Tells growth from shrinking, blocks from heaps, and heaps from stacks."""
    ends: dict[tuple[int, int], int] = {}
    grown: list[int] = []
    sizes: Counter[int] = Counter()
    count: Counter[str] = Counter()
    stack = _stack_bytes()
    for pid, name, values in calls:
        count["recorded"] += 1
        match name, values:
            case "mprotect", [_, size, protection, *_] if protection == _READ_WRITE:
                grown.append(size)
            case "brk", [end, *_] if end:
                heap = (pid, end >> 32)
                before = ends.get(heap, end)
                ends[heap] = end
                count["brk_grown"] += end > before
                count["brk_shrunk"] += end < before
                count["brk_shrunk_bytes"] += max(0, before - end)
            case "madvise", [_, size, advice, *_] if advice == _MADV_DONTNEED:
                # A thread that ends returns all of its stack but the last pages.
                if 0.9 * stack <= size <= stack:
                    count["stacks_returned"] += 1
                else:
                    count["trimmed"] += 1
                    count["trimmed_bytes"] += size
            case "mmap", [0, size, protection, flags, *_]:
                anonymous = flags & (_MAP_ANONYMOUS | _MAP_STACK) == _MAP_ANONYMOUS
                if size >= LARGE and protection == _READ_WRITE and anonymous:
                    sizes[size] += 1
                    count["mapped_large"] += 1
            case "munmap", [_, size, *_] if sizes[size] > 0:
                count["unmapped_large"] += 1
                count["large_bytes"] += size
    return Calls(
        recorder,
        wall_s,
        truncated,
        grown=len(grown),
        grown_median_bytes=median(grown) if grown else 0,
        largest_bytes=max(sizes, default=0),
        **count,
    )


def _recorder(data: Path, command: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """The recorder's name, the command that records here, and the one that prints the record."""
    # The preload is for the program, not for its recorder.
    preload = os.environ.get("LD_PRELOAD")
    wrapped = program.with_variables(command, {"LD_PRELOAD": preload}) if preload else list(command)
    reason = "perf is not installed"
    if perf := shutil.which("perf"):
        events = [word for name in _CALLS for word in ("-e", f"syscalls:sys_enter_{name}")]
        words, null = [perf, "record", "-q", "-o", str(data), *events, "--"], subprocess.DEVNULL
        if (
            subprocess.run([*words, "true"], stdin=null, stdout=null, stderr=null, check=False).returncode
            == 0
        ):
            script = [perf, "script", "-i", str(data), "-F", "pid,tid,event,trace"]
            return "perf", [*words, *wrapped], script
        reason = "perf cannot read tracepoints of system calls (that takes root, or CAP_PERFMON and tracefs)"
    if strace := shutil.which("strace"):
        words = [strace, "-f", "-qq", "-X", "raw", "-e", f"trace={','.join(_CALLS)}", "-e", "signal=none"]
        return "strace", [*words, "-o", str(data), "--", *wrapped], ["/bin/cat", str(data)]
    raise UnknownFactError(f"{reason}, and strace is not installed")


def _wait(process: subprocess.Popen[bytes], folder: Path, bar: Bar) -> bool:
    """Waits for the recorder; True if it was stopped before the program's end."""
    deadline = time.monotonic() + _LIMIT_S
    while process.poll() is None:
        size = sum(file.stat().st_size for file in folder.iterdir())
        if time.monotonic() >= deadline or size > _LIMIT_BYTES:
            processes.kill_descendants(process.pid)
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            return True
        bar.update()
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    return False


def record(command: Sequence[str], bar: Bar) -> Calls:
    """Runs the program, or its first seconds, and sums its memory calls up. May raise UnknownFactError.

    All descendants of this process are killed at the end: perf ends a shell, but not its children.
    """
    with tempfile.TemporaryDirectory(prefix="calm-advise-") as name:
        folder, null = Path(name), subprocess.DEVNULL
        recorder, arguments, script = _recorder(folder / "data", command)
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        processes.adopt_orphans()
        begin = time.monotonic()
        process = subprocess.Popen(arguments, stdin=null, stdout=null, stderr=null, env=environment)
        try:
            truncated = _wait(process, folder, bar)
        finally:
            process.poll()
            processes.end_orphans()
        wall_s = time.monotonic() - begin
        printed = subprocess.run(script, stdout=subprocess.PIPE, stderr=null, check=False).stdout
    lines = printed.decode(errors="replace").splitlines()
    calls = summarise(parse(lines), recorder, wall_s, truncated)
    # Any program maps at least its own file.
    if not calls.recorded:
        raise UnknownFactError(f"{recorder} recorded no call: it may not trace here")
    return calls
