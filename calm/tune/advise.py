"""`calm tune --advise`: a diagnosis by rules, without a search.

The program runs twice: once for counts and for looks at its memory, and once (or the first seconds of it)
for a record of its memory calls with their sizes. Where much of it is in huge pages, it runs a third time
without them, since only that tells what was touched.
"""

import dataclasses
import json
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, TextIO

import click

from calm import environment, report
from calm.measure import Measurement
from calm.progress import Bar
from calm.tune import advise_facts, advise_rules
from calm.tune.advise_facts import Facts
from calm.tune.advise_rules import Finding, Unjudged

_WIDTH = 100
_STOPPED = "the run was stopped"


@dataclasses.dataclass
class _Diagnosis:
    facts: Facts
    run: Measurement
    interrupted_by: int | None = None


class _Stopped(KeyboardInterrupt):
    """As Ctrl-C, by another signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _signal_of(error: KeyboardInterrupt) -> int:
    return error.number if isinstance(error, _Stopped) else signal.SIGINT


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP end a recording as Ctrl-C does; without a handler they would leave it running."""

    def stop(number: int, _: FrameType | None) -> None:
        raise _Stopped(number)

    # One that is ignored, as under nohup, stays so.
    watched = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    old = {number: signal.signal(number, stop) for number in watched}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _gather(cmd: tuple[str, ...]) -> _Diagnosis:
    with Bar() as bar:
        bar.update(what="run 1: counts, and looks at memory")
        facts, run = advise_facts.first_run(cmd, bar)
        found = _Diagnosis(facts, run, run.interrupted_by)
        if found.interrupted_by is not None or run.failure:
            stopped = found.interrupted_by is not None
            why = _STOPPED if stopped else f"the program failed ({run.failure})"
            found.facts = replace(
                facts, missing={**facts.missing, "calls": why, "peak_without_huge_kib": why}
            )
            return found
        missing = dict(facts.missing)
        try:
            bar.update(what="run 2: memory calls")
            recorded = advise_facts.record_calls(cmd, bar)
            calls = None if isinstance(recorded, str) else recorded
            if isinstance(recorded, str):
                missing["calls"] = recorded
            peak = None
            if advise_facts.is_huge(facts):
                bar.update(what="run 3: without huge pages")
                third = advise_facts.run_without_huge_pages(cmd, bar)
                found.interrupted_by = third.interrupted_by if third else None
                if found.interrupted_by is not None:
                    missing["peak_without_huge_kib"] = _STOPPED
                elif third is None or third.failure:
                    missing["peak_without_huge_kib"] = "the program failed without huge pages"
                else:
                    peak = third.peak_rss_kib
            found.facts = replace(facts, calls=calls, peak_without_huge_kib=peak, missing=missing)
        except KeyboardInterrupt as error:
            found.interrupted_by = _signal_of(error)
            missing |= {"calls": _STOPPED, "peak_without_huge_kib": _STOPPED}
            found.facts = replace(facts, missing=missing)
    return found


def _value(name: str, value: float | int | str) -> str:
    if isinstance(value, str):
        return value
    if name.endswith("_kib"):
        return report.memory(value)
    if "bytes" in name:
        return report.memory(value / 1024)
    return report.figure(value, "count")


def _label(name: str) -> str:
    return name.removesuffix("_kib").replace("_", " ").replace("rss", "RSS")


def _wrapped(text: str, first: str, then: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _tell(number: int, finding: Finding, told: set[str]) -> list[str]:
    lines = _wrapped(f"{finding.rule}: {finding.sentence}", f"{number}. ", "   ")
    shown = ", ".join(f"{_label(name)} {_value(name, value)}" for name, value in finding.evidence.items())
    if finding.rule != "environment":
        lines += _wrapped(shown, "   evidence: ", "             ")
        lines += _wrapped(finding.threshold, "   fires at: ", "             ")
    for remedy in finding.remedies:
        settings = " ".join(f"{name}={value}" for name, value in remedy.environment.items())
        again = settings in told
        lines += _wrapped(settings or remedy.otherwise, "   remedy:   ", "             ")
        lines += _wrapped("as above" if again else remedy.cost, "   cost:     ", "             ")
        told.update([settings] if settings else [])
    return lines


def text_of(facts: Facts, found: list[Finding], unjudged: list[Unjudged], quiet: list[str]) -> str:
    """What a terminal gets."""
    command = shlex.join(facts.command)
    lines: list[str] = []
    told: set[str] = set()
    for number, finding in enumerate(found, 1):
        lines += [*_tell(number, finding, told), ""]
    if not found:
        which = "no rule that could be judged fires" if unjudged else "no rule fires"
        lines += [f"nothing to advise: {which}", ""]
    if quiet:
        lines += _wrapped(", ".join(quiet), "in order: ", "          ")
    for each in unjudged:
        lines += _wrapped(f"{each.rule}: {each.reason}", "not judged: ", "            ")
    if facts.calls is not None and facts.calls.truncated:
        lines += _wrapped(
            f"memory calls: the first {facts.calls.seconds:.1f} s of the run, by {facts.calls.how}", "", "  "
        )
    if variables := advise_rules.combined(found):
        settings = ";".join(f"{name}={value}" for name, value in variables.items())
        # One line each, to be copied.
        lines += ["", f"to see what they do: calm compare -a 'glibc,glibc:{settings}' -- {command}"]
    return "\n".join(lines) + "\n"


def as_dict(facts: Facts, found: list[Finding], unjudged: list[Unjudged], quiet: list[str]) -> dict[str, Any]:
    """For JSON."""
    return {
        "command": list(facts.command),
        "findings": [dataclasses.asdict(each) for each in found],
        "in_order": quiet,
        "not_judged": [dataclasses.asdict(each) for each in unjudged],
        "environment": advise_rules.combined(found),
        "facts": dataclasses.asdict(facts),
    }


def run(cmd: tuple[str, ...], json_path: str | None) -> int:
    """Diagnoses a program, and returns the exit code: 0, 1 if it failed, 128 + N after signal N."""
    try:
        with _stoppable():
            diagnosis = _gather(cmd)
    except KeyboardInterrupt as error:
        click.echo("calm: stopped before anything was known", err=True)
        return 128 + _signal_of(error)
    facts = diagnosis.facts
    found, unjudged, quiet = advise_rules.judge(facts, environment.warnings(os.environ))
    output: TextIO = sys.stderr if json_path == "-" else sys.stdout
    output.write(text_of(facts, found, unjudged, quiet))
    if json_path:
        told = as_dict(facts, found, unjudged, quiet) | {"interrupted": diagnosis.interrupted_by is not None}
        report.write(json_path, json.dumps(told, indent=2) + "\n")
    if diagnosis.interrupted_by is not None:
        click.echo("calm: stopped: what is above is by what was known then", err=True)
        return 128 + diagnosis.interrupted_by
    if diagnosis.run.failure:
        click.echo(f"calm: {shlex.join(cmd)}: {diagnosis.run.failure}", err=True)
        return 1
    return 0
