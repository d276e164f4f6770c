"""scripts/mutants, on sources of a few lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from calm_helpers import ROOT, load_script


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    return load_script("mutants")


C_SOURCE = """\
#include <assert.h>
#define LIMIT (1 < 2)
static const int table[2] = {1, 2};

/* a < b */
static bool fits(struct queue *queue, size_t bytes) {
    size_t left, taken;
    assert(bytes > 0 && queue != NULL);
    left = queue->limit - queue->used; // left < bytes
    if (left < bytes && !queue->grows) {
        note("too full: 1 < 2", left);
        return false;
    }
    char text[16] = {0};
    while (next(queue)) {
        if (queue->used == 0) {
            break;
        }
    }
    __atomic_thread_fence(0);
    return true;
}
"""

C_MUTANTS = {
    (9, "delete", "left = queue->limit - queue->used", ""),
    (9, "arithmetic", "-", "+"),
    (10, "boundary", "<", "<="),
    (10, "negate", "<", ">="),
    (10, "logic", "&&", "||"),
    (10, "not", "!", ""),
    (11, "delete", 'note("too full: 1 < 2", left)', ""),
    (12, "boolean", "false", "true"),
    (16, "negate", "==", "!="),
    (16, "number", "0", "1"),
    (17, "jump", "break", "continue"),
    (21, "boolean", "true", "false"),
}

PYTHON_SOURCE = '''\
"""Number 1 of them."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 3


@dataclass(frozen=True)
class Queue:
    """Holds no more than it may."""

    limit: int = 5

    @option("--number", default=4)
    def fits(self, used: int, text: str = "é") -> "Literal[1]":
        """Whether there is room for 1."""
        assert used > 0
        if text == "é" and self.limit is not None or not used < 10:
            self.note(f"{used + 1}")
            return False
        self.left = self.limit - used
        return "left: " + self.left
