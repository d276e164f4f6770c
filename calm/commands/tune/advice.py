"""`calm tune advise`: a diagnosis by rules, without a search.

The program runs twice: once for counts and samples of its memory, and once (or its first seconds) for a
record of its memory calls. If much of it is in huge pages, it runs a third time without them, since only that
shows what it touches.
"""

# ruff: noqa: RUF012 - msgspec copies mutable defaults

import os
import shlex
from types import FrameType
from typing import TYPE_CHECKING

import click

from calm.commands.tune import facts, rules
from calm.commands.tune.facts import Facts
from calm.commands.tune.rules import Finding, Unjudged
from calm.commands.tune.trial import handled
from calm.core import environment, report
from calm.core.documents import Document
from calm.core.errors import FAILED
from calm.core.measure import Measurement
from calm.core.options import Output
from calm.core.progress import Bar
from calm.core.rounds import StoppedError

if TYPE_CHECKING:
    from rich.console import Console


class Advice(Document, tag="calm-advice", kw_only=True):
    """What `calm tune advise` found."""

    command: list[str]
    facts: Facts
    findings: list[Finding] = []
    not_judged: list[Unjudged] = []
    in_order: list[str] = []
    """The rules that do not fire."""
    environment: dict[str, str] = {}
    """All variables of the remedies together."""
    interrupted_by: int | None = None
    failure: str | None = None
    """Of the first run."""


def gather(cmd: tuple[str, ...]) -> Advice:
    later = ("calls", "peak_without_huge_kib")
    with Bar() as bar:
        bar.update(what="run 1: counts, and samples of memory")
        known, first = facts.first_run(cmd, bar)
        found = Advice(command=list(cmd), facts=known, failure=first.failure)
        try:
            _check_stopped(first)
            if first.failure:
                known.missing |= dict.fromkeys(later, f"the program failed ({first.failure})")
                return found
            bar.update(what="run 2: memory calls")
            try:
                known.calls = facts.record(cmd, bar)
            except facts.UnknownFactError as error:
                known.missing["calls"] = str(error)
            if known.has_huge_pages:
                bar.update(what="run 3: without huge pages")
                third = facts.run_without_huge_pages(cmd)
                _check_stopped(third)
                if third is None or third.failure:
                    known.missing["peak_without_huge_kib"] = "the program failed without huge pages"
                else:
                    known.peak_without_huge_kib = third.peak_rss_kib
        except StoppedError as stopped:
            found.interrupted_by = stopped.signal
            known.missing = dict.fromkeys(later, "the run was stopped") | known.missing
    return found


def _check_stopped(run: Measurement | None) -> None:
    if run and run.interrupted_by is not None:
        raise StoppedError(run.interrupted_by)


def _evidence(name: str, value: float | str) -> str:
    text = str(value)
    if not isinstance(value, str):
        kib = value / 1024 if "bytes" in name else value if name.endswith("_kib") else None
        text = report.figure(value, "count") if kib is None else report.memory(kib)
    return f"{name.removesuffix('_kib').replace('_', ' ').replace('rss', 'RSS')} {text}"


def print_report(advice: Advice, console: "Console") -> None:
    """Prints the findings, the rules that do not fire, and a command to see the effect of the remedies."""
    table, printed = report.table(show_header=False), set()
    for number, finding in enumerate(advice.findings, 1):
        table.add_row(f"{number}. {finding.rule}", finding.sentence, style="bold")
        if finding.rule != "environment":
            table.add_row("   evidence", ", ".join(_evidence(*each) for each in finding.evidence.items()))
            table.add_row("   fires at", finding.threshold)
        for remedy in finding.remedies:
            settings = " ".join(f"{name}={value}" for name, value in remedy.environment.items())
            table.add_row("   remedy", settings or remedy.otherwise)
            table.add_row("   cost", "as above" if settings in printed else remedy.cost)
            printed |= {settings} if settings else set()
        table.add_row()
    if advice.in_order:
        table.add_row("in order", ", ".join(advice.in_order))
    for each in advice.not_judged:
        table.add_row("not judged", f"{each.rule}: {each.reason}")
    if (calls := advice.facts.calls) is not None and calls.truncated:
        table.add_row("memory calls", f"of the first {calls.wall_s:.1f} s of the run, by {calls.recorder}")
    if not advice.findings:
        which = "no rule that could be judged fires" if advice.not_judged else "no rule fires"
        console.print(f"nothing to advise: {which}\n", style="bold")
    report.print_table(console, table)
    if advice.environment:
        settings = ";".join(f"{name}={value}" for name, value in advice.environment.items())
        command = shlex.join(advice.command)
        console.print(
            f"\nto see their effect: calm compare -a 'glibc,glibc:{settings}' -- {command}", soft_wrap=True
        )


def run(cmd: tuple[str, ...], output: Output) -> int:
    """Diagnoses a program, and returns the exit status: 0, 1 if it failed, 128 + N after signal N."""

    def stop(number: int, _: FrameType | None) -> None:
        raise StoppedError(number)

    try:
        # Without a handler SIGTERM and SIGHUP would leave a recording running.
        with handled(stop):
            advice = gather(cmd)
    except StoppedError as stopped:
        click.echo("calm: stopped before anything was known", err=True)
        return 128 + stopped.signal
    judged = rules.judge(advice.facts, environment.warnings(os.environ))
    advice.findings, advice.not_judged, advice.in_order = judged
    advice.environment = rules.combined(advice.findings)
    with output.console() as console:
        print_report(advice, console)
    output.write(advice)
    if advice.interrupted_by is not None:
        click.echo("calm: stopped: the report has what was known by then", err=True)
        return 128 + advice.interrupted_by
    if advice.failure:
        click.echo(f"calm: {shlex.join(cmd)}: {advice.failure}", err=True)
    return FAILED if advice.failure else 0
