"""The knobs of each allocator that are worth a search, and how a setting reaches a program.

A knob may also stay unset, which is a choice of its own: glibc adapts its mmap threshold for as long as none
of trim_threshold, top_pad, mmap_threshold and mmap_max is set, so no value stands for "not set".
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from calm.core import allocators, environment
from calm.core.allocators import CALM_OPTIONS, GLIBC
from calm.core.environment import TUNABLES
from calm.core.errors import USAGE, CalmError

SENSITIVITY = "PTLBMALLOC2_SENSITIVITY"
OFFLOAD = "calmoffload"
NAMES = (GLIBC, "calmalloc", "ptlbmalloc2", OFFLOAD)
_STEP = 64 << 10
_SEPARATOR = {TUNABLES: ":", CALM_OPTIONS: ","}

Knobs = Mapping[str, tuple[str, ...]]
"""The values of each knob, in their order; the knobs from the one that affects most programs to the least."""


@dataclass(frozen=True)
class Setting:
    """An allocator, and the knobs that are set; without any it has its defaults."""

    allocator: str
    values: Mapping[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.allocator, frozenset(self.values.items())))

    @property
    def label(self) -> str:
        """For a table: short, and the same for the same setting."""
        parts = (f"{name.removeprefix('glibc.malloc.')}={_short(name, v)}" for name, v in self.values.items())
        return f"{self.allocator}: {' '.join(parts) or 'defaults'}"

    def without(self, names: Sequence[str]) -> "Setting":
        return Setting(self.allocator, {name: v for name, v in self.values.items() if name not in names})

    def replace(self, name: str, value: str) -> "Setting":
        return Setting(self.allocator, {**self.values, name: value})


class Point(NamedTuple):
    """A setting's ratios to the baseline's."""

    setting: Setting
    time: float
    memory: float

    def scaled(self, factor: float) -> "Point":
        return Point(self.setting, self.time * factor, self.memory * factor)


def _short(name: str, value: str) -> str:
    """32M for 33554432, if it is a number of bytes."""
    if value.isdigit() and name.endswith(("threshold", "top_pad", "tcache_max")):
        number = int(value)
        for shift, unit in ((30, "G"), (20, "M"), (10, "k")):
            if number and number % (1 << shift) == 0:
                return f"{number >> shift}{unit}"
    return value


def between(value: str, other: str) -> str | None:
    """Half way between two sizes, in steps of 64 KiB; None if nothing is between, or they are no sizes."""
    if not (value.isdigit() and other.isdigit()):
        return None
    middle = (int(value) + int(other)) // 2 // _STEP * _STEP
    return str(middle) if min(int(value), int(other)) < middle < max(int(value), int(other)) else None


def _powers(first: int, last: int) -> tuple[str, ...]:
    return tuple(str(1 << exponent) for exponent in range(first, last + 1))


def _knobs() -> dict[str, Knobs]:
    """Of each allocator: of glibc those that it lists, or all if it lists none."""
    version = tuple(map(int, re.findall(r"\d+", os.confstr("CS_GNU_LIBC_VERSION") or "")))
    knobs = {
        "trim_threshold": _powers(14, 30),
        "top_pad": _powers(12, 26),
        # glibc refuses more than half of a heap.
        "mmap_threshold": _powers(14, 25),
        "arena_max": _powers(0, 6),
        "tcache_count": ("0", "15", "31", "63", "127", "255", "1023", "4095", "16383", "65535"),
        # From 2.42 on thread caches hold large blocks; before, the default is the maximum.
        "tcache_max": ("64", "128", "256", "512", *(_powers(12, 22) if version >= (2, 42) else ())),
        "hugetlb": ("1",),  # 2 takes from a pool that the administrator has to reserve
        "mmap_max": ("0", "1048576"),
        "mxfast": ("0", "32", "64", "160"),
        "tcache_unsorted_limit": ("1", "4", "16", "64", "256"),
    }
    all_knobs = {f"glibc.malloc.{name}": values for name, values in knobs.items()}
    known = environment.known_tunables() or all_knobs
    glibc = {name: values for name, values in all_knobs.items() if name in known}
    shared = {f"glibc.malloc.{name}" for name in ("arena_max", "tcache_count", "tcache_max", "mxfast")}
    return {
        GLIBC: glibc,
        # Those that trade time for memory, without those for debugging and for sandboxes.
        "calmalloc": {
            "memory_per_cpu": ("0", "1", "2", "4", "8", "16", "32", "64", "128", "256", "512"),
            "background": ("off",),
            "huge_pages": ("never",),
        },
        # Its own, and those of glibc's that do not disable it.
        "ptlbmalloc2": {
            SENSITIVITY: ("0.1", "0.2", "0.5", "2", "5", "10", "20", "50", "100"),
            **{name: values for name, values in glibc.items() if name in shared},
        },
    }


def _set_by_user(inherited: Mapping[str, str]) -> set[str]:
    found = {*environment.given(inherited), *inherited.keys() & {SENSITIVITY}}
    found |= {tunable for variable, tunable in environment.ALIASES.items() if variable in inherited}
    return found | {item.partition("=")[0] for item in inherited.get(CALM_OPTIONS, "").split(",")}


def parse_names(texts: Sequence[str]) -> list[str]:
    names = [name.strip() for text in texts for name in text.split(",")]
    for name in names:
        if name not in NAMES:
            raise CalmError(f"{name!r} has no settings to search; {', '.join(NAMES)} have", USAGE)
        if names.count(name) > 1:
            raise CalmError(f"allocator {name!r} is given twice", USAGE)
    # In one order, so that all workers of a study have the same space.
    return sorted(names, key=NAMES.index)


def present() -> list[str]:
    """The allocators that can be searched here, without the one that is searched only if named."""
    return [name for name in NAMES if allocators.is_here(name) and name != OFFLOAD]


def spaces(names: Sequence[str], inherited: Mapping[str, str]) -> tuple[dict[str, Knobs], list[str]]:
    """The knobs of each allocator; and notes about variables that are set already, and stay so."""
    knobs = _knobs()
    fixed = _set_by_user(inherited)
    found: dict[str, Knobs] = {}
    for name in names:
        allocators.parse(name)  # raises CalmError before the search begins
        own = knobs["calmalloc" if name == OFFLOAD else name]
        found[name] = {knob: values for knob, values in own.items() if knob not in fixed}
    notes = [
        f"{variable}={value} is set, and stays so in every run: it is not searched"
        for variable, value in inherited.items()
        if value and variable.startswith(environment.SETTINGS)
    ]
    return found, notes


def variables(setting: Setting, inherited: Mapping[str, str]) -> dict[str, str]:
    """What to set in the program's environment, behind what is set there already."""
    items: dict[str, list[str]] = {}
    for name, value in setting.values.items():
        if name == SENSITIVITY:
            items[SENSITIVITY] = [value]
        else:
            variable = TUNABLES if name.startswith("glibc.") else CALM_OPTIONS
            items.setdefault(variable, []).append(f"{name}={value}")
    if CALM_OPTIONS in items and (existing := inherited.get(CALM_OPTIONS)):
        items[CALM_OPTIONS].insert(0, existing)
    own = {variable: _SEPARATOR.get(variable, "").join(each) for variable, each in items.items()}
    # This merges GLIBC_TUNABLES and LD_PRELOAD with what is inherited.
    return replace(allocators.parse(setting.allocator), environment=own).variables(inherited)


def line(setting: Setting, inherited: Mapping[str, str], command: Sequence[str]) -> str:
    chosen = variables(setting, inherited)
    if setting.allocator == GLIBC:
        chosen.pop("LD_PRELOAD", None)  # the environment has it anyway
    words = [f"{name}={shlex.quote(value)}" for name, value in chosen.items()]
    return " ".join([*words, shlex.join(command)])
