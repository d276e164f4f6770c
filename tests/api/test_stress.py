"""Random operations checked against a model, under every setting that selects different code.

The same with the allocator's sources built with a sanitizer.
"""

from __future__ import annotations

import os

import pytest
from api_helpers import (
    BUILD,
    GLIBC,
    LINKED,
    MIB,
    OFFLOAD,
    PRELOAD,
    STATIC,
    Programs,
    clean_environment,
    program,
    run_command,
)

# A failure names its seed; CALM_TEST_SEED runs it again.
SEED = int(os.environ["CALM_TEST_SEED"])
# The threads end and begin again in the eighth.
ROUNDS = "rounds=9"

SETTINGS = [
    f"test_policy={policy},background={background},test_cache={cache}"
    for policy in ("paper", "adaptive")
    for background in ("on", "off")
    for cache in ("auto", "locked", "off")
]
SETTINGS += [
    f"{OFFLOAD},{more}"
    for more in ("test_policy=paper", "test_cache=locked", "test_cache=off,background=off")
]


def seed(offset: int) -> str:
    return f"seed={SEED + offset}"


@pytest.mark.parametrize("settings", SETTINGS)
def test_stress(programs: Programs, settings: str) -> None:
    offset = SETTINGS.index(settings)
    ran = programs.run(PRELOAD, "stress", seed(offset), ROUNDS, options=settings)
    assert ran["operations"] > 10000
    assert ran["dirtied"] > 10 * MIB
    assert ran["purged"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        "vectored_purge=off",
        "memory_per_cpu=0",
        "memory_per_cpu=160",
        "huge_pages=never",
        f"{OFFLOAD},test_cache=off,test_sync=on",
    ],
)
def test_stress_with_other_settings(programs: Programs, settings: str) -> None:
    programs.run(PRELOAD, "stress", seed(20), ROUNDS, options=settings)


@pytest.mark.parametrize("mode", ["test_cache=auto", OFFLOAD])
@pytest.mark.parametrize("threads", [1, 16, 64])
def test_stress_with_threads(programs: Programs, threads: int, mode: str) -> None:
    ran = programs.run(PRELOAD, "stress", seed(30), ROUNDS, f"threads={threads}", options=mode)
    assert ran["operations"] > 1000


@pytest.mark.parametrize("threads", [2, 16, 64])
@pytest.mark.parametrize("heaps", [1, 2, 16, 32])
@pytest.mark.parametrize("more", ["background=on", "background=off,test_cache=off,test_policy=paper"])
def test_stress_with_heaps(programs: Programs, threads: int, heaps: int, more: str) -> None:
    """However many heaps there are, the limit holds for all of them together."""
    options = f"test_heaps={heaps},{more}"
    ran = programs.run(PRELOAD, "stress", seed(50 + heaps), "rounds=4", f"threads={threads}", options=options)
    assert ran["operations"] > 1000


@pytest.mark.parametrize("way", [LINKED, STATIC])
def test_stress_linked(programs: Programs, way: str) -> None:
    programs.run(way, "stress", seed(40), ROUNDS)


def test_stress_of_small_and_of_large(programs: Programs) -> None:
    programs.run(PRELOAD, "stress", seed(50), ROUNDS, "live_mib=2", "largest_mib=1")
    ran = programs.run(PRELOAD, "stress", seed(51), "rounds=4", "live_mib=3000", "largest_mib=900")
    assert ran["max_live"] > 500 * MIB


def test_the_model_holds_for_glibc(programs: Programs) -> None:
    """So failures above are due to the library."""
    assert programs.run(GLIBC, "stress", seed(60), ROUNDS)["operations"] > 10000


@pytest.mark.parametrize("fault", range(1, 8))
def test_the_model_finds_what_is_wrong(fault: int) -> None:
    """With a malloc that fails now and then: blocks that overlap, lose contents, or are misaligned."""
    command = [program(f"stress-fault-{fault}"), "rounds=100", "live_mib=50"]
    ran = run_command(command, clean_environment(), status=None)
    assert ran.status not in (0, 2), f"nothing was found; {ran.stdout}"
    assert "stress" in ran.stderr


# ---- sanitizers ----


# ThreadSanitizer sees neither restartable sequences, nor a helper that it did not start itself.
SANITIZED = [
    ("tsan", "test_cache=locked,background=off"),
    ("tsan", "test_cache=locked,test_heaps=16"),
    ("tsan", "test_cache=off,background=off,test_policy=paper"),
    ("tsan", "test_cache=locked,background=off,vectored_purge=off,memory_per_cpu=1"),
    ("asan", "test_cache=auto"),
    ("asan", "test_cache=locked,test_policy=paper"),
    ("asan", "test_cache=off,background=off,memory_per_cpu=1"),
]


@pytest.mark.parametrize(("sanitizer", "settings"), SANITIZED)
def test_stress_sanitized(sanitizer: str, settings: str) -> None:
    env = clean_environment() | {"CALM_OPTIONS": settings, "TSAN_OPTIONS": "halt_on_error=1"}
    stress = program("stress-beside", BUILD.with_name(sanitizer))
    ran = run_command([stress, seed(70), ROUNDS, "live_mib=60"], env)
    assert ran["operations"] > 1000


@pytest.mark.parametrize(("sanitizer", "cache"), [("tsan", "locked"), ("asan", "auto"), ("asan", "off")])
def test_stress_offloaded_sanitized(sanitizer: str, cache: str) -> None:
    env = clean_environment() | {"CALM_OPTIONS": f"test_cache={cache}", "TSAN_OPTIONS": "halt_on_error=1"}
    stress = program("stress-offloaded", BUILD.with_name(sanitizer))
    ran = run_command([stress, seed(80), ROUNDS, "live_mib=60"], env)
    assert ran["operations"] > 1000


@pytest.mark.long
@pytest.mark.timeout(8000)
@pytest.mark.parametrize("settings", SETTINGS)
def test_stress_for_a_minute(programs: Programs, settings: str) -> None:
    for offset in range(6):
        programs.run(
            PRELOAD,
            "stress",
            seed(1000 + offset),
            "seconds=10",
            f"threads={2 + 3 * offset}",
            options=settings,
        )
