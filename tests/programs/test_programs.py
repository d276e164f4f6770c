"""Real programs give the same results with and without the library, which is verified to be active."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from inputs import PROGRAMS, WORDS, Program
from preload import Plain, Runner, program

SOURCES = Path(__file__).parent


@dataclass(frozen=True)
class Output:
    """Named, so that a failure identifies the output that differs without printing it."""

    stdout: str
    files: dict[str, str]


def output_of(case: Program, runner: Runner, folder: Path) -> Output:
    """Runs a program in a separate folder, with its inputs beside it."""
    inputs, work = folder / "inputs", folder / "work"
    inputs.mkdir()
    work.mkdir()
    stdout = runner.run([program(case.binary, case.package), *case.write_inputs(inputs)], work)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(work.iterdir())}
    assert stdout or files, "the program wrote nothing"
    return Output(hashlib.sha256(stdout.encode()).hexdigest(), files)


@pytest.fixture(scope="module")
def plain_output(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Program], Output]:
    """The output of each program without a library, computed once."""
    known: dict[str, Output] = {}

    def get(case: Program) -> Output:
        if case.name not in known:
            folder = tmp_path_factory.mktemp(f"plain-{case.name}")
            known[case.name] = output_of(case, Plain(folder), folder)
        return known[case.name]

    return get


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_same_output(
    case: Program, plain_output: Callable[[Program], Output], preloaded: Runner, tmp_path: Path
) -> None:
    assert output_of(case, preloaded, tmp_path) == plain_output(case)
    preloaded.assert_active()


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The program and its expected output, built once."""
    folder = tmp_path_factory.mktemp("threads")
    binary, plain = folder / "threads", Plain(folder)
    compiler = [program("g++", "g++"), "-std=c++17", "-O2", "-pthread"]
    plain.run([*compiler, "-o", str(binary), str(SOURCES / "threads.cpp")], folder)
    return binary, plain.run([str(binary)], folder)


def test_threaded_cpp(threads: tuple[Path, str], preloaded: Runner, tmp_path: Path) -> None:
    binary, expected = threads
    for _ in range(3):
        assert preloaded.run([str(binary)], tmp_path) == expected
    preloaded.assert_active()


def git_history(folder: Path, runner: Runner) -> str:
    """Creates a repository of two commits, packs it with threads, and describes its contents."""
    git = program("git", "git")
    folder.mkdir()
    identity = {
        f"GIT_{role}_{field}": value
        for role in ("AUTHOR", "COMMITTER")
        for field, value in (("NAME", "A"), ("EMAIL", "a@example.org"), ("DATE", "2020-01-01T00:00:00Z"))
    }
    # Nothing from the user's own configuration, and no repository found above.
    identity |= {"HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1", "XDG_CONFIG_HOME": str(folder)}
    identity["GIT_CEILING_DIRECTORIES"] = str(folder.parent)

    def run(*words: str) -> str:
        return runner.run([git, *words], folder, **identity)

    run("init", "-q", "-b", "main", ".")
    for generation in range(2):
        for i in range(500):
            path = folder / f"{WORDS[i % len(WORDS)]}/{i}.txt"
            path.parent.mkdir(exist_ok=True)
            words = (WORDS[(i * j + generation) % len(WORDS)] for j in range(i % 400))
            path.write_text(f"{i}\n" + "\n".join(words))
        run("add", ".")
        run("commit", "-q", "-m", f"generation {generation}")
    run("-c", "pack.threads=4", "-c", "gc.auto=0", "gc", "-q", "--aggressive", "--prune=now")
    run("fsck", "--full", "--strict")
    listed = run("cat-file", "--batch-all-objects", "--batch-check")
    return run("log", "--format=%H %T", "--stat") + listed


@pytest.fixture(scope="module")
def plain_git(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The result without a library, computed once."""
    folder = tmp_path_factory.mktemp("plain-git")
    return git_history(folder / "work", Plain(folder))


def test_git(plain_git: str, preloaded: Runner, tmp_path: Path) -> None:
    assert git_history(tmp_path / "preloaded", preloaded) == plain_git
    preloaded.assert_active()
