"""What the guest's file system holds: a program, what it needs to run, and whatever is added to that.

Every file lies in the guest where it lies here, symbolic links and all, so that no path has to be changed.
"""

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

from calm import places, program
from calm.errors import NOT_EXECUTABLE, USAGE, CalmError

_MOST_LINKS = 40  # as the kernel follows
_ELF = b"\x7fELF"
# Of the type that a shared library and a program that may lie anywhere have.
_ELF_TYPES = (2, 3)
# Files of a system that programs expect without asking: where libraries are, and who root is.
_LINKER_CACHE = Path("/etc/ld.so.cache")
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
    """A folder, a link or a file: what it holds, or where on this machine that is to be read."""

    mode: int
    content: bytes = b""
    source: Path | None = None

    @property
    def size(self) -> int:
        """Bytes in the archive."""
        return self.source.stat().st_size if self.source else len(self.content)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(256)
    except OSError as error:
        raise CalmError(f"{path}: {error.strerror}", USAGE) from error


def _is_elf(path: Path) -> bool:
    head = _head(path)
    return head.startswith(_ELF) and int.from_bytes(head[16:18], "little") in _ELF_TYPES


def needed(files: Iterable[Path], environment: Mapping[str, str]) -> set[Path]:
    """The loader and the libraries of programs and libraries, where the loader finds them on this machine."""
    paths = [str(file) for file in files]
    if not paths:
        return set()
    if not shutil.which("ldd"):
        raise CalmError("ldd is missing, which tells what libraries a program needs: it is in libc-bin")
    # The allocators' own libraries are asked about on their own; here a preload would only mislead.
    clean = {name: value for name, value in environment.items() if name != "LD_PRELOAD"} | {"LC_ALL": "C"}
    done = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=False, env=clean)
    if missing := re.search(r"^\s*(\S+) => not found", done.stdout, re.MULTILINE):
        before = re.findall(r"^(/.*):$", done.stdout[: missing.start()], re.MULTILINE)
        raise CalmError(f"{(before or paths)[-1]} needs {missing[1]}, which is not found on this machine")
    return {Path(path) for path in re.findall(r"(/.*) \(0x[0-9a-f]+\)$", done.stdout, re.MULTILINE)}


