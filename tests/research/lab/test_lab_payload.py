"""What `calm lab` carries into the guest, and the machine that it emulates."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from calm_helpers import ROOT
from lab_helpers import compiled, needs_x86_64, turned, unpacked
from lab_qemu import VERSION, archive

from calm.core.errors import CalmError
from research.lab import guest, machine, payload
from research.lab.architecture import ARM64, X86_64
from research.lab.command import environment_of
from research.lab.machine import Qemu, Topology
from research.lab.payload import Payload

LIBRARY = ROOT / "build/release/libcalmalloc.so"
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="calmalloc is not built")
pytestmark = needs_library


def names(files: Payload, folder: Path) -> dict[str, tuple[int, bytes]]:
    path = folder / "archive"
    with path.open("wb") as file:
        files.write(file)
    return archive(path)


def test_a_program_comes_with_its_libraries_and_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "program").symlink_to(shutil.which("true") or "/bin/true")
    files = Payload({"PATH": os.environ["PATH"]})
    files.program(tmp_path / "link" / "program")
    files.finish()
    found = names(files, tmp_path)
    inner = str(tmp_path).lstrip("/")
    assert found[f"{inner}/link"] == (0o120777, b"real")
    assert found[f"{inner}/real/program"][0] == 0o120777
    real = Path(tmp_path / "link" / "program").resolve()
    assert found[str(real).lstrip("/")][1] == real.read_bytes()
    for name in payload.needed([real], os.environ):
        assert str(name.resolve()).lstrip("/") in found
        # The path by which the loader asks for it leads there too.
        at, left = "", str(name).lstrip("/").split("/")
        assert left[0] in found or at in found
    assert any(name.endswith("/libgcc_s.so.1") for name in found), (
        "glibc loads it where a thread is cancelled"
    )
    assert found["etc/ld.so.cache"][1] == Path("/etc/ld.so.cache").read_bytes()


def test_a_script_comes_with_its_interpreters(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    # An interpreter that is a script itself.
    (tools / "inner").write_text("#!/bin/sh -e\n")
    (tools / "inner").chmod(0o755)
    script = tmp_path / "script"
    script.write_text("#!/usr/bin/env -S A=1 inner -x\n")
    old = os.environ["PATH"]
    os.environ["PATH"] = f"{tools}:{old}"
    try:
        files = Payload({})
        files.program(script)
    finally:
        os.environ["PATH"] = old
    found = names(files, tmp_path)
    for path in (script, tools / "inner", Path("/usr/bin/env").resolve(), Path("/bin/sh").resolve()):
        assert str(path).lstrip("/") in found


@pytest.mark.parametrize(
    ("text", "message"),
    [("#!/no/interpreter\n", "there is no interpreter"), ("#!/usr/bin/env -i\n", "names no interpreter")],
)
def test_a_script_nobody_can_run(tmp_path: Path, text: str, message: str) -> None:
    script = tmp_path / "script"
    script.write_text(text)
    with pytest.raises(CalmError, match=message) as caught:
        Payload({}).program(script)
    assert caught.value.exit_code == 126


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "lib.c").write_text("int f(void) { return 0; }\n")
    (tmp_path / "main.c").write_text("int f(void); int main(void) { return f(); }\n")
    library = tmp_path / "libgone.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "lib.c"], check=True)
    subprocess.run(["cc", "-o", tmp_path / "main", tmp_path / "main.c", library], check=True)
    files = Payload(os.environ)
    files.program(tmp_path / "main")
    library.unlink()
    with pytest.raises(CalmError, match=r"libgone\.so"):
        files.finish()


def test_folders_are_carried_whole(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    (tree / "inner" / "data").write_bytes(b"12345")
    (tree / "dangling").symlink_to("/nowhere/at/all")
    shutil.copy(LIBRARY, tree / "module.so")
    os.mkfifo(tree / "pipe")
    files = Payload(os.environ)
    files.add(tree)
    files.finish()
    found = names(files, tmp_path)
    inner = str(tree).lstrip("/")
    assert found[f"{inner}/inner/data"][1] == b"12345"
    assert found[f"{inner}/dangling"] == (0o120777, b"/nowhere/at/all")
    assert f"{inner}/pipe" not in found
    assert any(name.endswith("/libc.so.6") for name in found), "what a module needs comes too"
    assert files.size == sum(len(content) for _, content in found.values())
    # Who the users are is this machine's business, unless it is carried.
    assert found["etc/passwd"][1].startswith(b"root:x:0:0:root:/root:/bin/sh")
    files = Payload(os.environ)
    files.add(Path("/etc/passwd"))
    files.finish()
    assert names(files, tmp_path)["etc/passwd"][1] == Path("/etc/passwd").read_bytes()


@needs_x86_64
def test_a_foreign_guest_has_debians_libraries(tmp_path: Path) -> None:
    files = Payload({}, ARM64)
    files.program(turned(compiled(tmp_path / "program")))
    files.finish(unpacked(tmp_path / "cache"))
    found = names(files, tmp_path)
    assert str(tmp_path / "program").lstrip("/") in found
    libraries = {
        "aarch64-linux-gnu/libc.so.6": b"libc6/lib/aarch64-linux-gnu/libc.so.6",
        "aarch64-linux-gnu/libstdc++.so.6": b"libstdc++6/usr/lib/aarch64-linux-gnu/libstdc++.so.6",
        "ld-linux-aarch64.so.1": b"aarch64-linux-gnu/ld-linux-aarch64.so.1",
    }
    for name, content in libraries.items():
        assert found[f"usr/lib/{name}"][1] == content
    # The loader and the shell are asked for by these paths.
    assert found["lib"] == (0o120777, b"usr/lib")
    assert found["bin"] == (0o120777, b"usr/bin")
    assert found["usr/bin/sh"] == (0o120777, guest.BUSYBOX.encode())
    # This machine's are not carried.
    assert "etc/ld.so.cache" not in found
    assert sum("libc.so" in name for name in found) == 1
    assert not any("gconv" in name for name in found), "they are large, and few programs need them"


@needs_x86_64
@pytest.mark.parametrize("known_by", ["variable", "runpath"])
def test_a_foreign_library_is_found_where_the_loader_looks(tmp_path: Path, known_by: str) -> None:
    other, folder = compiled(tmp_path / "other/libouter.so", "-shared").parent, tmp_path / "lib"
    inner = compiled(folder / "libinner.so", "-shared")
    outer = compiled(folder / "libouter.so", "-shared", inner, "-Wl,-rpath,$ORIGIN")
    runpath = [f"-Wl,-rpath,{other}:$ORIGIN/lib"] if known_by == "runpath" else []
    path = compiled(tmp_path / "program", f"-L{folder}", "-louter", f"-Wl,-rpath-link,{folder}", *runpath)
    for each in (inner, outer, path):
        turned(each)
    # The loader passes over the library that is not for its machine.
    files = Payload({"LD_LIBRARY_PATH": f"{other}::{folder}"} if known_by == "variable" else {}, ARM64)
    files.program(path)
    files.finish(unpacked(tmp_path / "cache"))
    found = names(files, tmp_path)
    assert str(inner).lstrip("/") in found
    assert str(outer).lstrip("/") in found
    assert str(other / "libouter.so").lstrip("/") not in found


@needs_x86_64
def test_a_missing_foreign_library_is_named(tmp_path: Path) -> None:
    library = compiled(tmp_path / "lib/libouter.so", "-shared")
    path = turned(compiled(tmp_path / "program", f"-L{library.parent}", "-louter"))
    files = Payload({"LD_LIBRARY_PATH": str(library.parent)}, ARM64)
    files.program(path)
    with pytest.raises(CalmError, match=rf"^{path} needs libouter\.so, which is not found for arm64"):
        files.finish(unpacked(tmp_path / "cache"))
    # Nor does a guest without the package of its loader run it.
    turned(library)
    with pytest.raises(CalmError, match=r"needs (libc\.so\.6|/lib/ld-linux-aarch64\.so\.1)"):
        files.finish()


@needs_x86_64
def test_files_of_another_machine_are_refused(tmp_path: Path) -> None:
    program, foreign = compiled(tmp_path / "program"), turned(compiled(tmp_path / "foreign"))
    library = compiled(tmp_path / "lib.so", "-shared")
    for path in (program, library):
        for add in (Payload({}, ARM64).program, Payload({}, ARM64).library, Payload({}, ARM64).add):
            with pytest.raises(CalmError, match=rf"^{path} is for x86-64, and the guest is arm64$"):
                add(path)
    with pytest.raises(CalmError, match=f"^{foreign} is for arm64, and the guest is x86-64: --arch arm64 "):
        Payload({}).program(foreign)
    # In a folder such a file is data.
    packages = unpacked(tmp_path / "cache")
    for architecture in (X86_64, ARM64):
        files = Payload({}, architecture)
        files.add(tmp_path)
        files.finish(packages)
        assert {str(each).lstrip("/") for each in (program, foreign)} <= set(names(files, tmp_path))


@needs_x86_64
@pytest.mark.parametrize("interpreter", ["/bin/sh", "/usr/bin/env sh", "PROGRAM"])
def test_a_script_of_a_foreign_guest(tmp_path: Path, interpreter: str) -> None:
    """It has a shell of its own, and no other interpreter."""
    script, program = tmp_path / "script", compiled(tmp_path / "program")
    script.write_text(f"#!{interpreter.replace('PROGRAM', str(program))}\n")
    files = Payload({}, ARM64)
    if interpreter == "/bin/sh":
        files.program(script)
        return
    with pytest.raises(CalmError, match=r"/(env|program) is for x86-64, and the guest is arm64$"):
        files.program(script)


@pytest.mark.parametrize(
    ("cpus", "sockets", "cores"), [(1, 1, 1), (16, 4, 4), (63, 3, 21), (64, 4, 16), (255, 1, 255)]
)
def test_topologies_that_can_be(cpus: int, sockets: int, cores: int) -> None:
    assert Topology(cpus, sockets).cores == cores


def test_a_node_has_memory_that_it_can_do_with(tmp_path: Path) -> None:
    """128 MiB; where there is less for each socket, all of them are one node."""
    for mib, nodes in ((1024, 8), (1016, 0)):
        words = machine.command(
            *(Qemu("qemu", VERSION), Topology(8, 8), mib << 20, machine.TCG),
            *(tmp_path / name for name in ("kernel", "initrd", "console")),
        )
        assert words.count("-numa") == nodes
        assert "8,sockets=8,cores=1,threads=1" in words


def test_memory_is_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    monkeypatch.setattr(machine, "available", lambda: 100_000 * mib)
    assert machine.choose_memory(None, 10 * mib) == 4126 * mib
    monkeypatch.setattr(machine, "available", lambda: 2000 * mib)
    assert machine.choose_memory(None, 10 * mib) == 1500 * mib
    monkeypatch.setattr(machine, "available", lambda: 600 * mib)
    assert machine.choose_memory(None, 10 * mib) == 542 * mib
    with pytest.raises(CalmError, match="the guest needs 812M"):
        machine.choose_memory(None, 100 * mib)


def test_the_guests_environment_is_its_own() -> None:
    here = {"PATH": "/a:/b", "SECRET": "1", "LD_LIBRARY_PATH": "/lib2", "TERM": "xterm"}
    made = environment_of(["X=a=b", "TERM"], here)
    assert made["PATH"] == f"/a:/b:{guest.APPLETS}"
    assert (made["X"], made["TERM"], made["LD_LIBRARY_PATH"]) == ("a=b", "xterm", "/lib2")
    assert "SECRET" not in made


def test_a_report_that_cannot_be_read_is_no_figure() -> None:
    listener = guest.Listener({0: "glibc"})
    with pytest.raises(CalmError, match="cannot be read"):
        listener.feed(b'@@ begin 0\n@@ end 0 0   {"half\n')
    listener = guest.Listener({0: "glibc"})
    ((_, run),) = listener.feed(b"noise\n@@ begin 0\n@@ end 0 0   \n")
    assert run.failure == "calm-probe ended with 0 and reported nothing"


def test_a_program_that_does_not_start_is_a_failure(tmp_path: Path) -> None:
    # As the probe itself tells it.
    command = [ROOT / "build/release/calm-probe", "-c", "none", "-o", tmp_path / "told", "--", "/no/such"]
    subprocess.run(command, check=False, capture_output=True)
    listener = guest.Listener({7: "glibc"})
    report = (tmp_path / "told").read_bytes().strip()
    ((_, run),) = listener.feed(b"@@ begin 7\n@@ end 7 1   " + report + b"\n")
    assert run.failure == "cannot be started in the guest: No such file or directory"
    assert run.measurement is not None
    assert run.measurement.exit_code == 127
