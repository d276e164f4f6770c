"""`calm tune`: its subcommands."""

import math
import os
import shlex
import signal
import socket
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from calm.commands.tune import space
from calm.commands.tune.space import Knobs
from calm.commands.tune.trial import SHORT_S, BaselineError, ProgramRunner, handled
from calm.commands.tune.verdict import PREFERENCES, Preference
from calm.core import environment, machine, messages, options, program, report
from calm.core.allocators import GLIBC
from calm.core.errors import FAILED, USAGE, CalmError
from calm.core.options import Output
from calm.core.rounds import StoppedError

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

_DEFAULT_S = 300.0
# Twelve settings tried, four measured again and one confirmed: less is hardly a search.
_RUNS_OF_A_SEARCH = 60


@click.group("tune")
def command() -> None:
    """Search settings of malloc that make a program faster or smaller, or advise some."""


def _chosen_spaces(
    specs: tuple[str, ...], storage: "RDBStorage | None", name: str | None, command: tuple[str, ...]
) -> tuple[dict[str, Knobs], list[str]]:
    """What to search, and notes about it."""
    if specs:
        names = space.parse_names(specs)
    else:
        names = space.present()
        if storage and name:
            from calm.commands.tune.study import allocators_of

            names = allocators_of(storage, name) or names
    notes = []
    if names != [GLIBC] and (obstacle := program.preload_obstacle(command)):
        if specs and GLIBC not in names:
            raise CalmError(obstacle, USAGE)
        notes.append(obstacle)
        names = [GLIBC]
    spaces, fixed = space.spaces(names, os.environ)
    # Without a knob glibc is the baseline.
    spaces = {name: knobs for name, knobs in spaces.items() if knobs or name != GLIBC}
    if not spaces:
        raise CalmError("nothing is left to search: the environment sets all knobs of glibc", USAGE)
    return spaces, [*notes, *fixed]


def _for(seconds: float) -> str:
    return f"--for {seconds / 60:g}min" if seconds % 60 == 0 else f"--for {seconds:g}s"


def _calibrate(runner: ProgramRunner, limit_s: float | None, memory_kind: str) -> list[str]:
    """Runs the program for the first time. Returns notes about it."""
    try:
        runner.calibrate(limit_s)
    except BaselineError as error:
        raise CalmError(f"{shlex.join(runner.command)}: {error}") from error
    notes, takes = [], report.duration(runner.wall_s)
    if runner.repeats > 1:
        notes.append(
            f"the program takes {takes}: it is run {runner.repeats} times for each figure, as is any below "
            f"{SHORT_S * 1e3:.0f} ms"
        )
    if runner.by_peak and memory_kind == "average":
        notes.append("the program is too short for an average of its memory: the peak is taken")
    run_s = runner.wall_s * runner.repeats
    if limit_s is not None and (runs := int(limit_s / run_s)) < _RUNS_OF_A_SEARCH:
        enough_s = _RUNS_OF_A_SEARCH * run_s
        enough = _for(math.ceil(enough_s / 60) * 60 if enough_s > 90 else math.ceil(enough_s))
        if runs < 3:
            raise CalmError(f"one run takes {takes}: {_for(limit_s)} is too short; {enough} is enough")
        notes.append(
            f"one run takes {takes}: {_for(limit_s)} allows about {runs} of the {_RUNS_OF_A_SEARCH} runs of "
            f"a search; {enough} is enough"
        )
    return notes


def _choice(name: str, variable: str, values: Sequence[str], text: str) -> options.Decorator:
    kind = click.Choice(values)
    return click.option(name, variable, type=kind, default=values[0], show_default=True, help=text)


