import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from calm_helpers import ROOT, Calm

from calm.commands.tune import space
from calm.core import allocators, paths
from calm.core.errors import USAGE, CalmError


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


@pytest.fixture
def own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one that stands for calmalloc's and calmoffload's, and knows no option to complain of."""
    library = tmp_path / "libcalmalloc.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(library)], check=True)
    shutil.copy(library, tmp_path / "libcalmoffload.so")
    monkeypatch.setenv(paths.LIBRARY_PATH, str(tmp_path))
    return library


def test_offload_is_a_library_of_its_own(calm: Calm, own_library: Path) -> None:
    command = ("--", "sh", "-c", "echo $LD_PRELOAD $CALM_OPTIONS")
    library = {paths.LIBRARY_PATH: str(own_library.parent), "CALM_OPTIONS": "server_cpu=3"}
    for chosen in (("--offload",), ("-a", "calmoffload")):
        result = calm("run", *chosen, *command, env=library)
        assert result.stdout == f"{own_library.parent}/libcalmoffload.so server_cpu=3\n", result.stderr
    rows = {row["name"]: row for row in json.loads(calm("allocators", "--json").stdout)["allocators"]}
    assert rows["calmoffload"]["version"] == rows["calmalloc"]["version"]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (("--offload", "-a", "calmalloc"), "--offload means -a calmoffload: leave one of them out"),
        ((), "name an allocator by --allocator, or give --offload"),
    ],
)
def test_one_allocator_is_needed(chosen: tuple[str, ...], expected: str, calm: Calm) -> None:
    result = calm("run", *chosen, "--", "true")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (USAGE, "", 1)
    assert expected in result.stderr


def test_offload_is_searched_only_where_it_is_asked_for(own_library: Path) -> None:
    assert "calmalloc" in space.present()
    assert "calmoffload" not in space.present()


JEMALLOC_VARIANTS = {
    "jemalloc-tuned": "background_thread:true,dirty_decay_ms:1000",
    "jemalloc-process-madvise": "process_madvise_max_batch:128",
}


@pytest.fixture
def jemalloc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of the development branch, by the name of its option, which is all that it has."""
    library = tmp_path / "libjemalloc.so"
    source = 'const char option[] = "process_madvise_max_batch";'
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    monkeypatch.setenv(paths.LIBRARY_PATH, str(tmp_path))
    return library


@pytest.mark.parametrize("name", JEMALLOC_VARIANTS)
def test_variants_of_jemalloc_have_their_options_in_its_variable(
    name: str, calm: Calm, jemalloc: Path
) -> None:
    options = JEMALLOC_VARIANTS[name]
    command = ("--", "sh", "-c", "echo $LD_PRELOAD $MALLOC_CONF $CALM_OPTIONS")
    for inherited, written, expected in (
        ("", "", options),
        ("narenas:2", "", f"narenas:2,{options}"),
        ("narenas:2", ":MALLOC_CONF=tcache:false,lg_chunk:3", f"tcache:false,lg_chunk:3,{options}"),
    ):
        environment = {paths.LIBRARY_PATH: str(jemalloc.parent)}
        environment |= {"MALLOC_CONF": inherited} if inherited else {}
        result = calm("run", "-a", name + written, *command, env=environment)
        assert result.stdout == f"{jemalloc} {expected}\n", result.stderr
    rows = {row["name"]: row for row in json.loads(calm("allocators", "--json").stdout)["allocators"]}
    assert (rows[name]["option"], rows[name]["library"]) == (options, str(jemalloc))


def test_a_variant_of_jemalloc_that_is_contradicted_is_refused(jemalloc: Path) -> None:
    text = "means dirty_decay_ms:1000, but MALLOC_CONF has dirty_decay_ms:0: leave one of them out"
    with pytest.raises(CalmError, match=text):
        allocators.parse("jemalloc-tuned:MALLOC_CONF=dirty_decay_ms:0")


def test_a_jemalloc_without_the_option_has_not_the_variant(jemalloc: Path, calm: Calm) -> None:
    jemalloc.write_bytes(jemalloc.read_bytes().replace(b"process_madvise", b"process_nothing"))
    assert allocators.find_library("jemalloc-tuned") == jemalloc
    with pytest.raises(CalmError, match="jemalloc-process-madvise is not on this machine: jemalloc's"):
        allocators.parse("jemalloc-process-madvise")
    rows = {row["name"]: row for row in json.loads(calm("allocators", "--json").stdout)["allocators"]}
    assert not rows["jemalloc-process-madvise"]["present"]


def test_offload_is_searched_with_the_knobs_of_calmalloc(own_library: Path) -> None:
    assert space.parse_names(["calmoffload,calmalloc"]) == ["calmalloc", "calmoffload"]
    found, _ = space.spaces(["calmalloc", "calmoffload"], {})
    assert found["calmoffload"] == found["calmalloc"]
    for inherited, before in (({}, ""), ({"CALM_OPTIONS": "test_cache=locked"}, "test_cache=locked,")):
        setting = space.Setting("calmoffload", {"memory_per_cpu": "50"})
        assert space.variables(setting, inherited) == {
            "LD_PRELOAD": str(own_library.parent / "libcalmoffload.so"),
            "CALM_OPTIONS": f"{before}memory_per_cpu=50",
        }


def test_nothing_lies_between(calm: Calm) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "calm", "run", "-a", "glibc", "--", "sh", "-c", "echo $$"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    output, _ = process.communicate()
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


def test_allocators_go_to_files(calm: Calm, tmp_path: Path) -> None:
    text, data = tmp_path / "list", tmp_path / "list.json"
    result = calm("allocators", "-o", text, "--json", data)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert text.read_text() == calm("allocators").stdout
    assert json.loads(data.read_text())["schema"] == "calm-allocators"


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="not Debian")
def test_debian_packages_are_named(calm: Calm) -> None:
    rows = json.loads(calm("allocators", "--json").stdout)["allocators"]
    assert rows[0]["package"].startswith("libc6")
    assert rows[0]["package_version"].startswith(rows[0]["version"])


def test_dpkg_is_asked_once_for_all_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def dpkg(*arguments: str) -> str:
        asked.append(arguments[0])
        if arguments[0] == "-S":
            return "diversion by z from: /a/x.so\nx:amd64, x:i386: /a/x.so\ny: /b/y.so"
        return "x:amd64 1.2-3\ny 2"

    monkeypatch.setattr(allocators, "_dpkg", dpkg)
    found = allocators._packages((Path("/a/x.so"), Path("/b/y.so"), Path("/c/none.so")))
    assert found == {Path("/a/x.so"): ("x:amd64", "1.2-3"), Path("/b/y.so"): ("y", "2")}
    assert asked == ["-S", "-W"]


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
