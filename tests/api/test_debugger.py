"""The allocator seen from gdb: packaging/gdb/calmalloc.py on processes, and on a core file."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from api_helpers import (
    LINKED,
    MODES,
    OFFLOAD,
    PRELOAD,
    REPOSITORY,
    STATIC,
    Programs,
    clean_environment,
    shared_library,
    tool,
)
from waiting import TIMEOUT_S

SCRIPT = REPOSITORY / "packaging/gdb/calmalloc.py"
# No timed purges, and a wait for the server, however busy the machine is.
QUIET = "background=off,test_policy=paper"
MARK = "--- next ---"
POINTERS = [
    "used",
    "inside",
    "cached",
    "in_depot",
    "in_slab",
    "large",
    "large_inside",
    "dirty",
    "clean",
    "on_stack",
    "wild",
]
SLAB = r"; slab 0x\w+ of \d+ bytes, \d+ of \d+ blocks in use or cached; (dirty|clean) page"
ENDED = "exited normally"


class Session:
    """What gdb prints for each of its commands, and its errors."""

    def __init__(self, commands: Sequence[str], *arguments: str | Path) -> None:
        words = [tool("gdb", "gdb"), "-nx", "-batch", "-iex", "set debuginfod enabled off"]
        for command in commands:
            words += ["-ex", command, "-ex", f"echo {MARK}\\n"]
        done = subprocess.run(
            [*words, *map(str, arguments)],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        self.errors = done.stderr
        self.said = dict(zip(commands, done.stdout.split(f"{MARK}\n"), strict=False))

    def __getitem__(self, command: str) -> str:
        assert command in self.said, f"{self.said}\n{self.errors}"
        return self.said[command].strip()


def start(way: str = PRELOAD, options: str = QUIET) -> list[str]:
    """The commands that start the program, up to where it stops for the first time."""
    preload = [f"set environment LD_PRELOAD={shared_library()}"] if way == PRELOAD else []
    return [
        f"source {SCRIPT}",
        *preload,
        f"set environment CALM_OPTIONS={options}",
        "set startup-with-shell off",
        "break stops",
        "run",
    ]


def block(pointer: str) -> str:
    return f"calm block {pointer}"


@pytest.mark.parametrize("mode", MODES)
def test_each_kind_of_pointer(programs: Programs, mode: str) -> None:
    looks = [*map(block, POINTERS), "calm block 0", "calm block many", "calm heap"]
    session = Session(
        [*start(options=f"{QUIET},{mode}"), *looks, "continue"], programs.path("debugged", PRELOAD)
    )
    cached = r"free, in CPU cache \d+"
    if mode == OFFLOAD:
        cached = r"free, in ([a-zA-Z ]+ \d+|its slab)"  # the server flushes idle caches
    elif mode == "test_cache=off":
        cached = "free, in its slab"
    expected = {
        "used": f"in use: a block of 48 bytes{SLAB}",
        "inside": rf"in use: 16 bytes into the block 0x\w+ of 48 bytes{SLAB}",
        "cached": f"{cached}: a block of 48 bytes{SLAB}",
        "in_slab": rf"free, in its slab: a block of \d+ bytes{SLAB}",
        "large": r"in use: a large block of \d+ bytes; \d+ pages from 0x\w+.*",
        "large_inside": r"in use: 1234567 bytes into the large block 0x\w+ of \d+ bytes; \d+ pages from .*",
        "dirty": r"free: in a dirty run of \d+ pages from 0x\w+",
        "clean": r"free: in a clean run of \d+ pages from 0x\w+",
        "on_stack": "not in a heap of calmalloc",
        "wild": "not in a heap of calmalloc",
    }
    for pointer, text in expected.items():
        said = session[block(pointer)]
        assert re.fullmatch(rf"0x\w+: {text}", said), f"{pointer}: {said}"
    if "cache=off" not in mode and mode != OFFLOAD:
        said = session[block("in_depot")]
        assert re.fullmatch(rf"0x\w+: free, in depot \d+: a block of 64 bytes{SLAB}", said), said
    assert session["calm block 0"] == "0x0: NULL"
    assert session["calm block many"].endswith("not in a heap of calmalloc")  # an array, not its content
    assert "large blocks: 3;" in session["calm heap"] or mode == OFFLOAD
    assert "the heap's lock: " in session["calm heap"]
    assert ENDED in session["continue"]


@pytest.mark.parametrize("mode", MODES)
def test_within_the_heap(programs: Programs, mode: str) -> None:
    """The thread, or offload mode's server, is stopped where it changes the heap."""
    looks = [*map(block, POINTERS), "calm heap"]
    session = Session(
        [
            *start(options=f"{QUIET},{mode}"),
            "break heap_take_blocks",
            "continue",
            *looks,
            "delete",
            "continue 1",
        ],
        programs.path("debugged", PRELOAD),
    )
    assert "heap_take_blocks (" in session["continue"]
    assert ": in use: a block of 48 bytes" in session[block("used")]
    if mode != OFFLOAD:
        assert session[block("used")].endswith("; the heap's lock is held")
        assert re.search(
            r"^  the heap's lock: held by thread 1 \(LWP \d+\), the caller$",
            session["calm heap"],
            re.MULTILINE,
        )
    assert ENDED in session["continue 1"]


