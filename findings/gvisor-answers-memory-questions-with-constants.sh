#!/bin/bash
# Under gVisor's kernel (containers of several clouds), the calls by which allocators and profilers learn about memory
# succeed, and say the same whatever the program did. mincore(2) calls pages resident that were never touched, so
# that an allocator which asks it before it gives memory back finds everything worth giving back. getrusage(2) counts no
# page fault, so that a comparison of allocators by faults finds all equal. RLIMIT_DATA can be set, and limits nothing.
# Only VmHWM, the peak, is missing from /proc/self/status, so that it can be noticed. VmRSS and MADV_DONTNEED do work.
#
# Seen with gVisor's Go module of 2026-09-05, platform systrap, beside Linux 6.18, CPython 3.11:
#     Linux: resident of 64 untouched pages: 0; faults of 100 MiB written: yes; RLIMIT_DATA: kept; VmHWM: there
#     gVisor: resident of 64 untouched pages: 64; faults of 100 MiB written: none; RLIMIT_DATA: ignored; VmHWM: missing
#
# Fails if that changes. Needs root, Go 1.26, python3, the Go module proxy, and some minutes to compile.
set -euo pipefail
gvisor=v0.0.0-20260905035102-160fafc42237

folder=$(mktemp -d)
trap 'chmod -R u+w "$folder"; rm -rf "$folder"' EXIT
cd "$folder"
export GOPATH=$folder/go GOCACHE=$folder/cache GOFLAGS=-mod=mod CGO_ENABLED=0
cat >tool.go <<'GO'
//go:build tools

package tool

import _ "gvisor.dev/gvisor/runsc"
GO
{
    go mod init tool
    go mod edit -require "gvisor.dev/gvisor@$gvisor"
    go mod tidy
    go build -o runsc gvisor.dev/gvisor/runsc
} 2>log || { cat log >&2; exit 1; }

cat >ask.py <<'PYTHON'
import ctypes, mmap, resource

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
FAILED = ctypes.c_void_p(-1).value

def map_pages(pages):
    return libc.mmap(None, pages * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)

answers = (ctypes.c_ubyte * 64)()
assert libc.mincore(ctypes.c_void_p(map_pages(64)), ctypes.c_size_t(64 * PAGE), answers) == 0
resident = sum(answer & 1 for answer in answers)

before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
ctypes.memset(map_pages(25600), 1, 25600 * PAGE)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, resource.RLIM_INFINITY))
limited = map_pages(16384) == FAILED
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

with open("/proc/self/status") as file:
    peak = "VmHWM" in file.read()
print(f"resident of 64 untouched pages: {resident}; faults of 100 MiB written: {'yes' if faults else 'none'}; "
      f"RLIMIT_DATA: {'kept' if limited else 'ignored'}; VmHWM: {'there' if peak else 'missing'}")
PYTHON

python=$(readlink -f "$(command -v python3)")
found="Linux: $("$python" -I ask.py)
gVisor: $(./runsc --root "$folder/state" --network=none --ignore-cgroups --platform=systrap 'do' --cwd="$folder" \
    "$python" -I ask.py)"
expected="Linux: resident of 64 untouched pages: 0; faults of 100 MiB written: yes; RLIMIT_DATA: kept; VmHWM: there
gVisor: resident of 64 untouched pages: 64; faults of 100 MiB written: none; RLIMIT_DATA: ignored; VmHWM: missing"
echo "$found"
[[ $found == "$expected" ]]
