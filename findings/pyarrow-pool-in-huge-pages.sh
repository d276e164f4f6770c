#!/bin/bash
# pyarrow's default memory pool is a mimalloc 3 that it brings, and that requests huge pages (MADV_HUGEPAGE) for its arenas,
# also where the system leaves huge pages to those who ask (transparent_hugepage=madvise). So a buffer of which one byte is
# written is resident as a whole, and its neighbours too; the system pool and the jemalloc of the same wheel do not do that.
# A service whose buffers are larger than what it fills pays for all of them. MIMALLOC_ALLOW_THP=0 ends it; no function of
# pyarrow does.
#
# Seen with pyarrow 26.0.1 (PyPI), CPython 3.11.7, glibc 2.36, Linux 6.18, transparent_hugepage=madvise, of 800 buffers of
# 256 KiB with one byte written in each:
#     default pool: more than 150 MiB resident
#     system pool: less than 20 MiB resident
#     jemalloc pool: less than 20 MiB resident
#     default pool, MIMALLOC_ALLOW_THP=0: less than 20 MiB resident
#
# Fails if that changes. Needs python3 with venv, and PyPI; exits with 77 where the kernel gives no huge pages on request.
set -euo pipefail
pyarrow=26.0.1

[[ $(cat /sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null) == *"[madvise]"* ]] || exit 77
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install "pyarrow==$pyarrow"

resident() {
    "$folder/venv/bin/python" - "$1" <<'PYTHON'
import ctypes, sys
import pyarrow

pool = getattr(pyarrow, f"{sys.argv[1]}_memory_pool")()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

before = resident()
buffers = [pyarrow.allocate_buffer(256 << 10, memory_pool=pool) for _ in range(800)]
for buffer in buffers:
    ctypes.memset(buffer.address, 1, 1)
mib = (resident() - before) >> 20
print("more than 150 MiB resident" if mib > 150 else "less than 20 MiB resident" if mib < 20 else f"{mib} MiB resident")
PYTHON
}
found="default pool: $(resident default)
system pool: $(resident system)
jemalloc pool: $(resident jemalloc)
default pool, MIMALLOC_ALLOW_THP=0: $(MIMALLOC_ALLOW_THP=0 resident default)"
echo "$found"
[[ $found == "default pool: more than 150 MiB resident
system pool: less than 20 MiB resident
jemalloc pool: less than 20 MiB resident
default pool, MIMALLOC_ALLOW_THP=0: less than 20 MiB resident" ]]
