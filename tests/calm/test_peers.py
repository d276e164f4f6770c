"""The peers that `make peers` builds: each replaces malloc in programs that know nothing of it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from calm_helpers import ROOT, Calm

from calm.core import allocators
from calm.core import paths as places
from calm.core.allocators import TUNABLES, Allocator
from calm.core.errors import CalmError

NAMES = ("jemalloc", "mimalloc", "snmalloc", "rpmalloc", "tcmalloc")
FUNCTIONS = (
    *("malloc", "calloc", "realloc", "free", "posix_memalign", "aligned_alloc", "memalign"),
    *("valloc", "pvalloc", "malloc_usable_size"),
    *("_Znwm", "_Znam", "_ZdlPv", "_ZdaPv", "_ZdlPvm", "_ZnwmSt11align_val_t", "_ZdlPvSt11align_val_t"),
)
LARSON = ROOT / "build/release/larson"

# Says which library has each function that a program calls, and whether its blocks are that library's.
WHERE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        Dl_info info;
        void *function = dlsym(RTLD_DEFAULT, argv[i]);
        printf("%s %s\n", argv[i], function && dladdr(function, &info) ? info.dli_fname : "nowhere");
    }
    for (size_t size = 1; size < (size_t)8 << 20; size = size * 3 + 1) {
        char *block = malloc(size), *zeros = calloc(1, size);
        void *aligned = NULL;
        if (block == NULL || zeros == NULL || malloc_usable_size(block) < size) return 2;
        if (zeros[0] != 0 || zeros[size - 1] != 0) return 3;
        memset(block, 7, size);
        block = realloc(block, 2 * size);
        if (block == NULL || block[0] != 7 || block[size - 1] != 7) return 4;
        if (posix_memalign(&aligned, 256, size) != 0 || (uintptr_t)aligned % 256 != 0) return 5;
        free(aligned);
        free(zeros);
        free(block);
    }
    return 0;
}
"""


@pytest.fixture(params=NAMES)
def peer(request: pytest.FixtureRequest) -> Allocator:
    """One that was built; others of that name would not do."""
    name: str = request.param
    library = ROOT / "build/peers/lib" / f"lib{name}.so"
    if not library.is_file():
        pytest.skip(f"{library.relative_to(ROOT)} is not there: `make peers` builds it")
    found = allocators.parse(name)
    assert found.library == library
    return found


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("where") / "where"
    command = ["cc", "-O1", "-fno-builtin", "-x", "c", "-", "-o", str(program)]
    subprocess.run(command, input=WHERE, text=True, check=True)
    return program


def test_serves_every_function(peer: Allocator, where: Path, calm: Calm) -> None:
    result = calm("run", "-a", peer.label, "--", where, *FUNCTIONS)
    assert result.returncode == 0, result.stderr
    assert dict(line.split() for line in result.stdout.splitlines()) == dict.fromkeys(
        FUNCTIONS, str(peer.library)
    )


def test_cpp_throws_and_allocates_in_threads(peer: Allocator, calm: Calm, tmp_path: Path) -> None:
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler")
    source = tmp_path / "program.cpp"
    source.write_text(r"""
        #include <cstdint>
        #include <map>
        #include <stdexcept>
        #include <string>
        #include <thread>
        #include <vector>
        struct alignas(128) Wide { char bytes[256]; };
        int main() {
            std::vector<std::thread> threads;
            for (int i = 0; i < 4; i++)
                threads.emplace_back([] {
                    std::map<int, std::string> strings;
                    for (int k = 0; k < 5000; k++) strings[k] = std::string(k % 300, 'x');
                    Wide *wide = new Wide, *more = new Wide[3];
                    if ((std::uintptr_t)wide % 128 != 0 || (std::uintptr_t)more % 128 != 0) std::abort();
                    delete wide;
                    delete[] more;
                });
            for (auto &thread : threads) thread.join();
            try {
                throw std::runtime_error("thrown");
            } catch (const std::exception &) {
                return 0;
            }
        }
    """)
    program = tmp_path / "program"
    subprocess.run(["c++", "-std=c++17", "-O1", "-pthread", source, "-o", program], check=True)
    result = calm("run", "-a", peer.label, "--", program)
    assert result.returncode == 0, result.stderr


def test_runs_programs(peer: Allocator, calm: Calm) -> None:
    script = "import json, threading; print(len(json.dumps(list(range(100000)))))"
    assert calm("run", "-a", peer.label, "--", sys.executable, "-c", script).stdout == "688890\n"
    numbers = "\n".join(map(str, range(20000, 0, -1)))
    done = calm("run", "-a", peer.label, "--", "sort", "-n", input=numbers, process=True)
    assert done.stdout.split() == [str(number) for number in range(1, 20001)]


