#!/bin/bash
# The wheels of DuckDB 2.0 and Polars 2.1 allocate almost all of their memory past malloc: their extension modules contain
# an allocator that answers to other names, and nothing says so at run time. (DuckDB's wheels of 1.5 still used malloc.) A
# preloaded allocator, a malloc profiler or glibc's own memusage therefore sees a few MB of a process of some hundred, and
# a comparison of allocators by LD_PRELOAD compares nothing. numpy's arrays, for comparison, are malloc's.
#
# Seen with duckdb 2.0.1, polars 2.1.0 and numpy 2.2.6 (PyPI), CPython 3.11, glibc 2.36 and its libmemusage.so, each
# program with 100 to 200 MiB of data alive at once:
#     duckdb: malloc's peak is less than a quarter of what became resident
#     polars: malloc's peak is less than a quarter of what became resident
#     numpy: malloc's peak is more than three quarters of what became resident
#
# Fails if that changes. Needs python3 with venv, and PyPI; exits with 77 without glibc's libmemusage.so.
set -euo pipefail
duckdb=2.0.1 polars=2.1.0 numpy=2.2.6

memusage=$(find /lib /usr/lib -name libmemusage.so 2>/dev/null | head -n 1)
[[ -n $memusage ]] || exit 77
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install "duckdb==$duckdb" "polars==$polars" "numpy==$numpy"

cat >"$folder/work.py" <<'PYTHON'
import sys

def resident(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))

if sys.argv[1] == "duckdb":
    import duckdb
    before = resident("VmRSS")
    held = duckdb.connect()
    held.execute("create table t as select i, hash(i) as h, 'text ' || hash(i) as s from range(3000000) r(i)")
elif sys.argv[1] == "polars":
    import polars
    before = resident("VmRSS")
    numbers = polars.arange(0, 6_000_000, eager=True)
    held = polars.DataFrame({"a": numbers, "b": numbers.hash(1), "c": numbers.hash(2)})
else:
    import numpy
    before = resident("VmRSS")
    held = [numpy.full(2_000_000, 1.0) for _ in range(10)]
print((resident("VmHWM") - before) * 1024)
PYTHON

share() {
    local grown peak
    LD_PRELOAD=$memusage "$folder/venv/bin/python" "$folder/work.py" "$1" >"$folder/out" 2>"$folder/err"
    grown=$(cat "$folder/out")
    peak=$(sed 's/\x1b\[[0-9;]*m//g' "$folder/err" | sed -n 's/.*heap peak: \([0-9]*\).*/\1/p')
    if ((peak * 4 < grown)); then
        echo "$1: malloc's peak is less than a quarter of what became resident"
    elif ((peak * 4 > grown * 3)); then
        echo "$1: malloc's peak is more than three quarters of what became resident"
    else
        echo "$1: malloc's peak is $peak of $grown bytes"
    fi
}

found=$(for name in duckdb polars numpy; do share "$name"; done)
expected="duckdb: malloc's peak is less than a quarter of what became resident
polars: malloc's peak is less than a quarter of what became resident
numpy: malloc's peak is more than three quarters of what became resident"
echo "$found"
[[ $found == "$expected" ]]
