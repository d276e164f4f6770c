"""The JSON documents that calm writes and reads.

Each is a `msgspec.Struct` below `Document`. Its tag is the name of its schema; its `version` grows when a
reader of the one before would misread it; its fields are checked by their annotations when a file is read.
The reference of them on the site is generated from these classes.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from calm import __version__
from calm.core.errors import USAGE, CalmError


class Document(msgspec.Struct, kw_only=True, tag_field="schema"):
    """What every document has."""

    version: int = 1
    calm: str = __version__
    """The version of calm that wrote it."""
    date: str = msgspec.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """In UTC, to the second."""


_Kind = TypeVar("_Kind", bound=Document)


def schema(kind: type[Document]) -> str:
    return str(kind.__struct_config__.tag)


def _version(kind: type[Document]) -> int:
    return next(int(each.default) for each in msgspec.structs.fields(kind) if each.name == "version")


def _printable(value: Any) -> Any:  # noqa: ANN401
    """The same without the bytes of a command line that are not UTF-8, which JSON cannot hold."""
    if isinstance(value, str):
        return value.encode(errors="surrogateescape").decode(errors="replace")
    if isinstance(value, dict):
        return {key: _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list) else value


def _encoded(document: Document) -> bytes:
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return msgspec.json.encode(_printable(msgspec.to_builtins(document)))


def text(document: Document, indent: int = 2) -> str:
    return msgspec.json.format(_encoded(document), indent=indent).decode() + "\n"


def line(document: Document) -> str:
    """The document's JSON on one line, for streams of documents."""
    return _encoded(document).decode() + "\n"


def load(path: str) -> Any:  # noqa: ANN401
    """The JSON in a file. Raises CalmError with USAGE if there is none."""
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise CalmError(f"cannot read {path}: {error.strerror}", USAGE) from error
    except (ValueError, RecursionError) as error:
        raise CalmError(f"{path} is not JSON, or was cut short", USAGE) from error


def read(path: str, *kinds: type[_Kind]) -> _Kind:
    """The document in a file, if it is one of these kinds. Raises CalmError with USAGE if it is not."""
    return convert(path, load(path), *kinds)


def convert(path: str, found: object, *kinds: type[_Kind]) -> _Kind:
    """The same of a file that `load` has read."""
    name = found.get("schema") if isinstance(found, dict) else None
    kind = next((kind for kind in kinds if schema(kind) == name), None)
    if kind is None or not isinstance(found, dict):
        wanted = " or ".join(schema(kind) for kind in kinds)
        what = f"of the schema {name}" if isinstance(name, str) else "no document of calm"
        raise CalmError(f"{path} is {what}, and {wanted} is needed", USAGE)
    if found.get("version") != _version(kind):
        raise CalmError(
            f"{path} has version {found.get('version')} of {name}; this calm reads {_version(kind)}", USAGE
        )
    try:
        return msgspec.convert(found, kind)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise CalmError(f"{path} is not a whole {name}: {error}", USAGE) from error