@pytest.mark.parametrize("way", [LINKED, STATIC])
def test_linked_programs(programs: Programs, way: str) -> None:
    session = Session([*start(way), block("used"), "continue"], programs.path("debugged", way))
    assert ": in use: a block of 48 bytes" in session[block("used")]
    assert ENDED in session["continue"]


def test_what_cannot_be_told(programs: Programs, tmp_path: Path) -> None:
    """A core file, no process, a process without the library, and expressions without a value."""
    core = tmp_path / "core"
    path = programs.path("debugged", PRELOAD)
    session = Session(
        ["calm heap", *start(), f"generate-core-file {core}", "calm block", "calm block nosuch", "kill"], path
    )
    assert "calm block EXPRESSION: a pointer or an address" in session.errors
    assert 'calm block: No symbol "nosuch" in current context.' in session.errors
    for command in ("calm heap", block("used")):
        errors = Session([f"source {SCRIPT}", command], path, core).errors
        assert "calm: a core file cannot run the library's functions: use the process itself" in errors
        assert "calm: there is no process" in Session([f"source {SCRIPT}", command], path).errors
        foreign = Session([f"source {SCRIPT}", "break main", "run", command], path).errors
        assert "calm: this process has no calm_debug_" in foreign
        assert "Traceback" not in errors + foreign


# Stops in each restartable sequence that the program comes to, up to ten, and has each go on.
IN_SEQUENCES = """
import re
def word(address): return int(gdb.parse_and_eval(f"*(unsigned long *) {address}"))
files = gdb.execute("info files", to_string=True)
first, end = re.search(r"(0x\\w+) - (0x\\w+) is __rseq_cs in .*libcalmalloc", files).groups()
descriptor = int(gdb.parse_and_eval("(unsigned long) $fs_base + *(long *) &__rseq_offset + 8"))
for place in range(int(first, 16), int(end, 16), 32):
    gdb.Breakpoint(f"*{word(place + 8)}")
for stop in range(10):
    gdb.execute("continue", to_string=True)
    before, at = word(descriptor), gdb.selected_frame().pc()
    said = gdb.execute("calm block used", to_string=True)
    within = before != 0 and at - word(before + 8) < word(before + 16)
    print("stop", within, word(descriptor) == before, gdb.selected_frame().pc() == at, "in use" in said)
    for each in gdb.breakpoints():
        each.enabled = each.location != f"*{at}"
"""


def test_within_restartable_sequences(programs: Programs, tmp_path: Path) -> None:
    script = tmp_path / "sequences.py"
    script.write_text(IN_SEQUENCES)
    session = Session(
        [*start(), "calm heap", f"source {script}", "delete", "continue"], programs.path("debugged", PRELOAD)
    )
    if "(restartable sequences)" not in session["calm heap"]:
        pytest.skip("no restartable sequences here")
    stops = [line for line in session[f"source {script}"].splitlines() if line.startswith("stop ")]
    assert stops == ["stop True True True True"] * 10
    assert ENDED in session["continue"]


def test_loaded_by_name(programs: Programs, tmp_path: Path) -> None:
    """As where packages install it: gdb finds the file by the library's path below its auto-load folder."""
    library = shared_library().resolve()
    file = Path(f"{tmp_path}{library}-gdb.py")
    file.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, file)
    allow = [f"set auto-load scripts-directory {tmp_path}", f"add-auto-load-safe-path {tmp_path}"]
    session = Session([*allow, *start()[1:], block("used")], programs.path("debugged", PRELOAD))
    assert ": in use: a block of 48 bytes" in session[block("used")]


def test_without_the_script(programs: Programs) -> None:
    call = 'printf "%s", ((char *(*)(void *)) calm_debug_block)(used)'
    session = Session([*start()[1:], call], programs.path("debugged", PRELOAD))
    assert ": in use: a block of 48 bytes" in session[call]
