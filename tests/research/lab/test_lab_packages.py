"""The kernel and the shell of the guest: Debian packages, fetched by an apt that is made up."""

import os
from pathlib import Path

import pytest
from lab_helpers import needs_x86_64

from calm.core.errors import CalmError
from research.lab import packages
from research.lab.architecture import ARM64, ARM64_16K


def apt(folder: Path, kernels: str, *, fails: bool = False, shells: str = "bin") -> str:
    """A PATH with an apt that knows some kernels."""
    tools = folder / "apt"
    tools.mkdir(exist_ok=True)
    scripts = {
        "apt-cache": f"""
            while [ "$1" = -o ]; do shift 2; done
            case $1 in
            pkgnames) printf '%s\\n' {kernels} ;;
            policy) case $2 in *gone*) echo '  Candidate: (none)' ;; *) echo '  Candidate: 1' ;; esac ;;
            esac""",
        "apt-get": f"""
            echo "$@" >>{folder}/asked
            for last; do :; done
            [ "$last" != update ] || exit 0
            {"echo 'E: Unable to locate package' >&2; exit 100" if fails else "echo $last >$last.deb"}""",
        "dpkg-deb": f"""
            case $1 in
            --field) echo 1.2-3 ;;
            *) name=$(cat "$2")
               mkdir -p "$3/boot" "$3/{shells}"
               case $name in
               linux-image-7*) ;;
               linux-binary-7*) mkdir -p "$3/usr/lib/modules/7"
                                echo kernel >"$3/usr/lib/modules/7/vmlinuz" ;;
               *) echo kernel >"$3/boot/vmlinuz-$name" ;;
               esac
               echo busybox >"$3/{shells}/busybox" ;;
            esac""",
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    return f"{tools}:{os.environ['PATH']}"


def test_the_newest_kernel_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [
        "linux-image-6.9.1-cloud-amd64",
        "linux-image-6.12.9+deb12-cloud-amd64",
        "linux-image-6.1.0-56-cloud-amd64",
        "linux-image-7.0.0-gone-cloud-amd64",
        "linux-image-6.13.0-cloud-amd64-dbg",
        "linux-image-6.13.0-amd64",
        "linux-image-cloud-amd64",
    ]
    monkeypatch.setenv("PATH", apt(tmp_path, " ".join(kernels)))
    said: list[str] = []
    parts = packages.fetch(tmp_path / "cache", said.append)
    assert parts.kernel_package == "linux-image-6.12.9+deb12-cloud-amd64 1.2-3"
    assert parts.kernel.read_text() == "kernel\n"
    assert parts.busybox.read_text() == "busybox\n"
    assert said[0] == "fetching linux-image-6.12.9+deb12-cloud-amd64"
    # From now on without any apt.
    path = os.environ["PATH"]
    asked = (tmp_path / "asked").read_text()
    monkeypatch.setenv("PATH", "/nonexistent")
    assert packages.fetch(tmp_path / "cache", said.append) == parts
    # A newer one is taken when asked for, and stays the one that is used.
    monkeypatch.setenv("PATH", path)
    apt(tmp_path, "linux-image-6.18.1+deb13-cloud-amd64")
    newer = packages.fetch(tmp_path / "cache", said.append, update=True)
    assert newer.kernel_package.startswith("linux-image-6.18.1")
    assert packages.fetch(tmp_path / "cache", said.append) == newer
    assert len((tmp_path / "asked").read_text().splitlines()) == len(asked.splitlines()) + 1


def test_from_6_19_on_the_kernel_is_in_a_package_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And from 7.3 on in another folder. What an older calm has unpacked of it has no kernel."""
    versions = ("7.3.4+deb13-cloud-amd64", "6.12.9+deb13-cloud-amd64")
    names = [f"linux-{part}-{version}" for version in versions for part in ("image", "binary")]
    monkeypatch.setenv("PATH", apt(tmp_path, " ".join([*names, "linux-base-7.3.4+deb13-cloud-amd64"])))
    cache = tmp_path / "cache"
    parts = packages.fetch(cache, lambda _: None)
    assert parts.kernel_package == f"{names[1]} 1.2-3"
    assert parts.kernel.read_text() == "kernel\n"
    (cache / names[0]).mkdir()
    assert packages.fetch(cache, lambda _: None) == parts


@pytest.mark.parametrize(
    ("kernels", "fails", "message"),
    [
        ("linux-image-amd64", False, "run apt-get update"),
        ("linux-image-6.1.0-9-cloud-amd64", True, "Unable to locate"),
    ],
)
def test_a_fetch_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, fails: bool, message: str
) -> None:
    monkeypatch.setenv("PATH", apt(tmp_path, kernels, fails=fails))
    with pytest.raises(CalmError, match=message) as caught:
        packages.fetch(tmp_path / "cache", lambda _: None)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


KERNEL = "linux-image-6.1.0-9-cloud-amd64"


def test_debian_13_has_busybox_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", apt(tmp_path, KERNEL, shells="usr/bin"))
    parts = packages.fetch(tmp_path / "cache", lambda _: None)
    assert parts.busybox.read_text() == "busybox\n"


@pytest.mark.parametrize(
    "missing", [f"{KERNEL}/version", f"{KERNEL}/boot/vmlinuz-{KERNEL}", "busybox-static/bin"]
)
def test_a_package_that_is_not_whole_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setenv("PATH", apt(tmp_path, KERNEL))
    cache = tmp_path / "cache"
    packages.fetch(cache, lambda _: None)
    (cache / missing).rename(tmp_path / "lost")
    with pytest.raises(CalmError, match="is incomplete") as caught:
        packages.fetch(cache, lambda _: None)
    assert str(cache / missing.partition("/")[0]) in str(caught.value)


def test_two_at_once_fetch_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other's package gets its name while this one is unpacked. Nobody's half is taken for one's own.

    Of several containers that share the cache, processes may have the same number.
    """
    monkeypatch.setenv("PATH", apt(tmp_path, KERNEL))
    cache = tmp_path / "cache"
    half = cache / f".{KERNEL}.{os.getpid()}.x"
    half.mkdir(parents=True)

    def tell(what: str) -> None:
        if what == f"unpacking {KERNEL}":
            (cache / KERNEL / "boot").mkdir(parents=True)
            (cache / KERNEL / "boot" / "vmlinuz-x").write_text("the other's\n")
            (cache / KERNEL / "version").write_text("1\n")

    parts = packages.fetch(cache, tell)
    assert parts.kernel.read_text() == "the other's\n"
    assert sorted(path.name for path in cache.iterdir()) == [half.name, "busybox-static", KERNEL]


def test_the_cache_is_the_users_where_there_is_no_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.paths, "checkout", lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/cache")
    assert packages.default_cache() == Path("/somewhere/cache/calm/lab")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert packages.default_cache() == Path.home() / ".cache/calm/lab"


@needs_x86_64
def test_a_foreign_guest_has_packages_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [
        "linux-image-6.12.9+deb12-cloud-arm64",
        "linux-image-6.12.9+deb12-arm64-16k",
        "linux-image-6.12-arm64-16k",
        "linux-image-6.13.0-arm64",
        "linux-image-6.13.0-cloud-amd64",
    ]
    monkeypatch.setenv("PATH", apt(tmp_path, " ".join(kernels)))
    cache = tmp_path / "cache"
    parts = packages.fetch(cache, lambda _: None, architecture=ARM64)
    assert parts.kernel_package == "linux-image-6.12.9+deb12-cloud-arm64 1.2-3"
    assert [path.name for path in parts.libraries] == ["libc6", "libgcc-s1", "libstdc++6"]
    assert parts.glibc == "1.2"
    update, *downloads = (tmp_path / "asked").read_text().splitlines()
    assert update.endswith(" update")
    # apt's own state is not used, and what takes its place is gone.
    for asked in (update, *downloads):
        assert "-o APT::Architecture=arm64 -o APT::Architectures=arm64" in asked
        assert f"-o Dir::State={cache}/.apt." in asked
    assert [asked.split()[-1] for asked in downloads] == [
        *("linux-image-6.12.9+deb12-cloud-arm64", "busybox-static", "libc6", "libgcc-s1", "libstdc++6")
    ]
    assert not list(cache.glob(".*"))
    # Another kernel needs the lists again, and nothing else.
    other = packages.fetch(cache, lambda _: None, architecture=ARM64_16K)
    assert other.kernel_package == "linux-image-6.12.9+deb12-arm64-16k 1.2-3"
    asked = (tmp_path / "asked").read_text().splitlines()[1 + len(downloads) :]
    assert [line.split()[-1] for line in asked] == ["update", "linux-image-6.12.9+deb12-arm64-16k"]
    monkeypatch.setenv("PATH", "/nonexistent")
    assert packages.fetch(cache, lambda _: None, architecture=ARM64) == parts
    assert packages.fetch(cache, lambda _: None, architecture=ARM64_16K) == other


@needs_x86_64
def test_a_kernel_that_debian_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", apt(tmp_path, "linux-image-6.1.0-9-cloud-arm64"))
    with pytest.raises(CalmError, match=r"^apt knows no linux-image-\*-arm64-16k$"):
        packages.fetch(tmp_path / "cache", lambda _: None, architecture=ARM64_16K)
