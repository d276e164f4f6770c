"""The order of loads and stores in the sequences on aarch64: what is allowed, and what is compiled."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build/aarch64/libcalmalloc.so.0"
TESTS = sorted(Path(__file__).parent.glob("*.litmus"))


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_what_the_memory_model_allows(path: Path) -> None:
    herd = shutil.which("herd7")
    if herd is None:
        pytest.skip("herd7 is not on PATH")
    found = output(herd, path)
    assert "\nOk\n" in found
    never = not path.stem.partition("-without-")[2]
    assert f"\nObservation {path.stem} {'Never' if never else 'Sometimes'} " in found


def sequences() -> list[list[str]]:
    """The instructions of each sequence in the library, whose descriptors are relocated."""
    prefix = "aarch64-linux-gnu-"
    if shutil.which(f"{prefix}objdump") is None:
        pytest.skip("there is no binutils for aarch64: it is in the Debian package gcc-aarch64-linux-gnu")
    sections = output(f"{prefix}readelf", "-SW", LIBRARY)
    at, offset, size = (
        int(text, 16) for text in re.search(r"__rseq_cs +PROGBITS +(\w+) (\w+) (\w+)", sections).groups()
    )
    addends = {
        int(place, 16): int(value, 16)
        for place, value in re.findall(
            r"^(\w+) .*R_AARCH64_RELATIV\w* +(\w+)", output(f"{prefix}readelf", "-rW", LIBRARY), re.MULTILINE
        )
    }
    content = LIBRARY.read_bytes()[offset : offset + size]
    found = []
    for begin in range(0, size, 32):
        start, length = addends[at + begin + 8], int.from_bytes(content[begin + 16 : begin + 24], "little")
        code = output(
            f"{prefix}objdump", "-d", f"--start-address={start}", f"--stop-address={start + length}", LIBRARY
        )
        found.append(re.findall(r"^ +\w+:\t\w+ +\t(.+?)(?:\t// .*)?$", code, re.MULTILINE))
    return found


def test_what_is_compiled() -> None:
    # Those of caches; the one that tests the kernel reads no number of a CPU.
    found = [code for code in sequences() if code[0].startswith("ldrsw")]
    pushes = [code for code in found if re.search(r"^(cmp\tx10, |subs\t)", "\n".join(code), re.MULTILINE)]
    assert len(pushes) > 1
    assert len(found) - len(pushes) > 1
    for code in found:
        first = next(number for number, text in enumerate(code) if text.startswith("ldr\t"))
        depends = r"ldr\t(x\d+), \[(x\d+), #\d+\]\neor\t(x\d+), \1, \1\nldr\t(x\d+), \[\2, \3\]"
        assert re.fullmatch(depends, "\n".join(code[first : first + 3]))
        assert code[-1].startswith("stlr\t" if code in pushes else "str\t")
