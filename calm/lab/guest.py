"""What happens within the guest: its first process, a script that runs programs and tells what they took.

It speaks through a serial port of its own, line by line, so that nothing the kernel or a program prints can
come between: `@@ WORD NUMBER REST`.
"""

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calm.errors import CalmError
from calm.measure import signal_name

HOME = "/.lab"
BUSYBOX = f"{HOME}/busybox"
APPLETS = f"{HOME}/bin"
MARK = "@@ "
_KEPT = 1 << 18  # of what a program printed: the end is what tells
_SHOWN = 20  # lines of it
# ld.so goes on without a library that it cannot preload, and the run would be one of glibc.
_NOT_PRELOADED = "cannot be preloaded"

_INIT = """#!{home}/busybox sh
set -f
export PATH={home}/bin
{home}/busybox mkdir -p {home}/bin
{home}/busybox --install -s {home}/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tracefs trace /sys/kernel/tracing
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
mount -t devpts pts /dev/pts
chmod 1777 /tmp /dev/shm
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/fd/0 /dev/stdin
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr
exec </dev/null >/dev/console 2>&1
stty -F /dev/ttyS1 raw
exec 3>/dev/ttyS1
say() {{ echo "@@ $*" >&3; }}
packed() {{ tail -c {kept} "$1" | base64 -w 0; }}
say ready $(nproc) $(grep '^physical id' /proc/cpuinfo | sort -u | wc -l) \
$(ls /sys/devices/system/node | grep -c '^node') $(uname -r)
run() {{
    label=$1 number=$2
    shift 2
    case " $failed " in *" $label "*) return ;; esac
    say begin $number
    : >/tmp/.report
    cd {folder}
    env -i "$@" </dev/null >/tmp/.printed 2>/tmp/.errors 3>&-
    status=$?
    # What it has left running would count in the next one's figures. The first process is spared.
    kill -9 -1
    grep -q '"end": {{"code": 0,' /tmp/.report || failed="$failed $label"
    say report $number $(cat /tmp/.report)
    say printed $number $(packed /tmp/.printed)
    say errors $number $(packed /tmp/.errors)
    say end $number $status
}}
{runs}
say done
poweroff -f
"""


@dataclass(frozen=True)
class Turn:
    """A program to run: what it is known by, its words, and its variables."""

    label: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    pin: str | None = None
    """CPUs that it may use, as taskset has them: 0-3,8."""


@dataclass(frozen=True)
class Run:
    """What a program took in the guest, and how it ended."""

    label: str
    status: int
    """The probe's own, which is not the program's."""
    report: Mapping[str, Any]
    """The probe's."""
    printed: str
    errors: str

    @property
    def exit_code(self) -> int | None:
        """The program's, as a shell gives it."""
        end = self.report.get("end") or {}
        return 128 + end["signal"] if end.get("signal") else end.get("code")

    @property
    def failure(self) -> str | None:
        """What went wrong, if anything did."""
        if error := self.report.get("error"):
            return f"cannot be started in the guest: {error['text']}"
        if not self.report:
            return f"calm-probe ended with {self.status} and reported nothing"
        end = self.report["end"]
        if end["signal"]:
            return f"killed by {signal_name(end['signal'])}"
        if end["code"]:
            return f"exit code {end['code']}"
        if _NOT_PRELOADED in self.errors:
            line = next(line for line in self.errors.splitlines() if _NOT_PRELOADED in line)
            return f"its library was not loaded: {line.strip()}"
        return None

    @property
    def last_words(self) -> list[str]:
        """The end of what it wrote, for the message about its failure; nothing that a terminal obeys."""
        text = self.errors if self.errors.strip() else self.printed
        printable = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)
        return printable.strip("\n").splitlines()[-_SHOWN:]


@dataclass(frozen=True)
class View:
    """What the guest's kernel sees of the machine."""

    cpus: int
    sockets: int
    nodes: int
    kernel: str


def script(
    turns: Sequence[tuple[int, Turn]],
    *,
    probe: Path,
    groups: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
) -> bytes:
    """The first process. Turns have numbers; after a failure those of the same label are left out."""
    labels = {
        label: f"l{place}" for place, label in enumerate(dict.fromkeys(turn.label for _, turn in turns))
    }
    lines = []
    for number, turn in turns:
        words = ["run", labels[turn.label], str(number)]
        words += [f"{name}={value}" for name, value in environment.items()]
        words += [str(probe), "-c", ",".join(groups) or "none", "-i", "100", "-o", "/tmp/.report"]
        for name, value in turn.variables.items():
            words += ["-e", f"{name}={value}"]
        words.append("--")
        if turn.pin is not None:
            words += [BUSYBOX, "taskset", "-c", turn.pin]
        lines.append(shlex.join([*words, *turn.command]))
    return _INIT.format(
        home=HOME, kept=_KEPT, folder=shlex.quote(str(folder)), runs="\n".join(lines)
    ).encode()


class Listener:
    """Puts together what the guest says. Feed it bytes; it gives what is complete."""

    def __init__(self, labels: Mapping[int, str]) -> None:
        self.view: View | None = None
        self.running: int | None = None
        self.done = False
        self._labels = labels
        self._rest = b""
        self._parts: dict[str, str] = {}

    def feed(self, data: bytes) -> list[tuple[int, Run]]:
        """The runs that have ended with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        runs = []
        for line in lines:
            text = line.decode(errors="replace").strip("\r")
            if text.startswith(MARK) and (run := self._take(text.removeprefix(MARK))):
                runs.append(run)
        return runs

    def _take(self, text: str) -> tuple[int, Run] | None:
        word, _, rest = text.partition(" ")
        if word == "ready":
            cpus, sockets, nodes, kernel = rest.split(maxsplit=3)
            # A kernel without NUMA has one node, and no folder for it.
            self.view = View(int(cpus), int(sockets), max(1, int(nodes)), kernel)
            return None
        if word == "done":
            self.done = True
            return None
        number, _, payload = rest.partition(" ")
        if word == "begin":
            self.running, self._parts = int(number), {}
        elif word != "end":
            self._parts[word] = payload
        elif self.running == int(number):
            run = self._run(int(number), int(payload))
            self.running = None
            return int(number), run
        return None

    def _run(self, number: int, status: int) -> Run:
        printed, errors = (
            base64.b64decode(self._parts.get(word, "")).decode(errors="replace")
            for word in ("printed", "errors")
        )
        try:
            report = json.loads(self._parts.get("report") or "{}")
        except ValueError as error:
            raise CalmError("the guest told something that cannot be read") from error
        return Run(self._labels[number], status, report, printed, errors)
