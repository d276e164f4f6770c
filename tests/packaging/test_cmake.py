"""The installed tree, its use by CMake and pkg-config, and the project as a subproject."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from packaging_helpers import (
    BUILD,
    FOR_RESEARCH,
    REPOSITORY,
    SOURCES,
    VERSION,
    build,
    configure,
    project,
    run,
    tool,
)

SERVED = "served by calmalloc\n"
STRICT = "-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Werror"


def find(target: str, version: str = "0.1") -> list[str]:
    return [
        f"find_package(calmalloc {version} REQUIRED)",
        f"target_link_libraries(uses_calmalloc PRIVATE {target})",
    ]


def test_installed_tree(prefix: Path) -> None:
    assert (prefix / "lib/libcalmalloc.so").readlink() == Path("libcalmalloc.so.0")
    assert (prefix / "lib/libcalmalloc.so.0").readlink() == Path(f"libcalmalloc.so.{VERSION}")
    assert "[libcalmalloc.so.0]" in run("readelf", "-d", prefix / "lib/libcalmalloc.so").stdout
    installed = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if not path.is_dir()}
    headers = {f"include/{path.name}" for path in (REPOSITORY / "include").iterdir()}
    pages = {f"share/man/man{path.suffix[1:]}/{path.name}" for path in (REPOSITORY / "docs/man").iterdir()}
    rest = {"lib/libcalmalloc.a", "lib/libcalmoffload.so", "lib/libptlbmalloc2.so"}
    rest |= {"bin/calm", "libexec/calmalloc/calm-probe"}
    rest |= {"share/bash-completion/completions/calm", "share/calmalloc/gdb/calmalloc.py"}
    rest |= {"share/zsh/site-functions/_calm", "share/fish/vendor_completions.d/calm.fish"}
    assert installed >= headers | pages | rest
    # Where calm looks: beside its modules.
    link = prefix / "share/calmalloc/calm/_native/calm-probe"
    assert link.resolve() == (prefix / "libexec/calmalloc/calm-probe").resolve()
    assert [name for name in installed if FOR_RESEARCH.search(name)] == []
    entries = "entry_points.txt"  # by which calm finds its plug-in
    assert not any(
        "__pycache__" in name or (name.endswith((".c", ".txt")) and not name.endswith(entries))
        for name in installed
    )


def test_checkout_keeps_its_library_where_it_was() -> None:
    assert (BUILD / "libcalmalloc.so").resolve() == BUILD / f"libcalmalloc.so.{VERSION}"


@pytest.mark.parametrize("language", ["C", "CXX"])
@pytest.mark.parametrize("target", ["calmalloc::calmalloc", "calmalloc::static"])
def test_find_package(prefix: Path, tmp_path: Path, language: str, target: str) -> None:
    program = build(project(tmp_path / "outer", language, find(target)), f"-DCMAKE_PREFIX_PATH={prefix}")
    assert run(program).stdout == SERVED
    needed = run("readelf", "-d", program).stdout
    assert ("libcalmalloc.so.0" in needed) == (target == "calmalloc::calmalloc")


@pytest.mark.parametrize("version", ["0.2", "1.0"])
def test_find_package_of_another_version(prefix: Path, tmp_path: Path, version: str) -> None:
    folder = project(tmp_path / "outer", "C", find("calmalloc::calmalloc", version))
    errors = configure(folder, f"-DCMAKE_PREFIX_PATH={prefix}", fails=True).stderr
    assert "compatible with requested version" in errors
    assert VERSION in errors


def test_a_program_that_never_calls_malloc_has_it_all_the_same(prefix: Path, tmp_path: Path) -> None:
    """Linkers drop a library that nothing needs, but libc's own calls need the allocator."""
    source = tmp_path / "quiet.c"
    source.write_text('#include <string.h>\nint main(void) { return strdup("x") == 0; }\n')
    flags = pkg_config(prefix, "--cflags", "--libs")
    run("cc", source, "-o", tmp_path / "quiet", "-Wl,--as-needed", *flags)
    output = run(tmp_path / "quiet", LD_LIBRARY_PATH=str(prefix / "lib"), CALM_OPTIONS="report=exit").stderr
    assert '{"allocator": "calmalloc"' in output


def pkg_config(prefix: Path, *arguments: str) -> list[str]:
    command = tool("pkg-config", "pkg-config")
    return run(command, *arguments, "calmalloc", PKG_CONFIG_PATH=str(prefix / "lib/pkgconfig")).stdout.split()


def test_pkg_config(prefix: Path, tmp_path: Path) -> None:
    assert pkg_config(prefix, "--modversion") == [VERSION]
    source = SOURCES / "program.c"
    run("cc", source, "-o", tmp_path / "shared", *pkg_config(prefix, "--cflags", "--libs"))
    assert run(tmp_path / "shared", LD_LIBRARY_PATH=str(prefix / "lib")).stdout == SERVED
    flags = pkg_config(prefix, "--static", "--cflags", "--libs")
    assert "-pthread" in flags
    run("cc", "-static", source, "-o", tmp_path / "static", *flags)
    assert run(tmp_path / "static").stdout == SERVED


