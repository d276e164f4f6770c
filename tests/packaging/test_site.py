"""The documentation site (`make docs`): it builds, is complete, and needs no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest
from packaging_helpers import REPOSITORY

from calm.cli import cli

WHY = "mkdocs is not installed: make docs installs it, and so does scripts/setup check"
pytest.importorskip("mkdocs", reason=WHY)
pytest.importorskip("material", reason=WHY)

from markdown_it import MarkdownIt  # noqa: E402

# Attributes whose address a browser loads by itself; of links those in the head.
LOADED = {"src", "srcset", "poster", "data"}
FOREIGN = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//")
OF_A_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")
COUNTED = ("li", "table", "tr", "pre", "h2", "h3", "img")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build is strict: it fails for a dead link or anchor, or a page outside the navigation."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    built = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def article(page: Path) -> str:
    """The page's content, without the theme's."""
    found = re.search(r"<article.*?</article>", page.read_text(), re.DOTALL)
    assert found is not None
    return found[0]


def sections(page: Path) -> dict[str, str]:
    """The content of each section of the second level, by the heading's anchor."""
    return dict(re.findall(r'<h2 id="([^"]+)">(.*?)(?=<h2 |</article>)', article(page), re.DOTALL))


def names(pattern: str, file: str) -> list[str]:
    """Matches in a source without its comments."""
    source = re.sub(r"/\*.*?\*/", "", (REPOSITORY / file).read_text(), flags=re.DOTALL)
    found = re.findall(pattern, source, re.MULTILINE)
    assert len(found) >= 8
    return found


def test_reference(site: Path) -> None:
    described = sections(site / "reference/commands.html")
    for name in cli.listed:
        assert f"calm-{name}" in described, f"calm {name} is not in the reference"
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        for parameter in command.params:
            for flag in (*parameter.opts, *parameter.secondary_opts):
                if isinstance(parameter, click.Option):
                    row = rf"<td><code>[^<]*(?<![\w-]){flag}(?![\w-])[^<]*</code></td>"
                    assert re.search(row, described[f"calm-{name}"]), f"calm {name} {flag}"
    for page, wanted in {
        "options": names(r"^(?:TEXT_)?OPTION\((\w+),", "src/api/options.def"),
        "counters": names(r"^COUNTER\((\w+),", "src/api/counters.def"),
    }.items():
        first_cells = re.findall(
            r"<tr>\s*<td><code>(\w+)</code></td>", article(site / f"reference/{page}.html")
        )
        assert set(wanted) <= set(first_cells), page
    text = re.sub(r"<[^>]*>", "", article(site / "reference/api.html"))
    for name in names(r"^CALM_API [^(]*?(\w+)\(", "include/calmalloc.h"):
        assert f"{name}(" in text, f"{name} is not in the reference"


def test_every_page_is_in_the_navigation_and_read_as_commonmark(site: Path) -> None:
    """Compares with CommonMark, as repository hosts parse it: the counts of lists, tables and code must
    agree.
    """
    pages = sorted((REPOSITORY / "docs").glob("*.md"))
    navigation = re.findall(r'href="([\w-]+)\.html"\s+class="md-nav__link', (site / "index.html").read_text())
    assert {page.stem for page in pages} <= set(navigation)
    reader = MarkdownIt("commonmark").enable("table")
    for page in pages:
        both = reader.render(page.read_text()), article(site / f"{page.stem}.html")
        one, other = ({tag: len(re.findall(f"<{tag}[ >]", text)) for tag in COUNTED} for text in both)
        assert one == other, page.name


class Requests(HTMLParser):
    """The addresses that a browser loads for a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = OF_A_STYLE.findall(page.read_text())
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            value or "" for name, value in attrs if name in LOADED or (tag, name) == ("link", "href")
        ]


def test_no_other_host_is_asked(site: Path) -> None:
    """By pages and styles. The theme's script would, but only for diagrams, which no page has."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    assert any(Requests(page).addresses for page in pages)
    for page in pages:
        assert [address for address in Requests(page).addresses if FOREIGN.match(address)] == [], page
        assert 'class="mermaid' not in page.read_text()
    for style in site.rglob("*.css"):
        assert OF_A_STYLE.findall(style.read_text()) == [], style
