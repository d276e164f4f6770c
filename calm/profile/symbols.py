"""Addresses become functions: inlined ones too, demangled, with the line of the source where it is known.

perf gives the symbol that an address lies in; llvm-symbolizer, or else addr2line, reads the debugging
information for the rest. Each file is asked about once, with all its addresses. Where neither tool is there,
perf's symbols stay, demangled by c++filt if that is there.
"""

import json
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from pathlib import Path

from calm.profile.model import Frame
from calm.profile.script import Address

_PT_LOAD = 1
# Of a function, by the older way of Rust's, and of its crate by the newer.
_RUST_HASH = re.compile(r"::h[0-9a-f]{16}$|(?<=\w)\[[0-9a-f]{2,16}\](?=::)")
_SPELLED = re.compile(r"\$(LT|GT|RF|BP|C|LP|RP|SP|u[0-9a-f]{1,6})\$")
_SIGNS = {"LT": "<", "GT": ">", "RF": "&", "BP": "*", "C": ",", "LP": "(", "RP": ")", "SP": "@"}
_UNKNOWN = ("", "??", "[unknown]")
# Debugging information of a large program takes a while to read; beyond this, perf's symbols do.
_PATIENCE_S = 60

Inlined = list[tuple[str, str | None]]
"""Functions at one address, the innermost first, each with its line."""


@lru_cache(maxsize=1024)
def _segments(path: str) -> tuple[tuple[int, int, int], ...]:
    """What of a file is loaded where: offset, address, size."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(64)
            if head[:6] != b"\x7fELF\x02\x01":
                return ()
            (table,) = struct.unpack_from("<Q", head, 0x20)
            size, count = struct.unpack_from("<HH", head, 0x36)
            file.seek(table)
            headers = file.read(size * count)
        found = [struct.unpack_from("<IIQQQQ", headers, i * size) for i in range(count)]
    except (OSError, struct.error):
        return ()
    return tuple(
        (offset, address, length) for kind, _, offset, address, _, length in found if kind == _PT_LOAD
    )


def file_address(path: str, offset: int) -> int | None:
    """The address that a place in a file has by its own reckoning."""
    for start, address, length in _segments(path):
        if start <= offset < start + length:
            return offset - start + address
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
            timeout=_PATIENCE_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _line(name: str, line: int) -> str | None:
    return f"{name.rpartition('/')[2]}:{line}" if name not in _UNKNOWN and line > 0 else None


def _by_llvm(tool: str, path: str, addresses: list[int]) -> dict[int, Inlined]:
    text = "".join(f"{address:#x}\n" for address in addresses)
    found: dict[int, Inlined] = {}
    for line in _run([tool, f"--obj={path}", "--output-style=JSON"], text).splitlines():
        try:
            answer = json.loads(line)
            found[int(answer["Address"], 16)] = [
                (symbol["FunctionName"], _line(symbol["FileName"], symbol["Line"]))
                for symbol in answer.get("Symbol", [])
            ]
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _by_addr2line(tool: str, path: str, addresses: list[int]) -> dict[int, Inlined]:
    text = "".join(f"{address:#x}\n" for address in addresses)
    found: dict[int, Inlined] = {}
    lines = _run([tool, "-aifCe", path], text).splitlines()
    current: Inlined = []
    at = 0
    while at < len(lines):
        if re.fullmatch(r"0x[0-9a-f]+", lines[at]):
            current = found.setdefault(int(lines[at], 16), [])
            at += 1
        elif at + 1 < len(lines):
            name, _, number = lines[at + 1].partition(" (disc")[0].rpartition(":")
            current.append((lines[at], _line(name, int(number) if number.isdigit() else 0)))
            at += 2
        else:
            break
    return found


_TOOLS: tuple[tuple[str, Callable[[str, str, list[int]], dict[int, Inlined]]], ...] = (
    ("llvm-symbolizer", _by_llvm),
    ("addr2line", _by_addr2line),
)


def demangle(names: Collection[str]) -> dict[str, str]:
    """C++ and Rust names as their languages write them; those of neither are left out."""
    mangled = sorted({name for name in names if name.startswith(("_Z", "_R"))})
    tool = shutil.which("c++filt") or shutil.which("llvm-cxxfilt")
    if not mangled or tool is None:
        return {}
    plain = _run([tool], "".join(f"{name}\n" for name in mangled)).splitlines()
    return dict(zip(mangled, plain, strict=True)) if len(plain) == len(mangled) else {}


def _tidy(name: str) -> str:
    """Without Rust's hashes, and with the signs that its older names spell out."""
    name = _RUST_HASH.sub("", name)
    if not _SPELLED.search(name):
        return name
    plain = _SPELLED.sub(lambda sign: _SIGNS.get(sign[1]) or chr(int(sign[1][1:], 16)), name)
    return plain.replace("..", "::").replace("_<", "<")


def _module(address: Address) -> str:
    return "kernel" if address.kernel else address.module.rpartition("/")[2] or address.module


def resolve(addresses: Collection[Address]) -> Mapping[Address, tuple[Frame, ...]]:
    """The functions at each address, the outermost first."""
    tool = next(((path, read) for name, read in _TOOLS if (path := shutil.which(name))), None)
    by_file: dict[str, dict[int, Address]] = {}
    for address in addresses:
        if not address.kernel and (place := file_address(address.module, address.offset)) is not None:
            by_file.setdefault(address.module, {})[place] = address
    inlined: dict[Address, Inlined] = {}
    if tool is not None:
        for path, places in by_file.items():
            for place, functions in tool[1](tool[0], path, sorted(places)).items():
                if place in places and functions and functions[0][0] not in _UNKNOWN:
                    inlined[places[place]] = functions
    names = {address.symbol for address in addresses}
    names |= {name for functions in inlined.values() for name, _ in functions}
    demangled = demangle(names)
    found: dict[Address, tuple[Frame, ...]] = {}
    for address in addresses:
        functions = inlined.get(address) or [(address.symbol, None)]
        module = _module(address)
        frames = [
            Frame(
                _tidy(demangled.get(name, name)),
                module,
                address.kernel,
                inlined=index < len(functions) - 1,
                source=source,
            )
            for index, (name, source) in enumerate(functions)
        ]
        found[address] = tuple(reversed(frames))
    return found
