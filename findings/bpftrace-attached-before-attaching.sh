#!/bin/bash
# bpftrace prints "Attaching N probes..." (as JSON: "attached_probes") before it attaches the first of them. A script that
# waits for that line, and then starts the program to be traced, loses the events of its first moments: some hundredths of
# a second, or a second on a busy machine. What does tell is what BEGIN prints: bpftrace reads it once all are attached.
#
# Seen with bpftrace 0.17.0-1 and strace 6.1-0.1 (Debian 12), Linux 6.18, in the order of its system calls:
#     says attached_probes
#     attaches sched_process_exit
#     prints from BEGIN
#
# Fails if that changes. Needs root, tracefs, BPF, and Debian 12 with its package index (some 60 MB); otherwise exits with 77.
set -euo pipefail
packages=(bpftrace=0.17.0-1 strace=6.1-0.1 libbpf1 libbpfcc libclang1-14 libllvm14 libdw1 libelf1 libz3-4 libedit2 libxml2
    libicu72 libbsd0 libmd0 libunwind8 libtinfo6)

event=/sys/kernel/tracing/events/sched/sched_process_exit/id
[[ $(id -u) == 0 && -r $event ]] && command -v apt-get >/dev/null || exit 77
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
apt-get download --quiet=2 -o APT::Sandbox::User=root "${packages[@]}" 2>apt.log || exit 77
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$folder/root/usr/lib/x86_64-linux-gnu:$folder/root/lib/x86_64-linux-gnu
program='BEGIN { printf("from BEGIN\n"); } tracepoint:sched:sched_process_exit { exit(); }'
root/usr/bin/strace -f -s 200 -e trace=write,perf_event_open -o calls \
    timeout 20 root/usr/bin/bpftrace -f json -e "$program" >/dev/null 2>&1 &
traced=$!
for ((i = 0; i < 200; i++)); do
    kill -0 "$traced" 2>/dev/null || break
    /bin/true # its end is an event
    sleep 0.1
done
wait "$traced" || true
number=$(cat "$event")
found=$(sed -nE "s/.*write\(1, .*attached_probes.*/says attached_probes/p; s/.*write\(1, .*from BEGIN.*/prints from BEGIN/p
    s/.*PERF_TYPE_TRACEPOINT.* config=$number, .*/attaches sched_process_exit/p" calls | uniq)
echo "$found"
[[ $found == $'says attached_probes\nattaches sched_process_exit\nprints from BEGIN' ]]
