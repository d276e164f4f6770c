"""Counts shootdowns by cause, exactly: bpftrace counts the kernel's stacks within the kernel.

A program that begins some thousand shootdowns has some tens of samples in the worst case. One that begins ten
thousand a second has enough, and counting would slow it down: each takes 3 us, most of it for reaching
bpftrace's program, also at the CPUs that are interrupted. So bpftrace ends by itself then. It needs root, and
process ids that are the kernel's (not those of a container's own). Where it fails, shares rest on samples.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from calm.commands.profile.causes import classify
from calm.core import processes
from calm.core.events import EVENTS

_START_S, _STOP_S, _AGAIN_S = 15.0, 15.0, 0.5
# A process is known by its first thread, so new threads are passed over. What BEGIN prints is read once all
# probes are attached; "attached_probes" comes before. Calls of calm's own that fail begin and end the counts.
# The types of a map's keys have to agree, also in their sign.
_PROGRAM = """
BEGIN {{ {roots} printf("{attached}"); }}
tracepoint:syscalls:sys_enter_getpgid /pid == {own} && (uint64)args->pid == {begin}/ {{ @on = 1; }}
tracepoint:syscalls:sys_enter_getpgid /pid == {own} && (uint64)args->pid == {end}/ {{ @on = 0; }}
tracepoint:task:task_newtask /@ours[(uint64)pid] && !(args->clone_flags & 0x10000)/ {{
    @ours[(uint64)args->pid] = 1;
}}
tracepoint:{group}:{name} /@on && args->{condition} && @ours[(uint64)pid]/ {{
    @found[kstack(perf, 64)] = count();
    @late++;
}}
interval:ms:500 {{ if (@late > {most}) {{ printf("{many}"); exit(); }} @late = 0; }}
END {{ clear(@ours); clear(@on); clear(@late); }}
"""
_ATTACHED, _MANY = "attached here", "too many here"
_MOST_A_SECOND = 10_000
# No process has these numbers: the most is 4,194,304.
_BEGIN, _END = 1_600_000_001, 1_600_000_002
# Of a stack, which bpftrace 0.23 escapes once more.
_FUNCTION = re.compile(r"[0-9a-f]{16} ([^\s+]+)")


def parse(text: str) -> dict[str, int]:
    """The shootdowns of each cause, in what bpftrace prints as JSON."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            for stack, count in json.loads(line)["data"].get("@found", {}).items():
                found[classify(_FUNCTION.findall(stack))] += int(count)
    return dict(found)


def _tell(what: int) -> None:
    """Makes a call by which bpftrace knows calm."""
    with suppress(ProcessLookupError):
        os.getpgid(what)


class ShootdownCounts:
    """One bpftrace process, from start to stop."""

    def __init__(self) -> None:
        self.why = ""
        """The reason for there being no counts."""
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - kept until it is read

    def start(self, roots: Sequence[int]) -> None:
        """Returns once it can count what these processes and their descendants do, or cannot."""
        bpftrace = shutil.which("bpftrace")
        if bpftrace is None or os.geteuid() != 0:
            self.why = "there is no bpftrace in PATH" if bpftrace is None else "bpftrace needs root"
            return
        event = EVENTS["shootdowns"]
        program = _PROGRAM.format(
            roots=" ".join(f"@ours[(uint64){root}] = 1;" for root in roots),
            own=os.getpid(),
            begin=_BEGIN,
            end=_END,
            group=event.group,
            name=event.name,
            condition=event.condition,
            attached=_ATTACHED,
            most=_MOST_A_SECOND // 2,
            many=_MANY,
        )
        try:
            self._process = subprocess.Popen(
                [bpftrace, "-f", "json", "-e", program],
                start_new_session=True,
                preexec_fn=lambda: processes.end_with_parent(signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as error:
            self.why = f"bpftrace: {error.strerror}"
            return
        assert self._process.stdout is not None
        output, deadline, begun = self._process.stdout.fileno(), time.monotonic() + _START_S, b""
        while _ATTACHED.encode() not in begun:
            left = deadline - time.monotonic()
            data = os.read(output, 4096) if left > 0 and select.select([output], [], [], left)[0] else b""
            if not data:
                self._errors.seek(0)
                lines = self._errors.read().decode(errors="replace").split("\n")
                self.close()
                self.why = f"bpftrace: {lines[0][:200] or 'it did not begin in time'}"
                return
            begun += data

    def begin(self) -> None:
        """Counts from now on."""
        _tell(_BEGIN)

    def end(self) -> None:
        """Counts no more."""
        _tell(_END)

    def stop(self) -> dict[str, int]:
        """The shootdowns of each cause that were counted; empty where `why` says so, and at a second call."""
        if self._process is None:
            return {}
        self.end()
        text = b""
        for _ in range(round(_STOP_S / _AGAIN_S)):
            # bpftrace (0.17) forgets a signal that arrives while it does not wait for events.
            self._process.terminate()
            try:
                text, _ = self._process.communicate(timeout=_AGAIN_S)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            self.why = "bpftrace did not end"
        self.close()
        if _MANY.encode() in text:
            self.why, text = f"there were more than {_MOST_A_SECOND:,} a second", b""
        return parse(text.decode(errors="replace"))

    def close(self) -> None:
        """Ends it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        self._errors.close()
