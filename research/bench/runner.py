"""Runs the suite: round by round, each case once under every allocator."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from calm.core import allocators, machine, measure, messages, proc, processes, program, report, rounds
from calm.core.allocators import Allocator
from calm.core.environment import clean_environment
from calm.core.errors import CalmError
from calm.core.progress import RoundsBar
from calm.core.statistics import SEED
from research.bench import workloads
from research.bench.cases import Case, Prepared
from research.bench.results import COST, METRIC, RESIDENT, Kind, Results, Row, Run, Side, Subject, cost_s

Figures = dict[str, float | None]

# No case is meant to reach as much; a note says so where one did.
_EXPECTED_PEAK_KIB = 4 * 1024 * 1024
_HUGE_PAGE = 2 * 1024 * 1024
_NOT_PRELOADED = b"cannot be preloaded"

_MEASURED = (
    *("wall_s", "user_s", "system_s", "peak_rss_kib", "average_rss_kib", "minor_faults"),
    *("shootdowns", "interrupts", "interrupts_system_wide", "threads_started"),
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


def _has_module(python: str, module: str) -> bool:
    """Whether a Python would find a module; it is not imported, which would take long."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    # -I: a module of the user's own, or of the current folder, is another one.
    return subprocess.run([python, "-I", "-c", code], capture_output=True, check=False).returncode == 0


def obstacle(case: Case) -> str | None:
    """Why a case cannot be run here at all: a workload was not built, or a program is missing."""
    if case.obstacle:
        return case.obstacle
    if case in workloads.CASES:
        try:
            # It has no inputs, so nothing is written.
            case.prepare(Path())
        except CalmError as error:
            return str(error)
    if case.program is None:
        return None
    if (found := shutil.which(case.program)) is None:
        hint = f": install the package {case.package}" if case.package else ""
        return f"{case.program} is not on this machine{hint}"
    for name, package in case.further_programs.items():
        if shutil.which(name) is None:
            return f"{name} is not on this machine: install the package {package}"
    if case.python_module and not _has_module(case.program, case.python_module):
        return f"{case.program} has no module {case.python_module}: install the package {case.package}"
    # Debian 13's redis-server does: what it gets from jemalloc it would give to the preloaded free().
    if b"\0mallocx\0" in Path(found).read_bytes():
        return f"{case.program} calls functions of jemalloc's own, which a preload does not replace"
    return None


def describe(allocator: Allocator) -> Subject:
    found = Subject(allocator.label, environment=dict(allocator.environment))
    if allocator.library:
        found.library = str(allocator.library)
    name = allocator.label.partition(":")[0]
    if name in allocators.KNOWN:
        origin = allocators.origin(name)
        found.version, found.package = origin.version, origin.package
        found.package_version, found.date = origin.package_version, origin.date
    return found


def _printed(case: Case, file: IO[bytes]) -> dict[str, Any]:
    """What a program or a client printed at last: the figure of the case's pattern, or a line of JSON."""
    file.seek(0)
    text = file.read()
    if case.metric and case.pattern:
        found = re.findall(case.pattern, text.decode(errors="replace"))
        return {case.metric.key: float(found[-1])} if found else {}
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def _number(printed: Mapping[str, Any], key: str) -> float | None:
    value = printed.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _names(groups: Sequence[str]) -> list[str]:
    """The figures of a run: without shootdowns where these are not counted, with cycles where they are."""
    uncounted = () if measure.TLB_GROUP in groups else ("shootdowns", "interrupts")
    cycles = ("cycles",) if measure.HARDWARE_GROUP in groups else ()
    return [name for name in (*_MEASURED, *cycles) if name not in uncounted]


def run_once(
    case: Case,
    prepared: Prepared,
    allocator: Allocator,
    limit_s: float,
    groups: Sequence[str] = (measure.TLB_GROUP,),
    heard: dict[str, list[str]] | None = None,
) -> tuple[measure.Measurement, Figures, str | None]:
    """One run: the measurement, its figures, and its failure, if it failed.

    heard gets calmalloc's own messages.
    """
    environment = clean_environment() | dict(prepared.environment)
    with ExitStack() as stack:
        output, errors, client_output, client_errors = (
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(4)
        )

        def start_client() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                prepared.client,
                env=environment,
                cwd=prepared.folder,
                stdin=subprocess.DEVNULL,
                stdout=client_output,
                stderr=client_errors,
            )

        run = measure.measure(
            prepared.command,
            allocator.variables(environment),
            groups=groups,
            stdin=subprocess.DEVNULL,
            stdout=output if case.metric not in (None, COST) and not prepared.client else subprocess.DEVNULL,
            stderr=errors,
            inherited=environment,
            folder=prepared.folder,
            limit_s=limit_s,
            start_client=start_client if prepared.client else None,
        )
        if heard is not None:
            messages.listen(heard, allocator.label, errors)
        figures = {name: measure.METRIC[name].get(run) for name in _names(groups)}
        failure = run.failure
        if failure:
            words = report.last_words(client_errors) if run.client_code else ""
            failure += words or report.last_words(errors)
        elif allocator.library and _refused(errors, allocator.library):
            failure = f"the dynamic linker did not preload it{report.last_words(errors)}"
        elif case.metric == COST:
            figures[METRIC] = cost_s(figures)
        elif case.metric:
            printed = _printed(case, client_output if prepared.client else output)
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


