"""The wheel, in a fresh environment."""

from __future__ import annotations

import json
import platform
import re
import shutil
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging_helpers import FOR_RESEARCH, REPOSITORY, VERSION, configure, run

OWN = ("calmalloc", "calmoffload", "ptlbmalloc2")
PYTHON = REPOSITORY / ".venv/bin/python"


@dataclass(frozen=True)
class Fresh:
    """A wheel, and the environment in which it is installed."""

    wheel: Path
    root: Path

    @property
    def calm(self) -> Path:
        return self.root / "bin/calm"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """The wheel's dependencies come from .venv, so that tests need no network."""
    wheel = Path(run("make", "--no-print-directory", "-s", "wheel", cwd=REPOSITORY).stdout.strip())
    root = tmp_path_factory.mktemp("wheel") / "venv"
    run(PYTHON, "-m", "venv", "--without-pip", root)
    pip = (PYTHON, "-m", "pip", "--python", root / "bin/python", "--disable-pip-version-check")
    run(*pip, "install", "--no-index", "--no-deps", REPOSITORY / wheel)
    [packages] = root.glob("lib/python*/site-packages")
    lent = root / "lent"
    lent.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if "calmalloc" not in each.name:  # nor research, which plugs into it
            (lent / each.name).symlink_to(each)
    (packages / "lent.pth").write_text(f"{lent}\n")
    return Fresh(REPOSITORY / wheel, root)


def test_tag_is_the_oldest_glibc_that_has_all_its_symbols(fresh: Fresh) -> None:
    tag = re.fullmatch(
        rf"calmalloc-{VERSION}-py3-none-manylinux_2_(\d+)_{platform.machine()}\.whl", fresh.wheel.name
    )
    assert tag is not None, fresh.wheel.name
    asked = [28]  # the oldest that is promised
    for file in (fresh.root).glob("lib/python*/site-packages/calm/_native/*"):
        asked += map(int, re.findall(r"@GLIBC_2\.(\d+)", run("nm", "-D", "--undefined-only", file).stdout))
    assert int(tag[1]) == max(asked)


def audited(wheel: Path) -> str:
    """The platform tag that auditwheel finds for a wheel."""
    auditwheel = PYTHON.with_name("auditwheel")
    if not auditwheel.exists():
        pytest.skip("auditwheel is not installed: `scripts/setup check` installs it")
    found = run(auditwheel, "show", wheel).stdout
    tag = re.search(r'platform\s+tag:\s+"(\w+)"', found)
    assert tag is not None, found
    return tag[1]


def is_as_old(found: str, wheel: Path) -> bool:
    """Whether a platform tag is that of a wheel, or of an older C library."""
    tags = [re.fullmatch(r"(\w+)_2_(\d+)_(\w+)", tag) for tag in (found, wheel.stem.rpartition("-")[2])]
    before, named = (tag.groups() for tag in tags if tag)
    return (before[0], before[2]) == (named[0], named[2]) and int(before[1]) <= int(named[1])


def test_auditwheel_accepts_the_tag(fresh: Fresh) -> None:
    assert is_as_old(audited(fresh.wheel), fresh.wheel)


def test_contents(fresh: Fresh) -> None:
    names = {name for name in zipfile.ZipFile(fresh.wheel).namelist() if ".dist-info/" not in name}
    modules = {
        str(path.relative_to(REPOSITORY))
        for package in ("calm", "calm_heap_readers")
        for path in (REPOSITORY / package).rglob("*.py")
        if path.is_file()
    }
    page = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "calm").rglob("page/*")}
    carried = {"calm-probe", *(f"lib{name}.so" for name in OWN)}
    native = {f"calm/_native/{name}" for name in carried}
    assert names == modules | page | native | {"calm/py.typed"}
    assert [name for name in names if FOR_RESEARCH.search(name)] == []
    # Stripped, as all that is compiled.
    [probe] = fresh.root.glob("lib/*/site-packages/calm/_native/calm-probe")
    assert probe.stat().st_size < 1 << 20


def test_the_plugin_is_found(fresh: Fresh) -> None:
    code = "from calm.commands.explain.readers import readers; print(len(readers()))"
    assert int(run(fresh.root / "bin/python", "-c", code).stdout) > 1


def test_calm_uses_what_is_carried(fresh: Fresh, tmp_path: Path) -> None:
    listed = json.loads(run(fresh.calm, "allocators", "--json", cwd=tmp_path).stdout)["allocators"]
    for row in listed:
        if row["name"] in OWN:
            assert Path(row["library"]).is_relative_to(fresh.root)
            assert row["version"] == VERSION
    code = "print(open('/proc/self/maps').read())"
    for name in OWN:
        command = ("run", "-a", name, "--", fresh.root / "bin/python", "-c", code)
        assert f"{fresh.root}/" in run(fresh.calm, *command, cwd=tmp_path).stdout
        assert f"lib{name}.so" in run(fresh.calm, *command, cwd=tmp_path).stdout
    measured = json.loads(run(fresh.calm, "stat", "--json", "--", "true", cwd=tmp_path).stdout)
    assert measured


@pytest.mark.parametrize("name", ["bench", "calibrate", "colors", "lab", "predict"])
def test_a_command_that_only_a_checkout_has(fresh: Fresh, tmp_path: Path, name: str) -> None:
    for arguments in ((name,), (name, "run", "--help")):
        refused = run(fresh.calm, *arguments, cwd=tmp_path, fails=True)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr == (
            f"calm: {name} is in calmalloc's research package, which is not installed: `make demo` in a "
            f"checkout of calmalloc installs it, for `bin/calm {name}`\n"
        )
    overview = run(fresh.calm, "--help", cwd=tmp_path)
    assert overview.stderr == ""
    assert f"calm {name}" not in overview.stdout


