"""What calm says of heaps that libraries bring, and what tools before malloc count with libcalmalloc."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import environ
from pathlib import Path

from calm.commands.explain import advice
from calm.commands.explain import command as explain
from calm.commands.explain.picture import SMALL_BYTES, Picture
from calm.commands.explain.rules import explain as explained
from calm.core import proc

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "build/crossings"
PAGE = REPOSITORY / "docs/crossings.md"
BEGIN, END = "<!-- the record -->", "<!-- the end of the record -->"
OURS = str(REPOSITORY / "build/release/libcalmalloc.so")
WHEELS = ("pyarrow", "polars", "duckdb", "pandas", "memray")
# By library: what calm calls its heap; "" is the process's own.
HEAPS = {
    "pyarrow": "mimalloc in libarrow",
    "pyarrow-jemalloc": "jemalloc in libarrow",
    "polars": "jemalloc in _polars",
    "duckdb": "jemalloc in _duckdb",
    "pandas": "",
    "tikv-jemallocator": "jemalloc in libholder",
}
STATES = ("idle", "live", "retained")
TOOLS = ("heaptrack", "memcheck", "memray")
NAMES = (*HEAPS, *TOOLS)
_SETTLE_S = 3.0
_BACK = 0.9
"""The part of what is retained that has to come back."""

# Takes a library and a state, and prints what is resident after the import, with live memory, and at the end.
# Then it executes lines from standard input.
_HOLDER = """
import ctypes, random, sys, time
library, state = sys.argv[1:]

def told(what):
    with open("/proc/self/statm") as file:
        print(what, int(file.read().split()[1]) * 4096, flush=True)

generator = random.Random(1)
sizes = [generator.randrange(1000, 60000) for _ in range(9000)]
if library.startswith("pyarrow"):
    import pyarrow
    pool = pyarrow.jemalloc_memory_pool() if "jemalloc" in library else pyarrow.mimalloc_memory_pool()
    def make():
        buffers = [pyarrow.allocate_buffer(size, memory_pool=pool) for size in sizes]
        for buffer in buffers:
            ctypes.memset(buffer.address, 1, buffer.size)
        return buffers
elif library == "polars":
    import polars
    def make():
        column = polars.int_range(0, 400000).cast(polars.String) + "and so on and on"
        return [polars.select(column.alias("text")) for _ in range(14)]
elif library == "duckdb":
    import duckdb
    connection = duckdb.connect()
    def make():
        connection.execute("create table t as select range::varchar || 'and so on' as s from range(9000000)")
