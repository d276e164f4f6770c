"""The versions of allocators, as their sources state them; None where they state none."""

import re
from pathlib import Path


def first(pattern: str, path: Path) -> str | None:
    """The first group of the first match in a file; None if there is no match, or no file."""
    try:
        match = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def jemalloc(tree: Path) -> str | None:
    """A release has a file VERSION: 5.3.1-0-g0123…"""
    return first(r"\A(\d+(?:\.\d+)+)", tree / "VERSION") or first(r"^\* (\d+(?:\.\d+)+) ", tree / "ChangeLog")


def mimalloc(tree: Path) -> str | None:
    """Digits of major, minor and patch: 30403 of 3.4.3, 3206 of 3.2.6, 316 of 3.1.6."""
    digits = first(r"^#define MI_MALLOC_VERSION\s+(\d{3,5})\b", tree / "include/mimalloc.h")
    if digits is None:
        return None
    end_of_minor = 3 if len(digits) == 5 else 2
    return f"{digits[0]}.{int(digits[1:end_of_minor])}.{int(digits[end_of_minor:])}"


def snmalloc(tree: Path) -> str | None:
    return first(r'"version-semver": "([\d.]+)"', tree / "vcpkg.json")


def rpmalloc(tree: Path) -> str | None:
    return first(r"\A(\d+\.\d+\.\d+)$", tree / "CHANGELOG")


def gperftools(tree: Path) -> str | None:
    return first(r"^AC_INIT\(\[gperftools\],\[([\d.]+)", tree / "configure.ac")


def llvm(tree: Path) -> str | None:
    file = tree / "cmake/Modules/LLVMVersion.cmake"
    parts = [first(rf"LLVM_VERSION_{part} (\d+)", file) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part for part in parts if part) or None
