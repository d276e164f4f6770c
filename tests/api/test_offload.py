"""libcalmoffload from outside: a server stopped by a debugger, forks, and its thread.

Properties of every mode are tested in every mode, including this one, in the other files.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from api_helpers import (
    MIB,
    OFFLOAD,
    PRELOAD,
    Programs,
    compile_program,
    complaints,
    offload_library,
    run_command,
    tool,
)

CPUS = sorted(os.sched_getaffinity(0))
ENDS = sorted({CPUS[0], CPUS[-1]})
NOBODY = 65534
# Whatever else the machine does: with a CPU of its number the server serves always.
SERVED = f"{OFFLOAD},server_cpu={CPUS[-1]}"

needs_two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="a server needs a CPU beside its clients'")


@needs_two_cpus
def test_stopped_for_seconds(programs: Programs) -> None:
    """Twice, while threads and children allocate, and a million frees return."""
    ran = programs.run(PRELOAD, "offload", "stopped", "1.3,1000000", options=SERVED)
    assert complaints(ran.stderr) == []
    assert ran["resident_left"] < 24 * MIB


@needs_two_cpus
@pytest.mark.parametrize("more", ["", ",test_cache=off,test_sync=on"])
def test_stopped_at_any_moment(programs: Programs, more: str) -> None:
    ran = programs.run(PRELOAD, "offload", "stops", options=f"{SERVED}{more}")
    assert complaints(ran.stderr) == []


@needs_two_cpus
def test_forks_while_it_starts(programs: Programs) -> None:
    """The parent's server starts after the call of fork, and before the process is copied."""
    env = programs.environment(PRELOAD, OFFLOAD)
    strace: list[str | Path] = [tool("strace", "strace"), "-f", "-qq", "-o", "/dev/null", "-e", "trace=clone"]
    strace += ["-e", "inject=clone:delay_enter=200000:when=1"]
    strace += ["-E", f"LD_PRELOAD={env.pop('LD_PRELOAD')}", programs.path("offload", PRELOAD)]
    for _ in range(3):
        run_command([*strace, "fork-while-starting"], env)


@needs_two_cpus
def test_it_keeps_no_file_open(programs: Programs) -> None:
    """Nor uses a number in the program's descriptor table, which the program might close."""
    options = f"{OFFLOAD},background=off"
    assert programs.run(PRELOAD, "offload", "placed", str(CPUS[0]), options=options)["server_files"] == 0


@needs_two_cpus
def test_one_thread_for_each_process(programs: Programs) -> None:
    """Without the helper, which is one more."""
    ran = programs.run(PRELOAD, "offload", "one-each", options=f"{OFFLOAD},background=off")
    assert (ran["parents"], ran["childs"]) == (1, 1)


@needs_two_cpus
@pytest.mark.parametrize("options", [OFFLOAD, f"{OFFLOAD},test_policy=paper"])
def test_idle_it_sleeps(programs: Programs, options: str) -> None:
    programs.run(PRELOAD, "offload", "idle", options=options)


@needs_two_cpus
def test_settings_change(programs: Programs, tmp_path: Path) -> None:
    programs.run(PRELOAD, "offload", "settings", options=f"{OFFLOAD},profile_file={tmp_path / 'own'}")


COMBINED = [
    "profile=64k",
    "test_policy=paper,test_cache=locked,profile=64k",
    "test_cache=off,memory_per_cpu=1",
]


@needs_two_cpus
@pytest.mark.parametrize("options", COMBINED)
def test_with_other_options(programs: Programs, tmp_path: Path, options: str) -> None:
    options = f"{OFFLOAD},{options},profile_file={tmp_path / 'own'}"
    assert programs.run(PRELOAD, "stress", "rounds=9", options=options)["operations"] > 1000


def where_it_is(programs: Programs, wanted: int | str, client: int) -> tuple[int, list[str]]:
    """The server's CPU, and the message about it, if the program is busy on the client's CPU."""
    options = f"{OFFLOAD},background=off,server_cpu={wanted}"
    ran = programs.run(PRELOAD, "offload", "placed", str(client), options=options)
    return ran["server_cpu"], complaints(ran.stderr)


def lies(cpu: int, name: str, unknown: str) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/{name}")
    return path.read_text().strip() if path.exists() else unknown


def fitting(kind: str, client: int) -> list[int]:
    """The CPUs in that relation to the client's."""
    cores = {cpu: lies(cpu, "thread_siblings_list", str(cpu)) for cpu in CPUS}
    sockets = {cpu: lies(cpu, "physical_package_id", "0") for cpu in CPUS}
    found = []
    for cpu in CPUS:
        lies_so = {
            "auto": True,
            "sibling": cores[cpu] == cores[client],
            "core": cores[cpu] != cores[client] and sockets[cpu] == sockets[client],
            "socket": sockets[cpu] != sockets[client],
        }
        if cpu != client and lies_so[kind]:
            found.append(cpu)
    return found


