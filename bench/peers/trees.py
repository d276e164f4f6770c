"""Builds peers from source trees: in copies, as their documentation says, with their documented defaults."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import versions

HERE = Path(__file__).resolve().parent
# The number of process_madvise(2), on every architecture.
SYS_PROCESS_MADVISE = 440


class TreeError(Exception):
    """What the user named is not a tree that can be built: one line for the user."""


class BuildError(Exception):
    """A tree could not be built: one line for the user."""


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says of a folder; None where it fails. Whose checkout it is does not matter."""
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", check=False)
    except FileNotFoundError:
        return None
    return done.stdout.removesuffix("\n") if done.returncode == 0 else None


class Tree:
    """A source tree of the user's, which is only read: a checkout, or an unpacked release."""

    def __init__(self, root: Path, file: str, places: Sequence[str] = (".",)) -> None:
        """The file is what the tree must have, at one of these places below the root."""
        if not root.is_dir():
            raise TreeError(f"{root} is not a directory")
        found = (root / place for place in places if (root / place / file).is_file())
        folder = next(found, None)
        if folder is None:
            raise TreeError(f"{root} has no file {Path(places[0]) / file}")
        self.root, self.folder = root, folder
        # One that lies in somebody else's repository is no checkout.
        self._is_checkout = _git(folder, "ls-files", "--error-unmatch", "--", file) is not None

    def _files(self) -> list[str]:
        """All files; of a checkout, without those that git ignores, such as an earlier build's."""
        if self._is_checkout:
            listed = _git(self.folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or ""
            names = listed.strip("\0").split("\0")
        else:
            names = [
                str(path.relative_to(self.folder))
                for path in self.folder.rglob("*")
                if ".git" not in path.parts
            ]
        is_file = (
            name for name in names if (self.folder / name).is_symlink() or (self.folder / name).is_file()
        )
        return sorted(set(is_file))

    def checksum(self) -> str:
        """Of all files' names and contents."""
        digest = hashlib.sha256()
        for name in self._files():
            path = self.folder / name
            content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode(errors="surrogateescape") + content)
        return digest.hexdigest()

    def copy(self, to: Path) -> None:
        for name in self._files():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.folder / name, to / name, follow_symlinks=False)

    def version(self, stated: Callable[[Path], str | None]) -> str | None:
        """As git describes a checkout, 5.3.1-47-g0123abcd; or else what the sources state, and the commit."""
        if not self._is_checkout:
            return stated(self.root)
        # Without the name that some projects put before the number.
        tagged = _git(self.folder, "describe", "--tags", "--dirty", "--match", "*[0-9]*")
        if tagged and (number := re.search(r"\d.*", tagged)):
            return number[0]
        commit = _git(self.folder, "describe", "--always", "--dirty", "--exclude", "*")
        return "-g".join(each for each in (stated(self.root), commit) if each) or None

    def date(self) -> str | None:
        """The day of a checkout's last commit."""
        return _git(self.folder, "log", "-1", "--format=%cs") if self._is_checkout else None


class Workshop:
    """Where one peer is built: copies of its trees, a folder for the build, and a log."""

    def __init__(self, trees: Mapping[str, Tree], folder: Path, log: IO[str]) -> None:
        self._log = log
        self.trees = {name: folder / name for name in trees}
        self.build = folder / "build"
        for name, tree in trees.items():
            tree.copy(self.trees[name])
        self.build.mkdir()

    def run(self, *command: str | Path, folder: Path | None = None) -> None:
        """Runs a command; its output goes to the log. Raises CalledProcessError."""
        words = [str(word) for word in command]
        self._log.write(f"$ {' '.join(words)}\n")
        self._log.flush()
        # Neither a make that started this script nor the repository around the copy concerns the build.
        environment = {
            name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")
        }
        environment["GIT_CEILING_DIRECTORIES"] = str(self.build.parents[1])
        subprocess.run(
            words,
            cwd=folder or self.build,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            check=True,
        )

    def cmake(self, name: str, target: str, *options: str) -> None:
        _need(name, "cmake", "make")
        self.run("cmake", "-S", self.trees[name], "-B", self.build, "-DCMAKE_BUILD_TYPE=Release", *options)
        self.run("cmake", "--build", self.build, "--target", target, *_parallel())


def _need(name: str, *tools: str) -> None:
    if missing := [tool for tool in tools if not shutil.which(tool)]:
        raise BuildError(f"{name} needs {' and '.join(missing)}")


def _parallel() -> list[str]:
    return [f"-j{os.cpu_count() or 1}"]


