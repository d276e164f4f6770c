"""The allocators that a program can be run with: their names, libraries, variables and origins."""

import ctypes.util
import functools
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from calm import __version__
from calm.core import elf, paths, proc
from calm.core.errors import USAGE, CalmError

GLIBC = "glibc"
TUNABLES = "GLIBC_TUNABLES"
CALM_OPTIONS = "CALM_OPTIONS"
MALLOC_CONF = "MALLOC_CONF"
# What this project builds; their version is calm's own.
OWN = ("calmalloc", "calmoffload", "ptlbmalloc2")


@dataclass(frozen=True)
class Known:
    """An allocator that is known by name: the file names of its library, the preferred first."""

    # Among those that were built to be measured; and as the system has it.
    built: tuple[str, ...] = ()
    system: tuple[str, ...] = ()
    # How to get it where it is missing.
    hint: str = ""
    # What its own documentation asks for, unless the user sets it.
    environment: Mapping[str, str] = field(default_factory=dict)
    # Measured only where the user names it, as are all variants.
    only_by_name: bool = False
    # Another's library, with more options in the variable that it reads them from.
    variant_of: str | None = None
    option: str | None = None
    variable: str = ""
    # A text in the library, without which it does not know a variant's option.
    needs: str = ""


def _own(name: str, only_by_name: bool = False) -> Known:
    library = (f"lib{name}.so",)
    return Known(library, library, "`make` builds it", only_by_name=only_by_name)


def _variant(of: str, known: Known, option: str, variable: str) -> Known:
    return replace(known, variant_of=of, option=option, variable=variable)


def _debian(library: tuple[str, ...], package: str) -> Known:
    return Known((), library, f"install Debian's package {package}", only_by_name=True)


_PEERS = "`make peers` builds it"
_TREE = "`scripts/peers --source {}=DIR` builds it"
_JEMALLOC = ("libjemalloc.so.2", "libjemalloc.so")
_MIMALLOC = ("libmimalloc.so.3", "libmimalloc.so.2", "libmimalloc.so.2.0", "libmimalloc.so")
_GPERFTOOLS = ("libtcmalloc_minimal.so.4", "libtcmalloc_minimal.so")

_JE = Known(tuple(reversed(_JEMALLOC)), _JEMALLOC, _PEERS)
_DEVELOPED_JE = replace(
    _JE,
    hint=f"jemalloc's development branch has this option: {_TREE.format('jemalloc')}",
    needs="process_madvise_max_batch",
)

KNOWN: Mapping[str, Known] = {
    GLIBC: Known(),
    "calmalloc": _own("calmalloc"),
    # The same heap, whose blocks a thread of its own prepares.
    "calmoffload": _own("calmoffload", only_by_name=True),
    "ptlbmalloc2": _own("ptlbmalloc2", only_by_name=True),
    "jemalloc": _JE,
    "mimalloc": Known(tuple(reversed(_MIMALLOC)), _MIMALLOC, _PEERS),
    "snmalloc": Known(("libsnmalloc.so",), hint=_PEERS),
    "rpmalloc": Known(("librpmalloc.so",), hint=_PEERS),
    # Google's. A system's libtcmalloc.so is of gperftools. Its per-CPU caches register rseq themselves, which
    # glibc does otherwise.
    "tcmalloc": Known(("libtcmalloc.so",), hint=_PEERS, environment={TUNABLES: "glibc.pthread.rseq=0"}),
    "gperftools": Known(
        ("libgperftools.so", *_GPERFTOOLS),
        _GPERFTOOLS,
        f"install Debian's package libtcmalloc-minimal4, or {_TREE.format('gperftools')}",
    ),
    # These two are made for safety, not for speed.
    "scudo": Known(
        ("libscudo.so",),
        (f"libclang_rt.scudo_standalone-{platform.machine()}.so",),
        f"install Debian's package libclang-rt-dev, or {_TREE.format('scudo')}",
        only_by_name=True,
    ),
    "hardened_malloc": Known(
        ("libhardened_malloc.so",), hint=_TREE.format("hardened_malloc"), only_by_name=True
    ),
    "jemalloc-debian": _debian(_JEMALLOC, "libjemalloc2"),
    "mimalloc-debian": _debian(_MIMALLOC, "libmimalloc2.0"),
    "gperftools-debian": _debian(_GPERFTOOLS, "libtcmalloc-minimal4"),
    # As servers often have it: memory goes back within a second, also while the program is idle.
    "jemalloc-tuned": _variant("jemalloc", _JE, "background_thread:true,dirty_decay_ms:1000", MALLOC_CONF),
    "jemalloc-process-madvise": _variant(
        "jemalloc", _DEVELOPED_JE, "process_madvise_max_batch:128", MALLOC_CONF
    ),
}

