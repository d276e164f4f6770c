"""`calm explain`: why the memory of a process is what it is."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from calm.commands.explain import process, stacks
from calm.commands.explain.model import Certainty, Heap
from calm.commands.explain.picture import HEAP_PARTS, PARTS, Picture, picture
from calm.commands.explain.readers import readers
from calm.commands.explain.rules import Explanation, explain
from calm.core import options, proc, program, report
from calm.core.documents import Document
from calm.core.errors import USAGE, CalmError
from calm.core.heap_live import Snapshot
from calm.core.options import Output

if TYPE_CHECKING:
    from rich.console import Console

_CLASSES_SHOWN = 8
_DASHES = "calm.explain.dashes"
_TRIES = 3


class ExplainFigure(msgspec.Struct):
    """Bytes, and how sure they are."""

    bytes: int
    certainty: Certainty


class ExplainClass(msgspec.Struct):
    """The blocks of one size."""

    size: int
    used: int
    cached: int
    free: int
    bytes: int
    movable: int


class ExplainHeap(msgspec.Struct):
    """The heap of one allocator. Its figures count what may be resident; those of `parts` what is."""

    allocator: str
    library: str
    """The file's name of a library that brought this allocator for itself; "" if it may be the process's."""
    version: str
    figures: dict[str, ExplainFigure]
    classes: list[ExplainClass]
    facts: dict[str, int]
    notes: list[str]


class ExplainSample(msgspec.Struct):
    """The memory of the process at one moment."""

    rss: int
    parts: dict[str, ExplainFigure]
    """They sum to rss."""
    heaps: list[ExplainHeap]
    shared: int
    swap: int
    huge_pages: int
    untouched: int


class ExplainAlso(msgspec.Struct):
    """A further cause."""

    verdict: str
    bytes: int
    certainty: Certainty
    text: str


class ExplainDocument(Document, kw_only=True, tag="calm-explain"):
    """What `calm explain --json` writes."""

    pid: int
    command: str
    allocator: str
    """Of the largest heap; "" where no reader found one."""
    verdict: str
    """leak_suspected, in_use, cached, retained, fragmentation, huge_pages, shared, other_mappings, small or
    unknown."""
    grew: bool
    """The verdict is about what grew between the samples; otherwise about what is large."""
    interval_s: float
    summary: str
    evidence: list[str]
    certainty: Certainty
    why: str
    also: list[ExplainAlso]
    steps: list[str]
    samples: list[ExplainSample]


def _heap(heap: Heap) -> ExplainHeap:
    names = ("footprint", "in_use", "cached", "retained", "fragmentation", "metadata", "movable")
    figures = {name: getattr(heap, name) for name in names}
    return ExplainHeap(
        heap.allocator,
        heap.library,
        heap.version,
        {name: ExplainFigure(each.bytes, each.certainty) for name, each in figures.items()},
        [
            ExplainClass(each.size, each.used, each.cached, each.free, each.bytes, each.movable)
            for each in heap.classes
        ],
        heap.facts,
        list(heap.notes),
    )


def _written(found: Picture) -> ExplainSample:
    return ExplainSample(
        rss=found.rss,
        parts={name: ExplainFigure(each.bytes, each.certainty) for name, each in found.parts.items()},
        heaps=[_heap(heap) for heap in found.heaps],
        shared=found.shared,
        swap=found.swap,
        huge_pages=found.huge,
        untouched=found.untouched,
    )


def document(samples: list[Picture], found: Explanation, interval_s: float) -> ExplainDocument:
    last = samples[-1]
    return ExplainDocument(
        pid=last.pid,
        command=last.command,
        allocator=last.heap.allocator if last.heap else "",
        verdict=found.verdict,
        grew=found.grew,
        interval_s=interval_s,
        summary=found.summary,
        evidence=list(found.evidence),
        certainty=found.certainty,
        why=found.why,
        also=[ExplainAlso(each.verdict, each.bytes, each.certainty, each.words) for each in found.also],
        steps=list(found.steps),
        samples=[_written(each) for each in samples],
    )


class _ExecutedError(CalmError):
    """The process executed another program while it was read."""


def take(pid: int) -> Picture:
    """One sample, and again if the process changed much meanwhile.

    Raises CalmError where there is nothing to read or it may not be read.
    """
    for _ in range(_TRIES - 1):
        with contextlib.suppress(_ExecutedError):
            found = _take(pid)
            if not found.mismatch:
                return found
    return _take(pid)


def _take(pid: int) -> Picture:
    try:
        proc.check(pid)
        stat = proc.stat(pid)
        if stat.is_kernel:
            raise CalmError(f"{pid} is a thread of the kernel, and has no memory of its own")
        if stat.has_ended:
            raise CalmError(f"process {pid} has ended")
        with process.sample(pid) as read:
            found = picture(read, readers())
        now = proc.stat(pid)
        if now.has_ended:
            raise CalmError(f"process {pid} ended while it was read")
        if now.image != stat.image:
            raise _ExecutedError(f"process {pid} executed another program while it was read")
    except PermissionError as error:
        raise CalmError(
            f"the memory of process {pid} may not be read; root may, and its owner where"
            " kernel.yama.ptrace_scope is 0"
        ) from error
    except OSError as error:
        raise CalmError(f"the memory of process {pid} cannot be read: {error.strerror}") from error
    return found


def _print(samples: list[Picture], found: Explanation, console: Console) -> None:
    last, first = samples[-1], samples[0]
    heap = last.heap
    version = f" {heap.version}" if heap and heap.version else ""
    console.print(f"{last.pid} {last.command}, {heap.title if heap else 'no known allocator'}{version}")
    console.print(f"\n{found.verdict}: {found.summary}", style="bold")
    for line in found.evidence:
        console.print(line)
    for each in found.also:
        console.print(f"Also {each.verdict}: {_lower(each.words)}.")
    console.print(f"Certainty: {found.certainty}. {found.why}")
    console.print()
    changed = len(samples) > 1
    headings = ("part", "MiB", *(("change",) if changed else ()), "%", "", "what it is")
    table = report.table(*headings, right=("MiB", "change", "%"))
    for name, words in PARTS.items():
        part = last.parts[name]
        change = part.bytes - first.parts[name].bytes
        if part.bytes == 0 and change == 0:
            continue
        table.add_row(
            name,
            _mib(part.bytes),
            *((f"{change / (1 << 20):+.1f}",) if changed else ()),
            f"{100 * part.bytes / max(1, last.rss):.0f}",
            "" if part.certainty == "exact" else part.certainty,
            words,
        )
    grown = (f"{(last.rss - first.rss) / (1 << 20):+.1f}",) if changed else ()
    table.add_row("RSS", _mib(last.rss), *grown, "100", "", "", style="bold")
    report.print_table(console, table)
    extra = {
        "in swap": last.swap,
        "in huge pages": last.huge,
        "shared with other processes": last.shared,
        "in use by the program's records, but not resident": last.untouched,
    }
    for words, count in extra.items():
        if count >= 1 << 20:
            console.print(f"{_mib(count)} MiB {words}")
    _print_heaps(last.heaps, console)
    most = "in_use" if found.verdict == "leak_suspected" else found.verdict
    _print_classes(last.heap_of(most), console)
    if found.steps:
        console.print("\nNext steps", style="bold")
    for step in found.steps:
        console.print(f"  - {step}")


def _print_heaps(heaps: Sequence[Heap], console: Console) -> None:
    """Of a process with several allocators, or several copies of one."""
    if len(heaps) < 2:
        return
    console.print()
    table = report.table("heap", "MiB", *HEAP_PARTS, right=("MiB", *HEAP_PARTS))
    for heap in heaps:
        figures = [heap.footprint, *(getattr(heap, name) for name in HEAP_PARTS)]
        table.add_row(heap.title, *(_mib(each.bytes) if each.is_known else "?" for each in figures))
    report.print_table(console, table)


def _print_classes(heap: Heap | None, console: Console) -> None:
    classes = sorted(heap.classes if heap else (), key=lambda each: -each.bytes)[:_CLASSES_SHOWN]
    classes = [each for each in classes if each.bytes >= 1 << 20]
    if not classes:
        return
    console.print("\nLargest size classes", style="bold")
    headings = ("block", "in use", "cached", "MiB held", "MiB if packed")
    table = report.table(*headings, right=headings)
    for each in classes:
        packed = _mib(each.bytes - each.movable)
        table.add_row(f"{each.size:,}", f"{each.used:,}", f"{each.cached:,}", _mib(each.bytes), packed)
    report.print_table(console, table)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.1f}"


@contextlib.contextmanager
def _started(command: tuple[str, ...], stdout: int | None) -> Iterator[subprocess.Popen[bytes]]:
    """CMD while it runs; ended at the end."""
    program.find(command[0])
    try:
        child = subprocess.Popen(command, stdout=stdout)
    except OSError as error:
        raise program.exec_error(command[0], error.errno or 0) from error
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
        child.wait()


def _target(words: tuple[str, ...]) -> int | None:
    """The process id, if the words are one; None if they are a command."""
    if len(words) == 1 and words[0].isdecimal():
        if (pid := options.parse_process_id(words[0])) is None:
            raise CalmError(f"{words[0]} is not a process id", USAGE)
        return pid
    return None


class _Sample(NamedTuple):
    picture: Picture
    profile: Snapshot | None


def _sample_of(pid: int) -> _Sample:
    return _Sample(take(pid), stacks.snapshot(pid))


def _sampled(pid: int, interval_s: float) -> list[_Sample]:
    """A sample now, and one after the interval if there is one."""
    samples = [_sample_of(pid)]
    if interval_s:
        time.sleep(interval_s)
        samples.append(_sample_of(pid))
    return samples


def _sampled_child(child: subprocess.Popen[bytes], interval_s: float) -> list[_Sample]:
    """The first sample after half of the time: a program that starts has no memory yet."""
    samples = []
    for _ in range(2):
        try:
            child.wait(interval_s / 2)
        except subprocess.TimeoutExpired:
            samples.append(_sample_of(child.pid))
        else:
            raise CalmError(f"CMD ended with status {child.returncode} before the time of --for")
    return samples


class _Command(click.Command):
    """Knows whether `--` was given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_DASHES] = "--" in args
        return super().parse_args(ctx, args)


