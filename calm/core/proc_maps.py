"""Which allocator a process has, by the files that it has mapped."""

import re
from collections.abc import Iterable

from calm.core.allocators import GLIBC, OWN

# TBB's own libtbbmalloc.so leaves malloc as it is; its proxy does not.
_PEERS = (
    *("jemalloc", "mimalloc", "snmalloc", "rpmalloc", "tcmalloc", "gperftools", "scudo", "hardened_malloc"),
    *("hoard", "tbbmalloc_proxy"),
)
# libsnmallocshim.so, librpmallocwrap.so, libtcmalloc_minimal_debug.so.4: a name goes on as its builders like.
_LIBRARY = re.compile(rf"(?:^|/)lib(?:clang_rt\.)?({'|'.join((*OWN, *_PEERS))})([^/]*)\.so[^/]*$")
_GLIBC = re.compile(r"(?:^|/)libc(?:\.so\.6|-2\.\d+\.so)(?: \(deleted\))?$")
_MUSL = re.compile(r"(?:^|/)(?:ld-musl-|libc\.musl-)[^/]*$")
# Words in the text of a program that one of them is linked into.
_LINKED = {
    "jemalloc": b"<jemalloc>",
    "mimalloc": b"MIMALLOC_",
    "tcmalloc": b"TCMALLOC_",
    "snmalloc": b"snmalloc",
    "rpmalloc": b"rpmalloc_",
}


def allocator(files: Iterable[str], executable: bytes = b"") -> str | None:
    """The one that comes first in the search for malloc: a library's before one that is linked into the
    program, if its text is given, and that before the C library's.

    Two libraries' are not told apart by their order: ours count first. None: no file says.
    """
    paths = list(files)
    found = [match for path in paths if (match := _LIBRARY.search(path))]
    if found:
        match = min(found, key=lambda match: match[1] not in OWN)
        if match[1] == "tcmalloc" and match[2].startswith("_"):
            return "gperftools"
        return match[1].removesuffix("_proxy")
    if linked := next((name for name, words in _LINKED.items() if words in executable), None):
        return linked
    if any(_GLIBC.search(path) for path in paths):
        return GLIBC
    return "musl" if any(_MUSL.search(path) for path in paths) else None
