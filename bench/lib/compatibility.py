"""Programs' own test suites, in a Debian with a library in every process; and the table of what they say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .results import REPOSITORY

TRIES = 3
PATIENCE_S = 3600
FOLDER = REPOSITORY / "build/compatibility"
RESULTS = REPOSITORY / "bench/results/compatibility.json"
DOCS = REPOSITORY / "docs/compatibility.md"
OURS = ("libcalmalloc", "libptlbmalloc2")
LIBRARIES = {
    "libcalmalloc": "build/release/libcalmalloc.so",
    "libptlbmalloc2": "build/release/libptlbmalloc2.so",
    "jemalloc": "build/peers/lib/libjemalloc.so",
    "mimalloc": "build/peers/lib/libmimalloc.so",
}
_VERDICT = re.compile(r"(ok|not ok) (.+)")


class MissingError(Exception):
    """Something that must be built or installed first."""


@dataclass(frozen=True)
class Program:
    """One of bench/compatibility.toml."""

    name: str
    what: str
    packages: list[str]
    run: str
    prepare: str = ""
    suite: str = "bookworm"

    @property
    def folder(self) -> str:
        """Where it is prepared, below the root."""
        return "srv/" + re.sub(r"[^a-z0-9]+", "-", self.name.lower())


def read_programs() -> list[Program]:
    """All of them, in their order."""
    text = (REPOSITORY / "bench/compatibility.toml").read_text()
    return [Program(**entry) for entry in tomllib.loads(text)["program"]]


@dataclass
class Verdicts:
    """What one run of a program's suite said, by test."""

    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def summary(self) -> str:
        """In a few words."""
        return f"{len(self.passed)} passed, {len(self.failed)} failed"


def read_verdicts(output: str) -> Verdicts:
    """Of lines "ok NAME" and "not ok NAME"; a test that did both did not pass."""
    verdicts = Verdicts()
    for line in output.splitlines():
        found = _VERDICT.fullmatch(line.strip())
        if found and found[1] == "ok":
            verdicts.passed.add(found[2])
        elif found and found[1] == "not ok":
            verdicts.failed.add(found[2])
    verdicts.passed -= verdicts.failed
    return verdicts


@dataclass(frozen=True)
class Root:
    """A Debian in a folder. One program at a time."""

    folder: Path

    @classmethod
    def made(cls, suite: str) -> Root:
        """Of a suite, made where it is not there yet."""
        folder = FOLDER / suite
        if not (folder / "made").exists():
            shutil.rmtree(folder / "root", ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            script = str(REPOSITORY / "scripts/debian-root")
            subprocess.run(
                [script, "make", suite, str(folder / "root")], check=True, stdin=subprocess.DEVNULL
            )
            subprocess.run([script, "run", str(folder / "root"), "useradd", "-m", "tester"], check=True)
            (folder / "made").touch()
        return cls(folder / "root")

    @property
    def _preload(self) -> Path:
        return self.folder / "etc/ld.so.preload"

    def _command(self, script: str, folder: str) -> list[str]:
        words = [str(REPOSITORY / "scripts/debian-root"), "run", str(self.folder), "env"]
        words += ["LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"]
        return [*words, "bash", "-uc", f"cd /{folder} || exit 1\n{script}"]

    def prepare(self, program: Program) -> None:
        """Installs what it needs, and prepares its folder: once."""
        self._preload.unlink(missing_ok=True)
        prepared = self.folder / program.folder / "prepared"
        script = f"set -e\n{program.prepare}"
        known = prepared.parent / "known"
        inputs = "\n".join([*program.packages, script])
        if known.exists() and known.read_text() == inputs:
            return
        shutil.rmtree(prepared.parent, ignore_errors=True)
        prepared.mkdir(parents=True)
        packages = " ".join(program.packages)
        install = f"apt-get -qq update && apt-get -qq install -y --no-install-recommends {packages}"
        log = (FOLDER / f"{program.folder.replace('/', '-')}-prepare.log").open("w")
        with log:
            for step, folder in ((install, "srv"), (script, f"{program.folder}/prepared")):
                subprocess.run(
                    self._command(step, folder), check=True, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT,
                )  # fmt: skip
        known.write_text(inputs)

    def _install(self, label: str | None) -> str:
        """Puts a library into every process of the root. Returns its path there."""
        if label is None:
            return ""
        library = REPOSITORY / LIBRARIES[label]
        if not library.is_file():
            raise MissingError(f"{LIBRARIES[label]} is not built: make all peers")
        place = Path("usr/local/lib") / library.name
        shutil.copy(library, self.folder / place)
        self._preload.write_text(f"/{place}\n")
        return f"/{place}"

    def run(self, program: Program, label: str | None) -> Verdicts:
        """In a fresh copy of what was prepared."""
        work = f"{program.folder}/work"
        shutil.rmtree(self.folder / work, ignore_errors=True)
        subprocess.run(
            ["cp", "-a", str(self.folder / program.folder / "prepared"), str(self.folder / work)], check=True
        )
        path = self._install(label)
        try:
            check = f"grep -q {path} /proc/self/maps || exit 99\n" if path else ""
            done = subprocess.run(
                self._command(check + program.run, work), stdin=subprocess.DEVNULL, capture_output=True,
                text=True, errors="replace", timeout=PATIENCE_S,
            )  # fmt: skip
        finally:
            self._preload.unlink(missing_ok=True)
        log = FOLDER / f"{program.folder.replace('/', '-')}-{label or 'glibc'}.log"
        log.write_text(done.stdout + done.stderr)
        if done.returncode == 99:
            raise MissingError(f"{path} was not loaded in the root: see {log}")
        return read_verdicts(done.stdout)


@dataclass
class Result:
    """Of one program: what passes under glibc, and what of that does not under each library."""

    program: Program
    passed: list[str]
    failed: list[str]
    lost: dict[str, list[str]] = field(default_factory=dict)


def keep(result: Result) -> None:
    """Adds it to the results, in place of an earlier one of the program and its libraries."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    before = results.get(result.program.name, {})
    same = before.get("passed") == len(result.passed)
    results[result.program.name] = {
        "what": result.program.what,
        "suite": result.program.suite,
        "passed": len(result.passed),
        "failed": len(result.failed),
        "lost": (before.get("lost", {}) if same else {}) | result.lost,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def _cell(entry: dict[str, Any], label: str) -> str:
    lost = entry["lost"].get(label)
    return "" if lost is None else "all" if not lost else f"all but {len(lost)}"


def table() -> list[str]:
    """One line for each program that has a result."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    lines = [
        "| program | what was run | pass under glibc | " + " | ".join(LIBRARIES) + " |",
        "| --- | --- | ---: |" + " --- |" * len(LIBRARIES),
    ]
    for program in read_programs():
        entry = results.get(program.name)
        if entry is not None:
            total = entry["passed"] + entry["failed"]
            cells = [f"{program.name} ({entry['suite']})", entry["what"], f"{entry['passed']} of {total}"]
            cells += [_cell(entry, label) for label in LIBRARIES]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def lost_lines() -> list[str]:
    """What each library lost, by name."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return [
        f"- {name}, {label}: {', '.join(f'`{test}`' for test in lost)}"
        for name, entry in results.items()
        for label, lost in entry["lost"].items()
        if lost
    ]


def write_table() -> None:
    """Into the document, between its marks."""
    text = DOCS.read_text()
    for mark, lines in (("table", table()), ("lost", lost_lines())):
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = before + begin + "\n".join([*lines, ""]) + end + after
    DOCS.write_text(text)
