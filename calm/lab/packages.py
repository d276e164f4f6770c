"""The guest's kernel and its shell: Debian's packages, unpacked into a cache and not installed.

apt checks what it downloads against signed lists. What the cache has is used without any network.
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

from calm import places
from calm.errors import CalmError

# What a run keeps in the cache for itself: a guest's files, and half a package. With its process's number.
_OWN = re.compile(r"boot-(\d+)-\S+|\.(?:linux-image|busybox-static)\S*\.(\d+)\.\S+")
# What it keeps for the user: a console, of a boot that went wrong.
_CONSOLE = re.compile(r"console-\d+-\S+\.log")
_KEPT_S = 7 * 24 * 3600
_KERNEL = re.compile(r"linux-image-\d\S*-cloud-amd64")
_BUSYBOX = "busybox-static"
# In the package: Debian 12 has it in the first, Debian 13 in the second.
_SHELLS = ("bin/busybox", "usr/bin/busybox")
_VERSION = "version"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Parts:
    """What every guest is made of."""

    kernel: Path
    kernel_package: str
    """With the version, or the file's name where the user gave a file."""
    busybox: Path


def default_cache() -> Path:
    """In a checkout its build folder, elsewhere the user's cache."""
    if root := places.checkout():
        return root / "build" / "emulated"
    return places.user_cache() / "lab"


def _output(*command: str, cwd: Path | None = None) -> str:
    """What a command prints; its complaint, if it fails, becomes ours."""
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.startswith("E:")]
        complaint = (lines or (done.stderr or done.stdout).strip().splitlines() or ["failed"])[0]
        raise CalmError(f"{' '.join(command[:1])}: {complaint.removeprefix('E: ')}")
    return done.stdout


def _need_apt(what: str) -> None:
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if not shutil.which(tool):
            raise CalmError(
                f"{tool} is missing, so {what} cannot be fetched: on Debian it is in the packages apt and "
                "dpkg; elsewhere give --kernel and --busybox"
            )


def _version_key(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name.partition("-cloud")[0])]


def unpack(package: str, cache: Path, tell: Tell) -> Path:
    """A Debian package's files in a folder of the cache, downloaded once. Only a whole one gets its name."""
    folder = cache / package
    if folder.is_dir():
        return folder
    _need_apt(package)
    tell(f"fetching {package}")
    with tempfile.TemporaryDirectory(prefix=f".{package}.{os.getpid()}.", dir=cache) as name:
        downloads, partial = Path(name, "download"), Path(name, "files")
        downloads.mkdir()
        # apt's own download user may have no access to this folder.
        sandbox = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
        _output("apt-get", "-q", *sandbox, "download", package, cwd=downloads)
        (deb,) = downloads.glob("*.deb")
        tell(f"unpacking {package}")
        _output("dpkg-deb", "--extract", str(deb), str(partial))
        (partial / _VERSION).write_text(_output("dpkg-deb", "--field", str(deb), "Version"))
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # another of us was faster
                raise
    return folder


def sweep(cache: Path) -> None:
    """Removes what those of us left behind that were killed, and consoles that are old by now.

    Nothing else: it may be any folder.
    """
    for path in cache.iterdir():
        found = _OWN.fullmatch(path.name)
        if found and not Path("/proc", found[1] or found[2]).exists():
            shutil.rmtree(path, ignore_errors=True)
        elif _CONSOLE.fullmatch(path.name):
            with contextlib.suppress(OSError):  # another of us was faster
                if path.stat().st_mtime < time.time() - _KEPT_S:
                    path.unlink()


def _newest_kernel() -> str:
    """The name of the newest package with a kernel for clouds that apt knows, backports' among them."""
    _need_apt("a kernel")
    names = _output("apt-cache", "pkgnames", "linux-image-").split()
    kernels = [name for name in names if _KERNEL.fullmatch(name)]
    # A package that is only named by others, or was there once, has no version to download.
    for name in sorted(kernels, key=_version_key, reverse=True):
        if re.search(r"^  Candidate: (?!\(none\))", _output("apt-cache", "policy", name), re.MULTILINE):
            return name
    raise CalmError("apt knows no linux-image-*-cloud-amd64: run apt-get update first")


def _kernel(cache: Path, update: bool, tell: Tell) -> tuple[Path, str]:
    def images() -> list[Path]:
        found = cache.glob("linux-image-*/boot/vmlinuz-*")
        return sorted(found, key=lambda image: _version_key(image.parents[1].name))

    if update or not images():
        fetched = unpack(_newest_kernel(), cache, tell)
        if not images():
            raise _damaged(fetched)
    image = images()[-1]
    package = image.parents[1]
    try:
        return image, f"{package.name} {(package / _VERSION).read_text().strip()}"
    except FileNotFoundError:
        raise _damaged(package) from None


def _shell(cache: Path, tell: Tell) -> Path:
    package = unpack(_BUSYBOX, cache, tell)
    found = next((package / name for name in _SHELLS if (package / name).is_file()), None)
    if found is None:
        raise _damaged(package)
    return found


def _damaged(package: Path) -> CalmError:
    return CalmError(f"{package} is not whole: remove that folder, and it is fetched anew")


def fetch(
    cache: Path, tell: Tell, *, kernel: Path | None = None, busybox: Path | None = None, update: bool = False
) -> Parts:
    """The kernel and busybox: the user's own files, or Debian's."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalmError(f"cannot write {cache}: {error.strerror}; --cache names another folder") from error
    image, package = (kernel, kernel.name) if kernel else _kernel(cache, update, tell)
    return Parts(image, package, busybox or _shell(cache, tell))
