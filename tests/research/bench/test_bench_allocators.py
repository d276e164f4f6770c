"""The allocators that `calm bench` compares, and the one that it is about."""

import pytest

from calm.core import allocators
from research.bench.analysis import OWN, subject_of
from research.bench.command import default_allocators

OFFLOAD = {"calmoffload"}
JEMALLOC = {"jemalloc-tuned", "jemalloc-process-madvise"}
OTHERS = {"scudo", "hardened_malloc", "ptlbmalloc2", "jemalloc-debian"}


def test_some_are_measured_only_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocators, "is_here", lambda _: True)
    assert not (OFFLOAD | JEMALLOC | OTHERS) & set(default_allocators())
    assert {"glibc", "calmalloc", "jemalloc", "gperftools", "tcmalloc"} <= set(default_allocators())


def test_a_variant_is_about_calmalloc_or_a_peer() -> None:
    assert set(OWN) >= OFFLOAD
    assert not JEMALLOC & set(OWN)
    assert subject_of(["glibc", "mimalloc", "calmoffload", "calmalloc"]) == "calmalloc"
    assert subject_of(["glibc", "mimalloc", "calmoffload"]) == "calmoffload"
    assert subject_of(["glibc", "jemalloc-tuned", "calmoffload"]) == "calmoffload"
