"""What `calm tune --advise` judges by: counts of one run, looks at its memory, and a record of its calls."""

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from calm import machine, mapped, processes, program
from calm.allocators import GLIBC
from calm.errors import CalmError
from calm.measure import Measurement, measure
from calm.progress import Bar
from calm.tune.space import glibc_version

LARGE = 128 * 1024
"""Bytes from which on glibc maps a block by itself, at first."""
HEAP = 64 * 1024 * 1024
"""glibc's arenas of threads consist of heaps of at most that, aligned to it (on 64-bit machines)."""

_LOOK_EVERY_S = 0.05
_RECORD_LIMIT_S = 20.0
_RECORD_LIMIT = "32M"
_RECORD_LIMIT_BYTES = 64 * 1024 * 1024
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_THP_DISABLE = 41
_MIB_KIB = 1024
_CALLS = ("mprotect", "brk", "madvise", "munmap", "mmap")
_MADV_DONTNEED = 4
_MAP_ANONYMOUS = 0x20
_MAP_STACK = 0x20000
_STACK = 8 * 1024 * 1024

# By the names of their libraries, and by what their code says where it is linked in.
# What is linked into a program says of itself.
_SIGNS = {
    "jemalloc": b"<jemalloc>",
    "mimalloc": b"MIMALLOC_",
    "tcmalloc": b"TCMALLOC_",
    "snmalloc": b"snmalloc",
    "rpmalloc": b"rpmalloc_",
}


@dataclass(frozen=True)
class Calls:
    """The memory system calls of one run, by what they do to a heap."""

    how: str
    seconds: float
    truncated: bool = False
    recorded: int = 0
    grown: int = 0
    """mprotect to read and write: a heap of a thread's arena is made longer."""
    grown_median_bytes: float = 0
    brk_grown: int = 0
    brk_shrunk: int = 0
    brk_shrunk_bytes: int = 0
    trimmed: int = 0
    """madvise(MADV_DONTNEED), but not of a thread's stack."""
    trimmed_bytes: int = 0
    stacks_returned: int = 0
    mapped_large: int = 0
    unmapped_large: int = 0
    """Of a size that was mapped as a block before."""
    large_bytes: int = 0
    largest: int = 0

    @property
    def returned_bytes(self) -> int:
        """Given back by the heaps, and by blocks that were mapped by themselves."""
        return self.brk_shrunk_bytes + self.trimmed_bytes + self.large_bytes


@dataclass(frozen=True)
class Facts:
    """What is known of a program. None is what could not be found out: `missing` says why."""

    command: tuple[str, ...]
    wall_s: float = 0
    faults: int = 0
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
    """AnonHugePages, the most at a look."""
    heaps: int | None = None
    heaps_rss_kib: int | None = None
    allocator: str | None = None
    static: bool = False
    peak_without_huge_kib: int | None = None
    glibc: tuple[int, ...] = (2, 36)
    missing: Mapping[str, str] = field(default_factory=dict)


_PERF = re.compile(r"^\s*(\d+)/\d+\s+syscalls:sys_enter_(\w+):\s*(.*)$")
# The arguments are all there at entry, though another thread's call may come before the end.
_STRACE = re.compile(r"^(\d+)\s+(\w+)\((.*?)(?:\)\s+=.*| <unfinished \.\.\.>)$")
_MASKS = {"PROT_NONE": 0, "PROT_READ": 1, "PROT_WRITE": 2, "PROT_EXEC": 4}
_FLAGS = {"MAP_ANONYMOUS": _MAP_ANONYMOUS, "MAP_STACK": _MAP_STACK, "MADV_DONTNEED": _MADV_DONTNEED}


def _number(text: str) -> int:
    """An argument as perf or strace prints it; flags that do not matter are 0."""
    text = text.strip()
    if text == "NULL":
        return 0
    with suppress(ValueError):
        return int(text, 0)
    return sum({**_MASKS, **_FLAGS}.get(word, 0) for word in text.split("|"))


