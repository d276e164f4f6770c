"""Prints versions.json: which version of each allocator is built, and of the crate that carries it."""

import json
import re
import sys
from pathlib import Path

CRATES = {
    "jemalloc": "tikv-jemalloc-sys",
    "mimalloc": "libmimalloc-sys",
    "snmalloc": "snmalloc-sys",
    "rpmalloc": "rpmalloc-sys",
    "tcmalloc": "libtcmalloc-sys",
}


def _first(pattern: str, path: Path) -> str | None:
    match = re.search(pattern, path.read_text(), re.MULTILINE)
    return match[1] if match else None


def allocator_version(name: str, crate_version: str, crate: Path) -> str | None:
    """What the crate's sources say; None where they say nothing."""
    match name:
        case "jemalloc":  # 0.7.1+5.3.1-0-g0123…
            return re.sub(r"-.*", "", crate_version.partition("+")[2]) or None
        case "mimalloc":  # 30302, and five digits before version 3.3
            header = crate / "c_src/mimalloc/v3/include/mimalloc.h"
            number = int(_first(r"^#define MI_MALLOC_VERSION\s+(\d+)", header) or 0)
            parts = (number // 10000, number // 100 % 100, number % 100)
            return ".".join(map(str, parts)) if number else None
        case "rpmalloc":
            return _first(r"\A(\d+\.\d+\.\d+)$", crate / "rpmalloc/CHANGELOG")
        case "snmalloc":  # The crate is a directory of snmalloc, and has its number.
            return crate_version
        case _:  # Google's has no numbers: the day on which the crate took it.
            day = r"\d{4}-\d\d-\d\d"
            return _first(rf"^## \[{re.escape(crate_version)}\].*({day})$", crate / "CHANGELOG.md")


def main() -> None:
    """Reads what `cargo metadata` says on standard input."""
    packages = {package["name"]: package for package in json.load(sys.stdin)["packages"]}
    versions = {}
    for name, crate in CRATES.items():
        package = packages[crate]
        directory = Path(package["manifest_path"]).parent
        versions[name] = {
            "version": allocator_version(name, package["version"], directory),
            "crate": crate,
            "crate_version": package["version"].partition("+")[0],
        }
    print(json.dumps(versions, indent=2))


if __name__ == "__main__":
    main()
