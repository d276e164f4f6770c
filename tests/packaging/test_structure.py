"""The layers of src/, and the rooms: no circles, and no use of what they may not use (scripts/structure).

And the tests, which mirror the tree.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from packaging_helpers import BUILD, REPOSITORY, run, tool

SCRIPT = REPOSITORY / "scripts/structure"


@pytest.fixture(scope="module")
def structure() -> Any:
    loader = importlib.machinery.SourceFileLoader("structure_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # where its dataclass looks for names
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tree(structure: Any) -> Any:
    return structure.read(REPOSITORY, BUILD)


def none(findings: list[str]) -> None:
    assert not findings, "\n".join(findings)


def test_files_form_no_circle(tree: Any) -> None:
    none(tree.in_circles())


def test_folders_form_no_circle(tree: Any) -> None:
    none(tree.in_circles(tree.place_of))


def test_no_layer_uses_one_above_it(tree: Any) -> None:
    none(tree.upwards())


def test_no_layer_uses_one_that_it_is_beside(tree: Any) -> None:
    assert tree.siblings == {"cache": "heap"}
    none(tree.sideways())


def test_optional_features_are_used_by_their_plug_ins_only(tree: Any) -> None:
    none(tree.unplugged())


def test_the_list_of_layers_is_complete(tree: Any) -> None:
    none(tree.unlisted())


def test_no_room_uses_one_that_it_may_not_use(tree: Any) -> None:
    none(tree.across())


def test_each_room_has_a_page(tree: Any) -> None:
    assert {"src", "offload", "calm", "bench", "tests"} <= set(tree.rooms)
    none(tree.unexplained())


OTHERS = re.compile(
    r"[Oo]ffload|calm_colored|[Cc]olored memory|colored/|ptlbmalloc2|research/|heap_readers|kernel/abis"
    r"|(?:workloads|bench)/|\bcalm (?:bench|c[ao]l\w+|compare|ex\w+|heap|lab|pr\w+|run|stat|t\w+)\b"
)


def test_src_names_no_other_room() -> None:
    """But for the option that has moved, and one paragraph of the page."""
    found = []
    for path in sorted((REPOSITORY / "src").rglob("*")):
        if path.suffix in (".c", ".h", ".def", ".txt"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if OTHERS.search(line) and not line.startswith("MOVED_OPTION("):
                    found.append(f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}")
    paragraphs = [
        part for part in (REPOSITORY / "src/README.md").read_text().split("\n\n") if OTHERS.search(part)
    ]
    none([*found, *paragraphs[1:]])


# ---- locks ----


def test_the_page_lists_the_locks_in_their_order() -> None:
    header = (REPOSITORY / "src/os/lock.h").read_text()
    ranks = re.findall(r"^ {4}(LOCK_\w+),", header, re.MULTILINE)
    assert len(ranks) > 8
    assert ranks.pop(0) == "LOCK_UNRANKED"
    assert (
        re.findall(r"^\| `(LOCK_\w+)` \|", (REPOSITORY / "src/README.md").read_text(), re.MULTILINE) == ranks
    )


def test_each_lock_has_a_rank() -> None:
    """One that has none is not checked; and none is given to what is no lock of src/."""
    texts = [path.read_text() for path in (REPOSITORY / "src").glob("*/*.[ch]") if path.stem != "lock"]
    declared = [name for text in texts for name in re.findall(r"^.*\bstruct lock (\w+)(?:;| = )", text, re.M)]
    ranked = [
        rank
        for text in texts
        for rank in re.findall(r"(?:LOCK_OF\(|lock_set_rank\([^;]*, )(LOCK_\w+)\)", text)
    ]
    # The heap profile's table of samples is a structure whose lock is given its rank with it.
    assert len(declared) == len(ranked) == len(set(ranked)), (declared, ranked)


def test_each_lock_of_the_offload_library_has_a_rank() -> None:
    texts = [path.read_text() for path in (REPOSITORY / "offload").glob("*.[ch]")]
    declared = [name for text in texts for name in re.findall(r"\bstruct lock (\w+);", text)]
    ranked = [rank for text in texts for rank in re.findall(r"lock_set_rank\([^;]*, (LOCK_\w+)\)", text)]
    listed = re.findall(r"^\| `(LOCK_\w+)` \|", (REPOSITORY / "offload/README.md").read_text(), re.MULTILINE)
    assert len(declared) == len(ranked) > 0, (declared, ranked)
    assert sorted(set(ranked)) == listed


# ---- tests ----

MAX_TEST_LINES = 1000


@pytest.mark.skipif(BUILD.name != "release" or platform.machine() != "x86_64", reason="of other sizes")
def test_the_library_has_few_data() -> None:
    # A conservative collector of garbage scans the data of all libraries.
    with (BUILD / "libcalmalloc.so").open("rb") as file:
        sections = [ELFFile(file).get_section_by_name(name) for name in (".data", ".bss")]
        assert sum(section["sh_size"] for section in sections) <= 32 << 10


def test_no_test_file_is_long() -> None:
    """So that a reader finds what tests a file, and a failure names more than a layer."""
    kinds = (".py", ".c", ".h", ".cpp")
    files = [path for path in (REPOSITORY / "tests").rglob("*") if path.suffix in kinds]
    assert len(files) > 100
    lines = {path: path.read_bytes().count(b"\n") for path in files}
    none([f"{path}: {count} lines" for path, count in lines.items() if count > MAX_TEST_LINES])


def test_c_tests_are_in_the_folder_of_what_they_test(structure: Any) -> None:
    """A layer of src/, or a folder beside it; the rest is helpers."""
    layers = structure.LAYER.findall((REPOSITORY / "src/README.md").read_text())
    assert "heap" in layers
    folders = [path.name for path in (REPOSITORY / "tests/c").iterdir() if path.is_dir()]
    none([name for name in folders if name not in (*layers, "helpers") and not (REPOSITORY / name).is_dir()])


# ---- what the script finds ----

PAGE = """\
1. `low/` the ground
2. `extra/` a feature
3. `high/` the roof

