"""The allocators that a program can be run with: finding them, and `calm allocators`."""

import ctypes.util
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from calm import __version__, places, report
from calm.errors import USAGE, CalmError

GLIBC = "glibc"
TUNABLES = "GLIBC_TUNABLES"
CALM_OPTIONS = "CALM_OPTIONS"
# What this project builds; their version is calm's own.
OWN = ("calmalloc", "ptlbmalloc2")


@dataclass(frozen=True)
class Known:
    """Where an allocator that is known by name comes from: the names of its library, the best first."""

    # Among those that were built to be measured; and as the system has it.
    built: tuple[str, ...] = ()
    system: tuple[str, ...] = ()
    # What to do where it is missing.
    hint: str = ""
    # What its own documentation asks for, unless the user says otherwise.
    environment: Mapping[str, str] = field(default_factory=dict)
    # Another's library, with this in CALM_OPTIONS: nothing that is measured where nobody asks for it.
    variant_of: str | None = None
    option: str | None = None


def _own(name: str, option: str | None = None, variant_of: str | None = None) -> Known:
    library = (f"lib{variant_of or name}.so",)
    return Known(library, library, "`make` builds it", variant_of=variant_of, option=option)


_PEERS = "`make peers` builds it"
_JEMALLOC = ("libjemalloc.so.2", "libjemalloc.so")
_MIMALLOC = ("libmimalloc.so.3", "libmimalloc.so.2", "libmimalloc.so.2.0", "libmimalloc.so")
_GPERFTOOLS = ("libtcmalloc_minimal.so.4", "libtcmalloc_minimal.so")

