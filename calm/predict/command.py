"""`calm predict`: what shootdowns would cost on another machine, and what offload would save on this one."""

import json
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from calm import allocators, compare, machine, options, program, ranges, report, said, topology
from calm.errors import USAGE, CalmError
from calm.measure import TLB_GROUP
from calm.predict import calibration, inputs, model, offload_report
from calm.predict.calibration import Calibration
from calm.predict.inputs import Inputs
from calm.predict.model import (
    ENVIRONMENTS,
    LOCAL_CYCLES,
    NATIVE,
    OVERCOMMIT,
    OVERCOMMITTED,
    REMOTE,
    VIRT,
    VIRTUAL,
    Estimate,
    Prediction,
    Span,
    Target,
)
from calm.predict.offload import FIGURES

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Costs:
    """What an interrupt costs, by all that is known; the first is the one to go by."""

    estimates: list[Estimate]
    here_ns: float
    ghz: float
    notes: list[str]


@dataclass(frozen=True)
class Report:
    """All predictions: by environment, one for each allocator."""

    target: Target
    costs: Costs
    inputs: Inputs
    predictions: Mapping[str, list[Prediction]]

    def ratio(self, environment: str, index: int) -> Span | None:
        """Of all CPU time, to the first allocator's.

        What an interrupt costs is the same for both, and so is how many threads there are. How many more
        calls begin a shootdown is each one's own affair.
        """
        base, own = self.predictions[environment][0], self.predictions[environment][index]
        if base.total_s == 0:
            return None
        value = own.total_s / base.total_s
        if own is base:
            return Span(value, value, value)
        mine, its = own.interrupts, base.interrupts
        each_ns = model.interrupt_ns(self.costs.estimates, environment, self.target.sockets)
        edges = [
            (own.rest_s + count * ns * 1e-9) / (base.rest_s + other * ns * 1e-9)
            for ns in (each_ns.low, each_ns.high)
            for count, other in (
                (mine.low, its.low),
                (mine.value, its.high),
                (mine.high, its.value),
                (mine.high, its.high),
            )
            if base.rest_s + other > 0
        ]
        return Span(value, min([value, *edges]), max([value, *edges]))


def clock_ghz(cpuinfo: str) -> float | None:
    """Of the CPU that runs the fastest: one that sleeps may have a fifth of it. None where it is not told."""
    found = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", cpuinfo, re.MULTILINE)
    return max(map(float, found), default=0.0) / 1000 or None


def _calibration(path: str | None) -> tuple[Calibration | None, list[str]]:
    """The user's; or that of the cache, which may be missing or of another machine."""
    if path is not None:
        return calibration.load_of_this_machine(Path(path)), []
    cached = calibration.default_path()
    if not cached.exists():
        return None, [
            "this machine is not calibrated: `calm calibrate` measures what an interrupt costs here"
        ]
    try:
        return calibration.load_of_this_machine(cached), []
    except CalmError as error:
        return None, [f"the calibration is not used: {error}"]


def costs(path: str | None, ghz: float | None, here: bool) -> Costs:
    """Of this machine if it is calibrated, and the published ones."""
    found, notes = _calibration(path)
    mhz = found.reference_mhz if found else None
    own_ghz = mhz / 1000 if mhz else clock_ghz(Path("/proc/cpuinfo").read_text())
    if ghz is None and own_ghz is None:
        raise CalmError(
            "the clock of this machine's CPUs is not known: give that of the other by --ghz", USAGE
        )
    # The other machine's clock; of this one, where it is not known, there is no better guess.
    ghz, own_ghz = ghz or own_ghz or 0.0, own_ghz or ghz or 0.0
    published_ns = LOCAL_CYCLES / ghz
    estimates = [Estimate("published", published_ns, published_ns, published_ns)]
    sockets = len(topology.sockets())
    here_ns = LOCAL_CYCLES / own_ghz
    if here:
        here_ns *= model.environment_factor(VIRT if topology.is_virtual() else NATIVE, sockets, REMOTE)
    if found:
        measured = found.costs.local_ns
        # A guest's own interrupts have the price of virtualization in them.
        divisor = VIRTUAL if found.machine["virtual"] else 1.0
        remote = REMOTE if found.costs.remote is None else found.costs.remote
        low, high = found.local_low_ns or measured, found.local_high_ns or measured
        source = "calibrated here"
        if here:
            here_ns = measured * model.socket_factor(sockets, remote)
        # As many cycles, by the other machine's clock.
        faster = ghz / own_ghz if mhz else 1.0
        if divisor != 1.0 or faster != 1.0:
            source += f"{', in a virtual machine' if divisor != 1.0 else ''}: {measured:,.0f} ns"
            source += f" at {own_ghz:.2f} GHz" if faster != 1.0 else ""
            source += f", divided by the published {divisor:g}" if divisor != 1.0 else ""
        native, low, high = (each / divisor / faster for each in (measured, low, high))
        estimates.insert(0, Estimate(source, native, low, high, remote))
    if not here:
        notes.append(
            "the figures were counted on another machine: its shootdowns are taken to cost as published, "
            "native and within a socket"
        )
    return Costs(estimates, here_ns, ghz, notes)


