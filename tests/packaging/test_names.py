"""Names in src/ and offload/: each is of one thing; and all files of src/ compile as one, src/all.c."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from packaging_helpers import BUILD, REPOSITORY, SOURCES, run, tool

ROOMS = ("src", "offload", "ptlbmalloc2", "research/colored")
FEATURES = ("CALM_PROFILE",)
INCLUDES = (f"-I{REPOSITORY}/src", f"-I{REPOSITORY}/include")
ALL = REPOSITORY / "src/all.c"


@cache
def objects() -> list[tuple[Path, Path]]:
    """The sources of the libraries, with their object files in the build."""
    found = []
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        made = Path(words[words.index("-o") + 1])
        beside_malloc = "-DCALM_WITHOUT_MALLOC" in words  # the same sources once more
        source = Path(entry["file"])
        own = any(made.is_relative_to(room) and source.is_relative_to(REPOSITORY / room) for room in ROOMS)
        if own and not beside_malloc:
            found.append((source, Path(entry["directory"]) / made))
    return found


def test_no_two_files_have_a_static_function_of_the_same_name() -> None:
    """Nor a static function or variable that is another's global one, in whichever library."""
    source = {str(made): path for path, made in objects()}
    assert len(source) > 100
    printed = run("nm", "--format=posix", "--print-file-name", *source).stdout
    users: dict[str, set[Path]] = defaultdict(set)
    local = set()
    for line in printed.splitlines():
        made, _, rest = line.partition(": ")
        symbol, kind = rest.split()[:2]
        if kind not in "tTdDbBrR" or re.search(r"^\.|\.\d+$", symbol):  # a label; within a function
            continue
        # What the compiler made of a function: NAME.constprop.0
        name = symbol.split(".")[0]
        users[name].add(source[made])
        if kind.islower():
            local.add(name)
    headers = (*(REPOSITORY / "src").glob("*/*.h"), *(REPOSITORY / "offload").glob("*.h"))
    inline = "\n".join(path.read_text() for path in headers)
    in_headers = set(re.findall(r"^static inline [^;{]*?(\w+)\(", inline, re.MULTILINE))
    shared = {name: users[name] for name in local - in_headers if len(users[name]) > 1}
    assert shared == {}


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("features", [(), FEATURES], ids=["without features", "with all features"])
def test_all_files_compile_as_one(compiler: str, features: tuple[str, ...], tmp_path: Path) -> None:
    """Without warnings; and a program that is linked with it has its malloc."""
    command = [tool(compiler, compiler), "-Wall", "-Wextra", "-Werror", *INCLUDES]
    defines = [f"-D{feature}" for feature in features]
    run(*command, "-O2", *defines, "-c", ALL, "-o", tmp_path / "all.o")
    program = tmp_path / "program"
    run(*command, SOURCES / "program.c", tmp_path / "all.o", "-o", program)
    assert run(program).stdout == "served by calmalloc\n"
    report = subprocess.run(
        [program], env={"CALM_OPTIONS": "report=exit"}, capture_output=True, text=True, check=True
    ).stderr
    assert '"allocator": "calmalloc"' in report


def test_the_one_file_has_what_the_archive_has() -> None:
    """In the order of the layers."""
    listed = re.findall(r'^#include "((\w+)/\w+)\.c"$', ALL.read_text(), re.MULTILINE)
    shared = {
        str(path.relative_to(REPOSITORY / "src").with_suffix(""))
        for path, made in objects()
        if "calmalloc.dir" in made.parts
    }
    assert shared
    there = {str(path.relative_to(REPOSITORY / "src").with_suffix("")) for path in ALL.parent.glob("*/*.c")}
    assert [name for name, _ in listed] == list(dict.fromkeys(name for name, _ in listed))
    assert {name for name, _ in listed} == there - shared
    layers = re.findall(r"^\d+\. `(\w+)/`", (REPOSITORY / "src/README.md").read_text(), re.MULTILINE)
    order = [layers.index(layer) for _, layer in listed]
    assert order == sorted(order)