@command.command(
    "search",
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  calm tune search --for 5min --plot front.svg -- ./program its arguments
  calm tune search -a glibc --trials 40 -- ./program
""",
)
@options.allocator_list(
    "The allocators to search: glibc, calmalloc, ptlbmalloc2 or calmoffload. "
    "Default: the first three, as far as they are on this machine."
)
@options.duration(
    "--for", "limit_s", text="The time limit of the search.  [default: 5min, if there is no --trials]"
)
@click.option("--trials", type=click.IntRange(min=1), metavar="N", help="The number of settings to try.")
@_choice("--time", "time_kind", ("wall", "cpu"), "The time to compare.")
@_choice(
    "--memory", "memory_kind", ("average", "peak"), "The average over time, or the peak, of resident memory."
)
@_choice("--prefer", "prefer", PREFERENCES, "What the recommendation goes by.")
@click.option(
    "--memory-limit",
    type=options.FloatRange(min=0, min_open=True),
    default=1.5,
    show_default=True,
    metavar="RATIO",
    help="The maximum memory of the recommended setting, relative to CMD as it is now.",
)
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="The optimizer's seed.")
@click.option(
    "--storage",
    metavar="URL",
    help="Keep the study in a database, as sqlite:///FILE or postgresql://USER@HOST/BASE: to continue it "
    "later, or to search on several machines at once.",
)
@click.option("--study", "study_name", metavar="NAME", help="The study's name in the database.")
@click.option(
    "--show-output", is_flag=True, help="Print CMD's output to standard error instead of dropping it."
)
@options.plot("Draw time against memory.")
@options.output("all trials, rounds and settings")
@options.program()
def search(
    specs: tuple[str, ...],
    limit_s: float | None,
    trials: int | None,
    time_kind: str,
    memory_kind: str,
    prefer: str,
    memory_limit: float,
    seed: int | None,
    storage: str | None,
    study_name: str | None,
    show_output: bool,
    plot_path: Path | None,
    output: Output,
    cmd: tuple[str, ...],
) -> None:
    """Search settings of malloc that make CMD faster or smaller.

    Each run of a setting is paired with one of CMD as it is now. The best settings are measured again before
    they are reported, and the recommended one once more: a gain within noise is no gain. Ctrl-C keeps what is
    known.
    """
    if bool(storage) != bool(study_name):
        raise CalmError("--storage URL and --study NAME go together", USAGE)
    program.find(cmd[0])
    environment.tell()
    try:
        import_module("optuna")
    except ImportError as error:
        raise CalmError(
            "calm tune search needs optuna, which is not installed: pip install optuna"
        ) from error
    from calm.commands.tune.output import Progress, draw, print_report
    from calm.commands.tune.search import Budget, Search, Tuning
    from calm.commands.tune.study import Study, open_storage, redacted_url

    database = open_storage(storage) if storage else None
    spaces, notes = _chosen_spaces(specs, database, study_name, cmd)
    if limit_s is None and trials is None:
        limit_s = _DEFAULT_S
    budget = Budget(limit_s, trials)
    runner = ProgramRunner(cmd, time_kind == "cpu", memory_kind == "peak", show_output)

    def note_signal(number: int, _: FrameType | None) -> None:
        # The search ends between two runs, so that a database is never left in the middle of a trial.
        if runner.stop_signal is not None:
            raise KeyboardInterrupt
        runner.stop_signal = number

    with handled(note_signal):
        try:
            with (watcher := Progress(budget)):
                watcher.phase("first", 1)
                notes += _calibrate(runner, limit_s, memory_kind)
        except StoppedError as stopped:
            click.echo("calm: stopped before anything was known", err=True)
            raise SystemExit(128 + stopped.signal) from None
        for note in notes:
            click.echo(f"calm: {note}", err=True)
        result = Tuning(
            command=list(cmd),
            time=time_kind,
            memory="peak" if runner.by_peak else "average",
            allocators=list(spaces),
            machine=machine.describe(),
            baseline_wall_s=runner.wall_s,
            repeats=runner.repeats,
            limit_s=limit_s,
            max_trials=trials,
            preference=Preference(prefer, memory_limit),
            study={"storage": redacted_url(storage), "name": study_name} if storage and study_name else None,
        )
        host = socket.gethostname()
        study = Study(
            spaces,
            seed=seed,
            storage=database,
            name=study_name,
            identity={key: getattr(result, key) for key in ("command", "time", "memory", "allocators")},
            machine={"machine": host, "cpu": str(result.machine["cpu"]), "worker": f"{host}:{os.getpid()}"},
        )
        budget.runs_s.append(runner.wall_s * runner.repeats)
        with (watcher := Progress(budget)):
            Search(study, runner.run, budget, result, watcher).run()
        # The report takes a second; another Ctrl-C must not lose what was found.
        with handled(signal.SIG_IGN):
            if result.interrupted_by is not None:
                click.echo(f"calm: stopped after {result.trials} trials", err=True)
            elif result.failure:
                click.echo(f"calm: {result.failure}", err=True)
            printed = messages.notes(runner.messages)
            result.notes = [*environment.warnings(os.environ), *notes, *printed]
            with output.console() as console:
                print_report(result, printed, console)
            output.write(result)
            if plot_path and result.tried:
                draw(plot_path, result)
    raise SystemExit(
        128 + result.interrupted_by if result.interrupted_by else FAILED if result.failure else 0
    )


@command.command(
    "advise",
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  calm tune advise -- ./program its arguments
""",
)
@options.output("the findings, and the facts that they follow from,")
@options.program()
def advise(output: Output, cmd: tuple[str, ...]) -> None:
    """Run CMD two or three times, and advise settings by its counters.

    Unlike `calm tune search` this tries no setting.
    """
    program.find(cmd[0])
    environment.tell()
    from calm.commands.tune import advice

    raise SystemExit(advice.run(cmd, output))
