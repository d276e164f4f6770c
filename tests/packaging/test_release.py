"""The recipes of other distributions, and the checks before a release."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from packaging_helpers import REPOSITORY, VERSION, run

ARCH = REPOSITORY / "packaging/arch/PKGBUILD"
NIX = REPOSITORY / "packaging/nix"
CHECK = REPOSITORY / "scripts/release-check"
RESULT = re.compile(r"^(ok|failed|skipped) +([\w-]+) +(.+)$", re.MULTILINE)
# Where Arch's name is not that of PyPI.
ARCH_NAMES = {"jinja2": "jinja", "prometheus-client": "prometheus_client"}


def needed() -> set[str]:
    """The Python modules that calm depends on, and those for pictures, under their registry's names."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    listed = re.findall(r"^(?:dependencies|plot) = \[\n(.*?)\n\]", text, re.M | re.S)
    assert len(listed) == 2
    return set(re.findall(r'"([\w-]+)>=', "\n".join(listed)))


def test_the_arch_recipe_is_read(tmp_path: Path) -> None:
    run("bash", "-n", ARCH)
    if shutil.which("makepkg") is None:
        pytest.skip("makepkg is not installed: it is in the Debian package makepkg")
    assert run(CHECK, "arch").stdout.startswith("ok")
    # What calm needs is what its package depends on, or suggests.
    text = ARCH.read_text()
    for name in needed():
        assert f"python-{ARCH_NAMES.get(name, name)}" in text


@pytest.mark.long
def test_the_alpine_recipe_builds() -> None:
    assert re.match(r"ok|skipped", run(CHECK, "alpine").stdout)


# nixpkgs is not here: stand-ins return what they are called with.
STUB = """
import PACKAGE/package.nix {
  lib = {
    cleanSource = path: path;
    cleanSourceWith = { src, filter }: map (name: filter name "directory") [ "/a/build" "/a/src" ];
    licenses.mit = "MIT";
  };
  stdenv.mkDerivation = attributes: attributes;
  cmake = "cmake";
  ninja = "ninja";
  python3.withPackages = modules: modules (builtins.listToAttrs (map (name: { inherit name; value = name; })
    (builtins.fromJSON ''NEEDED'')));
}
"""


def test_the_nix_recipe_evaluates(tmp_path: Path) -> None:
    if shutil.which("nix-instantiate") is None:
        pytest.skip("nix-instantiate is not installed: it is in the Debian package nix-bin")
    for path in NIX.glob("*.nix"):
        run("nix-instantiate", "--parse", path, HOME=str(tmp_path))
    text = STUB.replace("PACKAGE", str(NIX)).replace("NEEDED", json.dumps(sorted(needed())))
    options = ("--eval", "--strict", "--json", "--store", "dummy://")
    found = json.loads(run("nix-instantiate", *options, "-E", text, HOME=str(tmp_path)).stdout)
    assert found["version"] == VERSION
    assert set(found["buildInputs"][0]) == needed()
    assert found["src"] == [False, True]
    options = re.findall(r"^option\((\w+)", (REPOSITORY / "CMakeLists.txt").read_text(), re.MULTILINE)
    assert {flag[2:].partition("=")[0] for flag in found["cmakeFlags"]} <= set(options)


def test_the_checks_are_listed() -> None:
    listed = [line.split()[0] for line in run(CHECK, "--list").stdout.splitlines()]
    assert {"version", "changelog", "tree", "tests", "deb", "deb-arm64", "wheel", "crate", "oci"} <= set(
        listed
    )


def test_checks_pass_and_fail() -> None:
    """The changelog has no date before the release."""
    found = run(CHECK, "version", "licences", "todo")
    assert [match[0] for match in RESULT.findall(found.stdout)] == ["ok", "ok", "ok"]
    assert found.stdout.splitlines()[-1] == "3 ok, 0 failed, 0 skipped"
    unreleased = f"## [{VERSION}]" not in (REPOSITORY / "CHANGELOG.md").read_text()
    found = run(CHECK, "changelog", fails=unreleased)
    if unreleased:
        assert found.stdout.startswith("failed   changelog      CHANGELOG.md has no line")


def test_a_missing_tool_skips_the_check(tmp_path: Path) -> None:
    found = run(sys.executable, CHECK, "nix", "arch", "oci", PATH=str(tmp_path), HOME=str(tmp_path))
    assert [match[0] for match in RESULT.findall(found.stdout)] == ["skipped"] * 3
    assert "nix-instantiate is missing: Debian's nix-bin has it" in found.stdout


def test_no_such_check() -> None:
    refused = run(CHECK, "everything", fails=True)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == (
        "release-check: error: there is no check 'everything'; --list prints them"
    )


@pytest.mark.long
def test_the_images(tmp_path: Path) -> None:
    """Built on a Debian root in place of the published image, and run."""
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None or shutil.which("buildah") is None:
        pytest.skip("needs root, mmdebstrap and buildah")
    storage = tmp_path / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "vfs"\nrunroot = "{tmp_path}/run"\ngraphroot = "{tmp_path}/graph"\n'
    )
    here = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs", "CONTAINERS_STORAGE_CONF": str(storage)}
    run(REPOSITORY / "scripts/debian-root", "make", "bookworm", tmp_path / "root")
    run("tar", "-C", tmp_path / "root", "--one-file-system", "-cf", tmp_path / "root.tar", ".")
    container = run("buildah", "from", "scratch", **here).stdout.strip()
    run("buildah", "add", container, tmp_path / "root.tar", "/", **here)
    run("buildah", "commit", "--rm", container, "localhost/base", **here)
    run("packaging/deb", cwd=REPOSITORY)
    run("packaging/oci/build", "--base", "localhost/base", cwd=REPOSITORY, **here)
    tools = run("buildah", "from", f"localhost/calmalloc-tools:{VERSION}", **here).stdout.strip()
    inside = ("buildah", "run", "--network", "host", tools, "--")
    assert run(*inside, "calm", "--version", **here).stdout == f"calm, version {VERSION}\n"
    mapped = run(*inside, "calm", "run", "-a", "calmalloc", "--", "cat", "/proc/self/maps", **here).stdout
    assert "libcalmalloc.so" in mapped
    (tmp_path / "empty").mkdir()
    (tmp_path / "Dockerfile").write_text(
        f"FROM localhost/base\nCOPY --from=localhost/calmalloc:{VERSION} /libcalmalloc.so /usr/local/lib/\n"
        "RUN LD_PRELOAD=/usr/local/lib/libcalmalloc.so grep libcalmalloc /proc/self/maps\n"
    )
    run("buildah", "bud", "--network", "host", "-f", tmp_path / "Dockerfile", tmp_path / "empty", **here)
    for name in ("root", "graph", "run"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)


def test_no_base_image() -> None:
    refused = run("packaging/oci/build", "--base", cwd=REPOSITORY, fails=True)
    assert (refused.returncode, refused.stderr) == (2, "usage: packaging/oci/build [--base IMAGE]\n")


@pytest.mark.parametrize("arguments", [("--arch", "sparc"), ("--arch",), ("arm64",)])
def test_packages_for_no_such_architecture(arguments: tuple[str, ...]) -> None:
    refused = run("packaging/deb", *arguments, cwd=REPOSITORY, fails=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("usage: packaging/deb [--arch ARCH]")
