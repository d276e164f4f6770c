"""Where calm's own parts and the allocators may lie."""

import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from calm.core.errors import CalmError

LIBRARY_PATH = "CALM_LIBRARY_PATH"


def checkout() -> Path | None:
    """The source tree that calm runs from, if it runs from one."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "CMakeLists.txt").is_file() else None


def _own_build() -> Iterator[Path]:
    for directory in os.environ.get(LIBRARY_PATH, "").split(":"):
        if directory:
            yield Path(directory).absolute()
    # What a wheel carries, or an installation has put links into.
    yield Path(__file__).resolve().parents[1] / "_native"
    if root := checkout():
        yield root / "build" / "release"


def built_directories() -> list[Path]:
    """Directories with libraries that were built to be measured, the most particular first."""
    root = checkout()
    return [*_own_build(), *([root / "build" / "peers" / "lib"] if root else [])]


def system_directories() -> list[Path]:
    """Directories with the system's shared libraries, the most particular first."""
    triple = f"{platform.machine()}-linux-gnu"
    system = ["/usr/local/lib", f"/usr/local/lib/{triple}", f"/usr/lib/{triple}", "/usr/lib64", "/usr/lib"]
    return [*map(Path, system), *_clang_directories()]


def _clang_directories() -> list[Path]:
    """Those of clang's own libraries, of the newest clang first."""
    found = Path("/usr/lib").glob("llvm-*/lib/clang/*/lib/linux")
    return sorted(found, key=lambda path: [int(part) for part in re.findall(r"\d+", str(path))], reverse=True)


def probe_candidates() -> list[Path]:
    """Paths that the probe may have, the most particular first."""
    prefixes = dict.fromkeys([Path(sys.prefix), Path("/usr/local"), Path("/usr")])
    installed = [prefix / "libexec" / "calmalloc" for prefix in prefixes]
    return [directory / "calm-probe" for directory in [*_own_build(), *installed]]


def find_part(name: str) -> Path:
    """A program or library of calm's own: the probe, or a file that is built to the probe's folder."""
    for probe in probe_candidates():
        path = probe.with_name(name)
        if path.is_file() and (path.suffix == ".so" or os.access(path, os.X_OK)):
            return path.absolute()
    raise CalmError(f"{name} is missing: `make` builds it, or set {LIBRARY_PATH} to its directory")