@needs_two_cpus
@pytest.mark.parametrize("client", ENDS)
@pytest.mark.parametrize("kind", ["auto", "sibling", "core", "socket"])
def test_as_it_is_to_lie_to_the_client(programs: Programs, kind: str, client: int) -> None:
    """Or, if there is no such CPU, on another than the client's, with a message."""
    found = fitting(kind, client)
    cpu, said = where_it_is(programs, kind, client)
    if found:
        assert cpu in found
        assert said == []
    else:
        assert cpu in fitting("auto", client)
        assert len(said) == 1
        assert said[0].startswith(f"calmalloc: server_cpu={kind}, but there is no ")


@needs_two_cpus
@pytest.mark.parametrize("client", ENDS)
@pytest.mark.parametrize("number", ENDS)
def test_on_the_cpu_of_that_number(programs: Programs, number: int, client: int) -> None:
    """Even on the client's own, which no other setting selects."""
    assert where_it_is(programs, number, client) == (number, [])


@needs_two_cpus
def test_on_no_cpu_that_is_not_allowed(programs: Programs) -> None:
    number = min(set(range(len(CPUS) + 1)) - set(CPUS))
    cpu, (said,) = where_it_is(programs, number, CPUS[0])
    assert cpu in fitting("auto", CPUS[0])
    assert "a CPU that the process may not run on" in said


@pytest.mark.parametrize("mode", [OFFLOAD, f"{OFFLOAD},test_cache=off,test_sync=on"])
def test_declines_with_one_cpu(programs: Programs, mode: str) -> None:
    """With one message; the program runs as with libcalmalloc."""
    one = [tool("taskset", "util-linux"), "-c", str(CPUS[0])]
    ran = programs.run(PRELOAD, "offload", "none", options=mode, wrapper=one)
    (line,) = complaints(ran.stderr)
    assert "offload" in line
    assert "running without it" in line
    assert (ran["servers"], ran["records"]) == (0, 0)
    ran = programs.run(PRELOAD, "stress", "rounds=4", options=f"{mode},background=off", wrapper=one)
    assert ran["operations"] > 1000


@needs_two_cpus
@pytest.mark.parametrize("ending", ["abort", "warn"])
@pytest.mark.parametrize("block", ["48", "2000", "100000"])
def test_misuse_while_stopped(programs: Programs, block: str, ending: str) -> None:
    """One free too many among more frees than the rings hold."""
    status = -signal.SIGABRT if ending == "abort" else 0
    options = f"{SERVED},misuse={ending}"
    ran = programs.run(PRELOAD, "offload", "misuse-while-stopped", block, options=options, status=status)
    (line,) = complaints(ran.stderr)
    found = re.match(r"calmalloc: (?:double|invalid) free: (0x[0-9a-f]+)\b", line)
    assert found is not None, line
    assert f"pointer {found[1]}" in ran.stdout
    assert ("lived" in ran.figures) == (ending == "warn")


LATEST = """
#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int servers(void) {
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *entry; tasks != NULL && (entry = readdir(tasks)) != NULL;) {
        char path[300] = "/proc/self/task/", name[32] = "";
        strcat(strcat(path, entry->d_name), "/comm");
        int descriptor = open(path, O_RDONLY);
        count += descriptor >= 0 && read(descriptor, name, sizeof name - 1) > 0 &&
                 strcmp(name, "calmalloc\\n") == 0;
        close(descriptor);
    }
    closedir(tasks);
    return count;
}

/* Of a library that came before the allocator, and so ends after it. */
__attribute__((destructor)) static void end(void) {
    for (int i = 0; i < 6000 && servers() > 0; i++) {
        usleep(10000);
    }
    for (size_t bytes = 1; bytes < 10000000; bytes *= 3) {
        char *block = calloc(1, bytes);
        block = realloc(block, bytes * 2);
        memset(block, 1, bytes * 2);
        free(block);
    }
    static const char gone[] = "gone 1\\n", there[] = "gone 0\\n";
    write(STDOUT_FILENO, servers() == 0 ? gone : there, sizeof gone - 1);
}
"""


@needs_two_cpus
def test_gone_after_the_last_handlers(programs: Programs, tmp_path: Path) -> None:
    """Later code is served without the server."""
    (tmp_path / "latest.c").write_text(LATEST)
    latest = tmp_path / "latest.so"
    compile_program(
        [tool("cc", "gcc"), "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", tmp_path / "latest.c", "-o", latest]
    )
    env = programs.environment(PRELOAD, f"{OFFLOAD},background=off")
    env["LD_PRELOAD"] = f"{offload_library()}:{latest}"
    ran = run_command([programs.path("offload", PRELOAD), "one-each"], env)
    assert ran["parents"] == 1
    assert ran["gone"] == 1
