"""bench/emulated: what is run on the machine, and what becomes of its figures; without any machine."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lab_qemu
import pytest
from calm_helpers import ROOT

from calm.core import measure
from calm.core.errors import CalmError
from calm.core.progress import Bar
from research.lab import session
from research.lab.guest import Run
from research.lab.machine import Qemu, Topology
from research.lab.packages import Parts
from research.lab.session import Outcome, Plan

sys.path.insert(0, str(ROOT / "bench"))

from lib import guest, paper_figures
from lib.guest import CALMALLOC, PTLBMALLOC2, Settings, Work

LIBRARY = guest.RELEASE / f"lib{CALMALLOC}.so"
pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="calmalloc is not built")

SETTINGS = Settings(Path("/cache"), 60)
ACTIVE = {
    f"lib{CALMALLOC}.so": '{"allocator": "calmalloc", "heap_locks": 7}',
    f"lib{PTLBMALLOC2}.so": '{"pid": 1, "active": true}',
}

Ran = Callable[..., list[Plan]]


def run_of(label: str, interrupts: int, errors: str = "") -> Run:
    return Run(label, measure.parse(json.loads(lab_qemu.report(interrupts))), errors=errors)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """In place of the machine: each turn counts its number, from 1, in each round ten times as many."""

    def prepare(errors: Mapping[str, str] = ACTIVE, **changes: Any) -> list[Plan]:
        plans = []

        def run(plan: Plan, _: Bar) -> Outcome:
            plans.append(plan)
            found = Outcome(plan, Qemu("/q/qemu", "9"), Parts(Path("/k"), "k 1", Path("/b")), "tcg", "no", 1)
            for number in range(plan.rounds):
                for place, turn in enumerate(plan.turns, 1):
                    library = Path(turn.variables.get("LD_PRELOAD", "")).name
                    said = errors.get(library, "")
                    found.runs.append((number, run_of(turn.label, place * 10**number, said)))
            for name, value in changes.items():
                setattr(found, name, value)
            return found

        monkeypatch.setattr(session, "run", run)
        return plans

    return prepare


def work(library: Path | None = None) -> Work:
    made = Work()
    made.add("one", ("listing1",), library)
    return made


@pytest.mark.parametrize("failure", [{"failures": {"one": "it hung"}}, {"stopped": "it hung"}])
def test_figures_with_holes_are_no_figures(ran: Ran, failure: dict[str, Any]) -> None:
    ran(**failure)
    with pytest.raises(CalmError, match="it hung"):
        guest.measure(work(), 1, Topology(2, 1), SETTINGS)


def test_an_interrupt_ends_it(ran: Ran) -> None:
    ran(interrupted_by=2)
    with pytest.raises(SystemExit) as ended:
        guest.measure(work(), 1, Topology(2, 1), SETTINGS)
    assert ended.value.code == 130


def test_the_guest_has_what_a_turn_needs(ran: Ran) -> None:
    plans = ran()
    _, runs = guest.measure(work(LIBRARY), 2, Topology(4, 2), SETTINGS)
    assert [run.label for run in runs] == ["one", "one"]
    (plan,) = plans
    assert (plan.rounds, plan.topology, plan.cache) == (2, Topology(4, 2), SETTINGS.cache)
    (turn,) = plan.turns
    assert turn.variables["CALM_OPTIONS"] == "report=exit"
    for path in (turn.command[0], turn.variables["LD_PRELOAD"]):
        assert str(Path(path).resolve()) in plan.payload.entries


@pytest.mark.parametrize(
    ("name", "errors"),
    [
        (CALMALLOC, "listing1: something else"),
        (PTLBMALLOC2, '{"pid": 1, "active": false}'),
    ],
)
def test_a_library_that_was_not_there_is_no_figure(name: str, errors: str) -> None:
    library = Path(f"lib{name}.so")
    with pytest.raises(CalmError, match=f"lib{name}.so was not active"):
        guest.report_of(library, run_of("one", 1, errors))
    assert guest.report_of(library, run_of("one", 1, f"words\n{ACTIVE[library.name]}\nmore"))
    assert guest.report_of(Path("libother.so"), run_of("one", 1)) == {}


def test_figure_1a_is_of_calls_by_cpus(ran: Ran) -> None:
    plans = ran()
    result = paper_figures.figure_1a(3, SETTINGS)
    assert plans[0].topology == Topology(20, 1)
    first, second, *_, last = result["rows"]
    assert (first["cpus"], first["pinned_to"], first["other_cpus"]) == (1, "0-0", 0)
    assert (last["cpus"], last["pinned_to"], last["other_cpus"]) == (20, "0-19", 15)
    # Its turns are the first two of each round, and the next one's those behind them.
    assert first["touched"]["interrupts"] == [1, 10, 100]
    assert second["untouched"]["interrupts"] == [4, 40, 400]
    assert second["untouched"]["shootdowns"] == [2, 20, 200]
    assert second["untouched"]["interrupts_per_call"] == 40 / (16 * 300)
    touched, untouched = plans[0].turns[:2]
    assert touched.command[1:] == (*untouched.command[1:], "--pages", "own", "--touch")
    assert paper_figures.table_of("1a", result).splitlines()[3] == "| 2 | 0.01 | 0.01 | 1 |"


def test_figure_1b_is_of_twelve_cpus_by_sockets(ran: Ran) -> None:
    plans = ran()
    result = paper_figures.figure_1b(1, SETTINGS)
    assert plans[0].topology == Topology(48, 4)
    assert [row["pinned_to"] for row in result["rows"]] == [
        "0-11",
        "0-5,12-17",
        "0-3,12-15,24-27",
        "0-2,12-14,24-26,36-38",
    ]
    assert {row["other_cpus"] for row in result["rows"]} == {11}


def test_figure_3_is_of_programs_by_allocators(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_figures.shutil, "which", lambda _: None)  # type: ignore[attr-defined]
    ran()
    result = paper_figures.figure_3(3, SETTINGS)
    assert result["left_out"] == ["vips"]
    assert [row["program"] for row in result["rows"]] == [f"{name}-like" for name in paper_figures.STAND_INS]
    row = result["rows"][1]
    assert [row[label]["median_interrupts"] for label in ("glibc", PTLBMALLOC2, CALMALLOC)] == [40, 50, 60]
    table = paper_figures.table_of("3", result).splitlines()
    assert table[3] == "| canneal-like | 40 | 50 | 60 |"
    ran(errors={})
    with pytest.raises(CalmError, match="was not active"):
        paper_figures.figure_3(1, SETTINGS)
