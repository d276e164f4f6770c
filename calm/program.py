"""Finding the user's program, and seeing before it runs whether an allocator can be put under it."""

import errno
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from calm.errors import NOT_EXECUTABLE, NOT_FOUND, CalmError

_PT_INTERP = 3


def find(name: str) -> Path:
    """The file that execvp would run, or an error with the shell's exit code for it."""
    if "/" in name:
        candidates = [Path(name)]
    else:
        path = os.environ.get("PATH", os.defpath)
        candidates = [Path(directory or ".") / name for directory in path.split(":")]
    # A folder of PATH that may not be looked into is passed over, as execvp does.
    present = [candidate for candidate in candidates if os.access(candidate, os.F_OK)] if name else []
    for candidate in present:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    if present:
        what = "is a directory" if present[0].is_dir() else "is not executable"
        raise CalmError(f"{present[0]} {what}", NOT_EXECUTABLE)
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
            # env(1) looks the interpreter up, as this process would not.
            return bool(interpreter and interpreter.name != "env" and _is_static(interpreter))
        if not head.startswith(b"\x7fELF\x02\x01"):
            return False
        (table,) = struct.unpack_from("<Q", head, 0x20)
        size, count = struct.unpack_from("<HH", head, 0x36)
        file.seek(table)
        headers = file.read(size * count)
    return all(struct.unpack_from("<I", headers, i * size)[0] != _PT_INTERP for i in range(count))


def preload_obstacle(command: Sequence[str]) -> str | None:
    """Why the dynamic linker would silently ignore a preloaded allocator, or None."""
    try:
        path = find(command[0])
        mode = path.stat().st_mode
        if mode & (stat.S_ISUID | stat.S_ISGID) and os.geteuid() != 0:
            return f"{path} is set-user-ID: the allocator is not preloaded into it"
        if _is_static(path):
            return f"{path} is statically linked: no allocator can be preloaded into it"
    except (OSError, struct.error):
        pass
    return None
