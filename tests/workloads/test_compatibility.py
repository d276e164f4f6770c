"""bench/compatibility: its configuration, runs and results of programs' own test suites."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from lib import compatibility  # noqa: E402
from lib.compatibility import (  # noqa: E402
    Program,
    Result,
    Root,
    Verdicts,
    keep,
    measure,
    read_programs,
    read_verdicts,
    text,
)
from lib.results import Store  # noqa: E402

# In a second or two, and with nothing that is not on any machine.
QUICK = ["namespaces", "gdb"]
LIBRARIES = ["libcalmalloc", "libptlbmalloc2"]


def test_programs_are_told_apart() -> None:
    programs = read_programs()
    assert len({program.name for program in programs}) == len({program.folder for program in programs})
    assert all(program.packages and program.what for program in programs)
    assert {program.suite for program in programs} <= {"bookworm", "trixie"}


@pytest.mark.parametrize("program", read_programs(), ids=lambda program: program.name)
def test_scripts_can_be_read_by_the_shell(program: Program) -> None:
    for script in (program.prepare, program.run):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_verdicts() -> None:
    said = "ok one\nnot ok two\nskip three\n ok four \nokay five\nok six: a (b)\nnot ok four\nok\n"
    assert read_verdicts(said) == Verdicts({"one", "six: a (b)"}, {"two", "four"})


def functions(*calls: str) -> Verdicts:
    """The output of the scripts' own functions for these calls."""
    (program,) = [each for each in read_programs() if each.name == "namespaces"]
    preamble = program.run.partition("for kind in")[0]
    done = subprocess.run(
        ["bash", "-uc", "\n".join([preamble, *calls])], capture_output=True, text=True, check=True
    )
    return read_verdicts(done.stdout)


def test_functions_of_the_scripts() -> None:
    verdicts = functions(
        "passes p1 true",
        "passes p2 false",
        "own() { echo mine; }",
        "passes p3 own",
        "gives g1 mine own",
        "gives g2 min own",
        "gives g3 '' true",
        "says s1 in own",
        "says s2 out own",
        "says s3 '^x$' sh -c 'echo x >&2; exit 3'",
        "passes p4 test -t 0",
    )
    assert verdicts == Verdicts({"p1", "p3", "g1", "g3", "s1", "s3"}, {"p2", "p4", "g2", "s2"})


PROGRAM = Program(name="Try", what="its tests", packages=["try"], run="")


def kept(store: Store, **lost: list[str]) -> dict[str, Any]:
    """The result of a program with three tests, one of which fails under glibc."""
    keep(store, Result(PROGRAM, Verdicts({"a", "b"}, {"c"}), dict(lost)))
    result: dict[str, Any] = json.loads((store.folder / "compatibility.json").read_text())
    return result["programs"]["Try"]


def test_results_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "read_programs", lambda: [PROGRAM])
    monkeypatch.setattr(compatibility, "_versions", lambda: {"jemalloc": "5"})
    store = Store(tmp_path)
    assert text(store) == ""
    kept(store, libcalmalloc=["a"])
    entry = kept(store, jemalloc=[])
    assert entry["lost"] == {"libcalmalloc": 1, "jemalloc": 0}
    assert entry["names"] == {"libcalmalloc": ["a"]}
    told = text(store)
    assert "| Try | its tests | 2 of 3 | all but 1 |  | all |  |" in told
    assert "jemalloc 5 |" in told
    assert "- Try, libcalmalloc: `a`" in told
    entry = kept(store, libcalmalloc=[])
    assert entry["lost"] == {"libcalmalloc": 0, "jemalloc": 0}
    assert "`a`" not in text(store)


def test_the_peers_may_be_run_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under glibc, too, some tests are flaky."""
    monkeypatch.setattr(compatibility, "read_programs", lambda: [PROGRAM])
    monkeypatch.setattr(compatibility, "_versions", dict)
    store = Store(tmp_path)
    kept(store, libcalmalloc=["a"])
    keep(store, Result(PROGRAM, Verdicts({"a", "b", "c"}), {"jemalloc": []}))
    assert "| Try | its tests | 3 of 3 | all but 1 |  | all |  |" in text(store)


def test_another_try_is_for_what_was_lost() -> None:
    runs: list[tuple[str | None, list[str]]] = []
    answers = iter([{"a", "b", "c"}, {"a"}, {"b"}, set(), {"a", "b", "c"}])

    class Known(Root):
        def prepare(self, program: Program) -> None: ...

        def run(self, program: Program, label: str | None, tests: Iterable[str] = ()) -> Verdicts:
            runs.append((label, list(tests)))
            return Verdicts(next(answers))

    result = measure(PROGRAM, Known(ROOT), ["libcalmalloc", "libptlbmalloc2"])
    assert result.lost == {"libcalmalloc": ["c"], "libptlbmalloc2": []}
    assert runs == [
        (None, []), ("libcalmalloc", []), ("libcalmalloc", ["b", "c"]), ("libcalmalloc", ["c"]),
        ("libptlbmalloc2", []),
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [["no-such-program"], ["-l", "no-such-library"]])
def test_unknown_names(arguments: list[str]) -> None:
    done = subprocess.run([ROOT / "bench/compatibility", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such" in done.stderr


def run_here(program: Program, folder: Path, preload: str) -> Verdicts:
    """Runs on this machine, with the library in the environment only."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "CALM_"))}
    subprocess.run(["bash", "-euc", program.prepare], cwd=folder, env=environment, check=True)
    done = subprocess.run(
        ["bash", "-uc", f"again=\nexport LD_PRELOAD={preload}\n{program.run}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
    )
    return read_verdicts(done.stdout)


@pytest.mark.parametrize("name", QUICK)
def test_what_passes_under_glibc(name: str, tmp_path: Path) -> None:
    """A part of the whole, which takes hours."""
    (program,) = [each for each in read_programs() if each.name == name]
    plain = run_here(program, tmp_path / "glibc", "").passed
    assert plain, f"{name}: nothing passes here"
    for label in LIBRARIES:
        lost = plain
        for number in range(compatibility.TRIES):  # as the whole does
            folder = tmp_path / f"{label}-{number}"
            lost = lost - run_here(program, folder, str(ROOT / compatibility.LIBRARIES[label])).passed
            if not lost:
                break
        assert not lost, f"{label}: {lost}"
