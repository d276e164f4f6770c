"""The programs of the NextGen-Malloc paper's tables, and the names of their rows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from research.bench import inputs, programs, workloads
from research.bench.cases import Case, Prepared
from research.bench.results import Metric
from research.papers import published
from research.papers.model import About

THREADS = tuple(published.NEXTGEN_2)
# What a scale of 1 is. Traced runs take some 30 times as long as others, so they have less to do.
_ORDERS, _TRACED_ORDERS, _LAYOUT_ORDERS = 150_000, 6_000, 2_000
_OPERATIONS = 300_000
_SECONDS, FEWEST_SECONDS = 1.0, 0.2
# Instructions of xmalloc-test for each of its threads: those that fill the caches, and those that count.
_WARM, _COUNTED = 5_000_000, 15_000_000
_FREES = Metric("frees_per_second", "/s", higher_is_better=True)


def scaled(amount: int, about: About) -> int:
    return max(1, round(amount * about.scale))


def xalan_name(orders: int) -> str:
    return f"xalan of {orders:,} orders"


def xmalloc_name(threads: int) -> str:
    return f"xmalloc-test, {threads} thread{'s' if threads > 1 else ''}"


LAYOUT_PROGRAM = "alloc-test"


def counted(name: str) -> str:
    return f"{name}: counted"


def traced(name: str) -> str:
    return f"{name}: traced"


def laid_out(name: str) -> str:
    return f"{name}: layouts"


def _write_new(path: Path, pieces: Iterable[str]) -> None:
    """Writes a missing file, whole or not at all."""
    if not path.exists():
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        with unfinished.open("w") as file:
            file.writelines(pieces)
        unfinished.rename(path)


def _xalan(orders: int) -> Case:
    def prepare(folder: Path) -> Prepared:
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)

        _write_new(folder / "orders.xml", inputs.xml_orders(orders))
        _write_new(folder / "report.xsl", [inputs.XSLT])
        return Prepared(("xalan", *inputs.XALAN.arguments(Path())), folder)

    package = next(case.package for case in programs.CASES if case.name == "xalan")
    summary = "Debian's xalan transforms and sorts a generated document"
    return Case(xalan_name(orders), "program", summary, prepare, package=package, program="xalan")


def _xmalloc(threads: int, seconds: float) -> Case:
    def prepare(folder: Path) -> Prepared:
        words = ("--threads", str(threads), "--seconds", f"{round(seconds, 3):g}")
        return Prepared((str(workloads.find("xmalloc-test")), *words), folder)

    summary = "threads allocate what as many others free"
    return Case(xmalloc_name(threads), "workload", summary, prepare, metric=_FREES)


def _alloc_test(operations: int) -> Case:
    def prepare(folder: Path) -> Prepared:
        words = ("--threads", "1", "--max", "1024", "--operations", str(operations))
        return Prepared((str(workloads.find("alloc-test")), *words), folder)

    return Case(LAYOUT_PROGRAM, "workload", "random slots filled and emptied", prepare)


def rounds(about: About) -> list[Case]:
    """The cases that are timed, and that the processor's counters count."""
    seconds = max(FEWEST_SECONDS, _SECONDS * about.scale)
    return [_xalan(scaled(_ORDERS, about)), *(_xmalloc(threads, seconds) for threads in THREADS)]


def traced_runs(about: About) -> Iterator[tuple[Case, int, int]]:
    """Each with the instructions that warm it up, and those that count; 0 and 0 is all of a run."""
    yield _xalan(scaled(_TRACED_ORDERS, about)), 0, 0
    for threads in THREADS:
        # It is ended when they are through, and not by its clock.
        yield _xmalloc(threads, 3600), threads * scaled(_WARM, about), threads * scaled(_COUNTED, about)


def layout_runs(about: About) -> list[Case]:
    return [_xalan(scaled(_LAYOUT_ORDERS, about)), _alloc_test(scaled(_OPERATIONS, about))]


def timed_xalan(about: About) -> str:
    return xalan_name(scaled(_ORDERS, about))


def traced_xalan(about: About) -> str:
    return xalan_name(scaled(_TRACED_ORDERS, about))


def recorded_xalan(about: About) -> str:
    return xalan_name(scaled(_LAYOUT_ORDERS, about))
