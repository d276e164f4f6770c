"""What can be set: the knobs of each allocator that are worth a search, and how a setting reaches a program.

Each knob may also be left alone, which is a choice of its own: glibc adapts its mmap threshold for as long
as none of trim_threshold, top_pad, mmap_threshold and mmap_max is set, so no value stands for "not set".
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calm import allocators, environment
from calm.allocators import CALM_OPTIONS, GLIBC, KNOWN, Allocator
from calm.environment import TUNABLES
from calm.errors import USAGE, CalmError

SENSITIVITY = "PTLBMALLOC2_SENSITIVITY"
NAMES = (GLIBC, "calmalloc", "ptlbmalloc2", "calmalloc-offload", "calmalloc-offload-sync")
_STEP = 64 << 10
_SEPARATOR = {TUNABLES: ":", CALM_OPTIONS: ","}


@dataclass(frozen=True)
class Knob:
    """One thing to set: what it is called, and its values in their order."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Space:
    """An allocator, and what of it is searched: from the knob that most programs feel to the least."""

    allocator: str
    knobs: tuple[Knob, ...]
    library: Path | None = None


@dataclass(frozen=True)
class Setting:
    """One choice: an allocator, and the knobs that are set. Without any it is the allocator as it comes."""

    allocator: str
    values: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """For a table: short, and the same for the same setting."""
        parts = [f"{name.removeprefix('glibc.malloc.')}={_short(name, value)}" for name, value in self.values]
        return f"{self.allocator}: {' '.join(parts)}" if parts else f"{self.allocator} as it comes"

    def without(self, name: str) -> "Setting":
        """The same with one knob left alone."""
        return Setting(self.allocator, tuple(pair for pair in self.values if pair[0] != name))

    def replace(self, name: str, value: str) -> "Setting":
        """The same with another value of one knob."""
        return Setting(
            self.allocator, tuple((each, value if each == name else old) for each, old in self.values)
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"allocator": self.allocator, "values": dict(self.values)}

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> "Setting":
        """What as_dict gave."""
        return Setting(
            str(found["allocator"]), tuple((str(name), str(value)) for name, value in found["values"].items())
        )


def _variable(name: str) -> str:
    """The variable that a knob is set by."""
    if name.startswith("glibc."):
        return TUNABLES
    return SENSITIVITY if name == SENSITIVITY else CALM_OPTIONS


def _short(name: str, value: str) -> str:
    """32M for 33554432, where it is bytes."""
    if value.isdigit() and name.endswith(("threshold", "top_pad", "tcache_max")):
        number = int(value)
        for shift, unit in ((30, "G"), (20, "M"), (10, "k")):
            if number and number % (1 << shift) == 0:
                return f"{number >> shift}{unit}"
    return value


def between(value: str, other: str) -> str | None:
    """Half way between two sizes, in steps of 64 KiB; None where nothing is between, or they are no sizes."""
    if not (value.isdigit() and other.isdigit()):
        return None
    middle = (int(value) + int(other)) // 2 // _STEP * _STEP
    return str(middle) if min(int(value), int(other)) < middle < max(int(value), int(other)) else None


def _powers(first: int, last: int) -> tuple[str, ...]:
    return tuple(str(1 << exponent) for exponent in range(first, last + 1))


def glibc_version() -> tuple[int, ...]:
    """Of the C library that runs this; empty where it is not glibc."""
    found = re.findall(r"\d+", os.confstr("CS_GNU_LIBC_VERSION") or "")
    return tuple(int(part) for part in found)


def _glibc_knobs() -> tuple[Knob, ...]:
    """Those that this glibc knows. Where it cannot be asked, those that there have been since 2.26."""
    # Thread caches of large blocks are newer; before, the default is the most there can be.
    tcache_max: tuple[str, ...] = ("64", "128", "256", "512")
    if glibc_version() >= (2, 42):
        tcache_max += _powers(12, 22)
    table = {
        "trim_threshold": _powers(14, 30),
        "top_pad": _powers(12, 26),
        # glibc refuses more than half of a heap.
        "mmap_threshold": _powers(14, 25),
        "arena_max": _powers(0, 6),
        "tcache_count": ("0", "15", "31", "63", "127", "255", "1023", "4095", "16383", "65535"),
        "tcache_max": tcache_max,
        "hugetlb": ("1",),  # 2 takes from a pool that somebody has to reserve: not for a search to decide
        "mmap_max": ("0", "1048576"),
        "mxfast": ("0", "32", "64", "160"),
        "tcache_unsorted_limit": ("1", "4", "16", "64", "256"),
    }
    known = environment.known_tunables()
    newer = {"hugetlb", "mxfast"}
    return tuple(
        Knob(f"glibc.malloc.{name}", values)
        for name, values in table.items()
        if (f"glibc.malloc.{name}" in known if known is not None else name not in newer)
    )


