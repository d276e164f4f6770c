"""The environment of measured programs: removal of allocators' settings, and warnings of ineffective ones."""

import os
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from calm.core import proc, report

TUNABLES = "GLIBC_TUNABLES"

# The older variables, and the tunables that replace them. Some end in an underscore, and some do not.
ALIASES: Mapping[str, str] = {
    f"MALLOC_{name.upper()}{end}": f"glibc.malloc.{name}"
    for end, names in (
        ("_", ("trim_threshold", "top_pad", "mmap_threshold", "mmap_max", "perturb", "check")),
        ("", ("arena_max", "arena_test")),
    )
    for name in names
}
# Settings of allocators and the dynamic linker: removed from what calm measures by itself.
SETTINGS = (
    *("LD_", "MALLOC_", "GLIBC_TUNABLES", "CALM_OPTIONS", "PTLBMALLOC2_", "MIMALLOC_", "TCMALLOC_"),
    *("JE_MALLOC_", "_RJEM_", "SNMALLOC_", "RPMALLOC_", "SCUDO_"),
)
_LINKER = re.compile(r"/ld(?:-linux[^/]*|64|-[\d.]+)\.so[.\d]*$")
_LISTED = re.compile(r"^(glibc\.[\w.]+): *(?:\S+ \(min: (\w+), max: (\w+)\))?$", re.MULTILINE)


def clean_environment(inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without any allocator's settings, and without ccache for programs that compile."""
    kept = os.environ if inherited is None else inherited
    clean = {name: value for name, value in kept.items() if not name.startswith(SETTINGS)}
    return clean | {"CCACHE_DISABLE": "1"}


class Bounds(NamedTuple):
    """The range of a tunable; None where it is no number."""

    minimum: int | None
    maximum: int | None


def _number(text: str) -> int | None:
    """As strtoul reads it: decimal, 0x or 0 in front; a sign wraps around."""
    match = re.fullmatch(r"\s*([-+]?)(0[xX][0-9a-fA-F]+|\d+)", text)
    if not match:
        return None
    digits = match[2]
    try:
        value = int(digits, 8 if re.match("0[0-9]", digits) else 0)
    except ValueError:
        return None
    return (-value) % (1 << 64) if match[1] == "-" else value


def parse_list(text: str) -> dict[str, Bounds]:
    """Reads what `ld.so --list-tunables` writes."""
    return {
        name: Bounds(_number(low) if low else None, _number(high) if high else None)
        for name, low, high in _LISTED.findall(text)
    }


@cache
def known_tunables() -> Mapping[str, Bounds] | None:
    """The tunables of this glibc; None where it does not list them (before 2.33), or there is no glibc."""
    linker = next((path for path in proc.files(os.getpid()) if _LINKER.search(path)), None)
    try:
        command = [linker or "", "--list-tunables"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False, env={})
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_list(listed.stdout) or None


def given(environment: Mapping[str, str]) -> dict[str, str]:
    """The well-formed settings in GLIBC_TUNABLES; of two that contradict each other glibc takes the last."""
    items = (item.partition("=") for item in environment.get(TUNABLES, "").split(":"))
    return {name: value for name, equals, value in items if name and equals}


def tell(*more: Mapping[str, str]) -> None:
    """Prints on standard error the `warnings` of this environment, and of what is set besides."""
    found = [warning for environment in (os.environ, *more) for warning in warnings(environment)]
    for warning in dict.fromkeys(found):
        report.warn(warning)


def warnings(environment: Mapping[str, str]) -> list[str]:
    """One line for each setting of malloc that glibc will ignore."""
    found = []
    for right in ALIASES:
        # MALLOC_CHECK and MALLOC_PERTURB are as easily misspelt as the rest.
        wrong, how = (right[:-1], "with") if right.endswith("_") else (right + "_", "without")
        if wrong in environment:
            also = ", which is set too" if right in environment else ""
            found.append(f"{wrong} is set, but glibc reads {right}, {how} an underscore at its end{also}")
    items = [item for item in environment.get(TUNABLES, "").split(":") if item]
    problems = (_problem(item, known_tunables()) for item in items)
    return found + [f"{TUNABLES}: {problem}" for problem in problems if problem]


def _problem(item: str, known: Mapping[str, Bounds] | None) -> str | None:
    name, _, value = item.partition("=")
    if not name or not value or "=" in value:
        return f"{item!r} is not name=value: glibc ignores it, or all of the variable"
    if known is None:
        return None
    if name not in known:
        return f"this glibc knows no {name}, and ignores it"
    (low, high), number = known[name], _number(value)
    if low is None or high is None:
        return None
    if number is None:
        return f"{item}: {value!r} is not a number"
    return None if low <= number <= high else f"{item} is not within {low} to {high}: glibc ignores it"
