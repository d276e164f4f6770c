"""Reports and profiles at exit: whose they are, what they count from, and that they harm no program."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from api_helpers import (
    LINKED,
    MIB,
    MODES,
    OURS,
    PRELOAD,
    STATIC,
    Programs,
    clean_environment,
    describe,
    shared_library,
    tool,
)

HOWS = ["default", "ignored", "handled", "blocked", "pending"]


def reports(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


# ---- whose a line is, and what it counts ----


@pytest.mark.parametrize(("way", "mode"), [*((PRELOAD, mode) for mode in MODES), (STATIC, MODES[0])])
def test_lines_of_a_family_add_up(programs: Programs, way: str, mode: str) -> None:
    """Each child counts from its fork on, and its line names it and its parent."""
    ran = programs.run(way, "reported", "family", "4", options=f"report=exit,{mode}")
    lines = reports(ran.stderr)
    assert len(lines) == 9
    by_pid = {line["pid"]: line for line in lines}
    assert len(by_pid) == 9
    parent = by_pid.pop(ran["parent"])
    assert parent["ppid"] == os.getpid()
    children = [line for line in by_pid.values() if line["ppid"] == parent["pid"]]
    grandchildren = [line for line in by_pid.values() if line not in children]
    assert len(children) == len(grandchildren) == 4
    assert {line["ppid"] for line in grandchildren} == {line["pid"] for line in children}
    assert len({line["started_ns"] for line in lines}) == 9
    assert all(line["started_ns"] > parent["started_ns"] for line in by_pid.values())

    assert parent["purges_request"] >= 20
    assert parent["purged"] >= 160 * MIB
    for line, churned in [(each, 3) for each in children] + [(each, 1) for each in grandchildren]:
        assert 1 <= line["purges_request"] <= 2, line
        assert line["large_allocations"] <= 4, line
        # With the parent's free memory that the fork copied, of which little is left.
        assert line["purged"] <= line["dirtied"] + 2 * MIB, line
        assert churned * MIB <= line["dirtied"] <= (churned + 2) * MIB, line
        for total in ("heap_locks", "limit_checks", "cache_misses", "purge_ranges", "purge_ns"):
            assert line[total] <= parent[total] / 4, (total, line, parent)
        # Levels are what the child has, its parent's blocks included.
        assert line["in_use"] + line["dirty"] == line["footprint"]
        assert line["in_use"] > 0


@pytest.mark.parametrize("way", OURS)
def test_a_line_names_its_process(programs: Programs, way: str) -> None:
    """Of equal numbers in two namespaces, the start tells which."""
    first, second = (programs.run(way, "reported", "family", "0", options="report=exit") for _ in range(2))
    assert first.report["pid"] == first["parent"]
    assert list(first.report)[:5] == ["allocator", "version", "pid", "ppid", "started_ns"]
    assert 0 < first.report["started_ns"] < second.report["started_ns"]


def test_lines_under_a_filter(programs: Programs) -> None:
    """No call is made that the program's filter may not know: what was known before is in the line."""
    ran = programs.run(PRELOAD, "reported", "filtered", options="report=exit")
    child, parent = reports(ran.stderr)
    assert (parent["pid"], parent["ppid"]) == (ran["parent"], os.getpid())
    assert (child["pid"], child["ppid"]) == (0, 0)
    assert child["started_ns"] > parent["started_ns"]


# ---- files of two processes of one number ----

UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]


def cannot_unshare() -> bool:
    return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0


@pytest.mark.feature("profile")
@pytest.mark.skipif(cannot_unshare(), reason="PID namespaces are not allowed here")
def test_profiles_of_two_namespaces(programs: Programs, tmp_path: Path) -> None:
    """Both are number 1, on one volume, and both files stay."""
    options = f"report=exit,profile=64k,profile_file={tmp_path}/own"
    lines = []
    for _ in range(3):
        ran = programs.run(PRELOAD, "reported", "family", "0", options=options, wrapper=UNSHARE)
        lines += [line for line in reports(ran.stderr) if line["pid"] == 1]
    assert len(lines) == 3
    files = {path.name for path in tmp_path.iterdir() if path.name.startswith("own.1.")}
    # The name has what the line has.
    assert files == {f"own.1.{line['started_ns']}.heap" for line in lines}


def traced(programs: Programs, folder: Path, *options: str) -> list[str]:
    """Writes a profile there, as strace sees it: the calls that name it."""
    trace = folder / "trace"
    strace = [tool("strace", "strace"), "-f", "-y", "-e", "trace=%file,write", *options, "-o", str(trace)]
    variables = [f"LD_PRELOAD={shared_library()}", f"CALM_OPTIONS=profile=64k,profile_file={folder}/own"]
    words = [word for variable in variables for word in ("-E", variable)]
    command = [*strace, *words, programs.path("reported", PRELOAD), "family", "0"]
    subprocess.run(command, env=clean_environment(), check=True, capture_output=True)
    return [line for line in trace.read_text().splitlines() if f"{folder}/own." in line]


