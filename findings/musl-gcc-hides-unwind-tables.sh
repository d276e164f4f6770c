#!/bin/bash
# A program that Debian's musl-gcc links has the tables for unwinding (.eh_frame), and no header by which they are found at
# run time (.eh_frame_hdr, the segment GNU_EH_FRAME): the wrapper's specs replace gcc's own for the linker, and --eh-frame-hdr
# is lost with them. A profiler in the process, or any other unwinder that asks dl_iterate_phdr, gets one frame. With
# -Wl,--eh-frame-hdr the header is there. gcc 12's own unwinder does not even link: it asks for glibc's _dl_find_object.
#
# Seen with musl-tools 1.2.3-1 and gcc 12.2.0 (Debian 12):
#     gcc: tables header
#     musl-gcc: tables
#     musl-gcc -Wl,--eh-frame-hdr: tables header
#     unwinder: _dl_find_object
#
# Fails if that changes. Needs x86-64, and Debian 12 with its package index, gcc and binutils; otherwise exits with 77.
set -euo pipefail
packages=(musl=1.2.3-1 musl-dev=1.2.3-1 musl-tools=1.2.3-1)

[[ $(uname -m) == x86_64 ]] && command -v apt-get gcc readelf >/dev/null || exit 77
[[ $(gcc -dumpversion) == 12 ]] || exit 77
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
apt-get download --quiet=2 -o APT::Sandbox::User=root "${packages[@]}" 2>apt.log || exit 77
for package in *.deb; do dpkg -x "$package" root; done
cp -a root/lib/. root/usr/lib
sed -i "s,/usr/,$folder/root/usr/,g" root/usr/bin/musl-gcc root/usr/lib/x86_64-linux-musl/musl-gcc.specs

echo 'int main(void) { return 0; }' >plain.c
cat >unwinds.c <<'C'
#include <unwind.h>
static _Unwind_Reason_Code next(struct _Unwind_Context *context, void *unused) {
    (void)context, (void)unused;
    return _URC_NO_REASON;
}
int main(void) { return _Unwind_Backtrace(next, 0); }
C
has() {
    "$@" -fasynchronous-unwind-tables plain.c -o plain
    local found=
    if readelf -SW plain | grep -q ' \.eh_frame '; then found+=' tables'; fi
    if readelf -lW plain | grep -q GNU_EH_FRAME; then found+=' header'; fi
    echo "${found# }"
}
found="gcc: $(has gcc)
musl-gcc: $(has root/usr/bin/musl-gcc)
musl-gcc -Wl,--eh-frame-hdr: $(has root/usr/bin/musl-gcc -Wl,--eh-frame-hdr)
unwinder: $(root/usr/bin/musl-gcc unwinds.c -o unwinds 2>&1 | grep -o '_dl_find_object' | sort -u || true)"
echo "$found"
[[ $found == 'gcc: tables header
musl-gcc: tables
musl-gcc -Wl,--eh-frame-hdr: tables header
unwinder: _dl_find_object' ]]
