"""Heap profiles as read by Go's pprof: the functions and their amounts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from api_helpers import (
    C_FLAGS,
    CXX_FLAGS,
    MODES,
    REPOSITORY,
    SOURCES,
    STATIC,
    Programs,
    archive,
    built,
    clean_environment,
    compile_program,
    complaints,
    run_command,
    shared_library,
    tool,
)
from callgrind import instructions_of_pair

from calm.core.protobuf import fields

pytestmark = pytest.mark.feature("profile")

MB = 1_000_000
TOOLCHAIN = Path("/usr/local/go/bin/go")  # where Go's own archives go
# Go's pprof names nothing in .text.startup, where gcc puts what only main calls.
OPTIMIZED = ["-O2", "-fomit-frame-pointer", "-fno-reorder-functions"]


def go() -> str:
    return str(TOOLCHAIN) if shutil.which("go") is None and TOOLCHAIN.exists() else tool("go", "golang-go")


@dataclass(frozen=True)
class Amount:
    flat: float
    total: float


def top(program: Path, profile: Path, index: str) -> dict[str, Amount]:
    """The output of `go tool pprof -top` by function, in bytes or blocks."""
    command: list[str | Path] = [go(), "tool", "pprof", "-top", f"-sample_index={index}"]
    command += ["-unit=B", "-nodefraction=0"]
    environment = clean_environment() | {"PPROF_TMPDIR": str(profile.parent)}
    done = subprocess.run([*command, program, profile], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"Type: {index}" in done.stdout, done.stdout
    line = re.compile(r"^\s*(-?[\d.]+)B?\s+[\d.]+%\s+[\d.]+%\s+(-?[\d.]+)B?\s+[\d.]+%\s+(.+)$", re.MULTILINE)
    return {
        match[3].removesuffix(" (inline)"): Amount(float(match[1]), float(match[2]))
        for match in line.finditer(done.stdout)
    }


def shown(profile: Path) -> int:
    """Bytes in use of all samples, including those without a stack, which older versions of pprof drop."""
    total = 0
    for field, sample in fields(profile.read_bytes()):
        if field == 2 and isinstance(sample, bytes):
            values = [value for name, value in fields(sample) if name == 2 and isinstance(value, int)]
            total += values[3]
    return total


def stacks(program: Path, profile: Path) -> str:
    done = subprocess.run(
        [go(), "tool", "pprof", "-traces", "-sample_index=alloc_space", program, profile],
        env=clean_environment() | {"PPROF_TMPDIR": str(profile.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("profiled") / "profiled"
    source = SOURCES / "profiled.c"
    compile_program([tool("cc", "gcc"), *C_FLAGS, *OPTIMIZED, source, "-o", program, "-ldl"])
    return program


def environment(folder: Path, options: str) -> dict[str, str]:
    return clean_environment() | {
        "LD_PRELOAD": str(shared_library()),
        "CALM_OPTIONS": f"{options},profile_file={folder / 'own'}",
    }


def only_profile(folder: Path) -> Path:
    found = list(folder.glob("own.*.heap"))
    assert len(found) == 1, found
    return found[0]


def about(amount: float, wanted: float) -> bool:
    """Within six standard deviations of the sampling error, with six hundred samples or more."""
    return abs(amount - wanted) <= 0.25 * wanted


@pytest.mark.parametrize("mode", MODES)
def test_sites(profiled: Path, tmp_path: Path, mode: str) -> None:
    """Functions of optimized code and of threads; freed blocks count as allocated, but not as in use."""
    run_command([profiled, "sites"], environment(tmp_path, f"profile=16k,{mode}"))
    profile = only_profile(tmp_path)
    in_use = top(profiled, profile, "inuse_space")
    assert about(in_use["small_site"].flat, 20 * MB), in_use
    assert about(in_use["large_site"].flat, 20 * MB), in_use
    assert in_use.get("churn_site", Amount(0, 0)).flat == 0, in_use
    assert about(in_use["nest"].total, 40 * MB), in_use
    objects = top(profiled, profile, "inuse_objects")
    assert about(objects["small_site"].flat, 100_000), objects
    assert about(objects["large_site"].flat, 100), objects
    allocated = top(profiled, profile, "alloc_space")
    assert about(allocated["churn_site"].flat, 60 * MB), allocated
    assert about(allocated["churn"].total, 60 * MB), allocated
    assert about(top(profiled, profile, "alloc_objects")["churn_site"].flat, 60_000)
    assert not {"malloc", "allocate_slow"} & set(allocated), "the allocator's own frames are left out"
    # Eleven of nest in a row above small_site: the whole stack is there, not a guess.
    assert re.search(r"small_site\n(\s+nest\n){11}\s+(main|\[profiled\])", stacks(profiled, profile))


def test_many_threads(profiled: Path, tmp_path: Path) -> None:
    """A thread interrupted while it takes a sample does not block the samples of other threads on its CPU."""
    run_command([profiled, "many"], environment(tmp_path, "profile=16k"))
    allocated = top(profiled, only_profile(tmp_path), "alloc_space")
    assert allocated["churn_site"].flat == pytest.approx(3200 * MB, rel=0.02), allocated


def test_blocks_as_large_as_the_mean(profiled: Path, tmp_path: Path) -> None:
    """This would show sampling gaps that are constant instead of random."""
    run_command([profiled, "sites"], environment(tmp_path, "profile=1k"))
    allocated = top(profiled, only_profile(tmp_path), "alloc_space")
    assert allocated["churn_site"].flat == pytest.approx(60 * MB, rel=0.03), allocated


def test_all_of_them(profiled: Path, tmp_path: Path) -> None:
    """If each block is sampled, the result is exact."""
    run_command([profiled, "forked"], environment(tmp_path, "profile=1"), status=0)
    for profile in tmp_path.glob("own.*.heap"):
        assert top(profiled, profile, "alloc_space")["small_site"].flat == pytest.approx(20 * MB, rel=0.001)
        assert top(profiled, profile, "alloc_objects")["small_site"].flat == 100_000


def test_switched(profiled: Path, tmp_path: Path) -> None:
    """At run time: calloc, realloc and posix_memalign are sampled while it is on, but not before or after."""
    asked = tmp_path / "asked.heap"
    run_command([profiled, "switched", asked], environment(tmp_path, "memory_per_cpu=8"))
    in_use = top(profiled, asked, "inuse_space")
    for site in ("during_site", "resized_site", "aligned_site"):
        assert about(in_use[site].flat, 10 * MB), in_use
    assert "before_site" not in in_use
    at_exit = only_profile(tmp_path)
    assert sum(amount.flat for amount in top(profiled, at_exit, "inuse_space").values()) == 0
    assert about(top(profiled, at_exit, "alloc_space")["during_site"].flat, 10 * MB)


def test_forked(profiled: Path, tmp_path: Path) -> None:
    """The child keeps the parent's samples, and writes a separate file."""
    ran = run_command([profiled, "forked"], environment(tmp_path, "profile=16k"))
    files = {int(path.name.split(".")[1]): path for path in tmp_path.glob("own.*.heap")}
    child = files.pop(ran["child"])
    (parent,) = files.values()
    assert about(top(profiled, parent, "inuse_space")["small_site"].flat, 20 * MB)
    assert "child_site" not in top(profiled, parent, "inuse_space")
    assert about(top(profiled, child, "inuse_space")["small_site"].flat, 20 * MB)
    assert about(top(profiled, child, "inuse_space")["child_site"].flat, 10 * MB)


