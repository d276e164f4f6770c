"""A tree of published benchmark programs that the user has: `--source NAME=DIR`.

Its programs are built by its own CMake files from a copy, in a folder of ours; the tree is only read.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from calm.core.environment import clean_environment
from calm.core.errors import USAGE, CalmError
from research.bench.results import Source

MIMALLOC_BENCH = "mimalloc-bench"
NAMES = (MIMALLOC_BENCH,)
METAVAR = f"{MIMALLOC_BENCH}=DIR"

# Named by the tree's CMake files, and not part of the tree: their licence forbids to redistribute them.
_WITHHELD = ("shbench/sh6bench-new.c", "shbench/sh8bench-new.c")
_STUB = "int main(void) { return 0; }\n"
_STAMP = "made-by"
_ERROR = re.compile(r"\berror\b|No rule to make target", re.IGNORECASE)


@dataclass(frozen=True)
class SourceTree:
    """A tree whose `bench` folder has the programs."""

    name: str
    folder: Path

    @property
    def bench(self) -> Path:
        return self.folder / "bench"

    def has_source(self, name: str) -> bool:
        """Whether a file of the bench folder is there, and no stub in its place."""
        path = self.bench / name
        return path.is_file() and b"malloc" in path.read_bytes()


def open_tree(text: str) -> SourceTree:
    """The tree that NAME=DIR means. Raises CalmError with USAGE if there is none."""
    name, equals, folder = text.partition("=")
    if not equals or not folder:
        raise CalmError(f"--source {text}: is not {METAVAR}", USAGE)
    if name not in NAMES:
        raise CalmError(f"--source {text}: no such source: {name} (known: {', '.join(NAMES)})", USAGE)
    tree = SourceTree(name, Path(folder).resolve())
    if not tree.folder.is_dir():
        raise CalmError(f"--source {text}: {folder} is not a directory", USAGE)
    if not (tree.bench / "CMakeLists.txt").is_file():
        raise CalmError(f"--source {text}: {folder} has no bench/CMakeLists.txt", USAGE)
    return tree


def _git(tree: SourceTree, *arguments: str) -> str | None:
    """What git prints about the tree; None if it is no git checkout."""
    # Neither a repository around the tree, nor one that the caller's variables name.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CEILING_DIRECTORIES": str(tree.folder.parent), "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(tree.folder), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def describe(tree: SourceTree) -> Source:
    """Which version of the programs the tree has."""
    version = _git(tree, "describe", "--tags", "--always")
    changed = version and _git(tree, "status", "--porcelain", "--untracked-files=no", "--", "bench")
    date = _git(tree, "log", "-1", "--format=%cs")
    return Source(tree.name, f"{version} with changes" if changed else version, date)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _digest(tree: SourceTree) -> str:
    """Of all that a build depends on: the tree's files, and how they are built."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in _files(tree.bench):
        digest.update(f"{path.relative_to(tree.bench)}\0".encode(errors="surrogateescape"))
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _copy(tree: SourceTree, to: Path) -> None:
    # Without modes and times: those of a read-only tree would be in the way.
    for path in _files(tree.bench):
        copy = to / path.relative_to(tree.bench)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for name in _WITHHELD:
        if not (stub := to / name).exists():
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.write_text(_STUB)


def sources(name: str, folder: Path) -> Path:
    """Where the copy of a tree's bench folder is, in the folder for inputs."""
    return folder / name / "source"


def binaries(name: str, folder: Path) -> Path:
    """Where the tree's programs are built to."""
    return folder / name / "build"


def build(tree: SourceTree, targets: Iterable[str], folder: Path) -> None:
    """Builds programs of the tree in the folder for inputs. Raises CalmError with USAGE if that fails.

    All begins anew if the tree has changed since the last time, or is another one.
    """
    place = (folder / tree.name).absolute()
    source, binary = sources(tree.name, folder), binaries(tree.name, folder)
    try:
        digest, stamp = _digest(tree), place / _STAMP
        if not stamp.is_file() or stamp.read_text() != digest:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            _copy(tree, source)
            click.echo(f"calm: building programs of {tree.name} in {place}", err=True)
            _run(tree, place, "cmake", "-S", source, "-B", binary, "-DCMAKE_BUILD_TYPE=Release")
            stamp.write_text(digest)
        cpus = str(len(os.sched_getaffinity(0)))
        _run(tree, place, "cmake", "--build", binary, "--parallel", cpus, "--target", *targets)
    except OSError as error:
        raise CalmError(f"--source {tree.name}={tree.folder}: cannot be built: {error}", USAGE) from error


def _run(tree: SourceTree, place: Path, *command: str | Path) -> None:
    """Runs one step of the build, whose output is kept."""
    try:
        done = subprocess.run(
            command,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError as error:
        raise CalmError(f"--source: {command[0]} is not on this machine: install it", USAGE) from error
    log = place / "build.log"
    log.write_text(done.stdout)
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        reason = next((line for line in lines if _ERROR.search(line)), lines[-1] if lines else "no output")
        raise CalmError(
            f"--source {tree.name}={tree.folder}: the build failed: {reason} (all of it: {log})", USAGE
        )
