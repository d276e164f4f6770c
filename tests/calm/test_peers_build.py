"""`scripts/peers`: peers from their crates, and from source trees; small trees stand for the real ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peer_trees
import pytest
from calm_helpers import ROOT, Calm
from peer_trees import EMPTY, MIMALLOC

from calm.core import paths

CRATES = ("jemalloc", "mimalloc", "snmalloc", "rpmalloc", "tcmalloc")
GIT = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")} | {
    "GIT_COMMITTER_DATE": "2026-05-18T12:00:00Z",
    "GIT_CONFIG_GLOBAL": "/dev/null",
}


class Peers:
    """The script in a repository of its own, where nothing is built yet; tools/ comes first in its path."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tools = root / "tools"
        self.library_folder = root / "build/peers/lib"
        self.trees = root / "trees"
        for folder in ("scripts", "tools", "trees", "bench"):
            (root / folder).mkdir()
        shutil.copy(ROOT / "scripts/peers", root / "scripts")
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "bench/peers", root / "bench/peers", ignore=ignored)
        (self.tools / "python3").symlink_to(sys.executable)
        # Too old, so that no crate is built.
        self.put_rust(self.tools, "1.63.0")
        self.path = f"{self.tools}:/usr/bin:/bin"
        self.environment: dict[str, str] = {}

    def put(self, name: str, text: str) -> None:
        """A tool."""
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def put_rust(self, folder: Path, version: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("cargo", "rustc"):
            (folder / name).write_text(f"#!/bin/sh\necho 'release: {version}'\n")
            (folder / name).chmod(0o755)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": self.path, "HOME": str(self.root), **self.environment}
        command = [self.root / "scripts/peers", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def library(self, name: str) -> Path:
        return self.library_folder / f"lib{name}.so"

    def known(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.library_folder / "versions.json").read_text())[name]
        return found

    def tree(self, name: str, files: Mapping[str, str], executable: str = "") -> Path:
        """Writes a source tree."""
        for path, text in files.items():
            file = self.trees / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        if executable:
            (self.trees / name / executable).chmod(0o755)
        return self.trees / name


@pytest.fixture
def peers(tmp_path: Path) -> Peers:
    return Peers(tmp_path)


@pytest.fixture
def mimalloc(peers: Peers) -> Path:
    return peers.tree("mimalloc", MIMALLOC)


def git(tree: Path, *arguments: str) -> str:
    command = ["git", "-C", tree, *arguments]
    return subprocess.run(
        command, env=os.environ | GIT, capture_output=True, text=True, check=True
    ).stdout.strip()


def check_in(tree: Path, *tags: str) -> str:
    """Makes a checkout of a tree. Returns its commit, abbreviated."""
    if not (tree / ".git").exists():
        git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "--allow-empty", "-m", "a commit")
    for tag in tags:
        git(tree, "tag", tag)
    return git(tree, "rev-parse", "--short", "HEAD")


