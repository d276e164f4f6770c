"""Reading the samples that `perf script` prints."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Without the program's name, which may be anything: a newline, or another sample's text.
FIELDS = "pid,tid,time,event,ip,sym,dso,trace"
# Where perf has this field (from 6.4 on), it is printed after the file's name, and the address is the
# process's; without it, perf 6.1 prints the file's own.
OFFSET_FIELD = "dsoff"

CLOCK = "cpu-clock"

_HEAD = re.compile(r"^\s*-?\d+/-?\d+\s+(\d+\.\d+):\s+(\S+):(?: (.*))?$")
_FRAME = re.compile(r"^\s+([0-9a-f]+) (.*?) \((.*)\)$")
_OFFSET = re.compile(r"(.*)\+0x([0-9a-f]+)")
# What stands in brackets without being the kernel's, or one of its modules.
_USERS = ("[vdso", "[vsyscall", "[heap", "[stack", "[unknown", "[uprobes", "[anon")


@dataclass(frozen=True)
class Address:
    """A place in the code: in a file by its offset there, in the kernel by its address."""

    module: str
    """The file's path, or what perf calls the kernel's."""
    offset: int
    symbol: str
    """As perf knows it, mangled; "[unknown]" where it does not."""

    @property
    def kernel(self) -> bool:
        """Belongs to the kernel or one of its modules."""
        return self.module.startswith("[") and not self.module.startswith(_USERS)


@dataclass(frozen=True)
class Sample:
    """One event that was looked at; it stands for as many as its period says. Of the clock, for one tick."""

    at_s: float
    period: int
    event: str
    trace: str
    """The tracepoint's fields, as text."""
    stack: tuple[Address, ...]
    """The innermost first."""


def read(lines: Iterable[str], period: int, *, has_offsets: bool = False) -> Iterator[Sample]:
    """The samples in the text, of one event in so many; what is not understood is passed over.

    has_offsets: OFFSET_FIELD was asked for.
    """
    head: re.Match[str] | None = None
    stack: list[Address] = []
    known: dict[str, Address] = {}
    for line in lines:
        line = line.rstrip("\n")
        if head is not None and (frame := _FRAME.match(line)):
            if line not in known:
                known[line] = _address(frame, has_offsets)
            stack.append(known[line])
            continue
        if head is not None:
            yield _sample(head, stack, period)
            head, stack = None, []
        if found := _HEAD.match(line):
            head = found
    if head is not None:
        yield _sample(head, stack, period)


def _address(frame: re.Match[str], has_offsets: bool) -> Address:
    place = _OFFSET.fullmatch(frame[3]) if has_offsets else None
    return Address(
        module=place[1] if place else frame[3],
        offset=int(place[2] if place else frame[1], 16),
        symbol=frame[2],
    )


def _sample(head: re.Match[str], stack: list[Address], period: int) -> Sample:
    # What options the event was asked for with is a part of its name, unless it is a modifier such as ":u".
    event = head[2].partition("/")[0]
    period = 1 if event == CLOCK else period
    return Sample(float(head[1]), period, event, (head[3] or "").strip(), tuple(stack))
