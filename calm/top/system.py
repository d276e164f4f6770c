"""What /proc says of a process and of the machine, as figures."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from calm.errors import CalmError

PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
_TICKS = os.sysconf("SC_CLK_TCK")
_KERNEL_THREAD = 0x00200000


class GoneError(Exception):
    """The process has ended."""


@dataclass(frozen=True)
class Stat:
    """Of /proc/PID/stat and statm: totals since the process began."""

    pid: int
    name: str
    state: str
    threads: int
    user_s: float
    system_s: float
    minor_faults: int
    major_faults: int
    # Which process it is, and which program it runs: both change with exec.
    identity: tuple[int, int, str]
    is_kernel: bool
    rss_kib: int

    @property
    def has_ended(self) -> bool:
        """Whether it only waits for its parent to take note."""
        return self.state in "ZX"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise GoneError from error


def stat(pid: int) -> Stat:
    """Raises GoneError."""
    text = _read(f"/proc/{pid}/stat")
    # The name may hold anything, parentheses too.
    begin, end = text.index("("), text.rindex(")")
    fields = text[end + 2 :].split()
    resident = _read(f"/proc/{pid}/statm").split()
    return Stat(
        pid=pid,
        name="".join(c if c.isprintable() else "?" for c in text[begin + 1 : end]),
        state=fields[0],
        threads=int(fields[17]),
        user_s=int(fields[11]) / _TICKS,
        system_s=int(fields[12]) / _TICKS,
        minor_faults=int(fields[7]),
        major_faults=int(fields[9]),
        identity=(int(fields[19]), int(fields[23]), text[begin + 1 : end]),
        is_kernel=bool(int(fields[6]) & _KERNEL_THREAD),
        rss_kib=int(resident[1]) * PAGE_KIB,
    )


def command_line(pid: int) -> str:
    """The program and its arguments; empty where it has none or has ended."""
    try:
        text = _read(f"/proc/{pid}/cmdline")
    except (GoneError, OSError):
        return ""
    words = text.rstrip("\0").replace("\0", " ")
    return "".join(c if c.isprintable() else "?" for c in words)


def program(pid: int) -> str:
    """The last part of the name by which it was started."""
    try:
        return _read(f"/proc/{pid}/cmdline").split("\0")[0].rsplit("/", 1)[-1]
    except (GoneError, OSError):
        return ""


def cpu_percent_so_far(of: Stat) -> float:
    """Of a CPU, since the process began."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - of.identity[0] / _TICKS
    return 100 * (of.user_s + of.system_s) / max(age, 1.0)


def processes() -> list[int]:
    """All that can be seen."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def check(pid: int) -> None:
    """Raises CalmError unless it is a process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError as error:
        raise CalmError(f"there is no process {pid}") from error
    leader = next((line.split()[1] for line in status.splitlines() if line.startswith("Tgid:")), str(pid))
    if int(leader) != pid:
        raise CalmError(f"{pid} is a thread of process {leader}")


def fields_kib(text: str) -> dict[str, int]:
    """The fields of smaps_rollup, or of status, that are in kB."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB" and words[1].isdigit():
            found[words[0].rstrip(":")] = int(words[1])
    return found


def rollup(pid: int) -> dict[str, int]:
    """Of smaps_rollup, for which the kernel walks through all pages. Raises GoneError, or PermissionError."""
    return fields_kib(_read(f"/proc/{pid}/smaps_rollup"))