elif library == "pandas":
    import numpy, pandas
    def make():
        return [pandas.Series(numpy.ones(size // 8)) for size in sizes]
else:
    rust = ctypes.CDLL(sys.path[0] + "/libholder.so")
    def make():
        rust.hold(ctypes.c_size_t(9000))
told("imported")
if state != "idle":
    held = make()
    told("made")
    if state == "retained":
        if library == "duckdb":
            connection.execute("drop table t")
        elif library == "tikv-jemallocator":
            rust.release()
        else:
            # The last one stays, as something does in a program.
            held = held[-1:]
told("ready")
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
_CARGO = """[package]
name = "holder"
version = "0.1.0"
edition = "2021"
[lib]
crate-type = ["cdylib"]
[dependencies]
tikv-jemallocator = { version = "*", features = ["disable_initial_exec_tls"] }
"""
_RUST = """use std::sync::Mutex;
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;
static HELD: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());
#[no_mangle]
pub extern "C" fn hold(count: usize) {
    HELD.lock().unwrap().extend((0..count).map(|i| vec![1u8; 1000 + i * 7919 % 59000]));
}
#[no_mangle]
pub extern "C" fn release() {
    HELD.lock().unwrap().clear();
}
"""
_BLOCKS = """#include <cstdlib>
#include <memory>
#include <string>
#include <vector>
void *volatile sink;
int main() {
    std::vector<std::unique_ptr<std::string>> strings;
    for (int i = 0; i < 5000; i++) strings.push_back(std::make_unique<std::string>(40 + i % 50, 'x'));
    for (int i = 0; i < 100; i++) sink = new int[20];
    for (int i = 0; i < 1000; i++) std::free(sink = std::malloc(100 + i));
    for (int i = 0; i < 50; i++) sink = std::calloc(3, 30);
}
"""


@dataclass(frozen=True)
class Row:
    """One try."""

    what: str
    under: str
    found: str
    right: bool

    @property
    def line(self) -> str:
        return f"| {self.what} | {self.under} | {self.found} | {'yes' if self.right else '**no**'} |"


def _run(
    *command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, text=True, capture_output=True, cwd=cwd, env=env)


def _prepare(names: list[str], pinned: dict[str, str]) -> dict[str, str]:
    """Installs what the rows need; the versions of it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    python = FOLDER / "venv/bin/python"
    if not python.exists():
        _run(sys.executable, "-m", "venv", FOLDER / "venv")
    wheels = [f"{name}=={pinned[name]}" if name in pinned else name for name in WHEELS]
    _run(python, "-m", "pip", "install", "--upgrade", "--quiet", *wheels)
    (FOLDER / "holder.py").write_text(_HOLDER)
    code = "import importlib.metadata as m, sys; [print(n, m.version(n)) for n in sys.argv[1:]]"
    versions = dict(line.split() for line in _run(python, "-c", code, *WHEELS).stdout.splitlines())
    if "tikv-jemallocator" in names:
        crate = FOLDER / "holder"
        (crate / "src").mkdir(parents=True, exist_ok=True)
        pin = pinned.get("tikv-jemallocator")
        (crate / "Cargo.toml").write_text(_CARGO.replace('"*"', f'"={pin}"' if pin else '"*"'))
        (crate / "src/lib.rs").write_text(_RUST)
        path = f"{environ['PATH']}:{Path.home()}/.cargo/bin"
        if not pin:
            _run("cargo", "update", "--quiet", cwd=crate, env=environ | {"PATH": path})
        _run("cargo", "build", "--release", "--quiet", cwd=crate, env=environ | {"PATH": path})
        shutil.copy(crate / "target/release/libholder.so", FOLDER)
        lock = (crate / "Cargo.lock").read_text()
        found = re.search(r'name = "tikv-jemallocator"\nversion = "([^"]*)"', lock)
        versions["tikv-jemallocator"] = found[1] if found else "unknown"
    return versions


class _Held:
    """A process that holds memory in one state."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child
        self.told: dict[str, int] = {}
        assert child.stdout is not None
        for line in child.stdout:
            what, size = line.split()
            self.told[what] = int(size)
            if what == "ready":
                break

    @property
    def rss(self) -> int:
        return proc.rss_kib(self.child.pid) * 1024

    def execute(self, line: str) -> None:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()
        self.child.stdout.readline()


@contextmanager
def _holding(library: str, state: str, ours: bool, **variables: str) -> Iterator[_Held]:
    with subprocess.Popen(
        [FOLDER / "venv/bin/python", FOLDER / "holder.py", library, state],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ | ({"LD_PRELOAD": OURS} if ours else {}) | variables,
    ) as child:
        held = _Held(child)
        time.sleep(_SETTLE_S)
        yield held
        child.communicate()


def _title(library: str, ours: bool) -> str:
    return HEAPS[library] or ("calmalloc" if ours else "glibc")


def _judged(picture: Picture, held: _Held, library: str, state: str, ours: bool) -> tuple[str, bool]:
    """The verdict, and whether it is right."""
    said = explained([picture])
    heap = picture.heap_of(said.verdict)
    of = heap.title if heap and said.verdict in ("in_use", "retained", "cached", "fragmentation") else ""
    found = f"{said.verdict}{f', {of}' if of else ''}, {said.certainty}"
    size = held.told.get("made", 0) - held.told["imported"]
    its = next((each for each in picture.heaps if each.title.startswith(_title(library, ours))), None)
    parts = picture.of_heaps[picture.heaps.index(its)] if its else {}

    def has(part: str) -> int:
        return parts[part].bytes if part in parts else 0

    if state == "idle":
        right = (
            said.verdict not in ("retained", "unknown", "leak_suspected") and has("in_use") < 4 * SMALL_BYTES
        )
    elif state == "live":
        right = (
            said.verdict == "in_use" and of.startswith(_title(library, ours)) and has("in_use") > 0.8 * size
        )
        # "exact" has to be that.
        right &= said.certainty != "exact" or has("in_use") < 1.2 * size
    elif held.rss - held.told["imported"] < size / 4:
        # It came back by itself.
        found, right = f"{found} (it came back)", said.verdict != "retained"
    else:
        right = said.verdict == "retained" and of.startswith(_title(library, ours))
    return found, right


def _follow(step: str, held: _Held) -> str | None:
    """Does what the advice for a running process says; None where it is a setting for the next start."""
    words: list[str] = re.findall(r"`([^`]*)`", step)
    if words and words[0].startswith("gdb "):
        subprocess.run(words[0], shell=True, capture_output=True)
    elif words and words[0].startswith("SET "):
        held.execute(f"connection.execute({words[0]!r})")
    elif words and words[0].startswith("pyarrow."):
        held.execute(words[0])
    else:
        return None
    return words[0].split()[0].partition("(")[0]


def _came_back(library: str, ours: bool) -> tuple[str, bool] | None:
    """What following the advice does; None where nothing was retained."""
    with _holding(library, "retained", ours) as held:
        picture = explain.take(held.child.pid)
        heap = next((each for each in picture.heaps if each.title.startswith(_title(library, ours))), None)
        if heap is None or explained([picture]).verdict != "retained":
            return None
        retained = picture.of_heaps[picture.heaps.index(heap)]["retained"].bytes
        before = held.rss
        way = _follow(advice.release(heap.allocator, heap, held.child.pid), held)
        time.sleep(_SETTLE_S)
        shares = [] if way is None else [(way, (before - held.rss) / retained)]
    for step in advice.steps("retained", heap, 0):
        if setting := re.match(r"([A-Z_]+)=(\S+) returns", step):
            with _holding(library, "retained", ours, **{setting[1]: setting[2]}) as again:
                shares.append((setting[1], (before - again.rss) / retained))
    text = ", ".join(f"{'all' if share >= _BACK else f'{share:.2f}'} by {way}" for way, share in shares)
    return text, bool(shares) and all(share >= _BACK for _, share in shares)


def _heap_rows(library: str) -> Iterator[Row]:
    for ours in (False, True):
        under = "libcalmalloc" if ours else "glibc"
        for state in STATES:
            with _holding(library, state, ours) as held:
                found, right = _judged(explain.take(held.child.pid), held, library, state, ours)
            yield Row(f"{library}, {state}", under, found, right)
        if back := _came_back(library, ours):
            yield Row(f"{library}, advice followed", under, *back)


def _counted(text: str, *patterns: str) -> list[str]:
    return [found[1].replace(",", "") if (found := re.search(each, text)) else "?" for each in patterns]


def _heaptrack(program: Path, folder: Path, ours: bool) -> list[str]:
    preload = "/usr/lib/heaptrack/libheaptrack_preload.so"
    output = folder / "heaptrack"
    variables = {"DUMP_HEAPTRACK_OUTPUT": str(output), "LD_PRELOAD": preload + (f":{OURS}" if ours else "")}
    _run(program, env=environ | variables)
    lines = next(folder.glob("heaptrack*")).read_text(errors="replace").splitlines()
    allocations = sum(line.startswith("+") for line in lines)
    return [str(allocations), str(allocations - sum(line.startswith("-") for line in lines))]


def _memcheck(program: Path, folder: Path, ours: bool) -> list[str]:
    log = folder / "memcheck"
    variables = {"LD_PRELOAD": OURS} if ours else {}
    _run("valgrind", f"--log-file={log}", "--leak-check=full", program, env=environ | variables)
    return _counted(log.read_text(), r"total heap usage: ([\d,]+) allocs", r"definitely lost: ([\d,]+) bytes")


def _memray(_program: Path, folder: Path, ours: bool) -> list[str]:
    python = FOLDER / "venv/bin/python"
    script = folder / "held.py"
    script.write_text("held = [bytearray(1000 + n % 3000) for n in range(30000)]\n")
    variables = {"LD_PRELOAD": OURS} if ours else {}
    output = folder / "memray.bin"
    _run(python, "-m", "memray", "run", "-q", "-o", output, script, env=environ | variables)
    _run(python, "-m", "memray", "stats", "--json", "-o", folder / "stats.json", output)
    text = (folder / "stats.json").read_text()
    # The interpreter's own blocks differ by some hundred from run to run.
    total, peak = _counted(text, r'"total_num_allocations": (\d+)', r'"peak_memory": (\d+)')
    return [f"about {round(int(total), -3)}", f"about {round(int(peak) / 1e6)} MB"]


_COUNT: dict[str, Callable[[Path, Path, bool], list[str]]] = {
    "heaptrack": _heaptrack,
    "memcheck": _memcheck,
    "memray": _memray,
}


def _tool_rows(tool: str) -> Iterator[Row]:
    program = FOLDER / "blocks"
    program.with_suffix(".cpp").write_text(_BLOCKS)
    _run("c++", "-O1", "-g", "-o", program, program.with_suffix(".cpp"))
    counts = []
    for ours in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            counts.append(_COUNT[tool](program, Path(folder), ours))
    same, other = ("; ".join(each) for each in counts)
    what = {
        "heaptrack": "allocations; leaks",
        "memcheck": "allocations; bytes lost",
        "memray": "allocations; peak",
    }
    found = f"{other}, and {same} under glibc" if same != other else other
    yield Row(f"{tool}: {what[tool]}", "libcalmalloc", found, same == other)


def _recorded() -> tuple[dict[str, str], list[str]]:
    """The versions and the rows of the page."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    found = re.search(r"^Versions: (.*)\.$", text, re.MULTILINE)
    return dict(each.split(" ") for each in found[1].split(", ")) if found else {}, lines[2:]


def run(names: list[str], pinned: bool, update: bool) -> int:
    """Tries the rows, prints them, and what changed; the exit status."""
    versions_before, before = _recorded()
    versions = _prepare(names, versions_before if pinned else {})
    rows = []
    for name in names:
        for row in _tool_rows(name) if name in TOOLS else _heap_rows(name):
            rows.append(row)
            print(row.line, flush=True)
    known = {tuple(line.split(" | ")[:2]): line for line in before}
    changed = [row for row in rows if known.get(tuple(row.line.split(" | ")[:2])) != row.line]
    for row in changed:
        old = known.get(tuple(row.line.split(" | ")[:2]), "not in the record")
        print(f"changed: {row.line}\n    was: {old}")
    if update:
        fresh = {tuple(row.line.split(" | ")[:2]): row.line for row in rows}
        lines = [line for key, line in known.items() if key not in fresh and len(rows) < len(known)]
        table = ["| what | under | found | right |", "| --- | --- | --- | --- |", *fresh.values(), *lines]
        text = ", ".join(
            f"{name} {version}" for name, version in sorted((versions_before | versions).items())
        )
        page = PAGE.read_text()
        head, tail = page.partition(BEGIN)[0], page.partition(END)[2]
        PAGE.write_text(f"{head}{BEGIN}\n" + "\n".join(table) + f"\n\nVersions: {text}.\n{END}{tail}")
    return 1 if changed or not all(row.right for row in rows) else 0
