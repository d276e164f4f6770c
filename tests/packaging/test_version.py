"""The version: one in the header, and the same wherever a file must repeat it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from packaging_helpers import BUILD, REPOSITORY, VERSION, run

SCRIPT = REPOSITORY / "scripts/version"
PLACES = (
    "include/calmalloc.h",
    "calm/__init__.py",
    "research/pyproject.toml",
    "rust/Cargo.toml",
    "packaging/alpine/APKBUILD",
    "packaging/arch/PKGBUILD",
    "packaging/debian/changelog",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that state the version."""
    for name in PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def test_one_version_everywhere() -> None:
    assert run(SCRIPT, "--check").stdout == f"{VERSION} everywhere\n"
    assert f'CALM_RELEASE "{VERSION}"' in (REPOSITORY / "include/calmalloc.h").read_text()


def test_what_is_built_has_it() -> None:
    assert (BUILD / f"libcalmalloc.so.{VERSION}").is_file()
    assert (
        f'set(PACKAGE_VERSION "{VERSION}")' in (BUILD / "installed/calmallocConfigVersion.cmake").read_text()
    )
    configuration = (REPOSITORY / "pyproject.toml").read_text()
    assert re.search(r'^dynamic = \["version"\]$', configuration, re.MULTILINE)


@pytest.mark.parametrize("name", PLACES[1:])
def test_another_version_is_found(tree: Path, name: str) -> None:
    path = tree / name
    path.write_text(path.read_text().replace(VERSION, "9.8.7", 1))
    found = run(SCRIPT, "--check", "--root", tree, fails=True)
    assert found.stdout == f"{name}: 9.8.7, but include/calmalloc.h has {VERSION}\n"
    path.write_text("")
    assert f"{name}: no version," in run(SCRIPT, "--check", "--root", tree, fails=True).stdout


def test_a_header_without_a_version(tree: Path) -> None:
    (tree / "include/calmalloc.h").write_text("")
    found = run(SCRIPT, "--check", "--root", tree, fails=True).stdout
    assert found.startswith("include/calmalloc.h: no line")


def test_a_new_version_is_written(tree: Path) -> None:
    assert run(SCRIPT, "--root", tree, "1.20.3").stdout == "1.20.3\n"
    # The changelog gets an entry by hand.
    left = run(SCRIPT, "--check", "--root", tree, fails=True).stdout
    assert left == f"packaging/debian/changelog: {VERSION}, but include/calmalloc.h has 1.20.3\n"


@pytest.mark.parametrize("text", ["1.2", "v1.2.3", "1.2.3-rc1", ""])
def test_what_is_no_version(tree: Path, text: str) -> None:
    refused = run(SCRIPT, "--root", tree, text, fails=True)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith(f"version: error: {text!r} is not a version")
    assert run(SCRIPT, "--root", tree).stdout == f"{VERSION}\n"
