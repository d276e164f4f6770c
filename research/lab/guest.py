"""The guest's first process, a script that runs programs and reports on them; and the reader of its reports.

The script writes lines that begin with `@@` to a serial port of their own, where neither the kernel nor a
program writes.
"""

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from calm.core import measure
from calm.core.errors import CalmError
from calm.core.measure import Measurement
from calm.core.report import shown

HOME = "/.lab"
BUSYBOX = f"{HOME}/busybox"
APPLETS = f"{HOME}/bin"
MARK = "@@ "
_MAX_OUTPUT_BYTES = 1 << 18  # of a program's output, its end
_LAST_LINES = 20
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
stty -F /dev/{port} raw
exec 3>/dev/{port}
say() {{ echo "@@ $*" >&3; }}
packed() {{ tail -c {kept} "$1" | base64 -w 0; }}
say ready $(nproc) \
$(set +f; cat /sys/devices/system/cpu/cpu*/topology/physical_package_id | sort -u | wc -l) \
$(ls /sys/devices/system/node | grep -c '^node') \
$(awk '/^KernelPageSize/ {{ kib = $2; exit }} END {{ print kib + 0 }}' /proc/self/smaps) $(uname -r)
run() {{
    label=$1 number=$2
    shift 2
    case " $failed " in *" $label "*) return ;; esac
    say begin $number
    : >/tmp/.report
    cd {folder}
    env -i "$@" </dev/null >/tmp/.printed 2>/tmp/.errors 3>&-
    status=$?
    # Processes that it left running would count in the next run's figures. The signal spares process 1.
    kill -9 -1
    grep -q '"end": {{"code": 0,' /tmp/.report || failed="$failed $label"
    say end $number $status "$(packed /tmp/.printed)" "$(packed /tmp/.errors)" "$(cat /tmp/.report)"
}}
{runs}
say done
poweroff -f
"""


@dataclass(frozen=True)
class Turn:
    """A program to run: the label of its allocator, its words, and its variables."""

    label: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    pin: str | None = None
    """CPUs that it may use, as taskset has them: 0-3,8."""


@dataclass(frozen=True)
class Run:
    """One run of a program in the guest."""

    label: str
    measurement: Measurement | None
    printed: str = ""
    errors: str = ""
    obstacle: str | None = None
    """Why the program was not started, or not measured."""

    @property
    def failure(self) -> str | None:
        """What went wrong, if anything did."""
        if found := self.obstacle or (self.measurement and self.measurement.failure):
            return found
        line = next((line for line in self.errors.splitlines() if _NOT_PRELOADED in line), None)
        return f"its library was not loaded: {line.strip()}" if line else None

    @property
    def last_words(self) -> list[str]:
        """The end of its output, for the message about its failure, without terminal controls."""
        text = self.errors if self.errors.strip() else self.printed
        return [shown(line) for line in text.strip("\n").splitlines()[-_LAST_LINES:]]


@dataclass(frozen=True)
class View:
    """The machine, as the guest's kernel detects it."""

    cpus: int
    sockets: int
    nodes: int
    page_kib: int
    """0 if the kernel does not tell."""
    kernel: str


def script(
    turns: Sequence[tuple[int, Turn]],
    probe: Path,
    groups: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    port: str,
) -> bytes:
    """The first process, which reports to a port. After a failure it skips the turns of the same label."""
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
        home=HOME,
        port=port,
        kept=_MAX_OUTPUT_BYTES,
        folder=shlex.quote(str(folder)),
        runs="\n".join(lines),
    ).encode()


class Listener:
    """Reads the lines of the guest from the bytes that it is fed."""

    def __init__(self, labels: Mapping[int, str]) -> None:
        self.view: View | None = None
        self.running: int | None = None
        self.done = False
        self._labels = labels
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, Run]]:
        """The runs that have ended with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        texts = [line.decode(errors="replace").strip("\r") for line in lines]
        found = [self._take(text.removeprefix(MARK)) for text in texts if text.startswith(MARK)]
        return [run for run in found if run]

    def _take(self, text: str) -> tuple[int, Run] | None:
        word, _, rest = text.partition(" ")
        if word == "ready":
            *numbers, kernel = rest.split(maxsplit=4)
            cpus, sockets, nodes, page_kib = map(int, numbers)
            # A kernel without NUMA has one node, and no folder for it.
            self.view = View(cpus, sockets, max(1, nodes), page_kib, kernel)
        elif word == "done":
            self.done = True
        elif word == "begin":
            self.running = int(rest)
        elif word == "end" and rest.startswith(f"{self.running} "):
            number, self.running = int(rest.split()[0]), None
            return number, self._run(number, *rest.split(" ", 4)[1:])
        return None

    def _run(self, number: int, status: str, printed: str, errors: str, report: str) -> Run:
        measurement, obstacle = None, None
        try:
            if report:
                data = json.loads(report)
                measurement = measure.parse(data)
                if data["error"]:
                    obstacle = f"cannot be started in the guest: {data['error']['text']}"
            else:
                obstacle = f"calm-probe ended with {status} and reported nothing"
        except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
            raise CalmError("the guest reported something that cannot be read") from error
        return Run(self._labels[number], measurement, _decode(printed), _decode(errors), obstacle)


def _decode(text: str) -> str:
    return base64.b64decode(text).decode(errors="replace")
