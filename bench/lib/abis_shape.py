"""Checks values that were read as JSON against a shape."""

from __future__ import annotations

from collections.abc import Iterable
from types import UnionType


def complaint(value: object, shape: object, name: str) -> str | None:
    """The first mismatch between a value and its shape, or None.

    A shape is a type, a list with the shape of all elements, or a dictionary of shapes by key, with ... for
    all other keys.
    """
    inner: Iterable[str | None]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{name} is no list"
        inner = (complaint(each, shape[0], f"{name}[{at}]") for at, each in enumerate(value))
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{name} is no object"
        for key in shape:
            if key is not ... and key not in value:
                return f"{name} lacks {key}"
        inner = (
            complaint(each, shape.get(key, shape.get(..., object)), f"{name}.{key}")
            for key, each in value.items()
        )
    else:
        assert isinstance(shape, type | UnionType)
        return None if isinstance(value, shape) else f"{name} is {value!r}"
    return next((found for found in inner if found), None)
