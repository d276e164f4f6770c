"""`calm tune`: which settings of malloc make one program faster or smaller, and whether any does."""

import json
import math
import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from calm import environment, machine, options, plot, program, ranges, report, said
from calm.allocators import GLIBC
from calm.errors import USAGE, CalmError
from calm.statistics import CONFIDENCE, RESAMPLES, SEED
from calm.tune import shown, space
from calm.tune.search import Budget, Outcome, Search, plan
from calm.tune.space import Setting, Space
from calm.tune.trial import SHORT_S, BaselineError, OutOfTimeError, ProgramRunner, Stopped
from calm.tune.verdict import PREFERENCES, ROUNDS_LEAST, Preference, Verdict

if TYPE_CHECKING:
    from calm.tune.study import Storage

_DEFAULT_MINUTES = 5.0
# Twelve settings looked at, four run anew and one confirmed: less can hardly be called a search.
_RUNS_PROPER = 60
_MEMORY = {"average": "average RSS", "peak": "peak RSS"}


def _chosen_spaces(
    specs: tuple[str, ...], storage: "Storage | None", name: str | None, command: tuple[str, ...]
) -> tuple[list[Space], list[str]]:
    """What is searched, and what to tell about it."""
    if specs:
        names = space.parse_names(specs)
    else:
        names = space.present()
        if storage and name:
            from calm.tune.study import allocators_of

            names = allocators_of(storage, name) or names
    notes = []
    if names != [GLIBC] and (obstacle := program.preload_obstacle(command)):
        if specs and GLIBC not in names:
            raise CalmError(obstacle, USAGE)
        notes.append(obstacle)
        names = [GLIBC]
    spaces, kept = space.spaces(names, os.environ)
    # Without a knob glibc is the baseline.
    spaces = [each for each in spaces if each.knobs or each.allocator != GLIBC]
    if not spaces:
        raise CalmError("nothing is left to search: the environment sets all that glibc can be told", USAGE)
    if existing := os.environ.get("LD_PRELOAD"):
        notes.append(f"LD_PRELOAD={existing} is set, and stays so in every run")
    return spaces, [*notes, *kept]


def _calibrate(runner: ProgramRunner, seconds: float | None, minutes: float | None) -> str | None:
    """The first run; a line about what the time is enough for, if it is not for all."""
    try:
        runner.calibrate(seconds)
    except OutOfTimeError as error:
        raise CalmError(
            f"one run takes more than the {minutes:g} minutes that there are: nothing can be tried; "
            "give more --minutes"
        ) from error
    except BaselineError as error:
        raise CalmError(f"{shlex.join(runner.command)}: {error}") from error
    if seconds is None:
        return None
    each = runner.wall_s * runner.repeats
    runs = int(seconds / each)
    proper = math.ceil(_RUNS_PROPER * each / 6) / 10
    if runs < 3:
        raise CalmError(
            f"one run takes {report.duration(runner.wall_s)}: {minutes:g} minutes are too short to compare "
            f"anything; --minutes {proper:g} is enough for a search"
        )
    if runs < _RUNS_PROPER:
        settings, rounds = plan(runs)
        enough = "" if rounds >= ROUNDS_LEAST else f", too few to be sure of a gain ({ROUNDS_LEAST} are)"
        return (
            f"one run takes {report.duration(runner.wall_s)}: in {minutes:g} minutes about "
            f"{settings} settings can be tried, and {rounds} rounds confirm one{enough}; "
            f"--minutes {proper:g} is enough for a search"
        )
    return None


def _notes_about(runner: ProgramRunner, wanted: str) -> list[str]:
    notes = []
    if runner.repeats > 1:
        notes.append(
            f"the program takes {report.duration(runner.wall_s)}: it is run {runner.repeats} times "
            f"for each figure, as anything under {SHORT_S * 1e3:.0f} ms is"
        )
    if runner.by_peak and wanted == "average":
        notes.append("it is too short for an average of its memory: the peak is taken")
    return notes