| feature | left out by | plugged in by |
| --- | --- | --- |
| `extra/` | `EXTRA=OFF` | `high/plug` |
"""
ROOMS = """\
| room | what it is | uses |
| --- | --- | --- |
| `src/` | the house | |
| `ptlbmalloc2/` | a hut | `src/low/`, `src/high/roof.h` |
| `offload/` | a shed | `src/` |
| `research/colored/` | a greenhouse | `src/` |
| `calm/` | a tool | |
| `bench/` | a yard | `calm/` |
| `tests/` | a hedge | all |
| `gone/` | a hole | |
"""
SOUND = {
    "src/low/ground.h": "int ground(void);\n",
    "src/low/ground.c": '#include "low/ground.h"\nint ground(void) { return 1; }\n',
    "src/low/cellar.h": "static inline int cellar(void) { return 0; }\n",
    "src/extra/extra.h": "int extra(void);\n",
    "src/extra/extra.c": '#include "low/ground.h"\nint extra(void);\nint extra(void) { return ground(); }\n',
    "src/high/plug.c": '#include "extra/extra.h"\nint plug(void);\nint plug(void) { return extra(); }\n',
    "src/high/roof.c": '#include "low/ground.h"\nint roof(void);\nint roof(void) { return ground(); }\n',
    "ptlbmalloc2/roof.c": '#include "low/ground.h"\nint roof(void);\nint roof(void) { return ground(); }\n',
    "ptlbmalloc2/user.c": "int roof(void);\nint user(void);\nint user(void) { return roof(); }\n",
    "ptlbmalloc2/README.md": "",
    "offload/shed.c": '#include "high/roof.h"\nint shed(void);\nint shed(void) { return plug(); }\n',
    "offload/README.md": "",
    "src/high/roof.h": "int roof(void);\nint plug(void);\n",
    "calm/cli.py": "import os\nfrom calm import cli\n",
    "calm/README.md": "",
    "bench/lib/one.py": "from calm import cli\nimport lib\n",
    "bench/README.md": "",
    "tests/test_one.py": "import lib\nfrom calm import cli\n",
    "tests/README.md": "",
}


def calls(name: str, called: str) -> str:
    """A source that defines a function, which calls another."""
    return f"int {called}(void);\nint {name}(void);\nint {name}(void) {{ return {called}(); }}\n"


def make(root: Path, changes: dict[str, str]) -> Path:
    """A tree of small files, compiled."""
    files = SOUND | {"src/README.md": PAGE, "CONTRIBUTING.md": ROOMS} | changes
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    folder, entries = root / "build/release", []
    includes = (f"-I{root}/src", f"-I{root}", f"-I{root}/research")
    for name in files:
        if name.endswith(".c"):
            made = str(Path(name).with_suffix(".o"))
            command = [tool("cc", "gcc"), "-O0", *includes, "-c", f"{root}/{name}", "-o", made]
            (folder / made).parent.mkdir(parents=True, exist_ok=True)
            run(*command, cwd=folder)
            entries.append({"directory": str(folder), "command": " ".join(command), "file": f"{root}/{name}"})
    (folder / "compile_commands.json").write_text(json.dumps(entries))
    return root


def test_a_sound_tree(tmp_path: Path) -> None:
    found = run(SCRIPT, "--root", make(tmp_path, {})).stdout.splitlines()
    assert [line.split() for line in found] == [
        ["layer", "files", "lines", "circles", "largest"],
        ["low", "2", "4", "0", "0"],
        ["extra", "1", "4", "0", "0"],
        ["high", "2", "8", "0", "0"],
        ["ptlbmalloc2", "2", "6", "0", "0"],
        ["offload", "1", "3", "0", "0"],
        ["all", "8", "25", "0", "0"],
    ]


INCLUDES_ROOF = '#include "high/roof.h"\n'


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            {"src/low/ground.c": calls("ground", "deep"), "src/low/deep.c": calls("deep", "ground")},
            [
                "circle of low/deep, low/ground",
                "    low/deep uses low/ground: ground",
                "    low/ground uses low/deep: deep",
            ],
            id="files that call each other",
        ),
        pytest.param(
            {"src/low/cellar.h": '#include "low/ground.h"\n', "src/low/ground.c": '#include "cellar.h"\n'},
            [
                "circle of low/cellar, low/ground",
                "    low/cellar uses low/ground: low/ground.h",
                "    low/ground uses low/cellar: cellar.h",
            ],
            id="headers and sources that include each other",
        ),
        pytest.param(
            {
                "src/low/one.c": calls("one", "two"),
                "src/low/two.c": calls("two", "three"),
                "src/low/three.h": '#include "low/one.h"\n',
                "src/low/one.h": "",
                "src/low/three.c": "int three;\n",
            },
            ["circle of low/one, low/three, low/two"],
            id="a circle of includes and calls",
        ),
        pytest.param(
            {"src/low/deep.c": calls("deep", "roof")},
            [
                "circle of extra, high, low",
                "    high/roof uses low/ground: low/ground.h, ground",
                "    low/deep uses high/roof: roof",
                "upwards: low/deep uses high/roof: roof",
            ],
            id="a call upwards",
        ),
        pytest.param(
            {"src/low/cellar.h": INCLUDES_ROOF, "src/high/roof.h": ""},
            ["upwards: low/cellar uses high/roof: high/roof.h"],
            id="an include upwards",
        ),
        pytest.param(
            {"src/high/deep.c": calls("deep", "user")},
            ["another room: high/deep uses ptlbmalloc2/user: user"],
            id="a use of ptlbmalloc2",
        ),
        pytest.param(
            {"ptlbmalloc2/user.c": calls("user", "plug")},
            ["another room: ptlbmalloc2/user uses high/plug: plug"],
            id="a use of a part that is not allowed",
        ),
        pytest.param(
            {"offload/shed.c": '#include "ptlbmalloc2/hut.h"\n', "ptlbmalloc2/hut.h": ""},
            ["another room: offload/shed uses ptlbmalloc2/hut: ptlbmalloc2/hut.h"],
            id="an include from another room",
        ),
        pytest.param(
            {"calm/probe/main.c": '#include "low/ground.h"\n'},
            ["another room: calm/probe/main uses low/ground: low/ground.h"],
            id="an include in a room that uses none",
        ),
        pytest.param(
            {"calm/cli.py": "from lib.one import two\n", "bench/figures": "#!python3\nimport test_one\n"},
            [
                "another room: calm/cli.py uses bench/lib: imported",
                "another room: bench/figures uses tests/test_one: imported",
            ],
            id="imports",
        ),
        pytest.param(
            {"bench/CMakeLists.txt": "add_library(x ${PROJECT_SOURCE_DIR}/src/low/ground.c)\n"},
            ["another room: bench/CMakeLists.txt uses low/ground: built from"],
            id="a source of another room",
        ),
        pytest.param(
            {"CONTRIBUTING.md": ROOMS + "| `src/low/` | a cave | |\n"},
            ["src/low/ has no README.md"],
            id="a page",
        ),
        pytest.param(
            {"research/colored/deep.c": calls("deep", "user")},
            ["another room: research/colored/deep uses ptlbmalloc2/user: user"],
            id="a library that uses another",
        ),
        pytest.param(
            {
                "research/colored/one.c": calls("one", "two") + '#include "colored/two.h"\n',
                "research/colored/two.h": "",
                "research/colored/two.c": calls("two", "one"),
            },
            [
                "circle of research/colored/one, research/colored/two",
                "    research/colored/one uses research/colored/two: colored/two.h, two",
            ],
            id="a circle within a library",
        ),
        pytest.param(
            {"src/README.md": PAGE.replace("`high/`", "`high/`, beside `low/`:")},
            ["sideways: high/roof uses low/ground: low/ground.h, ground"],
            id="a use of the layer beside",
        ),
        pytest.param(
            {"src/high/other.c": calls("other", "extra")},
            ["no plug-in: high/other uses extra/extra: extra"],
            id="a feature that is called",
        ),
        pytest.param(
            {"src/high/other.c": '#include "extra/extra.h"\n'},
            ["no plug-in: high/other uses extra/extra: extra/extra.h"],
            id="a feature that is included",
        ),
        pytest.param(
            {"src/new/new.c": "int new;\n"}, ["new/ is not listed in src/README.md"], id="a new folder"
        ),
        pytest.param(
            {"src/README.md": PAGE.replace("high/plug", "high/plug`, `high/gone") + "4. `sky/` none\n"},
            [
                "sky/, listed in src/README.md, is not there",
                "high/gone, listed in src/README.md, is not there",
            ],
            id="lines without files",
        ),
    ],
)
def test_findings(changes: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    found = run(SCRIPT, "--root", make(tmp_path, changes), fails=True).stdout.splitlines()
    for line in expected:
        assert line in found, found


def test_a_tree_that_is_not_built(tmp_path: Path) -> None:
    root = make(tmp_path, {})
    (root / "build/release/src/low/ground.o").unlink()
    assert "no object of low/ground: run make" in run(SCRIPT, "--root", root, fails=True).stderr
    (root / "build/release/compile_commands.json").unlink()
    assert "is not built: run make" in run(SCRIPT, "--root", root, fails=True).stderr
