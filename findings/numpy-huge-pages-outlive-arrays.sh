#!/bin/bash
# numpy requests huge pages (MADV_HUGEPAGE) for arrays from 4 MiB on, in memory that malloc gave it. The request stays
# with the memory: once glibc's dynamic mmap threshold has risen, such arrays lie in the brk heap, and what is allocated
# there after them, by any library of the process, gets huge pages that nobody requested for it. One page that is
# written then makes up to 512 resident.
#
# Seen with numpy 2.4.1 (PyPI), CPython 3.11.7, glibc 2.36, Linux 6.18, transparent_hugepage=madvise:
#     [heap] asks for huge pages before: no
#     [heap] asks for huge pages once all arrays are freed: yes
#
# Fails if that changes. Needs python3 with venv, and PyPI; exits with 77 where the kernel has no huge pages.
set -euo pipefail
numpy=2.4.1

[[ $(cat /sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null) == *"[never]"* ]] && exit 77
[[ -e /sys/kernel/mm/transparent_hugepage/enabled ]] || exit 77
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "numpy==$numpy"
cat >"$folder/arrays.py" <<'PYTHON'
import numpy


def heap_asks() -> bool:
    here = False
    for line in open("/proc/self/smaps"):
        here = line.endswith("[heap]\n") if "-" in line.split(" ")[0] else here
        if here and line.startswith("VmFlags:") and " hg" in line:
            return True
    return False


def say(when: str) -> None:
    print(f"[heap] asks for huge pages {when}:", "yes" if heap_asks() else "no")


del (first := [numpy.ones(1 << 20)])[:]  # 8 MiB, mapped alone; its free raises the mmap threshold
say("before")
arrays = [numpy.ones(700_000) for _ in range(4)]
behind = bytearray(100_000)  # so that the heap's end stays where it is
arrays.clear()
say("once all arrays are freed")
PYTHON
found=$("$folder/venv/bin/python" "$folder/arrays.py")
echo "$found"
[[ $found == $'[heap] asks for huge pages before: no\n[heap] asks for huge pages once all arrays are freed: yes' ]]
