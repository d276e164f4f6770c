"""The functions at places in the files of programs and libraries, each file read once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from calm.core import elf, symbols
from calm.core.profile_model import Frame
from calm.core.symbols import Address


class Place(NamedTuple):
    """An offset in a file."""

    path: str
    """"" where no file is known: then the offset is an address."""
    offset: int
    build_id: str = ""
    """Of the file that was meant; "" if any will do."""
    module: str = ""
    """What reports call the file; "" is its name."""

    @property
    def name(self) -> str:
        return self.module or self.path.rpartition("/")[2]

    @property
    def unnamed(self) -> str:
        """What a place is called where no function is known."""
        return f"{self.name}+{self.offset:#x}" if self.name else f"{self.offset:#x}"


def _changed(places: Iterable[Place]) -> set[str]:
    """Files that are no longer those that were meant."""
    changed = set()
    for path, build_id in {(each.path, each.build_id) for each in places if each.path and each.build_id}:
        try:
            if elf.build_id(path) != build_id:
                changed.add(path)
        except elf.ElfError:
            pass  # its functions will not be found
    return changed


def _by_table(places: Iterable[Place]) -> dict[Place, str]:
    """The names that a file's own symbols have, for what no tool could name."""
    by_file: dict[str, list[Place]] = {}
    for place in places:
        by_file.setdefault(place.path, []).append(place)
    found = {}
    for path, of_file in by_file.items():
        try:
            functions = elf.functions(path)
        except elf.ElfError:
            continue
        for place in of_file:
            address = symbols.file_address(path, place.offset)
            if address is not None and (name := functions.at(address)):
                found[place] = name
    return found


def frames(places: Collection[Place]) -> tuple[Mapping[Place, tuple[Frame, ...]], list[str]]:
    """The functions at each place, the outermost first, and notes about files that cannot be used."""
    changed = _changed(places)
    usable = {
        each: Address(each.path, each.offset, "")
        for each in set(places)
        if each.path and each.path not in changed
    }
    resolved = symbols.resolve(set(usable.values()))
    named = {each: resolved[address] for each, address in usable.items() if resolved[address][-1].function}
    by_table = _by_table(usable.keys() - named.keys())
    plain = symbols.demangle(set(by_table.values()))
    found: dict[Place, tuple[Frame, ...]] = {}
    for each in set(places):
        if each in named:
            found[each] = tuple(replace(frame, module=each.name) for frame in named[each])
        else:
            name = by_table.get(each, each.unnamed)
            found[each] = (Frame(plain.get(name, name), each.name),)
    notes = [
        f"{path} is not the file that the profile was recorded of: its functions are not named"
        for path in sorted(changed)
    ]
    return found, notes
