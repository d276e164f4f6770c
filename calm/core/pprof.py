"""Reads and writes pprof's profiles: profile.proto, compressed by gzip or not.

Functions that a file does not name are looked up in the programs and libraries that it was recorded of, if
their build ids are the same.
"""

from __future__ import annotations

import gzip
import re
import shutil
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from io import BytesIO
from itertools import takewhile
from pathlib import Path

from calm.core import places
from calm.core.errors import USAGE, CalmError
from calm.core.heap_profile import HeapProfile, SampleType, merged, numbered
from calm.core.places import Place
from calm.core.profile_model import Frame
from calm.core.protobuf import FormatError, fields, numbers, signed
from calm.core.protobuf import field as encoded

_GZIP = b"\x1f\x8b"
_TEXT = (b"heap profile:", b"heap_v2/", b"--- ")
# Unpacked: a damaged or hostile file may have much more.
_MAX_BYTES = 1 << 26
# Of all stacks: a location may stand for many inlined functions, and a small file may name it often.
_MAX_FRAMES = 1 << 24
# Names with `|` between them: anything may precede and follow each, and one part of it may be optional or one
# of several. Other regular expressions may take exponential time.
_LITERAL = r"(?:(?:[^\\()\[\]{}*+?|^$]|\\\W)(?![*+?{]))"
_CHOICE = rf"(?:\({_LITERAL}++(?:\|{_LITERAL}++)*+\)\??+|\w\?)"
_NAME = rf"(?:\.\*)?+{_LITERAL}*+{_CHOICE}?+{_LITERAL}*+(?:\.\*)?+"
_NAMES = re.compile(rf"{_NAME}(?:\|{_NAME})*+")
_MAX_NAMES_CHARACTERS = 1 << 16


@dataclass
class _Mapping:
    start: int = 0
    limit: int = 0
    offset: int = 0
    path: str = ""
    build_id: str = ""


@dataclass
class _Location:
    mapping: int = 0
    address: int = 0
    lines: list[tuple[int, int]] = field(default_factory=list)
    """Function and line, the innermost of inlined ones first."""


@dataclass
class _File:
    """The messages of a file, by their numbers; texts are indices into `strings`."""

    strings: list[str] = field(default_factory=list)
    types: list[tuple[int, int]] = field(default_factory=list)
    samples: list[tuple[list[int], list[int]]] = field(default_factory=list)
    mappings: dict[int, _Mapping] = field(default_factory=dict)
    locations: dict[int, _Location] = field(default_factory=dict)
    functions: dict[int, tuple[int, int]] = field(default_factory=dict)
    comments: list[int] = field(default_factory=list)
    period: int = 0
    default_type: int = 0
    drop_frames: int = 0

    def text(self, index: int) -> str:
        if index >= len(self.strings):
            raise FormatError("it names a text that it does not have")
        return self.strings[index]


def _message(value: int | bytes) -> dict[int, int | bytes]:
    if isinstance(value, int):
        raise FormatError("a number in it stands where a message does")
    return dict(fields(value))


def _int(message: dict[int, int | bytes], tag: int) -> int:
    value = message.get(tag, 0)
    if not isinstance(value, int):
        raise FormatError("a message in it stands where a number does")
    return value


def _sample(value: int | bytes) -> tuple[list[int], list[int]]:
    places: list[int] = []
    values: list[int] = []
    for tag, each in fields(value) if isinstance(value, bytes) else ():
        if tag == 1:
            places += numbers(each)
        elif tag == 2:
            values += map(signed, numbers(each))
    return places, values


def _location(value: int | bytes) -> tuple[int, _Location]:
    message = _message(value)
    found = _Location(_int(message, 2), _int(message, 3))
    assert isinstance(value, bytes)
    for tag, each in fields(value):
        if tag == 4:
            line = _message(each)
            found.lines.append((_int(line, 1), signed(_int(line, 2))))
    return _int(message, 1), found