def make(found: Inputs, target: Target, known: Costs, environments: Sequence[str]) -> Report:
    """Predicts for each environment and allocator."""
    predictions = {}
    for environment in environments:
        each_ns = model.interrupt_ns(known.estimates, environment, target.sockets)
        predictions[environment] = [
            model.total([model.predict(each, target, known.here_ns, each_ns) for each in programs])
            for programs in found.programs.values()
        ]
    for label, programs in found.programs.items():
        if any(each.interrupts * known.here_ns * 1e-9 > each.cpu_s for each in programs):
            found.notes.append(
                f"{label}: at {known.here_ns:,.0f} ns each its interrupts would have taken more than all its "
                "CPU time, so nothing is left for all else"
            )
    return Report(target, known, found, predictions)


def _threads(found: Inputs, target: Target) -> str:
    if target.threads is not None:
        return f"{target.threads} of its threads run at once, as --threads says"
    counted = [each.threads for programs in found.programs.values() for each in programs]
    known = [each for each in counted if each is not None]
    if len(known) < len(counted):
        return "how many threads it has is unknown, so on every CPU (--threads says how many)"
    least, most = min(known), max(known)
    number = f"{most:,.0f}" if least == most else f"{least:,.0f} to {most:,.0f}"
    return f"all its threads ({number} with the first) run at once; the least is without the first"


def assumptions(made: Report) -> list[str]:
    """What the figures rest on, in sentences."""
    target, known = made.target, made.costs
    first = known.estimates[0]
    spread = model.socket_factor(target.sockets, first.remote)
    sockets = "one socket" if target.sockets == 1 else f"{target.sockets} sockets"
    any_calls = any(each.calls is not None for group in made.inputs.programs.values() for each in group)
    lines = [
        "the work is the same: all but shootdowns takes the same CPU time, and as many shootdowns begin as "
        f"on the {made.inputs.cpus} CPUs where they were counted"
        + (", or at most as many as there were calls that may begin one" if any_calls else ""),
        f"a shootdown interrupts every other CPU that runs the program: {_threads(made.inputs, target)}",
        f"a native interrupt within a socket takes {first.local_ns:,.0f} ns ({first.source})"
        + (
            f"; the published {LOCAL_CYCLES:,.0f} cycles are {known.estimates[-1].local_ns:,.0f} ns"
            if len(known.estimates) > 1
            else f": {LOCAL_CYCLES:,.0f} cycles"
        )
        + f" at {known.ghz:.2f} GHz",
        f"over {sockets} it takes {spread:.2f} times as long (1/s + n (1 - 1/s), n = {first.remote:g}"
        f"{', published' if first.remote == REMOTE else ''})",
    ]
    if VIRT in made.predictions:
        lines.append(f"virtual machines: {VIRTUAL:g} times, as published")
    if OVERCOMMIT in made.predictions:
        lines.append(
            f"several on the same CPUs, sockets hidden from them: {OVERCOMMITTED:g} times a native one "
            "within a socket, as published; what sockets cost is in that"
        )
    if len(known.estimates) > 1:
        lines.append(
            "ranges are from the least to the most that the calibration and the published constants give"
        )
    lines.append(
        "CPUs that invalidate TLBs by broadcast (arm64; x86 with INVLPGB) would send no interrupts at all"
    )
    return lines


def as_json(made: Report) -> dict[str, Any]:
    """Everything."""
    sides = []
    for index, (label, programs) in enumerate(made.inputs.programs.items()):
        there = {}
        for environment, found in made.predictions.items():
            each, ratio = found[index], made.ratio(environment, index)
            there[environment] = {
                "interrupts": asdict(each.interrupts),
                "shootdown_s": asdict(each.shootdown_s),
                "rest_s": each.rest_s,
                "cpu_s": each.total_s,
                "share": asdict(each.share),
                "ratio": asdict(ratio) if ratio else None,
            }
        sides.append({"label": label, "observed": [asdict(each) for each in programs], "predicted": there})
    return {
        "calm_prediction": 1,
        "target": asdict(made.target),
        "estimates": [asdict(each) for each in made.costs.estimates],
        "interrupt_ns_where_counted": made.costs.here_ns,
        "ghz": made.costs.ghz,
        "assumptions": assumptions(made),
        "notes": made.inputs.notes + made.costs.notes,
        "allocators": sides,
    }


