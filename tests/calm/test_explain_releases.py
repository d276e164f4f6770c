"""calm explain's readers on the releases of allocators that the package registries have.

Each release in the readers' table is read in a program that knows what it holds. Of the releases that the
registries have and the table has not, nothing is read. They are kept in build/heap-releases.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from calm_helpers import ROOT

from calm.commands.explain import picture, process
from calm.commands.explain.model import Heap
from calm_heap_readers import READERS, versions

pytestmark = pytest.mark.long

FOLDER = ROOT / "build/heap-releases"
SOURCES = Path(__file__).with_name("heap_releases")
KIB, MIB = 1 << 10, 1 << 20
# The crate's version and features, and what its mimalloc is.
MIMALLOC_CRATES = (
    ("0.1.24", "", "1.7.5"),
    ("0.1.25", "", "2.0.6"),
    ("0.1.28", "", "2.0.7"),
    ("0.1.30", "", "2.0.9"),
    ("0.1.32", "", "2.1.1"),
    ("0.1.35", "", "2.1.2"),
    ("0.1.37", "", "2.1.4"),
    ("0.1.38", "", "2.1.6"),
    ("0.1.39", "", "2.1.7"),
    ("0.1.42", "", "2.2.3"),
    ("0.1.43", "", "2.2.5"),
    ("0.1.44", "", "2.2.4"),
    ("0.1.44", "v3", "3.1.5"),
    ("0.1.46", "v2", "2.3.0"),
    ("0.1.46", "", "3.3.0"),
    ("0.1.47", "v2", "2.3.1"),
    ("0.1.47", "", "3.3.1"),
    ("0.1.49", "v2", "2.3.2"),
    ("0.1.49", "", "3.3.2"),
)
JEMALLOC_CRATES = (
    ("0.4.3+5.2.1-patched.2", "5.2.1-2"),
    ("0.5.4+5.3.0-patched", "5.3.0"),
    ("0.6.1+5.3.0-1-ge13ca993e8ccb9ba9847cc330696e02839f328f7", "5.3.0-1"),
    ("0.7.1+5.3.1-0-g81034ce1f1373e37dc865038e1bc8eeecf559ce8", "5.3.1"),
)
# The releases of mimalloc in them. Their jemalloc is 5.3.0.
PYARROWS = {
    **dict.fromkeys(("10.0.1", "12.0.1", "14.0.2", "16.1.0", "18.1.0", "20.0.0"), "2.0.6"),
    "21.0.0": "2.2.4",
    **dict.fromkeys(("22.0.0", "23.0.1"), "3.1.5"),
    "24.0.0": "3.2.7",
    **dict.fromkeys(("25.0.1", "26.0.1"), "3.4.1"),
}
POLARS = {
    **dict.fromkeys(("0.16.18", "0.18.15", "0.20.31", "1.0.0", "1.9.0", "1.17.1"), "5.3.0"),
    **dict.fromkeys(("1.25.2", "1.33.1", "1.35.2"), "5.3.0-1"),
    "2.1.0": "5.3.1",
}
DUCKDBS = {
    **dict.fromkeys(("0.6.1", "0.8.1", "0.10.3", "1.0.0"), "5.3.0"),
    **dict.fromkeys(("1.1.3", "1.2.2", "1.3.2", "1.4.5", "1.5.6", "2.0.1"), "5.3.0-196"),
}
PYTHONS = ("3.6", "3.7", "3.8", "3.9", "3.10", "3.11", "3.12", "3.13")

HOLD_PYARROW = """
import ctypes, pyarrow, sys
pool = getattr(pyarrow, sys.argv[1] + "_memory_pool")()
def made(size):
    buffer = pyarrow.allocate_buffer(size, memory_pool=pool)
    ctypes.memset(buffer.address, 1, size)
    return buffer
sizes = [512 if i % 7 == 0 else 64 for i in range(20000)]
held = [made(size) for size in sizes][::10]
sizes = sizes[::10]
held.append(made(10 << 20))
made(30 << 20)
told = sizes.count(64), sizes.count(512), pool.bytes_allocated()
print('{"blocks_64": %d, "blocks_512": %d, "live": %d}' % told)
"""
HOLD_POLARS = """
import polars
make = getattr(polars, "int_range", None) or polars.arange
held = make(0, 4000000, eager=True)
print('{"live": %d}' % held.estimated_size())
"""
HOLD_DUCKDB = """
import duckdb
connection = duckdb.connect(config={"threads": 1})
connection.execute("create table t as select hash(range) as i from range(4000000)")
try:
    size = connection.execute("select sum(memory_usage_bytes) from duckdb_memory()").fetchone()[0]
