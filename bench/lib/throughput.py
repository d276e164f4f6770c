"""Workloads that run for a fixed time, or measure their own, compared by the figure that they print."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from . import ratios
from .results import BUILD, Store
from .rounds import CALMALLOC, PEERS, interleaved, present, run_once


@dataclass(frozen=True)
class Workload:
    """A workload and the figure that it prints."""

    name: str
    metric: str
    arguments: tuple[str, ...] = ()
    rounds: int = 7


WORKLOADS = (
    Workload("larson", "operations_per_second"),
    Workload("xmalloc-test", "frees_per_second"),
    Workload("glibc-simple", "ns_per_pair"),
)


def measure(workload: Workload, store: Store, runs: int | None) -> None:
    """Measures one workload and saves it."""
    command = [str(BUILD / workload.name), *workload.arguments]
    labels = present([*PEERS, CALMALLOC])
    print(f"\n{' '.join(command)}: {workload.metric}", flush=True)
    run = partial(run_once, command)
    sides = interleaved(labels, run, runs or workload.rounds, case=workload.name)
    ratios.compare(sides, [workload.metric])
    for side in sides:
        if side["n"]:
            print(f"  {side['label']:<12} {side['median'][workload.metric]:>16,.1f}", flush=True)
    store.save(workload.name, {"command": command, "metric": workload.metric, "allocators": sides})