@dataclass(frozen=True)
class _Told:
    """What a search has found, and all that belongs to it, for the terminal and for files."""

    outcome: Outcome
    runner: ProgramRunner
    budget: Budget
    preference: Preference
    identity: Mapping[str, Any]
    notes: Sequence[str]
    study: Mapping[str, str] | None

    def _line(self, setting: Setting) -> str:
        own = next(each for each in self.runner.spaces if each.allocator == setting.allocator)
        return space.line(setting, own, self.runner.inherited, self.runner.command)

    def _with_line(self, verdict: Verdict) -> dict[str, Any]:
        return verdict.as_dict() | {"line": self._line(verdict.setting)}

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything."""
        outcome = self.outcome
        return {
            **self.identity,
            "machine": machine.describe(),
            "baseline": {"wall_s": self.runner.wall_s, "runs_for_a_figure": self.runner.repeats},
            "budget": {"seconds": self.budget.seconds, "trials": self.budget.trials},
            "seconds": self.budget.elapsed,
            "trials": outcome.trials,
            "confidence": CONFIDENCE,
            "resamples": RESAMPLES,
            "bootstrap_seed": SEED,
            "prefer": self.preference.by,
            # JSON has no infinity.
            "memory_limit": limit if math.isfinite(limit := self.preference.memory_limit) else None,
            "study": self.study,
            "interrupted": outcome.stopped_by is not None,
            "error": outcome.error,
            "notes": [*environment.warnings(os.environ), *self.notes, *said.notes(self.runner.said)],
            "front": [self._with_line(each) for each in outcome.front],
            "fell_off_the_front": [each.as_dict() for each in outcome.dropped],
            "tried": [each.as_dict() for each in outcome.tried.values()],
            "failed_when_confirmed": [
                setting.as_dict() | {"failure": failure} for setting, failure in outcome.failures.items()
            ],
            "chosen": outcome.chosen.as_dict() if outcome.chosen else None,
            "left_out": outcome.unneeded,
            "refined": outcome.refined.as_dict() if outcome.refined else None,
            "refined_from": outcome.refined_from.as_dict() if outcome.refined_from else None,
            "confirmation": outcome.final.as_dict() if outcome.final else None,
            "recommendation": self._with_line(outcome.recommended) if outcome.recommended else None,
            "reason": outcome.reason or None,
        }

    def tell(self, json_path: str | None, plot_path: str | None) -> None:
        """Prints it, and writes what was asked for."""
        outcome = self.outcome
        if outcome.stopped_by is not None:
            click.echo(f"calm: stopped after {outcome.trials} trials", err=True)
        elif outcome.error:
            click.echo(f"calm: {outcome.error}", err=True)
        title, label = shlex.join(self.runner.command), _MEMORY[self.identity["memory"]]
        console = report.console(sys.stderr if json_path == "-" else sys.stdout)
        console.print(title, style="bold", soft_wrap=True)
        for note in said.notes(self.runner.said):
            console.print(f"note: {note}", soft_wrap=True)
        line = self._line(outcome.recommended.setting) if outcome.recommended else ""
        shown.show(outcome, self.budget, self.preference, label, line, console)
        if json_path:
            report.write(json_path, json.dumps(self.as_dict(), indent=2) + "\n")
        if plot_path and outcome.tried:
            from calm.tune import picture

            picture.draw(Path(plot_path), title, outcome, label)
        sys.stdout.flush()


def _here() -> dict[str, str]:
    """What a trial is signed with."""
    host = socket.gethostname()
    return {"machine": host, "cpu": str(machine.describe()["cpu"]), "worker": f"{host}:{os.getpid()}"}


class _Signals:
    """Between two runs a signal is only noted, so that a database is never left in the middle."""

    def __init__(self, runner: ProgramRunner) -> None:
        self._runner = runner
        self._old: dict[signal.Signals, Any] = {}

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._runner.stop_signal is not None:
            raise KeyboardInterrupt
        self._runner.stop_signal = number

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, self._note)
        return self

    def ignore(self) -> None:
        """What is left to do takes a second; another Ctrl-C must not lose what was found."""
        for number in self._old:
            signal.signal(number, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


def _given_for_a_search() -> list[str]:
    """The options on the command line that --advise has no use for."""
    context = click.get_current_context()
    return [
        each.opts[0]
        for each in context.command.params
        if each.name not in ("advise", "json_path", "cmd")
        and context.get_parameter_source(each.name or "") is ParameterSource.COMMANDLINE
    ]


def _check(
    advise: bool,
    plot_path: str | None,
    json_path: str | None,
    storage: str | None,
    name: str | None,
    minutes: float | None,
) -> None:
    if advise and (said := _given_for_a_search()):
        raise CalmError(f"--advise runs no search, so {', '.join(said)} says nothing", USAGE)
    if plot_path and Path(plot_path).suffix not in plot.ENDINGS:
        raise CalmError(f"--plot {plot_path}: the name must end in {' or '.join(plot.ENDINGS)}", USAGE)
    if minutes == math.inf:
        raise CalmError("--minutes inf would never end", USAGE)
    if bool(storage) != bool(name):
        raise CalmError("--storage URL and --study NAME go together", USAGE)
    for path in (json_path, plot_path):
        if path and path != "-":
            report.check_writable(path)


@click.command(
    "tune",
    context_settings={"allow_interspersed_args": False},
    epilog="\b\nExamples:\n  calm tune --minutes 5 --plot front.svg -- ./program its arguments\n"
    "  calm tune -a glibc --trials 40 -- ./program\n"
    "  calm tune --advise -- ./program",
)
@click.option(
    "-a",
    "--allocators",
    "specs",
    multiple=True,
    metavar="A,B,…",
    help="What to search: glibc, calmalloc, ptlbmalloc2. Default: those that are on this machine. "
    "Where asked for, calmalloc-offload and calmalloc-offload-sync, too.",
    shell_complete=lambda _ctx, _param, text: [each for each in space.NAMES if each.startswith(text)],
)
@click.option(
    "--minutes",
    type=ranges.FloatRange(min=0, min_open=True),
    metavar="M",
    help="How long it may last.  [default: 5, if there is no --trials]",
)
@click.option("--trials", type=click.IntRange(min=1), metavar="N", help="How many settings to try.")
@click.option(
    "--time",
    "time_kind",
    type=click.Choice(["wall", "cpu"]),
    default="wall",
    show_default=True,
    help="Which time.",
)
@click.option(
    "--memory",
    "memory_kind",
    type=click.Choice(["average", "peak"]),
    default="average",
    show_default=True,
    help="Which resident memory: its average over time, or its peak.",
)
@click.option(
    "--prefer",
    type=click.Choice(PREFERENCES),
    default="time",
    show_default=True,
    help="What the recommendation goes by.",
)
@click.option(
    "--memory-limit",
    type=ranges.FloatRange(min=0, min_open=True),
    default=1.5,
    show_default=True,
    metavar="RATIO",
    help="The most memory that a recommended setting may take, to that of CMD as it is now.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="Of the optimizer, to search alike again."
)
@click.option(
    "--storage",
    metavar="URL",
    help="Keep the study in a database, as sqlite:///FILE or postgresql://USER@HOST/BASE: to go on later, or "
    "to search on several machines at once.",
)
@click.option("--study", "study_name", metavar="NAME", help="The study's name there.")
@options.json_file()
@click.option(
    "--plot", "plot_path", metavar="FILE.svg|png", type=click.Path(), help="Draw time against memory."
)
@click.option(
    "--advise", is_flag=True, help="No search: run CMD two or three times, and say what its counters advise."
)
@click.option("--show-output", is_flag=True, help="Let CMD's output through, to stderr; else it is dropped.")
@options.program()
def command(
    specs: tuple[str, ...],
    minutes: float | None,
    trials: int | None,
    time_kind: str,
    memory_kind: str,
    prefer: str,
    memory_limit: float,
    seed: int | None,
    storage: str | None,
    study_name: str | None,
    json_path: str | None,
    plot_path: str | None,
    advise: bool,
    show_output: bool,
    cmd: tuple[str, ...],
) -> None:
    """Search settings of malloc that make CMD faster or smaller.

    Every run stands beside one of CMD as it is now, in turn. What looks good is run anew before it is told,
    and the one setting that is recommended once more: a gain within noise is called none. Ctrl-C keeps what
    is known.
    """
    _check(advise, plot_path, json_path, storage, study_name, minutes)
    program.find(cmd[0])
    environment.tell()
    if advise:
        from calm.tune.advise import run as diagnose

        raise SystemExit(diagnose(cmd, json_path))
    try:
        import_module("optuna")
    except ImportError as error:
        raise CalmError("calm tune needs optuna, which is not installed: pip install optuna") from error
    from calm.tune.study import Study, open_storage, shown_url

    database = open_storage(storage) if storage else None
    spaces, notes = _chosen_spaces(specs, database, study_name, cmd)
    if minutes is None and trials is None:
        minutes = _DEFAULT_MINUTES
    budget = Budget(minutes * 60 if minutes is not None else None, trials)
    runner = ProgramRunner(
        cmd, spaces, by_cpu_time=time_kind == "cpu", by_peak=memory_kind == "peak", show_output=show_output
    )
    preference = Preference(prefer, memory_limit)
    identity: dict[str, Any] = {"command": list(cmd), "time": time_kind}
    with _Signals(runner) as signals:
        try:
            with shown.Shown(budget) as watcher:
                watcher.phase("first", 1)
                possible = _calibrate(runner, budget.seconds, minutes)
        except Stopped as stopped:
            click.echo("calm: stopped before anything was known", err=True)
            raise SystemExit(128 + stopped.signal) from None
        notes += [*_notes_about(runner, memory_kind), *([possible] if possible else [])]
        for note in notes:
            click.echo(f"calm: {note}", err=True)
        memory_kind = "peak" if runner.by_peak else "average"
        identity |= {"memory": memory_kind, "allocators": [each.allocator for each in spaces]}
        study = Study(
            spaces, seed=seed, storage=database, name=study_name, identity=identity, machine=_here()
        )
        with shown.Shown(budget) as watcher:
            run_s = runner.wall_s * runner.repeats
            outcome = Search(study, runner, budget, preference, watcher, run_s=run_s).run()
        signals.ignore()
        kept = {"storage": shown_url(storage), "name": study_name or ""} if storage else None
        told = _Told(outcome, runner, budget, preference, identity, notes, kept)
        told.tell(json_path, plot_path)
    raise SystemExit(128 + outcome.stopped_by if outcome.stopped_by else 1 if outcome.error else 0)
