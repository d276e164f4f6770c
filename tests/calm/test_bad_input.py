"""Bad input of every command: one clear line on standard error, and the documented exit status."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from calm_helpers import ROOT, Calm
from waiting import wait_until

from calm.cli import COMMANDS
from calm.core import proc
from calm.core.errors import FAILED, NOT_EXECUTABLE, NOT_FOUND, PIPE_CLOSED, USAGE

# With as little work as each can do.
WITH_PROGRAM = {
    "colors run": (),
    "compare": ("-a", "glibc", "-n", "1"),
    "lab": ("-a", "glibc"),
    "predict offload": ("-n", "1"),
    "predict run": ("--cpus", "4", "-a", "glibc", "-n", "1"),
    "profile": (),
    "run": ("-a", "glibc"),
    "stat": (),
    "tune advise": (),
    "tune search": ("-a", "glibc", "--trials", "1"),
}
LARGE_MEMORY = "memory = bytearray(64 << 20)"
REPORTS = {
    "allocators": (),
    "bench list": (),
    "colors run": ("--", sys.executable, "-c", LARGE_MEMORY),
    "colors simulate": ("-n", "1", "--policy", "modulo", "--pattern", "linear"),
    "compare": ("-a", "glibc", "-n", "1", "--", "true"),
    "stat": ("--", "true"),
    "top": ("-n", "1", "--pid", str(os.getpid())),
}
# The reports of these go to standard error, beside the output of CMD.
ON_STANDARD_OUTPUT = [command for command in REPORTS if command not in ("colors run", "stat")]
WITH_PID = {"colors run": (), "profile": ("--for", "1h"), "top": ("-n", "1")}
# What reads a document, with the place of its path.
READERS: dict[str, Callable[[str], tuple[str, ...]]] = {
    "bench report": lambda path: (path,),
    "compare": lambda path: ("-a", "glibc", "-n", "1", "--baseline", path, "--", "true"),
    "predict run --profile": lambda path: ("--cpus", "4", "--profile", path),
    "predict run --compare": lambda path: ("--cpus", "4", "--compare", path),
    "predict run --calibration": lambda path: (
        *("--cpus", "4", "-a", "glibc", "--calibration", path, "--", "true"),
    ),
    "predict offload": lambda path: ("--profile", path),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`calm predict offload` keeps the costs of messages that it measures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def words(command: str) -> list[str]:
    return [word for word in command.split() if not word.startswith("--")]


def line_of(done: subprocess.CompletedProcess[str]) -> str:
    """The only line on standard error."""
    assert re.fullmatch(r"calm: [^\n]+\n", done.stderr), done.stderr
    assert "internal error" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("command", WITH_PROGRAM)
def test_a_program_that_does_not_exist(calm: Calm, command: str) -> None:
    done = calm(*words(command), *WITH_PROGRAM[command], "--", "no-such-program")
    assert done.returncode == NOT_FOUND
    assert "no-such-program" in line_of(done)


@pytest.mark.parametrize("command", WITH_PROGRAM)
def test_a_program_that_cannot_be_executed(calm: Calm, command: str, tmp_path: Path) -> None:
    (tmp_path / "text").touch()
    done = calm(*words(command), *WITH_PROGRAM[command], "--", tmp_path / "text")
    assert done.returncode == NOT_EXECUTABLE
    assert f"{tmp_path}/text" in line_of(done)


@pytest.mark.parametrize("command", WITH_PID)
def test_a_process_that_does_not_exist(calm: Calm, command: str) -> None:
    # Above the largest that the kernel gives.
    done = calm(*words(command), *WITH_PID[command], "--pid", "4194305")
    assert done.returncode == FAILED
    assert "4194305" in line_of(done)


def has_output(pid: int) -> bool:
    """Whether one of its children, as perf, has written to the file that is its standard output."""
    for child in proc.descendants(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/fd/1").stat().st_size > 0:
                return True
    return False


@pytest.mark.parametrize("command", ["profile", "top"])
def test_a_process_that_ends_meanwhile(command: str) -> None:
    """What was observed until then is reported."""
    options = ("--for", "1h") if command == "profile" else ("-n", "1000", "--delay", "50ms")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as observed:
        calm = subprocess.Popen(
            [sys.executable, "-m", "calm", command, *options, "--pid", str(observed.pid)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert calm.stdout
        if command == "profile":
            wait_until(lambda: calm.poll() is not None or has_output(calm.pid))
        begin = "" if command == "profile" else calm.stdout.readline()
        assert observed.stdin
        observed.stdin.close()
        output, errors = calm.communicate()
    if command == "profile" and "perf" in errors and calm.returncode == FAILED:
        pytest.skip("perf cannot be used here")
    assert calm.returncode == 0, errors
    assert str(observed.pid) in begin + output


@pytest.mark.parametrize("command", REPORTS)
def test_the_file_of_the_document_is_on_a_full_disk(calm: Calm, command: str) -> None:
    done = calm(*words(command), "--json", "/dev/full", *REPORTS[command])
    assert done.returncode == FAILED
    assert "/dev/full: No space left on device" in done.stderr.splitlines()[-1]


def process(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-m", "calm", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {}),  # type: ignore[operator]
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.parametrize("command", ON_STANDARD_OUTPUT)
def test_standard_output_is_on_a_full_disk(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = process(*words(command), *REPORTS[command], stdout=full)
    assert done.returncode == FAILED
    assert "standard output: No space left on device" in line_of(done)


@pytest.mark.parametrize("command", ON_STANDARD_OUTPUT)
def test_the_reader_has_closed_the_pipe(command: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as pipe:
        done = process(*words(command), *REPORTS[command], stdout=pipe)
    assert (done.returncode, done.stderr) == (PIPE_CLOSED, "")


@pytest.mark.parametrize("command", REPORTS)
def test_a_terminal_of_40_columns_without_colors(command: str) -> None:
    main, terminal = pty.openpty()
    started = subprocess.Popen(
        [sys.executable, "-m", "calm", *words(command), *REPORTS[command]],
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "COLUMNS": "40", "NO_COLOR": "1", "TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            data = os.read(main, 4096)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        output += data
    os.close(main)
    assert started.wait() == 0, output
    assert output
    # Bold is no color.
    assert not re.search(rb"\x1b\[[\d;]*(?:3[0-7]|4[0-7]|9[0-7]|38;|48;)[\d;]*m", output)


DAMAGED = {
    "is not there": None,
    "is not JSON": b"\x7fELF\0\1",
    "was cut short": b'{"schema": "calm-suite", "version": 3, "rows": [',
    "is a list": b"[]",
    "is another program's": b'{"results": []}',
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("command", READERS)
def test_a_file_that_is_no_document(calm: Calm, command: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    if (text := DAMAGED[damage]) is not None:
        path.write_bytes(text)
    done = calm(*words(command), *READERS[command](str(path)))
    assert done.returncode == USAGE
    assert str(path) in line_of(done)


SCHEMAS = {
    "bench report": "calm-suite",
    "compare": "calm-comparison",
    "predict run --profile": "calm-profile",
    "predict run --compare": "calm-comparison",
    "predict run --calibration": "calm-calibration",
    "predict offload": "calm-profile",
}


@pytest.mark.parametrize("command", READERS)
def test_a_document_of_another_version(calm: Calm, command: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"schema": SCHEMAS[command], "version": 99}))
    done = calm(*words(command), *READERS[command](str(path)))
    assert done.returncode == USAGE
    assert f"has version 99 of {SCHEMAS[command]}" in line_of(done)


@pytest.mark.parametrize("command", READERS)
def test_a_document_that_lacks_a_member(calm: Calm, command: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    version = 3 if command == "bench report" else 1
    path.write_text(json.dumps({"schema": SCHEMAS[command], "version": version}))
    done = calm(*words(command), *READERS[command](str(path)))
    assert done.returncode == USAGE
    assert "missing" in line_of(done)


def test_a_program_is_not_overwritten(calm: Calm, tmp_path: Path) -> None:
    """`--json CMD` without `--` would take CMD for its file."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    done = calm("stat", "--json", program, "true")
    assert done.returncode == USAGE
    assert "put `--` before it" in line_of(done)
    assert program.read_text() == "#!/bin/sh\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("command", ["colors run", "profile"])
