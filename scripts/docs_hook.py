"""Hooks of mkdocs (mkdocs.yml): the pages of the site that are not in docs/, and links that fit the site.

The reference is generated at each build: calm's commands from click, its JSON documents by json_reference.py,
the options and counters from the tables in src/api, the C interface from include/calmalloc.h.
"""

from __future__ import annotations

import inspect
import posixpath
import re
import runpy
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from calm.cli import cli
from calm.core.errors import STATUSES

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "scripts"))
import json_reference  # noqa: E402
from json_reference import plain, row  # noqa: E402

HEADER = (REPOSITORY / "include/calmalloc.h").read_text()
GENERATOR = runpy.run_path(str(REPOSITORY / "scripts/generate"))
ROOT_PAGES = {"README.md": "index.md"} | {
    f"{name}.md": f"{name.lower()}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG")
}
ROOT_FILES = {page: file for file, page in ROOT_PAGES.items()}
LINK = re.compile(r"(?P<start>!?\[(?P<text>[^\]]*)\]\()(?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")
# In a header: a comment that starts a line, or a declaration.
PART = re.compile(
    r"^/\*(?P<comment>.*?)\*/$|^(?P<code>CALM_API[^;]*;|struct \w+ \{.*?^\};|#define CALM_(?!API)[^\n]*)",
    re.MULTILINE | re.DOTALL,
)
NAME = re.compile(r"struct \w+(?= \{)|CALM_(?!API)\w+|\w+(?=\()")
# In a structure: a member and the comment behind it, or a comment on the members that follow.
MEMBER = re.compile(r"(?P<name>\w+);(?:[ \t]*/\*(?P<comment>.*?)\*/)?|/\*(?P<group>.*?)\*/", re.DOTALL)


def help_text(text: str | None) -> str:
    """The paragraphs of a help text. Those that begin with a backspace keep their lines, as in a terminal."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(
        re.sub(r"^", "    ", paragraph[2:], flags=re.MULTILINE) if paragraph[:1] == "\b" else plain(paragraph)
        for paragraph in paragraphs
    )


def contexts(context: click.Context) -> Iterator[click.Context]:
    """Those of a command and of all commands below it."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None
            yield from contexts(click.Context(command, parent=context, info_name=name))


def commands() -> str:
    """The page of calm's commands and their options."""
    page = "# calm's commands\n"
    for context in contexts(click.Context(cli, info_name="calm", **cli.context_settings)):
        command, path = context.command, context.command_path
        page += f"\n## {path}\n" if context.parent else ""
        page += f"\n    {' '.join([path, *command.collect_usage_pieces(context)])}\n"
        page += f"\n{help_text(command.help)}\n\n{row('option', 'what it does')}{row('---', '---')}"
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record and isinstance(parameter, click.Option):
                page += row(f"`{record[0]}`", plain(record[1]))
        page += f"\n{help_text(command.epilog)}\n"
        guide = f"calm-{context.info_name}.md"
        page += f"\n[More on {path}](../{guide}).\n" if (REPOSITORY / "docs" / guide).exists() else ""
    return page


def statuses() -> str:
    """The exit statuses of all commands."""
    rows = "".join(row(status, plain(what)) for status, what in STATUSES.items())
    return f"\n## Exit status\n\n{row('status', 'when')}{row('---', '---')}{rows}"


def options() -> str:
    """The page of the library's options."""
    return (
        "# Options\n\nAt the start by `CALM_OPTIONS=name=value,...`, later by [`calm_set`](api.md#calm_set)."
        f"\n\n{GENERATOR['option_table']()}"
    )


def comment_text(comment: str) -> str:
    """A comment of C as Markdown, in which a list needs an empty line before it."""
    text = plain(re.sub(r"^ *\* ?", "", comment, flags=re.MULTILINE).strip())
    return text.replace("\n- ", "\n\n- ", 1)


def members(structure: str) -> str:
    """A structure's members: a table for each group."""
    page = head = f"\n{row('member', 'what it is')}{row('---', '---')}"
    for member in MEMBER.finditer(structure):
        if member["group"]:
            page += f"\n{comment_text(member['group'])}\n{head}"
        else:
            page += row(f"`{member['name']}`", " ".join(comment_text(member["comment"] or "").split()))
    return page


def counters() -> str:
    """The members of struct calm_stats: a table for each group."""
    page = ""
    for group, named in groupby(GENERATOR["counters"](), lambda each: each.group):
        page += f"\n{plain(group)}\n\n{row('counter', 'what it is')}{row('---', '---')}"
        page += "".join(row(f"`{each.name}`", each.phrase) for each in named)
    return page


def header_pages() -> tuple[str, str]:
    """The pages of the C interface, with a section for each comment or empty line, and of the counters."""
    page, described = "# C interface: calmalloc.h\n", ""
    sections: list[tuple[str, list[str]]] = []
    for part in PART.finditer(HEADER):
        if part["comment"] or HEADER[: part.start()].endswith("\n\n"):
            sections.append((part["comment"] or "", []))
        if part["code"]:
            sections[-1][1].append(re.sub(r"CALM_API | __attribute__\(\(.*\)\)", "", part["code"]))
    for comment, codes in sections:
        names = [f"`{found[0]}`" for code in codes if (found := NAME.search(code))]
        if names:
            page += f"\n## {' to '.join([names[0], names[-1]][: len(names)])}\n"
        text = f"\n{comment_text(comment)}\n"
        if names == ["`struct calm_stats`"]:
            normal = "[What is normal, and what to do if it is not](../operators.md#what-the-counters-mean)."
            described = f"# Counters\n{text}\n{normal}\n{counters()}"
            page += "\nIts members are the [counters](counters.md).\n"
        elif codes and codes[0].startswith("struct "):
            page += text + members(codes[0])
        elif codes:
            page += "\n```c\n" + "\n".join(codes) + f"\n```\n{text}"
        else:
            page += text
    assert described
    return page, described


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    pages = {page: (REPOSITORY / file).read_text() for file, page in ROOT_PAGES.items()}
    pages["reference/commands.md"] = commands() + statuses()
    pages["reference/json.md"] = json_reference.page()
    pages["reference/options.md"] = options()
    pages["reference/api.md"], pages["reference/counters.md"] = header_pages()
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to pages become links within the site; those to other files of the repository name the file."""
    uri = page.file.src_uri
    folder = (REPOSITORY / ROOT_FILES.get(uri, f"docs/{uri}")).parent

    def fit(link: re.Match[str]) -> str:
        target = folder / link["path"]
        if not target.exists():
            return link[0]
        file = target.resolve().relative_to(REPOSITORY).as_posix()
        site = ROOT_PAGES.get(file, file.removeprefix("docs/"))
        if (found := files.get_file_from_path(site)) is None or not found.inclusion.is_included():
            return link["text"] if file in link["text"] else f"{link['text']} (`{file}`)"
        return f"{link['start']}{posixpath.relpath(site, posixpath.dirname(uri))}{link['anchor'] or ''})"

    return LINK.sub(fit, markdown)
