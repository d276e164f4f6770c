"""`calm predict`: the cost of shootdowns on another machine, and the gain of offload on this one."""

from __future__ import annotations

import click

from calm.core import allocators, comparison, options, program
from calm.core.errors import USAGE, CalmError
from calm.core.measure import TLB_GROUP
from calm.core.options import Output
from research.predict import calibration, offload, offload_inputs, shootdowns
from research.predict.calibration import Calibration
from research.predict.model import ENVIRONMENTS, Target

_CPUS = click.IntRange(1, 1 << 20)
_FILE = click.Path()
_GHZ = options.FloatRange(0.1, 20)


def _one_of(**given: object) -> None:
    names = [name for name, value in given.items() if value]
    if len(names) != 1:
        *others, last = given
        what = f"one of {', '.join(others)} or {last} is needed"
        raise CalmError(what + (f", not {' and '.join(names)} at once" if names else ""), USAGE)


def _calibration(what: str, command: str) -> options.Decorator:
    return click.option(
        "--calibration",
        "calibration_path",
        type=_FILE,
        metavar="FILE",
        help=f"{what}, from `{command} --json FILE`. Default: what it kept without --json.",
    )


@click.group("predict")
def command() -> None:
    """Predict the cost of TLB shootdowns on another machine, and the gain of offload on this one."""


@command.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  calm predict run --cpus 64 --sockets 4 --virt -a glibc,calmalloc -- build/release/listing1
  calm predict run --cpus 64 --sockets 4 --compare compared.json
  calm predict run --cpus 32 --profile glibc.json --profile calmalloc.json
""",
)
@click.option("--cpus", type=_CPUS, metavar="N", required=True, help="CPUs of the machine to predict for.")
@click.option(
    "--sockets", type=_CPUS, metavar="N", default=1, show_default=True, help="Sockets they are spread over."
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
    metavar="N",
    help="The number of the program's threads that run at once. Default: as many as it started.",
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    type=_FILE,
    metavar="FILE",
    help="A file of `calm profile --json`. May be given several times; ratios are to the first.",
)
@click.option(
    "--compare",
    type=_FILE,
    metavar="FILE",
    help="A file of `calm compare --json` or `calm bench run --json`.",
)
@click.option("--case", metavar="CASE", help="This case alone of a suite's file. Default: all together.")
@options.allocator_list("Run CMD now under these, as `calm compare` does.")
@options.rounds(3, "Rounds of CMD that count.")
@click.option("--ghz", type=_GHZ, metavar="GHZ", help="That machine's clock. Default: this machine's.")
@_calibration("The cost of an interrupt", "calm calibrate shootdowns")
@options.output()
@options.program(required=False)
def run(
    cpus: int,
    sockets: int,
    virt: bool,
    overcommit: bool,
    threads: int | None,
    profiles: tuple[str, ...],
    compare: str | None,
    case: str | None,
    specs: tuple[str, ...],
    rounds: int,
    ghz: float | None,
    calibration_path: str | None,
    output: Output,
    cmd: tuple[str, ...],
) -> None:
    """Predict the cost of TLB shootdowns on another machine.

    Starts from counts for each allocator: in profiles, in a comparison, or in runs of CMD made now. The cost
    of an interrupt is from `calm calibrate shootdowns` and from the published model; the report states all
    assumptions.
    """
    if sockets > cpus:
        raise CalmError(f"--sockets {sockets}: {cpus} CPUs cannot be spread over so many", USAGE)
    if cpus % sockets:
        raise CalmError(f"--sockets {sockets}: {cpus} CPUs are not a multiple of it", USAGE)
    _one_of(**{"--profile": profiles, "--compare": compare, "-a with a CMD": cmd or specs})
    if bool(cmd) != bool(specs):
        raise CalmError("-a and a CMD need each other: -a glibc,calmalloc -- CMD", USAGE)
    if case is not None and not compare:
        raise CalmError("--case is about a file of --compare", USAGE)
    # Before the runs, not after them.
    missing = "this machine is not calibrated: `calm calibrate shootdowns` measures its cost of an interrupt"
    known, notes = calibration.given_or_kept(
        calibration_path, Calibration, "the calibration is not used", [missing]
    )
    code = 0
    if profiles:
        found = shootdowns.from_profiles(profiles)
    elif compare:
        found = shootdowns.from_file(compare, case)
    else:
        calibration.check_interrupts("count")
        sides = allocators.parse_list(specs)
        comparison.warn(cmd, sides)
        compared, code = comparison.run(cmd, sides, rounds, [TLB_GROUP])
        found = shootdowns.from_comparison(compared)
    found.notes += notes
    if found.programs:
        environments = list(ENVIRONMENTS)[: 3 if overcommit else 2 if virt else 1]
        target = Target(cpus, sockets, threads)
        shootdowns.print_prediction(shootdowns.make(found, target, known, ghz, environments), output)
    raise SystemExit(code)


@command.command(
    "offload",
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  calm predict offload -- build/release/larson
  calm predict offload --profile calmalloc.json --figures cache_misses=94360,large=389
""",
)
@click.option(
    "--figures",
    multiple=True,
    metavar="NAME=VALUE,…",
    help="Figures that replace those found. "
    f"{'; '.join(f'{name}: {what}' for name, what in offload.FIGURES.items())}.",
)
@click.option(
    "--cpus", type=_CPUS, metavar="N", help="CPUs that may be used. Default: those of this process."
)
@click.option(
    "--profile", type=_FILE, metavar="FILE", help="A file of `calm profile --json` under calmalloc."
)
@options.rounds(3, "Rounds of CMD that count.")
@click.option("--ghz", type=_GHZ, metavar="GHZ", help="The clock that counts cycles.")
@_calibration("The cost of a message", "calm calibrate messages")
@options.output()
@options.program(required=False)
def offload_command(
    figures: tuple[str, ...],
    cpus: int | None,
    profile: str | None,
    rounds: int,
    ghz: float | None,
    calibration_path: str | None,
    output: Output,
    cmd: tuple[str, ...],
) -> None:
    """Predict whether an allocator on a CPU of its own would pay.

    Starts from a few runs of CMD under calmalloc, from its profile, or from figures, and from the cost of a
    message between CPUs here.
    """
    if profile or cmd or not figures:
        _one_of(**{"--profile": profile, "--figures": False, "a CMD": cmd})
    given = offload_inputs.parse_figures(figures)
    if cmd:
        program.find(cmd[0])
    # Before the runs, not after them.
    measured, costs = None, None
    notes: list[str] = []
    try:
        measured, notes = calibration.messages(calibration_path)
        costs = offload.latency(measured, ghz)
    except calibration.UnmeasuredError as error:
        notes = [f"messages are not measured: {error}"]
    if cmd:
        found = offload_inputs.from_runs(cmd, rounds)
    elif profile:
        found = offload_inputs.from_profile(profile)
    else:
        found = offload.Found(offload.Work())
    found.notes += notes
    here = offload_inputs.cpus_here() if cpus is None else offload.Cpus(cpus)
    offload.print_prediction(offload.make(found, given, here, measured, costs), output)
