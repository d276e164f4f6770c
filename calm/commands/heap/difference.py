"""The difference of two heap profiles."""

from __future__ import annotations

from calm.core.errors import USAGE, CalmError
from calm.core.heap_profile import HeapProfile, merged, numbered, stacks_by_frames


def difference(profile: HeapProfile, base: HeapProfile) -> HeapProfile:
    """A profile less another, by functions and lines, of the types that both have. Raises CalmError."""
    types = [each for each in profile.types if each in base.types]
    if not types:
        raise CalmError(f"{profile.source} and {base.source} have no type of values in common", USAGE)
    ours = [profile.types.index(each) for each in types]
    theirs = [base.types.index(each) for each in types]
    stacks = [
        *((frames, [values[at] for at in ours]) for frames, values in stacks_by_frames(profile).items()),
        *((frames, [-values[at] for at in theirs]) for frames, values in stacks_by_frames(base).items()),
    ]
    frames, found = numbered(merged(stacks))
    names = [each.name for each in types]
    return HeapProfile(
        command=profile.command,
        pid=profile.pid,
        source=profile.source,
        base=base.source,
        mean_bytes=profile.mean_bytes,
        default_type=profile.default_type if profile.default_type in names else names[-1],
        types=types,
        frames=frames,
        stacks=found,
        notes=list(dict.fromkeys([*profile.notes, *base.notes])),
    )
