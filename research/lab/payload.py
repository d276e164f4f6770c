"""The guest's file system: a program, the files that it needs, and files that the user adds.

Every file has the same path in the guest as here, symbolic links included.
"""

import contextlib
import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from calm.core import elf, paths, program
from calm.core.errors import NOT_EXECUTABLE, USAGE, CalmError
from research.lab.architecture import X86_64, Architecture, named
from research.lab.guest import BUSYBOX

_SHELL = Path("/bin/sh")
_LINKER_CACHE = Path("/etc/ld.so.cache")
# Of an unpacked package; and links of a guest that has these, as Debian 13 has them for all packages.
_LIBRARY_FOLDERS = ("lib*", "lib*/*-linux-gnu", "usr/lib*", "usr/lib*/*-linux-gnu")
_MERGED = ("bin", "lib", "lib64")
# Files that programs expect on every system.
_MADE = {
    "/etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n",
    "/etc/group": b"root:x:0:\n",
    "/etc/hosts": b"127.0.0.1 localhost\n",
    "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files\n",
}
_KERNELS = ("/proc", "/sys", "/dev")
_FOLDERS = (*_KERNELS, "/tmp", "/root")
# glibc loads it where a thread is cancelled or exits, without naming it as needed.
_UNWINDER = "libgcc_s.so.1"


@dataclass(frozen=True)
class Entry:
    """A folder, a link or a file: its content, or the file of this machine that has it."""

    mode: int
    content: bytes = b""
    source: Path | None = None

    @property
    def size(self) -> int:
        return self.source.stat().st_size if self.source else len(self.content)

    def read(self) -> bytes:
        return self.source.read_bytes() if self.source else self.content


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(256)
    except OSError as error:
        raise CalmError(f"{path}: {error.strerror}", USAGE) from error


def needed(files: Iterable[Path], environment: Mapping[str, str]) -> set[Path]:
    """The loader and the libraries that programs and libraries need, by their paths on this machine."""
    paths = [str(file) for file in files]
    if not paths:
        return set()
    if not shutil.which("ldd"):
        raise CalmError(
            "ldd is missing, which lists the libraries of a program: it is in the Debian package libc-bin"
        )
    # A preload is no library that the programs need.
    clean = {name: value for name, value in environment.items() if name != "LD_PRELOAD"} | {"LC_ALL": "C"}
    done = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=False, env=clean)
    if missing := re.search(r"^\s*(\S+) => not found", done.stdout, re.MULTILINE):
        before = re.findall(r"^(/.*):$", done.stdout[: missing.start()], re.MULTILINE)
        raise CalmError(f"{(before or paths)[-1]} needs {missing[1]}, which is not found on this machine")
    return {Path(path) for path in re.findall(r"(/.*) \(0x[0-9a-f]+\)$", done.stdout, re.MULTILINE)}


def _machine(path: Path) -> str | None:
    """Of a program or shared library, as ELF calls it; None of any other file."""
    with contextlib.suppress(elf.ElfError):
        if elf.is_loadable(path):
            with elf.opened(path) as file:
                return str(file.header.e_machine)
    return None


def _linked(path: Path) -> tuple[list[str], list[str], str | None]:
    """The libraries that an object needs, folders that may have them, and its loader, if it is a program."""
    libraries: list[str] = []
    folders: list[str] = []
    loader = None
    with contextlib.suppress(elf.ElfError), elf.opened(path) as file:
        loader = elf.interpreter(path)
        for tag in (tag for segment in file.iter_segments("PT_DYNAMIC") for tag in segment.iter_tags()):
            if tag.entry.d_tag == "DT_NEEDED":
                libraries.append(tag.needed)
            elif tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                text = tag.rpath if tag.entry.d_tag == "DT_RPATH" else tag.runpath
                folders += re.sub(r"\$(?:ORIGIN|{ORIGIN})", str(path.parent), text).split(":")
    return libraries, folders, loader


