"""What reads foreign bytes, on bytes that hypothesis makes up: files, and the memory of other processes.

Garbage gives the error that the reader promises, or a result that fits the reader's types; never another
exception, a hang, or more memory than the reader's bounds allow. Intact files are read as they were written.
"""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from calm.commands.heap import formats, html, summary
from calm.commands.heap.difference import difference
from calm.core import counters, documents, elf, heap_live, pprof, protobuf
from calm.core.control import EndedError
from calm.core.counters import NotATableError, Table
from calm.core.errors import USAGE, CalmError
from calm.core.heap_profile import TYPES, HeapProfile, merged, numbered
from calm.core.profile_model import Frame

# The same examples each time, and no verdict by the clock.
properties = settings(
    derandomize=True,
    deadline=None,
    max_examples=80,
    database=None,
    suppress_health_check=list(HealthCheck),
)
few = settings(properties, max_examples=40)

WORDS = st.one_of(
    st.integers(0, 64),
    st.sampled_from(
        [(1 << bits) + more for bits in (7, 8, 15, 16, 24, 31, 32, 40, 63, 64) for more in (-1, 0)]
    ),
    st.integers(0, (1 << 64) - 1),
).map(lambda number: number & (1 << 64) - 1)


def damages(size: int) -> st.SearchStrategy[list[tuple[int, bytes]]]:
    """Where some bytes of so many change, and to what."""
    word = st.tuples(WORDS, st.sampled_from([1, 2, 4, 8])).map(
        lambda pair: (pair[0] & (1 << 8 * pair[1]) - 1).to_bytes(pair[1], "little")
    )
    return st.lists(st.tuples(st.integers(0, max(0, size - 1)), word), min_size=1, max_size=6)


