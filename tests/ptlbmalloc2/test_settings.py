"""Settings by the user, of the library and of glibc, and the messages about them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest
from ran import Run

MIB = 1 << 20


@pytest.mark.parametrize("case", ["little", "threads"])
def test_active_and_silent(run: Run, case: str) -> None:
    ran = run(case)
    assert ran.stats["active"] is True
    assert ran.stats["why_not"] == ""
    assert ran.stats["arenas"] >= (3 if case == "threads" else 1)
    assert ran.stderr == ""


def test_verbose_says_that_it_governs(run: Run) -> None:
    ran = run("little", PTLBMALLOC2_VERBOSE="1")
    assert ran.stderr == f"ptlbmalloc2: glibc {ran.stats['glibc']} is governed\n"


@pytest.mark.parametrize("value", ["", "0", "no"])
def test_not_verbose(run: Run, value: str) -> None:
    assert run("little", PTLBMALLOC2_VERBOSE=value).stderr == ""


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, "glibc.malloc.hugetlb"),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1000000:glibc.malloc.top_pad=100000"},
            "trim_threshold and top_pad are set by the user",
        ),
        (
            {"MALLOC_TRIM_THRESHOLD_": "1000000", "MALLOC_TOP_PAD_": "100000"},
            "trim_threshold and top_pad are set by the user",
        ),
    ],
    ids=["hugetlb", "tunables", "variables"],
)
def test_stays_out_and_says_why(run: Run, variables: dict[str, str], why: str) -> None:
    silent = run("threads", **variables)
    assert silent.stats["active"] is False
    assert why in silent.stats["why_not"]
    assert silent.stats["trims"] == 0
    assert silent.stderr == ""
    verbose = run("little", PTLBMALLOC2_VERBOSE="1", **variables).stderr
    assert verbose.count("\n") == 1
    assert "is left as it is" in verbose
    assert why in verbose


def user_settings(stats: dict[str, object]) -> set[str]:
    return {name for name in ("trim_threshold", "top_pad", "mmap_threshold") if stats[f"user_{name}"] is True}


# Each of these settings disables glibc's dynamic mmap threshold, and so counts as a setting of that.
SETTINGS = [
    (name, way)
    for name in ("trim_threshold", "top_pad", "mmap_threshold")
    for way in ("tunable", "variable", "mallopt")
]


@pytest.mark.parametrize(("name", "way"), SETTINGS)
def test_user_settings_win(run: Run, name: str, way: str) -> None:
    case, variables = ["much"], {}
    if way == "tunable":
        variables = {"GLIBC_TUNABLES": f"glibc.malloc.perturb=0:glibc.malloc.{name}=1048576"}
    elif way == "variable":
        variables = {f"MALLOC_{name.upper()}_": "1048576"}
    else:
        case = ["mallopt", name]
    ran = run(*case, **variables)
    assert ran.stats["active"] is True
    assert user_settings(ran.stats) == {name, "mmap_threshold"}
    # Trimming continues in any case: by glibc if the user set the threshold.
    assert (ran.stats["trims"] == 0) == (name == "trim_threshold")
    assert ran.figures["peak"] > 55 * MIB
    assert ran.figures["kept"] < 4 * MIB
    if name == "top_pad":
        assert ran.stats["pad_each_bytes"] == MIB
        assert ran.stats["claims"] == 0


def test_nothing_set(run: Run) -> None:
    assert user_settings(run("much").stats) == set()


def test_without_trimming_all_is_kept(run: Run) -> None:
    """This shows that the tests of kept memory measure the library."""
    ran = run("much", MALLOC_TRIM_THRESHOLD_=str(1 << 40))
    assert ran.figures["kept"] > 55 * MIB


def test_sensitivity_scales(run: Run) -> None:
    plain = run("little").stats
    for factor in ("0.5", "10", "1e3"):
        ran = run("little", PTLBMALLOC2_SENSITIVITY=factor)
        assert ran.stderr == ""
        assert ran.stats["sensitivity"] == float(factor)
        ratio = ran.stats["threshold_bytes"] / plain["threshold_bytes"]
        assert 0.8 < ratio / float(factor) < 1.25
    kept = run("much", PTLBMALLOC2_SENSITIVITY="1000").figures["kept"]
    assert kept > 55 * MIB


@pytest.mark.parametrize("value", ["0", "-1", "-0.0", "abc", "1x", "nan", "inf", "-inf", "1e999", "", " "])
def test_bad_sensitivity(run: Run, value: str) -> None:
    ran = run("little", PTLBMALLOC2_SENSITIVITY=value)
    assert ran.stats["sensitivity"] == 1
    assert ran.stderr.count("\n") == 1
    assert f"PTLBMALLOC2_SENSITIVITY='{value}' ignored" in ran.stderr


@pytest.mark.parametrize("value", ["yes", "2", "json:", "JSON", "text"])
def test_bad_statistics(run: Run, value: str) -> None:
    ran = run("threads", PTLBMALLOC2_STATS=value)
    assert ran.lines == []
    assert ran.stderr.count("\n") == 1
    assert f"PTLBMALLOC2_STATS='{value}' ignored" in ran.stderr


@pytest.mark.parametrize("value", ["", "0"])
def test_no_statistics(run: Run, value: str) -> None:
    ran = run("threads", PTLBMALLOC2_STATS=value)
    assert (ran.lines, ran.stderr) == ([], "")


def test_statistics_as_text(run: Run) -> None:
    stderr = run("threads", PTLBMALLOC2_STATS="1").stderr
    assert stderr.startswith("ptlbmalloc2: statistics at exit\n")
    assert all(line.startswith("ptlbmalloc2: ") for line in stderr.splitlines())
    assert "active" in stderr
    assert "trims" in stderr


def test_statistics_on_stderr(run: Run) -> None:
    stderr = run("little", PTLBMALLOC2_STATS="json").stderr
    assert stderr.startswith('{"pid": ')
    assert stderr.endswith("}\n")


@pytest.mark.parametrize("path", ["missing/folder/stats", "."])
def test_unwritable_statistics(run: Run, tmp_path: Path, path: str) -> None:
    ran = run("threads", PTLBMALLOC2_STATS=f"json:{tmp_path / path}")
    assert ran.stderr.count("\n") == 1
    assert "statistics not written" in ran.stderr


@pytest.mark.parametrize("there", [True, False])
def test_statistics_follow_no_link(run: Run, tmp_path: Path, there: bool) -> None:
    """What it names stays as it is, whether it is there or not."""
    victim, link = tmp_path / "victim", tmp_path / "link"
    if there:
        victim.write_text("precious")
    link.symlink_to(victim)
    ran = run("threads", PTLBMALLOC2_STATS=f"json:{link}")
    assert ran.stderr == f"ptlbmalloc2: statistics not written: cannot open {link} (a symbolic link)\n"
    assert link.is_symlink()
    assert victim.exists() == there
    assert not there or victim.read_text() == "precious"


def test_statistics_wait_for_no_reader(run: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    stderr = run("threads", PTLBMALLOC2_STATS=f"json:{pipe}").stderr
    assert stderr == f"ptlbmalloc2: statistics not written: cannot open {pipe} (a pipe without a reader)\n"


def test_statistics_are_appended(run: Run, tmp_path: Path) -> None:
    """Each line says of which process it is: the number may be another's, too, and the start is not."""
    path = tmp_path / "all"
    for _ in range(2):
        run("little", PTLBMALLOC2_STATS=f"json:{path}")
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["pid"] != second["pid"]
    assert first["ppid"] == second["ppid"] == os.getpid()
    assert 0 < first["started_ns"] < second["started_ns"]


