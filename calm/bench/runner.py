"""Runs the suite: round by round, each case once under every allocator."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Protocol

from calm import __version__, allocators, machine, measure, processes, program, report, said
from calm.allocators import Allocator
from calm.bench import workloads
from calm.bench.cases import Case, Prepared
from calm.bench.order import orders
from calm.bench.results import METRIC, RESIDENT, Results, Row, Run, Side, Subject
from calm.errors import CalmError
from calm.statistics import SEED

# Settings of whoever runs this must not reach what is measured.
_SETTINGS = (
    *("LD_", "MALLOC_", "GLIBC_TUNABLES", "CALM_OPTIONS", "PTLBMALLOC2_", "MIMALLOC_", "TCMALLOC_"),
    *("JE_MALLOC_", "_RJEM_", "SNMALLOC_", "RPMALLOC_"),
)
# No case is meant to reach as much; a note says so where one did.
_EXPECTED_PEAK_KIB = 4 * 1024 * 1024
_HUGE_PAGE = 2 * 1024 * 1024
_NOT_PRELOADED = b"cannot be preloaded"

_MEASURED = (
    *("wall_s", "user_s", "system_s", "peak_rss_kib", "average_rss_kib", "minor_faults"),
    *("shootdowns_begun", "interrupts_sent", "system_wide_tlb_interrupts", "threads_started"),
)

# First as huge pages, whole and aligned, as the kernel hands them out where a program asks for them; then
# page by page. Its own size is let go of in between, so the two passes touch the same memory.
_TOUCH = """
import mmap, sys
size, page = int(sys.argv[1]), mmap.PAGESIZE
for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE):
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        try:
            memory.madvise(advice)
        except OSError:
            pass
        for start in range(0, size, 1 << 27):
            stop = min(size, start + (1 << 27))
            memory[start:stop:page] = bytes(len(range(start, stop, page)))
"""


class Watcher(Protocol):
    """Is told how far the runs are."""

    def begin(self, turns: Sequence[tuple[str, str]], rounds: int) -> None:
        """All turns of one round, as case and allocator; rounds: with the warm-up."""

    def touching(self) -> None:
        """Memory is being touched, which takes some seconds."""

    def turn(self, number: int, case: str, label: str) -> None:
        """A run begins; the warm-up is round 0."""

    def done(self, case: str, label: str, seconds: float) -> None:
        """It has ended, after so long with everything that belongs to it."""

    def failed(self, case: str, label: str, failure: str) -> None:
        """It has failed."""

    def row_done(self) -> None:
        """Every allocator has had its turn in a case."""


@dataclass
class _Work:
    case: Case
    prepared: Prepared
    row: Row
    orders: list[list[Allocator]]


def clean_environment() -> dict[str, str]:
    """The environment without any allocator's settings. Where gcc is ccache's, it compiles all the same."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    return clean | {"CCACHE_DISABLE": "1"}


