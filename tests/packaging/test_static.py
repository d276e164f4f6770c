"""The archive libcalmalloc.a in a program, and in shared objects: names, linkers, LTO, dlclose."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from packaging_helpers import BUILD, REPOSITORY, SOURCES, run, tool

ARCHIVE = BUILD / "libcalmalloc.a"
INCLUDE = f"-I{REPOSITORY}/include"
# What the target calmalloc::static and calmalloc.pc link with.
FLAGS = ("-Wl,-u,malloc", "-Wl,-z,nodelete", "-pthread")
# Functions of the allocator, whose names a program may use, too.
NAMES = [
    "allocator_start",
    "arena_init",
    "clock_read",
    "counters_fill",
    "depot_take",
    "file_read",
    "file_write",
    "futex_wait",
    "heap_init",
    "lock_wake",
    "new_terms",
    "options_read",
    "random_process_seed",
    "report_write",
    "runs_take",
    "space_init",
    "text_format",
    "thread_start",
    "usable_size",
    "vm_map",
]
WORK = r"""
#include <calmalloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void *work(void *argument) {
    static void *kept[4][512];
    void **mine = kept[(size_t)argument];
    for (unsigned i = 0; i < 20000; i++) {
        size_t bytes = i % 97 == 0 ? 100000 + i : i % 1000;
        free(mine[i % 512]);
        mine[i % 512] = malloc(bytes);
        if (mine[i % 512] == NULL) {
            abort();
        }
        memset(mine[i % 512], (int)i, bytes);
    }
    return NULL;
}

