"""The paper's program under memory pressure: pbzip2 reads a file into more memory than it may use.

Its limit is three eighths of the file, and the rest is swapped out: the kernel unmaps pages that were not
used for long, of a program with a thread on each CPU.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

from research.lab.payload import Payload

from . import abis_packages
from .abis_guest import DISK, LIMITED, words

PACKAGES = (*abis_packages.PBZIP2, *abis_packages.E2FSPROGS)
INPUT_MIB = 48
LIMIT_MIB = INPUT_MIB * 3 // 8
# In hundreds of kB, as in the paper.
_BLOCK = 5
_MIB = 1 << 20
_SEED = 44
_FILE = f"{DISK}/made-text"
_HEADER = 512  # of a file in a tar archive; what files hold is padded to as much


def script(threads: int) -> str:
    """A script that compresses the file with this many threads."""
    program = abis_packages.program("pbzip2", "pbzip2")
    command = words(program, "-c", "-k", "-r", f"-b{_BLOCK}", "-1", f"-p{threads}", _FILE)
    return f"""
make_disk {2 * INPUT_MIB}
cp {words(_input())} {_FILE}
sync
echo 3 >/proc/sys/vm/drop_caches
make_swap 512
make_limit {LIMIT_MIB}
count {LIMITED} sh -c {words(f"exec {command} >/dev/null")}
"""


def add(files: Payload) -> None:
    """The files that the script needs."""
    files.program(abis_packages.program("pbzip2", "pbzip2"))
    files.add(_made(_input()))


def _input() -> Path:
    return abis_packages.CACHE / f"made-text-{INPUT_MIB}-MiB"


def _made(path: Path) -> Path:
    if not path.exists():
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        with partial.open("wb") as file:
            for piece in pieces(INPUT_MIB * _MIB):
                file.write(piece)
        partial.rename(path)
    return path


def pieces(size: int) -> Iterator[bytes]:
    """Reproducible data, similar to an archive of a program's sources."""
    drawn = random.Random(_SEED)
    names = [
        "".join(drawn.choices("abcdefghijklmnopqrstuvwxyz_", k=drawn.randint(2, 12))) for _ in range(4000)
    ]
    frequent = [1 / place for place in range(1, len(names) + 1)]
    signs = [" ", "(", ")", " = ", ";\n", ";\n\t", " + ", "->", ", ", "\n\n"]
    number = 0
    while size > 0:
        count = drawn.randint(50, 5000)
        text = "".join(
            word + sign
            for word, sign in zip(
                drawn.choices(names, frequent, k=count), drawn.choices(signs, k=count), strict=True
            )
        )
        content = text.encode()
        header = f"sources/{number:06}.c".ljust(100, "\0") + f"0000644{len(content):>12o}ustar"
        piece = header.encode().ljust(_HEADER, b"\0") + content + bytes(-len(content) % _HEADER)
        yield piece[:size]
        size -= len(piece)
        number += 1
