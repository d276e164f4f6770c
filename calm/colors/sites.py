"""Where in a program a block was allocated: the calls that led to it, without those within allocators."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from calm.colors import pagemap
from calm.profile import symbols
from calm.profile.script import Address

# Between a program and the allocator: the languages' own libraries, and calm's.
_BETWEEN = re.compile(
    r"^(lib(c(?!-[a-z])|stdc\+\+|c\+\+(abi)?|calmcolors|calmalloc|ptlbmalloc2|jemalloc|mimalloc|snmalloc(shim)?"
    r"|rpmalloc(wrap)?|tcmalloc)([-_.][^/]*)?\.so[^/]*|ld-linux[^/]*)$"
)
_LIBRARY_CODE = re.compile(r"^(std::|__gnu_cxx::|operator new|alloc::|core::|__rust|__rdl)")


@dataclass(frozen=True)
class Call:
    """One function of a stack."""

    function: str
    source: str | None
    """FILE:LINE."""
    module: str

    def __str__(self) -> str:
        where = self.source or self.module
        return f"{self.function} ({where})" if where else self.function


Site = tuple[Call, ...]
"""The calls, the innermost first. Empty: not known."""


def _locate(address: int, mappings: Sequence[pagemap.Mapping]) -> Address | None:
    # The call is before the place that it returns to.
    place = address - 1
    for mapping in mappings:
        if mapping.start <= place < mapping.end and mapping.path.startswith("/"):
            path = mapping.path.removesuffix(" (deleted)")
            return Address(path, place - mapping.start + mapping.offset, "")
    return None


def name_of(function: str) -> str:
    """Of a demangled function, without what it returns, which stands before the name of a template's."""
    start = depth = 0
    for at, sign in enumerate(function):
        if depth == 0:
            if at == start and function.startswith("operator", at):
                break
            is_name = function[start:at] not in ("", "decltype")
            if sign == "(" and is_name and not function.startswith("(anonymous namespace)", at):
                break
            if function.startswith(" [clone ", at):
                break
            if sign == " ":
                start = at + 1
        if sign in "<([{":
            depth += 1
        elif sign in ">)]}" and function[at - 1 : at + 1] != "->":
            depth -= 1
    return function[start:]


def _is_between(call: Call, allocator: str) -> bool:
    inner = call.module == allocator or _BETWEEN.match(call.module)
    return bool(inner or _LIBRARY_CODE.match(name_of(call.function)))


def resolve(
    stacks: Collection[tuple[int, ...]], mappings: Sequence[pagemap.Mapping], allocator: str = ""
) -> Mapping[tuple[int, ...], Site]:
    """The program's own calls of each stack of return addresses; all where none is its own.

    The allocator is the name of its library.
    """
    located = {frame: _locate(frame, mappings) for stack in stacks for frame in stack}
    known = symbols.resolve({address for address in located.values() if address is not None})
    found: dict[tuple[int, ...], Site] = {}
    for stack in stacks:
        calls: list[Call] = []
        for frame in stack:
            address = located[frame]
            if address is None:
                calls.append(Call(f"{frame:#x}", None, ""))
                continue
            module = address.module.rpartition("/")[2]
            for each in reversed(known[address]):
                # Without a symbol it is a place in the file.
                name = each.function or f"{module}+{address.offset:#x}"
                calls.append(Call(name, each.source, module))
        own = [call for call in calls if not _is_between(call, allocator)]
        found[stack] = tuple(own or calls)
    return found