except duckdb.Error:
    size = 4000000 * 8
print('{"live": %d}' % size)
"""
HOLD_PYTHON = """
import sys
held = [{"number": i, "text": str(i)} for i in range(200000)][::3]
print('{"blocks": %d}' % sys.getallocatedblocks())
"""
WAIT = "\nimport sys\nsys.stdout.flush()\nsys.stdin.read()\n"


def run(*command: str | Path, **variables: str) -> None:
    done = subprocess.run(
        [str(word) for word in command], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def holding(*command: str | Path, **variables: str) -> Iterator[tuple[dict[str, int], tuple[Heap, ...]]]:
    """What a program says of itself on one line, and the heaps that are read of it."""
    with subprocess.Popen(
        [str(word) for word in command],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        told = json.loads(child.stdout.readline())
        with process.sample(child.pid) as found:
            whole = picture.picture(found, READERS)
        if all(heap.footprint.is_known for heap in whole.heaps):
            assert whole.bytes("other", "unaccounted") < 8 * MIB
        yield told, whole.heaps
        child.communicate()


def crate(name: str, version: str, features: str = "", named: bool = True) -> Path:
    """A program with an allocator that a crate builds."""
    cargo = shutil.which("cargo", path=f"{os.environ['PATH']}:{Path.home()}/.cargo/bin")
    if cargo is None:
        pytest.skip("cargo is not installed")
    folder = FOLDER / f"{name}-{version}{'-' if features else ''}{features}"
    program = folder / ("named" if named else "unnamed")
    if program.exists():
        return program
    (folder / "src").mkdir(parents=True, exist_ok=True)
    sources = ("heaps.rs", f"{name.replace('-', '_')}.rs")
    (folder / "src/main.rs").write_text("".join((SOURCES / each).read_text() for each in sources))
    wanted = f'"{features}"' if features else ""
    (folder / "Cargo.toml").write_text(
        '[package]\nname = "heaps"\nversion = "0.1.0"\nedition = "2021"\n[features]\nnamed = []\n'
        f"[dependencies.{name}]\n"
        f'version = "={version}"\ndefault-features = false\nfeatures = [{wanted}]\n'
    )
    manifest = ("--manifest-path", folder / "Cargo.toml", *(("--features", "named") if named else ()))
    run(cargo, "build", "--release", "--quiet", *manifest)
    shutil.copy(folder / "target/release/heaps", program)
    return program


def wheel(name: str, version: str) -> Path:
    """The folder with a package of PyPI, without what it depends on."""
    folder = FOLDER / f"{name}-{version}"
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}")
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:")
        run(*pip, "--target", partial, f"{name}=={version}")
        partial.rename(folder)
    return folder


def of(heaps: Sequence[Heap], allocator: str) -> Heap:
    [heap] = [each for each in heaps if each.allocator == allocator]
    return heap


def key(heap: Heap) -> str:
    """The version as the table has it."""
    return heap.version if heap.allocator != "jemalloc" or heap.version.count("-") else f"{heap.version}-0"


def check(heap: Heap, told: dict[str, int], slack: int) -> None:
    """The figures are what the program holds; or the release is unknown, and there are none."""
    if not versions.layout(heap.allocator, key(heap)):
        assert heap.notes[0].startswith("Unknown version: ")
        assert not heap.footprint.is_known
        assert heap.ranges == ()
        return
    parts = ("in_use", "cached", "retained", "fragmentation", "metadata")
    assert heap.footprint.is_known, heap.notes
    assert sum(getattr(heap, part).bytes for part in parts) == heap.footprint.bytes
    assert told["live"] <= heap.in_use.bytes <= told["live"] + slack, heap.notes
    for size in (64, 512):
        if (count := told.get(f"blocks_{size}")) is not None:
            [used] = [each.used for each in heap.classes if each.size == size]
            assert count <= used <= count + 16


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("version", "features", "release"), MIMALLOC_CRATES)
def test_mimalloc_in_a_program(version: str, features: str, release: str, named: bool) -> None:
    with holding(crate("libmimalloc-sys", version, features, named)) as (told, heaps):
        heap = of(heaps, "mimalloc")
    # Before 2.2 no message has the version, and the linker drops mi_version.
    assert heap.version == (release if named or release >= "2.2" else "")
    # Rust's vector of the blocks' addresses, and what 3.x rounds a large block up to.
    check(heap, told, 2 * MIB)


@pytest.mark.parametrize(("version", "release"), JEMALLOC_CRATES)
def test_jemalloc_in_a_program(version: str, release: str) -> None:
    with holding(crate("tikv-jemalloc-sys", version)) as (told, heaps):
        heap = of(heaps, "jemalloc")
    assert heap.version == release
    check(heap, told, 512 * KIB)


@pytest.mark.parametrize("version", PYARROWS)
@pytest.mark.parametrize("allocator", ["mimalloc", "jemalloc"])
def test_pyarrow(version: str, allocator: str) -> None:
    # Before 18 it needs numpy, and before 16 one before 2.
    numpy = [wheel("numpy", "1.26.4")] if int(version.split(".")[0]) < 18 else []
    folder = wheel("pyarrow", version)
    path = {"PYTHONPATH": ":".join(map(str, (folder, *numpy)))}
    with holding(sys.executable, "-c", HOLD_PYARROW + WAIT, allocator, **path) as (told, heaps):
        heap = of(heaps, allocator)
    assert heap.library.startswith("libarrow.so")
    assert heap.version == (PYARROWS[version] if allocator == "mimalloc" else "5.3.0")
    check(heap, told, 2 * MIB)


@pytest.mark.parametrize(("version", "release"), POLARS.items())
def test_polars(version: str, release: str) -> None:
    folders = [wheel("polars", version)]
    if tuple(map(int, version.split("."))) >= (1, 34):
        folders.append(wheel("polars-runtime-32", version))
        for each in folders[1].iterdir():
            link = folders[0] / each.name
            if not link.exists():
                link.symlink_to(each)
    path = {"PYTHONPATH": str(folders[0]), "POLARS_MAX_THREADS": "1"}
    with holding(sys.executable, "-c", HOLD_POLARS + WAIT, **path) as (told, heaps):
        heap = of(heaps, "jemalloc")
    assert heap.version == release
    check(heap, told, 4 * MIB)


@pytest.mark.parametrize(("version", "release"), DUCKDBS.items())
def test_duckdb(version: str, release: str) -> None:
    path = {"PYTHONPATH": str(wheel("duckdb", version))}
    with holding(sys.executable, "-c", HOLD_DUCKDB + WAIT, **path) as (told, heaps):
        heap = of(heaps, "jemalloc")
    assert heap.version == release
    check(heap, told, told["live"] // 4 + 4 * MIB)


@pytest.mark.parametrize("version", PYTHONS)
def test_pymalloc(version: str) -> None:
    names = [*(Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python{version}"), f"python{version}"]
    python = next(filter(None, (shutil.which(name) for name in names)), None)
    if python is None:
        pytest.skip(f"Python {version} is not installed")
    with holding(python, "-c", HOLD_PYTHON + WAIT, PYTHONMALLOC="pymalloc") as (told, heaps):
        heap = of(heaps, "pymalloc")
    assert heap.version == version
    assert 0.97 * told["blocks"] < sum(each.used for each in heap.classes) <= told["blocks"]


def test_all_that_the_table_lists_is_tested() -> None:
    """But glibc, whose releases tests/glibcs has."""
    listed = {(each.allocator, version) for each in versions.TABLE for version in each.versions}
    tested = {("mimalloc", release) for *_, release in MIMALLOC_CRATES}
    tested |= {("mimalloc", release) for release in PYARROWS.values()}
    of_jemalloc = (release for _, release in (*JEMALLOC_CRATES, *POLARS.items(), *DUCKDBS.items()))
    tested |= {("jemalloc", each if "-" in each else f"{each}-0") for each in of_jemalloc}
    tested |= {("pymalloc", version) for version in PYTHONS}
    assert {each for each in listed if each[0] != "glibc"} <= tested
