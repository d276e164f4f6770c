"""Reads and writes the wire format of Protocol Buffers, as far as pprof's files need it.

Numbers of 64 bits and bytes alone: the schema, and what of it matters, is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_NUMBER, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_MASK = (1 << 64) - 1


class FormatError(Exception):
    """The bytes are not a message."""


def _number_at(data: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            raise FormatError("it ends within a number")
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value & _MASK, at
    raise FormatError("a number in it is longer than 64 bits")


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: the number and the value of each. Raises FormatError."""
    at = 0
    while at < len(data):
        tag, at = _number_at(data, at)
        kind = tag & 7
        if kind == _NUMBER:
            value, at = _number_at(data, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, at = _number_at(data, at)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise FormatError("a field in it is of no known kind")
        if at + size > len(data):
            raise FormatError("it ends within a field")
        if kind == _BYTES:
            yield tag >> 3, data[at : at + size]
        at += size


def signed(number: int) -> int:
    """A number as int64."""
    return number - (1 << 64) if number >> 63 else number


def numbers(value: int | bytes) -> list[int]:
    """A field of repeated numbers, which may be packed."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        number, at = _number_at(value, at)
        found.append(number)
    return found


def number(value: int) -> bytes:
    value &= _MASK
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def field(tag: int, value: int | bytes | Iterable[int]) -> bytes:
    """A field; numbers of an iterable are packed. A number that is 0 takes no room, as proto3 has it."""
    if isinstance(value, int):
        return number(tag << 3 | _NUMBER) + number(value) if value else b""
    data = value if isinstance(value, bytes) else b"".join(map(number, value))
    return number(tag << 3 | _BYTES) + number(len(data)) + data