# A colon that environment variables follow; a path may contain others.
_ENVIRONMENT = re.compile(r":(?=[A-Za-z_][A-Za-z0-9_]*=)")


@dataclass(frozen=True)
class Allocator:
    """One way to run a program: a library to preload, if any, and variables to set."""

    label: str
    library: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    option: str | None = None
    """What makes it a variant of another: added to the variable."""
    variable: str = ""

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """What to set in the program's environment.

        An inherited preload follows the library. Inherited tunables come first, as glibc takes the last of
        two that contradict each other. Raises CalmError if inherited options contradict a variant.
        """
        preload = [str(self.library)] if self.library else []
        if existing := inherited.get("LD_PRELOAD"):
            preload.append(existing)
        variables = ({"LD_PRELOAD": ":".join(preload)} if preload else {}) | dict(self.environment)
        if TUNABLES in variables and (existing := inherited.get(TUNABLES)):
            variables[TUNABLES] = f"{existing}:{variables[TUNABLES]}"
        if self.option:
            given = variables.get(self.variable, inherited.get(self.variable, ""))
            variables[self.variable] = with_options(given, self.option, self.label, self.variable)
        return variables


def with_options(given: str, options: str, label: str, variable: str) -> str:
    """A variable's options, as name:value, with more of them. Raises CalmError where it has other values."""
    items = [item for item in given.split(",") if item]
    for option in options.split(","):
        name = option.partition(":")[0]
        others = [item for item in items if item.partition(":")[0] == name]
        if other := next((item for item in others if item != option), None):
            raise CalmError(
                f"{label} means {option}, but {variable} has {other}: leave one of them out", USAGE
            )
        items += [] if others else [option]
    return ",".join(items)


def find_library(name: str) -> Path | None:
    known = KNOWN[name]
    candidates = [directory / file for directory in paths.built_directories() for file in known.built]
    candidates += [directory / file for directory in paths.system_directories() for file in known.system]
    found = next((path for path in candidates if path.is_file()), None)
    return found if found and known.needs.encode() in found.read_bytes() else None


def is_here(name: str) -> bool:
    return name == GLIBC or find_library(name) is not None


def _checked(path: Path) -> Path:
    """The absolute path of a library that can be preloaded: the dynamic linker would ignore others."""
    try:
        if not elf.is_shared_library_here(path):
            raise CalmError(f"{path} is not a shared library for this machine", USAGE)
    except elf.ElfError as error:
        raise CalmError(f"not a shared library: {error}", USAGE) from error
    absolute = path.absolute()
    if re.search(r"[:\s]", str(absolute)):
        raise CalmError(f"{absolute}: LD_PRELOAD cannot name a path with a colon or a space", USAGE)
    return absolute


def _library(name: str) -> Path | None:
    if "/" in name:
        return _checked(Path(name))
    if name not in KNOWN:
        known = ", ".join(KNOWN)
        raise CalmError(f"unknown allocator {name!r}: known are {known}, and any path/to/library.so", USAGE)
    if name == GLIBC:
        return None
    if library := find_library(name):
        return _checked(library)
    remedy = KNOWN[name].hint
    if KNOWN[name].built:
        remedy += f", or set {paths.LIBRARY_PATH} to its directory"
    raise CalmError(f"{name} is not on this machine: {remedy}", USAGE)


def parse(text: str) -> Allocator:
    """Reads NAME, PATH or LABEL=PATH, optionally followed by :VARIABLE=VALUE[;VARIABLE=VALUE…]."""
    name, *rest = _ENVIRONMENT.split(text, maxsplit=1)
    known = KNOWN.get(name, Known())
    environment = dict(known.environment)
    for assignment in rest[0].split(";") if rest else []:
        variable, equals, value = assignment.partition("=")
        if not equals or not variable:
            raise CalmError(f"{text!r}: {assignment!r} is not VARIABLE=VALUE", USAGE)
        environment[variable] = value
    label, equals, path = name.partition("=")
    if equals:
        if not label or "/" not in path:
            raise CalmError(f"{text!r}: LABEL=PATH needs a label and a path with a slash", USAGE)
        return Allocator(label + text[len(name) :], _library(path), environment)
    allocator = Allocator(text, _library(name), environment, known.option, known.variable)
    # Raises CalmError for a contradiction before anything runs.
    allocator.variables({})
    return allocator


def _begins_allocator(piece: str) -> bool:
    name = _ENVIRONMENT.split(piece, maxsplit=1)[0]
    return name in KNOWN or "/" in name.partition(":")[0]


