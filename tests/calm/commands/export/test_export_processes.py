"""calm export: processes that come, go, change, or belong to others."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from calm_helpers import ROOT, Calm
from export_helpers import CALMALLOC, PTLBMALLOC2, Exporter, Start, by_name, compiled, tell
from impostor import FLAGS, impostor
from unprivileged import NOBODY, readable_by_all, unprivileged
from waiting import wait_until

from calm.commands.export import reader
from calm.commands.export.reader import Reader
from calm.core import counters, proc

pytest.importorskip("prometheus_client")

from calm.commands.export import exposition

sys.path.insert(0, str(ROOT / "bench"))


# Processes that come, go and change.


def test_all_processes_with_a_library(start: Start, export: Callable[..., Exporter]) -> None:
    exporter = export()
    pids = {str(start(library)[0].pid) for library in (CALMALLOC, PTLBMALLOC2)}
    without, _ = start(None)
    found = exporter.metrics()
    assert pids <= set(found["calmalloc_footprint_bytes"])
    assert str(without.pid) not in found["process_memory_usage_bytes"]
    assert "2" not in found["process_memory_usage_bytes"]
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)
        os.waitpid(int(pid), 0)
    assert not pids & set(exporter.metrics().get("calmalloc_footprint_bytes", {}))


def test_by_name(start: Start, export: Callable[..., Exporter], tmp_path: Path, program: Path) -> None:
    named = tmp_path / "by-this-name"
    shutil.copy(program, named)
    exporter = export("--command", "by-this-*")
    assert "there is no process called 'by-this-*' yet" in exporter.lines[0]
    first, _ = start(command=named)
    second, _ = start(None, command=named)
    found = exporter.metrics()
    assert set(found["process_memory_usage_bytes"]) == {str(first.pid), str(second.pid)}
    assert set(found["calmalloc_footprint_bytes"]) == {str(first.pid)}


def test_a_hundred_processes(opened: Callable[..., Reader]) -> None:
    env = os.environ | {"LD_PRELOAD": str(CALMALLOC)}
    processes = [subprocess.Popen(["sleep", "1000"], env=env) for _ in range(100)]
    try:
        source = opened(*(process.pid for process in processes))
        wait_until(lambda: sum(bool(each.libraries) for each in source.read().processes) == 100)
        found = by_name(exposition.text(source.read()).decode())
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    assert len(found["calmalloc_footprint_bytes"]) == 100
    assert source.read().own["ended"] == 0  # chosen by their numbers, which are free again
    assert source._known == {}


def test_programs_that_are_run_once_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_MAX_FILES", 10)
    finder = counters.Finder()
    for number in range(1000):
        image = proc.Mapping(0, 4096, "r-xp", 0, "0:1", number, f"/{number}")
        assert finder.tables(lambda _, size: bytes(size), [image]) == ([], "")
        assert len(finder._without) <= 10


def test_there_is_a_limit(
    start: Start, opened: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = [start()[0].pid for _ in range(3)]
    monkeypatch.setattr(reader, "MAX_PROCESSES", 2)
    snapshot = opened(*pids).read()
    assert [process.pid for process in snapshot.processes] == pids[:2]
    assert (snapshot.own["processes"], snapshot.own["limit"]) == (2, 1)


def test_a_process_that_ends_during_the_scrape(
    start: Start, opened: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = start()
    source = opened(process.pid)
    source.read()

    def ends(_: int) -> tuple[int, int, int]:
        process.kill()
        process.wait()
        raise proc.GoneError(process.pid)

    monkeypatch.setattr(proc, "statm", ends)
    snapshot = source.read()
    assert (snapshot.processes, snapshot.own["ended"]) == ([], 1)


def test_a_program_that_becomes_another_and_one_that_renames_itself(
    start: Start, opened: Callable[..., Reader]
) -> None:
    process, _ = start()
    source = opened(process.pid)
    (first,) = source.read().processes
    tell(process, "n")
    assert process.stdout
    process.stdout.readline()
    assert proc.stat(process.pid).name == "renamed"
    (second,) = source.read().processes
    assert second.attributes == first.attributes
    assert second.libraries
    tell(process, "e")
    wait_until(lambda: proc.stat(process.pid).name == "cat")
    (third,) = source.read().processes
    assert (third.command, third.libraries) == ("cat", {})


def test_a_number_that_is_used_again(
    start: Start, opened: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = start()
    chosen = opened(process.pid)
    unchecked = Reader(lambda: [process.pid], every=False, shootdowns=False)
    (before,) = unchecked.read().processes
    assert chosen.read().processes[0].pid == process.pid
    again = replace(proc.stat(process.pid), name="another", started_ticks=0)
    monkeypatch.setattr(proc, "stat", lambda *_: again)
    assert chosen.read().processes == []
    (after,) = unchecked.read().processes
    assert (before.command, after.command) == ("victim", "another")


@pytest.mark.parametrize("library", [CALMALLOC, PTLBMALLOC2])
def test_a_stopped_process_is_read(start: Start, opened: Callable[..., Reader], library: Path) -> None:
    """Wherever its threads are: perhaps one of them has the heap's lock."""
    process, _ = start(library, "churn")
    source = opened(process.pid)
    for _ in range(20):
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: proc.stat(process.pid).state == "T")
        (read,) = source.read().processes
        assert read.libraries
        process.send_signal(signal.SIGCONT)


