"""Adds to a wheel what is compiled, the libraries and calm's probe, in calm/_native.

An editable install has none of it: calm finds build/release.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# CMake reads this variable, too. Each toolchain has its own folder.
TOOLCHAIN = Path(os.environ.get("CMAKE_TOOLCHAIN_FILE", "native")).stem
WORK = ROOT / "build/wheel" / TOOLCHAIN
LIBC = {"libc.so.6", "libm.so.6", "libpthread.so.0"}
# Debian and Alpine give musl different names; musl itself knows both.
MUSL = {"libc.so", "libc.musl-x86_64.so.1", "libc.musl-aarch64.so.1"}


def compile_into(folder: Path) -> None:
    """Builds by CMake, stripped, and puts into the folder what is carried."""
    for tool in ("cmake", "readelf"):
        if not shutil.which(tool):
            raise SystemExit(
                f"calmalloc: a wheel needs CMake 3.25, a C compiler and binutils: {tool} is missing"
            )
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = ["TESTS=OFF", "WORKLOADS=OFF", "STRICT=OFF", "TOOLS=ON", "STATIC_PROBE=ON", "INSTALL=ON"]
    options += ["PTLBMALLOC2=ON"]
    build = WORK / "cmake"
    commands = [
        ["cmake", "-S", ROOT, "-B", build, *generator, "-DCMAKE_BUILD_TYPE=Release"]
        + [f"-DCMAKE_{kind}_LINKER_FLAGS=-s" for kind in ("SHARED", "MODULE", "EXE")]
        + [f"-DCALMALLOC_{option}" for option in options],
        ["cmake", "--build", build, "--parallel"],
        ["cmake", "--install", build, "--component", "wheel", "--prefix", folder],
    ]
    for command in commands:
        subprocess.run(command, check=True)


def oldest_libc(folder: Path) -> str:
    """The oldest C library that the files in the folder run on, as in a wheel's platform tag."""
    newest = (2, 28)  # RHEL 8's
    needed: set[str] = set()
    for file in folder.iterdir():
        command = ["readelf", "--wide", "--dynamic", "--version-info", file]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        asked = [(int(major), int(minor)) for major, minor in re.findall(r"\bGLIBC_(\d+)\.(\d+)", text)]
        # Relative relocations in short form.
        asked += [(2, 36)] if "GLIBC_ABI_DT_RELR" in text else []
        newest = max([newest, *asked])
        named = {
            name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", text) if not name.startswith("ld-linux")
        }
        if foreign := named - LIBC - MUSL:
            raise SystemExit(f"calmalloc: {file.name} needs {', '.join(foreign)}, and a wheel may not")
        needed |= named
    # musl's symbols have no versions; all releases that Alpine maintains are later than 1.2.
    return "musllinux_1_2" if needed & MUSL else f"manylinux_{newest[0]}_{newest[1]}"


class BuildWithLibraries(build_py):
    """build_py, and the compiled parts unless the install is editable."""

    def run(self) -> None:
        """Builds the modules, then the rest."""
        super().run()
        if not self.editable_mode:
            native = Path(self.build_lib).resolve() / "calm/_native"
            shutil.rmtree(native, ignore_errors=True)
            compile_into(native)


class PlatformWheel(bdist_wheel):
    """A wheel for every Python on machines of one kind."""

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python; the oldest C library that the compiled parts run on, if they are built."""
        *_, platform = super().get_tag()
        native = Path(self.bdist_dir) / "calm/_native"
        if not native.is_dir():
            native = Path(self.get_finalized_command("build").build_lib) / "calm/_native"
        if native.is_dir() and platform.startswith("linux_"):
            platform = f"{oldest_libc(native)}_{platform.removeprefix('linux_')}"
        return "py3", "none", platform


class Compiled(Distribution):
    """A distribution with parts that are not Python, though no extension module."""

    def has_ext_modules(self) -> bool:
        """Which makes the wheel one for a platform."""
        return True


setup(
    distclass=Compiled,
    cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel},
    options={"build": {"build_base": str(WORK)}},
)
