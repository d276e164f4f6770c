"""Random operations against a model, under every setting that changes which code serves them.

And the same with the allocator's sources built by a sanitizer.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from api_helpers import (
    C_FLAGS,
    GLIBC,
    INCLUDE,
    LINKED,
    MIB,
    OFFLOAD,
    PRELOAD,
    REPOSITORY,
    SOURCES,
    STATIC,
    Programs,
    clean_environment,
    compile_program,
    run_command,
    tool,
)

# A failure names its seed; CALM_SEED runs it again.
SEED = int(os.environ.get("CALM_SEED", "0")) or random.randrange(1, 1 << 30)
SECONDS = 1.0

SETTINGS = [
    f"policy={policy},background={background},cache={cache}"
    for policy in ("paper", "adaptive")
    for background in ("on", "off")
    for cache in ("auto", "locked", "off")
]
SETTINGS += [f"{OFFLOAD},{more}" for more in ("policy=paper", "cache=locked", "cache=off,background=off")]


def seed(offset: int) -> str:
    return f"seed={SEED + offset}"


@pytest.mark.parametrize("settings", SETTINGS)
def test_stress(programs: Programs, settings: str) -> None:
    offset = SETTINGS.index(settings)
    ran = programs.run(PRELOAD, "stress", seed(offset), f"seconds={SECONDS}", options=settings)
    assert ran["operations"] > 10000
    assert ran["dirtied"] > 10 * MIB
    assert ran["purged"] > 0


@pytest.mark.parametrize(
    "settings",
    ["vectored_purge=off", "slack=10", "slack=1000", "purge_time=0", "huge_pages=never", "offload=sync"],
)
def test_stress_with_other_settings(programs: Programs, settings: str) -> None:
    programs.run(PRELOAD, "stress", seed(20), f"seconds={SECONDS}", options=settings)


@pytest.mark.parametrize("mode", ["cache=auto", OFFLOAD])
@pytest.mark.parametrize("threads", [1, 16, 64])
def test_stress_with_threads(programs: Programs, threads: int, mode: str) -> None:
    ran = programs.run(PRELOAD, "stress", seed(30), f"seconds={SECONDS}", f"threads={threads}", options=mode)
    # A round of many threads that wait for one server may take the second.
    assert mode == OFFLOAD or ran["rounds"] > 2
    assert ran["operations"] > 1000


@pytest.mark.parametrize("way", [LINKED, STATIC])
def test_stress_linked(programs: Programs, way: str) -> None:
    programs.run(way, "stress", seed(40), f"seconds={SECONDS}")


def test_stress_of_small_and_of_large(programs: Programs) -> None:
    programs.run(PRELOAD, "stress", seed(50), f"seconds={SECONDS}", "live_mib=2", "largest_mib=1")
    ran = programs.run(PRELOAD, "stress", seed(51), "rounds=4", "live_mib=3000", "largest_mib=900")
    assert ran["live_most"] > 500 * MIB


def test_the_model_holds_for_glibc(programs: Programs) -> None:
    """So that what fails above is the library's doing."""
    assert programs.run(GLIBC, "stress", seed(60), "seconds=1")["operations"] > 10000


@pytest.mark.parametrize("fault", range(1, 8))
def test_the_model_finds_what_is_wrong(tmp_path: Path, fault: int) -> None:
    """With a malloc that errs now and then: blocks that are owned twice, lose contents, are not aligned."""
    binary = tmp_path / "stress"
    sources = [SOURCES / name for name in ("stress.c", "support.c", "broken.c")]
    flags = [*C_FLAGS, INCLUDE, "-DUSE_CALM_NAMES", f"-DFAULT={fault}"]
    compile_program([tool("cc", "gcc"), *flags, *sources, "-o", binary])
    ran = run_command([binary, "seconds=5", "live_mib=50"], clean_environment(), status=None)
    assert ran.status not in (0, 2), f"nothing was found; {ran.stdout}"
    assert "stress" in ran.stderr


# ---- sanitizers ----


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The allocator and the test in one program, by sanitizer. malloc's own names are the sanitizer's."""
    made = {}
    for name, flags in (
        ("thread", ["-fsanitize=thread"]),
        ("address,undefined", ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]),
    ):
        folder = tmp_path_factory.mktemp("sanitized")
        compiler = [tool("cc", "gcc"), "-std=gnu17", "-D_GNU_SOURCE", "-O1", "-g", "-pthread", "-c", INCLUDE]
        compiler += [f"-I{REPOSITORY / 'src'}", "-Wno-attributes", "-fno-omit-frame-pointer", *flags]
        objects = []
        for source in sorted((REPOSITORY / "src").glob("*/*.c")):
            objects.append(folder / f"{source.parent.name}-{source.stem}.o")
            compile_program([*compiler, "-DCALM_WITHOUT_MALLOC", source, "-o", objects[-1]])
        for source in (SOURCES / "stress.c", SOURCES / "support.c"):
            objects.append(folder / f"{source.stem}.o")
            compile_program([*compiler, "-DUSE_CALM_NAMES", "-fno-builtin", source, "-o", objects[-1]])
        made[name] = folder / "stress"
        compile_program([tool("cc", "gcc"), *flags, "-pthread", *objects, "-o", made[name], "-ldl"])
    return made


# ThreadSanitizer sees neither restartable sequences, nor a helper that it did not start itself.
SANITIZED = [
    ("thread", "cache=locked,background=off"),
    ("thread", "cache=off,background=off,policy=paper"),
    ("thread", "cache=locked,background=off,vectored_purge=off,slack=20"),
    ("thread", f"{OFFLOAD},cache=locked"),
    ("address,undefined", "cache=auto"),
    ("address,undefined", "cache=locked,policy=paper"),
    ("address,undefined", "cache=off,background=off,slack=20"),
    ("address,undefined", OFFLOAD),
]


@pytest.mark.parametrize(("sanitizer", "settings"), SANITIZED)
def test_stress_sanitized(sanitized: dict[str, Path], sanitizer: str, settings: str) -> None:
    env = clean_environment() | {"CALM_OPTIONS": settings, "TSAN_OPTIONS": "halt_on_error=1"}
    ran = run_command([sanitized[sanitizer], seed(70), "seconds=2.5", "live_mib=60"], env)
    assert ran["operations"] > 1000


@pytest.mark.long
@pytest.mark.timeout(900)
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
