"""What a traced program is told of the model's machine, and which part of it counts."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from calm.core import allocators
from calm.core.allocators import Allocator
from calm.core.environment import clean_environment
from calm.core.errors import CalmError
from research.papers import nextgen_trace
from research.papers.nextgen_trace import Told

PLAIN = Allocator("glibc")
ROUNDS = 1000
PROGRAM = (
    f"enum {{ ROUNDS = {ROUNDS} }};"
    r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/sysinfo.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() __asm__ volatile("yield")
#endif
extern const long __rseq_offset;
extern const unsigned __rseq_size;
static _Atomic(int) turn __attribute__((aligned(128)));
static pthread_barrier_t barrier;
static void mark(long kind) { syscall(0x63616c6d, kind, 0L, 0L); }
static void *show(void *unused) {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof set, &set);
    unsigned cpu, node;
    syscall(SYS_getcpu, &cpu, &node, NULL);
    const int *area = (void *)((char *)__builtin_thread_pointer() + __rseq_offset);
    int sequences = __rseq_size >= 32 && getauxval(27) >= 28;
    dprintf(1, "%d %d %ld %u %u %d %d %d %d\n", CPU_COUNT(&set), get_nprocs(), sysconf(_SC_NPROCESSORS_CONF),
            cpu, node, sched_getcpu() == (int)cpu, sequences, area[0] == (int)cpu && area[6] == (int)cpu,
            area[5] == (int)node);
    if (unused) pthread_barrier_wait(&barrier);
    return NULL;
}
static void *answer(void *unused) {
    (void)unused;
    for (int i = 0; i < ROUNDS; i++) {
        while (atomic_load(&turn) != 2 * i + 1) PAUSE();
        atomic_store(&turn, 2 * i + 2);
    }
    return NULL;
}
static void ask(void) {
    pthread_t thread;
    atomic_store(&turn, 0);
    if (pthread_create(&thread, NULL, answer, NULL)) exit(2);
    for (int i = 0; i < ROUNDS; i++) {
        atomic_store(&turn, 2 * i + 1);
        while (atomic_load(&turn) != 2 * i + 2) PAUSE();
    }
    pthread_join(thread, NULL);
}
int main(int argc, char **argv) {
    int threads = atoi(argv[1]);
    if (!strcmp(argv[2], "show")) {
        pthread_t *all = malloc(sizeof *all * threads);
        pthread_barrier_init(&barrier, NULL, threads);
        show(NULL);
        for (int i = 1; i < threads; i++)
            if (pthread_create(&all[i], NULL, show, "")) exit(2);
        pthread_barrier_wait(&barrier);
        for (int i = 1; i < threads; i++) pthread_join(all[i], NULL);
    }
    if (!strcmp(argv[2], "ask")) {
        ask();
        mark(4);
        ask();
        mark(5);
        ask();
    }
    if (!strcmp(argv[2], "restart"))
        for (int i = 0; i < 3; i++)
            if (syscall(SYS_membarrier, 256, 0) || syscall(SYS_membarrier, 128, 0)) return 4;
    return 0;
}
"""
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := nextgen_trace.obstacle():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("told")
    (folder / "program.c").write_text(PROGRAM)
    path = folder / "program"
    subprocess.run(["cc", "-O1", "-pthread", "-o", str(path), str(folder / "program.c")], check=True)
    return path


