"""The kernels after NAS: they compute the published results, in several processes, and detect errors."""

from __future__ import annotations

import math
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ran_workloads import BUILD, LIBRARY, preloadable, run, start
from waiting import wait_until

KERNELS = ("cg-like", "ep-like", "ft-like", "mg-like")

# By kernel: a short run that is verified, but by nothing published.
SHORT = {
    "cg-like": ("--iterations", "2"),
    "ep-like": ("--iterations", "5"),
    "ft-like": ("--iterations", "1", "--seed", "7"),
    "mg-like": ("--iterations", "3"),
}
# Fields that depend on the machine, the allocator or the arguments. (An allocator may have per-CPU caches.)
APART = {"seconds", "seconds_median", "mop_s", "page_offsets", "equal_addresses", "processes"}

# NAS Parallel Benchmarks: what the report and its successors give for verification.
EIGENVALUE = {"S": 8.5971775078648, "W": 10.362595087124}
SUMS = {"S": (-3.247834652034740e3, -6.958407078382297e3), "W": (-2.863319731645753e3, -6.320053679109499e3)}
LAST_SUM = {"S": (5.542683411902e2, 4.932597244941e2), "W": (5.504159734538e2, 5.239212247086e2)}
RESIDUAL = {"S": 0.5307707005734e-4, "W": 0.6467329375339e-5}


def work_of(printed: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in printed.items() if key not in APART}


@pytest.mark.parametrize("problem", ["S", "W"])
def test_results_are_the_published_ones(problem: str) -> None:
    printed = run("cg-like", "--class", problem)
    assert printed["published"] == 1
    assert printed["eigenvalue"] == pytest.approx(EIGENVALUE[problem], rel=1e-10)
    printed = run("ep-like", "--class", problem)
    # Class W goes through the sums of class S.
    assert printed["published"] == {"S": 1, "W": 2}[problem]
    assert (printed["sum_x"], printed["sum_y"]) == pytest.approx(SUMS[problem], rel=1e-8)
    printed = run("ft-like", "--class", problem)
    assert printed["published"] == 6
    assert printed["sum"] == pytest.approx(LAST_SUM[problem], rel=1e-12)
    printed = run("mg-like", "--class", problem)
    assert printed["published"] == 1
    assert printed["residual"] == pytest.approx(RESIDUAL[problem], rel=1e-8)


@pytest.mark.parametrize(
    ("iterations", "estimate"), [("1", 9.99864415791401), ("2", 8.57332792032217), ("3", 8.59545103740579)]
)
def test_cg_like_starts_from_ones(iterations: str, estimate: float) -> None:
    # The benchmark's output after each step of class S.
    assert run("cg-like", "--iterations", iterations)["eigenvalue"] == pytest.approx(estimate, rel=1e-12)


def test_more_and_fewer_iterations_are_verified_too() -> None:
    assert run("cg-like", "--iterations", "14")["published"] == 0
    longer = run("cg-like", "--iterations", "25")
    assert longer["published"] == 1
    # Inverse iteration converges: by more than half a step's digit each.
    assert longer["vector_residual"] < 1e-3 * run("cg-like")["vector_residual"]
    assert run("ep-like", "--iterations", "255")["published"] == 0
    assert run("ft-like", "--iterations", "4")["published"] == 4
    assert run("ft-like", "--iterations", "9")["published"] == 6
    assert run("mg-like", "--iterations", "3")["published"] == 0
    longer = run("mg-like", "--iterations", "40")
    assert longer["published"] == 1
    # As far as rounding lets it.
    assert longer["residual"] < 1e-15 < 1e-2 < longer["residual_before"]
    assert 0 < longer["worst_cycle"] < 0.5


def test_pairs_are_distributed_normally() -> None:
    printed = run("ep-like", "--iterations", "40", "--seed", "12345")
    pairs = 40 * 65536
    accepted = sum(printed["counts"])
    assert accepted == pytest.approx(pairs * math.pi / 4, rel=0.005)
    inner = math.erf(1 / math.sqrt(2)) ** 2
    assert printed["counts"][0] == pytest.approx(accepted * inner, rel=0.005)


@pytest.mark.parametrize("name", KERNELS)
def test_the_work_is_the_same_with_any_number_of_processes_and_any_allocator(name: str) -> None:
    first = run(name, *SHORT[name])
    assert first["processes"] == 1
    assert first["published"] == 0
    for processes in ("2", "5"):
        printed = run(name, *SHORT[name], "--processes", processes)
        assert printed["processes"] == int(processes)
        assert work_of(printed) == work_of(first)
        assert printed["seconds"] >= printed["seconds_median"] > 0
    printed = run(name, *SHORT[name], "--processes", "3", preload=LIBRARY, CALM_OPTIONS="")
    assert work_of(printed) == work_of(first)


