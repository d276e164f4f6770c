"""All tables and pictures of README.md and docs/ that are generated from results: from bench/results only."""

from __future__ import annotations

from pathlib import Path

from . import (
    abis_results,
    abis_table,
    comparison,
    compatibility,
    hot,
    idle_curve,
    lines,
    locks,
    offload,
    paper_figures,
    papers,
    placement,
    policy,
    published,
    sawtooth,
    scaling,
    suite,
    summary,
    tables,
)
from .results import REPOSITORY, Store


def put(path: Path, text: str, name: str) -> None:
    """Replaces the text between the two marks of that name on a page."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    page = path.read_text()
    head, rest = page.split(begin)
    _, tail = rest.split(end)
    path.write_text(f"{head}{begin}{text}{end}{tail}")


def render_figures(store: Store, root: Path = REPOSITORY) -> None:
    """Updates the tables of bench/figures."""
    docs = root / "docs"
    put(root / "README.md", summary.table(store), "summary")
    put(root / "README.md", summary.losses(store), "losses")
    idle_curve.draw(store, docs / "idle-burst.svg")
    put(docs / "figures.md", tables.figures(store), "figures")
    put(docs / "ptlbmalloc2.md", tables.curve(store), "figures")
    put(docs / "figures.md", suite.tables(store.folder, suite.SUMMARY), suite.NAME)
    put(docs / "figures.md", published.tables(store.folder), published.NAME)
    put(docs / "figures.md", scaling.table(store), scaling.NAME)
    put(docs / "comparison.md", comparison.table(store), comparison.NAME)
    put(docs / "suite.md", suite.tables(store.folder, suite.DETAILS), suite.NAME)
    suite.draw(store.folder, docs / "suite.svg")
    for paper in papers.PAPERS:
        if text := papers.text(store.folder, paper, docs):
            put(docs / "papers.md", text, f"{papers.PREFIX}{paper}")
    put(docs / "retention.md", f"\n{sawtooth.table(store)}\n", sawtooth.NAME)
    put(docs / "retention.md", f"\n{policy.table(store)}\n", policy.NAME)
    put(docs / "hot.md", f"\n{hot.table(store)}\n", hot.NAME)
    put(docs / "lines.md", f"\n{lines.table(store)}\n", lines.NAME)
    put(docs / "offload.md", f"\n{offload.table(store)}\n", offload.GROUP)
    put(docs / "placement.md", f"\n{placement.table(store)}\n", placement.GROUP)


def render_emulated(store: Store, root: Path = REPOSITORY) -> None:
    """Updates the tables of bench/emulated."""
    results = {name: store.load(f"emulated-figure-{name}") for name in paper_figures.FIGURES}
    known = {name: result for name, result in results.items() if result is not None}
    for name, result in known.items():
        put(root / "docs/calm-lab.md", paper_figures.table_of(name, result), f"figure-{name}")
    if known:
        paper_figures.draw(known, root / "docs/calm-lab.svg")
    put(root / "docs/figures.md", locks.table(store), "locks")


def render_abis(path: Path, root: Path = REPOSITORY) -> None:
    """Updates the tables of bench/abis."""
    put(root / "docs/abis.md", f"\n{abis_table.text(abis_results.load(path))}\n", "abis")


def render_compatibility(store: Store, root: Path = REPOSITORY) -> None:
    """Updates the table of bench/compatibility."""
    put(root / "docs/compatibility.md", compatibility.text(store), compatibility.NAME)
