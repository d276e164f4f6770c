"""A program's cache and TLB misses by a model: it runs under QEMU with a plugin, research/papers/trace.

Each thread has a CPU of its own in the model, with private caches and a TLB, and the last level cache is
shared. Unlike the counters of most processors, the model also tells what a private cache missed because
another CPU had written, and whose miss it was: the program's or the allocator's own thread's.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from calm.core import messages, paths, report
from calm.core.allocators import CALM_OPTIONS, Allocator
from calm.core.environment import clean_environment
from calm.core.errors import CalmError
from research.papers import sessions

PACKAGE = "qemu-user"
PLUGIN, MARKS, REPLAY = "libcalm-trace.so", "libcalm-trace-marks.so", "calm-trace-replay"
SEQUENCES = "libcalm-trace-sequences.so"
# A thread of calmalloc's: its helper, or calmoffload's server.
OWN_THREAD = "calmalloc"
OFFLOADED = "calmoffload"
OWN = "own_"
LAYOUTS = ("aggregated inline", "segregated inline", "aggregated offloaded", "segregated offloaded")
# Figures, by the model's names for loads and stores.
_KINDS: Mapping[str, str] = {
    "accesses": "{}",
    "l1_misses": "l1_{}_misses",
    "l2_misses": "l2_{}_misses",
    "llc_misses": "llc_{}_misses",
    "coherence": "coherence_{}_misses",
    "transfers": "transfer_{}_misses",
    "tlb_misses": "dtlb_{}_misses",
    "walks": "dtlb_{}_walks",
}


@dataclass(frozen=True)
class Told:
    """The machine that a program is told of: at most 64 CPUs, one for each thread, and restartable sequences.

    Nodes: thread n is on the CPU of node n modulo their number; 0 for a machine without.
    """

    cpus: int
    nodes: int = 0

    def write_files(self, root: Path) -> None:
        """What a program reads about them, for QEMU to find it below this folder."""
        counts = {"cpu": self.cpus, "node": max(1, self.nodes)}
        for kind, count in counts.items():
            folder = root / f"sys/devices/system/{kind}"
            folder.mkdir(parents=True)
            for name in ("online", "possible", "present"):
                (folder / name).write_text(f"0-{count - 1}\n" if count > 1 else "0\n")
            for number in range(count):
                (folder / f"{kind}{number}").mkdir()


def _find(name: str) -> Path:
    for directory in paths.built_directories():
        if (path := directory / name).is_file():
            return path.absolute()
    raise CalmError(f"{name} is missing: `make` builds it")


def _qemu() -> str:
    name = f"qemu-{platform.machine()}"
    found = shutil.which(name)
    if found is None:
        raise CalmError(f"{name} is not on this machine: install the package {PACKAGE}")
    return found


@functools.cache
def obstacle() -> str | None:
    try:
        _find(MARKS)
        _find(REPLAY)
        with tempfile.TemporaryDirectory() as place:
            _run(
                [*_traced(Path(place) / "out"), _program("true")],
                clean_environment(),
                Path(),
                30,
            )
    except CalmError as error:
        return str(error)
    return None


def _program(name: str) -> str:
    """QEMU looks for no program on PATH."""
    found = shutil.which(name)
    if found is None:
        raise CalmError(f"no such program: {name!r}")
    return str(Path(found).absolute())


def _traced(out: Path, **options: int) -> list[str]:
    texts = [f"{_find(PLUGIN)},out={out}", *(f"{name}={value}" for name, value in options.items())]
    return [_qemu(), "-plugin", ",".join(texts)]


def _variables(variables: Mapping[str, str]) -> list[str]:
    """What must be set for the program, not for QEMU: which would be preloaded itself."""
    preload = variables.get("LD_PRELOAD")
    return ["-E", f"LD_PRELOAD={preload}"] if preload else []


def _inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of QEMU, which hands it on: its -E would split values at commas."""
    others = {name: value for name, value in variables.items() if name != "LD_PRELOAD"}
    return clean_environment() | others


def _judge(code: int, errors: IO[bytes], what: str = "") -> None:
    if code != 0:
        raise CalmError(f"{what}exit code {code}{report.last_words(errors)}")
    errors.seek(0)
    if b"cannot be preloaded" in errors.read(1 << 20):
        raise CalmError(f"{what}the dynamic linker did not preload it")


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    limit_s: float,
    label: str = "",
    heard: dict[str, list[str]] | None = None,
) -> None:
    with tempfile.TemporaryFile() as errors:
        try:
            code = sessions.run_whole(
                command, folder=folder, environment=environment, errors=errors, limit_s=limit_s
            )
        except subprocess.TimeoutExpired as error:
            raise CalmError(f"it did not end within {limit_s:g} s") from error
        _judge(code, errors)
        if heard is not None:
            messages.listen(heard, label, errors)


def patient(allocator: Allocator) -> str:
    """Options for calmoffload: where threads take turns, its server is slow, and seems to share its CPU.

    One that is named is kept all the same, if it may be used at all: the last of those that may.
    """
    if allocator.label.partition(":")[0] != OFFLOADED:
        return ""
    return f"test_server_timeout=3600000,server_cpu={max(os.sched_getaffinity(0))}"


