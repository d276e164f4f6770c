"""The Debian packages in fresh Debian roots: installed by apt, used, purged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging_helpers import REPOSITORY, VERSION, run, tool

DEBIAN_ROOT = REPOSITORY / "scripts/debian-root"
PACKAGES = REPOSITORY / "build/packages"
# A root that exists already, from `scripts/debian-root make SUITE FOLDER/SUITE`, is used as it is.
ROOTS = os.environ.get("CALM_TEST_DEBIAN_ROOTS")
OTHER_ARCHITECTURE = "arm64"


@pytest.fixture(scope="module")
def packages() -> list[Path]:
    tool("dpkg-shlibdeps", "dpkg-dev")
    listed = run("make", "--no-print-directory", "-s", "deb", cwd=REPOSITORY).stdout.split()
    return [Path(path) for path in listed]


class Root:
    """A Debian root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, command: str, fails: bool = False) -> str:
        """The output of a shell command in the root."""
        done = run(DEBIAN_ROOT, "run", self.folder, "sh", "-ec", command, fails=fails)
        return done.stdout + done.stderr

    def named_calm(self) -> list[str]:
        """The files of the packages, and those that they leave behind."""
        found = self.run("find / -xdev -name '*calm*' ! -path '/proc/*' ! -path '/packages/*'; true")
        return [line for line in found.splitlines() if line.startswith("/")]


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def root(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, packages: list[Path]
) -> Iterator[Root]:
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        pytest.skip("a Debian root needs root and mmdebstrap")
    folder = Path(ROOTS) / request.param if ROOTS else tmp_path_factory.mktemp("root") / request.param
    if not folder.exists():
        run(DEBIAN_ROOT, "make", request.param, folder)
    (folder / "packages").mkdir(exist_ok=True)
    for package in packages:
        shutil.copy(package, folder / "packages")
    found = Root(folder)
    assert found.named_calm() == []
    install = "apt-get install -qq -y --no-install-recommends"
    found.run(f"export DEBIAN_FRONTEND=noninteractive; apt-get update -qq; {install} /packages/*.deb")
    yield found
    if not ROOTS:
        shutil.rmtree(folder)


@pytest.mark.long
def test_calm_runs(root: Root) -> None:
    assert root.run("calm --version") == f"calm, version {VERSION}\n"
    assert "Usage: calm" in root.run("calm --help")
    assert "/usr/lib/" in root.run("calm run -a calmalloc -- grep -m 1 libcalmalloc.so /proc/self/maps")
    assert "libptlbmalloc2.so" in root.run(
        "calm run -a ptlbmalloc2 -- grep -m 1 libptlbmalloc2 /proc/self/maps"
    )
    assert '"calmalloc"' in root.run("calm compare -a glibc,calmalloc -n 1 --json - -- true")
    assert "NAME" in root.run("zcat /usr/share/man/man1/calm.1.gz | sed -n 's/^.Sh //p'")


@pytest.mark.long
@pytest.mark.parametrize("name", ["libcalmalloc.so.0", "libcalmalloc.so"])
def test_the_library_is_preloaded_by_name(root: Root, name: str) -> None:
    said = root.run(f"LD_PRELOAD={name} CALM_OPTIONS=report=exit ls /packages")
    assert '{"allocator": "calmalloc"' in said
    assert "cannot be preloaded" not in said


@pytest.mark.long
def test_purge_leaves_nothing(root: Root) -> None:
    assert root.named_calm()
    root.run("calm --version")
    root.run("apt-get purge -qq -y libcalmalloc libcalmalloc-dev calmalloc-tools")
    assert root.named_calm() == []


@pytest.mark.long
def test_packages_of_another_architecture(tmp_path: Path) -> None:
    """They are cross-built; the library works under an emulator."""
    tool("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu")
    emulator = tool("qemu-aarch64", "qemu-user")
    listed = run("packaging/deb", "--arch", OTHER_ARCHITECTURE, cwd=REPOSITORY).stdout.split()
    assert [Path(path).name for path in listed] == [
        f"{name}_{VERSION}_{OTHER_ARCHITECTURE}.deb"
        for name in ("calmalloc-tools", "libcalmalloc-dev", "libcalmalloc")
    ]
    for path in listed:
        assert run("dpkg-deb", "--field", path, "Architecture").stdout.strip() == OTHER_ARCHITECTURE
        run("dpkg-deb", "-x", path, tmp_path)
    depends = run("dpkg-deb", "--field", listed[-1], "Depends").stdout
    assert depends.startswith("libc6 (>= 2.")
    compiled = [path for path in tmp_path.rglob("*") if path.is_file() and ".so" in path.name]
    compiled += (tmp_path / "usr/libexec/calmalloc").iterdir()
    assert len(compiled) >= 5
    for path in compiled:
        assert "AArch64" in run("readelf", "-h", path).stdout, path
    program = tmp_path / "program"
    (tmp_path / "program.c").write_text(
        "#include <stdlib.h>\nint main(void) { free(malloc(100)); return 0; }\n"
    )
    run("aarch64-linux-gnu-gcc", tmp_path / "program.c", "-o", program)
    libraries = tmp_path / "usr/lib/aarch64-linux-gnu"
    variables = f"LD_PRELOAD={libraries}/libcalmalloc.so.0,CALM_OPTIONS=report=exit"
    emulated = (emulator, "-L", "/usr/aarch64-linux-gnu", "-E", variables)
    assert '{"allocator": "calmalloc"' in run(*emulated, program).stderr
    if shutil.which("lintian") is not None:
        bogus = "bogus-mail-host,bogus-mail-host-in-debian-changelog"
        command = ("lintian", "--fail-on", "error,warning", "--suppress-tags", bogus)
        assert run(*command, *listed).stdout == ""
