"""Shell scripts that count around a workload in the guest, and parsing of their output.

A script prepares the guest, and runs the workload by `count COMMAND`. The kernel's counters are read before
and after it, and the size of page tables is sampled while it runs. All other programs stay on one CPU: they
cause no TLB shootdowns, and so add none to the count.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calm.core.errors import CalmError
from research.lab.guest import BUSYBOX

FOLDER = "/.abis"
DISK = "/disk"
# Runs a program in the group whose memory make_limit limits.
LIMITED = f"{FOLDER}/limited"
_LIBRARY = f"{FOLDER}/counting"
_GROUP = "/sys/fs/cgroup/limited"
_MARK = "%%"
_PAGE = 4096
_TLB_ROW = "tlb_row"
_PAGE_TABLES = "nr_page_table_pages"
# The name in /proc/slabinfo of the kernel's metadata of page table entries.
_RECORDS = "abis_spt"
_SLAB = f"/sys/kernel/slab/{_RECORDS}"
SENT, RECEIVED = "nr_tlb_remote_flush", "nr_tlb_remote_flush_received"
# After the TLB's counters, those that show that a workload did its work.
_KEPT = "nr_tlb_|abis_|pgfault|pgmajfault|pswpin|pswpout|pgmigrate_success|pgsteal_anon|pgsteal_file"
# After one of these messages, the kernel's counts are worthless.
_COMPLAINTS = "|".join(
    (
        *("WARNING:", "BUG", "Oops", "UBSAN:", "INFO: (rcu|task|trying)", "general protection"),
        *("Bad page", "stack-protector", "Killed process"),
    )
)

_COUNTING = f"""\
set -eu
last=$(($(nproc) - 1))
cpus=0-$last
sampled=false
taskset -p -c $last $$ >/dev/null

tell() {{ sed "s/^/{_MARK} $1 /"; }}

counters() {{
    grep -E '^({_KEPT})' /proc/vmstat
    grep '^ *TLB:' /proc/interrupts
}}

page_tables() {{
    # Each CPU has counts of its own, which go into the sums now and then, or now.
    echo 1 >/proc/sys/vm/stat_refresh
    grep '^{_PAGE_TABLES} ' /proc/vmstat
    grep '^{_RECORDS} ' /proc/slabinfo || :
}}

sample() {{
    while :; do
        page_tables | tr '\\n' ' '
        echo
        sleep 0.5
    done >/tmp/.samples
}}

# Runs a command on the CPUs in $cpus. If $sampled is true, says what page tables take meanwhile: that takes
# programs, and these take from the last CPU what it has cached.
count() {{
    dmesg -c | grep -E '{_COMPLAINTS}' | tell complaint || :
    # The kernel keeps unused records for the next process; ours must not get them.
    if [ -e {_SLAB}/shrink ]; then
        echo 1 >{_SLAB}/shrink
    fi
    : >/tmp/.samples
    sampler=
    if $sampled; then
        sample &
        sampler=$!
    fi
    counters | tell before
    status=0
    taskset -c "$cpus" "$@" || status=$?
    counters | tell after
    [ -z "$sampler" ] || kill "$sampler"
    tell sample </tmp/.samples
    dmesg | grep -E '{_COMPLAINTS}' | tell complaint || :
    return $status
}}

# An ext4 file system on compressed memory, of so many MiB.
make_disk() {{
    mkdir -p {DISK}
    umount {DISK} 2>/dev/null || :
    echo 1 >/sys/block/zram0/reset
    echo "$1M" >/sys/block/zram0/disksize
    mkfs.ext4 -q -F /dev/zram0
    mount -t ext4 /dev/zram0 {DISK}
}}

# Swap on compressed memory, of so many MiB.
make_swap() {{
    swapoff /dev/zram1 2>/dev/null || :
    echo 1 >/sys/block/zram1/reset
    echo "$1M" >/sys/block/zram1/disksize
    mkswap /dev/zram1 >/dev/null
    swapon /dev/zram1
}}

