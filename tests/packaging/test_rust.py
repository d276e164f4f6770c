"""The crate: its own tests, a program that uses it, the package's contents, and the style of its source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CRATE = REPOSITORY / "rust"
TARGET = REPOSITORY / "build/rust"
CARGO_BIN = Path.home() / ".cargo/bin"
FEATURES = ["", "override"]
HOST = REPOSITORY / "tests/packaging/plugin_host.c"


def environment() -> dict[str, str]:
    """The environment without the developer's own settings; rustup's folder may be missing from PATH."""
    drop = ("LD_", "CALM_", "MALLOC_", "GLIBC_TUNABLES", "RUSTFLAGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    path = kept.get("PATH", os.defpath)
    return kept | {"CARGO_TARGET_DIR": str(TARGET), "PATH": f"{path}{os.pathsep}{CARGO_BIN}"}


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=CRATE, env=environment() | variables, capture_output=True, text=True)


@cache
def cargo() -> str:
    """The path of cargo, once the crate's dependencies are fetched."""
    found = shutil.which("cargo", path=environment()["PATH"])
    if found is None:
        pytest.skip("cargo is not installed: it is in the Debian package cargo")
    readable = run([found, "metadata", "--no-deps", "--format-version=1"])
    assert readable.returncode == 0, readable.stderr
    fetched = run([found, "fetch"])
    if fetched.returncode != 0:
        pytest.skip(f"cargo cannot fetch the crates that it builds with: {fetched.stderr.strip()}")
    return found


def succeed(*arguments: str, **variables: str) -> str:
    done = run([cargo(), *arguments], **variables)
    assert done.returncode == 0, f"cargo {' '.join(arguments)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def need(subcommand: str) -> None:
    if run([cargo(), subcommand, "--version"]).returncode != 0:
        pytest.skip(f"cargo {subcommand} is not installed: rustup component add {subcommand}")


@pytest.mark.parametrize("features", FEATURES)
def test_the_crates_own_tests(features: str) -> None:
    # The examples in the documentation, which --all-targets leaves out, do not depend on features.
    targets = ["--all-targets"] if features else []
    found = succeed("test", "--features", features, *targets)
    passed = [int(count) for count in re.findall(r"test result: ok\. (\d+) passed", found)]
    assert sum(passed) >= 13, found


@pytest.mark.parametrize("cache_mode", ["auto", "locked", "off"])
def test_a_threaded_program_at_work(cache_mode: str) -> None:
    found = succeed(
        "run", "--quiet", "--release", "--example", "churn", CALM_OPTIONS=f"test_cache={cache_mode}"
    )
    figures = {name: int(value) for name, value in (line.split() for line in found.splitlines())}
    assert figures["rounds"] == 3
    assert figures["wrong"] == 0
    assert figures["large_allocations"] > 1000
    assert figures["cache_misses"] > 1000
    assert figures["in_use_with_vector"] >= figures["in_use_at_end"] + (64 << 20)


def test_a_threaded_program_with_all_of_malloc() -> None:
    found = succeed("run", "--quiet", "--release", "--features", "override", "--example", "churn", "1")
    assert "wrong 0\n" in found


def test_the_programs_options_reach_the_allocator() -> None:
    """Options from the environment apply, and the report at exit shows a single allocator."""
    done = run(
        [cargo(), "run", "--quiet", "--release", "--example", "churn", "1"],
        CALM_OPTIONS="report=exit,memory_per_cpu=4",
    )
    assert done.returncode == 0, done.stderr
    reports = [line for line in done.stderr.splitlines() if line.startswith('{"allocator": "calmalloc"')]
    assert len(reports) == 1
    assert '"memory_per_cpu": 4' in reports[0]


@pytest.mark.parametrize("word", ["0", "-1", "many", ""])
def test_the_program_refuses_what_is_no_number(word: str) -> None:
    done = run([cargo(), "run", "--quiet", "--release", "--example", "churn", "--", word])
    assert done.returncode == 2
    assert done.stderr.strip() == "churn: ROUNDS is a number from 1 on"


