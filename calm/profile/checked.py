"""Dataclasses out of JSON, by their annotations: whatever is not as they say is named by its place."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_NAMES: Mapping[object, str] = {str: "text", bool: "true or false", int: "a whole number"}
_FORMS: dict[type, tuple[Mapping[str, object], Sequence[str]]] = {}
_Made = TypeVar("_Made")


class WrongError(ValueError):
    """Says what is wrong, and where."""


def build(wanted: type[_Made], value: object, place: str = "") -> _Made:
    """The dataclass that an object of JSON holds. Raises WrongError."""
    if not isinstance(value, dict):
        raise _wrong(place, "an object")
    hints, needed = _form(wanted)
    for name in value:
        if name not in hints:
            raise WrongError(f"{_inside(place, name)} is not known")
    for name in needed:
        if name not in value:
            raise WrongError(f"{_inside(place, name)} is missing")
    return wanted(**{name: _value(hints[name], each, _inside(place, name)) for name, each in value.items()})


def _value(wanted: object, value: object, place: str) -> object:
    origin, of = get_origin(wanted), get_args(wanted)
    if origin is UnionType:
        return None if value is None and NoneType in of else _value(of[0], value, place)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise _wrong(place, "a list")
        items = [_value(of[0], each, f"{place}[{index}]") for index, each in enumerate(value)]
        return items if origin is list else tuple(items)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise _wrong(place, "an object")
        return {key: _value(of[1], each, f"{place}[{key!r}]") for key, each in value.items()}
    if wanted is Any:
        return value
    if wanted is float:
        return _number(value, place)
    if wanted in _NAMES:
        if type(value) is not wanted:
            raise _wrong(place, _NAMES[wanted])
        return value
    assert isinstance(wanted, type)
    return build(wanted, value, place)


def _number(value: object, place: str) -> int | float:
    # JSON has one kind of number; to Python alone, true is one too.
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(place, "a number")
    if abs(value) >= 1e300 or not math.isfinite(value):
        raise _wrong(place, "a number of sensible size")
    return value


def _form(wanted: Any) -> tuple[Mapping[str, object], Sequence[str]]:  # noqa: ANN401 - it is a dataclass
    """Its annotations, and the fields without a default."""
    if wanted not in _FORMS:
        needed = [each.name for each in fields(wanted) if each.default is each.default_factory is MISSING]
        _FORMS[wanted] = get_type_hints(wanted), needed
    return _FORMS[wanted]


def _inside(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _wrong(place: str, wanted: str) -> WrongError:
    return WrongError(f"{place} is not {wanted}")