def test_signalled(profiled: Path, tmp_path: Path) -> None:
    """Through the kernel's signal frame, from one stack to the other."""
    run_command([profiled, "signalled"], environment(tmp_path, "profile=8k"))
    in_use = top(profiled, only_profile(tmp_path), "inuse_space")
    for function in ("signal_site", "nest", "handle", "raise_here"):
        assert about(in_use[function].total, 10 * MB), in_use


@pytest.mark.parametrize("tables", [True, False])
def test_static(programs: Programs, tmp_path: Path, tables: bool) -> None:
    """Linked into the program, the allocator's frames are dropped by name.

    Without an index of its unwind tables, which gcc includes in a static program only on request, there are
    no stacks, but the sums are correct.
    """
    program = tmp_path / "profiled-static"
    source = SOURCES / "profiled.c"
    command: list[str | Path] = [tool("cc", "gcc"), *C_FLAGS, *OPTIMIZED, source, "-static", archive()]
    command += ["-Wl,--eh-frame-hdr"] if tables else []
    # dlsym, which a static program has little use for, is not what this is about.
    done = subprocess.run([*command, "-o", program, "-ldl"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    env = programs.environment(STATIC, f"profile=16k,profile_file={tmp_path / 'own'}")
    run_command([program, "sites"], env)
    in_use = top(program, only_profile(tmp_path), "inuse_space")
    early = tmp_path / "early"
    early.mkdir()
    run_command(
        [program, "signalled"], programs.environment(STATIC, f"profile=1,profile_file={early / 'own'}")
    )
    # With each block sampled: also those of the C library's that come before all else.
    assert shown(only_profile(early)) == pytest.approx(10 * MB, rel=0.001)
    if tables:
        assert about(in_use["small_site"].flat, 20 * MB), in_use
        assert about(in_use["nest"].total, 40 * MB), in_use
    else:
        assert in_use == {}
        assert shown(only_profile(tmp_path)) == pytest.approx(40 * MB, rel=0.1)


def test_cxx(tmp_path: Path) -> None:
    program = tmp_path / "profiled_new"
    compile_program([tool("g++", "g++"), *CXX_FLAGS, "-O2", SOURCES / "profiled_new.cpp", "-o", program])
    run_command([program], environment(tmp_path, "profile=16k"))
    profile = only_profile(tmp_path)
    in_use = top(program, profile, "inuse_space")
    assert about(in_use["keep_strings"].total, 30 * MB), in_use
    assert in_use.get("drop_map", Amount(0, 0)).total == 0, in_use
    allocated = top(program, profile, "alloc_space")
    assert about(allocated["drop_map"].total, 33 * MB), allocated


def test_off(profiled: Path, tmp_path: Path) -> None:
    """Writes no file."""
    run_command([profiled, "sites"], environment(tmp_path, "profile=0"))
    assert list(tmp_path.iterdir()) == []


def test_default_name(profiled: Path, tmp_path: Path) -> None:
    env = environment(tmp_path, "profile=1m") | {"CALM_OPTIONS": "profile=1m"}
    run_command([profiled, "sites"], env, cwd=tmp_path)
    (profile,) = tmp_path.iterdir()
    assert re.fullmatch(r"calmalloc\.\d+\.\d{19}\.heap", profile.name)


def test_unwritable(profiled: Path, tmp_path: Path) -> None:
    """One message, and the program's own exit status."""
    env = environment(tmp_path, "profile=1m") | {"CALM_OPTIONS": "profile=1m,profile_file=/nonexistent/x"}
    ran = run_command([profiled, "sites"], env)
    (line,) = complaints(ran.stderr)
    assert line.startswith("calmalloc: profile not written to /nonexistent/x.")


@pytest.mark.parametrize("value", ["", "k", "1.5m", "-1", "2g", "10q"])
def test_invalid(profiled: Path, tmp_path: Path, value: str) -> None:
    ran = run_command([profiled, "sites"], environment(tmp_path, f"profile={value}"))
    (line,) = complaints(ran.stderr)
    assert line.startswith(f"calmalloc: value of option 'profile={value}'"), line
    assert list(tmp_path.iterdir()) == []


def test_free_when_off(tmp_path: Path) -> None:
    """A pair costs what was recorded of a library without profiling."""
    recorded = json.loads((REPOSITORY / "bench/results/instructions.json").read_text())
    off = instructions_of_pair(
        built("pairs"), 64, clean_environment() | {"LD_PRELOAD": str(shared_library())}, tmp_path
    )
    assert round(off) <= round(recorded["pair_of_malloc_and_free"]["64"]["calmalloc"])
    on = instructions_of_pair(built("pairs"), 64, environment(tmp_path, "profile=1g"), tmp_path)
    assert on > off + 1, "on, each block is counted"