int main(void) {
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) {
        pthread_create(&threads[i], NULL, work, (void *)i);
    }
    for (size_t i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    pid_t child = fork();
    if (child == 0) {
        work(NULL);
        _exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    calm_trim(0);
    struct calm_stats stats;
    printf("%d %d\n", status, calm_stats(&stats, sizeof stats) == 0 && stats.dirtied > 0);
    return 0;
}
"""
FOREIGN = "#include <stdlib.h>\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in NAMES)


def symbols(archive: Path) -> set[str]:
    """The global symbols that an archive defines."""
    printed = run("nm", "--extern-only", "--defined-only", "--format=posix", archive).stdout
    return {line.split()[0] for line in printed.splitlines() if not line.endswith(":")}


def test_global_names_of_the_archive_are_calm_or_the_interfaces() -> None:
    """What the shared library exports, and what starts with calm; scripts/namespace renames the rest."""
    library = BUILD / "libcalmalloc.so"
    printed = run("nm", "--dynamic", "--defined-only", "--format=posix", library).stdout
    exported = {line.split()[0].split("@")[0] for line in printed.splitlines()}
    assert "malloc" in exported
    foreign = {name for name in symbols(ARCHIVE) - exported if not name.startswith("calm")}
    assert foreign <= {"_.stapsdt.base"}


def test_the_header_renames_what_is_there() -> None:
    text = (REPOSITORY / "src/namespace.h").read_text()
    renamed = dict(re.findall(r"^#pragma redefine_extname (\w+) (\w+)$", text, re.MULTILINE))
    assert set(NAMES) <= set(renamed)
    assert set(renamed.values()) <= symbols(ARCHIVE), "run scripts/namespace"


LINKS = {
    "gcc": ("gcc",),
    "clang": ("clang",),
    "lld": ("clang", "-fuse-ld=lld"),
    "gold": ("gcc", "-fuse-ld=gold"),
    "gcc's LTO": ("gcc", "-flto"),
    "static": ("gcc", "-static"),
    "static PIE": ("gcc", "-static-pie"),
    "static with LTO": ("gcc", "-static", "-flto"),
    "gold with LTO": ("gcc", "-fuse-ld=gold", "-flto"),
    "clang's LTO": ("clang", "-flto"),
}


@pytest.mark.parametrize("link", LINKS)
def test_a_program_with_functions_of_the_same_names(link: str, tmp_path: Path) -> None:
    compiler, *options = LINKS[link]
    linkers = [f"ld.{option.partition('=')[2]}" for option in options if "-fuse-ld=" in option]
    if not all(map(shutil.which, linkers)):
        pytest.skip(f"{linkers[0]} is not installed")
    for name, text in {"work.c": WORK, "foreign.c": FOREIGN}.items():
        (tmp_path / name).write_text(text)
    program = tmp_path / "program"
    sources = (tmp_path / "work.c", tmp_path / "foreign.c")
    linked = run(tool(compiler, compiler), "-O1", *options, INCLUDE, *sources, ARCHIVE, *FLAGS, "-o", program)
    assert "warning" not in linked.stderr
    defined = run("nm", "--defined-only", "--format=posix", program).stdout.split("\n")
    there = {line.split()[0] for line in defined if line}
    assert "malloc" in there
    done = run(program, CALM_OPTIONS="report=exit")
    assert done.stdout == "0 1\n"
    assert done.stderr.count('"allocator": "calmalloc"') == 1


@pytest.mark.parametrize("link", [("gcc",), ("gcc", "-static"), ("clang",)])
def test_lto_of_a_program_that_names_nothing_but_malloc(link: tuple[str, ...], tmp_path: Path) -> None:
    """gcc's LTO does not tell the linker of malloc, which it knows by itself; the flags do."""
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text(
        "#include <stdlib.h>\n#include <string.h>\n"
        "int main(int argc, char **argv) {\n"
        "    char *volatile copy = malloc(strlen(argv[argc - 1]) + 1);\n"
        "    free(strcpy(copy, argv[0]));\n"
        "    return 0;\n"
        "}\n"
    )
    run(*link, "-O2", "-flto", source, ARCHIVE, *FLAGS, "-o", program)
    assert '"allocator": "calmalloc"' in run(program, CALM_OPTIONS="report=exit").stderr


@pytest.mark.parametrize("exported", [True, False])
def test_two_shared_objects_that_have_the_archive(exported: bool, tmp_path: Path) -> None:
    """If they export its functions, those of the first serve both; else each has an allocator of its own."""
    (tmp_path / "part.c").write_text(
        "#include <calmalloc.h>\n"
        '__attribute__((visibility("default"))) uint64_t PART(void) {\n'
        "    void *block = calm_malloc(3 << 20);\n"
        "    struct calm_stats stats;\n"
        "    calm_stats(&stats, sizeof stats);\n"
        "    calm_free(block);\n"
        "    return stats.in_use >> 20;\n"
        "}\n"
    )
    (tmp_path / "main.c").write_text(
        "#include <stdint.h>\n#include <stdio.h>\n#include <stdlib.h>\n"
        "uint64_t one(void);\nuint64_t two(void);\n"
        "int main(void) {\n"
        "    void *volatile block = malloc(100);\n"
        "    free(block);\n"
        '    printf("%d %d\\n", one() >= 3, two() >= 3);\n'
        "    return 0;\n"
        "}\n"
    )
    options = [] if exported else ["-Wl,--exclude-libs,libcalmalloc.a"]
    for part in ("one", "two"):
        source = (f"-DPART={part}", tmp_path / "part.c")
        made = tmp_path / f"lib{part}.so"
        run("gcc", "-shared", "-fPIC", INCLUDE, *source, ARCHIVE, *options, *FLAGS, "-o", made)
    program = tmp_path / "program"
    libraries = (f"-L{tmp_path}", "-lone", "-ltwo", f"-Wl,-rpath,{tmp_path}")
    run("gcc", tmp_path / "main.c", *libraries, "-o", program)
    assert run(program).stdout == "1 1\n"


PLUGIN = r"""
#include <calmalloc.h>
#include <string.h>

void work(unsigned rounds) {
    void *kept[64] = {0};
    for (unsigned i = 0; i < rounds; i++) {
        size_t bytes = i % 31 == 0 ? 4000000 : 16 + i % 2000;
        calm_free(kept[i % 64]);
        kept[i % 64] = calm_malloc(bytes);
        memset(kept[i % 64], 1, bytes);
    }
    for (unsigned i = 0; i < 64; i++) {
        calm_free(kept[i]);
    }
}
"""


@pytest.mark.parametrize("options", ["background=on", "background=off"])
@pytest.mark.parametrize("link", [(), ("-Wl,--exclude-libs,ALL",), ("-Wl,-z,nodelete",), ("-fuse-ld=gold",)])
def test_a_plugin_that_is_closed_stays(link: tuple[str, ...], options: str, tmp_path: Path) -> None:
    """The helper thread and restartable sequences of its allocator are in it."""
    (tmp_path / "plugin.c").write_text(PLUGIN)
    plugin = tmp_path / "plugin.so"
    run("gcc", "-shared", "-fPIC", INCLUDE, tmp_path / "plugin.c", ARCHIVE, *link, "-o", plugin)
    run("gcc", SOURCES / "plugin_host.c", "-pthread", "-o", tmp_path / "host")
    for name in ("./plugin.so", str(plugin)):
        assert run(tmp_path / "host", name, cwd=tmp_path, CALM_OPTIONS=options).stdout == "mapped: 1\n"
