"""Other page sizes, another instruction set, another C library, valgrind and sanitizers."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from api_helpers import (
    BUILD_AARCH64,
    BUILD_MUSL,
    C_FLAGS,
    GIB,
    GLIBC,
    INCLUDE,
    LINKED,
    MODES,
    OFFLOAD,
    PRELOAD,
    SOURCES,
    STATIC,
    Programs,
    clean_environment,
    compile_program,
    program,
    run_command,
    shared_library,
    tool,
)

PAGE_SIZES = [4096, 16384, 65536]
CONTRACTS = [
    "zero-bytes",
    "huge-sizes",
    "products",
    "realloc-zero",
    "aligned-alloc",
    "usable-sizes",
]
CONTRACTS += [
    "posix-memalign-refuses",
    "calm-family",
    "calm-stats-sizes",
    "calm-stats-count",
    "calm-get",
    "calm-trim",
]
# Every so many sizes: an emulator is slow.
SWEEPS = {"sizes": "9", "alignments": "7", "calloc": "one-thread", "realloc": "60", "doublings": "256"}


# The emulator keeps tables of all address space that is reserved; of less, most start four times as fast.
LITTLE = ("-R", str(4 * GIB))


@functools.cache
def has_other_pages(qemu: str) -> bool:
    """Whether -p has an effect: version 9.0 and later only warn."""
    words = [qemu, "-p", "16384", program("contracts-static", BUILD_AARCH64), "page-size"]
    return "page_bytes 4096" not in run_command(words, clean_environment()).stdout


def emulate(
    pages: int, name: str, *arguments: str, options: str = "", machine: Sequence[str] = LITTLE
) -> str:
    qemu: list[str] = [tool("qemu-aarch64", "qemu-user"), *machine]
    if pages != 4096:
        if not has_other_pages(qemu[0]):
            pytest.skip("this qemu has no page size but the machine's: 9.0 and later ignore -p")
        qemu += ["-p", str(pages)]
        # The machine's own kernel answers mincore(2), in pages of its own.
        options = f"{options},huge_pages=never".removeprefix(",")
    env = clean_environment() | {"CALM_OPTIONS": options}
    ran = run_command([*qemu, program(f"{name}-static", BUILD_AARCH64), *arguments], env)
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("pages", PAGE_SIZES)
class TestPages:
    def test_size_is_what_is_asked_for(self, pages: int) -> None:
        assert emulate(pages, "contracts", "page-size") == f"page_bytes {pages}\n"

    @pytest.mark.parametrize("case", CONTRACTS)
    def test_contract(self, pages: int, case: str) -> None:
        emulate(pages, "contracts", case, options="background=off")

    @pytest.mark.parametrize("case", SWEEPS)
    def test_sweep(self, pages: int, case: str) -> None:
        emulate(pages, "sweep", case, SWEEPS[case])

    @pytest.mark.parametrize("policy", ["adaptive", "paper"])
    def test_stress(self, pages: int, policy: str) -> None:
        out = emulate(pages, "stress", "rounds=3", "live_mib=60", options=f"test_policy={policy}")
        assert "operations" in out

    def test_server(self, pages: int) -> None:
        out = emulate(pages, "stress", "rounds=2", "live_mib=20", options=OFFLOAD)
        assert "operations" in out

    def test_misuse(self, pages: int) -> None:
        for size in ("small", "large"):
            out = emulate(pages, "misuse", "double-free", size, options="misuse=warn")
            assert out.count("calmalloc: double free: 0x") == 1

    def test_all_address_space(self, pages: int) -> None:
        emulate(pages, "contracts", "calm-stats-count", machine=())

    def test_threads(self, pages: int) -> None:
        emulate(pages, "threads", "thread-ends", "3")


# ---- another C library ----


def musl(name: str) -> Path:
    """A static program with the allocator."""
    if shutil.which("musl-gcc") is None:
        pytest.skip("musl-gcc is not installed: it is in the Debian package musl-tools")
    return program(f"{name}-static", BUILD_MUSL)


@pytest.mark.parametrize("case", CONTRACTS)
def test_musl_contract(case: str) -> None:
    run_command([musl("contracts"), case], clean_environment() | {"CALM_OPTIONS": "background=off"})


@pytest.mark.parametrize("case", ["sizes", "calloc", "realloc"])
def test_musl_sweep(case: str) -> None:
    run_command([musl("sweep"), case], clean_environment())


@pytest.mark.parametrize("case", ["signals", "signals-and-threads", "cost"])
def test_musl_forks(case: str) -> None:
    run_command([musl("forks"), case], clean_environment())


@pytest.mark.parametrize(
    "case",
    ["detached", "unregistered", "child-has-no-number"]
    + [
        f"children {way}"
        for way in ("vfork", "vfork-twice", "syscall-vfork", "syscall-clone", "syscall-clone3")
    ],
)
def test_musl_children(case: str) -> None:
    run_command([musl("children"), *case.split()], clean_environment())


@pytest.mark.parametrize("case", ["detached", "unregistered", "own-area", "children vfork", "children clone"])
def test_musl_children_preloaded(tmp_path: Path, case: str) -> None:
    """Where pthread_create and clone have wrappers."""
    musl("children")
    sources = [SOURCES / "children.c", SOURCES / "support.c"]
    headers = [INCLUDE, "-idirafter", BUILD_MUSL / "kernel-headers"]
    command = ["musl-gcc", "-O1", "-D_GNU_SOURCE", "-fno-builtin", "-pthread", *headers, *sources]
    compile_program([*command, "-o", tmp_path / "children"])
    preload = {"LD_PRELOAD": str(BUILD_MUSL / "libcalmalloc.so.0")}
    run_command([tmp_path / "children", *case.split()], clean_environment() | preload)


def test_musl_yields_to_an_area_of_the_program() -> None:
    """Of 11 threads, three times each; the kernel refuses a second area of a thread."""
    ran = run_command([musl("children"), "own-area"], clean_environment())
    assert ran.stdout.split() == ["registered"] * 33


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != OFFLOAD])
def test_musl_stress(mode: str) -> None:
    ran = run_command([musl("stress"), "rounds=9"], clean_environment() | {"CALM_OPTIONS": mode})
    assert ran["operations"] > 10000
    assert ran["dirtied"] > 0


# ---- valgrind, and a sanitizer's malloc ----


@pytest.mark.parametrize("way", [PRELOAD, LINKED])
def test_memcheck_brings_its_own(programs: Programs, way: str) -> None:
    """memcheck replaces malloc; the library is loaded but not used."""
    valgrind = [tool("valgrind", "valgrind"), "-q", "--error-exitcode=9"]
    for case in ("with-libc", "realloc-null", "sized-frees"):
        programs.run(way, "contracts", case, wrapper=valgrind)
    programs.run(way, "sweep", "calloc", "one-thread", wrapper=valgrind)


@pytest.mark.parametrize("cache", ["auto", "locked", "off"])
def test_on_valgrinds_machine(programs: Programs, cache: str) -> None:
    """valgrind has no restartable sequences. Here the library serves malloc."""
    valgrind = [tool("valgrind", "valgrind"), "-q", "--tool=none"]
    for case in ("zero-bytes", "errno", "calm-family", "usable-sizes"):
        programs.run(PRELOAD, "contracts", case, wrapper=valgrind, options=f"test_cache={cache}")
    ran = programs.run(
        STATIC, "stress", "rounds=9", "live_mib=40", wrapper=valgrind, options=f"test_cache={cache}"
    )
    assert ran["operations"] > 100


def test_beside_a_sanitizer(programs: Programs, tmp_path: Path) -> None:
    """The sanitizer's malloc serves if it is linked first; otherwise the sanitizer reports that."""
    binary = tmp_path / "contracts"
    command: list[str | Path] = [tool("cc", "gcc"), *C_FLAGS, INCLUDE, "-fsanitize=address"]
    command += [SOURCES / "contracts.c"]
    command += [SOURCES / "support.c", "-o", binary, "-ldl"]
    compile_program(
        [*command, "-Wl,--no-as-needed", shared_library(), f"-Wl,-rpath,{shared_library().parent}"]
    )
    env = clean_environment() | {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}
    for case in ("realloc-null", "with-libc", "calm-stats-sizes"):
        run_command([binary, case], env)
    ran = run_command([binary, "with-libc"], env | {"LD_PRELOAD": str(shared_library())}, status=None)
    assert ran.status == 0 or (ran.status > 0 and "ASan runtime does not come first" in ran.stderr)


def test_preloaded_into_anything(programs: Programs) -> None:
    """Scripts, and programs that start programs."""
    env = programs.environment(PRELOAD)
    ran = run_command(["/bin/sh", "-c", "for i in 1 2 3; do echo $i | cat | sort; done; ls / | wc -l"], env)
    assert ran.stdout.startswith("1\n2\n3\n")
    assert ran.stderr == ""
    plain = run_command([programs.path("stress", GLIBC), "rounds=1"], clean_environment())
    assert "purges" not in plain.figures


@pytest.mark.long
def test_heaptrack_sees_the_same(programs: Programs, tmp_path: Path) -> None:
    counts = []
    for way in (GLIBC, PRELOAD):
        output = tmp_path / way
        command = [tool("heaptrack", "heaptrack"), "-o", output, programs.path("news", way), "containers"]
        said = run_command(command, programs.environment(way), cwd=tmp_path).stderr
        found = re.search(r"allocations:\s+(\d+)\s+leaked allocations:\s+(\d+)", said)
        assert found is not None, said
        counts.append((int(found[1]), int(found[2])))
    assert counts[0] == counts[1]
    assert counts[0][0] > 20
