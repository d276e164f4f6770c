"""ELF files: what is read of them, and files that are none."""

import os
import subprocess
from pathlib import Path

import pytest

from calm.core import elf

SOURCE = "int counted(int x) { return x + 1; }\nint main(void) { return counted(-1); }\n"


def _build(folder: Path, name: str, *flags: str) -> Path:
    path = folder / name
    command = ["gcc", "-x", "c", "-", "-o", str(path), *flags]
    subprocess.run(
        command, input=SOURCE, text=True, check=True, env={"PATH": "/usr/bin:/bin", "CCACHE_DISABLE": "1"}
    )
    return path


def test_a_dynamic_program(tmp_path: Path) -> None:
    path = _build(tmp_path, "program")
    assert elf.is_elf(path)
    assert elf.is_loadable(path)
    assert Path(elf.interpreter(path) or "").exists()
    with elf.opened(path) as file:
        address = file.header.e_entry
    assert any(each.address <= address < each.address + each.size for each in elf.segments(path))


def test_a_static_program_has_no_interpreter(tmp_path: Path) -> None:
    path = _build(tmp_path, "program", "-static")
    assert elf.interpreter(path) is None
    assert not elf.is_shared_library_here(path)


def test_a_shared_library(tmp_path: Path) -> None:
    path = _build(tmp_path, "library.so", "-shared", "-fPIC")
    assert elf.is_shared_library_here(path)
    foreign = bytearray(path.read_bytes())
    foreign[18:20] = b"\xf3\x00"  # RISC-V
    path.write_bytes(foreign)
    assert not elf.is_shared_library_here(path)


@pytest.mark.parametrize("read", [elf.segments, elf.interpreter])
@pytest.mark.parametrize("size", [0, 3, 4, 16, 40, 64, 100, 800])
def test_files_that_are_none_raise_one_error(tmp_path: Path, read: object, size: int) -> None:
    assert callable(read)
    whole = Path("/proc/self/exe").read_bytes()
    path = tmp_path / "short"
    path.write_bytes(whole[:size])
    with pytest.raises(elf.ElfError, match="short"):
        read(path)
    assert elf.is_elf(path) == (size >= 4)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_files_raise_no_other_error(tmp_path: Path, seed: int) -> None:
    import random

    source = random.Random(seed)
    data = bytearray(_cached(tmp_path.parent).read_bytes())
    for _ in range(30):
        data[source.randrange(4, 2000)] = source.randrange(256)
    path = tmp_path / "damaged"
    path.write_bytes(data)
    for read in (elf.segments, elf.interpreter, elf.is_loadable):
        try:
            read(path)
        except elf.ElfError as error:
            assert str(path) in str(error)  # noqa: PT017


def _cached(folder: Path) -> Path:
    path = folder / "intact"
    return path if path.exists() else _build(folder, "intact")


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(elf.ElfError, match="No such file"):
        elf.segments(tmp_path / "missing")
    with pytest.raises(elf.ElfError, match="Is a directory"):
        elf.segments(tmp_path)
    assert not elf.is_elf(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """As where a hostile process has put one in the place of a file that it has mapped."""
    os.mkfifo(tmp_path / "pipe")
    assert not elf.is_elf(tmp_path / "pipe")
    with pytest.raises(elf.ElfError, match="not a regular file"):
        elf.segments(tmp_path / "pipe")
