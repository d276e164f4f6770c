"""What the processor itself counts of a program's misses, by `perf stat`: where the machine lets it."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from calm.core import messages, program, report
from calm.core.allocators import Allocator
from calm.core.environment import clean_environment
from calm.core.errors import CalmError
from research.papers import sessions

# perf's names, by those of the figures.
EVENTS: Mapping[str, str] = {
    "cycles": "cycles",
    "instructions": "instructions",
    "llc_load_misses": "LLC-load-misses",
    "llc_store_misses": "LLC-store-misses",
    "dtlb_load_misses": "dTLB-load-misses",
    "dtlb_store_misses": "dTLB-store-misses",
}
_NEEDED = ("instructions", "llc_load_misses")


def read(text: str) -> dict[str, float | None]:
    """The lines of `perf stat -x,`: a count, or words that say why there is none, and the event third."""
    figures: dict[str, float | None] = dict.fromkeys(EVENTS)
    names = {event: name for name, event in EVENTS.items()}
    for line in text.splitlines():
        count, _, event, *_ = [*line.split(","), "", "", ""]
        # Where only user mode may be counted, perf says so behind the name.
        name = names.get(event.partition(":")[0])
        if name is not None:
            try:
                figures[name] = float(count)
            except ValueError:
                figures[name] = None
    return figures


def _perf(
    command: Sequence[str],
    folder: Path,
    limit_s: float,
    label: str = "",
    heard: dict[str, list[str]] | None = None,
) -> dict[str, float | None]:
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as errors:
        out = Path(place) / "counts"
        code = sessions.run_whole(
            ["perf", "stat", "-x,", "-o", str(out), "-e", ",".join(EVENTS.values()), "--", *command],
            folder=folder,
            environment=clean_environment(),
            errors=errors,
            limit_s=limit_s,
        )
        if code != 0:
            raise CalmError(f"exit code {code}{report.last_words(errors)}")
        if heard is not None:
            messages.listen(heard, label, errors)
        return read(out.read_text())


@functools.cache
def obstacle() -> str | None:
    if shutil.which("perf") is None:
        return "perf is not on this machine: install the package linux-perf"
    try:
        figures = _perf(["true"], Path(), 30)
    except (CalmError, OSError, subprocess.TimeoutExpired) as error:
        return f"perf stat: {error}"
    missing = [EVENTS[name] for name in _NEEDED if figures[name] is None]
    return f"this machine does not count {' or '.join(missing)}" if missing else None


def count(
    command: Sequence[str],
    folder: Path,
    allocator: Allocator,
    limit_s: float,
    heard: dict[str, list[str]] | None = None,
) -> dict[str, float | None]:
    """One run; perf itself does not run with the allocator. heard: gets what calmalloc says."""
    try:
        own = program.with_variables(command, allocator.variables({}))
        return _perf(own, folder, limit_s, allocator.label, heard)
    except subprocess.TimeoutExpired as error:
        raise CalmError(f"it did not end within {limit_s:g} s") from error