def contents(tree: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


@pytest.mark.parametrize("version", [None, "1.63.0", "1.89.0"])
def test_without_a_cargo_that_is_new_enough_a_line_says_so(peers: Peers, version: str | None) -> None:
    peers.path = str(peers.tools)
    for name in ("cargo", "rustc"):
        (peers.tools / name).unlink()
    if version is not None:
        peers.put_rust(peers.tools, version)
    result = peers()
    assert (result.returncode, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    assert line.startswith("scripts/peers: there is no cargo of Rust 1.90 or later: Debian's libraries")
    assert not (peers.root / "build").exists()


def test_a_crate_that_was_asked_for_needs_cargo(peers: Peers) -> None:
    result = peers("--source", "mimalloc=crate")
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("scripts/peers: mimalloc: cannot be built from a crate: there is no cargo of Rust")


@pytest.mark.parametrize("where", ["tools", ".cargo/bin"])
def test_the_newer_of_two_cargos_is_taken(peers: Peers, where: str) -> None:
    """It gets as far as looking for the other compiler, which is not there."""
    peers.path = str(peers.tools)
    peers.put_rust(peers.root / where, "1.90.0-beta.1")
    result = peers()
    assert result.returncode == 1
    assert result.stderr == "scripts/peers: there is no C++ compiler (Debian's package g++)\n"


# Builds the libraries that it is told to, but none of these names, and says where their crates are.
CARGO = """#!{python}
import json, os, pathlib, sys
root = pathlib.Path({root!r})
if sys.argv[1] == "metadata":
    crates = {crates!r}
    print(json.dumps({{"packages": [
        {{"name": name, "version": version, "manifest_path": str(root / name / "Cargo.toml")}}
        for name, version in crates.items()
    ]}}))
    raise SystemExit
release = pathlib.Path(os.environ["CARGO_TARGET_DIR"]) / "release"
release.mkdir(parents=True, exist_ok=True)
names = [name for before, name in zip(sys.argv, sys.argv[1:]) if before == "-p"]
with (root / "built").open("a") as file:
    print(*names, file=file)
for name in names:
    if name not in {broken!r}:
        (release / f"lib{{name}}.so").write_text("of a crate")
"""
VERSIONS = {
    "tikv-jemalloc-sys": "0.7.1+5.3.1-0-g81034ce",
    "libmimalloc-sys": "0.1.49",
    "snmalloc-sys": "0.7.6",
    "rpmalloc-sys": "0.2.3+b097fd0",
    "libtcmalloc-sys": "0.1.14",
}


def put_crates(peers: Peers, *broken: str) -> None:
    peers.put_rust(peers.tools, "1.95.0")
    peers.put("rustc", "#!/bin/sh\nprintf 'host: a-b-c\\nrelease: 1.95.0\\n'\n")
    crates = peers.root / "crates"
    settings = {"python": sys.executable, "root": str(crates), "crates": VERSIONS, "broken": broken}
    peers.put("cargo", CARGO.format(**settings))
    for file, text in {
        "libmimalloc-sys/c_src/mimalloc/v3/include/mimalloc.h": "#define MI_MALLOC_VERSION 30302\n",
        "rpmalloc-sys/rpmalloc/CHANGELOG": "1.4.3\n\nA change.\n",
        "libtcmalloc-sys/CHANGELOG.md": "## [0.1.15] - 2026-01-01\n\n## [0.1.14] - 2025-06-16\n",
    }.items():
        (crates / file).parent.mkdir(parents=True, exist_ok=True)
        (crates / file).write_text(text)


def crates_built(peers: Peers) -> list[str]:
    """The names in each call of cargo."""
    return (peers.root / "crates/built").read_text().splitlines()


def test_crates_are_built_once_and_their_versions_kept(peers: Peers) -> None:
    put_crates(peers)
    for _ in range(2):
        result = peers()
        assert (result.returncode, result.stderr) == (0, "")
    assert crates_built(peers) == [" ".join(CRATES)]
    assert {name: peers.known(name)["version"] for name in CRATES} == {
        "jemalloc": "5.3.1",
        "mimalloc": "3.3.2",
        "snmalloc": "0.7.6",
        "rpmalloc": "1.4.3",
        "tcmalloc": "2025-06-16",
    }
    assert peers.known("jemalloc")["crate"] == "tikv-jemalloc-sys"
    assert peers.known("jemalloc")["crate_version"] == "0.7.1"
    # A recipe that was changed is followed; its date alone says nothing.
    recipe = peers.root / "bench/peers/Cargo.toml"
    recipe.touch()
    peers()
    assert len(crates_built(peers)) == 1
    recipe.write_text(recipe.read_text() + "\n")
    peers()
    assert len(crates_built(peers)) == 2


def test_a_crate_that_cannot_be_built_does_not_stop_the_others(peers: Peers) -> None:
    put_crates(peers, "snmalloc")
    result = peers()
    assert (result.returncode, result.stderr) == (1, "scripts/peers: snmalloc could not be built\n")
    assert [name for name in CRATES if not peers.library(name).exists()] == ["snmalloc"]
    # The next call tries again.
    put_crates(peers)
    assert peers().returncode == 0
    assert peers.library("snmalloc").exists()


def test_a_tree_takes_the_place_of_its_crate_until_the_crate_is_asked_for(
    peers: Peers, mimalloc: Path
) -> None:
    put_crates(peers)
    check_in(mimalloc, "v3.4.1")
    assert peers("--source", f"mimalloc={mimalloc}").returncode == 0
    assert crates_built(peers) == ["jemalloc snmalloc rpmalloc tcmalloc"]
    result = peers()
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("of source trees: mimalloc 3.4.1 (2026-05-18); ")
    assert len(crates_built(peers)) == 1
    assert peers("--source", "mimalloc=crate").returncode == 0
    assert peers.library("mimalloc").read_text() == "of a crate"
    assert peers.known("mimalloc")["version"] == "3.3.2"
    assert "tree" not in peers.known("mimalloc")
    assert peers().stdout == ""


def test_a_release_is_built_and_listed(peers: Peers, mimalloc: Path, calm: Calm) -> None:
    before = contents(mimalloc)
    result = peers("--source", f"mimalloc={mimalloc}")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"building mimalloc from {mimalloc}\n" in result.stdout
    assert contents(mimalloc) == before
    known = peers.known("mimalloc")
    assert (known["version"], known["date"], known["tree"]) == ("3.4.1", None, str(mimalloc))
    environment = {paths.LIBRARY_PATH: str(peers.library_folder)}
    rows = {
        row["name"]: row
        for row in json.loads(calm("allocators", "--json", env=environment).stdout)["allocators"]
    }
    assert rows["mimalloc"]["library"] == str(peers.library("mimalloc"))
    assert rows["mimalloc"]["version"] == "3.4.1"
    assert rows["mimalloc"]["tree"] == str(mimalloc)
    assert calm("run", "-a", "mimalloc", "--", "true", env=environment).returncode == 0


def test_a_checkout_has_its_version_and_date_of_git(peers: Peers, mimalloc: Path, calm: Calm) -> None:
    source = f"mimalloc={mimalloc}"
    commit = check_in(mimalloc)
    peers("--source", source)
    assert peers.known("mimalloc")["version"] == f"3.4.1-g{commit}"
    git(mimalloc, "tag", "v3.4.0")
    commit = check_in(mimalloc)
    (mimalloc / "a.c").write_text(EMPTY + "\n")
    peers("--source", source)
    known = peers.known("mimalloc")
    assert known["version"] == f"3.4.0-1-g{commit}-dirty"
    assert known["date"] == "2026-05-18"
    check_in(mimalloc, "v3.4.1")
    peers("--source", source)
    assert peers.known("mimalloc")["version"] == "3.4.1"
    text = calm("allocators", "-o", peers.root / "list", env={paths.LIBRARY_PATH: str(peers.library_folder)})
    assert text.returncode == 0
    assert "3.4.1 (2026-05-18)" in (peers.root / "list").read_text()


def test_a_name_before_the_number_is_no_part_of_the_version(peers: Peers, mimalloc: Path) -> None:
    check_in(mimalloc, "mimalloc-3.4.2")
    peers("--source", f"mimalloc={mimalloc}")
    assert peers.known("mimalloc")["version"] == "3.4.2"


def test_a_release_in_a_repository_of_others_is_no_checkout(peers: Peers, mimalloc: Path) -> None:
    (peers.trees / "unrelated").touch()
    (peers.trees / ".gitignore").write_text("mimalloc\n")
    check_in(peers.trees, "v9.9.9")
    peers("--source", f"mimalloc={mimalloc}")
    known = peers.known("mimalloc")
    assert (known["version"], known["date"]) == ("3.4.1", None)


def test_what_an_earlier_build_left_in_a_checkout_is_ignored(peers: Peers, mimalloc: Path) -> None:
    (mimalloc / ".gitignore").write_text("/CMakeCache.txt\n")
    check_in(mimalloc)
    (mimalloc / "CMakeCache.txt").write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/elsewhere\n")
    # A file that git does not know yet is a part of the tree.
    (mimalloc / "more.h").write_text("enum { MORE };\n")
    (mimalloc / "a.c").write_text('#include "more.h"\n' + EMPTY)
    result = peers("--source", f"mimalloc={mimalloc}")
    assert (result.returncode, result.stderr) == (0, "")


def test_a_tree_is_built_again_only_if_it_changed(peers: Peers, mimalloc: Path) -> None:
    def is_built() -> bool:
        result = peers("--source", f"mimalloc={mimalloc}")
        assert result.returncode == 0
        return "building mimalloc" in result.stdout

    assert is_built()
    assert not is_built()
    (mimalloc / "a.c").touch()
    assert not is_built()
    (mimalloc / "a.c").write_text(EMPTY + "\n")
    assert is_built()
    (mimalloc / "a.c").rename(mimalloc / "b.c")
    (mimalloc / "a.c").symlink_to("b.c")
    assert is_built()
    peers.library("mimalloc").unlink()
    assert is_built()


def test_an_empty_directory_beside_the_files_does_not_matter(peers: Peers, mimalloc: Path) -> None:
    (mimalloc / "empty").mkdir()
    (mimalloc / "dangling").symlink_to("nowhere")
    assert peers("--source", f"mimalloc={mimalloc}").returncode == 0


BAD = {
    (
        "--source",
        "hoard={tree}",
    ): "unknown peer 'hoard': known are jemalloc, mimalloc, snmalloc, rpmalloc, tcmalloc, ",
    ("--source", "mimalloc"): "--source mimalloc is not NAME=DIR",
    ("--source", "mimalloc="): "--source mimalloc= is not NAME=DIR",
    ("--source", "={tree}"): "--source ={tree} is not NAME=DIR",
    ("--source",): "argument --source: expected one argument",
    ("--tree", "mimalloc={tree}"): "unrecognized arguments: --tree mimalloc={tree}",
    ("--source", "mimalloc={tree}", "--source", "mimalloc={tree}"): "mimalloc is given twice",
    ("--source", "mimalloc={tree}/none"): "{tree}/none is not a directory",
    ("--source", "mimalloc={tree}/a.c"): "{tree}/a.c is not a directory",
    ("--source", "jemalloc={tree}"): "{tree} has no file include/jemalloc/jemalloc.sh",
    ("--source", "scudo={tree}"): "{tree} has no file compiler-rt/lib/scudo/standalone/wrappers_c.cpp",
    (
        "--source",
        "scudo=crate",
    ): "scudo has no crate; these have: jemalloc, mimalloc, snmalloc, rpmalloc, tcmalloc",
    ("--source", "abseil={tree}"): "nothing that is built needs abseil",
    ("--source", "tcmalloc={tcmalloc}"): "tcmalloc needs a tree of abseil, too: --source abseil=DIR",
    ("--source", "tcmalloc={tcmalloc}", "--source", "abseil={tree}"): "{tree} has no file absl/base/config.h",
}


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_what_cannot_be_meant_is_refused_in_a_line(
    arguments: tuple[str, ...], peers: Peers, mimalloc: Path
) -> None:
    names = {"tree": mimalloc, "tcmalloc": peers.tree("tcmalloc", {"tcmalloc/tcmalloc_helpers.cmake": ""})}
    result = peers(*(argument.format(**names) for argument in arguments))
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("scripts/peers: " + BAD[arguments].format(**names))
    assert not (peers.root / "build").exists()


def test_a_build_that_fails_names_its_log_and_leaves_what_was_there(peers: Peers, mimalloc: Path) -> None:
    source = f"mimalloc={mimalloc}"
    peers("--source", source)
    before = peers.library("mimalloc").read_bytes(), peers.known("mimalloc")
    (mimalloc / "a.c").write_text("#error as it was meant to\n")
    rpmalloc = peers.tree("rpmalloc", {"rpmalloc/rpmalloc.c": EMPTY})
    result = peers("--source", source, "--source", f"rpmalloc={rpmalloc}")
    log = peers.root / "build/peers/trees/mimalloc.log"
    assert result.returncode == 1
    assert result.stderr == f"scripts/peers: mimalloc could not be built: see {log}\n"
    assert "as it was meant to" in log.read_text()
    assert (peers.library("mimalloc").read_bytes(), peers.known("mimalloc")) == before
    # The others are built.
    assert peers.library("rpmalloc").exists()


def test_a_library_of_another_name_is_none(peers: Peers, mimalloc: Path) -> None:
    lists = mimalloc / "CMakeLists.txt"
    lists.write_text(lists.read_text() + "set_target_properties(mimalloc PROPERTIES OUTPUT_NAME another)\n")
    result = peers("--source", f"mimalloc={mimalloc}")
    assert result.returncode == 1
    assert result.stderr.startswith(
        "scripts/peers: mimalloc could not be built: no libmimalloc.so came of it; see "
    )


def test_a_library_that_no_program_runs_with_is_refused(peers: Peers, mimalloc: Path) -> None:
    (mimalloc / "a.c").write_text("int nowhere(void);\nint (*a_peer)(void) = nowhere;\n")
    result = peers("--source", f"mimalloc={mimalloc}")
    assert result.returncode == 1
    assert result.stderr.startswith("scripts/peers: mimalloc was built, but no program runs with ")
    assert not peers.library("mimalloc").exists()


def found(tool: str) -> str:
    """A tool's path; a compiler's own, not that of a cache which would look for the compiler in its turn."""
    places = (place for place in os.get_exec_path() if Path(place).name != "ccache")
    return str(shutil.which(tool, path=os.pathsep.join(places)))


def test_a_missing_tool_is_named(peers: Peers, mimalloc: Path) -> None:
    for name in ("git", "cat"):
        (peers.tools / name).symlink_to(found(name))
    peers.path = str(peers.tools)
    result = peers("--source", f"mimalloc={mimalloc}")
    assert (result.returncode, result.stderr) == (1, "scripts/peers: mimalloc needs cmake and make\n")


def test_only_a_checkout_of_jemalloc_needs_autoconf(peers: Peers) -> None:
    files = {**peer_trees.JEMALLOC, "autogen.sh": peer_trees.JEMALLOC_SCRIPT}
    tree = peers.tree("jemalloc", files, "autogen.sh")
    for name in ("make", "cat", "sh", "mkdir", "cc", "as", "ld"):
        (peers.tools / name).symlink_to(found(name))
    peers.path = str(peers.tools)
    result = peers("--source", f"jemalloc={tree}")
    assert (result.returncode, result.stderr) == (1, "scripts/peers: jemalloc needs autoconf\n")
    (tree / "autogen.sh").rename(tree / "configure")
    result = peers("--source", f"jemalloc={tree}")
    assert (result.returncode, result.stderr) == (0, "")


def test_without_git_a_checkout_is_built_as_a_release(peers: Peers) -> None:
    rpmalloc = peers.tree("rpmalloc", {"rpmalloc/rpmalloc.c": EMPTY, "CHANGELOG": "2.0.1\n\nA change.\n"})
    check_in(rpmalloc)
    for name in ("cc", "as", "ld", "cat"):
        (peers.tools / name).symlink_to(found(name))
    peers.path = str(peers.tools)
    result = peers("--source", f"rpmalloc={rpmalloc}")
    assert (result.returncode, result.stderr) == (0, "")
    known = peers.known("rpmalloc")
    assert (known["version"], known["date"]) == ("2.0.1", None)


def test_no_compiler_with_c23_is_a_line(peers: Peers) -> None:
    tree = peers.tree("hardened_malloc", {"h_malloc.c": EMPTY})
    (peers.tools / "make").symlink_to(str(shutil.which("make")))
    # It does not have C23; and one that does not exist is not tried.
    peers.put("cc", "#!/bin/sh\nexit 1\n")
    peers.path = str(peers.tools)
    result = peers("--source", f"hardened_malloc={tree}")
    assert result.returncode == 1
    needed = "a compiler with -std=c23: gcc 14, or clang 18 (Debian's clang-19)"
    assert result.stderr == f"scripts/peers: hardened_malloc needs {needed}\n"


def build_jemalloc(peers: Peers, script: str, files: Mapping[str, str], *tags: str) -> tuple[str, str]:
    """The version, and what the script was told."""
    tree = peers.tree(
        "jemalloc", {**peer_trees.JEMALLOC, script: peer_trees.JEMALLOC_SCRIPT, **files}, script
    )
    peers.put("autoconf", "#!/bin/sh\n")
    if tags:
        check_in(tree, *tags)
        check_in(tree)
    result = peers("--source", f"jemalloc={tree}")
    assert (result.returncode, result.stderr) == (0, "")
    told = (peers.root / "build/peers/trees/jemalloc/jemalloc/arguments").read_text().strip()
    return peers.known("jemalloc")["version"], told


def test_jemalloc_of_a_checkout_knows_its_version_and_has_the_batch(peers: Peers) -> None:
    version, told = build_jemalloc(peers, "autogen.sh", {}, "5.3.0")
    assert version.startswith("5.3.0-1-g")
    assert told == f"autogen.sh --with-version={version} --with-experimental-sys-process-madvise=440"


def test_jemalloc_of_a_tag_has_a_version_that_its_script_takes(peers: Peers) -> None:
    tree = peers.tree(
        "jemalloc", {**peer_trees.JEMALLOC, "autogen.sh": peer_trees.JEMALLOC_SCRIPT}, "autogen.sh"
    )
    peers.put("autoconf", "#!/bin/sh\n")
    check_in(tree, "5.3.1")
    assert peers("--source", f"jemalloc={tree}").returncode == 0
    assert peers.known("jemalloc")["version"] == "5.3.1"
    told = (peers.root / "build/peers/trees/jemalloc/jemalloc/arguments").read_text()
    assert "--with-version=5.3.1-0-g0 " in told


def test_jemalloc_of_a_release_is_configured_without_what_it_does_not_know(peers: Peers) -> None:
    files = {"VERSION": "5.3.2-0-g0123456789\n", "configure.ac": ""}
    assert build_jemalloc(peers, "configure", files) == ("5.3.2", "configure")


def test_jemalloc_without_a_file_of_its_version(peers: Peers) -> None:
    version, told = build_jemalloc(peers, "configure", {})
    assert version == "5.3.1"
    assert "--with-version=5.3.1-0-g0 " in told


STAND_INS = {
    "snmalloc": ("0.7.4", peer_trees.SNMALLOC),
    "rpmalloc": ("2.0.1", peer_trees.RPMALLOC),
    "gperftools": ("2.18.1", peer_trees.GPERFTOOLS),
    "scudo": ("21.1.2", peer_trees.SCUDO),
    "hardened_malloc": (None, peer_trees.HARDENED_MALLOC),
    "tcmalloc": (None, peer_trees.TCMALLOC),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_each_recipe(name: str, peers: Peers) -> None:
    version, files = STAND_INS[name]
    tree = peers.tree(name, files, "autogen.sh" if "autogen.sh" in files else "")
    for tool in ("autoconf", "automake", "libtoolize"):
        peers.put(tool, "#!/bin/sh\n")
    # A compiler that has C23.
    peers.put(
        "cc23",
        '#!/bin/sh\nfor word; do shift; [ "$word" = -std=c23 ] || set -- "$@" "$word"; done\ncc "$@"\n',
    )
    peers.environment = {"CC": "cc23"} if name == "hardened_malloc" else {}
    also = ["--source", f"abseil={peers.tree('abseil', peer_trees.ABSEIL)}"] if name == "tcmalloc" else []
    before = contents(tree)
    for is_built in (True, False):
        result = peers("--source", f"{name}={tree}", *also)
        logs = [log.read_text() for log in (peers.root / "build/peers/trees").glob("*.log")]
        assert (result.returncode, result.stderr) == (0, ""), logs
        assert (f"building {name} from" in result.stdout) == is_built
    assert contents(tree) == before
    assert peers.library(name).is_file()
    assert peers.known(name)["version"] == version


@pytest.mark.parametrize(
    ("number", "version"),
    [
        ("30403", "3.4.3"),
        ("20401", "2.4.1"),
        ("3206", "3.2.6"),
        ("3010", "3.0.10"),
        ("316", "3.1.6"),
        ("217", "2.1.7"),
    ],
)
def test_numbers_of_mimalloc(number: str, version: str, peers: Peers) -> None:
    header = f"#define MI_MALLOC_VERSION {number}   // major + 2 digits minor\n"
    tree = peers.tree("mimalloc", {**MIMALLOC, "include/mimalloc.h": header})
    peers("--source", f"mimalloc={tree}")
    assert peers.known("mimalloc")["version"] == version


@pytest.mark.parametrize("target", ["peers", "bench"])
def test_make_passes_the_sources_on(target: str, tmp_path: Path) -> None:
    command = ["make", "-n", "-C", str(ROOT), target, "PEER_SOURCES=mimalloc=/a/b rpmalloc=crate"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "scripts/peers --source mimalloc=/a/b --source rpmalloc=crate\n" in printed
    printed = subprocess.run(command[:-1], capture_output=True, text=True, check=True).stdout
    assert "scripts/peers\n" in printed.replace("peers \n", "peers\n")
