"""Programs' own test suites in a Debian with a library in every process, and the table of their results."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.core.allocators import dated

from .results import REPOSITORY, Store

if TYPE_CHECKING:
    from collections.abc import Iterable

TRIES = 3
TIMEOUT_S = 3600
FOLDER = REPOSITORY / "build/compatibility"
NAME = "compatibility"
# Relative to the root.
PREPARED = "srv/prepared"
OURS = ("libcalmalloc", "libptlbmalloc2")
LIBRARIES = {
    "libcalmalloc": "build/release/libcalmalloc.so",
    "libptlbmalloc2": "build/release/libptlbmalloc2.so",
    "jemalloc": "build/peers/lib/libjemalloc.so",
    "mimalloc": "build/peers/lib/libmimalloc.so",
}
_VERDICT = re.compile(r"(ok|not ok) (.+)")


class MissingError(Exception):
    """A requirement that must be built or installed first."""


@dataclass(frozen=True)
class Program:
    """A program of bench/compatibility.toml."""

    name: str
    what: str
    packages: list[str]
    run: str
    prepare: str = ""
    suite: str = "bookworm"

    @property
    def folder(self) -> str:
        """A name for its files."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower())


def read_programs() -> list[Program]:
    """All programs, in the file's order."""
    known = tomllib.loads((REPOSITORY / "bench/compatibility.toml").read_text())
    return [Program(**entry | {"run": known["functions"] + entry["run"]}) for entry in known["program"]]


@dataclass
class Verdicts:
    """The outcomes of one run of a program's suite, by test."""

    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


def read_verdicts(output: str) -> Verdicts:
    """Parses lines "ok NAME" and "not ok NAME"; a test with both did not pass."""
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
    """A Debian in a folder, for one program."""

    folder: Path

    @classmethod
    def made(cls, program: Program) -> Root:
        """Installs Debian, unless it is there."""
        folder = FOLDER / program.folder
        if not (folder / "made").exists():
            shutil.rmtree(folder / "root", ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            script = str(REPOSITORY / "scripts/debian-root")
            subprocess.run(
                [script, "make", program.suite, str(folder / "root")], check=True, stdin=subprocess.DEVNULL
            )
            user = ["useradd", "-m", "-p", "*", "tester"]  # no password fits, and it is not locked
            subprocess.run([script, "run", str(folder / "root"), *user], check=True)
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
        """Installs the program's packages, and prepares its folder, once."""
        self._preload.unlink(missing_ok=True)
        prepared = self.folder / PREPARED
        script = f"set -e\n{program.prepare}"
        known = prepared.parent / "known"
        inputs = "\n".join([*program.packages, script])
        if known.exists() and known.read_text() == inputs:
            return
        shutil.rmtree(prepared, ignore_errors=True)
        prepared.mkdir(parents=True)
        packages = " ".join(program.packages)
        install = "dpkg --configure -a && apt-get -qq update && "
        install += f"apt-get -qq install -y --no-install-recommends {packages}"
        log = (self.folder.parent / "prepare.log").open("w")
        with log:
            for step, folder in ((install, "srv"), (script, PREPARED)):
                subprocess.run(
                    self._command(step, folder), check=True, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT,
                )  # fmt: skip
        known.write_text(inputs)

    def _install(self, label: str | None) -> str:
        """Preloads a library into every process of the root. Returns its path there."""
        if label is None:
            return ""
        library = REPOSITORY / LIBRARIES[label]
        if not library.is_file():
            raise MissingError(f"{LIBRARIES[label]} is not built: make all peers")
        place = Path("usr/local/lib") / library.name
        shutil.copy(library, self.folder / place)
        self._preload.write_text(f"/{place}\n")
        return f"/{place}"

    def run(self, program: Program, label: str | None, tests: Iterable[str] = ()) -> Verdicts:
        """Runs the suite, or the named tests again, in a fresh copy of the prepared folder."""
        work = "srv/work"
        shutil.rmtree(self.folder / work, ignore_errors=True)
        subprocess.run(["cp", "-a", str(self.folder / PREPARED), str(self.folder / work)], check=True)
        path = self._install(label)
        try:
            check = f"grep -q {path} /proc/self/maps || exit 99\n" if path else ""
            again = "again=" + shlex.quote("\n".join(tests)) + "\n"
            done = subprocess.run(
                self._command(check + again + program.run, work), stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
            )  # fmt: skip
        finally:
            self._preload.unlink(missing_ok=True)
        log = self.folder.parent / f"{label or 'glibc'}{'-again' if tests else ''}.log"
        log.write_text(done.stdout + done.stderr)
        if done.returncode == 99:
            raise MissingError(f"{path} was not loaded in the root: see {log}")
        return read_verdicts(done.stdout)


@dataclass
class Result:
    """A program's result: the tests that pass under glibc, and those of them lost under each library."""

    program: Program
    plain: Verdicts
    lost: dict[str, list[str]] = field(default_factory=dict)


def measure(program: Program, root: Root, wanted: list[str]) -> Result:
    """Runs one program's suite under glibc, and then under each library."""
    root.prepare(program)
    start = time.monotonic()
    plain = root.run(program, None)
    counts = f"{len(plain.passed)} passed, {len(plain.failed)} failed"
    print(f"{program.name}: glibc: {counts} in {time.monotonic() - start:.0f} s", flush=True)
    if not plain.passed:
        raise MissingError(f"{program.name}: no test passes under glibc: see {root.folder.parent}/glibc.log")
    result = Result(program, plain)
    for label in wanted:
        lost = plain.passed - root.run(program, label).passed
        for _ in range(TRIES - 1):
            if lost:
                lost -= root.run(program, label, sorted(lost)).passed
        result.lost[label] = sorted(lost)
        shown = f": {', '.join(sorted(lost)[:10])}" if lost else ""
        print(f"{program.name}: {label}: {len(lost)} lost{shown}", flush=True)
    return result


def _versions() -> dict[str, str]:
    path = REPOSITORY / "build/peers/lib/versions.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    return {
        label: str(dated(known[label]["version"], known[label].get("date")))
        for label in LIBRARIES
        if label in known
    }


