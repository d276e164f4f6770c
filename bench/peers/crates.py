"""Builds peers from their crates, in the workspace beside this file."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import versions

WORKSPACE = Path(__file__).resolve().parent
CRATES = {
    "jemalloc": "tikv-jemalloc-sys",
    "mimalloc": "libmimalloc-sys",
    "snmalloc": "snmalloc-sys",
    "rpmalloc": "rpmalloc-sys",
    "tcmalloc": "libtcmalloc-sys",
}
# The linker of older versions cannot build the crates; see README.md.
MINOR_OF_RUST = 90


def _rust() -> dict[str, str]:
    """What `rustc -vV` prints: its host, its release, and others; nothing without cargo."""
    if not (shutil.which("cargo") and shutil.which("rustc")):
        return {}
    said = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=False).stdout
    return dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)


def _is_new_enough() -> bool:
    minor = re.match(r"1\.(\d+)\.", _rust().get("release", ""))
    return minor is not None and int(minor[1]) >= MINOR_OF_RUST


def obstacle() -> str | None:
    """Why the crates cannot be built here, if so. The user's cargo may be newer than the system's."""
    if not _is_new_enough():
        home = os.environ.get("CARGO_HOME") or f"{os.environ.get('HOME', '')}/.cargo"
        os.environ["PATH"] = f"{home}/bin:{os.environ.get('PATH', '')}"
    return None if _is_new_enough() else f"there is no cargo of Rust 1.{MINOR_OF_RUST} or later"


def _version(name: str, crate_version: str, crate: Path) -> str | None:
    match name:
        case "jemalloc":  # 0.7.1+5.3.1-0-g0123…
            return re.sub(r"-.*", "", crate_version.partition("+")[2]) or None
        case "mimalloc":
            return versions.mimalloc(crate / "c_src/mimalloc/v3")
        case "rpmalloc":
            return versions.rpmalloc(crate / "rpmalloc")
        case "snmalloc":  # The crate is a directory of snmalloc, and has its number.
            return crate_version
        case _:  # Google's has no numbers: the day on which the crate took it.
            day = r"\d{4}-\d\d-\d\d"
            return versions.first(rf"^## \[{re.escape(crate_version)}\].*({day})$", crate / "CHANGELOG.md")


def _packages() -> dict[str, dict[str, str]]:
    """The packages of the workspace and of its dependencies, by name."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", _rust()["host"]]
    found = subprocess.run(command, cwd=WORKSPACE, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {package["name"]: package for package in json.loads(found)["packages"]}


def build(names: Iterable[str], target: Path) -> Iterator[tuple[str, Path, dict[str, str | None]]]:
    """Builds libraries below a directory. Yields each that could be built, with its origin."""
    libraries = {name: target / "release" / f"lib{name}.so" for name in names}
    for library in libraries.values():
        library.unlink(missing_ok=True)
    command = ["cargo", "build", "--release", "--locked", "--quiet", "--keep-going"]
    command += [word for name in libraries for word in ("-p", name)]
    subprocess.run(command, cwd=WORKSPACE, env=os.environ | {"CARGO_TARGET_DIR": str(target)}, check=False)
    built = {name: library for name, library in libraries.items() if library.is_file()}
    packages = _packages() if built else {}
    for name, library in built.items():
        package = packages[CRATES[name]]
        version = _version(name, package["version"], Path(package["manifest_path"]).parent)
        crate_version = package["version"].partition("+")[0]
        yield name, library, {"version": version, "crate": CRATES[name], "crate_version": crate_version}