def printed(program: Path, folder: Path, told: Told, *arguments: str) -> list[list[int]]:
    """The numbers that it prints."""
    told.write_files(folder / "root")
    command = [
        *nextgen_trace._traced(folder / "out", cpus=told.cpus, nodes=told.nodes),
        *("-L", str(folder / "root"), "-E", f"LD_PRELOAD={nextgen_trace._find(nextgen_trace.SEQUENCES)}"),
        *(str(program), *arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


def test_each_thread_is_told_of_a_cpu_of_its_own(program: Path, tmp_path: Path) -> None:
    lines = printed(program, tmp_path, Told(64, 4), "64", "show")
    assert sorted(line[3] for line in lines) == list(range(64))
    for cpus, online, configured, cpu, node, *rest in lines:
        assert (cpus, online, configured) == (64, 64, 64)
        assert node == cpu % 4
        # sched_getcpu, the size of the area, and its numbers.
        assert rest == [1, 1, 1, 1]


def test_a_smaller_machine_has_one_node(program: Path, tmp_path: Path) -> None:
    lines = printed(program, tmp_path, Told(3), "3", "show")
    assert sorted(line[:5] for line in lines) == [[3, 3, 3, cpu, 0] for cpu in range(3)]


def test_sequences_may_be_restarted(program: Path, tmp_path: Path) -> None:
    assert printed(program, tmp_path, Told(2), "1", "restart") == []


def moved(found: dict[str, Any]) -> int:
    threads = found["threads"].values()
    return sum(each["transfers"]["loads"] + each["invalidations"] for each in threads)


@pytest.mark.parametrize("nodes", [0, 2])
def test_only_what_is_between_the_marks_counts(program: Path, nodes: int) -> None:
    command = [str(program), "0", "ask"]
    found = nextgen_trace.trace_marked(command, program.parent, PLAIN, 120, Told(8, nodes))
    # In a round, each thread reads what the other has written, and then writes to that line.
    assert 4 * ROUNDS * 0.95 < moved(found) < 4 * ROUNDS * 1.2
    remote = sum(sum(each["remote_lines"].values()) for each in found["threads"].values())
    assert (remote > 4 * ROUNDS * 0.95) == (nodes != 0)


def test_a_program_without_marks_is_no_measurement(program: Path) -> None:
    with pytest.raises(CalmError, match="has no marks"):
        nextgen_trace.trace_marked([str(program), "0", "none"], program.parent, PLAIN, 60, Told(2))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="calmalloc has sequences for x86-64")
def test_calmalloc_uses_the_sequences(program: Path) -> None:
    """With locks, a pair takes more than 200 instructions."""
    exchange = nextgen_trace._find("exchange")
    command = [str(exchange), "--threads", "2", "--blocks", "32", "--warm-up", "20", "--rounds", "100"]
    found = nextgen_trace.trace_marked(command, program.parent, allocators.parse("calmalloc"), 120, Told(64))
    threads = [each for each in found["threads"].values() if each["name"] != nextgen_trace.OWN_THREAD]
    assert len(threads) == 2
    assert sum(each["instructions"] for each in threads) / (2 * 32 * 100) < 130


def test_the_files_of_a_told_machine(tmp_path: Path) -> None:
    Told(64, 4).write_files(tmp_path / "nodes")
    Told(1).write_files(tmp_path / "one")
    files = {
        str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert files["nodes/sys/devices/system/cpu/possible"] == "0-63\n"
    assert files["nodes/sys/devices/system/node/online"] == "0-3\n"
    assert files["one/sys/devices/system/cpu/online"] == files["one/sys/devices/system/node/present"] == "0\n"
    folders = [path.name for path in (tmp_path / "nodes/sys/devices/system/node").iterdir() if path.is_dir()]
    assert sorted(folders) == ["node0", "node1", "node2", "node3"]


def test_the_marks_have_the_same_numbers_everywhere() -> None:
    root = Path(__file__).resolve().parents[3]
    header = (root / "research/papers/trace/record.h").read_text()
    workload = (root / "workloads/exchange.c").read_text()
    call = re.search(r"MARK_CALL = (0x[0-9a-f]+)", header)
    kinds = re.findall(r"^ +(MARK_\w+),", header, re.MULTILINE)
    assert call
    numbers = {"MARK_CALL": call[1]} | {kind: str(kinds.index(kind)) for kind in ("MARK_BEGIN", "MARK_END")}
    assert ", ".join(f"{name} = {number}" for name, number in numbers.items()) in workload