def figures(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Sums over the program's threads, and, after `own_`, over the allocator's; without their waiting."""
    sums: dict[str, float | None] = {}

    def add(name: str, value: float) -> None:
        sums[name] = (sums.get(name) or 0) + value

    for thread in found["threads"].values():
        own = OWN if thread["name"] == OWN_THREAD else ""
        add(f"{own}instructions", thread["instructions"] - thread["waiting"])
        add(f"{own}waiting_instructions", thread["waiting"])
        add(f"{own}upgrades", thread["upgrades"])
        for key, pattern in _KINDS.items():
            for kind in ("load", "store"):
                waited = thread["waiting_accesses"][f"{kind}s"] if key == "accesses" else 0
                name = f"{kind}s" if key == "accesses" else pattern.format(kind)
                add(f"{own}{name}", thread[key][f"{kind}s"] - waited)
    sums["turns_lost"] = found["turns_lost"]
    return sums | {f"{name}_bytes": shape["bytes"] for name, shape in found["machine"].items()}


def trace(
    command: Sequence[str],
    folder: Path,
    allocator: Allocator,
    limit_s: float,
    *,
    warm: int = 0,
    limit: int = 0,
    heard: dict[str, list[str]] | None = None,
) -> dict[str, float | None]:
    """One run: warm: instructions before it counts; limit: those that it counts, or 0 for all.

    heard: gets what calmalloc says.
    """
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"
        variables = allocator.variables({})
        if options := ",".join(filter(None, (variables.get(CALM_OPTIONS), patient(allocator)))):
            variables[CALM_OPTIONS] = options
        program, *arguments = command
        qemu = _traced(out, warm=warm, limit=limit)
        traced = [*qemu, *_variables(variables), _program(program), *arguments]
        _run(traced, _inherited(variables), folder, limit_s, allocator.label, heard)
        found = _report(out)
    if not found["warmed"]:
        raise CalmError(f"it ended within the first {warm:,} instructions")
    return figures(found)


def trace_marked(
    command: Sequence[str], folder: Path, allocator: Allocator, limit_s: float, told: Told
) -> dict[str, Any]:
    """The plugin's report of one run: of what the program does between its marks (record.h)."""
    with tempfile.TemporaryDirectory() as place:
        out, root = Path(place) / "out", Path(place) / "root"
        told.write_files(root)
        variables = allocator.variables({})
        # Before the allocator, whose pthread_create it calls.
        preload = filter(None, (str(_find(SEQUENCES)), variables.get("LD_PRELOAD")))
        variables["LD_PRELOAD"] = ":".join(preload)
        program, *arguments = command
        qemu = [*_traced(out, marked=1, cpus=told.cpus, nodes=told.nodes), "-L", str(root)]
        traced = [*qemu, *_variables(variables), _program(program), *arguments]
        _run(traced, _inherited(variables), folder, limit_s, allocator.label)
        found = _report(out)
    if not found["warmed"]:
        raise CalmError("it has no marks")
    return found


def _report(out: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(out.read_text())
    except (OSError, ValueError) as error:
        raise CalmError("the plugin wrote no report") from error
    return found


def layouts(command: Sequence[str], folder: Path, limit_s: float) -> dict[str, float | None]:
    """One recording, replayed as it is made with every layout: nothing is kept."""
    program, *arguments = command
    reads, writes = os.pipe()
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as replay_errors:
        options = f"{_find(PLUGIN)},record=/dev/fd/{writes}"
        variables = _variables({"LD_PRELOAD": str(_find(MARKS))})
        try:
            replay = subprocess.Popen(
                [str(_find(REPLAY))], stdin=reads, stdout=subprocess.PIPE, stderr=replay_errors, text=True
            )
        finally:
            os.close(reads)
        try:
            recording = subprocess.Popen(
                [_qemu(), "-plugin", options, *variables, _program(program), *arguments],
                cwd=folder,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(writes,),
            )
        except BaseException:
            replay.kill()
            replay.communicate()
            raise
        finally:
            os.close(writes)
        try:
            text, _ = replay.communicate(timeout=limit_s)
            code = recording.wait(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise CalmError(f"it did not end within {limit_s:g} s") from error
        finally:
            for process in (recording, replay):
                process.kill()
                process.wait()
        # A recording whose reader has gone fails as well.
        _judge(replay.returncode, replay_errors, f"{REPLAY}: ")
        _judge(code, errors)
    return layout_figures(json.loads(text))


def layout_figures(found: Mapping[str, Any]) -> dict[str, float | None]:
    flat: dict[str, float | None] = {
        name: found[name] for name in ("instructions", "mallocs", "frees", "accesses_in_blocks")
    }
    for layout, counts in found["layouts"].items():
        flat[f"{layout}: message_misses"] = counts["message_misses"]
        for who in ("users", "server"):
            flat |= {f"{layout}: {who} {name}": value for name, value in counts[who].items()}
    return flat