def _calmalloc_knobs() -> tuple[Knob, ...]:
    """What trades time for memory. What is there for debugging or for sandboxes is not searched."""
    table = {
        "slack": ("10", "25", "50", "200", "400", "800", "1600", "3200"),
        "policy": ("paper",),
        "purge_time": ("0", "2", "5", "10", "20"),
        "background": ("off",),
        "huge_pages": ("never",),
        "populate": ("never",),
    }
    return tuple(Knob(name, values) for name, values in table.items())


def _ptlbmalloc2_knobs() -> tuple[Knob, ...]:
    """Its own, and those of glibc's that do not make it stay out."""
    values = ("0.1", "0.2", "0.5", "2", "5", "10", "20", "50", "100")
    shared = {f"glibc.malloc.{name}" for name in ("arena_max", "tcache_count", "tcache_max", "mxfast")}
    return (
        Knob(SENSITIVITY, values),
        *(knob for knob in _glibc_knobs() if knob.name in shared),
    )


def _set_by_user(inherited: Mapping[str, str]) -> set[str]:
    """The knobs that the environment sets already."""
    found = set(environment.given(inherited))
    found |= {tunable for variable, tunable in environment.ALIASES.items() if variable in inherited}
    found |= {item.partition("=")[0] for item in inherited.get(CALM_OPTIONS, "").split(",") if item}
    if SENSITIVITY in inherited:
        found.add(SENSITIVITY)
    return found


def parse_names(texts: Sequence[str]) -> list[str]:
    """Reads comma-separated names of allocators."""
    names = [name.strip() for text in texts for name in text.split(",")]
    for name in names:
        if name not in NAMES:
            raise CalmError(f"nothing is known to search of {name!r}: there are {', '.join(NAMES)}", USAGE)
        if names.count(name) > 1:
            raise CalmError(f"allocator {name!r} is given twice", USAGE)
    # In one order, so that all workers of a study have the same space.
    return sorted(names, key=NAMES.index)


def present() -> list[str]:
    """The allocators that can be searched here; variants of one only where they are asked for."""
    return [name for name in NAMES if allocators.is_here(name) and KNOWN[name].variant_of is None]


def spaces(names: Sequence[str], inherited: Mapping[str, str]) -> tuple[list[Space], list[str]]:
    """The space of each allocator; and what to tell about settings that are there already and stay."""
    knobs = {
        GLIBC: _glibc_knobs,
        "calmalloc": _calmalloc_knobs,
        "ptlbmalloc2": _ptlbmalloc2_knobs,
    }
    fixed = _set_by_user(inherited)
    found = []
    for name in names:
        allocator = allocators.parse(name)
        # A variant that the environment contradicts is told of before the search begins.
        allocator.variables(inherited)
        own = knobs[KNOWN[name].variant_of or name]()
        found.append(Space(name, tuple(knob for knob in own if knob.name not in fixed), allocator.library))
    notes = [
        f"{variable}={inherited[variable]} is set, and stays so in every run: it is not searched"
        for variable in (TUNABLES, CALM_OPTIONS, SENSITIVITY, *environment.ALIASES)
        if inherited.get(variable)
    ]
    return found, notes


def variables(setting: Setting, space: Space, inherited: Mapping[str, str]) -> dict[str, str]:
    """What to set in the program's environment, behind what is there already."""
    by_variable: dict[str, list[str]] = {}
    for name, value in setting.values:
        variable = _variable(name)
        by_variable.setdefault(variable, []).append(value if variable == name else f"{name}={value}")
    own = {}
    for variable, items in by_variable.items():
        # GLIBC_TUNABLES is merged below, with the preload.
        if variable == CALM_OPTIONS and inherited.get(variable):
            items.insert(0, inherited[variable])
        own[variable] = _SEPARATOR.get(variable, "").join(items)
    option = KNOWN[setting.allocator].option
    return Allocator(setting.allocator, space.library, own, option).variables(inherited)


def line(setting: Setting, space: Space, inherited: Mapping[str, str], command: Sequence[str]) -> str:
    """What to type instead of the command."""
    chosen = variables(setting, space, inherited)
    if setting.allocator == GLIBC:
        chosen.pop("LD_PRELOAD", None)  # only what is there anyway
    words = [f"{name}={shlex.quote(value)}" for name, value in chosen.items()]
    return " ".join([*words, shlex.join(command)])
