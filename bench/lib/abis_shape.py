"""Whether what was read as JSON has what is asked of it."""

from __future__ import annotations

from collections.abc import Iterable
from types import UnionType


def complaint(value: object, shape: object, name: str) -> str | None:
    """The first thing that is wrong with a value; None if it is as its shape says.

    That is a type; a list of one shape, which all have; or shapes by key, and by ... that of all the others.
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