def _newest(name: str) -> Iterator[str]:
    """The names of a compiler in its versions that are here, the newest first, and the plain name last."""
    names = [f"{name}-{number}" for number in range(40, 9, -1)] + [name]
    return (each for each in names if shutil.which(each))


def _clang_if_here() -> list[str]:
    c, cpp = next(_newest("clang"), None), next(_newest("clang++"), None)
    return [f"-DCMAKE_C_COMPILER={c}", f"-DCMAKE_CXX_COMPILER={cpp}"] if c and cpp else []


def _script(shop: Workshop, name: str, *tools: str) -> str:
    """What configures a tree: a release's configure, or what makes it, by these tools."""
    is_release = (shop.trees[name] / "configure").is_file()
    _need(name, "make", *(() if is_release else tools))
    return "configure" if is_release else "autogen.sh"


def _jemalloc(shop: Workshop, version: str | None) -> Path:
    tree = shop.trees["jemalloc"]
    options = []
    # Else it would ask git, which does not know the copy.
    number = re.match(r"\d+\.\d+\.\d+(-\d+-g[0-9a-f]+)?", version or "")
    if number and not (tree / "VERSION").is_file():
        options.append(f"--with-version={number[0]}" + ("" if number[1] else "-0-g0"))
    # The C library's headers may be older than the kernel. It stays off until MALLOC_CONF switches it on.
    if "experimental_sys_process_madvise" in (tree / "configure.ac").read_text():
        options.append(f"--with-experimental-sys-process-madvise={SYS_PROCESS_MADVISE}")
    shop.run(f"./{_script(shop, 'jemalloc', 'autoconf')}", *options, folder=tree)
    shop.run("make", "build_lib_shared", *_parallel(), folder=tree)
    return tree / "lib/libjemalloc.so"


def _mimalloc(shop: Workshop, _: str | None) -> Path:
    shop.cmake("mimalloc", "mimalloc", "-DMI_BUILD_TESTS=OFF")
    return shop.build / "libmimalloc.so"


def _snmalloc(shop: Workshop, _: str | None) -> Path:
    # Its authors advise against gcc, which calls libatomic.
    shop.cmake("snmalloc", "snmallocshim", "-DSNMALLOC_BUILD_TESTING=OFF", *_clang_if_here())
    return shop.build / "libsnmallocshim.so"


def _rpmalloc(shop: Workshop, _: str | None) -> Path:
    library = shop.build / "librpmalloc.so"
    flags = ["-std=gnu17", "-O3", "-fPIC", "-shared", "-D_GNU_SOURCE"]
    # The first is the default since version 2, which does not have the second.
    flags += ["-DENABLE_OVERRIDE=1", "-DENABLE_PRELOAD=1"]
    source = shop.trees["rpmalloc"] / "rpmalloc/rpmalloc.c"
    shop.run(os.environ.get("CC", "cc"), *flags, source, "-o", library, "-lpthread", "-ldl")
    return library


def _gperftools(shop: Workshop, _: str | None) -> Path:
    tree = shop.trees["gperftools"]
    if (script := _script(shop, "gperftools", "autoconf", "automake", "libtoolize")) != "configure":
        shop.run(f"./{script}", folder=tree)
    shop.run("./configure", "--enable-minimal", "--disable-static", folder=tree)
    shop.run("make", "libtcmalloc_minimal.la", *_parallel(), folder=tree)
    return tree / ".libs/libtcmalloc_minimal.so"


def _tcmalloc(shop: Workshop, _: str | None) -> Path:
    # Its helpers want the project to begin in its own root, so this takes the place of its own file.
    shutil.copy(HERE / "tcmalloc/tree.cmake", shop.trees["tcmalloc"] / "CMakeLists.txt")
    trees = [f"-DABSEIL={shop.trees['abseil']}", f"-DEXPORTS={HERE / 'exports.map'}"]
    # gcc 12 initializes at run time what must be there before the first malloc; clang 14 refuses some of it.
    shop.cmake("tcmalloc", "peer", *trees, *_clang_if_here())
    return shop.build / "libpeer.so"


def _scudo(shop: Workshop, _: str | None) -> Path:
    tree, library = shop.trees["scudo"], shop.build / "libscudo.so"
    compiler = os.environ.get("CXX") or next(_newest("clang++"), "c++")
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", f"-I{tree / 'include'}"]
    # For the checksums of its headers.
    flags += ["-msse4.2"] if os.uname().machine == "x86_64" else []
    shop.run(compiler, *flags, *sorted(tree.glob("*.cpp")), "-o", library)
    return library