def parse_calls(lines: Iterable[str]) -> Iterator[tuple[int, str, list[int]]]:
    """Process, name and arguments, of `perf script` or of strace. Other lines are passed over.

    strace knows threads alone; 0 is the process then, and summarise tells heaps apart by where they are.
    """
    for line in lines:
        if found := _PERF.match(line):
            values = [_number(part.partition(":")[2]) for part in found[3].split(",")]
            process = int(found[1])
        elif found := _STRACE.match(line):
            values = [_number(part) for part in found[3].split(",")]
            process = 0
        else:
            continue
        if found[2] in _CALLS:
            yield process, found[2], values


def _stack_bytes() -> int:
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return _STACK if limit == resource.RLIM_INFINITY else limit


def summarise(
    calls: Iterable[tuple[int, str, list[int]]], how: str, seconds: float, truncated: bool
) -> Calls:
    """Tells growth from shrinking, blocks from heaps, and heaps from stacks."""
    recorded = 0
    ends: dict[tuple[int, int], int] = {}
    grown: list[int] = []
    sizes: Counter[int] = Counter()
    count: Counter[str] = Counter()
    stack = _stack_bytes()
    for pid, name, values in calls:
        recorded += 1
        if name == "mprotect" and values[2] == 3:
            grown.append(values[1])
        elif name == "brk" and values[0]:
            heap = (pid, values[0] >> 32)
            before = ends.get(heap, values[0])
            ends[heap] = values[0]
            count["brk_grown"] += values[0] > before
            count["brk_shrunk"] += values[0] < before
            count["brk_shrunk_bytes"] += max(0, before - values[0])
        elif name == "madvise" and values[2] == _MADV_DONTNEED:
            # A thread that ends gives back all of its stack but the last pages.
            if 0.9 * stack <= values[1] <= stack:
                count["stacks_returned"] += 1
            else:
                count["trimmed"] += 1
                count["trimmed_bytes"] += values[1]
        elif name == "mmap" and values[1] >= LARGE and values[2] == 3 and _is_block(values):
            sizes[values[1]] += 1
            count["mapped_large"] += 1
        elif name == "munmap" and sizes[values[1]] > 0:
            count["unmapped_large"] += 1
            count["large_bytes"] += values[1]
    return Calls(
        how,
        seconds,
        truncated,
        recorded,
        grown=len(grown),
        grown_median_bytes=median(grown) if grown else 0,
        largest=max(sizes, default=0),
        **count,
    )


def _is_block(values: Sequence[int]) -> bool:
    return bool(values[3] & _MAP_ANONYMOUS) and not values[3] & _MAP_STACK and values[0] == 0


@dataclass
class Look:
    """What one process, or several together, have in memory."""

    rss_kib: int = 0
    huge_kib: int = 0
    heaps: int = 0
    heaps_rss_kib: int = 0


_FIELD = re.compile(r"^(Rss|AnonHugePages):\s+(\d+) kB", re.MULTILINE)
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)\s*(.*)$")


def read_rollup(text: str) -> tuple[int, int]:
    """Rss and AnonHugePages of a smaps_rollup, in KiB."""
    found = dict(_FIELD.findall(text))
    return int(found.get("Rss", 0)), int(found.get("AnonHugePages", 0))


def count_heaps(smaps: str) -> tuple[int, int]:
    """The heaps of threads' arenas and what is resident of them, in KiB, by a process's smaps."""
    heaps: set[int] = set()
    rss = 0
    within = False
    for line in smaps.splitlines():
        if found := _MAPPING.match(line):
            begin, end = int(found[1], 16), int(found[2], 16)
            heap = begin - begin % HEAP
            anonymous = found[4] == "0" and not found[5]
            # What can be written begins at a multiple of their size, and ends before the next one.
            starts = anonymous and found[3].startswith("rw") and begin == heap and end <= heap + HEAP
            if starts:
                heaps.add(heap)
            within = anonymous and heap in heaps and end <= heap + HEAP
        elif within and line.startswith("Rss:"):
            rss += int(line.split()[1])
    return len(heaps), rss


def allocator_of(files: Iterable[str], executable: bytes) -> str | None:
    """Whose malloc a process has, by what it has mapped and what its program says of itself.

    None: no C library's, as far as can be seen.
    """
    found = mapped.allocator(files)
    if found in (None, GLIBC, "musl"):
        found = next((known for known, sign in _SIGNS.items() if sign in executable), found)
    return found


