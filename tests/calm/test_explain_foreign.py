"""calm explain's readers of jemalloc and mimalloc, against programs that know what they hold."""

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calm.commands.explain import picture, process
from calm.commands.explain.model import MAX_BYTES, Heap, Process, Reader
from calm.core import allocators, elf
from calm.core.errors import CalmError
from calm.core.proc import Mapping
from calm_heap_readers import glibc, jemalloc, memory, mimalloc

KIB, MIB, PAGE = 1 << 10, 1 << 20, 4096
READERS: dict[str, Reader] = {
    "jemalloc": jemalloc.heaps,
    "jemalloc-debian": jemalloc.heaps,
    "mimalloc": mimalloc.heaps,
    "mimalloc-debian": mimalloc.heaps,
}
PARTS = ("in_use", "cached", "retained", "fragmentation", "metadata")


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("foreign") / "heaps"
    source = Path(__file__).with_name("foreign_heaps.c")
    builtin = ("-fno-builtin-malloc", "-fno-builtin-free")
    subprocess.run(["cc", "-O1", *builtin, "-pthread", "-o", built, source], check=True)
    return built


@contextmanager
def running(program: Path, mode: str, name: str, **variables: str) -> Iterator[tuple[int, dict[str, int]]]:
    """The process and what it says of itself."""
    try:
        allocator = allocators.parse(name)
    except CalmError as error:
        pytest.skip(str(error))
    child = subprocess.Popen(
        [program, mode],
        env=os.environ | allocator.variables(os.environ) | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        told = {}
        for line in child.stdout:
            key, value = line.split()
            if key == "ready":
                break
            told[key] = int(value)
        yield child.pid, told
    finally:
        child.kill()
        child.communicate()


def first(reader: Reader, process: Process) -> Heap | None:
    found = reader(process)
    assert len(found) <= 1
    return found[0] if found else None


def read(pid: int, name: str) -> Heap:
    with process.sample(pid) as found:
        heap = first(READERS[name], found)
    assert heap is not None
    return heap


def parts(heap: Heap) -> int:
    return sum(getattr(heap, part).bytes for part in PARTS)


def blocks(heap: Heap, size: int) -> int:
    return sum(each.used for each in heap.classes if each.size == size)


def inside(heap: Heap, address: int) -> bool:
    return any(start <= address < end for start, end in heap.ranges)


@pytest.mark.parametrize("name", READERS)
def test_figures_are_what_the_program_holds(program: Path, name: str) -> None:
    with running(program, "mixed", name) as (pid, told):
        heap = read(pid, name)
        with process.sample(pid) as found:
            resident = memory.resident(found, heap.ranges)
    assert heap.allocator == name.removesuffix("-debian")
    assert re.fullmatch(r"\d+\.\d+\.\d+", heap.version)
    assert {getattr(heap, part).certainty for part in ("footprint", *PARTS)} == {"exact"}, heap.notes
    assert parts(heap) == heap.footprint.bytes
    # The dynamic linker and the C library hold a few blocks, too.
    assert told["blocks_64"] <= blocks(heap, 64) <= told["blocks_64"] + 8
    assert told["blocks_512"] <= blocks(heap, 512) <= told["blocks_512"] + 8
    assert blocks(heap, told["large"]) == 1
    assert told["live"] <= heap.in_use.bytes <= told["live"] + 96 * KIB
    assert inside(heap, told["address"])
    assert inside(heap, told["address_large"])
    assert abs(heap.footprint.bytes - resident) < MIB
    # Every slab and page has both free blocks and ones in use.
    slabs = sum(each.bytes for each in heap.classes if each.size in (64, 512))
    assert heap.fragmentation.bytes > slabs * 0.7
    assert heap.movable.bytes > slabs * 0.7


@pytest.mark.parametrize("name", ["jemalloc", "jemalloc-debian"])
def test_jemalloc_reports_the_same(program: Path, name: str) -> None:
    with running(program, "mixed", name) as (pid, told):
        heap = read(pid, name)
    assert abs(heap.facts["dirty_bytes"] - told["stats.arenas.4096.pdirty"] * PAGE) < 128 * KIB
    assert heap.facts["tcaches"] == 5
    assert heap.cached.bytes > 4 * 100 * 112
    if "stats.allocated" not in told:
        return
    internal = told["stats.arenas.4096.internal"]
    allocated = heap.in_use.bytes + heap.cached.bytes + internal
    assert abs(allocated - told["stats.allocated"]) < 64 * KIB
    assert abs(heap.cached.bytes - told["stats.arenas.4096.tcache_bytes"]) < 32 * KIB
    active = allocated + heap.fragmentation.bytes
    assert abs(active - told["stats.active"]) < 128 * KIB


@pytest.mark.parametrize("name", READERS)
def test_a_library_of_another_name(program: Path, name: str, tmp_path: Path) -> None:
    """The records are found by what they are: also in a program that the allocator is linked into."""
    library = allocators.find_library(name)
    if library is None:
        pytest.skip(f"{name} is not installed")
    renamed = tmp_path / "libother.so"
    shutil.copy(library, renamed)
    with running(program, "mixed", str(renamed)) as (pid, told):
        heap = read(pid, name)
    assert heap.version
    assert told["live"] <= heap.in_use.bytes <= told["live"] + 96 * KIB


def test_two_in_a_process(tmp_path: Path) -> None:
    """Each library that brought an allocator for itself has a heap, with the name of its settings."""
    built = allocators.find_library("jemalloc")
    assert built is not None
    data = Path(built).read_bytes()
    assert data.count(b"\0MALLOC_CONF\0") == 1
    program = f"""
import ctypes, sys
for path, count in (("{tmp_path}/libone.so", 3), ("{tmp_path}/libother.so", 9)):
    library = ctypes.CDLL(path, ctypes.DEFAULT_MODE)
    library.mallocx.restype = ctypes.c_void_p
    for _ in range(count):
        ctypes.memset(library.mallocx(ctypes.c_size_t({MIB}), 0), 1, {MIB})
print("ready", flush=True)
sys.stdin.read()
"""
    for name in ("libone.so", "libother.so"):
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", program]
    # Builds for preloading have variables of threads in a place that is small for libraries that are opened.
    env = os.environ | {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=65536"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        with process.sample(child.pid) as found:
            heaps = jemalloc.heaps(found)
            whole = picture.picture(found, [jemalloc.heaps])
        child.communicate()
    assert sorted(heap.in_use.bytes // MIB for heap in heaps) == [3, 9]
    assert [heap.settings for heap in heaps] == ["MALLOC_CONF", "MALLOC_CONF"]
    assert whole.parts["in_use"].bytes >= 11 * MIB
    assert whole.heap_of("in_use") == whole.heaps[0]


def test_what_a_library_brought_is_named() -> None:
    """A prefixed build exports no malloc, and has its own name for the settings."""
    constants = b"\0" + b"5.3.0-0-g" + b"0" * 40 + b"\0DUCKDB_JE_MALLOC_CONF\0"
    image = made_up("/none/libduckdb.so", constants, 5)
    heap = first(jemalloc.heaps, image)
    assert heap is not None
    assert (heap.title, heap.settings) == ("jemalloc in libduckdb.so", "DUCKDB_JE_MALLOC_CONF")


@pytest.mark.parametrize("name", ["jemalloc", "jemalloc-debian"])
def test_jemalloc_without_caches(program: Path, name: str) -> None:
    """Whether there are none or they were not found cannot be told."""
    with running(program, "mixed", name, MALLOC_CONF="tcache:false") as (pid, told):
        heap = read(pid, name)
    assert heap.in_use.certainty == "estimate"
    assert not heap.cached.is_known
    assert told["live"] <= heap.in_use.bytes <= told["live"] + 96 * KIB
    assert "tcache:false" in heap.notes[0]


@pytest.mark.parametrize("name", READERS)
def test_blocks_that_another_thread_freed(program: Path, name: str) -> None:
    with running(program, "remote", name) as (pid, _):
        heap = read(pid, name)
    assert heap.in_use.bytes < 96 * KIB
    assert heap.in_use.certainty == "exact", heap.notes
    assert parts(heap) == heap.footprint.bytes


@pytest.mark.parametrize("name", READERS)
def test_a_heap_that_changes(program: Path, name: str) -> None:
    """Two threads allocate and free: every sample is near what they hold, or says that it is not sure."""
    with running(program, "busy", name) as (pid, _):
        for _ in range(5):
            heap = read(pid, name)
            if heap.in_use.certainty == "exact":
                assert 256 * KIB < heap.in_use.bytes < 64 * MIB
            assert heap.notes or heap.footprint.is_known


class Image:
    """A process that is an image in memory: of a running one, or made up."""

    def __init__(self, pid: int, mappings: list[Mapping], contents: dict[int, bytearray]) -> None:
        self.pid = pid
        self.page = PAGE
        self.mappings = mappings
        self.contents = contents
        self.is_present: Any = None
        self.bytes_read = 0

    @classmethod
    def of(cls, pid: int) -> "Image":
        with process.sample(pid) as found:
            contents = {}
            for each in found.mappings:
                if each.rights[0] != "r" or each.path.startswith("[v"):
                    continue
                present = found.present(each.start, each.end)
                data = bytearray(min(each.end - each.start, 16 * MIB))
                for page in np.flatnonzero(present[: len(data) // PAGE]).tolist():
                    page_bytes = found.read(each.start + page * PAGE, PAGE)
                    data[page * PAGE : (page + 1) * PAGE] = page_bytes or bytes(PAGE)
                contents[each.start] = data
            return cls(pid, list(found.mappings), contents)

    def read(self, address: int, size: int) -> bytes | None:
        self.bytes_read += size
        parts, at = [], address
        for each in self.mappings:
            data = self.contents.get(each.start)
            if data is not None and each.start <= at < each.start + len(data):
                parts.append(bytes(data[at - each.start : address + size - each.start]))
                at += len(parts[-1])
        return b"".join(parts) if at == address + size else None

    def words(self, address: int, count: int, width: int = 8) -> tuple[int, ...] | None:
        data = self.read(address, count * width)
        return None if data is None else tuple(np.frombuffer(data, f"<u{width}").tolist())

    def symbols(self, pattern: str, names: Any) -> dict[str, int]:
        """Those of the running process; of an image that is made up there are none."""
        with process.sample(self.pid) as found:
            return found.symbols(pattern, names)

    def image(self, pattern: str) -> None:
        return None

    def present(self, start: int, end: int) -> Any:
        if self.is_present is not None:
            return self.is_present(start, end)
        start, end = start // PAGE * PAGE, -(-end // PAGE) * PAGE
        found = np.zeros((end - start) // PAGE, dtype=bool)
        for at, pages in self._pages.items():
            low, high = max(start, at), min(end, at + len(pages) * PAGE)
            if low < high:
                part = pages[(low - at) // PAGE : (high - at) // PAGE]
                found[(low - start) // PAGE : (low - start) // PAGE + len(part)] = part
        return found

    @cached_property
    def _pages(self) -> dict[int, Any]:
        """Which pages hold something, by mapping."""
        return {
            at: np.frombuffer(data, dtype=np.uint8).reshape(-1, PAGE).any(axis=1)
            for at, data in self.contents.items()
        }

    def resident(self, start: int, end: int) -> int | None:
        found = self.present(start, end)
        return None if found is None else int(np.count_nonzero(found)) * PAGE


def writable(image: Image) -> list[int]:
    return [
        each.start for each in image.mappings if each.rights.startswith("rw") and each.start in image.contents
    ]


def damage(image: Image, seed: int, count: int) -> None:
    """Replaces words of the allocator's records by others that look like words of theirs."""
    chosen = random.Random(seed)
    starts = writable(image)
    places = {at: np.flatnonzero(np.frombuffer(image.contents[at][:MIB], "<u8")).tolist() for at in starts}
    starts = [at for at in starts if places[at]]
    for _ in range(count):
        start = chosen.choice(starts)
        data = image.contents[start]
        at, other = (chosen.choice(places[start]) * 8 for _ in range(2))
        value = chosen.choice(
            [
                bytes(data[other : other + 8]),
                chosen.randbytes(8),
                b"\xff" * 8,
                bytes(8),
                (int.from_bytes(data[at : at + 8], "little") ^ 1 << chosen.randrange(64)).to_bytes(
                    8, "little"
                ),
                (chosen.choice(starts) + 8 * chosen.randrange(1 << 12)).to_bytes(8, "little"),
            ]
        )
        data[at : at + 8] = value


@pytest.mark.parametrize("name", READERS)
def test_damaged_records(program: Path, name: str) -> None:
    """A reader neither raises nor runs away, whatever it reads."""
    with running(program, "mixed", name) as (pid, _):
        image = Image.of(pid)
        clean = first(READERS[name], image)
        assert clean is not None
        assert clean.in_use.is_known
        for seed in range(20):
            image.bytes_read = 0
            damage(image, seed, 200)
            heap = first(READERS[name], image)
            assert heap is not None
            assert image.bytes_read <= 2 * MAX_BYTES
            assert all(getattr(heap, part).bytes >= 0 for part in ("footprint", *PARTS))
        image.is_present = lambda start, end: None
        assert first(READERS[name], image) is not None


def made_up(path: str, constants: bytes, seed: int) -> Image:
    """A library whose data and neighbours are noise, with many words that are addresses in them."""
    chosen = random.Random(seed)
    sizes = ((PAGE * 4, "r-xp", path), (MIB * 4, "rw-p", path), (MIB * 8, "rw-p", ""))
    mappings, contents, at = [], {}, 0x7F0000000000
    for size, rights, name in sizes:
        inode = 7 if name else 0
        mappings.append(Mapping(at, at + size, rights, 0, "0:0", inode, name, {}))
        contents[at] = bytearray(size)
        at += size + (64 << 20 if name == "" else 0)
    starts = [each.start for each in mappings]
    contents[starts[0]][: len(constants)] = constants
    noise = np.frombuffer(chosen.randbytes(2 * MIB), "<u8").copy()
    noise[::3] = noise[::3] % np.uint64(6 * MIB) // np.uint64(64) * np.uint64(64) + np.uint64(starts[1])
    contents[starts[1]][: 2 * MIB] = noise.tobytes()
    contents[starts[2]][: 2 * MIB] = noise[::-1].tobytes()
    return Image(os.getpid(), mappings, contents)


@pytest.mark.parametrize(
    ("reader", "path", "constants"),
    [
        (jemalloc.heaps, "/none/libjemalloc.so.2", b"\0" + b"5.3.0-0-g" + b"0" * 40 + b"\0"),
        (mimalloc.heaps, "/none/libmimalloc.so.2", b"mimalloc: "),
    ],
)
def test_noise(reader: Reader, path: str, constants: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mimalloc, "_release", lambda *_: "2.0.9")
    image = made_up(path, constants, 1)
    heap = first(reader, image)
    assert heap is not None
    assert not heap.footprint.is_known
    assert "not found" in heap.notes[0]


@pytest.mark.parametrize(
    ("name", "pattern", "altered"),
    [
        ("jemalloc", rb"\0\d+\.\d+\.\d+-\d+-g", b"\x005.9.0-0-g"),
        ("mimalloc", rb"\xb8.{2}\0\0\xc3", b"\xb8\x0f\x27\0\0\xc3"),
        ("glibc", rb"release version 2\.\d\d", b"release version 2.99"),
    ],
)
def test_an_unknown_version_is_refused(
    program: Path, name: str, pattern: bytes, altered: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that differs in its version alone: what was recognized is reported, and nothing is read."""
    file = Path(allocators.find_library(name) or "/none") if name != "glibc" else libc()
    if not file.exists():
        pytest.skip(f"{name} is not installed")
    data = file.read_bytes()
    places = [match.start() for match in re.finditer(pattern, data, re.DOTALL)]
    if name == "mimalloc":
        release = data.find(b"\xb8", symbol_offset(file, "mi_version"))
        places = [release] if release in places else []
    assert len(places) == 1
    copy = tmp_path / ("libc.so.6" if name == "glibc" else file.name)
    copy.write_bytes(data[: places[0]] + altered + data[places[0] + len(altered) :])
    copy.chmod(0o755)
    if name == "glibc":
        runner = tmp_path / "run"
        loader = next(path for path in map(Path, LOADERS) if path.exists())
        runner.write_text(f'#!/bin/sh\nexec {loader} --library-path {tmp_path} {program} "$@"\n')
        runner.chmod(0o755)
        started = running(runner, "mixed", "glibc")
    else:
        started = running(program, "mixed", str(copy))
    reader = {"jemalloc": jemalloc.heaps, "mimalloc": mimalloc.heaps, "glibc": glibc.heaps}[name]
    with started as (pid, _), process.sample(pid) as found:
        data_of = [each for each in found.mappings if "w" in each.rights]
        read = found.read

        def refuse(address: int, size: int) -> bytes | None:
            assert not any(each.start < address + size and address < each.end for each in data_of)
            return read(address, size)

        monkeypatch.setattr(found, "read", refuse)
        heap = first(reader, found)
    assert heap is not None
    assert heap.notes[0].startswith("Unknown version: ")
    assert heap.version.count("9") >= 1
    assert not heap.footprint.is_known
    assert heap.ranges == ()


LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")


def libc() -> Path:
    """The C library of this process."""
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"(/\S*/libc\.so\.6)$", maps, re.MULTILINE)
    return Path(found[1]) if found else Path("/none")


def symbol_offset(file: Path, name: str) -> int:
    """Where a function is in a file."""
    with elf.opened(file) as opened:
        [symbol] = opened.get_section_by_name(".dynsym").get_symbol_by_name(name)
        address = symbol.entry.st_value
        loads = (each.header for each in opened.iter_segments("PT_LOAD"))
        return next(
            int(address - each.p_vaddr + each.p_offset)
            for each in loads
            if each.p_vaddr <= address < each.p_vaddr + each.p_filesz
        )


def test_other_versions() -> None:
    image = made_up("/none/libjemalloc.so.1", b"\0" + b"4.5.0-0-g" + b"0" * 40 + b"\0", 2)
    heap = first(jemalloc.heaps, image)
    assert heap is not None
    assert heap.version == "4.5.0"
    assert not heap.in_use.is_known
    assert "malloc_stats_print" in heap.notes[0]


def test_a_name_is_not_enough() -> None:
    image = made_up("/none/libother.so", b"no allocator", 3)
    assert first(jemalloc.heaps, image) is None
    assert first(mimalloc.heaps, image) is None


def test_code_that_is_not_used() -> None:
    """A program that holds mimalloc, and runs on another allocator."""
    assert first(mimalloc.heaps, made_up("/none/python3.13", b"mimalloc: ", 4)) is None


def test_this_process_has_neither() -> None:
    with process.sample(os.getpid()) as found:
        assert first(jemalloc.heaps, found) is None
        assert first(mimalloc.heaps, found) is None


def test_size_classes() -> None:
    sizes = jemalloc.sizes()
    assert sizes[:12] == [8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224]
    assert 14 * KIB in sizes
    assert sizes[-1] == 7 << 60


def test_jemalloc_for_addresses_of_57_bits() -> None:
    """Root, node and leaf, whose entry is a pointer and a word of flags; and a library of no telling name."""
    library, nodes, heap = 0x7F0000000000, 0x7F1000000000, 0x7F2000040000
    path, leaf, record = "/usr/lib/libother.so", nodes + MIB, nodes + 2 * MIB
    mappings = [
        Mapping(library, library + PAGE, "r-xp", 0, "0:0", 7, path, {}),
        Mapping(library + PAGE, library + MIB, "rw-p", 0, "0:0", 7, path, {}),
        Mapping(nodes, nodes + 3 * MIB, "rw-p", 0, "0:0", 0, "", {}),
        Mapping(heap, heap + 16 * PAGE, "rw-p", 0, "0:0", 0, "", {}),
    ]
    contents = {each.start: bytearray(each.end - each.start) for each in mappings}
    version = b"\x005.3.0-0-g123456\0"
    contents[library][8 : 8 + len(version)] = version
    image = Image(os.getpid(), mappings, contents)

    def put(address: int, *words: int) -> None:
        start = max(start for start in contents if start <= address)
        data = np.array(words, "<u8").tobytes()
        contents[start][address - start : address - start + len(data)] = data

    root = library + PAGE + 64
    put(root + (heap >> 42) * 8, nodes)
    put(nodes + (heap >> 27 & 0x7FFF) * 8, leaf)
    active, large_16_pages = 0, jemalloc.sizes().index(16 * PAGE)
    put(leaf + (heap >> 12 & 0x7FFF) * 16, record, active << 2 | large_16_pages << 5)
    put(record, active << 17 | large_16_pages << 20, heap, 16 * PAGE)
    found = first(jemalloc.heaps, image)
    assert found is not None
    assert found.version == "5.3.0"
    assert found.in_use.bytes == 16 * PAGE


def test_touched_pages_only() -> None:
    """Pages that are not resident are not read."""
    data = bytearray(16 * PAGE)
    data[3 * PAGE] = data[4 * PAGE] = data[9 * PAGE] = 1
    mapping = Mapping(0x10000, 0x20000, "rw-p", 0, "0:0", 0, "", {})
    image: Process = Image(1, [mapping], {0x10000: data})
    pages = memory.Memory(image)
    assert list(pages.touched(0x10000, 0x20000)) == [(0x13000, 0x15000), (0x19000, 0x1A000)]
    addresses, values = pages.nonzero(0x10000, 0x20000)
    assert addresses.tolist() == [0x13000, 0x14000, 0x19000]
    assert values.tolist() == [1, 1, 1]
