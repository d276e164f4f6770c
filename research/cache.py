"""Where commands keep what is costly to make."""

import os
from pathlib import Path


def user_cache() -> Path:
    """What this user may lose: made again when it is missing."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "")
    # A relative one is to be ignored, says the specification.
    return (home if home.is_absolute() else Path.home() / ".cache") / "calm"
