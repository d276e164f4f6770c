"""The picture of the suite: time against memory."""

from __future__ import annotations

from pathlib import Path

from calm.bench.analysis import Analysis


def draw(path: Path, analysis: Analysis) -> None:
    """Writes the picture; its ending tells the format."""