'''

PYTHON_MUTANTS = {
    (12, "number", "5", "6"),
    (18, "negate", "==", "!="),
    (18, "logic", "and", "or"),
    (18, "negate", "is not", "is"),
    (18, "logic", "or", "and"),
    (18, "not", "not ", ""),
    (18, "boundary", "<", "<="),
    (18, "negate", "<", ">="),
    (18, "number", "10", "11"),
    (19, "delete", 'self.note(f"{used + 1}")', "pass"),
    (20, "boolean", "False", "True"),
    (21, "delete", "self.left = self.limit - used", "pass"),
    (21, "arithmetic", "-", "+"),
    (22, "return", 'return "left: " + self.left', "return None"),
}


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [("src/queue.c", C_SOURCE, C_MUTANTS), ("calm/queue.py", PYTHON_SOURCE, PYTHON_MUTANTS)],
)
def test_mutants_are_made_of_code_alone(
    mutants: ModuleType, file: str, source: str, expected: set[tuple[int, str, str, str]]
) -> None:
    found = mutants.mutants_of(file, source)
    assert {(one.line, one.operator, one.before, one.after) for one in found} == expected
    assert len({one.key for one in found}) == len(expected)
    for one in found:
        lines = source.splitlines()
        line = lines[one.line - 1]
        lines[one.line - 1] = line[: one.column] + one.after + line[one.column + len(one.before) :]
        assert one.apply(source).splitlines() == lines != source.splitlines()


def test_sample_keeps_the_mutants_of_lines_that_stay(
    mutants: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "GROUPS", (mutants.Group(("src/",), (".c",), 30),))
    sources = {f"src/{name}.c": C_SOURCE.replace("queue", name) for name in "abcdefghij"}

    def keys(sources: dict[str, str]) -> set[str]:
        found = [one for file, source in sources.items() for one in mutants.mutants_of(file, source)]
        return {one.key for one in mutants.sample(1, found)}

    taken = keys(sources)
    assert len(taken) == 30
    assert max(sum(key.startswith(file) for key in taken) for file in sources) <= mutants.MAX_PER_FILE
    moved = {
        file: source.replace("#include <assert.h>\n", "#include <assert.h>\n\n/* New. */\n\n")
        for file, source in reversed(sources.items())
    }
    assert keys(moved) == taken
    # A new line may be taken itself, and pushes out as many; a replaced one makes way for one other.
    longer = {
        file: source.replace("    return true;", "    used++;\n    return true;")
        for file, source in sources.items()
    }
    assert {key for key in keys(longer) if "used++" not in key} <= taken
    found = [one for file, source in sources.items() for one in mutants.mutants_of(file, source)]
    replaced = min(taken)
    again = {one.key for one in mutants.sample(1, found, frozenset({replaced}))}
    assert taken - again == {replaced}
    assert len(again) == 30


def test_equal_lines_are_told_apart(mutants: ModuleType) -> None:
    source = "void f(void) {\n    x = 1 + 1;\n    x = 1 + 1;\n}\n"
    keys = [one.key for one in mutants.mutants_of("src/f.c", source)]
    assert len(keys) == len(set(keys)) == 8


@pytest.fixture
def place(mutants: ModuleType, tmp_path: Path) -> Iterator[object]:
    place = mutants.Place(tmp_path)
    yield place
    place.end()


def test_outcomes(mutants: ModuleType, place: object, tmp_path: Path) -> None:
    """One mutant fails the test, one hangs it, and one passes; the file is always put back."""
    source = (
        "def f(n):\n    while n < 3:\n        n += 1\n    return n\n\n\ndef unused():\n    return 1 + 1\n"
    )
    file = tmp_path / "module.py"
    file.write_text(source)
    test = "import module, sys; sys.exit(module.f(0) != 3)"
    step = mutants.Step("test_f", (sys.executable, "-c", test), timeout=60.0)
    found = {(one.line, one.operator): one for one in mutants.mutants_of("module.py", source)}

    def attempt(line: int, operator: str, timeout: float = 60.0) -> tuple[str, str]:
        given = mutants.replace(step, timeout=timeout)
        outcome = place.attempt(found[line, operator], [given])  # type: ignore[attr-defined]
        assert file.read_text() == source
        return outcome.outcome, outcome.by

    assert attempt(2, "boundary") == ("killed", "test_f")
    assert attempt(4, "return") == ("killed", "test_f")
    assert attempt(8, "arithmetic") == ("survived", "")
    assert attempt(3, "delete", 0.5) == ("timeout", "test_f")


def test_builds(mutants: ModuleType, place: object, tmp_path: Path) -> None:
    """What does not compile, or compiles to the same, is no mutant. Tests of an equal build do not run."""
    source = "int f(int n) {\n    int unused = 1;\n    return n < 3;\n}\n"
    (tmp_path / "f.c").write_text(source)
    product = tmp_path / "f.so"
    build = mutants.Step(
        "build", ("cc", "-O1", "-shared", "-fPIC", "-o", str(product), "f.c"), products=(product,)
    )
    assert place.run(build.command, 60.0) == 0  # type: ignore[attr-defined]
    place.remember([product])  # type: ignore[attr-defined]
    fails = mutants.Step("test", ("false",))
    found = {(one.line, one.operator): one for one in mutants.mutants_of("f.c", source)}

    def attempt(mutant: object) -> str:
        outcome: str = place.attempt(mutant, [build, fails]).outcome  # type: ignore[attr-defined]
        return outcome

    assert attempt(found[3, "boundary"]) == "killed"
    assert attempt(found[2, "number"]) == "same code"
    assert attempt(mutants.replace(found[3, "boundary"], after="(")) == "not compiled"


def test_results_are_continued_and_compared(mutants: ModuleType, tmp_path: Path) -> None:
    def results(tree: str) -> object:
        return mutants.Results(tmp_path / "results.json", 1, "abc", tree)

    first, second = mutants.mutants_of("calm/f.py", "def f(a, b):\n    return a + b\n")
    kept = results("1")
    kept.add(first, mutants.Outcome("killed", "test_f"), 0.25)  # type: ignore[attr-defined]
    kept.add(second, mutants.Outcome("survived"), 1.0)  # type: ignore[attr-defined]
    assert results("1").mutants == kept.mutants  # type: ignore[attr-defined]
    assert results("2").mutants == {}  # type: ignore[attr-defined]
    lines = (tmp_path / "results.json").read_text().splitlines()
    assert sum(json.loads(line.rstrip(","))["file"] == "calm/f.py" for line in lines if '"key"' in line) == 2
    old = kept.mutants  # type: ignore[attr-defined]
    new = {key: mutant | {"outcome": "survived"} for key, mutant in old.items()}
    assert mutants.lost_since(old, new) == [first.key]
    assert mutants.lost_since(old, {}) == []
    assert mutants.lost_since(new, old) == []


def test_survivors_that_are_not_known_fail(mutants: ModuleType, tmp_path: Path) -> None:
    outcomes = {"a|x < y|b 0|0": "survived", "b": "survived", "c": "killed", "d": "same code"}
    found = {key: {"outcome": outcome} for key, outcome in outcomes.items()}
    known = tmp_path / "known"
    known.write_text("# Equivalent: x never is y.\na|x < y|b 0|0\n\nc\n")
    assert mutants.read_known_survivors(known) == ["a|x < y|b 0|0", "c"]
    assert mutants.unknown_survivors(mutants.read_known_survivors(known), found) == ["b"]


def test_known_survivors_are_of_lines_that_there_are(mutants: ModuleType) -> None:
    possible = {mutant.key for mutant in mutants.candidates_of(ROOT)}
    assert set(mutants.read_known_survivors(mutants.KNOWN_SURVIVORS)) <= possible


def test_a_full_disk_kills_no_mutant(
    mutants: ModuleType, place: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module.py").write_text("N = 1\n")
    fails = mutants.Step("test", ("false",), timeout=60.0)
    (mutant,) = mutants.mutants_of("module.py", "N = 1\n")
    assert place.attempt(mutant, [fails]).outcome == "killed"  # type: ignore[attr-defined]
    monkeypatch.setattr(mutants, "ROOM_LEAST", 1 << 60)
    with pytest.raises(mutants.MutationError, match="is full"):
        place.attempt(mutant, [fails])  # type: ignore[attr-defined]


def test_what_is_no_earlier_result_is_told(mutants: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(mutants.MutationError, match="is no earlier result"):
        mutants.read_earlier(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(mutants.MutationError, match="is no earlier result"):
        mutants.read_earlier(tmp_path / "other.json")
