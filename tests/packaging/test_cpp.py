"""The C++ header: containers, with each compiler and standard, and each way to link the library."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).parent / "cpp"
BUILD = Path(os.environ.get("CALMALLOC_BUILD", REPOSITORY / "build/release")).absolute()
INCLUDE = f"-I{REPOSITORY / 'include'}"
FLAGS = ["-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wpedantic", INCLUDE]

COMPILERS = {"g++": "g++", "clang++": "clang"}
STANDARDS = ["c++17", "c++20"]
# Beside: linked without its malloc, so that only what is asked of it by name is its.
SHARED, ARCHIVE, BESIDE = "shared", "archive", "beside"
CASES = ["containers", "served", "over-aligned", "pmr", "failures", "requirements", "threads"]

Program = Callable[[str, str, str], Path]


def tool(name: str) -> str:
    """The path of a tool. A missing tool fails the test, with the name of the package to install."""
    found = shutil.which(name)
    package = COMPILERS.get(name, "gcc")
    assert found is not None, f"{name} is not installed: it is in the Debian package {package}"
    return found


def built(name: str) -> Path:
    path = BUILD / name
    assert path.is_file(), f"{path} is not built: run make, or set CALMALLOC_BUILD"
    return path


def run(command: list[str | Path], *, status: int = 0) -> str:
    drop = ("LD_", "CALM_", "MALLOC_", "GLIBC_TUNABLES")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    line = " ".join(map(str, command))
    assert done.returncode == status, (
        f"{line}: status {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
    )
    return done.stdout


def linked_shared() -> list[str | Path]:
    return [built("libcalmalloc.so"), f"-Wl,-rpath,{BUILD}"]


@pytest.fixture(scope="module")
def library_without_malloc() -> Path:
    """The library's own sources, without the functions that a C library also has."""
    return built("libcalmalloc_beside.a")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, library_without_malloc: Path) -> Program:
    folder = tmp_path_factory.mktemp("cpp")
    libraries: dict[str, list[str | Path]] = {
        SHARED: linked_shared(),
        ARCHIVE: [built("libcalmalloc.a")],
        BESIDE: [library_without_malloc],
    }

    @cache
    def compiled(compiler: str, standard: str) -> Path:
        output = folder / f"{compiler}-{standard}.o"
        run([tool(compiler), f"-std={standard}", *FLAGS, "-c", SOURCES / "containers.cpp", "-o", output])
        return output

    @cache
    def build(compiler: str, standard: str, way: str) -> Path:
        output = folder / f"{compiler}-{standard}-{way}"
        run([tool(compiler), *FLAGS, compiled(compiler, standard), *libraries[way], "-o", output])
        return output

    return build


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("standard", "way"),
    # How it is linked is no matter of the standard.
    [("c++17", SHARED), ("c++20", SHARED), ("c++20", ARCHIVE), ("c++20", BESIDE)],
)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_containers(program: Program, compiler: str, standard: str, way: str, case: str) -> None:
    beside = ["beside"] if way == BESIDE else []
    assert run([program(compiler, standard, way), case, *beside]) == "done\n"


def test_a_case_that_is_none_fails(program: Program) -> None:
    run([program("g++", "c++17", SHARED), "containerz"], status=2)


def test_the_cases_tell_whose_malloc_it_is(program: Program) -> None:
    """The cases detect a malloc that is not calmalloc's, so `served` is meaningful."""
    run([program("g++", "c++20", BESIDE), "served"], status=1)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_without_exceptions_and_run_time_types(tmp_path: Path, compiler: str) -> None:
    output = tmp_path / "bare"
    command: list[str | Path] = [tool(compiler), "-std=c++17", "-fno-exceptions", "-fno-rtti", *FLAGS]
    run([*command, SOURCES / "bare.cpp", *linked_shared(), "-o", output])
    run([output])
    run([output, "memory"], status=-signal.SIGABRT)
    run([output, "length"], status=-signal.SIGABRT)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_plugins_resource_is_the_programs(tmp_path: Path, compiler: str) -> None:
    plugin, host = tmp_path / "libplugin.so", tmp_path / "host"
    command: list[str | Path] = [tool(compiler), "-std=c++17", "-fvisibility=hidden", *FLAGS]
    run([*command, "-shared", "-fPIC", SOURCES / "plugin.cpp", *linked_shared(), "-o", plugin])
    linked: list[str | Path] = [plugin, f"-Wl,-rpath,{tmp_path}", *linked_shared()]
    run([*command, SOURCES / "host.cpp", *linked, "-o", host])
    run([host])


@pytest.mark.parametrize("standard", [*STANDARDS, "c++2b"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_header_stands_alone(tmp_path: Path, compiler: str, standard: str) -> None:
    """Under the warnings of strict projects, included twice, and by two files of one program."""
    strict = [
        "-Wconversion",
        "-Wsign-conversion",
        "-Wold-style-cast",
        "-Wnon-virtual-dtor",
        "-Woverloaded-virtual",
    ]
    command: list[str | Path] = [tool(compiler), f"-std={standard}", *FLAGS, *strict]
    objects: list[str | Path] = [tmp_path / "twice.o", tmp_path / "again.o"]
    for name in objects:
        run([*command, "-c", SOURCES / Path(name).with_suffix(".cpp").name, "-o", name])
    output = tmp_path / "twice"
    run([*command, *objects, *linked_shared(), "-o", output])
    run([output])