class Watcher(threading.Thread):
    """Looks at the memory of all processes below this one, until it is told to stop."""

    def __init__(self, bar: Bar) -> None:
        super().__init__(daemon=True)
        self._bar = bar
        self._stopped = threading.Event()
        self.most = Look()
        self.looks = 0
        self.refused = False
        self.files: list[str] = []
        self.executable = b""
        self._largest = 0
        self._read = ""

    def run(self) -> None:
        """Looks, again and again."""
        # Signals are for the thread that waits for the program.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._stopped.wait(_LOOK_EVERY_S):
            with suppress(OSError):
                self._look()
            self._bar.update()

    def stop(self) -> None:
        """Returns when the last look is over."""
        self._stopped.set()
        self.join()

    def _look(self) -> None:
        now = Look()
        for pid in processes.descendants(os.getpid()):
            folder = Path("/proc") / str(pid)
            try:
                if (folder / "comm").read_text().strip() in ("calm-probe", "perf", "strace"):
                    continue
                rss, huge = read_rollup((folder / "smaps_rollup").read_text())
                # Reading all mappings takes long where there are many, and they change little.
                heaps, heaps_rss = (
                    count_heaps((folder / "smaps").read_text()) if self.looks % 4 == 0 else (0, 0)
                )
                self._identify(folder, rss)
            except PermissionError:
                self.refused = True
                continue
            except OSError:
                continue
            now.rss_kib += rss
            now.huge_kib += huge
            now.heaps += heaps
            now.heaps_rss_kib += heaps_rss
        if now.rss_kib:
            self.looks += 1
            self.most.huge_kib = max(self.most.huge_kib, now.huge_kib)
            if now.heaps_rss_kib > self.most.heaps_rss_kib or now.heaps > self.most.heaps:
                self.most.heaps, self.most.heaps_rss_kib = now.heaps, now.heaps_rss_kib

    def _identify(self, folder: Path, rss: int) -> None:
        """The largest process speaks for all."""
        if rss <= self._largest and self.files:
            return
        maps = (folder / "maps").read_text().splitlines()
        self.files = [line.split(maxsplit=5)[5] for line in maps if line.count("/")]
        executable = folder / "exe"
        if (path := str(executable.readlink())) != self._read:
            with executable.open("rb") as file:
                self.executable = file.read(64 * 1024 * 1024)
            self._read = path
        self._largest = max(self._largest, rss)