# So many MiB for what {LIMITED} runs.
make_limit() {{
    mount -t cgroup2 none /sys/fs/cgroup 2>/dev/null || :
    echo +memory >/sys/fs/cgroup/cgroup.subtree_control
    mkdir -p {_GROUP}
    echo "$1M" >{_GROUP}/memory.max
}}
"""

_LIMITED = f'echo $$ >{_GROUP}/cgroup.procs\nexec "$@"\n'


def _shell(text: str) -> bytes:
    return f"#!{BUSYBOX} sh\n{text}".encode()


def files() -> Mapping[str, bytes]:
    """The files that all scripts need, by path in the guest."""
    return {_LIBRARY: _shell(_COUNTING), LIMITED: _shell(_LIMITED)}


def script(body: str) -> bytes:
    """A workload's script, which includes the functions above."""
    return _shell(f". {_LIBRARY}\n{body.strip()}\n")


def words(*command: object) -> str:
    """A command for the shell."""
    return shlex.join(str(word) for word in command)


@dataclass(frozen=True)
class PageTables:
    """Memory for translating addresses, when page tables were largest."""

    pages: int
    """Pages of the page tables of all processes."""
    records: int
    """Bytes of the metadata of their entries; 0 if the kernel has none."""

    @property
    def ratio(self) -> float:
        """The ratio of all that to page tables alone."""
        return 1 + self.records / (self.pages * _PAGE)


@dataclass(frozen=True)
class Counts:
    """The counts of a workload."""

    deltas: Mapping[str, int]
    """Counters of /proc/vmstat, and the TLB row of /proc/interrupts over all CPUs."""
    page_tables: PageTables | None
    """None if there was no sample because the workload ended too soon."""

    def as_json(self) -> dict[str, Any]:
        """For the file of results."""
        tables = self.page_tables
        return {
            **self.deltas,
            "page_table_pages": tables.pages if tables else None,
            "page_table_records_bytes": tables.records if tables else None,
        }


def _lines(printed: str, word: str) -> Iterator[str]:
    start = f"{_MARK} {word} "
    return (line.removeprefix(start) for line in printed.splitlines() if line.startswith(start))


def _counters(printed: str, word: str) -> dict[str, int]:
    found = {}
    for line in _lines(printed, word):
        if row := re.fullmatch(r" *TLB:([ \d]+)TLB shootdowns", line):
            found[_TLB_ROW] = sum(int(value) for value in row[1].split())
        elif counter := re.fullmatch(r"(\w+) (\d+)", line):
            found[counter[1]] = int(counter[2])
        else:
            raise CalmError(f"it said of a counter: {line!r}")
    return found


def _page_tables(sample: str) -> PageTables | None:
    pages = re.search(rf"\b{_PAGE_TABLES} (\d+)", sample)
    if not pages or not int(pages[1]):
        return None
    # Objects of how many bytes, how many of them and pages in each slab; slabs in all.
    records = re.search(rf"\b{_RECORDS} +\d+ +\d+ +\d+ +\d+ +(\d+) .*: slabdata +\d+ +(\d+)", sample)
    return PageTables(int(pages[1]), int(records[1]) * int(records[2]) * _PAGE if records else 0)


def counts(printed: str) -> Counts:
    """Parses a script's output. Missing counters and complaints of the kernel are errors."""
    if complaints := list(_lines(printed, "complaint")):
        raise CalmError(f"the guest's kernel reports: {complaints[0]}")
    before, after = _counters(printed, "before"), _counters(printed, "after")
    for name in (SENT, RECEIVED, _TLB_ROW):
        if name not in before or name not in after:
            raise CalmError(f"the guest's kernel does not count {name}")
    found = [tables for sample in _lines(printed, "sample") if (tables := _page_tables(sample))]
    return Counts(
        {name: after[name] - before[name] for name in after if name in before},
        max(found, key=lambda tables: tables.pages, default=None),
    )


def rest(printed: str) -> list[str]:
    """The workload's own output."""
    return [line for line in printed.splitlines() if not line.startswith(_MARK)]


def reported(lines: Sequence[str]) -> dict[str, Any]:
    """The line of JSON that this project's workloads print. An incomplete one is an error."""
    for line in lines:
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                raise CalmError(f"its line of JSON is torn: {line[:60]}") from None
            return found
    return {}
