"""Finds the user's program, and tells before it runs whether an allocator can be preloaded into it."""

import errno
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from calm.core import elf
from calm.core.errors import NOT_EXECUTABLE, NOT_FOUND, CalmError


def find(name: str) -> Path:
    """The file that execvp would run, or an error with the shell's exit code for it."""
    if found := shutil.which(name):
        return Path(found)
    folders = [""] if "/" in name else os.environ.get("PATH", os.defpath).split(":")
    # A folder of PATH that may not be looked into is passed over, as execvp does.
    for path in (Path(folder or ".") / name for folder in folders if name):
        if os.access(path, os.F_OK):
            raise CalmError(
                f"{path} {'is a directory' if path.is_dir() else 'is not executable'}", NOT_EXECUTABLE
            )
    if "/" in name:
        try:
            Path(name).stat()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise exec_error(name, error.errno or 0) from error
    raise CalmError(f"no such program: {name!r}", NOT_FOUND)


def with_variables(command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The command with these set for itself alone, and not for what starts it: as a preload would be."""
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]


def exec_error(name: str, error: int) -> CalmError:
    """What it means that exec refused a program."""
    code = NOT_FOUND if error == errno.ENOENT else NOT_EXECUTABLE
    return CalmError(f"cannot run {name!r}: {os.strerror(error)}", code)


def _is_static(path: Path) -> bool:
    """True for an ELF program without a dynamic linker; a script is judged by its interpreter."""
    with path.open("rb") as file:
        head = file.read(256)
    if head.startswith(b"#!"):
        words = head[2:].split(b"\n")[0].split()
        interpreter = Path(os.fsdecode(words[0])) if words else None
        # env(1) finds the interpreter in PATH.
        return bool(interpreter and interpreter.name != "env" and _is_static(interpreter))
    return elf.is_elf(path) and elf.interpreter(path) is None


def preload_obstacle(command: Sequence[str]) -> str | None:
    """Why the dynamic linker would silently ignore a preloaded allocator, or None."""
    try:
        path = find(command[0])
        mode = path.stat().st_mode
        if mode & (stat.S_ISUID | stat.S_ISGID) and os.geteuid() != 0:
            return f"{path} is set-user-ID: the allocator is not preloaded into it"
        if _is_static(path):
            return f"{path} is statically linked: no allocator can be preloaded into it"
    except (CalmError, OSError, elf.ElfError):
        pass
    return None
