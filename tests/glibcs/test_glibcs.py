"""The library on the C libraries of Debian's other releases, each run by its own loader."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "programs"))

from preload import REPOSITORY, assert_active, environment, library, program, read_stats

from calm.commands.explain.command import take
from calm.commands.explain.rules import explain
from calm_heap_readers.versions import layout

GLIBCS = Path(os.environ.get("CALM_GLIBCS", REPOSITORY / "build/glibcs"))
WORKLOADS = REPOSITORY / "workloads"
# What fetch-glibcs can do without: releases to come, which not every mirror carries.
OPTIONAL_SUITES = ("forky", "sid")
OWN_SUITE = platform.freedesktop_os_release().get("VERSION_CODENAME")
SUITES = [suite for suite in ("bullseye", "bookworm", "trixie") if suite != OWN_SUITE]
OFFLINE = os.environ.get("CALM_OFFLINE") == "1"


@dataclass(frozen=True)
class Glibc:
    version: str
    loader: Path

    @property
    def libraries(self) -> Path:
        return self.loader.parent


def find_glibc(version: str) -> Glibc:
    # Releases differ in whether /lib is a link; the loader of the multiarch folder is the file itself.
    loaders = [
        path for path in (GLIBCS / version).glob("**/ld-linux*.so.*") if (path.parent / "libc.so.6").exists()
    ]
    assert loaders, f"{GLIBCS / version} holds no C library: remove it and fetch again"
    return Glibc(version, loaders[0].resolve())


@pytest.fixture(scope="session")
def said() -> str:
    """The message of the script that fetches them, if one is missing."""
    if OFFLINE:
        return ""
    command = [str(REPOSITORY / "scripts/fetch-glibcs"), str(GLIBCS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}(CALM_OFFLINE=1 skips what is not on disk)"
    return done.stderr


@pytest.fixture(scope="session", params=[*SUITES, *OPTIONAL_SUITES])
def glibc(request: pytest.FixtureRequest, said: str) -> Glibc:
    suite: str = request.param
    fetched = {note.name: note.read_text().strip() for note in GLIBCS.glob("suites/*")}
    if suite not in fetched and OFFLINE:
        pytest.skip(f"{suite} is not on disk, and CALM_OFFLINE=1")
    if suite not in fetched and suite in OPTIONAL_SUITES:
        pytest.skip(f"{suite} could not be had: {' '.join(said.split())}")
    assert suite in fetched, f"{suite} was not fetched"
    if suite == "sid" and fetched["sid"] == fetched.get("forky"):
        pytest.skip(f"sid has the same glibc {fetched[suite]} as forky")
    return find_glibc(fetched[suite])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A worker's folder, in which each program is built once."""
    return tmp_path_factory.mktemp("built")