class Payload:
    """Gathers files, and writes them as a cpio archive (newc), which the kernel unpacks as root."""

    def __init__(self, environment: Mapping[str, str], architecture: Architecture = X86_64) -> None:
        self.entries: dict[str, Entry] = {}
        self.architecture = architecture
        self._environment = environment
        self._objects: set[Path] = set()
        for folder in _FOLDERS:
            self._folder(folder)
        if architecture.foreign:
            self._folder("/usr/bin")
            for name in _MERGED:
                self.entries[f"/{name}"] = Entry(stat.S_IFLNK | 0o777, f"usr/{name}".encode())
            self.entries["/usr/bin/sh"] = Entry(stat.S_IFLNK | 0o777, BUSYBOX.encode())
            return
        for path in (_SHELL, _LINKER_CACHE):
            if path.exists():
                self.library(path)
        for directory in paths.system_directories():
            if (path := directory / _UNWINDER).exists():
                self.library(path)
                break

    def _folder(self, name: str, mode: int = 0o755) -> None:
        for parent in reversed(Path(name).parents):
            self.entries.setdefault(str(parent), Entry(stat.S_IFDIR | 0o755))
        self.entries.setdefault(name, Entry(stat.S_IFDIR | mode))

    def make(self, name: str, content: bytes, mode: int = 0o755) -> None:
        """Adds a file that this machine does not have at that path."""
        self._folder(str(Path(name).parent))
        self.entries[name] = Entry(stat.S_IFREG | mode, content)

    def mirror(self, path: Path) -> Path:
        """Adds a path, with each symbolic link on the way; returns the path without links."""
        try:
            path.stat()
        except OSError as error:
            raise CalmError(f"{path}: {error.strerror}", USAGE) from error
        return self._mirror(path)

    def _mirror(self, path: Path) -> Path:
        if path.name in ("", ".."):
            return self._mirror(path.parent).parent if path.name else path
        here = self._mirror(path.parent) / path.name
        mode = here.lstat().st_mode
        if stat.S_ISLNK(mode):
            return self._mirror(here.parent / self._link(here))
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise CalmError(f"{here} is neither a file nor a folder", USAGE)
        source = here if stat.S_ISREG(mode) else None
        self.entries.setdefault(str(here), Entry(stat.S_IFMT(mode) | stat.S_IMODE(mode), source=source))
        return here

    def _link(self, path: Path) -> Path:
        target = path.readlink()
        self.entries.setdefault(str(path), Entry(stat.S_IFLNK | 0o777, os.fsencode(target)))
        return target

    def library(self, path: Path) -> Path:
        """Adds a file; `finish` adds the libraries that it needs."""
        real = self.mirror(path.absolute())
        if (machine := _machine(real)) in self.architecture.elf:
            self._objects.add(real)
        elif machine is not None:
            its = named(machine)
            raise CalmError(
                f"{real} is for {its.name if its else machine}, and the guest is {self.architecture.name}"
                + (f": --arch {its.name} emulates one of {its.name}" if its and its.foreign else ""),
                USAGE,
            )
        return real

    def program(self, path: Path) -> None:
        """Adds a program, or a script with its interpreters."""
        seen = {_SHELL} if self.architecture.foreign else set()
        while path not in seen:
            seen.add(path)
            real = self.library(path)
            head = _head(real)
            if head.startswith(elf.MAGIC):
                return
            path = self._interpreter(real, head)

    def _interpreter(self, script: Path, head: bytes) -> Path:
        """The interpreter of a script: the shell, where its first line names none."""
        words = os.fsdecode(head[2:].split(b"\n")[0]).split() if head.startswith(b"#!") else []
        if not words:
            return _SHELL
        interpreter = Path(words[0])
        if interpreter.name == "env":
            self.library(interpreter)
            named = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
            if not named:
                raise CalmError(f"{script}: its first line names no interpreter", NOT_EXECUTABLE)
            return program.find(named[0])
        if not interpreter.is_file():
            raise CalmError(f"{script}: there is no interpreter {interpreter}", NOT_EXECUTABLE)
        return interpreter

    def add(self, path: Path) -> None:
        """Adds a file, or a folder with all below it."""
        absolute = path.absolute()
        if absolute.is_file():
            (self.program if os.access(absolute, os.X_OK) else self.library)(absolute)
            return
        self.mirror(absolute)
        for inner in absolute.rglob("*"):
            if inner.is_symlink():
                # Its target may be missing, or outside of the folder, and is not added.
                self._link(self.mirror(inner.parent) / inner.name)
            elif inner.is_file() or inner.is_dir():
                real = self.mirror(inner)
                if _machine(real) in self.architecture.elf:
                    self._objects.add(real)

    def finish(self, packages: Iterable[Path] = ()) -> None:
        """Adds the libraries that all files need, and the files that every system has.

        A foreign guest's own libraries are those of unpacked packages.
        """
        for name, content in _MADE.items():
            if name not in self.entries:
                self.make(name, content, 0o644)
        if self.architecture.foreign:
            self._link_all({name for package in packages for name in self._unpacked(package)})
            return
        for path in sorted(needed(sorted(self._objects), self._environment)):
            self.mirror(path)

    def _unpacked(self, package: Path) -> Iterator[str]:
        """Adds a package's libraries; yields their paths in the guest."""
        for path in (path for folder in _LIBRARY_FOLDERS for path in package.glob(f"{folder}/*.so*")):
            name = f"/usr/{str(path.relative_to(package)).removeprefix('usr/')}"
            if path.is_symlink():
                self._folder(str(Path(name).parent))
                self.entries[name] = Entry(stat.S_IFLNK | 0o777, os.fsencode(path.readlink()))
            else:
                self.make(name, path.read_bytes())
            yield name

    def _link_all(self, own: set[str]) -> None:
        """Adds libraries that are needed besides the guest's own, from the folders where its loader looks."""
        names = {Path(name).name for name in own} | {name.removeprefix("/usr") for name in own}
        given = self._environment.get("LD_LIBRARY_PATH", "").split(":")
        left = sorted(self._objects)
        for path in left:
            libraries, folders, loader = _linked(path)
            places = [Path(folder) for folder in folders + given if folder]
            wanted = {name: [folder / name for folder in places] for name in libraries}
            wanted |= {loader: [Path(loader)]} if loader else {}
            for name, candidates in wanted.items():
                if name == loader and name in names:
                    continue  # that of the C library, not another one that this machine may have
                found = next((each for each in candidates if _machine(each) in self.architecture.elf), None)
                if found:
                    real = self.library(found)
                    left += [] if real in left else [real]
                elif name not in names:
                    raise CalmError(
                        f"{path} needs {name}, which is not found for {self.architecture.name}: "
                        "--env LD_LIBRARY_PATH=FOLDER names the folder that has it"
                    )

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries.values())

    def write(self, file: BinaryIO) -> None:
        """Writes the archive. A folder comes before its files."""
        for name in sorted(self.entries, key=lambda name: name.split("/")):
            if name != "/":
                entry = self.entries[name]
                _write_entry(file, name.lstrip("/"), entry.mode, entry.read())
        _write_entry(file, "TRAILER!!!", 0, b"")


def _write_entry(file: BinaryIO, name: str, mode: int, content: bytes) -> None:
    """Header, name and content, each padded to four bytes. Everything belongs to root."""
    path = os.fsencode(name) + b"\0"
    fields = [0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0]
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + path
    file.write(header + bytes(-len(header) % 4) + content + bytes(-len(content) % 4))


def hints(command: Iterable[str], carried: Iterable[Path]) -> list[str]:
    """A message for each argument that is a file here and would be missing in the guest."""
    roots = [*map(Path, _KERNELS), *(path.absolute() for path in carried)]
    found = []
    for argument in command:
        for text in (argument, argument.partition("=")[2]):
            # Not Path.exists, which raises where an argument is longer than a file's name can be.
            if text in ("", ".", "/") or not os.access(text, os.F_OK):
                continue
            if not any(Path(text).absolute().is_relative_to(root) for root in roots):
                found.append(f"{text} is here, but not in the guest: --add {shlex.quote(text)} carries it")
            break
    return found
