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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from calm.core import elf, paths, program
from calm.core.errors import NOT_EXECUTABLE, USAGE, CalmError

_LINKER_CACHE = Path("/etc/ld.so.cache")
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


class Payload:
    """Gathers files, and writes them as a cpio archive (newc), which the kernel unpacks as root."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.entries: dict[str, Entry] = {}
        self._environment = environment
        self._objects: set[Path] = set()
        for folder in _FOLDERS:
            self._folder(folder)
        for path in (Path("/bin/sh"), _LINKER_CACHE):
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
        with contextlib.suppress(elf.ElfError):
            if real.is_file() and elf.is_loadable(real):
                self._objects.add(real)
        return real

    def program(self, path: Path) -> None:
        """Adds a program, or a script with its interpreters."""
        seen: set[Path] = set()
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
            return Path("/bin/sh")
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
                self.library(inner)

    def finish(self) -> None:
        """Adds the libraries that all files need, and the files that every system has."""
        for name, content in _MADE.items():
            if name not in self.entries:
                self.make(name, content, 0o644)
        for path in sorted(needed(sorted(self._objects), self._environment)):
            self.mirror(path)

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