def _parse(data: bytes) -> _File:
    found = _File()
    mappings: list[dict[int, int | bytes]] = []
    for tag, value in fields(data):
        if tag == 1:
            message = _message(value)
            found.types.append((_int(message, 1), _int(message, 2)))
        elif tag == 2:
            found.samples.append(_sample(value))
        elif tag == 3:
            mappings.append(_message(value))
        elif tag == 4:
            number, location = _location(value)
            found.locations[number] = location
        elif tag == 5:
            message = _message(value)
            found.functions[_int(message, 1)] = _int(message, 2), _int(message, 4)
        elif tag == 6:
            if isinstance(value, int):
                raise FormatError("a number in it stands where a text does")
            found.strings.append(value.decode(errors="replace"))
        elif tag == 13:
            found.comments += numbers(value)
        elif isinstance(value, int):
            if tag == 7:
                found.drop_frames = value
            elif tag == 12:
                found.period = value
            elif tag == 14:
                found.default_type = value
    for message in mappings:
        words = [_int(message, at) for at in range(7)]
        texts = found.text(words[5]), found.text(words[6])
        found.mappings[words[1]] = _Mapping(words[2], words[3], words[4], *texts)
    if not found.types or not found.strings:
        raise FormatError("it has no types of samples")
    return found


def _unpacked(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CalmError(f"cannot read {path}: {error.strerror}", USAGE) from error
    if data.startswith(_GZIP):
        try:
            with gzip.open(BytesIO(data)) as packed:
                data = packed.read(_MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise CalmError(f"{path} is compressed, and damaged or cut short", USAGE) from error
    if len(data) > _MAX_BYTES:
        raise CalmError(f"{path} has more than {_MAX_BYTES >> 20} MiB, unpacked", USAGE)
    return data


def _place(file: _File, location: _Location) -> Place:
    mapping = file.mappings.get(location.mapping)
    if mapping is None:
        return Place("", location.address)
    return Place(mapping.path, location.address - mapping.start + mapping.offset, mapping.build_id)


def _named(file: _File, location: _Location) -> tuple[Frame, ...]:
    """The functions that the file itself names, the outermost first."""
    mapping = file.mappings.get(location.mapping)
    module = mapping.path.rpartition("/")[2] if mapping else ""
    frames = []
    for index, (function, line) in enumerate(location.lines):
        name, source = (file.text(each) for each in file.functions.get(function, (0, 0)))
        where = f"{source.rpartition('/')[2]}:{line}" if source and line > 0 else None
        frames.append(Frame(name or "?", module, inlined=index < len(location.lines) - 1, source=where))
    return tuple(reversed(frames))


def _dropped(file: _File, functions: set[str]) -> set[str] | None:
    """The functions that stacks are to end before; None if the file names them in a way that is not read."""
    names = file.text(file.drop_frames)
    if not names:
        return set()
    if len(names) > _MAX_NAMES_CHARACTERS or not _NAMES.fullmatch(names):
        return None
    try:
        dropped = re.compile(names)
    except re.error:  # Python 3.11.2 takes a lone parenthesis for a name
        return None
    return {each for each in functions if dropped.fullmatch(each)}


def _profile(path: str, file: _File) -> HeapProfile:
    types = [SampleType(file.text(name), file.text(unit)) for name, unit in file.types]
    unnamed = {number: _place(file, each) for number, each in file.locations.items() if not each.lines}
    known, notes = places.frames(unnamed.values())
    frames = {
        number: known[unnamed[number]] if number in unnamed else _named(file, location)
        for number, location in file.locations.items()
    }
    dropped = _dropped(file, {frame.function for each in frames.values() for frame in each})
    if dropped is None:
        notes.append("functions that the file wants dropped are shown: its drop_frames is no list of names")
    stacks = []
    left = _MAX_FRAMES
    for numbers_of, values in file.samples:
        if len(values) != len(types) or any(number not in frames for number in numbers_of):
            raise FormatError("a sample in it is not whole")
        left -= sum(len(frames[number]) for number in numbers_of)
        if left < 0:
            raise CalmError(f"{path} has stacks of more than {_MAX_FRAMES} functions in all", USAGE)
        stack = tuple(frame for number in reversed(numbers_of) for frame in frames[number])
        if dropped:
            stack = tuple(takewhile(lambda frame: frame.function not in dropped, stack))
        stacks.append((stack, values))
    names = [each.name for each in types]
    default = file.text(file.default_type)
    all_frames, all_stacks = numbered(merged(stacks))
    return HeapProfile(
        command=[],
        source=path,
        mean_bytes=file.period,
        default_type=default if default in names else names[-1],
        types=types,
        frames=all_frames,
        stacks=all_stacks,
        notes=[*notes, *(file.text(each) for each in dict.fromkeys(file.comments))],
    )


class Unread:
    """A file whose functions are not named yet. Raises CalmError with USAGE if it is no profile."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file = _parse(_unpacked_profile(path))
            self._names = [self._file.text(name) for name, _ in self._file.types]
        except FormatError as error:
            raise _not_whole(path, error) from error

    def total(self, name: str) -> int:
        """The sum of the values of a type; 0 where it has none."""
        at = self._names.index(name) if name in self._names else None
        return 0 if at is None else sum(values[at] for _, values in self._file.samples if at < len(values))

    def named(self) -> HeapProfile:
        try:
            return _profile(self.path, self._file)
        except FormatError as error:
            raise _not_whole(self.path, error) from error


def _not_whole(path: str, error: FormatError) -> CalmError:
    return CalmError(f"{path} is not a whole profile of pprof: {error}", USAGE)


def _unpacked_profile(path: str) -> bytes:
    data = _unpacked(path)
    if data.startswith(_TEXT):
        raise CalmError(
            f"{path} is a heap profile in the text form of gperftools or jemalloc: "
            "`pprof -proto PROGRAM FILE` and `jeprof` convert such files",
            USAGE,
        )
    return data


def read(path: str) -> HeapProfile:
    """A profile from a file. Raises CalmError with USAGE if it is none."""
    return Unread(path).named()


class _Strings:
    def __init__(self) -> None:
        self.numbers = {"": 0}

    def __getitem__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def _program(profile: HeapProfile) -> str:
    """The name of the program's file: that which has main, or else that of the command."""
    of_main = (frame.module for frame in profile.frames if frame.function == "main")
    command = profile.command[0] if profile.command else ""
    return next(of_main, "") or (Path(shutil.which(command) or command).resolve().name if command else "")


def encode(profile: HeapProfile) -> bytes:
    """A file for pprof, compressed. Functions are named in it, so that it needs no programs."""
    strings = _Strings()
    parts = [
        encoded(1, encoded(1, strings[each.name]) + encoded(2, strings[each.unit])) for each in profile.types
    ]
    parts += [
        encoded(2, encoded(1, [index + 1 for index in reversed(each.frames)]) + encoded(2, each.values))
        for each in profile.stacks
    ]
    modules: dict[str, int] = defaultdict(lambda: len(modules) + 1)
    if program := _program(profile):
        _ = modules[program]  # pprof takes the first mapping for the program's
    functions: dict[tuple[str, str], int] = defaultdict(lambda: len(functions) + 1)
    for index, frame in enumerate(profile.frames):
        source, _, line = (frame.source or "").rpartition(":")
        function = functions[frame.function, source]
        where = encoded(1, function) + encoded(2, int(line) if line.isdecimal() else 0)
        parts.append(
            encoded(4, encoded(1, index + 1) + encoded(2, modules[frame.module]) + encoded(4, where))
        )
    for module, number in modules.items():
        # Bounds that differ, or pprof takes them for one; and that the functions are known.
        bounds = encoded(2, number << 32) + encoded(3, (number << 32) + (1 << 32))
        parts.append(
            encoded(
                3, encoded(1, number) + bounds + encoded(5, strings[module]) + encoded(7, 1) + encoded(8, 1)
            )
        )
    for (name, source), number in functions.items():
        texts = encoded(2, strings[name]) + encoded(3, strings[name]) + encoded(4, strings[source])
        parts.append(encoded(5, encoded(1, number) + texts))
    parts += [
        encoded(11, encoded(1, strings["space"]) + encoded(2, strings["bytes"])),
        encoded(12, profile.mean_bytes),
        encoded(13, [strings[note] for note in profile.notes]),
        encoded(14, strings[profile.default_type]),
    ]
    # Texts are encoded even if they are empty: the first one is.
    parts += [encoded(6, text.encode(errors="replace")) for text in strings.numbers]
    return gzip.compress(b"".join(parts), mtime=0)
