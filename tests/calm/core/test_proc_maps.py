"""The allocator of a process, by the files that it has mapped."""

import subprocess
import sys

import pytest
from calm_helpers import ROOT

from calm.core import proc_maps

LIBC = "/usr/lib/x86_64-linux-gnu/libc.so.6"


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ([LIBC], "glibc"),
        ([f"{LIBC} (deleted)"], "glibc"),
        (["/lib/libc-2.31.so"], "glibc"),
        (["7f00-7f01 r-xp 0 0:0 1     /usr/lib/libc.so.6"], "glibc"),
        (["/lib/libjemalloc.so.2", LIBC], "jemalloc"),
        ([LIBC, "/x/libmimalloc.so.2.0 (deleted)"], "mimalloc"),
        (["/x/libmimalloc-secure.so.2.0", LIBC], "mimalloc"),
        (["/x/libsnmallocshim.so", LIBC], "snmalloc"),
        (["/x/librpmallocwrap.so", LIBC], "rpmalloc"),
        (["/opt/libtcmalloc.so", LIBC], "tcmalloc"),
        (["/usr/lib/libtcmalloc_minimal.so.4", LIBC], "gperftools"),
        (["/peers/libgperftools.so", LIBC], "gperftools"),
        (["/peers/libscudo.so", LIBC], "scudo"),
        (["/lib/clang/19/lib/linux/libclang_rt.scudo_standalone-x86_64.so", LIBC], "scudo"),
        (["/peers/libhardened_malloc.so", LIBC], "hardened_malloc"),
        (["/x/libhardened_malloc-light.so", LIBC], "hardened_malloc"),
        (["/usr/lib/libtbbmalloc_proxy.so.2", LIBC], "tbbmalloc"),
        (["/usr/lib/libtbbmalloc.so.2", LIBC], "glibc"),
        (["/opt/libcalmalloc.so.0.1.0", LIBC], "calmalloc"),
        (["/x/libjemalloc.so.2", "/opt/libptlbmalloc2.so", LIBC], "ptlbmalloc2"),
        (["/lib/ld-musl-x86_64.so.1"], "musl"),
        (["/usr/lib/libjemallocator-docs.txt", LIBC], "glibc"),
        (["/usr/lib/libcurl.so.4"], None),
        ([], None),
    ],
)
def test_names(files: list[str], name: str | None) -> None:
    assert proc_maps.allocator(files) == name


def test_of_a_process() -> None:
    library = ROOT / "build/release/libcalmalloc.so"
    for preload, name in (("", "glibc"), (str(library), "calmalloc")):
        command = [sys.executable, "-c", "print(open('/proc/self/maps').read())"]
        done = subprocess.run(
            command, env={"LD_PRELOAD": preload}, capture_output=True, text=True, check=True
        )
        assert proc_maps.allocator(done.stdout.splitlines()) == name
