"""Files of figures, whole or as they were, whatever stands where one is to be written; narrow tables."""

import io
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from calm_helpers import ROOT
from rich.console import Console
from rich.table import Table

from calm.core import report
from calm.core.errors import CalmError


def test_a_file_stays_whole_where_a_write_breaks_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "base.json"
    path.write_text("before")

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CalmError, match=r"cannot write .*base\.json: No space left on device"):
        report.write(str(path), "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_file_is_besides_its_text_stays(tmp_path: Path) -> None:
    path, link = tmp_path / "base.json", tmp_path / "link"
    path.write_text("before")
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    had = path.stat()
    link.symlink_to(path.name)
    report.write(str(link), "after")
    assert link.is_symlink()
    now = path.stat()
    assert path.read_text() == "after"
    assert (now.st_uid, now.st_gid, stat.S_IMODE(now.st_mode)) == (had.st_uid, had.st_gid, 0o640)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["base.json", "link"]


def test_a_file_that_cannot_be_replaced_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is mounted into a container, or lies in a folder of somebody else's."""
    path = tmp_path / "base.json"
    path.write_text("before")

    def busy(_self: Path, _target: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    report.write(str(path), "after")
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_standard_output_by_its_name_is_written_to(tmp_path: Path) -> None:
    """A pipe, and a file that the shell has open and writes more to."""
    code = "from calm.core import report; report.write('/dev/stdout', 'text')"
    command = [sys.executable, "-c", code]
    piped = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert piped.stdout == "text"
    with (tmp_path / "out").open("w") as out:
        subprocess.run(command, cwd=ROOT, stdout=out, check=True)
        assert os.fstat(out.fileno()).st_ino == (tmp_path / "out").stat().st_ino
    assert (tmp_path / "out").read_text() == "text"


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE, text=True) as reader:
        report.write(str(path), "text")
        assert reader.communicate()[0] == "text"
    assert path.is_fifo()


def on_a_terminal(table: Table) -> str:
    """As 80 columns show it."""
    target = Console(file=io.StringIO(), width=80, force_terminal=True, no_color=True)
    report.print_table(target, table)
    assert isinstance(target.file, io.StringIO)
    return re.sub("\x1b\\[[0-9;]*m", "", target.file.getvalue())


def test_a_narrow_terminal_cuts_no_figure() -> None:
    table = report.table(*(f"heading {number}" for number in range(9)))
    table.add_row(*["1,234.5 MiB"] * 9)
    assert on_a_terminal(table).count("1,234.5 MiB") == 9


def test_a_narrow_terminal_gets_no_spare_column() -> None:
    table = report.table("path", "from", "words", wrap=("words",), spare=("from",))
    table.add_row("/a/long/path/of/a/library.so", "a package and its version", "one two three " * 3)
    assert "a package" not in on_a_terminal(table)
    assert "/a/long/path/of/a/library.so" in on_a_terminal(table)
    table = report.table("path", "from", spare=("from",))
    table.add_row("/a/path", "a package")
    assert "a package" in on_a_terminal(table)
