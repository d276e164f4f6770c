"""Settings of malloc that glibc would ignore are reported by every command that runs a program."""

import os
import subprocess

import pytest
from calm_helpers import Calm

from calm.core import environment
from calm.core.environment import Bounds


@pytest.mark.parametrize(
    "name", ["TRIM_THRESHOLD", "TOP_PAD", "MMAP_THRESHOLD", "MMAP_MAX", "PERTURB", "CHECK"]
)
def test_an_underscore_is_missing(name: str) -> None:
    (warning,) = environment.warnings({f"MALLOC_{name}": "1"})
    assert f"MALLOC_{name} is set" in warning
    assert f"glibc reads MALLOC_{name}_, with an underscore" in warning
    assert environment.warnings({f"MALLOC_{name}_": "1"}) == []


@pytest.mark.parametrize("name", ["ARENA_MAX", "ARENA_TEST"])
def test_an_underscore_too_many(name: str) -> None:
    (warning,) = environment.warnings({f"MALLOC_{name}_": "1"})
    assert f"glibc reads MALLOC_{name}, without" in warning
    assert environment.warnings({f"MALLOC_{name}": "1"}) == []


def test_both_spellings() -> None:
    (warning,) = environment.warnings({"MALLOC_TOP_PAD": "1", "MALLOC_TOP_PAD_": "1"})
    assert "which is set too" in warning


def test_the_aliases_are_those_of_the_dynamic_linker() -> None:
    """What glibc reads is written in its dynamic linker."""
    with open("/proc/self/maps") as maps:  # noqa: PTH123 - of the test, not of calm
        linker = next(path for line in maps if "/ld-linux" in (path := line.split()[-1]))
    words = subprocess.run(["strings", linker], capture_output=True, text=True, check=True).stdout.split()
    found = {word for word in words if word.startswith("MALLOC_")} - {"MALLOC_", "MALLOC_TRACE"}
    if not found:
        pytest.skip("this glibc has no variables of the old kind")
    assert found == set(environment.ALIASES)


def test_the_list_of_this_glibc() -> None:
    known = environment.known_tunables()
    if known is None:
        pytest.skip("this glibc does not list its tunables")
    assert known["glibc.malloc.arena_max"].minimum == 1
    assert "glibc.malloc.trim_threshold" in known


LISTED = """\
glibc.rtld.nns: 0x4 (min: 0x1, max: 0x10)
glibc.malloc.perturb: 0 (min: 0, max: 255)
glibc.cpu.x86_ibt:
something else
"""


def test_reads_a_list() -> None:
    assert environment.parse_list(LISTED) == {
        "glibc.rtld.nns": Bounds(1, 16),
        "glibc.malloc.perturb": Bounds(0, 255),
        "glibc.cpu.x86_ibt": Bounds(None, None),
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("glibc.malloc.perturb=255", []),
        ("glibc.malloc.perturb=0xff:glibc.rtld.nns=020", []),
        ("glibc.cpu.x86_ibt=on", []),
        ("", []),
        (":glibc.malloc.perturb=1:", []),
        ("glibc.malloc.perturb=256", ["not within 0 to 255"]),
        ("glibc.malloc.perturb=-1", ["not within 0 to 255"]),
        ("glibc.rtld.nns=0x11", ["not within 1 to 16"]),
        ("glibc.malloc.perturb=much", ["'much' is not a number"]),
        ("glibc.malloc.perturb=", ["not name=value"]),
        ("glibc.malloc.pertrub=1", ["knows no glibc.malloc.pertrub"]),
        ("glibc.malloc.perturb", ["not name=value"]),
        ("glibc.malloc.perturb=1=2", ["not name=value"]),
        ("perturb=1:glibc.malloc.perturb=999", ["knows no perturb", "not within"]),
    ],
)
def test_tunables(value: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "known_tunables", lambda: environment.parse_list(LISTED))
    found = environment.warnings({"GLIBC_TUNABLES": value})
    assert len(found) == len(expected)
    for each, words in zip(found, expected, strict=True):
        assert words in each
        assert each.startswith("GLIBC_TUNABLES: ")


def test_where_glibc_cannot_be_asked_only_the_form_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "known_tunables", lambda: None)
    assert environment.warnings({"GLIBC_TUNABLES": "glibc.malloc.pertrub=1"}) == []
    assert len(environment.warnings({"GLIBC_TUNABLES": "glibc.malloc.pertrub"})) == 1


def test_of_two_the_last_counts() -> None:
    assert environment.given({"GLIBC_TUNABLES": "a=1:b:c=2:a=3"}) == {"a": "3", "c": "2"}


def test_a_usual_environment_has_nothing_to_tell() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    assert environment.warnings(clean) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "-a", "glibc", "--", "true"),
        ("stat", "--", "true"),
        ("compare", "-a", "glibc", "-n", "1", "--", "true"),
        ("tune", "advise", "--", "false"),
        ("tune", "search", "-a", "glibc", "--trials", "1", "--", "false"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_every_command_tells(calm: Calm, arguments: tuple[str, ...]) -> None:
    result = calm(*arguments, env={"MALLOC_TRIM_THRESHOLD": "1"})
    assert result.stderr.count("calm: MALLOC_TRIM_THRESHOLD is set, but glibc reads") == 1


def test_bench_tells(calm: Calm) -> None:
    # The case is looked up first, so any that can be run will do; a limit of nothing ends it.
    result = calm(
        *("bench", "run", "-a", "glibc:MALLOC_TOP_PAD=1", "-n", "1", "--no-touch", "--timeout", "10ms"),
        "glibc-simple",
    )
    assert result.stderr.count("calm: MALLOC_TOP_PAD is set, but glibc reads") == 1


def test_what_an_allocator_is_given_is_looked_at_too(calm: Calm) -> None:
    for arguments in (
        ("compare", "-a", "glibc,glibc:MALLOC_TOP_PAD=1", "-n", "1", "--", "true"),
        ("run", "-a", "glibc:MALLOC_TOP_PAD=1", "--", "true"),
    ):
        assert calm(*arguments).stderr.count("MALLOC_TOP_PAD is set, but") == 1
