"""The tables' values from allocators' runs: medians, and ratios to glibc and to the best peer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from calm.core.statistics import Ratio, ratio_of_medians

from .results import summarize, values_of
from .rounds import CALMALLOC, GLIBC, PEERS


def ratio(side: dict[str, Any], base: dict[str, Any], metric: str) -> Ratio:
    """The ratio of two allocators' medians, over the rounds that have both."""
    rounds = zip(values_of(side, metric), values_of(base, metric), strict=False)
    pairs = [(above, below) for above, below in rounds if above is not None and below is not None]
    return ratio_of_medians([above for above, _ in pairs], [below for _, below in pairs])


def best_of(medians: Mapping[str, float], metric: str) -> str | None:
    """The peer with the best median."""
    peers = {label: figure for label, figure in medians.items() if label in PEERS}
    choose = max if metric.endswith("_per_second") else min
    return choose(peers, key=lambda label: peers[label], default=None)


def compare(sides: Sequence[dict[str, Any]], metrics: Iterable[str]) -> None:
    """Adds the tables' values to all sides. A ratio is a list: value, low, high, rounds."""
    metrics = tuple(metrics)
    summarize(sides, metrics)
    by_label = {side["label"]: side for side in sides}
    for side in sides:
        base = by_label.get(GLIBC)
        side["ratio"] = {
            metric: list(astuple(ratio(side, base, metric)))
            for metric in side["median"]
            if base and base is not side and metric in base["median"]
        }
    if ours := by_label.get(CALMALLOC):
        ours["to_best_peer"] = {}
        for metric in ours["median"]:
            medians = {side["label"]: side["median"][metric] for side in sides if metric in side["median"]}
            if best := best_of(medians, metric):
                to_best = list(astuple(ratio(ours, by_label[best], metric)))
                ours["to_best_peer"][metric] = {"peer": best, "ratio": to_best}