@pytest.mark.parametrize("name", KERNELS)
def test_another_seed_is_another_problem(name: str) -> None:
    first = work_of(run(name, *SHORT[name], "--seed", "11"))
    second = work_of(run(name, *SHORT[name], "--seed", "13"))
    same = {key for key, value in first.items() if second[key] == value}
    assert first["seed"] == 11
    assert {"workload", "class", "iterations", "published"} <= same
    assert len(same) < len(first) - 1


def test_operations_are_those_of_all_processes() -> None:
    printed = run("ep-like", "--iterations", "20", "--processes", "3")
    assert printed["mop_s"] * printed["seconds"] == pytest.approx(3 * 20 * 2 * 65536 / 1e6, rel=0.01)


@pytest.mark.parametrize("name", KERNELS)
def test_help_and_parameters(name: str) -> None:
    helped = start(name, "--help")
    assert helped.returncode == 0
    assert helped.stdout.startswith(f"usage: {name} [options]\n")
    printed = run(name, *SHORT[name], "--class", "S", "--processes", "1")
    for option in ("class", "processes", "iterations", "seed"):
        assert f"--{option} " in helped.stdout
        assert option in printed
    assert f"(default {run(name)['seed']})" in helped.stdout


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--class", "B"), "one of S|W|A"),
        (("--processes", "0"), "a number from 1 to 64"),
        (("--processes", "65"), "a number from 1 to 64"),
        (("--iterations", "0"), "a number from 1"),
        (("--seed", "2"), "--seed is even"),
        (("more",), "too many arguments"),
    ],
)
def test_bad_arguments_get_one_line(name: str, arguments: tuple[str, ...], message: str) -> None:
    done = start(name, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def test_processes_run_side_by_side_and_end_with_their_parent() -> None:
    command: list[str | Path] = [BUILD / "ep-like", "--processes", "3", "--iterations", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as parent:
        wait_until(lambda: len(children_of(parent.pid)) == 3)
        children = children_of(parent.pid)
        assert all(is_running(child) for child in children)
        parent.kill()
    wait_until(lambda: not any(is_running(child) for child in children))


# BREAK says what goes wrong. ONE names a file: then it goes wrong only in the process that makes it.
BROKEN = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

extern void *__libc_malloc(size_t size);
extern void __libc_free(void *block);

enum { LARGE = 100000 };

static char *room;
static size_t used;
static size_t used_by_first;

static int goes_wrong(const char *how) {
    static int here = -1;
    static pid_t where;
    const char *asked = getenv("BREAK");
    const char *one = getenv("ONE");
    if (asked == NULL || strcmp(asked, how) != 0) {
        return 0;
    }
    if (here < 0 || where != getpid()) {
        where = getpid();
        here = one == NULL || open(one, O_CREAT | O_EXCL, 0600) >= 0;
    }
    return here;
}

/* Large blocks are of one mapping at one address, and never freed. */
static char *take(size_t size) {
    if (room == NULL) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
        room = mmap((void *)(1UL << 42), 1UL << 32, PROT_READ | PROT_WRITE, flags, -1, 0);
    }
    char *at = room + used;
    used += (size + 8191) / 4096 * 4096;
    used_by_first = used_by_first == 0 ? used : used_by_first;
    return at;
}

void *malloc(size_t size) {
    if (size < LARGE) {
        return __libc_malloc(size);
    }
    if (goes_wrong("memory")) {
        return NULL;
    }
    if (goes_wrong("signal")) {
        raise(SIGKILL);
    }
    if (goes_wrong("exit")) {
        _exit(0);
    }
    if (goes_wrong("overlap")) {
        used = 0;
    }
    if (goes_wrong("twins")) {
        used = used_by_first;
    }
    return take(size) + (goes_wrong("offset") ? 192 : 64);
}

void free(void *block) {
    if ((char *)block < room || (char *)block >= room + (1UL << 32)) {
        __libc_free(block);
    }
}

static double wrong(const char *name) {
    static double factor;
    if (factor == 0) {
        double error = goes_wrong("little") ? 1e-7 : goes_wrong("bits") ? 1e-13 : goes_wrong("nan") ? NAN : 0;
        factor = goes_wrong(name) ? 0.25 : 1 + error;
    }
    return factor;
}

static void *real(void **function, const char *name) {
    return *function != NULL ? *function : (*function = dlsym(RTLD_NEXT, name));
}

pid_t fork(void) {
    static void *function;
    static int forks;
    if (goes_wrong("fork") && ++forks == 3) {
        errno = EAGAIN;
        return -1;
    }
    return ((pid_t (*)(void))real(&function, "fork"))();
}

double log(double x) {
    static void *function;
    /* A batch calls it some 51,000 times, and the first one is not timed. */
    static long calls;
    if (++calls == 100000 && goes_wrong("midway")) {
        raise(SIGKILL);
    }
    return ((double (*)(double))real(&function, "log"))(x) * wrong("log");
}

double pow(double x, double y) {
    static void *function;
    return ((double (*)(double, double))real(&function, "pow"))(x, y) * wrong("pow");
}

double sin(double x) {
    static void *function;
    return ((double (*)(double))real(&function, "sin"))(x) * wrong("sin");
}

/* What compilers make of sin and cos. */
void sincos(double x, double *sine, double *cosine) {
    static void *function;
    /* Then roots of unity are still of length 1. */
    double turned = goes_wrong("phase") ? x + 0.001 * x * x : x;
    ((void (*)(double, double *, double *))real(&function, "sincos"))(turned, sine, cosine);
    *sine *= wrong("sin");
}
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preloadable(tmp_path_factory.mktemp("broken"), BROKEN, "-ldl")


def failure(name: str, *arguments: str, preload: Path, broken_by: str, one: Path | None = None) -> str:
    more = {} if one is None else {"ONE": str(one)}
    done = start(name, *SHORT[name], *arguments, preload=preload, BREAK=broken_by, **more)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix(f"{name}: ").removesuffix("\n")


@pytest.mark.parametrize("processes", ["1", "3"])
@pytest.mark.parametrize(
    ("name", "broken_by", "arguments", "what"),
    [
        ("cg-like", "pow", ("--iterations", "15"), "the residual of the eigenvector"),
        ("cg-like", "little", ("--iterations", "15"), "the eigenvalue"),
        ("cg-like", "nan", (), "the residual of the last solution"),
        ("ep-like", "log", (), "the distance of the pairs in an annulus"),
        ("ep-like", "little", ("--iterations", "256"), "the first sum"),
        ("ft-like", "overlap", (), "the error of the last sum"),
        ("ft-like", "little", (), "the error of the energy"),
        ("ft-like", "nan", (), "the error of the energy"),
        ("ft-like", "phase", (), "the error of the inverse"),
        ("mg-like", "overlap", (), "the error of the charges"),
        ("mg-like", "twins", (), "what a cycle leaves of the residual"),
    ],
)
def test_wrong_results_are_found(
    name: str, broken_by: str, arguments: tuple[str, ...], what: str, processes: str, broken: Path
) -> None:
    said = failure(name, *arguments, "--processes", processes, preload=broken, broken_by=broken_by)
    assert said.startswith(f"wrong: {what}")


def test_processes_that_do_not_agree_are_found(broken: Path, tmp_path: Path) -> None:
    said = failure(*("ep-like", "--processes", "3"), preload=broken, broken_by="bits", one=tmp_path / "one")
    assert said.startswith("process ")
    assert said.endswith(" has another result than process 0")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("broken_by", "what"),
    [
        ("memory", "out of memory"),
        ("signal", " was ended by signal 9"),
        ("exit", " ended too early"),
        ("fork", "cannot start a process"),
    ],
)
def test_one_process_that_fails_ends_all(
    name: str, broken_by: str, what: str, broken: Path, tmp_path: Path
) -> None:
    # The others do not begin what would take them hours.
    arguments = ("--processes", "4", "--iterations", "1000000")
    said = failure(name, *arguments, preload=broken, broken_by=broken_by, one=tmp_path / "one")
    assert said.endswith(what)


