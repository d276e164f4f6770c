"""The calls that led to an allocation, without those within allocators and the languages' libraries."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from calm.core import symbols
from calm.core.proc import Mapping
from calm.core.symbols import Address

# Libraries between a program and its allocator: those of the languages, and calm's.
_BETWEEN = re.compile(
    r"^(lib(c(?!-[a-z])|stdc\+\+|c\+\+(abi)?|calmcolors|calmalloc|ptlbmalloc2|jemalloc|mimalloc|snmalloc(shim)?"
    r"|rpmalloc(wrap)?|tcmalloc)([-_.][^/]*)?\.so[^/]*|ld-linux[^/]*)$"
)
_NESTED = re.compile(r"<[^<>]*>|\([^()]*\)|\[[^][]*\]")
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
"""The calls, the innermost first; empty if they are not known."""


def _locate(address: int, mappings: Sequence[Mapping]) -> Address | None:
    # The call precedes its return address.
    place = address - 1
    for mapping in mappings:
        if mapping.start <= place < mapping.end and mapping.path.startswith("/"):
            path = mapping.path.removesuffix(" (deleted)")
            return Address(path, place - mapping.start + mapping.offset, "")
    return None


def name_of(function: str) -> str:
    """A demangled function's name, without its return type and all arguments."""
    plain, left = "", function.replace("->", "")
    while plain != left:
        plain, left = left, _NESTED.sub("", left)
    words = [word for word in plain.split() if word not in ("const", "volatile", "&", "&&")]
    operator = next((at for at, word in enumerate(words) if word.endswith("operator")), -1)
    return " ".join(words[operator:])


def _is_between(call: Call, allocator: str) -> bool:
    inner = call.module == allocator or _BETWEEN.match(call.module)
    return bool(inner or _LIBRARY_CODE.match(name_of(call.function)))


def resolve(
    stacks: Collection[tuple[int, ...]], mappings: Sequence[Mapping], allocator: str = ""
) -> dict[tuple[int, ...], Site]:
    """The program's own calls in each stack of return addresses, or all calls if none is its own.

    The allocator is the file name of its library.
    """
    located = {frame: _locate(frame, mappings) for stack in stacks for frame in stack}
    known = symbols.resolve({address for address in located.values() if address is not None})

    def calls(frame: int) -> Iterator[Call]:
        if (address := located[frame]) is None:
            yield Call(f"{frame:#x}", None, "")
            return
        module = address.module.rpartition("/")[2]
        for each in reversed(known[address]):
            # A place without a symbol is named by its offset in the file.
            yield Call(each.function or f"{module}+{address.offset:#x}", each.source, module)

    found = {}
    for stack in stacks:
        every = [call for frame in stack for call in calls(frame)]
        found[stack] = tuple([call for call in every if not _is_between(call, allocator)] or every)
    return found
