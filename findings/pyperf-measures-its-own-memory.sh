#!/bin/bash
# pyperf says that a program of 2 MiB has a peak of 12 MiB: its own. Where it starts a program by vfork, the child shares
# the memory of its parent until execve, and Linux then counts the peak of the memory that it leaves (exec_mmap in
# fs/exec.c) as the process's. ru_maxrss of getrusage and wait4, which pyperf reads, is the larger of both. So no program
# that Python's subprocess starts appears smaller than the parent's peak. The peak in /proc/PID/status, VmHWM, is of the
# new memory alone, as is ru_maxrss if a small process starts the program.
#
# Seen with pyperf 2.9.0, CPython 3.11.2, Debian 12, Linux 6.18:
#     grep itself: 1.9 MiB; pyperf: 12.2 MiB
#
# Fails if that changes. Needs Python 3.9 or newer with venv, and a package index; otherwise exits with 77.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv own >/dev/null && own/bin/pip install --quiet pyperf==2.9.0 2>pip.log || exit 77
program=(grep VmHWM /proc/self/status)
own=$("${program[@]}" | tr -dc 0-9)
own/bin/python -m pyperf command --track-memory --quiet --processes 2 --values 2 --loops 1 --warmups 0 --output result.json \
    -- "${program[@]}" >/dev/null
told=$(own/bin/python -c 'import pyperf; print(int(pyperf.Benchmark.load("result.json").mean()) // 1024)')
awk -v own="$own" -v told="$told" 'BEGIN {
    printf "grep itself: %.1f MiB; pyperf: %.1f MiB\n", own / 1024, told / 1024
    exit !(own < 4096 && told > 2 * own && told > 8192)
}'