class Payload:
    """Gathers files, and writes them as a cpio archive (newc), which the kernel unpacks as the root."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.entries: dict[str, Entry] = {}
        self._environment = environment
        self._objects: set[Path] = set()
        for folder in _FOLDERS:
            self._folder(folder)
        for path in (Path("/bin/sh"), _LINKER_CACHE):
            if path.exists():
                self._carry(path)
        for directory in places.system_directories():
            if (path := directory / _UNWINDER).exists():
                self._carry(path)
                break

    def _folder(self, name: str, mode: int = 0o755) -> None:
        for parent in reversed(Path(name).parents):
            self.entries.setdefault(str(parent), Entry(stat.S_IFDIR | 0o755))
        self.entries.setdefault(name, Entry(stat.S_IFDIR | mode))

    def make(self, name: str, content: bytes, mode: int = 0o755) -> None:
        """A file that this machine has not, or not there."""
        self._folder(str(Path(name).parent))
        self.entries[name] = Entry(stat.S_IFREG | mode, content)

    def mirror(self, path: Path) -> Path:
        """Puts a path into the guest as it is here, with each link on the way; returns what it leads to."""
        here = Path("/")
        left = list(path.parts[1:])
        links = 0
        while left:
            part = left.pop(0)
            if part == "..":
                here = here.parent
                continue
            here = here / part
            try:
                mode = here.lstat().st_mode
            except OSError as error:
                raise CalmError(f"{path}: {error.strerror}", USAGE) from error
            if stat.S_ISLNK(mode):
                links += 1
                target = Path(here.readlink())
                if links > _MOST_LINKS:
                    raise CalmError(f"{path}: too many links", USAGE)
                self.entries.setdefault(str(here), Entry(stat.S_IFLNK | 0o777, os.fsencode(target)))
                here = Path("/") if target.is_absolute() else here.parent
                left = [part for part in target.parts if part != "/"] + left
            elif stat.S_ISDIR(mode):
                self.entries.setdefault(str(here), Entry(stat.S_IFDIR | stat.S_IMODE(mode)))
            elif stat.S_ISREG(mode):
                self.entries.setdefault(str(here), Entry(stat.S_IFREG | stat.S_IMODE(mode), source=here))
            else:
                raise CalmError(f"{here} is neither a file nor a folder", USAGE)
        return here

    def folder(self, path: Path) -> None:
        """An empty folder, such as the one that the program is to run in."""
        self.mirror(path)

    def _carry(self, path: Path) -> Path:
        """A file; one that the dynamic linker loads is remembered, for what it needs."""
        real = self.mirror(path.absolute())
        if real.is_file() and _is_elf(real):
            self._objects.add(real)
        return real

    def program(self, path: Path) -> None:
        """A program, or a script with its interpreters."""
        seen: set[Path] = set()
        while path not in seen:
            seen.add(path)
            real = self._carry(path)
            head = _head(real)
            if head.startswith(_ELF):
                return
            path = self._interpreter(real, head)

    def _interpreter(self, script: Path, head: bytes) -> Path:
        """Who runs a script: the shell, where it does not say."""
        if not head.startswith(b"#!"):
            return Path("/bin/sh")
        words = os.fsdecode(head[2:].split(b"\n")[0]).split()
        if not words:
            return Path("/bin/sh")
        interpreter = Path(words[0])
        if interpreter.name == "env":
            self._carry(interpreter)
            named = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
            if not named:
                raise CalmError(f"{script}: its first line names no interpreter", NOT_EXECUTABLE)
            return program.find(named[0])
        if not interpreter.is_file():
            raise CalmError(f"{script}: there is no interpreter {interpreter}", NOT_EXECUTABLE)
        return interpreter

    def library(self, path: Path) -> None:
        """One to preload."""
        self._carry(path)

    def add(self, path: Path) -> None:
        """What the user wants to have there: a file, or a folder with all below it."""
        absolute = path.absolute()
        if not absolute.exists():
            raise CalmError(f"--add {path}: no such file or folder", USAGE)
        if absolute.is_file():
            if os.access(absolute, os.X_OK):
                self.program(absolute)
            else:
                self._carry(absolute)
            return
        self.mirror(absolute)
        for folder, names, files in os.walk(absolute):
            for name in sorted(names + files):
                inner = Path(folder, name)
                mode = inner.lstat().st_mode
                if stat.S_ISLNK(mode):
                    # Where it leads may be missing, or be outside, which nobody has asked for.
                    self.mirror(inner.parent)
                    self.entries.setdefault(
                        str(inner.parent.resolve() / inner.name),
                        Entry(stat.S_IFLNK | 0o777, os.fsencode(inner.readlink())),
                    )
                elif stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                    self._carry(inner)

    def finish(self) -> None:
        """Adds what all of them need, and what every system has, unless it was carried from here."""
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
        """The whole archive. A folder comes before what lies in it."""
        for name in sorted(self.entries, key=lambda name: name.split("/")):
            if name != "/":
                entry = self.entries[name]
                content = entry.source.read_bytes() if entry.source else entry.content
                _write_entry(file, name.lstrip("/"), entry.mode, content)
        _write_entry(file, "TRAILER!!!", 0, b"")


def _write_entry(file: BinaryIO, name: str, mode: int, content: bytes) -> None:
    """Header, name and content, each padded to four bytes. All belongs to root."""
    path = os.fsencode(name) + b"\0"
    fields = [0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0]
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + path
    file.write(header + bytes(-len(header) % 4) + content + bytes(-len(content) % 4))


def hints(command: Iterable[str], carried: Iterable[Path]) -> list[str]:
    """Arguments that are files here and would not be there: what to say about each."""
    roots = [*map(Path, _KERNELS), *(path.absolute() for path in carried)]
    found = []
    for argument in command:
        for text in dict.fromkeys([argument, argument.partition("=")[2]]):
            path = Path(text)
            # Not path.exists(), which raises where an argument is too long for a file's name.
            if not text or text in (".", "/") or not os.access(text, os.F_OK):
                continue
            if not any(path.absolute().is_relative_to(root) for root in roots):
                found.append(f"{text} is here, but not in the guest: --add {shlex.quote(text)} carries it")
            break
    return found