def prepare(case: Case, folder: Path) -> Prepared:
    """Writes the inputs. Raises CalmError with the reason if the case cannot be run."""
    if reason := obstacle(case):
        raise CalmError(reason)
    try:
        (folder / case.name).mkdir(parents=True, exist_ok=True)
        prepared = case.prepare(folder / case.name)
    except (OSError, subprocess.SubprocessError) as error:
        raise CalmError(f"its inputs could not be made: {error}") from error
    program.find(prepared.command[0])
    if reason := program.preload_obstacle(prepared.command):
        raise CalmError(reason)
    return prepared


def _prepare_all(
    cases: Sequence[Case], sides: Sequence[Allocator], folder: Path, results: Results
) -> dict[str, tuple[Case, Prepared]]:
    """Adds a row for each case; those that cannot be run are left out, with the reason."""
    work = {}
    for case in cases:
        try:
            prepared = prepare(case, folder)
        except CalmError as error:
            results.left_out[case.name] = str(error)
            continue
        under = [each.label for each in sides if case.runs_under is None or case.runs_under(each.label)]
        if under:
            work[case.name] = case, prepared
            results.rows.append(
                Row(
                    name=case.name,
                    family=case.family,
                    metric=case.metric,
                    command=list(prepared.command),
                    client=list(prepared.client),
                    environment=dict(prepared.environment),
                    sides=[Side(label, n=0) for label in under],
                )
            )
    return work


def run_suite(
    cases: Sequence[Case],
    sides: Sequence[Allocator],
    document: Callable[..., Kind],
    *,
    suite: str,
    count: int,
    folder: Path,
    limit_s: float,
    watcher: RoundsBar,
    save: Callable[[Kind], None],
    touch: bool = True,
    groups: Sequence[str] = (measure.TLB_GROUP,),
    shuffled: bool = False,
) -> Kind:
    """Runs every case in interleaved rounds; a round that a signal stops is left out.

    document makes the results, as `Results` does. save is called after each round, so that a machine that
    goes down takes one round with it. groups are the probe's counters: those of TLB shootdowns make each run
    a tenth of a second longer. shuffled: cases take their turns in another order in each round, for those
    that are compared with each other.
    """
    measure.find_probe()
    broadcast = machine.broadcast_here()
    results = document(
        machine=machine.describe(),
        suite=suite,
        rounds=count,
        seed=SEED,
        timeout_s=limit_s,
        notes=[broadcast.note] if broadcast else [],
        allocators=[describe(each) for each in sides],
        rows=[],
    )
    by_label = {each.label: each for each in sides}

    def once(row: rounds.Row[Figures], side: rounds.Side[Figures], _number: int) -> Figures:
        case, prepared = work[row.name]
        try:
            run, figures, failure = run_once(
                case, prepared, by_label[side.label], limit_s, groups, results.messages
            )
        except CalmError as error:
            raise rounds.RunFailedError(str(error)) from error
        finally:
            processes.end_orphans()
        if run.interrupted_by is not None:
            raise rounds.StoppedError(run.interrupted_by)
        for name in _names(groups):
            how = measure.how(measure.METRIC[name], run)
            # One that was counted says more than why one was not.
            if name not in results.how or results.how[name].startswith("not "):
                results.how[name] = how
        if failure:
            raise rounds.RunFailedError(failure)
        return figures

    def keep(number: int | None = None) -> None:
        for row, taken in zip(results.rows, turns, strict=True):
            for side, one in zip(row.sides, taken.sides, strict=True):
                side.runs = [Run(*each) for each in one.runs]
                side.failure, side.failed_round = one.failure, one.failed_round
        if number is not None:
            save(results)

    processes.adopt_orphans()
    try:
        work = _prepare_all(cases, sides, folder, results)
        if work and touch:
            watcher.touching()
            results.touched_kib = touch_memory(proc.memory_kib("MemAvailable"))
    except KeyboardInterrupt:
        results.interrupted_by = signal.SIGINT
        return results
    turns = [
        rounds.Row(row.name, [rounds.Side[Figures](each.label) for each in row.sides]) for row in results.rows
    ]
    draw = random.Random(f"{SEED} cases")
    results.interrupted_by = rounds.run(
        turns,
        count,
        once,
        watcher,
        after=keep,
        rows_of=(lambda _: draw.sample(turns, len(turns))) if shuffled else None,
    )
    keep()
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