def damaged(whole: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    data = bytearray(whole)
    for at, new in changes:
        data[at : at + len(new)] = new[: len(data) - at]
    return bytes(data)


# --- ELF files


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small one, with symbols, notes and an interpreter."""
    folder = tmp_path_factory.mktemp("elf")
    source = "int counted(int x) { return x + 1; }\nvoid _start(void) { counted(1); for (;;) {} }\n"
    path = folder / "small"
    flags = ["-nostdlib", "-fPIE", "-pie", "-Wl,--build-id", "-Wl,-z,noseparate-code"]
    subprocess.run(["gcc", "-x", "c", "-", "-o", path, *flags], input=source, text=True, check=True)
    return path.read_bytes()


READERS: tuple[Callable[[Path], object], ...] = (
    elf.segments,
    elf.functions,
    elf.build_id,
    elf.interpreter,
    elf.is_loadable,
    elf.is_shared_library_here,
)


def read_all(path: Path) -> int:
    """The number of readers that had no error."""
    intact = 0
    for read in READERS:
        try:
            read(path)
            intact += 1
        except elf.ElfError as error:
            assert str(path) in str(error)  # noqa: PT017
    return intact


@few
@given(data=st.data())
def test_elf_files_that_are_damaged(
    library: bytes, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """At the headers, of which most is read, or anywhere."""
    path = tmp_path_factory.getbasetemp() / "damaged"
    size = data.draw(st.sampled_from([64, 64 + 56 * 12, len(library)]))
    cut = data.draw(st.one_of(st.just(len(library)), st.integers(4, len(library))))
    path.write_bytes(damaged(library, data.draw(damages(size)))[:cut])
    read_all(path)


def test_an_intact_file_has_no_error(library: bytes, tmp_path: Path) -> None:
    path = tmp_path / "intact"
    path.write_bytes(library)
    assert read_all(path) == len(READERS)
    assert elf.functions(path).at(0) is None


@few
@given(data=st.binary(max_size=400))
def test_elf_files_that_are_none(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "none"
    path.write_bytes(elf.MAGIC + data)
    read_all(path)


def test_no_path_of_an_elf_file_is_a_surprise() -> None:
    """As a foreign profile may name one."""
    for path in ("", "a\0b", "/" + "x" * 5000, "\udcff"):
        with pytest.raises(elf.ElfError):
            elf.segments(path)
        assert not elf.is_elf(path)


# --- protobuf


FIELDS = st.lists(
    st.tuples(st.integers(1, 1 << 28), st.one_of(WORDS.filter(bool), st.binary(max_size=30))), max_size=12
)


@properties
@given(FIELDS)
def test_protobuf_reads_what_it_wrote(written: list[tuple[int, int | bytes]]) -> None:
    data = b"".join(protobuf.field(tag, value) for tag, value in written)
    assert list(protobuf.fields(data)) == written


@properties
@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_protobuf_packs_numbers(written: list[int]) -> None:
    (read,) = protobuf.fields(protobuf.field(3, written))
    assert [protobuf.signed(number) for number in protobuf.numbers(read[1])] == written


@properties
@given(st.binary(max_size=200))
def test_protobuf_of_garbage(data: bytes) -> None:
    try:
        for _, value in protobuf.fields(data):
            assert isinstance(value, int) or len(value) <= len(data)
            protobuf.numbers(value)
    except protobuf.FormatError as error:
        assert str(error)  # noqa: PT017


# --- pprof's profiles


TEXT = st.text(max_size=12)
FRAMES = st.builds(
    Frame,
    TEXT.filter(bool),
    TEXT,
    source=st.one_of(
        st.none(), st.tuples(TEXT, st.integers(0, 1 << 31)).map(lambda line: f"{line[0]}:{line[1]}")
    ),
)
VALUES = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=len(TYPES), max_size=len(TYPES))
PROFILES = st.dictionaries(st.lists(FRAMES, max_size=4).map(tuple), VALUES, max_size=6)


def document(stacks: dict[tuple[Frame, ...], list[int]]) -> HeapProfile:
    frames, found = numbered(merged(stacks.items()))
    return HeapProfile(command=[], types=list(TYPES), frames=frames, stacks=found)


def use(profile: HeapProfile) -> None:
    """In each form that `calm heap` writes."""
    text = msgspec.json.encode(profile)
    assert msgspec.json.decode(text, type=HeapProfile) == profile
    pprof.encode(profile)
    try:
        formats.folded(profile, None)
    except CalmError as error:
        assert error.exit_code == USAGE  # noqa: PT017
        return
    formats.speedscope(profile, None)
    html.page(profile, None)
    summary.show(Console(file=StringIO(), width=100), profile, None, 10)
    assert not any(any(each.values) for each in difference(profile, profile).stacks)


def read_or_refuse(path: Path) -> HeapProfile | None:
    try:
        profile = pprof.read(str(path))
    except CalmError as error:
        assert error.exit_code == USAGE  # noqa: PT017
        assert str(path) in str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
        return None
    use(profile)
    return profile


@few
@given(PROFILES)
def test_profiles_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, stacks: dict[tuple[Frame, ...], list[int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "whole.pb.gz"
    written = document(stacks)
    path.write_bytes(pprof.encode(written))
    read = pprof.read(str(path))
    assert read.types == written.types
    assert sorted(each.values for each in read.stacks) == sorted(each.values for each in written.stacks)
    names = [
        [[read.frames[at].function for at in each.frames] for each in read.stacks] for read in (read, written)
    ]
    assert sorted(names[0]) == sorted(names[1])


EXAMPLE = document(
    {
        (Frame("main", "program", source="main.c:3"), Frame("parse", "program")): [1, 2, 3, 4, 5, 6, 7, 8],
        (Frame("main", "program"), Frame("store", "lib.so", source="a.cc:9")): [
            10,
            20,
            30,
            40,
            50,
            60,
            70,
            80,
        ],
    }
)
WHOLE = gzip.decompress(pprof.encode(EXAMPLE))


@properties
@given(damages(len(WHOLE)), st.integers(0, len(WHOLE)))
def test_profiles_that_are_damaged(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]], end: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pb"
    path.write_bytes(damaged(WHOLE, changes))
    read_or_refuse(path)
    path.write_bytes(WHOLE[:end])
    read_or_refuse(path)


# Numbers of the messages of profile.proto, with fields of the kinds that each may have, or others.
MESSAGE = st.lists(
    st.tuples(st.integers(1, 8), st.one_of(st.integers(0, 5), WORDS, st.binary(max_size=8))), max_size=6
).map(lambda found: b"".join(protobuf.field(tag, value) for tag, value in found))


@properties
@given(
    st.lists(st.tuples(st.integers(1, 15), st.one_of(MESSAGE, st.integers(0, 5), WORDS)), max_size=12),
    st.lists(st.binary(max_size=8), max_size=5),
)
@example([(1, protobuf.field(1, 1)), (2, protobuf.field(1, 7) + protobuf.field(2, 1))], [b"", b"a\0b"])
def test_profiles_of_any_messages(
    tmp_path_factory: pytest.TempPathFactory, messages: list[tuple[int, bytes | int]], texts: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pb"
    parts = [protobuf.field(tag, value) for tag, value in messages]
    parts += [protobuf.field(6, text) for text in [b"", *texts]]
    path.write_bytes(b"".join(parts))
    read_or_refuse(path)


def test_small_files_of_large_profiles(tmp_path: Path) -> None:
    """A location of many inlined functions, named often: the product would not fit into memory."""
    line = protobuf.field(4, protobuf.field(1, 1))
    sample = protobuf.field(1, [1] * 20_000) + protobuf.field(2, [1])
    parts = [protobuf.field(1, protobuf.field(1, 1)), protobuf.field(2, sample)]
    parts += [protobuf.field(4, protobuf.field(1, 1) + line * 2000), protobuf.field(13, [1] * 100_000)]
    parts += [protobuf.field(6, b""), protobuf.field(6, b"x" * 1000)]
    path = tmp_path / "large.pb"
    path.write_bytes(b"".join(parts))
    with pytest.raises(CalmError, match="has stacks of more than 16777216 functions in all") as error:
        pprof.read(str(path))
    assert error.value.exit_code == USAGE
    path.write_bytes(b"".join(part for part in parts if part is not parts[1]))
    assert pprof.read(str(path)).notes == ["x" * 1000]


@few
@given(st.binary(max_size=100), st.booleans())
def test_files_that_are_no_profiles(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, compressed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "none.pb.gz"
    path.write_bytes(gzip.compress(data) if compressed else b"\x1f\x8b" + data)
    read_or_refuse(path)


# --- the memory of other processes


class Memory:
    """Ranges of bytes at addresses; everything else cannot be read. Counts what was read."""

    def __init__(self, ranges: dict[int, bytes]) -> None:
        self._ranges = ranges
        self.read_bytes = 0

    def __call__(self, address: int, size: int) -> bytes | None:
        assert size >= 0
        self.read_bytes += size
        # Enough of any memory is zero.
        assert self.read_bytes < 1 << 30, "a reader that ends has read less"
        for start, data in self._ranges.items():
            if start <= address < start + len(data) and address + size <= start + len(data):
                return data[address - start : address - start + size]
        return bytes(size) if 1 << 40 <= address < 1 << 41 and size <= 1 << 27 else None


ZEROS = 1 << 40
TABLE, TERMS, VALUE, IMAGE, LAYOUT, SAMPLES, STACKS, ADDRESSES = (0x10000 * number for number in range(1, 9))


def table(terms: int, samples: int = 0) -> bytes:
    head = struct.pack(
        "<8sIHHQQ24s16sQQQ",
        b"calmstat",
        counters.VERSION,
        112,
        104,
        TERMS,
        terms,
        b"calmalloc",
        b"0.1.0",
        0,
        samples,
        0,
    )
    return head + struct.pack("<Q", 0)


def term(name: bytes, at: int, **more: int) -> bytes:
    numbers = [more.get(key, 0) for key in ("rows", "present", "weights")]
    rest = [more.get(key, 0) for key in ("pointers", "pointer_stride", "offset", "row_stride", "stride")]
    rest += [more.get(key, 0) for key in ("weight_stride", "present_offset", "present_stride", "base_offset")]
    tail = more.get("words", 1), more.get("width", 8), more.get("unit", 0), 0
    return struct.pack("<24s4Q9IHBBI4x", name, at, *numbers, *rest, *tail)


GOOD_TERMS = (
    term(b"plain", VALUE)
    + term(b"pages", VALUE, unit=1, width=4)
    + term(b"rows", VALUE, rows=VALUE + 8, present=VALUE + 16, present_stride=8, row_stride=16)
    + term(b"weighted", VALUE, weights=VALUE + 64, weight_stride=4, words=4, stride=8)
    + term(b"pointers", VALUE + 16, pointers=2, pointer_stride=8, base_offset=32)
)
GOOD_VALUES = struct.pack("<QIIQQ", 42, 3, 0, VALUE, VALUE + 128) + bytes(range(200))


def read_counters(memory: Memory) -> dict[str, int]:
    """The values, of which each is a number that is not negative."""
    try:
        found = Table.read(memory, TABLE)
    except NotATableError as error:
        assert str(error)  # noqa: PT017
        assert str(error).isprintable()  # noqa: PT017
        return {}
    assert found.library.isprintable()
    values = found.values(memory)
    assert all(value >= 0 for value in values.values())
    for name in values:
        found.by_weight(memory, name)
    return values


def test_an_intact_table_is_read() -> None:
    whole = Memory({TABLE: table(5), TERMS: GOOD_TERMS, VALUE: GOOD_VALUES})
    values = read_counters(whole)
    assert values["plain"] == 42
    assert set(values) == {"plain", "pages", "rows", "weighted", "pointers"}


@properties
@given(st.data())
def test_tables_that_are_damaged(data: Any) -> None:
    parts = {TABLE: table(5), TERMS: GOOD_TERMS, VALUE: GOOD_VALUES}
    which = data.draw(st.sampled_from(list(parts)))
    read_counters(Memory(parts | {which: damaged(parts[which], data.draw(damages(len(parts[which]))))}))


TERMS_OF_ANYTHING = st.builds(
    lambda name, at, more: term(name, at, **more),
    st.sampled_from([b"one", b"two", b"", b"Bad"]),
    st.sampled_from([VALUE, ZEROS, 0, (1 << 64) - 1]),
    st.dictionaries(
        st.sampled_from(
            [
                *("rows", "present", "weights", "pointers", "pointer_stride", "offset", "row_stride"),
                *("stride", "weight_stride", "present_offset", "present_stride", "base_offset"),
            ]
        ),
        st.one_of(st.integers(0, 1 << 14), st.sampled_from([VALUE, 1 << 20, (1 << 32) - 1])),
        max_size=5,
    ),
)


@properties
@given(st.lists(TERMS_OF_ANYTHING, max_size=5), st.integers(0, 1 << 14))
def test_tables_of_any_terms(terms: list[bytes], rows: int) -> None:
    """That ask for as much as they like: the reader has bounds."""
    values = struct.pack("<I", rows) + GOOD_VALUES
    memory = Memory({TABLE: table(len(terms)), TERMS: b"".join(terms), VALUE: values})
    read_counters(memory)


ELF_HEAD = struct.pack("<6s26xQ14xHH6x", b"\x7fELF\x02\x01", 64, 56, 2)
NOTE = struct.pack("<III12sq", 10, 8, 1, b"calmalloc", TABLE - (IMAGE + 400 + 24))
GOOD_IMAGE = (
    (ELF_HEAD + struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 4096, 4096, 4096)).ljust(120, b"\0")
    + struct.pack("<IIQQQQQQ", 4, 4, 400, 400, 400, len(NOTE), len(NOTE), 4)
).ljust(400, b"\0") + NOTE


def test_an_intact_image_is_read() -> None:
    assert counters.table_addresses(Memory({IMAGE: GOOD_IMAGE}), IMAGE) == [TABLE]


@properties
@given(damages(len(GOOD_IMAGE)))
def test_images_that_are_damaged(changes: list[tuple[int, bytes]]) -> None:
    found = counters.table_addresses(Memory({IMAGE: damaged(GOOD_IMAGE, changes)}), IMAGE)
    assert found is None or all(0 <= address < 1 << 64 for address in found)


# --- the heap profile of another process

OFFSETS = {
    "count_unit": 1024,
    "max_depth": 64,
    "max_stacks": 8192,
    "stacks": 0,
    "addresses": 8,
    "stacks_end": 16,
    "addresses_end": 20,
    "dropped": 24,
    "peak_bytes": 32,
    "peak_ns": 40,
    "peak_epoch": 48,
    "stack_bytes": 96,
    "sequence": 0,
    "first": 4,
    "depth": 8,
    "allocated": 16,
    "in_use": 32,
    "at_peak": 48,
    "epoch": 64,
    "lifetimes": 72,
    "births": 80,
}


def layout(offsets: dict[str, int]) -> bytes:
    head = struct.pack("<8sIIQQQ", b"calmheap", heap_live.VERSION, 128, SAMPLES, SAMPLES + 56, SAMPLES + 64)
    return head + struct.pack("<21I", *offsets.values()) + bytes(4)


def sampled(number: int) -> bytes:
    """A stack of two functions."""
    weights = struct.pack("<6Q", 2048, 200, 1024, 100, 1024, 100)
    return (struct.pack("<IIII", 0, 2 * number, 2, 0) + weights + struct.pack("<Qdd", 1, 5e9, 1e6)).ljust(
        96, b"\0"
    )


GOOD_SAMPLES = struct.pack("<QQIIQQQQQQ", STACKS, ADDRESSES, 4, 8, 1, 100, 5, 1, 4096, 4096)
GOOD_STACKS = bytes(96) + b"".join(sampled(number) for number in range(1, 4))
GOOD_ADDRESSES = struct.pack("<8Q", *(0x400000 + 16 * number for number in range(8)))
LIVE = {LAYOUT: layout(OFFSETS), SAMPLES: GOOD_SAMPLES, STACKS: GOOD_STACKS, ADDRESSES: GOOD_ADDRESSES}


def read_samples(memory: Memory) -> heap_live.Snapshot | None:
    try:
        found = heap_live._Reader(memory, heap_live._layout(memory, LAYOUT)).snapshot(10**12)
    except (heap_live.NoSamplesError, EndedError) as error:
        assert str(error)  # noqa: PT017
        return None
    assert found.peak_age_s >= 0
    for values in found.stacks.values():
        assert len(values) == len(TYPES)
    use(heap_live.profile(1, found))
    return found


def test_intact_samples_are_read() -> None:
    found = read_samples(Memory(LIVE))
    assert found is not None
    assert found.mean_bytes == 4096
    assert [values[:4] for values in found.stacks.values()] == [[2, 200, 1, 100]] * 3


@few
@given(st.data())
def test_samples_that_are_damaged(data: Any) -> None:
    which = data.draw(st.sampled_from(list(LIVE)))
    read_samples(Memory(LIVE | {which: damaged(LIVE[which], data.draw(damages(len(LIVE[which]))))}))


@properties
@given(
    st.dictionaries(
        st.sampled_from(list(OFFSETS)),
        st.one_of(st.integers(0, 128), st.sampled_from([4096, 65536, 1 << 20, (1 << 32) - 1])),
        min_size=1,
        max_size=4,
    )
)
@example({"allocated": 88})
@example({"in_use": 88})
def test_layouts_of_anything(changes: dict[str, int]) -> None:
    read_samples(Memory(LIVE | {LAYOUT: layout(OFFSETS | changes)}))


# --- the documents of `calm heap`


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)


@properties
@given(
    st.dictionaries(
        st.sampled_from([*json.loads(msgspec.json.encode(EXAMPLE)), "more"]), JSON_VALUES, max_size=4
    )
)
def test_documents_that_are_damaged(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "document.json"
    path.write_text(json.dumps(json.loads(msgspec.json.encode(EXAMPLE)) | changes))
    try:
        use(documents.read(str(path), HeapProfile))
    except CalmError as error:
        assert error.exit_code == USAGE  # noqa: PT017
        assert str(path) in str(error)  # noqa: PT017