def test_the_package_is_whole(tmp_path: Path) -> None:
    """The published package builds from its own files, without the repository."""
    # The test at the end builds it; cargo would do so as well.
    succeed("package", "--allow-dirty", "--no-verify")
    version = re.search(r'^version = "(.+)"', (CRATE / "Cargo.toml").read_text(), re.MULTILINE)
    assert version is not None
    name = f"calmalloc-{version[1]}"
    archive = TARGET / "package" / f"{name}.crate"
    subprocess.run(["tar", "-xzf", archive, "-C", tmp_path], check=True)
    unpacked = tmp_path / name
    packed = unpacked / "csrc"
    carried = {path.relative_to(packed) for path in packed.rglob("*.*") if path.is_file()}
    sources = {path.relative_to(REPOSITORY) for path in (REPOSITORY / "src").rglob("*.*")}
    sources -= {Path("src/CMakeLists.txt"), Path("src/README.md")}
    assert carried == sources | {Path("include/calmalloc.h")}
    assert not any(path.is_symlink() for path in unpacked.rglob("*"))
    assert (unpacked / "LICENSE").read_text() == (REPOSITORY / "LICENSE").read_text()
    # With one target folder, cargo would take both for the same package, and rebuild the repository's later.
    manifest = ("--manifest-path", str(unpacked / "Cargo.toml"))
    succeed("test", *manifest, "--test", "beside", CARGO_TARGET_DIR=str(TARGET / "unpacked"))


def test_the_registrys_page_has_no_links_into_the_repository() -> None:
    assert re.findall(r"\]\((?!https?://)[^)]*\)", (CRATE / "README.md").read_text()) == []


