import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from calm_helpers import ROOT, Calm

from calm import allocators


@pytest.fixture(scope="module")
def preloadable() -> str:
    name = next((name for name in allocators.KNOWN if allocators.find_library(name)), None)
    if name is None:
        pytest.skip("no allocator library on this machine")
    return name


def test_preloads_the_allocator(calm: Calm, preloadable: str) -> None:
    library = allocators.find_library(preloadable)
    assert library
    assert str(library.resolve()) in calm("run", "-a", preloadable, "--", "cat", "/proc/self/maps").stdout


def test_prepends_to_an_existing_preload(calm: Calm, preloadable: str, tmp_path: Path) -> None:
    # An empty library that does nothing stands for whatever the user preloads.
    other = tmp_path / "libempty.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(other)], check=True)
    result = calm(
        "run", "-a", preloadable, "--", "sh", "-c", "echo $LD_PRELOAD", env={"LD_PRELOAD": str(other)}
    )
    assert result.stdout == f"{allocators.find_library(preloadable)}:{other}\n"


def test_glibc_preloads_nothing_and_variables_are_set(calm: Calm) -> None:
    script = 'echo "${LD_PRELOAD-none} $MALLOC_ARENA_MAX"'
    assert calm("run", "-a", "glibc:MALLOC_ARENA_MAX=3", "--", "sh", "-c", script).stdout == "none 3\n"


def test_nothing_lies_between(calm: Calm) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "calm", "run", "-a", "glibc", "--", "sh", "-c", "echo $$"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    output, _ = process.communicate(timeout=30)
    assert int(output) == process.pid


def test_signal_dispositions_are_the_defaults(calm: Calm) -> None:
    result = calm("run", "-a", "glibc", "--", "grep", "SigIgn", "/proc/self/status")
    assert int(result.stdout.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_exit_codes_and_signals_are_the_programs_own(calm: Calm) -> None:
    assert calm("run", "-a", "glibc", "--", "sh", "-c", "exit 9").returncode == 9
    assert calm("run", "-a", "glibc", "--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def test_script_without_an_interpreter_line(calm: Calm, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo script $1\n")
    script.chmod(0o755)
    assert calm("run", "-a", "glibc", "--", script, "one").stdout == "script one\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-a", "glibc", "--", "no-such-program"), 127, "no such program"),
        (("-a", "glibc", "--", "/etc/passwd"), 126, "not executable"),
        (("-a", "nosuch", "--", "true"), 2, "unknown allocator"),
        (("--", "true"), 2, "--allocator"),
        (("-a", "glibc"), 2, "cmd"),
    ],
)
def test_bad_input_gets_one_line(calm: Calm, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = calm("run", *arguments)
    assert result.returncode == code
    assert message.lower() in result.stderr.lower()
    assert result.stderr.count("\n") == 1


def test_what_cannot_be_looked_at_is_passed_over_on_the_path(calm: Calm) -> None:
    """As by execvp. Root may look anywhere, and so it is a name too long that cannot be looked at here."""
    path = f"/{'x' * 300}:{os.environ['PATH']}"
    result = calm("run", "-a", "glibc", "--", "echo", "found", env={"PATH": path})
    assert (result.returncode, result.stdout) == (0, "found\n"), result.stderr
    result = calm("run", "-a", "glibc", "--", f"/{'x' * 300}")
    assert (result.returncode, result.stderr.count("\n")) == (126, 1)
    assert "File name too long" in result.stderr


def test_a_static_program_is_warned_of(calm: Calm, preloadable: str, tmp_path: Path) -> None:
    source, path = tmp_path / "static.c", tmp_path / "static"
    source.write_text("int main(void) { return 0; }\n")
    if (
        subprocess.run(["cc", "-static", "-o", path, source], capture_output=True, check=False).returncode
        != 0
    ):
        pytest.skip("no static C library")
    result = calm("run", "-a", preloadable, "--", path)
    assert result.returncode == 0
    assert "statically linked" in result.stderr


def test_allocators_lists_what_is_there(calm: Calm) -> None:
    rows = {row["name"]: row for row in json.loads(calm("allocators", "--json").stdout)["allocators"]}
    assert list(rows) == list(allocators.KNOWN)
    glibc = rows["glibc"]
    assert glibc["present"]
    assert glibc["version"] == (os.confstr("CS_GNU_LIBC_VERSION") or "").split()[1]
    assert not glibc["preloaded"]
    for name, row in rows.items():
        if row["present"]:
            assert Path(row["library"]).is_file()
        assert (row["library"] is None) == (not row["present"]), name
    text = calm("allocators").stdout
    assert all(name in text for name in rows)


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="not Debian")
def test_debian_packages_are_named(calm: Calm) -> None:
    rows = json.loads(calm("allocators", "--json").stdout)["allocators"]
    assert rows[0]["package"].startswith("libc6")
    assert rows[0]["package_version"].startswith(rows[0]["version"])


def test_no_arguments_show_the_help(calm: Calm) -> None:
    result = calm()
    assert result.returncode == 2
    for name in ("stat", "compare", "run", "allocators"):
        assert name in result.stderr


def test_the_script_of_the_checkout_leaves_the_environment_alone(tmp_path: Path) -> None:
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("no .venv in the checkout")
    link = tmp_path / "calm"
    link.symlink_to(ROOT / "bin" / "calm")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [link, "run", "-a", "glibc", "--", "sh", "-c", 'echo "${PYTHONPATH-unset}"'],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    assert result.stdout == "unset\n"


def test_the_script_without_its_environment_says_so(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    script = shutil.copy(ROOT / "bin" / "calm", tmp_path / "bin" / "calm")
    result = subprocess.run([script, "stat", "true"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "`make demo`" in result.stderr
    assert result.stderr.count("\n") == 1
