"""What the tests of calm share: small C programs that do known things, and types of the fixtures."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from waiting import TIMEOUT_S

from calm.cli import cli
from calm.core import measure

ROOT = Path(__file__).resolve().parents[2]

Calm = Callable[..., subprocess.CompletedProcess[str]]
Compile = Callable[[str], Path]


def leaves(group: click.Group = cli, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """The commands by name, and those with modes by command and mode, as `bench run`."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from leaves(command, f"{before}{name} ")
        elif command is not None:
            yield before + name, command


PROGRAMS = {
    # Each argument is the number of one call; whatever else the program does is the C library's start.
    "calls": r"""
        #include <stdlib.h>
        #include <sys/mman.h>
        #include <sys/syscall.h>
        #include <unistd.h>
        int main(int argc, char **argv) {
            long page = sysconf(_SC_PAGESIZE);
            char *memory = mmap(NULL, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (argc != 5) return 2;
            for (int i = atoi(argv[1]); i > 0; i--) syscall(SYS_madvise, memory, page, MADV_NORMAL);
            for (int i = atoi(argv[2]); i > 0; i--) syscall(SYS_munmap, memory, page);
            for (int i = atoi(argv[3]); i > 0; i--) syscall(SYS_mprotect, memory, page, PROT_READ);
            for (int i = atoi(argv[4]); i > 0; i--) syscall(SYS_brk, NULL);
            return 0;
        }
    """,
    # Gives one page back again and again, the threads each on a CPU of their own.
    "shootdowns": r"""
        #define _GNU_SOURCE
        #include <pthread.h>
        #include <sched.h>
        #include <stdlib.h>
        #include <sys/mman.h>
        static volatile int spinning, stop;
        static void pin(int cpu) {
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(cpu, &set);
            if (sched_setaffinity(0, sizeof set, &set) != 0) exit(2);
        }
        static void *spin(void *unused) {
            pin(1);
            for (spinning = 1; !stop;) {}
            return unused;
        }
        int main(int argc, char **argv) {
            pthread_t thread;
            int rounds = atoi(argv[1]), two = argc > 2;
            char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            pin(0);
            if (two) {
                pthread_create(&thread, NULL, spin, NULL);
                while (!spinning) sched_yield();
            }
            for (int i = 0; i < rounds; i++) {
                *(volatile char *)page = 1;
                madvise(page, 4096, MADV_DONTNEED);
            }
            stop = 1;
            if (two) pthread_join(thread, NULL);
            return 0;
        }
    """,
    # Touches MiB of memory and holds it: in so many children at once, or itself where there are none.
    "hold": r"""
        #include <stdlib.h>
        #include <string.h>
        #include <sys/mman.h>
        #include <sys/wait.h>
        #include <unistd.h>
        static void hold(size_t size, int milliseconds) {
            char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED) exit(2);
            memset(memory, 1, size);
            usleep(milliseconds * 1000);
        }
        int main(int argc, char **argv) {
            size_t size = (size_t)atoi(argv[1]) << 20;
            int milliseconds = atoi(argv[2]), children = argc > 3 ? atoi(argv[3]) : 0;
            for (int i = 0; i < children; i++) {
                if (fork() == 0) {
                    hold(size, milliseconds);
                    _exit(0);
                }
            }
            if (children == 0) hold(size, milliseconds);
            while (wait(NULL) > 0) {}
            return 0;
        }
    """,
    # Starts programs that share its memory until they exec, while it holds a lot.
    "vforks": r"""
        #include <stdlib.h>
        #include <string.h>
        #include <sys/mman.h>
        int main(void) {
            size_t size = 100 << 20;
            char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            memset(memory, 1, size);
            for (int i = 0; i < 100; i++) if (system("true") != 0) return 2;
            return 0;
        }
    """,
    # A child shares its memory and touches one page after another.
    "vgrows": r"""
        #define _GNU_SOURCE
        #include <string.h>
        #include <sys/mman.h>
        #include <sys/wait.h>
        #include <time.h>
        #include <unistd.h>
        static long long now(void) {
            struct timespec at;
            clock_gettime(CLOCK_MONOTONIC, &at);
            return at.tv_sec * 1000000000LL + at.tv_nsec;
        }
        int main(void) {
            size_t size = 100 << 20;
            volatile char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
            memset((char *)memory, 1, size / 2);
            if (vfork() == 0) {
                for (size_t at = size / 2; at < size; at += 4096) {
                    for (long long start = now(); now() < start + 10000;) {}
                    memory[at] = 1;
                }
                _exit(0);
            }
            return wait(NULL) < 0;
        }
    """,
}


def probe(*arguments: str | Path, prefix: Sequence[str] = ()) -> dict[str, Any]:
    """The probe's own report."""
    command = [*prefix, measure.find_probe(), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(result.stderr.splitlines()[-1])
    return report


def wait_for(path: Path, text: str) -> None:
    """Until a file has it: written by somebody who is not waited for."""
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def without_runs(text: str, *, medians_only: bool = False) -> str:
    """A file of `calm bench run --json` with what the tables took from the runs in their place.

    medians_only: without what can be calculated from the medians, or from the list of allocators.
    """
    data = json.loads(text)
    for row in data["rows"]:
        for side in row["sides"]:
            del side["runs"]
        if medians_only:
            del row["to_best"]
            if not any(side["failure"] for side in row["sides"]):
                del row["sides"]
    return json.dumps(data)


def load_script(name: str) -> ModuleType:
    """One of scripts/, whose name is no module's, as a module."""
    loader = importlib.machinery.SourceFileLoader(f"{name}_script", str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # where dataclasses look it up
    loader.exec_module(module)
    return module