@pytest.mark.long
def test_the_oldest_rust(tmp_path: Path) -> None:
    """The crate passes with the manifest's rust-version and the dependencies that the README pins."""
    manifest = (CRATE / "Cargo.toml").read_text()
    oldest = re.search(r'^rust-version = "(.+)"$', manifest, re.MULTILINE)
    assert oldest is not None
    toolchain = f"+{oldest[1]}"
    if run([cargo(), toolchain, "--version"]).returncode != 0:
        pytest.skip(f"Rust {oldest[1]} is not installed: rustup toolchain install {oldest[1]}")
    crate = tmp_path / "crate"
    shutil.copytree(CRATE, crate, ignore=shutil.ignore_patterns("Cargo.lock"))
    at = ("--manifest-path", str(crate / "Cargo.toml"))
    pins = re.findall(r"cargo update -p (\w+) --precise ([\d.]+)", (CRATE / "README.md").read_text())
    assert {name for name, _ in pins} == {"cc", "libc"}
    for name, version in pins:
        succeed("update", *at, "-p", name, "--precise", version)
    # That cargo cannot read today's index, nor today's lock file.
    (crate / ".cargo").mkdir()
    (crate / ".cargo/config.toml").write_text(succeed("vendor", *at, str(tmp_path / "vendor")))
    (crate / "Cargo.lock").unlink()
    command = [cargo(), toolchain, "test", "--offline"]
    env = environment() | {"CARGO_TARGET_DIR": str(tmp_path / "target")}
    done = subprocess.run(command, cwd=crate, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("features", FEATURES)
def test_global_names_of_the_archive_are_calm_or_the_interfaces(features: str, tmp_path: Path) -> None:
    succeed("build", "--features", features, CARGO_TARGET_DIR=str(tmp_path))
    (archive,) = tmp_path.glob("debug/build/calmalloc-*/out/libcalmalloc_bundled.a")
    tool = ["nm", "--defined-only", "--format=posix"]
    names = run([*tool, "--extern-only", str(archive)]).stdout
    found = {line.split()[0] for line in names.splitlines() if line and not line.endswith(":")}
    exported = run([*tool, "--dynamic", str(REPOSITORY / "build/release/libcalmalloc.so")]).stdout
    interface = {line.split()[0].split("@")[0] for line in exported.splitlines()}
    assert ("malloc" in found) == bool(features)
    assert "calm_malloc" in found & interface
    assert {name for name in found - interface if not name.startswith("calm")} <= {"_.stapsdt.base"}


MAIN = """
#[global_allocator]
static ALLOCATOR: calmalloc::CalMalloc = calmalloc::CalMalloc;

macro_rules! foreign {
    ($($name:ident)*) => { $(#[no_mangle] pub extern "C" fn $name() { std::process::abort() })* };
}
foreign!(allocator_start clock_read file_write heap_init new_terms random_process_seed ring_push
         space_init thread_start vm_map);

fn main() {
    let threads = (0..4).map(|i| std::thread::spawn(move || (0..9999).map(|n| vec![i; n % 999]).count()));
    let counts: Vec<usize> = threads.collect::<Vec<_>>().into_iter().map(|t| t.join().unwrap()).collect();
    println!("{:?} {}", counts, calmalloc::stats().in_use > 0);
}
"""


def new_crate(folder: Path, source: str, features: str = "", kind: str = "") -> tuple[str, str]:
    """A crate that depends on this one; how cargo is told of it."""
    (folder / "src").mkdir()
    (folder / "src" / ("lib.rs" if kind else "main.rs")).write_text(source)
    chosen = f'features = ["{features}"]' if features else ""
    library = f'[lib]\ncrate-type = ["{kind}"]' if kind else ""
    (folder / "Cargo.toml").write_text(
        '[package]\nname = "user"\nversion = "0.1.0"\nedition = "2021"\n'
        f'[dependencies.calmalloc]\npath = "{CRATE}"\n{chosen}\n{library}\n[workspace]\n'
    )
    if (CRATE / "Cargo.lock").is_file():  # written by the first run of cargo
        shutil.copy(CRATE / "Cargo.lock", folder / "Cargo.lock")
    return "--manifest-path", str(folder / "Cargo.toml")


@pytest.mark.parametrize("features", FEATURES)
def test_a_program_with_functions_of_the_same_names(features: str, tmp_path: Path) -> None:
    manifest = new_crate(tmp_path, MAIN, features)
    assert succeed("run", "--offline", "--quiet", *manifest) == "[9999, 9999, 9999, 9999] true\n"


PLUGIN = """
#[global_allocator]
static ALLOCATOR: calmalloc::CalMalloc = calmalloc::CalMalloc;

#[no_mangle]
pub extern "C" fn work(rounds: u32) {
    let mut kept = vec![Vec::new(); 64];
    for i in 0..rounds as usize {
        kept[i % 64] = vec![1u8; if i % 31 == 0 { 4000000 } else { 16 + i % 2000 }];
    }
}
"""


def test_a_plugin_that_is_closed_stays(tmp_path: Path) -> None:
    succeed("build", "--offline", *new_crate(tmp_path, PLUGIN, kind="cdylib"), CARGO_TARGET_DIR=str(tmp_path))
    plugin = (tmp_path / "debug/libuser.so").rename(tmp_path / "plugin.so")
    host = tmp_path / "host"
    for command in (["cc", str(HOST), "-pthread", "-o", str(host)], [str(host), str(plugin)]):
        done = run(command)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "mapped: 1\n"


def test_every_source_of_the_library_is_compiled() -> None:
    """The build script compiles the library's C files, except those that only a shared library needs."""
    listed = (REPOSITORY / "src/CMakeLists.txt").read_text()
    in_library = set()
    pattern = r"calm_layer\(\s*(\w+)(?: FOLDER (\w+))? SOURCES ([^)]*)\)"
    for name, folder, words in re.findall(pattern, listed):
        layer = folder or name
        own = re.split(r"\s(?:ABOVE|DEFINES)\s", words)[0]
        in_library |= {f"{layer}/{source}.c" for source in own.split() if source.isidentifier()}
    there = {str(path.relative_to(REPOSITORY / "src")) for path in (REPOSITORY / "src").glob("*/*.c")}
    names = re.findall(r"set\(calm_shared_sources ([^)]*)\)", listed)[0].split()
    shared = [f"api/{name}.c" for name in names]
    archive = re.findall(r"add_library\(calmalloc_static STATIC \S+ ([^)]*)\)", listed)[0].split()
    assert in_library | set(shared) | set(archive) == there


def test_another_system_is_refused_in_one_line() -> None:
    succeed("test", "--no-run")
    scripts = (TARGET / "debug/build").glob("calmalloc-*/build-script-build")
    script = max(scripts, key=lambda path: path.stat().st_mtime)
    done = run(
        [str(script)],
        CARGO_MANIFEST_DIR=str(CRATE),
        CARGO_CFG_TARGET_OS="macos",
        CARGO_CFG_TARGET_ARCH="x86_64",
    )
    assert done.returncode == 1
    assert done.stderr == ("calmalloc: macos on x86_64 is not supported: Linux on x86-64 and aarch64 is\n")


@pytest.mark.parametrize("features", FEATURES)
def test_clippy_has_no_complaint(features: str) -> None:
    need("clippy")
    succeed("clippy", "--all-targets", "--features", features, "--", "-D", "warnings")


def test_the_format_is_rustfmts() -> None:
    need("fmt")
    succeed("fmt", "--check")


def test_the_documentation_has_no_dead_links() -> None:
    succeed("doc", "--no-deps", RUSTDOCFLAGS="-D warnings")
