"""The functions at addresses: inlined ones too, demangled, with the line of the source where it is known.

perf gives the symbol of an address; llvm-symbolizer, or else addr2line, reads the rest from the debugging
information, one file at a time. Without these tools perf's symbols remain, demangled by c++filt where that is
installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from calm.core import elf
from calm.core.profile_model import Frame

# Names in brackets that are neither the kernel's nor one of its modules'.
_USERS = ("[vdso", "[vsyscall", "[heap", "[stack", "[unknown", "[uprobes", "[anon")


@dataclass(frozen=True)
class Address:
    """A place in the code: in a file by its offset there, in the kernel by its address."""

    module: str
    """The file's path, or what perf calls the kernel's."""
    offset: int
    symbol: str
    """perf's name of it, mangled; "[unknown]" if there is none."""

    @property
    def kernel(self) -> bool:
        """Belongs to the kernel or one of its modules."""
        return self.module.startswith("[") and not self.module.startswith(_USERS)


# The hash of a function in Rust's older names, and of its crate in the newer ones.
_RUST_HASH = re.compile(r"::h[0-9a-f]{16}$|(?<=\w)\[[0-9a-f]{2,16}\](?=::)")
_SPELLED = re.compile(r"\$(LT|GT|RF|BP|C|LP|RP|SP|u[0-9a-f]{1,6})\$")
_SIGNS = {"LT": "<", "GT": ">", "RF": "&", "BP": "*", "C": ",", "LP": "(", "RP": ")", "SP": "@"}
_UNKNOWN = ("", "??", "[unknown]")
# A large program's debugging information takes a while to read; after this time perf's symbols are used.
_TIMEOUT_S = 60

Inlined = list[tuple[str, str | None]]
"""Functions at one address, the innermost first, each with its line."""


@lru_cache(maxsize=1024)
def _segments(path: str) -> tuple[elf.Segment, ...]:
    try:
        return elf.segments(path)
    except elf.ElfError:
        return ()


def file_address(path: str, offset: int) -> int | None:
    """The address of a place in a file, in the file's own numbering; None outside of its segments."""
    for segment in _segments(path):
        if segment.offset <= offset < segment.offset + segment.size:
            return offset - segment.offset + segment.address
    return None


def _run(arguments: list[str], text: str) -> str:
    try:
        return subprocess.run(
            arguments,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _line(name: str, line: int) -> str | None:
    return f"{name.rpartition('/')[2]}:{line}" if name not in _UNKNOWN and line > 0 else None


def _read(tool: Sequence[str], path: str, addresses: Iterable[int]) -> dict[int, Inlined]:
    """The functions at addresses of a file, by one of _TOOLS."""
    text = "".join(f"{address:#x}\n" for address in addresses)
    found: dict[int, Inlined] = {}
    current: Inlined = []
    rest = iter(_run([*tool, path], text).splitlines())
    for first in rest:
        if re.fullmatch(r"0x[0-9a-f]+", first):
            current = found.setdefault(int(first, 16), [])
        elif first:
            name, _, number = next(rest, "").partition(" (disc")[0].rpartition(":")
            current.append((first, _line(name, int(number) if number.isdecimal() else 0)))
    return found


_TOOLS = (
    ["llvm-symbolizer", "--output-style=GNU", "-a", "-i", "-f", "-C", "-e"],
    ["addr2line", "-a", "-i", "-f", "-C", "-e"],
)


def demangle(names: Collection[str]) -> dict[str, str]:
    """C++ and Rust names as their languages write them; those of neither are left out."""
    mangled = sorted({name for name in names if name.startswith(("_Z", "_R"))})
    plain = _run(["c++filt"], "".join(f"{name}\n" for name in mangled)).splitlines()
    return dict(zip(mangled, plain, strict=True)) if len(plain) == len(mangled) else {}


def _tidy(name: str) -> str:
    """Without the hashes of Rust's names, and with the signs that its older names spell out."""
    name = _RUST_HASH.sub("", name)
    if not _SPELLED.search(name):
        return name
    plain = _SPELLED.sub(lambda sign: _SIGNS.get(sign[1]) or chr(int(sign[1][1:], 16)), name)
    return plain.replace("..", "::").replace("_<", "<")


def _module(address: Address) -> str:
    return "kernel" if address.kernel else address.module.rpartition("/")[2] or address.module


def resolve(addresses: Collection[Address]) -> Mapping[Address, tuple[Frame, ...]]:
    """The functions at each address, the outermost first."""
    tool = next((tool for tool in _TOOLS if shutil.which(tool[0])), None)
    by_file: dict[str, dict[int, Address]] = {}
    for address in addresses:
        if not address.kernel and (place := file_address(address.module, address.offset)) is not None:
            by_file.setdefault(address.module, {})[place] = address
    inlined: dict[Address, Inlined] = {}
    if tool is not None:
        for path, places in by_file.items():
            for place, found in _read(tool, path, sorted(places)).items():
                if place in places and found and found[0][0] not in _UNKNOWN:
                    inlined[places[place]] = found
    functions = {address: inlined.get(address) or [(address.symbol, None)] for address in addresses}
    demangled = demangle({name for found in functions.values() for name, _ in found})
    return {
        address: tuple(
            Frame(
                _tidy(demangled.get(name, name)),
                _module(address),
                address.kernel,
                inlined=index < len(found) - 1,
                source=source,
            )
            for index, (name, source) in reversed(list(enumerate(found)))
        )
        for address, found in functions.items()
    }
