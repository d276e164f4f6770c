"""Which allocator a process has, by the files that it has mapped."""

import re
from collections.abc import Iterable

from calm.allocators import GLIBC, OWN

# TBB's own libtbbmalloc.so leaves malloc as it is; its proxy does not.
_PEERS = ("jemalloc", "mimalloc", "snmalloc", "rpmalloc", "tcmalloc", "scudo", "hoard", "tbbmalloc_proxy")
# libsnmallocshim.so, librpmallocwrap.so, libtcmalloc_minimal_debug.so.4: a name goes on as its builders like.
_LIBRARY = re.compile(rf"(?:^|/)lib({'|'.join((*OWN, *_PEERS))})([^/]*)\.so[^/]*$")
_GLIBC = re.compile(r"(?:^|/)libc(?:\.so\.6|-2\.\d+\.so)(?: \(deleted\))?$")
_MUSL = re.compile(r"(?:^|/)(?:ld-musl-|libc\.musl-)[^/]*$")


def allocator(files: Iterable[str]) -> str | None:
    """The one that comes first in the search for malloc: a library's before the C library's.

    Two libraries' are not told apart by their order: ours count first. None: no file says.
    """
    paths = list(files)
    found = [match for path in paths if (match := _LIBRARY.search(path))]
    if found:
        match = min(found, key=lambda match: match[1] not in OWN)
        if match[1] == "tcmalloc" and match[2].startswith("_"):
            return "gperftools"
        return match[1].removesuffix("_proxy")
    if any(_GLIBC.search(path) for path in paths):
        return GLIBC
    return "musl" if any(_MUSL.search(path) for path in paths) else None
