"""Programs whose trouble is known, and the verdicts on them that are right.

What is right follows from what a program did and from its resident memory, not from the readers. As a program
of its own, `python tests/calm/explain_helpers.py` prints the verdict on each program under each allocator.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from calm.commands.explain import command, rules
from calm.commands.explain.picture import Picture
from calm.core import allocators
from calm.core.errors import CalmError

TROUBLES = ("leak", "retention", "fragmentation", "caches", "mappings", "forked")
ALLOCATORS = ("calmalloc", "glibc", "jemalloc", "mimalloc", "ptlbmalloc2")
MIB = 1 << 20
FREED_BY_THREADS = 128 * 7 * sum(range(24, 24 + 64 * 16, 16))


def build(folder: Path, *options: str) -> Path:
    program = folder / "troubled"
    source = Path(__file__).with_name("troubled.c")
    builtin = ("-fno-builtin-malloc", "-fno-builtin-free")
    subprocess.run(["cc", "-O1", *builtin, "-pthread", *options, "-o", program, source], check=True)
    return program


@dataclass
class Running:
    """A troubled program that waits."""

    process: subprocess.Popen[str]
    pid: int = 0
    live: int = 0

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        word, pid, live = self.process.stdout.readline().split()
        assert word == "ready"
        self.pid, self.live = int(pid), int(live)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.wait_until_ready()

    def sample(self) -> Picture:
        """Of the stopped process: nothing changes between the reads, and no reader may wait for it."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            return command.take(self.pid)
        finally:
            os.kill(self.pid, signal.SIGCONT)


@contextmanager
def running(program: Path, trouble: str, allocator: str = "glibc") -> Iterator[Running]:
    variables = allocators.parse(allocator).variables(os.environ)
    process = subprocess.Popen(
        [program, trouble],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = Running(process)
    try:
        found.wait_until_ready()
        yield found
    finally:
        if found.pid not in (0, process.pid):
            os.kill(found.pid, signal.SIGKILL)
        process.kill()
        process.communicate()


def right(trouble: str, allocator: str, found: Picture, live: int) -> set[str]:
    """The verdicts that are true."""
    rss = found.rss
    small = {"small"} if rss < 12 * MIB else set()
    if trouble == "retention":
        # An allocator that returned the memory has none to explain.
        # Of mimalloc 3.0 threads keep the pages whose blocks are all free.
        is_3_0 = allocator == "mimalloc" and found.heap is not None and found.heap.version.startswith("3.0.")
        kept = {"retained", "cached"} if is_3_0 else {"retained"}
        return kept if rss - live > 24 * MIB else small or kept | {"small"}
    if trouble == "fragmentation":
        return {"fragmentation"} if rss > 4 * live else {"in_use", "small"}
    if trouble == "caches":
        if found.huge > rss / 2 and rss > 3 * FREED_BY_THREADS:
            # The program touched less than a third of this.
            return {"huge_pages"}
        # glibc's caches of threads hold 7 blocks of each size, which is what was freed.
        if allocator in ("glibc", "ptlbmalloc2"):
            return {"cached"}
        return {"cached", "retained"} if rss > 24 * MIB else small or {"cached", "retained", "small"}
    return {
        "leak": {"leak_suspected"},
        "mappings": {"other_mappings"},
        "forked": {"shared"},
    }[trouble]


def verdict(program: Path, trouble: str, allocator: str) -> tuple[str, set[str], Picture]:
    with running(program, trouble, allocator) as found:
        samples = [found.sample()]
        if trouble == "leak":
            found.go_on()
            samples.append(found.sample())
    last = samples[-1]
    return rules.explain(samples).verdict, right(trouble, allocator, last, found.live), last


def huge_pages_on_request() -> bool:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.exists() and "[never]" not in path.read_text()


def available(allocator: str) -> bool:
    try:
        return bool(allocators.parse(allocator))
    except CalmError:
        return False


def main() -> None:
    """Prints the matrix, and how many verdicts are right under the first four."""
    score: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for trouble in TROUBLES:
            for allocator in filter(available, ALLOCATORS):
                said, true, found = verdict(program, trouble, allocator)
                score[allocator] = score.get(allocator, 0) + (said in true)
                mark = "right" if said in true else f"wrong: {' or '.join(sorted(true))}"
                print(f"{trouble:14} {allocator:12} {found.rss / MIB:6.1f} MiB  {said:16} {mark}")
    of_four = [score[each] for each in score if each != "ptlbmalloc2"]
    print(f"{sum(of_four)} of {len(TROUBLES) * len(of_four)} right; each allocator: {score}")


if __name__ == "__main__":
    main()
