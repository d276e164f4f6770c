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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from calm.core import paths
from calm.core.errors import CalmError
from research import cache
from research.lab.architecture import X86_64, Architecture

# A run's own files in the cache: a guest's, and unfinished packages. They have the number of its process.
_OWN = re.compile(r"boot-(\d+)-\S+|\.(?:apt|linux-image|linux-binary|busybox-static|lib)\S*\.(\d+)\.\S+")
# The console of a boot that failed, kept for the user.
_CONSOLE = re.compile(r"console-\d+-\S+\.log")
_KEPT_S = 7 * 24 * 3600
_BUSYBOX = "busybox-static"
# With the libraries of a guest that cannot have this machine's.
_GLIBC = "libc6"
_LIBRARIES = (_GLIBC, "libgcc-s1", "libstdc++6")
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
    libraries: Sequence[Path] = ()
    """Of a foreign guest: the unpacked packages that have them."""
    glibc: str | None = None
    """Its version in these packages."""


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


def _is_kernel(name: str, architecture: Architecture) -> bool:
    return re.fullmatch(rf"linux-(?:image|binary)-\d\S*-{architecture.flavour}", name) is not None


def _version_key(name: str, architecture: Architecture) -> tuple[list[int], bool]:
    """The larger, the newer. From 6.19 on, linux-image has no file: the kernel is in linux-binary."""
    numbers = [int(number) for number in re.findall(r"\d+", name.removesuffix(architecture.flavour))]
    return numbers, name.startswith("linux-binary-")


def _sandbox() -> list[str]:
    # apt's download user may have no access to the cache.
    return ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []


@contextlib.contextmanager
def _foreign_lists(cache: Path, architecture: Architecture) -> Iterator[list[str]]:
    """Fetches the lists of another architecture's packages. Yields the options by which apt uses them.

    apt's sources and keys are this machine's. Its lists and the system's packages stay as they are.
    """
    with tempfile.TemporaryDirectory(prefix=f".apt.{os.getpid()}.", dir=cache) as name:
        settings = {
            "APT::Architecture": architecture.debian,
            "APT::Architectures": architecture.debian,
            "Acquire::Languages": "none",
            "Dir::Cache": name,
            "Dir::State": name,
            "Dir::State::status": "/dev/null",
        }
        options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
        _output("apt-get", "-q", *_sandbox(), *options, "update")
        yield options


def unpack(package: str, cache: Path, tell: Tell, options: Sequence[str] = ()) -> Path:
    """A folder of the cache with a Debian package's files. A partial one never gets its name.

    `options` are apt's.
    """
    folder = cache / package
    if folder.is_dir():
        return folder
    tell(f"fetching {package}")
    with tempfile.TemporaryDirectory(prefix=f".{package}.{os.getpid()}.", dir=cache) as name:
        downloads, partial = Path(name, "download"), Path(name, "files")
        downloads.mkdir()
        _output("apt-get", "-q", *_sandbox(), *options, "download", package, cwd=downloads)
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


def _newest_kernel(architecture: Architecture, options: Sequence[str]) -> str:
    """The newest package with a kernel of that flavour that apt knows, backports included."""
    names = _output("apt-cache", *options, "pkgnames", "linux-").split()
    kernels = [name for name in names if _is_kernel(name, architecture)]
    # A package that others only name, or that is gone, has no version to download.
    for name in sorted(kernels, key=lambda name: _version_key(name, architecture), reverse=True):
        policy = _output("apt-cache", *options, "policy", name)
        if re.search(r"^  Candidate: (?!\(none\))", policy, re.MULTILINE):
            return name
    missing = f"apt knows no linux-image-*-{architecture.flavour}"
    raise CalmError(missing if architecture.foreign else f"{missing}: run apt-get update first")


def _file(package: Path, *patterns: str) -> Path:
    found = next((path for pattern in patterns for path in package.glob(pattern)), None)
    if found is None:
        raise CalmError(f"{package} is incomplete: remove that folder, and it is fetched again")
    return found


def fetch(
    cache: Path,
    tell: Tell,
    *,
    kernel: Path | None = None,
    busybox: Path | None = None,
    update: bool = False,
    architecture: Architecture = X86_64,
) -> Parts:
    """The kernel and busybox: the user's own files, or Debian's. A foreign guest's libraries are Debian's."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalmError(f"cannot write {cache}: {error.strerror}; --cache names another folder") from error

    def kernels() -> list[Path]:
        return [folder for folder in cache.iterdir() if _is_kernel(folder.name, architecture)]

    names = [*([] if busybox else [_BUSYBOX]), *(_LIBRARIES if architecture.foreign else ())]
    fetches_kernel = kernel is None and (update or not kernels())
    with contextlib.ExitStack() as stack:
        options: list[str] = []
        if architecture.foreign and (fetches_kernel or not all((cache / name).is_dir() for name in names)):
            tell(f"fetching the lists of {architecture.debian} packages")
            options = stack.enter_context(_foreign_lists(cache, architecture))
        if fetches_kernel:
            unpack(_newest_kernel(architecture, options), cache, tell, options)
        folders = {name: unpack(name, cache, tell, options) for name in names}
    name = kernel.name if kernel else ""
    if kernel is None:
        package = max(kernels(), key=lambda folder: _version_key(folder.name, architecture))
        kernel = _file(package, "boot/vmlinuz-*", "usr/lib/modules/*/vmlinuz")
        name = f"{package.name} {_file(package, _VERSION).read_text().strip()}"
    busybox = busybox or _file(folders[_BUSYBOX], *_SHELLS)
    if not architecture.foreign:
        return Parts(kernel, name, busybox)
    glibc = _file(folders[_GLIBC], _VERSION).read_text().partition("-")[0]
    return Parts(kernel, name, busybox, [folders[name] for name in _LIBRARIES], glibc)