def _check_is_no_name(words: tuple[str, ...]) -> None:
    """Refuses the name of a running process instead of a process id: that would start the program again."""
    found = [pid for pid in proc.pids() if (stat := proc.stat_or_none(pid)) and stat.name == words[0]]
    if len(words) == 1 and found:
        raise CalmError(
            f"{words[0]} is not a process id; processes of that name: {', '.join(map(str, found[:8]))}."
            f" To start the program, put `--` before it",
            USAGE,
        )


@click.command(
    "explain",
    cls=_Command,
    context_settings={"allow_interspersed_args": True},
    epilog="\b\nExamples:\n  calm explain 4711\n"
    "  calm explain --for 30s 4711\n  calm explain --for 1min --json out.json -- ./server --port 8080",
)
@options.duration(
    "--for",
    "interval",
    at_least="1ms",
    text="Take a second sample after this time, and explain what grew. Default for CMD: 10s.",
)
@options.output()
@click.argument("words", nargs=-1, required=True, metavar="PID | -- CMD...", type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, interval: float | None, output: Output, words: tuple[str, ...]) -> None:
    """Explain why the memory of a process is what it is.

    Divides the resident memory of the process into what the program holds, what its allocator caches, retains
    or loses to fragmentation, and what is not the allocator's; and says what to do about the largest part or,
    with --for, about what grew. The process is not stopped. CMD is started, sampled after half of the time
    and at its end, and then terminated; the report goes to standard error.
    """
    pid = _target(words)
    if pid is not None:
        samples = _sampled(pid, interval or 0)
    else:
        if not ctx.meta[_DASHES]:
            _check_is_no_name(words)
        interval = interval or 10.0
        with _started(words, sys.stderr.fileno() if output.json_on_stdout else None) as child:
            samples = _sampled_child(child, interval)
    pictures = [sample.picture for sample in samples]
    found = explain(pictures)
    if found.verdict in ("in_use", "leak_suspected"):
        named = stacks.evidence(pictures[-1].pid, [sample.profile for sample in samples], found.grew)
        found = replace(found, evidence=(*found.evidence, *named))
    with replace(output, stdout_is_taken=pid is None).console() as console:
        _print(pictures, found, console)
    output.write(document(pictures, found, interval or 0.0))
