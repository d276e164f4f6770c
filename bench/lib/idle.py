"""Memory that a process keeps after its threads freed it and became idle (`idle-burst`)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from calm.core.allocators import Allocator
from research.papers.huge_pages import MODE, always

from .results import BUILD, Store, summarize
from .rounds import CALMALLOC, PEERS, interleaved, present, run_once

NAME, WITH_HUGE_PAGES = "idle-burst", "idle-burst-huge-pages"
WITHOUT_BACKGROUND = f"{CALMALLOC}:CALM_OPTIONS=background=off"
THREADS = (2, 64)
MAIN = ("busy", "idle")
METRICS = ("retained_kib", "cgroup_retained_kib")
ROUNDS = 3
IDLE_S = 10
"""Longer than free memory is kept of which nothing is known, whatever memory costs on a machine."""


def _own_cgroup() -> str | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::")
    return None


def cgroup_parent(
    mounts: Path = Path("/proc/self/mounts"), own: str | None = None
) -> tuple[Path | None, str]:
    """A cgroup (v2) whose children's memory is counted; or None and the reason.

    It enables no controller, because that would change other processes' cgroups.
    """
    fields = (line.split() for line in mounts.read_text().splitlines())
    mount = next((Path(field[1]) for field in fields if field[2] == "cgroup2"), None)
    if mount is None:
        return None, "cgroup v2 is not mounted"
    own = (own or _own_cgroup() or "/").strip("/")
    for parent in dict.fromkeys([(mount / own).parent if own else mount, mount]):
        try:
            counted = "memory" in (parent / "cgroup.subtree_control").read_text().split()
        except OSError:
            continue
        if counted and os.access(parent, os.W_OK):
            return parent, ""
    return None, "no cgroup of v2 here counts its children's memory and lets one be made"


@contextmanager
def fresh_cgroup(parent: Path) -> Iterator[Path]:
    """A fresh cgroup for one run, without memory charged by earlier runs."""
    folder = parent / f"calmalloc-bench-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        for _ in range(50):  # the last process may still be exiting
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def run_burst(command: list[str], parent: Path | None, allocator: Allocator) -> dict[str, Any]:
    """One run, in a fresh cgroup if possible. Adds the growth of the cgroup's memory."""
    with ExitStack() as stack:
        folder = stack.enter_context(fresh_cgroup(parent)) if parent else None
        if folder:
            command = [*command, "--cgroup", str(folder)]
        run = run_once(command, allocator, folder)
    before, after = run["cgroup_before_kib"], run["cgroup_after_kib"]
    run["cgroup_retained_kib"] = after - before if folder and None not in (before, after) else None
    return run


def measure(store: Store, runs: int | None, huge_pages: bool, arguments: tuple[str, ...] = ()) -> None:
    """All numbers of threads, with a busy main thread and an idle one."""
    if huge_pages and not os.access(MODE, os.W_OK):
        print(f"\nidle-burst with huge pages: skipped: {MODE} cannot be written", flush=True)
        return
    labels = present([*PEERS, CALMALLOC, WITHOUT_BACKGROUND])
    parent, reason = cgroup_parent()
    if parent is None:
        print(f"\nidle-burst: only resident memory is compared: {reason}", flush=True)
    configurations: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if huge_pages:
            stack.enter_context(always())
        for threads, main in product(THREADS, MAIN):
            command = [str(BUILD / "idle-burst"), "--threads", str(threads), "--main", main]
            command += [*("--seconds", str(IDLE_S)), *arguments]
            print(f"\n{' '.join(command)}{', huge pages always' if huge_pages else ''}: kept", flush=True)
            run = partial(run_burst, command, parent)
            sides = interleaved(labels, run, runs or ROUNDS, warm_up=0, case=" ".join(command[1:]))
            summarize(sides, METRICS)
            for side in sides:
                kept = ", ".join(f"{run['retained_kib'] / 1024:,.1f}" for run in side["runs"])
                print(f"  {side['label']:<40} {kept} MiB", flush=True)
                if configurations:
                    # The first configuration has the versions.
                    side.pop("origin")
            configurations.append({"threads": threads, "main": main, "command": command, "allocators": sides})
        store.save(
            WITH_HUGE_PAGES if huge_pages else NAME,
            {"cgroup": reason or "a fresh one for each run", "configurations": configurations},
        )