def parse_list(texts: Iterable[str]) -> list[Allocator]:
    """Reads comma-separated allocators. A comma that no allocator follows is part of a variable's value."""
    specs: list[str] = []
    for text in texts:
        start = len(specs)
        for piece in text.split(","):
            if len(specs) > start and _ENVIRONMENT.search(specs[-1]) and not _begins_allocator(piece):
                specs[-1] += "," + piece
            else:
                specs.append(piece)
    allocators = [parse(spec) for spec in specs]
    labels = [allocator.label for allocator in allocators]
    if repeated := next((label for label in labels if labels.count(label) > 1), None):
        raise CalmError(f"allocator {repeated!r} is given twice", USAGE)
    return allocators


def complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For a shell: the names of those on this machine; files, where a path has begun."""
    if "/" in incomplete or incomplete.startswith("."):
        return [CompletionItem(incomplete, type="file")]
    return [CompletionItem(name) for name in KNOWN if name.startswith(incomplete) and is_here(name)]


def complete_list(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The same behind the last comma, without those given before it."""
    before, comma, last = incomplete.rpartition(",")
    found = complete(context, parameter, last)
    if not comma:
        return found
    # A shell would put a file's name in place of the whole list.
    names = [each.value for each in found if each.type != "file" and each.value not in before.split(",")]
    return [CompletionItem(f"{before},{name}") for name in names]


@dataclass(frozen=True)
class Origin:
    """The version of an allocator on this machine, and its origin: a package, a crate, a tree, or neither."""

    name: str
    library: str | None
    version: str | None
    package: str | None = None
    package_version: str | None = None
    crate: str | None = None
    crate_version: str | None = None
    tree: str | None = None
    date: str | None = None
    """The day of the last commit, if the tree is a checkout."""
    option: str | None = None
    """What a variant adds to MALLOC_CONF."""
    present: bool = True
    preloaded: bool = True


def dated(version: str | None, date: str | None) -> str | None:
    """A version, and the day of the last commit, if it is of a checkout: 5.3.1-47-g0123abcd (2026-05-18)."""
    return f"{version} ({date})" if version and date else version


def _dpkg(*arguments: str) -> str | None:
    if not shutil.which("dpkg-query"):
        return None
    result = subprocess.run(["dpkg-query", *arguments], capture_output=True, text=True, check=False)
    # It fails where one of several is unknown, and still prints the others.
    return result.stdout.strip() or None


@functools.cache
def _packages(paths: tuple[Path, ...]) -> dict[Path, tuple[str, str | None]]:
    """Debian's packages of files, and their versions. dpkg takes 0.1 s for any number of files."""
    # A merged /usr hides a file's path.
    names: dict[str, Path] = {}
    for path in paths:
        resolved = str(path.resolve())
        names |= dict.fromkeys((str(path), resolved, resolved.removeprefix("/usr"), "/usr" + resolved), path)
    # Each line is "package[, package]: name"; a diversion is described in words.
    lines = (line.rpartition(": ") for line in (_dpkg("-S", *names) or "").splitlines())
    owner = {
        names[name]: package
        for packages, _, name in lines
        if name in names and " " not in (package := packages.split(", ")[0])
    }
    if not owner:
        return {}
    listed = _dpkg("-W", "-f", "${binary:Package} ${Version}\\n", *dict.fromkeys(owner.values()))
    versions = dict(line.split() for line in (listed or "").splitlines())
    return {path: (package, versions.get(package)) for path, package in owner.items()}


def _glibc_path() -> Path | None:
    found = (path for path in proc.files(os.getpid()) if re.search(r"/libc(\.so\.6|-[\d.]+\.so)$", path))
    path = next(found, None) or ctypes.util.find_library("c")
    return Path(path) if path else None


def _built(name: str, library: Path) -> dict[str, str | None] | None:
    """What `scripts/peers` wrote beside the libraries that it built."""
    try:
        found = json.loads((library.parent / "versions.json").read_text())[name]
        return {key: found.get(key) for key in ("version", "crate", "crate_version", "tree", "date")}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _malloc_file(name: str) -> Path | None:
    return _glibc_path() if name == GLIBC else find_library(name)


def origin(name: str) -> Origin:
    library = _malloc_file(name)
    if library is None:
        return Origin(name, None, None, option=KNOWN[name].option, present=False)
    if variant_of := KNOWN[name].variant_of:
        return replace(origin(variant_of), name=name, option=KNOWN[name].option)
    if built := _built(name, library):
        return Origin(name, str(library), **built)  # type: ignore[arg-type]
    package, package_version = _packages(tuple(filter(None, map(_malloc_file, KNOWN)))).get(
        library, (None, None)
    )
    version = package_version
    if name == GLIBC:
        version = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ") or None
    elif version is None and name in OWN:
        version = __version__
    elif version is not None:
        version = re.sub(r"^\d+:|[-+].*$", "", version)
    return Origin(name, str(library), version, package, package_version, preloaded=name != GLIBC)
