"""Figure 2: pages of one array that find no room in a cache beside the others, though an even spread would.

By simulated policies (research.colors), and for the frames that this machine's kernel gives: an array
is mapped, touched from its start to its end, and read in /proc/self/pagemap, which needs root. A guest's
frames are not the host's, which may have other colors.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from calm.core.errors import CalmError
from calm.core.proc import PROC
from research.colors import simulation
from research.colors.caches import NEHALEM, PAGE_BYTES, Cache, Ints
from research.colors.pagemap import HIDDEN, pagemap
from research.colors.policies import HUGE_PAGES

POLICIES = ("buddy", "random", "huge", "modulo", "hash")
LINUX, LINUX_HUGE = "this machine's pages", "this machine's huge pages"
SOURCES = (*POLICIES, LINUX, LINUX_HUGE)
KINDS = ("minimum", "mean", "maximum")
# Of the paper's 500: as many hold memory at once.
RUNS = 20

_CACHE, _SHARES = "cache", "shares of the cache"
_GEOMETRY = ("level", "bytes", "ways", "line_bytes", "cpus")

Curves = dict[str, list[float]]


def key(source: str, kind: str) -> str:
    """A curve's name: of whose pages."""
    return f"{source}: {kind}"


def _geometry(cache: Cache) -> list[float]:
    return [float(getattr(cache, name)) for name in _GEOMETRY]


def cache_of(curves: Curves) -> Cache:
    return Cache(**{name: int(value) for name, value in zip(_GEOMETRY, curves[_CACHE], strict=True)})


def shares_of(curves: Curves) -> list[float]:
    """The arrays' sizes as shares of the cache: one for each point of a curve."""
    return curves[_SHARES]


def simulated(cache: Cache, runs: int, step: Callable[[str], None]) -> Curves:
    result = simulation.run(
        cache, policies=POLICIES, patterns=(simulation.LINEAR,), runs=max(1, runs), step=step
    )
    curves = result.figure(simulation.CONFLICTS).curves
    shares = [point.at for point in curves[0].points]
    return {_CACHE: _geometry(cache), _SHARES: shares} | {
        key(curve.policy, kind): [getattr(point, kind) for point in curve.points]
        for curve in curves
        for kind in KINDS
    }


def frames(memory: mmap.mmap, pages: int, proc: Path = PROC) -> Ints:
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    with pagemap(os.getpid(), proc) as read:
        found = read(address, pages * mmap.PAGESIZE)
    if found.frames is None:
        raise CalmError(HIDDEN)
    if len(found.frames) < pages:
        raise CalmError("the kernel does not tell of every page")
    return found.frames


def _mapped(pages: int, advice: int) -> mmap.mmap:
    huge = HUGE_PAGES * PAGE_BYTES
    size = -(-pages * mmap.PAGESIZE // huge) * huge
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(advice)
        for start in range(0, pages * mmap.PAGESIZE, mmap.PAGESIZE):
            memory[start] = 1
    except BaseException:
        memory.close()
        raise
    return memory


def measured(
    cache: Cache, shares: Sequence[float], runs: int, read: Callable[[mmap.mmap, int], Ints] = frames
) -> Curves:
    """Of the frames that the kernel gives here. Each run keeps its memory until the last has its own."""
    colors = cache.colors
    room = colors * cache.ways
    ends = np.asarray([round(share * room) for share in shares], dtype=np.int64)
    curves: Curves = {}
    for source, advice in ((LINUX, mmap.MADV_NOHUGEPAGE), (LINUX_HUGE, mmap.MADV_HUGEPAGE)):
        held: list[mmap.mmap] = []
        rows = []
        for _ in range(runs):
            memory = _mapped(int(ends[-1]), advice)
            held.append(memory)
            of_pages = read(memory, int(ends[-1])) % colors
            counted = simulation.counts_by_size(of_pages, colors, ends)
            rows.append(cache.unnecessary(counted))
        by_run = np.stack(rows)
        spread = by_run.min(axis=0), by_run.mean(axis=0), by_run.max(axis=0)
        curves |= {key(source, kind): values.tolist() for kind, values in zip(KINDS, spread, strict=True)}
        for memory in held:
            memory.close()
    return curves


def wanted(own: Cache | None) -> Iterator[tuple[str, Cache]]:
    """The caches that there are figures of, and what their rows are called."""
    yield "frames in the paper's L3", NEHALEM[-1]
    if own is not None:
        yield f"frames in this machine's L{own.level}", own


def curves_of(cache: Cache, scale: float, step: Callable[[str], None]) -> tuple[Curves, str | None]:
    """All of them, and why this machine's own pages are not among them, if they are not."""
    found = simulated(cache, round(simulation.RUNS * min(1.0, scale)), step)
    try:
        real = measured(cache, shares_of(found), max(2, round(RUNS * min(1.0, scale))))
    except (CalmError, OSError) as error:
        return found, str(error)
    return found | real, None
