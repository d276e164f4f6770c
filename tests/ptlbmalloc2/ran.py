"""What a case printed, and what the library said of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ran:
    figures: dict[str, int]
    stderr: str
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stats(self) -> dict[str, Any]:
        """Of the program itself, which ends after all its children."""
        assert self.lines, "the library wrote no statistics"
        return self.lines[-1]


Run = Callable[..., Ran]