@pytest.mark.parametrize("most", [0, 1, 100])
@pytest.mark.parametrize("target", ["stderr", "file"])
def test_statistics_beyond_a_limit(tmp_path: Path, cases_program: Path, target: str, most: int) -> None:
    """The signal that the kernel raises then is not the program's."""
    from preload import environment, library

    path = tmp_path / "stats"
    value = "json" if target == "stderr" else f"json:{path}"
    env = environment(None) | {"LD_PRELOAD": str(library()), "PTLBMALLOC2_STATS": value}

    def prepare() -> None:
        # Python ignores it, and so would its children.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    with (tmp_path / "errors").open("wb") as errors:
        done = subprocess.run(
            [cases_program, "much"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=errors,
            preexec_fn=prepare,
            restore_signals=False,
        )
    assert done.returncode == 0
    assert b"kept " in done.stdout
    assert (path if target == "file" else tmp_path / "errors").stat().st_size == most


def test_full_disk_is_no_harm(run: Run) -> None:
    assert run("threads", PTLBMALLOC2_STATS="json:/dev/full").stderr == ""


@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_ARENA_MAX": "1"},
        {"MALLOC_ARENA_MAX": "2"},
        {"MALLOC_PERTURB_": "165"},
        {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"},
        {"GLIBC_TUNABLES": "glibc.malloc.check=3"},
        {"GLIBC_TUNABLES": "glibc.malloc.mxfast=0"},
    ],
    ids=lambda variables: next(iter(variables.values())),
)
def test_under_other_settings_of_glibc(run: Run, variables: dict[str, str]) -> None:
    for case in ("threads", "calloc", "realloc"):
        ran = run(case, **variables)
        stats = ran.stats
        assert stats["active"] is True
        # If threads share an arena, merges alone may free its top, and then that much stays.
        shared = case == "threads" and "MALLOC_ARENA_MAX" in variables
        assert stats["trims"] > 0 or (shared and stats["free_top_bytes"] <= ran.bound_bytes(threads=8))
        assert stats["failed_purges"] == 0
    if "MALLOC_ARENA_MAX" in variables:
        assert run("threads", **variables).stats["arenas"] == int(variables["MALLOC_ARENA_MAX"])


MALLOC_DEBUG = Path("/lib/x86_64-linux-gnu/libc_malloc_debug.so.0")


def test_beside_glibcs_debug_library(run: Run) -> None:
    """If the debug library comes first, this one has no effect, and does no harm."""
    from preload import library

    if not MALLOC_DEBUG.exists():
        pytest.skip(f"glibc's debug library is not installed: {MALLOC_DEBUG}")
    for order in ((library(), MALLOC_DEBUG), (MALLOC_DEBUG, library())):
        run("threads", LD_PRELOAD=":".join(map(str, order)), MALLOC_CHECK_="3")
