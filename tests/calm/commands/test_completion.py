"""Completion, in real shells: commands, options, and allocators in a list."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from calm_helpers import ROOT, Calm, leaves
from waiting import TIMEOUT_S

SHELLS = ("bash", "zsh", "fish")
INSTALLED = ROOT / "packaging/completions"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With calm on the path, and nothing of the user's own."""
    home = tmp_path_factory.mktemp("home")
    (home / "some-file").touch()
    calm = home / "bin/calm"
    calm.parent.mkdir()
    calm.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m calm "$@"\n')
    calm.chmod(0o755)
    path = f"{calm.parent}:{os.environ['PATH']}"
    return {"HOME": str(home), "PATH": path, "TERM": "dumb", "LC_ALL": "C.UTF-8"}


def needs(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    return path


def bash(environment: dict[str, str], load: str, *words: str) -> list[str]:
    """What bash would offer for the last word."""
    script = (
        f'{load}\nCOMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()\n'
        '_calm_completion calm\n[ ${#COMPREPLY[@]} = 0 ] || printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = [needs("bash"), "--norc", "-c", script, "bash", *words]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def fish(environment: dict[str, str], load: str, line: str) -> list[str]:
    """The same of fish, without what it says of each."""
    command = [needs("fish"), "--no-config", "-c", f'{load}\ncomplete -C "{line}"']
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [each.split("\t")[0] for each in result.stdout.splitlines()]


def typed(environment: dict[str, str], command: list[str], load: str, line: str, wanted: str) -> str:
    """What an interactive shell shows until the wanted text is there, once the line and a TAB were typed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(environment["HOME"])
        os.execve(command[0], command, environment)
    seen = ""
    try:
        # The shell's answer holds the sum, and its echo of what was typed does not.
        os.write(terminal, f"{load}; echo ready-$((40 + 2))\n".encode())
        for text, then in (("ready-42", f"{line}\t"), (wanted, "")):
            seen, deadline = "", time.monotonic() + TIMEOUT_S
            while text not in seen:
                assert time.monotonic() < deadline, seen
                if select.select([terminal], [], [], 0.5)[0]:
                    seen += os.read(terminal, 4096).decode(errors="replace")
            os.write(terminal, then.encode())
        return seen
    finally:
        os.close(terminal)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def having(parameter: str) -> list[str]:
    """The commands, with their modes, that have a parameter of this name."""
    return [name for name, command in leaves() if parameter in {each.name for each in command.params}]


BASH = 'eval "$(calm completion bash)"'


def test_bash_completes_commands_and_options(environment: dict[str, str]) -> None:
    assert bash(environment, BASH, "calm", "sta") == ["stat"]
    assert {"compare", "completion"} <= set(bash(environment, BASH, "calm", "comp"))
    assert bash(environment, BASH, "calm", "compare", "--sys") == ["--syscalls"]
    assert bash(environment, BASH, "calm", "completion", "z") == ["zsh"]
    assert bash(environment, BASH, "calm", "nonsense", "x") == []


def test_bash_completes_allocators(environment: dict[str, str]) -> None:
    assert bash(environment, BASH, "calm", "run", "-a", "glib") == ["glibc"]
    for name in (name for name in having("specs") if not name.startswith("tune")):
        offered = bash(environment, BASH, "calm", *name.split(), "-a", "glibc,")
        assert "glibc,calmalloc" in offered
        # What the list has already is not offered again.
        assert "glibc,glibc" not in offered
    assert bash(environment, BASH, "calm", "compare", "-a", "glibc,calmalloc,ptlb") == [
        "glibc,calmalloc,ptlbmalloc2"
    ]


def test_bash_by_its_tab_key(environment: dict[str, str]) -> None:
    shell = [needs("bash"), "--norc", "--noprofile", "-i"]
    typed(environment, shell, BASH, "calm sta", "calm stat ")
    # After the dashes there is a program and its files.
    for name in having("cmd"):
        typed(environment, shell, BASH, f"calm {name} -- cat some-f", "some-file")
    typed(environment, shell, BASH, "calm bench report some-f", "some-file")


def test_bash_as_installed(environment: dict[str, str]) -> None:
    assert bash(environment, f"source {INSTALLED / 'calm'}", "calm", "allo") == ["allocators"]


def test_zsh_by_its_tab_key(environment: dict[str, str]) -> None:
    shell = [needs("zsh"), "-f", "-i"]
    load = 'autoload -Uz compinit; compinit -u -D; eval "$(calm completion zsh)"'
    typed(environment, shell, load, "calm sta", "calm stat")
    typed(environment, shell, load, "calm run -a glib", "-a glibc")


def test_zsh_as_installed(environment: dict[str, str]) -> None:
    shell = [needs("zsh"), "-f", "-i"]
    load = f"fpath=({INSTALLED} $fpath); autoload -Uz compinit; compinit -u -D"
    typed(environment, shell, load, "calm allo", "calm allocators")


@pytest.mark.parametrize("load", ["calm completion fish | source", f"source {INSTALLED / 'calm.fish'}"])
def test_fish(environment: dict[str, str], load: str) -> None:
    assert fish(environment, load, "calm sta") == ["stat"]
    assert fish(environment, load, "calm compare --sys") == ["--syscalls"]
    assert fish(environment, load, "calm compare -a glibc,calma") == ["glibc,calmalloc"]


@pytest.mark.parametrize("shell", SHELLS)
def test_script(calm: Calm, shell: str) -> None:
    result = calm("completion", shell)
    assert result.returncode == 0
    assert f"_CALM_COMPLETE={shell}_complete" in result.stdout
    assert Path(needs(shell)).exists()


def test_unknown_shells_are_refused(calm: Calm) -> None:
    result = calm("completion", "tcsh")
    assert result.returncode == 2
    assert "'tcsh' is not one of" in result.stderr
