"""Other page sizes, another instruction set, another C library, and tools with a machine of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from api_helpers import (
    BUILD_AARCH64,
    C_FLAGS,
    GLIBC,
    INCLUDE,
    LINKED,
    MODES,
    OFFLOAD,
    PRELOAD,
    REPOSITORY,
    SOURCES,
    STATIC,
    WARNINGS,
    Programs,
    built,
    clean_environment,
    compile_program,
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
SWEEPS = {"sizes": "5", "alignments": "3", "calloc": "one-thread", "realloc": "20", "doublings": "256"}

PAGE_SIZE = """
#include <stdio.h>
#include <unistd.h>
int main(void) {
    printf("page %ld\\n", sysconf(_SC_PAGESIZE));
}
"""


@pytest.fixture(scope="session")
def aarch64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of static programs for it."""
    folder = tmp_path_factory.mktemp("aarch64")
    compiler = tool("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu")
    archive = built("libcalmalloc.a", BUILD_AARCH64)
    for name in ("contracts", "sweep", "stress", "misuse", "processes"):
        sources = [SOURCES / f"{name}.c", SOURCES / "support.c"]
        command: list[str | Path] = [
            compiler,
            *C_FLAGS,
            "-DLINKED",
            "-DSTATIC",
            INCLUDE,
            "-static",
            *sources,
            archive,
        ]
        compile_program([*command, "-o", folder / name])
    (folder / "page.c").write_text(PAGE_SIZE)
    compile_program([compiler, "-static", folder / "page.c", "-o", folder / "page"])
    return folder


def emulate(folder: Path, pages: int, name: str, *arguments: str, options: str = "", status: int = 0) -> str:
    qemu = tool("qemu-aarch64", "qemu-user")
    if pages != 4096:
        # The machine's own kernel answers mincore(2), in pages of its own.
        options = f"{options},huge_pages=never".removeprefix(",")
    env = clean_environment() | {"CALM_OPTIONS": options}
    command: list[str | Path] = [qemu, "-p", str(pages), folder / name, *arguments]
    ran = run_command(command, env, timeout=110, status=status)
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("pages", PAGE_SIZES)
class TestPages:
    def test_size_is_what_is_asked_for(self, aarch64: Path, pages: int) -> None:
        assert emulate(aarch64, pages, "page") == f"page {pages}\n"

    @pytest.mark.parametrize("case", CONTRACTS)
    def test_contract(self, aarch64: Path, pages: int, case: str) -> None:
        emulate(aarch64, pages, "contracts", case, options="background=off")

    @pytest.mark.parametrize("case", SWEEPS)
    def test_sweep(self, aarch64: Path, pages: int, case: str) -> None:
        emulate(aarch64, pages, "sweep", case, SWEEPS[case])

    @pytest.mark.parametrize("policy", ["adaptive", "paper"])
    def test_stress(self, aarch64: Path, pages: int, policy: str) -> None:
        out = emulate(aarch64, pages, "stress", "seconds=1", "live_mib=60", options=f"policy={policy}")
        assert "operations" in out

    def test_server(self, aarch64: Path, pages: int) -> None:
        out = emulate(aarch64, pages, "stress", "seconds=0.5", "live_mib=20", options=OFFLOAD)
        assert "operations" in out

    def test_misuse(self, aarch64: Path, pages: int) -> None:
        for size in ("small", "large"):
            out = emulate(aarch64, pages, "misuse", "double-free", size, options="misuse=warn")
            assert out.count("calmalloc: double free: 0x") == 1

    def test_threads(self, aarch64: Path, pages: int) -> None:
        emulate(aarch64, pages, "processes", "thread-ends", "3")


# ---- another C library ----


@pytest.fixture(scope="session")
def musl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The allocator and the tests in static programs, from the sources."""
    compiler = shutil.which("musl-gcc")
    if compiler is None:
        pytest.skip("musl-gcc is not installed: it is in the Debian package musl-tools")
    folder = tmp_path_factory.mktemp("musl")
    # The kernel's headers, without the other C library's beside them.
    kernel = folder / "kernel"
    kernel.mkdir()
    for name, target in (
        ("linux", "/usr/include/linux"),
        ("asm-generic", "/usr/include/asm-generic"),
        ("asm", "/usr/include/x86_64-linux-gnu/asm"),
    ):
        (kernel / name).symlink_to(target)
    flags: list[str | Path] = [
        "-std=gnu17",
        "-D_GNU_SOURCE",
        "-O2",
        "-g",
        "-fno-builtin",
        "-pthread",
        *WARNINGS,
    ]
    flags += [INCLUDE, f"-I{REPOSITORY / 'src'}", "-idirafter", kernel, "-c"]
    objects = []
    for source in sorted((REPOSITORY / "src").glob("*/*.c")):
        objects.append(folder / f"{source.parent.name}-{source.stem}.o")
        compile_program([compiler, *flags, source, "-o", objects[-1]])
    for name in ("contracts", "sweep", "stress", "misuse"):
        parts = []
        for source in (SOURCES / f"{name}.c", SOURCES / "support.c"):
            parts.append(folder / f"{source.stem}.o")
            compile_program([compiler, *flags, "-DLINKED", "-DSTATIC", source, "-o", parts[-1]])
        compile_program([compiler, "-static", "-pthread", *parts, *objects, "-o", folder / name])
    return folder


@pytest.mark.parametrize("case", CONTRACTS)
def test_musl_contract(musl: Path, case: str) -> None:
    run_command([musl / "contracts", case], clean_environment() | {"CALM_OPTIONS": "background=off"})


@pytest.mark.parametrize("case", ["sizes", "calloc", "realloc"])
def test_musl_sweep(musl: Path, case: str) -> None:
    run_command([musl / "sweep", case], clean_environment())


@pytest.mark.parametrize("mode", MODES)
def test_musl_stress(musl: Path, mode: str) -> None:
    seconds = "seconds=1" if mode == OFFLOAD else "seconds=2"
    ran = run_command([musl / "stress", seconds], clean_environment() | {"CALM_OPTIONS": mode})
    assert ran["operations"] > 10000
    assert ran["dirtied"] > 0


# ---- valgrind, and a sanitizer's malloc ----


@pytest.mark.parametrize("way", [PRELOAD, LINKED])
def test_memcheck_brings_its_own(programs: Programs, way: str) -> None:
    """It replaces malloc; the library is only carried along."""
    valgrind = [tool("valgrind", "valgrind"), "-q", "--error-exitcode=9"]
    programs.run(way, "contracts", "with-libc", wrapper=valgrind)
    programs.run(way, "sweep", "calloc", "one-thread", wrapper=valgrind)


@pytest.mark.parametrize("cache", ["auto", "locked", "off"])
def test_on_valgrinds_machine(programs: Programs, cache: str) -> None:
    """Which has no restartable sequences. Here the library does serve malloc."""
    valgrind = [tool("valgrind", "valgrind"), "-q", "--tool=none"]
    for case in ("zero-bytes", "errno", "calm-family", "usable-sizes"):
        programs.run(PRELOAD, "contracts", case, wrapper=valgrind, options=f"cache={cache}")
    ran = programs.run(
        STATIC, "stress", "seconds=3", "live_mib=40", wrapper=valgrind, options=f"cache={cache}", timeout=110
    )
    assert ran["operations"] > 100


def test_beside_a_sanitizer(programs: Programs, tmp_path: Path) -> None:
    """Its malloc serves where it is linked first; where it cannot come first it says so."""
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
    plain = run_command([programs.path("stress", GLIBC), "seconds=0.1"], clean_environment())
    assert "purges" not in plain.figures