def _speaks_c23(compiler: str) -> bool:
    command = [compiler, "-std=c23", "-x", "c", "-fsyntax-only", "-"]
    return subprocess.run(command, input=b"", capture_output=True, check=False).returncode == 0


def _c23_compiler() -> str | None:
    """The C compiler, or the newest gcc or clang that has C23."""
    names = [os.environ.get("CC", "cc"), *_newest("gcc"), *_newest("clang")]
    return next((name for name in names if shutil.which(name) and _speaks_c23(name)), None)


def _hardened_malloc(shop: Workshop, _: str | None) -> Path:
    _need("hardened_malloc", "make")
    compiler = _c23_compiler()
    if compiler is None:
        raise BuildError(
            "hardened_malloc needs a compiler with -std=c23: gcc 14, or clang 18 (Debian's clang-19)"
        )
    shop.run("make", f"CC={compiler}", *_parallel(), folder=shop.trees["hardened_malloc"])
    return shop.trees["hardened_malloc"] / "out/libhardened_malloc.so"


@dataclass(frozen=True)
class Recipe:
    """How a peer is built from its tree."""

    file: str
    """What every tree of the project has, by which it is recognized."""
    build: Callable[[Workshop, str | None], Path]
    """Builds the library, given the tree's version, and returns its path."""
    version: Callable[[Path], str | None] = lambda _: None
    """What the sources say where git says nothing."""
    places: tuple[str, ...] = (".",)
    """Where in what the user names the tree may lie."""
    also: Mapping[str, str] = field(default_factory=dict)
    """Other trees that are needed, and a file of each."""


RECIPES: Mapping[str, Recipe] = {
    "jemalloc": Recipe("include/jemalloc/jemalloc.sh", _jemalloc, versions.jemalloc),
    "mimalloc": Recipe("include/mimalloc.h", _mimalloc, versions.mimalloc),
    "snmalloc": Recipe("src/snmalloc/snmalloc.h", _snmalloc, versions.snmalloc),
    "rpmalloc": Recipe("rpmalloc/rpmalloc.c", _rpmalloc, versions.rpmalloc),
    "tcmalloc": Recipe("tcmalloc/tcmalloc_helpers.cmake", _tcmalloc, also={"abseil": "absl/base/config.h"}),
    "gperftools": Recipe("src/gperftools/tcmalloc.h", _gperftools, versions.gperftools),
    "scudo": Recipe(
        "wrappers_c.cpp",
        _scudo,
        versions.llvm,
        places=("compiler-rt/lib/scudo/standalone", "lib/scudo/standalone", "."),
    ),
    "hardened_malloc": Recipe("h_malloc.c", _hardened_malloc),
}


def find(name: str, folders: Mapping[str, Path]) -> dict[str, Tree]:
    """A peer's tree and those that it needs besides, by their names. Raises TreeError."""
    recipe = RECIPES[name]
    found = {name: Tree(folders[name], recipe.file, recipe.places)}
    for other, file in recipe.also.items():
        if other not in folders:
            raise TreeError(f"{name} needs a tree of {other}, too: --source {other}=DIR")
        found[other] = Tree(folders[other], file)
    return found


def origin(name: str, trees: Mapping[str, Tree]) -> dict[str, str | None]:
    """What is known of a peer that is built from these trees."""
    tree = trees[name]
    return {"version": tree.version(RECIPES[name].version), "date": tree.date(), "tree": str(tree.root)}


def build(name: str, trees: Mapping[str, Tree], folder: Path) -> Path:
    """Builds a peer's library below a folder, and returns its path. Raises BuildError."""
    recipe = RECIPES[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder.with_suffix(".log")
    with path.open("w") as log:
        try:
            library = recipe.build(Workshop(trees, folder, log), trees[name].version(recipe.version))
        except (subprocess.CalledProcessError, OSError) as error:
            print(error, file=log)
            raise BuildError(f"{name} could not be built: see {path}") from error
    if not library.is_file():
        raise BuildError(f"{name} could not be built: no {library.name} came of it; see {path}")
    # A program that would only print its mappings.
    preloaded = subprocess.run(
        ["cat", "/proc/self/maps"],
        env=os.environ | {"LD_PRELOAD": str(library.resolve())},
        capture_output=True,
        text=True,
        check=False,
    )
    if preloaded.returncode != 0 or str(library.resolve()) not in preloaded.stdout:
        raise BuildError(f"{name} was built, but no program runs with {library} preloaded")
    return library
