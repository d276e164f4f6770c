"""The cost of malloc and free in instructions, as callgrind counts them: exact, on a busy machine too."""

import re
import shutil
import subprocess
from pathlib import Path

FEW, MANY = 10_000, 20_000


def instructions_of_pair(
    pairs: Path, size: int, environment: dict[str, str], folder: Path, *, beside: bool = False
) -> float:
    """The instructions of malloc(size) and free, and of the loop around them.

    The program `pairs` calls the two a given number of times, beside a second thread if that is wanted.
    """
    valgrind = shutil.which("valgrind")
    assert valgrind is not None, "valgrind is not installed: it is in the Debian package valgrind"
    counts = []
    for number in (FEW, MANY):
        command = [valgrind, "--tool=callgrind", f"--callgrind-out-file={folder / 'callgrind.out'}"]
        command += [str(pairs), str(number), str(size), *(["beside"] if beside else [])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = re.search(r"Collected : (\d+)", done.stderr)
        assert found is not None, done.stderr
        counts.append(int(found[1]))
    return (counts[1] - counts[0]) / (MANY - FEW)
