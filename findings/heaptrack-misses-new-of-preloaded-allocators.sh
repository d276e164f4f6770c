#!/bin/bash
# heaptrack counts blocks by standing before malloc. glibc's operator new calls malloc; that of a preloaded allocator
# (jemalloc, gperftools and mimalloc all have one) does not. So heaptrack sees no block of C++ there, and reports
# neither an error nor that anything is missing: its totals and leaks are those of malloc alone. The functions that
# heaptrack stands before include no form of new.
#
# Seen with heaptrack 1.4.0-2 and libjemalloc2 5.3.0-1 (Debian 12), of 1,000 blocks by new and 100 by malloc:
#     glibc: 1000 or more
#     jemalloc: below 1000
#
# Fails if that changes. Needs Debian 12 with its package index, and g++; exits with 77 without these versions.
set -euo pipefail
packages=(libheaptrack=1.4.0-2 libjemalloc2=5.3.0-1 libunwind8=1.6.2-3)

command -v g++ apt-get >/dev/null || exit 77
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
apt-get download --quiet=2 -o APT::Sandbox::User=root "${packages[@]}" 2>apt.log || exit 77
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$folder/root/usr/lib/x86_64-linux-gnu
cat >blocks.cpp <<'CPP'
#include <cstdlib>
int main() {
    for (int i = 0; i < 1000; i++) {
        delete new int(i);
    }
    for (int i = 0; i < 100; i++) {
        std::free(std::malloc(10));
    }
}
CPP
g++ -O0 -o blocks blocks.cpp
# In heaptrack's own format a line that begins with + is an allocation.
seen() {
    DUMP_HEAPTRACK_OUTPUT=$folder/output LD_PRELOAD=$folder/root/usr/lib/heaptrack/libheaptrack_preload.so${1:+:$1} \
        ./blocks 2>/dev/null
    count=$(grep -c '^+' output*)
    rm -f output*
    [[ $count -ge 1000 ]] && echo "1000 or more" || echo "below 1000"
}
found="glibc: $(seen "")
jemalloc: $(seen "$LD_LIBRARY_PATH/libjemalloc.so.2")"
echo "$found"
[[ $found == $'glibc: 1000 or more\njemalloc: below 1000' ]]