@contextmanager
def without_huge_pages() -> Iterator[None]:
    """Processes that are started meanwhile get no transparent huge pages."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)


@contextmanager
def _nothing_left() -> Iterator[None]:
    """Ends what was started meanwhile, also what was left behind: perf ends a shell, not its children."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = set(processes.descendants(os.getpid()))
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        # What may not be killed, as it has become another user's, is left alone.
        while left := set(processes.descendants(os.getpid())) - before:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                    # Those below it are adopted when it is gone.
                    os.waitpid(pid, 0)
                except ChildProcessError:
                    continue
                except (ProcessLookupError, PermissionError):
                    before.add(pid)
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _recorder(folder: Path, command: Sequence[str]) -> tuple[list[str], str] | str:
    """What records memory calls here, and its name; or why nothing does."""
    # What is to be preloaded is for the program, not for what records it.
    preload = os.environ.get("LD_PRELOAD")
    wrapped = program.with_variables(command, {"LD_PRELOAD": preload}) if preload else list(command)
    reason = "perf is not installed"
    if perf := shutil.which("perf"):
        events = [word for name in _CALLS for word in ("-e", f"syscalls:sys_enter_{name}")]
        arguments = [perf, "record", "-q", "-o", str(folder / "data"), *events]
        tried = subprocess.run(
            [*arguments, "--", "true"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if tried.returncode == 0:
            return [*arguments, f"--max-size={_RECORD_LIMIT}", "--", *wrapped], "perf"
        reason = "perf cannot read tracepoints of system calls (that takes root, or CAP_PERFMON and tracefs)"
    if strace := shutil.which("strace"):
        options = ["-f", "-qq", "-e", f"trace={','.join(_CALLS)}", "-e", "signal=none"]
        return [strace, *options, "-o", str(folder / "text"), "--", *wrapped], "strace"
    return f"{reason}, and strace is not installed"


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _until_done(process: subprocess.Popen[bytes], folder: Path, bar: Bar) -> bool:
    """Waits for what records; True if it was stopped before the program's end."""
    deadline = time.monotonic() + _RECORD_LIMIT_S
    while process.poll() is None:
        if time.monotonic() >= deadline or _size(folder) > _RECORD_LIMIT_BYTES:
            processes.kill_descendants(process.pid)
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            return True
        bar.update()
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    return _size(folder) >= 30 * 1024 * 1024 and (folder / "data").exists()


def record_calls(command: Sequence[str], bar: Bar) -> Calls | str:
    """Runs the program once more, or its first seconds, and sums its memory calls up; or says why not."""
    calls = _record(command, bar)
    # Whatever starts maps its own file at least.
    if isinstance(calls, Calls) and calls.recorded == 0:
        return f"{calls.how} recorded no call at all: it may not trace here"
    return calls


def _record(command: Sequence[str], bar: Bar) -> Calls | str:
    with tempfile.TemporaryDirectory(prefix="calm-advise-") as name:
        folder = Path(name)
        chosen = _recorder(folder, command)
        if isinstance(chosen, str):
            return chosen
        arguments, how = chosen
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        begin = time.monotonic()
        with _nothing_left():
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            try:
                truncated = _until_done(process, folder, bar)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        seconds = time.monotonic() - begin
        if how == "strace":
            text = folder / "text"
            lines = text.read_text(errors="replace").splitlines() if text.exists() else []
            return summarise(parse_calls(lines), how, seconds, truncated)
        script = subprocess.Popen(
            ["perf", "script", "-i", str(folder / "data"), "-F", "pid,tid,event,trace"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        assert script.stdout is not None
        with script:
            try:
                return summarise(parse_calls(script.stdout), how, seconds, truncated)
            finally:
                script.kill()


def _is_static(command: Sequence[str]) -> bool:
    obstacle = program.preload_obstacle(command)
    return obstacle is not None and "statically linked" in obstacle


def first_run(command: tuple[str, ...], bar: Bar) -> tuple[Facts, Measurement]:
    """Counts, and looks at memory from outside."""
    watcher = Watcher(bar)
    watcher.start()
    try:
        run = measure(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finally:
        watcher.stop()
    missing: dict[str, str] = {}
    broadcast = machine.broadcast_here()
    threads, shootdowns = run.counters["threads_started"], run.counters["shootdowns_begun"]
    if threads.value is None:
        missing["threads_started"] = threads.reason or "not counted"
    if shootdowns.value is None or (broadcast and broadcast.always):
        missing["shootdowns"] = shootdowns.reason or (broadcast.note if broadcast else "not counted")
    if watcher.looks == 0:
        refused = (
            "its /proc files may not be read" if watcher.refused else "it ended before it could be looked at"
        )
        missing |= {"huge_kib": refused, "heaps": refused, "allocator": refused}
    seen = watcher.looks > 0
    here = machine.describe()
    facts = Facts(
        command=command,
        wall_s=run.wall_s,
        faults=run.minor_faults,
        peak_rss_kib=run.peak_rss_kib,
        page_kib=os.sysconf("SC_PAGESIZE") // 1024,
        processes=run.processes,
        cpus=int(here["cpus"]),
        huge_pages=str(here["transparent_huge_pages"]),
        threads_started=threads.value,
        shootdowns=None if "shootdowns" in missing else shootdowns.value,
        huge_kib=watcher.most.huge_kib if seen else None,
        heaps=watcher.most.heaps if seen else None,
        heaps_rss_kib=watcher.most.heaps_rss_kib if seen else None,
        allocator=allocator_of(watcher.files, watcher.executable) if seen else None,
        static=_is_static(command),
        glibc=glibc_version(),
        missing=missing,
    )
    return facts, run


def is_huge(facts: Facts) -> bool:
    """Enough huge pages for a run without them to say something."""
    return (facts.huge_kib or 0) >= 32 * _MIB_KIB and 4 * (facts.huge_kib or 0) >= facts.peak_rss_kib


def run_without_huge_pages(command: tuple[str, ...], bar: Bar) -> Measurement | None:
    """The same without them: what is resident then was touched."""
    bar.update()
    try:
        with without_huge_pages():
            return measure(
                command,
                groups=(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    except CalmError:
        return None
