"""A guest of arm64 for tests without a compiler for it: this machine's files, turned into such."""

import platform
import subprocess
from pathlib import Path

import pytest

needs_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="arm64 is not foreign here")
_LOADER, _ARM64_LOADER = b"/lib64/ld-linux-x86-64.so.2", b"/lib/ld-linux-aarch64.so.1\0"
_EM_AARCH64 = 183


def compiled(path: Path, *options: str | Path) -> Path:
    """A program of this machine; with -shared a library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = "int main(void) { return 0; }\n"
    command = ["cc", "-x", "c", "-", "-fPIC", "-Wl,--no-as-needed", "-o", path, "-x", "none", *options]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def turned(path: Path) -> Path:
    """The same file, which now says that it is for arm64."""
    data = bytearray(path.read_bytes().replace(_LOADER, _ARM64_LOADER))
    data[18:20] = _EM_AARCH64.to_bytes(2, "little")
    path.write_bytes(data)
    return path


def unpacked(cache: Path) -> list[Path]:
    """Debian's packages with the libraries of arm64, in Debian 12's folders: names instead of content."""
    names = (
        "libc6/lib/aarch64-linux-gnu/ld-linux-aarch64.so.1",
        "libc6/lib/aarch64-linux-gnu/libc.so.6",
        "libc6/usr/lib/aarch64-linux-gnu/gconv/UTF-7.so",
        "libgcc-s1/lib/aarch64-linux-gnu/libgcc_s.so.1",
        "libstdc++6/usr/lib/aarch64-linux-gnu/libstdc++.so.6",
    )
    for name in names:
        path = cache / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (cache / "libc6/lib/ld-linux-aarch64.so.1").symlink_to("aarch64-linux-gnu/ld-linux-aarch64.so.1")
    (cache / "libc6/version").write_text("2.99-1\n")
    return [cache / name for name in ("libc6", "libgcc-s1", "libstdc++6")]