def test_installed_calm_finds_its_own(prefix: Path, tmp_path: Path) -> None:
    python = REPOSITORY / ".venv/bin/python"
    listed = run(python, prefix / "bin/calm", "allocators", "--json", cwd=tmp_path).stdout
    assert str(prefix.resolve()) in listed
    code = "print([line.split()[-1] for line in open('/proc/self/maps') if 'calmalloc' in line][0])"
    command = ("run", "-a", "calmalloc", "--", python, "-c", code)
    assert run(python, prefix / "bin/calm", *command, cwd=tmp_path).stdout.startswith(str(prefix.resolve()))
    assert "wall time" in run(python, prefix / "bin/calm", "stat", "--", "true", cwd=tmp_path).stderr


def test_calm_says_what_python_lacks(prefix: Path) -> None:
    tool("python3", "python3")
    result = run("/usr/bin/env", "python3", "-S", prefix / "bin/calm", "--version", fails=True)
    assert re.fullmatch(r"calm: \S+ has no module 'click': .*\n", result.stderr)


@pytest.mark.parametrize(
    ("language", "how"),
    [
        ("C", f"add_subdirectory({REPOSITORY} calmalloc)"),
        (
            "CXX",
            f"include(FetchContent)\nFetchContent_Declare(calmalloc SOURCE_DIR {REPOSITORY})\n"
            "FetchContent_MakeAvailable(calmalloc)",
        ),
    ],
    ids=["add_subdirectory-C", "FetchContent-CXX"],
)
def test_within_another_project(tmp_path: Path, language: str, how: str) -> None:
    """The outer project's warning options do not fail calmalloc, which installs nothing by default."""
    marks = ["C_STANDARD", "C_EXTENSIONS", "RUNTIME_OUTPUT_DIRECTORY", "POSITION_INDEPENDENT_CODE"]
    lines = [
        "enable_testing()",
        f"string(APPEND CMAKE_{language}_FLAGS ' {STRICT}')".replace("'", '"'),
        f"add_compile_options({STRICT.replace(' ', ';')})".replace(";", " "),
        how,
        "target_link_libraries(uses_calmalloc PRIVATE calmalloc::static)",
        f"add_executable(shared program.{'c' if language == 'C' else 'cpp'})",
        "target_link_libraries(shared PRIVATE calmalloc::calmalloc)",
        *[f'message(STATUS "mark {mark}=${{CMAKE_{mark}}}.")' for mark in marks],
        "get_directory_property(options COMPILE_OPTIONS)",
        'message(STATUS "options: ${options}.")',
        "install(TARGETS uses_calmalloc)",
    ]
    folder = project(tmp_path / "outer", language, lines)
    output = configure(folder).stdout
    for mark in marks:
        assert f"mark {mark}=." in output
    assert f"options: {STRICT.replace(' ', ';')}." in output
    program = build(folder)
    assert run(program).stdout == SERVED
    assert run(folder / "build/shared").stdout == SERVED

    made = {path.name for path in (folder / "build").iterdir()}
    assert not made & {"libcalmalloc.so", "libcalmalloc.a", "calm-probe", "listing1", "compile_commands.json"}
    everything = {path.name for path in (folder / "build").rglob("*")}
    assert not everything & {"calm-probe", "listing1", "libcalmoffload.so", "libptlbmalloc2.so", "test_heap"}
    assert "No tests were found" in run("ctest", "--test-dir", folder / "build", cwd=tmp_path).stderr
    run("cmake", "--install", folder / "build", "--prefix", tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").rglob("*") if path.is_file()] == ["uses_calmalloc"]

    # But the outer project may ask for it.
    configure(folder, "-DCALMALLOC_INSTALL=ON")
    run("cmake", "--build", folder / "build")
    run("cmake", "--install", folder / "build", "--prefix", tmp_path / "target")
    shutil.rmtree(folder)
    again = project(tmp_path / "again", language, find("calmalloc::calmalloc"))
    assert run(build(again, f"-DCMAKE_PREFIX_PATH={tmp_path / 'target'}")).stdout == SERVED


@pytest.mark.parametrize("staged", [False, True])
def test_uninstall_leaves_what_is_not_ours(tmp_path: Path, staged: bool) -> None:
    """Whatever the folders above are called; and with DESTDIR what is there alone."""
    prefix = tmp_path / "calmalloc/target"
    stage = tmp_path / "stage" if staged else Path("/")
    installed = stage / prefix.relative_to("/")
    run("cmake", "--install", BUILD, "--prefix", installed)
    others = [tmp_path / "calmalloc/work.c", installed / "lib/libother.so"]
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.touch()
    # As Python leaves behind what it compiled.
    (installed / "share/calmalloc/calm/__pycache__").mkdir()
    (installed / "share/calmalloc/calm/__pycache__/cli.cpython-311.pyc").touch()
    destination = [f"DESTDIR={stage}"] if staged else []
    run("make", "-o", "all", "uninstall", f"PREFIX={prefix}", *destination, cwd=REPOSITORY)
    assert sorted(path for path in tmp_path.rglob("*") if not path.is_dir()) == sorted(others)