KNOWN: Mapping[str, Known] = {
    GLIBC: Known(),
    "calmalloc": _own("calmalloc"),
    "ptlbmalloc2": _own("ptlbmalloc2"),
    "jemalloc": Known(tuple(reversed(_JEMALLOC)), _JEMALLOC, _PEERS),
    "mimalloc": Known(tuple(reversed(_MIMALLOC)), _MIMALLOC, _PEERS),
    "snmalloc": Known(("libsnmalloc.so",), hint=_PEERS),
    "rpmalloc": Known(("librpmalloc.so",), hint=_PEERS),
    # Google's. A system's libtcmalloc.so is of gperftools. Its caches for each CPU need the kernel's rseq for
    # themselves, which glibc would have for its own sched_getcpu.
    "tcmalloc": Known(("libtcmalloc.so",), hint=_PEERS, environment={TUNABLES: "glibc.pthread.rseq=0"}),
    "gperftools": Known(_GPERFTOOLS, _GPERFTOOLS, "install Debian's package libtcmalloc-minimal4"),
    "jemalloc-debian": Known((), _JEMALLOC, "install Debian's package libjemalloc2"),
    "mimalloc-debian": Known((), _MIMALLOC, "install Debian's package libmimalloc2.0"),
    "calmalloc-offload": _own("calmalloc-offload", "offload=on", "calmalloc"),
    "calmalloc-offload-sync": _own("calmalloc-offload-sync", "offload=sync", "calmalloc"),
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
    """What makes it a variant of another: goes into CALM_OPTIONS, beside what is set there."""

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """What to set in the program's environment. A preload that is there already goes behind, and glibc's
        tunables that are there before, as glibc takes the last of two that contradict each other.

        Raises CalmError where CALM_OPTIONS there has another value for what makes it a variant: whichever
        of them won, somebody would be misled.
        """
        preload = [str(self.library)] if self.library else []
        if existing := inherited.get("LD_PRELOAD"):
            preload.append(existing)
        variables = ({"LD_PRELOAD": ":".join(preload)} if preload else {}) | dict(self.environment)
        if TUNABLES in variables and (existing := inherited.get(TUNABLES)):
            variables[TUNABLES] = f"{existing}:{variables[TUNABLES]}"
        if self.option:
            given = variables.get(CALM_OPTIONS, inherited.get(CALM_OPTIONS, ""))
            variables[CALM_OPTIONS] = with_option(given, self.option, self.label)
        return variables


def with_option(given: str, option: str, label: str) -> str:
    """CALM_OPTIONS with one more. Raises CalmError where they have another value for it."""
    items = [item for item in given.split(",") if item]
    name = option.partition("=")[0]
    if other := next((item for item in items if item.partition("=")[0] == name and item != option), None):
        raise CalmError(
            f"{label} means {option}, but {CALM_OPTIONS} has {other}: leave one of them out", USAGE
        )
    return ",".join(items if option in items else [*items, option])


def find_library(name: str) -> Path | None:
    """The library of a known allocator."""
    known = KNOWN[name]
    for directories, file_names in (
        (places.built_directories(), known.built),
        (places.system_directories(), known.system),
    ):
        for directory in directories:
            for file_name in file_names:
                if (path := directory / file_name).is_file():
                    return path
    return None


def is_here(name: str) -> bool:
    """Whether a known allocator is on this machine."""
    return name == GLIBC or find_library(name) is not None


def _checked(path: Path) -> Path:
    """The absolute path of a library that can be preloaded: the dynamic linker would ignore others."""
    try:
        with path.open("rb") as file, Path("/proc/self/exe").open("rb") as own:
            head, model = file.read(20), own.read(20)
    except OSError as error:
        raise CalmError(f"{path}: {error.strerror}", USAGE) from error
    # Class, byte order and machine are this machine's, and the type is a shared object.
    if len(head) < 20 or head[:6] != model[:6] or head[18:20] != model[18:20] or head[16:18] != b"\x03\x00":
        raise CalmError(f"{path} is not a shared library for this machine", USAGE)
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
        remedy += f", or set {places.LIBRARY_PATH} to its directory"
    raise CalmError(f"{name} is not on this machine: {remedy}", USAGE)


def parse(text: str) -> Allocator:
    """Reads NAME, PATH or LABEL=PATH, each with :VARIABLE=VALUE[;VARIABLE=VALUE…] behind it if so wished."""
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
    allocator = Allocator(text, _library(name), environment, known.option)
    # What contradicts itself is told before anything runs.
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
    if comma and ("/" in last or last.startswith(".")):
        # A shell would put a file's name in place of the whole list.
        return []
    given = before.split(",")
    found = complete(context, parameter, last)
    return [
        CompletionItem(before + comma + str(each.value), type=each.type)
        for each in found
        if each.value not in given
    ]


@dataclass(frozen=True)
class Origin:
    """Which version of an allocator is there, and where it is from: a package, a crate, or neither."""

    name: str
    library: str | None
    version: str | None
    package: str | None = None
    package_version: str | None = None
    crate: str | None = None
    crate_version: str | None = None
    option: str | None = None
    """What CALM_OPTIONS has besides, where it is a variant."""

    @property
    def present(self) -> bool:
        """Glibc's own malloc always is."""
        return self.library is not None


def _dpkg(*arguments: str) -> str | None:
    if not shutil.which("dpkg-query"):
        return None
    result = subprocess.run(["dpkg-query", *arguments], capture_output=True, text=True, check=False)
    # It fails where one of several is unknown, and still prints the others.
    return result.stdout.strip() or None


@functools.cache
def _packages(paths: tuple[Path, ...]) -> dict[Path, tuple[str, str | None]]:
    """Debian's packages that files belong to, and their versions. dpkg takes a tenth of a second to look, for
    however many.
    """
    # A merged /usr hides a file's path.
    names = {}
    for path in paths:
        resolved = str(path.resolve())
        for name in (str(path), resolved, resolved.removeprefix("/usr"), "/usr" + resolved):
            names[name] = path
    if not (owners := _dpkg("-S", *names)):
        return {}
    owner = {}
    for line in owners.splitlines():
        packages, _, name = line.rpartition(": ")
        package = packages.split(", ")[0]
        # Of a diversion dpkg tells in words.
        if name in names and " " not in package:
            owner[names[name]] = package
    listed = _dpkg("-W", "-f", "${binary:Package} ${Version}\\n", *dict.fromkeys(owner.values()))
    versions = dict(line.split() for line in (listed or "").splitlines())
    return {path: (package, versions.get(package)) for path, package in owner.items()}


def _glibc_path() -> Path | None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if re.search(r"/libc(\.so\.6|-[\d.]+\.so)$", path):
            return Path(path)
    found = ctypes.util.find_library("c")
    return Path(found) if found else None


def _crate(name: str, library: Path) -> dict[str, str | None] | None:
    """What `make peers` has written beside the libraries that it built."""
    try:
        versions = json.loads((library.parent / "versions.json").read_text())
        return {key: versions[name][key] for key in ("version", "crate", "crate_version")}
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _malloc_file(name: str) -> Path | None:
    return _glibc_path() if name == GLIBC else find_library(name)


def _libraries() -> tuple[Path, ...]:
    """All that are here."""
    found = [_malloc_file(name) for name in KNOWN if not KNOWN[name].variant_of]
    return tuple(path for path in found if path)


def origin(name: str) -> Origin:
    """Looks a known allocator up."""
    if variant_of := KNOWN[name].variant_of:
        return replace(origin(variant_of), name=name, option=KNOWN[name].option)
    library = _malloc_file(name)
    if library is None:
        return Origin(name, None, None)
    if crate := _crate(name, library):
        return Origin(name, str(library), **crate)
    package, package_version = _packages(_libraries()).get(library, (None, None))
    version = package_version
    if name == GLIBC:
        version = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ") or None
    elif version is None and name in OWN:
        version = __version__
    elif version is not None:
        version = re.sub(r"^\d+:|[-+].*$", "", version)
    return Origin(name, str(library), version, package, package_version)


@click.command("allocators", epilog="\b\nExamples:\n  calm allocators\n  calm allocators --json")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """List the allocators on this machine: version, origin, path."""
    origins = [origin(name) for name in KNOWN]
    if as_json:
        rows = [vars(each) | {"present": each.present, "preloaded": each.name != GLIBC} for each in origins]
        click.echo(json.dumps({"allocators": rows}, indent=2))
        return
    table = report.table()
    for heading in ("allocator", "version", "from", "library"):
        table.add_column(heading, no_wrap=True)
    for each in origins:
        if each.crate:
            source = f"crate {each.crate} {each.crate_version}"
        else:
            source = f"{each.package} {each.package_version}" if each.package else "not packaged"
        if each.option:
            source = f"{KNOWN[each.name].variant_of}, {each.option}"
        library = "nothing is preloaded" if each.name == GLIBC else each.library
        if each.present:
            table.add_row(each.name, each.version or "unknown", source, library)
        else:
            table.add_row(each.name, "-", f"not found: {KNOWN[each.name].hint}", "", style="dim")
    report.print_table(report.console(), table)
