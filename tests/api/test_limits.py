"""Under a memory limit of the kernel, free memory is returned before a process is killed."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from api_helpers import GLIBC, MIB, OFFLOAD, PRELOAD, Programs

HOUR_MS = 3600000
MOUNT = Path("/sys/fs/cgroup")
# A shell that goes into the group and then becomes the program.
ENTER = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
numbers = itertools.count()


def own_group(controller: str) -> str | None:
    """The process's group: in version 1 by its controller's name, in version 2 without one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            return group.strip("/")
    return None


def places() -> Iterator[tuple[Path, str]]:
    """Folders for groups, and the name of their limit: version 1, then version 2."""
    group = own_group("memory")
    if group is not None:
        yield MOUNT / "memory" / group, "memory.limit_in_bytes"
        yield MOUNT / "memory", "memory.limit_in_bytes"
    group = own_group("")
    if group is not None:
        yield MOUNT / group, "memory.max"
        yield MOUNT, "memory.max"


@pytest.fixture
def limited() -> Iterator[Callable[[int], Path]]:
    """Creates groups with this limit in bytes."""
    made: list[Path] = []

    def make(limit: int) -> Path:
        reason = "no control group of memory can be made here"
        for place, name in places():
            group = place / f"calm-test-{os.getpid()}-{next(numbers)}"
            try:
                group.mkdir()
            except OSError as error:
                reason = f"{reason}: {error}"
                continue
            made.append(group)
            if (group / name).exists():
                (group / name).write_text(str(limit))
                return group
        pytest.skip(reason)

    yield make
    for group in made:
        group.rmdir()


def run_in(group: Path, programs: Programs, way: str, options: str = "", waves: int = 4) -> int:
    """Runs a command in a group, and returns its status."""
    command = ["sh", "-c", ENTER, str(group), programs.path("limits", way), "waves", str(waves)]
    environment = programs.environment(way, options)
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


def test_glibc_is_killed(programs: Programs, limited: Callable[[int], Path]) -> None:
    """So the limit is effective."""
    assert run_in(limited(160 * MIB), programs, GLIBC) == -signal.SIGKILL


@pytest.mark.parametrize("options", ["", "background=off", "test_cache=off"])
def test_lives(programs: Programs, limited: Callable[[int], Path], options: str) -> None:
    assert run_in(limited(160 * MIB), programs, PRELOAD, options) == 0


def test_lives_with_a_server(programs: Programs, limited: Callable[[int], Path]) -> None:
    assert run_in(limited(180 * MIB), programs, PRELOAD, OFFLOAD) == 0


def test_lives_with_little(programs: Programs, limited: Callable[[int], Path]) -> None:
    """100 MiB are in use at a time, with little free memory of other sizes."""
    assert run_in(limited(140 * MIB), programs, PRELOAD, waves=20) == 0


# Runs in a guest. Its status is 0 if the program ends as expected: killed, or alive.
IN_VERSION_2 = """
[ -e /sys/fs/cgroup/limited ] || mount -t cgroup2 none /sys/fs/cgroup
cd /sys/fs/cgroup || exit 1
echo +memory >cgroup.subtree_control && mkdir -p limited && echo "$2" >limited/memory.max || exit 1
sh -c 'echo $$ >limited/cgroup.procs && exec "$0" waves 20' "$1"
[ $? -eq $3 ]
"""
KILLED = 128 + signal.SIGKILL


@pytest.mark.long
@pytest.mark.parametrize(
    ("allocator", "options", "status"),
    [("glibc", "", KILLED), ("calmalloc", "test_cgroup=off", KILLED), ("calmalloc", "test_cgroup=on", 0)],
)
def test_version_2(programs: Programs, tmp_path: Path, allocator: str, options: str, status: int) -> None:
    """On an emulated machine, since this one may have no memory controller of version 2."""
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("needs qemu-system-x86_64")
    script = tmp_path / "limited.sh"
    script.write_text(IN_VERSION_2)
    program = programs.path("limits", GLIBC)
    machine = ["--cpus", "2", "--memory", "2G", "-n", "1", "--env", f"CALM_OPTIONS={options}"]
    carried = ["--add", program, "--add", str(script)]
    command = ["/bin/sh", str(script), program, str(130 * MIB), str(status)]
    lab = [sys.executable, "-m", "calm", "lab", "-a", allocator, *machine, *carried, "--", *command]
    result = subprocess.run(lab, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
