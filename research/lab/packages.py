"""The guest's kernel and shell, from Debian's packages, which are unpacked into a cache and not installed.

apt checks downloads against signed lists. Packages in the cache need no network.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from calm.core import paths
from calm.core.errors import CalmError
from research import cache

# A run's own files in the cache: a guest's, and unfinished packages. They have the number of its process.
_OWN = re.compile(r"boot-(\d+)-\S+|\.(?:linux-image|busybox-static)\S*\.(\d+)\.\S+")
# The console of a boot that failed, kept for the user.
_CONSOLE = re.compile(r"console-\d+-\S+\.log")
_KEPT_S = 7 * 24 * 3600
_KERNEL = re.compile(r"linux-image-\d\S*-cloud-amd64")
_KERNELS = "linux-image-*"
_BUSYBOX = "busybox-static"
# Of Debian 12, and of Debian 13.
_SHELLS = ("bin/busybox", "usr/bin/busybox")
_VERSION = "version"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Parts:
    """The kernel and the shell of every guest."""

    kernel: Path
    kernel_package: str
    """With its version; the file's name if the user gave a file."""
    busybox: Path


def default_cache() -> Path:
    """The build folder of a checkout, or else the user's cache."""
    if root := paths.checkout():
        return root / "build" / "emulated"
    return cache.user_cache() / "lab"


def _output(*command: str, cwd: Path | None = None) -> str:
    """A command's output. Raises CalmError with the first line of its error if it fails."""
    environment = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError as error:
        raise CalmError(
            f"{command[0]} is missing: on Debian it is in the packages apt and dpkg; elsewhere give --kernel "
            "and --busybox"
        ) from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["failed"]
        complaint = next((line for line in lines if line.startswith("E:")), lines[0])
        raise CalmError(f"{command[0]}: {complaint.removeprefix('E: ')}")
    return done.stdout


def _version_key(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name.partition("-cloud")[0])]


def unpack(package: str, cache: Path, tell: Tell) -> Path:
    """A folder of the cache with a Debian package's files. A partial one never gets its name."""
    folder = cache / package
    if folder.is_dir():
        return folder
    tell(f"fetching {package}")
    with tempfile.TemporaryDirectory(prefix=f".{package}.{os.getpid()}.", dir=cache) as name:
        downloads, partial = Path(name, "download"), Path(name, "files")
        downloads.mkdir()
        # apt's download user may have no access to this folder.
        sandbox = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
        _output("apt-get", "-q", *sandbox, "download", package, cwd=downloads)
        (deb,) = downloads.glob("*.deb")
        tell(f"unpacking {package}")
        _output("dpkg-deb", "--extract", str(deb), str(partial))
        (partial / _VERSION).write_text(_output("dpkg-deb", "--field", str(deb), "Version"))
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # another calm was faster
                raise
    return folder


def sweep(cache: Path) -> None:
    """Removes the files of killed runs, and old consoles. The folder may have others, which stay."""
    for path in cache.iterdir():
        found = _OWN.fullmatch(path.name)
        if found and not Path("/proc", found[1] or found[2]).exists():
            shutil.rmtree(path, ignore_errors=True)
        elif _CONSOLE.fullmatch(path.name):
            with contextlib.suppress(OSError):  # another calm was faster
                if path.stat().st_mtime < time.time() - _KEPT_S:
                    path.unlink()


def _newest_kernel() -> str:
    """The newest package with a kernel for clouds that apt knows, backports included."""
    names = _output("apt-cache", "pkgnames", "linux-image-").split()
    kernels = [name for name in names if _KERNEL.fullmatch(name)]
    # A package that others only name, or that is gone, has no version to download.
    for name in sorted(kernels, key=_version_key, reverse=True):
        if re.search(r"^  Candidate: (?!\(none\))", _output("apt-cache", "policy", name), re.MULTILINE):
            return name
    raise CalmError("apt knows no linux-image-*-cloud-amd64: run apt-get update first")


def _file(package: Path, *patterns: str) -> Path:
    found = next((path for pattern in patterns for path in package.glob(pattern)), None)
    if found is None:
        raise CalmError(f"{package} is incomplete: remove that folder, and it is fetched again")
    return found


def fetch(
    cache: Path, tell: Tell, *, kernel: Path | None = None, busybox: Path | None = None, update: bool = False
) -> Parts:
    """The kernel and busybox: the user's own files, or Debian's."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalmError(f"cannot write {cache}: {error.strerror}; --cache names another folder") from error
    name = kernel.name if kernel else ""
    if kernel is None:
        if update or not any(cache.glob(_KERNELS)):
            unpack(_newest_kernel(), cache, tell)
        package = max(cache.glob(_KERNELS), key=lambda folder: _version_key(folder.name))
        kernel = _file(package, "boot/vmlinuz-*")
        name = f"{package.name} {_file(package, _VERSION).read_text().strip()}"
    return Parts(kernel, name, busybox or _file(unpack(_BUSYBOX, cache, tell), *_SHELLS))