def test_a_process_of_another_user(calm: Calm, command: str) -> None:
    folders = Path(__file__).resolve().parents
    if words(command)[0] not in COMMANDS and not all(each.stat().st_mode & 0o001 for each in folders):
        pytest.skip("another user cannot read the checkout, which has the command")
    with subprocess.Popen(["sleep", "60"]) as process:
        done = calm(
            *words(command),
            *WITH_PID[command],
            *("--pid", process.pid),
            set_up=lambda: (os.setgroups([]), os.setgid(65534), os.setuid(65534)),
        )
        process.kill()
    assert done.returncode == FAILED
    assert line_of(done)


@pytest.mark.parametrize("text", ["5", "5m", "-1s", "nans", "1e9s", ""])
def test_a_duration_without_its_unit(calm: Calm, text: str) -> None:
    done = calm("top", "-n", "1", "--delay", text)
    assert done.returncode == USAGE
    assert "--delay" in line_of(done)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--json", ""), ("--output", ""), ("--plot", ""), ("--html", ""), ("--output", "--"), ("--html", "-x")],
)
def test_a_file_without_a_name(calm: Calm, option: str, value: str) -> None:
    done = calm("profile", option, value, "--", "true")
    assert done.returncode == USAGE
    assert option in line_of(done)


def test_a_program_of_the_path_is_no_file_for_json(calm: Calm, tmp_path: Path) -> None:
    done = calm("stat", "--json", "sort", "words", cwd=tmp_path)
    assert done.returncode == USAGE
    assert "put `--` before it" in line_of(done)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", ["stat --json", "compare -a glibc -n 1 --json", "stat", "compare -a glibc -n 1"]
)
def test_arguments_that_are_not_utf8(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "calm", *command.split(), "--", "true", b"caf\xe9"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    if "--json" in command:
        assert json.loads(done.stdout)["command"] == ["true", "caf\ufffd"]


@pytest.mark.parametrize(
    "command", ["--help", "allocators", "allocators --json", "compare -a glibc -n 1 -- true"]
)
def test_closed_standard_streams(command: str) -> None:
    def close() -> None:
        for descriptor in (0, 1):
            os.close(descriptor)

    done = process(*command.split(), preexec_fn=close)
    assert done.returncode == FAILED
    assert "standard output: Bad file descriptor" in done.stderr.splitlines()[-1]


def test_an_interrupted_repetition_is_no_success(calm: Calm) -> None:
    done = calm("stat", "-n", "5", "--", "sh", "-c", "kill -INT $(ps -o ppid= -p $PPID)", process=True)
    assert done.returncode == 130
    assert "stopped after 1 of 5 runs" in done.stderr


def test_labels_do_not_control_the_terminal(calm: Calm) -> None:
    done = calm("stat", "--", "true", "\x1b[31mred")
    assert done.returncode == 0
    assert "\x1b" not in done.stderr


def test_a_program_that_failed_is_said_to_have(calm: Calm) -> None:
    done = calm("stat", "--", "false")
    assert done.returncode == 1
    assert "the program ended with status 1" in done.stderr
