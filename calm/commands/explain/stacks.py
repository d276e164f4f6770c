"""Which stacks of calls hold the memory, where calmalloc's heap profile is on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from calm.core import heap_live, pages, report
from calm.core.errors import CalmError
from calm.core.heap_live import Snapshot
from calm.core.heap_profile import INUSE_SPACE, HeapProfile

_SHOWN = 3


def snapshot(pid: int) -> Snapshot | None:
    """The samples of a process; None if it takes none."""
    try:
        with heap_live.attached(pid) as process:
            found = process.snapshot()
    except CalmError:
        return None
    return found if found.mean_bytes else None


def _held(profile: HeapProfile) -> dict[str, int]:
    """Bytes in use by the innermost functions of their stacks."""
    held: Counter[str] = Counter()
    sizes = profile.values(INUSE_SPACE) or ()
    for stack, size in zip(profile.stacks, sizes, strict=False):
        held[pages.summary(profile.frames, stack.frames) or "(no functions known)"] += size
    return held


def evidence(pid: int, snapshots: Sequence[Snapshot | None], grew: bool) -> list[str]:
    """The stacks that hold most, or whose memory grew most from the first snapshot to the last."""
    first, last = snapshots[0], snapshots[-1]
    if last is None or (grew and first is None):
        return []
    held = _held(heap_live.profile(pid, last))
    if grew and first is not None:
        before = _held(heap_live.profile(pid, first))
        held = {stack: size - before.get(stack, 0) for stack, size in held.items()}
    total = sum(size for size in held.values() if size > 0)
    largest = sorted(held.items(), key=lambda each: -each[1])[:_SHOWN]
    return [
        f"{report.memory(size / 1024)}{' more' if grew else ''}, by the heap profile: {stack}."
        for stack, size in largest
        if size > total / 10
    ]