def build(glibc: Glibc, folder: Path, name: str, *sources: Path) -> Path:
    """Links against that glibc, whose symbols may be older than those of the machine's own."""
    built = folder / f"{name}-{glibc.version}"
    if built.exists():
        return built
    own = [glibc.libraries / file for file in ("libc.so.6", "libpthread.so.0", glibc.loader.name)]
    command = [
        "gcc",
        "-std=gnu17",
        "-O3",
        "-D_GNU_SOURCE",
        f"-I{REPOSITORY / 'include'}",
        "-pthread",
        "-fno-builtin-malloc",
        "-fno-builtin-free",
    ]
    command += ["-nodefaultlibs", "-o", str(built), *map(str, sources)]
    command += ["-Wl,--no-as-needed", *map(str, own), "-Wl,--as-needed", "-l:libc_nonshared.a", "-lgcc"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return built


def run(
    glibc: Glibc,
    command: list[str],
    stats: Path | None,
    tracer: list[str] | None = None,
    variables: dict[str, str] | None = None,
) -> str:
    env = environment(stats) | (variables or {})
    # The loader's own option: LD_PRELOAD would also reach the tracer, which runs on the machine's glibc.
    preloaded = ["--preload", env.pop("LD_PRELOAD")] if stats is not None else []
    loader = [str(glibc.loader), "--library-path", str(glibc.libraries), *preloaded]
    done = subprocess.run([*(tracer or []), *loader, *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def assert_active_on(glibc: Glibc, stats: Path) -> None:
    assert_active(stats)
    assert {line["glibc"] for line in read_stats(stats)} == {glibc.version}


def count_madvise(glibc: Glibc, command: list[str], stats: Path | None, log: Path) -> int:
    tracer = [program("strace", "strace"), "-f", "-qq", "--trace=madvise", "--signal=none", f"--output={log}"]
    run(glibc, command, stats, tracer)
    return sum("madvise(" in line for line in log.read_text().splitlines())


def test_is_that_glibc(glibc: Glibc) -> None:
    assert f"version {glibc.version}." in run(glibc, [str(glibc.libraries / "libc.so.6")], None)


def dynamic_symbols(path: Path) -> str:
    command = ["objdump", "--dynamic-syms", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_needs_no_newer_symbols(glibc: Glibc) -> None:
    needed = {
        tuple(map(int, word.strip("()").removeprefix("GLIBC_").split(".")))
        for word in dynamic_symbols(library()).split()
        if word.strip("()").startswith("GLIBC_2.")
    }
    assert max(needed) <= tuple(map(int, glibc.version.split(".")))


def test_listing1_purges_less(glibc: Glibc, folder: Path, tmp_path: Path) -> None:
    listing1 = build(glibc, folder, "listing1", WORKLOADS / "listing1.c", WORKLOADS / "support.c")
    command = [str(listing1), "--threads", "4", "--rounds", "3", "--blocks", "500"]
    stats = tmp_path / "stats.json"
    plain = count_madvise(glibc, command, None, tmp_path / "plain.strace")
    ours = count_madvise(glibc, command, stats, tmp_path / "ours.strace")
    assert_active_on(glibc, stats)
    assert plain > 1000, "this glibc no longer trims on every free: the comparison says nothing"
    assert ours < plain / 10


def test_ttest1(glibc: Glibc, folder: Path, tmp_path: Path) -> None:
    ttest1 = build(glibc, folder, "ttest1", WORKLOADS / "ttest1.c", WORKLOADS / "support.c")
    stats = tmp_path / "stats.json"
    result = json.loads(run(glibc, [str(ttest1), "60", "3", "3000"], stats))
    assert result["n_total_max"] == 60
    assert_active_on(glibc, stats)


@pytest.mark.parametrize("case", ["malloc", "calloc", "grown", "resize", "copy-to-arena", "at-random"])
def test_placed_blocks(glibc: Glibc, folder: Path, tmp_path: Path, case: str) -> None:
    placed = build(glibc, folder, "placed", REPOSITORY / "tests/ptlbmalloc2/programs/placed.c")
    settings = {"PTLBMALLOC2_PLACEMENT": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    stats = tmp_path / "stats.json"
    found = run(glibc, [str(placed), case], stats, variables=settings)
    assert_active_on(glibc, stats)
    assert {line["why_no_placement"] for line in read_stats(stats)} == {""}
    assert all(line["placed_blocks"] > 0 for line in read_stats(stats))
    assert found == "" or "\ndistinct 64\n" in found


def test_forks_among_threads(glibc: Glibc, folder: Path, tmp_path: Path) -> None:
    forks = build(glibc, folder, "forks", Path(__file__).parent / "forks.c")
    stats = tmp_path / "stats.json"
    assert run(glibc, [str(forks)], stats) == "20 forks, status 0\n"
    assert_active_on(glibc, stats)


def lacks(glibc: Glibc, path: Path) -> bool:
    """Whether the library, built here, needs a newer C library."""
    needed = re.findall(r"\(GLIBC_2\.(\d+)\)", dynamic_symbols(path))
    return max(map(int, needed)) > int(glibc.version.split(".")[1])


def test_calmalloc_needs_nothing_newer(glibc: Glibc) -> None:
    for name in ("libcalmalloc.so", "libcalmoffload.so"):
        assert not lacks(glibc, library().with_name(name))


def build_api(glibc: Glibc, folder: Path, name: str) -> Path:
    """A program that the tests of the library's interface share."""
    programs = REPOSITORY / "tests/api/programs"
    return build(glibc, folder, f"api-{name}", programs / f"{name}.c", programs / "support.c")


def preloaded(glibc: Glibc, name: str) -> list[str]:
    loader = [str(glibc.loader), "--library-path", str(glibc.libraries)]
    return [*loader, "--preload", str(library().with_name(name))]


def test_fork_handlers_of_calmalloc(glibc: Glibc, folder: Path) -> None:
    """Those that are registered before it starts run before its own, or a fork may wait forever."""
    command = [*preloaded(glibc, "libcalmalloc.so"), str(build_api(glibc, folder, "forks")), "handlers-lock"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "case",
    ["detached", "own-area", "unregistered", "unregistered-creator", "children vfork", "children clone"],
)
def test_threads_of_calmalloc(glibc: Glibc, folder: Path, case: str) -> None:
    """They have restartable sequences, whether the C library registers them or not."""
    children = build_api(glibc, folder, "children")
    command = [*preloaded(glibc, "libcalmalloc.so"), str(children), *case.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if case == "own-area":
        registers = int(glibc.version.split(".")[1]) >= 35
        assert done.stdout.split() == ["refused" if registers else "registered"] * 33


@pytest.mark.parametrize("name", ["libcalmalloc.so", "libptlbmalloc2.so"])
def test_odd_arguments(glibc: Glibc, folder: Path, name: str) -> None:
    """As each C library answers them: from 2.38 on, aligned_alloc refuses what is no power of two."""
    if lacks(glibc, library().with_name(name)):
        pytest.skip(f"{name} was built for a newer glibc")
    odd = build(glibc, folder, "odd", Path(__file__).parent / "odd_arguments.c")
    loader = [str(glibc.loader), "--library-path", str(glibc.libraries)]
    outputs = [
        subprocess.run([*command, str(odd)], capture_output=True, text=True, check=True).stdout
        for command in (loader, preloaded(glibc, name))
    ]
    assert len(outputs[0].splitlines()) > 900
    assert outputs[1] == outputs[0]


@pytest.mark.parametrize("name", ["libcalmalloc.so", "libptlbmalloc2.so"])
def test_odd_arguments_on_the_machines_own(tmp_path: Path, name: str) -> None:
    odd = tmp_path / "odd"
    source = Path(__file__).parent / "odd_arguments.c"
    subprocess.run(["gcc", "-O1", "-fno-builtin", "-w", "-o", str(odd), str(source)], check=True)
    outputs = [
        subprocess.run([str(odd)], env=environment(None) | preload, stdout=subprocess.PIPE, check=True).stdout
        for preload in ({}, {"LD_PRELOAD": str(library().with_name(name))})
    ]
    assert outputs[1] == outputs[0]


@pytest.mark.parametrize("trouble", ["retention", "fragmentation", "caches"])
def test_calm_explain_reads_its_heap(glibc: Glibc, folder: Path, trouble: str) -> None:
    """From outside, by this glibc's layout of arenas and thread caches."""
    program = build(glibc, folder, "troubled", REPOSITORY / "tests/calm/troubled.c")
    loader = [str(glibc.loader), "--library-path", str(glibc.libraries)]
    process = subprocess.Popen(
        [*loader, str(program), trouble], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready ")
        taken = take(process.pid)
        said = explain([taken])
    finally:
        process.kill()
        process.communicate()
    verdict = {"retention": "retained", "caches": "cached"}.get(trouble, trouble)
    heap = next(each for each in taken.heaps if each.allocator == "glibc")
    assert heap.version == glibc.version
    if layout("glibc", glibc.version):
        assert (said.verdict, said.certainty) == (verdict, "exact")
    else:
        assert said.verdict == "unknown"
        assert heap.notes[0].startswith("Unknown version: ")


def test_fetches_no_index_but_packages(tmp_path: Path) -> None:
    """What apt-file adds to a machine's apt can fail to verify while a mirror is synchronized."""
    real = shutil.which("apt-get")
    if real is None or OFFLINE:
        pytest.skip("needs apt and its lists")
    conf = tmp_path / "apt.conf"
    conf.write_text(
        'Acquire::IndexTargets::deb::Contents-deb { MetaKey "$(COMPONENT)/Contents-$(ARCHITECTURE)";'
        ' ShortDescription "Contents"; Description "Contents"; };\n'
    )
    # In place of an update, says which indexes it would fetch, and fails.
    fake = tmp_path / "apt-get"
    listing = f"'{real}' indextargets --no-release-info --format 'index $(CREATED_BY)'"
    fake.write_text(
        "#!/bin/bash\n"
        f'[[ "$*" != *" update" ]] || {{ echo update; {listing} "${{@:1:$#-1}}"; exit 1; }}\n'
        f"exec '{real}' \"$@\"\n"
    )
    fake.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "APT_CONFIG": str(conf)}
    command = [str(REPOSITORY / "scripts/fetch-glibcs"), str(tmp_path / "glibcs")]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    indexes = [line for line in done.stdout.splitlines() if line.startswith("index ")]
    assert "update" in done.stdout.splitlines(), done.stderr
    assert set(indexes) == {"index Packages"}, done.stdout