def touch_memory(free_kib: int) -> int:
    """Has memory backed before it is measured with; returns how much, in KiB.

    The host of a virtual machine backs a page at its first touch only, which is many times slower. The least
    of what the suite may reach and of a quarter of what is free.
    """
    size = min(_EXPECTED_PEAK_KIB, free_kib // 4) * 1024 // _HUGE_PAGE * _HUGE_PAGE
    if size == 0:
        return 0
    # In a process of its own: this one must stay small.
    done = subprocess.run([sys.executable, "-c", _TOUCH, str(size)], capture_output=True, check=False)
    return size // 1024 if done.returncode == 0 else 0


def obstacle(case: Case) -> str | None:
    """Why a case cannot be run here at all."""
    if case.program is None:
        return workloads.obstacle(case)
    try:
        found = program.find(case.program)
    except CalmError:
        hint = f": install the package {case.package}" if case.package else ""
        return f"{case.program} is not on this machine{hint}"
    # Debian 13's redis-server does: what it gets from jemalloc it would give to the preloaded free().
    if b"\0mallocx\0" in found.read_bytes():
        return f"{case.program} calls functions of jemalloc's own, which a preload does not replace"
    return None


def describe(allocator: Allocator) -> Subject:
    """What an allocator is, for the file of results."""
    name = next((name for name in allocators.KNOWN if allocator.label.partition(":")[0] == name), None)
    origin = allocators.origin(name) if name else None
    return Subject(
        label=allocator.label,
        library=str(allocator.library) if allocator.library else None,
        version=origin.version if origin else None,
        package=origin.package if origin else None,
        package_version=origin.package_version if origin else None,
        environment=dict(allocator.environment),
    )


def _printed(file: IO[bytes]) -> dict[str, Any]:
    """The last line of JSON that a program or a client printed."""
    file.seek(0)
    for line in reversed(file.read().splitlines()):
        if line.lstrip().startswith(b"{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return found
    return {}


def _number(printed: Mapping[str, Any], key: str) -> float | None:
    value = printed.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# Counting these takes far longer than a short run does.
_SHOOTDOWNS = ("shootdowns_begun", "interrupts_sent")


def _figures(hardware: bool, shootdowns: bool) -> tuple[str, ...]:
    measured = (name for name in _MEASURED if shootdowns or name not in _SHOOTDOWNS)
    return (*measured, *(("cycles",) if hardware else ()))


def run_once(
    case: Case,
    prepared: Prepared,
    allocator: Allocator,
    broadcast: machine.Broadcast | None,
    limit_s: float | None,
    hardware: bool = False,
    heard: dict[str, list[str]] | None = None,
    shootdowns: bool = True,
) -> tuple[measure.Measurement, dict[str, float | None], str | None]:
    """One run: the measurement, its figures, and what went wrong with it, if anything did.

    heard: gets what calmalloc says.
    """
    environment = clean_environment() | dict(prepared.environment)
    with (
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryFile() as client_output,
        tempfile.TemporaryFile() as client_errors,
    ):

        def start_client() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                prepared.client,
                env=environment,
                cwd=prepared.folder,
                stdin=subprocess.DEVNULL,
                stdout=client_output,
                stderr=client_errors,
            )

        prints = bool(case.metric and not prepared.client)
        run = measure.measure(
            prepared.command,
            allocator.variables(environment),
            groups=[
                *([measure.TLB_GROUP] if shootdowns else []),
                *([measure.HARDWARE_GROUP] if hardware else []),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output if prints else subprocess.DEVNULL,
            stderr=errors,
            inherited=environment,
            folder=prepared.folder,
            limit_s=limit_s,
            start_client=start_client if prepared.client else None,
        )
        if heard is not None:
            said.listen(heard, allocator.label, errors)
        names = _figures(hardware, shootdowns)
        figures = {name: measure.counts(run, measure.METRIC[name], broadcast) for name in names}
        failure = run.failure
        if failure:
            words = report.last_words(client_errors) if run.client_code else ""
            failure += words or report.last_words(errors)
        elif allocator.library and _refused(errors, allocator.library):
            failure = f"the dynamic linker did not preload it{report.last_words(errors)}"
        elif case.metric:
            printed = _printed(client_output if prepared.client else output)
            figures[METRIC] = _number(printed, case.metric.key)
            if not figures[METRIC]:
                failure = f"it printed no {case.metric.key}"
            if case.resident_key:
                resident = _number(printed, case.resident_key)
                figures[RESIDENT] = resident / 1024 if resident is not None else None
            figures |= {key: _number(printed, key) for key in case.more_keys}
        return run, figures, failure


def _refused(errors: IO[bytes], library: Path) -> bool:
    """The dynamic linker only complains of a library that it leaves out, and runs the program without."""
    errors.seek(0)
    return any(
        _NOT_PRELOADED in line and os.fsencode(library) in line for line in errors.read(1 << 20).splitlines()
    )


def _prepare(
    cases: Sequence[Case], sides: Sequence[Allocator], rounds: int, folder: Path, results: Results
) -> list[_Work]:
    """Writes the inputs; what cannot be run is left out, with the reason."""
    work: list[_Work] = []
    for case in cases:
        reason = obstacle(case)
        if reason is None:
            own = folder / case.name
            try:
                own.mkdir(parents=True, exist_ok=True)
                prepared = case.prepare(own)
                program.find(prepared.command[0])
                reason = program.preload_obstacle(prepared.command)
            except CalmError as error:
                reason = str(error)
            except (OSError, subprocess.SubprocessError) as error:
                reason = f"its inputs could not be made: {error}"
        if reason is not None:
            results.left_out[case.name] = reason
            continue
        under = [each for each in sides if case.runs_under is None or case.runs_under(each.label)]
        if not under:
            continue
        row = Row(
            name=case.name,
            family=case.family,
            metric=case.metric,
            command=list(prepared.command),
            client=list(prepared.client),
            environment=dict(prepared.environment),
            sides=[Side(allocator.label) for allocator in under],
        )
        work.append(_Work(case, prepared, row, orders(under, rounds + 1, results.seed, case.name)))
        results.rows.append(row)
    return work


def _run_row(
    work: _Work,
    number: int,
    results: Results,
    broadcast: machine.Broadcast | None,
    limit_s: float | None,
    watcher: Watcher,
    hardware: bool,
    shootdowns: bool,
) -> bool:
    """One case in one round, under every allocator; False when the user stopped it in its middle."""
    finished: list[tuple[Side, Run]] = []
    for allocator in work.orders[number]:
        side = work.row.side(allocator.label)
        if side is None or side.failure:
            continue
        watcher.turn(number, work.case.name, allocator.label)
        begin = time.monotonic()
        try:
            run, figures, failure = run_once(
                work.case, work.prepared, allocator, broadcast, limit_s, hardware, results.said, shootdowns
            )
        except CalmError as error:
            run, figures, failure = None, {}, str(error)
        processes.end_orphans()
        if run is not None and run.interrupted_by is not None:
            results.interrupted_by = run.interrupted_by
            return False
        if failure:
            side.failure, side.failed_round = failure, number
            watcher.failed(work.case.name, allocator.label, failure)
        else:
            finished.append((side, Run(number, figures)))
        if run is not None:
            for name in _figures(hardware, shootdowns):
                how = measure.how(measure.METRIC[name], run, broadcast)
                # One that was counted says more than why one was not.
                if name not in results.how or results.how[name].startswith("not "):
                    results.how[name] = how
        watcher.done(work.case.name, allocator.label, time.monotonic() - begin)
    if number > 0:
        for side, one in finished:
            side.runs.append(one)
    watcher.row_done()
    return True


def run_suite(
    cases: Sequence[Case],
    sides: Sequence[Allocator],
    *,
    suite: str,
    rounds: int,
    folder: Path,
    limit_s: float,
    watcher: Watcher,
    save: Callable[[Results], None],
    touch: bool = True,
    hardware: bool = False,
    shootdowns: bool = True,
    shuffled: bool = False,
) -> Results:
    """Runs everything; whatever the user stops is left out of what comes back, and nothing else.

    Each round runs each case once under every allocator, the first one for nothing: it warms up files, memory
    and CPUs. save is called after each round, so that a machine that goes down takes one round with it.
    hardware: cycles are counted too, where the machine can. shootdowns: these are counted, which makes each
    run a tenth of a second longer. shuffled: cases take their turns in another order in each round, for those
    that are compared with each other.
    """
    measure.find_probe()
    broadcast = machine.broadcast_here()
    results = Results(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        calm=__version__,
        machine=machine.describe(),
        suite=suite,
        rounds=rounds,
        seed=SEED,
        timeout_s=limit_s,
        touched_kib=0,
        how={},
        notes=[broadcast.note] if broadcast else [],
        allocators=[describe(each) for each in sides],
        rows=[],
        left_out={},
    )
    processes.adopt_orphans()
    try:
        work = _prepare(cases, sides, rounds, folder, results)
        if work and touch:
            watcher.touching()
            results.touched_kib = touch_memory(machine.memory_kib("MemAvailable"))
        turns = [(each.case.name, side.label) for each in work for side in each.row.sides]
        watcher.begin(turns, rounds + 1)
        draw = random.Random(f"{results.seed} cases")
        for number in range(rounds + 1):
            for each in draw.sample(work, len(work)) if shuffled else work:
                if not _run_row(each, number, results, broadcast, limit_s, watcher, hardware, shootdowns):
                    break
            if results.interrupted_by is not None:
                break
            if number > 0:
                save(results)
    except KeyboardInterrupt:
        results.interrupted_by = signal.SIGINT
        processes.end_orphans()
    _note_untouched(results)
    return results


def _note_untouched(results: Results) -> None:
    peaks = [
        run.figures.get("peak_rss_kib") or 0 for row in results.rows for s in row.sides for run in s.runs
    ]
    if results.touched_kib == 0:
        results.notes.append("memory was not touched before the first run: first touches may have been slow")
    elif peaks and max(peaks) > results.touched_kib:
        results.notes.append(
            f"{report.memory(results.touched_kib)} were touched before the first run, and the largest peak "
            f"was {report.memory(max(peaks))}: first touches of the rest may have been slow"
        )


def command_line(row: Row) -> str:
    """As one would type it."""
    client = f"  with  {shlex.join(row.client)}" if row.client else ""
    return shlex.join(row.command) + client
