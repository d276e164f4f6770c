"""The Debian packages, installed into a separate folder."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging_helpers import (
    FOR_RESEARCH,
    REPOSITORY,
    SOURCES,
    VERSION,
    build,
    project,
    run,
    tool,
)

NAMES = ["calmalloc-tools", "libcalmalloc", "libcalmalloc-dev"]
SERVED = "served by calmalloc\n"


@dataclass(frozen=True)
class Debian:
    """The packages' files, and the root under which they are installed."""

    packages: dict[str, Path]
    root: Path

    @property
    def libraries(self) -> Path:
        triple = run("dpkg-architecture", "-qDEB_HOST_MULTIARCH").stdout.strip()
        return self.root / "usr/lib" / triple


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Debian:
    tool("dpkg-shlibdeps", "dpkg-dev")
    listed = run("make", "--no-print-directory", "-s", "deb", cwd=REPOSITORY).stdout.split()
    packages = {Path(path).name.split("_")[0]: Path(path) for path in listed}
    root = tmp_path_factory.mktemp("deb")
    if os.geteuid() == 0:
        # The dependencies are the machine's, which this dpkg knows nothing of.
        (root / "var/lib/dpkg/info").mkdir(parents=True)
        (root / "var/lib/dpkg/updates").mkdir()
        for name in ("status", "available"):
            (root / "var/lib/dpkg" / name).touch()
        force = ("--force-depends", "--force-script-chrootless")
        run("dpkg", f"--root={root}", f"--log={root}/log", *force, "--install", *packages.values())
    else:
        for package in packages.values():
            run("dpkg-deb", "-x", package, root)
    return Debian(packages, root)


def field(package: Path, name: str) -> str:
    return run("dpkg-deb", "--field", package, name).stdout.strip()


def control_file(package: Path, name: str) -> str:
    return run("dpkg-deb", "--info", package, name).stdout


def test_control_fields(debian: Debian) -> None:
    assert sorted(debian.packages) == NAMES
    for name, package in debian.packages.items():
        assert field(package, "Package") == name
        assert field(package, "Version") == VERSION
        assert field(package, "Architecture") == run("dpkg", "--print-architecture").stdout.strip()
        assert "@" in field(package, "Maintainer")
        assert len(field(package, "Description").splitlines()) > 3
    assert re.search(r"\blibc6 \(>= 2\.\d+\)", field(debian.packages["libcalmalloc"], "Depends"))
    assert field(debian.packages["libcalmalloc-dev"], "Depends") == f"libcalmalloc (= {VERSION})"
    needs = field(debian.packages["calmalloc-tools"], "Depends")
    for module in ("click", "rich", "numpy"):
        assert f"python3-{module}" in needs


def test_ldconfig_and_shlibs(debian: Debian) -> None:
    assert control_file(debian.packages["libcalmalloc"], "triggers") == "activate-noawait ldconfig\n"
    lines = control_file(debian.packages["libcalmalloc"], "shlibs").splitlines()
    for name, line in zip(("libcalmalloc.so", "libcalmoffload.so"), lines, strict=True):
        soname = re.search(
            r"SONAME.*\[(.*)\.so\.(\d+)\]", run("readelf", "-d", debian.libraries / name).stdout
        )
        assert soname is not None
        assert line.startswith(f"{soname[1]} {soname[2]} libcalmalloc (>= ")


def test_owners_and_paths(debian: Debian) -> None:
    for name, package in debian.packages.items():
        for line in run("dpkg-deb", "--contents", package).stdout.splitlines():
            mode, owner, *_ = line.split()
            path = line.split(" ./", 1)[1]
            assert owner == "root/root"
            assert path == "" or path.startswith("usr/")
            assert mode[1:] in ("rwxr-xr-x", "rw-r--r--") or mode.startswith("l")
        documents = debian.root / "usr/share/doc" / name
        assert "Expat" in (documents / "copyright").read_text()
        assert VERSION in run("zcat", documents / "changelog.gz").stdout
    man = debian.root / "usr/share/man"
    pages = {f"{path.name}.gz" for path in (REPOSITORY / "docs/man").iterdir()}
    assert {path.name for path in man.rglob("*.gz")} == pages


def test_completions_lie_where_the_shells_look(debian: Debian) -> None:
    share = debian.root / "usr/share"
    for name in (
        "bash-completion/completions/calm",
        "zsh/vendor-completions/_calm",
        "fish/vendor_completions.d/calm.fish",
    ):
        assert "calm completion" in (share / name).read_text()


def test_gdb_finds_its_commands(debian: Debian) -> None:
    """It looks for the library's path, with all links resolved, below its auto-load folder."""
    library = (debian.libraries / "libcalmalloc.so").resolve().relative_to(debian.root)
    loaded = debian.root / f"usr/share/gdb/auto-load/{library}-gdb.py"
    assert "calm_debug_block" in loaded.read_text()


