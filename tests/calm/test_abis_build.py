"""kernel/abis/build: series, packages and stamps, with sources of a few lines; nothing is compiled."""

import argparse
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from calm_helpers import ROOT

needs_patch = pytest.mark.skipif(not shutil.which("patch"), reason="patch is not installed")
needs_dpkg = pytest.mark.skipif(not shutil.which("dpkg"), reason="dpkg is not installed")

CHANGES_A = """\
Subject: two lines become three
--- a/kernel/a.c
+++ b/kernel/a.c
@@ -1,2 +1,3 @@
 one
-two
+2
+three
"""
MAKES_B = """\
--- /dev/null
+++ b/new/b.c
@@ -0,0 +1 @@
+made
"""
REMOVES_C = """\
--- a/c.c
+++ /dev/null
@@ -1 +0,0 @@
-gone
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command, in a repository of the test's."""
    loader = importlib.machinery.SourceFileLoader("abis_build", str(ROOT / "kernel/abis/build"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Where classes look their annotations up.
    monkeypatch.setitem(sys.modules, loader.name, module)
    loader.exec_module(module)
    output, series = tmp_path / "build/abis", tmp_path / "kernel/abis"
    for folder in (output, series / "linux", series / "qemu/test"):
        folder.mkdir(parents=True)
    places = {
        "REPOSITORY": tmp_path,
        "SERIES": series,
        "OUTPUT": output,
        "FIRMWARE": output / "firmware",
        "EMULATOR": output / "qemu-system-x86_64",
        "IMAGE_SOURCES": series / "qemu/test",
    }
    for name, path in places.items():
        monkeypatch.setattr(module, name, path)
    return module


def patches(folder: Path, *texts: str) -> list[Path]:
    """In the place of those that are there."""
    for old in folder.glob("*.patch"):
        old.unlink()
    paths = [folder / f"{number:04}-change.patch" for number in range(1, len(texts) + 1)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths


def tree_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


# --- sources and series


def test_a_series_is_in_order_and_is_never_empty(build: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "kernel/abis/linux"
    (folder / "config").write_text("")
    with pytest.raises(build.BuildError, match=r"^kernel/abis/linux has no patches$"):
        build.patches_of(folder)
    names = ("0010-z.patch", "0002-a.patch", "0001-b.patch")
    for name in names:
        (folder / name).write_text("")
    assert [path.name for path in build.patches_of(folder)] == sorted(names)


def test_what_patches_touch_is_in_their_heads(build: ModuleType, tmp_path: Path) -> None:
    found = patches(tmp_path, CHANGES_A + MAKES_B, REMOVES_C)
    assert build.files_of(found) == {"kernel/a.c", "new/b.c", "c.c"}
    assert build.files_of(found[1:]) == {"c.c"}


PLAIN = {"kernel/a.c": "one\ntwo\n", "c.c": "gone\n", "same.c": "same\n"}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "build/abis/linux-plain"
    for name, text in PLAIN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@needs_patch
def test_a_tree_is_the_source_with_the_series_and_the_source_stays(
    build: ModuleType, tmp_path: Path, plain: Path
) -> None:
    tree = tmp_path / "build/abis/linux-source"

    def apply(*texts: str) -> dict[str, str]:
        build.apply_series(plain, tree, patches(tmp_path, *texts), "patch")
        assert tree_of(plain) == PLAIN
        return tree_of(tree)

    changed = {"kernel/a.c": "one\n2\nthree\n", "same.c": "same\n"}
    assert apply(CHANGES_A, MAKES_B, REMOVES_C) == changed | {"new/b.c": "made\n"}
    # What no patch touches any more is as it was.
    assert apply(CHANGES_A) == changed | {"c.c": "gone\n"}
    assert apply(MAKES_B.replace("made", "made anew")) == PLAIN | {"new/b.c": "made anew\n"}
    # Patches apply to what those before them leave.
    further = CHANGES_A.replace("-two", "-2").replace("+2\n", "+II\n").replace("1,2 +1,3", "1,3 +1,4")
    assert apply(CHANGES_A, f"{further} three\n")["kernel/a.c"] == "one\nII\nthree\nthree\n"


@needs_patch
def test_files_that_do_not_change_are_not_written(build: ModuleType, tmp_path: Path, plain: Path) -> None:
    tree = tmp_path / "build/abis/linux-source"

    def written() -> dict[str, tuple[int, int]]:
        return {
            name: ((tree / name).stat().st_ino, (tree / name).stat().st_mtime_ns)
            for name in ("kernel/a.c", "same.c", "new/b.c")
        }

    build.apply_series(plain, tree, patches(tmp_path, CHANGES_A, MAKES_B), "patch")
    before = written()
    assert before["same.c"][0] == (plain / "same.c").stat().st_ino, "it is not shared"
    build.apply_series(plain, tree, patches(tmp_path, CHANGES_A, MAKES_B.replace("made", "x")), "patch")
    after = written()
    assert after["new/b.c"] != before["new/b.c"]
    del before["new/b.c"], after["new/b.c"]
    assert after == before


@needs_patch
def test_a_patch_that_does_not_apply_is_told_and_changes_nothing(
    build: ModuleType, tmp_path: Path, plain: Path
) -> None:
    tree = tmp_path / "build/abis/linux-source"
    build.apply_series(plain, tree, patches(tmp_path, CHANGES_A), "patch")
    before = tree_of(tree)
    with pytest.raises(build.BuildError, match=r"^patch: .*FAILED at.* \(see build/abis/patch.log\)$"):
        build.apply_series(plain, tree, patches(tmp_path, MAKES_B, CHANGES_A.replace("two", "2")), "patch")
    assert tree_of(tree) == before
    # Then what is next may be of other files, and finds those.
    build.apply_series(plain, tree, patches(tmp_path, REMOVES_C), "patch")
    assert tree_of(tree) == {name: text for name, text in PLAIN.items() if name != "c.c"}


# --- packages


def test_sources_are_asked_for_beside_packages(build: ModuleType) -> None:
    stanza = "Types: deb\nURIs: http://host/debian\nSuites: stable\n"
    assert build._with_source_stanzas(f"{stanza}\n{stanza}") == f"{stanza}\n{stanza}".replace(
        "Types: deb\n", "Types: deb deb-src\n"
    )
    assert build._with_source_stanzas("Types: deb-src deb\n") == "Types: deb deb-src\n"
    for other in ("Types: deb-src\n", "# Types of packages\nURIs: http://deb.host/deb\n"):
        assert build._with_source_stanzas(other) == other

    lines = "# deb http://no/ x\ndeb [a=b] http://one/ x main\ndeb-src [a=b] http://one/ x main\n\n"
    assert build._with_source_lines(f"{lines}deb-src http://two/ x\n") == (
        "deb [a=b] http://one/ x main\ndeb-src [a=b] http://one/ x main\ndeb-src http://two/ x\n"
    )


def test_packages_are_found_by_their_names(build: ModuleType, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    packages = build.Packages(given)
    own = tmp_path / "build/abis/packages"
    for name in (
        "linux-source-6.1_6.1.192-2_all.deb",
        "linux-source-6.1_6.9.1-1_all.deb",
        "linux-source-6.10_6.10.1-1_all.deb",
        "qemu_7.2+dfsg-7.dsc",
        "qemu_8.0+dfsg-1.dsc",
        "qemu_7.2+dfsg-7.debian.tar.xz",
        "qemu-system-data_1%3a7.2+dfsg-7_all.deb",
    ):
        (given / name).touch()
    for name in ("linux-source-6.1_6.1.192-2_all.deb", "linux-source-6.1_6.1.99-1_all.deb"):
        (own / name).touch()
    assert packages._there(build.LINUX) == {
        "6.1.192-2": given / "linux-source-6.1_6.1.192-2_all.deb",
        "6.1.99-1": own / "linux-source-6.1_6.1.99-1_all.deb",
    }
    assert packages._there(build.QEMU) == {"1:7.2+dfsg-7": given / "qemu_7.2+dfsg-7.dsc"}
    data = build.Package("qemu-system-data", "", "")
    assert list(packages._there(data)) == ["1:7.2+dfsg-7"]
    assert build.Packages(None)._there(build.QEMU) == {}


@needs_dpkg
def test_the_version_of_the_series_is_taken_or_the_newest(
    build: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = build.Packages(tmp_path)
    package = build.Package("p", "6.1.20-1", "6.1.")

    def got(*versions: str) -> str:
        for version in versions:
            (tmp_path / f"p_{version}_all.deb").touch()
        path, version = packages.get(package)
        assert path == tmp_path / f"p_{version}_all.deb"
        return str(version)

    assert got("6.1.9-1", "6.1.100-1", "6.2.1-1") == "6.1.100-1"
    assert "p: 6.1.100-1; the series were made for 6.1.20-1" in capsys.readouterr().out
    assert got("6.1.20-1") == "6.1.20-1"
    assert capsys.readouterr().out == ""


def test_what_is_not_there_is_fetched(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = build.Packages(None)
    monkeypatch.setattr(build.Apt, "version", lambda *_: "6.1.192-2")
    monkeypatch.setattr(build.Apt, "download", lambda *_: None)
    with pytest.raises(build.BuildError, match=r"apt-get fetched no linux-source-6.1_\*.deb"):
        packages.get(build.LINUX)

    def download(_: Any, package: Any, version: str, folder: Path) -> None:
        (folder / f"{package.name}_{version}_all.deb").touch()

    monkeypatch.setattr(build.Apt, "download", download)
    path = tmp_path / "build/abis/packages/linux-source-6.1_6.1.192-2_all.deb"
    assert packages.get(build.LINUX) == (path, "6.1.192-2")


# --- what is done, and what is to be done again


def test_a_step_is_done_again_if_it_was_stopped_or_something_changed(
    build: ModuleType, tmp_path: Path
) -> None:
    product = tmp_path / "product"
    product.touch()

    def stamp(inputs: str) -> Any:
        return build.Stamp("it", inputs, product)

    assert not stamp("a").current()
    with build.step("it", stamp("a")):
        assert not stamp("a").current()
    assert stamp("a").current()
    assert not stamp("b").current()
    with pytest.raises(build.BuildError), build.step("it", stamp("a")):
        raise build.BuildError("no")
    assert not stamp("a").current()
    stamp("a").write()
    product.unlink()
    assert not stamp("a").current()


def test_the_cpu_is_checked_again_when_anything_of_the_check_changed(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, firmware = build.IMAGE_SOURCES / "checks.c", build.FIRMWARE / build.FIRMWARE_FILES[0]
    build.FIRMWARE.mkdir()
    for path in (source, build.EMULATOR, *map(build.FIRMWARE.joinpath, build.FIRMWARE_FILES)):
        path.write_text("1")
    cpus: list[str] = []

    def run(_: str, *command: str | Path, **__: Any) -> None:
        if command[0] == "objcopy":
            Path(command[-1]).touch()

    monkeypatch.setattr(build, "run", run)
    monkeypatch.setattr(build, "check_image", lambda _, cpu: cpus.append(cpu))

    def checked() -> list[str]:
        cpus.clear()
        build.check_qemu()
        return list(cpus)

    assert checked() == ["max", "max,tlbins=on tlbins", "max one-level"]
    assert checked() == []
    for path in (source, build.EMULATOR, firmware):
        path.write_text("2")
        assert checked() == ["max", "max,tlbins=on tlbins", "max one-level"], path.name
        assert checked() == []
    for name, value in (("IMAGE_FLAGS", ("-O1",)), ("IMAGE_MACHINE", ("-m", "2G")), ("IMAGE_PASSED", 35)):
        monkeypatch.setattr(build, name, value)
        assert checked() == ["max", "max,tlbins=on tlbins", "max one-level"], name
        assert checked() == []
    monkeypatch.setattr(build, "IMAGE_CPUS", {("max", 256): "", ("qemu64", 1): "pcid"})
    assert checked() == ["max", "qemu64 pcid"]
    assert checked() == []


@pytest.mark.parametrize(
    ("status", "printed", "reason"),
    [
        (33, "FAILED: one\n", None),
        (35, "checking\nFAILED: it kept a page\n1 of 9 failed\n", "FAILED: it kept a page"),
        (1, "", "no output"),
    ],
)
def test_the_image_says_by_its_status_whether_all_passed(
    status: int, printed: str, reason: str | None, build: ModuleType, tmp_path: Path
) -> None:
    command = ["sh", "-c", f"printf '{printed}'; exit {status}"]
    if reason is None:
        build.check_image(command, "max")
    else:
        with pytest.raises(build.BuildError, match=rf"the emulated CPU \(max\): {reason} \(see build/abis/"):
            build.check_image(command, "max")
    assert printed in (tmp_path / "build/abis/qemu-test.log").read_text()


class Kernels:
    """In place of the commands that build kernels: which were built, from what."""

    def __init__(self, build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self._build = build
        self._built: list[tuple[str, str]] = []
        monkeypatch.setattr(build, "unpack_linux", lambda *_: build.OUTPUT / "linux-plain")
        monkeypatch.setattr(build, "apply_series", lambda *_: None)
        monkeypatch.setattr(build, "configure", lambda *_: None)
        monkeypatch.setattr(build, "run", self._run)

    def _run(self, log: str, *command: str | Path, **_: Any) -> None:
        folder = Path(str(command[3]).removeprefix("O="))
        (folder / "arch/x86/boot").mkdir(parents=True, exist_ok=True)
        (folder / "arch/x86/boot/bzImage").touch()
        (folder / "vmlinux").touch()
        self._built.append((log, Path(command[2]).name))

    def get(self, _: Any) -> tuple[Path, str]:
        return Path("linux.deb"), "6.1.1"

    def built(self, *names: str) -> list[tuple[str, str]]:
        self._built.clear()
        self._build.build_linux(self, names, 1)
        return list(self._built)


def test_a_kernel_is_built_again_when_what_is_its_own_changed(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = tmp_path / "kernel/abis/linux"
    for name in ("config", "config.abis", "config.debug"):
        (series / name).write_text(f"# {name}\n")
    kernels = Kernels(build, monkeypatch)
    plain, patched = ("linux-baseline", "linux-plain"), ("linux-abis", "linux-source")
    # The plain kernel needs no series, and a kernel that should have one is never built without.
    assert kernels.built("baseline") == [plain]
    with pytest.raises(build.BuildError, match="kernel/abis/linux has no patches"):
        kernels.built("abis")
    patches(series, CHANGES_A)
    assert kernels.built("baseline", "abis") == [patched]
    assert kernels.built("baseline", "abis") == []
    patches(series, CHANGES_A, MAKES_B)
    assert kernels.built("baseline", "abis") == [patched]
    (series / "config.abis").write_text("CONFIG_ABIS=y\n")
    assert kernels.built("baseline", "abis") == [patched]
    (series / "config").write_text("CONFIG_SMP=y\n")
    assert kernels.built("baseline", "abis") == [plain, patched]
    assert kernels.built("debug") == [("linux-debug", "linux-source")]


def test_an_emulator_without_a_series_is_not_built(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Packages:
        def get(self, _: Any) -> tuple[Path, str]:
            return Path("p"), "1"

    monkeypatch.setattr(build, "get_firmware", lambda _: None)
    with pytest.raises(build.BuildError, match="kernel/abis/qemu has no patches"):
        build.build_qemu(Packages(), 1)


# --- kernels' settings


def test_settings_that_are_not_set_are_n(build: ModuleType) -> None:
    text = '# Memory\nCONFIG_SMP=y\nCONFIG_NR=64\n# CONFIG_KVM is not set\nCONFIG_S="a b"\nCONFIG_SMP=m\n'
    assert build.settings_of(text) == {
        "CONFIG_SMP": "m",
        "CONFIG_NR": "64",
        "CONFIG_KVM": "n",
        "CONFIG_S": '"a b"',
    }


@pytest.mark.parametrize(
    ("wanted", "has", "lost"),
    [
        ("CONFIG_A=y\n# CONFIG_B is not set\n", "CONFIG_A=y\n", None),
        ("CONFIG_A=y\n", "# CONFIG_A is not set\n", "CONFIG_A=y"),
        ("CONFIG_A=y\nCONFIG_C=2\n", "CONFIG_A=y\nCONFIG_C=3\n", "CONFIG_C=2"),
        ("# CONFIG_B is not set\n", "CONFIG_B=y\n", "CONFIG_B=n"),
    ],
)
def test_a_setting_that_the_kernel_does_not_take_is_told(
    wanted: str,
    has: str,
    lost: str | None,
    build: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tmp_path / ".config"

    def run(_: str, *command: str | Path, **__: Any) -> None:
        if command[-1] == "tinyconfig":
            config.write_text("CONFIG_TINY=y\n")
        else:
            assert config.read_text() == f"CONFIG_TINY=y\n{wanted}"
            config.write_text(has)

    monkeypatch.setattr(build, "run", run)
    if lost is None:
        build.configure("abis", tmp_path, tmp_path, wanted)
        assert config.exists()
    else:
        with pytest.raises(build.BuildError, match=f"configuration does not take {lost}$"):
            build.configure("abis", tmp_path, tmp_path, wanted)
        assert not config.exists()


# --- the command


def test_a_command_that_fails_is_told_by_its_first_complaint(build: ModuleType) -> None:
    build.run("log", "sh", "-c", "echo error: of a run before; exit 0")
    script = "echo fine; echo 'x.c:1: error: no such thing'; echo 'x.c:2: error: nor this'; echo last; exit 1"
    with pytest.raises(
        build.BuildError, match=r"^sh: x.c:1: error: no such thing \(see build/abis/log.log\)$"
    ):
        build.run("log", "sh", "-c", script, append=True)
    with pytest.raises(build.BuildError, match=r"^sh: last \(see"):
        build.run("log", "sh", "-c", "echo first; echo last; exit 1")
    with pytest.raises(build.BuildError, match=r"^false: no reason given \(see"):
        build.run("log", "false")


def test_variants_are_known_ones(build: ModuleType) -> None:
    assert build.variants_of("debug,baseline") == ["debug", "baseline"]
    for text in ("", ",", "abis,other"):
        with pytest.raises(argparse.ArgumentTypeError, match="baseline, abis, debug is meant"):
            build.variants_of(text)


def test_jobs_are_at_least_one(build: ModuleType) -> None:
    assert build.jobs_of("12") == 12
    for text in ("0", "-1", "", "two", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="1 at least"):
            build.jobs_of(text)


def test_what_is_missing_is_said_before_anything_is_begun(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda tool: None)
    monkeypatch.setattr(sys, "argv", ["kernel/abis/build", "linux"])
    assert build.main() == 1
    told = capsys.readouterr().err
    assert "missing: apt-get, gcc, " in told
    assert "flex" in told
    assert "meson" not in told
    assert list((tmp_path / "build/abis").iterdir()) == []


@pytest.mark.parametrize("words", [["linux", "--jobs", "0"], ["linux", "--variants", "other"], ["nothing"]])
def test_what_is_not_meant_is_refused(words: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "kernel/abis/build", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "usage:" in done.stderr