def test_runs_threads(peer: Allocator, calm: Calm) -> None:
    if not LARSON.exists():
        pytest.skip("build/release/larson is not built")
    done = calm("run", "-a", peer.label, "--", LARSON, "--seconds", "1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["operations_per_second"] > 0


def test_compare_takes_it(peer: Allocator, calm: Calm) -> None:
    result = calm("compare", "-a", f"glibc,{peer.label}", "-n", "1", "--json", "-", "--", "true")
    assert result.returncode == 0, result.stderr
    assert [len(side["runs"]) for side in json.loads(result.stdout)["allocators"]] == [1, 1]


def test_is_listed_with_its_origin(peer: Allocator, calm: Calm, tmp_path: Path) -> None:
    rows = {row["name"]: row for row in json.loads(calm("allocators", "--json").stdout)["allocators"]}
    row = rows[peer.label]
    assert row["version"]
    if row["crate"]:
        locked = (ROOT / "bench/peers/Cargo.lock").read_text()
        assert f'name = "{row["crate"]}"\nversion = "{row["crate_version"]}' in locked
        assert f"crate {row['crate']} {row['crate_version']}" in calm("allocators").stdout
    else:
        assert row["tree"]


def test_tcmalloc_has_its_caches_for_each_cpu(calm: Calm, tmp_path: Path) -> None:
    """They are lost without a word where glibc has the kernel's rseq first."""
    if not (ROOT / "build/peers/lib/libtcmalloc.so").is_file():
        pytest.skip("build/peers/lib/libtcmalloc.so is not there: `make peers` builds it")
    if not shutil.which("strace"):
        pytest.skip("no strace")
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "-e", "trace=rseq", "-o", str(trace)]
    result = calm("run", "-a", "tcmalloc", "--", *strace, "true")
    assert result.returncode == 0, result.stderr
    calls = [line for line in trace.read_text().splitlines() if "rseq(" in line]
    assert calls
    assert all(line.endswith("= 0") for line in calls), calls


def test_tunables_that_are_set_stay() -> None:
    known = allocators.KNOWN["tcmalloc"].environment
    mine = Allocator("tcmalloc", None, known)
    assert mine.variables({})[TUNABLES] == "glibc.pthread.rseq=0"
    assert mine.variables({TUNABLES: "a.b.c=1"})[TUNABLES] == "a.b.c=1:glibc.pthread.rseq=0"
    assert TUNABLES not in Allocator("glibc").variables({TUNABLES: "a.b.c=1"})


REMEDIES = {
    **dict.fromkeys(NAMES, "`make peers` builds it"),
    "gperftools": "install Debian's package libtcmalloc-minimal4, or `scripts/peers --source gperf",
    "scudo": "install Debian's package libclang-rt-dev, or `scripts/peers --source scudo=DIR` builds it",
    "hardened_malloc": "`scripts/peers --source hardened_malloc=DIR` builds it",
    **{f"{name}-debian": "install Debian's package lib" for name in ("jemalloc", "mimalloc", "gperftools")},
    "jemalloc-tuned": "`make peers` builds it",
    "jemalloc-process-madvise": "jemalloc's development branch has this option: `scripts/peers",
}


@pytest.mark.parametrize("name", REMEDIES)
def test_where_it_is_missing_a_line_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "built_directories", list)
    monkeypatch.setattr(places, "system_directories", list)
    remedy = REMEDIES[name]
    with pytest.raises(CalmError, match=f"{name} is not on this machine: {remedy}"):
        allocators.parse(name)


def test_debian_is_not_what_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, system = tmp_path / "built", tmp_path / "system"
    for folder in (built, system):
        folder.mkdir()
        for library in ("libjemalloc.so", "libmimalloc.so", "libtcmalloc.so", "libtcmalloc_minimal.so"):
            (folder / library).touch()
    (built / "libgperftools.so").touch()
    monkeypatch.setattr(places, "built_directories", lambda: [built])
    monkeypatch.setattr(places, "system_directories", lambda: [system])
    for name in ("jemalloc", "mimalloc"):
        assert allocators.find_library(name) == built / f"lib{name}.so"
        assert allocators.find_library(f"{name}-debian") == system / f"lib{name}.so"
        (built / f"lib{name}.so").unlink()
        assert allocators.find_library(name) == system / f"lib{name}.so"
    assert allocators.find_library("gperftools") == built / "libgperftools.so"
    assert allocators.find_library("gperftools-debian") == system / "libtcmalloc_minimal.so"
    # A system's library of that name is of gperftools.
    (built / "libtcmalloc.so").unlink()
    assert allocators.find_library("tcmalloc") is None


def test_the_newest_clang_has_the_newest_scudo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [tmp_path / f"llvm-{number}/lib/clang/{release}/lib/linux" for number, release in
             ((9, "9.0.1"), (14, "14.0.6"), (19, "19"))]  # fmt: skip
    monkeypatch.setattr(Path, "glob", lambda *_: iter(found[1:] + found[:1]))
    assert [path for path in places.system_directories() if path in found] == found[::-1]


@pytest.mark.parametrize("name", ["scudo", "hardened_malloc", "gperftools"])
def test_it_serves_what_programs_call(name: str, where: Path, calm: Calm) -> None:
    library = allocators.find_library(name)
    if library is None:
        pytest.skip(f"{name} is not on this machine")
    result = calm(
        "run", "-a", name, "--", where, "malloc", "free", "calloc", "realloc", "posix_memalign", "_Znwm"
    )
    assert result.returncode == 0, result.stderr
    served = dict(line.split() for line in result.stdout.splitlines())
    assert {Path(file).resolve() for file in served.values()} == {library.resolve()}


def test_jemalloc_takes_the_options_of_its_variants(calm: Calm) -> None:
    variants = [name for name, known in allocators.KNOWN.items() if known.variant_of == "jemalloc"]
    here = [name for name in variants if allocators.is_here(name)]
    if not here:
        pytest.skip("jemalloc is not on this machine")
    for name in here:
        result = calm("run", "-a", f"{name}:MALLOC_CONF=abort_conf:true", "--", "true")
        assert (result.returncode, result.stderr) == (0, ""), name