@pytest.mark.parametrize(
    "name", ["libcalmalloc.so", "libcalmalloc.so.0", "libcalmoffload.so", "libptlbmalloc2.so"]
)
def test_preload(debian: Debian, name: str) -> None:
    """By name, as if ldconfig had run."""
    found = {"LD_PRELOAD": name, "LD_LIBRARY_PATH": str(debian.libraries)}
    output = run("ls", **found, CALM_OPTIONS="report=exit", PTLBMALLOC2_VERBOSE="1").stderr
    assert output.startswith("ptlbmalloc2: " if "ptlb" in name else '{"allocator": "calmalloc"')


def test_a_program_by_pkg_config(debian: Debian, tmp_path: Path) -> None:
    """The file refers to /usr; since the root is elsewhere, the compiler needs additional paths."""
    where = {
        "PKG_CONFIG_PATH": str(debian.libraries / "pkgconfig"),
        "PKG_CONFIG_SYSROOT_DIR": str(debian.root),
    }
    where |= {"PKG_CONFIG_ALLOW_SYSTEM_CFLAGS": "1", "PKG_CONFIG_ALLOW_SYSTEM_LIBS": "1"}
    flags = run("pkg-config", "--cflags", "--libs", "calmalloc", **where).stdout.split()
    run("cc", SOURCES / "program.c", "-o", tmp_path / "program", *flags)
    assert run(tmp_path / "program", LD_LIBRARY_PATH=str(debian.libraries)).stdout == SERVED


@pytest.mark.parametrize("target", ["calmalloc::calmalloc", "calmalloc::static"])
def test_a_program_by_cmake(debian: Debian, tmp_path: Path, target: str) -> None:
    lines = [
        "find_package(calmalloc 0.1 REQUIRED)",
        f"target_link_libraries(uses_calmalloc PRIVATE {target})",
    ]
    program = build(project(tmp_path / "outer", "C", lines), f"-DCMAKE_PREFIX_PATH={debian.root / 'usr'}")
    assert run(program).stdout == SERVED


def test_the_probe_is_stripped_and_nothing_is_there_for_research(debian: Debian) -> None:
    probe = debian.root / "usr/libexec/calmalloc/calm-probe"
    assert ".symtab" not in run("readelf", "--sections", "--wide", probe).stdout
    for package in debian.packages.values():
        listed = run("dpkg-deb", "--contents", package).stdout.splitlines()
        assert [line for line in listed if FOR_RESEARCH.search(line)] == []


def test_calm(debian: Debian, tmp_path: Path) -> None:
    calm = debian.root / "usr/bin/calm"
    assert calm.read_text().startswith("#!/usr/bin/python3\n")
    # Where the root is not /, calm is told where its parts are; .venv lends the modules that it depends on.
    places = f"{debian.libraries}:{debian.root / 'usr/libexec/calmalloc'}"
    python = REPOSITORY / ".venv/bin/python"
    assert VERSION in run(python, calm, "--version", cwd=tmp_path).stdout
    command = ("compare", "-a", "glibc,calmalloc,ptlbmalloc2", "-n", "1", "--json", "-", "--", "ls")
    assert '"calmalloc"' in run(python, calm, *command, cwd=tmp_path, CALM_LIBRARY_PATH=places).stdout
    loaded = run(python, "-v", calm, "--version", cwd=tmp_path).stderr
    assert f"{debian.root}/usr/share/calmalloc/calm/cli.py" in loaded


def test_calm_with_debians_own_modules(debian: Debian, tmp_path: Path) -> None:
    """These are older than those of .venv."""
    imports = "import click, rich, numpy, matplotlib, elftools, jinja2"
    if subprocess.run(["/usr/bin/python3", "-c", imports], capture_output=True, check=False).returncode != 0:
        pytest.skip("Debian's own Python modules are not installed")
    places = f"{debian.libraries}:{debian.root / 'usr/libexec/calmalloc'}"
    command = ("compare", "-a", "glibc,calmalloc", "-n", "1", "--plot", tmp_path / "plot.svg", "--", "ls")
    run(debian.root / "usr/bin/calm", *command, cwd=tmp_path, CALM_LIBRARY_PATH=places)
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    errors = run(debian.root / "usr/bin/calm", "run", "-a", "none", "--", "ls", fails=True).stderr
    assert errors.startswith("calm: unknown allocator 'none'")


@pytest.mark.skipif(os.geteuid() != 0, reason="dpkg installs as root only")
def test_removal_leaves_nothing(debian: Debian, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(debian.root, root, symlinks=True)
    for cache in root.rglob("__pycache__"):
        shutil.rmtree(cache)
    force = ("--force-depends", "--force-script-chrootless")
    run("dpkg", f"--root={root}", f"--log={root}/log", *force, "--purge", *NAMES)
    assert [path for path in root.glob("usr/**/*") if not stat.S_ISDIR(path.lstat().st_mode)] == []


def test_lintian(debian: Debian) -> None:
    """If lintian is installed. The maintainer's address comes from the packager, and is not checked."""
    if shutil.which("lintian") is None:
        pytest.skip("lintian is not installed")
    bogus = "bogus-mail-host,bogus-mail-host-in-debian-changelog"
    command = ("lintian", "--fail-on", "error,warning", "--suppress-tags", bogus)
    assert run(*command, *debian.packages.values()).stdout == ""