def test_a_process_that_was_named_ends(start: Start, export: Callable[..., Exporter], tmp_path: Path) -> None:
    process, _ = start()
    file = tmp_path / "x.prom"
    exporter = export(process.pid, "--textfile", file, "-d", "100ms")
    wait_until(file.exists)
    process.kill()
    _, errors = exporter.process.communicate()
    assert exporter.process.returncode == 0
    assert errors == f"calm: process {process.pid} (victim) has ended\n"
    assert list(tmp_path.iterdir()) == []


def test_a_process_without_a_library_is_reported(
    start: Start, export: Callable[..., Exporter], monkeypatch: pytest.MonkeyPatch, calm: Calm
) -> None:
    process, _ = start(None)
    monkeypatch.setattr(counters, "YOUNG_S", -1.0)
    done = calm("export", process.pid, "-n", "1", "--textfile", "-")
    assert done.returncode == 0
    assert done.stderr == f"calm: neither calmalloc nor ptlbmalloc2 is in process {process.pid}\n"
    found = by_name(done.stdout)
    assert str(process.pid) in found["process_memory_usage_bytes"]
    assert "calmalloc_footprint_bytes" not in found


FOREIGN = {
    "version": "table.version = 2;",
    "damaged": 'memcpy(one[0].name, "a\\033[31m", 7);',
    "other library": "",
    "same library": """
        strcpy(table.library, "calmalloc");
        strcpy(table.release, "1\\"\\n{");
        strcpy(one[0].name, "footprint");
    """,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_tables(
    start: Start, opened: Callable[..., Reader], calm: Calm, tmp_path: Path, kind: str
) -> None:
    process, _ = start(None, command=compiled(tmp_path, "foreign", impostor(FOREIGN[kind]), FLAGS))
    snapshot = opened(process.pid).read()
    if kind in ("version", "damaged"):
        assert snapshot.own[kind] == 1
        assert snapshot.processes[0].libraries == {}
        done = calm("export", process.pid)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.fullmatch(rf"calm: process {process.pid}: the table of counters in [^\n]+\n", done.stderr)
    elif kind == "other library":
        assert snapshot.processes[0].libraries == {}
    else:
        assert snapshot.processes[0].libraries["calmalloc"].release == '1"?{'
        assert by_name(exposition.text(snapshot).decode())["calmalloc_footprint_bytes"] == {
            str(process.pid): 42
        }
    every = opened().read()
    assert (process.pid in [each.pid for each in every.processes]) == (kind == "same library")


# Permissions.


def test_without_root(start: Start, program: Path) -> None:
    """The user's own processes alone, and a port that needs no right."""
    imports = "calm.commands.export.command, calm.commands.export.exposition, encodings.idna, difflib"
    roots, _ = start()
    with contextlib.ExitStack() as stack:
        if os.geteuid() == 0:
            library, copy = stack.enter_context(readable_by_all(CALMALLOC, program))
            mine, _ = start(library, command=copy, user=NOBODY, group=NOBODY, extra_groups=[])
        done = unprivileged(imports, "export", "-n", "1", "--textfile", "-")
    yama = proc.text("sys/kernel/yama/ptrace_scope").strip() or "0"
    if yama == "0":
        assert (done.returncode, done.stderr) == (0, "")
        found = by_name(done.stdout)
        assert str(mine.pid) in found["calmalloc_footprint_bytes"]
        assert str(roots.pid) not in found["process_memory_usage_bytes"]
    done = unprivileged(imports, "export", roots.pid)
    assert done.returncode == 1
    assert done.stderr == f"calm: process {roots.pid}: another user's process: needs root\n"
    if int(proc.text("sys/net/ipv4/ip_unprivileged_port_start") or 1024) > 80:
        done = unprivileged(imports, "export", "--listen", "80")
        assert done.returncode == 1
        assert "cannot listen at 127.0.0.1:80: ports below 1024 need root" in done.stderr.splitlines()[-1]