def _range(span: Span, text: Callable[[float], str]) -> str:
    return "" if span.low == span.high else f"{text(span.low)} to {text(span.high)}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or share == 0 else "under 0.1%"


def _table(made: Report) -> "Table":
    table = report.table()
    table.add_column("", no_wrap=True)
    for heading in ("interrupts", "their CPU time", "range", "share", "all CPU time", "ratio", "range"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "range" else "right")
    for environment, found in made.predictions.items():
        table.add_row(f"{ENVIRONMENTS[environment]}:", style="bold")
        for index, each in enumerate(found):
            ratio = made.ratio(environment, index)
            table.add_row(
                f"  {each.label}",
                f"{each.interrupts.value:,.0f}",
                report.duration(each.shootdown_s.value),
                _range(each.shootdown_s, report.duration),
                _percent(each.share.value),
                report.duration(each.total_s),
                f"{ratio.value:.3g}" if ratio else "-",
                _range(ratio, "{:.3g}".format) if ratio and index else "",
            )
    return table


def _print(made: Report, to_stderr: bool) -> None:
    console = report.console(sys.stderr if to_stderr else sys.stdout)
    target = made.target
    on = "one socket" if target.sockets == 1 else f"{target.sockets} sockets"
    console.print(f"{target.cpus} CPUs on {on}", style="bold")
    report.print_table(console, _table(made))
    for line in assumptions(made):
        console.print(f"assumed: {line}", soft_wrap=True)
    for line in made.inputs.notes + made.costs.notes:
        console.print(f"note: {line}", soft_wrap=True)


def _measure(specs: Sequence[str], rounds: int, cmd: tuple[str, ...]) -> tuple[Inputs | None, int]:
    """Runs made now, and what to exit with."""
    broadcast = machine.broadcast_here()
    if broadcast and broadcast.always:
        raise CalmError(f"{broadcast.note}, so there is nothing to count here")
    if int(machine.describe()["cpus"]) == 1:
        raise CalmError("on one CPU no TLB interrupt is sent, so there is nothing to count here")
    sides = [compare.Side(allocator) for allocator in allocators.parse_list(specs)]
    program.find(cmd[0])
    if any(side.allocator.library for side in sides) and (obstacle := program.preload_obstacle(cmd)):
        click.echo(f"calm: {obstacle}", err=True)
    comparison = compare.Comparison(cmd, rounds, sides, broadcast)
    compare.run_rounds(comparison, [TLB_GROUP], False)
    code = 1 if any(side.failure for side in sides) else 0
    if comparison.interrupted_by is not None:
        # What is left to do takes a moment; another Ctrl-C must not lose what was measured.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        done = max(len(side.runs) for side in sides)
        click.echo(f"calm: stopped after {done} of {rounds} rounds", err=True)
        code = 128 + comparison.interrupted_by
    found = inputs.from_runs(comparison)
    found.notes += said.notes(comparison.said)
    if broadcast:
        found.notes.append(broadcast.note)
    return (found if found.programs else None), code


def _check_target(cpus: int, sockets: int) -> None:
    if sockets > cpus:
        raise CalmError(f"--sockets {sockets}: {cpus} CPUs cannot be spread over so many", USAGE)
    if cpus % sockets:
        raise CalmError(f"--sockets {sockets}: {cpus} CPUs are not a multiple of it", USAGE)


