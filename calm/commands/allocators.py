"""`calm allocators`: those on this machine."""

import click

from calm.core import options, report
from calm.core.allocators import GLIBC, KNOWN, Origin, dated, origin
from calm.core.documents import Document
from calm.core.options import Output


class AllocatorsDocument(Document, kw_only=True, tag="calm-allocators"):
    """What `calm allocators --json` writes."""

    allocators: list[Origin]


def _source(each: Origin) -> str:
    if each.option:
        return f"{KNOWN[each.name].variant_of}, {each.option}"
    if each.crate:
        return f"crate {each.crate} {each.crate_version}"
    if each.tree:
        return "source tree"
    return f"{each.package} {each.package_version}" if each.package else "not packaged"


@click.command("allocators", epilog="\b\nExamples:\n  calm allocators\n  calm allocators --json")
@options.output()
def command(output: Output) -> None:
    """List the allocators on this machine: version, origin, path."""
    origins = [origin(name) for name in KNOWN]
    table = report.table("allocator", "version", "from", "library", wrap=("from",), spare=("from",))
    for each in origins:
        library = "nothing is preloaded" if each.name == GLIBC else each.library
        if each.present:
            table.add_row(each.name, dated(each.version, each.date) or "unknown", _source(each), library)
        else:
            table.add_row(each.name, "-", "", f"not found: {KNOWN[each.name].hint}", style="dim")
    # The table says the same as the document, and is left out beside it.
    if output.report_path or not output.json_on_stdout:
        with output.console() as console:
            report.print_table(console, table)
    output.write(AllocatorsDocument(allocators=origins))
