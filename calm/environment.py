"""Settings of malloc in the environment that glibc would ignore without a word."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click

TUNABLES = "GLIBC_TUNABLES"

# The older variables, and the tunables that they are now. Some end in an underscore, and some do not.
ALIASES: Mapping[str, str] = {
    "MALLOC_TRIM_THRESHOLD_": "glibc.malloc.trim_threshold",
    "MALLOC_TOP_PAD_": "glibc.malloc.top_pad",
    "MALLOC_MMAP_THRESHOLD_": "glibc.malloc.mmap_threshold",
    "MALLOC_MMAP_MAX_": "glibc.malloc.mmap_max",
    "MALLOC_PERTURB_": "glibc.malloc.perturb",
    "MALLOC_CHECK_": "glibc.malloc.check",
    "MALLOC_ARENA_MAX": "glibc.malloc.arena_max",
    "MALLOC_ARENA_TEST": "glibc.malloc.arena_test",
}
_LINKER = re.compile(r"/ld(?:-linux[^/]*|64|-[\d.]+)\.so[.\d]*$")
_LISTED = re.compile(r"^(glibc\.[\w.]+): *(?:\S+ \(min: (\w+), max: (\w+)\))?$", re.MULTILINE)


@dataclass(frozen=True)
class Bounds:
    """The least and the most that a tunable takes; None where it is no number."""

    least: int | None
    most: int | None


def _number(text: str) -> int | None:
    """As strtoul reads it: decimal, 0x or 0 in front; a sign wraps around."""
    match = re.fullmatch(r"\s*([-+]?)(0[xX][0-9a-fA-F]+|\d+)", text)
    if not match:
        return None
    digits = match[2]
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits.startswith("0") else 10
    try:
        value = int(digits, base)
    except ValueError:
        return None
    return (-value) % (1 << 64) if match[1] == "-" else value


def parse_list(text: str) -> dict[str, Bounds]:
    """Reads what `ld.so --list-tunables` writes."""
    return {
        name: Bounds(_number(least) if least else None, _number(most) if most else None)
        for name, least, most in _LISTED.findall(text)
    }


@cache
def known_tunables() -> Mapping[str, Bounds] | None:
    """The tunables of this glibc; None where it cannot be asked (before 2.33, or where there is no glibc)."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if _LINKER.search(path):
            try:
                asked = subprocess.run(
                    [path, "--list-tunables"], capture_output=True, text=True, timeout=10, check=False, env={}
                )
            except (OSError, subprocess.TimeoutExpired):
                return None
            return parse_list(asked.stdout) or None
    return None


def given(environment: Mapping[str, str]) -> dict[str, str]:
    """The well-formed settings in GLIBC_TUNABLES; of two that contradict each other glibc takes the last."""
    found: dict[str, str] = {}
    for item in environment.get(TUNABLES, "").split(":"):
        name, equals, value = item.partition("=")
        if name and equals:
            found[name] = value
    return found


def _of_variables(environment: Mapping[str, str]) -> list[str]:
    found = []
    for right in ALIASES:
        # MALLOC_CHECK and MALLOC_PERTURB are as easily misspelt as the rest.
        wrong = right.removesuffix("_") if right.endswith("_") else right + "_"
        if wrong in environment:
            how = "with an underscore" if right.endswith("_") else "without an underscore"
            also = ", which is set too" if right in environment else ""
            found.append(f"{wrong} is set, but glibc reads {right}, {how} at its end{also}")
    return found


def _of_tunables(environment: Mapping[str, str], known: Mapping[str, Bounds] | None) -> list[str]:
    found = []
    for item in environment.get(TUNABLES, "").split(":"):
        name, equals, value = item.partition("=")
        if not item:
            continue
        if not equals or not name or not value or "=" in value:
            found.append(f"{TUNABLES}: {item!r} is not name=value: glibc ignores it, or all of the variable")
            continue
        if known is None:
            continue
        if name not in known:
            found.append(f"{TUNABLES}: this glibc knows no {name}, and ignores it")
            continue
        least, most = known[name].least, known[name].most
        if least is None or most is None:
            continue
        number = _number(value)
        if number is None:
            found.append(f"{TUNABLES}: {item}: {value!r} is not a number")
        elif not least <= number <= most:
            found.append(f"{TUNABLES}: {item} is not within {least} to {most}: glibc ignores it")
    return found


def tell(*more: Mapping[str, str]) -> None:
    """Says on standard error what `warnings` finds in this environment, and in what is set besides."""
    found = [warning for environment in (os.environ, *more) for warning in warnings(environment)]
    for warning in dict.fromkeys(found):
        click.echo(f"calm: {warning}", err=True)


def warnings(environment: Mapping[str, str]) -> list[str]:
    """One line for each setting of malloc that will not do what it seems to."""
    known = known_tunables() if environment.get(TUNABLES) else None
    return _of_variables(environment) + _of_tunables(environment, known)