def test_a_process_that_ends_in_the_middle_is_noticed(broken: Path, tmp_path: Path) -> None:
    said = failure("ep-like", "--processes", "3", preload=broken, broken_by="midway", one=tmp_path / "one")
    assert said.endswith(" was ended by signal 9")


@pytest.mark.parametrize("name", KERNELS)
def test_arrays_lie_where_malloc_puts_them(name: str, broken: Path, tmp_path: Path) -> None:
    arguments = (*SHORT[name], "--processes", "3")
    assert run(name, *arguments)["equal_addresses"] is True
    plain = run(name, *arguments, preload=broken)
    assert plain["equal_addresses"] is True
    moved = run(name, *arguments, preload=broken, BREAK="offset")
    assert moved["equal_addresses"] is True
    large = [i for i, offset in enumerate(plain["page_offsets"]) if moved["page_offsets"][i] != offset]
    assert large
    assert {plain["page_offsets"][i] for i in large} == {64}
    assert {moved["page_offsets"][i] for i in large} == {192}
    # Where one process's are elsewhere, the line says so.
    single = run(name, *arguments, preload=broken, BREAK="offset", ONE=str(tmp_path / "one"))
    assert single["equal_addresses"] is False
    assert work_of(single) == work_of(plain)


def test_no_memory_is_one_line() -> None:
    done = subprocess.run(
        [BUILD / "ft-like", "--class", "A", "--processes", "2"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (200 << 20, 200 << 20)),
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "ft-like: out of memory\n"