@pytest.mark.feature("profile")
def test_only_whole_profiles_have_the_name(programs: Programs, tmp_path: Path) -> None:
    """It is written under another name, and only then gets its own."""
    calls = traced(programs, tmp_path)
    (name,) = (path.name for path in tmp_path.glob("own.*"))
    (opened,) = (line for line in calls if "O_CREAT" in line)
    assert "O_EXCL" in opened
    assert "O_NOFOLLOW" in opened
    assert f'/{name}"' not in opened
    assert "rename" in calls[-1]
    assert "RENAME_NOREPLACE" in calls[-1]
    assert not [line for line in calls if "unlink" in line]


@pytest.mark.feature("profile")
@pytest.mark.parametrize("error", ["EINVAL", "ENOSYS"])
def test_profile_where_the_kernel_cannot_rename(programs: Programs, tmp_path: Path, error: str) -> None:
    traced(programs, tmp_path, "-e", f"inject=renameat2:error={error}")
    (path,) = tmp_path.glob("own.*")
    assert re.fullmatch(r"own\.\d+\.\d{19}\.heap", path.name)
    assert path.stat().st_size > 0


@pytest.mark.feature("profile")
@pytest.mark.parametrize("call", ["renameat2:error=EEXIST", "linkat:error=EEXIST"])
def test_profile_whose_name_is_taken(programs: Programs, tmp_path: Path, call: str) -> None:
    """As by a copy of the machine."""
    without = ["-e", "inject=renameat2:error=ENOSYS"] if call.startswith("link") else []
    traced(programs, tmp_path, *without, "-e", f"inject={call}:when=1")
    (path,) = tmp_path.glob("own.*")
    assert re.fullmatch(r"own\.\d+\.\d{19}\.1\.heap", path.name)


# ---- limits and closed pipes ----


def ends_as_its_own(
    programs: Programs, way: str, case: tuple[str, str], options: str, stderr: Any, bytes_most: int | None
) -> None:
    """Runs it with this stderr: its output is all there, and its status is its own."""

    def prepare() -> None:
        # Python ignores both, and so would its children.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if bytes_most is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_most, bytes_most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    done = subprocess.run(
        [programs.path("reported", way), "limited", *case],
        env=programs.environment(way, options),
        stdout=subprocess.PIPE,
        stderr=stderr,
        stdin=subprocess.DEVNULL,
        text=True,
        preexec_fn=prepare,
        restore_signals=False,
    )
    assert done.returncode == 7, describe(done.returncode)
    assert done.stdout == "the program's output\n"


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("way", [PRELOAD, LINKED])
def test_report_beyond_a_limit(programs: Programs, tmp_path: Path, way: str, how: str) -> None:
    """Of stderr in a file that may not grow, or not by so much."""
    for most in (0, 100, 1000):
        path = tmp_path / f"{most}"
        with path.open("ab") as file:
            ends_as_its_own(programs, way, (how, "SIGXFSZ"), "report=exit", file, most)
        assert path.stat().st_size == most


@pytest.mark.parametrize("how", HOWS)
def test_report_to_nobody(programs: Programs, how: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ends_as_its_own(programs, PRELOAD, (how, "SIGPIPE"), "report=exit", writer, None)
    finally:
        os.close(writer)


@pytest.mark.feature("profile")
@pytest.mark.parametrize("how", HOWS)
def test_profile_beyond_a_limit(programs: Programs, tmp_path: Path, how: str) -> None:
    """Neither a cut file nor what it was written as is left."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    for most in (0, 1, 400):
        with (tmp_path / f"{most}").open("wb+") as errors:
            options = f"profile=1,profile_file={folder}/own"
            ends_as_its_own(programs, PRELOAD, (how, "SIGXFSZ"), options, errors, most)
            errors.seek(0)
            said = errors.read().decode()
        assert list(folder.iterdir()) == []
        assert len(said) == most
    done = programs.run(
        PRELOAD, "reported", "limited", "default", "SIGXFSZ", options=options, status=7,
        prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )  # fmt: skip
    (line,) = (each for each in done.stderr.splitlines() if "not written" in each)
    assert line.startswith(f"calmalloc: profile not written to {folder}/own.")
    assert list(folder.iterdir()) == []


@pytest.mark.feature("profile")
def test_profile_on_a_full_disk(programs: Programs, tmp_path: Path) -> None:
    """Likewise."""
    folder = tmp_path / "small"
    folder.mkdir()
    script = (
        f"mount -t tmpfs -o size=4k none {folder} && head -c 4096 /dev/zero >{folder}/other && "
        f'"$@" 2>{tmp_path}/errors; status=$?; ls -A {folder} >{tmp_path}/left; exit $status'
    )
    if subprocess.run([*UNSHARE, "--mount", "mount", "-t", "tmpfs", "none", folder]).returncode:
        pytest.skip("no file system may be mounted here")
    options = f"profile=1,profile_file={folder}/own"
    command = [programs.path("reported", PRELOAD), "limited", "default", "SIGXFSZ"]
    done = subprocess.run(
        [*UNSHARE, "--mount", "sh", "-c", script, "sh", "env", f"LD_PRELOAD={shared_library()}",
         f"CALM_OPTIONS={options}", *command],
        env=clean_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 7
    assert done.stdout == "the program's output\n"
    assert "profile not written" in (tmp_path / "errors").read_text()
    assert (tmp_path / "left").read_text() == "other\n"