def _check_offload(profiles: Sequence[str], figures: Sequence[str], cmd: Sequence[str]) -> None:
    """Which options and arguments go together."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        unwanted = name in ("sockets", "virt", "overcommit", "threads", "comparison", "case", "specs")
        if unwanted and context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise CalmError(f"{parameter.opts[0]} does not go with --offload", USAGE)
    if not cmd and context.get_parameter_source("rounds") == ParameterSource.COMMANDLINE:
        raise CalmError("-n is about runs of CMD, and there is none", USAGE)
    if len(profiles) > 1:
        raise CalmError("--offload starts from one --profile", USAGE)
    if bool(profiles) == bool(cmd) and (profiles or not figures):
        what = "one of --profile, --figures or a CMD is needed for --offload"
        raise CalmError(what + (", not --profile and CMD at once" if cmd else ""), USAGE)


@click.command(
    "predict",
    context_settings={"allow_interspersed_args": False},
    epilog="\b\nExamples:\n"
    "  calm predict --cpus 64 --sockets 4 --virt -a glibc,calmalloc -- build/release/listing1\n"
    "  calm predict --cpus 64 --sockets 4 --compare compared.json\n"
    "  calm predict --cpus 32 --profile glibc.json --profile calmalloc.json\n"
    "  calm predict --offload -- build/release/larson",
)
@click.option(
    "--offload",
    "of_offload",
    is_flag=True,
    help="Predict instead what calmalloc's option offload would save: the allocator on a CPU of its own.",
)
@click.option(
    "--figures",
    multiple=True,
    metavar="NAME=VALUE,…",
    help="With --offload: figures to go by, in place of those that are found. "
    f"{'; '.join(f'{name}: {what}' for name, what in FIGURES.items())}.",
)
@click.option(
    "--cpus",
    type=click.IntRange(1, 1 << 20),
    help="CPUs of the machine to predict for. Needed; with --offload, those that may be used here otherwise.",
)
@click.option(
    "--sockets",
    type=click.IntRange(1, 1 << 10),
    default=1,
    show_default=True,
    help="Sockets they are spread over.",
)
@click.option("--virt", is_flag=True, help="Also in a virtual machine.")
@click.option(
    "--overcommit",
    is_flag=True,
    help="Also in one of several virtual machines on the same CPUs; implies --virt.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="How many of the program's threads run at once. Default: as many as it started.",
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    type=click.Path(),
    metavar="FILE",
    help="What `calm profile --json` wrote. May be given several times; ratios are to the first.",
)
@click.option(
    "--compare",
    "comparison",
    type=click.Path(),
    metavar="FILE",
    help="What `calm compare --json` or `calm bench -o` wrote.",
)
@click.option(
    "--case", metavar="CASE", help="Of a `calm bench` file, this case alone. Default: all together."
)
@options.allocator_list("Run CMD now under these, as `calm compare` does.")
@click.option(
    "-n", "rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds of CMD that count."
)
@click.option("--ghz", type=ranges.FloatRange(0.1, 20), help="That machine's clock. Default: this machine's.")
@click.option(
    "--calibration",
    "calibration_path",
    type=click.Path(),
    metavar="FILE",
    help="What `calm calibrate --json` wrote; with --offload, what `calm calibrate --messages --json` did. "
    "Default: what was kept without --json.",
)
@options.json_file()
@options.program(required=False)
def command(
    of_offload: bool,
    figures: tuple[str, ...],
    cpus: int | None,
    sockets: int,
    virt: bool,
    overcommit: bool,
    threads: int | None,
    profiles: tuple[str, ...],
    comparison: str | None,
    case: str | None,
    specs: tuple[str, ...],
    rounds: int,
    ghz: float | None,
    calibration_path: str | None,
    json_path: str | None,
    cmd: tuple[str, ...],
) -> None:
    """Predict what TLB shootdowns would cost on another machine, under each allocator.

    Starts from what was counted: in profiles, in a comparison, or in runs of CMD made now. What an interrupt
    costs is from `calm calibrate` and from the published model; all that is assumed is printed.

    With --offload: whether running the allocator on a CPU of its own would pay, from a few runs of CMD under
    calmalloc, from its profile, or from figures, and from what a message between CPUs costs here.
    """
    if of_offload:
        _check_offload(profiles, figures, cmd)
        if json_path and json_path != "-":
            report.check_writable(json_path)
        profile = profiles[0] if profiles else None
        offload_report.run(cmd, profile, figures, rounds, cpus, ghz, calibration_path, json_path)
        return
    if figures:
        raise CalmError("--figures goes with --offload", USAGE)
    if cpus is None:
        raise click.UsageError("Missing option '--cpus'.", click.get_current_context())
    _check_target(cpus, sockets)
    given = [
        name for name, value in (("--profile", profiles), ("--compare", comparison), ("CMD", cmd)) if value
    ]
    if len(given) != 1:
        what = "one of --profile, --compare, or -a with a CMD is needed"
        raise CalmError(what + (f", not {' and '.join(given)} at once" if given else ""), USAGE)
    if bool(cmd) != bool(specs):
        raise CalmError("-a and a CMD need each other: -a glibc,calmalloc -- CMD", USAGE)
    if case is not None and not comparison:
        raise CalmError("--case is about a file of --compare", USAGE)
    if json_path and json_path != "-":
        report.check_writable(json_path)
    if calibration_path is not None:
        # Before the runs, not after them.
        calibration.load_of_this_machine(Path(calibration_path))
    code, found = 0, None
    if profiles:
        found = inputs.from_profiles(profiles)
    elif comparison:
        found = inputs.from_file(comparison, case)
    else:
        found, code = _measure(specs, rounds, cmd)
    if found:
        environments = [
            NATIVE,
            *([VIRT] if virt or overcommit else []),
            *([OVERCOMMIT] if overcommit else []),
        ]
        made = make(
            found, Target(cpus, sockets, threads), costs(calibration_path, ghz, found.here), environments
        )
        _print(made, json_path == "-")
        if json_path:
            report.write(json_path, json.dumps(as_json(made), indent=2) + "\n")
    raise SystemExit(code)