def keep(store: Store, result: Result) -> None:
    """Adds an entry to the results, replacing that of the same program and libraries.

    Results of other libraries are kept: each is relative to the run of glibc at that time.
    """
    known: dict[str, Any] = store.load(NAME) or {}
    programs: dict[str, Any] = known.get("programs", {})
    program = result.program
    before = programs.get(program.name, {})
    programs[program.name] = {
        "what": program.what,
        "suite": program.suite,
        "passed": len(result.plain.passed),
        "failed": len(result.plain.failed),
        "lost": before.get("lost", {}) | {label: len(names) for label, names in result.lost.items()},
        "names": before.get("names", {}) | result.lost,
    }
    order = [each.name for each in read_programs()]
    versions = known.get("versions", {}) | _versions()  # those of libraries that are not built here stay
    store.save(
        NAME, {"versions": versions, "programs": {name: programs[name] for name in order if name in programs}}
    )


def _cell(entry: dict[str, Any], label: str) -> str:
    lost = entry["lost"].get(label)
    return "" if lost is None else f"all but {lost}" if lost else "all"


def text(store: Store) -> str:
    """The table, and the lost tests by name; empty without a result."""
    results = store.load(NAME)
    if results is None:
        return ""
    versions = results.get("versions", {})
    labels = [f"{label} {versions.get(label, '')}".strip() for label in LIBRARIES]
    lines = ["", "| program | what was run | pass under glibc | " + " | ".join(labels) + " |"]
    lines.append("| --- | --- | ---: |" + " --- |" * len(LIBRARIES))
    for name, entry in results["programs"].items():
        cells = [name, entry["what"], f"{entry['passed']} of {entry['passed'] + entry['failed']}"]
        lines.append("| " + " | ".join([*cells, *(_cell(entry, label) for label in LIBRARIES)]) + " |")
    lost = [
        f"- {name}, {label}: {', '.join(f'`{test}`' for test in tests)}"
        for name, entry in results["programs"].items()
        for label, tests in entry.get("names", {}).items()
        if tests
    ]
    lines += ["", "Lost tests:", "", *lost] if lost else ["", "No test was lost."]
    machine = results["machine"]
    lines += ["", f"{machine['cpus']} CPUs ({machine['cpu']}), Linux {machine['kernel']}.", "", ""]
    return "\n".join(lines)
