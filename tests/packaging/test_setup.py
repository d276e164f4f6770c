"""scripts/setup on incomplete machines: one line that names the problem, and nothing half installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from packaging_helpers import REPOSITORY
from waiting import TIMEOUT_S

TOOLS = ("cat", "cp", "dirname", "env", "grep", "head", "mkdir", "rm", "sh", "sleep", "tail", "touch", "tr")

# The commands that setup runs; each notes its call, and reads from the machine's files what it is to do.
FAKES = {
    "id": 'cat "$MACHINE/uid"',
    "dpkg-query": 'shift 3; for name; do grep -qx "$name" "$MACHINE/installed" && echo installed; done; :',
    "apt-cache": 'grep -x "$2" "$MACHINE/known"; :',
    "apt-get": """
        case $1 in
        update) cat "$MACHINE/update" ;;
        install)
            shift
            if [ -s "$MACHINE/install" ]; then cat "$MACHINE/install" >&2; exit 100; fi
            for name; do echo "$name" >>"$MACHINE/installed"; done
        esac""",
    "sudo": 'if [ -s "$MACHINE/sudo" ]; then cat "$MACHINE/sudo" >&2; exit 1; fi; "$@"',
    "python3": 'mkdir -p .venv/bin && cp "$MACHINE/bin/venv-python" .venv/bin/python',
    "venv-python": """
        [ "$1" != -c ] || exit 0
        if [ -e "$MACHINE/hang" ]; then touch "$MACHINE/hanging"; sleep 300; fi
        cat "$MACHINE/pip" >&2
        [ ! -s "$MACHINE/pip" ] && head -c "$(cat "$MACHINE/bytes")" /dev/zero >.venv/package""",
}


class Machine:
    """A checkout with the files that scripts/setup needs, and a PATH without the system's package tools."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkout = folder / "checkout"
        self.venv = self.checkout / ".venv"
        (self.checkout / "scripts").mkdir(parents=True)
        shutil.copy(REPOSITORY / "scripts/setup", self.checkout / "scripts")
        (self.checkout / "research").mkdir()
        for name in ("pyproject.toml", "research/pyproject.toml"):
            shutil.copy(REPOSITORY / name, self.checkout / name)
        (folder / "bin").mkdir()
        for tool in TOOLS:
            (folder / "bin" / tool).symlink_to(shutil.which(tool) or pytest.fail(f"there is no {tool}"))
        for name, body in FAKES.items():
            fake = folder / "bin" / name
            note = f'printf \'%s\\n\' "{name} $*" >>"$MACHINE/calls"'
            fake.write_text(f"#!/bin/sh\n{note}\n{body}\n")
            fake.chmod(0o755)
        for file in ("calls", "installed", "known", "update", "install", "sudo", "pip"):
            self.says(file, "")
        self.says("uid", "0")
        self.says("bytes", "10")

    def says(self, file: str, text: str) -> None:
        (self.folder / file).write_text(f"{text}\n" if text else "")

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    @property
    def installs(self) -> list[str]:
        """The packages that apt-get was called to install."""
        calls = [call.split() for call in self.calls if call.startswith("apt-get install")]
        return [word for call in calls for word in call[2:] if not word.startswith("-")]

    def command(self, stage: str) -> tuple[list[str], dict[str, str]]:
        setup = self.checkout / "scripts/setup"
        return [str(setup), stage], {"PATH": f"{self.folder}/bin", "MACHINE": str(self.folder)}

    def setup(self, stage: str = "demo", status: int = 0) -> subprocess.CompletedProcess[str]:
        command, variables = self.command(stage)
        result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert result.returncode == status, result.stdout + result.stderr
        return result

    def refuses(self, *parts: str) -> None:
        """Checks that setup fails with one line that contains these parts."""
        said = self.setup(status=1).stderr.splitlines()
        assert len(said) == 1, said
        assert said[0].startswith("scripts/setup: ")
        for part in parts:
            assert part in said[0]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without any packages."""
    return Machine(tmp_path)


@pytest.fixture
def complete(machine: Machine) -> Machine:
    """A machine on which setup has succeeded."""
    machine.setup()
    machine.says("calls", "")
    return machine


def test_all_is_installed_and_then_nothing_is_done(machine: Machine) -> None:
    machine.says("known", "libmimalloc2.0")
    said = machine.setup().stdout
    assert "gcc" in said
    assert {"gcc", "cmake", "libmimalloc2.0"} <= set(machine.installs)
    machine.says("calls", "")
    done = machine.setup()
    assert (done.stdout, done.stderr) == ("", "")
    assert {call.split()[0] for call in machine.calls} == {"dpkg-query", "venv-python"}


def test_only_what_is_missing_is_installed(complete: Machine) -> None:
    installed = (complete.folder / "installed").read_text()
    complete.says("installed", installed.replace("ninja-build\n", ""))
    complete.setup()
    assert complete.installs == ["ninja-build"]


def test_of_alternatives_the_one_that_there_is(machine: Machine) -> None:
    machine.says("known", "libtcmalloc-minimal4\nlibmimalloc3")
    machine.setup()
    assert {"libtcmalloc-minimal4", "libmimalloc3"} <= set(machine.installs)
    assert not {"libtcmalloc-minimal4t64", "libmimalloc2.0"} & set(machine.installs)


def test_check_adds_to_demo_and_not_the_other_way(complete: Machine) -> None:
    complete.setup("check")
    assert "clang" in complete.installs
    assert "gcc" not in complete.installs
    assert any(call.endswith("-e .[dev] -e research") for call in complete.calls)
    complete.says("calls", "")
    complete.setup("demo")
    assert not any("pip install" in call for call in complete.calls)


def test_docs_take_python_alone_and_check_has_them(machine: Machine) -> None:
    machine.setup("docs")
    assert machine.installs == ["python3", "python3-venv"]
    assert any(call.endswith("-e .[docs] -e research") for call in machine.calls)
    machine.says("calls", "")
    machine.setup("demo")
    assert not any("pip install" in call for call in machine.calls)
    machine.setup("check")
    machine.says("calls", "")
    machine.setup("docs")
    assert not any("pip install" in call for call in machine.calls)


def test_no_such_stage(machine: Machine) -> None:
    assert "'chekc' is none of demo," in machine.setup("chekc", status=2).stderr
    assert machine.calls == []


def test_user_with_sudo(machine: Machine) -> None:
    machine.says("uid", "1000")
    machine.setup()
    assert next(call for call in machine.calls if call.startswith("sudo")) == "sudo apt-get update -qq"


def test_user_without_sudo(machine: Machine) -> None:
    machine.says("uid", "1000")
    (machine.folder / "bin/sudo").unlink()
    machine.refuses("not root and no sudo; please install: gcc libc6-dev")
    assert not machine.installs
    assert not machine.venv.exists()


def test_user_whom_sudo_refuses(machine: Machine) -> None:
    machine.says("uid", "1000")
    machine.says("sudo", "user is not in the sudoers file.")
    machine.refuses("could not install gcc", "not in the sudoers file", "run this again")
    assert not machine.venv.exists()


def test_no_debian(machine: Machine) -> None:
    (machine.folder / "bin/apt-get").unlink()
    machine.refuses("no apt-get", "please install", "gcc")


UNREACHABLE = "W: Failed to fetch http://mirror/InRelease  Temporary failure resolving 'mirror'"


@pytest.mark.parametrize(
    ("update", "install", "why"),
    [
        ("", "E: Unable to locate package ninja-build\nE: Unable to locate package gcc", "ninja-build)"),
        (UNREACHABLE, "E: Unable to locate package gcc", "Temporary failure resolving 'mirror')"),
        (
            UNREACHABLE,
            "E: Package 'gcc' has no installation candidate",
            "Temporary failure resolving 'mirror')",
        ),
        (
            "",
            "E: Failed to fetch http://mirror/gcc.deb  Timed out\nE: Unable to fetch some archives",
            "(E: Failed to fetch http://mirror/gcc.deb  Timed out)",
        ),
        # A source that has nothing to do with it is not the reason.
        (
            UNREACHABLE,
            "E: You don't have enough free space in /var/cache/apt/archives/.",
            "enough free space",
        ),
        ("", "dpkg: error: no line of apt's own", "no line of apt's own"),
    ],
    ids=["package", "network", "candidate", "archive", "disk", "other"],
)
def test_apt_fails(machine: Machine, update: str, install: str, why: str) -> None:
    machine.says("update", update)
    machine.says("install", install)
    machine.refuses("apt-get could not install gcc", why, "run this again")
    assert not machine.venv.exists()
    machine.says("install", "")
    machine.setup()


NO_SPACE = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
NO_ANSWER = "WARNING: Retrying\nERROR: No matching distribution found for click>=8.1"


@pytest.mark.parametrize("pip", [NO_SPACE, NO_ANSWER, "killed"], ids=["disk", "network", "other"])
def test_pip_fails(machine: Machine, pip: str) -> None:
    machine.says("pip", pip)
    machine.refuses(pip.splitlines()[-1], "run this again")
    assert not machine.venv.exists()
    machine.says("pip", "")
    machine.setup()
    assert (machine.venv / "package").exists()


@pytest.mark.parametrize("package", ["", "research"])
def test_environment_that_is_complete_survives_a_failing_update(complete: Machine, package: str) -> None:
    (complete.folder / "checkout" / package / "pyproject.toml").write_text("other")
    complete.says("pip", NO_ANSWER)
    complete.refuses("No matching distribution")
    assert (complete.venv / "package").exists()
    complete.says("calls", "")
    complete.says("pip", "")
    complete.setup()
    assert any("pip install" in call for call in complete.calls)
    assert not any(call.startswith("python3") for call in complete.calls)


def test_environment_without_pip_is_made_anew(complete: Machine) -> None:
    (complete.venv / "bin/python").unlink()
    (complete.venv / "remains").touch()
    complete.setup()
    assert (complete.venv / "package").exists()
    assert not (complete.venv / "remains").exists()


def test_interrupted(machine: Machine) -> None:
    machine.says("hang", "yes")
    command, variables = machine.command("demo")
    with subprocess.Popen(
        command, env=variables, start_new_session=True, stdout=subprocess.DEVNULL
    ) as running:
        deadline = time.monotonic() + TIMEOUT_S
        while not (machine.folder / "hanging").exists():
            assert time.monotonic() < deadline, "pip was not reached"
            time.sleep(0.01)
        # To all of the group, as a terminal's ^C is; but that one may be ignored where the tests run.
        os.killpg(running.pid, signal.SIGTERM)
        assert running.wait() == 130
    assert not machine.venv.exists()


def test_disk_that_is_full(machine: Machine) -> None:
    """A small disk, on which pip's files do not fit."""
    as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    in_namespaces = ("unshare", *as_root, "--mount")
    if subprocess.run([*in_namespaces, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("unshare gives no namespace to mount a small disk in")
    small = machine.folder / "small"
    small.mkdir()
    machine.says("bytes", "1000000")
    script = f"""
        mount -t tmpfs -o size=100k tmpfs {small}
        cp -r {machine.checkout}/. {small}
        PATH={machine.folder}/bin MACHINE={machine.folder} {small}/scripts/setup demo
        status=$?
        ls -A {small}
        exit $status"""
    result = subprocess.run([*in_namespaces, "sh", "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "No space left on device" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout.split()[-3:] == ["pyproject.toml", "research", "scripts"]
