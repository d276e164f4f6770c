"""The pages say what there is: each option and counter has its line, and each link leads somewhere."""

import re
from pathlib import Path

import pytest
from calm_helpers import ROOT

from calm.core.library_tables import OPTIONS

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
OPERATORS, OFFLOAD, TESTING = (ROOT / f"docs/{name}.md" for name in ("operators", "offload", "testing"))

# Between fences, or indented after an empty line; what is indented within a paragraph or a list is text.
CODE_BLOCK = re.compile(r"^```.*?^```$|(?:(?<=\n\n)|\A)(?:(?: {4}|\t)[^\n]*\n+)+", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)?$", re.MULTILINE)


def prose(page: Path) -> str:
    """The page without code, in which nothing is a link."""
    return CODE_SPAN.sub("", CODE_BLOCK.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The names of its headings, as links have them."""
    found: set[str] = set()
    for heading in HEADING.findall(CODE_BLOCK.sub("", page.read_text())):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(anchor)
    return found


def tables_first_cells(page: Path) -> set[str]:
    """What is named, as code, in the first cell of a row."""
    rows = re.findall(r"^\| (`[^|]+) \|", page.read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def options(folder: str = "src/api", kind: str = "(?:TEXT_)?OPTION") -> list[str]:
    """The names in the table of CALM_OPTIONS."""
    return re.findall(rf"^{kind}\((\w+),", (ROOT / folder / "options.def").read_text(), re.MULTILINE)


def counters(folder: str = "src/api") -> list[str]:
    """The names in the table that the report is written from."""
    return re.findall(r"^COUNTER\((\w+),", (ROOT / folder / "counters.def").read_text(), re.MULTILINE)


def test_the_tables_are_read_whole() -> None:
    assert {"memory_per_cpu", "report"} <= set(options())
    assert len(options()) == len(set(options())) >= 8
    declared = re.findall(r"^\s*(?:uint64_t\s+)?(\w+);", structure("calm_stats"), re.MULTILINE)
    assert [name for name in declared if name not in ("version", "size")] == counters()


def structure(name: str) -> str:
    """A structure's fields in calmalloc.h, without comments."""
    header = re.sub(r"/\*.*?\*/", "", (ROOT / "include/calmalloc.h").read_text(), flags=re.DOTALL)
    found = re.search(rf"struct {name} \{{(.*?)\n\}};", header, re.DOTALL)
    assert found is not None
    return found[1]


def test_users_see_nine_options() -> None:
    """Others are for tests, and only the page on tests has them."""
    for_tests = {name for name in OPTIONS if name.startswith("test_")}
    assert set(OPTIONS) - for_tests == set(options())
    assert len(options()) == 8
    assert set(options()) <= tables_first_cells(ROOT / "docs/allocator.md")
    assert options("offload") == ["server_cpu"]
    assert "server_cpu" in tables_first_cells(OFFLOAD)
    for_tests.update(options("offload", "TEST_OPTION"))
    assert for_tests <= tables_first_cells(TESTING)
    for page in (*PAGES, *(ROOT / "docs/man").iterdir(), ROOT / "rust/README.md"):
        if page != TESTING:
            assert not for_tests & set(re.findall(r"\w+", page.read_text())), page


@pytest.mark.parametrize(("page", "folder"), [(OPERATORS, "src/api"), (OFFLOAD, "offload")])
def test_operators_are_told_of_each_counter(page: Path, folder: str) -> None:
    assert set(counters(folder)) <= tables_first_cells(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            broken.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{link}: no such heading")
    assert broken == []


def test_the_pages_have_links() -> None:
    """Or the test above reads none."""
    for name in ("README.md", "docs/which-part.md", "docs/migration.md", "docs/operators.md"):
        assert LINK.findall(prose(ROOT / name)), name


def test_the_changelog_has_no_heading_twice_in_a_release() -> None:
    _, *releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert releases
    for release in releases:
        headings = HEADING.findall(release)
        assert len(headings) == len(set(headings)), headings


def test_what_is_a_link(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One *two*, three\n\n[a](b.md) `[c](d)`\n\n    [e](f)\n    [e](f)\n\n"
        "```\n[g](h)\n\n[g](h)\n```\n- [i](#one)\n    [j](k)\n"
    )
    assert LINK.findall(prose(page)) == ["b.md", "#one", "k"]
    assert anchors(page) == {"one-two-three"}
