"""How users' pages name what was measured: without the names of test options, which docs/testing.md has."""

from __future__ import annotations

_PLAIN = {
    ":CALM_OPTIONS=": ", ",
    ":PTLBMALLOC2_PLACEMENT=1": ", placement",
    "test_policy=paper": "paper's policy",
    "test_sync=on,test_cache=off": "paper's scheme",
    "test_placement=off": "no placement",
    "test_placement=lines": "placement by lines",
    "test_placement=random": "random placement",
}


def plain(label: str) -> str:
    """An allocator's label, or a row's name."""
    for name, words in _PLAIN.items():
        label = label.replace(name, words)
    return label