def test_packed_sources_have_all_that_cmake_builds(tmp_path: Path) -> None:
    command = ("setup.py", "-q", "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path)
    run(PYTHON, *command, cwd=REPOSITORY)
    shutil.unpack_archive(tmp_path / f"calmalloc-{VERSION}.tar.gz", tmp_path)
    sources = tmp_path / f"calmalloc-{VERSION}"
    configure(sources, "-DCALMALLOC_TESTS=OFF", "-DCALMALLOC_WORKLOADS=OFF")
    for folder in ("include", "offload", "ptlbmalloc2", "src"):
        for path in (REPOSITORY / folder).rglob("*.*"):
            assert (sources / path.relative_to(REPOSITORY)).is_file(), path


def test_without_cmake_there_is_one_line(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    shutil.copytree(REPOSITORY / "calm", tmp_path / "calm")
    result = run(PYTHON, "setup.py", "-q", "bdist_wheel", cwd=tmp_path, fails=True, PATH="/nonexistent")
    assert result.stderr.splitlines()[-1].startswith("calmalloc: a wheel needs CMake")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [("--for", "plan9"), ("--for",), ("x",)])
def test_for_no_such_platform(arguments: tuple[str, ...]) -> None:
    refused = run("packaging/wheel", *arguments, cwd=REPOSITORY, fails=True)
    usage = "usage: packaging/wheel [--for musl|aarch64|musl-aarch64]\n"
    assert (refused.returncode, refused.stderr) == (2, usage)


def other_wheel(name: str, folder: Path) -> tuple[Path, Path]:
    """A wheel for another platform, and its compiled parts below a folder where pip has installed it."""
    wheel = REPOSITORY / run("packaging/wheel", "--for", name, cwd=REPOSITORY).stdout.strip()
    tag = wheel.stem.rpartition("-")[2]
    pip = (PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps")
    run(*pip, "--platform", tag, "--only-binary", ":all:", "--target", folder, wheel)
    return wheel, folder / "calm/_native"


def compile_program(compiler: str, folder: Path) -> None:
    (folder / "program.c").write_text(
        "#include <stdlib.h>\nint main(void) { free(malloc(100)); return 0; }\n"
    )
    run(compiler, folder / "program.c", "-o", folder / "program")


@pytest.mark.long
def test_musllinux(tmp_path: Path) -> None:
    """Debian's musl stands in for Alpine's. ptlbmalloc2 is for glibc."""
    if shutil.which("musl-gcc") is None:
        pytest.skip("musl-gcc is not installed: it is in the Debian package musl-tools")
    wheel, native = other_wheel("musl", tmp_path / "installed")
    assert wheel.name == f"calmalloc-{VERSION}-py3-none-musllinux_1_2_{platform.machine()}.whl"
    assert audited(wheel) == f"musllinux_1_2_{platform.machine()}"
    names = {path.name for path in native.iterdir()}
    assert names == {"calm-probe", "libcalmalloc.so", "libcalmoffload.so"}
    for path in native.iterdir():
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-dW", path).stdout)
        assert needed == [f"libc.musl-{platform.machine()}.so.1"], path
        # Without it, unwinders find no table, and the heap profile no stacks.
        assert "GNU_EH_FRAME" in run("readelf", "-lW", path).stdout, path
    compile_program("musl-gcc", tmp_path)
    preloaded = {"LD_PRELOAD": str(native / "libcalmalloc.so"), "CALM_OPTIONS": "report=exit"}
    assert '{"allocator": "calmalloc"' in run(tmp_path / "program", **preloaded).stderr
    assert '"wall_ns"' in run(native / "calm-probe", "--", tmp_path / "program").stderr


@pytest.mark.long
def test_musllinux_of_another_architecture(tmp_path: Path) -> None:
    """packaging/musl-aarch64 fetches that musl."""
    for tool in ("apt-get", "aarch64-linux-gnu-gcc", "qemu-aarch64"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: Debian's packages gcc-aarch64-linux-gnu and qemu-user")
    wheel, native = other_wheel("musl-aarch64", tmp_path / "installed")
    assert wheel.name == f"calmalloc-{VERSION}-py3-none-musllinux_1_2_aarch64.whl"
    assert audited(wheel) == "musllinux_1_2_aarch64"
    musl = REPOSITORY / "build/musl-aarch64"
    compile_program(str(musl / "usr/bin/musl-gcc"), tmp_path)
    variables = f"LD_PRELOAD={native}/libcalmalloc.so,CALM_OPTIONS=report=exit"
    emulated = ("qemu-aarch64", "-L", musl)
    assert '{"allocator": "calmalloc"' in run(*emulated, "-E", variables, tmp_path / "program").stderr
    assert "usage: " in run(*emulated, native / "calm-probe", "-h").stdout


@pytest.mark.long
def test_another_architecture(tmp_path: Path) -> None:
    if shutil.which("aarch64-linux-gnu-gcc") is None or shutil.which("qemu-aarch64") is None:
        pytest.skip("Debian's packages gcc-aarch64-linux-gnu and qemu-user are not installed")
    wheel, native = other_wheel("aarch64", tmp_path / "installed")
    assert re.fullmatch(rf"calmalloc-{VERSION}-py3-none-manylinux_2_\d+_aarch64\.whl", wheel.name)
    assert is_as_old(audited(wheel), wheel)
    variables = f"LD_PRELOAD={native}/libcalmalloc.so,CALM_OPTIONS=report=exit"
    emulated = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
    compile_program("aarch64-linux-gnu-gcc", tmp_path)
    assert '{"allocator": "calmalloc"' in run(*emulated, "-E", variables, tmp_path / "program").stderr
    assert "usage: " in run(*emulated, native / "calm-probe", "-h").stdout
